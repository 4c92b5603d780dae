"""The ops that the models call: one name each, a plain twin, and faster forms where there are any.

A model file says what is computed; which form computes it is decided here, by the device of the
tensors and the environment (`SPINDLE_NO_EXT=1`: plain torch everywhere).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spindle.kernels import native, twins
from spindle.kernels.packed import Weight, onednn_linear, pack, packs, unpack
from spindle.kernels.twins import (
    add_layer_norm,
    add_rms_norm,
    attend,
    copy_blocks,
    layer_norm,
    rms_norm,
    rope,
    silu_mul,
    write_kv,
)

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


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """One query a row [R, H, D] over that row's keys, found through tables [R, B] of blocks."""
    if q.device.type == "cpu" and q.dtype == torch.float32 and native.available():
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
