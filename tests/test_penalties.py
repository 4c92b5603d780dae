"""What the tokens so far do to the next one: penalties and min_tokens, row by row."""

import dataclasses

import oracle_sampling
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix, counted
from spindle.decode.sampling import SamplingRows, adjust, probabilities, sample

VOCAB = 20
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        seed=st.integers(0, 2**63 - 1),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        top_p=st.sampled_from([0.8, 1.0]),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, 2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 1e-4, 1e4]),
        min_tokens=st.integers(0, 8),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    )


def random_logits(seed: int, rows: int = 1, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * 3).to(dtype)


def rows_of(params: list[SamplingParams], prefixes: list[Prefix], eos_ids=()) -> SamplingRows:
    return SamplingRows.of(params, prefixes=prefixes, eos_ids=eos_ids, vocab_size=VOCAB)


def adjusted(logits: torch.Tensor, prefix: Prefix, eos_ids=(), **params) -> torch.Tensor:
    """Logits [V] of one row after its min_tokens and penalties."""
    rows = rows_of([SamplingParams(seed=0, **params)], [prefix], eos_ids)
    return adjust(logits[None], rows)[0]


def literally(logits: list[float], prefix: Prefix, params: SamplingParams, eos_ids) -> list[float]:
    """The documented order as a loop: min_tokens, repetition, frequency, presence."""
    out = []
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    for token, logit in enumerate(logits):
        if token in ends and len(prefix.output) < params.min_tokens:
            logit = -float("inf")
        if token in prefix.prompt or token in prefix.output:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * prefix.output.count(token)
        logit -= params.presence_penalty * (token in prefix.output)
        out.append(logit)
    return out


@given(st.integers(0, 10**6), IDS, IDS, params_strategy(), st.sets(st.integers(0, VOCAB - 1)))
def test_adjusted_logits_are_those_of_a_loop(seed, prompt, output, params, eos_ids):
    logits, prefix = random_logits(seed), Prefix(prompt, output)
    got = adjust(logits, rows_of([params], [prefix], sorted(eos_ids)))[0]
    right = literally(logits[0].tolist(), prefix, params, eos_ids)
    assert torch.equal(got, torch.tensor(right, dtype=torch.float64))


@pytest.mark.parametrize("penalty", [1.3, 0.6, 1.0, 1e4, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_repetition_penalty_equals_transformers(penalty, dtype):
    """Bit for bit; positive and negative logits, ids that are there once and often."""
    logits = random_logits(3, dtype=dtype)[0]
    prefix = Prefix([7, 7, 1, 19], [0, 3, 7, 11])
    got = adjusted(logits, prefix, repetition_penalty=penalty)
    right = oracle_sampling.repetition(logits, [*prefix.prompt, *prefix.output], penalty)
    assert torch.equal(got, right)
    assert bool((logits > 0)[[7, 1, 19, 0, 3, 11]].any() & (logits < 0)[[7, 1, 19, 0, 3, 11]].any())


@pytest.mark.parametrize("produced", range(6))
@pytest.mark.parametrize("eos_ids", [[2], [2, 7], [19]])
def test_min_tokens_equals_transformers(produced, eos_ids):
    """B57: not the prompt's length, every EOS id, and none of the first 4 tokens ends."""
    logits, prefix = random_logits(5)[0], Prefix([1] * 10, list(range(8, 8 + produced)))
    got = adjusted(logits, prefix, eos_ids, min_tokens=4)
    right = oracle_sampling.min_tokens(logits, [1] * 10, list(prefix.output), 4, eos_ids)
    assert torch.equal(got, right)
    assert got[eos_ids].isinf().all() == (produced < 4)


def test_what_each_penalty_counts():
    """B59: repetition sees the prompt; presence and frequency only what was generated since."""
    logits = torch.zeros(VOCAB, dtype=torch.float64)
    logits[7], logits[9], logits[4] = 3.0, -2.0, 1.0

    def changed(output: list[int], **penalty: float) -> dict[int, float]:
        after = adjusted(logits, Prefix([7], output), **penalty)
        return {i: after[i].item() for i in (after != logits).nonzero().flatten().tolist()}

    assert changed([], repetition_penalty=1.5) == {7: 2.0}
    assert changed([], presence_penalty=0.5) == changed([], frequency_penalty=0.5) == {}
    assert changed([9, 9], repetition_penalty=1.5) == {7: 2.0, 9: -3.0}
    assert changed([9, 9], presence_penalty=0.5) == {9: -2.5}
    assert changed([9, 9], frequency_penalty=0.5) == {9: -3.0}
    assert changed([7], presence_penalty=0.5) == {7: 2.5}


def test_the_order_of_the_penalties_shows():
    """Repetition before the other two: 3 / 1.5 - 2 * 0.5 - 0.25, and not (3 - 1.25) / 1.5."""
    logits = torch.full((VOCAB,), 3.0, dtype=torch.float64)
    penalties = dict(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    assert adjusted(logits, Prefix([], [5, 5]), **penalties)[5] == 0.75


def test_token_zero_is_penalised_only_where_it_is():
    """B58: prompts of unequal lengths are not filled up with token 0."""
    logits = random_logits(1, rows=2)
    params = SamplingParams(seed=0, repetition_penalty=2.0, presence_penalty=1.0)
    got = adjust(logits, rows_of([params] * 2, [Prefix([3, 4, 5], [6]), Prefix([0], [])]))
    assert got[0, 0] == logits[0, 0]
    assert got[1, 0] != logits[1, 0]


@given(
    st.lists(st.tuples(params_strategy(), IDS, IDS), min_size=2, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
@settings(max_examples=60)
def test_each_row_is_its_solo_run(batch, seed, dtype):
    """B58: rows with and without penalties together, bit for bit as each alone."""
    params, prefixes = [p for p, _, _ in batch], [Prefix(a, b) for _, a, b in batch]
    logits, positions = random_logits(seed, len(batch), dtype), torch.arange(len(batch))
    rows = rows_of(params, prefixes, [2, 7])
    together, tokens = probabilities(logits, rows), sample(logits, rows, positions)
    for i in range(len(batch)):
        at = slice(i, i + 1)
        alone = rows_of(params[at], prefixes[at], [2, 7])
        assert torch.equal(probabilities(logits[at], alone)[0], together[i])
        assert sample(logits[at], alone, positions[at])[0] == tokens[i]


def test_a_plain_row_beside_a_penalised_one_keeps_its_bits_in_both_orders():
    """B58: with no prefix of its own to speak of, and not even one tensor of penalties alone."""
    logits = random_logits(2, rows=2, dtype=torch.float32)
    plain, other = SamplingParams(seed=1), SamplingParams(seed=1, frequency_penalty=1.0)
    alone = probabilities(logits[:1], SamplingRows.of([plain]))
    first = rows_of([plain, other], [Prefix([1], [2]), Prefix([3, 4], [5, 5, 5])])
    last = rows_of([other, plain], [Prefix([3, 4], [5, 5, 5]), Prefix([1], [2])])
    assert torch.equal(probabilities(logits, first)[0], alone[0])
    assert torch.equal(probabilities(logits.flip(0), last)[1], alone[0])


@given(params_strategy(), IDS, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10))
def test_rows_kept_up_to_date_are_those_built_from_the_lists(params, prompt, output):
    """`append` after each token: the same logits as rows built anew from all ids."""
    kept, logits = rows_of([params], [Prefix(prompt)], [2, 7]), random_logits(8)
    for n, token in enumerate(output, 1):
        kept.append(torch.tensor([token]))
        anew = rows_of([params], [Prefix(prompt, output[:n])], [2, 7])
        assert torch.equal(adjust(logits, kept), adjust(logits, anew))


def test_rows_that_verify_drafts_include_the_drafts_before_them():
    """Rows of one sequence, each with one draft more, are the steps that they stand for."""
    params = SamplingParams(
        seed=3, presence_penalty=1.0, repetition_penalty=1.4, min_tokens=4, temperature=0
    )
    prompt, output, drafts = [4, 9], [1, 2], [5, 5, 7]
    prefixes = [Prefix(prompt, output + drafts[:i]) for i in range(4)]
    logits = random_logits(6, rows=4)
    together = adjust(logits, rows_of([params] * 4, prefixes, [0]))
    step = rows_of([params], [Prefix(prompt, output)], [0])
    for i in range(4):
        assert torch.equal(adjust(logits[i : i + 1], step)[0], together[i])
        step.append(torch.tensor([*drafts, 0])[i : i + 1])
    assert together[:, 0].isinf().tolist() == [True, True, False, False]


def test_what_no_row_needs_is_not_there():
    prefixes = [Prefix([1], [2])]
    plain = rows_of([SamplingParams(seed=0, min_tokens=3)], prefixes)  # no id that would end it
    assert (plain.min_tokens, plain.penalties) == (None, None)
    assert adjust(logits := random_logits(0), plain) is logits
    ignoring = SamplingParams(seed=0, min_tokens=3, ignore_eos=True)
    assert rows_of([ignoring], prefixes, [2]).min_tokens is None
    both = rows_of([SamplingParams(seed=0, min_tokens=3, presence_penalty=1.0)], prefixes, [2])
    assert both.min_tokens is not None and both.penalties is not None
    shapes = [
        {f.name: getattr(one, f.name).shape for f in dataclasses.fields(one)}
        for one in (both.min_tokens, both.penalties)
    ]
    assert shapes[0] == {"ends": (1, VOCAB), "owed": (1,)}
    assert set(shapes[1].values()) == {(1,), (1, VOCAB)}


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [-1, 10**6]])
def test_an_eos_id_that_no_logit_has_masks_nothing(ids):
    """B57: an id of -1 is not the last of the vocabulary."""
    logits = random_logits(0)[0]
    assert torch.equal(adjusted(logits, Prefix([1]), ids, min_tokens=3), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_minus_one_and_alone(temperature):
    """B69: all that is possible is held back by min_tokens, or a NaN is hidden by its mask."""
    params = SamplingParams(seed=0, min_tokens=2, temperature=temperature)
    logits = random_logits(4, rows=3)
    logits[0, 3:] = -torch.inf
    logits[1, 2] = torch.nan
    rows = rows_of([params] * 3, [Prefix([5])] * 3, [0, 1, 2])
    tokens = sample(logits, rows, torch.arange(3))
    alone = rows_of([params], [Prefix([5])], [0, 1, 2])
    assert tokens.tolist() == [-1, -1, int(sample(logits[2:], alone, torch.tensor([2])))]
    assert tokens[2] >= 3


def test_logits_are_left_as_they_were():
    params = SamplingParams(seed=0, min_tokens=2, repetition_penalty=1.5, presence_penalty=1.0)
    logits = random_logits(1)
    before = logits.clone()
    sample(logits, rows_of([params], [Prefix([1, 2], [3])], [4]), torch.tensor([3]))
    assert torch.equal(logits, before)


@given(st.lists(IDS, min_size=1, max_size=4))
def test_counts_are_counts(lists):
    got = counted(lists, VOCAB, "cpu")
    assert got.tolist() == [[ids.count(i) for i in range(VOCAB)] for ids in lists]
