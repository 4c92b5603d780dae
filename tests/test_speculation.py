"""Speculation in a batch: whatever is drafted, by whom, however wrong, each request is itself.

"Plain" is an LLM without drafts that has nothing else to do. The models are tiny and random, in
float64: one decides, the others draft.
"""

import functools
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import shapes
import torch
from asked import requests_by_lot
from hypothesis import given, settings

from spindle import hub
from spindle.decode import graphs, speculative
from spindle.decode.drafters import Drafter, ModelDrafter, NgramDrafter
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockTable
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV
from spindle.model.weights import load_hf, random_model
from spindle.serve import drafting, runner, scheduler
from spindle.serve import llm as llm_module
from spindle.serve.llm import LLM
from spindle.serve.recorded import LARGEST
from spindle.tokenizer import Tokenizer

V, CONTEXT = shapes.LLAMA["vocab_size"], 64
CONFIGS = {"llama": shapes.llama(eos_token_id=7), "gpt2": shapes.gpt2(eos_token_id=7)}
MODELS = {name: random_model(config, dtype=torch.float64) for name, config in CONFIGS.items()}
OTHER = random_model(shapes.llama(num_hidden_layers=1), seed=5, dtype=torch.float64)


def near(name, spread=1.0):
    """A model that often says what another says: its logits, and a fixed noise on them."""
    model = random_model(CONFIGS[name], dtype=torch.float64)
    logits, noise = (
        model.logits,
        torch.randn(V, generator=torch.Generator().manual_seed(1)) * spread,
    )
    model.logits = lambda hidden: logits(hidden) + noise.double()
    return model


DRAFTS = {  # of each target, by what it is to it
    "same": {name: random_model(CONFIGS[name], dtype=torch.float64) for name in MODELS},
    "near": {name: near(name) for name in MODELS},
    "other": dict.fromkeys(MODELS, OTHER),
}
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, seed=0)


def engine(name="llama", **options):
    usual = dict(max_model_len=40, max_seqs=3, max_batch_tokens=32, num_blocks=40, block_size=4)
    return LLM(MODELS.get(name, name), **(usual | options))


class Cheap(ModelDrafter):
    """A draft model that is said to cost little, so that it pays, whatever its size."""

    def cost(self, target):
        return 0.05


def model_drafter(kind, name="llama"):
    return Cheap(Engine(DRAFTS[kind][name]))


# --- drafters of every character -----------------------------------------------------------------


class Told(Drafter):
    """Knows the answers, as whole lists of ids, and may do with them what it likes."""

    def __init__(self, answers=()):
        self.answers = list(answers)

    def truth(self, ids, k):
        ids = list(ids)
        for answer in self.answers:
            if answer[: len(ids)] == ids and len(answer) > len(ids):
                return answer[len(ids) :][:k]
        return []

    def propose(self, ids, k):
        return self.truth(ids, k)


class Wrong(Told):
    """None of its ids is right."""

    def propose(self, ids, k):
        right = self.truth(ids, k)
        right += [0] * (k - len(right))
        return [(token + 1) % V for token in right]


class RightThenWrong(Told):
    """The first of its ids are right, as many as the length of the sequence says."""

    def propose(self, ids, k):
        right = len(ids) % (k + 1)
        return [*self.truth(ids, right), *Wrong(self.answers).propose(ids, k)[right:]]


class Fickle(Told):
    """Any ids, of any number, right ones among them; asked again, others."""

    def __init__(self, answers=(), seed=0):
        super().__init__(answers)
        self.rng = random.Random(seed)

    def propose(self, ids, k):
        rng = self.rng
        right = self.truth(ids, rng.randint(0, k))
        return (right + [rng.randrange(V) for _ in range(k)])[: rng.randint(0, k)]


class Lot(Told):
    """The same, but asked again it says the same."""

    def propose(self, ids, k):
        return Fickle(self.answers, seed=hash((k, *ids))).propose(ids, k)


class Silent(Told):
    def propose(self, ids, k):
        return []


class TooMany(Told):
    """More than were asked for: right ones, then whatever."""

    def propose(self, ids, k):
        return [*self.truth(ids, 2 * k), *range(3 * k)]


ADVERSARIES = {kind.__name__: kind for kind in (Told, Wrong, RightThenWrong, Lot, Silent, TooMany)}
GUESSES = ["ngram", *ADVERSARIES]
ALL = [*GUESSES, *(f"model: {kind}" for kind in DRAFTS)]


def drafter_of(kind, name, answers=()):
    """What to give as `speculate`; answers: those that an adversary knows."""
    if kind == "ngram":
        return NgramDrafter(shortest=1)
    if kind in ADVERSARIES:
        return ADVERSARIES[kind](answers)
    return model_drafter(kind.removeprefix("model: "), name)


# --- what a request is, without drafts -----------------------------------------------------------


@functools.cache
def plain(name, prompt, params):
    """A request by itself, without drafts: its output. prompt: a tuple."""
    seats = max(params.samples, 1)
    room = dict(max_seqs=seats, num_blocks=16 * seats, max_model_len=CONTEXT)
    return engine(name, **room).generate([list(prompt)], params)[0]


def searched(name, prompt, width, most):
    llm = engine(name, max_seqs=width, num_blocks=16 * width, max_model_len=CONTEXT)
    return llm.beam_search(list(prompt), width, most, ignore_eos=True)


def assert_same(output, expected):
    """Ids, text, reasons, and logprobs within 1e-9."""
    assert len(output.outputs) == len(expected.outputs)
    for ours, theirs in zip(output.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.index, ours.text) == (theirs.index, theirs.text)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None:
            assert len(ours.logprobs) == len(ours.token_ids)
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert (one.sampled.token_id, one.sampled.rank) == (
                    other.sampled.token_id,
                    other.sampled.rank,
                )
                assert one.sampled.logprob == pytest.approx(other.sampled.logprob, abs=1e-9)
                assert [r.token_id for r in one.top] == [r.token_id for r in other.top]
        if theirs.cumulative_logprob is not None:
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-9)


def assert_counts(output, selects=False):
    """B48: what is counted of drafts fits together, and with the tokens that were returned.

    Of `best_of` all answers count, and not those alone that were returned.
    """
    counts = output.metrics.speculation
    if counts is None:
        return
    assert 0 <= counts.accepted <= counts.judged <= counts.proposed
    assert counts.tokens <= counts.passes + counts.accepted
    if not selects:  # the first of each answer is from the pass over the prompt
        assert counts.tokens == sum(max(len(one.token_ids) - 1, 0) for one in output.outputs)
    rates = counts.acceptance_rate, counts.draft_share
    assert all(rate is None or 0 <= rate <= 1 for rate in rates)


# --- what both caches hold -----------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def prefilled(model, ids):
    """Keys and values [2, L, len(ids), Hk, D] of a tuple of ids, from one pass."""
    kv = PagedKV(model.config, 1, len(ids), model.dtype)
    table = BlockTable(kv.pool)
    table.reserve(0, len(ids))
    model(torch.tensor(ids), kv.view(StepIndex.of([(0, 0, len(ids))]), [table]))
    return torch.stack((kv.keys[:, 0], kv.values[:, 0]))


def contents(kv, blocks, length):
    """Keys and values of the first tokens in these blocks, [2, L, length, Hk, D]."""
    both = torch.stack((kv.keys, kv.values))[:, :, blocks]  # [2, L, B, P, Hk, D]
    return both.flatten(2, 3)[:, :, :length]


class Watched:
    """An LLM whose caches are looked at after every step, and whose writes within."""

    def __init__(self, llm, draft_model=None):
        self.llm, self.pool = llm, llm._kv.pool
        self.caches = [(llm._kv, llm.model)]
        if draft_model is not None:
            self.caches.append((llm._drafting.kv, draft_model))
        for kv, _ in self.caches:
            kv.keys.fill_(torch.nan), kv.values.fill_(torch.nan)
        self._run, llm._runner.run = llm._runner.run, self.run
        self.most_rows = 0
        self.told = []  # all outputs so far
        self.broken_off = False  # whether a step was, which may leave blocks to the next

    def run(self, plan):
        """The step, which writes to no block but those that one of its sequences has for itself."""
        own = {
            block
            for chunk in plan.chunks
            for block in chunk.sequence.table.blocks
            if self.pool.count(block) == 1
        }
        others = [block for block in range(self.pool.num_blocks) if block not in own]
        before = [kv.keys[:, others].nan_to_num() for kv, _ in self.caches]
        rows = sum(chunk.count for chunk in plan.chunks)
        assert rows <= self.llm.scheduler.max_batch_tokens
        assert all(len(chunk.ids) == chunk.count for chunk in plan.chunks)
        planned = {chunk.sequence for chunk in plan.chunks}
        running = self.llm.scheduler.running
        oldest = [one for one in running if one.request is running[0].request]
        assert not running or planned & set(oldest), "the oldest goes on in every step"
        decodes = {one for one in running if one.pending == 1 and one.request.beam is None}
        assert decodes <= planned, "and so does whoever decodes"
        self.most_rows = max(self.most_rows, rows)
        outputs = self._run(plan)
        for (kv, _), was in zip(self.caches, before, strict=True):
            assert torch.equal(kv.keys[:, others].nan_to_num(), was), "somebody else's block"
        return outputs

    def step(self):
        outputs = self.llm.step()
        self.told += outputs
        self.llm.scheduler.check()
        P = self.pool.block_size
        for one in self.llm.scheduler.running:
            assert len(one.table.blocks) == -(-one.stored // P) or self.broken_off, "given back"
            lengths = [one.stored, one.draft_stored]
            for (kv, model), length in zip(self.caches, lengths, strict=False):
                if length:
                    right = prefilled(model, tuple(one.ids))[:, :, :length]
                    got = contents(kv, one.table.blocks, length)
                    assert torch.allclose(got, right, rtol=0, atol=1e-9), (one, length)
        for block, ids in remembered(self.pool).items():
            for kv, model in self.caches:
                right = prefilled(model, ids)[:, :, -P:]
                assert torch.allclose(contents(kv, [block], P), right, rtol=0, atol=1e-9), block
        return outputs

    def nothing_is_held(self):
        llm = self.llm
        assert not llm._requests and not llm._texts and llm.stats["blocks_held"] == 0
        llm._kv.pool.clear()
        assert llm._kv.pool.free == llm._kv.pool.num_blocks
        assert llm._kv.host is None or llm._kv.host.free == llm._kv.host.num_blocks


def until_idle(llm, most=2000):
    """A turn for each step that may be needed; it comes to an end."""
    for turn in range(most):
        if not llm.has_unfinished:
            return
        yield turn
    raise AssertionError("it comes to an end")


def remembered(pool):
    """Of each block that the index names, all ids up to its end."""
    found = {}
    for block, entry in pool.index._of_block.items():
        ids, one = (), entry
        while one is not None:
            ids, one = one.tokens + ids, one.parent
        found[block] = ids
    return found


# --- together is alone ---------------------------------------------------------------------------


@st.composite
def traffic(draw):
    """Requests of every kind, when they come, and when they are aborted (or never)."""
    rng, requests = random.Random(draw(st.integers(0, 10_000))), []
    for start, prompt, params in requests_by_lot(rng, draw(st.integers(1, 6)), V, 14):
        if params.n > 1 and rng.random() < 0.5:
            params = replace(params, best_of=3)
        beams = rng.choice([0, 0, 0, 0, 2, 3])
        abort = rng.randrange(12) if rng.random() < 0.15 else None
        requests.append((start, tuple(prompt), params, beams, abort))
    return requests


def serve(watched, requests):
    """Add each request when it is due, abort those that are to be; all outputs, by request.

    Each ends after as many steps at most as it and all older ones have tokens: nobody starves.
    """
    llm, names, done, ends_by = watched.llm, {}, {}, {}
    due = sorted(enumerate(requests), key=lambda pair: pair[1][0])
    for now in range(3000):
        while due and due[0][1][0] <= now:
            at, (_, prompt, params, beams, _) = due.pop(0)
            name = add_search(llm, prompt, beams, params) if beams else llm.add(prompt, params)
            names[name] = at
            alive = [requests[n] for n in names.values() if n not in done]
            ends_by[at] = now + sum(
                max(one[3], one[2].samples) * (len(one[1]) + one[2].max_tokens) for one in alive
            )
        for name, at in names.items():
            start, *_, abort = requests[at]
            if abort is not None and start + abort == now:
                done[at] = llm.abort(name) or done[at]
        if not due and not llm.has_unfinished:
            return done
        for output in watched.step():
            if output.finished:
                done[names[output.request_id]] = output
        assert all(now <= last for at, last in ends_by.items() if at not in done), "nobody starves"
    raise AssertionError("it comes to an end")


def add_search(llm, prompt, width, params):
    """Queue a beam search, and let others step it."""
    queued = []

    def run_to_the_end(queue, progress=False):
        queue(queued)
        return [None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "_run_to_the_end", run_to_the_end)
        llm.beam_search(list(prompt), width, params.max_tokens, ignore_eos=True)
    return queued[0]


@settings(max_examples=60, deadline=None)
@given(
    traffic(),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(ALL),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([1, 4, 16]),
    st.integers(3, 5),
    st.sampled_from([0, 0, 9]),
    st.integers(0, 60),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
)
def test_together_and_with_drafts_is_alone_and_without(
    requests, name, kind, k, adaptive, size, seqs, more, spare, preemption, cache
):
    """B33, B34, B42, B44, B48, B49: and what both caches hold is right after every step."""
    longest = max(len(prompt) + params.max_tokens for _, prompt, params, _, _ in requests)
    widest = max(beams for *_, beams, _ in requests)
    blocks = max(widest, 1) * -(-longest // size) + spare // size
    expected = [
        searched(name, prompt, beams, params.max_tokens) if beams else plain(name, prompt, params)
        for _, prompt, params, beams, _ in requests
    ]
    answers = [
        [*output.prompt_ids, *one.token_ids] for output in expected for one in output.outputs
    ]
    llm = engine(
        name,
        block_size=size,
        num_blocks=blocks,
        max_model_len=CONTEXT,
        max_seqs=seqs,
        max_batch_tokens=seqs * (1 + k) + more,
        preemption=preemption,
        prefix_cache=cache,
        speculate=drafter_of(kind, name, answers),
        k=k,
        adaptive_k=adaptive,
    )
    drafts_of_a_model = kind.startswith("model: ")
    watched = Watched(
        llm, DRAFTS[kind.removeprefix("model: ")][name] if drafts_of_a_model else None
    )
    done = serve(watched, requests)
    for at, (_, prompt, params, beams, abort) in enumerate(requests):
        output = done[at]
        assert_counts(output, params.selects)
        if any(one.finish_reason == "abort" for one in output.outputs):
            assert abort is not None
        elif beams or params.temperature == 0 or not drafts_of_a_model:
            assert_same(output, expected[at])
        else:
            assert_streams(output, name, kind, prompt, params, k, adaptive)
    watched.nothing_is_held()


def assert_streams(output, name, kind, prompt, params, k, adaptive):
    """Each answer is that of one stream with the same drafter."""
    if params.selects:
        return
    drafter = drafter_of(kind, name)
    single = speculative.Speculator(Engine(MODELS[name], CONTEXT), drafter, k, adaptive)
    streams = single.streams(prompt, params)
    for one, stream in zip(output.outputs, streams, strict=True):
        assert one.token_ids == list(stream)
        assert one.finish_reason == stream.stats.finish_reason


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_tokens_are_those_of_plain_decoding_for_every_k(name, kind):
    """B33, B37: three prompts that repeat themselves, and each their own answer again."""
    prompts = [(1, 2, 3, 4) * 3, (5,), tuple(range(20, 31))]
    expected = [plain(name, prompt, replace(GREEDY, logprobs=2)) for prompt in prompts]
    answers = [[*e.prompt_ids, *e.outputs[0].token_ids] for e in expected]
    for k, adaptive in itertools.product(range(1, 9), (False, True)):
        drafter = drafter_of(kind, name, answers)
        llm = engine(name, max_batch_tokens=27, speculate=drafter, k=k, adaptive_k=adaptive)
        outputs = llm.generate([list(p) for p in prompts], replace(GREEDY, logprobs=2))
        for output, right in zip(outputs, expected, strict=True):
            assert_same(output, right)
            assert_counts(output)
        assert (llm.stats["proposed"] > 0) == (kind != "Silent")
        if kind in ("Told", "model: same"):
            assert llm.stats["accepted"] == llm.stats["proposed"]
        if kind == "Wrong":
            assert llm.stats["accepted"] == 0


@pytest.mark.parametrize("kind", ["ngram", "Told", "Lot", "model: near"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_in_mid_run_they_go_on_as_they_were(preemption, kind):
    """A pool for the longest alone, and a block at a time beside it: it must preempt."""
    prompts = [(n + 1,) * (3 + 2 * n) for n in range(4)]
    each = [replace(GREEDY, max_tokens=18, temperature=n % 2, seed=n) for n in range(4)]
    expected = [plain("llama", *pair) for pair in zip(prompts, each, strict=True)]
    answers = [[*e.prompt_ids, *e.outputs[0].token_ids] for e in expected]
    for k, blocks in itertools.product((2, 7), (9, 12, 15)):
        drafter = drafter_of(kind, "llama", answers)
        options = dict(speculate=drafter, k=k, adaptive_k=False, preemption=preemption)
        llm = engine(num_blocks=blocks, max_seqs=4, **options)
        watched = Watched(llm, DRAFTS["near"]["llama"] if kind == "model: near" else None)
        done = serve(watched, [(0, *pair, 0, None) for pair in zip(prompts, each, strict=True)])
        assert sum(done[n].metrics.preemptions for n in done) > 0 and llm.stats["accepted"] > 0
        for n, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            if kind == "model: near" and params.temperature:
                assert_streams(done[n], "llama", kind, prompt, params, k, False)
            else:
                assert_same(done[n], expected[n])
        watched.nothing_is_held()


@pytest.mark.parametrize("kind", ["ngram", "model: near"])
def test_a_beam_search_has_no_drafts_and_is_itself_beside_those_that_have(kind):
    """Nor does a draft model write to the blocks that its beams share."""
    prompts, params = [(1, 2, 3), (4,) * 6], replace(GREEDY, max_tokens=20)
    for size, width in ((1, 2), (4, 3), (4, 2)):
        options = dict(block_size=size, num_blocks=240 // size, max_seqs=5, trace=99, k=3)
        llm = engine(speculate=drafter_of(kind, "llama"), adaptive_k=False, **options)
        watched = Watched(llm, DRAFTS["near"]["llama"] if kind == "model: near" else None)
        requests = [(0, prompts[0], params, width, None), (1, prompts[1], params, 0, None)]
        done = serve(watched, requests)
        assert_same(done[0], searched("llama", prompts[0], width, 20))
        assert_same(done[1], plain("llama", prompts[1], params))
        assert done[0].metrics.speculation is None
        chunks = [chunk for plan in llm.trace for chunk in plan.chunks]
        assert not any(c.drafts for c in chunks if c.sequence.request.beam)
        assert any(c.drafts for c in chunks)
        watched.nothing_is_held()


# --- a draft model -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_draft_model_that_is_the_target_has_everything_accepted(name, temperature):
    """B33: in every round, for every k; its cache is behind by the last draft alone."""
    params = replace(GREEDY, temperature=temperature, max_tokens=25, top_k=40)
    for k in range(1, 9):
        drafter = model_drafter("same", name)
        llm = engine(name, max_batch_tokens=64, speculate=drafter, k=k, adaptive_k=False)
        watched = Watched(llm, DRAFTS["same"][name])
        llm.add([1, 2, 3], params), llm.add([4] * 9, params)
        while llm.has_unfinished:
            outputs = watched.step()
            for one in llm.scheduler.running:
                full = one.new_tokens > 1
                assert one.draft_stored == one.stored - full and one.pending == 1
        for output in outputs:
            counts = output.metrics.speculation
            assert counts.accepted == counts.judged == counts.proposed == 25 - 1 - counts.passes
            assert counts.passes <= 24 // (k + 1) + k.bit_length()  # fewer drafts at the end


def test_after_rounds_of_every_outcome_the_draft_cache_is_that_of_a_prefill():
    """B34: 0, 1, k - 1 and k accepted; `Watched` looks at both caches after each."""
    seen, k = set(), 4
    for seed in range(4):
        llm = engine(speculate=model_drafter("near"), k=k, adaptive_k=False, trace=999)
        watched = Watched(llm, DRAFTS["near"]["llama"])
        params = replace(GREEDY, max_tokens=30, temperature=0.8, seed=seed)
        llm.add([1 + seed, 2], params)
        before = 2
        while llm.has_unfinished:
            (output,) = watched.step()
            now = len(output.outputs[0].token_ids) + 2
            if llm.trace[-1].chunks[0].drafts == k:
                seen.add(now - before - 1)
            before = now
    assert seen == set(range(k + 1))


def test_the_draft_model_has_no_more_to_do_than_what_is_to_be_drafted():
    """B45: with 0 tokens to come nothing; with 1 the prompt; never a position that is not needed.

    The prompt goes through both models: so a block of it is remembered for both.
    """
    for most, adaptive in itertools.product(range(13), (True, False)):
        llm = engine(speculate=model_drafter("other"), k=4, adaptive_k=adaptive)
        rows, hidden = Counter(), llm._drafting._hidden

        def counted(its, spans, chunks, hidden=hidden, rows=rows):
            rows.update(row.position for row in its)
            return hidden(its, spans, chunks)

        llm._drafting._hidden = counted
        (output,) = llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=most))
        assert len(output.outputs[0].token_ids) == most
        assert max(rows, default=-1) <= (3 + most - 2 if most else -1)  # not the last token


def test_sampled_drafts_have_the_same_tokens_alone_and_in_a_crowd():
    """B42: those of `speculative.generate`, for every way of sampling."""
    ways = [
        dict(temperature=1.0),
        dict(temperature=0.7, top_p=0.8),
        dict(temperature=1.4, top_k=5, repetition_penalty=1.3),
        dict(temperature=0.9, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.3),
        dict(temperature=1.0, min_tokens=6, ignore_eos=False, stop_token_ids=(1, 2, 3, 4)),
        dict(temperature=0),
    ]
    each = [replace(GREEDY, **way, seed=n) for n, way in enumerate(ways)]
    for k, adaptive in itertools.product((1, 5), (True, False)):
        drafter = model_drafter("near")
        options = dict(speculate=drafter, k=k, adaptive_k=adaptive, max_seqs=6, num_blocks=60)
        llm = engine(max_batch_tokens=40, **options)
        outputs = llm.generate([[n + 1, 9] for n in range(6)], each)
        for n, output in enumerate(outputs):
            assert_streams(output, "llama", "model: near", [n + 1, 9], each[n], k, adaptive)
        assert 0 < llm.stats["accepted"] < llm.stats["proposed"]


def test_a_seed_decides_and_nothing_else():
    """B42: the same twice, also beside others; another seed gives something else."""
    for kind in ("ngram", "model: near"):
        texts = []
        for seed, beside in ((1, 0), (1, 0), (1, 2), (2, 0)):
            llm = engine(speculate=drafter_of(kind, "llama"))
            params = replace(GREEDY, temperature=1.2, seed=seed)
            prompts = [[1, 2, 1, 2], *[[8, 9]] * beside]
            texts.append(llm.generate(prompts, params)[0].outputs[0].token_ids)
        assert texts[0] == texts[1] == texts[2] != texts[3]


# --- the distribution ----------------------------------------------------------------------------

SMALL = dict(vocab_size=3, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
SMALL |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=16)
LENGTH, PROMPT = 4, (2, 0)


def small(seed):
    return random_model(shapes.llama(**SMALL), seed=seed, dtype=torch.float64, gain=1.5)


def target_law(model, temperature, top_k, top_p):
    """The probability of every answer of LENGTH ids, from forward passes and the definitions."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*ids, token): p * q
            for ids, p in law.items()
            for token, q in enumerate(next_law(model, ids, temperature, top_k, top_p))
            if q > 0
        }
    return law


def next_law(model, ids, temperature, top_k, top_p):
    kv = PagedKV(model.config, 1, 16, model.dtype)
    table = BlockTable(kv.pool)
    table.reserve(0, len(ids) + len(PROMPT))
    index = StepIndex.of([(0, 0, len(ids) + len(PROMPT))])
    hidden = model(torch.tensor([*PROMPT, *ids]), kv.view(index, [table]))
    p = (model.logits(hidden[-1:])[0] / temperature).softmax(dim=0).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or None]
    total, before = sum(p[token] for token in order), 0.0
    kept = {}
    for token in order:
        if before / total < top_p:
            kept[token] = p[token]
        before += p[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(p))]


def tail(observed, law):
    """The chance of a chi-square as large as this one, rare outcomes taken together."""
    assert set(observed) <= set(law), "an answer that cannot be"
    n, rare, cells = sum(observed.values()), [0.0, 0], []
    for ids, p in law.items():
        if n * p < 5:
            rare[0] += n * p
            rare[1] += observed[ids]
        else:
            cells.append((n * p, observed[ids]))
    cells += [tuple(rare)] if rare[0] > 0 else []
    chi2 = sum((got - mean) ** 2 / mean for mean, got in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


WAYS = {
    "plain": dict(temperature=1.0, top_k=0, top_p=1.0),
    "cooler": dict(temperature=0.6, top_k=0, top_p=1.0),
    "top_k": dict(temperature=1.3, top_k=2, top_p=1.0),
    "top_p": dict(temperature=1.0, top_k=0, top_p=0.8),
}


@pytest.mark.parametrize(
    ("batch", "way"), [*((4, way) for way in WAYS), (1, "plain"), (1, "top_p")]
)
def test_whole_answers_come_as_often_as_the_target_says(way, batch):
    """B39, B40: with drafts drawn from another model, rounds rolled back in a paged cache."""
    model, n, way = small(1), 200 + 150 * batch, WAYS[way]
    drafter = ModelDrafter(Engine(small(2)))
    options = dict(max_model_len=8, max_seqs=batch, num_blocks=8 * batch, block_size=2)
    llm = LLM(model, speculate=drafter, k=3, adaptive_k=False, **options)
    params = [SamplingParams(max_tokens=LENGTH, seed=7 * seed, **way) for seed in range(n)]
    outputs = llm.generate([list(PROMPT)] * n, params)
    observed = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    law = target_law(model, **way)
    assert sum(law.values()) == pytest.approx(1)
    assert 0.1 < llm.stats["accepted"] / llm.stats["proposed"] < 0.9
    assert tail(observed, law) > 1e-3


# --- text, stops, lengths ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load_hf("tiny", device="cpu", dtype=torch.float64), Tokenizer("tiny")


PROMPTS = ["The capital of France is", "Return True if", "A dictionary is a dictionary is a"]


def texts(tiny, **options):
    model, tokenizer = tiny
    usual = dict(max_seqs=4, num_blocks=60, max_model_len=128)
    return LLM(model, tokenizer=tokenizer, **(usual | options))


def known(outputs):
    return [[*o.prompt_ids, *one.token_ids] for o in outputs for one in o.outputs]


def test_a_stop_string_that_is_completed_in_an_accepted_run_ends_it_there(tiny):
    """B38: text, ids and logprobs end at the same token, wherever in the run it stands."""
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=2, ignore_eos=True)
    free = texts(tiny).generate(PROMPTS[:2], params)
    answers = known(free)
    plainly, drafted = texts(tiny), texts(tiny, speculate=Told(answers), k=8, adaptive_k=False)
    ends = set()
    for at, output in enumerate(free):
        text = output.outputs[0].text
        for start in range(0, len(text) - 3, 5):
            stop = replace(params, stop=text[start : start + 3], min_tokens=start % 3)
            (right,), (got,) = (llm.generate([PROMPTS[at]], stop) for llm in (plainly, drafted))
            assert_same(got, right)
            assert_counts(got)
            ends.add(len(got.outputs[0].token_ids))
            assert got.outputs[0].finish_reason == "stop" or start % 3
    assert len(ends) > 8 and drafted.stats["accepted"] > 100


def test_an_end_in_an_accepted_run_is_the_last_id_wherever_it_stands():
    """B38, B48: an EOS or a stop id at every place of the run, and min_tokens around it."""
    free = plain("llama", (1, 2, 3), replace(GREEDY, logprobs=1))
    answers = known([free])
    llm = engine(speculate=Told(answers), k=8, adaptive_k=False)
    ids = free.outputs[0].token_ids
    for place, least in itertools.product(range(20), (0, 1, 7, 20)):
        params = replace(GREEDY, logprobs=1, stop_token_ids=(ids[place],), min_tokens=least)
        (got,) = llm.generate([[1, 2, 3]], params)
        assert_same(got, plain("llama", (1, 2, 3), params))
        assert_counts(got)
        if least == 0:
            assert got.outputs[0].token_ids == ids[: ids.index(ids[place]) + 1]
            assert got.outputs[0].stop_reason == ids[place]
    assert llm.stats["blocks_held"] == 0


@pytest.mark.parametrize("kind", ["ngram", "Told", "RightThenWrong", "model: same", "model: near"])
def test_as_many_tokens_as_were_asked_for(kind):
    """B36, B37, B45: 0 to 13 of them; the same in the counts, and in the pieces of a stream."""
    prompt = (5, 6) * 6
    answers = known([plain("llama", prompt, GREEDY)])
    for most, k in itertools.product(range(14), (1, 4)):
        llm = engine(speculate=drafter_of(kind, "llama", answers), k=k, adaptive_k=False)
        params = replace(GREEDY, max_tokens=most)
        (output,) = llm.generate([list(prompt)], params)
        assert output.outputs[0].token_ids == answers[0][12:][:most]
        assert output.outputs[0].finish_reason == "length"
        assert_counts(output)
        pieces = list(llm.stream(list(prompt), params))
        assert [i for piece in pieces for i in piece.token_ids] == output.outputs[0].token_ids
        assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["ngram", "Told", "Wrong", "model: same", "model: near"])
@pytest.mark.parametrize("most", [7, None])
def test_an_answer_that_ends_with_the_context_and_the_pool(most, kind):
    """B49: k = 7 in blocks of 4, and not one block more than the context has."""
    prompt = (3, 4) * 16 + (3,)
    answers = known([plain("llama", prompt, replace(GREEDY, max_tokens=7))])
    for seats, k in ((1, 7), (2, 7), (2, 32)):
        options = dict(max_model_len=40, num_blocks=10, max_seqs=seats, max_batch_tokens=66)
        drafter = drafter_of(kind, "llama", answers)
        llm = engine(speculate=drafter, k=k, adaptive_k=False, **options)
        outputs = llm.generate([list(prompt)] * 2, replace(GREEDY, max_tokens=most))
        for output in outputs:
            assert output.outputs[0].token_ids == answers[0][33:]
            assert output.outputs[0].finish_reason == "length"


def test_text_and_logprobs_are_those_without_drafts(tiny):
    """B44: no logprob is 0, and there are as many as tokens; several answers, and the best."""
    ways = [
        dict(temperature=0, logprobs=2, ignore_eos=True),
        dict(temperature=0.9, seed=3, stop=["the", ". "], logprobs=0),
        dict(temperature=1.0, seed=4, stop="e", min_tokens=5, n=3),
        dict(temperature=0.8, seed=6, n=2, best_of=4, logprobs=3),
        dict(temperature=0.8, seed=6, n=1, best_of=4),
    ]
    for prompt, way in itertools.product(PROMPTS[:1], ways):
        params = SamplingParams(max_tokens=20, **way)
        (right,) = texts(tiny).generate([prompt], params)
        for speculate in (NgramDrafter(shortest=1), Lot(known([right]))):
            (got,) = texts(tiny, speculate=speculate, k=4).generate([prompt], params)
            assert_same(got, right)
            for one in got.outputs if params.logprobs is not None else ():
                assert all(record.sampled.logprob < 0 for record in one.logprobs)


def test_the_draft_model_of_that_name_drafts(tiny):
    """B47: what was asked for happens, and is told in figures."""
    plainly, drafted = texts(tiny), texts(tiny, speculate="tiny-draft", k=4)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=1, ignore_eos=True)
    each = zip(plainly.generate(PROMPTS, params), drafted.generate(PROMPTS, params), strict=True)
    for right, got in each:
        assert_same(got, right)
        assert got.metrics.speculation.proposed > 0 and right.metrics.speculation is None
    assert 0 < drafted.stats["accepted"] < drafted.stats["proposed"]
    assert (plainly.stats["proposed"], plainly.stats["accepted"]) == (0, 0)
    assert drafted.stats["steps"] < plainly.stats["steps"]
    repeated = texts(tiny, speculate="ngram", k=4)
    repeated.generate([PROMPTS[2]], replace(params, max_tokens=80))
    assert 0 < repeated.stats["accepted"] <= repeated.stats["proposed"]


def test_what_is_accepted_is_counted_as_far_as_the_answer_has_it():
    """B48: an end in the middle of a run of eight; what follows it is of no account anywhere."""
    free = plain("llama", (1, 2, 3), GREEDY)
    llm = engine(speculate=Told(known([free])), k=8, adaptive_k=False)
    params = replace(GREEDY, stop_token_ids=(free.outputs[0].token_ids[3],))
    (output,) = llm.generate([[1, 2, 3]], params)
    assert len(output.outputs[0].token_ids) == 4
    assert output.metrics.speculation.accepted == 3
    assert llm.stats["accepted"] == 3


def test_streams_beside_each_other_tell_every_token_once():
    """Several tokens a step are one piece of text; an abort between two steps ends the stream."""
    prompts = [(1, 2, 3), (4, 5), (6,)]
    right = [plain("llama", prompt, replace(GREEDY, logprobs=0)) for prompt in prompts]
    llm = engine(speculate=Told(known(right)), k=3, adaptive_k=False)
    streams = [llm.stream(list(prompt), GREEDY) for prompt in prompts]
    got = [[], [], []]
    for n, stream in itertools.cycle(enumerate(streams)):
        delta = next(stream, None)
        if delta is None:
            break
        got[n] += delta.token_ids
    for n, stream in enumerate(streams):
        got[n] += [i for delta in stream for i in delta.token_ids]
        assert got[n] == right[n].outputs[0].token_ids
    stream = llm.stream([1, 2, 3], GREEDY)
    assert [len(next(stream).token_ids) for _ in range(3)] == [1, 4, 4]
    stream.close()
    assert llm.stats["blocks_held"] == 0 and not llm.has_unfinished


# --- what goes wrong -----------------------------------------------------------------------------


class Sick:
    """A model whose rows go bad wherever the token is that one."""

    config, dtype, device = (getattr(MODELS["llama"], a) for a in ("config", "dtype", "device"))
    directory = None
    logits = staticmethod(MODELS["llama"].logits)

    def __init__(self, token):
        self.token = token

    def __call__(self, ids, view):
        hidden = MODELS["llama"](ids, view)
        return hidden.masked_fill((ids == self.token)[:, None], torch.nan)


@pytest.mark.parametrize("kind", ["Told", "RightThenWrong", "model: same"])
def test_a_row_of_nan_ends_that_request_alone_with_the_tokens_before_it(kind):
    """In every place of an accepted run; and what it stored is not remembered."""
    prompts = [(1, 2), (3, 5), (6, 9)]
    healthy = [plain("llama", prompt, GREEDY) for prompt in prompts]
    ids = healthy[1].outputs[0].token_ids
    places = set()
    for place in range(19):
        if ids[place] in [*prompts[0], *prompts[2]] or any(
            ids[place] in healthy[n].outputs[0].token_ids for n in (0, 2)
        ):
            continue
        place = ids.index(ids[place])
        drafter = drafter_of(kind, "llama", known(healthy))
        llm = engine(Sick(ids[place]), speculate=drafter, k=5, adaptive_k=False)
        outputs = llm.generate([list(prompt) for prompt in prompts], GREEDY)
        assert outputs[1].outputs[0].finish_reason == "error"
        assert outputs[1].outputs[0].token_ids == ids[: place + 1]
        assert_counts(outputs[1])
        assert_same(outputs[0], healthy[0]), assert_same(outputs[2], healthy[2])
        assert llm.stats["blocks_held"] == 0 and not llm.has_unfinished
        assert not any(
            block[: place + 3] == (*prompts[1], *ids[: place + 1])
            for block in remembered(llm._kv.pool).values()
        )
        places.add(place)
    assert len(places) > 9


def test_an_id_that_is_none_is_refused_by_name_and_the_engine_goes_on():
    """B43: whoever proposed it is told; nothing is held when its request is gone."""

    class Broken(Told):
        bad = V

        def propose(self, ids, k):
            return [*self.truth(ids, 1), self.bad]

    right = plain("llama", (1, 2, 3), GREEDY)
    for bad, words in ((V, f"{V} at position 1"), (-1, "-1 at position 1"), ("a", "'a'")):
        drafter = Broken(known([right]))
        drafter.bad = bad
        llm = engine(speculate=drafter, k=4)
        with pytest.raises(RequestError, match=f"Broken: proposed .*{words}"):
            llm.generate([[1, 2, 3]], GREEDY)
        assert not llm.has_unfinished and llm.stats["blocks_held"] == 0
        drafter.bad = 0
        assert_same(llm.generate([[1, 2, 3]], GREEDY)[0], right)


class Moody(Told):
    """Fails at one call of four, by lot, and is right at all others."""

    def __init__(self, answers, seed):
        super().__init__(answers)
        self.rng = random.Random(seed)

    def propose(self, ids, k):
        if self.rng.random() < 1 / 4:
            raise ValueError("not now")
        return self.truth(ids, k)


@pytest.mark.parametrize(
    "preemption",
    ["recompute", "swap"],
)
def test_a_drafter_that_fails_now_and_then_costs_a_step_and_no_tokens(preemption):
    """The step is planned anew: its blocks have been copied, and swapped, where they say so."""
    prompts = [(n + 1,) * (5 + n) for n in range(4)]
    each = [replace(GREEDY, max_tokens=18, temperature=0.9, seed=n, n=2) for n in range(4)]
    right = [plain("llama", *pair) for pair in zip(prompts, each, strict=True)]
    failures = preemptions = 0
    for seed in range(12):
        options = dict(speculate=Moody(known(right), seed), k=2, adaptive_k=False)
        llm = engine(num_blocks=11, max_seqs=4, preemption=preemption, **options)
        llm._kv.keys.fill_(torch.nan), llm._kv.values.fill_(torch.nan)
        names = [llm.add(list(p), params) for p, params in zip(prompts, each, strict=True)]
        done = {}
        for _ in until_idle(llm):
            try:
                done |= {o.request_id: o for o in llm.step() if o.finished}
            except ValueError:
                failures += 1
            llm.scheduler.check()
        for name, output in zip(names, right, strict=True):
            assert_same(done[name], output)
            preemptions += done[name].metrics.preemptions
    assert failures > 50 and preemptions > 10


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_drafter_that_says_something_else_when_asked_again(preemption):
    """It is asked once for each step: what was planned is what runs."""
    prompts = [(n + 1,) * (3 + 2 * n) for n in range(4)]
    right = [plain("llama", prompt, GREEDY) for prompt in prompts]
    for seed in range(6):
        drafter = Fickle(known(right), seed)
        llm = engine(num_blocks=14, max_seqs=4, speculate=drafter, preemption=preemption)
        watched = Watched(llm)
        done = serve(watched, [(0, prompt, GREEDY, 0, None) for prompt in prompts])
        for n, output in enumerate(right):
            assert_same(done[n], output)


# --- interrupts ----------------------------------------------------------------------------------


class CtrlC:
    """Raises SIGINT at lines of these modules: after so many of them, again and again.

    Not in the lines that hand outputs over, which the next test is about.
    """

    def __init__(self, modules, rng, most):
        self.files = {module.__file__ for module in modules}
        self.rng, self.most = rng, most
        self.left = rng.randint(1, most)

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename not in self.files or code.co_name == "step":
            return None
        if event == "line":
            self.left -= 1
            if self.left <= 0:
                self.left = self.rng.randint(1, self.most)
                signal.raise_signal(signal.SIGINT)
        return self.trace


@pytest.mark.parametrize(
    "kind",
    [
        "ngram",
        "Told",
        "Lot",
        "model: near",
    ],
)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(preemption, kind, ctrl_c):
    """Ctrl-C in the bookkeeping waits for its end, in the passes it ends the step: answers stay."""
    prompts = [(n + 1,) * (5 + n) for n in range(4)]
    each = [
        replace(GREEDY, max_tokens=12, temperature=n % 2, seed=n, n=1 + n % 2) for n in range(4)
    ]
    right = [plain("llama", *pair) for pair in zip(prompts, each, strict=True)]
    modules = [llm_module, runner, scheduler, drafting, speculative]
    for seed in range(5):
        drafter = drafter_of(kind, "llama", known(right))
        options = dict(speculate=drafter, k=3, adaptive_k=False, preemption=preemption)
        llm = engine(num_blocks=15, max_seqs=4, **options)
        watched = Watched(llm, DRAFTS["near"]["llama"] if kind == "model: near" else None)
        names = [llm.add(list(p), params) for p, params in zip(prompts, each, strict=True)]
        interrupted, rng = 0, random.Random(seed)
        for _ in until_idle(llm):
            try:
                with CtrlC(modules, rng, 1500):
                    watched.step()
            except KeyboardInterrupt:
                interrupted, watched.broken_off = interrupted + 1, True
            llm.scheduler.check()
        assert interrupted > 2
        done = {output.request_id: output for output in watched.told if output.finished}
        for name, output, prompt, params in zip(names, right, prompts, each, strict=True):
            if kind == "model: near" and params.temperature:
                assert_streams(done[name], "llama", kind, prompt, params, 3, False)
            else:
                assert_same(done[name], output)
            assert_counts(done[name])
        watched.nothing_is_held()


def test_an_interrupt_while_outputs_are_handed_over_loses_none(ctrl_c):
    """Whatever line of `LLM.step` it comes at: they come with the next step."""

    def interrupt_at(line):
        lines = itertools.count()

        def trace(frame, event, arg):
            if frame.f_code is not LLM.step.__code__:
                return None
            if event == "line" and next(lines) == line:
                signal.raise_signal(signal.SIGINT)
            return trace

        return trace

    lost, before = [], sys.gettrace()
    for line in range(12):
        llm = engine(speculate="ngram")
        llm.add([1, 2, 3], replace(GREEDY, max_tokens=2))
        told = []
        sys.settrace(interrupt_at(line))
        for _ in until_idle(llm, 20):
            try:
                told += llm.step()
            except KeyboardInterrupt:
                pass
        sys.settrace(before)
        lost += [line] * (not told or not told[-1].finished)
    assert lost == []


# --- replayed steps ------------------------------------------------------------------------------


def replayable(plan):
    """Whether a step is tokens and their drafts alone, one answer each."""
    return all(c.count == 1 + c.drafts and c.samples for c in plan.chunks)


@pytest.mark.parametrize("kind", ["ngram", "Lot", "model: near"])
def test_steps_with_drafts_are_replayed_and_mixed_ones_are_not(kind):
    """The same tokens; a step counts as replayed exactly if no prompt is in it."""
    prompts = [(1, 2) * 3, (5,) * 9, tuple(range(30, 50))]
    each = [replace(GREEDY, temperature=n % 2, seed=n, max_tokens=10 + 3 * n) for n in range(3)]
    right = [plain("llama", *pair) for pair in zip(prompts, each, strict=True)]
    found = []
    for record in (graphs.recording, False):
        drafter = drafter_of(kind, "llama", known(right))
        options = dict(speculate=drafter, k=3, adaptive_k=False, trace=999, graphs=record)
        llm = engine(max_batch_tokens=14, **options)
        found.append(llm.generate([list(prompt) for prompt in prompts], each))
        expected = sum(map(replayable, llm.trace)) if record else 0
        assert llm.stats["replayed"] == expected and len(llm.trace) == llm.stats["steps"]
        assert any(c.drafts for plan in llm.trace for c in plan.chunks if replayable(plan))
        mixed = [p for p in llm.trace if not replayable(p) and any(c.drafts for c in p.chunks)]
        assert mixed or kind == "ngram", "a prompt beside drafts"
    for replayed, run, output in zip(*found, right, strict=True):
        assert_same(replayed, run)
        if kind != "model: near" or output.seed % 2 == 0:
            assert_same(replayed, output)


@pytest.mark.parametrize("kind", ["ngram", "model: same"])
def test_in_float32_with_native_code_they_are_replayed_without_being_asked(kind):
    model, twin = (random_model(CONFIGS["llama"]) for _ in range(2))
    if graphs.recorder_for(model) is None:
        pytest.skip(f"nothing is recorded: {graphs.why_none(model)}")
    drafter = NgramDrafter(shortest=1) if kind == "ngram" else Cheap(Engine(twin))
    found = []
    for options in (dict(speculate=drafter), dict(speculate=drafter, graphs=False), {}):
        llm = engine(model, **options)
        found.append(llm.generate([[1, 2] * 4, [5] * 9], replace(GREEDY, max_tokens=20)))
        assert (llm.stats["replayed"] > 0) == ("graphs" not in options)
        assert (llm.stats["accepted"] > 0) == bool(options)
    for replayed, run, without in zip(*found, strict=True):
        assert replayed.outputs[0].token_ids == run.outputs[0].token_ids
        assert replayed.outputs[0].token_ids == without.outputs[0].token_ids


def test_as_many_rows_are_recorded_as_pay_and_larger_steps_are_run():
    """Six sequences with eleven rows each are more than are recorded: the tokens are the same."""
    prompts = [(n + 1, n + 2) for n in range(6)]
    right = [plain("llama", prompt, GREEDY) for prompt in prompts]
    options = dict(max_seqs=6, num_blocks=99, max_batch_tokens=99, k=10, adaptive_k=False)
    llm = engine(speculate=Told(known(right)), graphs=graphs.recording, trace=99, **options)
    for output, expected in zip(
        llm.generate([list(p) for p in prompts], GREEDY), right, strict=True
    ):
        assert_same(output, expected)
    rows = [sum(c.count for c in plan.chunks) for plan in llm.trace]
    assert max(rows) == 66 > LARGEST
    assert 0 < llm.stats["replayed"] < llm.stats["steps"]


# --- plans ---------------------------------------------------------------------------------------


def test_the_trace_says_which_rows_are_drafts():
    right = plain("llama", (1, 2, 3), replace(GREEDY, max_tokens=10))
    llm = engine(speculate=Told(known([right])), k=3, adaptive_k=False, trace=99)
    llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=10))
    chunks = [plan.chunks[0] for plan in llm.trace]
    assert [(c.start, c.count, c.drafts, c.stop) for c in chunks] == [
        (0, 3, 0, 3),
        (3, 4, 3, 4),
        (7, 4, 3, 8),
        (11, 1, 0, 12),
    ]
    assert all(chunk.samples for chunk in chunks)


def test_drafts_take_no_row_from_who_decodes_and_prompts_get_what_is_left():
    """The budget: 3 sequences of 1 + 3 rows, and a prompt of 30 in what 14 leave."""
    prompts = [(1, 2), (3, 4), (5, 6)]
    right = [plain("llama", prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    options = dict(speculate=Told(known(right)), k=3, adaptive_k=False, trace=99)
    llm = engine(max_seqs=4, max_batch_tokens=16, num_blocks=60, **options)
    watched = Watched(llm)
    requests = [(0, prompt, replace(GREEDY, max_tokens=30), 0, None) for prompt in prompts]
    serve(watched, [*requests, (2, tuple(range(30)), GREEDY, 0, None)])
    counts = [[chunk.count for chunk in plan.chunks] for plan in llm.trace]
    assert counts[1:4] == [[4, 4, 4], [4, 4, 4, 4], [4, 4, 4, 4]]
    assert watched.most_rows == 16


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(k="x"), "k='x': expected a whole number of 0 to 32"),
        (dict(k=33), "k=33: expected a whole number of 0 to 32"),
        (dict(k=-1), "k=-1"),
        (dict(k=True), "k=True"),
        (dict(k=2.5), "k=2.5"),
        (dict(adaptive_k=1), "adaptive_k=1: expected True or False"),
        (dict(adaptive_k="no"), "adaptive_k='no': expected True or False"),
        (dict(policy="static"), "policy='static': expected 'continuous' where there are drafts"),
        (dict(max_batch_tokens=17), "max_batch_tokens=17: .* 18: max_seqs=3 .* and k=5 drafts"),
        (dict(speculate=5), 'speculate=5: expected "ngram", "int8", the name of a draft model'),
        (dict(speculate=NgramDrafter), "speculate=.*NgramDrafter.*: expected"),
        (dict(speculate="int8"), 'speculate="int8": the model was not loaded from a checkpoint'),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, words):
    with pytest.raises(RequestError, match=words):
        engine(**(dict(speculate="ngram") | options))


@pytest.mark.parametrize("option", [dict(k="x"), dict(adaptive_k="no")])
def test_a_wrong_option_is_refused_without_a_drafter_too(option):
    with pytest.raises(RequestError, match=next(iter(option))):
        engine(**option)


def test_a_draft_model_of_another_tokenizer_is_refused(tiny, tmp_path):
    """B43: two tokens have changed places: the same size, and not the same vocabulary."""
    directory = shutil.copytree(hub.resolve("tiny-draft"), tmp_path / "other")
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError, match="the draft model's tokenizer is another one"):
        texts(tiny, speculate=str(directory))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("rows", [90, 104])
def test_vocabularies_of_different_padding_are_aligned(rows, temperature):
    """B43: fewer rows than the target's, or more; nothing beyond either is proposed."""
    draft = random_model(shapes.llama(vocab_size=rows), seed=3, dtype=torch.float64)
    llm = engine(speculate=ModelDrafter(Engine(draft)), k=4, adaptive_k=False)
    params = replace(GREEDY, temperature=temperature)
    proposed, run = set(), llm._runner.run

    def looked_at(plan):
        outputs = run(plan)
        proposed.update(i for c in plan.chunks for i in c.sequence.drafts[: c.drafts])
        return outputs

    llm._runner.run = looked_at
    outputs = llm.generate([[1, 2], [3, 4, 5]], params)
    assert proposed and max(proposed) < min(rows, V)
    if temperature == 0:
        for output in outputs:
            assert_same(output, plain("llama", tuple(output.prompt_ids), params))


def test_ids_that_the_draft_model_has_not_are_treated_alike_in_both_engines():
    """B43: sampled, so that the drafts show."""
    draft = random_model(shapes.llama(vocab_size=60), seed=3, dtype=torch.float64)
    llm = engine(speculate=ModelDrafter(Engine(draft)), k=4, adaptive_k=False)
    for seed in range(8):
        params = replace(GREEDY, temperature=1.0, seed=seed)
        single = speculative.Speculator(
            Engine(MODELS["llama"]), ModelDrafter(Engine(draft)), 4, False
        )
        (output,) = llm.generate([[1, 2, 3]], params)
        assert output.outputs[0].token_ids == list(single.stream_with([1, 2, 3], params))


@pytest.mark.parametrize("length", [12, 30])
def test_a_draft_model_of_fewer_positions_drafts_as_far_as_they_go(length):
    """Refused in words, or as one stream has it: no drafts beyond."""
    short = random_model(shapes.llama(max_position_embeddings=20), seed=3, dtype=torch.float64)
    prompt = tuple(range(length))
    try:
        llm = engine(speculate=ModelDrafter(Engine(short)), max_model_len=60, num_blocks=60)
    except RequestError as error:
        assert "20 positions" in str(error)
        return
    (output,) = llm.generate([list(prompt)], GREEDY)
    assert_same(output, plain("llama", prompt, GREEDY))


# --- drafters that misbehave ---------------------------------------------------------------------


class Meddler(Drafter):
    """Writes into what it is given."""

    def propose(self, ids, k):
        ids += [ids[-1]] * k
        return ids[-k:]


class Fails(Drafter):
    """Cannot go on with one prompt, and guesses nothing for any other."""

    def propose(self, ids, k):
        if ids[0] == 5:
            raise ValueError("no idea")
        return []


class Slow(Drafter):
    def propose(self, ids, k):
        time.sleep(0.003)
        return [0] * k


GREEDY_6 = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def test_a_drafter_cannot_write_into_an_answer():
    plain = LLM(MODELS["llama"], num_blocks=20).generate([[1, 2]], GREEDY_6)
    with_it = LLM(MODELS["llama"], num_blocks=20, speculate=Meddler(), k=2, adaptive_k=False)
    assert with_it.generate([[1, 2]], GREEDY_6)[0].outputs[0].token_ids == (
        plain[0].outputs[0].token_ids
    )
    ids, _ = speculative.generate(
        Engine(MODELS["llama"]), Meddler(), [1, 2], k=2, max_new_tokens=6, temperature=0
    )
    assert ids == plain[0].outputs[0].token_ids


def test_a_drafter_that_fails_names_its_request_and_the_others_go_on_without_it():
    """B22: nothing was run, so the one can be aborted."""
    llm = LLM(MODELS["llama"], num_blocks=20, speculate=Fails())
    bad, good = llm.add([5], GREEDY_6), llm.add([1, 2], GREEDY_6)
    llm.step()  # the prompts: nothing is drafted yet
    for _ in range(2):
        with pytest.raises(RequestError, match=rf"'{bad}': Fails failed \(ValueError: no idea\)"):
            llm.step()
    assert llm.abort(bad).outputs[0].finish_reason == "abort"
    outputs = {}
    while llm.has_unfinished:
        outputs |= {o.request_id: o for o in llm.step()}
    assert len(outputs[good].outputs[0].token_ids) == 6 and llm.stats["blocks_held"] == 0


def test_the_time_of_guesses_is_the_time_of_drafting():
    llm = LLM(MODELS["llama"], num_blocks=20, speculate=Slow(), adaptive_k=False)
    (output,) = llm.generate([[1, 2]], GREEDY_6)
    counts = output.metrics.speculation
    assert counts.draft_s >= 0.003 * (counts.passes - 1) > 0
