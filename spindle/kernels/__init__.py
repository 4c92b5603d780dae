"""The ops that the models call: one name each, a plain twin, and faster forms where there are any.

A model file says what is computed; which form computes it is decided here, by the device of the
tensors and the environment (ops.py says how). SPINDLE_NO_EXT=1: plain torch everywhere.
SPINDLE_EMULATE=1: the CUDA sources, run on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spindle.kernels import cuda, emulate, native, ops, twins
from spindle.kernels.packed import Weight, onednn_linear, pack, packs, unpack

__all__ = [
    "Weight",
    "add_layer_norm",
    "add_rms_norm",
    "attend",
    "attends_in_place",
    "copy_blocks",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "pack",
    "packs",
    "paged_attend",
    "rms_norm",
    "rope",
    "rows_are_apart",
    "silu_mul",
    "unpack",
    "write_kv",
]

_linear = torch.ops.spindle.linear.default
_int8_linear = torch.ops.spindle.int8_linear.default
_rms_norm = torch.ops.spindle.rms_norm.default
_add_rms_norm = torch.ops.spindle.add_rms_norm.default
_layer_norm = torch.ops.spindle.layer_norm.default
_add_layer_norm = torch.ops.spindle.add_layer_norm.default
_rope = torch.ops.spindle.rope.default
_silu_mul = torch.ops.spindle.silu_mul.default
_gelu_tanh = torch.ops.spindle.gelu_tanh.default
_write_kv = torch.ops.spindle.write_kv.default
_copy_blocks = torch.ops.spindle.copy_blocks.default
_paged_attend = torch.ops.spindle.paged_attend.default


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus its bias -> [T, N].

    Where the weight is a part of one, N is the whole one's, as is the result. TypeError: x is of
    another width or dtype. (Native code would read beyond it.)
    """
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        got, want = f"{x.dtype} {list(x.shape)}", f"{weight.dtype} {list(weight.shape)}"
        raise TypeError(f"linear: x is {got}, its weight is {want}")
    y = _product(x, weight)
    return y if weight.join is None else weight.join(y)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """`linear` by what is in this process."""
    if weight.panels is not None:
        return _linear(x, weight.panels, weight.bias, weight.shape[0])
    if weight.int8 is not None:
        return _int8_linear(x, weight.int8, weight.scale, weight.bias)
    if weight.onednn is not None:
        return onednn_linear(x, weight)
    assert weight.plain is not None
    return twins.linear(x, weight.plain, weight.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [T, E] at root mean square 1, times weight [E]."""
    return _rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, in place, then RMS-normalise it; returns (normed, residual)."""
    return _add_rms_norm(x, residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Each row of x [T, E] at mean 0 and variance 1, times weight [E], plus bias [E]."""
    return _layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, in place, then layer-norm it; returns (normed, residual)."""
    return _add_layer_norm(x, residual, weight, bias, eps), residual


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D], in place, by the angles of cos, sin [T, D/2]."""
    _rope(q, k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first -> [T, F]."""
    return _silu_mul(gate_up)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh form of x [T, F] -> [T, F]."""
    return _gelu_tanh(x)


def write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Put new [T, Hk, D] into slots [T] of cache [N, P, Hk, D]; slot n * P + p is p of block n."""
    _write_kv(cache, slots, new)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the blocks source [C] of cache [L, N, P, Hk, D] over the blocks target [C].

    No target may be a source too, or be named twice: the copies are done in any order.
    """
    _copy_blocks(cache, source, target)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one sequence's new queries q [T, H, D] over its keys -> [T, H, D].

    k, v [S, Hk, D] with S = start + T: query t sees key j when j <= start + t.
    """
    form = twins.attend if q.dtype == torch.float64 else ops.attend  # what is exact, what is quick
    return form(q, k, v, start, scale)


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The last C queries of each row, q [R * C, H, D], over that row's keys -> [R * C, H, D].

    keys, values [N, P, Hk, D] lie in blocks, found through tables [R, B]; lengths [R] count the
    keys that a row's last query sees, and the query before it sees one less.
    TypeError: they do not go together.
    """
    return _paged_attend(q, keys, values, tables, lengths, scale)


def rows_are_apart(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether each op gives a row of such tensors the bits that it has alone, where it can.

    Native code does: whatever is summed is summed in an order that the row alone decides. Not so
    `attend`, which is torch's, nor products with weights that are not in panels.
    """
    native_here = device.type == "cpu" and dtype == torch.float32 and native.available()
    return native_here and not emulate.enabled()


def attends_in_place(cache: Tensor, queries: int = 1) -> bool:
    """Whether `paged_attend` reads this cache [..., D] where it lies, for so many queries a row.

    The twin would copy all of it, so a caller that has another way takes that.
    """
    if cache.is_cuda:  # without a GPU it is a fake tensor, which is not read at all
        runs = not torch.cuda.is_available() or cuda.compiled(cache.device) is not None
        return runs and cuda.attends(cache, queries)
    return native.takes(cache) or (emulate.enabled() and cuda.attends(cache, queries))
