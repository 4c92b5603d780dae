"""One trace of requests in two memories: how many slots does each hold, and what is in them?

A slot holds the keys and values of one token. No model runs: which token comes is of no matter to
a memory, only when. All requests wait from step 0 and are served in order.

    a step      every running request stores what has no slot yet and makes one token: in its
                first step it stores its prompt, later the one token that it made last
    its last    token is never stored: a prompt of p and n new tokens store p + n - 1 in n steps
    contiguous  prompt + max_new slots in a row, held from the first step to the last: the request
                may stop early, but nobody knows that when it is let in
    paged       blocks of P slots, each held once a token needs it

The kinds of waste are those of Kwon et al. 2023 (PagedAttention, section 3.1).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from spindle.bench import report
from spindle.errors import BlockError, OutOfBlocks, RequestError
from spindle.kvcache.blocks import BlockPool, BlockTable

Span = tuple[int, int]  # so many slots from this one on: (first, count)
Preempted = tuple[int, int]  # a request's name, and the tokens that it had stored

# The trace: most answers are short, few are long, and nobody says which. Of the first 200 seeds 183
# give a peak ratio of 2.5 or more and a paged utilisation of 0.92 or more: no seed was looked for.
PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_RANGE = 24, 0.35, (4, 96)
OUTPUT_MEDIAN, OUTPUT_SPREAD = 32, 0.5
MAX_NEW = 192  # what a service grants to whoever names no limit

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_LENGTHS = (128, 160, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Request:
    """What one user asks: tokens of the prompt, the most new ones, and those that will come.

    RequestError unless there is 1 of each, and no more come than were granted.
    """

    name: int  # each its own
    prompt: int
    max_new: int
    output: int

    def __post_init__(self) -> None:
        if self.prompt < 1 or not 1 <= self.output <= self.max_new:
            raise RequestError(
                f"{self}: expected a prompt of 1 or more, and an output up to max_new"
            )

    @property
    def final(self) -> int:
        """Tokens stored when it ends."""
        return self.prompt + self.output - 1


def long_tailed(num_requests: int = 64, seed: int = 0) -> list[Request]:
    """The trace of a seed: prompts and outputs are log-logistic, cut to PROMPT_RANGE and MAX_NEW.

    Half of the outputs are shorter than OUTPUT_MEDIAN, one in 37 would be longer than MAX_NEW.
    Only `random()` is drawn from: the one method that gives the same in every version of Python.
    """
    draw, trace = random.Random(seed), []
    for name in range(num_requests):
        prompt = log_logistic(draw.random(), PROMPT_MEDIAN, PROMPT_SPREAD)
        output = log_logistic(draw.random(), OUTPUT_MEDIAN, OUTPUT_SPREAD)
        low, high = PROMPT_RANGE
        trace.append(Request(name, cut(prompt, low, high), MAX_NEW, cut(output, 1, MAX_NEW)))
    return trace


def log_logistic(u: float, median: float, spread: float) -> int:
    """What a share u of all are below; a share 1 / (1 + (x / median)^(1 / spread)) is above x."""
    return round(median * (u / (1 - u)) ** spread)


def cut(value: int, low: int, high: int) -> int:
    """The value, or the end of the range that it is beyond."""
    return max(low, min(high, value))


# --- the loop -----------------------------------------------------------------------------------


@dataclass(eq=False)  # a job equals itself alone
class Job:
    """A request on its way: the tokens it has made, and of all its tokens those that are stored."""

    request: Request
    made: int = 0
    stored: int = 0

    @property
    def length(self) -> int:
        """Tokens there are: prompt and made. After a preemption all of them are stored anew."""
        return self.request.prompt + self.made


class Memory(Protocol):
    """What the loop asks of a memory; what is refused has changed nothing."""

    def admit(self, job: Job) -> bool:
        """Let a job in and hold slots for its `length` tokens, or let it wait."""

    def grow(self, job: Job) -> bool:
        """Hold slots for the `length` tokens of a job that runs. False: there are none."""

    def release(self, job: Job) -> None:
        """Take back every slot of the job."""

    def spans(self, job: Job) -> list[Span]:
        """The slots that it holds, in the order of its positions."""

    def promised(self, job: Job) -> int:
        """Slots that it holds for tokens which are not there yet, and may never be."""

    def unusable(self, job: Job) -> int:
        """Free slots that would be enough for a job that waits, but lie apart."""


def replay(trace: Iterable[Request], memory: Memory) -> list[Step]:
    """Serve a trace, first come first served; returns what every step looked like.

    A job that cannot grow sends the youngest back to the head of the queue, to store all its
    tokens again later (recompute). The oldest is sent back by nobody, so there is an end.
    """
    queue, running, steps = deque(Job(request) for request in trace), list[Job](), list[Step]()
    while queue or running:
        preempted = grow_all(running, queue, memory)
        while queue and memory.admit(queue[0]):
            running.append(queue.popleft())
        if not running:
            raise RequestError(f"{queue[0].request}: longer than the whole memory")
        for job in running:
            job.stored = job.length
        steps.append(Step.of(running, queue, preempted, memory))
        for job in running:
            job.made += 1
        for job in [job for job in running if job.made == job.request.output]:
            running.remove(job)
            memory.release(job)
    return steps


def grow_all(running: list[Job], queue: deque[Job], memory: Memory) -> list[Preempted]:
    """A slot for the newest token of every job, oldest first; the youngest make room."""
    preempted = []
    for job in list(running):
        while job in running and not memory.grow(job):
            youngest = running.pop()
            memory.release(youngest)
            preempted.append((youngest.request.name, youngest.stored))
            youngest.stored = 0
            queue.appendleft(youngest)
    return preempted


class Seat(NamedTuple):
    """What one request has in one step, in slots; spans are in the order of its positions."""

    spans: list[Span]
    held: int
    stored: int
    promised: int


@dataclass(frozen=True)
class Step:
    """A snapshot: who has which slots once all have stored, who waits, who was sent back."""

    seats: dict[int, Seat]  # by the request's name, the oldest first
    waiting: list[int]
    preempted: list[Preempted]
    unusable: int

    @classmethod
    def of(
        cls,
        running: Sequence[Job],
        queue: Sequence[Job],
        preempted: list[Preempted],
        memory: Memory,
    ) -> Step:
        """What the loop and the memory say now."""
        seats = {}
        for job in running:
            spans = memory.spans(job)
            held = sum(count for _, count in spans)
            seats[job.request.name] = Seat(spans, held, job.stored, memory.promised(job))
        unusable = memory.unusable(queue[0]) if queue else 0
        return cls(seats, [job.request.name for job in queue], preempted, unusable)


# --- two memories -------------------------------------------------------------------------------


class SlotAllocator:
    """Slots in a row for whoever asks, from the first hole that is large enough (first fit).

    Knuth, The Art of Computer Programming, volume 1, section 2.5, algorithms A and B.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.holes: list[Span] = [(0, slots)]  # by address; no two touch

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return sum(count for _, count in self.holes)

    def take(self, count: int) -> int | None:
        """Hold `count` slots and return the first, or None if no hole is as large."""
        if count < 1:
            raise BlockError(f"{count} slots: expected 1 or more")
        for n, (first, size) in enumerate(self.holes):
            if size >= count:
                self.holes[n : n + 1] = [(first + count, size - count)] if size > count else []
                return first
        return None

    def give(self, first: int, count: int) -> None:
        """Let go of slots; holes that touch become one. BlockError if one is free, or not ours."""
        stop, n = first + count, bisect(self.holes, (first, 0))
        before = sum(self.holes[n - 1]) if n else 0  # where the hole before it ends
        after = self.holes[n][0] if n < len(self.holes) else self.slots
        if count < 1 or not before <= first < stop <= after:
            raise BlockError(f"slots {first} to {stop - 1}: not all of them are held")
        low = n - 1 if n and before == first else n
        high = n + 1 if n < len(self.holes) and after == stop else n
        start = self.holes[low][0] if low < n else first
        end = sum(self.holes[n]) if high > n else stop
        self.holes[low:high] = [(start, end - start)]


class Contiguous(Memory):
    """Every job has prompt + max_new slots in a row for as long as it runs."""

    def __init__(self, slots: int) -> None:
        self.allocator = SlotAllocator(slots)
        self._held: dict[int, Span] = {}

    def admit(self, job: Job) -> bool:
        need = job.request.prompt + job.request.max_new
        first = self.allocator.take(need)
        if first is not None:
            self._held[job.request.name] = first, need
        return first is not None

    def grow(self, job: Job) -> bool:
        return True  # it has had the slot from the start

    def release(self, job: Job) -> None:
        self.allocator.give(*self._held.pop(job.request.name))

    def spans(self, job: Job) -> list[Span]:
        return [self._held[job.request.name]]

    def promised(self, job: Job) -> int:
        return self._held[job.request.name][1] - job.length

    def unusable(self, job: Job) -> int:
        free = self.allocator.free
        return free if free >= job.request.prompt + job.request.max_new else 0


class Paged(Memory):
    """Every job has a block table, which takes a block when a token needs it.

    A job waits while it would leave less than 1% of the blocks free, unless nobody else is there:
    those who run grow into them (the watermark of vLLM's first block manager).
    """

    def __init__(self, slots: int, block_size: int) -> None:
        self.pool = BlockPool(slots // block_size, block_size, prefix_cache=False)
        self.watermark = self.pool.num_blocks // 100
        self.tables: dict[int, BlockTable] = {}

    def admit(self, job: Job) -> bool:
        need = -(-job.length // self.pool.block_size)
        if self.tables and need + self.watermark > self.pool.free:
            return False
        table = BlockTable(self.pool)
        table.reserve(0, job.length)
        self.tables[job.request.name] = table
        return True

    def grow(self, job: Job) -> bool:
        try:
            self.tables[job.request.name].reserve(job.stored, job.length)
        except OutOfBlocks:
            return False
        return True

    def release(self, job: Job) -> None:
        self.tables.pop(job.request.name).release()

    def spans(self, job: Job) -> list[Span]:
        P = self.pool.block_size
        return [(block * P, P) for block in self.tables[job.request.name].blocks]

    def promised(self, job: Job) -> int:
        return 0  # what is free in its last block is the block's doing

    def unusable(self, job: Job) -> int:
        return 0  # any block will do


# --- what a run amounts to ----------------------------------------------------------------------


def summary(steps: Sequence[Step], trace: Sequence[Request], slots: int) -> dict[str, Any]:
    """The figures of a run in `slots` slots; `slot_steps` are sums over steps, of one kind each.

    `mean_utilisation` is the mean over steps of stored / held; `wasted` is the share of all slots
    held, over all steps, that had no token: steps in which much is held count for more there.
    """
    held = [sum(seat.held for seat in step.seats.values()) for step in steps]
    stored = [sum(seat.stored for seat in step.seats.values()) for step in steps]
    preempted = [one for step in steps for one in step.preempted]
    running = [len(step.seats) for step in steps]
    return {
        "peak_slots": max(held),
        "mean_utilisation": statistics.fmean(s / h for s, h in zip(stored, held, strict=True)),
        "steps": len(steps),
        "peak_running": max(running),
        "mean_running": statistics.fmean(running),
        "wasted": 1 - sum(stored) / sum(held),
        "slot_steps": slot_steps(steps, trace, slots),
        "steps_with_a_queue": sum(bool(step.waiting) for step in steps),
        "preemptions": len(preempted),
        "recomputed_tokens": sum(tokens for _, tokens in preempted),
    }


def slot_steps(steps: Sequence[Step], trace: Sequence[Request], slots: int) -> dict[str, int]:
    """What all slots were in all steps; the sum is slots x steps.

    stored: has a token; not_yet, never: promised to a token that comes later, that never comes;
    internal: the rest of a last block; external: free and enough for the first who waits, but in
    pieces; free: the others.
    """
    final = {request.name: request.final for request in trace}
    total = dict.fromkeys(("stored", "not_yet", "never", "internal", "external", "free"), 0)
    for step in steps:
        for name, seat in step.seats.items():
            not_yet = min(seat.promised, final[name] - seat.stored)
            total["stored"] += seat.stored
            total["not_yet"] += not_yet
            total["never"] += seat.promised - not_yet
            total["internal"] += seat.held - seat.stored - seat.promised
        total["external"] += step.unusable
    total["free"] = slots * len(steps) - sum(total.values())
    return total


def peak_in_blocks(steps: Sequence[Step], block_size: int) -> int:
    """Peak slots if the same requests had run in the same steps, in blocks."""
    P = block_size
    return max(sum(-(-seat.stored // P) * P for seat in step.seats.values()) for step in steps)


def peak_reserved(steps: Sequence[Step], trace: Sequence[Request]) -> int:
    """Peak slots if the same requests had run in the same steps, all reserved at admission."""
    size = {request.name: request.prompt + request.max_new for request in trace}
    return max(sum(size[name] for name in step.seats) for step in steps)


def ceiling(steps: Sequence[Step], block_size: int) -> float:
    """Mean over steps of L / (L + (P - 1) / 2), L the mean tokens of a request in that step.

    What blocks of P can hold, if a last block is as likely to have 1 token as P of them.
    """
    spare = (block_size - 1) / 2
    means = [statistics.fmean(seat.stored for seat in step.seats.values()) for step in steps]
    return statistics.fmean(mean / (mean + spare) for mean in means)


def last_began(steps: Sequence[Step]) -> int:
    """The first step of the request that ended last."""
    last = next(iter(steps[-1].seats))
    return next(n for n, step in enumerate(steps) if last in step.seats)


# --- sweeps -------------------------------------------------------------------------------------


def sweep_block_size(trace: Sequence[Request], slots: int) -> list[dict[str, Any]]:
    """The same trace and slots in blocks of every size that the longest request fits in."""
    longest, rows = max(request.final for request in trace), []
    for P in BLOCK_SIZES:
        if slots // P * P >= longest:
            steps = replay(trace, Paged(slots, P))
            lengths = [[len(seat.spans) for seat in step.seats.values()] for step in steps]
            row = {"block_size": P, "peak_table": max(map(max, lengths))}
            row["peak_entries"] = max(map(sum, lengths))  # of all tables together
            rows.append(row | summary(steps, trace, slots))
    return rows


def sweep_max_len(trace: Sequence[Request], block_size: int) -> list[dict[str, Any]]:
    """A service's limit on prompt and output together, reserved for everybody.

    Whoever would be longer is cut off there. There is room for all at once, so that nothing but
    the limit changes. `mean_len` is the mean of prompt + output that came.
    """
    rows = []
    for max_len in MAX_LENGTHS:
        cut = [limited(request, max_len) for request in trace]
        slots = len(trace) * (max_len + block_size)
        runs: dict[str, Memory]
        runs = {"contiguous": Contiguous(slots), "paged": Paged(slots, block_size)}
        figures = {n: summary(replay(cut, memory), cut, slots) for n, memory in runs.items()}
        mean_len = statistics.fmean(one.prompt + one.output for one in cut)
        lengths = {"max_len": max_len, "mean_len": mean_len, "ratio": max_len / mean_len}
        rows.append(lengths | figures)
    return rows


def limited(request: Request, max_len: int) -> Request:
    """The request of a user who asks for all that max_len leaves, and is cut off there."""
    room = max_len - request.prompt
    return Request(request.name, request.prompt, room, min(request.output, room))


# --- what the bookkeeping costs -----------------------------------------------------------------


def cost_us(num_blocks: int, block_size: int = 16, batches: int = 10) -> dict[str, float]:
    """Microseconds of a take, a give, and a reserve of one token, in a pool of `num_blocks`.

    Means of a batch of 1,000 calls; of the batches the fastest, since a busy machine only adds.
    """
    pool, calls = BlockPool(num_blocks, block_size), min(num_blocks, 1000)
    table, taken, costs = BlockTable(pool), list[int](), dict[str, list[float]]()
    for _ in range(batches):
        _time(costs, "take", lambda n: taken.extend(pool.take()), calls)
        _time(costs, "give", lambda n: pool.give(taken[n]), calls)
        _time(costs, "reserve", lambda n: table.reserve(n, n + 1), calls)
        taken.clear()
        table.release()
    return {name: min(values) for name, values in costs.items()}


def _time(
    costs: dict[str, list[float]], name: str, call: Callable[[int], object], calls: int
) -> None:
    start = time.perf_counter()
    for n in range(calls):
        call(n)
    costs.setdefault(name, []).append((time.perf_counter() - start) / calls * 1e6)


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench replay`."""
    add = parser.add_argument
    add("--requests", type=int, default=64, metavar="N", help="requests (default: 64)")
    add("--slots", type=int, default=8192, metavar="N", help="token slots (default: 8192)")
    add("--block-size", type=int, default=16, metavar="P", help="slots a block (default: 16)")
    add("--seed", type=int, default=0, metavar="N", help="of the trace (default: 0)")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Replay, print markdown tables, and write JSON if a file was named."""
    report.check_json(args.json)
    result = measure(args.requests, args.slots, args.block_size, args.seed)
    report.publish(result, as_markdown(result), args.json)
    return 0


def measure(
    requests: int = 64, slots: int = 8192, block_size: int = 16, seed: int = 0
) -> dict[str, Any]:
    """Both memories, their ratios and bounds, the sweeps, the cost. RequestError: cannot be."""
    _check(requests, slots, block_size)
    trace = long_tailed(requests, seed)
    contiguous = replay(trace, Contiguous(slots))
    paged = replay(trace, Paged(slots, block_size))
    figures = {
        "contiguous": summary(contiguous, trace, slots),
        "paged": summary(paged, trace, slots),
    }
    peaks = [figures[name]["peak_slots"] for name in ("contiguous", "paged")]
    return {
        **figures,
        "peak_ratio": peaks[0] / peaks[1],
        "equal_concurrency": {
            "contiguous_schedule": [peaks[0], peak_in_blocks(contiguous, block_size)],
            "paged_schedule": [peak_reserved(paged, trace), peaks[1]],
        },
        "bounds": {
            "utilisation": ceiling(paged, block_size),
            "steps": max(request.output for request in trace),
            "last_began": {"contiguous": last_began(contiguous), "paged": last_began(paged)},
        },
        "sweeps": {
            "block_size": sweep_block_size(trace, slots),
            "max_len": sweep_max_len(trace, block_size),
        },
        "cost_us": {str(num_blocks): cost_us(num_blocks) for num_blocks in (1000, 1_000_000)},
        "trace": [[one.prompt, one.max_new, one.output] for one in trace],
        "settings": {"slots": slots, "block_size": block_size, "seed": seed},
    }


def _check(requests: int, slots: int, block_size: int) -> None:
    if requests < 1:
        raise RequestError(f"--requests {requests}: expected 1 or more")
    if not 1 <= block_size <= 256:
        raise RequestError(f"--block-size {block_size}: expected 1 to 256")
    most = -(-(PROMPT_RANGE[1] + MAX_NEW) // block_size) * block_size
    if slots < most:
        raise RequestError(f"--slots {slots}: expected {most} or more (what one request may need)")


def as_markdown(result: dict[str, Any]) -> str:
    """The tables, and what bounds their figures."""
    parts = [_about(result), _both(result), _bounds(result), _block_sizes(result)]
    return "\n\n".join([*parts, _max_lengths(result), _cost(result)])


def _about(result: dict[str, Any]) -> str:
    prompts, limits, outputs = zip(*result["trace"], strict=True)
    settings = result["settings"]
    return (
        f"{len(prompts)} requests (seed {settings['seed']}): prompts of {min(prompts)} to "
        f"{max(prompts)} tokens, {statistics.fmean(prompts):.1f} on average; {max(limits)} new "
        f"tokens granted to each, {min(outputs)} to {max(outputs)} made, "
        f"{statistics.fmean(outputs):.1f} on average. "
        f"{settings['slots']:,} slots, blocks of {settings['block_size']}."
    )


ROWS: tuple[tuple[str, str, str], ...] = (
    ("peak slots held", "peak_slots", ",d"),
    ("mean slot utilisation", "mean_utilisation", ".3f"),
    ("steps to drain", "steps", "d"),
    ("requests running, peak", "peak_running", "d"),
    ("requests running, mean", "mean_running", ".1f"),
    ("steps in which somebody waits", "steps_with_a_queue", "d"),
    ("preemptions", "preemptions", "d"),
)
KINDS = {
    "stored": "with a token",
    "not_yet": "reserved, its token comes later",
    "never": "reserved, its token never comes",
    "internal": "the rest of a last block",
    "external": "free, enough for who waits, in pieces",
    "free": "free",
}


def _both(result: dict[str, Any]) -> str:
    runs = [result["contiguous"], result["paged"]]
    rows = [[label, *(format(run[key], how) for run in runs)] for label, key, how in ROWS]
    rows += [
        [f"slots of a mean step: {label}"]
        + [f"{run['slot_steps'][kind] / run['steps']:,.1f}" for run in runs]
        for kind, label in KINDS.items()
    ]
    return report.table(["", "contiguous", "paged"], rows)


def _bounds(result: dict[str, Any]) -> str:
    equal, bounds = result["equal_concurrency"], result["bounds"]
    runs, began = [result["contiguous"], result["paged"]], bounds["last_began"]
    peaks, waits = ([run[key] for run in runs] for key in ("peak_slots", "steps_with_a_queue"))
    spare = (result["settings"]["block_size"] - 1) / 2
    return "\n".join(
        [
            f"Peak: {_ratio(peaks)}. What bounds it is the memory while somebody waits: "
            f"{waits[0]} steps contiguous, {waits[1]} paged.",
            f"At equal concurrency: {_ratio(equal['contiguous_schedule'])} with the contiguous "
            f"run's admissions, {_ratio(equal['paged_schedule'])} with the paged run's.",
            f"Utilisation of blocks: at most about L / (L + {spare:g}) for L tokens a request, "
            f"{bounds['utilisation']:.3f} over these steps.",
            f"Steps: at least {bounds['steps']}, the tokens of the longest request. The one that "
            f"ends last begins in step {began['contiguous']} contiguous, {began['paged']} paged.",
        ]
    )


def _ratio(peaks: Sequence[int]) -> str:
    return f"{peaks[0]:,} / {peaks[1]:,} = {peaks[0] / peaks[1]:.2f}"


def _block_sizes(result: dict[str, Any]) -> str:
    columns = ["slots a block", "peak slots", "utilisation", "steps", "preemptions"]
    columns += ["longest table", "entries of all tables"]
    keys = [("block_size", "d"), ("peak_slots", ",d"), ("mean_utilisation", ".3f"), ("steps", "d")]
    keys += [("preemptions", "d"), ("peak_table", "d"), ("peak_entries", ",d")]
    rows = result["sweeps"]["block_size"]
    return report.table(columns, [[format(row[key], how) for key, how in keys] for row in rows])


def _max_lengths(result: dict[str, Any]) -> str:
    columns = ["max_len", "mean_len", "max_len / mean_len", "wasted, contiguous", "wasted, paged"]
    rows = [
        [f"{row['max_len']}", f"{row['mean_len']:.1f}", f"{row['ratio']:.1f}"]
        + [f"{row[name]['wasted']:.0%}" for name in ("contiguous", "paged")]
        for row in result["sweeps"]["max_len"]
    ]
    return report.table(columns, rows)


def _cost(result: dict[str, Any]) -> str:
    rows = [
        [f"{int(num_blocks):,}", *(f"{costs[name]:.2f}" for name in ("take", "give", "reserve"))]
        for num_blocks, costs in result["cost_us"].items()
    ]
    return report.table(["blocks in the pool", "take, us", "give, us", "reserve a token, us"], rows)
