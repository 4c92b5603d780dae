"""From logits to a token: masks, penalties, filters, and a uniform number that nobody owns.

The order is fixed, and it is vLLM's:

    logits         min_tokens: -inf for what would end the answer too early
                   repetition penalty, then frequency penalty, then presence penalty
    distribution   temperature, then min-p, then top-k, then top-p

Each works on what the one before it left. Greedy sampling is the argmax of the logits at the end of
their part. Else what survives of the distribution is renormalised, and one uniform number picks
from it by the inverse of its cumulative distribution, in the order of token ids. Log-probabilities
are reported from before all of this.

The uniform number is a pure function of (seed, sample, position, purpose): no generator, no state.
So a request gets the same token whoever shares its batch, and can be moved, replayed or captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spindle.decode.params import SamplingParams
from spindle.decode.penalties import MinTokens, Penalties, Prefix
from spindle.kernels import native_sampling

SAMPLE, DRAFT, ACCEPT = 0, 1, 2  # what a number is for: the next token, a draft of it, its judge
CANDIDATES = 256  # likeliest tokens of a row that are looked at first; then 16 times as many
ALL = torch.iinfo(torch.int64).max  # the top_k of a row that keeps all
EPS64 = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of R rows as tensors on the device; no shape depends on a value.

    What depends on the tokens before is there if any row of the step has such a parameter: a
    decision made once for the step, like `filtered`. The other rows keep their bits.
    """

    temperature: Tensor  # [R] float32, 0 for greedy
    top_k: Tensor  # [R] int64, its largest for all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    sample: Tensor  # [R] int64, which of a request's n answers
    filtered: bool  # whether any row needs its logits sorted
    greedy: bool  # whether all rows are greedy
    min_tokens: MinTokens | None = None
    penalties: Penalties | None = None
    fixed_shapes: bool = False  # on a CPU, too, where shapes that follow the values are faster

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        samples: Sequence[int] | None = None,
        prefixes: Sequence[Prefix] | None = None,
        eos_ids: Sequence[int] = (),
        vocab_size: int = 0,
    ) -> SamplingRows:
        """Rows for parameters that have a seed; `samples` are 0 if not given.

        What stands before each row's token, the model's EOS ids and the number of its logits are
        needed where a row has penalties or min_tokens.
        """

        def column(field: str) -> list[Any]:
            return [getattr(p, field) for p in params]

        min_tokens = penalties = None
        if any(p.min_tokens and p.end_ids(eos_ids) for p in params):
            assert prefixes is not None and vocab_size, "min_tokens: what have the rows so far?"
            min_tokens = MinTokens.of(params, prefixes, eos_ids, vocab_size, device)
        if any(p.penalises for p in params):
            assert prefixes is not None and vocab_size, "penalties: what have the rows so far?"
            penalties = Penalties.of(params, prefixes, vocab_size, device)
        reals = [column("temperature"), column("top_p"), column("min_p")]
        top_k = [k if k > 0 else ALL for k in column("top_k")]
        wholes = [top_k, column("seed"), list(samples or [0] * len(params))]
        # Two ways to the device, not six.
        temperature, top_p, min_p = torch.tensor(reals, dtype=torch.float32, device=device)
        ranks, seed, sample = torch.tensor(wholes, dtype=torch.int64, device=device)
        return SamplingRows(
            temperature=temperature,
            top_k=ranks,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            sample=sample,
            filtered=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            greedy=all(p.temperature == 0 for p in params),
            min_tokens=min_tokens,
            penalties=penalties,
        )

    def append(self, tokens: Tensor) -> None:
        """Each row's output has gained its one of `tokens` [R]: changes what was counted."""
        if self.min_tokens is not None:
            self.min_tokens.append()
        if self.penalties is not None:
            self.penalties.append(tokens)

    @property
    def kind(self) -> tuple[bool, ...]:
        """What decides, once for a step, which operations it has."""
        penalised = self.penalties is not None
        return (self.filtered, self.greedy, self.min_tokens is not None, penalised)

    @property
    def counts(self) -> bool:
        """Whether the tokens that a row has so far are part of it."""
        return self.min_tokens is not None or self.penalties is not None

    def load(self, other: SamplingRows) -> None:
        """Take over the values of other rows, as many, and of the same kind; tensors stay."""
        assert other.kind == self.kind, (other.kind, self.kind)
        for mine, its in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(its)

    def select(self, which: Tensor) -> SamplingRows:
        """The rows `which` [n] in that order, with all that was counted for them; a copy."""
        new: dict[str, Any] = {name: x[which] for name, x in _tensors(self).items()}
        if self.min_tokens is not None:
            of = _tensors(self.min_tokens)
            new["min_tokens"] = MinTokens(**{name: x[which] for name, x in of.items()})
        if self.penalties is not None:
            of = _tensors(self.penalties)
            new["penalties"] = Penalties(**{name: x[which] for name, x in of.items()})
        return replace(self, **new)

    def ahead(self, drafts: Tensor) -> SamplingRows:
        """Of one row, the rows that come after none of these drafts [k], after one, ... -> k + 1.

        What was counted for a row includes the drafts before it. A copy.
        """
        k = len(drafts)
        rows = self.select(torch.zeros(k + 1, dtype=torch.int64, device=drafts.device))
        if rows.min_tokens is not None:
            rows.min_tokens.owed.sub_(torch.arange(k + 1, device=drafts.device))
        if rows.penalties is not None:
            gained = F.one_hot(drafts, rows.penalties.counts.shape[1]).cumsum(dim=0)  # [k, V]
            rows.penalties.counts[1:] += gained
        return rows

    def tensors(self) -> list[Tensor]:
        """All of them, those of what was counted too."""
        parts = (self, self.min_tokens, self.penalties)
        return [x for part in parts if part is not None for x in _tensors(part).values()]

    def at(self, which: Tensor) -> SamplingRows:
        """The rows `which` [n] of those whose logits have been adjusted; reads their values."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample")
        columns = {name: getattr(self, name)[which] for name in names}
        cuts = (columns["top_p"] < 1) | (columns["top_k"] < ALL)
        return replace(self, **columns, filtered=bool(cuts.any()), min_tokens=None, penalties=None)


def _tensors(part: SamplingRows | MinTokens | Penalties) -> dict[str, Tensor]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def sample(logits: Tensor, rows: SamplingRows, position: Tensor) -> Tensor:
    """The next token id of each row: logits [R, V], position [R] of the token drawn -> [R] int64.

    A row that is no distribution (NaN or +inf among its logits, or nothing but -inf, also after
    min_tokens) gives -1 and leaves the other rows alone. Greedy rows take the first of equal
    maxima.
    """
    adjusted = adjust(logits, rows)
    if _is_native(adjusted, logits, rows):
        return _sample_natively(adjusted, logits, rows, position)
    largest, tokens = adjusted.max(dim=-1)  # [R] each; a NaN is the largest
    sound = largest.isfinite()
    if adjusted is not logits:
        sound &= logits.amax(dim=-1).isfinite()  # a mask may have covered it
    if not rows.greedy:
        drawn = _drawn(adjusted, rows, draw(rows, position), CANDIDATES)
        tokens = torch.where(rows.temperature == 0, tokens, drawn)
    return torch.where(sound, tokens, -1)


def _is_native(adjusted: Tensor, logits: Tensor, rows: SamplingRows) -> bool:
    """Whether native code is for these rows: float32 on a CPU, in a step that nothing records."""
    both = adjusted.dtype == logits.dtype == torch.float32
    return both and not rows.fixed_shapes and native_sampling.takes(adjusted)


def _sample_natively(
    adjusted: Tensor, logits: Tensor, rows: SamplingRows, position: Tensor
) -> Tensor:
    """`sample` in native code."""
    if rows.greedy:
        return native_sampling.greedy(adjusted, logits)
    u = native_sampling.uniform(rows.seed, rows.sample, position, SAMPLE)
    return _drawn_natively(adjusted, logits, rows, u)


def _drawn_natively(
    adjusted: Tensor, logits: Tensor, rows: SamplingRows, u: Tensor, p: Tensor | None = None
) -> Tensor:
    """The tokens at u [R], those of rows that another rounding might decide by a longer way.

    Native exponentials are rounded in their own way. What they leave open is decided with torch's,
    p [R, V]; and what is open then, as the order of a sum decides it, in torch alone.
    """
    columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    tokens, left_over = native_sampling.sample(adjusted, logits, *columns, u, p)
    if left_over:
        rest = (tokens == native_sampling.UNSETTLED).nonzero()
        for row in rest.unbind():  # one by one, so that none depends on where it stood
            one, its, at = adjusted[row], rows.at(row), u[row]
            if p is None:
                tokens[row] = _drawn_natively(one, one, its, at, _weighed(_scaled(one, its), its))
            else:
                tokens[row] = _drawn(one, its, at, CANDIDATES)
    return tokens


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution that each row samples from: logits [R, V] -> [R, V], rows sum to 1.

    A greedy row has all its weight on the argmax. A row that is no distribution gives NaN.
    """
    logits = adjust(logits, rows)
    p = _likely(logits, rows, CANDIDATES)
    one_hot = torch.zeros_like(p).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where((rows.temperature == 0)[:, None], one_hot, p)


def adjust(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [R, V] after min_tokens and penalties, in at least float32; themselves if none."""
    if rows.min_tokens is None and rows.penalties is None:
        return logits
    logits = _at_least_float32(logits)
    if rows.min_tokens is not None:
        logits = rows.min_tokens.apply(logits)
    return logits if rows.penalties is None else rows.penalties.apply(logits)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _drawn(logits: Tensor, rows: SamplingRows, u: Tensor, C: int) -> Tensor:
    """Adjusted logits [R, V] -> the ids that `inverse_cdf` finds at u [R] in what is `_filtered`.

    To sort all of V would be most of a step on a CPU. So there a row's likeliest C tokens are tried
    first, and more of them for the rows that these do not settle, unless all shapes are to be the
    same at every step: the ids are. Greedy rows get any id.
    """
    if not _may_try_few(logits, rows, C):
        return inverse_cdf(_filtered(logits, rows), u)
    ids, p, settled = _of_likeliest(logits, rows, C)
    tokens = ids.gather(1, inverse_cdf(p, u)[:, None]).squeeze(1)
    settled &= u < 1  # 1 finds none of them
    rest = (~settled & (rows.temperature > 0)).nonzero().squeeze(1)
    if len(rest) > 0:
        tokens[rest] = _drawn(logits[rest], rows.at(rest), u[rest], 16 * C)
    return tokens


def _likely(logits: Tensor, rows: SamplingRows, C: int) -> Tensor:
    """What is `_filtered` of adjusted logits [R, V], made of few of them where `_drawn` would."""
    if not _may_try_few(logits, rows, C):
        return _filtered(logits, rows)
    ids, few, settled = _of_likeliest(logits, rows, C)
    p = few.new_zeros(logits.shape).scatter_(1, ids, few)
    settled &= few.isfinite().all(dim=-1)  # what is no distribution is NaN throughout
    rest = (~settled).nonzero().squeeze(1)
    if len(rest) > 0:
        p[rest] = _likely(logits[rest], rows.at(rest), 16 * C)
    return p


def _may_try_few(logits: Tensor, rows: SamplingRows, C: int) -> bool:
    """Whether a row's likeliest C tokens may be all that is needed of V, and less work."""
    fixed = rows.fixed_shapes or logits.device.type != "cpu"
    return not fixed and rows.filtered and C < logits.shape[-1]


def _of_likeliest(logits: Tensor, rows: SamplingRows, C: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is `_filtered` of each row's C likeliest tokens alone: their ids, and it, [R, C] both.

    And whether all of V would give the same [R].

    Where all that is kept is among them, and none of its equals is outside, the same numbers are
    added in the same order, but for zeros: the same bits. Only the mass of all tokens, which the
    nucleus is a share of if top-k left them all, is added in another order. So there no share may
    be as near to top_p as two orders can be apart (V eps / 2 each; Higham 2002, section 4.2).
    """
    x = _scaled(logits, rows)
    p = _weighed(x, rows)  # [R, V]
    V, top_k, top_p = p.shape[-1], rows.top_k[:, None], rows.top_p[:, None]
    ids = x.topk(C, dim=-1).indices.sort(dim=-1).values  # [R, C], rising
    x, whole = x.gather(1, ids), p.sum(dim=-1, keepdim=True, dtype=torch.float64)
    whole = whole.where(top_k >= V, torch.nan)
    sorted_p, order, before = _ranked(x, p.gather(1, ids), rows, whole)
    kept = sorted_p.where(_in_nucleus(before, rows), 0.0)
    inside = (kept == 0) | (x.gather(1, order) > x.amin(dim=-1, keepdim=True))
    clear = (sorted_p == 0) | ((before - top_p).abs() > 2 * V * EPS64)
    settled = (inside & (clear | (top_k <= C))).all(dim=-1)
    return ids, _normalised(torch.zeros_like(kept).scatter_(1, order, kept)), settled


def _filtered(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Adjusted logits [R, V] -> what temperature, min-p, top-k and top-p make of them [R, V].

    A greedy row is taken for one of temperature 1.
    """
    x = _scaled(logits, rows)
    p = _weighed(x, rows)
    if rows.filtered:
        sorted_p, order, before = _ranked(x, p, rows)
        kept = sorted_p.where(_in_nucleus(before, rows), 0.0)
        p = torch.zeros_like(p).scatter_(1, order, kept)
    return _normalised(p)


def _scaled(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Adjusted logits [R, V] -> what temperature makes of them; the largest of a row is 0."""
    logits = _at_least_float32(logits)
    # Largest first becomes 0, so that no temperature, however small, can overflow.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / rows.temperature.where(rows.temperature > 0, 1.0)[:, None]


def _weighed(x: Tensor, rows: SamplingRows) -> Tensor:
    """Scaled logits [R, V] -> their weights [R, V], 1 for the likeliest, 0 where min-p cuts."""
    p = x.exp()
    return p.where(p >= rows.min_p[:, None], 0.0)


def _ranked(
    x: Tensor, p: Tensor, rows: SamplingRows, whole: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """p [R, V] by rank, 0 beyond top-k; the ids in that order; which share the likelier ones hold.

    Scaled logits x [R, V] decide the rank, and the sort is stable: of equal tokens the lower id is
    likelier. `whole` [R, 1]: the mass of what top-k left, where that is more than p.
    """
    order = x.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(p.shape[-1], device=p.device)
    sorted_p = p.gather(1, order).where(rank < rows.top_k[:, None], 0.0)
    mass = sorted_p.double().cumsum(dim=-1)
    total = mass[:, -1:]
    if whole is not None:
        total = total.where(rows.top_k[:, None] <= p.shape[-1], whole)
    return sorted_p, order, (mass - sorted_p) / total


def _in_nucleus(before: Tensor, rows: SamplingRows) -> Tensor:
    """Top-p: a token stays when the tokens likelier than it hold less, before [R, V] -> [R, V].

    The smallest set that reaches top_p (Holtzman et al. 2020, section 3.1).
    """
    keep = (before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1)
    keep[:, 0].fill_(True)  # also when top_p is so small that float32 calls it 0
    return keep


def _normalised(p: Tensor) -> Tensor:
    """p [R, V] with a sum of 1.

    Not p.sum(): torch splits that over threads when R is 1, and a row's bits would depend on R.
    """
    return p / p.cumsum(dim=-1, dtype=torch.float64)[:, -1:].to(p.dtype)


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
