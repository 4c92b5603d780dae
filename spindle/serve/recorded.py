"""RecordedDecodes: steps of a few tokens a sequence, recorded a bucket of rows, then replayed.

Tokens of one sequence, its last one and the drafts after it, are rows that share a table: all are
stored before one is looked at, and each sees as far as its own position.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
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
NOTHING = Prefix([])


STEEP = 8  # rows of a step on a CPU from which on each one more takes longer
KEPT_BYTES = 128 * 2**20  # of the recorded steps of an LLM, 4 bytes a row and id in float32
LARGEST = 64  # rows of a recorded step with drafts: beyond, what is saved is a small part


def buckets(most: int, steep: bool = False) -> list[int]:
    """The numbers of rows that are recorded: powers of two up to `most`, and that.

    steep: from STEEP on multiples of half of that, as a row that is nobody's costs what any does.
    """
    sizes = {min(1 << n, most) for n in range(most.bit_length() + 1)}
    if steep:
        sizes = {n for n in sizes if n <= STEEP or n == most} | {*range(STEEP, most, STEEP // 2)}
    return sorted(sizes)


class Next(NamedTuple):
    """A token to be drawn: of a sequence, after so many of its drafts.

    `sample`: which of its request's answers the token begins, or goes on with.
    """

    sequence: Sequence
    sample: int
    drafts: int = 0

    @property
    def position(self) -> int:
        """Where the token will stand."""
        return len(self.sequence.ids) + self.drafts

    @property
    def prefix(self) -> Prefix:
        """What stands before it."""
        one = self.sequence
        return Prefix(one.request.prompt, one.output + one.drafts[: self.drafts])


def sampling_rows(model: Model, tokens: Many[Next], padding: int = 0) -> SamplingRows:
    """What each token is drawn by, then as many rows that are nobody's."""
    params = [one.sequence.request.params for one in tokens]
    counting = any(p.penalises or p.min_tokens for p in params)
    prefixes = [one.prefix if counting else NOTHING for one in tokens]
    return SamplingRows.of(
        [*params, *[PADDING] * padding],
        model.device,
        [*(one.sample for one in tokens), *[0] * padding],
        [*prefixes, *[NOTHING] * padding],
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

    @staticmethod
    def of(token: int, at: int, table: list[int], block_size: int) -> Row:
        """A token at position `at` of the sequence of this table; it sees all up to itself."""
        slot = table[at // block_size] * block_size + at % block_size
        return Row(token, at, slot, at + 1, table)


def _parts(index: Any, B: int) -> tuple[Any, Any]:
    """Views of an index of B rows: their four numbers, [4, B], and their tables, [B, width]."""
    return index[: 4 * B].reshape(4, B), index[4 * B :].reshape(B, -1)


class PagedStep:
    """A token for each of B rows of a paged cache: the pass, and the draw of what follows each.

    All that differs from step to step is in one tensor, `index`: of each row its token, position,
    slot and length, then its block table, `width` blocks wide (`tell`). `tokens` [B] and `logits`
    [B, V] come out. A row that is nobody's has its token in the scratch block, and reads that one
    alone. sampling: how each row draws; None: nothing is drawn, the logits are wanted. logits: rows
    of which the first B are this step's while it runs; by default its own.
    """

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        B: int,
        sampling: SamplingRows | None,
        width: int,
        logits: Tensor | None = None,
    ) -> None:
        self.model, self.sampling = model, sampling
        host = np.zeros(B * (4 + width), np.int64)  # quicker to write a few numbers to
        self._host = torch.from_numpy(host)
        self.index = self._host.to(model.device)  # on a CPU the same memory
        self._numbers, self._tables = _parts(host, B)
        self._told = [list[int]()] * B  # the tables, as they were told last
        columns, tables = _parts(self.index, B)
        self._ids, positions, slots, self._lengths = columns
        self._view = kv.decode(positions, slots, tables, self._lengths)
        self.tokens = torch.zeros(B, dtype=torch.int64, device=model.device)
        self.logits = empty_logits(model, B) if logits is None else logits[:B]

    def tell(self, rows: Many[Row]) -> None:
        """Where its B rows are in the next step. Of a table, what was there before may stay behind.

        Most tables are what they were: only the others are written, as a list is slow to copy.
        """
        self._numbers[:] = [*zip(*rows, strict=True)][:4]
        for n, row in enumerate(rows):
            if row.table != self._told[n]:
                self._tables[n, : len(row.table)] = row.table
                self._told[n] = list(row.table)  # now, and not before: we may be broken off
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
        if self.sampling is not None:
            self.tokens.copy_(sample(self.logits, self.sampling, self._lengths))

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""
        drawn_by = [] if self.sampling is None else self.sampling.tensors()
        return [self.index, self.tokens, self.logits, *drawn_by]


def empty_logits(model: Model, rows: int) -> Tensor:
    """Where logits [rows, V] will be."""
    return torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=model.device)


class RecordedDecodes:
    """The decode steps of a batch over `PagedStep`s, each recorded when it is first needed.

    They share one place for logits. What else a recorded step keeps is as large, the head's output:
    so of many only those that were used last are kept, KEPT_BYTES of such rows.
    """

    def __init__(
        self, model: Model, kv: PagedKV, record: Recorder, max_rows: int, max_model_len: int
    ) -> None:
        self.model, self.kv, self._record = model, kv, record
        self._on_cpu = record is cpu_graph  # which leaves the draw to be run
        self._buckets = buckets(max_rows, steep=self._on_cpu)
        self._width = -(-max_model_len // kv.pool.block_size)
        self._logits = empty_logits(model, self._buckets[-1])
        self._steps: dict[tuple[int, ...], tuple[PagedStep, Replay]] = {}  # the last used last
        self._loaded: list[Next] = []  # whose parameters the last step has

    def takes(self, rows: int) -> bool:
        """Whether there is a bucket for as many rows."""
        return 1 <= rows <= self._buckets[-1]

    def run(self, chunks: Many[Chunk], tokens: list[Next]) -> tuple[Tensor, Tensor]:
        """All tokens of the chunks through the model; what follows each, and its logits [R, V].

        tokens: of whom those that follow are. Both tensors are overwritten by the next such step.
        """
        bucket = self._bucket(len(tokens))
        if tokens != self._loaded:  # else the parameters are there: the index is all there is
            self._load(tokens, bucket)
        step = self._replay(self._rows(chunks, bucket))
        return step.logits[: len(tokens)], step.tokens[: len(tokens)]

    def logits(self, rows: list[Row]) -> Tensor:
        """A pass over these rows -> [R, V], overwritten by the next one; nothing is drawn."""
        bucket = self._bucket(len(rows))
        self._loaded = []
        self._choose((bucket,), bucket, None)
        step = self._replay(rows + [self._nobody()] * (bucket - len(rows)))
        return step.logits[: len(rows)]

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _replay(self, rows: list[Row]) -> PagedStep:
        step, replay = self._step
        step.tell(rows)
        replay()
        return step

    def _load(self, tokens: list[Next], bucket: int) -> None:
        """Choose the step for these rows, and give it their parameters."""
        self._loaded = []
        sampling = sampling_rows(self.model, tokens, bucket - len(tokens))
        step = self._choose((bucket, *sampling.kind), bucket, sampling)
        assert step.sampling is not None
        step.sampling.load(sampling)
        if not sampling.counts:  # what is counted is another thing after each token
            self._loaded = tokens

    def _choose(self, key: tuple[int, ...], B: int, sampling: SamplingRows | None) -> PagedStep:
        """The step of that kind, recorded with rows that are nobody's if there is none."""
        made = self._steps.pop(key, None)
        if made is None:
            self._let_go(B)
            if sampling is not None:
                rows = torch.arange(B, device=self.model.device)
                sampling = replace(sampling.select(rows), fixed_shapes=not self._on_cpu)
            step = PagedStep(self.model, self.kv, B, sampling, self._width, self._logits)
            step.tell(self._rows([], B))
            made = step, self._record(step)
        self._step = self._steps[key] = made
        return made[0]

    def _let_go(self, more: int) -> None:
        """Forget the recorded steps that were used longest ago: so many rows are to come."""
        row_bytes = self._logits[0].nbytes
        rows = more + sum(len(step.tokens) for step, _ in self._steps.values())
        while self._steps and rows * row_bytes > KEPT_BYTES:
            step, _ = self._steps.pop(next(iter(self._steps)))
            rows -= len(step.tokens)

    def _rows(self, chunks: Many[Chunk], bucket: int) -> list[Row]:
        """All that the step is told: of each chunk's tokens, and of the rows that are nobody's."""
        P, rows = self.kv.pool.block_size, list[Row]()
        for chunk in chunks:
            table = chunk.sequence.table.blocks
            rows += [Row.of(i, at, table, P) for at, i in enumerate(chunk.ids, chunk.start)]
        return rows + [self._nobody()] * (bucket - len(rows))

    def _nobody(self) -> Row:
        """A row that only fills up a bucket."""
        return Row.of(0, 0, [self.kv.scratch], self.kv.pool.block_size)
