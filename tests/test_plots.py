"""The figures: titles, labels and numbers are asserted, since a stored picture is not compared."""

import subprocess
import sys

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import Rectangle

from spindle import plots
from spindle.lesson import CAST

MACHINE = plots.Machine("a machine", 0.5e9, 25e9, 0.25e9, 125e9)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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


def test_the_same_numbers_give_the_same_picture(tmp_path):
    for name in ("one", "two"):
        plots.rows_grid(3, 4, "A claim").savefig(tmp_path / name, format="png")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_lesson_does_not_import_matplotlib_or_ipython():
    code = "import spindle.lesson, sys; print({'matplotlib', 'IPython'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
