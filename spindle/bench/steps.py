"""Steps, timed whole and timed in parts by turns; and what the parts come to."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from spindle.bench import report
from spindle.bench.parts import OUTSIDE, PARTS, REST, Tally, places, replayed
from spindle.bench.spans import CallCost, Clock, Noted, Place, Spans, wrapped
from spindle.decode import graphs
from spindle.decode.cpu_graph import CpuGraph
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.text import stream_text
from spindle.model.layers import Model
from spindle.serve.llm import LLM
from spindle.tokenizer import Tokenizer

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True, seed=0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=0),
}
BLOCK_SIZE = 16
Step = Callable[[], object]
T = TypeVar("T")


class Timed:
    """Calls of one kind, whole and in parts: the seconds of each, and what each part took."""

    def __init__(self, model: Model, clock: Clock) -> None:
        self._clock, self._places = clock, places(model)
        self.whole_s: list[list[float]] = []  # a list a turn
        self.noted: list[list[dict[str, Noted]]] = []
        self.tally, self.tallied = Tally(model.config), 0

    def time(self, step: Step, count: int) -> None:
        """A turn of so many calls, timed from outside."""
        self.whole_s.append([])
        for _ in range(count):
            start = self._clock()
            step()
            self.whole_s[-1].append(self._clock() - start)

    def time_parts(self, step: Step, count: int) -> None:
        """A turn of so many calls, timed part by part."""
        spans = Spans(self._clock)
        self.noted.append([])

        def replay(graph: CpuGraph) -> None:
            start, took = self._clock(), 0.0
            for part, seconds in replayed(graph.timed()):
                spans.note(part, seconds)
                took += seconds
            spans.leave_out(max(0.0, self._clock() - start - took))  # to make the list, and this

        with wrapped(self._places, spans.wrap), patch.object(CpuGraph, "replay", replay):
            root = spans.wrap(Place(None, "", REST, whole=False), step)
            for _ in range(count):
                root()
                self.noted[-1].append(spans.take())

    def count(self, step: Step, count: int) -> None:
        """So many calls, whose bytes and operations are counted; none may be replayed."""
        with wrapped(self._places, self.tally.wrap):
            for _ in range(count):
                step()
        self.tallied += count

    def part_ms(self, cost: CallCost) -> dict[str, float]:
        """Milliseconds of each part, without what timing has added; they add up to a step's."""
        kept = [middle(turns, _seconds) for turns in zip(*self.noted, strict=True)]

        def ms(name: str) -> float:
            return statistics.fmean(
                statistics.fmean(one[name].corrected(cost) for one in step) * 1e3 for step in kept
            )

        return {name: ms(name) for name in self.parts}

    @property
    def parts(self) -> list[str]:
        """The parts that were called; those that PARTS does not know come last."""
        seen = {n for turn in self.noted for one in turn for n in one if one[n].calls}
        return sorted(seen, key=lambda n: (PARTS.index(n) if n in PARTS else len(PARTS), n))

    def calls(self, name: str) -> float:
        """Calls of a part in a step, on average."""
        return statistics.fmean(one[name].calls for turn in self.noted for one in turn)

    @property
    def whole_ms(self) -> float:
        """Milliseconds of a call that was timed from outside."""
        return typical(self.whole_s)

    @property
    def noted_ms(self) -> float:
        """Milliseconds of a call that was timed in parts, with what that added."""
        return typical([[_seconds(one) for one in turn] for turn in self.noted])


def _seconds(noted: dict[str, Noted]) -> float:
    return sum(part.seconds for part in noted.values())


def typical(turns: Sequence[Sequence[float]]) -> float:
    """Milliseconds of a step, from seconds: of each step the middle of its turns, then the mean.

    All turns do the same, step by step. So a slow spell falls out, and a step that has more to do
    than others, such as a draw that has to sort, does not.
    """
    steps = zip(*turns, strict=True)
    return statistics.fmean(statistics.fmean(middle(its, float)) for its in steps) * 1e3


def middle(values: Iterable[T], size: Callable[[T], float]) -> list[T]:
    """Without the smallest and the largest quarter; of three values, the median."""
    ordered = sorted(values, key=size)
    cut = (len(ordered) + 1) // 4
    return ordered[cut : len(ordered) - cut]


# --- a decode step ------------------------------------------------------------------------------


class Job(ABC):
    """A kind of step: so many rows, greedy or sampled, from the same prompts on in each turn."""

    through: str

    def __init__(
        self, model: Model, prompts: Sequence[list[int]], sampling: str, new: int, clock: Clock
    ) -> None:
        self.prompts, self.sampling, self.new = prompts, sampling, new
        self.timed = Timed(model, clock)

    @abstractmethod
    def begin(self, counted: bool = False) -> Step:
        """Run the prompts; what gives each row its next token is returned.

        counted: by an engine that runs all of its steps.
        """

    def turns(self, steps: int, plain_first: bool) -> None:
        """Two turns, one of them in parts; the first time two more, to count and to warm up."""
        if not self.timed.tallied:
            self.timed.count(self.begin(counted=True), steps)
            warm_up = self.begin()
            for _ in range(steps):
                warm_up()
        order = (self.timed.time, self.timed.time_parts)
        for time in order if plain_first else order[::-1]:
            time(self.begin(), steps)

    def params(self, row: int) -> SamplingParams:
        """Of one row: a seed of its own."""
        return replace(SAMPLINGS[self.sampling], max_tokens=self.new, seed=row)

    def figures(self, cost: CallCost, bytes_per_s: float) -> dict[str, Any]:
        """The step, and each part of it, with what is left over: all add up to the step."""
        timed, step_ms = self.timed, self.timed.whole_ms
        part_ms = timed.part_ms(cost)
        outside_ms = sum(part_ms.get(name, 0.0) for name in OUTSIDE)
        return {
            "rows": len(self.prompts),
            "through": self.through,
            "sampling": self.sampling,
            "step_ms": step_ms,
            "in_parts_ms": timed.noted_ms,
            "parts": {name: self._part(name, ms, bytes_per_s) for name, ms in part_ms.items()},
            "left_over_ms": step_ms - sum(part_ms.values()),
            "outside_share": outside_ms / step_ms,
        }

    def _part(self, name: str, ms: float, bytes_per_s: float) -> dict[str, float | None]:
        moved = self.timed.tally.bytes[name] / self.timed.tallied
        rate = moved / ms * 1e3 if moved and ms > 0 else None
        return {
            "ms": ms,
            "share": ms / self.timed.whole_ms,
            "calls": self.timed.calls(name),
            "bytes": moved or None,
            "gb_s": None if rate is None else rate / 1e9,
            "of_read_speed": None if rate is None else rate / bytes_per_s,
        }


class EngineJob(Job):
    """One stream of text; a step is one token of it."""

    through = "Engine"

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, recorded: bool, *given: Any
    ) -> None:
        super().__init__(model, *given)
        self._tokenizer = tokenizer
        most = len(self.prompts[0]) + self.new
        self._engine, self._plain = Engine(model, most), Engine(model, most)
        self._engine.reserve(most)
        if recorded:
            graphs.enable_if_free(self._engine)

    def begin(self, counted: bool = False) -> Step:
        """Run the prompt, and its first token."""
        ids, params = self.prompts[0], self.params(0)
        engine = self._plain if counted else self._engine
        stream: Any
        if self._tokenizer is None:
            stream = engine.stream_with(ids, params)
        else:
            stream = stream_text(engine, self._tokenizer, ids, params)
        next(stream)
        return partial(next, stream)


class LLMJob(Job):
    """Requests that run side by side; a step gives each of them a token."""

    through = "LLM"

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, recorded: bool, *given: Any
    ) -> None:
        super().__init__(model, *given)
        rows, most = len(self.prompts), max(map(len, self.prompts)) + self.new
        make = partial(
            LLM,
            model,
            tokenizer=tokenizer,
            max_seqs=rows,
            max_batch_tokens=rows * most,
            max_model_len=most,
            block_size=BLOCK_SIZE,
            num_blocks=rows * (-(-most // BLOCK_SIZE) + 1),  # and one spare for each that runs
        )
        self._llm, self._plain = make(graphs=None if recorded else False), make(graphs=False)

    def begin(self, counted: bool = False) -> Step:
        """Run all prompts in one step, with the first token of each."""
        llm = self._plain if counted else self._llm
        assert not llm.has_unfinished, "the turn before has come to its end"
        for row, ids in enumerate(self.prompts):
            llm.add(ids, self.params(row))
        assert len(llm.step()) == len(self.prompts)
        return llm.step


def jobs(
    model: Model,
    tokenizer: Tokenizer | None,
    prompts: Sequence[list[int]],
    rows: Sequence[int],
    new: int,
    clock: Clock,
    recorded: bool = True,
) -> list[Job]:
    """Greedy and sampled steps of so many rows; one row goes through Engine, more through LLM.

    recorded: replayed where they can be, as LLM has it by default; else all of them are run.
    """
    both = (model, tokenizer, recorded)
    return [
        (EngineJob if count == 1 else LLMJob)(*both, prompts[:count], name, new, clock)
        for count in rows
        for name in SAMPLINGS
    ]


LEFT_OVER = 0.25  # of a step, beyond which its parts are not to be believed
COLUMNS = ["part", "ms a step", "share", "calls", "must move, MB", "GB/s", "of the read speed"]


def tables(job: dict[str, Any]) -> list[str]:
    """A line a part, what is left over, and the step; then what timing the parts has cost."""
    rows = "1 row" if job["rows"] == 1 else f"{job['rows']} rows"
    heading = f"A {job['sampling']} step, {rows}, through {job['through']}:"
    parts = [_line(name, part) for name, part in job["parts"].items()]
    rest = [
        "left over",
        f"{job['left_over_ms']:.3f}",
        f"{job['left_over_ms'] / job['step_ms']:.1%}",
    ]
    whole = ["the step, timed whole", f"{job['step_ms']:.3f}", "100.0%"]
    ends = [[*cells, "", "", "", ""] for cells in (rest, whole)]
    added = job["in_parts_ms"] / job["step_ms"] - 1
    notes = (
        f"Outside the model: {job['outside_share']:.1%}. Timed in parts, and nothing taken off, a "
        f"step is {job['in_parts_ms']:.3f} ms: {added:+.1%}."
    )
    texts = [heading, report.table(COLUMNS, [*parts, *ends]), notes]
    left_over = job["left_over_ms"] / job["step_ms"]
    if abs(left_over) > LEFT_OVER:
        texts.append(report.disturbed(f"the parts leave {left_over:.0%} of the step over"))
    return texts


def _line(name: str, part: dict[str, Any]) -> list[str]:
    formats = {"ms": "{:.3f}", "share": "{:.1%}", "calls": "{:.4g}", "bytes": "{:,.3f}"}
    formats |= {"gb_s": "{:.2f}", "of_read_speed": "{:.0%}"}
    shown = part | {"bytes": part["bytes"] and part["bytes"] / 1e6}
    cells = [
        "—" if shown[key] is None else text.format(shown[key]) for key, text in formats.items()
    ]
    return [name, *cells]
