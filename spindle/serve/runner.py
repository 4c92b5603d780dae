"""Runner: a Plan becomes flat tensors, goes through the model, and comes back as token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from spindle.decode.logprobs import TokenLogprobs, logprob_table, token_logprobs
from spindle.decode.sampling import sample
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.serve.recorded import RecordedDecodes, sampling_rows
from spindle.serve.request import Request
from spindle.serve.scheduler import Chunk, Plan


@dataclass(frozen=True)
class Output:
    """What a chunk sampled: an id for each answer that goes on from it, -1 where none could be."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None]
    candidates: list[tuple[int, float]] = field(default_factory=list)  # of a beam: (id, logprob)


class Runner:
    """Carries out plans on one model over one paged cache; it decides nothing.

    `steps` counts those that were run, `replayed` those of them that a recorder had recorded.
    """

    def __init__(self, model: Model, kv: PagedKV, recorded: RecordedDecodes | None = None) -> None:
        self.model, self.kv, self.recorded = model, kv, recorded
        self.steps = self.replayed = 0

    def move(self, plan: Plan) -> None:
        """Do what the plan's tables take for done: blocks are swapped out, swapped in, copied."""
        self.kv.swap_out(plan.swap_out)
        self.kv.swap_in(plan.swap_in)
        self.kv.copy(plan.copies)

    def run(self, plan: Plan) -> list[Output]:
        """The plan's pass, after its moves; one output a chunk, empty where nothing is sampled."""
        chunks, outputs = plan.chunks, [Output([], []) for _ in plan.chunks]
        rows = [(n, sample) for n, c in enumerate(chunks) if c.samples for sample in _samples(c)]
        self.steps += 1
        if self.recorded is not None and self._are_decodes(chunks, rows):
            self._give(outputs, chunks, rows, *self.recorded.run(chunks))
            self.replayed += 1
            return outputs
        hidden = self._pass(chunks)
        if rows:
            self._give(outputs, chunks, rows, *self._draw(chunks, rows, hidden))
        return outputs

    def _are_decodes(self, chunks: tuple[Chunk, ...], rows: list[tuple[int, int]]) -> bool:
        """Whether each chunk is one token from which one answer goes on, and there is a bucket."""
        single = all(c.count == 1 and not c.filler for c in chunks)
        own = [(n, chunk.sequence.sample) for n, chunk in enumerate(chunks)]
        assert self.recorded is not None
        return single and rows == own and self.recorded.takes(len(chunks))

    def _pass(self, chunks: tuple[Chunk, ...]) -> torch.Tensor:
        """All tokens of the chunks through the model -> hidden [T, E]."""
        device = self.model.device
        index = StepIndex.of([(n, c.start, c.count) for n, c in enumerate(chunks)], device)
        view = self.kv.view(index, [chunk.sequence.table for chunk in chunks])
        ids = [i for c in chunks for i in c.sequence.ids[c.start : c.start + c.count]]
        return self.model(torch.tensor(ids, device=device), view)

    def _draw(
        self, chunks: tuple[Chunk, ...], rows: list[tuple[int, int]], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last row of each chunk that samples, logits [R, V] and tokens [R].

        rows: (chunk, which answer), as many for a chunk as answers begin there. The logits of
        fillers are computed behind them, and not looked at: a padded batch has them too.
        """
        ends = list(accumulate(chunk.count for chunk in chunks))
        fillers = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.filler]
        last = [*(ends[n] - 1 for n, _ in rows), *fillers]
        logits = self.model.logits(hidden[last])[: len(rows)]  # [R, V]
        sequences = [chunks[n].sequence for n, _ in rows]
        sampling = sampling_rows(self.model, sequences, [sample for _, sample in rows])
        position = [len(one.ids) for one in sequences]
        return logits, sample(logits, sampling, torch.tensor(position, device=logits.device))

    def _give(
        self,
        outputs: list[Output],
        chunks: tuple[Chunk, ...],
        rows: list[tuple[int, int]],
        logits: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Read the tokens, with what log-probabilities are asked for, into the outputs."""
        wanted = [_logprobs(chunks[n].sequence.request) for n, _ in rows]
        most = max((k for k in wanted if k is not None), default=None)
        table = tokens[:, None, None] if most is None else logprob_table(logits, tokens, most)
        for (n, _), k, row in zip(rows, wanted, table.tolist(), strict=True):
            token, request = int(row[0][0]), chunks[n].sequence.request
            if request.beam is not None and token >= 0:
                its = row[1 : request.beam.considered + 1]
                outputs[n].candidates.extend((int(i), logprob) for i, logprob, _ in its)
                continue
            outputs[n].ids.append(token)
            outputs[n].logprobs.append(None if k is None else token_logprobs(row[: k + 1]))


def _logprobs(request: Request) -> int | None:
    """How many likeliest tokens its rows need the logprobs of, besides the sampled one."""
    if request.beam is not None:
        return request.beam.considered
    if request.params.selects:
        return request.params.logprobs or 0
    return request.params.logprobs


def _samples(chunk: Chunk) -> range:
    """The answers that go on from a chunk: at the end of a prompt all of them, else its own."""
    sequence = chunk.sequence
    if sequence.new_tokens == 0 and len(sequence.request.sequences) == 1:
        return range(sequence.request.params.samples)
    return range(sequence.sample, sequence.sample + 1)
