"""Each CUDA kernel against its twin in float64, within bounds that follow from the arithmetic.

A kernel computes in float32 and rounds where its twin does. `STEPS` of float32's eps is what a sum
or a function may be off by, relative to the sizes of what goes into it (Higham 2002, section 4.2);
each rounding to the tensors' dtype may add half an eps of that. What is only copied has the bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from spindle.bench.gpu import Gpu
from spindle.kernels import cuda, twins

EPS32 = torch.finfo(torch.float32).eps
NORM_EPS = 1e-5
GARBAGE = (-1, 10**6, -(2**40))  # what stands in a table where no block is needed
TABLE = "kernels against their twins"

Parts = tuple[Tensor, Tensor, Tensor]  # ours; exact, and how far from that ours may be, in float64
Case = tuple[str, Callable[[], Parts]]  # a shape in words, and the comparison
Row = dict[str, Any]


def check_kernels(gpu: Gpu) -> Iterator[Row]:
    """A row for each op and dtype: the largest error, alone and as a share of its bound."""
    gpu.need_kernels()
    with patch.object(cuda, "_unwritten", poisoned):
        for dtype in gpu.sizes.dtypes:
            make = Random(gpu, dtype)
            for op, cases in make.cases().items():
                yield judged(op, dtype, cases)
            yield paged_is_contiguous(make)


def poisoned(*shape: int, like: Tensor) -> Tensor:
    """Where a kernel writes: NaN, so that what it leaves out is seen."""
    return like.new_full(shape, torch.nan)


def judged(op: str, dtype: torch.dtype, cases: list[Case]) -> Row:
    """The worst of some cases. One that fails is named, and the others are done all the same."""
    worst, largest, wrong = 0.0, 0.0, []
    for shape, compare in cases:
        try:
            ours, exact, bound = compare()
        except Exception as error:
            wrong.append(f"{shape}: {type(error).__name__}: {error}")
            continue
        off = (ours.double() - exact).abs()
        share = torch.where(off == 0, 0.0, off / bound)  # NaN stays
        at = float(share.max()) if share.numel() else 0.0
        if not at <= 1.0:
            wrong.append(f"{shape}: {at:.3g} times the bound")
        worst, largest = max(worst, at), max(largest, float(off.max()) if off.numel() else 0.0)
    row = {"table": TABLE, "op": op, "dtype": short(dtype), "cases": len(cases)}
    row |= {"largest_error": largest, "of_its_bound": worst}
    return row | ({"wrong": "; ".join(wrong)} if wrong else {})


def short(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def relative(dtype: torch.dtype, steps: float, roundings: int) -> float:
    """How far a result may be off, as a share: float32's steps, then roundings to the dtype."""
    return (1 + steps * EPS32) * (1 + torch.finfo(dtype).eps / 2) ** roundings - 1


def smallest(dtype: torch.dtype) -> float:
    """The smallest number above 0: what one rounding may cost where exponents have run out."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What paged_attend should give, in float64, and how far from that it may be.

    In units of eps / 2 a score is off by D + 4 times |q| |k| scale, and less the peak by two more;
    all that is a factor in a weight, above and below. There too are the sums of a split and of the
    splits, and eight more steps. Then one rounding.
    """
    dtype, D, slots = q.dtype, q.shape[2], tables.shape[1] * keys.shape[1]
    q, keys, values = q.double(), keys.double(), values.double()
    exact = twins.paged_attend(q, keys, values, tables, lengths, scale)
    sizes = twins.paged_attend(q, keys, values.abs(), tables, lengths, scale)
    score = q.norm(dim=-1).max() * keys.nan_to_num(0.0).norm(dim=-1).max() * scale
    off = ((D + 6) * score + 256 + slots / 256 + 8) * EPS32 * sizes
    return exact, off + (exact.abs() + off) * relative(dtype, 0, 1) + smallest(dtype)


# --- the cases -----------------------------------------------------------------------------------


class Random:
    """Random tensors of a dtype on the device, always the same, and what is asked of each op."""

    def __init__(self, gpu: Gpu, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = gpu.sizes, gpu.device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Normal numbers; drawn on the host, so that they are the same wherever they go."""
        return (spread * torch.randn(shape, generator=self._generator)).to(self.device, self.dtype)

    def ids(self, *ids: int) -> Tensor:
        """On the device."""
        return torch.tensor(ids, device=self.device)

    def cases(self) -> dict[str, list[Case]]:
        """By op."""
        rows = list(itertools.product((1, 3, 16), self.sizes.widths))
        heads = list(itertools.product((1, 5), self.sizes.heads))
        attention = list(itertools.product(self.sizes.heads, self.sizes.queries, (16, 64)))
        return {
            "rms_norm": [(f"{r}x{E}", partial(self.rms_norm, r, E)) for r, E in rows],
            "add_rms_norm": [(f"{r}x{E}", partial(self.added, r, E)) for r, E in rows],
            "silu_mul": [(f"{r}x{E}", partial(self.silu_mul, r, E)) for r, E in rows],
            "rope": [(f"{T}, {h}", partial(self.rope, T, *h)) for T, h in heads],
            "write_kv": [(f"{T}, {h}", partial(self.write_kv, T, *h)) for T, h in heads],
            "copy_blocks": [(f"{h}", partial(self.copy_blocks, *h)) for h in self.sizes.heads],
            "paged_attend": [
                (f"{h}, {C} queries, blocks of {P}", partial(self.attend, h, C, P))
                for h, C, P in attention
            ],
        }

    def rms_norm(self, rows: int, E: int) -> Parts:
        """E squares in a sum, a root, a few products; rounded before the weight and after it."""
        x, weight = self(rows, E, spread=3.0), self(E)
        return cuda.rms_norm(x, weight, NORM_EPS), *self._normed(x, weight)

    def added(self, rows: int, E: int) -> Parts:
        """The same, of a sum that has the bits of torch's."""
        x, residual, weight = self(rows, E), self(rows, E), self(E)
        total = x + residual
        normed, _ = cuda.add_rms_norm(x, residual, weight, NORM_EPS)  # the residual, in place
        exact, bound = self._normed(total, weight)
        ours = torch.cat((normed, residual))
        nothing = torch.zeros_like(bound)
        return ours, torch.cat((exact, total.double())), torch.cat((bound, nothing))

    def _normed(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        exact = twins.rms_norm(x.double(), weight.double(), NORM_EPS)
        bound = exact.abs() * relative(self.dtype, x.shape[1] / 2 + 8, 2)
        return exact, bound + smallest(self.dtype) * (1 + weight.double().abs())

    def silu_mul(self, rows: int, F: int) -> Parts:
        """An exponential, a sum, a division; rounded before `up` and after it."""
        gate_up = self(rows, 2 * F, spread=3.0)
        exact = twins.silu_mul(gate_up.double())
        bound = exact.abs() * relative(self.dtype, 8, 2)
        bound += smallest(self.dtype) * (1 + gate_up[:, F:].double().abs())
        return cuda.silu_mul(gate_up), exact, bound

    def rope(self, T: int, H: int, Hk: int, D: int) -> Parts:
        """Two products and a sum, rounded once. Queries and keys are slices; values stay."""
        heads, angles = self(T, H + 2 * Hk, D), self(T, D // 2, spread=3.0).float()
        cos, sin = angles.cos(), angles.sin()
        exact, size = heads.double(), heads.double().abs()
        q, k, _ = heads.split((H, Hk, Hk), dim=1)
        exact_q, exact_k, _ = exact.split((H, Hk, Hk), dim=1)
        twins.rope(exact_q, exact_k, cos.double(), sin.double())
        a, b = size.chunk(2, dim=-1)
        cuda.rope(q, k, cos, sin)
        bound = exact.abs() * relative(self.dtype, 0, 1) + 4 * EPS32 * torch.cat((a + b,) * 2, -1)
        bound += smallest(self.dtype)
        bound[:, H + Hk :] = 0
        return heads, exact, bound

    def write_kv(self, T: int, H: int, Hk: int, D: int) -> Parts:
        """A copy; the rows lie apart, as the keys of a step do."""
        cache, heads = self(4, 8, Hk, D), self(T, H + 2 * Hk, D)
        slots = self.ids(31, 0, 8, 15, 16)[:T]
        new, exact = heads[:, H : H + Hk], cache.clone()
        twins.write_kv(exact, slots, new)
        cuda.write_kv(cache, slots, new)
        return cache, exact.double(), torch.zeros_like(exact, dtype=torch.float64)

    def copy_blocks(self, H: int, Hk: int, D: int) -> Parts:
        """A copy."""
        cache = self(2, 6, 8, Hk, D)
        exact, pairs = cache.clone(), (self.ids(0, 0, 5), self.ids(1, 4, 2))
        twins.copy_blocks(exact, *pairs)
        cuda.copy_blocks(cache, *pairs)
        return cache, exact.double(), torch.zeros_like(exact, dtype=torch.float64)

    def attend(self, heads: tuple[int, int, int], C: int, P: int) -> Parts:
        """Rows of all lengths, several queries each."""
        parts, scale = self.pool(heads, C, P), heads[2] ** -0.5
        return cuda.paged_attend(*parts, scale), *exact_attention(*parts, scale)

    def pool(
        self, heads: tuple[int, int, int], C: int, P: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows in shuffled blocks: NaN in every slot, garbage in every entry, without use."""
        (H, Hk, D), lengths = heads, self.sizes.lengths
        counts = [-(-n // P) for n in lengths]
        order = torch.randperm(sum(counts) + 2, generator=self._generator)
        garbage = torch.randint(3, (len(lengths), max(counts) + 1), generator=self._generator)
        tables = torch.tensor(GARBAGE)[garbage]
        for table, blocks in zip(tables, order[: sum(counts)].split(counts), strict=True):
            table[: len(blocks)] = blocks
        tables = tables.to(self.device)
        shape = (2, len(order), P, Hk, D)
        keys, values = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        for table, n in zip(tables, lengths, strict=True):
            for cache in (keys, values):
                twins.write_kv(cache, self.slots(table, n, P), self(n, Hk, D))
        return self(len(lengths) * C, H, D, spread=2.0), keys, values, tables, self.ids(*lengths)

    def slots(self, table: Tensor, n: int, P: int) -> Tensor:
        """Of a row's first n keys [n]."""
        at = torch.arange(n, device=self.device)
        return table[at // P] * P + at % P


def paged_is_contiguous(make: Random) -> Row:
    """A static cache is a pool with one block a row: the same keys there give the same bits."""
    row = {"table": TABLE, "op": "paged = contiguous", "dtype": short(make.dtype)}
    pairs = list(itertools.product(make.sizes.heads, make.sizes.queries))
    wrong = []
    for heads, C in pairs:
        try:
            if not _same_bits(make, heads, C):
                wrong.append(f"{heads}, {C} queries: other bits")
        except Exception as error:
            wrong.append(f"{heads}, {C} queries: {type(error).__name__}: {error}")
    return row | {"cases": len(pairs)} | ({"wrong": "; ".join(wrong)} if wrong else {})


def _same_bits(make: Random, heads: tuple[int, int, int], C: int) -> bool:
    q, keys, values, tables, lengths = make.pool(heads, C, 16)
    R, S = len(lengths), max(make.sizes.lengths) + 3
    shape = (2, R, S, *keys.shape[2:])
    static = torch.full(shape, torch.nan, dtype=make.dtype, device=make.device)
    for row, (table, n) in enumerate(zip(tables, make.sizes.lengths, strict=True)):
        slots = make.slots(table, n, 16)
        for mine, cache in zip(static, (keys, values), strict=True):
            mine[row, :n] = cache.flatten(0, 1)[slots]
    rows, scale = torch.arange(R, device=make.device)[:, None], heads[2] ** -0.5
    paged = cuda.paged_attend(q, keys, values, tables, lengths, scale)
    return torch.equal(paged, cuda.paged_attend(q, static[0], static[1], rows, lengths, scale))
