"""Notebooks as pages: none that failed, a place and words for every figure, all in one file.

A figure is named by its chapter and its order in it: 07_paging.html#figure-2. Its words for those
who cannot see it are what it says of itself (spindle.plots), as the notebook stored it.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ARCHIVE = "spindle-notebooks.zip"
LINK = (
    '<a class="headerlink" href="#{0}" title="Link to this {1}" aria-label="Link to this {1}">#</a>'
)
READ_ME = """\
The notebooks of spindle. They import the package, which this file does not hold: they run in a copy
of the repository (`make lab` opens them there), or wherever `pip install -e PATH[notebooks]` has
installed it.
"""
SAID = "<Figure: "  # before the words of a figure of spindle.plots


def is_notebook(app: Sphinx, docname: str) -> bool:
    return Path(app.env.doc2path(docname)).suffix == ".ipynb"


def refuse_failed_cells(app: Sphinx, docname: str, source: list[str]) -> None:
    """End the build if a stored notebook holds an error: the page would pass it off as output."""
    if not is_notebook(app, docname):
        return
    for number, cell in enumerate(json.loads(source[0])["cells"], 1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                what = f"{output['ename']}: {output['evalue']}"
                raise SphinxError(f"{docname}, cell {number} failed when it was run: {what}")


# --- figures ------------------------------------------------------------------------------------


def name_figures(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Give every picture and player of a notebook an id, a link to itself, and words."""
    if not is_notebook(app, docname):
        return
    words = alternatives(Path(app.env.doc2path(docname)))
    images = list(doctree.findall(nodes.image))
    outputs = [
        node for node in doctree.findall(nodes.container) if "cell_output" in node["classes"]
    ]
    players = [node for output in outputs for node in output.findall(nodes.raw)]
    for number, (image, text) in enumerate(zip(images, words, strict=True), 1):
        image["alt"] = text or f"A figure of the section “{section_of(image)}”."
        image["width"] = "100%"  # then Sphinx links it to itself: on a phone one wants it alone
        frame(image, "figure", number)
    for number, player in enumerate(players, 1):
        frame(player, "player", number)


def frame(node: nodes.Element, kind: str, number: int) -> None:
    """Wrap a node in a box that a link can point to."""
    name = f"{kind}-{number}"
    box = nodes.container(classes=[f"{kind}-box"], ids=[name])
    node.replace_self(box)
    box += [node, nodes.raw("", LINK.format(name, kind), format="html")]


def section_of(node: nodes.Node) -> str:
    """The heading that a node stands under."""
    while not isinstance(node, nodes.section):
        node = node.parent
    return node[0].astext()


def alternatives(path: Path) -> list[str]:
    """The words for each stored picture of a notebook, in order: the repr of a `plots` figure."""
    outputs = [
        output.get("data", {})
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        for output in cell.get("outputs", [])
    ]
    said = ["".join(data.get("text/plain", "")) for data in outputs if "image/png" in data]
    return [
        words.removeprefix(SAID).removesuffix(">") if words.startswith(SAID) else ""
        for words in said
    ]


# --- all of them in one file --------------------------------------------------------------------


def pack(app: Sphinx, error: Exception | None) -> None:
    """Write the notebooks into one archive beside the static files; the same bytes each time."""
    if error is not None or app.builder.format != "html":
        return
    root = Path(app.srcdir)
    files = sorted([*root.glob("notebooks/*.ipynb"), *root.glob("notebooks/answers/*.ipynb")])
    with zipfile.ZipFile(Path(app.outdir) / "_static" / ARCHIVE, "w") as archive:
        archive.writestr(zipfile.ZipInfo("README.txt"), READ_ME)
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix())  # of 1980, whoever builds
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", refuse_failed_cells)
    app.connect("doctree-resolved", name_figures)
    app.connect("build-finished", pack)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
