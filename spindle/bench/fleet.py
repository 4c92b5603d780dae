"""A fleet: many replicas behind a router, simulated with step costs that are measured here.

    trace = fleet.draw(fleet.Traffic(), requests=10_000).at_rate(40.0)
    result = fleet.simulate(trace, 16, "prefix-aware", costs)

What is real is the cost of a step: this engine's, on this machine, in this run (fleet_measure.py),
or as it was recorded. Replicas plan as the scheduler does (fleet_replica.py), a router sends them
requests (fleet_router.py), and conversations come as fleet_trace.py says. With a constant load a
replica the table says whether a fleet scales; with a total load, how many replicas that takes.

Many requests are simulated in C++ where that can be compiled (fleet_native.py): a million take a
few seconds so, and a minute in Python. The numbers are the same.

Left out: the way of a request and of its tokens through a network and an HTTP server; reading text;
a bend in what steps cost; a router that is late to know what it is told; replicas that fail, start,
or differ; answers that end by a stop token rather than at their length; drafts, several answers to
a prompt, and swapping. Two requests that compute one new prefix at the same time count as if the
second held the first one's blocks as well as its own; `twice` says how many blocks that concerns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spindle.bench import fleet_native, fleet_tables, profile, report
from spindle.bench.fleet_costs import Costs, read
from spindle.bench.fleet_events import Result, simulate
from spindle.bench.fleet_replica import Shape
from spindle.bench.fleet_router import POLICIES
from spindle.bench.fleet_trace import Conversations, Trace, Traffic, check_room, draw
from spindle.bench.peers.jobs import choose
from spindle.errors import RequestError

__all__ = ["POLICIES", "Costs", "Result", "Shape", "Trace", "Traffic", "draw", "simulate"]

SHAPE_HELP = {
    "max_seqs": "requests that run at once in a replica",
    "max_batch_tokens": "tokens of a step",
    "num_blocks": "KV blocks of a replica",
    "block_size": "tokens of a block",
}


@dataclass(frozen=True)
class Plan:
    """What is simulated: each policy with each number of replicas.

    requests: a replica; with a total rate, for the largest fleet, and the same for all. load: of a
    replica, as a share of what a full one could do that remembers nothing; rate_s: instead,
    requests a second of a replica; total_rate_s: instead, of all together.
    """

    replicas: Sequence[int] = (1, 10, 100)
    policies: Sequence[str] = tuple(POLICIES)
    requests: int = 300
    load: float = 1.0
    rate_s: float | None = None
    total_rate_s: float | None = None
    balance: float = 1.25
    ttft_slo_ms: float = 450.0
    itl_slo_ms: float = 40.0

    def check(self) -> None:
        """RequestError for what cannot be."""
        sizes = list(self.replicas)
        if not sizes or sizes != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= 100_000:
            shown = " ".join(map(str, sizes))
            raise RequestError(f"--replicas {shown}: expected numbers that rise, of 1 to 100000")
        choose("--policies", list(self.policies), tuple(POLICIES))
        if not 1 <= self.requests * sizes[-1] <= 10**7:
            raise RequestError(f"--requests {self.requests}: expected 1 to 10^7 in all")
        if self.rate_s is not None and self.total_rate_s is not None:
            raise RequestError("--rate and --total-rate: expected one of them")
        for name in ("load", "rate_s", "total_rate_s", "ttft_slo_ms", "itl_slo_ms"):
            value = getattr(self, name)
            if value is not None and not 1e-6 <= value <= 1e9:
                option = "--" + name.removesuffix("_s").replace("_", "-")
                raise RequestError(f"{option} {value:g}: expected 1e-6 to 1e9")
        if not 1 <= self.balance <= 1e6:
            raise RequestError(f"--balance {self.balance:g}: expected 1 or more")


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench fleet`."""
    add = parser.add_argument
    add("-m", "--model", default="tiny", help="whose steps are measured (default: tiny)")
    add("--costs", type=Path, metavar="FILE", help="what a run wrote with --json: measure nothing")
    _add_plan(parser)
    _add_fields(parser, Shape, SHAPE_HELP)
    laws = {one.name: one.metadata["help"] for one in fields(Traffic)}
    _add_fields(parser, Traffic, laws)
    report.add_json(parser)
    add("--plot", type=Path, metavar="FILE", help="draw the table there (needs matplotlib)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add, plan = parser.add_argument, Plan()
    number, whole = partial(add, type=float, metavar="X"), partial(add, type=int, metavar="N")
    shown = " ".join(map(str, plan.replicas))
    whole("--replicas", nargs="+", default=plan.replicas, help=f"rising (default: {shown})")
    text = f"of {', '.join(POLICIES)} (default: all)"
    add("--policies", nargs="+", default=plan.policies, metavar="POLICY", help=text)
    text = "requests a replica; with --total-rate, of the largest fleet's (default: %(default)s)"
    whole("--requests", default=plan.requests, help=text)
    text = "load of a replica, of what it could do if it remembered nothing (default: %(default)s)"
    number("--load", default=plan.load, help=text)
    number("--rate", dest="rate_s", help="instead: requests a second of a replica")
    number("--total-rate", dest="total_rate_s", help="instead: of all replicas together")
    text = "prefix-aware: requests of a replica, at most, of the average (default: %(default)s)"
    number("--balance", default=plan.balance, help=text)
    text = "to the first token, at most, as MLPerf Inference 5.0 has it (default: %(default)s)"
    number("--ttft-slo-ms", default=plan.ttft_slo_ms, help=text)
    text = "a request's mean gap between tokens, likewise (default: %(default)s)"
    number("--itl-slo-ms", default=plan.itl_slo_ms, help=text)


def _add_fields(parser: argparse.ArgumentParser, kind: Any, texts: dict[str, str]) -> None:
    """An option for each field of a dataclass."""
    for one in fields(kind):
        parser.add_argument(
            "--" + one.name.replace("_", "-"),
            type=type(one.default),
            default=one.default,
            metavar="N" if isinstance(one.default, int) else "X",
            help=f"{texts[one.name]} (default: %(default)s)",
        )


def run(args: argparse.Namespace) -> int:
    """Measure or read the costs, simulate, print a table, write JSON and draw, if asked to."""
    report.check_json(args.json)
    profile.check_plot(args.plot)

    def of(kind: Any) -> Any:
        return kind(**{one.name: getattr(args, one.name) for one in fields(kind)})

    plan, shape, traffic = of(Plan), of(Shape), of(Traffic)
    plan.check()
    conversations = draw(traffic, plan.requests * max(plan.replicas))
    check_room(conversations, shape)
    result = compare(plan, shape, conversations, costs_of(args.model, args.costs))
    report.publish(result, fleet_tables.as_markdown(result), args.json)
    if args.plot is not None:
        fleet_tables.draw(result).savefig(args.plot)
    return 0


def costs_of(model: str, file: Path | None) -> dict[str, Any]:
    """The costs of a step: as a file has them, or measured now."""
    if file is not None:
        return read(file)
    from spindle.bench.fleet_measure import measure  # and with it the whole engine

    return measure(model)


def compare(
    plan: Plan, shape: Shape, conversations: Conversations, measured: dict[str, Any]
) -> dict[str, Any]:
    """Everything that the command prints; measured: as `costs_of` gives it."""
    costs, rows = Costs(**measured["costs"]), list[dict[str, Any]]()
    much = len(conversations.session) * len(plan.policies) >= fleet_native.WORTH
    native = much and fleet_native.available()
    start = time.perf_counter()
    seqs = min(shape.max_seqs, _seats(conversations, shape))
    tokens = (conversations.prompt, conversations.output)
    full_s = 1 / costs.full_s(*tokens, seqs, shape.max_batch_tokens)
    for count in plan.replicas:
        trace = _trace(plan, conversations, count, full_s)
        for policy in plan.policies:
            result = simulate(
                trace, count, policy, costs, shape, balance=plan.balance,
                seed=conversations.traffic.seed, progress=True, native=native,
            )  # fmt: skip
            rows.append({"policy": policy, "replicas": count} | figures(result, plan))
    longest = int((conversations.prompt + conversations.output).max())
    return {
        "rows": rows,
        "full_requests_s": full_s,
        "longest": longest,
        "seconds": time.perf_counter() - start,
        "native": native,
        "measured": measured,
        "settings": asdict(plan)
        | {"shape": asdict(shape), "traffic": asdict(conversations.traffic)},
    }


def _seats(conversations: Conversations, shape: Shape) -> float:
    """Requests of middling length that the pool has room for: 1 at least."""
    tokens = float(np.mean(conversations.prompt + conversations.output / 2))
    return max(1.0, shape.num_blocks * shape.block_size / tokens)


def _trace(plan: Plan, conversations: Conversations, replicas: int, full_s: float) -> Trace:
    """The traffic of a fleet of that size: the same for all, if there is a total rate."""
    if plan.total_rate_s is not None:
        return conversations.at_rate(plan.total_rate_s)
    rate_s = plan.load * full_s if plan.rate_s is None else plan.rate_s
    return conversations.part(plan.requests * replicas).at_rate(rate_s * replicas)


def figures(result: Result, plan: Plan) -> dict[str, Any]:
    """A row of the table; times are None if no request counts."""
    counted, p99 = result.counted, result.gaps.percentile_ps(99)
    ttft = [
        float(np.percentile(result.ttft_ms[counted], p, method="inverted_cdf"))
        if counted.any()
        else None
        for p in (50, 99)
    ]
    return {
        "requests": len(result.end_ps),
        "counted": int(counted.sum()),
        "window_s": result.window_s,
        "offered_s": float(counted.sum() / result.window_s),
        "hit_rate": result.hit_rate,
        "ttft_p50_ms": ttft[0],
        "ttft_p99_ms": ttft[1],
        "itl_p99_ms": None if p99 is None else p99 / 1e9,
        "goodput_s": result.goodput(plan.ttft_slo_ms, plan.itl_slo_ms),
        "utilisation": result.utilisation,
        "steps": int(result.steps.sum()),
        "preemptions": int(result.preemptions.sum()),
        "twice": int(result.twice.sum()),
    }
