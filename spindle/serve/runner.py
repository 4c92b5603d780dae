"""Runner: a Plan becomes flat tensors, goes through the model, and comes back as token ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spindle.decode.logprobs import TokenLogprobs, logprob_table, token_logprobs
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, sample
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.serve.request import Request
from spindle.serve.scheduler import Chunk, Plan


@dataclass(frozen=True)
class Output:
    """What a chunk sampled: an id for each answer that goes on from it, -1 where none could be."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None]
    candidates: list[tuple[int, float]] = field(default_factory=list)  # of a beam: (id, logprob)


class Runner:
    """Carries out plans on one model over one paged cache; it decides nothing."""

    def __init__(self, model: Model, kv: PagedKV) -> None:
        self.model, self.kv = model, kv

    def move(self, plan: Plan) -> None:
        """Do what the plan's tables take for done: blocks are swapped out, swapped in, copied."""
        self.kv.swap_out(plan.swap_out)
        self.kv.swap_in(plan.swap_in)
        self.kv.copy(plan.copies)

    def run(self, plan: Plan) -> list[Output]:
        """The plan's pass, after its moves; one output a chunk, empty where nothing is sampled."""
        chunks, device = plan.chunks, self.model.device
        index = StepIndex.of([(n, c.start, c.count) for n, c in enumerate(chunks)], device)
        view = self.kv.view(index, [chunk.sequence.table for chunk in chunks])
        ids = [i for c in chunks for i in c.sequence.ids[c.start : c.start + c.count]]
        hidden = self.model(torch.tensor(ids, device=device), view)  # [T, E]
        return self._sample(chunks, hidden)

    def _sample(self, chunks: tuple[Chunk, ...], hidden: torch.Tensor) -> list[Output]:
        """Logits of the last row of each chunk that samples, once for each answer it begins.

        Those of fillers are computed behind them, and not looked at: a padded batch has them too.
        """
        ends, at = [], -1
        for chunk in chunks:
            at += chunk.count
            ends.append(at)
        rows = [
            (n, sample)
            for n, chunk in enumerate(chunks)
            if chunk.samples
            for sample in _samples(chunk)
        ]
        outputs = [Output([], []) for _ in chunks]
        if not rows:
            return outputs
        sampling = self._sampling_rows([chunks[n] for n, _ in rows], [s for _, s in rows])
        fillers = [end for chunk, end in zip(chunks, ends, strict=True) if chunk.filler]
        last = [*(ends[n] for n, _ in rows), *fillers]
        logits = self.model.logits(hidden[last])[: len(rows)]  # [R, V]
        position = [len(chunks[n].sequence.ids) for n, _ in rows]
        tokens = sample(logits, sampling, torch.tensor(position, device=logits.device))  # [R]
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
        return outputs

    def _sampling_rows(self, chunks: list[Chunk], samples: list[int]) -> SamplingRows:
        sequences = [chunk.sequence for chunk in chunks]
        config = self.model.config
        return SamplingRows.of(
            [one.request.params for one in sequences],
            self.model.device,
            samples,
            [Prefix(one.request.prompt, one.output) for one in sequences],
            config.eos_ids,
            config.vocab_size,
        )


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
