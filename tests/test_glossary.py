"""The glossary and the chapters agree: a term is defined once, in its home, and is found there."""

import json
import re
from pathlib import Path

import pytest
from modules import module_of

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "book/glossary.md").read_text(encoding="utf-8")
CHAPTERS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))["cells"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}


HOMES = module_of(ROOT / "book/_ext/terms.py").homes(GLOSSARY)
HOME_OF = {term: chapter for chapter, terms in HOMES.items() for term in terms}
ENTRIES = re.findall(r"^(\w.*)$", GLOSSARY.split("```{glossary}")[1], re.MULTILINE)

# A term may be met in passing before the chapter that defines it: there, and nowhere else.
PREVIEWS = {
    ("00_tour", "batch"), ("00_tour", "block"), ("00_tour", "knee"),
    ("00_tour", "slot"), ("00_tour", "speculation"),
    ("03_sampling", "batch"), ("09_continuous_batching", "group"), ("12_one_stream", "kernel"),
}  # fmt: skip
QUOTED = {("01_gpt2_forward", "context")}  # a word of an output
# Emphasis in the words of a definition that defines nothing.
NO_TERMS = {"all", "dictionary", "generator", "isles", "its", "static", "the target itself"}


def words(chapter: str) -> str:
    """A chapter's prose as one line."""
    cells = [cell for cell in CHAPTERS[chapter] if cell["cell_type"] == "markdown"]
    return " ".join("".join(cell["source"]) for cell in cells).replace("\n", " ")


def everything(chapter: str) -> str:
    """Prose, code and what is printed."""
    return json.dumps(CHAPTERS[chapter], ensure_ascii=False).lower()


def forms(term: str) -> set[str]:
    """The term as it may stand in a sentence."""
    return {term.lower(), f"{term.lower()}s", f"{term.lower()}es"}


def term_of(word: str) -> str | None:
    """The entry that an emphasised word is a form of."""
    return next((term for term in ENTRIES if word.lower() in forms(term)), None)


def emphasised(chapter: str) -> set[str]:
    """The terms that a chapter sets in italics or bold, in any form."""
    found = re.findall(r"(?<![*\w])\*{1,2}([^*]{2,40}?)\*{1,2}(?![*\w])", words(chapter))
    return {term for word in found if (term := term_of(word.rstrip(",.:"))) is not None}


DEFINING = re.compile(  # "is called *x*", "A *x* is", "*x*, which", and bold in front of a colon
    r"(?:\bcalled|\bis an?|\bThis is|\bA|\bAn|\bin \w+|\bof|\bone) \*([a-z][\w -]+?)\*(?=[ ,.:;)])"
    r"|\*([a-z][\w -]+?)\*,? (?:which|is (?:to|what|the))\b"
    r"|\*\*([A-Z]{3,}|[a-z]+)\*\*(?:,| is an?\b)"
)


def defined(chapter: str) -> set[str]:
    """What a chapter's sentences define, by their form."""
    found = ["".join(groups) for groups in DEFINING.findall(words(chapter))]
    return {word for word in found if len(word.split()) <= 3} - NO_TERMS


def test_every_entry_has_a_home_and_each_is_defined_once():
    assert len(ENTRIES) > 120
    assert sorted(HOME_OF) == sorted(ENTRIES)
    assert len({term.lower() for term in ENTRIES}) == len(ENTRIES)
    named = {form for term in ENTRIES for form in forms(term) - {term.lower()}}
    assert named.isdisjoint(term.lower() for term in ENTRIES)  # no plural beside its singular


def test_every_home_is_a_chapter_under_its_own_name():
    links = re.findall(r"Home: \[(.*)\]\(\.\./notebooks/(\w+)\.ipynb\)\.", GLOSSARY)
    assert len(links) == len(ENTRIES)
    titles = {name: "".join(cells[0]["source"]).splitlines()[0] for name, cells in CHAPTERS.items()}
    assert [link for link in links if titles.get(link[1]) != f"# {link[0]}"] == []


@pytest.mark.parametrize("chapter", HOMES)
def test_a_term_is_met_in_its_home(chapter):
    text = everything(chapter)
    lost = [t for t in HOMES[chapter] if not re.search(rf"\b{stem(t)}", text)]
    assert lost == []


def stem(term: str) -> str:
    """What a term's forms in a text begin with."""
    special = {"bpe": "merge the pair", "inverse cdf": "inverse_cdf", "uniform number": "uniform"}
    special |= {"bonus token": "bonus", "block pool": "pool", "cached block": "cached"}
    special |= {"causal mask": "mask", "chained hash": "chained_hash", "flop": "g?flop"}
    special |= {"prefix index": "index", "poisson arrivals": "poisson"}
    special |= {"token budget": "budget", "acceptance rate": "acceptance"}
    return special.get(term.lower(), re.escape(term.lower().rstrip("y")))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_a_chapter_defines_is_in_the_glossary_with_that_home(chapter):
    unknown = {word for word in defined(chapter) if term_of(word) is None}
    assert unknown == set()
    later = list(CHAPTERS).index(chapter)
    for term in map(term_of, defined(chapter)):
        home = list(CHAPTERS).index(HOME_OF[term])
        assert home <= later or (chapter, term) in PREVIEWS, f"{term}: its home is {HOME_OF[term]}"


def test_no_term_is_set_apart_before_its_home():
    order = list(CHAPTERS)
    early = {
        (chapter, term)
        for chapter in order
        for term in emphasised(chapter)
        if order.index(chapter) < order.index(HOME_OF[term])
    }
    assert early - PREVIEWS - QUOTED == set()


def test_the_forms_that_define_are_found():
    cell = {
        "cell_type": "markdown",
        "source": "It is called *zeal*, *ardour*, which is rare, and **ZZZ**, a",
    }
    CHAPTERS["zz"] = [cell]
    try:
        assert defined("zz") == {"zeal", "ardour", "ZZZ"}
    finally:
        del CHAPTERS["zz"]
