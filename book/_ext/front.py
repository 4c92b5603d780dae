"""What is made for the cover at build time: the player, the bounds, a riddle, a calculator.

Each takes the place of a comment in index.md, as HTML that is complete without scripts.
"""

import json
import re
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

# Measured with torch 2.13.0 and transformers 5.24 on two cores of an x86-64 server with AVX-512:
# SmolLM2-135M-Instruct in float32, one greedy stream.
MACHINE = {
    "name": "two cores, SmolLM2-135M, float32",
    "weights_bytes": 0.538e9,
    "memory_bytes_per_s": 29e9,
    "flops_per_token": 0.269e9,
    "flops_per_s": 140e9,
}
HUGGING_FACE_TOK_S = 7.9

CHAPTER = "notebooks/05_bug_inferred_positions"
FAULT = "museum.html#positions-that-are-inferred"


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put each piece where the cover has its comment."""
    source[0] = source[0].replace("<!-- launch -->", launching(app))
    pieces: dict[str, Callable[[], str]] = {
        "<!-- player -->": lambda: import_module("cover").cover_html(),
        "<!-- bounds -->": bounds,
        "<!-- riddle -->": lambda: riddle(Path(app.srcdir) / f"{CHAPTER}.ipynb"),
        "<!-- calculator -->": lambda: import_module("_ext.calculator").html(),
    }
    for comment, make in pieces.items():
        if docname == app.config.root_doc and comment in source[0]:
            source[0] = source[0].replace(comment, f"{'`' * 7}{{raw}} html\n{make()}\n{'`' * 7}")


def launching(app: Sphinx) -> str:
    """What a reader of a hosted notebook has to know, where the buttons for that are."""
    if repository := app.config.html_theme_options.get("repository_url"):
        words = f"on Colab, where `%pip install git+{repository}` comes first."
        return f"A chapter's rocket opens it on Binder, or {words}"
    return ""


# --- which answer is broken? --------------------------------------------------------------------


def riddle(path: Path) -> str:
    """Two answers from the chapter at `path`, one by an engine with a fault, and what to choose."""
    answers, broken = told(path)
    cards = "\n".join(choice(name, text, broken) for name, text in answers.items())
    return f'<div class="riddle">\n{cards}\n</div>'


def told(path: Path) -> tuple[dict[str, str], str]:
    """The two answers by name, and which of them is broken.

    The answers stand in the chapter's opening; the fact is what its cells printed.
    """
    cells = json.loads(path.read_text("utf-8"))["cells"]
    opening = "".join(cells[0]["source"])
    answers = re.findall(r"^\*\*(\w)\*\* wrote:\n\n((?:>.*\n)+)", opening, re.MULTILINE)
    printed = "".join(
        "".join(output.get("text", [])) for cell in cells for output in cell.get("outputs", [])
    )
    fact = re.search(r"^fact ([AB])\n", printed, re.MULTILINE)
    assert fact is not None, f"{path.name} prints which answer is broken"
    plain = {name: re.sub(r"^> ?\\?", "", text, flags=re.M).strip() for name, text in answers}
    return plain, fact[1]


def choice(name: str, text: str, broken: str) -> str:
    """One answer and what comes of choosing it: the fault's place in the museum, either way."""
    if name == broken:
        verdict = "Yes. It had hardly read its prompt: how much of it, the chapter asks."
    else:
        verdict = (
            f"No, {name} is what these weights say. The good English comes from a broken cache."
        )
    return f"""<figure>
<figcaption>{name} wrote</figcaption>
<blockquote>{escape(text)}</blockquote>
<details><summary>{name} is broken</summary>
<p>{verdict} <a href="{FAULT}">The fault, in the museum</a>, or
<a href="../{CHAPTER}.html">the chapter that finds it</a>.</p></details>
</figure>"""


# --- the figure ---------------------------------------------------------------------------------

TITLE = "One stream gets 8 of 54 possible passes"


def bounds() -> str:
    """8, 54 and 520 in large figures, and the drawing of them: one for a page, one for a phone."""
    from spindle.plots import Machine

    machine = Machine(**MACHINE)
    steps = {
        "tokens a second, by Hugging Face <code>generate</code>": HUGGING_FACE_TOK_S,
        "passes a second, allowed by memory": machine.memory_bound(1),
        "tokens a second, allowed by arithmetic": round(machine.compute_bound(), -1),
    }
    listed = "".join(f"<div><dt>{dt}</dt><dd>{dd:.0f}</dd></div>\n" for dt, dd in steps.items())
    alt = f"{TITLE}. Tokens a second against rows in a pass: both bounds, the knee between them at"
    alt += f" {machine.knee():.0f} rows, and one dot far below them."
    return f"""<dl class="bounds">
{listed}</dl>
<picture>
<source media="(max-width: 600px)" srcset="../_static/cover-narrow.png" width="920" height="960">
<img class="figure-card" src="../_static/cover.png" width="1600" height="1000" alt="{alt}">
</picture>"""


def draw(app: Sphinx, error: Exception | None) -> None:
    """Draw the one question from its figures, among the static files of this build."""
    cover = Path(app.srcdir) / f"{app.config.root_doc}.md"
    if error is not None or app.builder.format != "html" or "<!-- bounds" not in cover.read_text():
        return
    import matplotlib

    matplotlib.use("agg")
    from spindle import plots

    theirs = [("Hugging Face", 1, HUGGING_FACE_TOK_S)]
    fig = plots.roofline_dots([], plots.Machine(**MACHINE), TITLE, recorded=theirs)
    fig.savefig(Path(app.outdir) / "_static/cover.png", dpi=200)
    fig.set_size_inches(4.6, 4.8)
    (ax,) = fig.axes
    for note in ax.texts:
        note.set_fontsize(8)
        if note.get_text() == MACHINE["name"]:
            note.set_visible(False)
            ax.set_xlabel(f"rows in a pass; {note.get_text()}", fontsize=9)
        if note.get_text().startswith("memory:"):
            note.set_text(note.get_text().replace("passes a second", "a second"))
    fig.suptitle(TITLE.replace(" of ", " of\n"), x=0.02, ha="left", fontsize=13, fontweight="bold")
    fig.savefig(Path(app.outdir) / "_static/cover-narrow.png", dpi=200)
    plots.plt.close(fig)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill)
    app.connect("build-finished", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
