"""At the end of each chapter, the terms of the glossary that have their home in it.

The glossary names a term's home; this turns the links round, so that neither is written twice.
"""

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ENTRY = re.compile(r"^(\w.*)\n(?:  .*\n)*  Home: \[.*\]\(\.\./notebooks/(\w+)\.ipynb\)\.$", re.M)


def homes(glossary: str) -> dict[str, list[str]]:
    """The terms of each chapter, as the glossary's text has them."""
    found: dict[str, list[str]] = {}
    for term, chapter in ENTRY.findall(glossary):
        found.setdefault(chapter, []).append(term)
    return found


def add_terms(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the terms of a chapter behind its last cell."""
    if not docname.startswith("notebooks/") or docname.count("/") != 1:
        return
    glossary = Path(app.srcdir) / "book/glossary.md"
    text = glossary.read_text("utf-8") if glossary.exists() else ""
    if terms := homes(text).get(docname.rpartition("/")[2]):
        nb = json.loads(source[0])
        said = f"*Terms of this chapter:* {', '.join(f'{{term}}`{term}`' for term in terms)}."
        cell = {"cell_type": "markdown", "id": "terms", "metadata": {}, "source": said}
        nb["cells"].append(cell)
        source[0] = json.dumps(nb)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
