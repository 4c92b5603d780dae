"""Which replica a request goes to.

    round-robin    each in turn
    least-loaded   the one with the fewest unfinished requests; of several the first
    two-choices    the better of two that are drawn (Mitzenmacher 2001, "The power of two choices")
    prefix-aware   the one that remembers most of the prompt, among those that are not overloaded;
                   of several the least loaded, and the first

A replica is overloaded if with this request it had more than `balance` times the average, rounded
up: the bound of Mirrokni et al. 2018 ("Consistent hashing with bounded loads"). So there is always
one that is not. Routers that look at prefixes differ in such a rule: SGLang's turns from the
longest match to the shortest queue once the longest queue is longer than the shortest by a number
and by a factor; Preble (Srivatsa et al. 2024) once a match is shorter than what is left to compute.

What a replica remembers it tells the router when a request begins or ends there, and no later; how
many requests are unfinished the router knows by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from spindle.bench.fleet_replica import Cache
from spindle.errors import RequestError

Policy = Callable[["Router", int], int]


def check(policy: str, balance: float) -> None:
    """RequestError for what no router does."""
    if policy not in POLICIES:
        raise RequestError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    if not 1 <= balance <= 1e6:
        raise RequestError(f"balance={balance:g}: expected 1 or more")


def pairs(seed: int, replicas: int, requests: int) -> np.ndarray:
    """The two replicas that are drawn for each request [N, 2]."""
    return np.random.default_rng(seed).integers(0, replicas, (requests, 2))


class Router:
    """Sends requests of a trace to replicas; the only writer of `load` and `sent`."""

    def __init__(
        self, session: list[int], system: list[int], caches: list[Cache], known: np.ndarray,
        policy: str, balance: float, seed: int,
    ) -> None:  # fmt: skip
        self.session, self.system, self.caches, self.known = session, system, caches, known
        self.balance, self._policy = balance, POLICIES[policy]
        self.load = np.zeros(len(caches), np.int64)  # unfinished requests
        self.total = 0
        self.sent = [-1] * len(session)  # to whom, by request
        self.turn = -1
        if policy == "two-choices":
            self.drawn = pairs(seed, len(caches), len(session)).tolist()

    def route(self, request: int) -> int:
        """The replica of a request that arrives."""
        number = self._policy(self, request)
        self.sent[request] = number
        self.load[number] += 1
        self.total += 1
        return number

    def ended(self, request: int) -> None:
        """A request is done."""
        self.load[self.sent[request]] -= 1
        self.total -= 1

    def most(self) -> int:
        """Requests that a replica may have with the next one: the rest are overloaded."""
        return math.ceil(self.balance * (self.total + 1) / len(self.load))


def round_robin(router: Router, request: int) -> int:
    """Each in turn."""
    router.turn = (router.turn + 1) % len(router.load)
    return router.turn


def least_loaded(router: Router, request: int) -> int:
    """The fewest unfinished requests."""
    return int(router.load.argmin())


def two_choices(router: Router, request: int) -> int:
    """The better of two."""
    one, other = router.drawn[request]
    return one if router.load[one] <= router.load[other] else other


def prefix_aware(router: Router, request: int) -> int:
    """The longest prefix that is remembered, where there is room.

    Who remembers anything of the conversation remembers all of its system prompt, so more than who
    does not; and it has had a turn of it.
    """
    most, session = router.most(), router.session[request]
    best, longest, turn = -1, 0, request - 1
    while turn >= 0 and router.session[turn] == session:
        number = router.sent[turn]
        depth = router.caches[number].depth.get(session, 0)
        if depth > longest and router.load[number] < most:
            best, longest = number, depth
        turn -= 1
    if best >= 0:
        return best
    score = (router.known[router.system[request]] << 32) - router.load  # [R]
    best = int(score.argmax())
    if router.load[best] >= most:
        score[router.load >= most] = -(2**62)
        best = int(score.argmax())
    return best


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "two-choices": two_choices,
    "prefix-aware": prefix_aware,
}
