"""A fleet, simulated: one replica is the real scheduler in counts and times, and many add up."""

import ctypes
import heapq
import itertools
import json
import math
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import numpy as np
import psutil
import pytest
import shapes
from ctrl_c import broken_off
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle import LLM, cli
from spindle.bench import (
    fleet,
    fleet_costs,
    fleet_measure,
    fleet_native,
    fleet_tables,
    fleet_trace,
)
from spindle.bench.fleet_costs import PS, Costs
from spindle.bench.fleet_measure import Timed
from spindle.bench.fleet_replica import Cache, Gaps, Replica, Shape, begun, lasting
from spindle.bench.fleet_router import POLICIES, Router
from spindle.bench.fleet_trace import Trace, Traffic
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kernels import build
from spindle.kvcache.blocks import BlockPool
from spindle.model.weights import random_model
from spindle.serve.request import Request
from spindle.serve.scheduler import Scheduler

COSTS = Costs(7_000, 1_100, 130, 3, 170, 7)
IDS = 1_000_000  # ids that one conversation, or one system prompt, has for itself

NATIVE = fleet_native.available()
needs_cpp = pytest.mark.skipif(not NATIVE, reason=f"no native code: {build.why_not('fleet')}")
FORMS = [False, True] if NATIVE else [False]  # Python, and C++ where it is to be had
in_both = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_cpp)])


# --- the oracle: the real scheduler, and a clock that the costs move ------------------------------


class Real:
    """A trace through one `Scheduler`, with answers of zeros; what each request saw, and when."""

    def __init__(self, trace, shape, costs):
        self.trace, self.costs = trace, costs
        longest = int((trace.prompt + trace.output).max())
        self.scheduler = Scheduler(
            BlockPool(shape.num_blocks, shape.block_size),
            max_seqs=shape.max_seqs,
            max_batch_tokens=shape.max_batch_tokens,
            max_model_len=longest,
        )
        self.due = [(int(trace.gap_ps[n]), n) for n in np.flatnonzero(trace.first)]
        heapq.heapify(self.due)
        self.requests, self.now, self.steps, self.gaps = {}, 0, 0, []
        self.decoding, self.last_ps = set(), {}

    def run(self):
        while self.due or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                self.now = max(self.now, self.due[0][0])
            while self.due and self.due[0][0] <= self.now:
                self.arrive(*heapq.heappop(self.due))
            self.step()
        return self

    def arrive(self, when, n):
        trace, order = self.trace, len(self.requests)
        output = int(trace.output[n])
        params = SamplingParams(max_tokens=output, temperature=0, seed=0, ignore_eos=True)
        self.requests[n] = Request(str(n), self.prompt(n), params, order, when)
        self.scheduler.add(self.requests[n])

    def prompt(self, n):
        """The ids: of the system prompt, then of each turn's message, and zeros of each answer."""
        trace, system = self.trace, int(self.trace.system[n])
        ids = list(range(system * IDS + 1, system * IDS + 1 + int(trace.system_tokens[system])))
        own, turn = itertools.count((1000 + int(trace.session[n])) * IDS), n
        while not trace.first[turn]:
            turn -= 1
        for before in range(turn, n):
            ids += itertools.islice(own, int(trace.prompt[before]) - len(ids))
            ids += [0] * int(trace.output[before])
        return ids + list(itertools.islice(own, int(trace.prompt[n]) - len(ids)))

    def step(self):
        plan = self.scheduler.schedule()
        self.now += self.price(plan)
        self.steps += 1
        gained = self.scheduler.commit(plan, [[0] if c.samples else [] for c in plan.chunks])
        self.decoding = {gain.sequence for gain in gained}
        for one in (gain.sequence for gain in gained):
            request = one.request
            if request.first_token is None:
                request.first_token = self.now
            else:
                self.gaps.append((self.last_ps[request.id], self.now - self.last_ps[request.id]))
            self.last_ps[request.id] = self.now
            if len(one.ids) == self.scheduler.longest(request):
                self.end(one)

    def end(self, one):
        self.scheduler.finish(one, "length")
        one.request.finished, n = self.now, int(one.request.id)
        if n + 1 < len(self.trace.session) and not self.trace.first[n + 1]:
            heapq.heappush(self.due, (self.now + int(self.trace.gap_ps[n + 1]), n + 1))

    def price(self, plan):
        """A decode is a chunk of a sequence that gained a token in the step before."""
        price = self.costs.step_ps
        for chunk in plan.chunks:
            if chunk.sequence in self.decoding:
                price += self.costs.decode_row_ps + (chunk.start + 1) * self.costs.key_ps
            else:
                price += self.costs.chunk_ps + chunk.count * self.costs.prompt_row_ps
                price += self.costs.pair_ps * sum(
                    at + 1 for at in range(chunk.start, chunk.start + chunk.count)
                )
        return price

    def column(self, name):
        return [getattr(self.requests[n], name) for n in range(len(self.requests))]


def assert_as_real(trace, shape, costs=COSTS):
    real = Real(trace, shape, costs).run()
    for native in FORMS:
        found = fleet.simulate(trace, 1, "round-robin", costs, shape, native=native)
        assert_is(found, real)
    return found, real


def assert_is(found, real):
    trace = real.trace
    assert found.arrival_ps.tolist() == real.column("arrival")
    assert found.cached.tolist() == real.column("cached_tokens")
    assert found.first_ps.tolist() == real.column("first_token")
    assert found.end_ps.tolist() == real.column("finished")
    assert found.steps.tolist() == [real.steps]
    assert found.preemptions.tolist() == [sum(real.column("preemptions"))]
    gaps = Gaps(trace.window_ps)
    for start, gap in real.gaps:
        gaps.add(start, 1, gap, 0, 1)
    assert found.gaps.counts == gaps.counts


@st.composite
def traces(draw, longest_system=40, most_sessions=14, systems=3, most_turns=3):
    """Conversations of small numbers that crowd: so many, the rest by a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    system_tokens, columns = rng.integers(0, longest_system + 1, systems), []
    apart = draw(st.sampled_from([1, 20_000, 200_000]))  # ps, of arrivals
    for session in range(draw(st.integers(1, most_sessions))):
        system = rng.integers(systems)
        held, gap = system_tokens[system], session * rng.integers(apart)
        for _ in range(rng.integers(1, most_turns + 1)):
            prompt, output = held + rng.integers(1, 31), rng.integers(1, 61)
            columns.append((session, system, prompt, output, gap))
            held, gap = prompt + output, rng.integers(1, 100_000)
    columns = [np.array(column, np.int64) for column in zip(*columns, strict=True)]
    low = int(rng.integers(50_000))
    return Trace(*columns, system_tokens, (low, low + draw(st.integers(1, 3_000_000))))


@st.composite
def limits(draw, trace, roomy=False):
    """Limits that bite, and a pool that the longest request just fits in, or a larger one."""
    block_size, seqs = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(2, 6))
    least = -(-(int((trace.prompt + trace.output).max()) - 1) // block_size)
    more = 8 * 4 * 200 if roomy else draw(st.integers(0, least))
    return Shape(seqs, draw(st.integers(seqs, seqs + 30)), least + more, block_size)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_replica_is_the_scheduler_when_blocks_are_short(data):
    """Sessions share no system prompt of a block: nobody computes what another one is computing."""
    trace = data.draw(traces(longest_system=0))
    assert_as_real(trace, data.draw(limits(trace)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_replica_is_the_scheduler_when_prefixes_are_shared(data):
    trace = data.draw(traces())
    found, _ = assert_as_real(trace, data.draw(limits(trace, roomy=True)))
    assert found.evicted.sum() == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_replica_is_the_scheduler_unless_a_prefix_is_computed_twice_at_once(data):
    trace = data.draw(traces())
    shape = data.draw(limits(trace))
    if not fleet.simulate(trace, 1, "round-robin", COSTS, shape).twice.sum():
        assert_as_real(trace, shape)


def llm_of(shape):
    model = random_model(shapes.gpt2(n_positions=256))
    options = {"block_size": shape.block_size, "num_blocks": shape.num_blocks, "trace": 10_000}
    options |= {"max_seqs": shape.max_seqs, "max_batch_tokens": shape.max_batch_tokens}
    return LLM(model, **options)


@in_both
@pytest.mark.parametrize("num_blocks", [60, 200])
def test_one_replica_is_an_llm_on_a_clock_that_counts_steps(num_blocks, native):
    """Hits, order, first and last step of each: with prefixes shared, preempted at 60 blocks."""
    shape = Shape(6, 40, num_blocks, 4)
    llm, rng = llm_of(shape), np.random.default_rng(5)
    system, lengths, outputs = (rng.integers(*its, 24) for its in ((0, 3), (4, 40), (2, 50)))
    starts, tokens = np.sort(rng.integers(0, 120, 24)), np.array([12, 21, 0])
    columns = [np.arange(24), system, tokens[system] + lengths, outputs, starts]
    trace = Trace(*(column.astype(np.int64) for column in columns), tokens, (0, 1000))
    found = fleet.simulate(trace, 1, "round-robin", Costs(1), shape, native=native)

    prompts = [[s + 1] * tokens[s] + [40 + n, *rng.integers(0, 97, length - 1)]
               for n, (s, length) in enumerate(zip(system, lengths, strict=True))]  # fmt: skip
    names, first, end, order, step = {}, {}, {}, [], 0
    while len(end) < 24:
        for n in range(len(names), 24):
            if starts[n] <= step:
                params = SamplingParams(
                    max_tokens=int(outputs[n]), temperature=0, seed=0, ignore_eos=True
                )
                names[llm.add([int(t) for t in prompts[n]], params)] = n
        step += 1
        for output in llm.step() if llm.has_unfinished else []:
            first.setdefault(names[output.request_id], step)
            if output.finished:
                end[names[output.request_id]] = step
                order.append(names[output.request_id])
    requests = {c.sequence.request for plan in llm.trace for c in plan.chunks}
    cached = {names[one.id]: one.cached_tokens for one in requests}
    assert found.twice.sum() == 0 or num_blocks > 60
    assert found.cached.tolist() == [cached[n] for n in range(24)] and sum(cached.values()) > 0
    assert found.first_ps.tolist() == [first[n] for n in range(24)]
    assert found.end_ps.tolist() == [end[n] for n in range(24)]
    assert order == sorted(range(24), key=lambda n: (found.end_ps[n], n))
    assert found.steps.sum() == len(llm.trace)
    assert found.preemptions.sum() == sum(one.preemptions for one in requests)
    assert (found.preemptions.sum() > 0) == (num_blocks == 60)


# --- runs of steps --------------------------------------------------------------------------------


def columns_of(result):
    names = [one.name for one in fields(result) if one.name not in ("trace", "gaps", "native")]
    return {name: getattr(result, name).tolist() for name in names} | {"gaps": result.gaps.counts}


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from(list(POLICIES)))
def test_alike_steps_at_once_are_the_steps_one_by_one(data, replicas, policy):
    trace = data.draw(traces(most_sessions=20))
    shape = data.draw(limits(trace))
    run = [
        fleet.simulate(trace, replicas, policy, COSTS, shape, jump=jump, native=native)
        for jump in (False, True)
        for native in FORMS
    ]
    for other in run[1:]:
        assert columns_of(run[0]) == columns_of(other)


@given(st.integers(1, 10**6), st.integers(0, 10**4), st.integers(1, 10**8))
def test_steps_begun_are_the_fewest_that_last_so_long(first, growth, elapsed):
    k = begun(elapsed, first, growth)
    assert lasting(k, first, growth) >= elapsed and k >= 1
    assert k == 1 or lasting(k - 1, first, growth) < elapsed
    assert lasting(5, first, growth) == sum(first + n * growth for n in range(5))


@given(st.integers(0, 5000), st.integers(1, 200), st.integers(1, 3000), st.integers(0, 90))
def test_gaps_of_a_run_are_the_gaps_of_its_steps(start, k, first, growth):
    whole, single = Gaps((1000, 9000)), Gaps((1000, 9000))
    whole.add(start, k, first, growth, 3)
    for n in range(k):
        single.add(start + lasting(n, first, growth), 1, first + n * growth, 0, 3)
    assert whole.counts == single.counts
    counted = [n for n in range(k) if 1000 <= start + lasting(n, first, growth) < 9000]
    assert sum(whole.counts.values()) == 3 * len(counted)


@given(st.lists(st.integers(1, 10**15), min_size=1), st.sampled_from([1, 50, 99, 100]))
def test_percentiles_of_gaps_are_off_by_one_in_128_at_most(values, share):
    gaps = Gaps((0, 1))
    for value in values:
        gaps.add(0, 1, value, 0, 1)
    exact = sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]
    assert abs(gaps.percentile_ps(share) - exact) <= exact / 128
    assert Gaps((0, 1)).percentile_ps(99) is None


# --- many replicas --------------------------------------------------------------------------------


def traffic(requests=1500, rate=60.0, **changes):
    law = Traffic(**{"message": 20, "answer": 30, "system": 80, "systems": 12, "think_s": 2,
                     "turns": 3, "context": 1024} | changes)  # fmt: skip
    return fleet_trace.draw(law, requests).at_rate(rate)


STEP_MS = Costs(2 * 10**9, 0, 2 * 10**8, 0, 10**8, 10**5)  # 2 ms, and 0.2 a prompt token


@in_both
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_tokens_add_up(policy, native):
    trace = replace(traffic(rate=200.0), window_ps=(0, 10**18))
    shape = Shape(16, 64, 64, 16)  # few enough to preempt
    found = fleet.simulate(trace, 5, policy, STEP_MS, shape, native=native)
    assert set(found.replica) == set(range(5))
    assert (found.arrival_ps < found.first_ps).all() and (found.first_ps <= found.end_ps).all()
    assert ((found.first_ps < found.end_ps) == (trace.output > 1)).all()
    assert sum(found.gaps.counts.values()) == (trace.output - 1).sum()
    assert (found.cached < trace.prompt).all() and (found.cached % 16 == 0).all()
    assert found.preemptions.sum() > 0 and found.evicted.sum() > 0
    first = trace.first
    assert (found.arrival_ps[first] == trace.gap_ps[first]).all()
    later = np.flatnonzero(~first)
    assert (found.arrival_ps[later] == found.end_ps[later - 1] + trace.gap_ps[later]).all()
    busy_s = found.busy_ps / PS
    assert (busy_s > 0).all() and (busy_s <= found.end_ps.max() / PS).all()


def test_the_blocks_of_a_replica_add_up_after_every_step(monkeypatch):
    """Held are those of each system prompt that somebody has, once, and of each request the rest.

    When a step is planned its tokens have their blocks already.
    """
    seen, wake = [], Replica.wake

    def checked(self):
        wake(self)
        self.check()
        cache, P, rows, held = self.cache, self.shape.block_size, dict(self.prompts), 0
        for one in self.running:
            stored = one.stored + (self.tick - one.since if one.since >= 0 else 0)
            after = stored + (1 if one.since >= 0 else rows.get(one, 0))
            held += -(-after // P) - min(cache.full[one.system], stored // P) + one.twice
        holders = np.bincount([one.system for one in self.running], minlength=len(cache.full))
        assert cache.holders == holders.tolist()
        held += sum(cache.depth.get(~n, 0) for n, count in enumerate(holders) if count)
        assert cache.used == held <= cache.num_blocks
        seen.append((cache.used, self.preemptions, self.twice))

    monkeypatch.setattr(Replica, "wake", checked)
    trace = traffic(400, 4000.0)
    found = fleet.simulate(trace, 2, "round-robin", STEP_MS, Shape(16, 1000, 64, 16))
    assert np.max(seen, axis=0)[0] >= 60 and found.preemptions.sum() > 0 and found.twice.sum() > 0


def test_what_continues_a_prefix_is_forgotten_before_it_and_the_last_block_first():
    known = np.zeros((1, 1), np.int64)
    cache = Cache(20, [3], known[:, 0])
    assert cache.adopt(5, 0) == 0
    assert (cache.learn(0, 0, 2), cache.learn(0, 2, 9), known[0, 0]) == (0, 0, 3)
    cache.used = 10
    cache.release(5, 0, total=10, complete=9, twice=0)
    assert list(cache.unheld) == [5, ~0] and (cache.used, cache.cached) == (0, 9)
    assert cache.adopt(5, 0) == 9 and cache.used == 9 and not cache.unheld
    cache.put_back(5, 0)
    assert list(cache.unheld) == [5, ~0] and (cache.used, cache.cached) == (0, 9)
    for used, depth in ((13, {5: 4, ~0: 3}), (18, {~0: 2})):
        cache.used = used
        cache.evict()
        cache.check()
        assert cache.depth == depth and cache.used + cache.cached == 20
    assert known[0, 0] == 2 and cache.evicted == 7


@in_both
def test_a_queue_of_one_seat_waits_as_long_as_theory_says(native):
    """M/D/1 (Pollaczek and Khinchine): a mean wait of rho / (2 (1 - rho)) of what a request takes.

    30,000 arrivals at rho = 0.6: the mean's standard error is about 2% of it.
    """
    count = 30_000
    rng, same = np.random.default_rng(1), np.ones(count, np.int64)
    arrivals = np.cumsum(rng.exponential(10**10, count)).astype(np.int64)
    columns = (np.arange(count), 0 * same, 8 * same, same, arrivals, np.array([0]))
    trace = Trace(*columns, (0, int(arrivals[-1])))
    costs = Costs(2 * 10**9, 0, 5 * 10**8)  # 2 ms + 8 x 0.5 ms: 6 ms, every 10 ms
    found = fleet.simulate(trace, 1, "least-loaded", costs, Shape(1, 8, 10, 16), native=native)
    service_ms, rho = 6.0, 0.6
    waited_ms = (found.ttft_ms - service_ms).mean()
    assert waited_ms == pytest.approx(service_ms * rho / (2 * (1 - rho)), rel=0.06)
    assert found.utilisation == pytest.approx(rho, rel=0.02)
    assert found.hit_rate == 0 and found.gaps.percentile_ps(99) is None


def hits(trace, policy, **options):
    return fleet.simulate(trace, 8, policy, STEP_MS, Shape(16, 128, 400, 16), **options).hit_rate


@pytest.mark.parametrize("seed", range(3))
def test_prefixes_are_found_where_the_router_looks_for_them(seed):
    trace = traffic(seed=seed)
    assert hits(trace, "prefix-aware") > 1.2 * hits(trace, "round-robin") > 0


def test_policies_are_alike_where_nothing_is_shared():
    trace = traffic(turns=1, system=4, spread=0)
    assert {hits(trace, policy) for policy in POLICIES} == {0.0}


def test_more_balance_gives_fewer_hits():
    trace = traffic(rate=150.0)
    rates = [hits(trace, "prefix-aware", balance=balance) for balance in (1.0, 1.25, 4.0)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def router(policy, replicas=3, sessions=6, turns=4, balance=1.25):
    session = [n // turns for n in range(sessions * turns)]
    known = np.zeros((1, replicas), np.int64)
    caches = [Cache(100, [4], known[:, n]) for n in range(replicas)]
    return Router(session, [0] * len(session), caches, known, policy, balance, 0)


def test_round_robin_and_the_least_loaded_are_what_they_are_called():
    one, other = router("round-robin"), router("least-loaded")
    assert [one.route(n) for n in range(5)] == [0, 1, 2, 0, 1]
    assert [other.route(n) for n in range(4)] == [0, 1, 2, 0]
    other.ended(1)
    assert other.route(4) == 1 and other.load.tolist() == [2, 1, 1]


def test_two_choices_takes_the_better_of_two():
    one = router("two-choices", replicas=50)
    for n in range(24):
        pair, loads = one.drawn[n], one.load.copy()
        assert loads[one.route(n)] == min(loads[pair])
    assert len({n for pair in one.drawn for n in pair}) > 20


def test_the_longest_prefix_wins_unless_its_replica_is_overloaded():
    one = router("prefix-aware")
    assert one.route(0) == 0, "nobody remembers anything: the least loaded"
    one.ended(0)
    one.caches[2]._set_depth(~0, 3)
    assert one.route(4) == 2, "who remembers most of the system prompt"
    one.ended(4)
    one.caches[1]._set_depth(~0, 4)
    assert one.route(8) == 1
    one.ended(8)
    one.caches[2].depth[1] = 5
    assert one.route(5) == 2, "who has had this conversation"
    assert one.route(6) == 1, "2 x 3 requests are more than 1.25 times 2: next, the system prompt"
    assert one.route(7) == 2, "which has room again, of 3 requests"


def test_a_block_more_is_worth_any_load_that_is_not_too_much():
    one = router("prefix-aware", balance=10.0)
    one.caches[1]._set_depth(~0, 4)
    one.caches[2]._set_depth(~0, 3)
    assert [one.route(4 * session) for session in range(6)] == [1] * 6


@settings(max_examples=50, deadline=None)
@given(st.data(), st.floats(1, 3))
def test_nobody_gets_more_than_its_balance(data, balance):
    one, unfinished = router("prefix-aware", 4, balance=balance), []
    for number in range(4):
        one.caches[number]._set_depth(~0, data.draw(st.integers(1, 4)))
    for request in range(24):
        most = math.ceil(balance * (len(unfinished) + 1) / 4)
        unfinished.append(request)
        assert one.load[one.route(request)] <= most
        while unfinished and data.draw(st.booleans()):
            one.ended(unfinished.pop(data.draw(st.integers(0, len(unfinished) - 1))))


# --- in C++ ---------------------------------------------------------------------------------------

END = 2**63 - 1  # of time, in 64 bits


@st.composite
def fleets(draw):
    """What `simulate` is given: small numbers of all that there is, and pools that bite."""
    longest, sessions, turns = draw(st.sampled_from([0, 5, 40, 150])), 24, 3
    if draw(st.booleans()):
        sessions, turns = 8, 9
    trace = draw(traces(longest, sessions, most_turns=turns))
    if draw(st.booleans()):
        trace = replace(trace, window_ps=(0, 2**70))
    seqs, block_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 3, 16, 50]))
    least = -(-(int((trace.prompt + trace.output).max()) - 1) // block_size)
    blocks = least + draw(st.sampled_from([0, 0, 1, 3, least // 2, 8000]))
    budget = seqs + draw(st.sampled_from([0, 0, 1, 2, 20, 60]))
    shape, price = (
        Shape(seqs, budget, blocks, block_size),
        st.sampled_from([0, 0, 1, 7, 130, 40_000]),
    )
    costs = Costs(draw(st.sampled_from([1, 60, 7_000])), *(draw(price) for _ in range(5)))
    policy = draw(st.sampled_from(list(POLICIES)))
    options = {"seed": draw(st.integers(0, 9)), "jump": draw(st.integers(0, 5)) > 0}
    options["balance"] = draw(st.sampled_from([1, 1.1, 1.25, 3.7, 1e6]))
    return [trace, draw(st.sampled_from([1, 1, 2, 3, 5])), policy, costs, shape], options


def of_both(given, options):
    """What the forms say: columns, or the words of an error."""
    found = []
    for native in (False, True):
        try:
            found.append(columns_of(fleet.simulate(*given, native=native, **options)))
        except RequestError as error:
            found.append(str(error))
    return found


@needs_cpp
def test_cpp_finds_what_python_finds(monkeypatch):
    """And there is something to find: each of these comes often."""
    seen, add, preempt = Counter(), Replica.add, Replica._preempt

    def added(self, now_ps, one):
        before, idle = self.k, self.end_ps == -1
        changed = add(self, now_ps, one)
        seen["cut short"] += changed and not idle and self.k < before
        return changed

    def preempted(self, one):
        seen["preempted in a prompt"] += one is self.partial
        preempt(self, one)

    monkeypatch.setattr(Replica, "add", added)
    monkeypatch.setattr(Replica, "_preempt", preempted)

    @settings(max_examples=400, deadline=None)
    @given(fleets())
    def alike(fleet):
        python, cpp = of_both(*fleet)
        assert cpp == python
        for name in ("preemptions", "evicted", "twice", "busy_ps", "gaps"):
            seen[name] += any(python[name])
        trace = fleet[0][0]
        seen["at once"] += len(set(trace.gap_ps[trace.first].tolist())) < trace.first.sum()

    alike()
    assert min(seen.values()) > 5 and len(seen) == 8, seen


@needs_cpp
@pytest.mark.parametrize("balance", [1.0, 2.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_cpp_finds_what_python_finds_in_a_crowd(policy, balance):
    """Long conversations, each replica overloaded at times: earlier turns are asked for, too."""
    trace, shape = traffic(3000, 400.0, turns=6), Shape(8, 64, 70, 16)
    python, cpp = of_both([trace, 9, policy, STEP_MS, shape], {"balance": balance})
    assert cpp == python
    assert sum(python["preemptions"]) > 5 and sum(python["evicted"]) > 10_000


@needs_cpp
def test_at_the_end_of_time_cpp_finds_what_python_finds():
    """Conversations begin so near to the end of 64 bits that some results are beyond it."""
    seen = Counter()

    @settings(max_examples=200, deadline=None)
    @given(fleets(), st.integers(0, 999), st.integers(2, 7), st.integers(0, 10**7))
    def alike(fleet, number, power, window):
        (trace, *given), options = fleet
        left = number * 10**power
        first, gap_ps = trace.first, trace.gap_ps.copy()
        gap_ps[first] += END - left - gap_ps[first].max()
        low = END - window
        trace = replace(trace, gap_ps=gap_ps, window_ps=(low, low + window // 2 + 1))
        python, cpp = of_both([trace, *given], options)
        assert cpp == python
        seen[python if isinstance(python, str) else "in time"] += 1

    alike()
    assert len(seen) == 2 and min(seen.values()) > 30, seen


COLUMNS = ("session", "system", "prompt", "output", "gap_ps")


def few(prompt, output, gap_ps):
    """A conversation; each turn has as many tokens more as it must."""
    turns = len(gap_ps)
    prompts = [prompt + n * (output + 1) for n in range(turns)]
    columns = ([0] * turns, [0] * turns, prompts, [output] * turns, gap_ps, [0])
    return Trace(*(np.array(column, np.int64) for column in columns), (0, 10**30))


def repeated(trace, count):
    """A trace of one request as so many that come at once."""
    columns = {name: np.repeat(getattr(trace, name), count) for name in COLUMNS}
    return replace(trace, **columns | {"session": np.arange(count)})


DEAR = 10**15  # ps: the most that a cost may be
LAST = {  # what takes so many picoseconds at these costs, of a prompt and an answer
    "a run of steps": (Costs(DEAR), (1, 9223), 9223 * DEAR),
    "a step": (Costs(DEAR), (1, 1), DEAR),
    "keys": (Costs(1, key_ps=DEAR), (4000, 2), 2 + 4001 * DEAR),
    "pairs": (Costs(1, pair_ps=DEAR), (100, 1), 1 + 5050 * DEAR),
}
TOO_LATE = "^the last request ends after 106 days: expected less load, or fewer requests$"


@in_both
@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("what", LAST)
def test_the_last_picosecond_is_the_last(what, jump, native):
    def end(trace, costs):
        how = {"jump": jump, "native": native}
        return fleet.simulate(trace, 1, "round-robin", costs, Shape(2, 5000), **how).end_ps[-1]

    costs, tokens, takes = LAST[what]
    assert end(few(*tokens, [END - takes]), costs) == END
    assert end(few(1, 1, [0, END - 2]), Costs(1)) == END, "and of a later turn"
    with pytest.raises(RequestError, match=TOO_LATE):
        end(few(*tokens, [END - takes + 1]), costs)
    for gap_ps in (END - 1, END):  # it ends, or comes, too late
        with pytest.raises(RequestError, match=TOO_LATE):
            end(few(1, 1, [0, gap_ps]), Costs(1))


@in_both
@pytest.mark.parametrize(
    ("costs", "prompt", "output"),
    [
        (Costs(*[DEAR] * 6), 2**14, 9),  # the first step
        (Costs(1, key_ps=DEAR), 2**14, 9),  # the first decode
        (Costs(1, key_ps=10**6), 2**22, 2**22),  # one of the last of a run of millions
        (Costs(1, pair_ps=2**49), 2**16 - 1, 1),  # the first: 1 ps more than a multiple of 2^64
        (Costs(1, key_ps=2**49), 2**15 - 1, 2),  # the first decode: likewise
    ],
)
def test_what_lasts_too_long_is_refused_in_the_same_words(costs, prompt, output, native):
    trace, shape = few(prompt, output, [0]), Shape(1, 2**24, 2**24, 1)
    with pytest.raises(RequestError, match=TOO_LATE):
        fleet.simulate(trace, 1, "least-loaded", costs, shape, native=native)


@in_both
def test_what_would_end_too_late_does_even_if_an_arrival_cuts_it_short(native):
    trace = replace(repeated(few(1, 2**20, [0]), 2), gap_ps=np.array([0, 10**17]))
    shape = Shape(2, 2, 2**18, 16)
    with pytest.raises(RequestError, match=TOO_LATE):
        fleet.simulate(trace, 1, "round-robin", Costs(10**13), shape, native=native)


@needs_cpp
def test_what_is_beyond_its_numbers_cpp_leaves_to_python(monkeypatch):
    """It is asked for by name, or it is not said."""
    monkeypatch.setattr(fleet_native, "WORTH", 1)
    fits, beyond = few(2**24, 3, [0]), few(2**24 + 1, 3, [0])
    shape = Shape(1, 2**40, 2**70, 4096)  # whose limits Python has
    given = (1, "round-robin", Costs(1, 1, 1, 1, 1, 1), shape)
    assert [fleet.simulate(trace, *given).native for trace in (fits, beyond)] == [True, False]
    assert columns_of(fleet.simulate(fits, *given)) == columns_of(
        fleet.simulate(fits, *given, native=False)
    )
    with pytest.raises(RequestError, match=r"^native=True: it takes 2\^24 requests, of 2\^24 tok"):
        fleet.simulate(beyond, *given, native=True)
    monkeypatch.setattr(fleet_native, "MOST", 1)
    with pytest.raises(RequestError, match="native=True: it takes"):
        fleet.simulate(traffic(2), *given[:-1], native=True)


@needs_cpp
def test_few_requests_are_served_in_python_and_many_in_cpp():
    law = {"system": 8, "message": 4, "answer": 2, "context": 64}
    found = [
        fleet.simulate(traffic(count, **law), 2, "round-robin", STEP_MS)
        for count in (fleet_native.WORTH - 1, fleet_native.WORTH)
    ]
    assert [one.native for one in found] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is built")
@pytest.mark.parametrize("how", ["no compiler", "not wanted", "it fails"])
def test_without_native_code_python_finds_the_same(how, monkeypatch, tmp_path, recorded, capsys):
    trace, shape = traffic(300, 200.0), Shape(16, 64, 64, 16)
    right = fleet.simulate(trace, 3, "prefix-aware", STEP_MS, shape)
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\n[ $1 = --version ] && exit\necho out of luck >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPINDLE_NO_EXT", str(int(how == "not wanted")))
    if how != "not wanted":
        monkeypatch.setenv("CXX", str(failing) if how == "it fails" else "no-such-compiler")
    words = {"no compiler": "no C..? compiler", "not wanted": "SPINDLE_NO_EXT=1"}
    monkeypatch.setattr(fleet_native, "WORTH", 1)
    for cached in (build.library, fleet_native._library):
        cached.cache_clear()
    try:
        found = fleet.simulate(trace, 3, "prefix-aware", STEP_MS, shape)
        with pytest.raises(RequestError, match=f"native=True: .*{words.get(how, 'out of luck')}"):
            fleet.simulate(trace, 3, "prefix-aware", STEP_MS, shape, native=True)
        command("--costs", recorded)
    finally:
        for cached in (build.library, fleet_native._library):
            cached.cache_clear()
    assert not found.native and columns_of(found) == columns_of(right)
    assert " s of Python, " in capsys.readouterr().out


class Watched:
    """The library, and how many fleets it holds."""

    def __init__(self):
        self.library, self.held, self.begun, self.slices = fleet_native._library(), 0, 0, 0

    def spindle_fleet_begin(self, given, fleet):
        self.library.spindle_fleet_begin(given, fleet)
        self.held += bool(fleet)
        self.begun += 1

    def spindle_fleet_run(self, *its):
        self.slices += 1
        return self.library.spindle_fleet_run(*its)

    def spindle_fleet_free(self, fleet):
        self.library.spindle_fleet_free(fleet)
        self.held -= bool(fleet)


@pytest.fixture
def watched(monkeypatch):
    """Slices of 64 events; after them nothing is held, whatever has happened."""
    one = Watched()
    monkeypatch.setattr(fleet_native, "_library", lambda: one)
    monkeypatch.setattr(fleet_native, "SLICE_S", 0.0)
    yield one
    assert one.begun and not one.held


@needs_cpp
def test_slices_are_the_whole(watched):
    trace = traffic(400, 200.0)
    given = (trace, 3, "two-choices", STEP_MS, Shape(16, 64, 64, 16))
    told, found = [], fleet.simulate(*given, native=False)
    sliced = fleet_native.run(*given, 1.25, 0, True, told.append)
    assert columns_of(found) == columns_of(replace(found, **sliced))
    assert watched.slices > 20 and sum(told) == 400 and len(told) == watched.slices
    assert sum(n > 0 for n in told) > 10, "the bar moves while it runs"


@needs_cpp
def test_ctrl_c_at_any_line_leaves_nothing_behind(watched, ctrl_c):
    trace, lines = traffic(60, 200.0), 0

    def work():
        fleet.simulate(trace, 2, "least-loaded", STEP_MS, native=True)

    while broken_off(work, lines, "fleet_native.py"):
        assert watched.held == 0, lines
        lines += 1
    assert watched.begun > 20 and lines > 40


@needs_cpp
def test_what_is_told_of_the_end_of_requests_may_raise(watched):
    given = (traffic(60), 2, "least-loaded", STEP_MS, Shape(), 1.25, 0, True)
    with pytest.raises(ZeroDivisionError):
        fleet_native.run(*given, lambda n: 1 // 0)
    assert watched.held == 0


@needs_cpp
def test_late_and_no_memory_leave_nothing_behind(watched, monkeypatch):
    given = (few(1, 9, [END - 5]), 1, "least-loaded", Costs(1), Shape(), 1.25, 0, True)
    with pytest.raises(OverflowError):
        fleet_native.run(*given, print)
    assert watched.held == 0
    monkeypatch.setattr(watched, "spindle_fleet_run", lambda *its: fleet_native.NO_MEMORY)
    with pytest.raises(MemoryError, match="1 requests and 1 replicas"):
        fleet_native.run(*given, lambda n: None)


@needs_cpp
def test_what_a_fleet_has_held_is_free_again():
    """1,000 replicas and 2,000 system prompts: 24 MB a fleet."""
    trace = replace(few(1, 1, [0]), system_tokens=np.zeros(2000, np.int64))
    held = []
    for _ in range(12):
        fleet.simulate(trace, 1000, "round-robin", COSTS, native=True)
        held.append(psutil.Process().memory_info().rss)
    assert held[-1] - held[1] < 24e6


@pytest.fixture
def alarm(ctrl_c):
    """A Ctrl-C in 0.3 s."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@needs_cpp
def test_ctrl_c_is_heard_in_the_middle_of_a_minute(alarm):
    trace, shape = repeated(few(1, 2**23, [0]), 200), Shape(1, 1, 2**20, 16)
    start, how = time.perf_counter(), {"jump": False, "native": True}
    with pytest.raises(KeyboardInterrupt):
        fleet.simulate(trace, 1, "round-robin", Costs(1), shape, **how)
    assert time.perf_counter() - start < 2


@needs_cpp
def test_columns_may_lie_as_they_like():
    """Backwards, in steps, read-only; and numbers may be numpy's."""
    trace = traffic(200, 200.0)
    other = {}
    for name in (*COLUMNS, "system_tokens"):
        column = np.repeat(getattr(trace, name), 2)[::-1][::2][::-1]
        column.flags.writeable = False
        assert not column.flags.c_contiguous
        other[name] = column
    moved = replace(trace, **other, window_ps=tuple(np.array(trace.window_ps)))
    given = (2, "prefix-aware", STEP_MS, Shape(*np.array([8, 64, 256, 16])))
    one, two = (fleet.simulate(its, *given, native=True) for its in (trace, moved))
    assert columns_of(one) == columns_of(two)


@needs_cpp
def test_the_names_that_both_files_have_are_in_one_order():
    text = (build.SOURCES / "fleet.cpp").read_text(encoding="utf-8")
    parts = {"Given": [*fleet_native.POINTERS, *fleet_native.NUMBERS, "balance", "shape", "costs"]}
    parts |= {"Shape": fleet_native.LIMITS, "Costs": fleet_native.PRICES}
    for name, members in parts.items():
        body = text.split(f"struct {name} {{\n")[1].split("\n};")[0].split("\n\n")[0]
        lines = [line.split("//")[0].rpartition(";")[0] for line in body.splitlines()]
        found = [part.split()[-1].lstrip("*") for line in lines for part in line.split(",")]
        assert found == members
    assert [f"case {n}: return" in text for n in range(3)] == [True] * 3 and len(POLICIES) == 4
    assert ctypes.sizeof(fleet_native._Given) == 8 * len(fleet_native._Given._fields_)


# --- the traffic ----------------------------------------------------------------------------------


def test_lengths_and_gaps_have_the_means_that_were_asked_for():
    law = Traffic(context=10**7, systems=2000, spread=0.5)
    found = fleet_trace.draw(law, 40_000)
    trace = found.at_rate(25.0)
    first = trace.first
    message = trace.prompt[first] - trace.system_tokens[trace.system[first]]
    assert message.mean() == pytest.approx(69.5, rel=0.03)
    assert trace.output.mean() == pytest.approx(214.5, rel=0.03)
    assert trace.system_tokens.mean() == pytest.approx(512, rel=0.05)
    assert len(first) / first.sum() == pytest.approx(2.0, rel=0.03)
    assert found.think_s.mean() == pytest.approx(10, rel=0.03)
    arrivals_s = trace.gap_ps[first] / PS
    assert 40_000 / arrivals_s[-1] == pytest.approx(25, rel=0.03)
    assert trace.window_ps == (round(trace.window_ps[1] / 4), trace.gap_ps[first][-1])


def test_popularity_is_zipfs():
    found = fleet_trace.draw(Traffic(systems=10, zipf=1.0, turns=1), 30_000)
    counts = np.bincount(found.system, minlength=10)
    assert counts == pytest.approx(
        30_000 / np.arange(1, 11) / sum(1 / n for n in range(1, 11)), rel=0.1
    )


@pytest.mark.parametrize("burst", [0.5, 1.0, 3.0])
def test_gaps_vary_as_much_as_they_should(burst):
    gaps = fleet_trace.draw(Traffic(burst=burst, turns=1), 40_000).gaps
    assert gaps.mean() == pytest.approx(1, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burst, rel=0.06)


def test_a_swing_moves_arrivals_from_one_half_of_the_period_to_the_other():
    """1 + a sin: the first half has (1 + 2 a / pi) / 2 of them."""
    even, swung = (
        fleet_trace.draw(Traffic(swing=swing, period_s=10, turns=1), 40_000).at_rate(400.0)
        for swing in (0, 0.8)
    )
    share = [float((trace.gap_ps % (10 * PS) < 5 * PS).mean()) for trace in (even, swung)]
    assert share == pytest.approx([0.5, 0.5 + 0.8 / math.pi], abs=0.01)
    assert (np.diff(swung.gap_ps) >= 0).all()
    with pytest.raises(RequestError, match=r"period_s=0.001: expected 1/10\^5 of"):
        fleet_trace.draw(Traffic(swing=0.5, period_s=0.001), 500).at_rate(0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(16, 3000), st.integers(1, 300), st.integers(1, 300), st.floats(1, 20))
def test_conversations_end_before_they_are_too_long(context, requests, part, turns):
    law = Traffic(context=context, turns=turns)
    found = fleet_trace.draw(law, requests)
    trace = found.at_rate(1.0)  # which checks that turns fit together
    assert len(trace.session) == requests
    assert (trace.prompt + trace.output).max() <= context
    less = found.part(min(part, requests))
    assert less.prompt.tolist() == found.prompt[: len(less.prompt)].tolist()
    assert len(less.gaps) == less.at_rate(1.0).first.sum()


def test_a_seed_is_one_traffic_and_a_rate_only_moves_it():
    one, same, other = (fleet_trace.draw(Traffic(seed=seed), 500) for seed in (1, 1, 2))
    assert one.prompt.tolist() == same.prompt.tolist() != other.prompt.tolist()
    slow, fast = one.at_rate(1.0), one.at_rate(10.0)
    first = slow.first
    assert slow.gap_ps[first] == pytest.approx(10 * fast.gap_ps[first])
    assert (slow.gap_ps[~first] == fast.gap_ps[~first]).all()


GOOD = {"session": [0, 0, 1], "system": [0, 0, 0], "prompt": [5, 12, 6], "output": [3, 2, 1]}
GOOD |= {"gap_ps": [0, 1, 9], "system_tokens": [4]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [5, 8, 6]}, "hold the one before"),
        ({"prompt": [4, 12, 6]}, "longer than their system"),
        ({"output": [0, 2, 1]}, "1 token or more"),
        ({"system": [0, 0, 1]}, "systems of 0 to 0"),
        ({"system": [0, 1, 0], "system_tokens": [4, 4]}, "hold the one before"),
        ({"session": [0, 1, 0]}, "one after the other"),
        ({"gap_ps": [0, 0, 9]}, "1 ps to think"),
        ({"gap_ps": [-1, 1, 9]}, "arrivals from 0 on"),
        ({"gap_ps": [0, 1]}, "one length"),
        ({"window_ps": (5, 5)}, "from < to"),
        ({name: [] for name in GOOD}, "one request at least"),
    ],
)
def test_a_trace_that_does_not_fit_together_is_refused(change, words):
    def trace(**columns):
        window = columns.pop("window_ps", (0, 10))
        return Trace(**{k: np.array(v, np.int64) for k, v in columns.items()}, window_ps=window)

    fleet.simulate(trace(**GOOD), 2, "round-robin", COSTS)
    with pytest.raises(RequestError, match=words):
        trace(**GOOD | change)


# --- the costs ------------------------------------------------------------------------------------


def test_a_fit_finds_the_costs_that_steps_were_made_of():
    rng = np.random.default_rng(0)
    terms = [(1, *map(int, row)) for row in rng.integers(0, (4, 300, 9000, 32, 9000), (200, 5))]
    costs = Costs(700_000_000, 40_000_000, 30_000_000, 50_000, 60_000_000, 300_000)
    steps = [Timed(its, float(np.dot(its, list(asdict(costs).values()))) / PS) for its in terms]
    found, errors = fleet_measure.fit(steps)
    assert list(asdict(found).values()) == pytest.approx(list(asdict(costs).values()), rel=1e-6)
    assert errors.max() < 1e-6


def test_a_term_that_would_be_negative_is_left_out():
    steps = [Timed((1, 0, 0, 0, rows, 100 * rows**2), 1e-3 + 1e-4 * rows) for rows in range(1, 9)]
    steps = [replace(one, seconds=one.seconds - 2e-9 * one.terms[5]) for one in steps]
    found, errors = fleet_measure.fit(steps)
    assert found.key_ps == 0 and found.decode_row_ps > 0
    assert 0 < errors.max() < 0.1, "and it says so"


def test_steps_are_timed_with_what_was_in_them():
    model = random_model(shapes.gpt2())
    steps, longest = fleet_measure.steps_of(model, 1)
    terms = np.array([step.terms for step in steps])
    assert longest == 64 and all(step.seconds > 0 for step in steps)
    rows = [rows for rows in fleet_measure.ROWS for prompt in (16, 16, 56)]
    prompts = [prompt for _ in fleet_measure.ROWS for prompt in (16, 16, 56)]
    assert (terms[:, 0] == 1).all()
    assert terms[:, 2].sum() == np.dot(rows, prompts)
    assert terms[:, 3].sum() == sum(
        n * p * (p + 1) // 2 for n, p in zip(rows, prompts, strict=True)
    )
    new = fleet_measure.NEW
    assert terms[:, 4].sum() == sum(rows) * (new - 1)
    assert terms[:, 5].sum() == sum(
        n * sum(range(p + 1, p + new)) for n, p in zip(rows, prompts, strict=True)
    )
    costs, _ = fleet_measure.fit(steps)
    assert costs.step_ps > 0


def test_a_full_replica_does_as_much_as_its_costs_say():
    """All seats taken by requests that share nothing: no pass is begun for fewer."""
    count, same = 400, np.ones(400, np.int64)
    columns = (np.arange(count), 0 * same, 32 * same, 64 * same, same, np.array([0]))
    trace = Trace(*columns, (0, 1))
    costs = Costs(10**9, 10**7, 10**6, 10**4, 10**7, 10**5)
    found = fleet.simulate(trace, 1, "round-robin", costs, Shape(8, 32, 1000, 16))
    predicted_s = count * costs.full_s(trace.prompt, trace.output, 8, 32)
    assert found.end_ps.max() / PS == pytest.approx(predicted_s, rel=0.03)


@pytest.mark.parametrize("value", [-1, 1.5, True, 2**60])
def test_costs_are_whole_picoseconds(value):
    with pytest.raises(RequestError, match=r"key_ps=.*expected 0 to 10"):
        Costs(1, key_ps=value)
    with pytest.raises(RequestError, match="step_ps=0: expected 1"):
        Costs(0)


# --- the command ----------------------------------------------------------------------------------

MEASURED = {
    "costs": asdict(STEP_MS),
    "fit": {"steps": 9, "longest": 64, "median_error": 0.01, "p90_error": 0.2},
    "model": "tiny",
    "machine": {"device": "cpu", "dtype": "float32", "threads": 1, "torch": "2"},
    "recorded": False,
}
FEW = ["--replicas", "1", "4", "--requests", "60", "--system", "64", "--message", "20"]
FEW += ["--context", "600", "--num-blocks", "200"]


@pytest.fixture
def recorded(tmp_path):
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({"measured": MEASURED}))
    return str(file)


def command(*options):
    assert cli.main(["bench", "fleet", *FEW, *options]) == 0


def test_the_command_prints_what_it_writes(recorded, tmp_path, capsys):
    written, figure = tmp_path / "found.json", tmp_path / "found.png"
    command("--costs", recorded, "--json", str(written), "--plot", str(figure))
    printed, err = capsys.readouterr()
    assert err == "" and figure.read_bytes().startswith(b"\x89PNG")
    found = json.loads(written.read_text())
    assert printed.strip() == fleet_tables.as_markdown(found)
    assert [(row["replicas"], row["policy"]) for row in found["rows"]] == [
        (count, policy) for count in (1, 4) for policy in POLICIES
    ]
    ones = [{k: v for k, v in row.items() if k != "policy"} for row in found["rows"][:4]]
    assert ones == [ones[0]] * 4, "one replica leaves no choice"
    assert [row["requests"] for row in found["rows"][3:5]] == [60, 240]
    assert "recorded; cpu" in printed and "the longest here has" in printed
    for words in (
        "| prefix-aware | 4 |",
        "were in time at 1 replica, ",
        "a second a replica, 1 of what a full one could",
    ):
        assert words in printed
    assert " s of Python, " in printed, "so few requests are not worth a compiler"
    assert "Disturbed" not in printed and all(0 <= row["utilisation"] <= 1 for row in found["rows"])


def test_what_was_written_can_be_read_again_and_gives_the_same_rows(recorded, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("one.json", "two.json", "three.json")]
    command("--costs", recorded, "--json", files[0])
    command("--costs", files[0], "--json", files[1])
    command("--costs", files[0], "--json", files[2], "--seed", "3")
    one, two, three = (json.loads(Path(file).read_text())["rows"] for file in files)
    assert one == two != three


def test_a_total_load_is_the_same_for_every_fleet(recorded, tmp_path, capsys):
    file = tmp_path / "found.json"
    command("--costs", recorded, "--total-rate", "30", "--policies", "least-loaded",
            "--json", str(file))  # fmt: skip
    one, four = json.loads(file.read_text())["rows"]
    assert one["requests"] == four["requests"] == 240
    assert one["ttft_p99_ms"] > four["ttft_p99_ms"] > 0
    assert one["utilisation"] > four["utilisation"] > 0
    printed = capsys.readouterr().out
    assert "30 requests a second in all" in printed and "two-choices" not in printed


def test_costs_are_measured_unless_a_file_has_them(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(fleet_measure, "measure", lambda name: asked.append(name) or MEASURED)
    command("-m", "a model", "--rate", "3", "--policies", "two-choices")
    assert asked == ["a model"]
    printed = capsys.readouterr().out
    assert "9 steps measured here" in printed and "3 requests a second a replica" in printed


def test_a_disturbed_measurement_says_so():
    found = {"measured": MEASURED | {"fit": MEASURED["fit"] | {"p90_error": 0.9}}, "longest": 9}
    assert "Disturbed: a step in ten is 90% off" in fleet_tables._costs(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "4", "1"], "--replicas 4 1: expected numbers that rise"),
        (["--replicas", "0"], "--replicas 0"),
        (["--policies", "best"], "--policies 'best': expected some of round-robin"),
        (["--requests", "0"], "--requests 0"),
        (["--rate", "1", "--total-rate", "2"], "expected one of them"),
        (["--load", "0"], "--load 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--ttft-slo-ms", "-1"], "--ttft-slo-ms -1"),
        (["--balance", "0.5"], "--balance 0.5: expected 1 or more"),
        (["--turns", "0.5"], "turns=0.5: expected 1 to 1000"),
        (["--max-seqs", "0"], "max_seqs=0: expected 1 or more"),
        (["--max-batch-tokens", "8"], "expected max_seqs=32 or more"),
        (["--num-blocks", "3"], "num_blocks=3: a request takes"),
        (["--block-size", "5000"], "block_size=5000: expected 4096 or less"),
        (["--requests", "9000000"], "--requests 9000000: expected 1 to 10^7 in all"),
        (["--costs", "/nowhere"], "--costs /nowhere: No such file"),
        (["--json", "/nowhere/file"], "--json /nowhere/file"),
        (["--plot", "figure.txt"], "--plot figure.txt"),
        (["-m", "no model of that name"], "no model of that name"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(options, words, monkeypatch, capsys):
    monkeypatch.setattr(fleet_measure, "steps_of", None)
    assert cli.main(["bench", "fleet", *FEW, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "measured"),
        (json.dumps({"measured": MEASURED | {"costs": {"step_ps": 0}}}), "step_ps=0"),
        (json.dumps({"measured": MEASURED | {"costs": {"step": 1}}}), "step"),
        (json.dumps({"measured": MEASURED | {"fit": {}}}), "steps"),
        (json.dumps({"measured": MEASURED | {"model": 1}}), "model: expected a name"),
        (json.dumps({"measured": MEASURED | {"machine": {}}}), "device"),
        (
            json.dumps({"measured": MEASURED | {"fit": MEASURED["fit"] | {"longest": "x"}}}),
            "longest: expected a number",
        ),
    ],
)
def test_a_file_without_costs_is_refused(tmp_path, text, words):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=words) as error:
        fleet_costs.read(file)
    assert str(error.value).startswith(f"--costs {file}: ")
