"""What every benchmark does with its figures: a table for people, JSON if a file is named."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from spindle.errors import RequestError


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json FILE`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def check_json(file: Path | None) -> None:
    """RequestError if the figures could not be written there: before they are measured."""
    if file is not None and file.is_dir():
        raise RequestError(f"--json {file}: it is a directory; expected a file")
    if file is not None and not file.resolve().parent.is_dir():
        raise RequestError(f"--json {file}: there is no directory {file.parent}")


def publish(result: object, text: str, file: Path | None) -> None:
    """Print the text, and write the figures if a file was named."""
    print(text)
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
