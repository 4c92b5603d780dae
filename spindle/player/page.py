"""The player's page: panels that one slider steps through, as HTML, a style and a script."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spindle.errors import RequestError
from spindle.lesson import CAST
from spindle.player import traces
from spindle.player.panel import Cell, Panel

Snapshot = tuple[str, Sequence[Cell]]  # what happened, and all cells after it

LONG = 20  # steps, beyond which their text is folded: it would bury the page


def _packed(file: str) -> str:
    """A file beside this one without indentation and comments: each stored player has a copy."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


STYLE, SCRIPT = _packed("player.css"), _packed("player.js")


class Player:
    """Snapshots to step through with buttons, a slider or the keyboard; HTML in a notebook.

    One grid of cells: slots, columns and lines as `Panel` has them. For several, see `of_panels`,
    and for what ran the other constructors. colours: "#rrggbb" by owner; the cast has its own,
    others get those of the cast in turn. RequestError for what cannot be drawn.
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
        cells = [cells for _, cells in snapshots]
        panels = [Panel(cells, slots, columns=columns, lines=lines)]
        self._fill([caption for caption, _ in snapshots], panels, title, colours)

    @classmethod
    def of_panels(
        cls,
        captions: Sequence[str],
        panels: Sequence[Panel],
        title: str = "",
        colours: Mapping[str, str] | None = None,
    ) -> Player:
        """Several panels in step; captions say what happened in each step."""
        player = cls.__new__(cls)
        player._fill(captions, panels, title, colours)
        return player

    @classmethod
    def of_llm(cls, llm: Any, title: str = "", colours: Mapping[str, str] | None = None) -> Player:
        """Serve what is unfinished to its end, and show it; `llm` is left with nothing to do.

        RequestError: it keeps no trace, or has nothing to do.
        """
        return cls.of_steps([*traces.steps(llm)], title, colours)

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[traces.Step],
        title: str = "",
        colours: Mapping[str, str] | None = None,
        tables: bool = True,
    ) -> Player:
        """Steps of a scheduler, as `steps` records them: block pool, block tables, timeline.

        tables: whether to show the block tables. RequestError: no steps.
        """
        return cls.of_panels(*traces.of_steps(steps, tables), title, colours)

    @classmethod
    def of_rounds(
        cls,
        rounds: Iterable[tuple[Sequence[str], Sequence[str]]],
        title: str = "",
        colours: Mapping[str, str] | None = None,
    ) -> Player:
        """Rounds of speculation: (texts drafted, texts gained), the target's own token last.

        RequestError: no rounds, or one that gained nothing, or drafts that it was never given.
        """
        return cls.of_panels(*traces.of_rounds(rounds), title, colours)

    @classmethod
    def of_fibres(
        cls,
        turns: Sequence[Any],
        title: str = "",
        colours: Mapping[str, str] | None = None,
    ) -> Player:
        """Turns of a kernel's threads, and its shared memory, as `kernels.fibres` records them."""
        return cls.of_panels(*traces.of_fibres(turns), title, colours)

    def _fill(
        self,
        captions: Sequence[str],
        panels: Sequence[Panel],
        title: str,
        colours: Mapping[str, str] | None,
    ) -> None:
        self.captions, self.panels, self.title = list(captions), list(panels), title
        counts = [len(panel.changes) for panel in self.panels]
        if not counts or set(counts) != {len(self.captions)}:
            right = f"expected {len(self.captions)} each, a caption a step"
            raise RequestError(f"panels of {counts} steps: {right}")
        owners = dict.fromkeys(owner for panel in self.panels for owner in panel.owners)
        self.colours = colours_of(owners, colours)

    def __repr__(self) -> str:
        what = " and ".join(panel.title or f"{panel.size} cells" for panel in self.panels)
        return f"Player: {len(self.captions)} steps of {what}"

    def _repr_html_(self) -> str:
        return (
            f"{self.figure()}<style>{STYLE}</style>\n<script>({SCRIPT}){self.arguments()};</script>"
        )

    def figure(self, bare: bool = False) -> str:
        """The element that the script fills, with title and all text; bare: with neither."""
        head = f"<p><b>{escape(self.title, quote=False)}</b></p>\n" if self.title else ""
        label = escape(self.title or "step by step", quote=True)
        return (
            f'<div class="spindle-player" id="{self.name}" role="group" aria-label="{label}">\n'
            f"{'' if bare else head + self._text()}</div>\n"
        )

    def arguments(self, bare: bool = False) -> str:
        """What the script is called with: which element, and what it shows in it."""
        return f'("{self.name}", {self._data(captions=bare)})'

    @property
    def name(self) -> str:
        """The element's id: the same for the same content, and for no other."""
        content = json.dumps([self.title, self._data(captions=True)])
        return "player-" + hashlib.sha256(content.encode()).hexdigest()[:8]

    def _data(self, captions: bool) -> str:
        """What the script needs, as JSON that cannot end a script element."""
        owners = list(self.colours)
        data: dict[str, Any] = {
            "last": len(self.captions) - 1,
            "owners": list(self.colours.items()),
            "panels": [panel.data(owners) for panel in self.panels],
        }
        if captions:
            data["says"] = self.captions
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def _text(self) -> str:
        """All steps, for every reader."""
        items = []
        for caption, *texts in zip(
            self.captions, *(panel.texts() for panel in self.panels), strict=True
        ):
            named = zip(self.panels, texts, strict=True)
            said = [f"{p.title}: {t}" if p.title else t for p, t in named if t]
            code = "".join(f"<br><code>{escape(words, quote=False)}</code>" for words in said)
            items.append(f"<li><span>{escape(caption, quote=False)}</span>{code}</li>\n")
        short = all(panel.is_short for panel in self.panels)
        summary = "Every step as text" + ("" if short else ": what changed")
        details = "<details open>" if len(items) <= LONG else "<details>"
        return f"{details}<summary>{summary}</summary>\n<ol>\n{''.join(items)}</ol></details>\n"


def colours_of(names: Iterable[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """A "#rrggbb" for each name: those given, the cast's own, and those of the cast in turn.

    The answers of a request, "name" and "name.1", have one colour.
    """
    known, names = {one.name: one.colour for one in CAST} | dict(given or {}), list(names)
    for n, request in enumerate(dict.fromkeys(map(request_of, names))):
        known.setdefault(request, CAST[n % len(CAST)].colour)
    return {name: known.get(name, known[request_of(name)]) for name in names}


def request_of(name: str) -> str:
    """The request that an answer's name, as `name_of` has it, belongs to."""
    front, _, sample = name.rpartition(".")
    return front if front and sample.isdecimal() else name
