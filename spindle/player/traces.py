"""From what ran to the player's panels: a scheduler's steps, speculation, the threads of a kernel.

Nothing here runs or changes anything but `steps`, which calls `LLM.step`. A step is kept as plain
data, so it stays as it was when the engine goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spindle.errors import RequestError
from spindle.player.panel import Cell, Panel, Timeline

Drawn = tuple[list[str], list[Panel]]  # a caption a step, and panels of as many steps


# --- a scheduler --------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A sequence's part of a pass: `rows` of it, the last `drafts` of them guesses."""

    kind: str  # "prefill" | "recompute" | "decode" | "filler"
    rows: int = 1
    drafts: int = 0


class Held(NamedTuple):
    """The blocks of a sequence, in the order of its positions, and how many tokens they hold."""

    blocks: tuple[int, ...]
    stored: int


class Step(NamedTuple):
    """What a scheduler planned for one step, and what the pool of blocks was then.

    Sequences go by the request's name, its answers after the first by "name.1" and so on. waiting:
    those that do not run, with whether they were sent away; cached: blocks that nobody holds and
    the pool remembers; ended: who has all tokens with this step.
    """

    num_blocks: int
    block_size: int
    ran: Mapping[str, Ran]
    held: Mapping[str, Held]
    waiting: Mapping[str, bool]
    cached: frozenset[int] = frozenset()
    ended: tuple[str, ...] = ()


class Recorder:
    """Makes a `Step` of a scheduler's plan, while it is carried out or right after that."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._computed: dict[Any, int] = {}  # by sequence: tokens that were computed before

    def step(self, plan: Any) -> Step:
        """The plan, and how queues, tables and pool are now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        ran = {name_of(chunk.sequence): self._ran(chunk) for chunk in plan.chunks}
        stops = {chunk.sequence: chunk.stop for chunk in plan.chunks}
        held = {
            name_of(one): Held(tuple(one.table.blocks), max(one.stored, stops.get(one, 0)))
            for one in scheduler.running
        }
        waiting = {
            name_of(one): one.waits_for_ending >= 0
            for one in scheduler.waiting
            if one.finish_reason is None
        }
        cached = (b for b in range(pool.num_blocks) if pool.count(b) == 0 and pool.index.names(b))
        done = (c.sequence for c in plan.chunks if c.sequence.finish_reason and not c.filler)
        sizes = pool.num_blocks, pool.block_size
        return Step(*sizes, ran, held, waiting, frozenset(cached), tuple(map(name_of, done)))

    def _ran(self, chunk: Any) -> Ran:
        known = self._computed.get(chunk.sequence, 0)
        self._computed[chunk.sequence] = max(known, chunk.stop)
        return Ran(kind_of(chunk, known), chunk.count, chunk.drafts)


def name_of(sequence: Any) -> str:
    """The request's name; of its answers after the first "name.1" and so on."""
    return sequence.request.id + (f".{sequence.sample}" if sequence.sample else "")


def kind_of(chunk: Any, known: int) -> str:
    """What a chunk of a Plan is for, if so many of its sequence's tokens were computed before."""
    if chunk.filler:
        return "filler"
    if chunk.start < known:
        return "recompute"
    prompt = len(chunk.sequence.request.prompt)
    decodes = chunk.count == 1 + chunk.drafts and chunk.start >= prompt
    return "decode" if decodes else "prefill"


def steps(llm: Any) -> Iterator[Step]:
    """Serve what is unfinished, a step at a time; each as it is once it is done.

    Requests may be added between two steps. RequestError: the LLM keeps no trace.
    """
    if not llm.trace.maxlen:
        raise RequestError("trace=0: expected an LLM that keeps a plan, LLM(..., trace=1)")
    recorder = Recorder(llm.scheduler)
    while llm.has_unfinished:
        before = llm.trace[-1] if llm.trace else None
        llm.step()
        if llm.trace and llm.trace[-1] is not before:
            yield recorder.step(llm.trace[-1])


def of_steps(steps: Sequence[Step], tables: bool = True) -> Drawn:
    """Block pool, block tables and timeline, in step; or without the tables."""
    if not steps:
        raise RequestError("no steps: expected one or more, of an LLM with something to do")
    names = list(dict.fromkeys(name for step in steps for name in (*step.ran, *step.waiting)))
    pool = Panel([_pool(step) for step in steps], steps[0].block_size, "Block pool")
    parts = [pool, *([_tables(steps, names)] if tables else []), _timeline(steps, names)]
    away = [{name for name, sent in step.waiting.items() if sent} for step in steps]
    said = [
        _says(step, now - was) for step, now, was in zip(steps, away, [set(), *away], strict=False)
    ]
    return [f"Step {n}: {words}." for n, words in enumerate(said)], parts


def _pool(step: Step) -> list[Cell]:
    """Each block: whose it is, by how many it is shared, and how many of its slots have a token."""
    owners: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for name, held in step.held.items():
        for n, block in enumerate(held.blocks):
            owners.setdefault(block, []).append(name)
            slots = min(step.block_size, max(0, held.stored - n * step.block_size))
            filled[block] = max(filled.get(block, 0), slots)
    cells: list[Cell] = [None] * step.num_blocks
    for block in step.cached:
        cells[block] = ((), step.block_size, "", "cached")
    for block, its in owners.items():
        count = f"×{len(its)} " if len(its) > 1 else ""  # first: a narrow cell cuts the names
        cells[block] = (its, filled[block], count + " ".join(its))
    return cells


def _tables(steps: Sequence[Step], names: Sequence[str]) -> Panel:
    """A line a sequence: the numbers of its blocks, in the order of its positions."""
    wide = max([1, *(len(held.blocks) for step in steps for held in step.held.values())])

    def line(step: Step, name: str) -> list[Cell]:
        blocks = step.held[name].blocks if name in step.held else ()
        return [(name, 1, str(block)) for block in blocks] + [None] * (wide - len(blocks))

    states = [[cell for name in names for cell in line(step, name)] for step in steps]
    return Panel(states, 1, "Block tables", columns=wide, lines=names, look="chip")


def _timeline(steps: Sequence[Step], names: Sequence[str]) -> Timeline:
    """A line a sequence, a column a step: how it ran, or that it waited."""

    def cell(step: Step, name: str) -> Cell:
        if ran := step.ran.get(name):
            rows = f"{ran.rows - ran.drafts}+{ran.drafts}" if ran.drafts else f"{ran.rows}"
            return name, 1, "" if rows == "1" else rows, ran.kind
        if name in step.waiting:
            return name, 1, "", "preempted" if step.waiting[name] else "waiting"
        return None

    return Timeline({name: [cell(step, name) for step in steps] for name in names}, "Who runs when")


def _says(step: Step, away: set[str]) -> str:
    """A step in words; away: who was sent away in it."""
    by_kind: dict[str, list[str]] = {}
    for name, ran in step.ran.items():
        by_kind.setdefault(ran.kind, []).append(name)
    rows = {kind: sum(step.ran[name].rows for name in its) for kind, its in by_kind.items()}
    words = {
        "prefill": "{rows} prompt token{s} of {names}",
        "recompute": "{rows} token{s} of {names} once more",
        "decode": "a next token for {names}",
        "filler": "a row for nobody in the seats of {names}",
    }
    said = [
        form.format(names=_list(by_kind[kind]), rows=rows[kind], s="s" * (rows[kind] != 1))
        for kind, form in words.items()
        if kind in by_kind
    ]
    said += [f"{_list(sorted(away))} sent away"] if away else []
    said += [f"{_list(step.ended)} done"] if step.ended else []
    return "; ".join(said)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


# --- speculation --------------------------------------------------------------------------------


def of_rounds(rounds: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Drawn:
    """A line a round: its drafts, and what the target made of them; two steps each."""
    judged = [(list(drafts), list(gained)) for drafts, gained in rounds]
    for n, (drafts, gained) in enumerate(judged):
        if not 0 < len(gained) <= len(drafts) + 1 or gained[:-1] != drafts[: len(gained) - 1]:
            right = "expected the accepted drafts, and one token of the target's own"
            raise RequestError(f"round {n}: drafted {drafts}, gained {gained}; {right}")
    if not judged:
        raise RequestError("no rounds: expected one or more")
    wide = 1 + max(len(drafts) for drafts, _ in judged)
    lines: list[list[Cell]] = [[None] * wide for _ in judged]
    captions, states = [], []
    for n, (drafts, gained) in enumerate(judged):
        kept = len(gained) - 1
        own = f"{kept} of {len(drafts)} accepted, then {_quoted(gained[-1:])} from the target"
        halves = (
            (_drafted(drafts), f"drafted {_quoted(drafts)}"),
            (_judged(drafts, gained, wide), own),
        )
        for cells, caption in halves:
            lines[n] = [*cells, *[None] * (wide - len(cells))]
            captions.append(f"Round {n}: {caption}.")
            states.append([cell for line in lines for cell in line])
    names = [f"round {n}" for n in range(len(judged))]
    panel = Panel(states, 1, "Rounds", columns=wide, lines=names, look="chip")
    return captions, [panel]


def _drafted(drafts: Sequence[str]) -> list[Cell]:
    return [("drafter", 1, _visible(token), "drafted") for token in drafts]


def _judged(drafts: Sequence[str], gained: Sequence[str], wide: int) -> list[Cell]:
    """Accepted, rejected, and behind that not looked at; in the last column the target's own."""
    kept = len(gained) - 1
    kinds = ["accepted"] * kept + ["rejected"] + ["dropped"] * len(drafts)
    cells: list[Cell] = [
        ("drafter", 1, _visible(token), kind) for token, kind in zip(drafts, kinds, strict=False)
    ]
    own: Cell = ("target", 1, _visible(gained[-1]), "bonus")
    return [*cells, *[None] * (wide - 1 - len(cells)), own]


def _visible(token: str) -> str:
    """With marks for what would not be seen."""
    return token.replace(" ", "·").replace("\n", "↵")


def _quoted(tokens: Sequence[str]) -> str:
    return " ".join(f"‘{_visible(token)}’" for token in tokens) or "nothing"


# --- the threads of a kernel --------------------------------------------------------------------


def of_fibres(turns: Sequence[Any]) -> Drawn:
    """A line a thread, a column a turn, and the shared memory after it."""
    if not turns:
        raise RequestError("no turns: expected one or more, of a kernel that ran")
    many = any(turn.block != turns[0].block for turn in turns)
    threads = sorted({(turn.block, n) for turn in turns for n in range(len(turn.states))})
    rows = {
        f"block {block}, {n}" if many else f"thread {n}": [_did(turn, block, n) for turn in turns]
        for block, n in threads
    }
    parts: list[Panel] = [Timeline(rows, "Threads")]
    if any(turn.memory for turn in turns):
        parts.append(Panel(list(_memory(turns)), 1, "Shared memory", look="chip"))
    barriers = sorted({turn.line for turn in turns if turn.stopped == "at a barrier"})
    return [f"Turn {n}: {_turn_says(turn, many, barriers)}." for n, turn in enumerate(turns)], parts


def _did(turn: Any, block: int, thread: int) -> Cell:
    """What a thread is in somebody's turn; blocks run one after the other."""
    state = "ready" if block != turn.block else turn.states[thread]
    if (block, thread) == (turn.block, turn.thread):
        state = "runs"
    return None if state == "ready" else (_warp(thread), 1, "", state)


def _warp(thread: int) -> str:
    return f"warp {thread // 32}"


def _memory(turns: Sequence[Any]) -> Iterator[list[Cell]]:
    """What each word holds, and who wrote it: whose turn it was when it changed."""
    words = max(len(turn.memory) for turn in turns)
    block, before, cells = None, dict[int, float](), list[Cell]()
    for turn in turns:
        if turn.block != block:  # it begins with memory that nobody has written
            block, before, cells = turn.block, {}, [None] * words
        for n, value in enumerate(turn.memory):
            if not math.isnan(value) and value != before.get(n):
                before[n] = value
                cells[n] = (_warp(turn.thread), 1, f"{value:g} by {turn.thread}")
        yield list(cells)


def _turn_says(turn: Any, many: bool, barriers: list[int]) -> str:
    """What a thread did; `barriers`: the lines of all, among which its own has a number."""
    who = f"thread {turn.thread}" + (f" of block {turn.block}" if many else "")
    if turn.stopped == "returned":
        return f"{who} runs to its end"
    if turn.stopped == "at a barrier":
        return f"{who} runs, and then waits at barrier {1 + barriers.index(turn.line)}"
    return f"{who} runs, and then waits {turn.stopped} in line {turn.line}"
