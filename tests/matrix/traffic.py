"""Requests by lot, when they come, and what becomes of them in one engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from matrix.models import Subject
from spindle import LLM, SamplingParams
from spindle.serve.outputs import RequestOutput
from spindle.serve.scheduler import Chunk, Plan

MOST_STEPS = 5000  # of a schedule; it comes to an end long before


@dataclass(frozen=True)
class Asked:
    """A request, and before which step it comes; width: of a beam search, 0: it is none."""

    at: int
    prompt: tuple[int, ...]
    params: SamplingParams
    width: int = 0
    penalty: float = 1.0  # on the length of a beam's answers

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time: also where others cannot be drawn."""
        return self.width == 0 and (self.params.temperature == 0 or self.params.top_k == 1)

    @property
    def is_drawn(self) -> bool:
        return self.width == 0 and not self.is_greedy

    @property
    def blocks(self) -> tuple[int, int]:
        """(sequences that must be in memory at once, tokens of each)."""
        return max(1, self.width), len(self.prompt) + (self.params.max_tokens or 0)


@dataclass(frozen=True, eq=False)
class Served:
    """What became of the requests of a schedule, in their order, and how it went."""

    asked: Sequence[Asked]
    outputs: Sequence[RequestOutput]
    plans: Sequence[Plan]
    stats: dict[str, Any]
    calls: Sequence[str] = ()  # kernels that were called, by name
    options: dict[str, Any] = field(default_factory=dict)  # of the engine

    def of(self, chunks: Sequence[Chunk]) -> set[int]:
        """Which requests these chunks belong to."""
        names = {output.request_id: at for at, output in enumerate(self.outputs)}
        return {names[chunk.sequence.request.id] for chunk in chunks}


def by_lot(
    rng: random.Random,
    subject: Subject,
    count: int,
    most: int,
    answers: Sequence[int] = (1,),
    beams: bool = False,
    apart: int = 3,
    least: int = 0,
) -> list[Asked]:
    """Greedy and drawn requests in turn, with `most` tokens at most.

    answers: one of these numbers of them each. beams: two of the greedy ones are beam searches, one
    of which goes on after an EOS. apart: steps between those that come, at most. least: ids that
    all prompts have in common, before those that some have.
    """
    head, stem, asked = _ids(rng, subject, least), _ids(rng, subject, 10), list[Asked]()
    for n in range(count):
        at, prompt = n // 2 * rng.randint(0, apart), tuple(head + _prompt(rng, subject, stem))
        if beams and n in (0, 4):
            width = rng.randint(1 if n == 0 else 2, 4)
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(3, most), ignore_eos=n == 0
            )
            asked.append(Asked(at, prompt, params, width, rng.choice([0.5, 1])))
        else:
            params = (_drawn if n % 2 else _greedy)(rng, subject, most)
            asked.append(Asked(at, prompt, _several(params, rng.choice(answers))))
    return asked


def _several(params: SamplingParams, n: int) -> SamplingParams:
    """The same with n answers; if greedy, drawn from the likeliest id alone: else it is refused."""
    likeliest = dict(temperature=1.0, top_k=1) if n > 1 and params.temperature == 0 else {}
    return replace(params, n=n, **likeliest)


def _prompt(rng: random.Random, subject: Subject, stem: list[int]) -> list[int]:
    """A beginning that all have in common, then ids of its own, which may repeat themselves."""
    own = _ids(rng, subject, rng.randint(1, 5))
    return stem[: rng.randint(3, len(stem))] + own * rng.choice([1, 1, 2, 3])


def _ids(rng: random.Random, subject: Subject, count: int) -> list[int]:
    """So many ids in a row of the subject's text, or any."""
    if not subject.text:
        return [rng.randrange(subject.vocab_size) for _ in range(count)]
    start = rng.randrange(len(subject.text) - count)
    return list(subject.text[start : start + count])


def _greedy(rng: random.Random, subject: Subject, most: int) -> SamplingParams:
    stops = rng.sample(range(subject.vocab_size), 2)
    return SamplingParams(
        temperature=0,
        max_tokens=rng.randint(4, most),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=rng.choice([None, None, stops]),
        logprobs=0,
    )


def _drawn(rng: random.Random, subject: Subject, most: int) -> SamplingParams:
    stops = rng.sample(range(subject.vocab_size), 2)
    return SamplingParams(
        temperature=rng.choice([0.3, 0.8, 1.2]),
        max_tokens=rng.randint(4, most),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=rng.choice([None, None, stops]),
        seed=rng.getrandbits(62),
        top_p=rng.choice([1, 0.9]),
        top_k=rng.choice([0, 0, 7]),
        min_p=rng.choice([0, 0, 0.02]),
        min_tokens=rng.choice([0, 0, 3]),
        repetition_penalty=rng.choice([1, 1, 1.3]),
        frequency_penalty=rng.choice([0, 0, 0.4]),
        presence_penalty=rng.choice([0, 0, 0.4]),
    )


def serve(llm: LLM, asked: Sequence[Asked]) -> Served:
    """Add each request before its step, and run until all have ended; nothing is held then.

    A beam search runs to its end when it comes, beside whatever else is unfinished.
    """
    for pool in (llm._kv.keys, llm._kv.values):
        pool.fill_(torch.nan)  # what nobody wrote must not be read
    due = sorted(range(len(asked)), key=lambda n: asked[n].at)
    names, done = dict[str, int](), dict[int, RequestOutput]()
    for now in range(MOST_STEPS):
        while due and asked[due[0]].at <= now:
            n = due.pop(0)
            if asked[n].width:
                done[n] = _search(llm, asked[n])
            else:
                names[llm.add(list(asked[n].prompt), asked[n].params)] = n
        if not due and not llm.has_unfinished:
            break
        done |= {names[one.request_id]: one for one in llm.step() if one.finished}
    stats = llm.stats
    assert len(done) == len(asked), f"{len(asked) - len(done)} requests have not ended"
    assert stats["blocks_held"] == stats["running"] == stats["waiting"] == 0, stats
    return Served(asked, [done[n] for n in range(len(asked))], list(llm.trace), stats)


def _search(llm: LLM, one: Asked) -> RequestOutput:
    options: dict[str, Any] = dict(width=one.width, max_tokens=one.params.max_tokens)
    options |= dict(length_penalty=one.penalty, ignore_eos=one.params.ignore_eos)
    return llm.beam_search(list(one.prompt), **options)
