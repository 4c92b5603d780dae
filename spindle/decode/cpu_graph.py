"""A recorded step on a CPU: its native calls are done again by a loop in C++.

On a GPU the launches of a small model's step cost the host more than the work that they start, and
a CUDA graph sends them all at once. On a CPU the same holds for the small ops: what one computes is
done in a microsecond or two, and Python and torch take ten to get to it. So the step is run once
under a log that notes the native calls, and these are done again as one. What torch did between
them, torch does again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from spindle.decode.capture import Launch, Recording
from spindle.decode.oplog import home_of, tensors_of
from spindle.kernels import native
from spindle.kernels.native import Call
from spindle.kernels.program import Program, Span, place

Storages = dict[int, Any]  # by what `home_of` calls them


class CpuGraph(Recording):
    """A recording whose native calls become programs, once it is sealed.

    As in a CUDA graph, numbers and addresses stay what they were. What native calls alone write and
    read is nobody else's: it all goes into one buffer, where what is not needed any more makes room
    for what comes. So 30 layers work in the memory of one, as they do when each frees its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, _Noted] = {}  # launches that are native calls alone, by number
        self._parts: list[Program | Launch] = []
        self._held: list[object] = []  # what the programs point at

    @torch.inference_mode()
    def replay(self) -> None:
        """Every launch once more. IndexError: keys or values had no slot to go to."""
        for part in self._parts:
            part.run()

    @torch.inference_mode()
    def timed(self) -> list[tuple[str, float]]:
        """The same; returns of each operation its name and how many seconds it took."""
        return [pair for part in self._parts for pair in part.timed()]

    def seal(self) -> None:
        """Make what `replay` runs, and let go of all that the recording held besides."""
        private = self._private()
        numbers: Iterator[int]
        moved, buffer = _moved(self._noted, private)
        for is_native, numbers in groupby(range(len(self._calls)), self._noted.__contains__):
            if is_native:
                calls = [call for n in numbers for call in self._noted[n].calls]
                self._parts.append(Program(calls, moved))
            else:
                self._parts.extend(self._calls[n] for n in numbers)
        used = {key: home for its in self._noted.values() for key, home in its.storages.items()}
        self._held = [buffer, *(home for key, home in used.items() if key not in private)]
        self._calls, self._noted, self.ops = [], {}, []
        self.forget()

    def _run(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        number = len(self._calls)
        with native.noting() as calls:
            out = super()._run(func, args, kwargs)
        if calls and len(self._calls) > number:
            noted = _Noted(calls, dict(map(home_of, tensors_of((args, kwargs, out)))))
            if noted.is_whole():
                self._noted[number] = noted
        return out

    def _save(self, x: Tensor) -> None:
        """Nothing: whoever records puts the state back, and a copy of the cache would be large."""

    def _private(self) -> set[int]:
        """The temporaries that torch has no part in."""
        shared = set[int]()
        for n, launch in enumerate(self._calls):
            if n not in self._noted:
                shared |= {home_of(x)[0] for x in tensors_of([*launch[1:]])}
        used = {key for its in self._noted.values() for key in its.storages}
        return {key for key in used - shared if self._temporaries.has(key)}


class _Noted(NamedTuple):
    """The native calls of a launch, and the storages of what it was given and has made."""

    calls: Sequence[Call]
    storages: Storages

    def key_of(self, pointer: int) -> int | None:
        """Which of the storages it points into."""
        for key, storage in self.storages.items():
            if 0 <= pointer - storage.data_ptr() < storage.nbytes():
                return key
        return None

    @property
    def pointers(self) -> set[int]:
        """All that the calls point at."""
        return {pointer for call in self.calls for pointer in call.pointers if pointer}

    def is_whole(self) -> bool:
        """Whether they point at nothing else: the op may have made a copy, which is gone by now."""
        return all(self.key_of(pointer) is not None for pointer in self.pointers)


def _moved(noted: dict[int, _Noted], private: set[int]) -> tuple[dict[int, int], Tensor]:
    """Where each pointer into private storages is to point, into a buffer for all of them."""
    spans: dict[int, Span] = {}
    for n, its in noted.items():
        for key in its.storages.keys() & private:
            span = spans.setdefault(key, Span(its.storages[key].nbytes(), n, n))
            span.last = n
    buffer = torch.empty(place([*spans.values()]), dtype=torch.uint8)
    moved = {}
    for its in noted.values():
        for pointer in its.pointers:
            home = its.key_of(pointer)
            if home is not None and home in private:
                inside = pointer - its.storages[home].data_ptr()
                moved[pointer] = buffer.data_ptr() + spans[home].offset + inside
    return moved, buffer
