"""Room for weights on a CPU, in large pages where the system gives them.

Memory is looked up page by page. A step reads every page of every weight, and with the usual 4 kB a
page that is a hundred thousand lookups for 500 MB, each of which can hold up the bytes behind it.
Linux has pages of 2 MB for whoever asks (madvise), aligned and in one piece. So weights are given
parts of larger pieces. Elsewhere, and where there is no such page to be had, nothing is different.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

PAGE = 2 * 2**20  # bytes of a large page
PIECE = 16 * PAGE  # bytes that are asked for at once
LINE = 64  # bytes of a cache line, to which each tensor is aligned
MADV_HUGEPAGE = 14  # of Linux


class Room:
    """Uninitialised tensors on the CPU: parts of pieces that live as long as any part of them."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of that shape."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > PIECE // 4:  # a piece of its own, and what is left of the other stays
            return large(nbytes)[:nbytes].view(dtype).view(shape)
        if self._used + nbytes > len(self._piece):
            self._piece, self._used = large(PIECE), 0
        part = self._piece[self._used : self._used + nbytes]
        self._used += -(-nbytes // LINE) * LINE
        return part.view(dtype).view(shape)


def large(nbytes: int) -> Tensor:
    """At least so many bytes [n], uninitialised, in large pages where there are any."""
    size = -(-nbytes // PAGE) * PAGE
    around = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -around.data_ptr() % PAGE
    piece = around[start : start + size]
    madvise = _madvise()
    if madvise is not None:
        madvise(piece.data_ptr(), size, MADV_HUGEPAGE)  # a wish: what it returns is of no account
    return piece


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
