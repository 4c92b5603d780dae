"""A step on a GPU that is not there: its tensors have shapes and a device, and no values.

Where host and device are one, `.cpu()` and `.tolist()` leave no trace; here they have nothing to
read. Torch's fake tensors do it, in builds without CUDA too, but for a few methods that ask for the
device's driver on the way: indices, above all. These are done by the operations behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from spindle.decode.capture import CaptureError, Log, Step, check_same

aten = torch.ops.aten
OPERATIONS = {Tensor.copy_: aten.copy_, Tensor.nonzero: aten.nonzero, torch.nonzero: aten.nonzero}
OPERATIONS |= dict.fromkeys((Tensor.__int__, Tensor.__float__, Tensor.__index__), aten.item)


@torch.inference_mode()
def check_on_fake_device(
    make_step: Callable[[str], Step], times: int = 2, device: str = "cuda:0"
) -> Log:
    """`check_same` of `make_step(device)` on tensors that have shapes and a device, but no values.

    CaptureError: something brings values to the host, or mixes devices. The step must be made by
    `make_step`, whatever it needs included; the device need not exist.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Bindings():
        step = make_step(device)
        try:
            return check_same(step, times)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise CaptureError(f"on {device}, which cannot be read: {error}") from error


class _Bindings(TorchFunctionMode):
    """Methods whose binding asks for the device's driver, as operations that do not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _get(*args)
        if func is Tensor.__setitem__:
            return _set(*args)
        return OPERATIONS.get(func, func)(*args, **(kwargs or {}))


def _get(x: Tensor, index: object) -> Tensor:
    view, tensors = _indexed(x, index)
    return aten.index(view, tensors) if tensors else view


def _set(x: Tensor, index: object, value: Tensor | float) -> None:
    view, tensors = _indexed(x, index)
    new = value if isinstance(value, Tensor) else view.new_full((), value)
    if tensors:
        aten.index_put_(view, tensors, new)
    else:
        aten.copy_(view, new)


def _indexed(x: Tensor, index: object) -> tuple[Tensor, list[Tensor | None]]:
    """The view that an index's numbers, slices and Nones make, and its tensors by dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not ... for part in parts)
    whole = [slice(None)] * (x.ndim - used)
    tensors: list[Tensor | None] = []
    for part in (each for p in parts for each in (whole if p is ... else [p])):
        dim = len(tensors)
        if isinstance(part, int):
            x = aten.select(x, dim, part)
            continue
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, slice):
            x = (
                x
                if part == slice(None)
                else aten.slice(x, dim, part.start, part.stop, part.step or 1)
            )
        elif not isinstance(part, Tensor):
            raise TypeError(f"an index of {part!r}, which has to be brought to the device first")
        tensors.append(part if isinstance(part, Tensor) else None)
    return x, tensors if any(part is not None for part in tensors) else []
