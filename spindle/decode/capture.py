"""Whether a step can be captured, asked of its operations, on a CPU.

A CUDA graph is what one run of a step sent to the GPU, sent again without Python: the same kernels,
at the same addresses, with the same numbers. What Python decided in that run is decided for good;
what it read from a tensor it would have had to wait for. Three ways to find that out beforehand:

    check_same(step)                   every run is the same list of operations, to the last number
    capture(step).replay()             does what a graph does, and silently what it does wrong
    check_on_fake_device(make_step)    on a GPU that is not there, whose tensors cannot be read

The third is in fake_device.py. Wrong streams, memory that the allocator reuses, a library's
workspaces: that a GPU alone shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from spindle.decode.oplog import CaptureError, Log, Seen, home_of, tensors_of, written

__all__ = ["CaptureError", "Log", "Recording", "Step", "capture", "check_same"]

Step = Callable[[], object]  # all that it reads and changes is in buffers that stay where they are


@torch.inference_mode()
def check_same(
    step: Step,
    times: int = 4,
    prepare: Callable[[int], object] | None = None,
    **names: Tensor,
) -> Log:
    """Run a step so often, and demand the same operations, shapes, numbers and buffers each time.

    `prepare(n)` comes before run n, 0 .. times - 1, and changes what is in the buffers: what does
    not change from run to run cannot be told from what is baked in. `names` are buffers to be
    called so. Returns the log of the first run. CaptureError names the first operation that a
    capture cannot have, or that is not what it was; the steps until then have been run.
    """
    first: Log | None = None
    for n in range(times):
        if prepare is not None:
            prepare(n)
        log = Log(f"run {n}", first, **({} if first else names))
        with log:
            step()
        log.check_end()
        log.forget()
        first = first or log
    assert first is not None, times
    return first


class Launch(NamedTuple):
    """An operation that was run, with its tensors."""

    func: OpOverload
    args: tuple
    kwargs: dict
    outputs: list[Tensor | None]  # None: it is an input, changed in place, or a view of one

    def run(self) -> None:
        """Do it once more, on the same memory: outputs go where they went at first."""
        made = tensors_of(self.func(*self.args, **self.kwargs))
        for kept, new in zip(self.outputs, made, strict=True):
            if kept is not None:
                kept.copy_(new)

    def timed(self) -> list[tuple[str, float]]:
        """The same; returns the operation's name, and how many seconds it took."""
        start = time.perf_counter()
        self.run()
        return [(str(self.func), time.perf_counter() - start)]


class Recording(Log):
    """A log that keeps every launch with its tensors, and can do them all again."""

    def __init__(self) -> None:
        super().__init__("the capture")
        self._calls: list[Launch] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @torch.inference_mode()
    def replay(self) -> None:
        """Every launch once more. Views need nothing: they look at the memory they looked at."""
        for launch in self._calls:
            launch.run()

    def restore(self) -> None:
        """Give the buffers the values that they had before they were first written to."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def _run(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        for tensor in written(func, args, kwargs):
            self._save(tensor)
        out = super()._run(func, args, kwargs)
        op = self.ops[-1]
        if op.kind == "launch":
            inputs = {x.memory for x in op.given if isinstance(x, Seen)}
            made = [None if self._memory(x) in inputs else x for x in tensors_of(out)]
            self._calls.append(Launch(func, args, kwargs, made))
        return out

    def _save(self, x: Tensor) -> None:
        key, storage = home_of(x)
        if x not in self._temporaries and key not in self._before:
            self._before[key] = (storage, storage.clone())


@torch.inference_mode()
def capture(step: Step) -> Recording:
    """Run a step once, and keep it for `replay`, as a CUDA graph would; no buffer is changed.

    To record is to run, but the buffers get their values back. CaptureError: the step does what
    cannot be captured. All else that a graph does wrong, a replay does wrong: a number or an
    address that was Python's at the time stays what it was.
    """
    recording = Recording()
    try:
        with recording:
            step()
    finally:
        recording.restore()
    return recording
