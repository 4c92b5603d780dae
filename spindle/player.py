"""The step-through player: a process as snapshots, drawn as a grid that a reader steps through.

    Player(
        [
            ("r0 comes in", [("r0", 4), ("r0", 1), None, None]),
            ("r1 shares its first block", [(("r0", "r1"), 4), ("r0", 1), ("r1", 1), None]),
        ],
        slots=4,
        title="Two sequences, three blocks",
    )

A notebook shows it as HTML that asks no other host for anything. Where scripts may not run (a fresh
clone in JupyterLab, GitHub), what is left is the list of all steps as text, a long one folded;
where they may, the script makes grid and controls out of it. The same snapshots give the same HTML.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from spindle.errors import RequestError
from spindle.lesson import CAST

__all__ = ["Cell", "Player", "Snapshot"]

# A cell as it is given: nobody's, or (owner or owners, slots filled), and a text for the owners'
# names, if it is to say something else.
Cell = tuple[str | Sequence[str], int] | tuple[str | Sequence[str], int, str] | None
Snapshot = tuple[str, Sequence[Cell]]  # what happened, and all cells after it

WHOLE = 400  # cells in all steps, up to which the text of a step names every cell that is held
WIDE = 16  # columns, beyond which a cell has no room for words
LONG = 20  # steps, beyond which their text is folded: it would bury the page


class _Cell(NamedTuple):
    owners: tuple[str, ...]
    filled: int
    says: str

    @classmethod
    def of(cls, cell: Cell) -> _Cell:
        if cell is None:
            return cls((), 0, "")
        names = (cell[0],) if isinstance(cell[0], str) else tuple(cell[0])
        return cls(names, cell[1], cell[2] if len(cell) == 3 else " ".join(names))


class Player:
    """Snapshots to step through with buttons, a slider or the arrow keys; HTML in a notebook.

    slots: what a cell holds when it is full. columns: cells in a line; by default as many as fit.
    lines: a name for each line of the grid, if it has columns. colours: "#rrggbb" by owner; the
    cast has its own, others get those of the cast in turn. RequestError for no snapshots, for
    snapshots of different sizes, and for a cell that holds more than its slots.
    """

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        slots: int = 1,
        title: str = "",
        *,
        columns: int = 0,
        lines: Sequence[str] = (),
        colours: Mapping[str, str] | None = None,
    ) -> None:
        self.captions = [caption for caption, _ in snapshots]
        self.states = [[_Cell.of(cell) for cell in cells] for _, cells in snapshots]
        self.slots, self.title, self.columns, self.lines = slots, title, columns, list(lines)
        _check(self)
        self.colours = _colours(self.states, colours or {})

    def __repr__(self) -> str:
        return f"Player: {len(self.states)} steps of {len(self.states[0])} cells"

    def _repr_html_(self) -> str:
        data = self._data()
        name = "player-" + hashlib.sha256((self._text() + data).encode()).hexdigest()[:8]
        label = escape(self.title or "step by step", quote=True)
        return (
            f'<div class="spindle-player" id="{name}" role="group" aria-label="{label}">\n'
            f"{self._text()}</div>\n<style>{_STYLE}</style>\n"
            f'<script>({_SCRIPT})("{name}", {data});</script>'
        )

    def _changes(self) -> Iterator[dict[int, _Cell]]:
        """Of each step, the cells that are not what they were, by number."""
        before = [_Cell.of(None)] * len(self.states[0])
        for state in self.states:
            yield {n: cell for n, cell in enumerate(state) if cell != before[n]}
            before = state

    def _data(self) -> str:
        """What the script needs, as JSON that cannot end a script element."""
        names = list(self.colours)
        steps = [
            [[n, [names.index(o) for o in cell.owners], cell.filled, *_words(cell)] for n, cell in
             changes.items()]
            for changes in self._changes()
        ]  # fmt: skip
        data: dict[str, Any] = {
            "cells": len(self.states[0]),
            "slots": self.slots,
            "columns": self.columns,
            "wide": self.columns > WIDE,
            "lines": self.lines,
            "owners": list(self.colours.items()),
            "steps": steps,
        }
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def _text(self) -> str:
        """Title and all steps, for every reader."""
        whole = len(self.states) * len(self.states[0]) <= WHOLE
        items = []
        for caption, state, changes in zip(
            self.captions, self.states, self._changes(), strict=True
        ):
            shown = dict(enumerate(state)) if whole else changes
            cells = [self._say(n, cell) for n, cell in shown.items() if cell.owners or not whole]
            listed = f"<br><code>{escape(' | '.join(cells), quote=False)}</code>" if cells else ""
            items.append(f"<li><span>{escape(caption, quote=False)}</span>{listed}</li>\n")
        summary = "Every step as text" + ("" if whole else ": what changed")
        head = f"<p><b>{escape(self.title, quote=False)}</b></p>\n" if self.title else ""
        details = "<details open>" if len(items) <= LONG else "<details>"
        return (
            f"{head}{details}<summary>{summary}</summary>\n<ol>\n{''.join(items)}</ol></details>\n"
        )

    def _say(self, n: int, cell: _Cell) -> str:
        place = f"{self.lines[n // self.columns]} {n % self.columns}" if self.lines else f"{n}"
        held = f" {cell.filled}/{self.slots}" if cell.owners and self.slots > 1 else ""
        return f"{place}: {cell.says if cell.owners else 'free'}{held}"


def _words(cell: _Cell) -> list[str]:
    """What the cell says, if it is not its owners' names."""
    return [] if cell.says == " ".join(cell.owners) else [cell.says]


def _check(player: Player) -> None:
    sizes = {len(state) for state in player.states}
    if len(sizes) != 1:
        raise RequestError(
            f"snapshots of {sorted(sizes)} cells: expected one size, and one or more"
        )
    (size,) = sizes
    if player.lines and len(player.lines) * player.columns != size:
        raise RequestError(
            f"{len(player.lines)} lines of {player.columns} columns: expected {size} cells"
        )
    for number, state in enumerate(player.states):
        for n, cell in enumerate(state):
            if not 0 <= cell.filled <= player.slots:
                raise RequestError(
                    f"step {number}, cell {n}: {cell.filled} of {player.slots} slots filled"
                )


def _colours(states: Sequence[Sequence[_Cell]], given: Mapping[str, str]) -> dict[str, str]:
    """A colour for every owner, in the order in which they come."""
    known = {one.name: one.colour for one in CAST} | dict(given)
    owners = dict.fromkeys(owner for state in states for cell in state for owner in cell.owners)
    return {owner: known.get(owner, CAST[n % len(CAST)].colour) for n, owner in enumerate(owners)}


def _packed(text: str) -> str:
    """Without indentation: a notebook stores it once for every player."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


# Half-transparent greys and inherited ink: the same rules on a light and on a dark page.
_STYLE = _packed("""
.spindle-player button{font:inherit;color:inherit;background:none;border:1px solid #8888;
  border-radius:5px;padding:0 .8em;cursor:pointer}
.spindle-player button:disabled{opacity:.35}
.spindle-bar{display:flex;gap:.5em;align-items:center;max-width:34em}
.spindle-bar input{flex:1;min-width:4em}
.spindle-says{min-height:3em;margin:.4em 0}
.spindle-grid{display:grid;gap:4px;align-items:center;margin:.4em 0 .8em;
  padding:2px}
.spindle-cell{border:1px solid #8888;border-radius:4px;padding:1px 4px 4px;min-width:0;
  font-size:.8em;line-height:1.5;overflow:hidden;white-space:nowrap}
.spindle-cell small{opacity:.65;margin-right:.4em}
.spindle-new{outline:2px solid currentColor}
.spindle-fill{position:relative;height:9px;background:#8883;display:flex;flex-direction:column}
.spindle-fill i{flex:1}
.spindle-fill u{position:absolute;inset:0;display:flex}
.spindle-fill b{flex:1;border-right:1px solid #888}
.spindle-wide .spindle-fill{height:18px}
""")

_SCRIPT = _packed("""
(id, d) => document.querySelectorAll("#" + id).forEach(root => {
  if (root.dataset.ready) return;
  root.dataset.ready = 1;
  const put = (to, tag, name, text) => {
    const e = document.createElement(tag);
    if (name) e.className = "spindle-" + name;
    e.textContent = text ?? "";
    to.append(e);
    return e;
  };
  const texts = root.querySelector("details"), items = texts.querySelectorAll("li");
  const stage = document.createElement("div"), last = d.steps.length - 1, cells = [];
  root.insertBefore(stage, texts);
  texts.open = false;
  const bar = put(stage, "div", "bar"), back = put(bar, "button", "", "\\u2039");
  const slider = put(bar, "input"), next = put(bar, "button", "", "\\u203a");
  const count = put(bar, "span"), says = put(stage, "p", "says"), grid = put(stage, "div", "grid");
  Object.assign(slider, {type: "range", min: 0, max: last, ariaLabel: "step"});
  back.ariaLabel = "step back"; next.ariaLabel = "next step"; says.ariaLive = "polite";
  grid.style.gridTemplateColumns = (d.lines.length ? "auto " : "") + (d.columns ?
    `repeat(${d.columns},minmax(0,1fr))` : "repeat(auto-fill,minmax(4.6em,1fr))");
  if (d.wide) grid.style.gap = "1px";
  for (let n = 0; n < d.cells; n++) {
    if (d.lines.length && n % d.columns == 0) put(grid, "span", "", d.lines[n / d.columns]);
    cells.push(put(grid, "div", d.wide ? "wide" : "cell"));
  }
  if (d.wide) d.owners.forEach(([name, colour]) => {
    put(stage, "span", "", "\\u25a0 ").style.color = colour;
    put(stage, "span", "", name + " ");
  });
  const draw = (cell, n, [owners, filled, words]) => {
    const names = words ?? owners.map(o => d.owners[o][0]).join(" ");
    cell.title = owners.length ? `${n}: ${names} ${filled}/${d.slots}` : n + ": free";
    cell.textContent = "";
    if (!d.wide) {
      put(cell, "small", "", d.lines.length ? "" : n);
      put(cell, "span", "", names || "\\u00a0");
    }
    const fill = put(cell, "div", "fill");
    owners.forEach(o => {
      const i = put(fill, "i");
      i.style.width = filled / d.slots * 100 + "%";
      i.style.background = d.owners[o][1];
    });
    if (d.slots > 1 && d.slots < 9) {
      const marks = put(fill, "u");
      for (let slot = 0; slot < d.slots; slot++) put(marks, "b");
    }
  };
  let at = 0;
  const show = to => {
    at = Math.min(Math.max(to, 0), last);
    const state = Array(d.cells).fill([[], 0]);
    for (let i = 0; i <= at; i++) d.steps[i].forEach(([n, ...cell]) => { state[n] = cell; });
    const news = new Set(at ? d.steps[at].map(change => change[0]) : []);
    cells.forEach((cell, n) => {
      draw(cell, n, state[n]);
      cell.classList.toggle("spindle-new", news.has(n));
    });
    says.textContent = items[at].firstChild.textContent;
    count.textContent = `${at + 1} of ${last + 1}`;
    slider.value = at;
    back.disabled = at == 0;
    next.disabled = at == last;
  };
  back.onclick = () => show(at - 1);
  next.onclick = () => show(at + 1);
  slider.oninput = () => show(+slider.value);
  stage.tabIndex = 0;
  stage.onkeydown = event => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    show(to);
  };
  show(0);
})
""")
