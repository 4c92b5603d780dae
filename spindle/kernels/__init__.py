"""The ops that the models call: one name each, a plain twin, and faster forms where there are any.

A model file says what is computed; which form computes it is decided here, by the device of the
tensors and the environment (`SPINDLE_NO_EXT=1`: plain torch everywhere).
"""

from __future__ import annotations

from torch import Tensor

from spindle.kernels import native, twins
from spindle.kernels.packed import Weight, onednn_linear, pack, packs, unpack
from spindle.kernels.twins import (
    add_layer_norm,
    add_rms_norm,
    attend,
    layer_norm,
    rms_norm,
    rope,
    silu_mul,
)

__all__ = [
    "Weight",
    "add_layer_norm",
    "add_rms_norm",
    "attend",
    "layer_norm",
    "linear",
    "pack",
    "packs",
    "rms_norm",
    "rope",
    "silu_mul",
    "unpack",
]


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus its bias -> [T, N]."""
    if weight.panels is not None:
        return native.linear(x, weight.panels, weight.bias, weight.shape[0])
    if weight.onednn is not None:
        return onednn_linear(x, weight)
    assert weight.plain is not None
    return twins.linear(x, weight.plain, weight.bias)
