"""What the notebooks share: a stub and a plausible wrong answer never pass, and text is stable."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spindle import errors, lesson
from spindle.kernels.program import Span, place
from spindle.lesson import CAST, check, expect, on_ranks, reveal, smallest_lead, source

ROOT = Path(lesson.__file__).parent.parent


def verdict(exercise: Callable, answer: Callable, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of an answer that has no name, so that it gets the exercise's."""
    exercise(lambda *args: answer(*args))
    return capsys.readouterr().out


# --- the cast ----------------------------------------------------------------------------------


def _is_text(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_cast_is_eight_named_requests_with_a_long_tail():
    assert [one.name for one in CAST] == [f"r{i}" for i in range(8)]
    assert CAST[0].prompt == "The capital of France is"
    lengths = sorted(one.max_tokens for one in CAST)
    assert lengths[-1] >= 8 * lengths[len(lengths) // 2 - 1]
    assert len({one.prompt for one in CAST}) == 8


def linear_rgb(colour: str) -> torch.Tensor:
    values = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    weights = torch.tensor([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(linear_rgb(colour) @ weights) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#121212"])
def test_the_cast_is_legible_on_light_and_on_dark(page):
    assert min(contrast(one.colour, page) for one in CAST) >= 2.2


def lab(rgb: torch.Tensor) -> torch.Tensor:
    to_xyz = torch.tensor(
        [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    )
    xyz = to_xyz @ rgb.clamp(0, 1) / torch.tensor([0.9505, 1.0, 1.0888])
    x, y, z = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# What red-blind and green-blind eyes make of linear RGB: Machado, Oliveira and Fernandes (2009).
EYES = {
    "all cones": torch.eye(3),
    "no red cones": torch.tensor(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    ),
    "no green cones": torch.tensor(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    ),
}


@pytest.mark.parametrize("eye", EYES)
def test_no_two_of_the_cast_look_alike_to_a_colour_blind_reader(eye):
    seen = torch.stack([lab(EYES[eye] @ linear_rgb(one.colour)) for one in CAST])  # [8, 3]
    apart = torch.cdist(seen, seen) + torch.eye(8) * 1e3
    assert apart.min() >= 15  # CIE 1976; 2.3 is a just noticeable difference


# --- source ------------------------------------------------------------------------------------


def test_source_shows_the_package_file_and_text_word_for_word():
    shown = repr(source(lesson.Exercise._task))
    first, *rest = shown.splitlines()
    assert first == "# spindle/lesson.py"
    assert "    " + "\n    ".join(rest) in Path(lesson.__file__).read_text("utf-8")


def test_source_is_highlighted_python_in_a_notebook_and_the_same_on_every_machine():
    listing = source(errors.SpindleError, errors.ModelNotFound)
    markdown = listing._repr_markdown_()
    assert markdown == f"```python\n{listing}\n```"
    assert str(ROOT) not in markdown and "0x" not in markdown
    assert markdown.count("# spindle/errors.py") == 2


def test_source_of_text_that_holds_a_fence_gets_a_longer_fence():
    assert source(lesson._Listing)._repr_markdown_().startswith("````python\n")


def test_source_follows_decorators_and_properties():
    class Box:
        @property
        def width(self) -> int:
            return 3

    assert "return 3" in repr(source(Box.width))
    assert "expect: name the exceptions" in repr(source(expect))


def test_source_of_what_has_none_is_refused_in_words():
    with pytest.raises(TypeError, match="has no Python source"):
        source(len)


# --- expect, reveal ----------------------------------------------------------------------------


def test_expect_prints_type_and_message_of_the_error_that_must_come(capsys):
    with expect(KeyError, errors.SpindleError):
        raise errors.RequestError("max_tokens is 0: it must be 1 or more")
    assert capsys.readouterr().out == "RequestError: max_tokens is 0: it must be 1 or more\n"


def test_expect_fails_if_nothing_or_something_else_comes():
    with pytest.raises(AssertionError, match="expected KeyError, and nothing was raised"):
        with expect(KeyError):
            pass
    with pytest.raises(AssertionError, match="expected KeyError, and ValueError: x came"):
        with expect(KeyError):
            raise ValueError("x")
    with pytest.raises(TypeError, match="name the exceptions"):
        with expect():
            pass


@pytest.mark.parametrize(
    ("guess", "fact", "unit", "line"),
    [
        (1_200, 3_040, "rows", "guess 1,200 rows\nfact 3,040 rows | guess / fact 0.39"),
        (0.5, 0.25, "", "guess 0.5\nfact 0.25 | guess / fact 2"),
        ("r2", "r5", "", "guess r2\nfact r5"),
        (3, 0, "copies", "guess 3 copies\nfact 0 copies"),
        (1, 2, "rows", "guess 1 row\nfact 2 rows | guess / fact 0.5"),
        (1, 1, "tokens a second", "guess 1 token a second\nfact 1 token a second | guess / fact 1"),
        (1, 0, "copies", "guess 1 copy\nfact 0 copies"),
        (1, 0, "switches", "guess 1 switch\nfact 0 switches"),
        (1, 0, "times", "guess 1 times\nfact 0 times"),
        (1, 0, "ms", "guess 1 ms\nfact 0 ms"),
        (True, False, "", "guess True\nfact False"),
        (..., 3, "", "no guess yet: write one in the cell above, run it, then this cell again"),
        (None, 3, "", "no guess yet: write one in the cell above, run it, then this cell again"),
    ],
)
def test_reveal_says_the_guess_then_the_fact_on_a_line_of_its_own(guess, fact, unit, line, capsys):
    reveal(guess, fact, unit)
    assert capsys.readouterr().out == line + "\n"


# --- exercises ---------------------------------------------------------------------------------


def see(T, S, start):
    return torch.arange(S) <= start + torch.arange(T)[:, None]  # [T, S]


def attend(q, k, v, mask, scale, dim=-1):
    scores = (q @ k.T * scale).masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=dim) @ v


def attend_with(scale=None, start=None, mask=None, dim=-1):
    """Attention with one thing replaced."""

    def answer(q, k, v, true_start):
        T, S, D = len(q), len(k), q.shape[-1]
        seen = see(T, S, true_start if start is None else start) if mask is None else mask(T, S)
        return attend(q, k, v, seen, D**-0.5 if scale is None else scale(D), dim)

    return answer


def total(p, n):
    return sum(range(p, p + n))


def pairs_from_halves(rows, heads):
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def normal(p):
    return p / p.sum()


def top_p_by(rule):
    """Top-p with another rule for what stays: rule(held so far, own share, top_p)."""

    def answer(p, top_p):
        falling, order = p.sort(descending=True, stable=True)
        kept = falling * rule(falling.cumsum(0), falling, top_p)
        return normal(torch.zeros_like(p).scatter(0, order, kept))

    return answer


def common(prompt, remembered):
    """Tokens with which both begin."""
    pairs = enumerate(zip(prompt, remembered, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(prompt), len(remembered)))


def alone(prompt, remembered, P):
    """Tokens of the full blocks that are anywhere in the other, whatever stands before them."""
    known = [remembered[at : at + P] for at in range(0, len(remembered) // P * P, P)]
    return sum(P for at in range(0, (len(prompt) - 1) // P * P, P) if prompt[at : at + P] in known)


def chosen(**changed):
    """`choose` with one of its parts changed."""
    parts = {
        "heat": lambda z, temperature: ((z - z.max()) / temperature).exp(),
        "cut": lambda p, hot: hot,
        "anew": normal,
        "over": lambda held, p: held,
        "back": lambda p, order: torch.zeros_like(p).scatter(0, order, p),
        "walk": lambda p, u: p.cumsum(0) > u,
    } | changed

    def answer(z, temperature, top_k, top_p, min_p, u):
        z = z.double()
        hot = normal(parts["heat"](z, temperature))
        p = parts["cut"](z.softmax(0), hot)
        kept, order = (p * (p >= min_p * p.max())).sort(descending=True, stable=True)
        kept[top_k:] = 0
        kept = parts["anew"](kept)
        kept[parts["over"](kept.cumsum(0) - kept, kept) >= top_p] = 0
        left = normal(hot[order] * (kept > 0))
        return int(parts["walk"](parts["back"](left, order), u).nonzero()[0])

    return answer


WRONG: list[tuple[str, str, Callable]] = [
    ("causal_mask", "forgets start", lambda T, S, start: see(T, S, 0)),
    ("causal_mask", "hides itself", lambda T, S, start: see(T, S, start - 1)),
    ("causal_mask", "the other way round", lambda T, S, start: ~see(T, S, start)),
    ("causal_mask", "floats", lambda T, S, start: see(T, S, start).float()),
    ("causal_mask", "transposed", lambda T, S, start: see(T, S, start).T),
    ("causal_mask", "a list", lambda T, S, start: see(T, S, start).tolist()),
    ("attention", "no mask", attend_with(mask=lambda T, S: torch.ones(T, S).bool())),
    ("attention", "no scale", attend_with(scale=lambda D: 1.0)),
    ("attention", "scale by D", attend_with(scale=lambda D: 1 / D)),
    ("attention", "start is 0", attend_with(start=0)),
    ("attention", "softmax over queries", attend_with(dim=0)),
    ("cache_bytes", "only K", lambda t, n, h, d, b: t * n * h * d * b),
    ("cache_bytes", "numbers, not bytes", lambda t, n, h, d, b: 2 * t * n * h * d),
    ("rows_computed", "feeds the last back", lambda p, n, c: p + n if c else total(p, n)),
    ("rows_computed", "one step more", lambda p, n, c: p + n - 1 if c else total(p, n + 1)),
    ("rows_computed", "ignores the cache", lambda p, n, c: total(p, n)),
    ("whole_characters", "shows the unfinished", lambda data: data.decode(errors="replace")),
    (
        "whole_characters",
        "gives up after two bytes",
        lambda data: next(
            (data[: len(data) - n].decode() for n in range(3) if _is_text(data[: len(data) - n])),
            data.decode(errors="replace"),
        ),
    ),
    (
        "whole_characters",
        "drops a real replacement character",
        lambda data: data.decode(errors="replace").rstrip("\ufffd"),
    ),
    ("whole_characters", "drops what is broken", lambda data: data.decode("utf-8", "ignore")),
    ("whole_characters", "one character a byte", lambda data: data.decode("latin-1")),
    ("whole_characters", "drops what is not ASCII", lambda data: data.decode("ascii", "ignore")),
    ("rows_computed", "a string", lambda p, n, c: "many"),
    ("nucleus", "drops the token that crosses", top_p_by(lambda held, p, top: held <= top)),
    ("nucleus", "one too many where it is met", top_p_by(lambda held, p, top: held - p <= top)),
    ("nucleus", "does not renormalise", lambda p, top_p: p * (check.nucleus.right(p, top_p) > 0)),
    ("nucleus", "in sorted order", lambda p, t: check.nucleus.right(p, t).sort(descending=True)[0]),
    ("nucleus", "all ties", lambda p, t: normal(p * (p >= p[check.nucleus.right(p, t) > 0].min()))),
    ("choose", "reaches", chosen(walk=lambda p, u: p.cumsum(0) >= u)),
    ("choose", "the likeliest", lambda z, *how: int(z.argmax())),
    ("choose", "the cuts are cold", chosen(cut=lambda p, hot: p)),
    ("choose", "top-p asks for a share of all", chosen(anew=lambda p: p)),
    ("choose", "the largest is not taken away", chosen(heat=lambda z, t: (z / t).exp())),
    ("choose", "the walk goes along the likeliest first", chosen(back=lambda p, order: p)),
    ("choose", "the token that crosses is dropped", chosen(over=lambda held, p: held + p)),
    ("wavelength", "the place in the exponent", lambda t, D, i: 2 * math.pi * t ** (i / D)),
    ("wavelength", "radians", lambda t, D, i: t ** (2 * i / D)),
    ("wavelength", "a speed", lambda t, D, i: t ** (-2 * i / D)),
    ("halves_from_pairs", "as it was", lambda rows, heads: rows),
    ("halves_from_pairs", "the inverse", lambda rows, heads: pairs_from_halves(rows, heads)),
    ("halves_from_pairs", "across heads", lambda rows, heads: torch.cat([rows[::2], rows[1::2]])),
    ("visible_keys", "all alike", lambda L, m, stored, n: torch.full((L,), stored + n)),
    ("visible_keys", "gathers first", lambda L, m, s, n: s + n * (torch.arange(L) > m)),
    ("visible_keys", "the other layers", lambda L, m, s, n: s + n * (torch.arange(L) <= m)),
    ("visible_keys", "always the last", lambda L, m, s, n: s + n * (torch.arange(L) == L - 1)),
    ("branch_blocks", "a copy for everybody", lambda p, n, new, P: n * -(-(p + new) // P)),
    ("branch_blocks", "shares what is written", lambda p, n, new, P: -(-p // P) + n * -(-new // P)),
    (
        "branch_blocks",
        "copies unasked",
        lambda p, n, new, P: p // P + n * (-(-(p + new) // P) - p // P),
    ),
    ("rows_after_hit", "all but the last", lambda p, r, P: len(p) - min(len(p) - 1, common(p, r))),
    ("rows_after_hit", "all of it", lambda p, r, P: len(p) - common(p, r) // P * P),
    ("rows_after_hit", "each block for itself", lambda p, r, P: len(p) - alone(p, r, P)),
    (
        "rows_after_hit",
        "never mind the text",
        lambda p, r, P: len(p) - min(len(p) - 1, len(r)) // P * P,
    ),
]


def test_an_answer_is_called_what_the_reader_calls_it(capsys):
    def my_mask(seq_lens, count, capacity):
        return torch.zeros(len(seq_lens), count, capacity, dtype=torch.bool)

    def sums(x):
        return torch.full_like(x, torch.nan)

    check.slot_mask(my_mask)
    check.running_sums(sums)
    check.running_sums(lambda x: x)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "not yet: my_mask(tensor([2]), 1, 6) should be 1 at [0, 0, 3], not 0"
    assert said[1].startswith("not yet: sums returns nothing so far; it should return float [300]")
    assert said[2] == "not yet: running_sums(a tensor [300]) should be 2 at [1], not 1"


@pytest.mark.parametrize(("name", "why", "answer"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_a_plausible_wrong_answer_is_refused_with_the_input_it_fails_on(name, why, answer, capsys):
    said = verdict(getattr(check, name), answer, capsys)
    assert said.startswith(f"not yet: {name}(") and "returns nothing" not in said


@pytest.mark.parametrize("name", dir(check))
@pytest.mark.parametrize("result", [None, ..., NotImplementedError])
def test_the_stub_is_refused_and_told_what_to_return(name, result, capsys):
    def stub(*args):
        if result is NotImplementedError:
            raise NotImplementedError
        return result

    said = verdict(getattr(check, name), stub, capsys)
    assert said.startswith(f"not yet: {name} returns nothing so far; it should return ")
    assert len(said) > 80 and said.count("\n") == 1


@pytest.mark.parametrize("name", dir(check))
def test_the_right_answer_passes(name, capsys):
    exercise = getattr(check, name)
    count = len(exercise.inputs)
    said = verdict(exercise, exercise.right, capsys)
    assert said == f"yes: {name} is right on {count} of {count} inputs\n"


def test_an_answer_that_raises_is_told_where(capsys):
    def broken(T, S, start):
        raise IndexError("too many indices")

    said = verdict(check.causal_mask, broken, capsys)
    assert said == "not yet: causal_mask(1, 1, 0) raised IndexError: too many indices\n"


def test_an_answer_that_overwrites_its_inputs_is_judged_on_fresh_ones(capsys):
    def in_place(q, k, v, start):
        q /= math.sqrt(q.shape[-1])
        return attend(q, k, v, see(len(q), len(k), start), 1.0)

    for _ in range(2):
        assert verdict(check.attention, in_place, capsys).startswith("yes")


def test_an_answer_that_empties_a_list_leaves_the_next_one_a_full_one(capsys):
    def right_and_rude(stored, text):
        try:
            return check.resync.right(stored, text)
        finally:
            stored.clear()

    def wrong(stored, text):
        return min(len(stored), len(text) - 1)

    assert verdict(check.resync, wrong, capsys).startswith("not yet")
    assert verdict(check.resync, right_and_rude, capsys).startswith("yes")
    assert verdict(check.resync, wrong, capsys).startswith("not yet")


def test_the_numbers_of_chapter_04_by_hand():
    assert check.rows_computed.right(16, 64, False) == 3_040
    assert check.rows_computed.right(16, 64, True) == 79
    assert check.cache_bytes.right(1, 30, 3, 64, 4) == 46_080  # SmolLM2-135M, one token, float32


def test_the_numbers_of_chapter_06_by_hand():
    # Eight rows at ten keys each, two numbers a key, one byte a number, beside a hundred weights.
    assert check.fetched_bytes.right(8, 10, 100, 2, 1) == 260
    # Ten bytes and a hundred FLOPs a second; a weight of one byte is two FLOPs for each row.
    assert check.knee_rows.right(1, 10, 100) == 5


def test_the_exercises_of_07_refuse_plausible_wrong_answers(capsys):
    def ceiling_of_the_new(stored, new, block_size):
        return -(-new // block_size)

    def always_one(stored, new, block_size):
        return 1

    def in_one_piece(start, count, table, block_size):
        return table[0] * block_size + start + torch.arange(count)

    def off_by_one(start, count, table, block_size):
        p = torch.arange(start, start + count)
        return torch.tensor(table)[(p - 1) // block_size] * block_size + p % block_size

    def from_the_start(start, count, table, block_size):
        return check.slots_of.right(0, count, table, block_size)

    for wrong in (ceiling_of_the_new, always_one):
        assert verdict(check.blocks_needed, wrong, capsys).startswith("not yet: ")
    for wrong in (in_one_piece, off_by_one, from_the_start):
        assert verdict(check.slots_of, wrong, capsys).startswith("not yet: ")


def test_the_exercises_of_06_refuse_plausible_wrong_answers(capsys):
    def shared_texts(rows, keys, weights, kv_numbers, number_bytes):
        return (weights + keys * kv_numbers) * number_bytes

    def one_flop_a_weight(number_bytes, bytes_per_s, flops_per_s):
        return number_bytes * flops_per_s / bytes_per_s

    assert verdict(check.fetched_bytes, shared_texts, capsys).startswith("not yet: ")
    assert verdict(check.knee_rows, one_flop_a_weight, capsys).startswith("not yet: ")


def test_an_unknown_exercise_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match="no exercise 'mask'; there are attention, "):
        _ = check.mask


def test_every_exercise_belongs_to_a_chapter():
    chapters = {getattr(check, name).chapter for name in dir(check)}
    notebooks = Path(__file__).parent.parent.joinpath("notebooks").glob("*_*.ipynb")
    assert chapters == {path.name.split("_")[0] for path in notebooks}


def test_the_smallest_lead_is_that_of_the_closest_choice():
    class Scripted:
        """Logits whose best leads the second by 3, then 0.5, then 2; nothing follows the last."""

        def prefill(self, ids):
            self.leads = iter([3.0, 0.5, 2.0, 0.0])
            return self.extend(None)

        def extend(self, ids):
            return torch.tensor([[0.0, next(self.leads), -1.0]])

    assert smallest_lead(Scripted(), [0], [1, 1, 1]) == 0.5


def test_the_exercises_of_11_refuse_plausible_wrong_answers(capsys):
    def all_ends(requests, size):
        return sum(-(-(p + new - 1) // size) for p, new in requests)

    def in_one_piece(requests, size):
        steps = range(max(new for _, new in requests))
        return max(-(-sum(p + s for p, new in requests if s < new) // size) for s in steps)

    def one_too_long(requests, size):
        steps = range(max(new for _, new in requests) + 1)
        return max(sum(-(-(p + s) // size) for p, new in requests if s <= new) for s in steps)

    for wrong in (all_ends, in_one_piece, one_too_long):
        assert verdict(check.peak_blocks, wrong, capsys).startswith("not yet: ")

    def until_enough(held, free, asks, wants, order=-1):
        gone = 0
        for blocks in list(held)[::order]:
            if free >= wants:
                break
            gone, free = gone + 1, free + blocks
        return gone

    def the_oldest_first(held, free, asks, wants):
        return until_enough(held, free, asks, wants, order=1)

    def nothing_is_free(held, free, asks, wants):
        return check.preemptions.right(held, 0, asks, wants)

    def one(held, free, asks, wants):
        return int(free < wants)

    for wrong in (until_enough, the_oldest_first, nothing_is_free, one):
        assert verdict(check.preemptions, wrong, capsys).startswith("not yet: ")
    assert check.peak_blocks.right([(5, 16), (3, 8), (6, 32)], 4) == 11
    assert check.preemptions.right((4, 2, 1), 0, 1, 5) == 2  # the youngest, and then itself


def test_the_exercises_of_09_refuse_plausible_wrong_answers(capsys):
    def only_full_batches(lengths, seats):
        return sum(max(lengths[at : at + seats]) for at in range(0, len(lengths) - 1, seats))

    def sorted_batches(lengths, seats):
        return check.static_steps.right(sorted(lengths), seats)

    def one_after_another(lengths, seats):
        return sum(lengths)

    for wrong in (only_full_batches, sorted_batches, one_after_another):
        assert verdict(check.static_steps, wrong, capsys).startswith("not yet: ")

    def no_seat_ever_idle(lengths, seats):
        return max(max(lengths), -(-sum(lengths) // seats))

    def seats_in_turn(lengths, seats):
        return max(sum(lengths[seat::seats]) for seat in range(seats))

    def longest_first(lengths, seats):
        return check.continuous_steps.right(sorted(lengths, reverse=True), seats)

    for wrong in (no_seat_ever_idle, seats_in_turn, longest_first, check.static_steps.right):
        assert verdict(check.continuous_steps, wrong, capsys).startswith("not yet: ")
    assert check.static_steps.right((16, 8, 192, 24), 4) == 192
    assert check.continuous_steps.right((2, 2, 2, 3, 3, 4), 3) == 6


def test_the_exercises_of_10_refuse_plausible_wrong_answers(capsys):
    def from_when_it_is_sent(due, takes):
        return max(takes)

    def the_last(due, takes):
        now = 0
        for when, time in zip(due, takes, strict=True):
            now = max(now, when) + time
        return now - due[-1]

    def in_the_queue_alone(due, takes):
        now = longest = 0
        for when, time in zip(due, takes, strict=True):
            longest = max(longest, now - when)
            now = max(now, when) + time
        return longest

    for wrong in (from_when_it_is_sent, the_last, in_the_queue_alone):
        assert verdict(check.longest_wait, wrong, capsys).startswith("not yet: ")

    def its_own_rows(prompt, decodes, budget, knee):
        return prompt / knee

    def decodes_are_free(prompt, decodes, budget, knee):
        return check.prompt_ticks.right(prompt, 0, budget, knee)

    def full_steps(prompt, decodes, budget, knee):
        return -(-prompt // (budget - decodes)) * max(1, budget / knee)

    def no_floor(prompt, decodes, budget, knee):
        return (prompt + decodes * -(-prompt // (budget - decodes))) / knee

    def one_floor_for_all(prompt, decodes, budget, knee):
        steps = -(-prompt // (budget - decodes))
        return max(steps, (prompt + decodes * steps) / knee)

    for wrong in (its_own_rows, decodes_are_free, full_steps, no_floor, one_floor_for_all):
        assert verdict(check.prompt_ticks, wrong, capsys).startswith("not yet: ")
    assert check.longest_wait.right(range(0, 100, 10), [1, 1, 50, *[1] * 7]) == 50
    assert check.prompt_ticks.right(400, 8, 16, 10) == pytest.approx(80)


def test_the_exercises_of_c_refuse_plausible_wrong_answers(capsys):
    def answer(clash):
        return lambda log: next(
            (at for at, one in enumerate(log) for other in log[:at] if clash(one, other)), len(log)
        )

    def by_hand(one, other):
        return one[0] != other[0] and one[2:] == other[2:] and "wrote" in (one[1], other[1])

    assert verdict(check.first_race, answer(by_hand), capsys).startswith("yes: ")
    wrongs = (
        lambda one, other: one[0] != other[0] and one[2:] == other[2:],  # two who read
        lambda one, other: one[2:] == other[2:] and "wrote" in (one[1], other[1]),  # itself
        lambda one, other: by_hand(one, other) and other[1] == "wrote",  # forgets who read
        lambda one, other: by_hand(one, other) and one[1] == "read",  # forgets who writes
        lambda one, other: by_hand(one[:3], other[:3]),  # no barrier helps
    )
    for wrong in wrongs:
        assert verdict(check.first_race, answer(wrong), capsys).startswith("not yet: ")

    def remembers_the_last(log):
        last = {}
        for at, (thread, did, word, barriers) in enumerate(log):
            other = last.get((word, barriers))
            if other and other[0] != thread and "wrote" in (did, other[1]):
                return at
            last[word, barriers] = thread, did
        return len(log)

    def without_the_first(log):
        return answer(by_hand)(log[1:]) + 1

    for wrong in (remembers_the_last, without_the_first):
        assert verdict(check.first_race, wrong, capsys).startswith("not yet: ")

    def one_round(x):
        return x + torch.cat([torch.zeros(1), x[:-1]])

    for wrong in (torch.clone, one_round, lambda x: x.cumsum(0) - x, lambda x: x.sum().expand(300)):
        assert verdict(check.running_sums, wrong, capsys).startswith("not yet: ")
    assert verdict(check.running_sums, lambda x: x.cumsum(0), capsys).startswith("yes: ")


def test_exercises_of_chapter_13(capsys):
    def answer(rescale=True, skip=True, start=-math.inf):
        def one_pass(scores, values):
            peak, total, sums = start, 0.0, torch.zeros(values.shape[1])
            for score, value in zip(scores, values, strict=True):
                if skip and score == -math.inf:
                    continue
                higher = max(peak, score)
                kept, own = (math.exp(n - higher) for n in (peak, score))
                kept = kept if rescale else 1.0
                peak, total, sums = higher, total * kept + own, sums * kept + own * value
            return sums / total if total else sums

        return one_pass

    def softmax(scores, values):
        return scores.softmax(0) @ values

    def typed_in(scores, values):
        return scores.exp() @ values / scores.exp().sum()

    assert verdict(check.one_pass_attention, answer(), capsys).startswith("yes: ")
    for wrong in (answer(rescale=False), answer(skip=False), answer(start=0.0), softmax, typed_in):
        said = verdict(check.one_pass_attention, wrong, capsys)
        assert said.startswith("not yet: ") and "returns nothing" not in said  # NaN is something

    def first_256(x):
        return torch.cat([x[:, :256].softmax(-1), torch.zeros_like(x[:, 256:])], dim=-1)

    def in_parts(x):
        return torch.cat([part.softmax(-1) for part in x.split(256, dim=-1)], dim=-1)

    def without_the_peak(x):
        return x.exp() / x.exp().sum(-1, keepdim=True)

    for wrong in (torch.zeros_like, first_256, in_parts, without_the_peak):
        assert verdict(check.row_softmax, wrong, capsys).startswith("not yet: ")
    assert verdict(check.row_softmax, lambda x: x.softmax(-1), capsys).startswith("yes: ")


def test_the_exercises_of_14_refuse_plausible_wrong_answers(capsys):
    right = check.slot_mask.right

    def all_at_once(seq_lens, count, capacity):  # each sees the whole chunk
        return right(seq_lens + count - 1, 1, capacity).expand(-1, count, -1)

    def not_itself(seq_lens, count, capacity):
        return right(seq_lens - 1, count, capacity)

    def one_too_many(seq_lens, count, capacity):
        return right(seq_lens + 1, count, capacity)

    def where_it_may(seq_lens, count, capacity):
        return ~right(seq_lens, count, capacity)

    for wrong in (all_at_once, not_itself, one_too_many, where_it_may):
        assert verdict(check.slot_mask, wrong, capsys).startswith("not yet: slot_mask(tensor([")

    def powers_alone(batches, most):
        return sum((1 << (rows - 1).bit_length()) - rows for rows in batches)

    def the_largest(batches, most):
        return sum(most - rows for rows in batches)

    def the_next_one(batches, most):  # a full bucket is thought too small
        return sum(min(1 << rows.bit_length(), most) - rows for rows in batches)

    for wrong in (powers_alone, the_largest, the_next_one):
        assert verdict(check.rows_of_nobody, wrong, capsys).startswith("not yet: ")
    assert check.rows_of_nobody.right((9, 7), 12) == 3 + 1


def test_the_exercises_of_12_refuse_plausible_wrong_answers(capsys):
    right = check.largest_first.right

    def first_fit(spans):  # as the package places them: in the order of first use
        return place([Span(*span) for span in spans])

    def all_kept(spans):
        return sum(nbytes for nbytes, _, _ in spans)

    def most_at_once(spans):  # a bound, which not every plan reaches
        calls = [call for _, first, last in spans for call in (first, last)]
        return max((sum(n for n, a, b in spans if a <= call <= b) for call in calls), default=0)

    def freed_too_early(spans):
        return right([(nbytes, first, max(first, last - 1)) for nbytes, first, last in spans])

    def smallest_first(spans):
        placed = []
        for one in sorted((Span(*span) for span in spans), key=lambda span: span.nbytes):
            for other in sorted(placed, key=lambda span: span.offset):
                beside = other.first <= one.last and one.first <= other.last
                if beside and one.offset + one.nbytes > other.offset:
                    one.offset = max(one.offset, other.offset + other.nbytes)
            placed.append(one)
        return max((one.offset + one.nbytes for one in placed), default=0)

    assert verdict(check.largest_first, right, capsys).startswith("yes: ")
    for wrong in (first_fit, all_kept, most_at_once, freed_too_early, smallest_first):
        assert verdict(check.largest_first, wrong, capsys).startswith("not yet: largest_first(")

    def one_scale_a_row(outputs, inputs, bits, group, scale_bytes):
        return outputs * (inputs * bits // 8 + scale_bytes)

    def whole_groups(outputs, inputs, bits, group, scale_bytes):
        return outputs * (inputs * bits // 8 + inputs // group * scale_bytes)

    def without_scales(outputs, inputs, bits, group, scale_bytes):
        return outputs * inputs * bits // 8

    for wrong in (one_scale_a_row, whole_groups, without_scales):
        assert verdict(check.grouped_bytes, wrong, capsys).startswith("not yet: grouped_bytes(")
    assert check.grouped_bytes.right(1, 32, 4, 32, 2) == 18


def test_the_exercises_of_15_refuse_plausible_wrong_answers(capsys):
    def at(weights, u):
        held = weights.cumsum(0)
        return int((held > u * held[-1]).nonzero()[0])

    def answer(accept=lambda p, q, u: u * q < p, left=lambda p, q: (p - q).clamp(min=0)):
        def judge(p, q, draft, u_accept, u):
            return draft if accept(p[draft], q[draft], u_accept) else at(left(p, q), u)

        return judge

    def not_made_whole(p, q, draft, u_accept, u):
        if u_accept * q[draft] < p[draft]:
            return draft
        held = (p - q).clamp(min=0).cumsum(0)
        return int((held > u).nonzero()[0]) if u < held[-1] else len(p) - 1

    assert verdict(check.judged_token, answer(), capsys).startswith("yes: ")
    wrongs = (
        answer(left=lambda p, q: p),  # the target again
        answer(left=lambda p, q: (q - p).clamp(min=0)),
        answer(left=lambda p, q: (p - q).abs()),
        answer(accept=lambda p, q, u: p >= 0.1),  # likely enough
        answer(accept=lambda p, q, u: u < p),  # as of a plain guess
        answer(accept=lambda p, q, u: p >= q),
        answer(accept=lambda p, q, u: u * q <= p),  # what the target never says
        answer(accept=lambda p, q, u: u * p < q),
        not_made_whole,
    )
    for wrong in wrongs:
        assert verdict(check.judged_token, wrong, capsys).startswith("not yet: judged_token(")

    def every_agreement(stored, guesses, said):
        return stored + 1 + sum(a == b for a, b in zip(guesses, said, strict=False))

    right = check.tokens_kept.right
    wrongs = (
        every_agreement,
        lambda stored, guesses, said: stored + 1 + len(guesses),  # nothing taken back
        lambda *given: right(*given) - 1,  # without the last token of the text
        lambda *given: right(*given) + 1,  # with the token that was said last
    )
    for wrong in wrongs:
        assert verdict(check.tokens_kept, wrong, capsys).startswith("not yet: tokens_kept(")


def test_the_exercise_of_16_refuses_the_fault_and_other_wrong_answers(capsys):
    def shared(stored, text):  # the fault: where the cache has it all, nothing is left to run
        pairs = zip(stored, text, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(text)))

    def all_but_the_last(stored, text):  # whatever is stored there
        return min(len(stored), len(text) - 1)

    def never_mind_the_cache(stored, text):
        return len(text) - 1

    def all_over_again(stored, text):
        return 0

    def one_less(stored, text):
        return max(0, check.resync.right(stored, text) - 1)

    assert verdict(check.resync, shared, capsys).startswith(
        "not yet: resync([5, 1, 8, 2, 9, 4, 7], [5, 1, 8, 2, 9, 4, 7]) should be 6, not 7"
    )
    for wrong in (all_but_the_last, never_mind_the_cache, all_over_again, one_less):
        assert verdict(check.resync, wrong, capsys).startswith("not yet: resync([")


def test_the_exercises_of_17_refuse_the_most_tokens_and_free_rows(capsys):
    def best(gain):
        return lambda a, v, c: max(range(len(v) - 1), key=lambda k: gain(a, v, c, k))

    def tokens(a, k):
        return sum(a**i for i in range(k + 1))

    right = best(lambda a, v, c, k: tokens(a, k) / (v[k + 1] + k * c))
    assert verdict(check.drafts_that_pay, right, capsys).startswith("yes: ")
    wrongs = (
        best(lambda a, v, c, k: tokens(a, k)),  # the most tokens a pass
        best(lambda a, v, c, k: tokens(a, k) / (1 + k * c)),  # rows are free
        best(lambda a, v, c, k: tokens(a, k) / v[k + 1]),  # drafts are free
        best(lambda a, v, c, k: tokens(a, k) / (v[k + 1] + c)),  # one price for all drafts
        best(lambda a, v, c, k: (1 + a * k) / (v[k + 1] + k * c)),  # each for itself
        best(lambda a, v, c, k: (tokens(a, k) - 1) / (v[k + 1] + k * c)),  # nothing besides
        best(lambda a, v, c, k: tokens(a, k) / (v[max(k, 1)] + k * c)),  # a row too few
        lambda a, v, c: right(a, v, c) or 1,
    )
    for wrong in wrongs:
        said = verdict(check.drafts_that_pay, wrong, capsys)
        assert said.startswith("not yet: drafts_that_pay("), said

    wrongs = (
        lambda knee, tokens, k: knee / (k + 1),  # where the rows run out
        lambda knee, tokens, k: knee,
        lambda knee, tokens, k: knee * tokens,
        lambda knee, tokens, k: knee * tokens / k,
        lambda knee, tokens, k: knee * tokens // (k + 1),
    )
    for wrong in wrongs:
        said = verdict(check.users_that_gain, wrong, capsys)
        assert said.startswith("not yet: users_that_gain("), said


def test_the_exercises_of_18_refuse_rows_for_places_and_seats_for_rows(capsys):
    def share(places):
        return lambda passes, wanted, b, knee: wanted / sum(places(n, b, knee) for n in passes)

    right = share(lambda n, b, knee: max(n, knee * b / 4))
    assert verdict(check.wanted_share, right, capsys).startswith("yes: ")
    wrongs = (
        share(lambda n, b, knee: n),  # rows, and no empty places
        share(lambda n, b, knee: knee),  # every pass a tick
        share(lambda n, b, knee: max(n, knee)),  # weights of four bytes
        share(lambda n, b, knee: max(n, knee * 4 / b)),  # the wrong way round
        share(lambda n, b, knee: n + knee * b / 4),  # both bills
        lambda passes, wanted, b, knee: sum(passes) / sum(max(n, knee * b / 4) for n in passes),
    )
    for wrong in wrongs:
        said = verdict(check.wanted_share, wrong, capsys)
        assert said.startswith("not yet: wanted_share("), said

    wrongs = (
        lambda gap, knee, k: int(gap * knee),  # drafts are free
        lambda gap, knee, k: int(gap * knee // max(k, 1)),  # a row too few each
        lambda gap, knee, k: int(knee // (k + 1)),  # a tick at most
        lambda gap, knee, k: -int(-gap * knee // (k + 1)),  # one too many
        lambda gap, knee, k: gap * knee / (k + 1),
        lambda gap, knee, k: int(gap * knee // (k + 1)),  # less than a tick
    )
    for wrong in wrongs:
        said = verdict(check.most_seats, wrong, capsys)
        assert said.startswith("not yet: most_seats("), said


def test_the_exercises_of_B_refuse_a_forgotten_part_and_a_sum_of_one_hop(capsys):
    def likeliest(rank_of, at=lambda rank, ids, part: rank * part + ids[rank]):
        return lambda best, ids, part: at(rank_of(best), ids, part)

    def first(best):
        return best.index(max(best))

    right = likeliest(first)
    assert verdict(check.likeliest_of_parts, right, capsys).startswith("yes: ")
    wrongs = (
        likeliest(first, lambda rank, ids, part: ids[rank]),  # its place in the part
        likeliest(first, lambda rank, ids, part: rank * part),
        likeliest(lambda best: max(range(len(best)), key=lambda n: (best[n], n))),  # last of equals
        likeliest(lambda best: best.index(max(best, key=abs))),
        lambda best, ids, part: min(
            n * part + ids[n] for n in range(len(best)) if ids[n] == max(ids)
        ),
    )
    for wrong in wrongs:
        said = verdict(check.likeliest_of_parts, wrong, capsys)
        assert said.startswith("not yet: likeliest_of_parts("), said

    def hop(hops, gain=lambda n: (n - 1) / n):
        return lambda pass_us, layers, ranks: pass_us * gain(ranks) / hops(layers, ranks)

    right = hop(lambda layers, n: (2 * layers + 2) * 2 * (n - 1))
    assert verdict(check.longest_hop_us, right, capsys).startswith("yes: ")
    wrongs = (
        hop(lambda layers, n: 2 * layers),  # a sum is one message
        hop(lambda layers, n: 2 * layers * 2 * (n - 1)),  # the layers alone
        hop(lambda layers, n: (2 * layers + 1) * 2 * (n - 1)),  # the sums alone
        hop(lambda layers, n: (2 * layers + 2) * (n - 1)),  # half a ring
        hop(lambda layers, n: (2 * layers + 2) * 2 * n),
        hop(lambda layers, n: (2 * layers + 2) * 2 * (n - 1), lambda n: 1),  # all of the pass
        hop(lambda layers, n: (2 * layers + 2) * 2 * (n - 1), lambda n: 1 / n),  # what is left
    )
    for wrong in wrongs:
        said = verdict(check.longest_hop_us, wrong, capsys)
        assert said.startswith("not yet: longest_hop_us("), said


# --- several processes ---------------------------------------------------------------------------


def ten():
    return 10


def two_meetings(join):
    found = []
    for name in ("one", "other"):
        with join(name) as ranks:
            found += [ranks.rank, ranks.count, ranks.here, ranks.number(ranks.rank + ten())]
    return found


def fails(join):
    with join("one") as ranks:
        assert ranks.rank == 0, "only I am fit for this"
        ranks.least(1)


def test_a_function_runs_in_each_rank_and_ranks_may_meet_again():
    assert on_ranks(2, two_meetings, ten) == [[rank, 2, 2, 10] * 2 for rank in range(2)]


def test_a_rank_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match=r"of 2 ranks failed:[\s\S]*only I am fit for this"):
        on_ranks(2, fails)


def test_the_exercises_of_a_refuse_one_seat_for_all_and_edges_for_percentiles(capsys):
    wrongs = (
        lambda seats, tokens, patience: patience // tokens,  # one seat
        lambda seats, tokens, patience: patience * seats,  # answers of one token
        lambda seats, tokens, patience: patience * seats / tokens,
        lambda seats, tokens, patience: -(-patience * seats // tokens),  # one too many
        lambda seats, tokens, patience: seats + patience * seats // tokens,  # who sits waits not
    )
    for wrong in wrongs:
        said = verdict(check.queue_limit, wrong, capsys)
        assert said.startswith("not yet: queue_limit("), said

    def bin_of(counts, p):
        rank = sum(counts) * p / 100
        return next(n for n in range(len(counts)) if sum(counts[: n + 1]) >= rank)

    wrongs = (
        lambda edges, counts, p: edges[bin_of(counts, p) + 1],  # the upper edge
        lambda edges, counts, p: edges[bin_of(counts, p)],  # the lower one
        lambda edges, counts, p: sum(edges[bin_of(counts, p) :][:2]) / 2,  # the middle
        lambda edges, counts, p: edges[-1] * p / 100,
    )
    for wrong in wrongs:
        said = verdict(check.binned_percentile, wrong, capsys)
        assert said.startswith("not yet: binned_percentile("), said
