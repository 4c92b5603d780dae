"""Cost as work grows: requests that wait, and what a model has to do and to remember (growth.py).

What scheduling costs a token is measured here, however many requests wait, and no model runs. The
scheduler and its pool are the real ones, and a stand-in says which token came: always 0. The
queue is kept at its length: whenever a request ends, another one comes, so what is measured is the
same work each time, behind queues of different lengths. The same then through LLM, whose step also
checks, times and reports; its runner is the stand-in.

    rows    tokens that a plan has the model compute: prompt tokens and new ones
    new     tokens that came: fewer, and the harder measure
"""

from __future__ import annotations

import argparse
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spindle import hub
from spindle.bench import growth, growth_figure, growth_tables, profile, report
from spindle.bench.peers.jobs import choose
from spindle.config import ModelConfig
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool
from spindle.model.weights import random_model
from spindle.serve.llm import LLM
from spindle.serve.request import Request
from spindle.serve.runner import Output, Runner
from spindle.serve.scheduler import Plan, Scheduler

PARTS = ("queue", *growth.PARTS)
WAITING = (1_000, 10_000, 100_000)
PROMPT, LONGEST = 16, 31  # tokens of a prompt, and of the longest answer
BLOCK_SIZE = 16
PARAMS = [  # answers of 1 to LONGEST tokens, 16 on average: they do not end all at once
    SamplingParams(max_tokens=most, temperature=0, seed=0, ignore_eos=True)
    for most in range(1, LONGEST + 1)
]
SHAPE = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 64}  # for LLM: as small as may be
SHAPE |= {"n_embd": 8, "n_layer": 1, "n_head": 1}


@dataclass
class Cost:
    """Seconds spent, and what for."""

    schedule_s: float = 0.0
    commit_s: float = 0.0
    add_s: float = 0.0
    step_s: float = 0.0  # of LLM: plan, commit and outputs, all together
    rows: int = 0
    new: int = 0
    added: int = 0
    steps: int = 0

    def us(self) -> dict[str, float]:
        """Microseconds: of each part a row, of all parts a new token, and an add."""
        loop_s = self.schedule_s + self.commit_s + self.step_s
        return {
            "schedule_us_a_row": self.schedule_s / self.rows * 1e6,
            "commit_us_a_row": self.commit_s / self.rows * 1e6,
            "us_a_row": loop_s / self.rows * 1e6,
            "us_a_new_token": loop_s / self.new * 1e6,
            "us_an_add": self.add_s / self.added * 1e6,
        }


# --- two loops ----------------------------------------------------------------------------------


class Loop(ABC):
    """A queue of constant length, and what its steps have cost so far."""

    def __init__(self) -> None:
        self.order, self.cost = 0, Cost()

    def add(self, count: int) -> None:
        """So many more requests, each with a prompt of its own."""
        clock = time.perf_counter
        for _ in range(count):
            self.order += 1
            queue = self.request(self.order)
            start = clock()
            queue()
            self.cost.add_s += clock() - start
        self.cost.added += count

    @abstractmethod
    def request(self, order: int) -> Callable[[], object]:
        """The queueing of a request, to be called."""

    @abstractmethod
    def step(self) -> int:
        """Run one; returns how many requests have ended."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests in the queue."""


class SchedulerLoop(Loop):
    """A scheduler in front of a stand-in, with a queue of constant length."""

    def __init__(self, seqs: int, waiting: int) -> None:
        pool = BlockPool(_blocks(seqs), BLOCK_SIZE)
        budget, longest = seqs * PROMPT, PROMPT + LONGEST
        self.scheduler = Scheduler(
            pool, max_seqs=seqs, max_batch_tokens=budget, max_model_len=longest
        )
        super().__init__()
        self.add(waiting + seqs)

    def request(self, order: int) -> Callable[[], object]:
        """The queueing of a request."""
        request = Request(str(order), prompt_of(order), params_of(order), order, 0.0)
        return partial(self.scheduler.add, request)

    def step(self) -> int:
        """Plan, and commit zeros; returns how many requests have ended."""
        clock, cost, scheduler = time.perf_counter, self.cost, self.scheduler
        start = clock()
        plan = scheduler.schedule()
        planned = clock()
        outputs = [[0] if chunk.samples else [] for chunk in plan.chunks]
        ready = clock()
        gained = scheduler.commit(plan, outputs)
        sequences = [one.sequence for one in gained]
        ended = [one for one in sequences if len(one.ids) == scheduler.longest(one.request)]
        for sequence in ended:
            scheduler.finish(sequence, "length")
        cost.schedule_s += planned - start
        cost.commit_s += clock() - ready
        cost.steps += 1
        cost.rows += sum(chunk.count for chunk in plan.chunks)
        cost.new += len(gained)
        return len(ended)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)


class StandIn(Runner):
    """A runner that computes nothing: every token is 0."""

    def run(self, plan: Plan) -> list[Output]:
        """One id for each chunk that samples."""
        return [Output([0], [None]) if chunk.samples else Output([], []) for chunk in plan.chunks]


class LLMLoop(Loop):
    """An LLM in front of the stand-in, with a queue of constant length."""

    def __init__(self, seqs: int, waiting: int) -> None:
        model = random_model(ModelConfig.from_dict(SHAPE))
        self.llm = LLM(
            model,
            block_size=BLOCK_SIZE,
            num_blocks=_blocks(seqs),
            max_seqs=seqs,
            max_batch_tokens=seqs * PROMPT,
            trace=1,
        )
        self.llm._runner = StandIn(model, self.llm._kv)
        super().__init__()
        self.add(waiting + seqs)

    def request(self, order: int) -> Callable[[], object]:
        """The queueing of a request."""
        return partial(self.llm.add, prompt_of(order), params_of(order))

    def step(self) -> int:
        """A step of the LLM; returns how many requests have ended."""
        clock, cost = time.perf_counter, self.cost
        start = clock()
        outputs = self.llm.step()
        cost.step_s += clock() - start
        cost.steps += 1
        cost.rows += sum(chunk.count for chunk in self.llm.trace[-1].chunks)
        cost.new += len(outputs)
        return sum(output.finished for output in outputs)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.llm.stats["waiting"]


LOOPS: dict[str, Callable[[int, int], Loop]] = {"scheduler": SchedulerLoop, "llm": LLMLoop}


def prompt_of(order: int) -> list[int]:
    """Ids below 16 that spell the number: prompts of different numbers share no block."""
    return [order >> shift & 15 for shift in range(0, 4 * PROMPT, 4)]


def params_of(order: int) -> SamplingParams:
    """Answers of all lengths in turn, neighbours far apart."""
    return PARAMS[order * 7 % LONGEST]


def _blocks(seqs: int) -> int:
    return seqs * (-(-(PROMPT + LONGEST) // BLOCK_SIZE) + 1)


def steady(loop: Loop, steps: int) -> Cost:
    """What so many steps cost, a request coming for each that ends."""
    before = Cost(**vars(loop.cost))
    for _ in range(steps):
        loop.add(loop.step())
    spent = {
        one.name: getattr(loop.cost, one.name) - getattr(before, one.name) for one in fields(Cost)
    }
    return Cost(**spent)


def drain(requests: int, seqs: int) -> dict[str, float]:
    """All the requests, to the end of the last: the whole scheduler's seconds, by row."""
    loop = SchedulerLoop(seqs, requests - seqs)
    while loop.scheduler.has_unfinished:
        loop.step()
    wanted = sum(params_of(order).max_tokens or 0 for order in range(1, requests + 1))
    assert loop.cost.new == wanted, "every token of every request"
    return {"requests": requests, "steps": loop.cost.steps, **loop.cost.us()}


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench scale`."""
    add = parser.add_argument
    add("-m", "--model", default="tiny", help="what steps and prompts run (default: tiny)")
    text = f"what to measure, of {', '.join(PARTS)} (default: all)"
    add("--only", nargs="+", default=list(PARTS), metavar="PART", help=text)
    _add_sizes(parser)
    add("--seqs", type=int, default=64, metavar="N", help="requests that run at once (default: 64)")
    text = "steps a turn, of the queue (default: 200)"
    add("--steps", type=int, default=200, metavar="N", help=text)
    text = "tokens of a turn, of steps of the model (default: 16)"
    add("--new", type=int, default=16, metavar="N", help=text)
    add("--repeat", type=int, default=5, metavar="K", help="turns of each (default: 5)")
    report.add_json(parser)
    text = "draw what was measured with the model there (needs matplotlib)"
    add("--plot", type=Path, metavar="FILE", help=text)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """What grows in each part; in words, and what it is unless it is said."""
    texts = {"waiting": "requests in the queue", "contexts": "tokens of context of a decode step"}
    texts |= {"batches": "rows of a decode step", "lengths": "tokens of a prompt"}
    texts |= {"tokens": "tokens that a cache holds"}
    for name, text in texts.items():
        default = WAITING if name == "waiting" else growth.DEFAULTS[name]
        shown = f"{text}, rising (default: {' '.join(map(str, default))})"
        given = list(WAITING) if name == "waiting" else None
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=given, metavar="N", help=shown
        )


def run(args: argparse.Namespace) -> int:
    """Measure, print markdown tables, write JSON and draw the figure if files were named."""
    report.check_json(args.json)
    profile.check_plot(args.plot)
    choose("--only", args.only, PARTS)
    modelled = [part for part in growth.PARTS if part in args.only]
    if args.plot is not None and not modelled:
        words = ", ".join(growth.PARTS)
        raise RequestError(f"--plot {args.plot}: nothing to draw; expected some of {words}")
    queue = (args.waiting, args.seqs, args.steps, args.repeat)
    settings = _settings(args, modelled) if modelled else None
    result, texts = dict[str, Any](), list[str]()
    if "queue" in args.only:
        result = measure(*queue)
        texts.append(as_markdown(result))
    if settings is not None:
        found = growth.measure(args.model, settings)
        texts.append(growth_tables.as_markdown(found))
        result |= found | {"settings": result.get("settings", {}) | found["settings"]}
    report.publish(result, "\n\n".join(texts), args.json)
    if args.plot is not None:
        growth_figure.draw(result).savefig(args.plot)
    return 0


def _settings(args: argparse.Namespace, parts: Sequence[str]) -> growth.Settings:
    """The growing parts' own. RequestError for what cannot be, ModelNotFound for the model."""
    config = ModelConfig.from_directory(hub.resolve(args.model))
    sizes = {name: getattr(args, name) for name in growth.DEFAULTS}
    return growth.Settings.of(config, parts, **sizes, new=args.new, repeat=args.repeat)


def measure(
    waiting: Sequence[int] = WAITING, seqs: int = 64, steps: int = 200, repeat: int = 5
) -> dict[str, Any]:
    """The cost behind each queue, medians of turns, and of draining the longest."""
    _check(waiting, seqs, steps, repeat)
    costs = {name: _turns(name, waiting, seqs, steps, repeat) for name in LOOPS}
    return {
        **costs,
        "flat": {name: _growth(rows, waiting) for name, rows in costs.items()},
        "drained": drain(max(waiting), seqs),
        "settings": {"waiting": list(waiting), "seqs": seqs, "steps": steps, "repeat": repeat}
        | {"prompt": PROMPT, "longest": LONGEST, "block_size": BLOCK_SIZE},
    }


def _check(waiting: Sequence[int], seqs: int, steps: int, repeat: int) -> None:
    least = {"--seqs": (seqs, 1), "--steps": (steps, LONGEST), "--repeat": (repeat, 1)}
    for option, (count, low) in least.items():  # in LONGEST steps somebody ends
        if count < low:
            raise RequestError(f"{option} {count}: expected {low} or more")
    if list(waiting) != sorted(set(waiting)) or waiting[0] < seqs:
        lengths = " ".join(map(str, waiting))
        raise RequestError(
            f"--waiting {lengths}: expected numbers that rise, from --seqs {seqs} on"
        )


def _turns(
    name: str, waiting: Sequence[int], seqs: int, steps: int, repeat: int
) -> dict[str, dict[str, float]]:
    """Microseconds behind each queue: the loops take turns, so that a slow spell hits all."""
    loops = {count: LOOPS[name](seqs, count) for count in waiting}
    fill_us = {n: loop.cost.add_s / loop.cost.added * 1e6 for n, loop in loops.items()}
    for loop in loops.values():
        steady(loop, 4 * LONGEST)  # until as many end in a step as later
    turns: dict[int, list[dict[str, float]]] = {count: [] for count in waiting}
    for _ in tqdm(range(repeat), desc=name, disable=None):
        for count, loop in loops.items():
            turns[count].append(steady(loop, steps).us())
            assert count <= loop.waiting <= count + seqs, "the queue is as long as it was"
    return {
        str(count): {key: statistics.median(turn[key] for turn in its) for key in its[0]}
        | {"us_an_add_when_filling": fill_us[count]}
        for count, its in turns.items()
    }


def _growth(costs: dict[str, dict[str, float]], waiting: Sequence[int]) -> float:
    """Cost a row behind the longest queue / behind the shortest."""
    shortest, longest = (costs[str(count)]["us_a_row"] for count in (waiting[0], waiting[-1]))
    return longest / shortest


def as_markdown(result: dict[str, Any]) -> str:
    """Two tables, and how flat the cost is."""
    settings, drained = result["settings"], result["drained"]
    about = (
        f"{settings['seqs']} requests run at once, prompts of {PROMPT} tokens and answers of 1 to "
        f"{LONGEST}; medians of {settings['repeat']} turns of {settings['steps']} steps."
    )
    end = (
        f"{drained['requests']:,} requests from first to last: {drained['steps']:,} steps, "
        f"{drained['us_a_row']:.2f} us a row, {drained['us_a_new_token']:.2f} a new token."
    )
    return "\n\n".join([about, _table(result, "scheduler"), _table(result, "llm"), end])


LABELS = {
    "schedule_us_a_row": "schedule, us a row",
    "commit_us_a_row": "commit, us a row",
    "us_a_row": "all, us a row",
    "us_a_new_token": "all, us a new token",
    "us_an_add": "add, us a request",
}


def _table(result: dict[str, Any], name: str) -> str:
    keys = [
        key
        for key in LABELS
        if name == "scheduler" or key not in ("schedule_us_a_row", "commit_us_a_row")
    ]
    rows = [
        [f"{int(count):,}", *(f"{costs[key]:.2f}" for key in keys)]
        for count, costs in result[name].items()
    ]
    text = report.table([f"waiting, {name}", *(LABELS[key] for key in keys)], rows)
    return f"{text}\n\nLongest queue / shortest, a row: {result['flat'][name]:.2f}."
