"""Times and what follows from them, with a clock that is turned by hand."""

import itertools
import json
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spindle.decode.stats import Speculation, Stats, StepTimes, percentile


def recorded(*events: tuple[float, int], arrival: float = 0.0, prompt_tokens: int = 7) -> Stats:
    """Stats of a call at `arrival` and tokens at the given times."""
    clock = iter([arrival, *(now for now, _ in events)])
    stats = Stats(prompt_tokens, seed=3, clock=lambda: next(clock))
    for _, tokens in events:
        stats.record(tokens)
    return stats


def timed(*times: float) -> StepTimes:
    """Steps that start and stop at these times, one after the other."""
    clock = iter(times)
    steps = StepTimes(torch.device("cpu"), lambda: next(clock))
    for _ in range(len(times) // 2):
        steps.start()
        steps.stop()
    return steps


def events() -> st.SearchStrategy[list[tuple[float, int]]]:
    """Arrivals of 1 to 5 tokens, at times that do not run backwards."""
    gaps = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=20)
    return gaps.map(
        lambda pairs: list(
            zip(itertools.accumulate(g / 8 for g, _ in pairs), (n for _, n in pairs), strict=True)
        )
    )


def test_tokens_that_arrive_together_share_the_gap_before_them():
    """B91: 1, 3, 1 tokens at 1.0, 1.3, 1.4 s: ttft 1 s, and 4 gaps of 0.1 s, not 2 of 0.2."""
    stats = recorded((1.0, 1), (1.3, 3), (1.4, 1))
    assert stats.new_tokens == 5
    assert stats.ttft_ms == pytest.approx(1000)
    assert stats.itl_ms == pytest.approx([100, 100, 100, 100])
    assert stats.tok_s == pytest.approx(5 / 1.4)
    assert stats.decode_tok_s == pytest.approx(10)


def test_tokens_with_the_first_one_have_no_gap():
    stats = recorded((1.0, 3), (1.5, 1))
    assert stats.itl_ms == pytest.approx([0, 0, 500])
    assert stats.decode_tok_s == pytest.approx(3 / 0.5)


@given(events(), st.integers(0, 100))
def test_times_add_up(arrivals, arrival):
    """B91, B93: one gap a token after the first; ttft and gaps add up to the whole."""
    arrivals = [(now + arrival, tokens) for now, tokens in arrivals]
    stats = recorded(*arrivals, arrival=float(arrival))
    gaps = stats.itl_ms
    assert len(gaps) == stats.new_tokens - 1 == sum(n for _, n in arrivals) - 1
    assert min(gaps, default=0) >= 0
    assert stats.ttft_ms >= 0
    whole = arrivals[-1][0] - arrival  # seconds
    assert stats.ttft_ms + sum(gaps) == pytest.approx(whole * 1e3)
    assert (stats.tok_s is None) == (whole == 0)
    if whole:
        assert stats.tok_s == pytest.approx(stats.new_tokens / whole)


def test_one_token_has_a_ttft_and_no_gap():
    """B93: the first token is the last; there is nothing between them."""
    stats = recorded((2.5, 1), arrival=2.0)
    assert stats.ttft_ms == pytest.approx(500)
    assert stats.itl_ms == []
    assert stats.decode_tok_s is None
    assert stats.tok_s == pytest.approx(2)
    assert stats.as_dict()["itl_p50_ms"] is None


def test_no_token_has_no_times():
    """B96: None where there is nothing to measure, never 0."""
    stats = recorded()
    timed = ("ttft_ms", "itl_p50_ms", "itl_p99_ms", "tok_s", "decode_tok_s")
    assert stats.new_tokens == 0
    assert stats.itl_ms == []
    assert [stats.as_dict()[name] for name in timed] == [None] * 5
    assert stats.summary() == "0 tokens after a prompt of 7"


def test_the_clock_is_read_once_at_arrival_and_once_an_event():
    reads = itertools.count(10)
    stats = Stats(1, clock=lambda: next(reads))
    stats.record()
    stats.record(4)
    assert stats.ttft_ms == pytest.approx(1000)
    assert stats.as_dict() == stats.as_dict()  # to read is not to measure again
    assert next(reads) == 13


def test_the_clock_is_real_by_default():
    before = time.perf_counter()
    stats = Stats(1)
    time.sleep(0.002)
    stats.record()
    assert 2 <= stats.ttft_ms <= (time.perf_counter() - before) * 1e3


def test_rates_count_new_tokens_only():
    """B99: the prompt is a number of its own, in no rate."""
    long, short = (recorded((1.0, 1), (2.0, 1), prompt_tokens=n) for n in (5000, 1))
    assert long.tok_s == short.tok_s == pytest.approx(1)
    assert long.decode_tok_s == pytest.approx(1)
    assert (long.prompt_tokens, long.new_tokens) == (5000, 2)


def test_as_dict_is_json_with_units_in_its_names():
    """B99: exactly these names; each time ends in its unit, each rate in its own."""
    stats = recorded((1.0, 1), (1.1, 1), (1.4, 1))
    stats.finish_reason = "length"
    stats.steps = timed(1.02, 1.09, 1.11, 1.38)
    got = stats.as_dict()
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert got == {
        "prompt_tokens": 7,
        "new_tokens": 3,
        "seed": 3,
        "finish_reason": "length",
        "stop_reason": None,
        "ttft_ms": pytest.approx(1000),
        "itl_p50_ms": pytest.approx(100),
        "itl_p99_ms": pytest.approx(300),
        "step_p50_ms": pytest.approx(70),
        "step_p99_ms": pytest.approx(270),
        "tok_s": pytest.approx(3 / 1.4),
        "decode_tok_s": pytest.approx(5),
    }


def test_summary_is_one_line():
    line = recorded((1.0, 1), (1.1, 1), (1.4, 1)).summary()
    assert line == (
        "3 tokens after a prompt of 7 · ttft 1000 ms · 2.1 tok/s · itl p50 100.0 ms, p99 300.0 ms"
    )


def test_a_token_that_takes_no_time_gives_no_rate():
    stats = recorded((0.0, 1))
    assert stats.tok_s is None
    assert stats.ttft_ms == 0
    assert "tok/s" not in stats.summary()


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120)


@given(VALUES, st.sampled_from([0, 25, 50, 75, 100]))
def test_percentile_is_numpys_inverted_cdf(values, p):
    assert percentile(values, p) == np.percentile(values, p, method="inverted_cdf")


@given(VALUES, st.integers(0, 100))
def test_percentile_is_its_definition(values, p):
    """The smallest value that at least p percent do not exceed, counted exactly."""
    right = next(
        v
        for v in sorted(values)
        if Fraction(sum(x <= v for x in values), len(values)) >= Fraction(p, 100)
    )
    before = list(values)
    assert percentile(values, p) == right
    assert values == before


def test_percentile_of_nothing_is_none():
    """B96: not 0."""
    assert percentile([], 50) is None


def test_p99_of_a_hundred_is_the_second_largest():
    assert percentile(range(100), 99) == 98
    assert percentile(range(101), 99) == 99
    assert percentile([5.0], 1) == percentile([5.0], 99) == 5.0


def test_step_times_are_those_of_the_clock_on_a_cpu():
    assert timed(1.0, 1.5, 2.0, 2.25).ms() == pytest.approx([500, 250])
    assert timed().ms() == []


def test_a_step_that_failed_has_no_time():
    """It was started and not stopped; the next one is timed from its own start."""
    clock = iter([1.0, 5.0, 5.5])
    steps = StepTimes(torch.device("cpu"), lambda: next(clock))
    steps.start()
    steps.start()
    steps.stop()
    assert steps.ms() == pytest.approx([500])


def test_on_a_gpu_a_step_is_a_pair_of_events_and_only_the_end_waits(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")
            self.at = len(log)

        def synchronize(self):
            log.append(f"wait for {self.at}")

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps = StepTimes(torch.device("cuda"))
    for _ in range(3):
        steps.start()
        steps.stop()
    assert log == ["record"] * 6
    assert steps.ms() == [1.0] * 3
    assert log[6:] == ["wait for 6"]


def test_the_summary_names_the_step_where_there_is_one():
    stats = recorded((1.0, 1), (1.1, 1))
    assert "step" not in stats.summary()
    stats.steps = timed(1.0, 1.08)
    assert stats.summary().endswith("step p50 80.0 ms")


# --- drafts --------------------------------------------------------------------------------------


@given(events())
def test_tokens_recorded_one_by_one_at_a_time_are_one_event(arrivals):
    """B91: those of a pass come as if they had been recorded together; the clock is not read."""
    together = recorded(*arrivals)
    reads = itertools.count()
    apart = Stats(7, seed=3, clock=lambda: float(next(reads)))
    for now, tokens in itertools.groupby(arrivals, key=lambda event: event[0]):
        for _ in range(sum(n for _, n in tokens)):
            apart.record(at=now)
    assert next(reads) == 1  # at the arrival, which is 0 for both
    assert apart.new_tokens == together.new_tokens
    assert apart.ttft_ms == together.ttft_ms
    assert sum(apart.itl_ms) == pytest.approx(sum(together.itl_ms))
    assert apart.tok_s == together.tok_s


def test_tokens_of_a_pass_share_the_gap_before_it():
    stats = Stats(7, clock=lambda: 0.0)
    for at in (1.0, 1.3, 1.3, 1.3, 1.4):
        stats.record(at=at)
    assert stats.itl_ms == pytest.approx([100, 100, 100, 100])


def test_without_drafts_there_is_nothing_to_say_of_them():
    stats = recorded((1.0, 1))
    assert stats.acceptance_rate is None
    assert "speculation" not in stats.as_dict() and "draft" not in stats.summary()


def noted(*tokens: tuple[bool, bool], **counts) -> Speculation:
    speculation = Speculation(**counts)
    for drafted, accepted in tokens:
        speculation.note(drafted, accepted)
    return speculation


RUN = ((True, True), (True, True), (True, False)), ((True, True), (False, False)), ((False, False),)


def test_what_became_of_the_drafts():
    """B48: a pass with 2 of 5 drafts accepted, one with 1 of 1, one without a draft."""
    parts = [token for one in RUN for token in one]
    one = noted(*parts, passes=3, proposed=6, draft_s=1.0, pass_s=3.0)
    assert (one.tokens, one.judged, one.accepted) == (6, 4, 3)
    assert (one.acceptance_rate, one.tokens_per_pass, one.draft_share) == (0.75, 2, 0.25)
    assert one.summary() == "2.00 tokens a pass, 75% of 4 drafts accepted"
    stats = recorded((1.0, 1))
    stats.speculation = one
    assert stats.acceptance_rate == 0.75
    assert stats.summary().endswith(" · 2.00 tokens a pass, 75% of 4 drafts accepted")
    got = stats.as_dict()["speculation"]
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert got == {
        "passes": 3,
        "tokens": 6,
        "proposed": 6,
        "judged": 4,
        "accepted": 3,
        "acceptance_rate": 0.75,
        "tokens_per_pass": 2,
        "draft_share": 0.25,
    }


def test_of_no_drafts_there_are_no_rates():
    """B96: None, never 0 of 0; and 0 where all were rejected."""
    none = Speculation()
    assert [none.acceptance_rate, none.tokens_per_pass, none.draft_share] == [None] * 3
    assert none.summary() == "no drafts"
    assert noted((False, False), passes=1).summary() == "no drafts"
    rejected = noted((True, False), passes=1, proposed=4)
    assert rejected.summary() == "1.00 tokens a pass, 0% of 1 drafts accepted"


COUNTS = st.builds(
    Speculation, *[st.integers(0, 50)] * 5, *[st.integers(0, 64).map(lambda n: n / 8)] * 2
)


@given(st.lists(st.none() | COUNTS, max_size=5))
def test_the_total_is_the_sum_of_each(parts):
    """None of none; and the parts are as before."""
    there = [vars(part).copy() for part in parts if part is not None]
    total = Speculation.total(iter(parts))
    if not there:
        assert total is None
        return
    assert vars(total) == {name: sum(one[name] for one in there) for name in there[0]}
    assert [vars(part) for part in parts if part is not None] == there
