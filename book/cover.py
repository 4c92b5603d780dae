"""The player on the cover: the same eight requests in two memories, under two policies.

    cover_html()  # static first: the figures of the four runs in a table; a script adds the player

No model runs: which token comes is of no matter to a memory or to a scheduler, only when. In blocks
it is the package's own scheduler, with its pool; in one piece the slot allocator of `bench replay`,
which gives each request room for its prompt and all that it asks for, rounded up to whole blocks,
so that both are drawn in the same cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

from spindle import Tokenizer
from spindle.bench import load, replay
from spindle.kvcache.blocks import BlockPool
from spindle.lesson import CAST
from spindle.player.page import SCRIPT, STYLE, Player
from spindle.player.traces import Held, Ran, Recorder, Step

BLOCKS, BLOCK_SIZE, SEATS = 25, 8, 8  # chapter 00's memory, in which r2 alone nearly fills it
OPENING = 100  # the step that is shown first: memory is full, and somebody waits
MEMORIES = {"contiguous": "in one piece", "paged": "in blocks"}
POLICIES = {"static": "static batches", "continuous": "continuous batching"}


def runs() -> dict[tuple[str, str], list[Step]]:
    """The steps of all four runs, by memory and policy; each while its blocks are held."""
    prompts = [len(Tokenizer("tiny").encode(one.prompt)) for one in CAST]
    record = {"contiguous": in_one_piece, "paged": in_blocks}
    return {
        (memory, policy): with_endings(list(record[memory](policy, prompts)), prompts)
        for memory in MEMORIES
        for policy in POLICIES
    }


def in_blocks(policy: str, prompts: Sequence[int]) -> Iterator[Step]:
    """The scheduler's steps."""
    asked = [
        load.Request(n, tuple(range(prompt)), one.max_tokens)
        for n, (one, prompt) in enumerate(zip(CAST, prompts, strict=True))
    ]
    pool = BlockPool(BLOCKS, BLOCK_SIZE, prefix_cache=False)
    scheduler = load.scheduler_of(policy, pool, SEATS, 512, 512)
    recorder = Recorder(scheduler)
    for plan in load.drain(scheduler, asked):
        yield named(recorder.step(plan))


def named(step: Step) -> Step:
    """The same with the cast's names in the place of numbers."""
    ran, held, waiting = (
        {CAST[int(n)].name: its for n, its in part.items()}
        for part in (step.ran, step.held, step.waiting)
    )
    return step._replace(ran=ran, held=held, waiting=waiting)


class Seated(replay.Contiguous):
    """Slots in a row for as many as there are seats for.

    policy "static": those who have ended keep seat and slots until all of their batch have. So
    whoever did not fit in beside them at first does not later, and nobody comes in meanwhile.
    """

    def __init__(self, policy: str) -> None:
        super().__init__(BLOCKS * BLOCK_SIZE)
        self.static = policy == "static"
        self.seated: list[replay.Job] = []
        self.ended: list[replay.Job] = []

    def admit(self, job: replay.Job) -> bool:
        if len(self.seated) == SEATS or not super().admit(job):
            return False
        self.seated.append(job)
        return True

    def release(self, job: replay.Job) -> None:
        self.ended.append(job)
        if not self.static or len(self.ended) == len(self.seated):
            for one in self.ended:
                self.seated.remove(one)
                super().release(one)
            self.ended.clear()


def in_one_piece(policy: str, prompts: Sequence[int]) -> Iterator[Step]:
    """The slot allocator's steps, with the seats of those who have ended in a static batch."""
    asked = []
    for n, (one, prompt) in enumerate(zip(CAST, prompts, strict=True)):
        whole = -(-(prompt + one.max_tokens) // BLOCK_SIZE) * BLOCK_SIZE
        asked.append(replay.Request(n, prompt, whole - prompt, one.max_tokens))
    batch: dict[int, Held] = {}
    begun: set[int] = set()
    for step in replay.replay(asked, Seated(policy)):
        held = {n: Held(blocks_of(seat.spans), seat.stored) for n, seat in step.seats.items()}
        if policy == "continuous" or not batch.keys() & held.keys():
            batch = {}
        ran = {n: Ran("filler") for n in batch.keys() - held.keys()}
        for n in held:
            ran[n] = Ran("decode") if n in begun else Ran("prefill", held[n].stored)
        batch |= held
        begun |= held.keys()
        waiting = dict.fromkeys(step.waiting, False)
        yield named(Step(BLOCKS, BLOCK_SIZE, dict(sorted(ran.items())), dict(batch), waiting))


def blocks_of(spans: Sequence[replay.Span]) -> tuple[int, ...]:
    """The blocks that slots fill, which begin and end where blocks do."""
    return tuple(
        n // BLOCK_SIZE for first, count in spans for n in range(first, first + count, BLOCK_SIZE)
    )


def with_endings(steps: Sequence[Step], prompts: Sequence[int]) -> list[Step]:
    """The same, each with those who store the last token that they will ever store in it."""
    final = {
        one.name: prompt + one.max_tokens - 1 for one, prompt in zip(CAST, prompts, strict=True)
    }
    return [
        step._replace(
            ended=tuple(
                name
                for name, ran in step.ran.items()
                if ran.kind != "filler" and step.held[name].stored == final[name]
            )
        )
        for step in steps
    ]


# --- what they amount to, and how it is shown ---------------------------------------------------


class Figures(NamedTuple):
    """What a run amounts to."""

    steps: int
    last: str  # who ends last
    peak_blocks: int  # held at once
    used: float  # of the slots held, the share with a token: the mean over steps
    idle_seats: int  # seats in which nobody gained a token, over all steps


def figures(steps: Sequence[Step]) -> Figures:
    """Counted from the steps."""
    held = [sum(len(its.blocks) for its in step.held.values()) for step in steps]
    stored = [sum(its.stored for its in step.held.values()) for step in steps]
    gained = sum(ran.kind != "filler" for step in steps for ran in step.ran.values())
    used = fmean(s / (h * BLOCK_SIZE) for s, h in zip(stored, held, strict=True))
    (last,) = steps[-1].ended
    return Figures(len(steps), last, max(held), used, SEATS * len(steps) - gained)


def cover_html() -> str:
    """The player with its toggles: an element, its style and its script, without an empty line.

    Where no script runs there is the table of the four runs, and nothing that does not work.
    """
    four = runs()
    players = {
        key: Player.of_steps(steps, f"{MEMORIES[key[0]]}, {POLICIES[key[1]]}", tables=False)
        for key, steps in four.items()
    }
    calls = "".join(f"show{player.arguments(bare=True)};\n" for player in players.values())
    html = (
        '<div class="spindle-cover" id="cover-player">\n'
        f"{''.join(_figure(key, player) for key, player in players.items())}"
        f"{_table({key: figures(steps) for key, steps in four.items()})}</div>\n"
        f"<style>{STYLE}\n{COVER_STYLE}</style>\n"
        f"<script>{{const show = {SCRIPT};\n{calls}({TOGGLES})();}}</script>\n"
    )
    return "\n".join(line for line in html.splitlines() if line.strip()) + "\n"


def _figure(key: tuple[str, str], player: Player) -> str:
    return f'<div class="spindle-run" data-run="{" ".join(key)}">{player.figure(bare=True)}</div>\n'


def _table(rows: dict[tuple[str, str], Figures]) -> str:
    head = "memory", "policy", "steps", "last", "peak blocks", "slots used", "seats idle"
    cells = [[MEMORIES[m], POLICIES[p], *_said(its)] for (m, p), its in rows.items()]
    lines = [
        f'<tr data-run="{" ".join(key)}">{"".join(f"<td>{escape(c)}</td>" for c in line)}</tr>'
        for key, line in zip(rows, cells, strict=True)
    ]
    top = "".join(f'<th scope="col">{words}</th>' for words in head)
    return (
        "<details><summary>All four runs in figures, and who was last</summary>\n"
        '<div class="spindle-scroll"><table class="table" aria-describedby="cover-words">\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>\n"
        f'<p id="cover-words">Eight requests, {SEATS} seats, {BLOCKS} blocks of {BLOCK_SIZE} '
        "slots. Peak blocks: held at once. Slots used: the share of those held that have a token, "
        "the mean over all steps. Seats idle: over all steps, those in which nobody gained a "
        "token.</p></details>\n"
    )


def _said(its: Figures) -> list[str]:
    used = f"{its.used:.0%}"
    return [f"{its.steps}", its.last, f"{its.peak_blocks}", used, f"{its.idle_seats:,}"]


COVER_STYLE = """
.spindle-toggles{display:flex;flex-wrap:wrap;gap:.3em 2em;margin:0 0 .8em}
.spindle-toggles fieldset{border:0;padding:0;margin:0;display:flex;flex-wrap:wrap;gap:.2em 1em}
.spindle-toggles legend{font-weight:600;font-size:.9em;padding:0;margin:0;float:none;width:auto}
.spindle-toggles label{cursor:pointer;display:flex;align-items:center;gap:.35em}
.spindle-toggles input:focus-visible{outline:3px solid currentColor;outline-offset:2px}
.spindle-cover .spindle-scroll{overflow-x:auto;margin-top:.8em}
.spindle-cover table{font-size:.9em;margin:0}
#cover-words{font-size:.9em}
.spindle-cover td:nth-child(n+3),.spindle-cover th:nth-child(n+3){text-align:right}
.spindle-cover tr[aria-current] td{font-weight:700;box-shadow:inset 0 2px currentColor,
  inset 0 -2px currentColor}
@media (max-width:600px){.spindle-cover table{font-size:.72em}
.spindle-cover th,.spindle-cover td{padding:.3em .25em}}
@media (pointer:coarse){.spindle-toggles label{min-height:44px}}
"""

# The chosen run is shown, and goes on at the step at which the other one was.
TOGGLES = """
() => {
  const cover = document.querySelector("#cover-player");
  if (!cover || cover.querySelector(".spindle-toggles")) return;
  const choices = CHOICES;
  const chosen = choices.map(([, options]) => options[0][0]);
  const bar = document.createElement("div");
  bar.className = "spindle-toggles";
  cover.prepend(bar);
  const all = kind => [...cover.querySelectorAll(kind + "[data-run]")];
  const player = one => one.querySelector(".spindle-player").spindle;
  const choose = () => {
    const run = chosen.join(" "), at = player(all("div").find(one => !one.hidden)).at();
    all("div").forEach(one => {
      one.hidden = one.dataset.run != run;
      if (!one.hidden) player(one).show(at);
    });
    all("tr").forEach(row => {
      if (row.dataset.run == run) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  };
  choices.forEach(([name, options], n) => {
    const set = document.createElement("fieldset"), legend = document.createElement("legend");
    legend.textContent = name;
    set.append(legend);
    options.forEach(([value, words], place) => {
      const label = document.createElement("label"), input = document.createElement("input");
      Object.assign(input, {type: "radio", name: "cover-" + n, checked: place == 0});
      input.onchange = () => { chosen[n] = value; choose(); };
      label.append(input, words);
      set.append(label);
    });
    bar.append(set);
  });
  all("div").slice(1).forEach(one => { one.hidden = true; });
  player(all("div")[0]).show(OPENING);
  choose();
}
""".replace(
    "CHOICES",
    json.dumps([["Memory", [*MEMORIES.items()]], ["Policy", [*POLICIES.items()]]]),
).replace("OPENING", str(OPENING))
