"""A list of native calls as one: what Python called one by one, a loop in C++ calls again.

A call is a few numbers: which op, where its tensors lie, how large they are. They are noted once
(`native.noting`) and done again without Python or torch between them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spindle.kernels import native
from spindle.kernels.native import Call

CACHE_LINE = 64  # bytes


@dataclass
class Span:
    """Memory in use from the call `first` to the call `last`; once placed, from `offset` on."""

    nbytes: int
    first: int
    last: int
    offset: int = 0


def place(spans: Sequence[Span]) -> int:
    """Give each span an offset at which it overlaps none that is in use with it; returns the sum.

    In the order of first use each takes the lowest gap that is large enough (first fit: Knuth 1997,
    section 2.5). Changes the spans.
    """
    nbytes, live = 0, list[Span]()
    for span in sorted(spans, key=lambda one: one.first):
        live = sorted((one for one in live if one.last >= span.first), key=lambda one: one.offset)
        span.offset = 0
        for other in live:
            if span.offset + span.nbytes <= other.offset:
                break
            span.offset = max(span.offset, _aligned(other.offset + other.nbytes))
        live.append(span)
        nbytes = max(nbytes, span.offset + span.nbytes)
    return nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


class Program:
    """Native calls, one after another, as one. What they point at is the caller's to keep."""

    def __init__(self, calls: Sequence[Call], moved: Mapping[int, int] | None = None) -> None:
        """moved: where pointers of the calls are to point instead."""
        lib = native.library()
        assert lib is not None
        self.names = [call.name for call in calls]
        self._run = lib.spindle_run
        words = [word for call in calls for word in _words(lib, call, moved or {})]
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._seconds = (ctypes.c_double * len(calls))()

    def run(self) -> None:
        """Do all of them, on as many threads as torch has now. IndexError: no such slot."""
        self._check(self._run(self._words, len(self.names), torch.get_num_threads(), None))

    def timed(self) -> list[tuple[str, float]]:
        """The same; returns the name of each call, and how many seconds it took."""
        threads = torch.get_num_threads()
        self._check(self._run(self._words, len(self.names), threads, self._seconds))
        return list(zip(self.names, self._seconds, strict=True))

    def _check(self, failed: int) -> None:
        if failed:
            name = self.names[failed - 1]
            raise IndexError(f"call {failed} of {len(self.names)}, {name}: there is no such slot")


def _words(lib: ctypes.CDLL, call: Call, moved: Mapping[int, int]) -> list[int]:
    """A call as spindle_run reads it: the op's number, how many words follow, and these."""
    number = lib.spindle_number(call.name.encode())
    if number < 0:
        raise ValueError(f"{call.name} cannot be in a program")
    pointers = [moved.get(pointer, pointer) if pointer else 0 for pointer in call.pointers]
    threads = 0  # filled in when it runs
    arguments = [*pointers, *map(_word, call.numbers), threads]
    return [number, len(arguments), *arguments]


def _word(number: int | float) -> int:
    """A number as the 64 bits that it is read from."""
    return struct.unpack("q", struct.pack("d", number))[0] if isinstance(number, float) else number
