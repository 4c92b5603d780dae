"""What every benchmark does with its figures: a table for people, JSON if a file is named."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from spindle.errors import RequestError, SpindleError


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json FILE`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def check_json(file: Path | None) -> None:
    """RequestError if the figures could not be written there: before they are measured."""
    if file is None:
        return
    if file.is_dir():
        raise RequestError(f"--json {file}: it is a directory; expected a file")
    if not file.resolve().parent.is_dir():
        raise RequestError(f"--json {file}: there is no directory {file.parent}")
    check_writable("--json", file)


def check_writable(option: str, file: Path) -> None:
    """RequestError if the file cannot be opened for writing; it is left as it is, or not there."""
    was_there = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as cause:
        raise RequestError(f"{option} {file}: {cause.strerror or cause}") from None
    if not was_there:
        file.unlink()


def publish(result: object, text: str, file: Path | None) -> None:
    """Print the text, and write the figures if a file was named. SpindleError: it is full."""
    print(text)
    if file is None:
        return
    try:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as cause:
        raise SpindleError(f"--json {file}: {cause.strerror or cause}") from None


def disturbed(what: str) -> str:
    """A sentence that says by what a run shows that something else took the machine's time."""
    return f"Disturbed: {what}. Something else was running; measure again when nothing is."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
