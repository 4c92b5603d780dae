"""How many tokens to draft: never more than may be, and few where drafting does not pay."""

import copy
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spindle.decode.pace import HOPE, MEMORY, REST, ROW, Pace, check_k, levels, tokens_a_pass
from spindle.errors import RequestError

MANY = 10**6  # tokens that are still to come: no limit
SHARES = st.fractions(0, 1, max_denominator=50)


@given(SHARES, st.integers(0, 32))
def test_tokens_a_pass_is_the_sum_of_the_chances(a, k):
    """A pass gives one token, and one more for each draft that is reached and accepted."""
    exact = sum(a**n for n in range(k + 1))
    assert tokens_a_pass(float(a), k) == pytest.approx(float(exact), rel=1e-9)


def test_tokens_a_pass_at_the_ends():
    assert [tokens_a_pass(0, k) for k in (0, 1, 8)] == [1, 1, 1]
    assert [tokens_a_pass(1, k) for k in (0, 1, 8)] == [1, 2, 9]


def test_few_numbers_of_drafts_are_used():
    assert levels(5) == [5, 2, 1, 0]
    assert levels(8) == [8, 4, 2, 1, 0]
    assert levels(0) == [0]
    assert max(len(levels(k)) for k in range(33)) == 7


@pytest.mark.parametrize("wrong", [-1, 33, True, 1.5, "5", None, math.nan])
def test_a_k_that_cannot_be_is_refused(wrong):
    with pytest.raises(RequestError, match=r"k=.*: expected a whole number of 0 to 32"):
        check_k(wrong)
    with pytest.raises(RequestError, match="k="):
        Pace(wrong)


@given(st.integers(0, 32), st.integers(0, 40), st.lists(st.integers(0, 32), max_size=20))
def test_one_that_does_not_adapt_takes_the_most_that_fit(k, most, history):
    pace = Pace(k, cost=0.9, adaptive=False)
    for accepted in history:
        judged = min(accepted + 1, pace.next(MANY))
        pace.note(min(accepted, judged), judged)
    assert pace.next(most) == max(one for one in levels(k) if one <= most)


def estimate(outcomes: list[bool]) -> float:
    """The share accepted: each judged draft weighs MEMORY times the next one, the hope the least.

    Exactly, in fractions.
    """
    memory, (hoped, of) = Fraction(MEMORY), map(Fraction, HOPE)
    weights = [memory ** (len(outcomes) - 1 - n) for n in range(len(outcomes))]
    oldest = memory ** len(outcomes)
    accepted = hoped * oldest + sum(w for w, yes in zip(weights, outcomes, strict=True) if yes)
    return float(accepted / (of * oldest + sum(weights)))


@given(
    st.integers(1, 32), st.floats(0, 0.5), st.lists(st.integers(0, 32), max_size=25), st.booleans()
)
def test_it_takes_the_number_that_gives_most_tokens_for_its_price(k, cost, history, roomy):
    """Until it rests: E(k) for a pass that costs 1 + k (ROW + cost), of the numbers that fit."""
    pace, outcomes = Pace(k, cost), []
    for accepted in history:
        drafts = pace.next(MANY)
        accepted = min(accepted, drafts)
        judged = min(accepted + 1, drafts)
        outcomes += [True] * accepted + [False] * (judged - accepted)
        pace.note(accepted, judged)
        a = estimate(outcomes)
        gain = {n: tokens_a_pass(a, n) / (1 + n * (ROW + cost)) for n in levels(k)}
        best = max(gain.values())
        if gain[0] == best:
            return
        most = MANY if roomy else 1
        fits = {n: value for n, value in gain.items() if n <= most}
        assert fits[pace.next(most)] == pytest.approx(max(fits.values()), rel=1e-9)


def rows_of(k: int, cost: float, tokens: int) -> list[int]:
    """The drafts of each of so many rounds, of a sequence none of whose drafts is accepted."""
    pace, drafts = Pace(k, cost), []
    for _ in range(tokens):
        drafts.append(pace.next(MANY))
        pace.note(0, min(1, drafts[-1]))
    return drafts


@pytest.mark.parametrize("k", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("cost", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("tokens", [10, 100, 1000, 10_000])
def test_drafts_that_are_never_accepted_are_bounded(k, cost, tokens):
    """At most 28 rows a try; between tries it rests, at first 16 tokens, and twice as many each
    time up to 256. So in the long run a token costs 28 / 256 rows more at most.
    """
    drafts = rows_of(k, cost, tokens)
    rests, since = [], 0
    for n in drafts:
        if n and since:
            rests.append(since)
        since = 0 if n else since + 1
    assert rests == [min(REST[0] << n, REST[1]) for n in range(len(rests))]
    assert sum(drafts) <= 28 * (len(rests) + 1)
    assert sum(drafts) <= 28 * (5 + tokens / 256)
    assert (len(rests) > 0) == (tokens >= 100)


def test_it_comes_back_when_drafts_are_accepted_again():
    """A text that begins to repeat itself is found out within a rest, and stays at the most."""
    pace = Pace(5)
    for _ in range(2000):
        pace.note(0, min(1, pace.next(MANY)))
    paused = 0
    while not pace.next(MANY):
        pace.note(0, 0)
        paused += 1
    assert paused <= REST[1]
    for _ in range(50):
        assert pace.next(MANY) == 5
        pace.note(5, 5)
    paused = 0
    while pace.next(MANY):
        pace.note(0, 1)
    while not pace.next(MANY):
        pace.note(0, 0)
        paused += 1
    assert paused == REST[0]  # what was accepted has shortened the rest again


@pytest.mark.parametrize("k", [0, 1, 5, 8])
def test_a_draft_as_dear_as_a_pass_is_never_tried(k):
    """Even if all were accepted, k + 1 tokens would cost more than k + 1 passes."""
    assert set(rows_of(k, 1.0, 200)) == {0}


class Rounds(RuleBasedStateMachine):
    """Any history of rounds: limits hold, `next` changes nothing, and a twin says the same."""

    @initialize(k=st.integers(0, 32), cost=st.floats(0, 2), adaptive=st.booleans())
    def begin(self, k, cost, adaptive):
        self.k, self.adaptive = k, adaptive
        self.pace, self.twin = Pace(k, cost, adaptive), Pace(k, cost, adaptive)

    @rule(most=st.integers(0, 40), data=st.data())
    def a_round(self, most, data):
        drafts = self.pace.next(most)
        assert drafts <= most
        drafts = data.draw(st.sampled_from([drafts, 0, drafts // 2]))  # the drafter may have fewer
        accepted = data.draw(st.integers(0, drafts))
        judged = min(accepted + 1, drafts)
        for one in (self.pace, self.twin):
            one.note(accepted, judged)

    @rule(count=st.integers(1, 300))
    def rounds_without_drafts(self, count):
        for one in (self.pace, self.twin):
            for _ in range(count):
                one.note(0, 0)

    @precondition(lambda self: self.adaptive)
    @rule()
    def nothing_is_accepted(self):
        """It goes to 0, whatever was before."""
        for _ in range(60):
            drafts = self.pace.next(MANY)
            if not drafts:
                return
            for one in (self.pace, self.twin):
                one.note(0, 1)
        raise AssertionError("60 rounds without an accepted draft, and it still drafts")

    @rule()
    def everything_is_accepted(self):
        drafts = self.pace.next(MANY)
        for one in (self.pace, self.twin):
            one.note(drafts, drafts)

    @invariant()
    def next_is_of_the_set_and_changes_nothing(self):
        before = copy.deepcopy(vars(self.pace))
        for most in (0, 1, 3, MANY):
            now = self.pace.next(most)
            assert now in levels(self.k) and now <= most
            assert self.pace.next(most) == self.twin.next(most) == now
        assert vars(self.pace) == before == vars(self.twin)


TestRounds = Rounds.TestCase
