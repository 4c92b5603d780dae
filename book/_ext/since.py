"""Whether code has changed since the run that a page tells of: found out when the book is built."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

COMMENT = "<!-- since -->"
RECORDS = {"book/proven": "tests/matrix/last_run.json", "book/museum": "tests/museum/last_run.json"}


def say(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the sentence where the page has its comment; none, if the record names no code."""
    if docname in RECORDS and COMMENT in source[0]:
        root = Path(app.srcdir)
        kept = json.loads((root / RECORDS[docname]).read_text("utf-8")).get("code")
        said = digest(root).since(kept) if kept else ""
        source[0] = source[0].replace(COMMENT, said)


def digest(root: Path) -> ModuleType:
    """The module of the tests that makes digests."""
    spec = importlib.util.spec_from_file_location("digest", root / "tests/matrix/digest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", say)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
