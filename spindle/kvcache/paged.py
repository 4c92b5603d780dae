"""PagedKV: keys and values of many sequences in the blocks of one pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spindle import kernels
from spindle.config import ModelConfig
from spindle.kvcache.blocks import BlockPool, BlockTable, Copy
from spindle.kvcache.index import StepIndex


class PagedKV:
    """The tensors of a pool: keys and values [L, N, P, Hk, D], by layer, block and slot.

    A cache has no clock and owns no table: a step brings its StepIndex and the tables of its
    sequences, whose slots have been reserved. Keys are stored after RoPE. Slots that belong to no
    sequence may hold anything, NaN too. `host_blocks`: room in host memory for swapped sequences.

    Behind the pool's blocks is one more, `scratch`, which belongs to nobody: rows that only fill up
    a step of a fixed size write there. `beside`: another model's cache, as large, whose blocks it
    has: a block is the same tokens in both. `apart`: all tokens of a chunk attend as rows of their
    own, however many they are, where `paged_attend` reads keys in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        host_blocks: int = 0,
        prefix_cache: bool = True,
        beside: PagedKV | None = None,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        if beside is None:
            self.pool = BlockPool(num_blocks, block_size, prefix_cache)
            self.host = BlockPool(host_blocks, block_size, False) if host_blocks else None
        else:
            self.pool, self.host = beside.pool, beside.host
        self.scratch = num_blocks
        heads = (config.num_kv_heads, config.head_dim)
        shape = (2, config.num_layers, num_blocks + 1, block_size, *heads)
        # Not zeros: to write them takes a second a gigabyte, and the system has to find the memory.
        self.keys, self.values = torch.empty(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.keys, self.values, strict=True))  # the same, layer by layer
        there = (*shape[:2], host_blocks, *shape[3:])
        pinned = self.keys.is_cuda and host_blocks > 0  # the copy need not wait for the CPU
        self._host_keys, self._host_values = torch.empty(there, dtype=dtype, pin_memory=pinned)

    def view(self, index: StepIndex, tables: Sequence[BlockTable]) -> PagedView:
        """The two verbs on this step; `tables` are those of the index's rows, in its order."""
        return PagedView(self, index, [table.blocks for table in tables])

    def decode(
        self, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> DecodeView:
        """The two verbs on one token a row, where all of this is the caller's, on the device.

        positions, slots, lengths [R]; tables [R, B], wide enough for the longest row there will be.
        They are read when the step is run, so one view serves all steps.
        """
        return DecodeView(self, positions, slots, tables, lengths)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Do what a `reserve` asked for, before the step that writes."""
        for pairs in _at_once(list(copies)):
            source, target = torch.tensor(pairs, device=self.keys.device).unbind(1)
            for cache in (self.keys, self.values):
                kernels.copy_blocks(cache, source, target)

    def swap_out(self, copies: Iterable[Copy]) -> None:
        """Do what a `move` of tables to the host's pool asked for, before the blocks are reused."""
        self._carry(copies, (self.keys, self.values), (self._host_keys, self._host_values))

    def swap_in(self, copies: Iterable[Copy]) -> None:
        """Do what a `move` of tables to the device's pool asked for, before the step."""
        self._carry(copies, (self._host_keys, self._host_values), (self.keys, self.values))

    def nbytes(self) -> int:
        """Bytes of the pool's tensors, whoever holds the blocks."""
        return self.keys.nbytes + self.values.nbytes

    def _carry(
        self, copies: Iterable[Copy], source: Sequence[Tensor], target: Sequence[Tensor]
    ) -> None:
        pairs = list(copies)
        if not pairs:
            return
        out, into = torch.tensor(pairs).unbind(1)
        for here, there in zip(source, target, strict=True):
            there[:, into.to(there.device)] = here[:, out.to(here.device)].to(there.device)


def _at_once(copies: list[Copy]) -> list[list[Copy]]:
    """The copies in runs whose order is of no account: no block is written and then used again.

    A step may give a block back after it was copied from, and take it for another's copy.
    """
    runs: list[list[Copy]] = []
    read, written = set[int](), set[int]()
    for source, target in copies:
        if not runs or source in written or target in written or target in read:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, target))
        read.add(source)
        written.add(target)
    return runs


class DecodeView:
    """Steps of one token for each of R rows, whose places are read from tensors at every step."""

    def __init__(
        self, kv: PagedKV, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> None:
        self._kv, self.positions = kv, positions  # [R]
        self._slots, self._tables, self._lengths = slots, tables, lengths  # [R], [R, B], [R]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hk, D] of this step's tokens in their slots."""
        keys, values = self._kv.layers[layer]
        kernels.write_kv(keys, self._slots, k)
        kernels.write_kv(values, self._slots, v)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [R, H, D] over its own sequence, as far as its length -> [R, H, D]."""
        keys, values = self._kv.layers[layer]  # [N, P, Hk, D] each
        return kernels.paged_attend(q, keys, values, self._tables, self._lengths, scale)


FEW = 16  # tokens of a chunk that are read as so many rows of one table


class PagedView(DecodeView):
    """One step on a PagedKV: each layer writes its new keys, then attends over all.

    Chunks of one token are one op over the tables, whatever their number, and so are those of a few
    tokens where that op reads keys where they lie: each token sees as far as its own position. A
    longer chunk gathers its sequence's keys into a row and attends like the contiguous cache.
    `batched` False: all chunks do, which is the path that is equal to the contiguous cache bit for
    bit.
    """

    batched = True

    def __init__(self, kv: PagedKV, index: StepIndex, tables: list[list[int]]) -> None:
        self._kv, self._index, self._device = kv, index, kv.keys.device
        self.positions = index.position  # [T]
        P, starts = kv.pool.block_size, [0]
        for count in index.counts:
            starts.append(starts[-1] + count)
        self._chunks = list(zip(index.starts, index.counts, starts, tables, strict=False))
        slots = [
            table[p // P] * P + p % P
            for start, count, _, table in self._chunks
            for p in range(start, start + count)
        ]
        self._slots = torch.tensor(slots, device=self._device)  # [T], for `write`
        few = 1
        if kernels.attends_in_place(kv.keys):
            few = max(index.counts) if kv.apart else FEW
        self._decodes = [
            (p, t + p - start, table)
            for start, count, t, table in self._chunks
            if count <= few
            for p in range(start, start + count)
        ]
        self._few = few
        if self._decodes:
            self._rows, self._tables, self._lengths = self._decode_tensors()

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [T, H, D] over its own sequence up to its own position -> [T, H, D]."""
        if self.batched and len(self._decodes) == len(q):  # nothing beside them to put together
            return super().attend(layer, q, scale)
        out = torch.empty_like(q)
        if self.batched and self._decodes:
            out[self._rows] = super().attend(layer, q[self._rows], scale)
        for start, count, t, table in self._chunks:
            if count > self._few or not self.batched:
                mine = slice(t, t + count)
                k, v = (self._gather(x, table, start + count) for x in self._kv.layers[layer])
                out[mine] = kernels.attend(q[mine], k, v, start, scale)
        return out

    def _decode_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens that are rows: those of q [R], tables [R, B] ending in block 0, lengths [R]."""
        P = self._kv.pool.block_size
        lengths = [position + 1 for position, _, _ in self._decodes]
        width = max(-(-length // P) for length in lengths)
        tables = [(table + [0] * width)[:width] for _, _, table in self._decodes]
        rows = [t for _, t, _ in self._decodes]
        made = (torch.tensor(x, device=self._device) for x in (rows, tables, lengths))
        return tuple(made)  # type: ignore[return-value]

    def _gather(self, cache: Tensor, table: list[int], length: int) -> Tensor:
        """The first `length` keys or values of a sequence, [S, Hk, D], from [N, P, Hk, D]."""
        blocks = -(-length // cache.shape[1])
        found = cache[torch.tensor(table[:blocks], device=self._device)]  # [B, P, Hk, D]
        return found.flatten(0, 1)[:length]
