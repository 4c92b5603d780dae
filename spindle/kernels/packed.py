"""A linear layer's weight, kept in the one form that `linear` reads on its device.

Decoding one token reads every weight once and does two operations on each: what counts is how fast
the bytes come in. On x86 CPUs oneDNN can reorder a weight once into blocks of its own. How that
compares with the plain tensor for a single row depends on the processor (measured: from a third
slower to twice as fast); from four rows on it was ahead wherever it was measured, and above all a
row then has the same bits however many rows are beside it, which the plain product does not give.
"""

from __future__ import annotations

import os
import platform

import torch
from torch import Tensor


class Weight:
    """A weight [N, K] and its bias [N] or None; frozen, made by `pack`, read by `linear`.

    Exactly one of `plain` and `packed` is there. `min_rows` is the smallest number of rows for
    which the packed form gives a row the bits that it has in any larger batch.
    """

    __slots__ = ("bias", "min_rows", "packed", "plain", "shape")

    def __init__(self, plain: Tensor | None, packed: Tensor | None, bias: Tensor | None) -> None:
        self.plain, self.packed, self.bias = plain, packed, bias
        self.shape = (plain if plain is not None else packed).shape  # type: ignore[union-attr]
        self.min_rows = 1


def pack(weight: Tensor, bias: Tensor | None = None) -> Weight:
    """Weight [N, K] and bias [N] in the form for their device: a copy, whatever form it is."""
    if not packs(weight):
        return Weight(weight.clone(memory_format=torch.contiguous_format), None, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    result = Weight(None, packed, bias)
    result.min_rows = _min_rows(result)
    return result


def packed_linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times a packed weight [N, K] transposed, plus bias -> [T, N]."""
    rows = x.shape[0]
    if 0 < rows < weight.min_rows:
        x = x.expand(weight.min_rows, -1).contiguous()
    y = torch.ops.mkldnn._linear_pointwise(x, weight.packed, weight.bias, "none", [], "")
    return y[:rows]


def packs(weight: Tensor) -> bool:
    """Whether oneDNN's packed form is to be had, and wanted, for this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and os.environ.get("SPINDLE_NO_EXT") != "1"
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _min_rows(weight: Weight) -> int:
    """1, or 2 where the one-row product adds in another order than a batch's does.

    oneDNN may split a long sum over K for a single row. A request's tokens must not depend on
    who else is in its batch, so such a weight is always given two rows: asked once, not assumed.
    """
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    alone, beside = packed_linear(x[:1], weight), packed_linear(x, weight)
    return 1 if torch.equal(alone, beside[:1]) else 2
