"""The table of who may import whom, on the page of the architecture: read from the test's own."""

import ast
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PLACEHOLDER = "<!-- imports -->"
TESTS = "tests/test_public_api.py"
Table = dict[str, tuple[str, ...]]


def table(source: str) -> tuple[tuple[str, ...], Table]:
    """Whom every room may import, and what each may besides, as the test's file has them."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in ("EVERYONE_MAY", "MAY_IMPORT"):
            found[target.id] = eval(compile(ast.Expression(node.value), TESTS, "eval"), {})
    return found["EVERYONE_MAY"], found["MAY_IMPORT"]


def first_sentence(root: Path, room: str) -> str:
    """What a room's docstring begins with; a plain list of its files where there is none."""
    path = root / "spindle" / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return ""
    words = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return words.partition("\n")[0].replace("|", "\\|")


def drawn(root: Path) -> str:
    """The table in Markdown, without rooms that are not there yet."""
    everyone, rooms = table((root / TESTS).read_text("utf-8"))
    lines = ["| room | what it is | may import |", "|---|---|---|"]
    for room, others in rooms.items():
        said = first_sentence(root, room)
        if room and room not in everyone and said:
            may = "everything" if "*" in others else ", ".join(f"`{o}`" for o in others)
            lines.append(f"| `{room}` | {said} | {may or 'nothing'} |")
    names = ", ".join(f"`{name}`" for name in everyone)
    return "\n".join([*lines, "", f"Everyone may import {names}."])


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the table where the page has the placeholder."""
    if PLACEHOLDER in source[0]:
        source[0] = source[0].replace(PLACEHOLDER, drawn(Path(app.srcdir)))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
