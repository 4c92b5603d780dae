"""The reading guide, the notation and the changelog say what is there."""

import json
import re
from pathlib import Path

import pytest

from spindle import bench, cli

ROOT = Path(__file__).parents[1]
READING = (ROOT / "book/reading.md").read_text(encoding="utf-8")
NOTATION = (ROOT / "book/notation.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "book/changelog.md").read_text(encoding="utf-8")
CHAPTERS = {
    path.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
ROW = re.compile(
    r"^\| \[(.*?)\]\(\.\./notebooks/(\w+\.ipynb)\) \| (\d+) \| (.*?) \| (\S.*) \|$", re.MULTILINE
)
ROWS = {
    name: (title, int(minutes), needs) for title, name, minutes, needs, _ in ROW.findall(READING)
}
NEEDS = {"smollm2": "`smollm2`", "c++": "a C++ compiler"}


def test_the_guide_has_every_chapter_in_order():
    assert list(ROWS) == sorted(CHAPTERS)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_takes_the_minutes_and_needs_what_the_guide_says(name):
    nb, (title, minutes, needs) = CHAPTERS[name], ROWS[name]
    prose = ["".join(cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "markdown"]
    assert prose[0].startswith(f"# {title}\n")
    assert abs(minutes - len(" ".join(prose).split()) / 200) <= 1
    wanted = nb["metadata"].get("spindle", {}).get("needs", [])
    assert needs == (", ".join(NEEDS[what] for what in wanted) or "–")


@pytest.mark.parametrize("part", ["An afternoon", "A week", "With a GPU"])
def test_the_minutes_of_a_way_through_the_book_add_up(part):
    text = READING.split(f"\n## {part}\n")[1].split("\n## ")[0]
    chapters = re.findall(r"\(\.\./notebooks/(\w+\.ipynb)\)", text)
    assert len(chapters) == len(set(chapters)) >= 5
    stated = re.search(r"(\d+) minutes of reading", text)
    assert stated is not None and int(stated[1]) == sum(ROWS[name][1] for name in chapters)
    for name, minutes in re.findall(r"(\w+\.ipynb)\), (\d+) minutes", text):
        assert int(minutes) == ROWS[name][1]


def test_a_week_has_every_chapter():
    text = READING.split("\n## A week\n")[1].split("\n## ")[0]
    assert set(re.findall(r"(\w+\.ipynb)", text)) == set(CHAPTERS)


def test_the_notation_has_the_shape_that_the_tour_runs():
    code = "".join("".join(cell["source"]) for cell in CHAPTERS["00_tour.ipynb"]["cells"])
    fields = {"E": "hidden_size", "F": "intermediate_size", "V": "vocab_size"}
    fields |= {"L": "num_hidden_layers", "H": "num_attention_heads", "Hk": "num_key_value_heads"}
    for letter, field in fields.items():
        count = re.search(rf'"{field}": (\d+)', code)
        assert count is not None
        assert re.search(rf"^\| `{letter}` \| .* \| {int(count[1]):,} in SmolLM2", NOTATION, re.M)


def test_every_letter_of_a_shape_in_the_code_is_in_the_notation():
    shape = re.compile(r"\[(?:\d+|[A-Z]k?|2F)(?:(?:, | \* )(?:\d+|[A-Z]k?|2F))*\]")
    used: set[str] = set()
    for path in (ROOT / "spindle").rglob("*.py"):
        for found in shape.findall(path.read_text(encoding="utf-8")):
            used |= set(re.findall(r"[A-Z]k?", found))
    known = set(re.findall(r"^\| `(\w+)` \|", NOTATION, re.MULTILINE))
    assert len(used) >= 14 and used <= known


def test_the_changelog_names_every_command_and_bench():
    commands = re.findall(
        r"commands\.add_parser\(\s*\"(\w+)\"", Path(cli.__file__).read_text("utf-8")
    )
    assert {"generate", "chat", "fetch", "doctor", "bench"} <= set(commands)
    said = CHANGELOG.split("**Commands.**")[1].split("\n\n")[0]
    assert [
        name
        for name in [*commands, *bench.BENCHES]
        if f"`{name}`" not in said.replace("`spindle ", "`")
    ] == []
