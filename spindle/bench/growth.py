"""What steps and prompts cost as the work grows, each beside what arithmetic predicts.

    decode   a step of one row, over contexts that grow: through `Engine`
    batch    a step of ever more rows, all of one context: through `LLM`, as a server runs it
    prefill  a prompt that grows, and what attention takes of it: through `Engine.prefill`
    memory   what the caches take for the tokens that they hold (growth_memory.py)

A prediction is the larger of two bills, as in Williams et al. 2009 ("Roofline"): the bytes that
must be read, at the speed at which this machine reads memory, and the operations of the products,
at the speed of its fastest square one. Activations are counted as nothing, and so is everything
that is not a product: a step costs more, but that must not grow faster than the work does.

All points are made first. Then they take turns, there and back, so that a machine that slows down
slows down for all, and its two speeds are measured between the turns. What a cache holds is of no
account for the time: contexts are filled once, and every turn rewinds to the same place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from spindle import hub
from spindle.bench import growth_memory, machine, profile
from spindle.bench.growth_fit import growth
from spindle.bench.growth_points import BatchPoint, DecodePoint, Here, Point, PrefillPoint
from spindle.bench.spans import Clock, call_cost
from spindle.config import ModelConfig
from spindle.decode.engine import Engine
from spindle.errors import RequestError
from spindle.model.layers import Model
from spindle.model.weights import load
from spindle.serve.llm import LLM
from spindle.tokenizer import Tokenizer

CONTEXT = 64  # tokens of each row where rows are what grows
PARTS = ("decode", "batch", "prefill", "memory")
DEFAULTS = {  # as far as the model has positions
    "contexts": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "batches": (1, 2, 4, 8, 16, 32, 64),
    "lengths": (64, 128, 256, 512, 1024, 2048, 4096),
    "tokens": (512, 1024, 2048, 4096, 8192),
}


# --- what is to be measured ---------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The parts, and the sizes of each; `new` tokens and `repeat` turns of each point.

    context: tokens of each row of a batch.
    """

    parts: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    new: int
    repeat: int
    context: int

    @staticmethod
    def of(
        config: ModelConfig,
        parts: Sequence[str] = PARTS,
        contexts: Sequence[int] | None = None,
        batches: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        new: int = 16,
        repeat: int = 5,
    ) -> Settings:
        """What is not given is the default, as far as the model goes. RequestError: cannot be."""
        most = config.max_positions
        made = Settings(
            tuple(parts),
            tuple(contexts or _up_to(DEFAULTS["contexts"], most)),
            tuple(batches or DEFAULTS["batches"]),
            tuple(lengths or _up_to(DEFAULTS["lengths"], most)),
            tuple(tokens or DEFAULTS["tokens"]),
            new,
            repeat,
            min(CONTEXT, most // 2),  # then LLM's own pool has room for all rows at once
        )
        _check(made, most)
        if "memory" in parts:
            growth_memory.check(config, made.tokens)
        return made


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Those that the model has positions for, and where that leaves some out, as many as it has."""
    kept = [size for size in sizes if size < most]
    return kept if len(kept) == len(sizes) else [*kept, most]


def _check(its: Settings, positions: int) -> None:
    profile.check_not_emulated()
    if its.repeat < 1:
        raise RequestError(f"--repeat {its.repeat}: expected 1 or more")
    _check_rising("--contexts", its.contexts, 2, positions)
    _check_rising("--batches", its.batches, 1, 256)
    _check_rising("--lengths", its.lengths, 1, positions)
    _check_rising("--tokens", its.tokens, 1, None)
    most = min(its.context, its.contexts[0])
    if not 2 <= its.new <= most:
        raise RequestError(f"--new {its.new}: expected 2 to {most} (tokens of the least context)")


def _check_rising(option: str, sizes: Sequence[int], low: int, high: int | None) -> None:
    fits = sizes[0] >= low and (high is None or sizes[-1] <= high)
    if not fits or list(sizes) != sorted(set(sizes)):
        given, end = " ".join(map(str, sizes)), "on" if high is None else f"to {high}"
        raise RequestError(f"{option} {given}: expected numbers that rise, from {low} {end}")


# --- the points ---------------------------------------------------------------------------------


def points(
    model: Model, tokenizer: Tokenizer | None, its: Settings, clock: Clock
) -> Iterator[Point]:
    """Every point of the parts that are timed; each is made, and filled, when it is asked for."""
    ids_of = partial(profile.prompts_of, tokenizer, model.config)
    if "decode" in its.parts:
        (text,) = ids_of(1, its.contexts[-1])
        for context in its.contexts:
            yield DecodePoint(model, text[:context], its.new, clock)
    if "batch" in its.parts:
        rows = its.batches[-1]
        texts = ids_of(rows, its.context)
        budget = max(512, sum(map(len, texts)))  # all prompts are admitted in one step
        llm = LLM(model, tokenizer=tokenizer, max_seqs=rows, max_batch_tokens=budget)
        for count in its.batches:
            yield BatchPoint(llm, texts[:count], its.new, clock)
    if "prefill" in its.parts:
        (text,) = ids_of(1, its.lengths[-1])
        engine = Engine(model, its.lengths[-1])
        engine.reserve(its.lengths[-1])
        engine.prefill(text[: its.lengths[0]])  # threads, and what is built on first use
        for length in its.lengths:
            yield PrefillPoint(engine, text[:length], clock)


def _count(its: Settings) -> int:
    """How many points there will be."""
    sizes = {"decode": its.contexts, "batch": its.batches, "prefill": its.lengths}
    return sum(len(them) for part, them in sizes.items() if part in its.parts)


# --- all of it ----------------------------------------------------------------------------------


def measure(name: str, its: Settings) -> dict[str, Any]:
    """Everything but the queue; memory first, while there is little else in it."""
    directory = hub.resolve(name)
    config = ModelConfig.from_directory(directory)
    result: dict[str, Any] = {"settings": {"model": name, **vars(its)}}
    if "memory" in its.parts:
        result["memory"] = growth_memory.measure(config, its.tokens)
    if _count(its):
        model = load(directory, config, torch.float32, torch.device("cpu"))
        result |= timed(model, Tokenizer(directory), its)
    return result


def timed(
    model: Model,
    tokenizer: Tokenizer | None,
    its: Settings,
    clock: Clock = time.perf_counter,
    speeds: Callable[[], profile.Machine] = profile.Machine,
) -> dict[str, Any]:
    """The points of each part that is timed, and how each part grows."""
    with tqdm(total=_count(its) * (1 + its.repeat), desc="points", disable=None) as bar:
        made = list(_shown(points(model, tokenizer, its, clock), bar))
        its_machine = speeds()
        for n in range(its.repeat):
            its_machine.read()
            its_machine.multiply()
            for point in _shown(made if n % 2 == 0 else made[::-1], bar):
                point.turn()
    here = Here(its_machine.read_bytes_per_s, its_machine.flops_per_s, call_cost(clock))
    return {
        **_by_part(made, here),
        "replayed": all(p.replayed for p in made if isinstance(p, DecodePoint | BatchPoint)),
        "read_gb_s": here.bytes_per_s / 1e9,
        "matrix_gflop_s": here.flops_per_s / 1e9,
        "machine": machine.here(model.device, model.dtype),
    }


def _shown(made: Iterable[Point], bar: tqdm) -> Iterator[Point]:
    """The points, each counted once the next one is asked for."""
    for point in made:
        yield point
        bar.update()


SIZE = {"decode": "context", "batch": "rows", "prefill": "tokens", "memory": "tokens"}


def _by_part(made: Sequence[Point], here: Here) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in dict.fromkeys(point.part for point in made):
        rows = [point.figures(here) for point in made if point.part == part]
        sizes = [row[SIZE[part]] for row in rows]
        found[part] = {"points": rows, "growth": _growth(sizes, rows)}
        for name in ("attention", "rest"):
            if name in rows[0]:
                found[part][f"{name}_growth"] = _growth(sizes, [row[name] for row in rows])
    return found


def _growth(sizes: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    measured, predicted = ([row[key] for row in rows] for key in ("ms", "predicted_ms"))
    turns = list(zip(*(row["turns_ms"] for row in rows), strict=True))
    return growth(sizes, measured, predicted, turns)
