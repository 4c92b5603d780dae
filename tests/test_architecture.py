"""The page of the architecture says what is there: names that exist, imports that are made."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import test_public_api as rules
from bs4 import BeautifulSoup
from modules import module_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book/architecture.md").read_text(encoding="utf-8")
SVG = (ROOT / "book/_static/architecture.svg").read_text(encoding="utf-8")


# --- the table -----------------------------------------------------------------------------------


def test_the_table_on_the_page_is_the_one_that_the_test_reads():
    imports = module_of(ROOT / "book/_ext/imports.py")
    source = Path(rules.__file__).read_text(encoding="utf-8")
    assert imports.table(source) == (rules.EVERYONE_MAY, rules.MAY_IMPORT)
    assert PAGE.count(imports.PLACEHOLDER) == 1


def test_every_room_that_is_there_has_its_line():
    drawn = module_of(ROOT / "book/_ext/imports.py").drawn(ROOT)
    rooms = {rules.room_of(module) for module in rules.modules()} - {""}
    lines = re.findall(r"^\| `([\w.]+)` \| \S.* \| \S.* \|$", drawn, re.MULTILINE)
    assert set(lines) == rooms - set(rules.EVERYONE_MAY)


# --- the drawing ---------------------------------------------------------------------------------


def arrows() -> set[tuple[str, str]]:
    """Whom the drawing lets import whom."""
    paths = BeautifulSoup(SVG, "html.parser").find_all(attrs={"data-from": True})
    return {(path["data-from"], to) for path in paths for to in path["data-to"].split()}


def made() -> set[tuple[str, str]]:
    """Imports between rooms as the sources have them, a room being what stands before a dot."""
    rooms = {module.partition(".")[0] for module in rules.modules()}
    found = set()
    for module, path in rules.modules().items():
        for name in rules.imports_of(path.read_text(encoding="utf-8"), module):
            _, _, inner = name.partition("spindle.")
            here, there = module.partition(".")[0], inner.partition(".")[0]
            if there in rooms and here != there:
                found.add((here, there))
    return found


def test_the_drawing_has_every_import_between_its_rooms_and_no_other():
    rooms = {room for pair in arrows() for room in pair}
    assert {"serve", "decode", "kvcache", "model", "kernels", "tokenizer", "hub"} < rooms
    inside = {pair for pair in made() if set(pair) <= rooms - {"cli"}}
    drawn = {pair for pair in arrows() if "cli" not in pair}
    known = {("tokenizer", "hub")}  # within one box
    assert inside - known <= drawn
    allowed = {(a, b) for a, b in drawn if rules.may(a, b) or rules.may(f"{a}.weights", b)}
    assert drawn - allowed - {("serve", "decode")} == set()  # of decode, serve has some modules


def test_the_drawing_can_be_read_without_seeing_it():
    picture = BeautifulSoup(SVG, "html.parser").svg
    ids = picture["aria-labelledby"].split()
    assert picture["role"] == "img" and [picture.find(id=one).name for one in ids] == [
        "title",
        "desc",
    ]
    assert len(picture.desc.get_text()) > 200


def defined() -> set[str]:
    """The classes, functions and files of the package, by name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in rules.modules().values())
    return set(re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE))


def test_every_name_in_the_drawing_is_a_class():
    names = re.findall(r"\b(?:LLM|[A-Z]\w*KV|Block\w+|Scheduler|Runner|Engine|GPT2|Llama)\b", SVG)
    assert len(names) >= 9 and set(names) <= defined()


# --- the life of a request ------------------------------------------------------------------------


ROLES = re.findall(r"\{py:(meth|class|func)\}`[^<`]*<([\w.]+)>`", PAGE)


def found(path: str) -> object:
    """What a dotted path leads to."""
    parts = path.split(".")
    for at in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for name in parts[at:]:
            thing = getattr(thing, name)
        return thing
    raise LookupError(path)


@pytest.mark.parametrize(("kind", "path"), ROLES, ids=[path for _, path in ROLES])
def test_a_name_on_the_page_is_there_and_is_on_the_api_page(kind, path):
    thing = found(path)
    assert inspect.isclass(thing) if kind == "class" else callable(thing)
    owner = found(path.rpartition(".")[0]) if kind == "meth" else thing
    assert inspect.getdoc(owner) and not owner.__name__.startswith("_")


def test_the_life_of_a_request_has_eight_steps_each_with_a_name_and_a_chapter():
    life = PAGE.split("## The life of a request")[1].split("\n## ")[0]
    steps = re.split(r"^\d\. ", life, flags=re.MULTILINE)[1:]
    assert len(steps) == 8
    assert all("{py:" in step and "../notebooks/" in step for step in steps)


def test_every_chapter_of_the_book_proper_is_linked():
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        assert f"../notebooks/{path.name}" in PAGE, path.name


def test_owners_and_writers_are_there():
    rows = re.findall(r"^\| (?!state|---)(.*) \|$", PAGE.split("## Who owns what")[1], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    attributes = {"stored", "trace"}
    assert len(rows) == 11
    assert {part for name in named for part in name.split(".")} <= defined() | attributes
