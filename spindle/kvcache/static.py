"""StaticKV: rows of a fixed capacity, written by index. Every decode step has the same shapes.

What moves from step to step stands in one device tensor, the rows' lengths, which the caller owns.
All else follows from it in tensor ops: a step can be captured once and replayed (gpt-fast's
`input_pos` is the same idea for one row).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spindle import kernels
from spindle.config import ModelConfig
from spindle.errors import RequestError
from spindle.kernels.twins import wide


class StaticKV:
    """Keys and values [L, rows, S, Hk, D], by layer, row and position; `capacity` is S, in tokens.

    The cache keeps no length: what lies at or beyond a row's length is never read and may be NaN,
    so a row is rewound by a smaller length. Keys are stored after RoPE. Raises RequestError for no
    rows, or for rows without room.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise RequestError(f"{rows} rows of {capacity} tokens; expected at least 1 of each")
        self.rows, self.capacity = rows, capacity
        shape = (2, config.num_layers, rows, capacity, config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.empty(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.keys, self.values, strict=True))  # the same, layer by layer

    def prefill(self, row: int, start: int, count: int) -> PrefillView:
        """The two verbs on one row's tokens at `start` .. `start + count - 1`, of any number.

        RequestError, before anything is written: there is no such row, or no room in it.
        """
        if not 0 <= row < self.rows:
            raise RequestError(f"row {row}: the cache has rows 0 to {self.rows - 1}")
        self._check_row(row, start, count)
        return PrefillView(self, row, start, count)

    def decode(self, seq_lens: Tensor) -> StaticView:
        """The two verbs on one token for each row; as `chunk` with a count of 1."""
        return self.chunk(seq_lens, 1)

    def chunk(self, seq_lens: Tensor, count: int) -> StaticView:
        """The two verbs on `count` tokens on top of each row's context, for any number of steps.

        seq_lens [R], R <= rows: how many tokens each of the first R rows has stored, int64, on the
        cache's device. It is kept, read at every `begin`, and never written: the caller moves it on
        between steps, and calls `check_room` before each. TypeError: it is some other tensor.
        """
        fits = seq_lens.ndim == 1 and 1 <= len(seq_lens) <= self.rows
        if not fits or seq_lens.dtype != torch.int64 or seq_lens.device != self.keys.device:
            got = f"{seq_lens.dtype} {list(seq_lens.shape)} on {seq_lens.device}"
            want = f"torch.int64 [1 to {self.rows}] on {self.keys.device}"
            raise TypeError(f"seq_lens is {got}; expected {want}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise TypeError(f"count is {count!r}; expected a whole number of 1 or more")
        return StaticView(self, seq_lens, count)

    def check_room(self, lengths: Iterable[int], count: int = 1) -> None:
        """RequestError if a row, which has stored that many tokens, has no room for `count` more.

        The lengths are those of the rows that go on, in order, as the host knows them: nothing is
        read from the device. It belongs before every step, for a step cannot refuse.
        """
        for row, length in enumerate(lengths):
            self._check_row(row, length, count)

    def fork(self, row: int, twin: int) -> None:
        """Begin a second sequence, in row `twin`, with a copy of all that `row` has stored.

        RequestError: there is no such row.
        """
        for one in (row, twin):
            if not 0 <= one < self.rows:
                raise RequestError(f"row {one}: the cache has rows 0 to {self.rows - 1}")
        for cache in (self.keys, self.values):
            cache[:, twin] = cache[:, row]

    def nbytes(self) -> int:
        """Bytes of the rows, whether written or not."""
        return self.keys.nbytes + self.values.nbytes

    def _check_row(self, row: int, length: int, count: int) -> None:
        assert length >= 0 and count >= 1, (length, count)
        if length + count > self.capacity:
            raise RequestError(
                f"row {row} has {length} tokens and room for {self.capacity - length} more, not "
                f"for {count}: the cache's capacity is {self.capacity} tokens a row"
            )


class PrefillView:
    """A prompt, or a part of one, in one row: as many slots are read as the row has by then."""

    def __init__(self, kv: StaticKV, row: int, start: int, count: int) -> None:
        self._kv, self._row, self._start, self._stop = kv, row, start, start + count
        self.positions = torch.arange(start, self._stop, device=kv.keys.device)  # [T]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hk, D] of the tokens at their positions."""
        for cache, new in zip(self._kv.layers[layer], (k, v), strict=True):
            cache[self._row, self._start : self._stop] = new

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Causal attention of q [T, H, D] over the row -> [T, H, D]."""
        k, v = (cache[self._row, : self._stop] for cache in self._kv.layers[layer])  # [S, Hk, D]
        return kernels.attend(q, k, v, self._start, scale)


class StaticView:
    """Steps of C tokens for each of R rows, T = R * C, row by row; one object for all of them.

    `begin` opens a step: `model(ids, view.begin())`. From there to the last layer there are tensor
    ops alone, over all S slots, and no number that comes from the lengths is seen by Python.
    A row that has ended may be stepped on, full or not: it stays within its own slots.
    """

    positions: Tensor  # [T], from the first `begin` on

    def __init__(self, kv: StaticKV, seq_lens: Tensor, count: int) -> None:
        self._kv, self._seq_lens = kv, seq_lens
        R, S, device = len(seq_lens), kv.capacity, seq_lens.device
        row = torch.arange(R, device=device)[:, None]  # [R, 1]
        self._slot = torch.arange(S, device=device)  # [S]
        self._first = row * S  # [R, 1] each row's slot 0 among the slots of all rows
        self._ahead = torch.arange(count, device=device)  # [C]
        self._tables = row  # [R, 1] a row is one block of S slots
        self._in_place = kernels.attends_in_place(kv.keys, count)  # the twin would copy it

    def begin(self) -> StaticView:
        """Open a step at the lengths as they are now: its positions, slots and mask."""
        last = self._kv.capacity - 1  # only a row that is full, and has ended, is held back to it
        at = (self._seq_lens[:, None] + self._ahead).clamp(max=last)  # [R, C]
        self.positions = at.flatten()
        self._slots = (self._first + at).flatten()  # [T]
        if self._in_place:
            self._lengths = at[:, -1] + 1  # [R] what the row's last token sees
        else:
            self._hidden = self._slot > at[:, :, None]  # [R, C, S]
        return self

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hk, D] of this step's tokens in their rows' slots."""
        keys, values = self._kv.layers[layer]  # [rows, S, Hk, D]: a paged cache of blocks of S
        kernels.write_kv(keys, self._slots, k)
        kernels.write_kv(values, self._slots, v)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [T, H, D] over its own row up to its own position -> [T, H, D]."""
        keys, values = self._kv.layers[layer]
        if self._in_place:
            return kernels.paged_attend(q, keys, values, self._tables, self._lengths, scale)
        R = len(self._first)
        return attend_chunks(q, keys[:R], values[:R], self._hidden, scale)


def attend_chunks(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attention of C queries a row over that row's slots, each query with a mask of its own.

    q [R * C, H, D]; keys, values [R, S, Hk, D]; hidden [R, C, S] is True where a query may not
    look, and what is hidden from a row's last query may be NaN. The C queries of the G = H / Hk
    heads that share a key head are one matrix [C * G, D]: keys and values are read once for all
    of them (Shazeer 2019, section 3; Ainslie et al. 2023). Returns [R * C, H, D].
    """
    (R, S, Hk, D), (T, H, _), C = keys.shape, q.shape, hidden.shape[1]
    G = H // Hk
    folded = q.view(R, C, Hk, G, D).transpose(1, 2).reshape(R, Hk, C * G, D)
    scores = wide(folded) @ wide(keys).permute(0, 2, 3, 1) * scale  # [R, Hk, C * G, S]
    masked = scores.view(R, Hk, C, G, S).masked_fill(hidden[:, None, :, None], -torch.inf)
    weights = masked.softmax(dim=-1).flatten(2, 3)  # [R, Hk, C * G, S]
    beyond = hidden[:, -1, :, None, None]  # [R, S, 1, 1]
    seen = wide(values).masked_fill(beyond, 0.0).transpose(1, 2)  # a weight of 0 times NaN is NaN
    out = (weights @ seen).view(R, Hk, C, G, D).transpose(1, 2)  # [R, C, Hk, G, D]
    return out.reshape(T, H, D).to(q.dtype)
