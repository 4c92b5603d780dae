"""The columns: what each says of the answers of a schedule, and the references it says it by.

`plain` is the plain path: no cache, no batch, no engine, attention as the formula has it; the whole
sequence goes through the model again for each token. In float64 ids have to be the same. In float32
every id must be the reference's own after the ids before it, or within NEAR of that.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor

from matrix.models import EOS, Subject
from matrix.traffic import Asked, Served
from spindle import LLM, Engine, SamplingParams
from spindle.decode.drafters import ModelDrafter
from spindle.decode.sampling import uniform

NEAR = 1e-3  # between the reference's best logit and ours, in float32: see `test_matrix`
NEAR_DRAW = 1e-4  # between a random number and the interval of the token, in float32
CHANCE = 1e-6  # a law is denied where chance would do what was seen as rarely as this


@dataclass
class Tally:
    """What a cell has seen so far. touched: requests to which the row's feature has happened."""

    schedules: int = 0
    touched: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    where: str = ""  # what is looked at now, for a failure to name
    largest_gap: float = 0.0  # that was let pass, in float32
    p: float | None = None  # of the law that fits worst

    def expect(self, same: bool, words: str) -> None:
        if not same:
            self.failures.append(f"{self.where}: {words}")


# --- the plain path ------------------------------------------------------------------------------


class Whole:
    """A view over one sequence that begins with this pass and ends with it: nothing is cached."""

    def __init__(self, length: int) -> None:
        self.positions = torch.arange(length)  # [T]
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Remember k, v [T, Hk, D] until they are read."""
        self._kv[layer] = k, v

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """softmax(q k^T scale) v, each query over the keys up to itself; q [T, H, D]."""
        T, H, _ = q.shape
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in self._kv.pop(layer))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights, v)


def plain_logits(subject: Subject, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of a sequence in one pass."""
    model = subject.plain
    return model.logits(model(torch.tensor(ids), Whole(len(ids))))


@functools.lru_cache(maxsize=256)
def plain(subject: Subject, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy ids and their logprobs: each from a pass over all ids before it."""
    ids, logprobs = list(prompt), list[float]()
    for _ in range(count):
        logprob, token = plain_logits(subject, ids)[-1].log_softmax(-1).max(-1)
        ids.append(int(token))
        logprobs.append(float(logprob))
    return ids[len(prompt) :], logprobs


def plain_beams(subject: Subject, prompt: Sequence[int], width: int, count: int) -> list[list[int]]:
    """The `width` best of all continuations of the best, step by step, where nothing ends early."""
    beams = [(0.0, list(prompt))]
    for _ in range(count):
        longer = [
            (total + logprob, [*ids, token])
            for total, ids in beams
            for token, logprob in enumerate(plain_logits(subject, ids)[-1].log_softmax(-1).tolist())
        ]
        beams = sorted(longer, key=lambda one: -one[0])[:width]
    return [ids[len(prompt) :] for _, ids in beams]


def up_to_the_end(subject: Subject, ids: list[int], one: Asked) -> list[int]:
    """Ids as far as the request goes: with the first that ends it."""
    ends = one.params.end_ids(subject.ours.config.eos_ids)
    length = next((n for n, token in enumerate(ids, 1) if token in ends), len(ids))
    return ids[:length]


# --- the columns ---------------------------------------------------------------------------------


def against_transformers(subject: Subject, served: Served, touched: set[int], tally: Tally) -> None:
    """Greedy answers are those of transformers' `generate`, and beams those of its beam search."""

    def greedy(one: Asked) -> list[int]:
        return oracle.greedy(subject.theirs, list(one.prompt), one.params.max_tokens or 0)

    def search(one: Asked) -> list[list[int]] | None:
        if one.params.ignore_eos:  # where one beam is greedy, and several need an EOS there
            return [greedy(one)] if one.width == 1 else None
        count = one.params.max_tokens or 0
        prompt = list(one.prompt)
        return oracle.beam_search(subject.theirs, prompt, one.width, count, one.penalty, EOS)

    def logits(ids: list[int]) -> Tensor:
        return oracle.logits(subject.theirs, ids)

    _judge_greedy(subject, served, touched, tally, greedy, search, logits)


def against_plain(subject: Subject, served: Served, touched: set[int], tally: Tally) -> None:
    """Greedy answers and their logprobs are those of the plain path, and beams its beams."""

    def greedy(one: Asked) -> list[int]:
        return plain(subject, one.prompt, one.params.max_tokens or 0)[0]

    def search(one: Asked) -> list[list[int]] | None:
        if not one.params.ignore_eos:
            return None
        return plain_beams(subject, one.prompt, one.width, one.params.max_tokens or 0)

    logits = functools.partial(plain_logits, subject)
    _judge_greedy(subject, served, touched, tally, greedy, search, logits)
    for n, one in enumerate(served.asked):
        for answer in served.outputs[n].outputs:
            if one.is_greedy and subject.is_exact and answer.logprobs is not None:
                right = plain(subject, one.prompt, one.params.max_tokens or 0)[1]
                ours = [record.sampled.logprob for record in answer.logprobs]
                off = max(abs(a - b) for a, b in zip(ours, right, strict=False))
                tally.expect(off < 1e-9, f"request {n}: logprobs are off by {off:.1e}")


def _judge_greedy(
    subject: Subject,
    served: Served,
    touched: set[int],
    tally: Tally,
    greedy: Callable[[Asked], list[int]],
    search: Callable[[Asked], list[list[int]] | None],
    logits: Callable[[list[int]], Tensor],
) -> None:
    for n, one in enumerate(served.asked):
        answers = [answer.token_ids for answer in served.outputs[n].outputs]
        if one.width:
            if (right := search(one)) is None:
                continue
            tally.expect(answers == right, f"request {n}: beams {answers}, expected {right}")
        elif one.is_greedy and subject.is_exact:
            whole = up_to_the_end(subject, greedy(one), one)
            right = [whole] * one.params.n
            tally.expect(answers == right, f"request {n}: {answers}, expected {right}")
        elif one.is_greedy:
            for ids in answers:
                rows = logits([*one.prompt, *ids])[len(one.prompt) - 1 : -1]  # [T', V]
                gaps = rows.max(-1).values - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
                _let_pass(tally, n, float(gaps.max()), NEAR)
        else:
            continue
        _count(tally, subject, n, served, touched)


def against_solo(subject: Subject, served: Served, touched: set[int], tally: Tally) -> None:
    """Drawn answers are those that the request has alone, in a plain engine, by the same seed.

    Where a draft model drafts, it does so alone as well. In float32: each id is the one that its
    random number means by the plain path in float64.
    """
    for n, one in enumerate(served.asked):
        if not one.is_drawn:
            continue
        answers = [answer.token_ids for answer in served.outputs[n].outputs]
        if subject.is_exact:
            right = solo(subject, one, **_drafts(subject, served))
            tally.expect(answers == right, f"request {n}: {answers}, alone {right}")
        else:
            for sample, ids in enumerate(answers):
                _let_pass(tally, n, _off_the_draw(subject, one, sample, ids), NEAR_DRAW)
        _count(tally, subject, n, served, touched)


def solo(subject: Subject, one: Asked, **options: Any) -> list[list[int]]:
    """The answers to a request that has a fresh engine to itself; options: by default, nothing."""
    seats, length = one.params.n, one.blocks[1]
    plainly = dict(max_seqs=seats, block_size=16, num_blocks=seats * (-(-length // 16)))
    plainly |= dict(prefix_cache=False, graphs=False, max_batch_tokens=64, max_model_len=64)
    (output,) = LLM(subject.plain, **(plainly | options)).generate([list(one.prompt)], one.params)
    return [answer.token_ids for answer in output.outputs]


def _drafts(subject: Subject, served: Served) -> dict[str, Any]:
    """How a draft model drafts in a schedule, if one does; an engine of its own for it."""
    if not isinstance(served.options.get("speculate"), ModelDrafter):
        return {}
    kept = {name: served.options[name] for name in ("k", "adaptive_k")}
    return kept | {"speculate": ModelDrafter(Engine(subject.draft))}


def _off_the_draw(subject: Subject, one: Asked, sample: int, ids: list[int]) -> float:
    """How far the random numbers lie from the intervals of the tokens that were drawn by them.

    Where temperature is all that shapes the distribution.
    """
    first = len(one.prompt)
    logits = plain_logits(subject, [*one.prompt, *ids])[first - 1 : -1].double()  # [T, V]
    ends = (logits / one.params.temperature).softmax(-1).cumsum(-1)
    position = torch.arange(first, first + len(ids))
    seed, which = torch.tensor([[one.params.seed], [sample]]).expand(2, len(ids))
    u = uniform(seed, which, position)
    token = torch.tensor(ids)[:, None]
    above = u - ends.gather(1, token)[:, 0]
    below = (ends - ends.diff(dim=-1, prepend=torch.zeros(len(ids), 1))).gather(1, token)[:, 0] - u
    return float(torch.stack((above, below)).max())


def _let_pass(tally: Tally, n: int, off: float, most: float) -> None:
    """Note how far a float32 answer is off; further than that is a failure."""
    tally.largest_gap = max(tally.largest_gap, off)
    tally.expect(off < most, f"request {n}: {off:.1e} from the reference, beyond {most}")


def _count(tally: Tally, subject: Subject, n: int, served: Served, touched: set[int]) -> None:
    """Count what was judged of a request; and whether its answers ended where they have to."""
    one, answers = served.asked[n], served.outputs[n].outputs
    for answer in answers if not one.width else ():
        ids = answer.token_ids
        ended = up_to_the_end(subject, ids, one) == ids
        ends = ids[-1] in one.params.end_ids(subject.ours.config.eos_ids)
        right = answer.finish_reason == ("stop" if ends else "length")
        whole = ends or len(ids) == one.params.max_tokens
        tally.expect(ended and right and whole, f"request {n} ends in {ids}, for {one.params}")
    tally.touched += n in touched
    tally.tokens += sum(len(answer.token_ids) for answer in answers)


# --- the law -------------------------------------------------------------------------------------

LENGTH, PROMPT = 4, (1, 0, 3, 2, 1)
WAYS = {
    "temperature 1": dict(temperature=1.0),
    "temperature 0.6": dict(temperature=0.6),
    "top-k 2, temperature 1.3": dict(temperature=1.3, top_k=2),
    "top-p 0.8": dict(temperature=1.0, top_p=0.8),
}


def counted(rng: random.Random, way: str, count: int, answers: Sequence[int]) -> list[Asked]:
    """`count` answers to one prompt, each drawn by a seed of its own, two requests a step."""
    asked = list[Asked]()
    while count > 0:
        n = rng.choice(answers)
        params = SamplingParams(max_tokens=LENGTH, n=n, seed=rng.getrandbits(62), **WAYS[way])
        asked.append(Asked(len(asked) // 2, PROMPT, params))
        count -= n
    return asked


@functools.cache
def law(subject: Subject, way: str) -> dict[tuple[int, ...], float]:
    """The probability of every answer of LENGTH ids, from transformers' logits and definitions."""
    V = subject.vocab_size
    beginnings = [list(ids) for ids in itertools.product(range(V), repeat=LENGTH - 1)]
    passes = torch.stack([oracle.logits(subject.theirs, [*PROMPT, *ids]) for ids in beginnings])
    rows = passes[:, len(PROMPT) - 1 :].tolist()  # [V^3, LENGTH, V]
    found = {}
    for ids, logits in zip(beginnings, rows, strict=True):
        first, *later, last = (distribution(row, **WAYS[way]) for row in logits)
        before = first[ids[0]]
        for token, p in zip(ids[1:], later, strict=True):
            before *= p[token]
        for token, p in enumerate(last):
            found[*ids, token] = before * p
    return {ids: p for ids, p in found.items() if p > 0}


def distribution(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0
) -> list[float]:
    """What a token is drawn from, by the definitions, with nothing of the package's."""
    p = torch.tensor([x / temperature for x in logits], dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or None]
    total, before, kept = sum(p[token] for token in order), 0.0, {}
    for token in order:
        if before / total < top_p:
            kept[token] = p[token]
        before += p[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(p))]


def chance(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The chance of a chi-square as large as this one, rare answers taken together (Pearson 1900).

    0 for an answer that cannot be.
    """
    if not set(observed) <= set(law):
        return 0.0
    n, cells = sum(observed.values()), [(0.0, 0)]
    for ids, p in sorted(law.items(), key=lambda pair: pair[1]):
        if cells[-1][0] >= 5:  # the likelier ones have cells of their own
            cells.append((0.0, 0))
        mean, got = cells[-1]
        cells[-1] = mean + n * p, got + observed[ids]
    if cells[-1][0] < 5 and len(cells) > 1:
        (mean, got), (more, others) = cells.pop(), cells.pop()
        cells.append((mean + more, got + others))
    if len(cells) == 1:  # nearly all answers are the same one
        return 1.0
    chi2 = sum((got - mean) ** 2 / mean for mean, got in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))
