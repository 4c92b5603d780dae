"""Stop strings in text that comes in pieces: equal to their definition, however the text is cut."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spindle.decode.stops import StopScanner

# Two letters and short stops: borders, overlaps and stops within stops in most examples.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
PIECES = st.lists(st.text("abc", max_size=6), max_size=12)


def first_match(text: str, stops: list[str], begin: int = 0) -> tuple[int, str] | None:
    """The definition: the first character (from `begin` on) that completes a stop, the longest."""
    for end in range(begin + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def may_be_a_stop(text: str, stops: list[str]) -> int:
    """The definition: the length of the longest suffix that is a proper prefix of a stop."""
    prefixes = [stop[:n] for stop in stops for n in range(len(stop))]
    return max((len(p) for p in prefixes if text.endswith(p)), default=0)


@given(PIECES, STOPS)
@example(["a", "aab"], ["aab"])
@example(["abc", "ab"], ["abcab", "ca"])
def test_the_deltas_are_the_text_before_the_first_match(pieces, stops):
    """B64, B65: the same for every cut; never a character of the match, all of what precedes it."""
    text, scanner = "".join(pieces), StopScanner(stops)
    deltas = [scanner.push(piece) for piece in pieces]
    deltas.append(scanner.flush())
    match = first_match(text, stops)
    if match is None:
        assert ("".join(deltas), scanner.matched) == (text, None)
    else:
        assert ("".join(deltas), scanner.matched) == (text[: match[0]], match[1])
        assert deltas[-1] == ""


@given(PIECES, STOPS)
def test_what_is_held_back_is_what_may_still_be_a_stop_and_no_more(pieces, stops):
    """B65, B66: at each moment, exactly the longest suffix that is a proper prefix of a stop."""
    scanner, text, shown = StopScanner(stops), "", ""
    for piece in pieces:
        text, shown = text + piece, shown + scanner.push(piece)
        if scanner.matched is not None:
            return
        assert shown == text[: len(text) - may_be_a_stop(text, stops)]


@given(PIECES, PIECES, STOPS)
def test_what_is_completed_too_early_is_text(early, late, stops):
    """A stop counts if a character completes it that comes late, wherever the stop begins."""
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece, may_stop=False) for piece in early)
    before = "".join(early)
    assert shown == before[: len(before) - may_be_a_stop(before, stops)]
    assert scanner.matched is None
    shown += "".join(map(scanner.push, late)) + scanner.flush()
    text = before + "".join(late)
    match = first_match(text, stops, begin=len(before))
    assert shown == (text if match is None else text[: match[0]])
    assert scanner.matched == (match and match[1])


def test_a_stop_that_spans_pieces():
    """B64: 'Hel', 'lo wor', 'ld' with the stop 'o w': 'Hell', known at the second piece."""
    scanner = StopScanner(["o w"])
    assert [scanner.push("Hel"), scanner.push("lo wor")] == ["Hel", "l"]
    assert scanner.matched == "o w"
    assert (scanner.push("ld"), scanner.flush()) == ("", "")


def test_a_false_start_is_released_by_what_breaks_it():
    """B65: 'own foo' with the stop 'own goal': held and released; the last 'o' may begin one."""
    scanner, pieces = StopScanner(["own goal"]), ("my ", "own", " fo", "o")
    assert [scanner.push(piece) for piece in pieces] == ["my ", "", "own f", "o"]
    assert scanner.flush() == "o"


def test_text_that_begins_no_stop_is_not_late():
    """B66: with the stop 'XYZXYZ' each delta is its piece; with 'aab', 'aaab' is matched."""
    scanner, pieces = StopScanner(["XYZXYZ"]), ["The ", "cap", "ital", " of", "\n"]
    assert [scanner.push(piece) for piece in pieces] == pieces
    scanner = StopScanner(["aab"])
    assert [scanner.push(c) for c in "aaab"] == ["", "", "a", ""]
    assert scanner.matched == "aab"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # the first to be complete, not the first to begin
        (["bc", "abc"], "xabc", "x", "abc"),  # completed by one character: the longest
        (["ab", "abc"], "abc", "", "ab"),  # so a stop that begins with another never matches
        (["x", "x"], "ax", "a", "x"),
    ],
)
@pytest.mark.parametrize("cut", range(6))
def test_which_stop_wins_does_not_depend_on_the_cut(stops, text, shown, matched, cut):
    scanner = StopScanner(stops)
    assert scanner.push(text[:cut]) + scanner.push(text[cut:]) == shown
    assert scanner.matched == matched


def test_without_stops_nothing_is_held_back():
    scanner = StopScanner([])
    assert (scanner.push("abc"), scanner.flush(), scanner.matched) == ("abc", "", None)


def test_what_is_held_back_at_the_end_is_flushed_once():
    scanner = StopScanner(["stop"])
    assert scanner.push("do not sto") == "do not "
    assert (scanner.flush(), scanner.flush()) == ("sto", "")


class Counted(str):
    """A string that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at):
        Counted.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("text", ["a" * 100_000, "aaab" * 25_000, "abacabad" * 12_500])
def test_the_work_is_linear_in_the_text(text):
    """4 stops of up to 1,000 characters, 100,000 characters: 3 comparisons each at most."""
    stops = ["a" * 999 + "b", "aab" * 300 + "c", "abacabae", "e" + "a" * 50]
    scanner = StopScanner([Counted(stop) for stop in stops])
    Counted.looks = 0
    shown = [scanner.push(character) for character in text]
    assert scanner.matched is None
    assert "".join(shown) + scanner.flush() == text
    assert len(text) * 4 <= Counted.looks <= len(text) * 4 * 3


def test_long_stops_cost_what_the_text_does():
    """64 stops of a megabyte each, of which the text has the first characters."""
    stops = ["ab" * 500_000 + str(n) for n in range(64)]
    start = time.process_time()
    scanner = StopScanner(stops)
    assert scanner.push("xabab") == "x" and scanner.push("c") == "ababc"
    assert time.process_time() - start < 0.5  # 64 million characters take a minute


@given(st.text("ab", min_size=1, max_size=9), st.text("ab", max_size=40))
def test_what_may_begin_a_long_stop_is_known_as_far_as_it_is_needed(stop, text):
    scanner, whole = StopScanner([stop]), StopScanner([stop])
    for character in text:
        scanner.push(character)
    whole.push(text)
    assert scanner.matched == whole.matched == (stop if stop in text else None)
