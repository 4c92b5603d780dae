"""The columns: what each says of the answers of a schedule, and the references it says it by.

`plain` is the plain path: no cache, no batch, no engine, attention as the formula has it; the whole
sequence goes through the model again for each token. In float64 ids have to be the same. In float32
every id must be the reference's own after the ids before it, or within NEAR of that.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor

from matrix import models
from matrix.definitions import Draw
from matrix.law import Drawn
from matrix.models import EOS, Subject
from matrix.traffic import Asked, Served
from spindle import LLM, Engine, SamplingParams
from spindle.decode.drafters import ModelDrafter

NEAR = 1e-3  # between the reference's best logit and ours, in float32: see `test_matrix`
NEAR_DRAW = 1e-4  # between a random number and the interval of the token, in float32


@dataclass
class Tally:
    """What a cell has seen so far. touched: requests to which the row's feature has happened."""

    schedules: int = 0
    touched: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    where: str = ""  # what is looked at now, for a failure to name
    largest_gap: float = 0.0  # that was let pass, in float32

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


def against_definitions(subject: Subject, served: Served, touched: set[int], tally: Tally) -> None:
    """Each drawn id is the one that its random number means, by definitions written in the tests.

    Where a draft model drafts, the answers of an engine are those that the request has alone, in a
    plain engine, with the same draft model; what is a law's to say is not looked at.
    """
    if has_draft_model(served):
        if subject.is_exact and served.plans:
            _against_solo(subject, served, touched, tally)
        return
    drawn = drawn_by(subject, served)
    off, whose = drawn.off(), torch.tensor(drawn.requests)
    for n, one in enumerate(served.asked):
        if one.is_drawn:
            most = 0.0 if subject.is_exact else NEAR_DRAW
            words = f"answers {[answer.token_ids for answer in served.outputs[n].outputs]}"
            _let_pass(tally, n, float(off[whose == n].max()), most, words)
            _count(tally, subject, n, served, touched)


def _against_solo(subject: Subject, served: Served, touched: set[int], tally: Tally) -> None:
    for n, one in enumerate(served.asked):
        if one.is_drawn:
            answers = [answer.token_ids for answer in served.outputs[n].outputs]
            right = solo(subject, one, served.options)
            tally.expect(answers == right, f"request {n}: {answers}, alone {right}")
            _count(tally, subject, n, served, touched)


def solo(subject: Subject, one: Asked, options: dict[str, Any]) -> list[list[int]]:
    """The answers to a request that has a fresh engine, and a fresh draft model, to itself."""
    seats, length = one.params.n, one.blocks[1]
    plainly = dict(max_seqs=seats, block_size=16, num_blocks=seats * (-(-length // 16)))
    plainly |= dict(prefix_cache=False, graphs=False, max_batch_tokens=64, max_model_len=64)
    plainly |= {name: options[name] for name in ("k", "adaptive_k")}
    llm = LLM(subject.plain, **plainly, speculate=ModelDrafter(Engine(subject.draft)))
    (output,) = llm.generate([list(one.prompt)], one.params)
    return [answer.token_ids for answer in output.outputs]


def has_draft_model(served: Served) -> bool:
    return isinstance(served.options.get("speculate"), ModelDrafter)


@functools.lru_cache(maxsize=1)  # two columns look at it
def drawn_by(subject: Subject, served: Served) -> Drawn:
    """The tokens of all drawn answers of a schedule, and transformers' logits before each."""
    answers = [
        (n, one, sample, answer.token_ids)
        for n, one in enumerate(served.asked)
        if one.is_drawn
        for sample, answer in enumerate(served.outputs[n].outputs)
    ]
    draws = [
        Draw(one.params, one.prompt, ids[:at], token, sample)
        for _, one, sample, ids in answers
        for at, token in enumerate(ids)
    ]
    requests = [n for n, _, _, ids in answers for _ in ids]
    texts = [(len(one.prompt), [*one.prompt, *ids[:-1]]) for _, one, _, ids in answers]
    draft = None
    if has_draft_model(served):
        assert subject.draft_directory is not None
        draft = logits_along(models.theirs(subject.draft_directory, False), texts)
    logits, eos_ids = logits_along(subject.theirs, texts), subject.ours.config.eos_ids
    return Drawn(draws, logits, eos_ids, draft, subject.is_exact, requests)


@torch.inference_mode()
def logits_along(model: Any, texts: Sequence[tuple[int, list[int]]]) -> Tensor:
    """transformers' logits [N, V] after each id of some texts, from the n-th on, in one pass."""
    width = max(len(ids) for _, ids in texts)
    batch = torch.tensor([ids + [0] * (width - len(ids)) for _, ids in texts])  # nobody looks ahead
    logits = model(batch, use_cache=False).logits
    rows = zip(logits, texts, strict=True)
    return torch.cat([its[first - 1 : len(ids)] for its, (first, ids) in rows])


def _let_pass(tally: Tally, n: int, off: float, most: float, words: str = "") -> None:
    """Note how far an answer is off; further than that is a failure."""
    tally.largest_gap = max(tally.largest_gap, off)
    said = f"request {n}: {off:.1e} from the reference, beyond {most}"
    tally.expect(off <= most, f"{said}: {words}" if words else said)


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

LENGTH = 8  # tokens of an answer that is drawn for the law alone
WAYS: tuple[dict[str, Any], ...] = (
    dict(temperature=1.0),
    dict(temperature=0.7),
    dict(temperature=1.3, top_k=7),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=1.2, min_p=0.1),
    dict(temperature=1.0, presence_penalty=1.5),
    dict(temperature=1.0, frequency_penalty=1.0),
    dict(temperature=1.0, repetition_penalty=3.0),
)


def many(rng: random.Random, subject: Subject, count: int, answers: Sequence[int]) -> list[Asked]:
    """`count` answers to one prompt, drawn in all ways, by a seed each, two requests a step."""
    prompt = tuple(rng.randrange(subject.vocab_size) for _ in range(5))
    asked = list[Asked]()
    while count > 0:
        n, way = rng.choice(answers), rng.choice(WAYS)
        params = SamplingParams(max_tokens=LENGTH, n=n, seed=rng.getrandbits(62), **way)
        asked.append(Asked(len(asked) // 2, prompt, params))
        count -= n
    return asked
