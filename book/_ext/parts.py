"""The table of contents: the chapters in parts, and the pages around them.

It is made from the files that exist, so a chapter that is written later takes its place by itself.
A notebook that no part claims ends the build.
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

PLACEHOLDER = "<!-- parts -->"
ANSWERS = "<!-- answers -->"
MADE = ("book/index", "book/answers", "book/api")
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (  # caption, pages or beginnings of chapters
    ("", ("reading", "00")),
    ("One sequence", ("01", "02", "03", "04", "05", "06")),
    ("Memory", ("07", "08")),
    ("Many users", ("09", "10", "11")),
    ("One user, fast", ("12", "13", "14")),
    ("Guessing ahead", ("15", "16", "17")),
    ("The whole", ("18",)),
    ("Appendices", ("A", "B", "C", "answers")),
    ("What holds it together", ("architecture", "proven", "museum", "figures")),
    ("To look things up", ("using", "notation", "glossary", "api", "references", "changelog")),
)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the parts where the cover, and the answers where their page has the placeholder."""
    root = Path(app.srcdir)
    if PLACEHOLDER in source[0]:
        source[0] = source[0].replace(PLACEHOLDER, parts(root))
    if ANSWERS in source[0]:
        answers = sorted(path.stem for path in root.glob("notebooks/answers/*.ipynb"))
        names = [f"../notebooks/answers/{name}" for name in answers]
        source[0] = source[0].replace(ANSWERS, toctree("", names, "maxdepth: 1"))


def always_read(app: Sphinx, *changes: object) -> list[str]:
    """The pages whose content follows from which files, names and figures there are."""
    return [name for name in MADE if name in app.env.found_docs]


def parts(root: Path) -> str:
    """A hidden toctree for each part; SphinxError names the chapters that are in none."""
    chapters = sorted(path.stem for path in root.glob("notebooks/*.ipynb"))
    trees, placed = [], set()
    for caption, entries in PARTS:
        found = [page for entry in entries for page in pages(root, entry, chapters)]
        placed |= {name.rpartition("/")[2] for name in found}
        trees += [toctree(caption, found, "hidden:")] * bool(found)
    if lost := [name for name in chapters if name not in placed]:
        raise SphinxError(f"in no part of the book (book/_ext/parts.py): {', '.join(lost)}")
    return "\n".join(trees)


def pages(root: Path, entry: str, chapters: list[str]) -> list[str]:
    """The chapters that begin with `entry`, or the page of that name; neither may be there yet."""
    if (root / f"book/{entry}.md").exists():
        return [entry]
    return [f"../notebooks/{name}" for name in chapters if name.startswith(f"{entry}_")]


def toctree(caption: str, names: list[str], option: str) -> str:
    """A toctree in Markdown."""
    lines = ["```{toctree}", *[f":caption: {caption}"] * bool(caption), f":{option}", "", *names]
    return "\n".join([*lines, "```", ""])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-get-outdated", always_read)
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
