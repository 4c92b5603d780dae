"""A GPU from end to end: build, kernels, capture, bandwidth, latency; no network, no checkpoint.

It is for a machine that is to be had for minutes, and on which nobody can look into a failure. So
each stage is a process of its own: one that fails, hangs or takes the device with it is in the
record, in its own words, and the others run. The record is written after each. Without a GPU, or
with --dry-run, the same script rehearses on the CPU (`gpu.py`), and tells no times.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spindle import hub
from spindle.bench import report
from spindle.bench.gpu import Gpu, machine
from spindle.bench.kernel_checks import Row
from spindle.bench.stages import STAGES
from spindle.errors import RequestError

RECORDED = Path("notebooks", "recorded")
SECONDS = 240.0


@dataclass
class Result:
    """What came of a stage: its rows, and in words why it is not whole, or what was wrong in it."""

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    failed: str | None = None

    @property
    def went_well(self) -> bool:
        """Whether it came to its end, and no row has anything wrong."""
        return self.failed is None and not any("wrong" in row for row in self.rows)


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench device`."""
    add = parser.add_argument
    names = ", ".join(STAGES)
    add("--stages", nargs="+", metavar="STAGE", help=f"of {names} (default: all)")
    about = f"no stage begins, and none goes on, after these (default: {SECONDS:.0f})"
    add("--seconds", type=float, default=SECONDS, metavar="S", help=about)
    about = f"the folder for device-NAME.json (default: {RECORDED}; of a dry run: none)"
    add("--out", type=Path, metavar="DIR", help=about)
    add("--dry-run", action="store_true", help="the same on the CPU, small and without times")
    add("-m", "--model", help="a checkpoint whose latency is measured, too")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Do the stages, print their tables, write the record; 1 if anything in it is wrong."""
    report.check_json(args.json)
    names = _checked_stages(args.stages)
    if not 0 < args.seconds < 86400:
        raise RequestError(f"--seconds {args.seconds}: expected more than 0, and less than a day")
    if args.model is not None:
        hub.resolve(args.model)
    gpu = machine(args.dry_run)
    file = _file(gpu, args.out)
    files = [path for path in (file, args.json) if path is not None]
    results = measure(gpu, names, args.seconds, args.model, files)
    print("\n".join(_ends(results)))
    return 0 if all(result.went_well for result in results.values()) else 1


def _checked_stages(asked: list[str] | None) -> list[str]:
    for name in asked or []:
        if name not in STAGES:
            raise RequestError(f"--stages {name}: expected of {', '.join(STAGES)}")
    return [name for name in STAGES if asked is None or name in asked]


def _file(gpu: Gpu, folder: Path | None) -> Path | None:
    """Where the record goes, in a folder that is there; None: a dry run that was given none."""
    if folder is None and gpu.rehearsed:
        return None
    place = folder or RECORDED
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise RequestError(f"--out {place}: {cause.strerror}; expected a folder") from None
    return place / f"device-{re.sub('[^a-z0-9]+', '-', gpu.name.lower())}.json"


def measure(
    gpu: Gpu,
    names: Sequence[str],
    seconds: float = SECONDS,
    model: str | None = None,
    files: Sequence[Path] = (),
) -> dict[str, Result]:
    """The results of these stages; each is printed as it comes, and all so far are written."""
    start, results = time.monotonic(), dict[str, Result]()
    print(f"# {gpu.name}\n", flush=True)
    for name in names:
        left = seconds - (time.monotonic() - start)
        results[name] = _stage(gpu, name, model, left, seconds)
        print(as_markdown(name, results[name]) + "\n", flush=True)
        record = as_record(gpu, results)
        for file in files:
            report.write_whole(file, json.dumps(record, indent=1) + "\n")
    return results


def _stage(gpu: Gpu, name: str, model: str | None, left: float, seconds: float) -> Result:
    """One stage in what time is left: in its own process on a GPU, in this one in a rehearsal."""
    if left <= 0:
        return Result(failed=f"not begun: the {seconds:.0f} seconds were over")
    start = time.monotonic()
    result = _here(gpu, name, model) if gpu.rehearsed else apart(gpu, name, model, left)
    result.seconds = time.monotonic() - start
    return result


def _here(gpu: Gpu, name: str, model: str | None) -> Result:
    result = Result()
    try:
        for row in STAGES[name](gpu, model):
            result.rows.append(row)
    except Exception as error:
        result.failed = in_words(error)
    return result


def in_words(error: BaseException) -> str:
    """An exception as a line of a record."""
    return f"{type(error).__name__}: {error}"


# --- a process for a stage -----------------------------------------------------------------------


def apart(gpu: Gpu, name: str, model: str | None, seconds: float) -> Result:
    """A stage in a process of its own, which is ended after so many seconds."""
    result, context = Result(), multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, gpu.rehearsed, name, model), daemon=True)
    process.start()
    sender.close()  # so that there is an end to what is received when the process has died
    try:
        result.rows.extend(_received(receiver, time.monotonic() + seconds))
    except _Failed as failure:
        result.failed = str(failure)
    except TimeoutError:
        result.failed = f"ended, as the {seconds:.0f} seconds that were left are over"
    except EOFError:
        process.join(10)
        result.failed = f"its process died, with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return result


class _Failed(Exception):
    """What ended the stage in its process."""


def _received(receiver: Connection, until: float) -> Iterator[Row]:
    """The rows, up to the end that the process announces."""
    while receiver.poll(max(until - time.monotonic(), 0)):
        kind, content = receiver.recv()
        if kind == "end":
            if content is not None:
                raise _Failed(content)
            return
        yield content
    raise TimeoutError


def _work(sender: Connection, rehearsed: bool, name: str, model: str | None) -> None:
    """In the process: send each row, and then how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    try:
        for row in STAGES[name](machine(rehearsed), model):
            sender.send(("row", row))
    except BaseException as error:
        sender.send(("end", in_words(error)))
    else:
        sender.send(("end", None))


# --- what is told --------------------------------------------------------------------------------


def as_record(gpu: Gpu, results: dict[str, Result]) -> dict[str, Any]:
    """What is written: for whom, when, and every row of every stage."""
    return {
        "device": gpu.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dry_run": gpu.rehearsed,
        "python": sys.version.split()[0],
        "stages": {
            name: {
                "seconds": round(one.seconds, 1),
                "failed": one.failed,
                "rows": [_for_json(row) for row in one.rows],
            }
            for name, one in results.items()
        },
    }


def _for_json(row: Row) -> Row:
    """JSON has no word for what is infinite, or no number: then it is a text."""
    broken = {key for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
    return {key: str(x) if key in broken else x for key, x in row.items()}


def as_markdown(name: str, result: Result) -> str:
    """A stage: its tables, then what was wrong."""
    parts = [f"## {name}, {result.seconds:.1f} s"]
    tables: dict[str, list[Row]] = {}
    for row in result.rows:
        tables.setdefault(row["table"], []).append(row)
    for title, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "table"))
        lines = [[_cell(row.get(key)) for key in columns] for row in rows]
        parts += [f"{title}:", report.table([key.replace("_", " ") for key in columns], lines)]
    if result.failed is not None:
        parts.append(f"FAILED: {result.failed}")
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\n", " ").replace("|", "/")


def _ends(results: dict[str, Result]) -> list[str]:
    """A line a stage."""
    return [
        f"{name}: {'well' if one.went_well else one.failed or 'something is wrong'}"
        for name, one in results.items()
    ]
