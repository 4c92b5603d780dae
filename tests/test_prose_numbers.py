"""Numbers in the chapters' prose: each is in the chapter's outputs or code, or is made of such."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
from prose_numbers import GIVEN

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")
SMALL = 12  # as a word would say it: not looked at
NOT_PROSE = (
    r"```(?s:.*?)```|`[^`]*`",  # code
    r"\$\$(?s:.*?)\$\$|\$[^$]*\$",  # formulas
    r"\]\([^)]*\)",  # where a link leads
    r"[Cc]hapters? \d\d(?:(?:,| and| to) \d\d)*|\b(?:19|20)\d\d\b|^#.*$",  # chapters, years, titles
    r"^\*\*(?:Predict|Break|Build)\.\*\*.*$",  # exercises, which may ask of any number
)


@cache
def notebook(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["cells"]


def numbers(text: str) -> set[str]:
    return {found.replace(",", "") for found in NUMBER.findall(text)}


def said(markdown: str) -> set[str]:
    """The numbers of a cell's prose that are looked at."""
    for pattern in NOT_PROSE:
        markdown = re.sub(pattern, " ", markdown, flags=re.MULTILINE)
    return {n for n in numbers(markdown) if float(n) > SMALL or "." in n}


@cache
def shown(path: Path) -> set[str]:
    """All numbers in a notebook's code, and in what its cells have put out."""
    texts = []
    for cell in notebook(path):
        if cell["cell_type"] == "code":
            outputs = [o.get("data", {"text/plain": o.get("text", "")}) for o in cell["outputs"]]
            texts += ["".join(v) for o in outputs for k, v in o.items() if k.startswith("text/")]
            texts.append("".join(cell["source"]).replace("_", ""))
    plain = [re.sub(r"(?<=\d),(?=\d{3})", "", text) for text in texts]
    return {n for text in plain for n in re.findall(r"\d+(?:\.\d+)?", text)}


def is_shown(number: str, path: Path) -> bool:
    """Whether a notebook shows it, or something that rounds to it, or the share of a percentage."""
    if number in shown(path):
        return True
    decimals = len(number.partition(".")[2])
    values = [float(n) for n in shown(path) if "." in n]
    shares = [100 * value for value in values if value <= 1]
    return any(round(value, decimals) == float(number) for value in values + shares)


def is_rounded(number: str, value: float) -> bool:
    """Whether `number` is the value, as exactly as its digits say."""
    places = len(number.partition(".")[2])
    if not places:
        places = len(number.rstrip("0")) - len(number)
    return round(value, places) == float(number)


def is_given(number: str, words: str) -> bool:
    """Whether it comes of the calculation, is shown by that notebook, or a source is named."""
    if (other := NOTEBOOKS / f"{words}.ipynb").exists():
        return is_shown(number, other)
    if words[0].isupper():
        return True
    return is_rounded(number, eval(words, {"e": math.e, "ceil": math.ceil}))


def unfounded(chapter: str, prose: set[str]) -> set[str]:
    """Those of the numbers that this chapter shows nowhere."""
    return {n for n in prose if not is_shown(n, NOTEBOOKS / f"{chapter}.ipynb")}


def prose_of(path: Path) -> set[str]:
    cells = [cell for cell in notebook(path) if cell["cell_type"] == "markdown"]
    return set().union(*(said("".join(cell["source"])) for cell in cells))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_number_in_prose_is_shown_or_made_of_what_is(chapter):
    given = GIVEN.get(chapter, {})
    prose = prose_of(NOTEBOOKS / f"{chapter}.ipynb")
    assert unfounded(chapter, prose - set(given)) == set(), "in no output, nor in GIVEN"
    assert set(given) <= prose, "no longer said: not needed in prose_numbers.py"
    wrong = {number: words for number, words in given.items() if not is_given(number, words)}
    assert wrong == {}


def test_a_number_that_nothing_shows_is_noticed():
    assert unfounded("09_continuous_batching", {"231", "412", "1.73"}) == set()
    wrong = {"233", "417", "58.7", "298", "182"}  # some of which other chapters show
    assert unfounded("09_continuous_batching", wrong) == wrong


@pytest.mark.parametrize(
    "number, value, right",
    [
        ("520", 518.5, True),
        ("520", 512, False),
        ("2.7", 2.74, True),
        ("2.7", 2.76, False),
        ("106500", 106_506, True),
        ("106500", 106_580, False),
        ("81", 81, True),
    ],
)
def test_a_number_is_as_exact_as_its_digits(number, value, right):
    assert is_rounded(number, value) == right


@pytest.mark.parametrize(
    "markdown, found",
    [
        ("231 steps, or 1,371 tokens.", {"231", "1371"}),
        ("Chapters 07 and 08, in 2023: `x = 99`, $n = 77$, [of 55](a_66.ipynb)", {"55"}),
        ("# 17 · A title\n\n2.5 times, 12 tokens", {"2.5"}),
    ],
)
def test_what_counts_as_a_number_in_prose(markdown, found):
    assert said(markdown) == found
