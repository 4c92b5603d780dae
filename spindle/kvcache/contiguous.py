"""ContiguousKV: one growing buffer a sequence. The first cache, and the oracle for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from spindle import kernels
from spindle.config import ModelConfig
from spindle.kvcache.index import StepIndex


class ContiguousKV:
    """Keys and values of each sequence in a buffer of its own, doubled when it is full.

    A buffer is [2, L, capacity, Hk, D]: keys and values, by layer and position. Keys are stored
    after RoPE. The cache keeps no length: the StepIndex of a step says where its tokens go, so a
    sequence is rewound by a later step that starts earlier. `release` gives a buffer back.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._buffers: dict[int, Tensor] = {}

    def view(self, index: StepIndex) -> ContiguousView:
        """Room for the step's tokens, and the two verbs on it: `write`, then `attend`."""
        for row, start, count in zip(index.rows, index.starts, index.counts, strict=True):
            self._grow(row, start + count)
        return ContiguousView(self._buffers, index)

    def fork(self, row: int, twin: int) -> None:
        """Begin a second sequence with a copy of all that the first one has written."""
        self._buffers[twin] = self._buffers[row].clone()

    def release(self, row: int) -> None:
        """Forget the sequence; a row that was never written is fine."""
        self._buffers.pop(row, None)

    def capacity(self, row: int) -> int:
        """Tokens that fit into the sequence's buffer as it is."""
        return self._buffers[row].shape[2] if row in self._buffers else 0

    def nbytes(self) -> int:
        """Bytes held, whether written or not."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _grow(self, row: int, needed: int) -> None:
        """Doubling: fewer than two copies a token on average, however long it gets."""
        held = self.capacity(row)
        if needed <= held:
            return
        c, capacity = self._config, max(needed, 2 * held, 16)
        shape = (2, c.num_layers, capacity, c.num_kv_heads, c.head_dim)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        if held:
            buffer[:, :, :held] = self._buffers[row]
        self._buffers[row] = buffer


class ContiguousView:
    """One step on a ContiguousKV: each layer writes its new keys, then attends over all."""

    def __init__(self, buffers: dict[int, Tensor], index: StepIndex) -> None:
        self._buffers, self._index = buffers, index
        self.positions = index.position  # [T]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hk, D] of this step's tokens at their positions."""
        for row, at, new in self._chunks():
            keys, values = self._buffers[row][:, layer]  # [capacity, Hk, D] each
            keys[at], values[at] = k[new], v[new]

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [T, H, D] over its own sequence up to its own position -> [T, H, D]."""
        out = torch.empty_like(q)
        for row, at, new in self._chunks():
            keys, values = self._buffers[row][:, layer, : at.stop]  # [S, Hk, D] each
            out[new] = kernels.attend(q[new], keys, values, at.start, scale)
        return out

    def _chunks(self) -> list[tuple[int, slice, slice]]:
        """(row, where in the sequence, where in this step's flat row) of each chunk."""
        index, spans, t = self._index, [], 0
        for row, start, count in zip(index.rows, index.starts, index.counts, strict=True):
            spans.append((row, slice(start, start + count), slice(t, t + count)))
            t += count
        return spans
