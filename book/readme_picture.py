"""Draw the README's picture: the book's one figure, with what was measured on one machine.

    python book/readme_picture.py

writes book/_static/readme.svg. The figures are those of book/figures.md, and a test compares them.
"""

import io
import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib.figure import Figure

from spindle import plots

FILE = Path(__file__).parent / "_static/readme.svg"
MACHINE = plots.Machine(
    name="two cores, SmolLM2-135M in float32",
    weights_bytes=538e6,
    memory_bytes_per_s=31.66e9,  # 58.8 passes a second
    flops_per_token=0.27e9,
    flops_per_s=287e9,
)
THEIRS = [("transformers, one stream", 1, 30.1), ("transformers, eight", 8, 119.9)]
OURS = [
    ("one stream", 1, 50.0),
    ("one stream, quoting, five guesses", 6, 220.0),
    ("eight streams", 8, 290.8),
]


def draw() -> Figure:
    """Both bounds, then the dots; it is a white card, for a white page and for a dark one."""
    claim = f"A pass that one user pays for can carry {MACHINE.knee():.0f} rows"
    return plots.roofline_dots(OURS, MACHINE, claim, recorded=THEIRS)


def svg() -> str:
    """The figure as text that is the same whenever this version of matplotlib draws it."""
    out, same = io.StringIO(), {"svg.hashsalt": "spindle", "svg.fonttype": "path"}
    with matplotlib.rc_context(same):
        draw().savefig(out, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)


if __name__ == "__main__":
    FILE.write_text(svg(), encoding="utf-8")
