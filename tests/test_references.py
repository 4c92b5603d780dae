"""The references and the sources agree: who is named is listed, and stands where the page says."""

import json
import re
from pathlib import Path

import pytest
from pybtex.database import parse_file

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book/references.md").read_text(encoding="utf-8")
BIB = parse_file(ROOT / "book/references.bib").entries
ITEMS = re.findall(r"^\{cite:t\}`(\w+)`, \d{4}\n: (.*)$", PAGE, re.MULTILINE)
SOURCES = [
    path
    for ending in ("py", "cu", "cuh", "cpp", "h")
    for path in sorted((ROOT / "spindle").rglob(f"*.{ending}"))
]
CHAPTERS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
WORDS = {  # what a work is called where its author is not
    "nvidia2024practices": "Best Practices",
    "nvidia2024programming": "Programming Guide",
    "nvidia2024sheets": "H200|H100",
    "okabe2008colour": "Color Universal Design",
    "hillis1986data": "running sum",
    "stafford2011better": "Stafford",
}
NAMED = re.compile(
    r"\b([A-Z][\w’'-]+)(?:,? (?:and|&) [A-Z][\w-]+| et al\.|(?:, [A-Z]\w+)+,? (?:and )?[A-Z]\w+)?"
    r",? \(?((?:19|20)\d\d)\b"
)
NO_AUTHORS = {"SIGMOD", "Python", "PEP", "Unicode", "January", "February", "March", "April", "May"}
NO_AUTHORS |= {"June", "July", "August", "September", "October", "November", "December"}


def prose(path: Path) -> str:
    """What a source says: a notebook's Markdown and code, a file as it is, on one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.sub(r"\s+(?:#|//|\*)?\s*", " ", text)


def family(key: str) -> str:
    """The first author's family name."""
    person = BIB[key].persons["author"][0]
    return " ".join(map(str, [*person.rich_prelast_names, *person.rich_last_names]))


KNOWN = {(family(key), entry.fields["year"]) for key, entry in BIB.items()}


def test_each_work_has_one_item_and_each_item_its_work():
    keys = [key for key, _ in ITEMS]
    assert len(keys) > 50 and sorted(keys) == sorted(BIB)
    years = dict(re.findall(r"^\{cite:t\}`(\w+)`, (\d{4})$", PAGE, re.MULTILINE))
    assert years == {key: entry.fields["year"] for key, entry in BIB.items()}


@pytest.mark.parametrize(("key", "words"), ITEMS, ids=[key for key, _ in ITEMS])
def test_a_work_is_named_where_the_page_says(key, words):
    spots = [ROOT / spot for spot in re.findall(r"`(spindle/[\w/.]+)`", words)]
    spots += [
        ROOT / "book" / spot for spot in re.findall(r"\]\((\.\./notebooks/\w+\.ipynb)\)", words)
    ]
    assert spots or key == "allal2025smollm2"
    called = WORDS.get(key, family(key))
    assert [spot.name for spot in spots if not re.search(called, prose(spot), re.IGNORECASE)] == []


@pytest.mark.parametrize("path", [*SOURCES, *CHAPTERS], ids=lambda path: path.name)
def test_who_is_named_with_a_year_is_listed(path):
    named = {pair for pair in NAMED.findall(prose(path)) if pair[0] not in NO_AUTHORS}
    assert named - KNOWN == set()


def test_a_work_is_cited_in_full():
    for key, entry in BIB.items():
        assert entry.persons["author"] and {"title", "year"} <= set(entry.fields), key
        assert len(entry.persons["author"]) > 1 or "others" not in str(entry.persons["author"]), key


def test_names_with_years_are_found():
    text = (
        "(Su et al. 2021, section 3), Zhang & Sennrich 2019, Knuth, Morris and Pratt 1977, He 2025"
    )
    assert NAMED.findall(text) == [
        ("Su", "2021"),
        ("Zhang", "2019"),
        ("Knuth", "1977"),
        ("He", "2025"),
    ]
