"""What guesses the next tokens: n-grams of the sequence itself, a smaller model, or anything."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import shapes
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spindle import load_hf
from spindle.decode import drafters
from spindle.decode.drafters import Draft, Drafter, ModelDrafter, NgramDrafter, drawn_from
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.sampling import SamplingRows
from spindle.decode.speculative import drafter_for
from spindle.errors import ModelNotFound, RequestError
from spindle.model.weights import random_model

TARGET = random_model(shapes.gpt2(), seed=1, dtype=torch.float64)
SMALL = random_model(shapes.llama(num_hidden_layers=1), seed=2, dtype=torch.float64)
V = TARGET.config.vocab_size


def rows_of(**params) -> SamplingRows:
    return SamplingRows.of([SamplingParams(**{"seed": 3, "temperature": 0} | params)])


class Saying(Drafter):
    """Proposes the same, whatever it is asked."""

    def __init__(self, proposal) -> None:
        self.proposal = proposal

    def propose(self, ids, k):
        return self.proposal


# --- n-grams -------------------------------------------------------------------------------------


def by_search(ids: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """What NgramDrafter is to propose, found by looking at every place from the last to the first.

    Beyond the end the guess goes on with itself.
    """
    for n in range(min(longest, len(ids)), shortest - 1, -1):
        for at in range(len(ids) - 1, n - 1, -1):
            if ids[at - n : at] == ids[-n:]:
                return [ids[at + i % (len(ids) - at)] for i in range(k)]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=10),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(max_examples=300)
def test_ngrams_are_a_search(pieces, k, shortest, more):
    """B46: of ids that arrive in pieces, some of them empty, some before a first question."""
    drafter, ids = NgramDrafter(shortest + more, shortest), list[int]()
    for number, piece in enumerate(pieces):
        ids += piece
        if number % 3 < 2:
            assert drafter.propose(ids, k) == by_search(ids, k, shortest + more, shortest)


@pytest.mark.parametrize(
    ("ids", "right", "why"),
    [
        ([], [], "nothing stands there"),
        ([5], [], "shorter than any n-gram"),
        ([5, 5], [], "the one n-gram is the end itself"),
        ([1, 2, 3, 4], [], "no n-gram stands twice"),
        ([1, 2, 9, 8, 7, 1, 2], [9, 8, 7], "what followed"),
        ([1, 2, 9, 1, 2], [9, 1, 2], "up to the end of the sequence"),
        ([1, 2, 1, 2], [1, 2, 1], "at the end it goes on with itself"),
        ([5, 5, 5], [5, 5, 5], "as with one that overlaps the end"),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2], "of equal matches the last"),
        ([0, 1, 2, 7, 4, 5, 1, 2, 8, 6, 0, 1, 2], [7, 4, 5], "the longest before the last"),
        ([9, 3, 0, 0, 4, 3], [], "one token is no match"),
    ],
)
def test_which_match_is_taken(ids, right, why):
    """B46: prompt and answer alike, the longest first, then the last; k ids, or none."""
    assert NgramDrafter().propose(ids, 3) == right, why
    assert NgramDrafter().propose(ids, 0) == []


def test_the_length_of_an_ngram_can_be_chosen():
    ids = [1, 2, 3, 9, 5, 2, 3, 8, 6, 3, 7, 1, 2, 3]
    assert [NgramDrafter(n, n).propose(ids, 1) for n in (1, 2, 3)] == [[7], [8], [9]]
    assert NgramDrafter(3, 1).propose(ids, 1) == [9]
    assert NgramDrafter(4, 4).propose(ids, 1) == []


@pytest.mark.parametrize(
    ("longest", "shortest", "words"),
    [
        (4, 0, "shortest=0: expected a whole number of 1 or more"),
        (4, True, "shortest=True"),
        (1, 2, "longest=1: expected a whole number of shortest=2 or more"),
        (2.0, 2, "longest=2.0"),
    ],
)
def test_lengths_that_cannot_be_are_refused(longest, shortest, words):
    with pytest.raises(RequestError, match=words):
        NgramDrafter(longest, shortest)


def test_each_sequence_has_an_index_of_its_own():
    first = NgramDrafter(3, 1)
    assert first.propose([1, 2, 1], 2) == [2, 1]
    second = first.begin()
    assert (second.longest, second.shortest) == (3, 1)
    assert second.propose([7, 1], 2) == []
    assert first.propose([1, 2, 1, 2], 2) == [1, 2]


class Watched(list):
    """Ids that count how many of them were looked at."""

    looked_at = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.looked_at += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.looked_at += len(self)
        return super().__iter__()


@pytest.mark.parametrize("alphabet", [50, 10**9], ids=["repeats", "never repeats"])
def test_a_guess_costs_the_same_whatever_came_before(alphabet):
    """Ids that are looked at for a token that arrives and the guess after it: the same number after
    1,000, 10,000 and 100,000 tokens; none of them is read a second time from the start.
    """
    most = 0
    ids = Watched(np.random.default_rng(0).integers(alphabet, size=100_010).tolist())
    seen, drafter, costs = Watched(), NgramDrafter(), {}
    for at in (1000, 10_000, 100_000):
        seen.extend(list.__getitem__(ids, slice(len(seen), at)))
        drafter.propose(seen, 5)
        seen.looked_at = 0
        for n in range(10):
            seen.append(list.__getitem__(ids, at + n))
            drafter.propose(seen, 5)
        costs[at] = seen.looked_at
    most = 10 * (2 + 3 + 4 + 2 + 3 + 4 + 5)  # n-grams noted, n-grams looked up, the guess
    assert max(costs.values()) <= most
    if alphabet > 100:
        assert len(set(costs.values())) == 1


# --- any drafter ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "proposal",
    [[3, 4, 5], (3, 4, 5, 6, 7), np.array([3, 4, 5]), torch.tensor([3, 4, 5, 6])],
    ids=str,
)
def test_a_guess_is_cut_to_what_was_asked_for(proposal):
    draft = Saying(proposal).draft([1], 3, rows_of(), TARGET)
    assert draft.ids.tolist() == [3, 4, 5] and draft.ids.dtype == torch.int64
    assert draft.probs is None
    assert Saying([]).draft([1], 3, rows_of(), TARGET).ids.shape == (0,)


@pytest.mark.parametrize("wrong", [[V], [3, -1], [True], [1.0], ["a"], 7, None, [3, 4, V]])
def test_a_guess_that_is_no_id_is_refused_by_name(wrong):
    with pytest.raises(RequestError, match=r"^Saying: proposed token id"):
        Saying(wrong).draft([1], 2, rows_of(), TARGET)


def test_the_last_row_of_a_pass_has_no_draft():
    probs = torch.full((2, 3), 1 / 3)
    behind = Draft(torch.tensor([2, 0]), probs).behind()
    assert behind.ids.tolist() == [2, 0, -1]
    assert torch.equal(behind.probs, torch.cat((probs, torch.zeros(1, 3))))
    assert Draft(torch.tensor([2, 0])).behind().probs is None
    assert drafters.nothing(TARGET).behind().ids.tolist() == [-1]


def test_a_drafter_of_ones_own_needs_one_method():
    """It keeps nothing, costs nothing, and is for any model."""
    mine = Saying([1])
    assert mine.begin() is mine and mine.cost(TARGET) == 0
    mine.check(TARGET)
    with pytest.raises(NotImplementedError):
        Drafter().propose([1], 1)


@pytest.mark.parametrize(
    ("speculate", "kind"),
    [(None, type(None)), ("ngram", NgramDrafter), ("tiny-draft", ModelDrafter)],
)
def test_a_drafter_by_name(speculate, kind):
    assert type(drafter_for(speculate, TARGET)) is kind


def test_a_drafter_that_is_one_is_itself():
    mine = Saying([])
    assert drafter_for(mine, TARGET) is mine


def test_the_model_in_8_bits_is_its_own_drafter():
    """It reads between a quarter and 30% of the bytes: 4 of 32 bits, and a scale a row."""
    target = load_hf("tiny", dtype=torch.float32)
    drafter = drafter_for("int8", target)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.engine.model.directory == target.directory
    assert 0.25 < drafter.cost(target) < 0.3
    with pytest.raises(RequestError, match=r'speculate="int8": the model was not loaded'):
        drafter_for("int8", TARGET)


@pytest.mark.parametrize("wrong", [7, True, b"ngram", ["ngram"]])
def test_what_names_no_drafter_is_refused(wrong):
    with pytest.raises(RequestError, match=r'speculate=.*: expected "ngram", "int8", the name'):
        drafter_for(wrong, TARGET)
    with pytest.raises(ModelNotFound, match="nowhere"):
        drafter_for("./nowhere", TARGET)
    with pytest.raises(ModelNotFound, match="nowhere"):
        drafter_for(Path("./nowhere"), TARGET)


# --- a draft model -------------------------------------------------------------------------------


def test_an_engine_is_needed():
    with pytest.raises(RequestError, match=r"engine=.*: expected an Engine over the draft model"):
        ModelDrafter(SMALL)


def test_the_cost_is_the_share_of_the_bytes():
    """Matrices of a GPT-2 layer: 12 W^2, and the head's V W; biases and norms are some 0.5%."""
    small, large = load_hf("tiny-draft"), load_hf("tiny")
    sizes = [(m.config.num_layers, m.config.width) for m in (small, large)]
    ours, theirs = (12 * width**2 * layers + 4096 * width for layers, width in sizes)
    assert ModelDrafter(Engine(small)).cost(large) == pytest.approx(ours / theirs, rel=0.005)
    assert ModelDrafter(Engine(large)).cost(large) == 1


def test_a_vocabulary_is_padded_or_cut_to_the_targets():
    """B43"""
    logits = torch.randn(2, 5)
    assert torch.equal(drafters.aligned(logits, 5), logits)
    assert torch.equal(drafters.aligned(logits, 3), logits[:, :3])
    longer = drafters.aligned(logits, 7)
    assert torch.equal(longer[:, :5], logits) and longer[:, 5:].tolist() == [[-torch.inf] * 2] * 2


def test_greedy_drafts_are_the_likeliest_and_nothing_was_drawn():
    """B40: what has no chance in it has no distribution either."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    ids, probs = drawn_from(logits, rows_of(), torch.tensor([4]))
    assert (ids.tolist(), probs) == ([1], None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_distribution_says_id_0(bad):
    """And says that it was drawn from all of its weight on 0, so that what follows is exact."""
    logits = torch.full((1, 4), bad)
    ids, probs = drawn_from(logits, rows_of(temperature=1), torch.tensor([4]))
    assert (ids.tolist(), probs.tolist()) == ([0], [[1, 0, 0, 0]])


def cache_of(engine: Engine, length: int) -> torch.Tensor:
    """Keys and values of the first `length` tokens of its first row."""
    kv = engine._kv
    return torch.stack((kv.keys[:, 0, :length], kv.values[:, 0, :length]))


def fresh_cache(model, ids: Sequence[int]) -> torch.Tensor:
    engine = Engine(model)
    engine.prefill(ids)
    return cache_of(engine, len(ids))


def assert_is_a_fresh_one(drafter: ModelDrafter, ids: list[int], k: int, **params) -> list[int]:
    """Draft; the drafts are those of a new drafter, and so is what the cache holds afterwards.

    That is the sequence and all drafts but the last, which has not gone through the model.
    """
    draft = drafter.draft(ids, k, rows_of(**params), TARGET)
    right = ModelDrafter(Engine(SMALL)).draft(ids, k, rows_of(**params), TARGET)
    assert draft.ids.tolist() == right.ids.tolist()
    stored = [*ids, *draft.ids.tolist()[:-1]]
    assert drafter.engine.length == len(stored)
    held = cache_of(drafter.engine, len(stored))
    assert torch.allclose(held, fresh_cache(SMALL, stored), rtol=0, atol=1e-9)
    return draft.ids.tolist()


def go_on(ids: list[int], drafts: list[int], accepted: int) -> None:
    """The sequence gains what was accepted, and a token that the next draft was not."""
    ids += drafts[:accepted]
    ids.append((drafts[accepted] + 1) % V if accepted < len(drafts) else 11)


@pytest.mark.parametrize("params", [{}, {"temperature": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_draft_cache_is_that_of_a_prefill_after_every_kind_of_round(k, params):
    """B34: rounds with 0, 1, k - 1 and k accepted, one after another, in both orders."""
    drafter, ids = ModelDrafter(Engine(SMALL)).begin(), [5, 81, 17, 3]
    each = [0, 1, max(k - 1, 0), k]
    for accepted in [*each, *reversed(each)]:
        drafts = assert_is_a_fresh_one(drafter, ids, k, **params)
        go_on(ids, drafts, min(accepted, k))
    assert_is_a_fresh_one(drafter, ids, k, **params)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=6))
@example([(3, 3), (3, 0)])
@settings(max_examples=25)
def test_the_draft_cache_follows_any_rounds(rounds):
    """B33, B34: k from round to round as it likes."""
    drafter, ids = ModelDrafter(Engine(SMALL)).begin(), [5, 81, 17]
    for k, accepted in rounds:
        go_on(ids, assert_is_a_fresh_one(drafter, ids, k), min(accepted, k))


@pytest.mark.parametrize("pause", [1, 2, 5])
@pytest.mark.parametrize("accepted", [0, 1, 3, 4, 5])
def test_the_draft_cache_is_that_of_a_prefill_after_rounds_without_drafts(accepted, pause):
    """B34: the pace rests after a round that did not pay, and the sequence goes on alone."""
    drafter, ids = ModelDrafter(Engine(SMALL)).begin(), [5, 81, 17, 3]
    go_on(ids, assert_is_a_fresh_one(drafter, ids, 5), accepted)
    ids += [(7 * n) % V for n in range(pause)]
    assert_is_a_fresh_one(drafter, ids, 5)


def test_a_drafter_that_begins_forgets():
    drafter = ModelDrafter(Engine(SMALL))
    for ids in ([5, 81, 17, 3], [5, 81], [9, 9, 9, 9, 9]):
        assert drafter.begin() is drafter
        assert_is_a_fresh_one(drafter, ids, 3)


def test_no_drafts_where_there_are_no_positions():
    """The last draft is not put through the model: k drafts need k - 1 places."""
    drafter = ModelDrafter(Engine(SMALL, max_seq_len=8)).begin()
    assert len(drafter.draft([1, 2, 3, 4, 5], 4, rows_of(), TARGET).ids) == 4
    assert drafter.engine.length == 8
    for ids, k in (([1, 2, 3, 4, 5, 6], 4), ([1] * 8, 2), ([1] * 20, 1)):
        assert len(drafter.begin().draft(ids, k, rows_of(), TARGET).ids) == 0
    assert len(drafter.begin().draft([1] * 8, 1, rows_of(), TARGET).ids) == 1


def test_an_id_that_the_draft_model_does_not_have_is_its_id_0():
    """B34, B43: the target's vocabulary is padded further, and it has said one of those ids."""
    narrow = random_model(shapes.llama(vocab_size=90), seed=2, dtype=torch.float64)
    one, other = (ModelDrafter(Engine(narrow)).begin() for _ in range(2))
    for ids in ([1, 2, 89], [1, 2, 89, 90], [1, 2, 89, 90, 3]):
        drafts = one.draft(ids, 2, rows_of(), TARGET).ids
        known = [i if i < 90 else 0 for i in ids]
        assert torch.equal(drafts, other.draft(known, 2, rows_of(), TARGET).ids)
        assert len(drafts) == 2 and (drafts < 90).all()


@pytest.mark.parametrize("params", [dict(temperature=0.8, seed=5), dict(temperature=1, top_k=3)])
def test_drafts_are_drawn_from_what_they_say_they_are(params):
    """B39, B42: shaped by the request's own parameters; the same seed draws the same."""
    ids = [5, 81, 17]

    def draft(**changes) -> Draft:
        drafter = ModelDrafter(Engine(SMALL)).begin()
        return drafter.draft(ids, 5, rows_of(**params | changes), TARGET)

    one, again = draft(), draft()
    assert torch.equal(one.ids, again.ids) and torch.equal(one.probs, again.probs)
    assert len({tuple(draft(seed=seed).ids.tolist()) for seed in range(10)}) > 1
    assert one.probs.shape == (5, V)
    assert torch.allclose(one.probs.sum(dim=-1), torch.ones(5, dtype=one.probs.dtype))
    assert (one.probs.gather(1, one.ids[:, None]) > 0).all()
    if "top_k" in params:
        assert ((one.probs > 0).sum(dim=-1) == 3).all()
