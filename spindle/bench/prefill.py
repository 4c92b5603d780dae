"""A prompt, timed whole and timed in parts by turns, against the machine's fastest product."""

from __future__ import annotations

from functools import partial
from typing import Any

from spindle.bench import report
from spindle.bench.parts import ATTENTION, HEAD, LINEARS
from spindle.bench.spans import CallCost, Clock
from spindle.bench.steps import Timed
from spindle.decode.engine import Engine
from spindle.model.layers import Model


class Prefill:
    """A prompt through `Engine.prefill`, whole and in parts."""

    def __init__(self, model: Model, prompt: list[int], clock: Clock) -> None:
        self._prompt, self._engine = prompt, Engine(model, len(prompt))
        self._engine.reserve(len(prompt))
        self.timed = Timed(model, clock)

    def turns(self, plain_first: bool) -> None:
        """Once whole and once in parts; the first time once more, to warm up and to count."""
        step = partial(self._engine.prefill, self._prompt)
        if not self.timed.tallied:
            self.timed.count(step, 1)
        order = (self.timed.time, self.timed.time_parts)
        for time in order if plain_first else order[::-1]:
            time(step, 1)

    def figures(self, cost: CallCost, flops_per_s: float) -> dict[str, Any]:
        """Milliseconds and operations of the products, of attention, of all else, and of all."""
        part_ms, counts = self.timed.part_ms(cost), self.timed.tally.flops
        ms = {
            "linears and head": part_ms[LINEARS] + part_ms[HEAD],
            "attention": part_ms[ATTENTION],
        }
        flop = {"linears and head": counts[LINEARS] + counts[HEAD], "attention": counts[ATTENTION]}
        ms["all else"] = self.timed.whole_ms - sum(ms.values())
        ms["the prefill"], flop["the prefill"] = self.timed.whole_ms, sum(flop.values())
        parts = {name: _speed(its, flop.get(name), flops_per_s) for name, its in ms.items()}
        return {"tokens": len(self._prompt), "parts": parts}


def _speed(ms: float, flop: int | None, flops_per_s: float) -> dict[str, float | None]:
    rate = flop / ms * 1e3 if flop and ms > 0 else None
    return {
        "ms": ms,
        "gflop": flop and flop / 1e9,
        "gflop_s": None if rate is None else rate / 1e9,
        "of_matrix_speed": None if rate is None else rate / flops_per_s,
    }


COLUMNS = ["prefill", "ms", "share", "GFLOP", "GFLOP/s", "of the fastest square product"]


def tables(prefill: dict[str, Any]) -> list[str]:
    """A line each for the products, attention, all else, and the whole."""
    parts = prefill["parts"]
    whole_ms = parts["the prefill"]["ms"]
    formats = {"ms": "{:.3f}", "share": "{:.1%}", "gflop": "{:.3f}", "gflop_s": "{:.1f}"}
    formats |= {"of_matrix_speed": "{:.0%}"}
    rows = []
    for name, part in parts.items():
        shown = part | {"share": part["ms"] / whole_ms}
        cells = ["—" if shown[k] is None else text.format(shown[k]) for k, text in formats.items()]
        rows.append([name, *cells])
    return [
        f"A prompt of {prefill['tokens']} tokens, through Engine.prefill:",
        report.table(COLUMNS, rows),
    ]
