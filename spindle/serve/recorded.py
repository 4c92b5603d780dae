"""RecordedDecodes: steps of one token a sequence, recorded a bucket of rows, then replayed."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spindle.decode.graphs import Recorder, Replay, cpu_graph
from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, sample
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.serve.request import Sequence
from spindle.serve.scheduler import Chunk

PADDING = SamplingParams(temperature=0, seed=0)  # of a row that is nobody's


STEEP = 8  # rows of a step on a CPU from which on each one more takes longer


def buckets(most: int, steep: bool = False) -> list[int]:
    """The numbers of rows that are recorded: powers of two up to `most`, and that.

    steep: from STEEP on multiples of half of that, as a row that is nobody's costs what any does.
    """
    sizes = {min(1 << n, most) for n in range(most.bit_length() + 1)}
    if steep:
        sizes = {n for n in sizes if n <= STEEP or n == most} | {*range(STEEP, most, STEEP // 2)}
    return sorted(sizes)


def sampling_rows(
    model: Model, sequences: Many[Sequence], samples: Many[int], padding: int = 0
) -> SamplingRows:
    """What each sequence's next token is drawn by, then as many rows that are nobody's.

    samples: which of its request's answers the token begins, or goes on with.
    """
    prefixes = [Prefix(one.request.prompt, one.output) for one in sequences]
    return SamplingRows.of(
        [*(one.request.params for one in sequences), *[PADDING] * padding],
        model.device,
        [*samples, *[0] * padding],
        [*prefixes, *[Prefix([])] * padding],
        model.config.eos_ids,
        model.config.vocab_size,
    )


class Row(NamedTuple):
    """Where a row of a step is: it has `token` at `position`, and sees `length` keys."""

    token: int
    position: int
    slot: int
    length: int
    table: list[int]  # blocks


def _parts(index: Tensor, B: int) -> tuple[Tensor, Tensor]:
    """An index of B rows: their four numbers, [4, B], and their tables, [B, width]."""
    return index[: 4 * B].view(4, B), index[4 * B :].view(B, -1)


class PagedStep:
    """A token for each of B rows of a paged cache: the pass, and the draw of the next one.

    All that differs from step to step is in one tensor, `index`: of each row its token, position,
    slot and length, then its block table, `width` blocks wide (`tell`). `tokens` [B] and `logits`
    [B, V] come out. A row that is nobody's has its token in the scratch block, and reads that one
    alone.
    """

    def __init__(self, model: Model, kv: PagedKV, sampling: SamplingRows, width: int) -> None:
        B = len(sampling.seed)
        self.model, self.sampling = model, sampling
        self.index = torch.zeros(B * (4 + width), dtype=torch.int64, device=model.device)
        self._host, self._tables = self.index.cpu(), [list[int]()] * B  # what was told last
        columns, tables = _parts(self.index, B)
        self._ids, positions, slots, self._lengths = columns
        self._view = kv.decode(positions, slots, tables, self._lengths)
        self.tokens = torch.zeros(B, dtype=torch.int64, device=model.device)
        V = model.config.vocab_size
        self.logits = torch.zeros(B, V, dtype=model.dtype, device=model.device)

    def tell(self, rows: Many[Row]) -> None:
        """Where its B rows are in the next step. Of a table, what was there before may stay behind.

        Most tables are what they were: only the others are written, as a list is slow to copy.
        """
        columns, tables = _parts(self._host, len(rows))
        columns.copy_(torch.tensor([row[:4] for row in rows]).t())
        for n, row in enumerate(rows):
            if row.table != self._tables[n]:
                self._tables[n] = list(row.table)
                tables[n, : len(row.table)] = torch.tensor(row.table)
        self.index.copy_(self._host, non_blocking=True)

    def run(self) -> None:
        """One step. A row from whose logits nothing can be sampled gets the token -1."""
        self.forward()
        self.draw()

    @torch.inference_mode()
    def forward(self) -> None:
        """The pass: keys and values are stored, the logits are there."""
        hidden = self.model(self._ids, self._view)  # [B, E]
        self.logits.copy_(self.model.logits(hidden))

    @torch.inference_mode()
    def draw(self) -> None:
        """The tokens that follow from the logits."""
        self.tokens.copy_(sample(self.logits, self.sampling, self._lengths))

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""
        return [self.index, self.tokens, self.logits, *self.sampling.tensors()]


class RecordedDecodes:
    """The decode steps of a batch over `PagedStep`s, each recorded when it is first needed."""

    def __init__(
        self, model: Model, kv: PagedKV, record: Recorder, max_seqs: int, max_model_len: int
    ) -> None:
        self.model, self.kv, self._record = model, kv, record
        self._on_cpu = record is cpu_graph  # which leaves the draw to be run
        self._buckets = buckets(max_seqs, steep=self._on_cpu)
        self._width = -(-max_model_len // kv.pool.block_size)
        self._steps: dict[tuple[int, ...], tuple[PagedStep, Replay]] = {}
        self._loaded: list[Sequence] = []  # whose parameters the last step has

    def takes(self, rows: int) -> bool:
        """Whether there is a bucket for as many rows."""
        return 1 <= rows <= self._buckets[-1]

    def run(self, chunks: Many[Chunk]) -> tuple[Tensor, Tensor]:
        """One token of each through the model; returns logits [R, V] and the next tokens [R].

        Both tensors are overwritten by the next such step.
        """
        R = len(chunks)
        bucket = next(size for size in self._buckets if size >= R)
        sequences = [chunk.sequence for chunk in chunks]
        if sequences != self._loaded:  # else the parameters are there: the index is all there is
            self._load(sequences, bucket)
        step, replay = self._step
        step.tell(self._rows(chunks, bucket))
        replay()
        return step.logits[:R], step.tokens[:R]

    def _load(self, sequences: list[Sequence], bucket: int) -> None:
        """Choose the step for these rows, and give it their parameters."""
        self._loaded = []
        samples, padding = [one.sample for one in sequences], bucket - len(sequences)
        sampling = sampling_rows(self.model, sequences, samples, padding)
        key = (bucket, *sampling.kind)
        if key not in self._steps:
            self._steps[key] = self._recorded(sampling)
        self._step = self._steps[key]
        self._step[0].sampling.load(sampling)
        if not sampling.counts:  # what is counted is another thing after each token
            self._loaded = sequences

    def _recorded(self, sampling: SamplingRows) -> tuple[PagedStep, Replay]:
        """A step of rows of that kind, over tensors of its own; all rows are nobody's."""
        rows = torch.arange(len(sampling.seed), device=self.model.device)
        own = replace(sampling.select(rows), fixed_shapes=not self._on_cpu)
        step = PagedStep(self.model, self.kv, own, self._width)
        step.tell(self._rows([], len(rows)))
        return step, self._record(step)

    def _rows(self, chunks: Many[Chunk], bucket: int) -> list[Row]:
        """All that the step is told: of each chunk's token, and of the rows that are nobody's."""
        P, scratch = self.kv.pool.block_size, self.kv.scratch
        rows = [Row(0, 0, scratch * P, 1, [scratch])] * bucket
        for n, chunk in enumerate(chunks):
            at, table = chunk.start, chunk.sequence.table.blocks
            slot = table[at // P] * P + at % P
            rows[n] = Row(chunk.sequence.ids[at], at, slot, at + 1, table)
        return rows
