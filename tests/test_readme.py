"""The README and the pages that it leads to say what is there: their Python runs, their figures
are those of the page of figures, their links lead somewhere, and the chapters have their names.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from modules import module_of

from spindle import Engine, Tokenizer, cli, load_hf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USING = (ROOT / "book/using.md").read_text(encoding="utf-8")
FIGURES = (ROOT / "book/figures.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# --- what is printed runs ------------------------------------------------------------------------


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_python_of_the_readme_runs(capsys):
    (block,) = python_of(README)
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_python_of_using_the_package_runs_one_block_after_the_other(capsys):
    names: dict[str, object] = {}
    blocks = python_of(USING)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "using.md", "exec"), names)
    assert "tokens after a prompt of" in capsys.readouterr().out
    assert names["tokens"].shape == (2,)


def test_make_run_prints_what_the_readme_shows():
    """The text; how long it took is the machine's."""
    shown = re.search(r"```\n(If the argument is.*?)\n60 tokens after", README, re.DOTALL)
    assert shown is not None
    tok = Tokenizer("tiny")
    prompt = tok.encode("If the argument is")
    options = {"temperature": 0.6, "top_p": 0.9, "seed": 2}
    ids, _ = Engine(load_hf("tiny")).generate(prompt, max_new_tokens=60, **options)
    assert tok.decode(prompt + ids) == shown[1]
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-n 60" in recipe and "--temperature 0.6 --top-p 0.9 --seed $(SEED)" in recipe


def test_every_target_of_make_that_is_named_is_there():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = set(re.findall(r"`make ([a-z-]+)", README + USING + FIGURES))
    named |= set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "lab", "test", "book", "matrix", "museum", "fuzz", "soak"} <= named
    assert named <= set(targets)


def test_every_command_of_spindle_that_is_named_takes_its_options(capsys):
    """Each is parsed, and not run; what stands for a value of the reader's is left as it is."""
    commands = list(commands_of(README + USING + FIGURES))
    assert len(commands) > 15
    for words in commands:
        try:
            cli._parser(words).parse_args(words)
        except SystemExit as end:
            assert end.code == 0, f"spindle {' '.join(words)}: {capsys.readouterr().err}"


def commands_of(page: str) -> Iterator[list[str]]:
    found = re.findall(r"^(?:\.venv/bin/)?spindle (.+)$", page, re.MULTILINE)
    found += re.findall(r"`(?:SPINDLE_EMULATE=1 )?spindle ([^`]+)`", page)
    for command in found:
        yield shlex.split(command.replace("-m MODEL", "-m tiny"))


# --- one set of figures --------------------------------------------------------------------------


def rows_of(page: str) -> set[str]:
    """The rows of its tables in which something was measured."""
    rows = re.findall(r"^\|.*\|$", page, re.MULTILINE)
    figure = r"(?<![\d.=])\d+\.\d+(?!\.)"
    return {row for row in rows if re.search(figure, row) and ".ipynb" not in row}


def measured(page: str) -> list[str]:
    """The figures of its sentences that come from a clock, a scale or a comparison."""
    text = re.sub(r"```.*?```|!\[[^]]*\]", " ", page, flags=re.DOTALL)  # the picture: see below
    text = re.sub(r"^\|.*$|`[^`]*`|\]\([^)]*\)|Python 3\.11", " ", text, flags=re.MULTILINE)
    decimals = re.findall(r"(?<![\d.,])\d+\.\d+(?![\d.])", text)
    units = r"(?:%|(?: |\n)(?:ms|MB|GB/s|passes a second|tokens a second))"
    return decimals + re.findall(rf"(?<![\d.,])(\d[\d,]*)(?={units})", text)


LIMITS = {"93", "128"}  # MB of a download, and of recorded steps that an LLM keeps: not measured


@pytest.mark.parametrize("page", [README, USING], ids=["README", "using"])
def test_the_figures_are_those_of_the_page_of_figures(page):
    assert rows_of(page) <= rows_of(FIGURES)
    known = set(re.findall(r"\d[\d,]*(?:\.\d+)?", FIGURES)) | LIMITS
    missing = [figure for figure in measured(page) if figure not in known]
    assert missing == [] and len(measured(page)) >= 6


def test_the_page_of_figures_has_the_readmes_tables_whole():
    assert len(rows_of(README)) == 10  # eight engines, two models in 8 bits
    assert rows_of(README) < rows_of(FIGURES)


def test_each_table_of_figures_says_its_command():
    sections = FIGURES.split("\n## ")[2:-1]  # behind the preamble and where the book began
    assert len(sections) == 4
    for section in sections:
        assert "spindle bench " in section, section.split("\n")[0]
    assert re.search(r"\*\*The machine\*\*.*\d{4}-\d\d-\d\d", FIGURES, re.DOTALL)


def test_the_page_of_figures_has_those_of_the_cover():
    tree = ast.parse((ROOT / "book/_ext/front.py").read_text(encoding="utf-8"))
    given = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id in ("MACHINE", "HUGGING_FACE_TOK_S")
    }
    machine, rows = given["MACHINE"], " ".join(FIGURES.split())
    assert f"| weights | {machine['weights_bytes'] / 1e9:.3f} GB |" in rows
    assert f"| arithmetic of a token | {machine['flops_per_token'] / 1e9:.2f} GFLOP |" in rows
    passes = machine["memory_bytes_per_s"] / machine["weights_bytes"]
    assert (
        f"{machine['memory_bytes_per_s'] / 1e9:.0f} GB/s, so {passes:.0f} passes a second" in rows
    )
    tokens = round(machine["flops_per_s"] / machine["flops_per_token"], -1)
    assert f"{machine['flops_per_s'] / 1e9:.0f} GFLOP/s, so about {tokens:.0f} tokens" in rows
    assert f"| {given['HUGGING_FACE_TOK_S']} tokens a second |" in rows


# --- the picture ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def picture():
    """book/readme_picture.py as a module."""
    return module_of(ROOT / "book/readme_picture.py")


def test_the_picture_shows_the_figures_of_the_tables(picture):
    machine = picture.MACHINE
    assert f"{machine.memory_bytes_per_s / 1e9:.1f} GB/s in the run" in FIGURES
    bound = f"{machine.flops_per_s / 1e9:.0f} GFLOP/s, so about {machine.compute_bound():,.0f} "
    assert bound in " ".join(FIGURES.split())
    dots = {label: (rows, speed) for label, rows, speed in picture.OURS + picture.THEIRS}
    assert f"| **spindle** | {dots['one stream'][1]} | {dots['eight streams'][1]} |" in README
    theirs = [dots["transformers, one stream"][1], dots["transformers, eight"][1]]
    assert "| transformers, `generate` | {} · 1.68 | {} · 2.43 |".format(*theirs) in README
    rows, speed = dots["one stream, quoting, five guesses"]
    assert rows == 1 + 5 and f"| | 5 | 5.38 | 53.2 → {speed} |" in FIGURES


def test_the_readme_says_in_words_what_its_picture_shows(picture):
    alt = re.search(r"!\[(.*?)\]\(book/_static/readme\.svg\)", README, re.DOTALL)
    assert alt is not None
    shown = [picture.MACHINE.memory_bound(1), picture.MACHINE.compute_bound()]
    shown += [speed for _, _, speed in (*picture.OURS, picture.THEIRS[0])]
    assert [f"{x:,.0f}" for x in shown if f" {x:,.0f}" not in " ".join(alt[1].split())] == []


def test_the_picture_is_small_and_is_what_its_script_draws(picture):
    text = picture.FILE.read_text(encoding="utf-8")
    assert len(text.encode()) <= 100_000
    assert "<image" not in text and 'href="http' not in text
    if f"Matplotlib v{matplotlib.__version__}," not in text:
        pytest.skip("another version of matplotlib draws other curves")
    assert picture.svg() == text


# --- what it leads to ----------------------------------------------------------------------------


def test_somebody_who_lands_on_the_readme_reads_it_in_a_minute():
    assert len(README.splitlines()) < 150


@pytest.mark.parametrize("page", ["README.md", "book/using.md", "book/figures.md"])
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    gone = [link for link in links if "://" not in link]
    assert [link for link in gone if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_in_the_readme_under_its_own_name(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
    assert re.search(
        rf"^\| \[{re.escape(title)}\]\(notebooks/{path.name}\) \| \S.* \|$", README, re.M
    )


def test_how_to_cite_it_has_the_version_that_this_is():
    for text in (README, (ROOT / "CITATION.cff").read_text(encoding="utf-8")):
        assert "The spindle authors" in text
        assert re.search(rf"version(?: = \{{|: ){re.escape(PROJECT['version'])}", text)
