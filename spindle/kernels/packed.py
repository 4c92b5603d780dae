"""A linear layer's weight, kept in the one form that `linear` reads on its device.

Decoding one token reads every weight once and does two operations on each: what counts is how fast
the bytes come in. So a float32 weight on a CPU is laid out once for being read, when it is loaded:

- in panels, for the loop in csrc/cpu.cpp, where there is a C++ compiler;
- else in the blocks of oneDNN, on x86 (from four rows on ahead of the plain tensor wherever it was
  measured; for one row that depends on the processor);
- else, and for other dtypes and devices, as it is.

The first two give a row the same bits however many rows are beside it; the plain product does not.

Fewer bytes come in faster still: with `quantize="int8"` a weight is kept as integers of 8 bits with
a scale for each output, in panels where the native loop reads them. Inputs and sums stay floats.
Elsewhere (no compiler, other dtypes, a GPU) the weight is made anew from its integers for each
product: right, and slower than without.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable

import torch
from torch import Tensor

from spindle.kernels import native, twins
from spindle.kernels.room import Room

PART = 2**18  # numbers that are turned into integers at a time: what a cache holds


class Weight:
    """A weight [N, K] and its bias [N] or None; frozen, made by `pack`, read by `linear`.

    Exactly one of `plain`, `panels`, `onednn` and `int8` is there. `int8` is [N, K], or its panels,
    and has a `scale` [N] beside it. `dtype` is that of the inputs. `min_rows`: the smallest number
    of rows for which oneDNN gives a row the bits that it has in any larger batch. `join`: where
    several processes have a part of the weight each, what makes the product of a part the whole
    one; they give and get it in step.
    """

    __slots__ = (
        *("bias", "dtype", "int8", "join", "min_rows", "onednn", "panels", "plain", "scale"),
        "shape",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        bias: Tensor | None = None,
        *,
        plain: Tensor | None = None,
        panels: Tensor | None = None,
        onednn: Tensor | None = None,
        int8: Tensor | None = None,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape, self.bias = tuple(shape), bias
        self.plain, self.panels, self.onednn = plain, panels, onednn
        self.int8, self.scale = int8, scale
        self.dtype = plain.dtype if plain is not None else dtype
        self.min_rows = 1
        self.join: Callable[[Tensor], Tensor] | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that it holds."""
        held = (self.plain, self.panels, self.onednn, self.int8, self.scale, self.bias)
        return [part for part in held if part is not None]

    @property
    def in_panels(self) -> bool:
        """Whether it lies as native code reads it."""
        return self.panels is not None or (self.int8 is not None and self.int8.ndim == 3)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers, its scales and its bias, without what a layout adds."""
        itemsize = self.dtype.itemsize if self.int8 is None else 1
        beside = [x for x in (self.scale, self.bias) if x is not None]
        return math.prod(self.shape) * itemsize + sum(x.nbytes for x in beside)


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    quantize: str | None = None,
    room: Room | None = None,
) -> Weight:
    """Weight [N, K] and bias [N] in the form for their device: a copy, whatever form it is.

    quantize: None, or "int8". room: where panels are to lie, beside others of a model. TypeError: a
    bias of another length or dtype.
    """
    if bias is not None:
        if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype:
            raise TypeError(f"pack: the bias is {bias.dtype} {list(bias.shape)}")
        bias = bias.contiguous()
    if quantize == "int8":
        return _pack_int8(weight, bias, room)
    if not packs(weight):
        plain = weight.clone(memory_format=torch.contiguous_format)
        return Weight(weight.shape, bias, plain=plain)
    if native.available():
        return Weight(weight.shape, bias, panels=native.to_panels(weight, room))
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    result = Weight(weight.shape, bias, onednn=blocks)
    result.min_rows = _min_rows(result)
    return result


def _pack_int8(weight: Tensor, bias: Tensor | None, room: Room | None) -> Weight:
    """A part of the rows at a time, so that the integers as floats take little room."""
    N, K = weight.shape
    panel = native.PANEL if native.takes(weight) else None
    if panel is None:
        held = torch.empty(N, K, dtype=torch.int8, device=weight.device)
    else:
        held = native.panels_for(N, K, torch.int8, room)
    scale = torch.empty(N, dtype=torch.float32, device=weight.device)
    step = max(1, PART // (K * native.PANEL)) * native.PANEL
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        q, scale[rows] = twins.quantize(weight[rows])
        if panel is None:
            held[rows] = q
        else:
            held[start // panel : -(-rows.stop // panel)] = native.to_panels(q)
    return Weight(weight.shape, bias, int8=held, scale=scale, dtype=weight.dtype)


def unpack(weight: Weight) -> Tensor:
    """The weight [N, K] as it was given to `pack`; of integers, what they stand for."""
    if weight.int8 is not None and weight.scale is not None:
        held = weight.int8
        q = native.from_panels(held, weight.shape[0]) if held.ndim == 3 else held
        return twins.dequantize(q, weight.scale, weight.dtype)
    if weight.panels is not None:
        return native.from_panels(weight.panels, weight.shape[0])
    return weight.plain if weight.plain is not None else weight.onednn.to_dense()  # type: ignore[union-attr]


def packs(weight: Tensor) -> bool:
    """Whether this weight is laid out anew: float32 on a CPU, and a form for it is to be had."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return native.available() or _has_onednn()


def onednn_linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times a weight [N, K] in oneDNN's blocks, transposed, plus bias -> [T, N]."""
    rows = x.shape[0]
    if 0 < rows < weight.min_rows:
        x = x.expand(weight.min_rows, -1).contiguous()
    y = torch.ops.mkldnn._linear_pointwise(x, weight.onednn, weight.bias, "none", [], "")
    return y[:rows]


def _has_onednn() -> bool:
    return (
        os.environ.get("SPINDLE_NO_EXT") != "1"
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
    alone, beside = onednn_linear(x[:1], weight), onednn_linear(x, weight)
    return 1 if torch.equal(alone, beside[:1]) else 2
