"""OUT: one line a result, each written at once, by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spindle.batch.lines import RESULT_ID, RunWith
from spindle.errors import SpindleError, brief

BEGINNING = f'{{"id": "{RESULT_ID}'.encode()  # of each line


class Results:
    """A file of results, locked until it is closed; a new one if there is none.

    A kill may leave the last line half written: it has no newline. `repair` cuts it off, once the
    rest was read. `made_with` is what all of them were made with; None: there are none yet.
    SpindleError: the file cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made_with: RunWith | None = None
        self._end = 0  # bytes of whole lines
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as cause:
            raise SpindleError(f"{path}: it cannot be opened ({cause.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process
        except OSError as cause:
            os.close(self._file)
            busy = isinstance(cause, BlockingIOError)
            why = "another process is writing to it" if busy else f"no lock ({cause.strerror})"
            raise SpindleError(f"{path}: {why}; expected to be alone with it") from None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def read(self) -> Iterator[tuple[str, str]]:
        """The custom_id and the id of each result. SpindleError: a line that is no result.

        Changes nothing, and reads a line at a time.
        """
        try:
            with open(self.path, "rb") as file:
                number = 0
                while head := file.read(len(BEGINNING)):
                    number += 1
                    if not BEGINNING.startswith(head):
                        raise self._no_result(number, "begins otherwise")
                    line = head + file.readline()
                    if line.endswith(b"\n"):
                        self._end += len(line)
                        yield self._ids(line, number)
        except OSError as cause:
            raise SpindleError(f"{self.path}: {cause.strerror}") from None

    def _ids(self, line: bytes, number: int) -> tuple[str, str]:
        try:
            result = json.loads(line)
            custom_id, result_id = result["custom_id"], result["id"]
            made_with = _made_with(result)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._no_result(number, f"{type(error).__name__}: {error}") from None
        if not isinstance(custom_id, str):
            raise self._no_result(number, "its custom_id is no text")
        self.check(made_with)
        self.made_with = made_with
        return custom_id, result_id

    def check(self, run_with: RunWith) -> None:
        """SpindleError: the results that are there were made with something else."""
        if words := run_with.unlike(self.made_with):
            raise SpindleError(f"{self.path}: its results were {words}")

    def _no_result(self, number: int, why: str) -> SpindleError:
        right = "expected results of `spindle batch`, or a new file"
        return SpindleError(f"{self.path}: line {number} is no result ({brief(why)}); {right}")

    def repair(self) -> None:
        """Cut off what follows the last whole line of those that were read."""
        os.ftruncate(self._file, self._end)

    def append(self, result: dict[str, Any]) -> None:
        """Write a result, whole or not at all. SpindleError: the disk is full, or worse.

        So too if the engine that has made it is not like that of the others.
        """
        self.check(made_with := _made_with(result))
        self.made_with = made_with
        line = json.dumps(result).encode() + b"\n"
        try:
            rest = line
            while rest:  # a write may be short, and then the next one says why
                rest = rest[os.write(self._file, rest) :]
        except OSError as cause:
            why = cause.strerror or str(cause)
            self.repair()
            kept = "what is written is whole, and the same command goes on from there"
            raise SpindleError(f"{self.path}: {why}; {kept}") from None
        self._end += len(line)

    def sync(self) -> None:
        """Let it reach the disk. SpindleError: it does not."""
        try:
            os.fsync(self._file)
        except OSError as cause:
            raise SpindleError(f"{self.path}: {cause.strerror}") from None


def _made_with(result: dict[str, Any]) -> RunWith:
    body = result["response"]["body"]
    return RunWith(body["model"], body["system_fingerprint"])
