"""Calls that nobody should make: each works or is refused by name, and no neighbour notices.

    python tests/fuzz/calls.py --count 5000              the seeds 0 to 4999, all kinds by turns
    python tests/fuzz/calls.py --seed 17 --only llm      one case again, with what it called

A case is a few calls of one kind, with some of their arguments replaced (fuzz.weird). What is
refused must be refused by a SpindleError that names an argument, in words that a terminal can show,
and must leave the engine as it was; an answer that was on its way in the same engine goes on as it
is alone. Calls in which nothing was replaced have to work, and give what they give alone.

Cases run in child processes, as those of fuzz.files do: a crash, a hang or memory without end ends
one child and is told with its seed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from fuzz import files, turns

COMMAND = (sys.executable, str(Path(__file__).resolve()), "--child")
LONGEST = 1500  # characters of a message
Call = Callable[[], Any]


class Case:
    """The calls of a seed, as they are made; a finding is an AssertionError."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng, self.kind, self.seed = Random(f"{kind} {seed}"), kind, seed
        self.worked = self.refused = 0
        self.what: list[str] = []

    def call(self, name: str, call: Call, given: dict[str, Any], replaced: list[str]) -> Any:
        """Its result, or REFUSED. given: the arguments, replaced: the names of the odd ones."""
        from spindle.errors import SpindleError

        self.note(name, given, replaced)
        try:
            result = call()
        except SpindleError as error:
            assert replaced, f"refused what is right: {type(error).__name__}: {error}"
            check_message(str(error), replaced)
            self.refused += 1
            return REFUSED
        self.worked += 1
        return result

    def note(self, name: str, given: dict[str, Any], replaced: list[str]) -> None:
        """A call that is about to be made, with its odd arguments."""
        from fuzz import weird

        odd = ", ".join(f"{key}={weird.in_words(given[key])}" for key in replaced if key in given)
        self.say(f"{name}({odd})")

    def say(self, what: str) -> None:
        """Also to stderr, before it is made: whoever dies of it has said why."""
        self.what.append(what.encode("utf-8", "backslashreplace").decode())
        print(f"{self.kind} {self.seed}: {self.what[-1]}", file=sys.stderr, flush=True)

    def replace(self, given: dict[str, Any], most: int = 2, share: float = 0.75) -> list[str]:
        """Replace some of the arguments; returns their names, none in a call that has to work."""
        from fuzz import weird

        if self.rng.random() > share:
            return []
        names = self.rng.sample(sorted(given), min(len(given), self.rng.randint(1, most)))
        for name in names:
            given[name] = weird.value(self.rng)
        return names


REFUSED = object()

WORDS = {  # what a message may call an argument, where not by its name
    "prompt": ("prompt", "token id", "text to encode"),
    "prompts": ("prompt", "token id", "text to encode"),
    "ids": ("prompt", "token id", "text to encode", "no tokens", "the sequence is full"),
    "text": ("text to encode",),
    "token": ("token id",),
    "params": ("params", "parameters"),
    "messages": ("message", "text to encode", "prompt has"),
    "name": ("model", "checkpoint", "tokenizer"),
    "model": ("model", "checkpoint"),
    "tokens": ("tokens",),
    "drafter": ("drafter",),
    "adaptive_k": ("adaptive_k",),
    "max_tokens": ("max_tokens", "max_new_tokens"),
    "template": ("template",),
    "tools": ("tools", "tool"),
    "variable": ("variable",),
    "width": ("width", "beams"),
    "max_seqs": ("max_seqs", "num_blocks"),
    "max_model_len": ("max_model_len", "num_blocks"),
    "num_blocks": ("num_blocks", "blocks"),
    "block_size": ("block_size", "blocks"),
    "host_blocks": ("host_blocks", "blocks"),
    "k": ("k=", "max_batch_tokens"),
    "row": ("row",),
    "speculate": ("speculate", "model", "drafter", "draft model"),
}


def check_message(message: str, replaced: list[str]) -> None:
    """It names one of them, and can be shown."""
    words = [word for name in replaced for word in WORDS.get(name, (name,))]
    assert any(word in message for word in words), f"names none of {words}: {message!r:.300}"
    assert len(message) <= LONGEST, f"a message of {len(message)} characters: {message!r:.300}"
    bad = [c for c in message if not c.isprintable() and c != "\n"]
    assert not bad, f"{bad[:3]} in a message: {message!r:.300}"


# What they are made to: one checkpoint, its model in float64, and what it says alone.


class World:
    """A checkpoint of random weights, whose tokens are bytes, and what it says alone."""

    def __init__(self, folder: Path) -> None:
        from spindle import Tokenizer, load_hf

        self.folder = write_checkpoint(folder)
        self.tokenizer = Tokenizer(folder)
        self.model = load_hf(folder, "cpu", "float64")
        self.answers: dict[Any, Any] = {}

    def engine(self, **options: Any) -> Any:
        from spindle import Engine

        return Engine(self.model, **{"max_seq_len": 40} | options)

    def alone(self, prompt: Any, params: Any) -> list[tuple[list[int], str, str | None]]:
        """Ids, text and end of each answer of a request that has an engine of its own."""
        from spindle.decode.text import stream_texts

        key = (prompt if isinstance(prompt, str) else tuple(prompt), params)
        if key not in self.answers:
            said = []
            for stream in stream_texts(self.engine(), self.tokenizer, prompt, params):
                text = "".join(stream)
                said.append((stream.token_ids, text, stream.finish_reason))
            self.answers[key] = said
        return self.answers[key]


def write_checkpoint(folder: Path) -> Path:
    """Two layers, 64 positions, and the byte tokenizer of fuzz.bases, with a chat template."""
    import shapes
    import torch
    from safetensors.torch import save_file

    from fuzz import bases
    from spindle.config import ModelConfig
    from spindle.model.weights import RandomSource, wishes

    files_ = bases.tokenizer("byte level")
    vocab_size = len(json.loads(files_["tokenizer.json"])["model"]["vocab"])
    raw = shapes.LLAMA | dict(vocab_size=vocab_size, num_hidden_layers=2, eos_token_id=1)
    raw |= dict(hidden_size=32, intermediate_size=40, tie_word_embeddings=True)
    config = ModelConfig.from_dict(raw)
    source = RandomSource(config, 0, torch.float32, torch.device("cpu"), 2.0)
    tensors = {
        name: source(name, *shape)
        for name, shape in wishes(config).shapes.items()
        if "lm_head" not in name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in files_.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


TEXTS = ["the cat", "a", "hello well", "\u20ac5", "to be or not to be or not to", "12 345"]


def good_prompt(rng: Random) -> Any:
    """A text or a list of ids."""
    if rng.random() < 0.5:
        return rng.choice(TEXTS)
    return [rng.randrange(262) for _ in range(rng.randint(1, 12))]


def good_sampling(rng: Random) -> dict[str, Any]:
    """Parameters of every kind, as keywords of SamplingParams, but for n and best_of."""
    return dict(
        max_tokens=rng.randint(1, 10),
        temperature=rng.choice([0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 5, -1]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1000),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([None, None, "e", ["he", "\n"]]),
        stop_token_ids=rng.choice([None, [5, 6]]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, 0, 3]),
    )


def good_params(rng: Random, most: int = 3, **changes: Any) -> Any:
    from spindle import SamplingParams

    given = good_sampling(rng) | changes
    if given["temperature"] and most > 1 and rng.random() < 0.3:
        given["n"] = rng.randint(2, most)
    return SamplingParams(**given)


# SamplingParams: what its docstring says is what it takes.


def whole(low: int, high: int, none: bool = False) -> Callable[[Any], bool]:
    from numbers import Integral

    def legal(value: Any) -> bool:
        number = isinstance(value, Integral) and not isinstance(value, bool)
        return (none and value is None) or bool(number and low <= value <= high)

    return legal


def real(low: float, high: float, above: bool = False) -> Callable[[Any], bool]:
    from numbers import Real

    def legal(value: Any) -> bool:
        number = isinstance(value, Real) and not isinstance(value, bool)
        return bool(number and low <= value <= high and not (above and value == low))

    return legal


def legal_fields() -> dict[str, Callable[[Any], bool]]:
    most = 2**63 - 1
    return dict(
        max_tokens=whole(0, most, none=True),
        temperature=real(0, 1e4),
        top_k=whole(-1, most),
        top_p=real(0, 1, above=True),
        min_p=real(0, 1),
        seed=whole(0, most, none=True),
        ignore_eos=lambda value: isinstance(value, bool),
        min_tokens=whole(0, most),
        presence_penalty=real(-2, 2),
        frequency_penalty=real(-2, 2),
        repetition_penalty=real(1e-4, 1e4),
        logprobs=whole(0, 20, none=True),
        n=whole(1, 128),
        best_of=whole(1, 128, none=True),
    )


def params(case: Case, world: World) -> None:
    """Each field takes what it says it takes; two that are right apart may be wrong together."""
    from spindle import SamplingParams

    legal = legal_fields()
    for _ in range(case.rng.randint(4, 12)):
        given = good_sampling(case.rng) | dict(n=1, best_of=None)
        replaced = case.replace(given, most=3)
        made = case.call("SamplingParams", lambda g=given: SamplingParams(**g), given, replaced)
        if made is REFUSED:
            continue
        wrong = [name for name in replaced if name in legal and not legal[name](given[name])]
        assert not wrong, f"took {wrong}: {made!r:.500}"
        hash(made)
        assert made == SamplingParams(**vars(made)), "what it keeps is not what it takes"
    if made is not REFUSED:
        use(case, world, made)


def use(case: Case, world: World, made: Any) -> None:
    """What SamplingParams took, an LLM either refuses or answers, as an engine does alone."""
    from dataclasses import replace

    made = replace(made, seed=made.seed or 0)
    llm = small_llm(world, "none")
    given = dict(prompts="the cat", params=made)
    names = ["params", *legal_fields(), "stop", "stop_token_ids"]
    outputs = case.call("generate", lambda: llm.generate(**given), given, names)
    if outputs is REFUSED:  # such as a stop id that the model does not have, or more answers than 3
        return
    if not made.selects and all(one.finish_reason != "error" for one in outputs[0].outputs):
        assert said(outputs[0]) == world.alone("the cat", made), "not what it is alone"


# An LLM with neighbours.

OF_AN_ANSWER = ("token_ids", "text", "finish_reason")


def said(output: Any) -> list[tuple[list[int], str, str | None]]:
    return [(one.token_ids, one.text, one.finish_reason) for one in output.outputs]


def small_llm(world: World, drafts: str, **options: Any) -> Any:
    from spindle import LLM

    usual = dict(max_model_len=40, max_seqs=4, max_batch_tokens=24, num_blocks=24, block_size=4)
    return LLM(
        world.model,
        tokenizer=world.tokenizer,
        speculate=None if drafts == "none" else drafts,
        **usual | options,
    )


def state(llm: Any) -> dict[str, Any]:
    """What a refused call must not change."""
    unfinished = llm.has_unfinished  # which ends what streams were for that were let go of
    llm.scheduler.check()
    queues = [*llm.scheduler.waiting, *llm.scheduler.running]
    live = [one for one in queues if one.finish_reason is None]
    return dict(
        stats=llm.stats,
        unfinished=unfinished,
        requests=list(llm._requests),
        watched=list(llm._watched),
        texts=len(llm._texts),
        told=(len(llm._held), len(llm._news), len(llm._ended), len(llm._abandoned)),
        sequences=[(s.request.id, s.ids, s.stored, s.table.blocks[:]) for s in live],
    )


def llm(case: Case, world: World) -> None:
    """Bad calls, and good ones, to an LLM that has two requests on their way."""
    rng = case.rng
    options = dict(
        preemption=rng.choice(["recompute", "swap"]),
        prefix_cache=rng.random() < 0.7,
        num_blocks=rng.choice([18, 24]),
    )
    engine = small_llm(world, rng.choice(["none", "none", "ngram"]), **options)
    asked = {}
    for n in range(2):
        prompt, its = good_prompt(rng), good_params(rng)
        asked[engine.add(prompt, its, f"neighbour-{n}")] = prompt, its
    done = steps(engine, rng.randrange(6))
    for _ in range(rng.randint(2, 6)):
        call = rng.choice([add, add, add, generate, stream, chat, beam_search, abort])
        before = state(engine)
        if call(case, world, engine, asked, done) is REFUSED:
            after = state(engine)
            changed = [key for key in before if before[key] != after[key]]
            assert not changed, f"refused, and changed {changed}"
        done |= steps(engine, rng.randrange(3))
    for _ in range(2000):
        if not engine.has_unfinished:
            break
        done |= steps(engine, 1)
    idle(engine)
    for name, (prompt, its) in asked.items():
        assert name in done, f"{name} has never ended"
        assert said(done[name]) == world.alone(prompt, its), f"{name} is not what it is alone"


def steps(engine: Any, count: int) -> dict[str, Any]:
    """So many steps; who ended in them."""
    ended = [o for _ in range(count) for o in engine.step() if o.finished]
    return {output.request_id: output for output in ended}


def idle(engine: Any) -> None:
    """Nothing is held when nothing is to do."""
    assert not engine.has_unfinished, "no end after 2000 steps"
    for name in ("_requests", "_texts", "_watched", "_held", "_news", "_ended", "_abandoned"):
        assert not getattr(engine, name), f"{name} at idle: {getattr(engine, name)!r:.200}"
    assert engine.stats["blocks_held"] == engine.stats["waiting"] == engine.stats["running"] == 0


def add(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    its = good_params(case.rng)
    given = dict(prompt=good_prompt(case.rng), params=its, request_id=None)
    replaced = case.replace(given)
    name = case.call("add", lambda: engine.add(**given), given, replaced)
    if name is not REFUSED and not replaced:
        asked[name] = given["prompt"], its
    return name


def generate(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    from fuzz import weird

    count = case.rng.randint(1, 3)
    prompts, each = [good_prompt(case.rng) for _ in range(count)], good_params(case.rng)
    given = dict(prompts=list(prompts), params=each, progress=False)
    replaced = case.replace(given)
    if "prompts" in replaced and case.rng.random() < 0.5:  # one of them
        at = case.rng.randrange(count)
        given["prompts"] = [weird.value(case.rng) if n == at else p for n, p in enumerate(prompts)]
    outputs = case.call("generate", lambda: engine.generate(**given), given, replaced)
    if outputs is not REFUSED and not replaced:
        for prompt, output in zip(prompts, outputs, strict=True):
            assert said(output) == world.alone(prompt, each), "generate: not what it is alone"
    return outputs


def stream(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    its = good_params(case.rng, most=1)
    given = dict(prompt=good_prompt(case.rng), params=its)
    replaced = case.replace(given)
    deltas = case.call("stream", lambda: engine.stream(**given), given, replaced)
    if deltas is REFUSED:
        return deltas
    if not replaced:
        read = list(deltas)
        text, ids = "".join(d.text for d in read), [i for d in read for i in d.token_ids]
        ((alone, words, _),) = world.alone(given["prompt"], its)
        assert (ids, text) == (alone, words), "stream: not what it is alone"
    elif case.rng.random() < 0.5:
        next(deltas, None)
        deltas.close()
    return None


def chat(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    messages = [{"role": "user", "content": case.rng.choice(TEXTS[:3])}]
    given = dict(messages=messages, params=good_params(case.rng))
    replaced = case.replace(given)
    return case.call("chat", lambda: engine.chat(**given), given, replaced)


def beam_search(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    width = case.rng.randint(1, 2)
    given = dict(prompt=good_prompt(case.rng), width=width, max_tokens=case.rng.randint(0, 5))
    given |= dict(length_penalty=1.0, ignore_eos=False)
    replaced = case.replace(given)
    return case.call("beam_search", lambda: engine.beam_search(**given), given, replaced)


def abort(case: Case, world: World, engine: Any, asked: dict, done: dict) -> Any:
    from fuzz import weird

    given = dict(request_id=weird.value(case.rng))
    before = state(engine)
    result = case.call("abort", lambda: engine.abort(**given), given, [])
    assert result is None and state(engine) == before
    return result


# Options.


def is_large(value: Any) -> bool:
    """A number of blocks, rows or bytes that there may be, and that a test does not take."""
    return type(value) is int and 10**5 <= value < 2**31


def options(case: Case, world: World) -> None:
    """How an LLM or an Engine is made; what is made works."""
    rng = case.rng
    for _ in range(3):
        (an_llm if rng.random() < 0.7 else an_engine)(case, world)


def an_llm(case: Case, world: World) -> None:
    from spindle import LLM

    rng = case.rng
    given = dict(tokenizer=world.tokenizer, block_size=4, num_blocks=24, max_model_len=40)
    given |= dict(max_seqs=3, max_batch_tokens=24, prefix_cache=True, preemption="recompute")
    given |= dict(policy="continuous", host_blocks=None, graphs=None, speculate=None, k=5)
    given |= dict(adaptive_k=True, trace=0, quantize=None)
    if rng.random() < 0.2:
        given |= dict(speculate="ngram", max_seqs=2)
    replaced = case.replace(given)
    if any(is_large(given[name]) for name in replaced):
        return
    made = case.call("LLM", lambda: LLM(world.model, **given), given, replaced)
    if made is not REFUSED and "tokenizer" not in replaced:
        its = good_params(rng, most=1)
        given = dict(prompts="a", params=its)
        words = [*replaced, "prompt"]  # that does not fit into what was made
        outputs = case.call("generate", lambda: made.generate(**given), given, words)
        if outputs is not REFUSED and made.max_model_len == 40:
            assert said(outputs[0]) == world.alone("a", its), "not what it is alone"


def an_engine(case: Case, world: World) -> None:
    from spindle import Engine

    given = dict(max_seq_len=40, prefill_chunk=16, rows=1, keep_probs=False)
    replaced = case.replace(given)
    if any(is_large(given[name]) for name in replaced):
        return
    made = case.call("Engine", lambda: Engine(world.model, **given), given, replaced)
    if made is not REFUSED and made.max_seq_len >= 40:
        ids, _ = made.generate([1, 2, 3], 8, seed=1)
        assert ids == world.engine().generate([1, 2, 3], 8, seed=1)[0], "not what it is alone"


# An engine of one stream, with a stream on its way.


def engine(case: Case, world: World) -> None:
    """Refused calls leave a stream that is on its way alone; what works takes the engine over."""
    rng = case.rng
    one = world.engine(rows=2)
    its = good_params(rng, most=1, stop=None)
    prompt = [rng.randrange(262) for _ in range(5)]
    on_its_way, read = one.stream_with(prompt, its), list[int]()
    for _ in range(rng.randint(2, 6)):
        read += [token for token in [next(on_its_way, None)] if token is not None]
        before = engine_state(one)
        name, call, given, replaced = engine_call(case, world, one)
        result = case.call(name, call, given, replaced)
        if result is REFUSED or before == engine_state(one):
            assert before == engine_state(one), "refused, and changed the engine"
        else:
            one.prefill([1])
            on_its_way, read = one.stream_with(prompt, its), []
    read += on_its_way
    ((alone, _, _),) = world.alone(prompt, its)
    assert read == alone, "the stream that was on its way is not what it is alone"


def engine_state(one: Any) -> tuple[Any, ...]:
    return one.lengths[:], one.changes, one._rewinds, one.rows, one.seq_lens.tolist()


def engine_call(case: Case, world: World, one: Any) -> tuple[str, Call, dict[str, Any], list[str]]:
    """One call of an engine: its name, the call, its arguments, and which were replaced."""
    from spindle.decode import speculative

    rng = case.rng
    names = ["generate", "stream", "answers", "begin", "prefill", "extend", "rewind", "reserve"]
    names += ["speculative.generate", "NgramDrafter", "stream_with", "Speculator"]
    name = rng.choice(names)
    ids = [rng.randrange(262) for _ in range(4)]
    sampling = good_sampling(rng) | dict(stop=None)
    sampling["max_new_tokens"] = sampling.pop("max_tokens")
    del sampling["stop"]
    its = good_params(rng, most=1, stop=None)
    given: dict[str, Any] = {
        "generate": dict(ids=ids, **sampling),
        "stream": dict(ids=ids, **sampling),
        "answers": dict(ids=ids, params=good_params(rng, stop=None)),
        "stream_with": dict(ids=ids, params=its),
        "begin": dict(prompts=[ids], params=its),
        "prefill": dict(ids=ids, row=0),
        "extend": dict(ids=ids[:2], row=1),
        "rewind": dict(length=0, row=1),
        "reserve": dict(tokens=10),
        "speculative.generate": dict(drafter=speculative.NgramDrafter(), ids=ids, k=3, **sampling),
        "NgramDrafter": dict(longest=4, shortest=2),
        "Speculator": dict(drafter=speculative.NgramDrafter(), k=3, adaptive_k=True),
    }[name]
    replaced = case.replace(given)
    made = {
        "speculative.generate": lambda: speculative.generate(one, **given),
        "NgramDrafter": lambda: speculative.NgramDrafter(**given),
        "Speculator": lambda: speculative.Speculator(one, **given),
        "stream": lambda: list(one.stream(**given)),
        "stream_with": lambda: list(one.stream_with(**given)),
    }
    return name, made.get(name, lambda: getattr(one, name)(**given)), given, replaced


# Text.


def text(case: Case, world: World) -> None:
    """The tokenizer, its chat template, and the text of one stream."""
    for _ in range(4):
        name, call, given = text_call(case, world)
        replaced = case.replace(given)
        if name == "decode" and type(given["ids"]) is range:  # a long way, but a right one
            continue
        case.call(name, lambda c=call, g=given: c(**g), given, replaced)


def text_call(case: Case, world: World) -> tuple[str, Call, dict[str, Any]]:
    from spindle import StreamDecoder
    from spindle.decode.text import stream_text

    rng, tokenizer = case.rng, world.tokenizer
    messages = [{"role": "user", "content": rng.choice(TEXTS)}]

    def streamed(**given: Any) -> Any:
        return list(stream_text(world.engine(), tokenizer, **given))

    def pushed(token: Any) -> str:
        return StreamDecoder(tokenizer).push(token)

    return rng.choice(
        [
            ("encode", tokenizer.encode, dict(text=rng.choice(TEXTS))),
            ("decode", tokenizer.decode, dict(ids=[1, 2, 3])),
            ("token_bytes", lambda token: tokenizer.token_bytes(token), dict(token=3)),
            ("StreamDecoder.push", pushed, dict(token=3)),
            ("encode_chat", tokenizer.encode_chat, dict(messages=messages)),
            ("render_chat", tokenizer.render_chat, dict(messages=messages, template=None)),
            ("render_chat", tokenizer.render_chat, dict(messages=messages, variable=1, tools=None)),
            ("stream_text", streamed, dict(prompt=good_prompt(rng), params=good_params(rng, 1))),
        ]
    )


# Loading.


def loading(case: Case, world: World) -> None:
    """What names a model, a device, a type."""
    from spindle import LLM, Tokenizer, hub, load_hf

    rng, where = case.rng, world.folder
    for _ in range(3):
        name, call, given = rng.choice(
            [
                ("load_hf", load_hf, dict(model=where, device="cpu", dtype="auto", quantize=None)),
                ("resolve", lambda name: hub.resolve(name), dict(name=where)),
                ("fetch", lambda name: hub.fetch(name), dict(name="tiny")),
                ("Tokenizer", lambda name: Tokenizer(name), dict(name=where)),
                ("LLM", LLM, dict(model=where, device="cpu", dtype="auto", num_blocks=8)),
            ]
        )
        replaced = case.replace(given, share=0.95)
        if is_large(given.get("num_blocks")):
            continue
        case.call(name, lambda c=call, g=given: c(**g), given, replaced)


# The command line, in this process.

SPELLED = [
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "1e3",
    "0x10",
    "1_0",
    "+5",
    "-0",
]
SPELLED += ["9" * 25, "9" * 5000, "-" + "9" * 400, "\uff11", "\u0661", "", " ", " 7 ", "a", "None"]
SPELLED += ["true", "--", "-", "-p", "\udcff", "a\udcffb", "\ud800", "\n", "a\nb", "\0", "\x1b[31m"]
SPELLED += [
    "\u202e",
    "x" * 3000,
    "../..",
    "/",
    "/dev/null/x",
    "~",
    "~nobody/x",
    "%s",
    "{}",
    "$(ls)",
]
SPELLED += ["tiny", "gpt2", "org/name", "int8", "ngram", "cuda", "cpu", "mps", "meta", "float32"]
SPELLED += ["float64", "bfloat16", "int32", "auto", "cuda:99", "1.5", "0.5", "128", "64", "1025"]

VALUED = {  # option -> what is right
    "--temperature": ("0", "0.7", "1.5"),
    "--top-k": ("5", "0"),
    "--top-p": ("0.9", "1"),
    "--min-p": ("0.05",),
    "--presence-penalty": ("0.5",),
    "--frequency-penalty": ("-0.5",),
    "--repetition-penalty": ("1.2",),
    "--seed": ("1", "7"),
    "--stop": ("e", "\n"),
    "--stop-token-id": ("5",),
    "--min-tokens": ("1",),
    "--device": ("cpu", "auto"),
    "--dtype": ("float32", "auto"),
    "--quantize": ("int8",),
    "-k": (),
    "--max-seq-len": ("40",),
}
OF_GENERATE = {"--samples": ("1",), "--logprobs": (), "--draft": ()}
FLAGS = ("--ignore-eos", "--ngram", "-q", "--json", "--debug", "--nonsense")
STDINS = [b"", b"the cat", b"\xff\xfe", b"a\0b", b"a\nb\n", b"x" * 100_000, b"/quit\n", b"/help\n"]
BENCH_OPTIONS = ["--repeat", "--new", "--rows", "--seqs", "-k", "--turns", "--requests", "--slots"]
BENCH_OPTIONS += ["--block-size", "--seed", "--seconds", "--tokens", "--context", "--steps", "-m"]


def cli(case: Case, world: World) -> None:
    """Exit status 0, or 2 with one line on stderr that names what was wrong."""
    for _ in range(2):
        command = case.rng.choice(["generate"] * 6 + ["chat", "chat", "fetch", "bench", "root"])
        argv, replaced = COMMANDS[command](case, world)
        stdin = case.rng.choice(STDINS)
        shown = shlex.join(argv).replace(str(world.folder), "CHECKPOINT")
        case.say(f"spindle {shown:.300} < {stdin!r:.40}")
        run_cli(case, argv, stdin, replaced)


def run_cli(case: Case, argv: list[str], stdin: bytes, replaced: list[str]) -> None:
    """Call `main` as a process does, and judge what came of it; replaced: a word to be named."""
    status, out, err = called(argv, stdin)
    shown = f"status {status}, stdout {out!r:.200}, stderr {err!r:.600}"
    assert status in (0, 2), shown
    if "--debug" not in argv:
        assert "Traceback" not in err, shown
    assert "a fault of spindle" not in err, shown
    lines = [line for line in err.splitlines() if line.startswith("spindle: error: ")]
    assert len(lines) == (status == 2), shown
    if status == 0:
        case.worked += 1
        if "--json" in argv and argv[0] == "generate" and not {"-h", "--help"} & set(argv):
            for line in out.splitlines():
                json.loads(line)
        return
    case.refused += 1
    assert replaced, f"refused what is right: {shown}"
    (line,) = lines
    assert any(word in line for word in replaced), f"names none of {replaced}: {line!r:.500}"
    assert line.isprintable() and len(line) <= LONGEST, f"{len(line)} characters: {line!r:.500}"


def called(argv: list[str], stdin: bytes) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command."""
    from spindle.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    finally:
        sys.stdin = before
    texts = []
    for stream_ in (out, err):
        stream_.flush()
        texts.append(stream_.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return status, *texts  # type: ignore[return-value]


def odd_options(case: Case, valued: dict[str, tuple[str, ...]]) -> tuple[list[str], list[str]]:
    """Options, right ones and odd ones, as argv; and words of which a refusal has one."""
    rng, argv, words = case.rng, list[str](), list[str]()
    for option in rng.sample(sorted(valued), rng.randint(0, 3)):
        right = valued[option]
        value = rng.choice(right) if right and rng.random() < 0.6 else rng.choice(SPELLED)
        if value not in right:
            words += [option, f"argument {option}", value.strip() or option]
        argv += [f"{option}={value}" if rng.random() < 0.5 and option[1] == "-" else option]
        argv += [value] if argv[-1] == option else []
    if rng.random() < 0.3:
        argv.append(rng.choice(FLAGS))
        words += [argv[-1]] if argv[-1] == "--nonsense" else []
    if words or "--ngram" in argv or "--draft" in argv or "--logprobs" in argv:
        # what one option says may be refused in the words of another
        words += ["--json", "-k", "unrecognized", "device", "dtype", "model", "draft", "stdin"]
        words += ["-p", "prompt", "--temperature", "--samples", "expected", "--max-new-tokens"]
    return argv, words


def of_generate(case: Case, world: World) -> tuple[list[str], list[str]]:
    rng = case.rng
    argv, words = odd_options(case, VALUED | OF_GENERATE)
    argv = ["generate", "-m", str(world.folder), "-n", rng.choice("123"), *argv]
    how = rng.random()
    if how < 0.6:
        argv += ["-p", rng.choice(TEXTS)]
    elif how < 0.75:
        argv += ["-p", "the cat", "-p", rng.choice(TEXTS)]
    elif how < 0.9:
        argv += ["-p", rng.choice([*SPELLED, "x" * 100_000, "-"])]
        words += ["prompt", "text to encode", "stdin", "-p"]
    elif how < 0.93:
        count = rng.choice([65, 100, 1000, 10_000])  # argparse takes 5 s for so many
        argv += ["-p", "a", *(part for n in range(count) for part in ("--stop", f"s{n}"))]
        words += ["--stop"]
    else:
        argv += ["-n", rng.choice(SPELLED)]
        words += ["-n", "--max-new-tokens", "--min-tokens"]
    if "--seed" in argv and not words:
        words = []
    return argv, words


def of_chat(case: Case, world: World) -> tuple[list[str], list[str]]:
    argv, words = odd_options(case, VALUED | {"--system": ("Be brief.",)})
    argv = ["chat", "-m", str(world.folder), "-n", "2", *argv]
    return argv, [*words, "stdin", "prompt", "context", "text to encode", "unrecognized"]


def of_fetch(case: Case, world: World) -> tuple[list[str], list[str]]:
    name = case.rng.choice(SPELLED)
    return ["fetch", name], ["model", "checkpoint", "NAME", "unrecognized", "argument"]


def of_bench(case: Case, world: World) -> tuple[list[str], list[str]]:
    """Always with a file that cannot be written: whatever else is right, nothing is measured."""
    from spindle.bench import BENCHES

    option, value = case.rng.choice(BENCH_OPTIONS), case.rng.choice(SPELLED)
    nowhere = f"{world.folder}/nowhere/figures.json"
    name = case.rng.choice([*BENCHES, "nonsense"])
    argv = ["bench", name, "--json", nowhere, option, value]
    words = [option, option.strip("-"), "--json", "unrecognized", "BENCH", "model", "GPU", value]
    return argv, words


def of_root(case: Case, world: World) -> tuple[list[str], list[str]]:
    argv = [case.rng.choice([*SPELLED, "--help", "generate", "doctor", "bench"])]
    argv += [case.rng.choice([*SPELLED, "--help"])]
    return argv, ["COMMAND", "unrecognized", "argument", "required", "--prompt", "prompt"]


COMMANDS = {
    "generate": of_generate,
    "chat": of_chat,
    "fetch": of_fetch,
    "bench": of_bench,
    "root": of_root,
}

KINDS: dict[str, Callable[[Case, World], None]] = {
    "params": params,
    "llm": llm,
    "options": options,
    "engine": engine,
    "text": text,
    "loading": loading,
    "cli": cli,
}


# One case, and the child that runs it.


def report(kind: str, seed: int, world: World) -> dict[str, Any]:
    """Run a case here, and say how it ended."""
    case, start, fault = Case(kind, seed), time.perf_counter(), ""
    try:
        KINDS[kind](case, world)
    except AssertionError as error:
        fault = str(error) or f"assertion {where(error)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        fault = f"{type(error).__name__}: {str(error)[:300]} {where(error)}"
    outcome = "finding" if fault else "passed"
    told = {"kind": kind, "seed": seed, "outcome": outcome, "fault": printable(fault)}
    told |= {"what": printable("; ".join(case.what[-3:])), "wall_s": time.perf_counter() - start}
    return told | {"worked": case.worked, "refused": case.refused}


def where(error: BaseException) -> str:
    """The line of the package, or of a test, that raised it."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/spindle/" in f.filename] or frames
    return f"({Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name})"


def printable(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode()[:1500]


def child(folder: str) -> None:
    """Run the cases that stdin names, a line each: kind and seed. It may be killed at any time."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines, out = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not a report
    parent = Path(tempfile.mkdtemp(dir=folder))
    os.environ |= {"HF_HOME": f"{parent}/hub", "SPINDLE_CACHE": f"{parent}/cache"}
    (parent / "checkpoint").mkdir()
    world = World(parent / "checkpoint")
    os.chdir(parent)
    files.limit_memory()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in lines:
        kind, seed = line.split()
        print(json.dumps(report(kind, int(seed), world)), file=out, flush=True)


# The parent.


def run(wanted: Iterable[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """The reports of the cases, in order; what the children write is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fuzz-calls-", ignore_cleanup_errors=True) as folder:
        yield from files.run(wanted, (*COMMAND, folder))


def in_words(told: dict[str, Any]) -> str:
    again = f"python tests/fuzz/calls.py --seed {told['seed']} --only {told['kind']}"
    return f"{told['outcome']}: {told['what']}\n  {told['fault']}\n  {again}"


def main() -> int:
    args = turns.asked("calls that nobody should make, from seeds", KINDS, 500)
    if args.child is not None:
        child(args.child)
        return 0
    wanted = turns.by_turns(KINDS, args.seed, args.count, args.only)
    start, counts, findings = time.monotonic(), Counter[str](), []
    bar = tqdm(wanted, desc="calls", disable=None)
    slowest, seconds = (0.0, ""), Counter[str]()
    for told in turns.heard(run(bar), findings, bar, in_words, args.single):
        for key in ("worked", "refused"):
            counts[f"{told['kind']} {key}"] += told.get(key, 0)
        seconds[told["kind"]] += told.get("wall_s", files.LIMIT_S)
        slowest = max(
            slowest, (told.get("wall_s", files.LIMIT_S), f"{told['kind']} {told['seed']}")
        )
    wall_s = time.monotonic() - start
    print(f"seeds {args.seed} to {args.seed + len(wanted) - 1}: {len(wanted)} in {wall_s:.0f} s")
    for kind in KINDS:
        if counts[f"{kind} worked"] + counts[f"{kind} refused"]:
            told_of = [f"{counts[f'{kind} {key}']} {key}" for key in ("worked", "refused")]
            print(f"  {kind:8} calls: {', '.join(told_of)}; {seconds[kind]:.1f} s")
    print(f"  slowest {slowest[0]:.1f} s ({slowest[1]}), findings {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
