"""Log-probabilities: the model's own, whatever is sampled from, with the sampled token once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spindle.decode.logprobs import Logprob, logprob_table, token_logprobs


def record(logits: list[float] | torch.Tensor, token: int, k: int):
    table = logprob_table(torch.as_tensor(logits)[None], torch.tensor([token]), k)
    assert table.shape == (1, 1 + min(k, len(logits)), 3)
    return token_logprobs(table[0].tolist())


def rank(logits: list[float], token: int) -> int:
    return 1 + sum(other > logits[token] for other in logits)


@given(
    st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=30),  # small numbers: many ties
    st.integers(0, 29),
    st.integers(0, 20),
)
def test_the_record_is_the_raw_log_softmax_with_the_token_once(logits, token, k):
    """k or k + 1 entries by rank, of equals the lower id first; at most as many as there are."""
    token %= len(logits)
    total = math.log(math.fsum(map(math.exp, logits)))
    got = record(torch.tensor(logits, dtype=torch.float64), token, k)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]
    assert [one.token_id for one in got.top] == order + [token] * (token not in order)
    assert got.sampled in got.top
    assert got.sampled.token_id == token
    for one in got.top:
        assert one.rank == rank(logits, one.token_id)
        assert one.logprob == pytest.approx(logits[one.token_id] - total, abs=1e-12)


def test_ties_share_a_rank_and_go_to_the_lower_id():
    got = record([1.0, 5.0, 2.0, 5.0, 5.0], 4, 2)
    assert [(one.token_id, one.rank) for one in got.top] == [(1, 1), (3, 1), (4, 1)]
    assert [(o.token_id, o.rank) for o in record([1.0, 5.0, 2.0, 5.0], 2, 3).top] == [
        (1, 1),
        (3, 1),
        (2, 3),
    ]


def test_no_alternatives_still_report_the_sampled_token():
    got = record([0.0, 0.0], 1, 0)
    assert got.top == (got.sampled,)
    assert got.sampled == Logprob(1, pytest.approx(math.log(0.5)), 1)


def test_more_than_the_vocabulary_is_the_vocabulary():
    """B56: no crash where k exceeds the number of logits."""
    assert len(record([0.0, 1.0, 2.0], 0, 20).top) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_reported_in_float32(dtype):
    logits = (torch.randn(300, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    right = logits.double().log_softmax(-1)
    for one in record(logits, 7, 20).top:
        assert one.logprob == pytest.approx(right[one.token_id].item(), rel=1e-5)


def test_a_large_id_survives_the_table():
    """Ids and ranks travel as float64, which holds integers up to 2**53."""
    logits = torch.zeros(200_001)
    logits[200_000] = -1.0
    assert record(logits, 200_000, 1).sampled == Logprob(
        200_000, pytest.approx(-1 - math.log(200_000 + math.exp(-1)), rel=1e-6), 200_001
    )


def test_impossible_tokens_are_minus_infinity():
    got = record([0.0, -math.inf, 0.0], 0, 3)
    assert [one.logprob for one in got.top] == [*[pytest.approx(-math.log(2))] * 2, -math.inf]


def test_rows_do_not_depend_on_each_other():
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, 0, 999, 17, -1])  # the last row had no distribution
    together = logprob_table(logits, tokens, 4)
    for i in range(5):
        alone = logprob_table(logits[i : i + 1], tokens[i : i + 1], 4)
        assert torch.equal(alone[0], together[i])
    assert together[4, 0, 0] == -1
