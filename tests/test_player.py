"""The step-through player: what it stores, and what a reader gets whose scripts are off."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle import plots
from spindle.errors import RequestError
from spindle.lesson import CAST
from spindle.player import Player

SHARED = [
    ("r0 comes in", [("r0", 4), ("r0", 1), None, None]),
    ("r1 shares a block", [(("r0", "r1"), 4), ("r0", 1), ("r1", 1), None]),
    ("r0 goes", [("r1", 4), None, ("r1", 1), None]),
]


class Page(HTMLParser):
    """The elements of a page, and what a reader without scripts and styles is shown."""

    VOID = ("br",)

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


@pytest.mark.parametrize(("steps", "cells", "most"), [(10, 16, 7_000), (40, 64, 14_000)])
def test_it_is_small(steps, cells, most):
    assert len(Player(run_of(steps, cells), 4)._repr_html_()) <= most


def test_a_long_run_stores_changes_alone():
    def size(steps: int) -> int:
        return len(Player([("same", [("r0", 1)] * 64)] * steps, 4)._data())

    assert size(40) - size(20) == 20 * len("[],")


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

    rules = runpy.run_path(str(Path(__file__).parent.parent / "notebooks" / "rules.py"))
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
    ):
        with pytest.raises(RequestError, match=words):
            Player(snapshots, **options)


def test_plots_has_it():
    assert plots.Player is Player
