"""Fault: one line that goes wrong, where that was met, and the tests that are to notice."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A mutation of one line of the package.

    `before` is text within one line of `file`, which stands there once: in the file, or in the
    function or class that `inside` names ("Scheduler.commit"). `after` takes its place.
    """

    name: str  # words with hyphens, for the command line and as a heading
    file: str  # below spindle/
    before: str
    after: str
    seen: str  # what a user saw
    why: str
    tests: tuple[str, ...]  # "test_blocks.py::test_...", below tests/
    report: str = ""  # the public report; "": made up for the book, or met in making it
    kin: str = ""  # what the report is of, where it is another fault of the same kind
    chapter: str = ""  # the chapter that it belongs to
    breaks: str = ""  # code of that chapter's "Break it" which plants the same fault
    inside: str = ""
    words: str = ""  # the heading, where the name without its hyphens is not good English

    @property
    def title(self) -> str:
        """The name in words."""
        if self.words:
            return self.words
        words = self.name.replace("-", " ")
        return words[0].upper() + words[1:]

    @property
    def digest(self) -> str:
        """Changes with what is planted, where, and who is to notice."""
        parts = (self.file, self.before, self.after, self.inside, *self.tests)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def lines(self, package: Path = ROOT / "spindle") -> tuple[str, str]:
        """The whole line without the fault and with it. ValueError: it is not there once."""
        text, at = self._found(package)
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        return text[start:end], text[start:at] + self.after + text[at + len(self.before) : end]

    def plant(self, package: Path) -> None:
        """Change the line in the copy of the package."""
        text, at = self._found(package)
        mutated = text[:at] + self.after + text[at + len(self.before) :]
        path = package / self.file
        path.write_text(mutated, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def _found(self, package: Path) -> tuple[str, int]:
        text = (package / self.file).read_text(encoding="utf-8")
        start, end = span_of(text, self.inside) if self.inside else (0, len(text))
        times = text.count(self.before, start, end)
        if times != 1:
            where = f"{self.inside or 'the file'} of spindle/{self.file}"
            raise ValueError(f"{self.name}: {self.before!r} stands {times} times in {where}; once")
        return text, text.index(self.before, start, end)


def span_of(text: str, name: str) -> tuple[int, int]:
    """From where to where a function or a class, such as "BlockPool.give", stands in a source."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == part]
        if len(found) != 1:
            raise ValueError(f"{name}: there are {len(found)} of {part}")
        node = found[0]
    ends = [0]
    for line in text.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    assert isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None
    return ends[node.lineno - 1], ends[node.end_lineno]
