"""The figures: titles, labels and numbers are asserted, since a stored picture is not compared."""

import math
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import Rectangle

from spindle import LLM, SamplingParams, plots
from spindle.lesson import CAST
from spindle.serve.scheduler import Chunk

MACHINE = plots.Machine("a machine", 0.5e9, 25e9, 0.25e9, 125e9)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def tiny_llm_trace():
    """Two seats, three requests, the third admitted when the second has ended."""
    llm = LLM("tiny", max_seqs=2, trace=99)
    for name, tokens in (("r0", 5), ("r1", 3), ("r2", 2)):
        llm.add([9, 8, 7], SamplingParams(max_tokens=tokens, ignore_eos=True), name)
    while llm.has_unfinished:
        llm.step()
    return list(llm.trace)


def said(fig) -> list[str]:
    """Every text on the figure."""
    return [text.get_text() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]


def test_the_bounds_are_bytes_and_arithmetic_and_meet_at_the_knee():
    assert MACHINE.memory_bound(1) == 50.0
    assert MACHINE.memory_bound(8) == 400.0
    assert MACHINE.compute_bound() == 500.0
    assert MACHINE.knee() == 10.0
    assert MACHINE.memory_bound(MACHINE.knee()) == MACHINE.compute_bound()


def test_the_map_draws_the_lower_of_both_bounds_before_any_dot():
    fig = plots.roofline_dots([("eager", 1, 15.0)], MACHINE, "Reading bounds one row")
    lines = fig.axes[0].lines
    roof = next(line for line in lines if line.get_label() == "bound")
    rows, speeds = roof.get_data()
    assert [min(50 * row, 500.0) for row in rows] == pytest.approx(list(speeds))
    labels = [line.get_label() for line in lines]
    assert labels.index("bound") < labels.index("eager")


def test_the_map_shows_the_dots_where_they_were_measured_and_recorded_ones_grey():
    fig = plots.roofline_dots(
        [("eager", 1, 15.0), ("batched", 8, 120.0)], MACHINE, "A claim", [("theirs", 8, 174.0)]
    )
    dots = {line.get_label(): line for line in fig.axes[0].lines}
    assert {name: [*map(float, dots[name].get_xydata()[0])] for name in ("eager", "batched")} == {
        "eager": [1.0, 15.0],
        "batched": [8.0, 120.0],
    }
    assert dots["theirs"].get_color() == plots.COLOURS["recorded"]
    assert dots["eager"].get_color() == plots.COLOURS["measured"]


def test_a_label_of_the_map_stands_where_nothing_is_in_its_way():
    """One on the roof, one beside it, one at the edge: beside them there is too little room."""
    knee = MACHINE.knee()
    dots = [("on the roof", knee / 2, MACHINE.memory_bound(knee / 2)), ("at the edge", 60, 20.0)]
    dots += [("beside it", knee / 1.5, 1.1 * dots[0][2]), ("above", 1, 3 * MACHINE.memory_bound(1))]
    fig = plots.roofline_dots(dots, MACHINE, "A claim")
    ax = fig.axes[0]
    fig.draw_without_rendering()
    names = [text for text in ax.texts if text.get_text().startswith(tuple(d[0] for d in dots))]
    assert len(names) == 4
    boxes = [text.get_window_extent() for text in ax.texts]
    marks = [line.get_window_extent() for line in ax.lines if line.get_marker() == "o"]
    for name in names:
        box = name.get_window_extent()
        assert sum(box.overlaps(other) for other in boxes) == 1  # its own
        assert not any(box.overlaps(mark) for mark in marks)
        assert ax.get_window_extent().x0 <= box.x0 < box.x1 <= ax.get_window_extent().x1
        roof = ax.lines[2]
        assert roof.get_label() == "bound"
        assert not roof.get_path().transformed(roof.get_transform()).intersects_bbox(box, False)


def test_the_map_says_its_claim_axes_bounds_and_dots_in_words():
    fig = plots.roofline_dots([("eager", 1, 15.0)], MACHINE, "Reading bounds one row")
    assert {
        "Reading bounds one row",
        "rows in a pass",
        "tokens a second",
        "memory: 50 passes a second",
        "arithmetic: 500 tokens a second",
        "knee: 10 rows",
        "eager: 15",
        "a machine",
    } <= set(said(fig))
    assert fig.axes[0].get_legend() is None


def test_the_map_may_have_another_unit_than_the_second():
    ticks = plots.Machine("on paper", 1, 1, 1, 10)
    words = set(said(plots.roofline_dots([("a", 1, 1.0)], ticks, "A claim", unit="tick")))
    assert {"tokens a tick", "memory: 1 pass a tick", "arithmetic: 10 tokens a tick"} <= words
    assert not any("second" in text for text in words)


def test_no_dot_falls_off_the_map():
    fig = plots.roofline_dots([("slow", 1, 0.5), ("fast", 64, 2_000.0)], MACHINE, "A claim")
    low, high = fig.axes[0].get_ylim()
    assert low < 0.5 and high > 2_000.0


def test_panels_stand_under_one_claim():
    fig, axes = plots.panels(8, 4, "Two ways", 2, sharey=True)
    assert "Two ways" in said(fig) and len(axes) == 2
    assert axes[0].get_shared_y_axes().joined(axes[0], axes[1])


def test_rows_grid_counts_what_chapter_04_counts():
    fig = plots.rows_grid(16, 64, "The same rows again")
    assert {"no cache: 3,040 rows", "a cache: 79 rows", "The same rows again"} <= set(said(fig))


@pytest.mark.parametrize("panel", [0, 1])
def test_rows_grid_draws_as_many_rows_as_it_says(panel):
    axes = plots.rows_grid(3, 4, "A claim").axes[panel]
    bars = axes.containers[1]  # the first holds the empty places
    spans = [(bar.get_x(), bar.get_width()) for bar in bars]
    want = [[(0, 3), (0, 4), (0, 5), (0, 6)], [(0, 3), (3, 1), (4, 1), (5, 1)]]
    assert spans == want[panel]
    assert f"{sum(width for _, width in spans):.0f} rows" in axes.get_title(loc="left")


def test_token_strip_shows_every_piece_over_its_id_in_its_colour():
    colours = [one.colour for one in CAST[:3]]
    fig = plots.token_strip(["The", " cap", "\n"], [464, 3139, 198], colours)
    assert said(fig)[:6] == ["The", "464", "·cap", "3139", "↵", "198"]
    boxes = [box for box in fig.axes[0].patches if isinstance(box, Rectangle)]
    assert [matplotlib.colors.to_hex(box.get_facecolor()).upper() for box in boxes] == colours


def test_the_map_draws_a_dot_with_an_empty_label_without_words():
    fig = plots.roofline_dots([("one", 1, 15.0), ("", 2, 29.0)], MACHINE, "A claim")
    silent = [line for line in fig.axes[0].lines if list(line.get_xdata()) == [2]]
    assert len(silent) == 1 and silent[0].get_color() == plots.COLOURS["measured"]
    assert "one: 15" in said(fig) and not [text for text in said(fig) if "29" in text]


def test_attention_grid_fills_what_may_be_seen():
    mask = torch.ones(2, 3).tril(1).bool()
    fig = plots.attention_grid(mask, ["a", "b"], ["x", "y", "z"], "Two queries, three keys")
    filled = fig.axes[0].patches[1::2]  # every second square is the background
    assert [box.get_alpha() for box in filled] == mask.flatten().float().tolist()
    assert {"x", "y", "z", "a", "b", "query", "key", "Two queries, three keys"} <= set(said(fig))
    assert not [text for text in said(fig) if text.startswith((".", "1"))]


def test_attention_grid_writes_weights_into_their_squares():
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    fig = plots.attention_grid(weights, ["a", "b"], ["x", "y"], "A claim")
    assert [text for text in said(fig) if text[-1].isdigit()] == ["1.00", ".25", ".75"]


def test_a_figure_says_in_words_what_it_shows():
    fig, ax = plots.figure(
        8, 3, "Only 3 of them, on a line that is so long that it is broken.", "step"
    )
    ax.set(ylabel="slots")
    ax.text(0, 0, "Ann\nwaits"), ax.text(1, 1, "12"), ax.text(2, 2, "Ann waits")
    claim = "Only 3 of them, on a line that is so long that it is broken"
    assert repr(fig) == f"<Figure: {claim}. Across: step. Up: slots. Labels: Ann waits.>"
    timeline = plots.timeline(
        {"static": [("A", 0, "decode")], "continuous": [("B", 1, "prefill")]}, "Two"
    )
    words = "Two. static. continuous. Across: step. Labels: A. Labels: B. Key: prompt; one token."
    assert repr(timeline) == f"<Figure: {words}>"
    falls = plots.waterfall([("eager", 3.0), ("graphs", 2.0)], "now", ("bound", 1.0), "Falls", "ms")
    assert repr(falls) == "<Figure: Falls. Across: ms. Lines: eager; graphs; now; bound.>"
    strip = plots.token_strip([f"t{n}" for n in range(15)], range(15))
    assert repr(strip).endswith("; t11 and 3 more.>")


def test_the_same_numbers_give_the_same_picture(tmp_path):
    for name in ("one", "two"):
        plots.rows_grid(3, 4, "A claim").savefig(tmp_path / name, format="png")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_lesson_does_not_import_matplotlib_or_ipython():
    code = "import spindle.lesson, sys; print({'matplotlib', 'IPython'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


# --- timelines ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    request: object
    sample: int = 0


def answer(name: str, prompt: int, sample: int = 0) -> Answer:
    return Answer(SimpleNamespace(id=name, prompt=[0] * prompt), sample)


def plan(*chunks) -> SimpleNamespace:
    """(sequence, start, count) each, and "filler" as a fourth where it is one."""
    return SimpleNamespace(
        chunks=[
            Chunk(of, start, count, samples=True, filler=bool(more))
            for of, start, count, *more in chunks
        ]
    )


def bars(ax) -> list[tuple[int, int, int, str]]:
    """(line, first step, steps, kind) of every bar, from the left."""
    drawn = [box for box in ax.patches if box.get_label() in plots.KINDS]
    found = [
        (round(b.get_y() + 0.43), round(b.get_x()), math.ceil(b.get_width()), b.get_label())
        for b in drawn
    ]
    return sorted(found, key=lambda bar: (bar[1], bar[0]))


def test_trace_cells_tell_prompts_from_decodes_fillers_and_what_is_computed_again():
    r0, r1, other = answer("r0", 4), answer("r1", 1), answer("r1", 1, sample=1)
    trace = [
        plan((r0, 0, 3), (r1, 0, 1)),
        plan((r0, 3, 1), (r1, 1, 1), (other, 1, 1)),
        plan((r0, 4, 1), (r1, 1, 1, "filler")),
        plan((r0, 0, 6)),  # after a preemption
    ]
    assert plots.trace_cells(trace) == [
        ("r0", 0, "prefill", 3),
        ("r1", 0, "prefill", 1),
        ("r0", 1, "prefill", 1),  # the prompt's last token, by itself
        ("r1", 1, "decode", 1),
        ("r1.1", 1, "decode", 1),
        ("r0", 2, "decode", 1),
        ("r1", 2, "filler", 1),
        ("r0", 3, "recompute", 6),
    ]


def test_who_goes_on_where_drafts_were_rejected_computes_nothing_again():
    r0 = answer("r0", 4)
    drafts = SimpleNamespace(chunks=[Chunk(r0, 4, 3, samples=True, drafts=2)])
    cells = plots.trace_cells([plan((r0, 0, 4)), drafts, plan((r0, 5, 1))])
    assert [(cell.kind, cell.rows) for cell in cells] == [
        ("prefill", 4),
        ("decode", 3),
        ("decode", 1),
    ]


def test_trace_cells_of_a_live_engine_have_a_row_for_each_row_that_was_computed(tiny_llm_trace):
    trace = tiny_llm_trace
    cells = plots.trace_cells(trace)
    assert sum(cell.rows for cell in cells) == sum(c.count for p in trace for c in p.chunks)
    assert [c.step for c in cells if c.name == "r1"] == [0, 1, 2]
    assert [c.kind for c in cells if c.name == "r0"] == ["prefill", *["decode"] * 4]
    assert {c.name: c.step for c in reversed(cells)} == {"r0": 0, "r1": 0, "r2": 3}


def test_a_timeline_gives_the_lowest_free_seat_and_leaves_the_others_pale():
    cells = [("a", s, "decode") for s in range(4)]
    cells += [("b", s, "decode") for s in range(2)]
    cells += [("c", s, "filler") for s in (2, 3)]  # in the seat of b
    cells += [("d", 4, "decode")]  # in the seat of a
    ax = plots.timeline({"one run": cells}, "A claim", steps=100).axes[0]
    assert bars(ax) == [
        (0, 0, 4, "decode"),
        (1, 0, 2, "decode"),
        (1, 2, 2, "filler"),
        (0, 4, 1, "decode"),
    ]
    pale = [box for box in ax.patches if box.get_label() not in plots.KINDS]
    assert [(box.get_x(), box.get_width()) for box in pale] == [(0, 100)] * 2


def test_who_comes_back_gets_the_old_seat_unless_another_sits_there():
    gone = [("a", 0, "decode"), ("b", 0, "decode"), ("a", 1, "decode"), ("c", 2, "decode")]
    for back, seat in ((3, 1), (2, 1)):
        cells = [*gone, ("a", 2, "decode"), ("b", back, "recompute")]
        if back == 2:
            cells.remove(("c", 2, "decode"))
        ax = plots.timeline({"": cells}, "A claim", steps=100).axes[0]
        assert (seat, back, 1, "recompute") in bars(ax)
    cells = [*gone, ("a", 2, "decode"), ("c", 3, "decode"), ("b", 3, "decode")]
    ax = plots.timeline({"": cells}, "A claim", steps=100).axes[0]
    assert (0, 3, 1, "decode") in bars(ax) and (1, 2, 2, "decode") in bars(ax)


def test_a_timeline_by_sequence_draws_a_thin_line_where_it_waits_in_between():
    cells = [("a", 0, "decode"), ("b", 0, "decode"), ("a", 1, "decode"), ("a", 4, "recompute")]
    ax = plots.timeline({"": [*cells, ("b", 1, "decode")]}, "A claim", lines="sequence").axes[0]
    assert [list(map(float, line.get_xdata())) for line in ax.lines] == [[2, 4]]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]


def test_timelines_share_their_steps_say_their_claim_and_keep_the_colours_of_the_cast():
    runs = {
        "static: 3 steps": [("r1", 0, "prefill", 5), ("r1", 1, "decode"), ("r1", 2, "filler")],
        "continuous: 1 step": [("r0", 0, "decode"), ("r1.1", 0, "decode")],
    }
    fig = plots.timeline(runs, "Who sits where")
    above, below = fig.axes
    assert above.get_shared_x_axes().joined(above, below) and above.get_xlim() == (0, 3)
    words = {"Who sits where", *runs, "step", "5", "prompt", "computed, wanted by nobody"}
    assert words <= set(said(fig)) and "computed again" not in said(fig)
    fills = {
        matplotlib.colors.to_hex(box.get_facecolor()).upper()
        for ax in fig.axes
        for box in ax.patches
        if box.get_label() in ("prefill", "decode")
    }
    assert fills == {CAST[0].colour, CAST[1].colour}


def test_token_times_draw_a_stroke_a_token_on_the_line_of_its_request():
    runs = {
        "whole": {"r0": [1.0, 2.0, 9.0], "page": [9.0]},
        "in chunks": {"r0": [1.0, 2.0, 4.0, 6.0], "page": [6.0]},
    }
    fig = plots.token_times(runs, "A claim", "tick", {"page": "#000000"}, window=(0, 10))
    for ax, its in zip(fig.axes, runs.values(), strict=True):
        strokes = [collection.get_segments() for collection in ax.collections]
        assert [[line[0][0] for line in lines] for lines in strokes] == list(its.values())
        assert [{round(line[:, 1].mean()) for line in lines} for lines in strokes] == [{0}, {1}]
        assert [text.get_text() for text in ax.get_yticklabels()] == ["r0", "page"]
        assert ax.get_xlim() == (0, 10)
        inks = [matplotlib.colors.to_hex(c.get_color()[0]).upper() for c in ax.collections]
        assert inks == [CAST[0].colour, "#000000"]
    assert {"A claim", "whole", "in chunks", "tick"} <= set(said(fig))


# --- what grows -----------------------------------------------------------------------------------

PANEL = plots.GrowthPanel(
    "Two lines",
    "size",
    "ms",
    [("upper", [1, 2], [3.0, 5.0], [1.0, 2.0]), ("lower", [1, 2], [1, 2], [1, 1])],
)


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (3, (2, 2)), (4, (2, 2))])
def test_growth_has_a_panel_a_kind_of_work_two_side_by_side(count, grid):
    fig = plots.growth([PANEL] * count, "A claim")
    assert fig.axes[0].get_gridspec().get_geometry() == grid
    assert [ax.axison for ax in fig.axes] == [True] * count + [False] * (grid[0] * grid[1] - count)
    words = {"A claim", "Two lines", "size", "ms", "upper", "lower"}
    assert words <= set(said(fig)) and said(fig).count("upper") == count


def test_growth_draws_what_is_predicted_dashed_and_first_on_axes_that_begin_at_0():
    ax = plots.growth([PANEL], "A claim").axes[0]
    drawn = [(line.get_linestyle(), [*map(float, line.get_ydata())]) for line in ax.lines]
    predicted, measured = [[1.0, 2.0], [1.0, 1.0]], [[3.0, 5.0], [1.0, 2.0]]
    assert drawn == [*(("--", y) for y in predicted), *(("-", y) for y in measured)]
    assert [line.get_color() for line in ax.lines[:2]] == [plots.COLOURS["predicted"]] * 2
    assert ax.lines[2].get_color() == plots.COLOURS["measured"] != ax.lines[3].get_color()
    assert ax.get_xlim()[0] == ax.get_ylim()[0] == 0 and ax.get_xlim()[1] > 2
    assert ax.get_xscale() == ax.get_yscale() == "linear"


# --- a fleet --------------------------------------------------------------------------------------


def test_a_fleet_has_three_panels_and_a_line_a_policy():
    points = {
        "one": [(1, 0.8, 90.0, 2.0), (10, 0.4, None, 15.0)],
        "other": [(1, 0.8, 90.0, 2.0), (10, 0.7, 95.0, 19.0)],
    }
    fig = plots.fleet(points, "A claim")
    drawn = [[[*map(float, line.get_ydata())] for line in ax.lines] for ax in fig.axes]
    assert drawn[0] == [[80, 40], [80, 70]] and drawn[2] == [[2, 1.5], [2, 1.9]]
    assert drawn[1][1] == [90, 95] and drawn[1][0][0] == 90 and math.isnan(drawn[1][0][1])
    assert all([*line.get_xdata()] == [1, 10] for ax in fig.axes for line in ax.lines)
    colours = [[line.get_color() for line in ax.lines] for ax in fig.axes]
    assert colours[0] == colours[1] == colours[2] and len(set(colours[0])) == 2
    assert all(ax.get_xscale() == "log" and ax.get_ylim()[0] == 0 for ax in fig.axes)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["one", "other"]
    assert {"A claim", "TTFT p99, ms", "replicas"} <= set(said(fig))
