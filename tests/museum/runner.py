"""Plants each fault in a copy of the package, and runs the tests that are to notice.

    python tests/museum/run.py                   all of them
    python tests/museum/run.py --only seed-zero  one of them; may be repeated
    python tests/museum/run.py --list            their names
    python tests/museum/run.py --page            only write the book's page anew

What it finds goes into the record, last_run.json, and the book's page is written from that.

First the same tests have to pass on a copy without a fault. Then a fault is caught if a test of its
own fails, or hangs; one that cannot be collected or set up has noticed nothing. What survives lacks
a test. Tests are derandomised: a run is like the one before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from matrix.digest import ALL, digests
from tqdm import tqdm

from museum.collection import FAULTS
from museum.fault import ROOT, Fault

TESTS = ("tests", "tests/museum")
RECORD = Path(__file__).parent / "last_run.json"
CPU_LIMIT_S = 180  # tests that compute for longer hang
WALL_LIMIT_S = 1800  # tests that wait for longer say nothing: the machine may be busy
NOT_THE_COPY, TOO_SLOW = 90, 91  # pytest's own statuses end at 5
PYTEST = """
import importlib.util, os, sys
found = importlib.util.find_spec("spindle").origin
if not os.path.realpath(found).startswith(os.path.realpath(os.getcwd()) + os.sep):
    sys.exit(90)
import pytest

class Quick:
    def pytest_configure(self):  # a failing example need not be made small
        from hypothesis import Phase, settings
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("quick", derandomize=True, deadline=None, phases=phases)
        settings.load_profile("quick")

sys.exit(pytest.main(sys.argv[1:], [Quick()]))
"""
FAILED = re.compile(r"^FAILED tests/(\S+?\.py::\w+).*?(?: - (.*))?$", re.MULTILINE)
SLIPS = ("NameError", "SyntaxError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: caught by a test that failed or hung, or why it was not."""

    verdict: str  # "caught" | "hung" | "SURVIVED" | "ERROR"
    test: str = ""  # the one that failed first
    seconds: float = 0.0
    words: str = ""  # of pytest

    @property
    def is_caught(self) -> bool:
        return self.verdict in ("caught", "hung")


@contextmanager
def copy() -> Iterator[Path]:
    """A folder with the package and its tests."""
    with TemporaryDirectory(prefix="spindle-museum-") as made:
        folder = Path(made)
        for name in ("spindle", "tests"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield folder


def pytest_in(folder: Path, tests: Iterable[str], *options: str) -> tuple[int | None, str]:
    """Run tests of a copy, on that copy -> (exit status, None if it hung; what was written)."""
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"COLUMNS": "300"}  # pytest cuts its lines
    ids = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += [*options, *ids]
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        while True:
            try:
                written, _ = process.communicate(timeout=1)
                return process.returncode, written
            except subprocess.TimeoutExpired:
                if "-x" in options and cpu_seconds(process) > CPU_LIMIT_S:
                    return None, ""
                if time.monotonic() - begun > WALL_LIMIT_S:
                    return TOO_SLOW, ""
    finally:
        end(process)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What it has computed so far: not how long it was there, as somebody may have stopped it."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def end(process: subprocess.Popen[str]) -> None:
    """The process and its children, if they are still there."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def examine(fault: Fault) -> Outcome:
    """Plant one fault, and see who notices."""
    begun = time.monotonic()
    with copy() as folder:
        fault.plant(folder / "spindle")
        status, written = pytest_in(folder, fault.tests, "-x")
    return judged(status, written, round(time.monotonic() - begun, 1))


def judged(status: int | None, written: str, seconds: float) -> Outcome:
    """What an exit status of pytest means here, where a failure is what we want."""
    if status is None:
        return Outcome("hung", seconds=seconds)
    failed = FAILED.search(written)
    if status == 1 and failed:
        words = failed[2] or ""
        slip = words.startswith(SLIPS)  # ours, and nothing that an engine ever did
        return Outcome("ERROR" if slip else "caught", failed[1], seconds, words)
    last = (written.strip().splitlines() or [""])[-1]
    if status == 0:
        return Outcome("SURVIVED", seconds=seconds, words=last)
    words = "the copy is not what was imported" if status == NOT_THE_COPY else last
    return Outcome("ERROR", seconds=seconds, words=f"exit status {status}: {words}")


def check_without_a_fault(faults: Sequence[Fault]) -> str:
    """Run all tests that are to notice something, with nothing to notice; "" or what was wrong."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    with copy() as folder:
        status, written = pytest_in(folder, tests)
    return "" if status == 0 else f"without a fault, exit status {status}:\n{written}"


def line(fault: Fault, outcome: Outcome) -> str:
    """One fault's line."""
    by = f"{outcome.test} {outcome.words}".strip()
    return f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {fault.name}: {by}"


def score(outcomes: Iterable[Outcome]) -> str:
    """Such as "30 of 30 caught"."""
    results = list(outcomes)
    return f"{sum(one.is_caught for one in results)} of {len(results)} caught"


def run(faults: Sequence[Fault]) -> dict[str, Outcome]:
    """Examine the faults one by one; by name."""
    outcomes = {}
    for fault in (bar := tqdm(faults, disable=None, unit="fault")):
        outcomes[fault.name] = outcome = examine(fault)
        bar.write(line(fault, outcome))
        sys.stdout.flush()
    return outcomes


def keep(
    outcomes: dict[str, Outcome], code: dict[str, str], cpu_minutes: float | None = None
) -> None:
    """Write what was found into the record; code, cpu_minutes: of a whole run, else not kept."""
    whole = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"faults": {}}
    of = {fault.name: fault.digest for fault in FAULTS}
    found = {
        name: {"digest": of[name], "verdict": one.verdict, "test": one.test}
        for name, one in outcomes.items()
    }
    faults = whole["faults"] | found
    whole["faults"] = {name: faults[name] for name in of if name in faults}
    whole["date"] = date.today().isoformat()
    if cpu_minutes is not None:
        whole["cpu_minutes"], whole["code"] = round(cpu_minutes, 1), code
    RECORD.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def cpu_minutes_of_children() -> float:
    """What all processes that have ended so far have computed."""
    times = os.times()
    return (times.children_user + times.children_system) / 60


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every fault is caught, 1 if one survives, 130 after Ctrl-C."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(description="Plant each fault and see which test notices.")
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--page", action="store_true", help="only write the book's page anew")
    args = parser.parse_args(argv)
    from museum import page  # which reads the record

    if args.list or args.page:
        print("\n".join(names)) if args.list else page.write()
        return 0
    faults = [fault for fault in FAULTS if not args.only or fault.name in args.only]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the tests, too
    print(f"{len(faults)} faults; no seed: tests are derandomised", flush=True)
    begun, cpu, code = time.monotonic(), cpu_minutes_of_children(), digests(ALL, *TESTS)
    try:
        if wrong := check_without_a_fault(faults):
            print(wrong)
            return 1
        outcomes = run(faults)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130
    cpu = cpu_minutes_of_children() - cpu
    seconds = time.monotonic() - begun
    print(f"{score(outcomes.values())}, {seconds:.0f} s, {cpu:.1f} minutes of a core", flush=True)
    keep(outcomes, code, None if args.only else cpu)
    page.write()
    return int(not all(one.is_caught for one in outcomes.values()))
