"""From logits to a token: parameters, filters, and a uniform number that nobody owns.

The order is fixed: temperature, then min-p, then top-k, then top-p, each on the distribution that
the one before it left (vLLM's order). What survives is renormalised, and one uniform number picks
from it by the inverse of its cumulative distribution, in the order of token ids.

The uniform number is a pure function of (seed, sample, position, purpose): no generator, no state.
So a request gets the same token whoever shares its batch, and can be moved, replayed or captured.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

import torch
from torch import Tensor

from spindle.errors import RequestError

SAMPLE = 0  # the purpose of the draw that picks the next token


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; names, meanings and defaults as in vLLM's class of that name.

    max_tokens: tokens to generate at most; None: as many as the context allows; 0: none.
    temperature: 0 is greedy; else logits are divided by it.
    top_k: keep the k likeliest; 0 or -1: all. Ties go to the lower id: exactly k are kept.
    top_p: keep the smallest set of likeliest tokens that holds this much probability; 1: all.
    min_p: keep tokens at least this fraction as likely as the likeliest; 0: all.
    seed: 0 .. 2**63 - 1; None: one is drawn when the request is made, and reported.
    ignore_eos: go on after an end-of-sequence token.
    Raises RequestError, naming the field, on construction.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._whole("max_tokens", 0, "a whole number of 0 or more, or None")
        self._real("temperature", 1e4, "a number from 0 to 10,000 (where all tokens are equal)")
        self._whole("top_k", -1, "a whole number of 1 or more, or 0 or -1 for all")
        self._real("top_p", 1.0, "a number above 0 and at most 1")
        if self.top_p == 0:
            self._refuse("top_p", "a number above 0 and at most 1 (temperature=0 is greedy)")
        self._real("min_p", 1.0, "a number from 0 to 1")
        if self.seed is not None:
            self._whole("seed", 0, "a whole number from 0 to 2**63 - 1, or None")
        if not isinstance(self.ignore_eos, bool):
            self._refuse("ignore_eos", "True or False")

    def seeded(self) -> SamplingParams:
        """The same parameters with a seed: the one they have, or a fresh one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def _refuse(self, field: str, right: str) -> None:
        raise RequestError(f"{field}={getattr(self, field)!r}: expected {right}")

    def _whole(self, field: str, low: int, right: str) -> None:
        value = getattr(self, field)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not (is_whole and low <= value < 2**63):
            self._refuse(field, right)
        object.__setattr__(self, field, int(value))  # numpy's integers become plain ones

    def _real(self, field: str, high: float, right: str) -> None:
        value = getattr(self, field)
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_real and 0 <= value <= high):
            self._refuse(field, right)
        object.__setattr__(self, field, float(value))


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of R rows as tensors on the device; no shape depends on a value."""

    temperature: Tensor  # [R] float32, 0 for greedy
    top_k: Tensor  # [R] int64, its largest for all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    sample: Tensor  # [R] int64, which of a request's n answers
    filtered: bool  # whether any row needs its logits sorted
    greedy: bool  # whether all rows are greedy

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        samples: Sequence[int] | None = None,
    ) -> SamplingRows:
        """Rows for parameters that have a seed; `samples` are 0 if not given."""
        columns = {f.name: [getattr(p, f.name) for p in params] for f in fields(SamplingParams)}
        top_k = [k if k > 0 else torch.iinfo(torch.int64).max for k in columns["top_k"]]
        return SamplingRows(
            temperature=torch.tensor(columns["temperature"], dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, device=device),
            top_p=torch.tensor(columns["top_p"], dtype=torch.float32, device=device),
            min_p=torch.tensor(columns["min_p"], dtype=torch.float32, device=device),
            seed=torch.tensor(columns["seed"], device=device),
            sample=torch.tensor(samples or [0] * len(params), device=device),
            filtered=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            greedy=all(p.temperature == 0 for p in params),
        )


def sample(logits: Tensor, rows: SamplingRows, position: Tensor) -> Tensor:
    """The next token id of each row: logits [R, V], position [R] of the token drawn -> [R] int64.

    A row that is no distribution (NaN or +inf among its logits, or nothing but -inf) gives -1 and
    leaves the other rows alone. Greedy rows take the first of equal maxima.
    """
    best = logits.argmax(dim=-1)  # [R]
    peak = logits.gather(1, best[:, None]).squeeze(1)  # NaN if there is one: argmax finds it
    if not rows.greedy:  # a greedy row among others draws from all its weight on the argmax
        best = inverse_cdf(probabilities(logits, rows), draw(rows, position))
    return torch.where(peak.isfinite(), best, -1)


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution that each row samples from: logits [R, V] -> [R, V], rows sum to 1.

    A greedy row has all its weight on the argmax. A row that is no distribution gives NaN.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = rows.temperature == 0
    # Largest first becomes 0, so that no temperature, however small, can overflow.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    scaled = shifted / rows.temperature.where(~greedy, 1.0)[:, None]  # [R, V]
    p = scaled.softmax(dim=-1)
    p = p.where(p >= rows.min_p[:, None] * p.amax(dim=-1, keepdim=True), 0.0)
    if rows.filtered:
        p = _keep_likeliest(p, rows)
    # Not p.sum(): torch splits that over threads when R is 1, and a row's bits would depend on R.
    p = p / p.cumsum(dim=-1, dtype=torch.float64)[:, -1:].to(p.dtype)
    one_hot = torch.zeros_like(p).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, p)


def _keep_likeliest(p: Tensor, rows: SamplingRows) -> Tensor:
    """Top-k, then top-p over what top-k left; p [R, V], unnormalised -> [R, V], zeros elsewhere.

    A token stays in the nucleus when the tokens likelier than it hold less than top_p (Holtzman et
    al. 2019, section 3.1: the smallest set that reaches it). The sort is stable, so of equal
    tokens the lower id is likelier.
    """
    sorted_p, order = p.sort(dim=-1, descending=True, stable=True)  # [R, V]
    rank = torch.arange(p.shape[-1], device=p.device)
    sorted_p = sorted_p.where(rank < rows.top_k[:, None], 0.0)
    mass = sorted_p.double().cumsum(dim=-1)
    before = (mass - sorted_p) / mass[:, -1:]  # held by the likelier ones
    keep = (before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1)
    keep[:, 0] = True  # also when top_p is so small that float32 calls it 0
    return torch.zeros_like(p).scatter_(1, order, sorted_p.where(keep, 0.0))


def inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds u: p [R, V], u [R] in [0, 1) -> [R].

    Never an id of probability 0: where the sum passes u, it has just grown.
    """
    mass = p.double().cumsum(dim=-1)
    passed = mass > u[:, None] * mass[:, -1:]
    return passed.int().argmax(dim=-1)


def draw(rows: SamplingRows, position: Tensor, purpose: int = SAMPLE) -> Tensor:
    """One uniform number for each row [R], for the token at `position` [R]."""
    return uniform(rows.seed, rows.sample, position, purpose)


def uniform(seed: Tensor, sample: Tensor, position: Tensor, purpose: int = SAMPLE) -> Tensor:
    """Uniform numbers in [0, 1), float64, a pure function of four integers; int64 [R] -> [R].

    A counter hash: each argument is mixed in by SplitMix64's finaliser (Steele et al. 2014, with
    the constants of Stafford's variant 13), in tensor operations only.
    """
    h = _mix(seed + _GOLDEN)
    for value in (sample, position, torch.full_like(seed, purpose)):
        h = _mix(h + value * _GOLDEN + 1)
    return _shift(h, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(h: Tensor) -> Tensor:
    """Every bit of an int64 into every other; products wrap around at 64 bits."""
    h = (h ^ _shift(h, 30)) * _MIX_1
    h = (h ^ _shift(h, 27)) * _MIX_2
    return h ^ _shift(h, 31)


def _shift(h: Tensor, bits: int) -> Tensor:
    """A logical right shift: int64's own copies the sign."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)
