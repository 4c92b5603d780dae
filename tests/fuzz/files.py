"""Damaged files: each loads correctly or is refused by name, in bounded time and memory.

    python tests/fuzz/files.py --count 2000              the seeds 0 to 1999, all kinds by turns
    python tests/fuzz/files.py --seed 17 --only gguf     one case again, with what it did

A case is a checkpoint in a directory with one or two faults. What loads must be, bit for bit, what
another reading of the same files gives (fuzz.readers; for tokenizers the library itself); what does
not must raise a SpindleError that names the file in words that a terminal can show. Beside each
checkpoint lie pickles and Python files that would leave a mark if anything ran them.

Cases run in child processes, so that a crash, a hang or memory without end ends one child and is
told with its seed. Nothing else here knows the time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from fuzz import cases, corrupt, turns
from fuzz.cases import Case

LIMIT_S = 30.0  # for one case, on a machine that is busy with other things
SLICE_S = 0.5
BATCH = 400  # cases a child runs before a fresh one takes over
SPARE_BYTES = 128 * 2**20  # memory that a case may take however small its files are,
TIMES = 64  # and so many times their size: JSON as Python objects
ROOM_BYTES = 3 * 2**30  # a child's address space beyond what it has when it starts
MARK = "EXECUTED"
COMMAND = (sys.executable, str(Path(__file__).resolve()), "--child")


# One case.


def attempt(case: Case) -> str:
    """Load a case from a fresh directory: "loaded" or "refused". AssertionError: a finding."""
    from fuzz import judge

    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as parent:
        folder = Path(parent) / "checkpoint"
        folder.mkdir()
        corrupt.put(case.files, folder, case.odd)
        set_traps(folder)
        os.chdir(folder)
        try:
            outcome = judge.judge(case, folder)
        finally:
            os.chdir("/")
        assert not (folder / MARK).exists(), "something in the checkpoint was executed"
    return outcome


def set_traps(folder: Path) -> None:
    """Files that leave a mark when they are unpickled or imported."""
    mark = str(folder / MARK)
    pickled = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()
    for name in ("pytorch_model.bin", "adapter.pt"):
        (folder / name).write_bytes(pickled)
    for name in ("evil.py", "modeling_llama.py"):
        (folder / name).write_text(f"import os; os.mkdir({mark!r})\n")


def report(kind: str, seed: int) -> dict[str, Any]:
    """Run a case here, and say how it ended."""
    case = cases.make(kind, seed)
    forget_peak()
    before, start, fault = peak_bytes(), time.process_time(), ""
    try:
        outcome = attempt(case)
    except AssertionError as error:
        outcome, fault = "finding", str(error)
    except BaseException as error:  # a panic of a Rust library is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, fault = "finding", f"{type(error).__name__}: {str(error)[:500]}"
    cpu_s, grown_bytes = time.process_time() - start, peak_bytes() - before
    size_bytes = sum(map(len, case.files.values()))
    if grown_bytes > SPARE_BYTES + TIMES * size_bytes:
        outcome = "finding"
        fault += f" {grown_bytes / 1e6:.0f} MB of memory for {size_bytes} bytes of files"
    told = {"kind": kind, "seed": seed, "outcome": outcome, "what": case.what[:300]}
    return told | {"fault": fault, "cpu_s": cpu_s, "grown_bytes": grown_bytes}


def forget_peak() -> None:
    """Let the peak of resident memory begin anew (Linux; elsewhere it stays)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The peak of resident memory so far."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The child: one line in, one line out.


def child() -> None:
    """Run the cases that stdin names, a line each: kind and seed."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from fuzz import judge

    judge.warm()
    limit_memory()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not a report
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        kind, seed = line.split()
        print(json.dumps(report(kind, int(seed))), file=out, flush=True)


def limit_memory() -> None:
    """No more address space than there is now, and ROOM_BYTES."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


# The parent.


class Child:
    """A process that runs cases one by one, and may die of one."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.errors = tempfile.TemporaryFile()
        self.folder = tempfile.TemporaryDirectory(prefix="fuzz-files-")  # a killed child leaves it
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SPINDLE_NO_EXT": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment["TMPDIR"] = self.folder.name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
        )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._stdout(), selectors.EVENT_READ)
        self._line(120.0)  # it says that it is ready

    def run(self, kind: str, seed: int) -> dict[str, Any]:
        """The report of a case, or of the child's end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{kind} {seed}\n".encode())
            self.process.stdin.flush()
        if line := self._line(LIMIT_S):
            return json.loads(line)
        return {"kind": kind, "seed": seed, "outcome": "finding", "fault": self._why(), "what": ""}

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self.selector.close()
        self.folder.cleanup()

    def _stdout(self) -> Any:
        return self.process.stdout

    def _line(self, limit_s: float) -> bytes:
        """What it says, or nothing: it died, or had its time.

        In slices: if both processes are stopped for a while, that counts as one slice.
        """
        for _ in range(round(limit_s / SLICE_S)):
            if self.selector.select(SLICE_S):
                return bytes(self._stdout().readline())
        return b""

    def _why(self) -> str:
        """How the child ended; one that hangs is ended here, and says where it was."""
        if hung := self.alive and not self.selector.select(0.2):
            self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.alive:
            self.process.kill()
        status = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()[-1500:].decode(errors="replace")
        return f"{f'no end after {LIMIT_S:.0f} s' if hung else f'died, status {status}'}\n{said}"


def run(
    wanted: Iterable[tuple[str, int]], command: tuple[str, ...] = COMMAND
) -> Iterator[dict[str, Any]]:
    """The reports of the cases, in order."""
    process, done = None, 0
    try:
        for kind, seed in wanted:
            if process is None or not process.alive or done % BATCH == 0:
                if process is not None:
                    process.close()
                process = Child(command)
            yield process.run(kind, seed)
            done += 1
    finally:
        if process is not None:
            process.close()


def in_words(told: dict[str, Any]) -> str:
    """A report as a line or more, with the command that brings the case back."""
    again = f"python tests/fuzz/files.py --seed {told['seed']} --only {told['kind']}"
    if not told["what"]:
        told["what"] = cases.make(told["kind"], told["seed"]).what[:300]
    return f"{told['outcome']}: {told['what']}\n  {told['fault']}\n  {again}"


def main() -> int:
    args = turns.asked("damaged files, from seeds", cases.KINDS, 200)
    if args.child is not None:
        child()
        return 0
    wanted = turns.by_turns(cases.KINDS, args.seed, args.count, args.only)
    start, ends, findings = time.monotonic(), Counter[str](), []
    bar = tqdm(wanted, desc="damaged files", disable=None)
    slowest, largest = 0.0, 0
    for told in turns.heard(run(bar), findings, bar, in_words, args.single):
        ends[f"{told['kind']} {told['outcome']}"] += 1
        slowest = max(slowest, told.get("cpu_s", LIMIT_S))
        largest = max(largest, told.get("grown_bytes", 0))
    wall_s = time.monotonic() - start
    print(
        f"seeds {args.seed} to {args.seed + len(wanted) - 1}: {len(wanted)} cases in {wall_s:.0f} s"
    )
    for kind in cases.KINDS:
        counts = {end: ends[f"{kind} {end}"] for end in ("loaded", "refused", "finding")}
        if any(counts.values()):
            print(f"  {kind:12}", ", ".join(f"{n} {end}" for end, n in counts.items() if n))
    print(f"  slowest {slowest:.1f} s of a processor, most memory {largest / 1e6:.0f} MB", end="")
    print(f", findings {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
