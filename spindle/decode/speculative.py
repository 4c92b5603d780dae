"""Speculation: draft k tokens cheaply, let one pass of the target judge them, keep what it says.

    draft    d1 .. dk, from a drafter: d_i ~ q_i, or a plain guess
    verify   one pass over [last token, d1 .. dk] gives k + 1 distributions p_1 .. p_(k+1)
    accept   d_i with probability min(1, p_i(d_i) / q_i(d_i)); at the first rejection a token from
             (p_i - q_i)+ instead; after k accepted ones a token from p_(k+1) besides

What comes out has the target's distribution, whatever the drafts are (Leviathan et al. 2023,
appendix A.1; Chen et al. 2023, theorem 1). A plain guess is a q with all its weight on one id: then
sampling the target's token and comparing has the same law, and the tokens are those of plain seeded
sampling.

Examples:

    >>> from spindle import Engine, Tokenizer, load_hf, speculative
    >>> tok, eng = Tokenizer("tiny"), Engine(load_hf("tiny"))
    >>> prompt = tok.encode("The with statement is used to")
    >>> plain, _ = eng.generate(prompt, 64, temperature=0)
    >>> drafter = speculative.ModelDrafter(Engine(load_hf("tiny-draft")))
    >>> ids, stats = speculative.generate(eng, drafter, prompt, 5, 64, temperature=0)
    >>> ids == plain, stats.speculation.passes < len(ids)
    (True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spindle.decode.drafters import Draft, Drafter, ModelDrafter, NgramDrafter, nothing
from spindle.decode.engine import Engine, params_of, refuse_logits
from spindle.decode.graphs import enable_if_free
from spindle.decode.logprobs import logprob_table
from spindle.decode.pace import Pace, check_k, tokens_a_pass
from spindle.decode.params import SamplingParams, check_bool
from spindle.decode.penalties import Prefix
from spindle.decode.run import Run
from spindle.decode.sampling import (
    ACCEPT,
    SAMPLE,
    SamplingRows,
    draw,
    inverse_cdf,
    probabilities,
    sample,
)
from spindle.decode.stats import Speculation, Stats
from spindle.decode.stream import Stream
from spindle.errors import RequestError, shown
from spindle.model.layers import Model
from spindle.model.weights import load_hf

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter", "Speculator", "generate", "tokens_a_pass"]


# --- the rule -----------------------------------------------------------------------------------


def judged(
    target_probs: Tensor, draft_probs: Tensor, drafts: Tensor, u_accept: Tensor, u: Tensor
) -> Tensor:
    """The token of each row: its draft, if that is accepted, else one from the residual.

    target_probs, draft_probs [R, V]: what the target and the drafter sample this row from. drafts
    [R], and -1 in a row without one, whose draft_probs are 0: its token is the target's. u_accept,
    u [R]: uniform numbers, which have been used for nothing else. Returns [R] int64.
    """
    has, at = drafts >= 0, drafts.clamp(min=0)[:, None]
    p, q = (probs.gather(1, at).squeeze(1) for probs in (target_probs, draft_probs))
    accepted = has & (u_accept * q < p)  # u < p / q
    residual = (target_probs - draft_probs).clamp(min=0)
    # Where rounding leaves none, p and q are the same.
    residual = residual.where(residual.sum(dim=-1, keepdim=True) > 0, target_probs)
    return torch.where(accepted, drafts, inverse_cdf(residual, u))


def verified(logits: Tensor, rows: SamplingRows, position: Tensor, draft: Draft) -> Tensor:
    """What the target says in each row, drafts before it granted: [R] int64, -1 if it cannot say.

    logits [R, V] of a pass over tokens and drafts; rows: how each is sampled; position [R] of what
    follows; draft: of each row, as `Draft.behind` has it. A row's token is its draft exactly if
    that is accepted.
    """
    if draft.probs is None:
        return sample(logits, rows, position)
    p = probabilities(logits, rows)
    u_accept, u = draw(rows, position, ACCEPT), draw(rows, position, SAMPLE)
    tokens = judged(p, draft.probs, draft.ids, u_accept, u)
    sound = p.sum(dim=-1).isfinite() & logits.amax(dim=-1).isfinite()  # a mask may have covered it
    return torch.where(sound, tokens, -1)


def accepted(tokens: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts [k] come before the first that is not the token of its row, of [k + 1]."""
    return (tokens[:-1] == drafts).int().cumprod(dim=0).sum()


def drafter_for(speculate: str | Path | Drafter | None, model: Model) -> Drafter | None:
    """The drafter that is meant: "ngram", "int8" (the model's own weights in 8 bits), or a model.

    RequestError: there is no such thing. ModelNotFound: no such model.
    """
    if speculate is None or isinstance(speculate, Drafter):
        return speculate
    if not isinstance(speculate, str | Path):
        right = 'expected "ngram", "int8", the name of a draft model, a Drafter, or None'
        raise RequestError(f"speculate={shown(speculate)}: {right}")
    if speculate == "ngram":
        return NgramDrafter()
    name, quantize = speculate, None
    if speculate == "int8":
        if model.directory is None:
            raise RequestError('speculate="int8": the model was not loaded from a checkpoint')
        name, quantize = model.directory, "int8"
    draft = Engine(load_hf(name, model.device, model.dtype, quantize, whole=True))
    return ModelDrafter(enable_if_free(draft))


# --- one stream ---------------------------------------------------------------------------------


def generate(
    engine: Engine,
    drafter: Drafter,
    ids: Iterable[int],
    k: int = 5,
    max_new_tokens: int | None = 16,
    adaptive_k: bool = True,
    **sampling: Any,
) -> tuple[list[int], Stats]:
    """`Engine.generate` with drafts: the same distribution, and the same tokens at temperature 0.

    k: drafts a pass, at most; adaptive_k: fewer where they are not accepted. The tokens are those
    of `Engine.generate` at any temperature if the drafter gives guesses, as NgramDrafter does. The
    stats say what became of the drafts. Raises what `Engine.generate` does, and RequestError if the
    drafter's tokens are not the model's.
    """
    return Speculator(engine, drafter, k, adaptive_k).generate(ids, max_new_tokens, **sampling)


class Speculator:
    """An engine whose next tokens are drafted first: `generate` and the streams of an `Engine`.

    One stream at a time, of this and of both engines. RequestError: k is none from 0 to 32, or the
    drafter is none, or is not for this model.
    """

    def __init__(
        self, engine: Engine, drafter: Drafter, k: int = 5, adaptive_k: bool = True
    ) -> None:
        if not isinstance(engine, Engine):
            raise RequestError(f"engine={shown(engine)}: expected an Engine")
        if not isinstance(drafter, Drafter):
            raise RequestError(f"drafter={shown(drafter)}: expected a Drafter")
        if isinstance(drafter, ModelDrafter) and drafter.engine is engine:
            raise RequestError("the drafter has the engine itself; expected one of its own")
        drafter.check(engine.model)
        self.engine, self.drafter = engine, drafter
        self.k, self.adaptive_k = check_k(k), check_bool("adaptive_k", adaptive_k)

    @property
    def max_seq_len(self) -> int:
        """The engine's: prompt and answer together, in tokens."""
        return self.engine.max_seq_len

    def generate(
        self, ids: Iterable[int], max_new_tokens: int | None = 16, **sampling: Any
    ) -> tuple[list[int], Stats]:
        """As `Engine.generate`."""
        stream = self.stream(ids, max_new_tokens, **sampling)
        return list(stream), stream.stats

    def stream(
        self, ids: Iterable[int], max_new_tokens: int | None = 16, **sampling: Any
    ) -> Stream:
        """As `Engine.stream`; the tokens of a pass come one after another, at once."""
        return self.stream_with(ids, params_of(max_new_tokens, sampling))

    def stream_with(self, ids: Iterable[int], params: SamplingParams) -> Stream:
        """As `Engine.stream_with`."""
        return self.engine.stream_with(ids, params, self._tokens)

    def streams(self, ids: Iterable[int], params: SamplingParams) -> Iterator[Stream]:
        """As `Engine.streams`."""
        return self.engine.streams(ids, params, self._tokens)

    def _tokens(
        self, run: Run, prompt: list[int], start: Callable[[], Tensor]
    ) -> Generator[int, None, None]:
        """The answer's ids; `start` runs the prompt and gives the logits [1, V] that follow it."""
        run.stats.speculation = Speculation()
        if run.limit == 0:
            return
        engine, drafter, ids = self.engine, self.drafter.begin(), list(prompt)
        pace = Pace(self.k, drafter.cost(engine.model), self.adaptive_k)
        sampler = Sampler(engine, run, prompt)
        verdict = self._judge(start(), nothing(engine.model), sampler)
        while True:
            yield from self._give(verdict, ids, run)
            if run.ended:
                return
            k = pace.next(run.limit - len(run.token_ids) - 1)
            verdict = self._round(drafter, k, ids, sampler)
            pace.note(verdict.accepted, min(verdict.accepted + 1, verdict.drafts))

    def _give(self, verdict: Verdict, ids: list[int], run: Run) -> Generator[int, None, None]:
        """A pass's tokens, one by one; where they are broken off, the engine forgets the rest."""
        engine, counts, now = self.engine, run.stats.speculation, run.stats.now()

        def forget() -> None:
            engine.shorten(min(engine.length, len(ids) - 1))

        for n, row in enumerate(verdict.table):
            if row[0][0] < 0:
                forget()
                refuse_logits(verdict.logits[n], len(ids))
            if run.token_ids and counts is not None:  # the first one is from the prompt's pass
                counts.note(drafted=n < verdict.drafts, accepted=n < verdict.accepted)
            ids.append(run.take(row, at=now))
            if run.ended:
                forget()
            changes = engine.changes
            try:
                with engine.alone(run):
                    yield ids[-1]
            except GeneratorExit:
                if engine.changes == changes:  # else it is somebody else's by now
                    forget()
                raise
            if run.ended:
                return

    def _round(self, drafter: Drafter, k: int, ids: list[int], sampler: Sampler) -> Verdict:
        """Draft, run the target over what it has not stored yet and the drafts, and judge."""
        engine, stats = self.engine, sampler.run.stats
        counts, clock = stats.speculation, stats.now
        assert counts is not None and engine.length == len(ids) - 1
        begun, draft = clock(), nothing(engine.model)
        if k:
            draft = drafter.draft(ids, k, sampler.next(), engine.model)
        drafted = clock()
        last = torch.tensor(ids[-1:], dtype=torch.int64, device=draft.ids.device)
        with engine.timed(sampler.run):
            logits = engine.chunk(torch.cat((last, draft.ids))[None])[0]  # [k + 1, V]
        kept = len(ids)
        try:
            verdict = self._judge(logits, draft, sampler)
            kept += verdict.accepted
        finally:
            engine.shorten(kept)
        counts.passes += 1
        counts.proposed += len(draft.ids)
        counts.draft_s += drafted - begun
        counts.pass_s += clock() - drafted
        return verdict

    def _judge(self, logits: Tensor, draft: Draft, sampler: Sampler) -> Verdict:
        """What the target says in each row, as far as it counts."""
        k, at, most = len(draft.ids), sampler.position, sampler.run.params.logprobs
        position = torch.arange(at, at + k + 1, device=logits.device)
        said = verified(logits, sampler.ahead(draft.ids), position, draft.behind())
        table = said[:, None, None] if most is None else logprob_table(logits, said, most)
        agreed = int(accepted(said, draft.ids))  # waits for the device
        return Verdict(logits, k, agreed, table[: agreed + 1].tolist())


class Sampler:
    """How the tokens of one answer are sampled, in rows; made anew where what was said counts."""

    def __init__(self, engine: Engine, run: Run, prompt: list[int]) -> None:
        self.engine, self.run, self.prompt = engine, run, prompt
        self._made: dict[int, SamplingRows] = {}  # rows by their number, if they stay the same

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.prompt) + len(self.run.token_ids)

    def next(self) -> SamplingRows:
        """The next token's row, [1]."""
        if 1 in self._made:
            return self._made[1]
        run, prefix = self.run, Prefix(self.prompt, self.run.token_ids)
        row = self.engine.sampling([run.params], [run.sample], [prefix])
        if not row.counts:
            self._made[1] = row
        return row

    def ahead(self, drafts: Tensor) -> SamplingRows:
        """The rows of the next token and of those after each draft, [k + 1]."""
        rows = self._made.get(len(drafts) + 1)
        if rows is None:
            rows = self.next().ahead(drafts)
            if not rows.counts:
                self._made[len(drafts) + 1] = rows
        return rows


class Verdict(NamedTuple):
    """What a pass over drafts came to."""

    logits: Tensor  # [drafts + 1, V]
    drafts: int
    accepted: int  # of them
    table: list[list[list[float]]]  # of `logprob_table`, the rows that count: accepted + 1
