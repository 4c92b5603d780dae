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
_ARGUMENTS = {  # of each op: pointers, lengths, floats; then the number of threads
    "int8_linear": (5, 3, 0),
    "int8_pack": (2, 2, 0),
    "linear": (4, 3, 0),
    "pack": (2, 2, 0),
    "paged_attend": (6, 7, 1),
    "rms_norm": (4, 2, 1),
    "rope": (4, 8, 0),
    "silu_mul": (2, 2, 0),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = build.library("cpu")
    if found is not None:
        for name, (pointers, lengths, floats) in _ARGUMENTS.items():
            op = getattr(found, f"spindle_{name}")
            parts = [_POINTER] * pointers + [_LENGTH] * lengths + [ctypes.c_float] * floats
            op.argtypes, op.restype = [*parts, ctypes.c_int], None
    return found


def available() -> bool:
    """Whether the native forms are here; the first call may compile them, a second or three."""
    return _library() is not None


def takes(x: Tensor) -> bool:
    """Whether the native forms are for this tensor: float32 on a CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and available()


def to_panels(weight: Tensor) -> Tensor:
    """weight [N, K] of float32 or int8 -> panels [ceil(N / 32), K, 32], a copy."""
    N, K = weight.shape
    weight = weight.contiguous()
    panels = weight.new_empty(-(-N // PANEL), K, PANEL)
    lib = _library()
    assert lib is not None
    to_panels = lib.spindle_int8_pack if weight.dtype == torch.int8 else lib.spindle_pack
    to_panels(weight.data_ptr(), panels.data_ptr(), N, K, torch.get_num_threads())
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


def int8_linear(x: Tensor, panels: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for integers in panels; output n's sum is times scale [N] before the bias."""
    x = x.contiguous()
    (T, K), N = x.shape, scale.shape[0]
    y = x.new_empty(T, N)
    add = None if bias is None else bias.data_ptr()
    lib = _library()
    assert lib is not None
    pointers = (x.data_ptr(), panels.data_ptr(), scale.data_ptr(), add, y.data_ptr())
    lib.spindle_int8_linear(*pointers, T, K, N, torch.get_num_threads())
    return y


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The twin's arguments and result, for contiguous float32 tensors on the CPU."""
    T, H, D = q.shape
    _, P, Hk, _ = keys.shape
    R, B = tables.shape
    out = torch.empty_like(q)
    lib = _library()
    assert lib is not None
    pointers = (tensor.data_ptr() for tensor in (q, keys, values, tables, lengths, out))
    sizes = (T, T // max(R, 1), H, Hk, D, P, B)
    lib.spindle_paged_attend(*pointers, *sizes, scale, torch.get_num_threads())
    return out


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of contiguous x [..., E]; with a residual, x is added to it, in place, and it is."""
    out = torch.empty_like(x)
    E = x.shape[-1]
    lib = _library()
    assert lib is not None
    add = None if residual is None else residual.data_ptr()
    pointers = (x.data_ptr(), add, weight.data_ptr(), out.data_ptr())
    lib.spindle_rms_norm(*pointers, x.numel() // E, E, eps, torch.get_num_threads())
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The twin's arguments and result; rows and heads of q and k may lie apart."""
    pointers = (q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr())
    T, H, D = q.shape
    strides = (*q.stride()[:2], *k.stride()[:2])
    lib = _library()
    assert lib is not None
    lib.spindle_rope(*pointers, T, H, k.shape[1], D, *strides, torch.get_num_threads())


def silu_mul(gate_up: Tensor) -> Tensor:
    """The twin's result for contiguous gate_up [T, 2F]."""
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(T, F)
    lib = _library()
    assert lib is not None
    lib.spindle_silu_mul(gate_up.data_ptr(), out.data_ptr(), T, F, torch.get_num_threads())
    return out
