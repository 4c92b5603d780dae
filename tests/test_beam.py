"""Beam search: by hand, against every answer there is, against transformers, in any company."""

import dataclasses
import itertools
import math
import random

import numpy as np
import oracle
import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.decode.beam import Beam, Pick
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.model.weights import load_hf, random_model
from spindle.serve.llm import LLM
from spindle.tokenizer import Tokenizer

V = 6
SMALL = random_model(shapes.llama(vocab_size=V, eos_token_id=0), dtype=torch.float64)
MODEL = random_model(shapes.llama(eos_token_id=7), dtype=torch.float64)


# --- the rules, by hand --------------------------------------------------------------------------


def test_one_step_by_hand():
    """Two beams, EOS 0: the second candidate ends, the third and the first live on."""
    beam = Beam(2, 9, 1.0, (0,))
    beams = [([5], -1.0), ([6], -1.5)]
    candidates = [[(1, -0.1), (0, -0.2), (2, -3.0), (3, -4.0)], [(1, -0.2), (4, -0.4)]]
    assert beam.advance(beams, candidates) == [Pick(0, 1, -1.1), Pick(1, 1, -1.7)]
    (found,) = beam.hypotheses
    assert (found.ids, found.finish_reason) == ([5, 0], "stop")
    assert (found.cumulative, found.score) == (-1.2, -0.6)


def test_an_end_beyond_the_first_candidates_is_no_hypothesis():
    beam = Beam(2, 9, 1.0, (0,))
    assert len(beam.advance([([], 0.0)], [[(1, -1.0), (2, -2.0), (0, -3.0), (3, -4.0)]])) == 2
    assert beam.hypotheses == []


def test_equal_candidates_come_in_the_order_of_their_beams_and_ids():
    beams = [([1], -1.0), ([2], -1.0)]
    picks = Beam(3, 9).advance(beams, [[(5, -1.0), (4, -1.0)], [(0, -1.0)]])
    assert [(pick.parent, pick.token) for pick in picks] == [(0, 4), (0, 5), (1, 0)]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_it_stops_only_when_nothing_can_change(penalty):
    """One beam, one hypothesis of -2 in two tokens: how likely must the live one still be?"""
    for live in (-1.0, -1.9, -2.1, -3.0, -5.0, -9.0):
        beam = Beam(1, 4, penalty, (0,))
        beam.advance([([1], -1.0)], [[(0, -1.0), (2, -1.5)]])
        worst = beam.hypotheses[0].score
        goes_on = bool(beam.advance([([1, 2], live)], [[(3, 0.0), (4, -1.0)]]))
        attainable = max(beam.score(live, n) for n in (3, 4))
        assert goes_on == (attainable > worst)


# --- against every answer there is ---------------------------------------------------------------


def every_answer(model, prompt, limit, penalty):
    """All answers of at most `limit` tokens, by score: each prefix is run once, alone."""
    engine, found = Engine(model, 64), []
    for length in range(1, limit + 1):
        for ids in itertools.product(range(V), repeat=length):
            ended = ids[-1] == 0
            if 0 in ids[:-1] or (length < limit and not ended):
                continue
            total, logits = 0.0, engine.prefill(prompt)
            for n, token in enumerate(ids):
                total += float(logits[0].log_softmax(-1)[token])
                if n + 1 < len(ids):
                    logits = engine.extend([token])
            found.append((total / length**penalty, list(ids)))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_answers(penalty):
    """Of 5 + 25 + ... answers over a vocabulary of 6, the best and all after it."""
    width, limit, prompt = 25, 3, [1, 2, 3]
    llm = LLM(SMALL, max_seqs=width, num_blocks=200, block_size=4, max_model_len=64)
    output = llm.beam_search(prompt, width, limit, penalty)
    best = every_answer(SMALL, prompt, limit, penalty)
    assert len(output.outputs) == width
    for one, (score, ids) in zip(output.outputs[:5], best, strict=False):
        assert one.token_ids == ids
        tokens = len(ids)
        assert one.cumulative_logprob / tokens**penalty == pytest.approx(score, abs=1e-9)
    narrow = llm.beam_search(prompt, 1, limit, penalty)
    assert len(narrow.outputs) == 1


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("width", [2, 4])
def test_it_finds_what_transformers_finds(tmp_path, width, penalty):
    """float64, with an EOS that comes often, early_stopping="never" there."""
    directory = oracle.make_checkpoint(tmp_path / "m", "llama", vocab_size=12)
    oracle.edit_config(directory, eos_token_id=3)
    model, theirs = load_hf(directory, dtype=torch.float64), oracle.load(directory)
    llm = LLM(model, max_seqs=4, num_blocks=60, block_size=4)
    rng, ended = random.Random(0), 0
    for _ in range(12):
        prompt = [rng.randrange(4, 12) for _ in range(rng.randint(1, 9))]
        ours = llm.beam_search(prompt, width, 7, penalty)
        expected = oracle.beam_search(theirs, prompt, width, 7, penalty, eos=3)
        assert [one.token_ids for one in ours.outputs] == expected
        ended += sum(one.finish_reason == "stop" for one in ours.outputs)
    assert ended > 0


def test_several_ends_of_sequence_as_in_transformers(tmp_path):
    """Three of twelve tokens end an answer: so many candidates more are looked at."""
    ends = [3, 5, 7]
    directory = oracle.make_checkpoint(tmp_path / "m", "llama", vocab_size=12, gain=1.0)
    oracle.edit_config(directory, eos_token_id=ends)
    model, theirs = load_hf(directory, dtype=torch.float64), oracle.load(directory)
    llm = LLM(model, max_seqs=3, num_blocks=60, block_size=4)
    rng = random.Random(1)
    for _ in range(12):
        prompt = [rng.choice([0, 1, 2, 4, 6]) for _ in range(rng.randint(1, 9))]
        ours = llm.beam_search(prompt, 3, 6, np.float32(0.5))
        expected = oracle.beam_search(theirs, prompt, 3, 6, 0.5, eos=ends)
        assert [one.token_ids for one in ours.outputs] == expected


# --- in company ----------------------------------------------------------------------------------


def alone(prompt, width, most):
    llm = LLM(MODEL, max_seqs=width, num_blocks=120, block_size=4, max_model_len=64)
    return llm.beam_search(prompt, width, most)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 8]),
    st.integers(0, 24),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.sampled_from(["continuous", "continuous", "static"]),
)
def test_beside_others_in_a_small_pool_it_finds_the_same(seed, size, spare, preemption, cache, how):
    """The group is preempted as one, and comes back as one; its neighbours notice nothing."""
    rng = random.Random(seed)
    width, most = rng.randint(1, 4), rng.randint(1, 10)
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 14))]
    blocks = -(-(len(prompt) + most) // size) * width + spare // size
    llm = LLM(
        MODEL,
        block_size=size,
        num_blocks=max(blocks, -(-30 // size)),
        max_model_len=64,
        max_seqs=5,
        max_batch_tokens=rng.randint(5, 20),
        preemption=preemption,
        prefix_cache=cache,
        policy=how,
    )
    for pool in (llm._kv.keys, llm._kv.values):
        pool.fill_(torch.nan)
    others = [
        ([rng.randrange(97) for _ in range(rng.randint(1, 12))], rng.randint(1, 16))
        for _ in range(rng.randint(0, 4))
    ]
    params = [SamplingParams(max_tokens=n, temperature=0) for _, n in others]
    names = [llm.add(ids, its) for (ids, _), its in zip(others, params, strict=True)]
    found = llm.beam_search(prompt, width, most)
    expected = alone(prompt, width, most)
    assert [one.token_ids for one in found.outputs] == [o.token_ids for o in expected.outputs]
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-9)
    done = {}
    while llm.has_unfinished:
        done |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
        llm.scheduler.check()
    for name, (ids, _), its in zip(names, others, params, strict=True):
        assert done[name] == list(Engine(MODEL, 64).stream_with(ids, its))
    llm._kv.pool.clear()
    assert llm._kv.pool.free == llm._kv.pool.num_blocks and not llm._texts


@pytest.mark.parametrize("width", [5, 12])
def test_a_search_wider_than_the_vocabulary_keeps_its_seats(width):
    """While fewer beams live than may, nobody else takes the seats that they will grow into."""
    llm = LLM(SMALL, max_seqs=12, max_batch_tokens=12, num_blocks=300, block_size=4)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    names = [llm.add([n % V], params) for n in range(30)]
    names.append(llm.add([1] * 30, params))
    run = llm._runner.run

    def looked_at(plan):
        assert sum(chunk.count for chunk in plan.chunks) <= 12
        llm.scheduler.check()
        return run(plan)

    llm._runner.run = looked_at
    found = llm.beam_search([1, 2], width, 6)
    expected = LLM(SMALL, max_seqs=12, num_blocks=300, block_size=4).beam_search([1, 2], width, 6)
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    done = set()
    while llm.has_unfinished:
        done |= {output.request_id for output in llm.step() if output.finished}
    assert done == set(names)


def test_beams_share_their_prompt():
    """Four beams after a prompt of 16 tokens: 19 blocks by name, 7 in memory."""
    llm = LLM(MODEL, max_seqs=4, num_blocks=60, block_size=4, max_model_len=64)
    seen = []
    run = llm._runner.run

    def look(plan):
        named = sum(len(one.table.blocks) for one in llm.scheduler.running)
        seen.append((named, llm.scheduler.pool.num_blocks - llm.scheduler.pool.free))
        return run(plan)

    llm._runner.run = look
    llm.beam_search([5] * 16, 4, 3, 0.0, ignore_eos=True)
    assert seen[:2] == [(4, 4), (20, 8)]
    assert llm.stats["blocks_held"] == 0


def test_a_group_is_preempted_whole_and_resumes_whole():
    options = dict(max_seqs=5, block_size=2, max_model_len=40, prefix_cache=False)
    whole = LLM(MODEL, num_blocks=200, **options).beam_search([2] * 6, 3, 8, ignore_eos=True)
    llm = LLM(MODEL, num_blocks=22, trace=99, **options)
    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for _ in range(2):
        llm.add([1] * 4, long)
    output = llm.beam_search([2] * 6, 3, 8, ignore_eos=True)
    assert output.metrics.preemptions > 0
    chunks = [[c for c in plan.chunks if c.sequence.request.beam] for plan in llm.trace]
    assert {len(its) for its in chunks} == {0, 1, 3}
    assert {sum(c.samples for c in its) for its in chunks} == {0, 1, 3}
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in whole.outputs]


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(width=0), "width=0: expected a whole number of 1 or more"),
        (dict(width=True), "width=True"),
        (dict(width=5), "width=5: at most max_seqs=4"),
        (dict(length_penalty=math.nan), "length_penalty=nan: expected a number from -10 to 10"),
        (dict(length_penalty=400.0), "length_penalty=400.0: expected a number from -10 to 10"),
        (dict(length_penalty=-(10**400)), "length_penalty"),
        (dict(length_penalty=True), "length_penalty=True"),
        (dict(length_penalty="1"), "length_penalty='1'"),
        (dict(max_tokens=-1), "max_tokens=-1"),
        (dict(prompt=[]), "the prompt has no tokens"),
        (dict(max_tokens=60), "each of 4 beams may take 40 tokens, 40 blocks of 4 in all"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_anything_changes(options, words):
    llm = LLM(MODEL, max_seqs=4, num_blocks=30, block_size=4, max_model_len=40)
    with pytest.raises(RequestError, match=words):
        llm.beam_search(**(dict(prompt=[1, 2]) | options))
    assert not llm.has_unfinished and not llm._requests


def test_no_tokens_asked_for():
    llm = LLM(MODEL, max_seqs=4, num_blocks=30, block_size=4, max_model_len=40)
    output = llm.beam_search([1, 2], 2, 0)
    assert [(o.token_ids, o.finish_reason) for o in output.outputs] == [([], "length")] * 2


def test_text_is_that_of_the_ids():
    model, tokenizer = load_hf("tiny", device="cpu", dtype=torch.float64), Tokenizer("tiny")
    llm = LLM(model, tokenizer=tokenizer, num_blocks=40)
    output = llm.beam_search("The capital of France is", 3, 8)
    assert len(output.outputs) == 3
    for one in output.outputs:
        whole = tokenizer.decode(output.prompt_ids + one.token_ids)
        assert whole == tokenizer.decode(output.prompt_ids) + one.text
    sums = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
    assert sums == sorted(sums, reverse=True)


def test_the_token_that_ends_an_answer_has_no_text():
    """An EOS that is an ordinary token in the tokenizer."""
    model, tokenizer = load_hf("tiny", device="cpu", dtype=torch.float64), Tokenizer("tiny")
    (the,) = tokenizer.encode(" the")
    model.config = dataclasses.replace(model.config, eos_ids=(the,))
    llm = LLM(model, tokenizer=tokenizer, num_blocks=40)
    ended = [o for o in llm.beam_search("The capital of", 4, 9).outputs if o.token_ids[-1] == the]
    assert ended
    for one in ended:
        assert one.text == tokenizer.decode(one.token_ids[:-1]) and one.finish_reason == "stop"


def test_broken_logits_end_the_search_alone():
    """A row without a distribution in one of the beams: an error, and the engine goes on."""

    class Sick:
        config, dtype, device = MODEL.config, MODEL.dtype, MODEL.device
        logits = staticmethod(MODEL.logits)

        def __call__(self, ids, view):
            hidden = MODEL(ids, view)
            return hidden.masked_fill(
                (view.positions > 4)[:, None] & (ids > 40)[:, None], torch.nan
            )

    llm = LLM(Sick(), max_seqs=4, num_blocks=60, block_size=4, max_model_len=40)
    output = llm.beam_search([1, 2, 3], 4, 12, ignore_eos=True)
    assert {one.finish_reason for one in output.outputs} == {"error"}
    assert llm.stats["blocks_held"] == 0 and not llm.has_unfinished
