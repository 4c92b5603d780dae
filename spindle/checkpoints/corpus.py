"""Documentation that every Python carries, as a list of texts: what the bundled models learn from.

Two sources, both on the disk of whoever runs this, neither downloaded: `pydoc_data.topics` (the
language reference, as `help("topic")` prints it), and the docstrings and longer comments of the
standard library, read from its source without importing it.
"""

import ast
import hashlib
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

# Tests, installed packages, an editor, generated tables, and lists of demos: no documentation.
SKIPPED = frozenset(
    "test tests idle_test site-packages dist-packages idlelib lib2to3 turtledemo ensurepip "
    "pydoc_data __pycache__ encodings this.py antigravity.py _pydecimal.py nturl2path.py".split()
)
SHORTEST_DOCSTRING_CHARS = 40
SHORTEST_COMMENT_CHARS = 200
LEGAL = re.compile(r"copyright|licen[cs]e|warrant|all rights reserved", re.IGNORECASE)
COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#(?: .*)?\n){3,}", re.MULTILINE)


def documents() -> list[str]:
    """All documents, in an order that depends on names alone: the topics, then one text a file."""
    seen: set[str] = set()
    texts = [tidy(topics[name]) for name in sorted(topics)]
    for path in library_files():
        fresh = [part for part in dict.fromkeys(passages(path)) if part not in seen]
        seen.update(fresh)
        if fresh:
            texts.append("\n\n".join(fresh))
    return texts


def library_files() -> Iterator[Path]:
    """The standard library's own `.py` files, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        generated = parts[0].startswith(("config-", "_sysconfigdata"))
        if not generated and SKIPPED.isdisjoint(parts):
            yield path


def passages(path: Path) -> list[str]:
    """A file's docstrings and long comments in the order of their lines, tidied."""
    source = path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")
    found = sorted([*docstrings(source), *comments(source)])
    return [tidy(text) for _, text in found]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring that is more than a label."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's strings are not our affair
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST_DOCSTRING_CHARS and not LEGAL.search(text):
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each block of comment lines that reads as prose."""
    for match in COMMENT_BLOCK.finditer(source):
        lines = [line.strip()[1:].removeprefix(" ") for line in match[0].splitlines()]
        text = inspect.cleandoc("\n".join(lines))
        if len(text) >= SHORTEST_COMMENT_CHARS and is_prose(text):
            yield source.count("\n", 0, match.start()) + 1, text


def is_prose(text: str) -> bool:
    """Whether a comment is sentences: mostly letters and spaces, starts and ends like one."""
    letters = sum(char.isalpha() or char == " " for char in text)
    starts, ends = text[0].isupper(), text.rstrip()[-1:] in ".!?:)"
    return starts and ends and letters > 0.88 * len(text) and not LEGAL.search(text)


def tidy(text: str) -> str:
    """One newline style, spaces for tabs, no trailing blanks, at most one empty line in a row."""
    lines = [line.rstrip() for line in text.expandtabs(4).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def split(texts: list[str], held_out: float = 0.05, seed: int = 0) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts); whole documents, chosen by a seeded shuffle."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    chosen = set(order[: max(1, round(held_out * len(texts)))])
    kept = [text for index, text in enumerate(texts) if index not in chosen]
    return kept, [texts[index] for index in sorted(chosen)]


def sha256(texts: list[str]) -> str:
    """The hex digest of all texts, each ended by a NUL so that their borders count."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8") + b"\0")
    return digest.hexdigest()
