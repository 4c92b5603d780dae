"""From logits to a token: the uniform number, the filters and their order, rows that share a batch.

Statistical tests have fixed seeds, so they are decided once; the p-value that each must exceed is
0.0001 where nothing else is said.
"""

import dataclasses
import itertools
import math
import re
from contextlib import AbstractContextManager
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spindle.decode import sampling
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import (
    SamplingParams,
    SamplingRows,
    draw,
    inverse_cdf,
    probabilities,
    sample,
    uniform,
)
from spindle.errors import RequestError
from spindle.kernels import native_sampling

ALPHA = 1e-4
LAST_U = 1 - 2.0**-53  # the largest float64 below 1
LARGEST = 2**63 - 1
AXES = ("seed", "sample", "position", "purpose")


def chi_square_p(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """How likely counts at least this uneven are if the shares are true (Pearson 1900)."""
    expected = shares.double() / shares.double().sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2))


def counter(axis: str, n: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of `uniform` that differ along one axis only."""
    fixed = {"seed": 12, "sample": 0, "position": 34, "purpose": 0}
    columns = {name: torch.full((n,), value) for name, value in fixed.items()}
    columns[axis] = torch.arange(start, start + n)
    return columns


def uniforms(columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """`uniform` of the columns; a purpose is one number a call."""
    seed, sample_, position, purpose = (columns[name] for name in AXES)
    u = torch.empty(len(seed), dtype=torch.float64)
    for value in purpose.unique().tolist():
        at = purpose == value
        u[at] = uniform(seed[at], sample_[at], position[at], value)
    return u


def solo(params: SamplingParams, n: int = 1) -> SamplingRows:
    return SamplingRows.of([params] * n)


def distribution(logits: list[float] | torch.Tensor, **params) -> torch.Tensor:
    """What one row [V] samples from."""
    row = torch.as_tensor(logits)[None]
    return probabilities(row, solo(SamplingParams(seed=0, **params)))[0]


def kept(logits: list[float] | torch.Tensor, **params) -> list[int]:
    return distribution(logits, **params).nonzero().flatten().tolist()


def draws(logits: torch.Tensor, params: SamplingParams, n: int) -> torch.Tensor:
    """n tokens from the same logits [V], at n positions."""
    return sample(logits.expand(n, -1), solo(params, n), torch.arange(n))


def random_logits(seed: int, vocab: int, rows: int = 1, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)


def all_params() -> st.SearchStrategy[SamplingParams]:
    """Greedy, unfiltered, each filter alone, and several together."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-8, 0.3, 1.0, 2.5, 1e4]),
        top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 10**7]),
        top_p=st.sampled_from([5e-324, 0.1, 0.5, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        seed=st.integers(0, LARGEST),
    )


# The uniform number


def reference_mix(word: int) -> int:
    """SplitMix64's finaliser on Python ints, masked to 64 bits."""
    mask = (1 << 64) - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def reference_uniform(seed: int, sample: int, position: int, purpose: int) -> float:
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    word = reference_mix((seed + golden) & mask)
    for value in (sample, position, purpose):
        word = reference_mix((word + value * golden + 1) & mask)
    return (word >> 11) / 2**53


def one(seed: int, sample: int = 0, position: int = 0, purpose: int = 0) -> float:
    return float(uniform(*(torch.tensor([v]) for v in (seed, sample, position)), purpose))


def test_reference_mix_is_splitmix64():
    """The first outputs of SplitMix64 for the seed 1234567, as published with the generator."""
    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in (1, 2, 3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [reference_mix(state) for state in states] == published


@settings(deadline=None)
@given(
    seed=st.integers(0, LARGEST),
    sample=st.integers(0, LARGEST),
    position=st.integers(0, LARGEST),
    purpose=st.integers(0, 2**31),
)
@example(0, 0, 0, 0)
@example(LARGEST, LARGEST, LARGEST, 2**31)
@example(2**64 - 0x9E3779B97F4A7C15, 0, 0, 0)  # the seed whose first hash is 0
def test_uniform_is_the_documented_function(seed, sample, position, purpose):
    assert one(seed, sample, position, purpose) == reference_uniform(
        seed, sample, position, purpose
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 0, 0, 0), 5206332639330816),
        ((1, 0, 0, 0), 8892633380860152),
        ((0, 1, 0, 0), 1262456937223036),
        ((0, 0, 1, 0), 8726317679108721),
        ((0, 0, 0, 1), 5203412220436716),
        ((LARGEST, 2, 4096, 3), 3177655355760283),
    ],
)
def test_uniform_never_changes_between_versions(arguments, word):
    """A seed in somebody's notes must give the same answer in ten years: u * 2**53, exactly."""
    assert int(one(*arguments) * 2**53) == word


def test_uniform_is_pure_and_blind_to_the_batch():
    """B60: the same number on repeat, alone, and in any order of rows."""
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randint(0, 2**62, (64,), generator=generator) for _ in range(3)]
    before = [c.clone() for c in columns]
    together = uniform(*columns)
    assert together.dtype == torch.float64
    assert torch.equal(together, uniform(*columns))
    assert all(torch.equal(a, b) for a, b in zip(columns, before, strict=True))
    order = torch.randperm(64, generator=generator)
    assert torch.equal(uniform(*(c[order] for c in columns)), together[order])
    alone = [uniform(*(c[i : i + 1] for c in columns)) for i in range(64)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("start", [0, 2**31 - 50_000, 2**62])
def test_uniform_is_uniform_along_each_axis(axis, start):
    """Chi-square over 256 bins, and Kolmogorov-Smirnov, of consecutive counters."""
    n = 100_000 if axis != "purpose" else 2_000
    if axis == "purpose" and start:
        start = 2**20
    u = uniforms(counter(axis, n, start))
    assert u.min() >= 0
    assert u.max() < 1
    bins = 256 if n > 10_000 else 64
    counts = (u * bins).long().bincount(minlength=bins)
    assert chi_square_p(counts, torch.ones(bins)) > ALPHA
    ranks = torch.arange(n + 1) / n
    ordered = u.sort().values
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    assert distance < math.sqrt(-math.log(ALPHA / 2) / 2 / n)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbouring_counters_are_independent(axis, lag):
    """Chi-square of pairs on a 16 by 16 grid, and their correlation, at several distances."""
    n = 50_000 if axis != "purpose" else 4_000
    u = uniforms(counter(axis, n))
    a, b = u[:-lag], u[lag:]
    counts = ((a * 16).long() * 16 + (b * 16).long()).bincount(minlength=256)
    assert chi_square_p(counts, torch.ones(256)) > ALPHA
    assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 4 / math.sqrt(len(a))


@pytest.mark.parametrize(("up", "down"), list(itertools.combinations(AXES, 2)))
def test_axes_do_not_trade_against_each_other(up, down):
    """One counter up and another down by one: a sum of counters would give the same number."""
    n = 512
    columns = counter(up, n) | {down: torch.arange(n, 0, -1)}
    u = uniforms(columns)
    assert len(u.unique()) == n
    assert torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1].abs() < 4 / math.sqrt(n)
    swapped = uniforms(columns | {up: columns[down], down: columns[up]})
    same = columns[up] == columns[down]
    assert torch.equal(u == swapped, same)


def test_no_two_small_counters_collide():
    """Half a million combinations of small counters: as many numbers (1 in 65,000 by chance)."""
    grid = torch.cartesian_prod(torch.arange(32), torch.arange(16), torch.arange(256))
    u = torch.cat([uniform(*grid.unbind(1), purpose) for purpose in range(4)])
    assert len(u.unique()) == len(u) == 2**19


@pytest.mark.parametrize("axis", AXES)
def test_each_input_bit_moves_each_output_bit_half_the_time(axis):
    """Avalanche: every one of the 53 output bits, for every input bit, within 5.5 sigma of 1/2."""
    n = 2048
    generator = torch.Generator().manual_seed(1)
    base = {name: torch.randint(0, 2**62, (n,), generator=generator) for name in AXES[:3]}
    purpose, bits = 5, torch.arange(53)

    def words(columns: dict[str, torch.Tensor], purpose: int) -> torch.Tensor:
        return (uniform(*columns.values(), purpose) * 2**53).long()

    before = words(base, purpose)
    for bit in range(20 if axis == "purpose" else 63):
        if axis == "purpose":
            after = words(base, purpose ^ (1 << bit))
        else:
            after = words(base | {axis: base[axis] ^ (1 << bit)}, purpose)
        rates = ((before ^ after)[:, None] >> bits & 1).double().mean(dim=0)  # [53]
        assert (rates - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(n), f"{axis} bit {bit}"


def test_draw_uses_each_rows_own_seed_sample_and_position():
    rows = SamplingRows.of([SamplingParams(seed=3), SamplingParams(seed=4)], samples=[0, 2])
    got = draw(rows, torch.tensor([10, 11]))
    assert got.tolist() == [one(3, 0, 10), one(4, 2, 11)]
    assert draw(rows, torch.tensor([10, 11]), purpose=1).tolist() == [
        one(3, 0, 10, 1),
        one(4, 2, 11, 1),
    ]


# The inverse of the cumulative distribution


@settings(deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32)), min_size=1, max_size=40
    ).filter(any),
    u=st.one_of(st.sampled_from([0.0, LAST_U, 0.5]), st.floats(0, LAST_U)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_inverse_cdf_never_returns_an_impossible_token(weights, u, dtype):
    p = torch.tensor(weights, dtype=dtype)
    token = int(inverse_cdf(p[None], torch.tensor([u], dtype=torch.float64)))
    assert p[token] > 0
    mass = [sum(map(Fraction, p.tolist()[: n + 1])) for n in range(len(p))]
    slack = mass[-1] * Fraction(len(p), 2**52)  # what the running sum may be off
    below = mass[token - 1] if token else 0
    assert below - slack <= Fraction(u) * mass[-1] <= mass[token] + slack


def test_inverse_cdf_takes_first_and_last_possible_token_at_the_ends():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]] * 4)
    u = torch.tensor([0.0, 0.25 - 2.0**-54, 0.25, LAST_U], dtype=torch.float64)
    assert inverse_cdf(p, u).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.8},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_land_on_the_distribution(params):
    """40,000 draws from 6 tokens: none outside the filter, frequencies by chi-square.

    The shares expected are those of the plain specification below, not of the code under test.
    """
    logits = torch.tensor([2.0, -1.0, 1.2, 0.3, 1.9, -0.4])
    shares = torch.tensor(specification(logits.tolist(), **params))
    tokens = draws(logits, SamplingParams(seed=20, **params), 40_000)
    counts = tokens.bincount(minlength=6)
    possible = shares > 0
    assert counts[~possible].sum() == 0
    assert possible.sum() > 1
    assert chi_square_p(counts[possible], shares[possible]) > ALPHA


def test_draws_over_seeds_and_samples_land_on_the_distribution():
    logits, n = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5]), 20_000
    shares = logits.double().softmax(-1)
    by_seed = SamplingRows.of([SamplingParams(seed=s) for s in range(n)])
    by_sample = SamplingRows.of([SamplingParams(seed=5)] * n, samples=range(n))
    for rows in (by_seed, by_sample):
        tokens = sample(logits.expand(n, -1), rows, torch.full((n,), 7))
        assert chi_square_p(tokens.bincount(minlength=6), shares) > ALPHA


# Filters: each alone, their order, and what transformers makes of them


def specification(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """The documented order in plain Python: temperature, min-p, top-k, top-p, renormalise."""
    peak = max(logits)
    p = [math.exp((x - peak) / temperature) for x in logits]
    p = [x / sum(p) for x in p]
    p = [x if x >= min_p * max(p) else 0.0 for x in p]
    likeliest = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k > 0:
        likeliest = likeliest[:top_k]
    nucleus, total, held = [], math.fsum(p[i] for i in likeliest), 0.0
    for i in likeliest:
        if held / total >= top_p < 1:
            break
        nucleus.append(i)
        held += p[i]
    total = math.fsum(p[i] for i in nucleus)
    return [p[i] / total if i in nucleus else 0.0 for i in range(len(p))]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 10, 100]),
    top_p=st.sampled_from([0.125, 0.5, 0.75, 0.90625, 1.0]),
    min_p=st.sampled_from([0.0, 0.03125, 0.25, 1.0]),
)
def test_filters_come_in_the_documented_order(seed, **params):
    """Random logits, all filters at once; parameters are exact in float32, ties are excluded."""
    logits = random_logits(seed, 23)[0]
    got, right = distribution(logits, **params), specification(logits.tolist(), **params)
    assert torch.allclose(got, torch.tensor(right, dtype=torch.float64), rtol=1e-9, atol=1e-15)
    assert got.sum().item() == pytest.approx(1, abs=1e-12)
    assert (got > 0).tolist() == [x > 0 for x in right]


def test_every_pair_of_filters_in_the_other_order_would_show():
    """Cases in which the two orders keep different tokens, so that the order is really tested."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).double().log()
    assert kept(logits, temperature=2.0, top_p=0.78125) == [0, 1, 2]  # top-p first would keep 0, 1
    assert kept(logits, temperature=2.0, min_p=0.375) == [0, 1, 2]  # min-p first: 0, 1
    assert kept(logits, top_k=2, top_p=0.59375) == [0]  # top-p first: 0, 1
    assert kept(logits, min_p=0.5, top_p=0.609375) == [0]  # top-p first: 0, 1
    # min-p and top-k keep the likeliest by rank and by share: the two commute.
    assert kept(logits, min_p=0.25, top_k=2) == [0, 1]


def warped(logits: torch.Tensor, **params: float) -> torch.Tensor:
    """softmax of logits [R, V] after transformers' own processors, in the order given."""
    from transformers.generation import logits_process

    classes = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
    }
    for name, value in params.items():
        logits = classes[name](value)(None, logits)
    return logits.softmax(dim=-1)


@pytest.mark.parametrize(
    "params",
    [
        *({"temperature": t} for t in (0.01, 0.3, 0.7, 1.7, 100.0)),
        *({"top_k": k} for k in (1, 2, 7, 49, 50, 51, 10**7)),
        *({"top_p": p} for p in (0.05, 0.3, 0.6, 0.9, 0.99, 0.9999, 1.0)),
        *({"min_p": p} for p in (1e-6, 0.01, 0.1, 0.5, 1.0)),
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.6, "top_k": 8, "top_p": 0.6},
        {"temperature": 3.0, "min_p": 0.1},
        {"min_p": 0.02, "top_k": 12, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_filters_equal_transformers(params, dtype):
    """The same tokens survive, with the same probabilities, 64 rows of distinct logits."""
    logits = random_logits(3, 50, rows=64, dtype=dtype)
    got = probabilities(logits, solo(SamplingParams(seed=0, **params), 64))
    right = warped(logits, **params)
    assert torch.equal(got > 0, right > 0)
    # An exponent x carries a relative error of 2**-24 from our float32 temperature, in float32
    # once more from the division; exp(x) then has that of x, absolute.
    exponents = (logits.amax(-1) - logits.amin(-1)).max() / params.get("temperature", 1.0)
    assert torch.allclose(got, right, rtol=float(3 * 2**-24 * (2 + exponents)), atol=0)


def test_top_p_at_the_exact_boundary():
    """B52: the nucleus is the smallest set that holds top_p, so at 0.75 two tokens, not three."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert kept(logits, top_p=0.74) == [0, 1]
    assert kept(logits, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]
    assert torch.equal(distribution(logits, top_p=1.0), distribution(logits))


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-46, 1e-30, 1e-6])
def test_a_tiny_top_p_is_greedy_and_its_neighbour_unaffected(top_p):
    """B51: also where float32 has no such number and would call it 0."""
    logits = random_logits(0, 30, rows=2, dtype=torch.float32)
    rows = SamplingRows.of([SamplingParams(top_p=top_p, seed=1), SamplingParams(seed=2)])
    got = probabilities(logits, rows)
    assert got[0].nonzero().flatten().tolist() == [int(logits[0].argmax())]
    assert got[0].sum() == 1
    assert torch.equal(got[1], distribution(logits[1]))
    assert sample(logits, rows, torch.tensor([0, 0]))[0] == logits[0].argmax()


def test_a_top_p_that_float32_rounds_to_one_keeps_all():
    logits = random_logits(0, 30)[0]
    assert torch.equal(distribution(logits, top_p=1 - 2.0**-40), distribution(logits))


@pytest.mark.parametrize("batch", [1, 16])
def test_top_k_keeps_exactly_k_of_equal_tokens(batch):
    """B54: of ties the lowest ids stay, and top_k=1 is what greedy takes."""
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]).expand(batch, -1)
    for k in range(1, 6):
        got = probabilities(logits, solo(SamplingParams(top_k=k, seed=0), batch))
        assert torch.equal(got > 0, (torch.arange(5) < k).expand(batch, -1))
    equal = torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0]).expand(batch, -1)
    positions = torch.arange(batch)
    top_one = sample(equal, solo(SamplingParams(top_k=1, seed=9), batch), positions)
    greedy = sample(equal, solo(SamplingParams(temperature=0, seed=9), batch), positions)
    assert top_one.tolist() == greedy.tolist() == [1] * batch


def test_ties_go_to_the_lower_id_in_a_large_vocabulary():
    """B54: 50,257 logits of 3 values: a sort that is not stable would mix the ids of a value."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (50_257,), generator=generator).float()
    lowest = (logits == 2).nonzero().flatten()[:1000]
    assert kept(logits, top_k=1000) == lowest.tolist()


def test_ties_in_the_nucleus_go_to_the_lower_id():
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.625) == [0, 1, 2]
    assert kept([-9.0, 4.0, 4.0, -9.0, 4.0], top_p=0.5) == [1, 2]


@pytest.mark.parametrize("vocab", [100, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_greedy_takes_the_first_of_equal_maxima(vocab, dtype):
    logits = torch.zeros(8, vocab, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    winners = torch.randint(0, vocab, (8, 5), generator=generator)
    logits.scatter_(1, winners, 2.0)
    got = sample(logits, solo(SamplingParams(temperature=0, seed=0), 8), torch.arange(8))
    assert torch.equal(got, winners.amin(dim=1))


@pytest.mark.parametrize("k", [20, 21, 10**7, LARGEST, 0, -1])
def test_top_k_of_the_vocabulary_or_more_is_no_filter(k):
    """B55: neither a crash nor a change, 0 and -1 meaning all."""
    logits = random_logits(0, 20)[0]
    assert torch.equal(distribution(logits, top_k=k), distribution(logits))


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-40, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_tiny_temperature_is_greedy(temperature, dtype):
    """B53: logits up to 11, in half precision too; no overflow on the way."""
    logits = (random_logits(4, 40, rows=4) / 3).to(dtype)
    logits[:, 17] = 11.0
    params = SamplingParams(temperature=temperature, seed=0)
    got = probabilities(logits, solo(params, 4))
    assert got.isfinite().all()
    assert (got[:, 17] == 1).all()
    assert sample(logits, solo(params, 4), torch.arange(4)).tolist() == [17] * 4


def test_a_huge_temperature_is_nearly_uniform():
    logits = random_logits(4, 40)[0]
    got = distribution(logits, temperature=1e4)
    assert torch.allclose(got, torch.full((40,), 1 / 40, dtype=torch.float64), rtol=2e-3)
    assert torch.allclose(got, (logits / 1e4).softmax(-1), rtol=1e-7)
    assert got.argmax() == logits.argmax()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits_are_sampled_in_float32(dtype):
    logits = random_logits(8, 200, rows=6, dtype=dtype)
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_k=30, top_p=0.9)):
        got = probabilities(logits, solo(params, 6))
        assert got.dtype == torch.float32
        assert torch.equal(got, probabilities(logits.float(), solo(params, 6)))


def test_logits_are_left_as_they_were():
    logits = random_logits(1, 30, rows=3)
    before = logits.clone()
    sample(logits, solo(SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1), 3), torch.arange(3))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1e-8},
        {"temperature": 1e4},
        {"top_k": 7},
        {"top_k": 10**7},
        {"top_p": 0.999999},
        {"min_p": 1e-9},
        {"min_p": 0.0},
        {"temperature": 50.0, "top_k": 9, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
def test_masked_tokens_never_appear(params):
    """Logits of -inf with every filter: 0 of 20,000 draws, also when one token alone is left."""
    logits = random_logits(2, 12, dtype=torch.float32)[0]
    logits[[0, 3, 4, 11]] = -torch.inf
    counts = draws(logits, SamplingParams(seed=1, **params), 20_000).bincount(minlength=12)
    assert counts[[0, 3, 4, 11]].sum() == 0
    alone = torch.full((12,), -torch.inf)
    alone[5] = -3.0
    assert set(draws(alone, SamplingParams(seed=1, **params), 50).tolist()) == {5}


# Rows that are no distribution, and rows that share a batch


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 9, 19])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_broken_row_is_minus_one_and_alone(value, at, params):
    """B69: NaN or +inf first, in the middle, last; the rows above and below are unaffected."""
    logits = random_logits(5, 20, rows=3, dtype=torch.float32)
    rows, positions = solo(SamplingParams(seed=4, **params), 3), torch.arange(3)
    healthy = sample(logits, rows, positions)
    logits[1, at] = value
    assert sample(logits, rows, positions).tolist() == [int(healthy[0]), -1, int(healthy[2])]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_row_of_minus_infinities_is_minus_one(params):
    """B69: also beside a NaN, and with both infinities."""
    logits = random_logits(5, 20, rows=4, dtype=torch.float32)
    rows, positions = solo(SamplingParams(seed=4, **params), 4), torch.arange(4)
    healthy = sample(logits, rows, positions)
    logits[0] = -torch.inf
    logits[1, 3], logits[1, 4] = math.nan, -math.inf
    logits[3, 3], logits[3, 4] = math.inf, -math.inf
    assert sample(logits, rows, positions).tolist() == [-1, -1, int(healthy[2]), -1]


@settings(deadline=None, max_examples=60)
@given(
    batch=st.lists(all_params(), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([6, 50, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
def test_each_row_of_a_mixed_batch_is_its_solo_run(batch, seed, vocab, dtype):
    """B55, B60: greedy, top-k, nucleus and plain rows together, bit for bit as each alone."""
    logits = random_logits(seed, vocab, rows=len(batch), dtype=dtype)
    positions = torch.arange(len(batch)) * 7
    rows = SamplingRows.of(batch)
    together, tokens = probabilities(logits, rows), sample(logits, rows, positions)
    for i, params in enumerate(batch):
        alone, at = SamplingRows.of([params]), slice(i, i + 1)
        assert torch.equal(probabilities(logits[at], alone), together[at])
        assert torch.equal(sample(logits[at], alone, positions[at]), tokens[at])


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 1000, "top_p": 0.9}, {"min_p": 1e-4}, {"temperature": 0}], ids=str
)
def test_a_large_vocabulary_does_not_depend_on_the_batch(params, two_threads):
    """B60: torch splits one long row over threads, several rows not; a sum must not notice."""
    logits = random_logits(0, 128_256, rows=4, dtype=torch.float32)
    rows = [SamplingParams(seed=s, **params) for s in range(4)]
    together = probabilities(logits, SamplingRows.of(rows))
    for i in range(4):
        alone = probabilities(logits[i : i + 1], SamplingRows.of(rows[i : i + 1]))
        assert torch.equal(alone[0], together[i])


# The few likeliest tokens instead of all of them: the same tokens


def drawn_from_all(
    logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor
) -> torch.Tensor:
    """What `sample` says it gives: the inverse CDF of a distribution for which all are sorted."""
    largest = logits.amax(dim=-1)
    with mock.patch.object(sampling, "_may_try_few", lambda *_: False):
        all_of_it = probabilities(logits, rows)
    assert torch.equal(probabilities(logits, rows).nan_to_num(2), all_of_it.nan_to_num(2))
    tokens = inverse_cdf(all_of_it, draw(rows, positions))
    return torch.where(largest.isfinite(), tokens, -1)


def plain_torch() -> AbstractContextManager[object]:
    """Within it nothing is sampled by native code."""
    return mock.patch.object(native_sampling, "takes", lambda *_: False)


@st.composite
def hard_logits(draw_from: st.DrawFn, rows: int) -> torch.Tensor:
    """Logits [R, V]: flat and peaked, with ties, shares that are powers of two, -inf and NaN."""
    vocab, seed = draw_from(st.integers(2, 300)), draw_from(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    logits *= draw_from(st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]))
    if draw_from(st.booleans()):
        logits = logits.round()
    if draw_from(st.booleans()):
        logits *= math.log(2)
    spoilt, share = draw_from(
        st.sampled_from([(0.0, 0.0), (-math.inf, 0.3), (math.nan, 0.3 / vocab)])
    )
    logits[torch.rand(rows, vocab, generator=generator) < share] = spoilt
    kinds = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
    return logits.to(draw_from(kinds))


@settings(deadline=None, max_examples=300)
@given(st.data(), st.lists(all_params(), min_size=1, max_size=4), st.sampled_from([1, 3, 16]))
def test_the_likeliest_tokens_give_what_all_tokens_give(data, batch, candidates):
    """B55, B60: token for token, whatever C is, whoever is beside, at 16 positions of each row."""
    batch += [dataclasses.replace(p, top_p=0.75, temperature=1.0) for p in batch]
    logits = data.draw(hard_logits(len(batch))).repeat_interleave(16, dim=0)
    rows = SamplingRows.of([p for p in batch for _ in range(16)])
    positions = torch.arange(16).repeat(len(batch))
    with plain_torch(), mock.patch.object(sampling, "CANDIDATES", candidates):
        tokens = sample(logits, rows, positions)
    assert torch.equal(tokens, drawn_from_all(logits, rows, positions))


def test_a_share_at_the_last_bit_of_top_p_is_the_same_share():
    """One token has half of the mass, to the last bit: the order of the sum decides on the next."""
    rest = random_logits(0, 199, rows=400)
    logits = torch.cat((rest.logsumexp(dim=-1, keepdim=True), rest), dim=-1)
    rows, positions = solo(SamplingParams(seed=1, top_p=0.5), 400), torch.arange(400)
    sizes = (probabilities(logits, rows) > 0).sum(dim=-1)
    assert (sizes == 1).any() and (sizes == 2).any()
    with mock.patch.object(sampling, "CANDIDATES", 16):
        tokens = sample(logits, rows, positions)
    assert torch.equal(tokens, drawn_from_all(logits, rows, positions))


def test_a_nucleus_of_what_a_large_top_k_left_is_no_share_of_all():
    """64 nearly equal tokens, 40 of them left, 12 of those: 32 candidates know no mass of 40."""
    logits = random_logits(0, 64) / 100
    rows, positions = solo(SamplingParams(seed=1, top_k=40, top_p=0.3), 200), torch.arange(200)
    logits = logits.expand(200, -1)
    with mock.patch.object(sampling, "CANDIDATES", 32):
        tokens = sample(logits, rows, positions)
    assert len(tokens.unique()) == 12
    assert torch.equal(tokens, drawn_from_all(logits, rows, positions))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary_gives_the_same_tokens_from_its_likeliest(
    dtype, native, two_threads, monkeypatch
):
    """Some rows that 256 tokens settle, some that 4,096 do, some that nothing but all of V does."""
    if not native:
        monkeypatch.setattr(native_sampling, "takes", lambda *_: False)
    spreads = torch.tensor([6.0, 3.0, 2.0, 1.0, 0.0, 2.0, 0.0, 6.0])[:, None]
    logits = (random_logits(0, 20_000, rows=8) / 3 * spreads).to(dtype)
    params = [SamplingParams(seed=s, top_p=0.9) for s in range(6)]
    params += [SamplingParams(seed=6, top_k=3000), SamplingParams(seed=7, temperature=0)]
    rows, positions = SamplingRows.of(params), torch.arange(8)
    tokens = sample(logits, rows, positions)
    assert torch.equal(tokens, drawn_from_all(logits, rows, positions))
    for i in range(8):
        at = slice(i, i + 1)
        assert sample(logits[at], SamplingRows.of(params[at]), positions[at]) == tokens[i]


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.5}])
def test_a_number_that_no_sum_passes_finds_what_it_finds_among_all(params, monkeypatch):
    """A `uniform` that rounds to 1 is a fault, and is the same fault however tokens are found."""
    for module in (sampling, native_sampling):
        monkeypatch.setattr(module, "uniform", lambda seed, *args: torch.ones(len(seed)).double())
    logits = random_logits(0, 5000, rows=3)
    rows, positions = solo(SamplingParams(seed=1, **params), 3), torch.arange(3)
    assert sample(logits, rows, positions).tolist() == [0, 0, 0]


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.5}])
def test_a_usual_row_does_without_a_sort_of_all_tokens(params, monkeypatch):
    monkeypatch.setattr(native_sampling, "takes", lambda *_: False)
    logits = random_logits(0, 5000, rows=3, dtype=torch.float32)  # 240 to 350 tokens hold 0.9
    rows, positions = solo(SamplingParams(seed=1, **params), 3), torch.arange(3)
    expected = drawn_from_all(logits, rows, positions)
    monkeypatch.setattr(sampling, "_filtered", None)  # a call of it would raise
    assert torch.equal(sample(logits, rows, positions), expected)


def test_equal_seeds_in_one_batch_give_equal_tokens():
    """B60: whatever their rows; but the several answers of one request differ."""
    logits = random_logits(1, 300).expand(5, -1)
    params = [SamplingParams(seed=s) for s in (7, 1, 7, 2, 7)]
    sequences = [sample(logits, SamplingRows.of(params), torch.full((5,), n)) for n in range(16)]
    tokens = torch.stack(sequences, dim=1)  # [5, 16]
    assert torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[0], tokens[4])
    assert not torch.equal(tokens[0], tokens[1])
    triple = SamplingRows.of([SamplingParams(seed=7)] * 3, samples=[0, 1, 2])
    answers = [sample(logits[:3], triple, torch.full((3,), n)) for n in range(16)]
    again = [sample(logits[:3], triple, torch.full((3,), n)) for n in range(16)]
    assert len({tuple(a.tolist()) for a in torch.stack(answers, dim=1)}) == 3
    assert torch.equal(torch.stack(answers), torch.stack(again))
    assert torch.equal(torch.stack(answers)[:, 0], tokens[0])


def test_a_greedy_row_has_all_its_weight_on_the_argmax():
    got = distribution([0.5, 2.0, 2.0, -1.0], temperature=0, top_k=3, top_p=0.2, min_p=0.9)
    assert got.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_shapes_of_the_rows_depend_on_no_value():
    params = [SamplingParams(seed=1), SamplingParams(seed=2, top_k=5, top_p=0.5, temperature=0)]
    rows = SamplingRows.of(params)
    tensors = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.sample)
    assert all(t.shape == (2,) for t in tensors)
    assert rows.seed.tolist() == [1, 2]
    assert rows.sample.tolist() == [0, 0]
    assert (rows.filtered, rows.greedy) == (False, False)
    assert SamplingRows.of([SamplingParams(seed=1, top_k=3)]).filtered
    assert SamplingRows.of([SamplingParams(seed=1, temperature=0)]).greedy


# What is refused on construction

WHOLE = (True, False, 1.5, 1.0, "3", [1], math.nan, torch.tensor(True), np.bool_(True))
NOT_REAL = (True, False, "0.5", [0.5], 1j, math.nan, math.inf, -math.inf, np.bool_(True))
REAL = (*NOT_REAL, -1, -1e-9)
BAD = {
    "max_tokens": (*WHOLE, -1, -(10**30), 2**63, 2**64),
    "temperature": (*REAL, None, 10_001, 1e30, 10**400, np.float32("nan")),
    "top_k": (*WHOLE, None, -2, 2**63, 10**30),
    "top_p": (*REAL, None, 0, 0.0, -0.0, 1.5, 1 + 2**-52, 10**400),
    "min_p": (*REAL, None, 1.5, 1 + 2**-52, 10**400),
    "seed": (*WHOLE, -1, 2**63, 2**64),
    "ignore_eos": (0, 1, None, "yes", np.bool_(True), torch.tensor(True)),
    "min_tokens": (*WHOLE, None, -1, 2**63),
    "presence_penalty": (*NOT_REAL, None, -2.1, 2 + 1e-9, 1e30),
    "frequency_penalty": (*NOT_REAL, None, -2.1, 2 + 1e-9, 1e30),
    "repetition_penalty": (*REAL, None, 0, 0.0, 9e-5, 10_001, 1e30, 1e-300),
    "logprobs": (*WHOLE, -1, 21, 10**6, 2**64),
    "n": (*WHOLE, None, 0, -1, 129, 10**6, 2**64),
    "stop": (5, 1.5, True, b"x", {"a": 1}, {"a"}, iter(["a"])),
    "stop_token_ids": (5, 1.5, True, iter([1])),
}
RIGHT = {
    "max_tokens": "a whole number of 0 or more, or None",
    "temperature": "a number from 0 to 10,000",
    "top_k": "a whole number of 1 or more, or 0 or -1 for all",
    "top_p": "a number above 0 and at most 1",
    "min_p": "a number from 0 to 1",
    "seed": r"a whole number from 0 to 2\*\*63 - 1, or None",
    "ignore_eos": "True or False",
    "min_tokens": "a whole number of 0 or more",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number from 0.0001 to 10,000",
    "logprobs": "a whole number from 0 to 20, or None",
    "n": "a whole number from 1 to 128",
    "stop": "a string, a list of strings, or None",
    "stop_token_ids": "a list of token ids, or None",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param(field, value, id=f"{field}-{n}")
        for field, values in BAD.items()
        for n, value in enumerate(values)
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    """B56, B113, B114, B115: on construction, with the field, the value and the right range."""
    with pytest.raises(RequestError, match=f"^{field}=.*: expected {RIGHT[field]}"):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=field):  # for those who do not know our errors
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("max_tokens", np.int64(5), 5),
        ("max_tokens", 0, 0),
        ("max_tokens", None, None),
        ("top_k", np.int32(4), 4),
        ("top_k", np.uint8(4), 4),
        ("top_k", LARGEST, LARGEST),
        ("seed", 0, 0),
        ("seed", LARGEST, LARGEST),
        ("seed", np.uint64(LARGEST), LARGEST),
        ("temperature", np.float64(0.7), 0.7),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float16(0.5), 0.5),
        ("temperature", np.int64(2), 2.0),
        ("temperature", 10_000, 10_000.0),
        ("top_p", 1, 1.0),
        ("top_p", 5e-324, 5e-324),
        ("min_p", 1, 1.0),
        ("min_tokens", np.int8(3), 3),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", np.float32(0.5), 0.5),
        ("repetition_penalty", 10_000, 10_000.0),
        ("repetition_penalty", 1e-4, 1e-4),
        ("logprobs", np.int64(0), 0),
        ("n", np.int64(128), 128),
        ("min_p", np.float32(0.25), 0.25),
    ],
)
def test_numbers_of_numpy_become_plain_ones(field, value, stored):
    """Whatever counts as a number of its kind is taken and kept as Python's own, for JSON."""
    got = getattr(SamplingParams(**{field: value}), field)
    assert got == stored
    assert type(got) is type(stored)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ""}, "^stop: '' at position 0: expected a string, not empty"),
        ({"stop": ["a", ""]}, "^stop: '' at position 1: expected a string, not empty"),
        ({"stop": ["a", 5]}, "^stop: 5 at position 1: expected a string"),
        ({"stop": ["a", "b", None]}, "^stop: None at position 2: expected a string"),
        ({"stop": ["a"] * 65}, "^stop: 65 strings; expected at most 64"),
        ({"stop": ["a"] * 10**5}, "^stop: 100000 strings; expected at most 64"),
        ({"stop_token_ids": [3, -1]}, "^stop_token_ids: token id -1 at position 1: expected"),
        ({"stop_token_ids": [3, 1.0]}, "^stop_token_ids: token id 1.0 at position 1: expected"),
        ({"stop_token_ids": [True]}, "^stop_token_ids: token id True at position 0: expected"),
        ({"stop_token_ids": "12"}, "^stop_token_ids='12': expected a list of token ids, or None"),
        ({"stop_token_ids": b"x"}, "^stop_token_ids=b'x': expected a list of token ids, or None"),
        ({"stop_token_ids": {1: 2}}, "^stop_token_ids={1: 2}: expected a list of token ids"),
        ({"stop_token_ids": np.array(5)}, "^stop_token_ids=array.5.: expected a list of token ids"),
        ({"stop_token_ids": torch.tensor(5)}, "^stop_token_ids=tensor.5.: expected a list"),
        ({"stop_token_ids": [10**5000]}, "^stop_token_ids: token id a int at position 0"),
        ({"max_tokens": -(10**5000)}, "^max_tokens=a int: expected a whole number"),
        ({"stop_token_ids": [2**32]}, "^stop_token_ids: token id 4294967296 at position 0"),
        ({"stop_token_ids": [1] * 1025}, "^stop_token_ids: 1025 ids; expected at most 1024"),
        ({"min_tokens": 17}, "^min_tokens=17: expected at most max_tokens=16"),
        ({"min_tokens": 1, "max_tokens": 0}, "^min_tokens=1: expected at most max_tokens=0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_list_or_pair_is_refused_by_name(params, message):
    """B113, B115: the field, and in a list the position; bounds before anything is made of them."""
    with pytest.raises(RequestError, match=message) as refusal:
        SamplingParams(**params)
    assert len(str(refusal.value)) < 200


def test_lists_become_tuples_and_parameters_stay_hashable():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=np.array([3, 1, 3]), max_tokens=None)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 1, 3))
    assert {params: 1}[SamplingParams(stop=("a", "b"), stop_token_ids=[3, 1, 3], max_tokens=None)]
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=[], stop_token_ids=[]) == SamplingParams()
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ((), ())
    assert len(SamplingParams(stop=["a"] * 64, stop_token_ids=range(1024)).stop_token_ids) == 1024
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    assert SamplingParams(min_tokens=16, logprobs=20, n=128).seeded().n == 128


def test_defaults_are_vllms():
    """Its SamplingParams, field by field; an absent list is an empty one there too.

    `best_of` is that of OpenAI's completions.
    """
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 16,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "ignore_eos": False,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "n": 1,
        "best_of": None,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(n=3, best_of=2), "best_of=2: expected a whole number from n=3 to 128, or None"),
        (dict(best_of=129), "best_of=129: expected a whole number from n=1 to 128"),
        (dict(best_of=0), "best_of=0"),
        (dict(best_of=True), "best_of=True"),
        (dict(best_of=2.0), "best_of=2.0"),
    ],
)
def test_best_of_is_at_least_n(given, words):
    """B113"""
    with pytest.raises(RequestError, match=re.escape(words)):
        SamplingParams(**given)
    assert [SamplingParams(n=n, best_of=b).selects for n, b in ((1, 1), (2, None), (2, 2))] == [
        False,
        False,
        True,
    ]
    assert (SamplingParams(best_of=np.int64(5)).samples, SamplingParams(n=3).samples) == (5, 3)


def test_seed_zero_is_a_seed():
    """B114: 0 is no None."""
    assert SamplingParams(seed=0).seeded().seed == 0


def test_a_missing_seed_is_drawn_once():
    params = SamplingParams(temperature=0.5, top_k=3)
    seeds = {params.seeded().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed <= LARGEST for seed in seeds)
    assert max(seeds) > 2**55  # all 63 bits are used: 1 in 2**160 otherwise
    seeded = params.seeded()
    assert seeded.seeded() is seeded
    assert (seeded.temperature, seeded.top_k) == (0.5, 3)


def test_parameters_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 3.0


# --- rows ahead: what the tokens of a draft are judged by ----------------------------------------


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(0, 6), max_size=5),
    st.integers(0, 9),
    st.sampled_from([0.0, 1.3]),
)
@settings(max_examples=60)
def test_rows_ahead_are_those_of_the_longer_outputs(prompt, output, drafts, min_tokens, penalty):
    """Row i's penalties and masks include drafts 1 .. i; the row that it was made of is as before.

    To the last bit, of logits and of probabilities.
    """
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 20}
    options |= {
        "min_tokens": min_tokens,
        "presence_penalty": penalty,
        "frequency_penalty": -penalty,
    }
    params = SamplingParams(**options, repetition_penalty=1 + penalty)
    model = ([0, 3], 7)  # EOS ids, vocabulary

    def rows_after(outputs: list[list[int]]) -> SamplingRows:
        n, prefixes = len(outputs), [Prefix(prompt, one) for one in outputs]
        return SamplingRows.of([params] * n, "cpu", [2] * n, prefixes, *model)

    one = rows_after([output])
    ahead = one.ahead(torch.tensor(drafts, dtype=torch.int64))
    right = rows_after([output + drafts[:n] for n in range(len(drafts) + 1)])
    logits = torch.randn(len(drafts) + 1, 7, generator=torch.Generator().manual_seed(3)).double()
    assert torch.equal(sampling.adjust(logits, ahead), sampling.adjust(logits, right))
    assert torch.equal(probabilities(logits, ahead), probabilities(logits, right))
    position = torch.arange(len(logits))
    assert torch.equal(sample(logits, ahead, position), sample(logits, right, position))
    assert (ahead.filtered, ahead.greedy) == (right.filtered, right.greedy)
    untouched = rows_after([output])
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), untouched.tensors(), strict=True))
