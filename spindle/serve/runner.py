"""Runner: a Plan becomes flat tensors, goes through the model, and comes back as token ids."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from spindle.decode.drafters import Draft
from spindle.decode.logprobs import TokenLogprobs, logprob_table, token_logprobs
from spindle.decode.sampling import SamplingRows, sample
from spindle.decode.speculative import verified
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.serve.drafting import Drafting, Drawn, Seconds
from spindle.serve.passes import Passes
from spindle.serve.recorded import Next, RecordedDecodes, sampling_rows
from spindle.serve.request import Request
from spindle.serve.scheduler import Chunk, Plan

Sampled = tuple[int, Next]  # from which chunk, whose token


@dataclass(frozen=True)
class Output:
    """What a chunk sampled: an id for each answer that goes on from it, -1 where none could be.

    With drafts, an id for each that was accepted, and the one that follows.
    """

    ids: list[int]
    logprobs: list[TokenLogprobs | None]
    candidates: list[tuple[int, float]] = field(default_factory=list)  # of a beam: (id, logprob)


class Runner:
    """Carries out plans on one model over one paged cache; it decides nothing.

    `steps` counts those that were run, `replayed` those of them that a recorder had recorded.
    `seconds`: of the last one.
    """

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        recorded: RecordedDecodes | None = None,
        drafting: Drafting | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.model, self.kv, self.recorded, self.drafting = model, kv, recorded, drafting
        self._passes = Passes(model, kv, batch_invariant)
        self.steps = self.replayed = 0
        self.seconds = Seconds()

    def move(self, plan: Plan) -> None:
        """Do what the plan's tables take for done: blocks are swapped out, swapped in, copied."""
        for kv in (self.kv, *([] if self.drafting is None else self.drafting.caches)):
            kv.swap_out(plan.swap_out)
            kv.swap_in(plan.swap_in)
            kv.copy(plan.copies)

    def run(self, plan: Plan) -> list[Output]:
        """The plan's pass, after its moves; one output a chunk, empty where nothing is sampled."""
        chunks, outputs = plan.chunks, [Output([], []) for _ in plan.chunks]
        begun = time.perf_counter()
        drawn = {} if self.drafting is None else self.drafting.draft(chunks)
        rows = [(n, token) for n, c in enumerate(chunks) if c.samples for token in _samples(c)]
        between = time.perf_counter()
        self.steps += 1
        if self.recorded is not None and self._are_decodes(chunks, rows):
            logits, tokens = self.recorded.run(chunks, [token for _, token in rows])
            self.replayed += 1
        else:
            hidden = self._pass(chunks)
            if not rows:
                return outputs
            logits, tokens = self._draw(chunks, rows, hidden)
        if drawn:
            tokens = self._judge(logits, tokens, rows, drawn)
        self._give(outputs, chunks, rows, logits, tokens)
        guessed_s = 0.0 if self.drafting is None else self.drafting.guessed_s()
        self.seconds = Seconds(guessed_s + between - begun, time.perf_counter() - between)
        return outputs

    def _are_decodes(self, chunks: tuple[Chunk, ...], rows: list[Sampled]) -> bool:
        """Whether one answer goes on from each token of each chunk, and there is a bucket."""
        single = all(c.count == 1 + c.drafts and not c.filler for c in chunks)
        own = all(token.sample == token.sequence.sample for _, token in rows)
        assert self.recorded is not None
        whole = single and own and len(rows) == sum(c.count for c in chunks)
        return whole and self.recorded.takes(len(rows))

    def _pass(self, chunks: tuple[Chunk, ...]) -> Tensor:
        """All tokens of the chunks through the model -> hidden [T, E]."""
        spans = [(n, c.start, c.count) for n, c in enumerate(chunks)]
        ids = [i for c in chunks for i in c.ids]
        return self._passes.hidden(ids, spans, [chunk.sequence.table for chunk in chunks])

    def _draw(
        self, chunks: tuple[Chunk, ...], rows: list[Sampled], hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the rows from which something follows, logits [R, V] and tokens [R].

        rows: (chunk, token), as many for a chunk as answers begin there, or one for each draft and
        one more. The logits of fillers are computed behind them, and not looked at: a padded batch
        has them too.
        """
        ends = list(accumulate(chunk.count for chunk in chunks))
        fillers = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.filler]
        last = [*(ends[n] - 1 - chunks[n].drafts + token.drafts for n, token in rows), *fillers]
        logits = self._passes.logits(hidden[last])[: len(rows)]  # [R, V]
        tokens = [token for _, token in rows]
        sampling = sampling_rows(self.model, tokens)
        position = torch.tensor([token.position for token in tokens], device=logits.device)
        return logits, torch.cat(self._passes.each(sample, logits, sampling, position))

    def _judge(self, logits: Tensor, tokens: Tensor, rows: list[Sampled], drawn: Drawn) -> Tensor:
        """The tokens [R], those where a draft was drawn as its acceptance rule has it."""
        which = [n for n, (_, token) in enumerate(rows) if token.sequence in drawn]
        its, at = [rows[n][1] for n in which], torch.tensor(which, device=logits.device)
        position = torch.tensor([token.position for token in its], device=logits.device)
        sampling = sampling_rows(self.model, its)
        draft = Draft.together(draft.behind() for draft in drawn.values())
        tokens = tokens.clone()
        judge = self._passes.each(_verified, logits[at], sampling, position, *draft)
        tokens[at] = torch.cat(judge)
        return tokens

    def _give(
        self,
        outputs: list[Output],
        chunks: tuple[Chunk, ...],
        rows: list[Sampled],
        logits: Tensor,
        tokens: Tensor,
    ) -> None:
        """Read the tokens, with what log-probabilities are asked for, into the outputs.

        What follows a draft that was rejected is of no account.
        """
        wanted = [_logprobs(chunks[n].sequence.request) for n, _ in rows]
        most = max((k for k in wanted if k is not None), default=None)
        table = tokens[:, None, None]
        if most is not None:
            of_rows = partial(logprob_table, k=most)
            table = torch.cat(self._passes.each(of_rows, logits, tokens))
        for (n, its), k, row in zip(rows, wanted, table.tolist(), strict=True):
            token, request = int(row[0][0]), its.sequence.request
            if its.drafts and outputs[n].ids != its.sequence.drafts[: its.drafts]:
                continue
            if request.beam is not None and token >= 0:
                its = row[1 : request.beam.considered + 1]
                outputs[n].candidates.extend((int(i), logprob) for i, logprob, _ in its)
                continue
            outputs[n].ids.append(token)
            outputs[n].logprobs.append(None if k is None else token_logprobs(row[: k + 1]))


def _verified(
    logits: Tensor, rows: SamplingRows, position: Tensor, ids: Tensor, probs: Tensor | None
) -> Tensor:
    return verified(logits, rows, position, Draft(ids, probs))


def _logprobs(request: Request) -> int | None:
    """How many likeliest tokens its rows need the logprobs of, besides the sampled one."""
    if request.beam is not None:
        return request.beam.considered
    if request.params.selects:
        return request.params.logprobs or 0
    return request.params.logprobs


def _samples(chunk: Chunk) -> list[Next]:
    """The tokens that follow a chunk: of all answers at the end of a prompt, else of its own.

    Its own is the next one, and one after each draft.
    """
    sequence = chunk.sequence
    if sequence.new_tokens == 0 and len(sequence.request.sequences) == 1:
        return [Next(sequence, sample) for sample in range(sequence.request.params.samples)]
    return [Next(sequence, sequence.sample, drafts) for drafts in range(chunk.drafts + 1)]
