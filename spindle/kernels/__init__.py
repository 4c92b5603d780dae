"""The ops that the models call: one name each, a plain twin, and faster forms where there are any.

A model file says what is computed; which form computes it is decided here, by the device of the
tensors and the environment (`SPINDLE_NO_EXT=1`: plain torch everywhere).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spindle.kernels import native, twins
from spindle.kernels.packed import Weight, onednn_linear, pack, packs, unpack
from spindle.kernels.twins import add_layer_norm, attend, copy_blocks, layer_norm, write_kv

__all__ = [
    "Weight",
    "add_layer_norm",
    "add_rms_norm",
    "attend",
    "copy_blocks",
    "layer_norm",
    "linear",
    "pack",
    "packs",
    "paged_attend",
    "rms_norm",
    "rope",
    "silu_mul",
    "unpack",
    "write_kv",
]


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus its bias -> [T, N].

    TypeError: x is of another width or dtype. (Native code would read beyond it.)
    """
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        got, want = f"{x.dtype} {list(x.shape)}", f"{weight.dtype} {list(weight.shape)}"
        raise TypeError(f"linear: x is {got}, its weight is {want}")
    if weight.panels is not None:
        return native.linear(x, weight.panels, weight.bias, weight.shape[0])
    if weight.onednn is not None:
        return onednn_linear(x, weight)
    assert weight.plain is not None
    return twins.linear(x, weight.plain, weight.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [T, E] at root mean square 1, times weight [E]."""
    if native.takes(x) and _is_weight(weight, x):
        return native.rms_norm(x.contiguous(), None, weight, eps)
    return twins.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, then RMS-normalise the sum; returns (normed, residual).

    The residual that was passed in is consumed: use the returned one.
    """
    same = residual.dtype == x.dtype and residual.shape == x.shape
    if native.takes(x) and same and _is_weight(weight, x):
        residual = residual.contiguous()
        return native.rms_norm(x.contiguous(), residual, weight, eps), residual
    return twins.add_rms_norm(x, residual, weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D], in place, by the angles of cos, sin [T, D/2]."""
    if native.takes(q) and _are_turned(q, k, cos, sin):
        native.rope(q, k, cos.contiguous(), sin.contiguous())
    else:
        twins.rope(q, k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first -> [T, F]."""
    if native.takes(gate_up) and gate_up.shape[1] % 2 == 0:
        return native.silu_mul(gate_up.contiguous())
    return twins.silu_mul(gate_up)


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """One query a row [R, H, D] over that row's keys, found through tables [R, B] of blocks."""
    if native.takes(q):
        _check_paged(q, keys, values, tables, lengths)
        q, keys, values, tables = (x.contiguous() for x in (q, keys, values, tables))
        return native.paged_attend(q, keys, values, tables, lengths.contiguous(), scale)
    return twins.paged_attend(q, keys, values, tables, lengths, scale)


def _check_paged(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> None:
    """TypeError for what native code would read wrongly; the ids in a table are the caller's."""
    same = keys.shape == values.shape and keys.dtype == values.dtype == q.dtype
    heads = q.shape[2] == keys.shape[3] and q.shape[1] % keys.shape[2] == 0
    rows = len(q) == len(tables) == len(lengths) and tables.dtype == lengths.dtype == torch.int64
    if not (same and heads and rows):
        shapes = [f"{x.dtype} {list(x.shape)}" for x in (q, keys, values, tables, lengths)]
        raise TypeError(f"paged_attend: {', '.join(shapes)} do not go together")


def _is_weight(weight: Tensor, x: Tensor) -> bool:
    """Whether this is a row of x's width, beside x: native code reads it as such."""
    same = weight.dtype == x.dtype and weight.device == x.device
    return same and weight.shape == x.shape[-1:] and weight.is_contiguous()


def _are_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these go together in float32, with heads that lie whole."""
    T, _, D = q.shape
    same = q.dtype == k.dtype == cos.dtype == sin.dtype and k.shape[::2] == (T, D)
    return same and cos.shape == sin.shape == (T, D / 2) and q.stride(2) == k.stride(2) == 1
