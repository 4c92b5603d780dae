"""The native CPU forms, from Python: pointers and lengths into csrc/cpu.cpp.

Callers have checked device, dtype and shape; nothing is checked here twice.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from spindle.kernels import build

PANEL = 32  # outputs side by side, as in cpu.cpp
_POINTER, _LENGTH = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = build.library("cpu")
    if found is not None:
        found.spindle_linear.argtypes = [_POINTER] * 4 + [_LENGTH] * 3 + [ctypes.c_int]
        found.spindle_pack.argtypes = [_POINTER] * 2 + [_LENGTH] * 2 + [ctypes.c_int]
        found.spindle_paged_attend.argtypes = (
            [_POINTER] * 6 + [_LENGTH] * 6 + [ctypes.c_float, ctypes.c_int]
        )
        for op in (found.spindle_linear, found.spindle_pack, found.spindle_paged_attend):
            op.restype = None
    return found


def available() -> bool:
    """Whether the native forms are here; the first call may compile them, a second or three."""
    return _library() is not None


def to_panels(weight: Tensor) -> Tensor:
    """weight [N, K] float32 -> panels [ceil(N / 32), K, 32], a copy."""
    N, K = weight.shape
    weight = weight.contiguous()
    panels = weight.new_empty(-(-N // PANEL), K, PANEL)
    lib = _library()
    assert lib is not None
    lib.spindle_pack(weight.data_ptr(), panels.data_ptr(), N, K, torch.get_num_threads())
    return panels


def from_panels(panels: Tensor, rows: int) -> Tensor:
    """panels -> weight [N, K], the way back."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:rows]


def linear(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x [T, K] times a weight [N, K] in panels, transposed, plus bias [N] -> [T, N]."""
    x = x.contiguous()
    T, K = x.shape
    y = x.new_empty(T, outputs)
    add = None if bias is None else bias.data_ptr()
    lib = _library()
    assert lib is not None
    threads = torch.get_num_threads()
    lib.spindle_linear(x.data_ptr(), panels.data_ptr(), add, y.data_ptr(), T, K, outputs, threads)
    return y


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The twin's arguments and result, for contiguous float32 tensors on the CPU."""
    R, H, D = q.shape
    _, P, Hk, _ = keys.shape
    out = torch.empty_like(q)
    lib = _library()
    assert lib is not None
    pointers = (tensor.data_ptr() for tensor in (q, keys, values, tables, lengths, out))
    threads = torch.get_num_threads()
    lib.spindle_paged_attend(*pointers, R, H, Hk, D, P, tables.shape[1], scale, threads)
    return out
