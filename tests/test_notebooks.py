"""The tool that runs notebooks, the rules for what they store, and how nbval is run over them."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

import execute  # noqa: E402

NBVAL = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", "sanitize.cfg"]


def notebook(path: Path, *sources: str, tags: dict[int, str] | None = None) -> Path:
    """A notebook that was never run; `tags` by cell, from 0. A source `# ...` is Markdown."""
    cells = []
    for at, source in enumerate(sources):
        make = new_markdown_cell if source.startswith("# ") else new_code_cell
        metadata = {"tags": [(tags or {})[at]]} if at in (tags or {}) else {}
        cells.append(make(textwrap.dedent(source).strip(), metadata=metadata))
    nbformat.write(new_notebook(cells=cells), path)
    return path


def pytest_run(folder: Path, *more: str, **how) -> subprocess.CompletedProcess[str]:
    """nbval over `folder`, as `make test` runs it: our pytest settings, conftest and rules."""
    for name in ("conftest.py", "sanitize.cfg"):
        shutil.copy(NOTEBOOKS / name, folder)
    shutil.copy(NOTEBOOKS.parent / "pyproject.toml", folder)
    command = [sys.executable, "-m", "pytest", *NBVAL, "-p", "no:cacheprovider", *more, "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **how)


# --- running ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """A notebook run twice: the bytes after the first run, after the second, and what was said."""
    path = notebook(
        tmp_path_factory.mktemp("twice") / "a.ipynb",
        "# A claim",
        "print('first'); print('second')\n6 * 7",
        """
        import matplotlib.pyplot as plt
        plt.figure(figsize=(2, 1))
        plt.plot([1, 2], [2, 1])
        plt.show()
        """,
        "import time\nprint(f'{time.perf_counter_ns()} ns')",
        "'folded'",
        tags={3: "nbval-ignore-output", 4: "hide-output"},
    )
    said, stored = [], []
    for _ in range(2):
        said.append(execute.execute(path))
        stored.append(path.read_text("utf-8"))
    return path, said, stored


def test_a_second_run_changes_no_byte(twice):
    _, said, stored = twice
    assert said == ["written, outputs of 4 of 4 cells new", "unchanged"]
    assert stored[0] == stored[1]


def test_what_is_stored_is_what_the_cells_show_counted_from_1(twice):
    cells = execute.code_cells(execute.read(twice[0]))
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4]
    stream, result = cells[0].outputs
    assert (stream.text, result.data["text/plain"], result.execution_count) == (
        "first\nsecond\n", "42", 1,
    )  # fmt: skip
    assert cells[1].outputs[0].data["text/plain"] == "<Figure size 200x100 with 1 Axes>"
    assert "image/png" in cells[1].outputs[0].data


def test_metadata_is_the_least_that_jupyter_needs_and_a_folded_cell_is_folded_everywhere(twice):
    nb = json.loads(twice[2][0])
    assert sorted(nb["metadata"]) == ["code_sha256", "kernelspec", "language_info"]
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    assert [cell["metadata"] for cell in nb["cells"]] == [
        {}, {}, {}, {"tags": ["nbval-ignore-output"]},
        {"tags": ["hide-output"], "jupyter": {"outputs_hidden": True}, "collapsed": True},
    ]  # fmt: skip
    assert twice[2][0].endswith("}\n")


def test_what_a_notebook_says_it_needs_is_kept(tmp_path):
    nb = execute.read(notebook(tmp_path / "a.ipynb", "x = 0"))
    nb.metadata["spindle"] = {"needs": ["smollm2"]}
    assert json.loads(execute.to_text(nb))["metadata"]["spindle"] == {"needs": ["smollm2"]}


def test_a_measurement_is_kept_until_the_code_changes_or_a_new_one_is_asked_for(twice, tmp_path):
    stored = execute.read(twice[0])
    for refresh, edit, kept in [(False, "", True), (True, "", False), (False, "1 + 1", False)]:
        new = execute.read(twice[0])
        timed = execute.code_cells(new)[2]
        timed.outputs = [new_output("stream", text="5 ns\n")]
        execute.code_cells(new)[3].source += edit
        execute.merge(stored, new, refresh)
        assert (timed.outputs[0].text != "5 ns\n") == kept


def test_a_failing_cell_leaves_the_file_and_names_cell_line_and_error(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "x = 0", "y = 1\nz = y / x\nprint(z)")
    before = path.read_bytes()
    assert execute.main([str(path)]) == 1
    out, err = capsys.readouterr()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ipynb"]
    assert out == "a.ipynb: left as it was\n"
    assert (
        err == "  a.ipynb, cell [2], line 2: z = y / x\n    ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import time\ntime.sleep(60)", "ran for more than 1 s"),
        ("import os\nos._exit(1)", "the kernel died"),
        ("if True print(1)", "line 1: if True print(1)\n    SyntaxError: "),
    ],
)
def test_a_cell_without_an_end_or_a_kernel_leaves_the_file(source, words, tmp_path):
    path = notebook(tmp_path / "a.ipynb", "# One", source)
    before = path.read_bytes()
    with pytest.raises(execute.NotebookFailed, match=r"a.ipynb, cell \[1\], line 1") as caught:
        execute.execute(path, timeout_s=1)
    assert words in str(caught.value)
    assert path.read_bytes() == before


def test_the_kernel_is_this_python_whatever_kernels_are_installed(tmp_path, monkeypatch):
    fake = tmp_path / "kernels" / "python3"
    fake.mkdir(parents=True)
    spec = {"argv": ["false", "{connection_file}"], "display_name": "x", "language": "python"}
    (fake / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    path = notebook(tmp_path / "a.ipynb", "import sys, os\nprint(sys.executable, os.getcwd())")
    nb = execute.run(path, execute.read(path), 60)
    assert nb.cells[0].outputs[0].text.split() == [sys.executable, str(tmp_path)]


def test_a_file_edited_while_it_ran_is_not_overwritten(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "open('a.ipynb', 'a').write(' ')")
    with pytest.raises(execute.NotebookFailed, match="edited while it ran"):
        execute.execute(path)
    assert "outputs" in path.read_text() and path.read_text().endswith(" ")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        execute.write(path, "new")
    assert os.listdir(tmp_path) == ["a.ipynb"] and path.read_text() == "old"


def test_a_written_file_keeps_its_mode(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text("old")
    path.chmod(0o644)
    execute.write(path, "new\n")
    assert path.read_bytes() == b"new\n" and path.stat().st_mode & 0o777 == 0o644


def test_cells_without_an_id_get_one_that_depends_on_their_text_alone(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "1", "1", "2")
    raw = json.loads(path.read_text())
    for cell in raw["cells"]:
        del cell["id"]
    raw["cells"][2]["id"] = "kept"
    raw["nbformat_minor"] = 4
    path.write_text(json.dumps(raw))
    ids = [[cell.id for cell in execute.read(path).cells] for _ in range(2)]
    assert ids[0] == ids[1] and len(set(ids[0])) == 3 and ids[0][2] == "kept"


@pytest.mark.parametrize("text", ["", "[]", '{"cells": [{"source": 3}]}', "{}", "<<<<<<< HEAD"])
def test_a_file_that_is_no_notebook_is_named(text, tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(text)
    assert execute.main(["--check", str(path)]) == 1
    assert "a.ipynb: no notebook of format 4" in capsys.readouterr().err


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path, capsys):
    for argv in ([str(tmp_path / "none.ipynb")], ["--only", "no such chapter"]):
        with pytest.raises(SystemExit, match="2"):
            execute.main(argv)
    assert "no such notebook" in capsys.readouterr().err


# --- when a stored output may stay ---------------------------------------------------------------


def picture(size=(20, 10), dot=None, level=255, compress=6) -> str:
    image = Image.new("RGB", size, "white")
    if dot:
        image.putpixel(dot, (level, 0, 0))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=compress)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (picture(), picture(), True),
        (picture(dot=(3, 3)), picture(dot=(3, 3), compress=0), True),  # other bytes
        (picture(dot=(3, 3)), picture(dot=(3, 3), level=250), True),
        (picture(dot=(3, 3)), picture(dot=(4, 3)), False),
        (picture(), picture(dot=(3, 3)), False),
        (picture(), picture(size=(20, 11)), False),
    ],
    ids=["equal", "compressed", "a shade", "moved", "a dot", "taller"],
)
def test_a_picture_stays_if_nobody_could_see_the_difference(old, new, same):
    assert execute.same_picture(old, new) == same


def shown(**data: str) -> dict:
    return new_output("display_data", {f"text/{kind}": text for kind, text in data.items()})


PRINTED = new_output("stream", text="-0.00 and 1\n")


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ([PRINTED], [new_output("stream", text="0.00 and 1\n")], True),
        ([PRINTED], [new_output("stream", text="-0.01 and 1\n")], False),
        ([PRINTED], [new_output("stream", name="stderr", text="-0.00 and 1\n")], False),
        ([PRINTED], [shown(plain="-0.00 and 1\n")], False),
        ([PRINTED], [], False),
        ([shown(plain="a", html="b")], [shown(plain="a")], False),
        ([shown(plain="a", html="b")], [shown(plain="a", html="b")], True),
        ([shown(plain="a", html="b")], [shown(plain="a", html="c")], False),
    ],
)
def test_an_output_stays_if_it_is_equal_after_the_sanitize_rules(old, new, same):
    assert execute.same_outputs(old, new) == same


def test_the_tool_and_nbval_read_the_same_sanitize_rules():
    from nbval.plugin import get_sanitize_patterns

    text = (NOTEBOOKS / "sanitize.cfg").read_text("utf-8")
    assert get_sanitize_patterns(text) == execute.SANITIZE != []


# --- what --check refuses ------------------------------------------------------------------------


def stored(path: Path, *cells: dict) -> Path:
    """A notebook as the tool would have left it, with these cells."""
    nb = new_notebook(cells=list(cells))
    for at, cell in enumerate(nb.cells):
        cell.id = f"cell{at}"
    nb.metadata["code_sha256"] = execute.code_hash(nb)
    path.write_text(execute.to_text(nb), "utf-8")
    return path


def ran(source="1", *outputs, count=1, tags=()) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, execution_count=count, outputs=list(outputs), metadata=metadata)


def printed(text: str, **how) -> dict:
    return ran("1", new_output("stream", text=text), **how)


def markdown(text: str) -> dict:
    return new_markdown_cell(text)


def result(**data: str) -> dict:
    data = {f"text/{kind}": text for kind, text in data.items()}
    return ran("1", new_output("execute_result", data, execution_count=1))


def at(*parts):
    """A path from the root, put together here: no file of the project has one in it."""
    return "/" + "/".join(parts)


ERROR = new_output("error", ename="KeyError", evalue="3", traceback=["KeyError: 3"])
WARNING = new_output("stream", name="stderr", text="UserWarning: x\n")
REFUSED = {
    "stderr (B119)": (ran("1", WARNING), "stderr"),
    "error": (ran("1", ERROR), "a stored error: KeyError: 3"),
    "traceback": (printed("Traceback (most recent call last):\n"), "a traceback"),
    "path in output": (
        printed(f"read {at('home', 'me', 'x.json')}\n"),
        f"an absolute path: '{at('home', 'm')}'",
    ),
    "path in code": (ran(f"open('{at('tmp', 'x')}')"), "an absolute path"),
    "the answer in code": (ran('reveal(guess, "B and D")'), "an answer in code that shows"),
    "the answer where a fold shows it": (
        ran('reveal(guess, "B and D")\nassert 1', tags=("hide-input", "hide-output")),
        "an answer that the fold shows",
    ),
    "path in text": (markdown(f"see {at('root', 'x')}"), "an absolute path"),
    "windows path": (printed("C:\\Users\\me\n"), "an absolute path"),
    "semicolon": (ran("plt.plot(x);"), "a trailing `;`"),
    "unrun": (ran("1", count=None), r"execution counts are \[None\], not 1 to 1"),
    "count": (ran("1", count=7), r"execution counts are \[7\], not 1 to 1"),
    "long": (ran("\n".join(["x"] * 31)), "31 lines: more than 30"),
    "empty": (ran("  "), "an empty code cell"),
    "large": (printed("x" * 700_000), "bytes: more than 600,000"),
    "address (B119)": (result(plain="<object object at 0x7f12>"), "an object repr with an address"),
    "tqdm (B116)": (ran("from tqdm import tqdm"), "a progress bar"),
    "bar (B116)": (printed("  3%|█     | 1/30\n"), "a progress bar"),
    "rewritten line (B116)": (printed("1 of 3\r2 of 3\n"), "a progress bar"),
    "ms (B116)": (printed("took 12.5 ms\n"), "a time or a speed"),
    "seconds (B116)": (printed("3 seconds\n"), "a time or a speed"),
    "speed (B116)": (printed("54 tok/s\n"), "a time or a speed"),
    "gpu (B119)": (printed("on NVIDIA H200\n"), "the name of a device"),
    "cpu (B119)": (printed("Intel(R) Xeon(R)\n"), "the name of a device"),
    "bare": (result(plain="True"), "a bare True or False"),
    "label": (markdown("# A\n\n(here)=\n\nx"), "MyST-only syntax"),
    "role": (markdown("see {ref}`here`"), "MyST-only syntax"),
    "directive": (markdown("```{note}\nx\n```"), "MyST-only syntax"),
    "colons": (markdown(":::{note}\nx\n:::"), "MyST-only syntax"),
    "alert": (markdown("> [!TIP]\n> x"), "MyST-only syntax"),
    "script": (result(html="<script src='https://x.org/a.js'></script>"), "a request to another"),
    "style": (result(html="<style>@import 'x'</style>"), "a request to another host"),
    "fetch": (result(html="<script>fetch ('/x')</script>"), "a request to another host"),
    "picture": (markdown("![x](https://x.org/a.png)"), "a request to another host"),
    "link": (markdown("see [x](none.ipynb#a)"), "a link to nothing: none.ipynb"),
    "nbval comment": (ran("# NBVAL_SKIP\n1"), "an nbval comment"),
    "filler": (markdown("This is a powerful idea."), "a filler word"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_check_refuses_and_names_file_and_cell(name, tmp_path, capsys):
    """B116, B119: no bars, times, addresses, warnings or device names in what a test compares."""
    cell, words = REFUSED[name]
    path = stored(tmp_path / "03_x.ipynb", cell)
    assert execute.main(["--check", str(path)]) == 1
    said = capsys.readouterr().err.strip()
    where = "" if name in ("unrun", "count", "large") else "cell 1"
    assert any(line.strip().startswith(f"03_x.ipynb, {where}") for line in said.splitlines())
    assert re.search(words, said), said


ALLOWED = {
    "a time that is tagged": printed("12.5 ms\n", tags=["nbval-ignore-output"]),
    "the package's source": result(plain="# 4 to 7 us", markdown="```python\n# 4 to 7 us\n```"),
    "a semicolon in other languages": ran('code = """\nint x = 3;\n"""'),
    "counts and shapes": printed("3,040 rows, [16, 64], 79 of 79; r0s r1s\n"),
    "a sentence with a slash": markdown("and/or, 1/sqrt(D), `/v1/completions`, https://x.org/home/a"),
    "math": markdown("$$\\frac{a}{b}_{ref}$$ and `{ref}` alone"),
    "a link to itself and away": markdown("[a](#b), [c](https://x.org), [me](03_x.ipynb#b)"),
    "a folded answer": markdown("<details><summary>Answer</summary>\n\nx\n\n</details>"),
    "a script of its own": result(html="<div id='a'></div><script>document.title</script>"),
    "thirty lines": ran("\n".join(["x"] * 30)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_check_lets_the_rest_pass(name, tmp_path, capsys):
    path = stored(tmp_path / "03_x.ipynb", ALLOWED[name])
    assert execute.main(["--check", str(path)]) == 0, capsys.readouterr().err


def test_check_sees_outputs_of_other_code_and_a_form_that_is_not_ours(tmp_path, capsys):
    path = stored(tmp_path / "a.ipynb", ran("1 + 1"))
    path.write_text(path.read_text().replace("1 + 1", "1 + 2"))
    assert execute.main(["--check", str(path)]) == 1
    assert "outputs of other code than is stored" in capsys.readouterr().err
    path = stored(tmp_path / "b.ipynb", ran("1 + 1"))
    path.write_text(path.read_text().replace('"metadata": {}', '"metadata": {"scrolled": true}'))
    assert execute.main(["--check", str(path)]) == 1
    assert "not in the form that execute.py writes" in capsys.readouterr().err


def test_the_notebooks_of_this_repository_keep_the_rules(capsys):
    """B116, B119: every chapter and every answer, as stored."""
    assert execute.main(["--check"]) == 0, capsys.readouterr().err


# --- nbval ---------------------------------------------------------------------------------------

SLOW_STDOUT = """
import sys, time
for i in range(4):
    print("row", i)
    sys.stdout.flush()
    time.sleep(0.12)  # beyond the kernel's flush interval: several messages
"""


@pytest.fixture
def slow(tmp_path):
    path = notebook(tmp_path / "slow.ipynb", SLOW_STDOUT, "2 + 2")
    assert execute.main([str(path)]) == 0
    return tmp_path


def test_nbval_passes_twice_over_a_slow_stdout_and_our_warning_filters(slow):
    """B116: a stream in several messages is one output. B117: nbval's wait of 5 s is raised."""
    (slow / "probe.py").write_text(
        "def pytest_runtest_setup(item):\n    assert item.output_timeout == 60.0\n"
    )
    for more in ([], ["-p", "probe"]):
        done = pytest_run(slow, *more, env={**os.environ, "PYTHONPATH": str(slow)})
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_nbval_fails_on_a_changed_output(slow):
    path = slow / "slow.ipynb"
    path.write_text(path.read_text().replace("row 2", "row 5"))
    done = pytest_run(slow)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout


def test_nbval_passes_on_a_busy_machine(slow):
    """B117: one processor, shared with a loop that never rests."""

    def on_one_processor():
        if hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(busy, preexec_fn=on_one_processor) as loop:
        try:
            done = pytest_run(slow, preexec_fn=on_one_processor)
        finally:
            loop.kill()
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_nbval_with_coverage_is_refused(slow):
    """B118: the two together stall."""
    (slow / "cov_option.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--cov', dest='cov_source')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(slow)}
    done = pytest_run(slow, "-p", "cov_option", "--cov", "spindle", env=environment)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "run --nbval in a command of its own, without --cov" in done.stderr


@pytest.mark.parametrize("name", ["Makefile", ".ci/run", "pyproject.toml"])
def test_no_command_of_ours_asks_for_both(name):
    """B118: nor does any command that we ship."""
    path = NOTEBOOKS.parent / name
    text = path.read_text("utf-8").replace("\\\n", " ") if path.exists() else ""
    assert not [line for line in text.splitlines() if "--nbval" in line and "--cov" in line]


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_chapters_pass_strictly_with_one_and_with_two_threads(threads):
    """B119: no stored output depends on the number of threads."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "notebooks"]
    command += ["--nbval-sanitize-with", "notebooks/sanitize.cfg", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        command, cwd=NOTEBOOKS.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
