"""The driver behind `make test`, on fake parts: what fails, what is left out, what is printed."""

import json
import sys
from pathlib import Path

import check
import pytest
from check import Part, Result


def python(code: str, name: str = "fake", **options: object) -> Part:
    return Part(name, (sys.executable, "-c", code), **options)  # type: ignore[arg-type]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """Three parts in place of the real ones, and a machine on which nothing is missing."""
    fake = {
        "lint": python("print('clean')", "lint"),
        "pytest": python("print('=== 3 passed, 1 skipped in 2.10s ===')", "pytest"),
        "book": python("print('built')", "book"),
    }
    monkeypatch.setattr(check, "parts", lambda *args: list(fake.values()))
    monkeypatch.setattr(check, "missing_here", list)
    monkeypatch.delenv("CI", raising=False)
    return fake


def test_all_parts_pass(fakes: dict[str, Part], capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    out = capsys.readouterr().out
    assert "nothing that a test needs" in out
    table = out[out.index("part ") :].splitlines()
    assert [line.split()[0] for line in table] == [
        "part",
        "lint",
        "pytest",
        "book",
        "all",
        "tests:",
    ]
    assert table[2].endswith("passed    3 passed, 1 skipped in 2.10s")
    assert table[-1] == "tests: 3 passed, 0 failed, 1 skipped"


def test_a_part_that_fails_hides_no_other(
    fakes: dict[str, Part], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["lint"] = python("import sys; print('E501'); sys.exit(3)", "lint")
    fakes["book"] = python("raise SystemExit('warning')", "book")
    assert check.main([]) == 1
    out = capsys.readouterr().out
    assert "E501" in out and "3 passed, 1 skipped in 2.10s" in out and "warning" in out
    assert "FAILED: lint, book" in out.splitlines()[-2]


def test_only_runs_the_part_that_was_named(
    fakes: dict[str, Part], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["lint"] = python("raise SystemExit(1)", "lint")
    assert check.main(["--only", "book"]) == 0
    out = capsys.readouterr().out
    assert "built" in out and "--- lint" not in out and "--- pytest" not in out
    assert check.main(["--only", "book", "--only", "lint"]) == 1


def test_list_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--list"]) == 0
    names = "lint format types spelling pytest stored nbval book links".split()
    assert capsys.readouterr().out.split() == names


def test_a_part_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(["--only", "walk"])
    assert end.value.code == 2


# What needs smollm2.


@pytest.fixture
def no_model(fakes: dict[str, Part], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """A fetch that fails, one notebook that needs it, two tests; -> how `parts` was asked."""
    asked: list[bool] = []
    fakes["pytest"] = python("print('1 passed in 0.1s')", "pytest", needs_model=True)

    def parts(left_out: list[Path] | tuple[()] = (), without_model: bool = False) -> list[Part]:
        asked.append(without_model)
        assert [path.name for path in left_out] == ["02.ipynb"] * without_model
        return list(fakes.values())

    (tmp_path / "notebooks" / "answers").mkdir(parents=True)
    for name, metadata in {
        "01.ipynb": {"spindle": {"needs": ["gpu"]}},
        "answers/02.ipynb": {"spindle": {"needs": ["smollm2"]}},
        "answers/03.ipynb": {},
    }.items():
        (tmp_path / "notebooks" / name).write_text(json.dumps({"metadata": metadata}))
    monkeypatch.setattr(check, "parts", parts)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "PYTHON", (sys.executable, "-c", "raise SystemExit('no network')"))
    monkeypatch.setattr(check, "tests_that_need_the_model", lambda: ["t.py::a", "t.py::b"])
    return asked


def test_without_smollm2_its_tests_and_notebooks_are_left_out_by_name(
    no_model: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([]) == 0
    out = capsys.readouterr().out
    assert "Left out, for want of smollm2: 2 tests\n  t.py::a\n  t.py::b\n" in out
    assert "Left out, for want of smollm2: 1 notebooks\n  notebooks/answers/02.ipynb\n" in out
    assert no_model[-1] is True
    assert "left out" in next(line for line in out.splitlines() if line.startswith("fetch "))


@pytest.mark.parametrize(("value", "status"), [("true", 1), ("1", 1), ("", 0), ("false", 0)])
def test_in_ci_a_failed_fetch_fails_and_the_rest_still_runs(
    value: str,
    status: int,
    no_model: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CI", value)
    assert check.main([]) == status
    out = capsys.readouterr().out
    assert ("FAILED: fetch" in out) == bool(status)
    assert "1 passed in 0.1s" in out and "built" in out


def test_with_smollm2_nothing_is_left_out(
    no_model: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "PYTHON", (sys.executable, "-c", "pass"))
    assert check.main([]) == 0
    assert no_model[-1] is False
    assert "Left out" not in capsys.readouterr().out


def test_without_a_compiler_the_notebooks_that_compile_are_left_out_by_name(
    fakes: dict[str, Part],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[tuple[list[str], bool]] = []
    fakes["nbval"] = python("print('1 passed in 0.1s')", "nbval", needs_model=True)

    def parts(left_out: list[Path] | tuple[()] = (), without_model: bool = False) -> list[Part]:
        given.append(([path.name for path in left_out], without_model))
        return list(fakes.values())

    (tmp_path / "notebooks").mkdir()
    for name, needs in {"06.ipynb": ["smollm2"], "C.ipynb": ["c++"]}.items():
        text = json.dumps({"metadata": {"spindle": {"needs": needs}}})
        (tmp_path / "notebooks" / name).write_text(text)
    monkeypatch.setattr(check, "parts", parts)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "PYTHON", (sys.executable, "-c", "pass"))
    for compiler, left_out in ((sys.executable, []), ("no-such-compiler", ["C.ipynb"])):
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setattr(sys, "platform", "linux")
        assert check.main([]) == 0
        assert given[-1] == (left_out, False)
    assert (
        "Left out, for want of c++: 1 notebooks\n  notebooks/C.ipynb\n" in capsys.readouterr().out
    )
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not check.can_compile()


def test_a_part_that_needs_no_model_fetches_none(
    no_model: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--only", "lint"]) == 0
    assert "--- fetch" not in capsys.readouterr().out


# The real parts.


def commands(**options: object) -> dict[str, str]:
    return {part.name: " ".join(part.command) for part in check.parts(**options)}  # type: ignore[arg-type]


def test_the_real_parts_leave_out_what_they_are_told_to() -> None:
    left_out = [check.ROOT / "notebooks" / "15_x.ipynb"]
    told, plain = commands(left_out=left_out, without_model=True), commands()
    assert "--ignore=notebooks/15_x.ipynb" in told["nbval"]
    assert "--ignore" not in plain["nbval"]
    assert "not smollm2" in told["pytest"] and "smollm2" not in plain["pytest"]


def test_the_real_parts_are_strict() -> None:
    """B118: nbval is a command of its own, without coverage. B120: a book warning fails."""
    real = commands()
    assert "--nbval " in real["nbval"] and "lax" not in real["nbval"] and "cov" not in real["nbval"]
    assert " -W " in real["book"]
    assert "--hypothesis-profile=ci" in real["pytest"]
    for part in check.parts():
        assert (part.environment == check.ONE_THREAD) == (part.name in ("pytest", "nbval"))


def test_nothing_collected_fails_unless_notebooks_were_left_out() -> None:
    """pytest ends with 5 when it finds no test: an empty folder of notebooks is no success."""
    nbval = {part.name: part for part in check.parts()}["nbval"]
    assert nbval.ends_well == (0,)
    told = {part.name: part for part in check.parts([check.ROOT / "notebooks/a.ipynb"], True)}
    assert told["nbval"].ends_well == (0, 5) and told["pytest"].ends_well == (0,)


def test_a_part_sees_its_environment() -> None:
    code = "import os; raise SystemExit(os.environ['OMP_NUM_THREADS'] != '1')"
    assert check.run(python(code, environment=check.ONE_THREAD)).verdict == "passed"


# Reading pytest, and the doctor.


@pytest.mark.parametrize(
    ("line", "closing"),
    [
        ("3 passed in 2.10s\n", "3 passed in 2.10s"),
        (
            "===== 1 failed, 3 passed, 2 skipped in 82.10s (0:01:22) =====\n",
            "1 failed, 3 passed, 2 skipped in 82.10s (0:01:22)",
        ),
        ("\x1b[32m==== \x1b[32m\x1b[1m3 passed\x1b[0m\x1b[32m in 0.01s\x1b[0m ====", None),
        ("1 error in 0.03s", "1 error in 0.03s"),
        ("Success: no issues found in 20 source files", ""),
        ("12 files already formatted", ""),
        ("3 things in 2.0s", ""),
        ("tests/test_x.py::y PASSED  [ 3%]", ""),
    ],
)
def test_the_closing_line_is_recognised(line: str, closing: str | None) -> None:
    assert check.closing_line(line) == ("3 passed in 0.01s" if closing is None else closing)


def test_counts_add_up_over_parts() -> None:
    lines = ["3 passed, 1 skipped in 2s", "1 failed, 2 passed, 2 errors, 1 warning in 9s", ""]
    assert check.totals(lines) == "5 passed, 1 failed, 2 error, 1 skipped"
    assert check.totals(["", ""]) == ""


def test_the_table_shows_minutes_and_their_sum() -> None:
    text = check.summary([Result("lint", "passed", 0.26), Result("book", "FAILED", 1.5)])
    assert [line.split()[1] for line in text.strip().splitlines()] == [
        "minutes",
        "0.3",
        "1.5",
        "1.8",
    ]


def doctor_says(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    monkeypatch.setattr(check, "PYTHON", (sys.executable, "-c", code))
    return check.missing_here()


def test_what_is_missing_is_said_with_what_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "device": {"found": "cpu", "cost": "no CUDA GPU: tests marked cuda are skipped"},
        "c++ compiler": {"found": None, "cost": "tests that build are skipped"},
        "nvcc": {"found": "/bin/nvcc", "cost": ""},
        "model smollm2": {"found": None, "cost": "not fetched yet"},
    }
    lines = doctor_says(monkeypatch, f"print({json.dumps(report)!r})")
    assert lines == [
        "c++ compiler: tests that build are skipped",
        "CUDA GPU: no CUDA GPU: tests marked cuda are skipped",
    ]
    report["device"] = {"found": "cuda, some GPU", "cost": ""}
    assert len(doctor_says(monkeypatch, f"print({json.dumps(report)!r})")) == 1


def test_a_doctor_that_fails_is_reported_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = doctor_says(monkeypatch, "raise ValueError('broken')")
    assert line == "unknown: spindle doctor failed (ValueError: broken)"
