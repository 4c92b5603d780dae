"""The same requests in an Engine, one after another, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from matrix.models import Subject
from matrix.traffic import Asked, Served
from spindle import Engine
from spindle.decode import graphs
from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.speculative import Speculator
from spindle.decode.stats import Speculation, Stats
from spindle.serve.outputs import Completion, Metrics, RequestOutput

Given = tuple[list[int], list[TokenLogprobs] | None, Stats]  # an answer


def serve_one_by_one(subject: Subject, options: dict[str, Any], asked: Sequence[Asked]) -> Served:
    """Each request in its turn, all in one engine. Several answers are rows of it, if undrafted.

    options: prefill_chunk; record: what records a step, or None; speculate, k, adaptive_k.
    """
    calls = ["stream"]
    engine = engine_of(subject, options, lambda: calls.append("replayed"))
    for pool in (engine._kv.keys, engine._kv.values):
        pool.fill_(torch.nan)  # what nobody wrote must not be read
    answer = drafting(engine, options) if "speculate" in options else plainly(engine)
    outputs = [told(n, one, answer(one)) for n, one in enumerate(asked)]
    return Served(asked, outputs, [], {"replayed": calls.count("replayed")}, calls, options)


def engine_of(subject: Subject, options: dict[str, Any], heard: Callable[[], None]) -> Engine:
    """An engine, whose steps are recorded if that is asked for; `heard` is told of each replay."""
    engine = Engine(subject.ours, prefill_chunk=options["prefill_chunk"])
    record = options["record"]

    def listened(step: graphs.Recordable) -> Callable[[], None]:
        replay = record(step)

        def replayed() -> None:
            heard()
            replay()

        return replayed

    if record is not None:
        graphs.enable(engine, record)
        engine.record_with(listened, fixed_shapes=record is not graphs.cpu_graph)
    return engine


def plainly(engine: Engine) -> Callable[[Asked], list[Given]]:
    """`Engine.generate` for one answer, `Engine.answers` for several."""

    def answer(one: Asked) -> list[Given]:
        if one.params.n > 1:
            answers = engine.answers(one.prompt, one.params)
            return [(its.token_ids, its.logprobs, its.stats) for its in answers]
        stream = engine.stream_with(one.prompt, one.params)
        return [(list(stream), stream.logprobs, stream.stats)]

    return answer


def drafting(engine: Engine, options: dict[str, Any]) -> Callable[[Asked], list[Given]]:
    """The streams of a Speculator."""
    named = ("k", "adaptive_k")
    speculator = Speculator(engine, options["speculate"], **{name: options[name] for name in named})

    def answer(one: Asked) -> list[Given]:
        streams = speculator.streams(one.prompt, one.params)
        return [(list(stream), stream.logprobs, stream.stats) for stream in streams]

    return answer


def told(n: int, one: Asked, answers: Sequence[Given]) -> RequestOutput:
    """The answers as an LLM would give them."""
    completions = [
        Completion(i, "", ids, logprobs, None, stats.finish_reason, stats.stop_reason)
        for i, (ids, logprobs, stats) in enumerate(answers)
    ]
    drafts = Speculation.total(stats.speculation for _, _, stats in answers)
    metrics = Metrics(0.0, None, None, None, None, 0, 0, drafts)
    seed = answers[0][2].seed
    return RequestOutput(str(n), list(one.prompt), completions, True, seed, metrics)
