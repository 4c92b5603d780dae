"""One grid of the player: what each of its cells is after every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from spindle.errors import RequestError

# A cell as it is given: nobody's, or (owner or owners, slots filled), then a text for the owners'
# names, if it is to say something else, then one of KINDS.
Cell = (
    tuple[str | Sequence[str], int]
    | tuple[str | Sequence[str], int, str]
    | tuple[str | Sequence[str], int, str, str]
    | None
)

# Kinds of cells, and the fill or pattern by which each is told from the others: colours are for
# owners, and are never all there is to see.
KINDS = {
    "cached": "dots",
    "prefill": "full",
    "recompute": "edge",
    "decode": "low",
    "filler": "stripes",
    "waiting": "line",
    "preempted": "rails",
    "drafted": "dash",
    "accepted": "full",
    "rejected": "stripes",
    "dropped": "line",
    "bonus": "edge",
    "runs": "full",
    "at a barrier": "line",
    "in a shuffle": "rails",
    "returned": "base",
}
LOOKS = ("block", "chip")  # a block with its slots, or a word

WHOLE = 400  # cells in all steps, up to which the text of a step names every cell that is held
MOST = 50_000  # cells that a browser still draws at once
WIDE = 16  # columns, beyond which a block has no room for words


class State(NamedTuple):
    """A cell as the player keeps it; without an owner it is nobody's."""

    owners: tuple[str, ...] = ()
    filled: int = 0
    says: str = ""
    kind: str = ""

    @classmethod
    def of(cls, cell: Cell) -> State:
        """The cell that is given so."""
        if cell is None:
            return FREE
        owner, filled, *more = cell
        owners = (owner,) if isinstance(owner, str) else tuple(owner)
        says = more[0] if more else " ".join(owners)
        return cls(owners, filled, says, more[1] if len(more) > 1 else "")


FREE = State()
Change = dict[int, State]  # what a step changes: cells by number


class Panel:
    """Cells in a grid, and what they are after each step.

    snapshots: for each step all cells. slots: what a cell holds when it is full. columns: cells in
    a line, by default as many as fit; lines: a name for each line, if it has columns. look: one of
    LOOKS. RequestError for no snapshots, for snapshots of different sizes, and for a cell that
    holds more than its slots or is of an unknown kind.
    """

    def __init__(
        self,
        snapshots: Sequence[Sequence[Cell]],
        slots: int = 1,
        title: str = "",
        *,
        columns: int = 0,
        lines: Sequence[str] = (),
        look: str = "block",
    ) -> None:
        self.slots, self.title, self.columns, self.lines = slots, title, columns, list(lines)
        self.look = "wide" if look == "block" and columns > WIDE else look
        states = [[State.of(cell) for cell in cells] for cells in snapshots]
        self.size = _one_size(states)
        if look not in LOOKS:
            raise RequestError(f"look={look!r}: expected one of {', '.join(LOOKS)}")
        if lines and len(lines) * columns != self.size:
            raise RequestError(
                f"{len(lines)} lines of {columns} columns: expected {self.size} cells"
            )
        self.changes = list(_changes(states))
        _check(self.changes, slots, self.size)

    @property
    def is_short(self) -> bool:
        """Whether the text of a step has room for every cell that is held."""
        return len(self.changes) * self.size <= WHOLE

    @property
    def owners(self) -> list[str]:
        """All owners, in the order in which they come."""
        cells = (cell for change in self.changes for cell in change.values())
        return list(dict.fromkeys(owner for cell in cells for owner in cell.owners))

    def states(self) -> Iterator[list[State]]:
        """All cells after each step."""
        state = [FREE] * self.size
        for change in self.changes:
            state = [change.get(n, cell) for n, cell in enumerate(state)]
            yield state

    def texts(self) -> Iterator[str]:
        """Each step in words: every cell that is held, or where those are many what changed."""
        shown: Iterable[Change] = self.changes
        if self.is_short:
            shown = ({n: c for n, c in enumerate(s) if c != FREE} for s in self.states())
        for cells in shown:
            yield " | ".join(self._say(n, cell) for n, cell in cells.items())

    def _say(self, n: int, cell: State) -> str:
        held = f" {cell.filled}/{self.slots}" if cell.owners and self.slots > 1 else ""
        words = " ".join(filter(None, [cell.kind, cell.says])) if cell != FREE else "free"
        return f"{self._place(n)}: {words}{held}"

    def _place(self, n: int) -> str:
        return f"{self.lines[n // self.columns]} {n % self.columns}" if self.lines else f"{n}"

    def data(self, owners: Sequence[str]) -> dict[str, Any]:
        """What the script needs, for JSON; `owners` are told by their places there."""
        cells = (cell for change in self.changes for cell in change.values())
        kinds = list(dict.fromkeys(cell.kind for cell in cells if cell.kind))
        return {
            "title": self.title,
            "size": self.size,
            "slots": self.slots,
            "columns": self.columns,
            "lines": self.lines,
            "look": self.look,
            "kinds": [[kind, KINDS[kind]] for kind in kinds],
            **self._data_of_cells(owners, kinds),
        }

    def _data_of_cells(self, owners: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
        steps = [
            [[n, *_short(cell, owners, kinds)] for n, cell in change.items()]
            for change in self.changes
        ]
        return {"steps": steps}


class Timeline(Panel):
    """A line a sequence or thread, a column a step: what each did in it, and nothing before it.

    rows: by the name of a line its cell in each step. RequestError for no rows, for rows of
    different lengths, and for a cell of an unknown kind.
    """

    def __init__(self, rows: Mapping[str, Sequence[Cell]], title: str = "") -> None:
        self.slots, self.title, self.lines, self.look = 1, title, list(rows), "bar"
        self._rows = [[State.of(cell) for cell in row] for row in rows.values()]
        self.columns = _one_size(self._rows)
        self.size = self.columns * len(self.lines)
        self.changes = [
            {
                line * self.columns + step: row[step]
                for line, row in enumerate(self._rows)
                if row[step] != FREE
            }
            for step in range(self.columns)
        ]
        _check(self.changes, 1, self.size)

    is_short = False  # a step is a column, and the others are other steps

    def _place(self, n: int) -> str:
        return self.lines[n // self.columns]

    def _data_of_cells(self, owners: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
        """Equal neighbours together: (first cell, how many, what they are)."""
        runs, at = [], 0
        for row in self._rows:
            for cell, its in groupby(row):
                count = len(list(its))
                if cell != FREE:
                    runs.append([at, count, *_short(cell, owners, kinds)])
                at += count
        return {"runs": runs}


def _one_size(rows: Sequence[Sequence[State]]) -> int:
    sizes = {len(row) for row in rows}
    if len(sizes) != 1:
        raise RequestError(
            f"snapshots of {sorted(sizes)} cells: expected one size, and one or more"
        )
    return sizes.pop()


def _changes(states: Sequence[Sequence[State]]) -> Iterator[Change]:
    before: Sequence[State] = [FREE] * len(states[0])
    for state in states:
        yield {n: cell for n, cell in enumerate(state) if cell != before[n]}
        before = state


def _check(changes: Sequence[Change], slots: int, size: int) -> None:
    if size > MOST:
        raise RequestError(f"a grid of {size:,} cells: expected {MOST:,} at most; show fewer steps")
    for step, change in enumerate(changes):
        for n, cell in change.items():
            if not 0 <= cell.filled <= slots:
                raise RequestError(f"step {step}, cell {n}: {cell.filled} of {slots} slots filled")
            if cell.kind and cell.kind not in KINDS:
                right = f"expected one of {', '.join(KINDS)}"
                raise RequestError(f"step {step}, cell {n}: kind {cell.kind!r}; {right}")


def _short(cell: State, owners: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    """Owners, filled, kind, words: without what is at the end and as usual."""
    who: Any = [owners.index(owner) for owner in cell.owners]
    kind = kinds.index(cell.kind) + 1 if cell.kind else 0
    words = None if cell.says == " ".join(cell.owners) else cell.says
    parts = [who[0] if len(who) == 1 else who, cell.filled, kind, words]
    while len(parts) > 2 and parts[-1] in (None, 0):
        parts.pop()
    return [] if cell == FREE else parts
