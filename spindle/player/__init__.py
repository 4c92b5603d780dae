"""The step-through player: a process as snapshots, drawn as grids that a reader steps through.

    Player(
        [
            ("r0 comes in", [("r0", 4), ("r0", 1), None, None]),
            ("r1 shares its first block", [(("r0", "r1"), 4), ("r0", 1), ("r1", 1), None]),
        ],
        slots=4,
        title="Two sequences, three blocks",
    )
    Player.of_llm(llm)  # with trace=1: its pool, its block tables, who ran in which step

A notebook shows it as HTML that asks no other host for anything. Where scripts may not run (a fresh
clone in JupyterLab, GitHub), what is left is the list of all steps as text, a long one folded;
where they may, the script makes grids and controls out of it. The same snapshots give the same
HTML.

    panel    one grid: what each cell is after each step
    page     the panels on a page, in step with one slider
    traces   from what ran (a scheduler, speculation, a kernel's threads) to panels
"""

from spindle.player.page import Player, Snapshot, colours_of, request_of
from spindle.player.panel import KINDS, Cell, Panel, Timeline
from spindle.player.traces import Recorder, Step, kind_of, name_of, steps

__all__ = [
    "KINDS",
    "Cell",
    "Panel",
    "Player",
    "Recorder",
    "Snapshot",
    "Step",
    "Timeline",
    "colours_of",
    "kind_of",
    "name_of",
    "request_of",
    "steps",
]
