"""The figures of the book; the only module that imports matplotlib.

    from spindle import plots
    plots.roofline_dots([("eager", 1, 15.0)], machine=plots.Machine(...), title="...")
    plots.show()

Every function takes numbers and measures nothing, draws on a white card that is legible on a dark
page too, labels things where they are rather than in a legend, and returns the figure. A title
states the claim. Sizes are fixed, so that a stored figure can be compared.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from spindle.player import Player

__all__ = [
    "COLOURS",
    "Machine",
    "Player",
    "attention_grid",
    "figure",
    "panels",
    "roofline_dots",
    "rows_grid",
    "show",
    "style",
    "token_strip",
]

# Roles, after Okabe and Ito ("Color Universal Design", 2008). The requests have colours of their
# own: lesson.CAST.
COLOURS = {
    "measured": "#D55E00",
    "predicted": "#0072B2",
    "memory": "#0072B2",
    "compute": "#009E73",
    "recorded": "#8A8A8A",
    "ink": "#1F2328",
    "faint": "#D8DCE1",
    "empty": "#F4F5F7",
}

_STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 100,
    "axes.facecolor": "white",
    "axes.edgecolor": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "DejaVu Sans",  # matplotlib carries it: the same picture on every machine
    "font.size": 11,
    "lines.linewidth": 2,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
}

show = plt.show


def style() -> None:
    """Set matplotlib's defaults to the book's; the functions here do so by themselves."""
    rc: Any = plt.rcParams  # its type is a list of every key that it knows
    rc.update(_STYLE)


def figure(
    width: float, height: float, title: str, xlabel: str = "", ylabel: str = ""
) -> tuple[Figure, Axes]:
    """An empty figure of width x height inches whose title states the claim, and its axes."""
    fig, ax = panels(width, height, title, 1)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return fig, ax


def panels(width: float, height: float, title: str, count: int, **how: Any) -> tuple[Figure, Any]:
    """As `figure`, with `count` axes side by side; `how` goes to matplotlib's `subplots`."""
    style()
    fig, axes = plt.subplots(1, count, figsize=(width, height), layout="constrained", **how)
    _claim(fig, title)
    return fig, axes


def _claim(fig: Figure, title: str) -> None:
    lines = textwrap.fill(title, width=int(fig.get_figwidth() * 6))  # a phone shows so much
    fig.suptitle(lines, x=0.01, ha="left", fontsize=13, fontweight="bold")


# --- tokens a second against rows in a pass -----------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What bounds a pass: the weights and their arithmetic, and a machine's two speeds."""

    name: str
    weights_bytes: float  # read once a pass
    memory_bytes_per_s: float
    flops_per_token: float
    flops_per_s: float

    def memory_bound(self, rows: float) -> float:
        """Tokens a second if a pass costs only the reading of the weights: grows with the rows."""
        return rows * self.memory_bytes_per_s / self.weights_bytes

    def compute_bound(self) -> float:
        """Tokens a second if a pass costs only its arithmetic: the same for any number of rows."""
        return self.flops_per_s / self.flops_per_token

    def knee(self) -> float:
        """The rows at which both bounds are equal (Williams et al., "Roofline", 2009)."""
        return self.compute_bound() / self.memory_bound(1)


def roofline_dots(
    dots: Sequence[tuple[str, float, float]],
    machine: Machine,
    title: str,
    recorded: Sequence[tuple[str, float, float]] = (),
    max_rows: int = 64,
) -> Figure:
    """The book's map: tokens a second against rows in a pass, both bounds, and measured dots.

    `dots` are (label, rows, tokens a second) of the reader's run, `recorded` those of another
    machine or day, drawn grey; a dot with an empty label stands without words. The bounds are
    `machine`'s, and are drawn first.
    """
    fig, ax = figure(8, 5, title, "rows in a pass", "tokens a second")
    _bounds(ax, machine, max_rows)
    _dots(ax, recorded, COLOURS["recorded"], max_rows)
    _dots(ax, dots, COLOURS["measured"], max_rows)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(0.85, max_rows * 1.1)
    speeds = [machine.memory_bound(1), *(speed for _, _, speed in (*dots, *recorded))]
    ax.set_ylim(min(speeds) / 2, 2 * max(machine.compute_bound(), *speeds))
    _plain_ticks(ax, max_rows)
    return fig


def _bounds(ax: Axes, machine: Machine, max_rows: int) -> None:
    knee, top = machine.knee(), machine.compute_bound()
    ends = [0.85, max_rows * 1.1]
    ax.plot(
        ends, [machine.memory_bound(rows) for rows in ends], "--", color=COLOURS["memory"], lw=1
    )
    ax.plot(ends, [top, top], "--", color=COLOURS["compute"], lw=1)
    roof = [min(machine.memory_bound(rows), top) for rows in (ends[0], knee, ends[1])]
    ax.plot([ends[0], knee, ends[1]], roof, color=COLOURS["ink"], lw=2.5, label="bound")
    note = f"memory: {_short(machine.memory_bound(1))} passes a second"
    middle = math.sqrt(knee)  # half-way up the slope, away from the dots of one row
    at = machine.memory_bound(middle)
    _note(ax, note, middle, at, COLOURS["memory"], (10, -6), va="top")
    _note(ax, f"arithmetic: {_short(top)} tokens a second", 1, top, COLOURS["compute"], (0, 6))
    ax.axvline(knee, color=COLOURS["faint"], lw=1, zorder=0)
    _note(ax, f"knee: {knee:.3g} rows", knee, top, COLOURS["ink"], (6, -6), va="top")
    ax.text(
        1, 0, machine.name, transform=ax.transAxes, ha="right", va="bottom", fontsize=9,
        color=COLOURS["recorded"],
    )  # fmt: skip


def _dots(ax: Axes, dots: Sequence[tuple[str, float, float]], colour: str, max_rows: int) -> None:
    for label, rows, speed in dots:
        ax.plot([rows], [speed], "o", ms=8, color=colour, zorder=3, label=label)
        if not label:
            continue
        left = rows > max_rows / 2
        shift = (-9, -1) if left else (9, -1)
        text = f"{label}: {_short(speed)}"
        _note(ax, text, rows, speed, colour, shift, va="center", ha="right" if left else "left")


def _short(value: float) -> str:
    """Three digits, or all of a larger number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _note(
    ax: Axes, text: str, x: float, y: float, colour: str, shift: tuple[float, float], **how: Any
) -> None:
    how = {"va": "bottom", "ha": "left", "color": colour, "fontsize": 10, **how}
    ax.annotate(text, (x, y), shift, textcoords="offset points", **how)


def _plain_ticks(ax: Axes, max_rows: int) -> None:
    rows = [2**i for i in range(int(math.log2(max_rows)) + 1)]
    ax.set_xticks(rows, [str(row) for row in rows])
    low, high = ax.get_ylim()
    steps = [digit * 10**power for power in range(-2, 7) for digit in (1, 2, 5)]
    ax.set_yticks([step for step in steps if low <= step <= high])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


# --- tokens and attention -----------------------------------------------------------------------


def token_strip(
    pieces: Sequence[str], ids: Sequence[int], colours: Sequence[str] | str = COLOURS["predicted"]
) -> Figure:
    """Tokens as boxes in reading order, each id under its text; a space is drawn as `·`."""
    assert len(pieces) == len(ids), (len(pieces), len(ids))
    fills = [colours] * len(ids) if isinstance(colours, str) else list(colours)
    shown = [piece.replace(" ", "·").replace("\n", "↵") for piece in pieces]
    widths = [max(len(piece), len(str(i)), 2) + 1.2 for piece, i in zip(shown, ids, strict=True)]
    style()
    fig, ax = plt.subplots(figsize=(min(8.0, 0.14 * sum(widths) + 0.3), 0.95))
    left = 0.0
    for piece, i, fill, width in zip(shown, ids, fills, widths, strict=True):
        ax.add_patch(Rectangle((left, 0.45), width - 0.3, 0.5, color=fill, alpha=0.22, lw=0))
        middle = left + (width - 0.3) / 2
        ax.text(middle, 0.7, piece, ha="center", va="center", family="DejaVu Sans Mono")
        ax.text(middle, 0.2, str(i), ha="center", va="center", fontsize=9, color=fill)
        left += width
    ax.set(xlim=(0, left - 0.3), ylim=(0, 1))
    ax.set_axis_off()
    fig.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    return fig


def attention_grid(
    weights: Any, row_labels: Sequence[str], col_labels: Sequence[str], title: str
) -> Figure:
    """A mask or attention weights [T, S] as squares: a query a row, a key a column.

    A bool mask is drawn filled where a query may see a key; weights, from 0 to 1, by darkness, with
    the number in every square that is large enough to read.
    """
    rows = [[float(value) for value in row] for row in weights]
    size = 0.52
    width, height = 2.2 + size * len(col_labels), 1.5 + size * len(row_labels)
    fig, ax = figure(max(width, 4.5), height, title, "key", "query")
    for t, row in enumerate(rows):
        for s, value in enumerate(row):
            _square(ax, s, t, value, numbers=_has_fractions(rows))
    ax.set(xlim=(0, len(col_labels)), ylim=(len(row_labels), 0), aspect="equal")
    ax.set_xticks([s + 0.5 for s in range(len(col_labels))], col_labels, rotation=45, ha="right")
    ax.set_yticks([t + 0.5 for t in range(len(row_labels))], row_labels)
    _bare(ax)
    return fig


def _has_fractions(rows: Sequence[Sequence[float]]) -> bool:
    """Whether there is anything but 0 and 1 to tell."""
    return any(value not in (0.0, 1.0) for row in rows for value in row)


def _square(ax: Axes, column: float, row: float, value: float, numbers: bool) -> None:
    ax.add_patch(Rectangle((column, row), 0.94, 0.94, color=COLOURS["empty"], lw=0))
    fill = Rectangle((column, row), 0.94, 0.94, color=COLOURS["predicted"], alpha=value, lw=0)
    ax.add_patch(fill)
    if numbers and value >= 0.005:
        ink = "white" if value > 0.5 else COLOURS["ink"]
        text = f"{value:.2f}".removeprefix("0")
        ax.text(column + 0.47, row + 0.47, text, ha="center", va="center", fontsize=8, color=ink)


def _bare(ax: Axes) -> None:
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def rows_grid(prompt: int, new: int, title: str) -> Figure:
    """Which rows each step computes to generate `new` tokens from `prompt`: without a cache, with.

    Down: the passes. Across: positions. Without a cache a pass recomputes everything so far; with
    one, the first pass computes the prompt and each later pass one row.
    """
    without = [(0, prompt + step) for step in range(new)]
    cached = [(0, prompt), *((prompt + step - 1, prompt + step) for step in range(1, new))]
    fig, axes = panels(8, 4, title, 2, sharey=True)
    shown = [("no cache", without, "compute"), ("a cache", cached, "measured")]
    for ax, (name, spans, role) in zip(axes, shown, strict=True):
        _spans(ax, spans, prompt + new - 1, COLOURS[role])
        rows = sum(stop - start for start, stop in spans)
        ax.set_title(f"{name}: {rows:,} rows")
        ax.set(xlabel="position")
    axes[0].set(ylabel="pass")
    return fig


def _spans(ax: Axes, spans: Sequence[tuple[int, int]], width: int, colour: str) -> None:
    starts = [start for start, _ in spans]
    counts = [stop - start for start, stop in spans]
    ax.barh(range(len(spans)), [width] * len(spans), height=1, color=COLOURS["empty"], lw=0)
    ax.barh(range(len(spans)), counts, left=starts, height=1, color=colour, lw=0)
    ax.set(xlim=(0, width), ylim=(len(spans) - 0.5, -0.5))
    _bare(ax)
