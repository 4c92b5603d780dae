"""The events of a fleet in C++: pointers and lengths into csrc/fleet.cpp.

fleet_events.py says in Python what is computed; the numbers are the same ones.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from spindle.bench.fleet_costs import Costs
from spindle.bench.fleet_replica import Gaps, Shape
from spindle.bench.fleet_router import POLICIES, pairs
from spindle.bench.fleet_trace import Trace
from spindle.interrupts import held_back
from spindle.kernels import build

WORTH = 10_000  # requests; fewer are served in Python before a compiler is done
MOST = 2**24  # requests, and tokens of a prompt or an answer, as in fleet.cpp
SLICE_S = 0.05  # from one look at Ctrl-C to the next
LATEST = 2**63 - 1
CLIPPED = 2**60  # a limit beyond what any step comes to
MORE, LATE, NO_MEMORY = 1, 2, 3  # as in fleet.cpp

ASKED = ("session", "system", "prompt", "output", "gap_ps", "full", "drawn")
OF_REQUESTS = ("replica", "arrival_ps", "first_ps", "end_ps", "cached")
OF_REPLICAS = ("steps", "busy_ps", "preemptions", "twice", "evicted")
POINTERS = (*ASKED, *OF_REQUESTS, *OF_REPLICAS, "counts")
NUMBERS = ("requests", "systems", "replicas", "policy", "jump", "low", "high")
LIMITS, PRICES = ([one.name for one in fields(kind)] for kind in (Shape, Costs))


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("balance", ctypes.c_double),
        *((name, ctypes.c_int64) for name in (*LIMITS, *PRICES)),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = build.library("fleet")
    if found is not None:
        handle, number = ctypes.c_void_p, ctypes.c_int64
        found.spindle_fleet_begin.argtypes = [ctypes.POINTER(_Given), ctypes.POINTER(handle)]
        found.spindle_fleet_begin.restype = None
        found.spindle_fleet_run.argtypes = [handle, ctypes.c_double, ctypes.POINTER(number)]
        found.spindle_fleet_run.restype = ctypes.c_int
        found.spindle_fleet_free.argtypes = [handle]
        found.spindle_fleet_free.restype = None
    return found


def why_not(trace: Trace) -> str:
    """Why C++ does not serve this trace, in words; "" if it does. It may be compiled now."""
    if len(trace.session) > MOST or max(trace.prompt.max(), trace.output.max()) > MOST:
        return "it takes 2^24 requests, of 2^24 tokens in a prompt or an answer, at most"
    return "" if available() else build.why_not("fleet") or "there is no native code"


def available() -> bool:
    """Whether it is here; the first call may compile it, a few seconds."""
    return _library() is not None


def run(
    trace: Trace,
    replicas: int,
    policy: str,
    costs: Costs,
    shape: Shape,
    balance: float,
    seed: int,
    jump: bool,
    ended: Callable[[int], object],
) -> dict[str, np.ndarray | Gaps]:
    """The columns of a Result; OverflowError if a time is beyond 64 bits. See `why_not` first.

    ended: told of so many requests more, now and then; what it raises ends the simulation.
    """
    count, gaps = len(trace.session), Gaps(trace.window_ps)
    asked = {name: np.ascontiguousarray(getattr(trace, name)) for name in ASKED[:5]}
    asked["full"] = trace.system_tokens // shape.block_size
    if policy == "two-choices":
        asked["drawn"] = pairs(seed, replicas, count)
    columns = {name: np.zeros(count, np.int64) for name in OF_REQUESTS}
    columns |= {name: np.zeros(replicas, np.int64) for name in OF_REPLICAS}
    counts = np.zeros(64 << Gaps.BITS, np.int64)
    pointers = {name: x.ctypes.data for name, x in (asked | columns | {"counts": counts}).items()}
    low, high = (min(at, LATEST) for at in trace.window_ps)
    limits = {name: min(getattr(shape, name), CLIPPED) for name in LIMITS}
    number = list(POLICIES).index(policy)
    numbers = (count, len(trace.system_tokens), replicas, number, jump, low, high)
    named = dict(zip(NUMBERS, numbers, strict=True))
    given = _Given(**pointers, **named, balance=balance, **limits, **vars(costs))
    _run(given, ended)
    gaps.counts.update({bucket: int(counts[bucket]) for bucket in np.flatnonzero(counts).tolist()})
    return columns | {"gaps": gaps}


def _run(given: _Given, ended: Callable[[int], object]) -> None:
    """In slices, with a look at Ctrl-C after each; the fleet is freed in any case."""
    lib, fleet, now = _library(), ctypes.c_void_p(), ctypes.c_int64()
    assert lib is not None
    with held_back() as hold:
        try:
            lib.spindle_fleet_begin(given, fleet)
            status, before = MORE if fleet else NO_MEMORY, 0
            while status == MORE:
                status = lib.spindle_fleet_run(fleet, SLICE_S, now)
                ended(now.value - before)
                before = now.value
                hold.deliver()
        finally:
            lib.spindle_fleet_free(fleet)
    if status == LATE:
        raise OverflowError("a time is beyond 64 bits")
    if status == NO_MEMORY:
        raise MemoryError(f"{given.requests:,} requests and {given.replicas:,} replicas")
