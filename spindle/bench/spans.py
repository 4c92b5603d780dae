"""Where the time of a call goes, part by part: functions are wrapped for a while, and undone.

Each second is noted once: for the innermost wrapped function that was running. A function that is
`whole` keeps what it calls for itself. To be timed costs time, too: some of it is within what is
read off (`inside`), some before and after it, in the caller (`outside`). `call_cost` measures both
on a function that does nothing, and `Noted.corrected` takes them off again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], float]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """A function where its callers look it up: a module's global, or a method in its class."""

    owner: Any
    name: str
    part: str
    whole: bool = True  # what it calls is its own


@contextmanager
def wrapped(places: Iterable[Place], wrap: Callable[[Place, Function], Function]) -> Iterator[None]:
    """For a while each place holds `wrap(place, function)` instead of its function."""
    with ExitStack() as stack:
        for place in places:
            function = vars(place.owner)[place.name]
            setattr(place.owner, place.name, wrap(place, function))
            stack.callback(setattr, place.owner, place.name, function)
        yield


@dataclass(frozen=True)
class CallCost:
    """Seconds that timing adds to one call: to the part itself, and to the one that it is in."""

    inside_s: float
    outside_s: float


@dataclass
class Noted:
    """What one part has taken: seconds of its own, calls, and timed calls that it made.

    replayed: those of its calls that were timed by others, at no cost to be taken off.
    """

    seconds: float = 0.0
    calls: int = 0
    nested: int = 0
    replayed: int = 0

    def corrected(self, cost: CallCost) -> float:
        """The seconds, without what timing has added."""
        timed = self.calls - self.replayed
        return self.seconds - timed * cost.inside_s - self.nested * cost.outside_s


class Spans:
    """Notes for each part what its functions take; `take` gives the notes, and begins anew."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._parts: dict[str, Noted] = {}
        self._whole = False  # we are in a function that keeps all for itself
        self._inner_s, self._nested = 0.0, 0  # of the calls that were made in the one around us

    def wrap(self, place: Place, function: Function) -> Function:
        """The function, timed."""
        clock, whole = self._clock, place.whole
        mine = self._parts.setdefault(place.part, Noted())

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._whole:
                return function(*args, **kwargs)
            inner_s, nested = self._inner_s, self._nested
            self._inner_s, self._nested, self._whole = 0.0, 0, whole
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - start
                mine.seconds += took - self._inner_s
                mine.nested += self._nested
                mine.calls += 1
                self._inner_s, self._nested, self._whole = inner_s + took, nested + 1, False

        return timed

    def note(self, part: str, seconds: float) -> None:
        """A call that took so long by another clock, within the one that is running now."""
        mine = self._parts.setdefault(part, Noted())
        mine.seconds += seconds
        mine.calls += 1
        mine.replayed += 1
        self._inner_s += seconds

    def leave_out(self, seconds: float) -> None:
        """What timing took in the call that is running now is nobody's."""
        self._inner_s += seconds

    def take(self) -> dict[str, Noted]:
        """The notes of each part so far."""
        taken = {part: Noted(**vars(noted)) for part, noted in self._parts.items()}
        for noted in self._parts.values():
            vars(noted).update(vars(Noted()))
        return taken


def call_cost(clock: Clock = time.perf_counter, calls: int = 1000, batches: int = 15) -> CallCost:
    """What timing adds to a call, median of batches."""
    costs = [_cost(clock, calls) for _ in range(batches)]
    return CallCost(
        statistics.median(cost.inside_s for cost in costs),
        statistics.median(cost.outside_s for cost in costs),
    )


def _cost(clock: Clock, calls: int) -> CallCost:
    spans = Spans(clock)
    bare_s = _seconds(_nothing, clock, calls)
    all_s = _seconds(spans.wrap(Place(None, "", "nothing"), _nothing), clock, calls)
    inside_s = (spans.take()["nothing"].seconds - bare_s) / calls
    return CallCost(inside_s, (all_s - bare_s) / calls - inside_s)


def _seconds(function: Function, clock: Clock, calls: int) -> float:
    start = clock()
    for _ in range(calls):
        function(1, 2)
    return clock() - start


def _nothing(a: int, b: int) -> None:
    """As much as is called with two arguments."""
