"""What `make test` runs: every part, whatever the others said, then how long each took.

    python tests/check.py                 all parts
    python tests/check.py --only pytest   one of them; may be repeated
    python tests/check.py --list          their names

Some tests and notebooks need the smollm2 checkpoint, which is fetched once. Where that fails they
are left out, by name and with their number; where CI is set, it is a failure. Notebooks that
compile C++ are left out, by name, where that cannot be done.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2"
COMPILER = "c++"  # and Linux, as for spindle.kernels.build
PYTHON = (sys.executable, "-m")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the same sums on every machine
WORKERS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 4)
SPREAD = ("-n", str(WORKERS), "--dist")  # over as many processes; each may need 2 GB
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-sanitize-with", "notebooks/sanitize.cfg")
NBVAL += ("--nbval-cell-timeout", "120")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)")


@dataclass(frozen=True)
class Part:
    """One command that must end well."""

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    needs_model: bool = False  # whether it runs something that may need smollm2
    ends_well: Sequence[int] = (0,)  # with these exit statuses


@dataclass(frozen=True)
class Result:
    """How a part ended. `closing`: the last line that counts tests, as pytest wrote it."""

    name: str
    verdict: str  # "passed" | "FAILED" | "left out"
    minutes: float
    closing: str = ""


def parts(left_out: Sequence[Path] = (), without_model: bool = False) -> list[Part]:
    """All parts in order; `left_out` are notebooks, `without_model` leaves out the marked tests."""
    marks = ("-m", f"not {MODEL}") if without_model else ()
    ignored = [f"--ignore={path.relative_to(ROOT)}" for path in left_out]
    color = ("--color=yes",) if sys.stdout.isatty() else ()
    pytest = (*PYTHON, "pytest", *color)
    tests = (*pytest, *SPREAD, "worksteal", "--hypothesis-profile=ci")
    nothing_left = (0, 5) if left_out else (0,)  # pytest ends with 5 when it has collected nothing
    book = ("-b", "html", "-W", "--keep-going", "-q", "-j", "auto", "-c", "book", ".")
    return [
        Part("lint", (*PYTHON, "ruff", "check", ".")),
        Part("format", (*PYTHON, "ruff", "format", "--check", ".")),
        Part("types", (*PYTHON, "mypy")),
        Part("spelling", (*PYTHON[:1], "tests/spelling.py")),
        Part("pytest", (*tests, *marks), ONE_THREAD, True),
        Part("stored", (*PYTHON[:1], "notebooks/execute.py", "--check")),
        Part(
            "nbval",
            (*pytest, *SPREAD, "loadfile", *NBVAL, *ignored, "notebooks"),
            ONE_THREAD,
            True,
            nothing_left,
        ),
        Part("book", (*PYTHON, "sphinx", *book, "book/_build/html")),
        Part("links", (*PYTHON[:1], "book/links.py")),
    ]


def run(part: Part) -> Result:
    """Run one part, its output shown as it comes."""
    print(f"\n--- {part.name}: {shlex.join(part.command[1:])}", flush=True)
    start, closing = time.monotonic(), ""
    environment = os.environ | part.environment
    with subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = closing_line(line) or closing
    verdict = "passed" if process.returncode in part.ends_well else "FAILED"
    return Result(part.name, verdict, (time.monotonic() - start) / 60, closing)


def closing_line(line: str) -> str:
    """A line of pytest's such as "3 passed, 1 skipped in 2.10s", without its frame; else ""."""
    plain = ANSI.sub("", line).strip().strip("= ")
    return plain if re.match(r"\d+ \w+.* in [\d.]+s\b", plain) and OUTCOME.match(plain) else ""


# What is missing, and what that leaves out.


def missing_here() -> list[str]:
    """What `spindle doctor` misses, with what that costs; its own failure is a line as well."""
    command = [*PYTHON, "spindle", "doctor", "--json"]
    doctor = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if doctor.returncode != 0:
        reason = (doctor.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [f"unknown: spindle doctor failed ({reason})"]
    report = json.loads(doctor.stdout)
    absent = (name for name in report if report[name]["found"] is None)
    lines = [f"{name}: {report[name]['cost']}" for name in absent if name != f"model {MODEL}"]
    if not report["device"]["found"].startswith("cuda"):
        lines.append(f"CUDA GPU: {report['device']['cost']}")
    return lines


def fetch() -> Result:
    """Bring smollm2 into the cache; where that fails and CI is not set, it is left out."""
    result = run(Part("fetch", (*PYTHON, "spindle", "fetch", MODEL)))
    if result.verdict == "FAILED" and not in_ci():
        return Result("fetch", "left out", result.minutes)
    return result


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def can_compile() -> bool:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    return sys.platform == "linux" and any(map(shutil.which, names))


def notebooks_that_need(what: str, folder: Path) -> list[Path]:
    """Those whose metadata say {"spindle": {"needs": [what]}}; they are left out whole."""
    found = []
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata", {})
            if what in metadata.get("spindle", {}).get("needs", []):
                found.append(path)
    return found


def tests_that_need_the_model() -> list[str]:
    command = [*PYTHON, "pytest", "--collect-only", "-q", "-m", MODEL]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if "::" in line]


def print_left_out(what: str, title: str, names: Sequence[object]) -> None:
    print(f"\nLeft out, for want of {what}: {len(names)} {title}", flush=True)
    for name in names:
        print(f"  {name}")


# The whole.


def check(only: Sequence[str]) -> list[Result]:
    """Run the parts named, or all of them, and return how each ended, in order."""
    print("Missing on this machine:")
    for line in missing_here() or ["nothing that a test needs"]:
        print(f"  {line}", flush=True)
    wanted = [part for part in parts() if not only or part.name in only]
    if not any(part.needs_model for part in wanted):
        return [run(part) for part in wanted]
    results = [fetch()]
    without_model = results[0].verdict != "passed"
    if without_model:
        print_left_out(MODEL, "tests", tests_that_need_the_model())
    left_out: list[Path] = []
    for what in [MODEL] * without_model + [COMPILER] * (not can_compile()):
        paths = notebooks_that_need(what, ROOT / "notebooks")
        print_left_out(what, "notebooks", [path.relative_to(ROOT) for path in paths])
        left_out += paths
    names = [part.name for part in wanted]
    return results + [run(p) for p in parts(left_out, without_model) if p.name in names]


def summary(results: Sequence[Result]) -> str:
    """A line for each part, then the tests of all parts counted together."""
    lines = [f"\n{'part':<8} {'minutes':>7}"]
    for r in results:
        lines.append(f"{r.name:<8} {r.minutes:7.1f}  {r.verdict:<8}  {r.closing}".rstrip())
    failed = [r.name for r in results if r.verdict == "FAILED"]
    minutes = sum(r.minutes for r in results)
    lines.append(
        f"{'all':<8} {minutes:7.1f}  {'FAILED: ' + ', '.join(failed) if failed else 'passed'}"
    )
    counted = totals(r.closing for r in results)
    return "\n".join(lines + [f"tests: {counted}"] * bool(counted))


def totals(closing_lines: Iterable[str]) -> str:
    """The sum of pytest's counts: "3 passed in 1s", "1 failed in 2s" -> "3 passed, 1 failed"."""
    counts: dict[str, int] = {}
    for line in closing_lines:
        for number, kind in OUTCOME.findall(line):
            counts[kind.rstrip("s")] = counts.get(kind.rstrip("s"), 0) + int(number)
    order = ("passed", "failed", "error", "skipped", "deselected", "xfailed", "xpassed")
    if not counts:
        return ""
    counts.setdefault("passed", 0)
    counts.setdefault("failed", 0)
    return ", ".join(f"{counts[kind]} {kind}" for kind in order if kind in counts)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part passed (what was left out aside), else 1; 130 after Ctrl-C."""
    names = [part.name for part in parts()]
    parser = argparse.ArgumentParser(description="Run all checks, or some of them.")
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(names))
        return 0
    try:
        results = check(args.only)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130
    print(summary(results), flush=True)
    return int(any(result.verdict == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())
