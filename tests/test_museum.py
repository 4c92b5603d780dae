"""The fault museum: what it holds is what the package and the chapters are, and a sample is caught.

`make museum` runs the whole; here are the structure, the record, and a few faults of seconds.
"""

import ast
import functools
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from museum import page, runner
from museum.collection import FAULTS
from museum.fault import ROOT, Fault

NAMES = [fault.name for fault in FAULTS]
SAMPLE = [  # of the cheapest, one a kind where there is one
    "the-block-that-moved-out",
    "to-the-end-of-the-queue",
    "the-first-time-it-was-said",
    "always-six-characters-late",
    "three-tokens-one-gap",
]
NUMBERS = {"two": 2, "three": 3, "four": 4}


def by_name(name: str) -> Fault:
    return FAULTS[NAMES.index(name)]


# --- the collection -----------------------------------------------------------------------------


def test_there_are_as_many_as_were_promised_and_each_has_a_name_of_its_own():
    """25 faults of real engines or more, by their reports; and both recorded bugs."""
    assert len([fault for fault in FAULTS if fault.report]) >= 25
    assert len(set(NAMES)) == len(NAMES)
    assert {"positions-that-are-inferred", "the-stale-distribution"} <= set(NAMES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in NAMES)


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_line_stands_once_in_the_source(fault):
    """So that drift fails at once, and not as a fault that nobody can plant."""
    before, after = fault.lines()
    assert before != after and "\n" not in fault.before + fault.after
    if fault.file.endswith(".py"):  # a fault that is no Python would be caught by any test
        text = (ROOT / "spindle" / fault.file).read_text(encoding="utf-8")
        ast.parse(text.replace(before, after))


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_each_is_told_and_has_tests_that_exist(fault):
    assert fault.seen and fault.why and fault.tests
    assert not fault.report or re.fullmatch(
        r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", fault.report
    )
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test


@functools.cache
def functions_of(file: str) -> set[str]:
    """What a test file defines."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_line_that_is_gone_or_stands_twice_is_said(tmp_path):
    fault = by_name("eight-bits-of-chance")
    (tmp_path / "decode").mkdir()
    for times in (0, 2):
        (tmp_path / fault.file).write_text(fault.before * times)
        with pytest.raises(ValueError, match=f"stands {times} times in the file of spindle/"):
            fault.lines(tmp_path)


# --- the chapters -------------------------------------------------------------------------------


def break_it(notebook: Path) -> tuple[str, str]:
    """The words and the code of a notebook's "Break it"; both empty if it has none."""
    words, code, inside = [], [], False
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heads = re.split(r"^(?=## )", text, flags=re.MULTILINE)
            for part in heads:
                inside = part.startswith("## Break it") if part.startswith("## ") else inside
                words += [part] * inside
        elif inside:
            code.append(text)
    return "\n".join(words), "\n".join(code)


def announced(words: str) -> int:
    """How many faults a "Break it" says that it has; one, if it does not say."""
    found = re.search(r"\b(Two|Three|Four|three) (?:faults|edits)\b", words)
    return NUMBERS[found[1].lower()] if found else 1


CHAPTERS = {path.name.split("_")[0]: path for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
BROKEN = [chapter for chapter, path in CHAPTERS.items() if break_it(path)[0]]


@pytest.mark.parametrize("chapter", BROKEN)
def test_the_faults_of_a_chapter_are_in_the_museum(chapter):
    """As many as its "Break it" announces, and each by code that plants it there."""
    words, code = break_it(CHAPTERS[chapter])
    ours = [fault for fault in FAULTS if fault.chapter == chapter and fault.breaks]
    assert len(ours) == announced(words), [fault.name for fault in ours]
    for fault in ours:
        assert fault.breaks in code, fault.name


def test_every_chapter_that_breaks_something_is_known_here():
    """And no fault belongs to a chapter that there is not, or that has no "Break it"."""
    assert len(BROKEN) >= 19
    assert {fault.chapter for fault in FAULTS if fault.breaks} == set(BROKEN)
    assert {fault.chapter for fault in FAULTS} <= {"", *CHAPTERS}


# --- the record and the page --------------------------------------------------------------------


def test_the_record_is_of_this_collection_and_has_no_survivor():
    """A fault that was added or changed since has to be examined: `make museum`."""
    kept = page.read()["faults"]
    assert {name: its["digest"] for name, its in kept.items()} == {f.name: f.digest for f in FAULTS}
    assert [name for name, its in kept.items() if its["verdict"] not in ("caught", "hung")] == []


def test_the_page_of_the_book_is_what_the_record_says():
    """`make museum` writes it; nobody else does."""
    assert page.PAGE.read_text(encoding="utf-8") == page.render()


# --- the runner ---------------------------------------------------------------------------------


def test_a_sample_is_caught():
    """Each in a copy of its own, and by a test of its own; all pass where nothing is planted."""
    faults = [by_name(name) for name in SAMPLE]
    assert runner.check_without_a_fault(faults) == ""
    outcomes = {fault.name: runner.examine(fault) for fault in faults}
    assert Counter(one.verdict for one in outcomes.values()) == {"caught": len(SAMPLE)}, outcomes
    for fault in faults:
        assert outcomes[fault.name].test in fault.tests


@pytest.mark.parametrize(
    ("status", "written", "verdict"),
    [
        (1, "FAILED tests/test_x.py::test_y[1] - assert 0", "caught"),
        (1, "ERROR tests/test_x.py::test_y - a fixture", "ERROR"),
        (0, "1 passed", "SURVIVED"),
        (None, "", "hung"),
        (2, "FAILED tests/test_x.py::test_y", "ERROR"),
        (4, "no such test", "ERROR"),
        (5, "no tests ran", "ERROR"),
        (runner.NOT_THE_COPY, "", "ERROR"),
        (-9, "", "ERROR"),
    ],
)
def test_only_a_failure_is_a_catch(status, written, verdict):
    """A test that was not collected, or could not be set up, has noticed nothing."""
    outcome = runner.judged(status, written, 1.0)
    assert outcome.verdict == verdict
    assert outcome.test == ("test_x.py::test_y" if verdict == "caught" else "")


def test_a_package_from_elsewhere_is_no_copy(tmp_path):
    (tmp_path / "tests").mkdir()
    status, _ = runner.pytest_in(tmp_path, ["test_nothing.py"])
    assert status == runner.NOT_THE_COPY


def test_ctrl_c_ends_the_tests_that_run(tmp_path):
    """And their children: a test that hangs would be there for ever."""
    (tmp_path / "spindle").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "spindle" / "__init__.py").touch()
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "tests" / "test_slow.py").write_text(
        "import subprocess, sys\n"
        f"def test_slow(): subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += "from pathlib import Path; from museum import runner\n"
    code += f"runner.pytest_in(Path({str(tmp_path)!r}), ['test_slow.py'], '-x')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pid, end = tmp_path / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    while runs(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(int(pid.read_text()))


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its entry, which nobody has asked for yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
