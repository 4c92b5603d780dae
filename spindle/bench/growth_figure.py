"""The figure of growth.py: a panel a part, and what it shows in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spindle.bench.growth_tables import CACHES, Result, mb


def draw(result: Result) -> Any:
    """A panel for each part that was measured; needs matplotlib."""
    from spindle import plots

    shown = [panel(result[part]) for part, panel in PANELS.items() if part in result]
    made = [plots.GrowthPanel(*panel) for panel in shown]
    title = f"{result['settings']['model']}: cost as work grows, predicted dashed"
    return plots.growth(made, title)


Line = tuple[str, list[float], list[float], list[float]]  # name, sizes, measured, predicted
Panel = tuple[str, str, str, list[Line]]  # the claim, what is across, what is up, and the lines


def _decode_panel(its: Result) -> Panel:
    first, last, grown = its["points"][0], its["points"][-1], its["growth"]
    claim = (
        f"{last['context']:,} tokens of context take {last['ms'] / first['ms']:.1f} times as long "
        f"as {first['context']:,}"
    )
    if grown:
        claim += f"; a straight line is off by up to {grown['off_line']:.0%}"
    return claim, "tokens of context", "ms a step", [_line("", its["points"], "context")]


def _batch_panel(its: Result) -> Panel:
    first, last, grown = its["points"][0], its["points"][-1], its["growth"]
    times = last["ms"] / first["ms"]
    claim = f"{last['rows']} rows take {times:.1f} times as long as {first['rows']}"
    if grown:
        claim += (
            f"; from {its['points'][-2]['rows']} on they grow with the power {grown['power']:.2f}"
        )
    return claim, "rows", "ms a step", [_line("", its["points"], "rows")]


def _prefill_panel(its: Result) -> Panel:
    points, last = its["points"], its["points"][-1]
    claim = f"{last['tokens']:,} tokens: attention has {last['attention']['ms'] / last['ms']:.0%}"
    if its["growth"]:
        terms = [its[f"{part}_growth"]["quadratic"] / last["ms"] for part in ("attention", "rest")]
        claim += "; quadratic terms: {:.0%} attention, {:.0%} all else".format(*terms)
    lines = [_line("all", points, "tokens")]
    for name, key in (("all else", "rest"), ("attention", "attention")):
        inner = [{"tokens": p["tokens"], **p[key]} for p in points]
        lines.append(_line(name, inner, "tokens"))
    return claim, "tokens of the prompt", "ms", lines


def _memory_panel(its: Result) -> Panel:
    points, last = its["points"], its["points"][-1]
    each = {name: last[f"{name}_taken_bytes"] / last["tokens"] for name in CACHES}
    claim = (
        f"A token takes {its['token_bytes'] / 1e3:.1f} kB, {each['paged'] / 1e3:.1f} in blocks, "
        f"{each['static'] / 1e3:.1f} in rows"
    )
    lines = []
    for name, key in (("rows", "static_taken"), ("blocks", "paged_taken")):
        lines.append(_sized(name, points, f"{key}_bytes"))
    lines.append(_sized("resident", points, "paged_resident_bytes"))
    return claim, "tokens held", "MB", lines


def _line(name: str, points: Sequence[Result], size: str) -> Line:
    columns = ([p[key] for p in points] for key in (size, "ms", "predicted_ms"))
    return (name, *columns)  # type: ignore[return-value]


def _sized(name: str, points: Sequence[Result], key: str) -> Line:
    keys = ("tokens", key, "predicted_bytes")
    sizes, *both = ([p[one] for p in points] for one in keys)
    return (name, sizes, *([mb(size) for size in them] for them in both))  # type: ignore


PANELS = {
    "decode": _decode_panel,
    "batch": _batch_panel,
    "prefill": _prefill_panel,
    "memory": _memory_panel,
}
