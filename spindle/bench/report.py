"""What every benchmark does with its figures: a table for people, JSON if a file is named."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from spindle.errors import RequestError, SpindleError
from spindle.paths import sweep

PART = ".spindle-part-"  # beside a file that is being written, and then the number of the process


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
        write_whole(file, json.dumps(result, indent=2) + "\n")
    except OSError as cause:
        raise SpindleError(f"--json {file}: {cause.strerror or cause}") from None


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is at any moment what it was, or what it will be, and whole.

    What is no ordinary file, such as a pipe, is written to as it is; so is a file in a directory
    that takes no new ones. OSError: it cannot be written; then it is what it was.
    """
    target = file.resolve()  # a link stays one
    part = target.with_name(f"{PART}{os.getpid()}")
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        file.write_text(text, encoding="utf-8")
        return
    sweep(target.parent, f"{PART}*")
    try:
        part.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def disturbed(what: str) -> str:
    """A sentence that says by what a run shows that something else took the machine's time."""
    return f"Disturbed: {what}. Something else was running; measure again when nothing is."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
