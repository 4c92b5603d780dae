"""What code a record was made on: a digest of each room, in which words do not count.

Comments, docstrings and empty lines are left out, so that a digest changes with what is run. It is
text that is hashed, and no syntax tree: another Python has other trees.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_PYTHON, OF_C = (".py",), (".cpp", ".cu", ".cuh", ".h")
IN_C = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
OF_MATRIX = ("kvcache", "serve", "decode", "model", "kernels")  # rooms that its rows run
ALL = (*OF_MATRIX, "bench", "top")  # top: the modules that are in no room


def digests(rooms: Iterable[str], *tests: str, root: Path = ROOT) -> dict[str, str]:
    """A digest a room, and one a folder of tests/ ("tests/museum") or tests/ itself ("tests")."""
    found = {}
    for room in rooms:
        folder = root / "spindle"
        paths = folder.glob("*") if room == "top" else (folder / room).rglob("*")
        found[room] = _digest(root, paths)
    for folder in tests:
        found[folder] = _digest(root, (root / folder).glob("*"))
    return found


def whole(kept: dict[str, str]) -> str:
    """One digest for all of them."""
    return hashlib.sha256("\n".join(f"{n} {d}" for n, d in kept.items()).encode()).hexdigest()[:12]


def since(kept: dict[str, str]) -> str:
    """A sentence: whether the code of a record is that of today, and else where it is not."""
    rooms = [name for name in kept if not name.startswith("tests")]
    today = digests(rooms, *[name for name in kept if name.startswith("tests")])
    if changed := [name for name in kept if kept[name] != today[name]]:
        names = ", ".join(f"*{name}*" for name in changed)
        return f"Code has changed since, in {names}: the run has to be made again."
    return "No code has changed since."


def _digest(root: Path, paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in OF_PYTHON + OF_C):
        whole.update(f"{path.relative_to(root).as_posix()}\n{code_of(path)}\n".encode())
    return whole.hexdigest()[:12]


def code_of(path: Path) -> str:
    """A source without comments, docstrings and empty lines."""
    text = path.read_text(encoding="utf-8")
    text = _without_words(text) if path.suffix in OF_PYTHON else IN_C.sub(r"\1", text)
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _without_words(text: str) -> str:
    """A Python source without comments and docstrings."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                said = node.body[0]
                assert said.end_lineno is not None
                lines[said.lineno - 1 : said.end_lineno] = [""] * (
                    said.end_lineno - said.lineno + 1
                )
    return "\n".join(lines)
