"""The native CPU forms, from Python: pointers and lengths into csrc/cpu.cpp.

Callers have checked device, dtype and shape; nothing is checked here twice. Each call can be noted
(`noting`), to be done again without Python (program.py).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from spindle.kernels import build
from spindle.kernels.room import Room

PANEL = 32  # outputs side by side, as in cpu.cpp
_POINTER, _LENGTH = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {  # of each op: pointers, lengths, floats; then the number of threads
    "gelu_tanh": (2, 2, 0),
    "int8_linear": (5, 3, 0),
    "int8_pack": (2, 2, 0),
    "layer_norm": (5, 2, 1),
    "linear": (4, 3, 0),
    "pack": (2, 2, 0),
    "paged_attend": (6, 8, 1),
    "read": (2, 1, 0),
    "rms_norm": (4, 2, 1),
    "rope": (4, 8, 0),
    "silu_mul": (2, 2, 0),
    "write_kv": (3, 4, 0),
}
_FAILS = ("write_kv",)  # those that give 1 for what they have not done


class Call(NamedTuple):
    """A call of a native form: its name and arguments, but for the number of threads."""

    name: str
    pointers: tuple[int | None, ...]
    numbers: tuple[int | float, ...]


class _Notes(threading.local):
    calls: list[Call] | None = None


_notes = _Notes()  # of each thread its own: another one's engine may be at work


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled csrc/cpu.cpp with its parameters declared; None where there is none."""
    found = build.library("cpu")
    if found is not None:
        for name, (pointers, lengths, floats) in _ARGUMENTS.items():
            op = getattr(found, f"spindle_{name}")
            parts = [_POINTER] * pointers + [_LENGTH] * lengths + [ctypes.c_float] * floats
            op.argtypes = [*parts, ctypes.c_int]
            op.restype = ctypes.c_int if name in _FAILS else None
        found.spindle_lanes.argtypes, found.spindle_lanes.restype = [], _LENGTH
        found.spindle_number.argtypes, found.spindle_number.restype = [ctypes.c_char_p], _LENGTH
        found.spindle_run.argtypes = [_POINTER, _LENGTH, ctypes.c_int, _POINTER]
        found.spindle_run.restype = _LENGTH
    return found


@contextmanager
def noting() -> Iterator[list[Call]]:
    """The native calls that this thread makes in the block, in order, as they are made."""
    outer, _notes.calls = _notes.calls, []
    try:
        yield _notes.calls
    finally:
        _notes.calls = outer


def _call(name: str, pointers: tuple[int | None, ...], *numbers: int | float) -> int | None:
    lib = library()
    assert lib is not None
    if _notes.calls is not None:
        _notes.calls.append(Call(name, pointers, numbers))
    return getattr(lib, f"spindle_{name}")(*pointers, *numbers, torch.get_num_threads())


def available() -> bool:
    """Whether the native forms are here; the first call may compile them, a second or three."""
    return library() is not None


def lanes() -> int:
    """How many numbers a vector has here, where the native forms are: sums go by that."""
    lib = library()
    assert lib is not None
    return lib.spindle_lanes()


def why_not() -> str:
    """Why they are not here, in words; "" if they are."""
    return "" if available() else build.why_not("cpu") or ""


def takes(x: Tensor) -> bool:
    """Whether the native forms are for this tensor: float32 on a CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and available()


def panels_for(N: int, K: int, dtype: torch.dtype, room: Room | None = None) -> Tensor:
    """Where a weight [N, K] is to lie in panels [ceil(N / 32), K, 32]; uninitialised."""
    shape = (-(-N // PANEL), K, PANEL)
    return torch.empty(shape, dtype=dtype) if room is None else room.empty(shape, dtype)


def to_panels(weight: Tensor, room: Room | None = None) -> Tensor:
    """weight [N, K] of float32 or int8 -> its panels, a copy, in a room or by themselves."""
    N, K = weight.shape
    weight, panels = weight.contiguous(), panels_for(N, K, weight.dtype, room)
    form = "int8_pack" if weight.dtype == torch.int8 else "pack"
    _call(form, (weight.data_ptr(), panels.data_ptr()), N, K)
    return panels


def from_panels(panels: Tensor, rows: int) -> Tensor:
    """panels -> weight [N, K], the way back."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:rows]


def linear(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x [T, K] times a weight [N, K] in panels, transposed, plus bias [N] -> [T, N]."""
    x = x.contiguous()
    T, K = x.shape
    y = x.new_empty(T, outputs)
    _call("linear", _pointers(x, panels, bias, y), T, K, outputs)
    return y


def int8_linear(x: Tensor, panels: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for integers in panels; output n's sum is times scale [N] before the bias."""
    x = x.contiguous()
    (T, K), N = x.shape, scale.shape[0]
    y = x.new_empty(T, N)
    _call("int8_linear", _pointers(x, panels, scale, bias, y), T, K, N)
    return y


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The twin's arguments and result, for contiguous tensors; rows of q may lie apart."""
    (T, H, D), (_, P, Hk, _), (R, B) = q.shape, keys.shape, tables.shape
    out = q.new_empty(T, H, D)
    pointers = _pointers(q, keys, values, tables, lengths, out)
    _call("paged_attend", pointers, T, T // max(R, 1), H, Hk, D, P, B, q.stride(0), scale)
    return out


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of contiguous x [..., E]; with a residual, x is added to it, in place, and it is."""
    out = torch.empty_like(x)
    E = x.shape[-1]
    _call("rms_norm", _pointers(x, residual, weight, out), x.numel() // E, E, eps)
    return out


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Layer norm of contiguous x [..., E]; with a residual, as `rms_norm`."""
    out = torch.empty_like(x)
    E = x.shape[-1]
    _call("layer_norm", _pointers(x, residual, weight, bias, out), x.numel() // E, E, eps)
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The twin's arguments and result; rows and heads of q and k may lie apart."""
    T, H, D = q.shape
    strides = (*q.stride()[:2], *k.stride()[:2])
    _call("rope", _pointers(q, k, cos, sin), T, H, k.shape[1], D, *strides)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The twin's result for contiguous gate_up [T, 2F]."""
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(T, F)
    _call("silu_mul", _pointers(gate_up, out), T, F)
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """The twin's result for contiguous x [T, F]."""
    out = torch.empty_like(x)
    _call("gelu_tanh", _pointers(x, out), *x.shape)
    return out


def write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """The twin's arguments and effect; rows of `new` may lie apart. IndexError: no such slot."""
    T, Hk, D = new.shape
    width = Hk * D
    sizes = (T, cache.numel() // width, width, new.stride(0))
    if _call("write_kv", _pointers(cache, slots, new), *sizes):
        raise IndexError(f"write_kv: slots {slots.tolist()}; expected 0 to {sizes[1] - 1}")


def read(x: Tensor) -> float:
    """The sum of a contiguous float32 tensor, as fast as memory gives it: to measure that."""
    out = x.new_empty(1)
    _call("read", _pointers(x, out), x.numel())
    return out.item()


def _pointers(*tensors: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if x is None else x.data_ptr() for x in tensors)
