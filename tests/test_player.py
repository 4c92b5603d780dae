"""The step-through player: what it stores, what it shows of real traces, what a reader gets whose
scripts are off, and what the script does in a browser, if there is one."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import module_of

from spindle import LLM, Engine, SamplingParams, Tokenizer, plots, speculative
from spindle.config import ModelConfig
from spindle.decode.drafters import Drafter, NgramDrafter, WatchedDrafter
from spindle.errors import RequestError
from spindle.kernels import build, emulate, fibres
from spindle.lesson import CAST
from spindle.model.weights import random_model
from spindle.player import KINDS, Panel, Player, Timeline, steps, traces
from spindle.player.page import SCRIPT, STYLE
from spindle.serve.scheduler import Chunk

ROOT = Path(__file__).parent.parent

SHARED = [
    ("r0 comes in", [("r0", 4), ("r0", 1), None, None]),
    ("r1 shares a block", [(("r0", "r1"), 4), ("r0", 1), ("r1", 1), None]),
    ("r0 goes", [("r1", 4), None, ("r1", 1), None]),
]


class Page(HTMLParser):
    """The elements of a page, and what a reader without scripts and styles is shown."""

    VOID = ("br", "meta", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.shown = ""
        self.steps: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        assert not {key for key, _ in attrs} & {"style", "hidden", "onclick", "src", "href"}
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "li":
            self.steps.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.shown += data
        if "li" in self.open:
            self.steps[-1] += data


def run_of(steps: int, cells: int) -> list:
    """A pool in which four blocks change at each step."""
    state, snapshots = [None] * cells, []
    for step in range(steps):
        for n in range(4 * step, 4 * step + 4):
            state[n * 7 % cells] = (f"r{step % 8}", 1 + n % 4) if n % 3 else None
        snapshots.append((f"r{step % 8} needs a block for its next token", list(state)))
    return snapshots


def test_without_scripts_every_step_is_there_as_text():
    page = Page(Player(SHARED, 4, "Sharing")._repr_html_())
    assert page.steps == [
        "r0 comes in0: r0 4/4 | 1: r0 1/4",
        "r1 shares a block0: r0 r1 4/4 | 1: r0 1/4 | 2: r1 1/4",
        "r0 goes0: r1 4/4 | 2: r1 1/4",
    ]
    assert page.shown.startswith("\nSharing\nEvery step as text\n")
    assert "<details open>" in Player(SHARED, 4)._repr_html_()


def test_the_text_of_a_long_run_is_folded_and_still_there():
    html = {steps: Player([("again", [("r0", 1)])] * steps)._repr_html_() for steps in (20, 21)}
    assert "<details open><summary>" in html[20] and "<details><summary>" in html[21]
    assert Page(html[21]).steps == ["again0: r0"] * 21


def test_a_long_run_says_what_changed():
    snapshots = [("all", [("r0", 1)] * 300), ("one goes", [None] + [("r0", 1)] * 299)]
    page = Page(Player(snapshots, 4)._repr_html_())
    assert page.steps[1] == "one goes0: free"
    assert page.steps[0].count("r0 1/4") == 300
    assert "Every step as text: what changed" in page.shown


def test_lines_have_names_and_a_cell_may_say_something_else():
    snapshots = [("begin", [("r0", 1, "prompt"), None, None, ("r1", 1)])]
    page = Page(Player(snapshots, 1, columns=2, lines=["ours", "theirs"])._repr_html_())
    assert page.steps == ["beginours 0: prompt | theirs 1: r1"]


def test_the_same_snapshots_give_the_same_html_and_others_another_id():
    once, again = (Player(SHARED, 4, "Sharing")._repr_html_() for _ in range(2))
    assert once == again
    others = [
        Player(SHARED, 4, "Title"),
        Player(SHARED, 5, "Sharing"),
        Player(SHARED[:2], 4, "Sharing"),
        Player([("another caption", SHARED[0][1]), *SHARED[1:]], 4, "Sharing"),
        Player(SHARED, 4, "Sharing", colours={"r0": "#000000"}),
    ]
    ids = [id for html in (once, *(p._repr_html_() for p in others)) for id in Page(html).ids]
    assert len(ids) == len(set(ids)) == 6
    assert "0x" not in repr(others[0]) and repr(others[0]) == "Player: 3 steps of 4 cells"


@pytest.mark.parametrize(("steps", "cells", "most"), [(10, 16, 12_500), (40, 64, 15_500)])
def test_it_is_small(steps, cells, most):
    assert len(Player(run_of(steps, cells), 4)._repr_html_()) <= most


def test_a_long_run_stores_changes_alone():
    def size(steps: int) -> int:
        return len(Player([("same", [("r0", 1)] * 64)] * steps, 4)._data(captions=False))

    assert size(41) - size(21) == 20 * len("[],")


ODD = "</script><script>x</script><b>&amp;\"'</b>"


def test_what_it_is_given_stays_text():
    snapshots = [(ODD, [(ODD, 1), ("r0", 1, ODD), None, None])]
    player = Player(snapshots, 1, ODD, columns=2, lines=[ODD, "<"], colours={ODD: "<"})
    page = Page(player._repr_html_())
    assert page.tags.count("script") == 1 and page.tags.count("b") == 1  # the title's
    assert page.steps[0].startswith(ODD) and page.shown.count(ODD) == 6


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_any_text_comes_back(caption, owner):
    html = Player([(caption, [(owner, 0)])])._repr_html_()
    page = Page(html.replace("\r", ""))
    assert page.tags.count("script") == 1
    assert (caption + f"0: {owner}").replace("\r", "") in page.shown


def test_no_other_host_is_asked_and_a_notebook_may_store_it():
    import runpy

    rules = runpy.run_path(str(ROOT / "notebooks" / "rules.py"))
    html = Player(run_of(10, 16), 4, "A title")._repr_html_()
    assert not re.search(r"https?:|//|url\(|@import|fetch|XMLHttp|import\s*\(", html)
    assert rules["_matches"](rules["OUTPUT"] + rules["FACT"], html) == []


def test_the_cast_has_its_colours_and_others_one_each():
    names = [("r3", 1), ("r0", 1), ("new", 1), ("own", 1)]
    player = Player([("all", names)], colours={"own": "#123456"})
    assert player.colours == {
        "r3": CAST[3].colour,
        "r0": CAST[0].colour,
        "new": CAST[2].colour,
        "own": "#123456",
    }


def test_what_cannot_be_drawn_is_refused_in_words():
    for snapshots, options, words in (
        ([], {}, r"snapshots of \[\] cells"),
        ([("a", [None]), ("b", [None, None])], {}, r"snapshots of \[1, 2\] cells"),
        ([("a", [("r0", 5)])], {"slots": 4}, "step 0, cell 0: 5 of 4 slots"),
        ([("a", [None] * 3)], {"columns": 2, "lines": ["x"]}, "1 lines of 2 columns"),
        (
            [("a", [("r0", 1, "", "lost")])],
            {},
            "step 0, cell 0: kind 'lost'; expected one of cached",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            Player(snapshots, **options)
    for build_one, words in (
        (lambda: Panel([[None]], look="bar"), "look='bar': expected one of block, chip"),
        (lambda: Timeline({"a": [None] * 50_001}), "50,001 cells: expected 50,000 at most"),
        (lambda: Timeline({}), r"snapshots of \[\] cells"),
        (lambda: Timeline({"a": [None], "b": []}), r"snapshots of \[0, 1\] cells"),
        (lambda: Player.of_panels(["a"], []), r"panels of \[\] steps: expected 1 each"),
        (lambda: Player.of_panels(["a"], [Panel([[None]] * 2)]), r"panels of \[2\] steps"),
        (lambda: Player.of_steps([]), "no steps"),
        (lambda: Player.of_rounds([]), "no rounds"),
        (lambda: Player.of_rounds([(["a"], [])]), "round 0: drafted"),
        (lambda: Player.of_rounds([(["a"], ["b", "c"])]), "expected the accepted drafts"),
        (lambda: Player.of_rounds([(["a"], ["a", "b", "c"])]), "expected the accepted drafts"),
        (lambda: Player.of_fibres([]), "no turns"),
    ):
        with pytest.raises(RequestError, match=words):
            build_one()


def test_plots_has_it():
    assert plots.Player is Player


# --- panels ---------------------------------------------------------------------------------------

CELLS = st.none() | st.tuples(
    st.sampled_from(["r0", "r1", ("r0", "r1"), "x.1"]),
    st.integers(0, 4),
    st.sampled_from(["", "words", "<"]),
    st.sampled_from(["", *KINDS]),
)


def stored(panel: Panel, owners: list[str]) -> list[list[tuple]]:
    """All states of a panel out of what the script is given, by the script's rules."""
    data = json.loads(json.dumps(panel.data(owners)))
    changes = data.get("steps") or [[] for _ in panel.changes]
    for n, count, *cell in data.get("runs", []):
        for i in range(n, n + count):
            changes[i % data["columns"]].append([i, *cell])
    state, states = [()] * data["size"], []
    for change in changes:
        for n, *cell in change:
            who, filled, kind, words = [*cell, *[[], 0, 0, None][len(cell) :]]
            who = [owners[i] for i in (who if isinstance(who, list) else [who])]
            words = " ".join(who) if words is None else words
            kind = data["kinds"][kind - 1][0] if kind else ""
            state[n] = (tuple(who), filled, words, kind) if cell else ()
        states.append(list(state))
    return states


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=6)
    )
)
def test_what_the_script_is_given_is_what_was_given(snapshots):
    panel = Panel(snapshots, 4)
    states = [
        [() if cell == ((), 0, "", "") else tuple(cell) for cell in s] for s in panel.states()
    ]
    assert stored(panel, panel.owners) == states
    for cells, state in zip(snapshots, panel.states(), strict=True):
        for given_cell, cell in zip(cells, state, strict=True):
            assert given_cell is None or given_cell[1:] == cell[1:]
            owners = given_cell[0] if given_cell else ()
            assert cell.owners == ((owners,) if isinstance(owners, str) else owners)


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=3)
    )
)
def test_a_timeline_shows_in_each_step_its_column_and_those_before(rows):
    rows = {f"line {n}": [c and (c[0], 1, *c[2:]) for c in row] for n, row in enumerate(rows)}
    timeline = Timeline(rows)
    for step, (state, ours) in enumerate(
        zip(timeline.states(), stored(timeline, timeline.owners), strict=True)
    ):
        assert [() if cell == ((), 0, "", "") else tuple(cell) for cell in state] == ours
        for line, row in enumerate(rows.values()):
            for column, cell in enumerate(row):
                here = state[line * timeline.columns + column]
                assert here[1:] == ((0, "", "") if column > step or cell is None else cell[1:])


def test_several_panels_are_in_step_and_each_is_named_in_the_text():
    pool = Panel([[("r0", 1), None], [("r0", 2), ("r1", 1)]], 2, "Pool")
    line = Timeline({"r0": [("r0", 1, "7", "prefill"), ("r0", 1, "", "decode")]}, "Who runs")
    player = Player.of_panels(["first", "second"], [pool, line], "Both")
    assert Page(player._repr_html_()).steps == [
        "firstPool: 0: r0 1/2Who runs: r0: prefill 7",
        "secondPool: 0: r0 2/2 | 1: r1 1/2Who runs: r0: decode",
    ]
    assert repr(player) == "Player: 2 steps of Pool and Who runs"


def test_the_answers_of_a_request_have_its_colour():
    player = Player([("all", [("q", 1), ("q.1", 1), ("p", 1), ("r2.3", 1)])])
    assert player.colours["q.1"] == player.colours["q"] != player.colours["p"]
    assert player.colours["r2.3"] == CAST[2].colour


def luminance(colour: list[float]) -> float:
    """Relative luminance of sRGB in 0 to 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def rgb(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("page", "ink"),
    [
        ("#ffffff", "#323232"),
        ("#121212", "#ced6dd"),
        ("#ffffff", "#212121"),
        ("#111111", "#ffffff"),
    ],
)
def test_every_mark_stands_out_on_light_and_dark_pages(page, ink):
    """The site's and JupyterLab's; 3:1 is what WCAG 2.2 wants of marks (1.4.11)."""
    (share,) = re.findall(r"color-mix\(in srgb,var\(--c,(?:#7a7a7a)\) (\d+)%,currentColor\)", STYLE)
    part = int(share) / 100
    for colour in ["#7a7a7a", *(one.colour for one in CAST)]:
        mixed = [part * a + (1 - part) * b for a, b in zip(rgb(colour), rgb(ink), strict=True)]
        assert contrast(mixed, rgb(page)) >= 3, colour
    assert contrast(rgb("#7a7a7a"), rgb(page)) >= 3  # borders


def test_the_style_keeps_its_promises():
    looks = set(KINDS.values())
    assert all(f".spindle-{look}{{" in STYLE or look == "dash" for look in looks)
    assert "transition" not in STYLE and "animation" not in STYLE  # nothing to reduce
    assert "@media (pointer:coarse){" in STYLE and "min-height:44px" in STYLE
    assert ":focus-visible{outline:3px" in STYLE and "outline:none" not in STYLE
    assert "autoplay" not in SCRIPT and "show(0);\n})" in SCRIPT  # it begins at rest


# --- traces: a scheduler --------------------------------------------------------------------------

SHAPE = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
SMALL = random_model(ModelConfig.from_dict(SHAPE), 0, torch.float64)
P = 4  # slots a block


class Live(NamedTuple):
    """An engine right after a step, read from its own objects."""

    owners: list[list[str]]  # by block
    filled: list[int]  # by block
    tables: dict[str, list[int]]
    waiting: dict[str, bool]  # whether it was sent away
    chunks: dict[str, Chunk]

    @classmethod
    def of(cls, llm: LLM) -> "Live":
        scheduler, blocks = llm.scheduler, range(llm.scheduler.pool.num_blocks)
        running = {traces.name_of(one): one for one in scheduler.running}
        owners = [[name for name, s in running.items() if b in s.table.blocks] for b in blocks]
        assert [len(its) for its in owners] == [scheduler.pool.count(b) for b in blocks]
        filled = [0] * len(blocks)
        chunks = {traces.name_of(chunk.sequence): chunk for chunk in llm.trace[-1].chunks}
        for name, one in running.items():
            stored = one.stored + (name in chunks and chunks[name].filler)  # its last one too
            for n, b in enumerate(one.table.blocks):
                filled[b] = max(filled[b], min(P, max(0, stored - n * P)))
        waiting = [one for one in scheduler.waiting if not one.finish_reason]
        return cls(
            owners,
            filled,
            {name: list(one.table.blocks) for name, one in running.items()},
            {traces.name_of(one): one.request.preemptions > 0 for one in waiting},
            chunks,
        )


class Again(Drafter):
    """Guesses that the last token goes on for ever."""

    def propose(self, ids, k):
        return [ids[-1]] * k


OPTIONS = [
    {"num_blocks": 9},
    {"num_blocks": 30, "prefix_cache": False, "policy": "static"},
    {"num_blocks": 9, "preemption": "swap"},
    {"num_blocks": 9, "speculate": Again(), "k": 3, "max_batch_tokens": 32},
    {"num_blocks": 9, "max_batch_tokens": 4},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=lambda one: " ".join(one))
def served(request):
    """Answers that share a prompt, prefixes that are remembered, and too few blocks for all."""
    llm = LLM(SMALL, block_size=P, max_seqs=4, trace=1, **request.param)
    for n, count in enumerate((9, 9, 3, 7)):
        prompt = [*[1, 2, 3, 4, 5, 6, 7, 8, 9][:count], 10 + n]
        params = SamplingParams(
            max_tokens=10 + n, temperature=1, n=2 - n % 2, seed=n, ignore_eos=True
        )
        llm.add(prompt, params, f"q{n}")
    recorded, live = [], []
    for step in steps(llm):
        recorded.append(step)
        live.append(Live.of(llm))
        assert len(step.cached) == llm.scheduler.pool.cached
    return recorded, live, Player.of_steps(recorded)


def test_the_pool_is_shown_as_it_is_after_each_step(served):
    recorded, live, player = served
    pool = player.panels[0]
    for step, now, state in zip(recorded, live, pool.states(), strict=True):
        assert [list(cell.owners) for cell in state] == now.owners
        assert {b for b, cell in enumerate(state) if cell.kind == "cached"} == step.cached
        held = [cell.filled if cell.owners else 0 for cell in state]
        assert held == now.filled
        shared = [f"×{len(cell.owners)}" for cell in state if len(cell.owners) > 1]
        assert [cell.says.split()[0] for cell in state if len(cell.owners) > 1] == shared
    assert any(len(its) > 1 for now in live for its in now.owners)


def test_the_tables_are_shown_as_they_are_after_each_step(served):
    _, live, player = served
    tables = player.panels[1]
    for now, state in zip(live, tables.states(), strict=True):
        for at, name in enumerate(tables.lines):
            row = state[at * tables.columns : (at + 1) * tables.columns]
            assert [int(cell.says) for cell in row if cell.owners] == now.tables.get(name, [])


def test_the_timeline_shows_each_plan_and_who_waits(served):
    recorded, live, player = served
    line = player.panels[2]
    final = list(line.states())[-1]
    for n, (step, now) in enumerate(zip(recorded, live, strict=True)):
        for at, name in enumerate(line.lines):
            cell = final[at * line.columns + n]
            if chunk := now.chunks.get(name):
                assert step.ran[name] == (cell.kind, chunk.count, chunk.drafts)
                assert (cell.kind == "filler") == chunk.filler
                assert not chunk.drafts or cell.kind in ("decode", "recompute")
                own = chunk.count - chunk.drafts
                many = f"{own}+{chunk.drafts}" if chunk.drafts else f"{own}" if own > 1 else ""
                assert cell.says == many
            else:
                words = {True: "preempted", False: "waiting", None: ""}
                assert cell.kind == words[now.waiting.get(name)]
    assert sorted(name for step in recorded for name in step.ended) == sorted(line.lines)


def test_the_runs_have_what_they_are_to_show(served, request):
    options = request.node.callspec.params["served"]
    kinds = {cell.kind for panel in served[2].panels for state in panel.states() for cell in state}
    static, swap = "policy" in options, "preemption" in options
    expected = {"", "prefill", "decode", "waiting"}
    expected |= {"filler"} if static else {"cached", "preempted"}
    expected |= set() if static or swap else {"recompute"}
    assert kinds == expected
    drafts = sum(ran.drafts for step in served[0] for ran in step.ran.values())
    assert (drafts > 0) == ("speculate" in options)


def test_an_llm_is_served_to_its_end_and_needs_a_trace_and_something_to_do():
    llm = LLM(SMALL, num_blocks=12, block_size=P, trace=1)
    llm.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=0), "q")
    player = Player.of_llm(llm, "One")
    assert not llm.has_unfinished
    assert player.captions[0] == "Step 0: 3 prompt tokens of q."
    assert player.captions[-1] == "Step 2: a next token for q; q done."
    with pytest.raises(RequestError, match="no steps"):
        Player.of_llm(llm)
    with pytest.raises(RequestError, match=r"trace=0: expected an LLM that keeps a plan"):
        Player.of_llm(LLM(SMALL, num_blocks=12, block_size=P))


def test_requests_may_come_between_two_steps():
    llm = LLM(SMALL, num_blocks=12, block_size=P, trace=1)
    llm.add([1, 2, 3], SamplingParams(max_tokens=3, temperature=0), "first")
    recorded = []
    for step in steps(llm):
        recorded.append(step)
        if len(recorded) == 2:
            llm.add([4], SamplingParams(max_tokens=2, temperature=0), "second")
    assert [list(step.ran) for step in recorded] == [
        ["first"], ["first"], ["first", "second"], ["second"]
    ]  # fmt: skip


# --- traces: speculation --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("adaptive_k", [False, True])
def test_rounds_are_those_that_the_engine_had(temperature, adaptive_k):
    drafter = WatchedDrafter(NgramDrafter(2, 1))
    engine, prompt = Engine(SMALL), [1, 2, 3, 1, 2]
    how = {"temperature": temperature, "seed": 3, "ignore_eos": True, "adaptive_k": adaptive_k}
    for _ in range(2):  # and once more with the same drafter
        ids, stats = speculative.generate(engine, drafter, prompt, 3, 40, **how)
    rounds = drafter.rounds(prompt + ids)
    counts = stats.speculation
    gained = [token for _, its in rounds for token in its]
    assert gained == ids[len(ids) - len(gained) :]
    assert sum(len(drafts) for drafts, _ in rounds) == counts.proposed
    assert sum(len(its) - 1 for _, its in rounds) == counts.accepted
    assert 0 < counts.accepted < counts.proposed
    for drafts, its in rounds:
        assert its[:-1] == drafts[: len(its) - 1]
        assert len(its) > len(drafts) or its[-1] != drafts[len(its) - 1]


def test_a_round_is_drafted_and_then_judged():
    rounds = [([" a", "b"], [" a", "b", "!"]), (["c", "d", "e"], ["c", "\n"]), ([], ["."])]
    player = Player.of_rounds(rounds)
    (panel,) = player.panels
    lines = [[cell[2:] for cell in state] for state in panel.states()]
    assert lines[0] == [("·a", "drafted"), ("b", "drafted")] + [("", "")] * 10
    assert lines[1][:4] == [("·a", "accepted"), ("b", "accepted"), ("", ""), ("!", "bonus")]
    assert lines[3][4:8] == [
        ("c", "accepted"), ("d", "rejected"), ("e", "dropped"), ("↵", "bonus")
    ]  # fmt: skip
    assert lines[5][8:] == [("", "")] * 3 + [(".", "bonus")]
    assert player.captions[2:4] == [
        "Round 1: drafted ‘c’ ‘d’ ‘e’.", "Round 1: 1 of 3 accepted, then ‘↵’ from the target."
    ]  # fmt: skip


# --- traces: a kernel's threads -------------------------------------------------------------------

SUM = """
__global__ void total(float* out, const float* in) {
  __shared__ float sums[8];
  const int t = threadIdx.x;
  sums[t] = in[t] + blockIdx.x;
  __syncthreads();  // 6
  for (int apart = 4; apart > 0; apart /= 2) {
    if (t < apart) sums[t] += sums[t + apart];
    __syncthreads();  // 9
  }
  if (t == 0) out[blockIdx.x] = sums[0];
}
extern "C" int run_total(float* out, const float* in, int64_t blocks) {
  total<<<blocks, 8>>>(out, in);
  return cudaGetLastError();
}
"""


def compiles(test):
    """It takes g++, and a cache of its own."""
    here = sys.platform == "linux" and build.compiler() is not None
    skip = pytest.mark.skipif(not here, reason="no C++ compiler, or no Linux")
    return skip(pytest.mark.usefixtures("own_cache")(test))


@compiles
@pytest.mark.parametrize("order", emulate.ORDERS)
def test_turns_are_those_of_the_emulator(order):
    """8 threads with 4 waits each have 5 turns each, all of a stage before any of the next."""
    out, x = torch.zeros(2), torch.arange(1.0, 9)
    with emulate.thread_order(order, seed=1):
        turns = fibres.record(SUM, "run_total", out, x, 2)
    assert sorted(out.tolist()) == [36, 44] and len(turns) == 2 * 8 * 5
    for half in (turns[:40], turns[40:]):
        assert len({turn.block for turn in half}) == 1
        for stage in range(5):
            its = half[8 * stage : 8 * stage + 8]
            assert sorted(turn.thread for turn in its) == list(range(8))
            stopped = ("returned", 0) if stage == 4 else ("at a barrier", 9 if stage else 6)
            for n, turn in enumerate(its):
                assert turn.stopped == stopped[0] and (stage == 4 or turn.line == stopped[1])
                ran = {one.thread for one in its[:n]}
                assert turn.states == tuple(stopped[0] if t in ran else "ready" for t in range(8))
        block = half[0].block
        assert half[7].memory[:8] == tuple((x + block).tolist())
        assert sum(not math.isnan(word) for word in half[2].memory) == 3
        assert half[-1].memory[0] == out[block]
    if order == "down":
        assert turns[0].thread == 7 and turns[0].block == 1


@compiles
def test_a_player_of_turns_shows_what_each_thread_does_and_who_wrote_what():
    turns = fibres.record(SUM, "run_total", torch.zeros(1), torch.arange(1.0, 9), 1)
    threads, memory = Player.of_fibres(turns).panels
    final, steps = list(threads.states())[-1], list(memory.states())
    for n, turn in enumerate(turns):
        for thread, state in enumerate(turn.states):
            kind = final[thread * 40 + n].kind
            assert kind == ("runs" if thread == turn.thread else state.replace("ready", ""))
        words = [cell.says.split(" by ")[0] for cell in steps[n] if cell.owners]
        assert words == [f"{word:g}" for word in turn.memory if not math.isnan(word)]
    assert [cell.says for cell in steps[9]][:3] == ["6 by 0", "8 by 1", "3 by 2"]


@compiles
def test_more_turns_than_are_kept_are_refused_in_words():
    with pytest.raises(ValueError, match=r"4,800 turns; at most 4,096 are kept"):
        fibres.record(SUM, "run_total", torch.zeros(120), torch.zeros(8), 120)


def test_style_and_script_are_stored_without_comments_and_nothing_else_is_lost():
    assert STYLE.startswith(".spindle-player{max-width:100%}") and "/*" not in STYLE + SCRIPT
    assert STYLE.count("{") == STYLE.count("}") and SCRIPT.startswith("(id, d) =>")


# --- the cover ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cover() -> ModuleType:
    return module_of(ROOT / "book/cover.py")


@pytest.fixture(scope="module")
def four(cover):
    return cover.runs()


@pytest.fixture(scope="module")
def cover_html(cover) -> str:
    return cover.cover_html()


def test_the_covers_run_in_blocks_is_that_of_an_engine_with_a_model(four):
    tok, shape = Tokenizer("tiny"), SHAPE | {"max_position_embeddings": 256}
    model = random_model(ModelConfig.from_dict(shape), 0, torch.float64)
    llm = LLM(model, num_blocks=25, block_size=8, prefix_cache=False, trace=1)
    for one in CAST:
        params = SamplingParams(max_tokens=one.max_tokens, temperature=0, ignore_eos=True)
        llm.add([1] * len(tok.encode(one.prompt)), params, one.name)
    run = list(steps(llm))
    assert [step.ran for step in run] == [step.ran for step in four["paged", "continuous"]]
    assert [step.ended for step in run] == [step.ended for step in four["paged", "continuous"]]


def test_in_all_four_runs_everybody_gets_what_they_want_and_no_block_is_anybody_elses(four):
    assert set(four) == {(m, p) for m in ("contiguous", "paged") for p in ("static", "continuous")}
    for (memory, policy), run in four.items():
        batches = [set(step.ran) for step in run]
        for before, now in pairwise(batches):  # a static batch is left as it came
            assert policy == "continuous" or now == before or not now & before
        gained = Counter(n for step in run for n, r in step.ran.items() if r.kind != "filler")
        assert gained == {one.name: one.max_tokens for one in CAST}
        assert sorted(n for step in run for n in step.ended) == [one.name for one in CAST]
        fillers = sum(r.kind == "filler" for step in run for r in step.ran.values())
        assert (fillers > 0) == (policy == "static")
        for step in run:
            held = [block for its in step.held.values() for block in its.blocks]
            assert len(held) == len(set(held)) and set(held) <= set(range(25))
            assert set(step.ran) == set(step.held) and not set(step.ran) & set(step.waiting)
            for its in step.held.values():
                first, count = its.blocks[0], len(its.blocks)
                in_a_row = list(its.blocks) == list(range(first, first + count))
                assert memory == "paged" or in_a_row
                assert its.stored <= 8 * count
        for name in gained:  # what is promised in one piece is held from the first step to the last
            sizes = {len(step.held[name].blocks) for step in run if name in step.held}
            assert memory == "paged" or len(sizes) == 1


def test_the_cover_is_whole_without_scripts_small_and_the_same_each_time(cover, cover_html, four):
    html = cover_html
    assert html == cover.cover_html()
    assert len(html) < 150_000 and "\n\n" not in html
    page = Page(html)
    rows = re.findall(r'<tr data-run="(\w+) (\w+)">(.*?)</tr>', html)
    assert len(rows) == 4 and html.count("<details") == 1  # who was last is not told unasked
    for memory, policy, cells in rows:
        its, run = re.findall(r"<td>(.*?)</td>", cells), four[memory, policy]
        peak = max(sum(len(h.blocks) for h in step.held.values()) for step in run)
        (last,) = run[-1].ended
        idle = 8 * len(run) - 396
        assert its[2:5] == [f"{len(run)}", last, f"{peak}"] and its[6] == f"{idle:,}"
    assert re.match(r"\s*All four runs in figures, and who was last", page.shown)  # nothing else
    assert page.tags.count("input") == page.tags.count("button") == 0  # nothing that does not work
    assert len(set(page.ids)) == len(page.ids)
    assert [len(four[key]) for key in four] == [320, 304, 320, 197]


# --- the script, in a browser ---------------------------------------------------------------------

DRIVER = """
const out = {};
const titles = root => [...root.querySelectorAll(".spindle-panel")].map(
  panel => [...panel.querySelectorAll(".spindle-grid > div")].map(cell => cell.title));
const key = (on, name) => on.dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
addEventListener("load", () => setTimeout(async () => {
  try {
    for (const root of document.querySelectorAll("main > .spindle-player")) {
      const at = () => root.querySelector("input").value, seen = [];
      const [back, play, next] = root.querySelectorAll("button"), stage = root.querySelector("div");
      const says = root.querySelector(".spindle-says"), slider = root.querySelector("input");
      const shot = () => seen.push([+at(), says.textContent, titles(root)]);
      shot();
      while (!next.disabled) { key(stage, "ArrowRight"); shot(); }
      const one = out[root.id] = {seen};
      one.ends = [back.disabled, next.disabled];
      key(stage, "Home"); one.home = +at(); one.atHome = [back.disabled, next.disabled];
      key(stage, "End"); one.end = +at();
      key(stage, "ArrowLeft"); one.left = +at();
      key(stage, "ArrowLeft"); key(stage, "Home"); key(stage, "ArrowLeft"); one.stop = +at();
      one.again = titles(root);
      next.click(); one.next = +at(); back.click(); one.back = +at();
      slider.value = 1; slider.dispatchEvent(new Event("input")); one.slid = titles(root);
      one.live = [says.ariaLive]; one.label = [play.ariaLabel, next.ariaLabel, slider.ariaLabel];
      key(stage, " "); one.live.push(says.ariaLive); one.label.push(play.ariaLabel);
      key(play, " ");
      one.live.push(says.ariaLive);
      await new Promise(done => setTimeout(done, 60000));
      one.played = [+at(), says.ariaLive, play.ariaLabel];
      play.click(); one.replay = +at(); next.click(); one.paused = [+at(), play.ariaLabel];
      one.role = [root.getAttribute("role"), stage.tabIndex, !root.querySelector("details").open];
      one.ready = document.querySelectorAll("#" + root.id + " .spindle-controls").length;
    }
    const cover = document.querySelector("#cover-player");
    const radios = cover.querySelectorAll("input[type=radio]");
    const now = () => {
      const open = [...cover.querySelectorAll("div[data-run]")].filter(one => !one.hidden);
      const rows = [...cover.querySelectorAll("tr[aria-current]")].map(one => one.dataset.run);
      const steps = open.map(one => one.querySelector(".spindle-controls span").textContent);
      return [...open.map(one => one.dataset.run), ...rows, ...steps];
    };
    out.cover = [now()];
    cover.querySelector(".spindle-player").spindle.show(250);
    for (const n of [3, 1, 2, 0]) { radios[n].click(); out.cover.push(now()); }
    const frame = document.querySelector("iframe").contentDocument;
    out.wide = [frame.documentElement.scrollWidth, frame.documentElement.clientWidth];
  } catch (error) { out.error = String(error) + error.stack; }
  const pre = document.createElement("pre");
  pre.id = "out";
  pre.textContent = JSON.stringify(out);
  document.body.append(pre);
}));
"""


def browser() -> str:
    """A Chromium, or the test is skipped, and says so."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here: the player's script was not run")


@pytest.fixture(scope="module")
def players() -> list[Player]:
    odd = Player([(ODD, [(ODD, 1), ("r0", 1, ODD), None, None]), ("then", [None] * 4)], 1, ODD)
    llm = LLM(SMALL, num_blocks=9, block_size=P, trace=1)
    for n, one in enumerate(CAST[:3]):
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        llm.add([1, 2, 3, 4, 5, n], params, one.name)
    rounds = [(["a", "b"], ["a", "!"]), ([], ["c"])]
    return [
        Player(SHARED, 4, "Sharing"),
        odd,
        Player([(f"{n}", [("r0", n)] * 20) for n in range(3)], 2, columns=20, lines=["wide"]),
        Player.of_llm(llm),
        Player.of_rounds(rounds, "Rounds"),
    ]


@pytest.fixture(scope="module")
def driven(players, cover_html, tmp_path_factory) -> dict:
    """What a browser made of the players; all of them on one page, the first one twice."""
    command, folder = browser(), tmp_path_factory.mktemp("page")
    bodies = [player._repr_html_() for player in players]
    inner = '<meta name="viewport" content="width=device-width">' + bodies[3] + cover_html
    frame = f'<iframe width="390" height="800" srcdoc="{escape(inner, quote=True)}"></iframe>'
    page = f"<!doctype html><meta charset=utf-8><main>{''.join(bodies)}</main>{cover_html}"
    page += f"{frame}<aside>{bodies[0]}</aside><script>{DRIVER}</script>"
    (folder / "page.html").write_text(page, encoding="utf-8")
    how = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    how += ["--virtual-time-budget=600000", "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run([command, *how], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    out = json.loads(unescape(found[1]))
    assert "error" not in out, out
    return out


def titles(player: Player) -> list[list[list[str]]]:
    """By step and panel what each cell says, in the words of the text."""
    panels = [
        [[panel._say(n, cell) for n, cell in enumerate(state)] for state in panel.states()]
        for panel in player.panels
    ]
    return [list(one) for one in zip(*panels, strict=True)]


def test_the_script_shows_each_step_as_it_is_whichever_way_one_comes_to_it(players, driven):
    for player in players:
        out, steps = driven[player.name], titles(player)
        assert out["seen"] == [
            [n, caption, cells]
            for n, (caption, cells) in enumerate(zip(player.captions, steps, strict=True))
        ]
        assert out["again"] == steps[0] and out["slid"] == steps[1]


def test_keys_and_buttons_move_and_stop_at_the_ends(players, driven):
    for player in players:
        out, last = driven[player.name], len(player.captions) - 1
        assert out["ends"] == [False, True] and out["atHome"] == [True, False]
        assert (out["home"], out["end"], out["left"], out["stop"]) == (0, last, last - 1, 0)
        assert (out["next"], out["back"]) == (1, 0)


def test_it_plays_to_the_end_and_reads_nothing_out_meanwhile(players, driven):
    for player in players:
        out, last = driven[player.name], len(player.captions) - 1
        assert out["live"] == ["polite", "off", "off"]  # a button's own space plays nothing
        assert out["label"] == ["play", "next step", "step", "pause"]
        assert out["played"] == [last, "polite", "play"]
        assert out["replay"] == 0 and out["paused"] == [1, "play"]


def test_roles_and_one_set_of_controls_even_where_a_player_is_there_twice(players, driven):
    for n, player in enumerate(players):
        assert driven[player.name]["role"] == ["group", 0, True]
        assert driven[player.name]["ready"] == 2 - (n > 0)


def test_the_covers_toggles_choose_a_run_and_keep_the_step(driven):
    names = ["contiguous static", "contiguous continuous", "paged continuous", "paged static"]
    names.append("contiguous static")
    counts = ["101 of 320", "251 of 304", "197 of 197", "197 of 320", "197 of 320"]
    assert driven["cover"] == [[n, n, c] for n, c in zip(names, counts, strict=True)]


def test_no_page_scrolls_sideways_on_a_phone(driven):
    needed, there = driven["wide"]
    assert needed <= there <= 390
