"""The figures of the book; the only module that imports matplotlib.

    from spindle import plots
    plots.roofline_dots([("eager", 1, 15.0)], machine=plots.Machine(...), title="...")
    plots.show()

Every function takes numbers and measures nothing, draws on a white card (which the book turns round
in the dark), labels things where they are rather than in a legend, and returns the figure. A title
states the claim. Sizes are fixed, so that a stored figure can be compared. A figure's repr, which a
notebook stores beside the picture, says in words what it shows.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from spindle.player import Player, colours_of, kind_of, name_of, request_of

__all__ = [
    "COLOURS",
    "Cell",
    "GrowthLine",
    "GrowthPanel",
    "Machine",
    "Player",
    "attention_grid",
    "figure",
    "fleet",
    "growth",
    "panels",
    "roofline_dots",
    "rows_grid",
    "show",
    "style",
    "timeline",
    "token_strip",
    "token_times",
    "trace_cells",
    "waterfall",
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
    return _claimed(1, count, (width, height), title, **how)


class _Picture(Figure):
    """A figure whose repr says what it shows, for whoever does not see it."""

    def __repr__(self) -> str:
        """Its claim; of each of its axes the title, the axes' names, and the labels in words."""
        said = [self.get_suptitle(), *(_said(ax) for ax in self.axes if ax.axison)]
        said += [_listed("Labels", _labels(ax.texts)) for ax in self.axes]
        said += [_listed("Key", _labels(key.get_texts())) for key in self.legends]
        sentences = [" ".join(text.split()).rstrip(".") for text in said if text]
        return f"<Figure: {'. '.join(dict.fromkeys(sentences))}.>"


def _axes(down: int, across: int, size: tuple[float, float], **how: Any) -> tuple[_Picture, Any]:
    """A figure of that many axes, in the book's style."""
    style()
    fig, axes = plt.subplots(down, across, figsize=size, FigureClass=_Picture, **how)
    assert isinstance(fig, _Picture)
    return fig, axes


def _claimed(
    down: int, across: int, size: tuple[float, float], title: str, **how: Any
) -> tuple[_Picture, Any]:
    """The same under a title that states the claim, in lines of which a phone shows the whole."""
    fig, axes = _axes(down, across, size, layout="constrained", **how)
    lines = textwrap.fill(title, width=int(fig.get_figwidth() * 6))
    fig.suptitle(lines, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return fig, axes


def _stacked(height: float, heights: Sequence[float], title: str) -> tuple[_Picture, Any]:
    """The same with axes under one another that share what is across; `height` is of them all."""
    how: Any = {"sharex": True, "squeeze": False, "height_ratios": heights}
    return _claimed(len(heights), 1, (8, height), title, **how)


def _said(ax: Axes) -> str:
    """Its title, what its axes are called, and lines and columns that have names, not numbers."""
    title = ax.get_title("left") or ax.get_title()
    across, up, names = ax.get_xlabel(), ax.get_ylabel(), _labels(ax.get_yticklabels())
    parts = [title, f"Across: {across}" * bool(across), f"Up: {up}" * bool(up)]
    parts += [_listed("Lines", names), _listed("Columns", _labels(ax.get_xticklabels()))]
    return ". ".join(part for part in parts if part)


def _labels(texts: Iterable[Text]) -> list[str]:
    """What is written there in words, each once."""
    words = [" ".join(text.get_text().split()) for text in texts if text.get_visible()]
    return list(dict.fromkeys(text for text in words if any(map(str.isalpha, text))))


def _listed(name: str, words: Sequence[str]) -> str:
    """The first dozen."""
    more = f" and {len(words) - 12} more" * (len(words) > 12)
    return f"{name}: {'; '.join(words[:12])}{more}" if words else ""


# --- tokens a second against rows in a pass -----------------------------------------------------

# Where the label of a dot may stand, the best place first.
_SIDES: tuple[dict[str, Any], ...] = (
    {"shift": (9, -1), "va": "center", "ha": "left"},
    {"shift": (-9, -1), "va": "center", "ha": "right"},
    {"shift": (7, 5), "va": "bottom", "ha": "left"},
    {"shift": (7, -5), "va": "top", "ha": "left"},
    {"shift": (-7, 5), "va": "bottom", "ha": "right"},
    {"shift": (-7, -5), "va": "top", "ha": "right"},
    {"shift": (0, 8), "va": "bottom", "ha": "center"},
    {"shift": (0, -8), "va": "top", "ha": "center"},
)


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
    unit: str = "second",
) -> Figure:
    """The book's map: tokens a second against rows in a pass, both bounds, and measured dots.

    `dots` are (label, rows, tokens a second) of the reader's run, `recorded` those of another
    machine or day, drawn grey; a dot with an empty label stands without words. The bounds are
    `machine`'s, and are drawn first. unit: what the speeds are per, where it is not a second.
    """
    fig, ax = figure(8, 5, title, "rows in a pass", f"tokens a {unit}")
    _bounds(ax, machine, max_rows, unit)
    coloured = {COLOURS["recorded"]: recorded, COLOURS["measured"]: dots}
    for colour, its in coloured.items():
        for label, rows, speed in its:
            ax.plot([rows], [speed], "o", ms=8, color=colour, zorder=3, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(0.85, max_rows * 1.1)
    speeds = [machine.memory_bound(1), *(speed for _, _, speed in (*dots, *recorded))]
    ax.set_ylim(min(speeds) / 2, 2 * max(machine.compute_bound(), *speeds))
    _plain_ticks(ax, max_rows)
    fig.draw_without_rendering()  # now it is known where everything comes to lie
    for colour, its in coloured.items():
        _name_dots(ax, its, colour)
    return fig


def _bounds(ax: Axes, machine: Machine, max_rows: int, unit: str) -> None:
    knee, top = machine.knee(), machine.compute_bound()
    ends = [0.85, max_rows * 1.1]
    ax.plot(
        ends, [machine.memory_bound(rows) for rows in ends], "--", color=COLOURS["memory"], lw=1
    )
    ax.plot(ends, [top, top], "--", color=COLOURS["compute"], lw=1)
    roof = [min(machine.memory_bound(rows), top) for rows in (ends[0], knee, ends[1])]
    ax.plot([ends[0], knee, ends[1]], roof, color=COLOURS["ink"], lw=2.5, label="bound")
    speed = machine.memory_bound(1)
    note = f"memory: {_short(speed)} {'pass' if speed == 1 else 'passes'} a {unit}"
    above = machine.memory_bound(knee**0.75)  # over the slope, where no dot can be
    _note(ax, note, 1, above, COLOURS["memory"], (0, 0), va="center")
    _note(ax, f"arithmetic: {_short(top)} tokens a {unit}", 1, top, COLOURS["compute"], (0, 6))
    ax.axvline(knee, color=COLOURS["faint"], lw=1, zorder=0)
    foot = ax.get_xaxis_transform()  # no dot is as low as that: it begins at half of the slowest
    ax.annotate(
        f"knee: {knee:.3g} rows", (knee, 0.06), (6, 0), foot, "offset points", color=COLOURS["ink"]
    )
    ax.text(
        1, 0.015, machine.name, transform=ax.transAxes, ha="right", va="bottom", fontsize=9,
        color=COLOURS["recorded"], bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _name_dots(ax: Axes, dots: Sequence[tuple[str, float, float]], colour: str) -> None:
    """Beside each dot its label and speed, on the side where least is in the way."""
    for label, rows, speed in dots:
        if not label:
            continue
        note = partial(_note, ax, f"{label}: {_short(speed)}", rows, speed, colour)
        note(**min(_SIDES, key=lambda side: _in_the_way(ax, note(**side))))


def _in_the_way(ax: Axes, note: Text) -> float:
    """What a text covers: other texts and dots, then lines, of which a thin one counts least.

    Past the edge of the axes is the worst. The text is taken away.
    """
    box = note.get_window_extent()
    inside = ax.get_window_extent()
    past = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
    note.remove()
    covered = 100.0 * past
    covered += sum(10 * box.overlaps(other.get_window_extent()) for other in ax.texts)
    for line in ax.lines:
        if line.get_marker() == "o":
            covered += 10 * box.overlaps(line.get_window_extent())
        elif line.get_path().transformed(line.get_transform()).intersects_bbox(box, filled=False):
            covered += line.get_linewidth()
    return covered


def _short(value: float) -> str:
    """Three digits, or all of a larger number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _note(
    ax: Axes, text: str, x: float, y: float, colour: str, shift: tuple[float, float], **how: Any
) -> Text:
    how = {"va": "bottom", "ha": "left", "color": colour, "fontsize": 10, **how}
    return ax.annotate(text, (x, y), shift, textcoords="offset points", **how)


def _plain_ticks(ax: Axes, max_rows: int) -> None:
    rows = [2**i for i in range(int(math.log2(max_rows)) + 1)]
    ax.set_xticks(rows, [str(row) for row in rows])
    low, high = ax.get_ylim()
    steps = [digit * 10**power for power in range(-2, 7) for digit in (1, 2, 5)]
    ax.set_yticks([step for step in steps if low <= step <= high])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


# --- what each change is worth ------------------------------------------------------------------


def waterfall(
    stages: Sequence[tuple[str, float]],
    total: str,
    bound: tuple[str, float],
    title: str,
    xlabel: str,
) -> Figure:
    """From a first figure down towards a bound: what each stage takes off the one before it.

    `stages` are (name, figure after it), the first one whole; each later one is drawn from the
    figure before it to its own, and says the difference. `total` is what the last figure is called,
    drawn whole; `bound`, a name and a figure, is predicted, and drawn first.
    """
    values, last = [value for _, value in stages], len(stages)
    fig, ax = figure(8, 1.7 + 0.4 * (last + 2), title, xlabel)
    ax.axvline(bound[1], ls="--", lw=1, color=COLOURS["predicted"], label="bound")
    _fall(ax, last + 1, 0, bound[1], COLOURS["predicted"], _short(bound[1]))
    _fall(ax, 0, 0, values[0], COLOURS["recorded"], _short(values[0]))
    for line, (before, value) in enumerate(pairwise(values), 1):
        text = f"{value - before:+.3g}".replace("-", "\N{MINUS SIGN}")
        _fall(ax, line, before, value, COLOURS["measured" if value <= before else "ink"], text)
    _fall(ax, last, 0, values[-1], COLOURS["recorded"], _short(values[-1]))
    for line, value in enumerate(values):
        ax.plot([value, value], [line, line + 1], color=COLOURS["faint"], lw=1, zorder=0)
    names = [*(name for name, _ in stages), total, bound[0]]
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.15 * max(bound[1], *values)))
    ax.tick_params(axis="y", length=0)
    return fig


def _fall(ax: Axes, line: int, start: float, stop: float, colour: str, text: str) -> None:
    left, right = sorted((start, stop))
    ax.add_patch(Rectangle((left, line - 0.32), right - left, 0.64, color=colour, lw=0))
    _note(ax, text, right, line, colour, (6, 0), va="center")


# --- what grows ---------------------------------------------------------------------------------


class GrowthLine(NamedTuple):
    """Figures at growing sizes, measured and predicted; `name` stands at the largest."""

    name: str
    sizes: Sequence[float]
    measured: Sequence[float]
    predicted: Sequence[float]


class GrowthPanel(NamedTuple):
    """Up to three lines over one axis of sizes, the lowest last, and the claim they bear out."""

    claim: str
    xlabel: str
    ylabel: str
    lines: Sequence[GrowthLine | tuple]


def growth(panels: Sequence[GrowthPanel], title: str) -> Figure:
    """How figures grow with the size of the work: a panel a kind of work, two side by side.

    Both axes begin at 0 and are linear, so that what grows in proportion is seen to. What is
    predicted is dashed, and drawn first.
    """
    across, down = min(2, len(panels)), math.ceil(len(panels) / 2)
    size = (4.5 * across, 0.6 + 3.3 * down)
    fig, axes = _claimed(down, across, size, title, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _grow(ax, GrowthPanel(*panel))
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    return fig


def _grow(ax: Axes, panel: GrowthPanel) -> None:
    lines = [GrowthLine(*line) for line in panel.lines]
    for line in lines:
        ax.plot(line.sizes, line.predicted, "--", color=COLOURS["predicted"], lw=1.5)
    for line, role in zip(lines, ("measured", "compute", "ink"), strict=False):
        ax.plot(line.sizes, line.measured, "o-", color=COLOURS[role], ms=5, lw=1.5)
        lowest = len(lines) > 1 and line is lines[-1]  # two may end at one height
        last, side = (line.sizes[-1], line.measured[-1]), "top" if lowest else "bottom"
        _note(ax, line.name, *last, COLOURS[role], (6, 0), va=side)
    ax.set_title(textwrap.fill(panel.claim, 44), fontsize=10)
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    letters = max(len(line.name) for line in lines)
    ax.set_xlim(0, max(line.sizes[-1] for line in lines) * (1.05 + 0.035 * letters))
    ax.set_ylim(bottom=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


# --- tokens and attention -----------------------------------------------------------------------


def token_strip(
    pieces: Sequence[str], ids: Sequence[int], colours: Sequence[str] | str = COLOURS["predicted"]
) -> Figure:
    """Tokens as boxes in reading order, each id under its text; a space is drawn as `·`."""
    assert len(pieces) == len(ids), (len(pieces), len(ids))
    fills = [colours] * len(ids) if isinstance(colours, str) else list(colours)
    shown = [piece.replace(" ", "·").replace("\n", "↵") for piece in pieces]
    widths = [max(len(piece), len(str(i)), 2) + 1.2 for piece, i in zip(shown, ids, strict=True)]
    fig, ax = _axes(1, 1, (min(8.0, 0.14 * sum(widths) + 0.3), 0.95))
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
        ink = "white" if value > 0.85 else COLOURS["ink"]
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


# --- who runs in which step ---------------------------------------------------------------------


class Cell(NamedTuple):
    """One sequence's part of one step: `rows` of it went through the model, to what end."""

    name: str  # the request's, which has the colour; of its answers after the first "name.1"
    step: int
    kind: str  # a key of KINDS
    rows: int = 1


KINDS = {  # how dark it is drawn, and what the key under the figure calls it
    "prefill": (1.0, "prompt"),
    "recompute": (1.0, "computed again"),
    "decode": (0.5, "one token"),
    "filler": (0.0, "computed, wanted by nobody"),
}


def trace_cells(trace: Iterable[Any]) -> list[Cell]:
    """The cells of `LLM.trace`, a Plan a step; the first plan that is kept is step 0.

    A chunk of tokens that the trace has seen computed before is a recompute, after a preemption.
    """
    cells, computed = [], dict[Any, int]()
    for step, plan in enumerate(trace):
        for chunk in plan.chunks:
            sequence, stop = chunk.sequence, chunk.stop
            known = computed.get(sequence, 0)
            cells.append(Cell(name_of(sequence), step, kind_of(chunk, known), chunk.count))
            computed[sequence] = max(known, stop)
    return cells


def timeline(
    runs: Mapping[str, Sequence[Cell | tuple]],
    title: str,
    lines: str = "seat",
    colours: Mapping[str, str] | None = None,
    steps: int | None = None,
) -> Figure:
    """Runs under one another over the same steps: a line a seat, or a line a sequence.

    runs: the title of each and its cells, as `trace_cells` makes them or plain (name, step, kind).
    lines "seat": whoever begins takes the lowest free one, and is named where there is room; a
    seat that nobody has is pale. lines "sequence": in order of appearance; a thin line is drawn
    where a sequence has begun and does not run. colours: "#rrggbb" by name; the cast has its own,
    and others get the cast's in turn. steps: how many to show, by default all.
    """
    assert lines in ("seat", "sequence"), lines
    made = {name: [Cell(*cell) for cell in cells] for name, cells in runs.items()}
    last = steps or 1 + max(cell.step for cells in made.values() for cell in cells)
    fills = colours_of([cell.name for cells in made.values() for cell in cells], colours)
    places = [_seats(cells) if lines == "seat" else _own_lines(cells) for cells in made.values()]
    heights = [1 + max(at.values()) for at in places]
    fig, axes = _stacked(1.05 + 0.55 * len(made) + 0.24 * sum(heights), heights, title)
    panels = zip(axes[:, 0], made.items(), places, heights, strict=True)
    for ax, (name, cells), at, height in panels:
        if lines == "sequence":
            _waits(ax, at, fills)
        _runs_of_cells(ax, cells, at, fills, last, in_line=lines == "seat")
        _frame(ax, name, height, last)
        if lines == "sequence":
            names = {place: cell for (cell, _), place in at.items()}
            ax.set_yticks(range(height), [names[place] for place in range(height)], fontsize=9)
    axes[-1, 0].set(xlabel="step")
    _key(fig, {cell.kind for cells in made.values() for cell in cells})
    return fig


Places = dict[tuple[str, int], int]  # (name, step) -> line


def _seats(cells: Sequence[Cell]) -> Places:
    """The lowest free seat for who begins; who was away gets the old one if it is free."""
    by_step: dict[int, list[str]] = {}
    for cell in cells:
        by_step.setdefault(cell.step, []).append(cell.name)
    at: Places = {}
    old: dict[str, int] = {}
    for step in sorted(by_step):
        names = by_step[step]
        stay = [name for name in names if (name, step - 1) in at]
        taken = {old[name] for name in stay}
        for name in names:
            if name not in stay and (name not in old or old[name] in taken):
                old[name] = next(seat for seat in range(len(names) + 1) if seat not in taken)
            taken.add(old[name])
            at[name, step] = old[name]
    return at


def _own_lines(cells: Sequence[Cell]) -> Places:
    names = list(dict.fromkeys(cell.name for cell in cells))
    requests = [request_of(name) for name in names]
    names.sort(key=lambda name: requests.index(request_of(name)))  # a request's answers together
    return {(cell.name, cell.step): names.index(cell.name) for cell in cells}


def _runs_of_cells(
    ax: Axes, cells: Sequence[Cell], at: Places, fills: dict[str, str], last: int, in_line: bool
) -> None:
    """Neighbouring cells of one kind are one bar; a request's first bar carries its name."""
    line: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.step):
        line.setdefault(cell.name, []).append(cell)
    fine = last <= 60  # then each step is a cell of its own to the eye
    for name, its in line.items():
        for run in _joined(its, at):
            place, kind = at[name, run[0].step], run[0].kind
            _bar(ax, run[0].step, len(run), place, fine, _look(fills[name], kind))
            if fine and kind in ("prefill", "recompute"):
                _numbers(ax, run, place)
        wanted = [cell for cell in its if cell.kind != "filler"]
        stay = next(n for n in range(len(wanted) + 1) if not _goes_on(wanted, n, at))
        if in_line and stay * 8 * 72 / last > 7 * len(name) + 6:
            middle = its[0].step + stay / 2
            ax.text(middle, at[name, its[0].step], name, ha="center", va="center", fontsize=9)


def _goes_on(its: Sequence[Cell], n: int, at: Places) -> bool:
    """Whether cell n stands right behind the one before it, on the same line."""
    if n in (0, len(its)):
        return n < len(its)
    before, now = its[n - 1], its[n]
    same = at[before.name, before.step] == at[now.name, now.step]
    return now.step == before.step + 1 and same


def _joined(its: Sequence[Cell], at: Places) -> list[list[Cell]]:
    runs: list[list[Cell]] = []
    for n, cell in enumerate(its):
        if n and _goes_on(its, n, at) and its[n - 1].kind == cell.kind:
            runs[-1].append(cell)
        else:
            runs.append([cell])
    return runs


def _bar(ax: Axes, step: int, count: int, place: int, fine: bool, how: dict[str, Any]) -> None:
    for left in range(step, step + count) if fine else [step]:
        width = 0.92 if fine else count - 0.15
        ax.add_patch(Rectangle((left, place - 0.43), width, 0.86, **how))


def _look(colour: str, kind: str) -> dict[str, Any]:
    if kind == "filler":
        grey = {"fc": COLOURS["faint"], "ec": COLOURS["recorded"]}
        return {**grey, "hatch": "////", "lw": 0, "label": kind}
    if kind == "recompute":
        return {"fc": colour, "ec": COLOURS["ink"], "lw": 1.5, "label": kind}
    return {"fc": colour, "alpha": KINDS[kind][0], "lw": 0, "label": kind}


def _numbers(ax: Axes, run: Sequence[Cell], place: int) -> None:
    for cell in run:
        if cell.rows > 1:
            ax.text(
                cell.step + 0.46, place, str(cell.rows), ha="center", va="center", fontsize=8,
                color="white", fontweight="bold",
            )  # fmt: skip


def _waits(ax: Axes, at: Places, fills: dict[str, str]) -> None:
    """A thin line from where a sequence stops to where it goes on."""
    steps: dict[str, list[int]] = {}
    for name, step in sorted(at, key=lambda one: one[1]):
        steps.setdefault(name, []).append(step)
    for name, its in steps.items():
        for before, after in pairwise(its):
            if after > before + 1:
                place = at[name, before]
                ax.plot([before + 1, after], [place, place], color=fills[name], lw=1.5)


def _frame(ax: Axes, name: str, height: int, last: int) -> None:
    for place in range(height):
        pale = Rectangle((0, place - 0.43), last, 0.86, color=COLOURS["empty"], lw=0, zorder=-1)
        ax.add_patch(pale)
    ax.set(xlim=(0, last), ylim=(height - 0.5, -0.5))
    ax.set_title(name, fontsize=11)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _bare(ax)


def _key(fig: Figure, kinds: Iterable[str]) -> None:
    shown = [kind for kind in KINDS if kind in kinds]
    boxes = [Rectangle((0, 0), 1, 1, **_look(COLOURS["recorded"], kind)) for kind in shown]
    fig.legend(
        boxes, [KINDS[kind][1] for kind in shown], loc="outside lower left", ncols=len(shown),
        frameon=False, fontsize=10, handlelength=1.2,
    )  # fmt: skip


# --- when each token came -----------------------------------------------------------------------


def token_times(
    runs: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    xlabel: str,
    colours: Mapping[str, str] | None = None,
    window: tuple[float, float] | None = None,
) -> Figure:
    """When tokens came: a panel a run, a line a request, a stroke a token.

    runs: the title of each, and in it the times by the request's name. colours: as in `timeline`.
    window: the times to show, from and to; by default all.
    """
    fills = colours_of([name for its in runs.values() for name in its], colours)
    heights = [len(its) for its in runs.values()]
    fig, axes = _stacked(0.9 + 0.5 * len(runs) + 0.2 * sum(heights), heights, title)
    for ax, (name, its) in zip(axes[:, 0], runs.items(), strict=True):
        for line, (request, times) in enumerate(its.items()):
            ax.vlines(times, line - 0.36, line + 0.36, color=fills[request], lw=1.5)
        ax.set_title(name, fontsize=11)
        ax.set_yticks(range(len(its)), list(its), fontsize=9)
        ax.set(ylim=(len(its) - 0.4, -0.6), xlim=window)
        _bare(ax)
    axes[-1, 0].set(xlabel=xlabel)
    return fig


# --- a fleet ------------------------------------------------------------------------------------


def fleet(
    policies: Mapping[str, Sequence[tuple[int, float, float | None, float]]], title: str
) -> Figure:
    """What a fleet does as it grows: three panels, a line a policy, up to six of them.

    policies: of each its points, (replicas, share of the prompts' tokens that hit, TTFT p99 in ms,
    requests a second that were in time); the last figure is drawn for a replica.
    """
    fig, axes = panels(9.6, 3.4, title, 3)
    colours = (COLOURS[role] for role in ("predicted", "compute", "ink", "measured", "recorded"))
    for (name, points), colour in zip(policies.items(), [*colours, "#CC79A7"], strict=False):
        sizes, hits, ttft_ms, goodput_s = zip(*points, strict=True)
        each_s = [rate / count for rate, count in zip(goodput_s, sizes, strict=True)]
        waits = [math.nan if ms is None else ms for ms in ttft_ms]
        for ax, values in zip(axes, ([100 * hit for hit in hits], waits, each_s), strict=True):
            ax.plot(sizes, values, "o-", color=colour, ms=5, lw=1.5, label=name)
    claims = ("of prompts remembered, %", "TTFT p99, ms", "goodput a replica, 1/s")
    for ax, claim in zip(axes, claims, strict=True):
        ax.set_title(claim, fontsize=10)
        ax.set(xscale="log", xlabel="replicas", ylim=(0, None))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        ax.xaxis.set_minor_locator(NullLocator())
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig
