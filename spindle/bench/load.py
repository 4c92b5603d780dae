"""Loads and how they are served: requests, when they come, and what became of each.

    open loop   a request is added when it is due, whatever the engine is doing, and its latency
                starts when it was due: a stall that kept the sender from sending counts for all
                who were due in it (what is left out else is called coordinated omission)
    useful      tokens that somebody asked for and got, counted as they came
    a step      one pass of the model; its rows are prompt tokens, new tokens and filler
    a seat      of max_seqs: busy with a request's own rows, or idle (empty, or computing filler)

The three policies differ in what happens to a row that has ended: `static` computes it on as filler
until its batch ends, as padded batches do; `dropping` computes it no more, but lets nobody in;
`continuous` gives its seat away (Yu et al. 2022, Orca).
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from spindle.bench.replay import cut, log_logistic
from spindle.decode.params import SamplingParams
from spindle.decode.stats import Stats, percentile
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool
from spindle.serve.llm import LLM
from spindle.serve.outputs import RequestOutput
from spindle.serve.request import Request as Job
from spindle.serve.request import Sequence as Answer
from spindle.serve.scheduler import Plan, Scheduler

Clock = Callable[[], float]

# Most answers are short, few are long, one in nine takes all that a service grants. In batches of 8
# the median of steps, static / continuous, is 2.06 over the first 200 seeds (2.30 over the first
# 20): 2 or more in 115 of the 200. No seed was looked for.
PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_RANGE = 16, 0.35, (8, 64)
OUTPUT_MEDIAN, OUTPUT_SPREAD = 16, 1.2
MAX_NEW = 192  # what a service grants to whoever names no limit
UNIFORM_PROMPT, UNIFORM_OUTPUT = 16, 16  # three batches of 8 are 48 steps


@dataclass(frozen=True)
class Request:
    """What one user sends: ids, how many new tokens come back, and when, in seconds from the start.

    RequestError unless there is 1 id and 1 token at least, and the time is a number from 0 on.
    """

    name: int  # each its own
    prompt: tuple[int, ...]
    output: int
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt or self.output < 1:
            raise RequestError(f"request {self.name}: expected 1 id and 1 new token at least")
        if not 0 <= self.arrival_s < math.inf:
            raise RequestError(f"request {self.name}: it arrives at {self.arrival_s} s")


def long_tailed(count: int = 24, seed: int = 0, vocab_size: int = 256) -> list[Request]:
    """The load of a seed, all of it at 0 s: prompts and outputs are log-logistic, and cut.

    Half of the outputs are shorter than OUTPUT_MEDIAN, one in 9 would be longer than MAX_NEW. Only
    `random()` is drawn from: the one method that gives the same in every version of Python.
    """
    draw, sizes = random.Random(seed), list[tuple[int, int]]()
    for _ in range(count):
        prompt = log_logistic(draw.random(), PROMPT_MEDIAN, PROMPT_SPREAD)
        output = log_logistic(draw.random(), OUTPUT_MEDIAN, OUTPUT_SPREAD)
        sizes.append((cut(prompt, *PROMPT_RANGE), cut(output, 1, MAX_NEW)))
    return _with_ids(sizes, draw, vocab_size)


def uniform(
    count: int = 24,
    seed: int = 0,
    vocab_size: int = 256,
    prompt: int = UNIFORM_PROMPT,
    output: int = UNIFORM_OUTPUT,
) -> list[Request]:
    """The control: all prompts are of one length, and all outputs; the ids are a seed's."""
    return _with_ids([(prompt, output)] * count, random.Random(seed), vocab_size)


def poisson(load: Iterable[Request], rate: float, seed: int = 0) -> list[Request]:
    """The same requests in their order, `rate` a second on average, each when chance wants it.

    The gaps between arrivals are exponential; only `random()` is drawn from.
    """
    if not 0 < rate < math.inf:
        raise RequestError(f"rate={rate}: expected requests a second, above 0")
    draw, now, arriving = random.Random(seed), 0.0, []
    for request in load:
        now -= math.log(1 - draw.random()) / rate
        arriving.append(replace(request, arrival_s=now))
    return arriving


def _with_ids(sizes: Iterable[tuple[int, int]], draw: random.Random, vocab: int) -> list[Request]:
    return [
        Request(name, tuple(int(draw.random() * vocab) for _ in range(prompt)), output)
        for name, (prompt, output) in enumerate(sizes)
    ]


# --- the open loop ------------------------------------------------------------------------------


@dataclass
class Record:
    """What became of one request; times are in seconds from the start of the run.

    `arrival_s` is when it was due. `events`: when tokens came, and how many at once.
    """

    request: Request
    arrival_s: float
    scheduled_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    events: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float | None:
        """When its first token came."""
        return self.events[0][0] if self.events else None

    @property
    def last_s(self) -> float | None:
        """When its last token so far came."""
        return self.events[-1][0] if self.events else None

    @property
    def stats(self) -> Stats:
        """Its ttft and gaps, by the rules of a single stream: as if a clock showed these times."""
        times = iter([self.arrival_s, *(when for when, _ in self.events)])
        stats = Stats(len(self.request.prompt), clock=lambda: next(times))
        for _, count in self.events:
            stats.record(count)
        return stats

    @property
    def phases_ms(self) -> tuple[float, float, float] | None:
        """Queue, prefill, decode: to the first plan, the first token, the last one. None: none."""
        if self.scheduled_s is None or self.first_s is None or self.last_s is None:
            return None
        times = (self.arrival_s, self.scheduled_s, self.first_s, self.last_s)
        queue, prefill, decode = ((b - a) * 1e3 for a, b in pairwise(times))
        return queue, prefill, decode


@dataclass(frozen=True)
class Step:
    """One pass: rows computed, those of them that were filler, and seats busy with a request."""

    rows: int
    filler: int
    busy: int
    start_s: float = 0.0
    end_s: float = 0.0

    @classmethod
    def of(cls, plan: Plan, start_s: float = 0.0, end_s: float = 0.0) -> Step:
        """What a plan computes."""
        rows = sum(chunk.count for chunk in plan.chunks)
        filler = sum(chunk.count for chunk in plan.chunks if chunk.filler)
        busy = len({c.sequence for c in plan.chunks if not c.filler})
        return cls(rows, filler, busy, start_s, end_s)


@dataclass(frozen=True)
class Run:
    """A load as it was served: a record a request, in the load's order, and the steps."""

    records: list[Record]
    steps: list[Step]
    max_seqs: int

    @property
    def useful_tokens(self) -> int:
        """Tokens that came, counted, whatever was planned."""
        return sum(len(record.token_ids) for record in self.records)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return self.steps[-1].end_s if self.steps else 0.0

    def bins(self) -> tuple[list[int], float]:
        """Tokens that came in each of equal parts of the run, and a part's seconds, at most 1."""
        count = max(1, math.ceil(self.seconds))
        width, tokens = self.seconds / count, [0] * count
        for when, new in (event for record in self.records for event in record.events):
            tokens[min(count - 1, int(when / width)) if width else 0] += new
        return tokens, width

    def summary(self) -> dict[str, Any]:
        """The figures of the run; requests that got no token have no latency, and are counted.

        Rates are a second of the whole run, the prompts' passes included. `idle_slots`: seats that
        had no work of their own, summed over steps: filler and empty ones.
        """
        answered = [record.stats for record in self.records if record.events]
        ttft = [stats.ttft_ms for stats in answered if stats.ttft_ms is not None]
        gaps = [gap for stats in answered for gap in stats.itl_ms]
        prompts = sum(len(record.request.prompt) for record in self.records if record.events)
        tokens, width = self.bins()
        filler = sum(step.filler for step in self.steps)
        idle = sum(self.max_seqs - step.busy for step in self.steps)
        return {
            "useful_tok_s": _per(self.useful_tokens, self.seconds),
            "peak_tok_s": _per(max(tokens), width),
            "prompt_tok_s": _per(prompts, self.seconds),
            "total_tok_s": _per(self.useful_tokens + prompts, self.seconds),
            "useful_tokens": self.useful_tokens,
            "prompt_tokens": prompts,
            "seconds": self.seconds,
            "steps": len(self.steps),
            "rows": sum(step.rows for step in self.steps),
            "filler_rows": filler,
            "idle_slots": idle,
            "empty_slots": idle - filler,
            "ttft_p50_ms": percentile(ttft, 50),
            "ttft_p99_ms": percentile(ttft, 99),
            "itl_p50_ms": percentile(gaps, 50),
            "itl_p99_ms": percentile(gaps, 99),
            "requests": len(self.records),
            "without_tokens": len(self.records) - len(answered),
        }


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def serve(
    llm: LLM,
    load: Sequence[Request],
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Run:
    """Serve a load in open loop, greedily, to the last token asked for.

    clock: the one that the LLM was given. `llm` must keep a trace of 1 plan or more, and have
    nothing else to do. Raises RequestError if it does not, or if it refuses a request.
    """
    if not llm.trace.maxlen or llm.has_unfinished:
        raise RequestError("serve: expected an LLM with trace=1 or more, and nothing unfinished")
    return _OpenLoop(llm, load, clock, sleep).run()


class _OpenLoop:
    """One run in the making."""

    def __init__(
        self,
        llm: LLM,
        load: Sequence[Request],
        clock: Clock,
        sleep: Callable[[float], object],
    ) -> None:
        self.llm, self.clock, self.sleep = llm, clock, sleep
        self.start = start = clock()
        # Rounded as all other times are, so that none of them comes before it.
        self.records = [Record(one, start + one.arrival_s - start) for one in load]
        self.due = deque(sorted(self.records, key=lambda record: record.arrival_s))
        self.sent: dict[str, Record] = {}  # by the name that the LLM gave it
        self.steps: list[Step] = []

    def now(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.start

    def run(self) -> Run:
        while self.due or self.llm.has_unfinished:
            while self.due and self.clock() >= self.start + self.due[0].request.arrival_s:
                self.send(self.due.popleft())
            if self.llm.has_unfinished:
                self.step()
            elif self.due:
                self.sleep(max(0.0, self.start + self.due[0].request.arrival_s - self.clock()))
        return Run(self.records, self.steps, self.llm.scheduler.max_seqs)

    def send(self, record: Record) -> None:
        request = record.request
        params = SamplingParams(max_tokens=request.output, temperature=0, seed=0, ignore_eos=True)
        self.sent[self.llm.add(list(request.prompt), params)] = record

    def step(self) -> None:
        begin, before = self.now(), self._plan()
        outputs = self.llm.step()
        plan = self._plan()
        if plan is not None and plan is not before:
            self.steps.append(Step.of(plan, begin, self.now()))
        for output in outputs:
            self.note(output)

    def _plan(self) -> Plan | None:
        return self.llm.trace[-1] if self.llm.trace else None

    def note(self, output: RequestOutput) -> None:
        """Write down what a request has gained, and when, as the LLM's clock says."""
        record, metrics, answer = self.sent[output.request_id], output.metrics, output.outputs[0]
        new = len(answer.token_ids) - len(record.token_ids)
        if new and metrics.last_token is not None:
            record.events.append((metrics.last_token - self.start, new))
        record.token_ids, record.finish_reason = answer.token_ids, answer.finish_reason
        record.scheduled_s = self._since(metrics.scheduled)
        record.finished_s = self._since(metrics.finished)

    def _since(self, when: float | None) -> float | None:
        return None if when is None else when - self.start


# --- the policies -------------------------------------------------------------------------------

POLICIES = ("static", "dropping", "continuous")


class Dropping(Scheduler):
    """A static batch whose rows leave when they end; nobody takes their seats before it ends."""

    def finish(self, sequence: Answer, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence wherever it is, and give its blocks back."""
        super().finish(sequence, reason, stop_reason)
        if sequence in self.running:
            self.running.remove(sequence)
            sequence.table.release()


def engine(policy: str, model: Any, **options: Any) -> LLM:
    """An LLM of one of the POLICIES; `options` are LLM's. It keeps its last plan, for `serve`."""
    _check_policy(policy)
    kind = "continuous" if policy == "continuous" else "static"
    llm = LLM(model, policy=kind, **{"trace": 1} | options)
    if policy == "dropping":
        was = llm.scheduler
        limits = (was.max_seqs, was.max_batch_tokens, was.max_model_len)
        llm.scheduler = scheduler_of(policy, was.pool, *limits)
    return llm


def scheduler_of(
    policy: str, pool: BlockPool, max_seqs: int, max_batch_tokens: int, max_model_len: int
) -> Scheduler:
    """The scheduler of one of the POLICIES over a pool, preempting by recompute."""
    _check_policy(policy)
    kind = Dropping if policy == "dropping" else Scheduler
    return kind(
        pool,
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        policy="continuous" if policy == "continuous" else "static",
    )


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise RequestError(f"policy={policy!r}: expected {', '.join(POLICIES)}")


def drain(scheduler: Scheduler, load: Iterable[Request]) -> Iterator[Plan]:
    """Serve a load that waits from the start without a model; each plan, while its blocks are held.

    Which token comes is of no matter to a scheduler, only when.
    """
    for order, one in enumerate(load):
        params = SamplingParams(max_tokens=one.output, temperature=0, seed=0, ignore_eos=True)
        scheduler.add(Job(str(one.name), list(one.prompt), params, order, 0.0))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        yield plan
        for gain in scheduler.commit(plan, [[0] if c.samples else [] for c in plan.chunks]):
            answer = gain.sequence
            if len(answer.ids) == scheduler.longest(answer.request):
                scheduler.finish(answer, "length")
