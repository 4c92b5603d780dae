"""Sampling in native code: the tokens of plain torch, and which rows are left over for it."""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sampling import (
    LARGEST,
    LAST_U,
    all_params,
    drawn_from_all,
    hard_logits,
    plain_torch,
    random_logits,
    solo,
)

from spindle.decode import sampling
from spindle.decode.capture import Log
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingParams, SamplingRows, sample
from spindle.kernels import build, native_sampling
from spindle.kernels.native_sampling import UNSETTLED

pytestmark = pytest.mark.skipif(
    not native_sampling.available(), reason=f"no native code: {build.why_not('sampling')}"
)
SLACK, NARROW = 2.0**-20, 2.0**-22  # of a row's mass, as in sampling.cpp: the weights ours, torch's
EDGES = (0, 1, 15, 16, 63, 64, 127, 128, 198, 199)  # of vectors, of blocks, and of 200 tokens
VOCAB = 49_152


def at(logits: torch.Tensor, u: list[float], exact: bool = False, **params: float) -> list[int]:
    """What native code draws from logits [V] at each of the numbers u, -2 where it cannot tell.

    exact: whether it is given the weights that torch has for them.
    """
    rows = solo(SamplingParams(seed=0, **params), len(u))
    logits = logits.float().expand(len(u), -1).contiguous()
    weights = sampling._weighed(sampling._scaled(logits, rows), rows) if exact else None
    columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    numbers = torch.tensor(u, dtype=torch.float64)
    tokens, left_over = native_sampling.sample(logits, logits, *columns, numbers, weights)
    assert left_over == (tokens == UNSETTLED).sum()
    return tokens.tolist()


def ready_to_speak(seed: int, rows: int) -> torch.Tensor:
    """Logits [R, 49152] as a language model has them: a crowd, and some words far ahead."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator) * 2.2
    ahead = torch.randint(VOCAB, (rows, 40), generator=generator)
    return logits.scatter_(1, ahead, torch.randn(rows, 40, generator=generator) * 2 + 9)


# The same tokens


@settings(deadline=None, max_examples=400)
@given(st.data(), st.lists(all_params(), min_size=1, max_size=4))
def test_native_tokens_are_those_of_plain_torch(data, batch):
    """B55, B60: ties, shares that are powers of two, -inf, NaN; at 16 positions of each row."""
    batch += [dataclasses.replace(p, top_p=0.75, temperature=1.0) for p in batch]
    logits = data.draw(hard_logits(len(batch))).float().repeat_interleave(16, dim=0)
    rows = SamplingRows.of([p for p in batch for _ in range(16)])
    positions = torch.arange(16).repeat(len(batch))
    expected = drawn_from_all(logits, rows, positions)
    assert torch.equal(sample(logits, rows, positions), expected)


MIXTURES = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 3000},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.1, "top_p": 0.999, "min_p": 1e-9},
]


@pytest.mark.parametrize("params", MIXTURES, ids=str)
def test_usual_rows_are_settled_natively(params, monkeypatch):
    """48 rows of 49,152 logits, not one of which plain torch alone has to draw."""
    logits = ready_to_speak(0, 12).repeat(4, 1)
    rows, positions = solo(SamplingParams(seed=5, **params), 48), torch.arange(48)
    expected = drawn_from_all(logits, rows, positions)
    monkeypatch.setattr(sampling, "_drawn", None)  # a call of it would raise
    assert torch.equal(sample(logits, rows, positions), expected)
    assert len(expected.unique()) > 4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("top_p", [0.312345, 0.912345, 0.999])
def test_a_nucleus_of_nearly_all_tokens_is_found_natively(spread, top_p, exact):
    """Up to 20,000 tokens in it; of those at equal height the lower ids."""
    logits = random_logits(0, 20_000, dtype=torch.float32).expand(40, -1) / 3 * spread
    rows, positions = solo(SamplingParams(seed=1, top_p=top_p), 40), torch.arange(40)
    tokens = torch.tensor(
        at(logits[0], sampling.draw(rows, positions).tolist(), exact, top_p=top_p)
    )
    expected = drawn_from_all(logits, rows, positions)
    left_over = tokens == UNSETTLED
    assert left_over.sum() <= 2 or not exact  # with ours all rows are next to top_p, or none is
    assert torch.equal(tokens[~left_over], expected[~left_over])
    assert torch.equal(sample(logits, rows, positions), expected)


@pytest.mark.parametrize("top_k", [1, 2, 999, 1000, 1001, 19_999])
def test_top_k_takes_the_lower_of_equal_ids_natively(top_k):
    """B54: 20,000 logits of three values."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (20_000,), generator=generator).float().expand(40, -1)
    rows, positions = solo(SamplingParams(seed=1, top_k=top_k), 40), torch.arange(40)
    tokens = sample(logits, rows, positions)
    assert torch.equal(tokens, drawn_from_all(logits, rows, positions))
    likeliest = logits[0].sort(descending=True, stable=True).indices[:top_k]
    assert torch.isin(tokens, likeliest).all()


@pytest.mark.parametrize("params", [{"top_p": 5e-324}, {"top_k": 1}, {"top_k": 700}], ids=str)
@pytest.mark.parametrize("peak", [0.0, -70.0, 50.0])
def test_a_row_of_equal_tokens_is_cut_by_id(params, peak):
    """B51, B54: more of them than are looked at one by one."""
    logits = torch.full((2000,), peak)
    last = params.get("top_k", 1) - 1
    assert at(logits, [1e-5, 1 - 1e-5], **params) == [0, last]
    logits[7] = peak + 1  # alone likelier: half of the rest
    tokens = at(logits, [0.5], **params)
    assert tokens == [last // 2] if last else tokens == [7]


def test_a_tie_of_scaled_logits_is_one_even_if_the_logits_differ():
    """B54: 1 + 2^-23 and 1 are 9,999 below the largest, both of them, in float32."""
    logits = torch.tensor([1.0, 1 + 2**-23, 1e4, 1.0])
    assert at(logits, [0.1, 0.45, 0.7, 0.9], temperature=1e4, top_k=2) == [0, 2, 2, 2]
    rows = solo(SamplingParams(seed=3, temperature=1e4, top_k=2), 64)
    logits, positions = logits.expand(64, -1), torch.arange(64)
    assert torch.equal(sample(logits, rows, positions), drawn_from_all(logits, rows, positions))


def test_rows_do_not_depend_on_those_beside_them(two_threads):
    """B60: alone and in a batch, on two threads; rows that are left over, too."""
    params = [SamplingParams(seed=n, **mixture) for n, mixture in enumerate(MIXTURES)]
    params += [SamplingParams(seed=1, temperature=0), SamplingParams(seed=2, min_p=0.5)]
    logits, positions = ready_to_speak(1, len(params)), torch.arange(len(params))
    logits[-1] = -math.log(2)  # half as likely as the first: none can tell, but torch
    logits[-1, 0] = 0.0
    tokens = sample(logits, SamplingRows.of(params), positions)
    for n, one in enumerate(params):
        row = slice(n, n + 1)
        assert sample(logits[row], SamplingRows.of([one]), positions[row]) == tokens[n]


# Greedy rows, and rows that are no distribution


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_number_is_found_wherever_it_is(edge, temperature):
    """B69: and it makes its own row -1, no other."""
    logits = random_logits(5, 200, rows=7, dtype=torch.float32)
    logits[1, edge], logits[3, edge] = math.nan, math.inf
    logits[5] = -math.inf
    rows = solo(SamplingParams(seed=4, temperature=temperature), 7)
    tokens = sample(logits, rows, torch.arange(7))
    assert (tokens == -1).tolist() == [False, True, False, True, False, True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_mask_covers_is_found_too(value):
    """B69: min_tokens puts -inf over it, and the row is no distribution still."""
    logits = random_logits(5, 200, rows=2, dtype=torch.float32)
    logits[0, 7] = value
    for temperature in (0.0, 1.0):
        params = [SamplingParams(seed=4, temperature=temperature, min_tokens=3)] * 2
        rows = SamplingRows.of(
            params, prefixes=[Prefix([1])] * 2, eos_ids=[7], vocab_size=logits.shape[1]
        )
        tokens = sample(logits, rows, torch.arange(2))
        assert tokens[0] == -1 and tokens[1] >= 0


@pytest.mark.parametrize("edge", EDGES)
def test_greedy_takes_the_first_of_equal_maxima_natively(edge):
    logits = -random_logits(5, 200, dtype=torch.float32).abs() - 1
    logits[0, edge:] = logits[0, edge:].clamp(min=-0.5)
    assert native_sampling.greedy(logits, logits).tolist() == [edge]
    logits[0, edge] = -0.0  # is no less than 0
    logits[0, edge + 1 :] = 0.0
    assert native_sampling.greedy(logits, logits).tolist() == [edge]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 64, 65, 1000])
def test_every_token_can_be_the_last_and_only_one(vocab):
    logits = torch.full((vocab,), -math.inf)
    logits[-1] = -3.0
    for params in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0}, {"min_p": 1.0}):
        assert at(logits, [0.25, 0.75], **params) == [vocab - 1] * 2


# What is left over


WEIGHTS = [torch.arange(64) / -3.0, -(2.0 ** torch.arange(-149.0, 7)), torch.linspace(-90, 0, 9973)]


def test_weights_are_as_exact_as_the_slack_takes_them_to_be():
    """2^-22 of e^x here, 2^-23 in torch: in every binade, and at the ends."""
    dense = -torch.rand(10**6, generator=torch.Generator().manual_seed(0)) * 87.33
    x = torch.cat([*WEIGHTS, dense])
    x = x[x >= -87.33]
    exact = x.double().exp()
    for weights, bound in ((native_sampling.weights(x), 2.0**-22), (x.exp(), 2.0**-23)):
        assert ((weights.double() - exact).abs() <= bound * exact).all()
    ends = native_sampling.weights(torch.tensor([0.0, -0.0, -87.34, -1e30, -math.inf]))
    assert ends.tolist() == [1, 1, 0, 0, 0]


SLACKS = [pytest.param(False, SLACK, id="own"), pytest.param(True, NARROW, id="given")]


@pytest.mark.parametrize(("exact", "slack"), SLACKS)
@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.999}], ids=str)
def test_a_number_at_the_edge_between_two_tokens_is_left_over(params, exact, slack):
    """Four equal tokens of five: their edges at the quarters, and the ends of the interval."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -30.0])
    near, far = slack / 2, 2 * slack
    edges = [0.0, 0.25, 0.5, 0.75, LAST_U, 1.0]
    assert at(logits, edges, exact, **params) == [UNSETTLED] * 6
    assert at(logits, [0.25 - near, 0.25 + near], exact, **params) == [UNSETTLED] * 2
    assert at(logits, [0.25 - far, 0.25 + far, 0.75 - far], exact, **params) == [0, 1, 2]
    assert at(logits, [far, 0.5 - far, 0.5 + far, 1 - far], exact, **params) == [0, 1, 2, 3]


@pytest.mark.parametrize(("exact", "slack"), SLACKS)
@pytest.mark.parametrize("params", [{}, {"top_k": 299}, {"top_p": 0.99999}], ids=str)
def test_an_edge_between_two_blocks_is_an_edge(params, exact, slack):
    """Token 63 is the last of its block, and 64 and 65, of no weight, the first of the next."""
    logits = torch.full((300,), -math.inf)
    logits[63] = logits[66] = 0.0
    u = [0.5 - 2 * slack, 0.5, 0.5 + 2 * slack]
    assert at(logits, u, exact, **params) == [63, UNSETTLED, 66]


@pytest.mark.parametrize("filler", [0, 1000])
def test_a_share_next_to_top_p_is_left_over(filler):
    """B52: 1/2, 1/4, 1/8, 1/8: whether the second one stays is for torch to say at 0.5."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * filler).log()
    for exact, slack in ((False, SLACK), (True, 2.0**-25)):  # float32 has these beside 0.5
        assert at(logits, [0.9], exact, top_p=0.5) == [UNSETTLED]
        assert at(logits, [0.9], exact, top_p=0.5 - 2 * slack) == [0]
        assert at(logits, [0.9], exact, top_p=0.5 + 2 * slack) == [1]
        assert at(logits, [0.9], exact, top_p=0.75) == [UNSETTLED]
        assert at(logits, [0.9], exact, top_p=0.75, top_k=2) == [1]  # of two thirds and a third
        assert at(logits, [0.1], exact, top_p=5e-324) == [0]


def test_a_share_that_the_order_of_a_sum_decides_is_left_over():
    """Half of the mass, and 64 tokens besides that a sum of 2 forgets if they come one by one."""
    weights = 2.0 ** -torch.tensor([0.0, *range(1, 31), 30, *[54] * 64])
    by_rank = weights.double().cumsum(dim=0)[-1]
    assert (by_rank, by_rank + 64 * 2.0**-54) == (2, 2 + 2.0**-48)
    logits, u = weights.log()[None], torch.tensor([0.9], dtype=torch.float64)
    rows = solo(SamplingParams(seed=0, top_p=0.5), 1)
    columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    tokens, _ = native_sampling.sample(logits, logits, *columns, u, weights[None])
    assert tokens == UNSETTLED


def test_a_weight_next_to_min_p_is_left_over():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for more in ({}, {"top_k": 3}, {"top_p": 0.99}):
        assert at(logits, [0.9], min_p=0.5, **more) == [UNSETTLED]
        assert at(logits, [0.9], True, min_p=0.5, **more) == [1]  # torch has said so
        assert at(logits, [0.9], min_p=0.5 + 2 * SLACK, **more) == [0]
        assert at(logits, [0.9], min_p=0.5 - 2 * SLACK, **more) == [1]
        assert at(logits, [0.9], min_p=1.0, **more) == [0]  # e^0 is 1 to the last bit
        assert at(logits, [0.9], min_p=1e-40, **more) != [UNSETTLED]


def test_rows_that_are_left_over_are_drawn_by_torch(monkeypatch):
    """And no others: two of four, each with its own parameters and number."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4).log()
    params = [SamplingParams(seed=n, top_p=p) for n, p in enumerate((0.4, 0.5, 0.6, 0.75))]
    rows, positions = SamplingRows.of(params), torch.arange(4)
    expected = drawn_from_all(logits, rows, positions)
    seen, drawn = [], sampling._drawn

    def watched(logits, rows, u, C):
        seen.append(rows.top_p.tolist())
        return drawn(logits, rows, u, C)

    monkeypatch.setattr(sampling, "_drawn", watched)
    assert torch.equal(sample(logits, rows, positions), expected)
    assert seen == [[0.5], [0.75]]  # one by one: none depends on the other


# The uniform number, and who goes the plain way


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, LARGEST)] * 3), min_size=1, max_size=5), st.integers(0))
@example([(0, 0, 0), (LARGEST,) * 3], 2**31)
def test_native_uniform_numbers_are_the_documented_ones(rows, purpose):
    """B60: all 53 bits of them."""
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    purpose %= 2**31
    u = native_sampling.uniform(*columns, purpose)
    assert torch.equal(u, sampling.uniform(*columns, purpose))


def test_columns_and_logits_may_lie_apart():
    """A row of a larger tensor, one row for all, every second number."""
    logits = ready_to_speak(2, 1)
    pairs = torch.stack((logits[0], logits[0].flip(0)), dim=1)  # [V, 2]
    rows = SamplingRows.of([SamplingParams(seed=n // 2, top_k=50) for n in range(12)])
    rows, positions = rows.select(torch.arange(12)), torch.arange(12)
    every_second = {
        name: getattr(rows, name)[::2]
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "sample")
    }
    halved = dataclasses.replace(rows, **every_second)
    expected = sample(logits.expand(12, -1).contiguous(), rows, positions)[::2]
    assert torch.equal(sample(logits.expand(6, -1), halved, positions[::2]), expected)
    assert torch.equal(sample(pairs.T[:1].expand(6, -1), halved, positions[::2]), expected)


def test_only_float32_on_a_cpu_goes_natively_and_nothing_that_is_recorded(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("native code was called")

    logits, positions = random_logits(0, 100, rows=2, dtype=torch.float32), torch.arange(2)
    for rows in (solo(SamplingParams(seed=1), 2), solo(SamplingParams(seed=1, temperature=0), 2)):
        expected = sample(logits, rows, positions)
        with monkeypatch.context() as patch:
            patch.setattr(native_sampling, "_sample", refuse)
            with pytest.raises(AssertionError, match="native code"):
                sample(logits, rows, positions)
            sample(logits.double(), rows, positions)
            sample(logits.half(), rows, positions)
            fixed = dataclasses.replace(rows, fixed_shapes=True)
            assert torch.equal(sample(logits, fixed, positions), expected)
            with plain_torch():
                assert torch.equal(sample(logits, rows, positions), expected)
            with Log() as log:  # would not see native code
                logged = sample(logits, rows, positions)
            assert torch.equal(logged, expected) and log.launches


def test_without_native_code_tokens_are_the_same(monkeypatch):
    logits, positions = ready_to_speak(3, 3), torch.arange(3)
    rows = SamplingRows.of([SamplingParams(seed=1, **one) for one in MIXTURES[:3]])
    expected = sample(logits, rows, positions)
    monkeypatch.setattr(native_sampling, "_library", lambda: None)
    assert not native_sampling.takes(logits)
    assert torch.equal(sample(logits, rows, positions), expected)
