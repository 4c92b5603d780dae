"""200 damaged files, from printed seeds; and the runner notices what it is there to notice."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz import cases, files

SCRIPT = Path(files.__file__)


def test_two_hundred_damaged_files_load_correctly_or_are_refused_by_name():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "200"], capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # a bar is for terminals
    assert done.stdout.startswith("seeds 0 to 199: 200 cases in")
    for kind in cases.KINDS:  # most kinds load now and then, all are refused now and then
        assert re.search(rf"  {kind} +.*\d+ refused", done.stdout), kind
    assert len(re.findall(r"\d+ loaded", done.stdout)) >= 5


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_seed_gives_one_case(kind):
    for seed in range(30):
        one, other = cases.make(kind, seed), cases.make(kind, seed)
        assert (one.what, one.files, one.odd) == (other.what, other.files, other.odd)
    assert len({cases.make(kind, seed).what for seed in range(60)}) > 40


# What a case would do, if the package had the fault -> what the report must say.
FAULTS = {
    1: ("os.abort()", "died, status -6"),
    2: ("os.kill(os.getpid(), 9)", "died, status -9"),
    3: ("time.sleep(99)", "no end after 2 s"),
    4: ("[0 for _ in iter(int, 1)]", "no end after 2 s"),
    5: ("raise KeyError('x')", "KeyError: 'x'"),
    6: ("raise type('PanicException', (BaseException,), {})('at the disco')", "PanicException"),
    7: ("assert False, 'a wrong tensor'", "a wrong tensor"),
    8: ("bytearray(b'x' * 300_000_000)", "MB of memory for"),
    9: ("bytearray(b'x' * 2**36)", "MemoryError"),
    10: ("os.mkdir(files.MARK)", "something in the checkpoint was executed"),
}
PLANTED = f"""
import os, sys, time, types
sys.path.insert(0, {str(SCRIPT.parents[1])!r})
import fuzz
from fuzz import files

fuzz.judge = sys.modules["fuzz.judge"] = types.ModuleType("judge")  # torch is not needed here

def faulty(case, folder):
    exec(FAULTS.get(case.seed, "pass"))
    return "loaded"

FAULTS = {{n: fault for n, (fault, said) in {FAULTS!r}.items()}}
fuzz.judge.judge, fuzz.judge.warm = faulty, lambda: None
files.child()
"""


def test_the_runner_notices_each_kind_of_fault_and_goes_on(monkeypatch):
    """A crash, a hang with and without work, a foreign error, a wrong tensor, memory, execution."""
    monkeypatch.setattr(files, "LIMIT_S", 2.0)
    wanted = [("config", seed) for seed in range(12)]
    reports = {told["seed"]: told for told in files.run(wanted, (sys.executable, "-c", PLANTED))}
    assert [reports[seed]["outcome"] for seed in (0, 11)] == ["loaded"] * 2
    for seed, (_, said) in FAULTS.items():
        assert reports[seed]["outcome"] == "finding", seed
        words = files.in_words(reports[seed])
        assert said in words and f"--seed {seed} --only config" in words, words


def test_a_case_is_judged_by_what_it_does_and_not_by_when(monkeypatch):
    """A machine that stops both processes for a while has stopped the clock as well."""
    monkeypatch.setattr(files, "SLICE_S", 0.05)
    asked = []

    class Selector:
        def select(self, limit_s):
            asked.append(limit_s)
            return []

    child = files.Child.__new__(files.Child)
    child.selector = Selector()
    start = time.monotonic()
    assert child._line(3.0) == b"" and asked == [0.05] * 60
    assert time.monotonic() - start < 1
