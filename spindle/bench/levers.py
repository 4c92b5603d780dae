"""From the plain step to the bound: one lever at a time, each on top of those before it.

The plain step has every op in plain torch, called directly, and weights as they are in the
checkpoint. A lever replaces some of the ops by the form that this engine uses here. Then comes what
no lever has named, and at last the same step recorded and replayed: the engine as it is. All stages
have the same prompts, and take turns, there and back, so that a machine that slows down slows down
for all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from spindle import kernels
from spindle.bench import latency, report
from spindle.bench.latency import GREEDY
from spindle.bench.spans import Clock
from spindle.bench.steps import typical
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.kernels import Weight, build, native, ops, packed
from spindle.model.layers import Model

PLAIN, FULL = "plain torch, op by op", "all other ops as they are"
REPLAYED = "the pass recorded, and replayed"


@dataclass(frozen=True)
class Lever:
    """Ops that get their faster form together, and what that is called."""

    name: str
    ops: tuple[str, ...]


LEVERS = (
    Lever("weights laid out for reading", ("linear",)),
    Lever("norms, each one op", ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")),
    Lever("rope, one op", ("rope",)),
    Lever("activation, one op", ("silu_mul", "gelu_tanh")),
    Lever("attention, one op, in place", ("paged_attend",)),
)


@contextmanager
def levers_on(names: Sequence[str]) -> Iterator[None]:
    """For a while all ops are plain, as in `latency.plain_ops`, but for those of these names.

    A model is to be made, and an engine be run, in the same surroundings. Without "paged_attend"
    an engine that is made meanwhile attends over all of its slots, as where there are no kernels.
    """
    forms = {f"_{name}": getattr(kernels, f"_{name}") for name in names}
    built, blocks = native.available, packed._has_onednn
    with ExitStack() as stack:
        stack.enter_context(latency.plain_ops())
        for name, form in forms.items():
            stack.enter_context(patch.object(kernels, name, form))
        if names:
            stack.enter_context(patch.object(native, "available", built))
        if "linear" in names:
            stack.enter_context(patch.object(packed, "_has_onednn", blocks))
        else:
            stack.enter_context(patch.object(packed, "packs", lambda weight: False))
        if "paged_attend" not in names:
            stack.enter_context(patch.object(kernels, "attends_in_place", lambda *given: False))
        yield


# --- the stages ---------------------------------------------------------------------------------


@dataclass
class Stage:
    """An engine in its surroundings, from the same prompts on again and again."""

    name: str
    on: tuple[str, ...] | None  # ops that are not plain; None: everything is as it is
    engine: Engine
    first: torch.Tensor  # [R] the tokens that follow the prompts
    lengths: list[int]
    seconds: list[list[float]] = field(default_factory=list)  # a list a turn
    token_ids: list[list[int]] = field(default_factory=list)  # of the last turn, a list a step

    def turn(self, steps: int, clock: Clock) -> None:
        """As many steps from the end of the prompts on, each timed until its tokens are read."""
        with surroundings(self.on):
            for row, length in enumerate(self.lengths):
                self.engine.rewind(length, row)
            tokens, self.token_ids = self.first, []
            self.seconds.append([])
            for _ in range(steps):
                start = clock()
                tokens = self.engine.step(tokens)
                ids = tokens.tolist()
                self.seconds[-1].append(clock() - start)
                self.token_ids.append(ids)


@contextmanager
def surroundings(on: tuple[str, ...] | None) -> Iterator[None]:
    """What a stage is made and run in."""
    if on is None:
        yield
    else:
        with levers_on(on):
            yield


def stages(
    plain: Model, model: Model, prompts: Sequence[list[int]], new: int
) -> tuple[list[Stage], dict[str, str]]:
    """The stages that can be had here, the plain one first; for other levers, why they cannot be.

    `plain` has plain weights (it was made in `latency.plain_ops`), `model` those of this engine.
    """
    gaps = missing(model, _calls(model, prompts, new))
    on: tuple[str, ...] = ()
    found = [_stage(PLAIN, on, plain, prompts, new)]
    for lever in LEVERS:
        if lever.name not in gaps:
            on = (*on, *lever.ops)
            name = form(model) if lever.ops == ("linear",) else lever.name
            its = model if "linear" in on else plain
            found.append(_stage(name, on, its, prompts, new))
    found.append(_stage(FULL, None, model, prompts, new))
    why = graphs.why_none(model)
    if why:
        return found, gaps | {REPLAYED: why}
    return [*found, _stage(REPLAYED, None, model, prompts, new, recorded=True)], gaps


def _stage(
    name: str,
    on: tuple[str, ...] | None,
    model: Model,
    prompts: Sequence[list[int]],
    new: int,
    recorded: bool = False,
) -> Stage:
    with surroundings(on):
        engine = _engine(model, prompts, new)
        if recorded:
            graphs.enable(engine)
        first = engine.begin(prompts, GREEDY).clone()
        engine.step(first)  # threads, and what is built on first use
    return Stage(name, on, engine, first, [len(ids) for ids in prompts])


def _engine(model: Model, prompts: Sequence[list[int]], new: int) -> Engine:
    most = max(map(len, prompts)) + new
    engine = Engine(model, most, rows=len(prompts))
    engine.reserve(most)
    return engine


def missing(model: Model, calls: Counter[str]) -> dict[str, str]:
    """Why a lever is not to be had here, by its name; `calls`: of each op in a step."""
    why: dict[str, str] = {}
    for lever in LEVERS:
        if lever.ops == ("linear",):
            if first_weight(model).plain is not None:
                why[lever.name] = f"weights stay as they are: {build.why_not('cpu')}"
        elif not native.available():
            why[lever.name] = f"no native code: {build.why_not('cpu')}"
        elif not any(calls[name] for name in lever.ops):
            why[lever.name] = "no step of this model calls it"
    return why


def _calls(model: Model, prompts: Sequence[list[int]], new: int) -> Counter[str]:
    """How often a step calls each op."""
    engine = _engine(model, prompts, new)
    tokens, calls = engine.begin(prompts, GREEDY), Counter[str]()

    def counted(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
        def op(*given: Any) -> Any:
            calls[name] += 1
            return form(*given)

        return op

    with ExitStack() as stack:
        for name in ops.SCHEMAS:
            spy = counted(name, getattr(kernels, f"_{name}"))
            stack.enter_context(patch.object(kernels, f"_{name}", spy))
        engine.step(tokens)
    return calls


def first_weight(model: Any) -> Weight:
    """The first of the model's linear layers."""
    return next(x for x in vars(model.layers[0]).values() if isinstance(x, Weight))


def form(model: Model) -> str:
    """How the weights of this model are laid out, in words."""
    return "weights in panels" if first_weight(model).panels is not None else "weights in blocks"


# --- what they come to --------------------------------------------------------------------------


def compare(
    found: Sequence[Stage],
    steps: int,
    repeat: int,
    before: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Turns of all stages, there and back, and what each step costs; `before` each round."""
    for n in range(repeat):
        before()
        for stage in found if n % 2 == 0 else found[::-1]:
            stage.turn(steps, clock)
    step_ms = [typical(stage.seconds) for stage in found]
    ahead = [step_ms[0], *step_ms]
    return [
        {
            "stage": stage.name,
            "step_ms": ms,
            "gained_ms": last - ms,
            "same_tokens": stage.token_ids == found[0].token_ids,
        }
        for stage, ms, last in zip(found, step_ms, ahead, strict=False)
    ]


COLUMNS = ["stage", "ms a step", "gained", "times the plain step", "of the bound", "same tokens"]


def table(waterfall: dict[str, Any]) -> str:
    """The stages and the bound, a line each, and the levers that are missing, each with why."""
    stages, bound_ms = waterfall["stages"], waterfall["bound_ms"]
    plain_ms = stages[0]["step_ms"]
    rows = [
        [
            f"+ {its['stage']}" if n else its["stage"],
            f"{its['step_ms']:.3f}",
            f"{its['gained_ms']:.3f}" if n else "",
            f"{plain_ms / its['step_ms']:.2f}",
            f"{bound_ms / its['step_ms']:.0%}",
            "yes" if its["same_tokens"] else "NO",
        ]
        for n, its in enumerate(stages)
    ]
    rows.append(["the bound", f"{bound_ms:.3f}", "", f"{plain_ms / bound_ms:.2f}", "100%", ""])
    missing = [f"No stage for {name}: {why}." for name, why in waterfall["gaps"].items()]
    return "\n\n".join([report.table(COLUMNS, rows), *missing])


def claim(waterfall: dict[str, Any]) -> str:
    """What the figure shows, in one sentence."""
    stages, bound_ms = waterfall["stages"], waterfall["bound_ms"]
    first_ms, last_ms = stages[0]["step_ms"], stages[-1]["step_ms"]
    best = max(stages[1:], key=lambda its: its["gained_ms"])
    return (
        f"From {first_ms:.3g} ms a step to {last_ms:.3g}, where memory allows {bound_ms:.3g}; "
        f"the largest lever: {best['stage']}, {best['gained_ms']:.3g} ms"
    )


def draw(waterfall: dict[str, Any]) -> Any:
    """The stages and the bound as a figure; needs matplotlib."""
    from spindle import plots

    stages = [(its["stage"], its["step_ms"]) for its in waterfall["stages"]]
    bound = ("the bound", waterfall["bound_ms"])
    return plots.waterfall(stages, "this engine", bound, claim(waterfall), "ms a step")
