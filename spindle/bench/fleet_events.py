"""The events of a fleet, in the order of time: requests arrive, replicas go on, requests end.

One event at a time, in the order of time: a request arrives and is sent to a replica, or a replica
has come to the end of a run of steps (fleet_replica.py). A conversation's next turn arrives some
time after its answer has ended, so what a slow replica delays, it delays.

This is the form to read, and to change. Long traces are served by the same events in C++
(fleet_native.py), which find the same numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from spindle.bench import fleet_native, fleet_router
from spindle.bench.fleet_costs import PS, Costs
from spindle.bench.fleet_replica import IDLE, Cache, Gaps, Replica, Sequence, Shape
from spindle.bench.fleet_router import Router
from spindle.bench.fleet_trace import Trace, check_room
from spindle.errors import RequestError


@dataclass(frozen=True)
class Result:
    """What became of each request [N], of each replica [R], and of all gaps between tokens.

    Times are in picoseconds. cached: tokens of the prompt that were remembered. steps: passes.
    busy_ps: within the trace's window. Figures count the requests that arrive in that window.
    native: whether C++ has found it.
    """

    trace: Trace
    replica: np.ndarray
    arrival_ps: np.ndarray
    first_ps: np.ndarray
    end_ps: np.ndarray
    cached: np.ndarray
    steps: np.ndarray
    busy_ps: np.ndarray
    preemptions: np.ndarray
    twice: np.ndarray
    evicted: np.ndarray
    gaps: Gaps
    native: bool

    @property
    def counted(self) -> np.ndarray:
        """Which requests arrive in the window [N]."""
        low, high = self.trace.window_ps
        return (low <= self.arrival_ps) & (self.arrival_ps <= high)

    @property
    def window_s(self) -> float:
        """Seconds that count."""
        low, high = self.trace.window_ps
        return (high - low) / PS

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were remembered."""
        counted = self.counted
        return float(self.cached[counted].sum() / max(1, self.trace.prompt[counted].sum()))

    @property
    def ttft_ms(self) -> np.ndarray:
        """From the arrival to the first token [N]."""
        return (self.first_ps - self.arrival_ps) / 1e9

    @property
    def mean_gap_ms(self) -> np.ndarray:
        """Of a request's gaps between tokens [N]; 0 if it has one token."""
        return (self.end_ps - self.first_ps) / np.maximum(1, self.trace.output - 1) / 1e9

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time that steps took."""
        return float(self.busy_ps.sum() / PS / self.window_s / len(self.busy_ps))

    def goodput(self, ttft_slo_ms: float, itl_slo_ms: float) -> float:
        """Requests a second that kept both: first token in time, and gaps short on average."""
        good = (self.ttft_ms <= ttft_slo_ms) & (self.mean_gap_ms <= itl_slo_ms)
        return float((good & self.counted).sum() / self.window_s)


def simulate(
    trace: Trace,
    replicas: int,
    policy: str,
    costs: Costs,
    shape: Shape | None = None,
    *,
    balance: float = 1.25,
    seed: int = 0,
    jump: bool = True,
    progress: bool = False,
    native: bool | None = None,
) -> Result:
    """Serve a trace with so many replicas of one shape behind a router.

    policy: one of POLICIES; balance: how much more than the average a replica may have, for
    "prefix-aware"; seed: for "two-choices". jump: do runs of alike steps at once, which changes
    nothing. native: in C++, which changes nothing either; None: from 10,000 requests on, where that
    is to be had. RequestError, before it begins, for what cannot be.
    """
    shape = shape or Shape()
    if not 1 <= replicas <= 100_000:
        raise RequestError(f"replicas={replicas}: expected 1 to 100,000")
    if replicas * len(trace.system_tokens) > 10**8:
        words = f"{replicas} replicas and {len(trace.system_tokens)} system prompts"
        raise RequestError(f"{words}: expected a product of 10^8 at most")
    check_room(trace, shape)
    fleet_router.check(policy, balance)
    native = _is_native(trace, native)
    form = fleet_native.run if native else _run
    bar = tqdm(total=len(trace.session), disable=None if progress else True, unit="req")
    try:
        with bar:
            found = form(trace, replicas, policy, costs, shape, balance, seed, jump, bar.update)
    except OverflowError:
        right = "expected less load, or fewer requests"
        raise RequestError(f"the last request ends after 106 days: {right}") from None
    return Result(trace, **found, native=native)


def _is_native(trace: Trace, wanted: bool | None) -> bool:
    """Whether C++ is to serve it. RequestError if it is wanted and cannot."""
    if wanted is None:
        return len(trace.session) >= fleet_native.WORTH and not fleet_native.why_not(trace)
    if wanted and (why := fleet_native.why_not(trace)):
        raise RequestError(f"native=True: {why}")
    return wanted


def _run(
    trace: Trace, replicas: int, policy: str, costs: Costs, shape: Shape, balance: float,
    seed: int, jump: bool, ended: Callable[[int], object],
) -> dict[str, Any]:  # fmt: skip
    """As `fleet_native.run`, in Python."""
    return _Fleet(trace, replicas, policy, costs, shape, balance, seed, jump).run(ended)


class _Fleet:
    """One simulation in the making."""

    def __init__(
        self, trace: Trace, replicas: int, policy: str, costs: Costs, shape: Shape,
        balance: float, seed: int, jump: bool,
    ) -> None:  # fmt: skip
        self.trace, count = trace, len(trace.session)
        self.session, self.system = trace.session.tolist(), trace.system.tolist()
        self.prompt, self.output = trace.prompt.tolist(), trace.output.tolist()
        self.gap_ps, self.follows = trace.gap_ps.tolist(), (~trace.first).tolist()
        self.follows.append(False)
        full = (trace.system_tokens // shape.block_size).tolist()
        known = np.zeros((len(full), replicas), np.int64)
        caches = [Cache(shape.num_blocks, full, known[:, n]) for n in range(replicas)]
        self.first_ps, self.found = [0] * count, [0] * count
        self.arrival_ps, self.end_ps = [0] * count, [0] * count
        self.gaps = Gaps(trace.window_ps)
        common = (self.gaps, self.first_ps, self.found, jump)
        self.replicas = [Replica(shape, costs, cache, *common) for cache in caches]
        self.router = Router(self.session, self.system, caches, known, policy, balance, seed)
        first = np.flatnonzero(trace.first)
        order = first[np.argsort(trace.gap_ps[first], kind="stable")[::-1]]
        self.begins = order.tolist()  # requests that begin a conversation, the last one first
        self.arrivals: list[tuple[int, int]] = []  # a heap: when, and which request
        self._expect_next()
        self.wakes: list[tuple[int, int]] = []  # a heap: when, and which replica

    def run(self, ended: Callable[[int], object]) -> dict[str, Any]:
        """Event by event; of those at one time, arrivals come first. -> columns of a Result.

        ended: told how many requests have just ended. OverflowError: a number is beyond 64 bits.
        """
        arrivals, wakes, replicas = self.arrivals, self.wakes, self.replicas
        while arrivals or wakes:
            if arrivals and (not wakes or arrivals[0][0] <= wakes[0][0]):
                self._arrive(*heapq.heappop(arrivals))
                continue
            when, number = wakes[0]
            replica = replicas[number]
            if replica.end_ps == when:  # else it was cut short, and has woken
                replica.wake()
                if replica.ended:
                    ended(self._end(when, replica))
                if replica.end_ps != IDLE:
                    heapq.heapreplace(wakes, (replica.end_ps, number))
                    continue
            heapq.heappop(wakes)
        return self._columns()

    def _expect_next(self) -> None:
        """Of those that begin a conversation one at a time is in the heap: so it stays small."""
        if self.begins:
            request = self.begins.pop()
            heapq.heappush(self.arrivals, (self.gap_ps[request], request))

    def _arrive(self, when: int, request: int) -> None:
        if not self.follows[request]:
            self._expect_next()
        self.arrival_ps[request] = when
        number = self.router.route(request)
        replica = self.replicas[number]
        replica.orders += 1
        one = Sequence(
            request, replica.orders, self.session[request], self.system[request],
            self.prompt[request], self.output[request],
        )  # fmt: skip
        if not replica.add(when, one):
            return
        if replica.end_ps == when and not (self.arrivals and self.arrivals[0][0] == when):
            replica.wake()  # it was idle, and nobody else comes at this moment
        heapq.heappush(self.wakes, (replica.end_ps, number))

    def _end(self, when: int, replica: Replica) -> int:
        """What a replica has ended the router is told, and next turns come; returns how many."""
        ended, replica.ended = replica.ended, []
        for request in ended:
            self.end_ps[request] = when
            self.router.ended(request)
            if self.follows[request + 1]:
                heapq.heappush(self.arrivals, (when + self.gap_ps[request + 1], request + 1))
        return len(ended)

    def _columns(self) -> dict[str, Any]:
        def array(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), np.int64)

        def of(name: str) -> np.ndarray:
            return array(getattr(one, name) for one in self.replicas)

        return {
            "replica": array(self.router.sent),
            "arrival_ps": array(self.arrival_ps),
            "first_ps": array(self.first_ps),
            "end_ps": array(self.end_ps),
            "cached": array(self.found),
            "steps": of("tick"),
            "busy_ps": of("busy_ps"),
            "preemptions": of("preemptions"),
            "twice": of("twice"),
            "evicted": array(one.cache.evicted for one in self.replicas),
            "gaps": self.gaps,
        }
