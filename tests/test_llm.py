"""Many at once is each alone: token for token, in float64, whatever is scheduled how."""

import gc
import io
import itertools
import random
import signal
import threading
import time

import numpy as np
import pytest
import shapes
import torch
from asked import requests_by_lot
from clocks import HandClock
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.decode.beam import Beam
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.text import stream_text
from spindle.errors import RequestError
from spindle.interrupts import held_back
from spindle.model.weights import load_hf, random_model
from spindle.serve.llm import LLM
from spindle.tokenizer import Tokenizer

V = shapes.LLAMA["vocab_size"]
CONFIGS = {"llama": shapes.llama(eos_token_id=7), "gpt2": shapes.gpt2(eos_token_id=7)}
MODELS = {name: random_model(config, dtype=torch.float64) for name, config in CONFIGS.items()}


def alone(model, prompt, params, sample=0):
    """The ids of one answer, from an engine of one sequence."""
    if params.n == 1:
        return list(Engine(model, max_seq_len=64).stream_with(prompt, params))
    return Engine(model, max_seq_len=64).answers(prompt, params)[sample].token_ids


@st.composite
def traffic(draw):
    """Requests with shared prefixes, of every way of sampling, arriving while others run."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    return requests_by_lot(rng, draw(st.integers(1, 7)), V, 20)


@settings(max_examples=120, deadline=None)
@given(
    traffic(),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([1, 3, 8, 16]),
    st.integers(3, 6),
    st.integers(6, 30),
    st.integers(0, 60),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.sampled_from(["continuous", "continuous", "static"]),
)
def test_together_is_alone(requests, name, size, seqs, budget, spare, preemption, cache, policy):
    """B05, B15, B23, B24, B29, B30, B56, B60: and when all have ended, nothing is held."""
    model = MODELS[name]
    longest = max(len(prompt) + params.max_tokens for _, prompt, params in requests)
    llm = LLM(
        model,
        block_size=size,
        num_blocks=-(-longest // size) + spare // size,
        max_model_len=64,
        max_seqs=seqs,
        max_batch_tokens=budget,
        preemption=preemption,
        prefix_cache=cache,
        policy=policy,
    )
    for cache_of in (llm._kv.keys, llm._kv.values):
        cache_of.fill_(torch.nan)
    due, done, names = sorted(requests, key=lambda r: r[0]), {}, {}
    for now in range(5000):
        while due and due[0][0] <= now:
            _, prompt, params = due.pop(0)
            names[llm.add(prompt, params)] = prompt, params
        if not due and not llm.has_unfinished:
            break
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output
        llm.scheduler.check()
    assert done.keys() == names.keys()
    for request_id, (prompt, params) in names.items():
        outputs = done[request_id].outputs
        assert len(outputs) == params.n
        for one in outputs:
            assert one.token_ids == alone(model, prompt, params, one.index)
            assert (one.logprobs is None) == (params.logprobs is None)
            assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
    llm._kv.pool.clear()
    assert llm._kv.pool.free == llm._kv.pool.num_blocks
    assert llm._kv.host is None or llm._kv.host.free == llm._kv.host.num_blocks
    assert not llm._requests and not llm._texts


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_a_pool_that_shrinks_while_they_run_each_is_what_it_is_alone(name, preemption):
    """A block goes in every step, down to what the longest needs: they are preempted for it."""
    model = MODELS[name]
    llm = LLM(
        model, max_model_len=40, max_seqs=4, num_blocks=34, block_size=4, preemption=preemption
    )
    prompts = [[n + 1] * (3 + 2 * n) for n in range(6)]
    params = [
        SamplingParams(max_tokens=24, temperature=n % 2, seed=n, ignore_eos=True) for n in range(6)
    ]
    names = [llm.add(*one) for one in zip(prompts, params, strict=True)]
    taken, done, pool = [], {}, llm._kv.pool
    while llm.has_unfinished:
        if pool.free and pool.num_blocks - len(taken) > 10:
            taken += pool.take()
        done |= {output.request_id: output for output in llm.step() if output.finished}
    assert sum(output.metrics.preemptions for output in done.values()) > 0
    for one, prompt, its in zip(names, prompts, params, strict=True):
        assert done[one].outputs[0].token_ids == alone(model, prompt, its)
    for block in taken:
        pool.give(block)
    assert pool.free == pool.num_blocks and len(taken) == 24


# --- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load_hf("tiny", device="cpu", dtype=torch.float64), Tokenizer("tiny")


PROMPTS = ["The capital of France is", "Return True if", "A dictionary is", "Raised when"]


def test_text_stops_and_logprobs_are_those_of_one_stream(tiny):
    """B44, B64: the same text, ids, logprobs and reasons as `stream_text` gives."""
    model, tokenizer = tiny
    each = [
        SamplingParams(max_tokens=20, temperature=0, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0.9, seed=3, stop=["the", ". "]),
        SamplingParams(max_tokens=12, temperature=1, seed=4, stop="e", min_tokens=5),
        SamplingParams(max_tokens=5, temperature=1, seed=5, ignore_eos=True),
    ]
    llm = LLM(model, tokenizer=tokenizer, max_seqs=3, num_blocks=30)
    for prompt, params, output in zip(PROMPTS, each, llm.generate(PROMPTS, each), strict=True):
        solo = stream_text(Engine(model), tokenizer, prompt, params)
        "".join(solo)
        (one,) = output.outputs
        assert (one.text, one.token_ids) == (solo.text, solo.token_ids)
        assert (one.finish_reason, one.stop_reason) == (solo.finish_reason, solo.stop_reason)
        if params.logprobs is not None:
            for ours, theirs in zip(one.logprobs, solo.logprobs, strict=True):
                assert [r.token_id for r in ours.top] == [r.token_id for r in theirs.top]
                assert ours.sampled.logprob == pytest.approx(theirs.sampled.logprob, abs=1e-9)
            total = sum(record.sampled.logprob for record in one.logprobs)
            assert one.cumulative_logprob == pytest.approx(total)


def test_a_stream_is_its_answer_in_pieces(tiny):
    model, tokenizer = tiny
    llm = LLM(model, tokenizer=tokenizer, num_blocks=30)
    params = SamplingParams(max_tokens=25, temperature=0.8, seed=1)
    deltas = list(llm.stream(PROMPTS[0], params))
    (whole,) = llm.generate(PROMPTS[0], params)
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [i for d in deltas for i in d.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason


def test_closing_a_stream_aborts_its_request_and_no_other(tiny):
    model, tokenizer = tiny
    llm = LLM(model, tokenizer=tokenizer, num_blocks=30)
    other = llm.add(PROMPTS[1], SamplingParams(max_tokens=9, temperature=0))
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.stats["running"] == 1
    done = {}
    while llm.has_unfinished:
        done |= {output.request_id: output for output in llm.step()}
    assert len(done[other].outputs[0].token_ids) == 9
    assert llm.stats["blocks_held"] == 0


def test_two_streams_and_a_generate_step_the_engine_for_each_other():
    """Whoever steps: nobody's tokens, and nobody's end, are lost."""
    llm = engine()
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (8, 5, 3)]
    expected = [alone(MODELS["llama"], [n + 1], params) for n, params in enumerate(each)]
    added = llm.add([3], each[2])
    streams = [llm.stream([n + 1], each[n]) for n in range(2)]
    got = [[next(stream)] for stream in streams]
    (output,) = llm.generate([[3]], each[2])
    assert output.outputs[0].token_ids == expected[2]
    for stream, deltas in zip(streams, got, strict=True):
        deltas += list(stream)
    for deltas, ids in zip(got, expected, strict=False):
        assert [i for delta in deltas for i in delta.token_ids] == ids
        assert deltas[-1].finish_reason == "length"
    assert llm.has_unfinished  # the added one has ended, and nobody has been told
    (late,) = llm.step()
    assert late.request_id == added and late.outputs[0].token_ids == expected[2]
    assert not llm.has_unfinished


def test_a_stream_that_is_closed_unread_or_aborted_by_another():
    llm = engine()
    unread = llm.stream([1], SamplingParams(max_tokens=9))
    unread.close()
    assert not llm.has_unfinished and list(unread) == []
    stream = llm.stream([1], SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    llm.abort(next(iter(llm._requests)))
    assert [delta.finish_reason for delta in stream] == ["abort"]


def test_the_id_of_an_unread_stream_is_not_free():
    """Else it would tell another request's tokens."""
    llm = engine()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    stream = llm.stream([1], params)
    (name,) = llm._requests
    while llm.has_unfinished:
        llm.step()
    with pytest.raises(RequestError, match=f"'{name}': in use by a stream that is unread"):
        llm.add([2], params, name)
    assert [i for delta in stream for i in delta.token_ids] == alone(MODELS["llama"], [1], params)
    assert llm.add([2], params, name) == name


def test_a_stream_that_is_let_go_of_is_aborted():
    llm = engine()
    for _ in range(3):
        for _ in llm.stream([1, 2], SamplingParams(max_tokens=30, ignore_eos=True)):
            break
    gc.collect()
    assert not llm.has_unfinished and not llm._watched and llm.stats["blocks_held"] == 0
    with llm.stream([1, 2], SamplingParams(max_tokens=30, ignore_eos=True)) as stream:
        next(stream)
    assert not llm.has_unfinished and list(stream) == []


def test_a_stream_that_ends_with_an_error_says_so():
    llm = LLM(Sick(), max_seqs=3, num_blocks=20, block_size=4, max_model_len=40)
    (delta,) = llm.stream([1, 59], SamplingParams(max_tokens=4))
    assert (delta.finish_reason, delta.token_ids) == ("error", [])


def test_a_failure_in_the_middle_of_adding_or_running_leaves_nothing_behind():
    llm = engine()
    with pytest.raises(RequestError, match="prompt 1: params: expected SamplingParams, got dict"):
        llm.generate([[1], [2]], [SamplingParams(), {"max_tokens": 3}])
    assert not llm.has_unfinished
    llm._runner.run = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1], [2]], SamplingParams(max_tokens=3))
    assert not llm.has_unfinished and llm.stats["blocks_held"] == 0


def test_an_error_in_a_beam_search_costs_nobody_else_an_answer(monkeypatch):
    """Whatever goes wrong there: who ended in the same step is told of."""
    llm = engine()
    name = llm.add([1, 2], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    monkeypatch.setattr(Beam, "advance", lambda *args: 1 / 0)
    outputs = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            llm.beam_search([1, 2, 3], 2, 7)
    while llm.has_unfinished:
        outputs += llm.step()
    assert {output.request_id for output in outputs} == {name}
    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 3
    assert not llm._requests and llm.stats["blocks_held"] == 0


def test_every_answer_is_there_even_if_it_never_ran():
    """B110: three of no tokens; and an abort before the first."""
    llm = engine()
    params = SamplingParams(max_tokens=0, n=3)
    assert [len(one.token_ids) for one in llm.generate([[1]], params)[0].outputs] == [0, 0, 0]
    name = llm.add([1], SamplingParams(n=3))
    assert [one.finish_reason for one in llm.abort(name).outputs] == ["abort"] * 3


def test_a_name_that_nobody_chose_is_free():
    llm = engine()
    llm.add([1], request_id="request-1")
    assert llm.add([2]) not in ("request-1", None)
    assert len(llm._requests) == 2


# --- the best of several -------------------------------------------------------------------------


def test_best_of_gives_the_likeliest_of_what_n_gives():
    """By the sum of the tokens' logprobs; the same answers, with and without logprobs."""
    prompt, options = [1, 2, 3], dict(max_tokens=6, temperature=1.2, seed=5, ignore_eos=True)
    (every,) = engine(max_seqs=6).generate([prompt], SamplingParams(n=6, logprobs=0, **options))
    ranked = sorted(every.outputs, key=lambda one: -one.cumulative_logprob)
    for logprobs in (None, 0, 2):
        params = SamplingParams(n=2, best_of=6, logprobs=logprobs, **options)
        (best,) = engine(max_seqs=6).generate([prompt], params)
        assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
        assert [o.index for o in best.outputs] == [o.index for o in ranked[:2]]
        assert all((o.logprobs is None) == (logprobs is None) for o in best.outputs)
        for ours, theirs in zip(best.outputs, ranked, strict=False):
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-9)
        answers = Engine(MODELS["llama"]).answers(prompt, params)
        assert [a.token_ids for a in answers] == [o.token_ids for o in ranked[:2]]
        assert all((a.logprobs is None) == (logprobs is None) for a in answers)


def test_a_broken_answer_is_never_the_best():
    llm = LLM(Sick(), max_seqs=4, num_blocks=40, block_size=4, max_model_len=40)
    seen = set()
    for seed in range(60):
        params = SamplingParams(n=2, best_of=4, max_tokens=8, temperature=3, seed=seed)
        (output,) = llm.generate([[1, 2]], params)
        reasons = [one.finish_reason == "error" for one in output.outputs]
        assert reasons == sorted(reasons)
        seen.add(tuple(reasons))
    assert (False, False) in seen


def test_best_of_cannot_be_streamed():
    params = SamplingParams(n=1, best_of=2)
    with pytest.raises(RequestError, match="best_of=2: which 1 are given is known at the end"):
        engine().stream([1], params)
    with pytest.raises(RequestError, match="best_of=2: which 1 are given is known at the end"):
        Engine(MODELS["llama"]).stream_with([1], params)
    with pytest.raises(RequestError, match="best_of=4: at most max_seqs=3"):
        engine().add([1], SamplingParams(best_of=4))


# --- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_interrupt_at_any_moment_of_a_step_loses_nothing(preemption, ctrl_c):
    """Ctrl-C in the bookkeeping waits for its end, in the pass it ends the step: answers stay."""
    model, prompts = MODELS["llama"], [[n + 1] * (5 + n) for n in range(4)]
    params = [SamplingParams(max_tokens=14, temperature=0.9, seed=n, n=2) for n in range(4)]
    expected = [alone(model, p, s, k) for p, s in zip(prompts, params, strict=True) for k in (0, 1)]
    copies = 0
    for moment in range(5):
        llm = engine(
            num_blocks=18, max_seqs=4, max_batch_tokens=12, preemption=preemption, trace=999
        )
        for part in ("schedule", "commit"):
            _interrupt(llm.scheduler, part, every=2 * moment + 3)
        for part in ("move", "run"):
            _interrupt(llm._runner, part, every=2 * moment + 2)
        names, done, interrupted = [], {}, 0
        for prompt, its in zip(prompts, params, strict=True):
            names.append(llm.add(prompt, its))
        while llm.has_unfinished:
            try:
                done |= {o.request_id: o for o in llm.step() if o.finished}
            except KeyboardInterrupt:
                interrupted += 1
            llm.scheduler.check()
        assert interrupted > 5
        got = [one.token_ids for name in names for one in done[name].outputs]
        assert got == expected
        copies += sum(len(plan.copies) for plan in llm.trace)
    assert copies > 0


def test_a_sigint_that_is_handled_otherwise_is_left_alone(ctrl_c):
    """Ignored, or somebody's own handler, or a thread that gets none."""
    seen = []
    for handler in (signal.SIG_IGN, lambda number, frame: seen.append(number)):
        signal.signal(signal.SIGINT, handler)
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert signal.getsignal(signal.SIGINT) is handler
    assert seen == [signal.SIGINT]
    outputs = []
    worker = threading.Thread(target=lambda: outputs.extend(engine().generate([[1], [2]])))
    worker.start()
    worker.join()
    assert len(outputs) == 2


def test_an_interrupt_while_requests_are_queued(ctrl_c):
    """It comes once the request is queued whole, or is aborted with the others."""
    llm = engine()
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    _interrupt(llm.scheduler, "add", every=3)
    for _ in range(2):
        llm.add([1], params)
    with pytest.raises(KeyboardInterrupt):
        llm.add([2], params)
    assert len(llm._requests) == 3
    for queue in (
        lambda: llm.generate([[1], [2], [3]], params),
        lambda: llm.beam_search([1, 2], 2, 3),
        lambda: llm.stream([1], params),
    ):
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                queue()
    outputs = []
    while llm.has_unfinished:
        outputs += [output for output in llm.step() if output.finished]
    assert [output.request_id for output in outputs] == ["request-0", "request-1", "request-2"]
    assert not llm._requests and not llm._watched and llm.stats["blocks_held"] == 0


def _interrupt(owner, name, every):
    """Let every so many-th call of a method begin with a Ctrl-C."""
    method, calls = getattr(owner, name), itertools.count()

    def interrupted(*args):
        if next(calls) % every == every - 1:
            signal.raise_signal(signal.SIGINT)
        return method(*args)

    setattr(owner, name, interrupted)


# --- requests ------------------------------------------------------------------------------------


def engine(**options):
    settings = dict(max_model_len=40, max_seqs=3, max_batch_tokens=16, num_blocks=20, block_size=4)
    return LLM(MODELS["llama"], **(settings | options))


BAD = {
    "no tokens": (dict(prompt=[]), "the prompt has no tokens"),
    "a negative id": (dict(prompt=[1, -1]), "-1 at position 1"),
    "an id too many": (dict(prompt=[V]), f"{V} at position 0"),
    "a prompt too long": (dict(prompt=[1] * 41), "41 tokens; at most 40 fit"),
    "text without a tokenizer": (dict(prompt="hello"), "there is no tokenizer"),
    "a stop without a tokenizer": (
        dict(prompt=[1], params=SamplingParams(stop="x")),
        "there is no tokenizer",
    ),
    "more answers than run at once": (
        dict(prompt=[1], params=SamplingParams(n=4)),
        "n=4: at most max_seqs=3",
    ),
    "a stop id beyond the vocabulary": (
        dict(prompt=[1], params=SamplingParams(stop_token_ids=[V])),
        "stop_token_ids",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_request_is_refused_alone_and_nothing_changes(fault):
    """B22, B107, B108: the others get what they would have got."""
    llm = engine()
    good = llm.add([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    request, words = BAD[fault]
    with pytest.raises(RequestError, match=words):
        llm.add(**request)
    with pytest.raises(RequestError, match=words):
        llm.generate([request["prompt"]], request.get("params"))
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    assert outputs[-1].request_id == good
    greedy = SamplingParams(max_tokens=5, temperature=0)
    assert outputs[-1].outputs[0].token_ids == alone(MODELS["llama"], [1, 2, 3], greedy)


def test_one_bad_prompt_of_many_is_named_and_none_is_queued():
    llm = engine()
    with pytest.raises(RequestError, match="prompt 1: the prompt has no tokens"):
        llm.generate([[1], [], [2]])
    assert not llm.has_unfinished


def test_an_id_is_free_again_when_its_request_has_ended():
    """B112: while it runs it is refused, and the first one is unharmed."""
    llm = engine()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for end in ("finish", "abort"):
        llm.add([1, 2], params, "mine")
        with pytest.raises(RequestError, match="'mine': in use"):
            llm.add([3], params, "mine")
        if end == "abort":
            llm.step()
            aborted = llm.abort("mine")
            assert aborted.outputs[0].finish_reason == "abort"
            assert llm.abort("mine") is None and llm.abort("never") is None
        while llm.has_unfinished:
            last = llm.step()
    llm.add([1, 2], params, "mine")
    while llm.has_unfinished:
        last = llm.step()
    assert len(last[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(("length", "got"), [(39, 1), (40, 0)])
def test_a_prompt_that_fills_the_context(length, got):
    """B111: one token of room, and none."""
    (output,) = engine().generate([5] * length, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == got
    assert output.outputs[0].finish_reason == "length"


def test_no_tokens_asked_for_is_an_answer_of_none():
    """B110."""
    llm = engine()
    outputs = llm.generate([[1], [2]], SamplingParams(max_tokens=0))
    assert [o.outputs[0].token_ids for o in outputs] == [[], []]
    assert all(o.metrics.first_token is None for o in outputs)
    assert llm.stats["blocks_held"] == 0 and not llm.has_unfinished


def test_an_end_as_the_first_token():
    """B32: one branch ends at once, the other goes on."""
    model, ended = MODELS["llama"], set()
    for seed in range(200):
        params = SamplingParams(
            max_tokens=6, temperature=2, seed=seed, n=2, stop_token_ids=range(0, V, 3)
        )
        (output,) = engine().generate([[1, 2, 3]], params)
        lengths = tuple(len(one.token_ids) == 1 for one in output.outputs)
        if any(lengths):
            ended.add(lengths)
            for one in output.outputs:
                assert one.token_ids == alone(model, [1, 2, 3], params, one.index)
        if ended >= {(True, False), (False, True)}:
            return
    pytest.fail(f"seen only {ended}")


class Sick:
    """A model whose rows go bad wherever the token is 59."""

    config, dtype, device = (getattr(MODELS["llama"], a) for a in ("config", "dtype", "device"))
    logits = staticmethod(MODELS["llama"].logits)

    def __call__(self, ids, view):
        hidden = MODELS["llama"](ids, view)
        return hidden.masked_fill((ids == 59)[:, None], torch.nan)


def test_nan_logits_end_that_request_alone():
    """Its neighbours, in the same steps, do not notice."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[1, 2], [3, 59], [5, 6]]
    llm = LLM(Sick(), max_seqs=3, num_blocks=20, block_size=4, max_model_len=40)
    outputs = llm.generate(prompts, params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    for n in (0, 2):
        expected = alone(MODELS["llama"], prompts[n], params)
        assert 59 not in expected and outputs[n].outputs[0].token_ids == expected
    assert outputs[1].outputs[0].token_ids == []
    assert llm.stats["blocks_held"] == 0 and not llm.has_unfinished


def test_times_are_in_order_and_survive_a_preemption():
    """B93, B95, B96: arrival, scheduled, first, last, finished; a pause is in the gaps alone."""
    ticks = iter(range(10_000))
    llm = engine(num_blocks=7, max_batch_tokens=32, clock=lambda: float(next(ticks)))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate([[1] * 8, [2] * 8], params)
    assert [o.metrics.preemptions for o in outputs] == [0, 1]
    for output in outputs:
        m = output.metrics
        assert m.arrival <= m.scheduled <= m.first_token <= m.last_token <= m.finished
    first = [o.metrics.first_token for o in outputs]
    assert first[0] == first[1]


def test_a_prompt_seen_before_is_found_in_the_cache():
    llm = engine()
    params = SamplingParams(max_tokens=3, temperature=0)
    runs = [llm.generate([list(range(12))], params)[0] for _ in range(2)]
    assert [run.metrics.cached_tokens for run in runs] == [0, 8]
    assert runs[0].outputs[0].token_ids == runs[1].outputs[0].token_ids


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_at_a_terminal_and_nothing_elsewhere(monkeypatch):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for stream, progress, shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        engine().generate([[1], [2], [3]], params, progress=progress)
        assert ("3/3" in stream.getvalue()) == shown
        assert shown or stream.getvalue() == ""


def test_the_trace_keeps_the_last_plans():
    llm = engine(trace=3)
    llm.generate([[1, 2]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [len(plan.chunks) for plan in llm.trace] == [1, 1, 1]
    assert [plan.chunks[0].start for plan in llm.trace] == [4, 5, 6]


def test_prompts_in_every_form_that_ids_come_in():
    """B108: a list of one kind or another, an array, a tensor, an iterator of prompts."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = alone(MODELS["llama"], [1, 2, 3], params)
    ids = [1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3])
    for prompt in (*ids, [np.int64(1), np.int64(2), np.int64(3)]):
        (output,) = engine().generate(prompt, params)
        assert output.outputs[0].token_ids == expected
        outputs = engine().generate(iter([prompt, prompt]), params)
        assert [o.outputs[0].token_ids for o in outputs] == [expected] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.add([1], {"max_tokens": 3}), "params: expected SamplingParams, got dict"),
        (lambda llm: llm.add([1], {}), "params: expected SamplingParams, got dict"),
        (lambda llm: llm.stream([1], 5), "params: expected SamplingParams, got int"),
        (lambda llm: llm.add([1], None, [1]), r"request_id=\[1\]: expected a string, or None"),
        (lambda llm: llm.add([1], None, 5), "request_id=5: expected a string"),
        (lambda llm: llm.generate(None), "prompts: expected a list of them, got NoneType"),
        (lambda llm: llm.generate(5), "prompts: expected a list of them, got int"),
        (lambda llm: LLM(None), "model=None: expected a name, a directory, or a loaded model"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_by_name(call, words):
    llm = engine()
    with pytest.raises(RequestError, match=words):
        call(llm)
    assert not llm.has_unfinished and not llm._requests and not llm._watched
    assert llm.abort([1]) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_blocks=10**12), r"1000000000000 blocks of \d+ bytes on the cpu: .* GB are free"),
        (dict(num_blocks=2, preemption="swap", host_blocks=10**12), "GB are free; lower num_bl"),
        (dict(block_size=10**12), "GB are free"),
        (dict(prefix_cache="no"), "prefix_cache='no': expected True or False"),
        (dict(policy="dynamic"), "policy='dynamic': expected 'continuous' or 'static'"),
        (dict(preemption="never"), "preemption='never'"),
        (dict(max_seqs=0), "max_seqs=0"),
        (dict(max_batch_tokens=2), "max_batch_tokens=2: expected a whole number of max_seqs=3"),
        (dict(max_model_len=500), "max_model_len=500: the model has 64 positions"),
        (dict(num_blocks=True), "num_blocks=True"),
        (dict(block_size=1.5), "block_size=1.5"),
        (dict(host_blocks=-1), "host_blocks=-1: expected a whole number of 0 or more"),
        (dict(host_blocks="x"), "host_blocks='x'"),
        (dict(trace=-1), "trace=-1"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, words):
    with pytest.raises(RequestError, match=words):
        engine(**options)


def test_seeds_are_drawn_and_reported():
    llm = engine()
    outputs = llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=8))
    assert outputs[0].seed != outputs[1].seed
    again = llm.generate([[1, 2]], SamplingParams(max_tokens=8, seed=outputs[0].seed))
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.smollm2
def test_64_mixed_prompts_in_a_third_of_their_need_are_each_what_it_is_alone():
    """smollm2 in float32, greedy, a pool that has to preempt."""
    model, tokenizer = load_hf("smollm2", device="cpu"), Tokenizer("smollm2")
    rng = random.Random(0)
    prompts = [(PROMPTS[n % 4] + " " + " ".join(str(n) for n in range(n % 7))) for n in range(64)]
    params = [SamplingParams(max_tokens=rng.choice([2, 2, 8, 14]), temperature=0) for _ in prompts]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    need = sum(-(-(len(i) + p.max_tokens) // 2) for i, p in zip(ids, params, strict=True))
    options = dict(max_seqs=64, block_size=2, num_blocks=need // 3, max_model_len=64)
    llm = LLM(model, tokenizer=tokenizer, **options)
    outputs = llm.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    engine = Engine(model)
    for n, output in enumerate(outputs):
        solo = list(engine.stream_with(ids[n], params[n]))
        assert output.outputs[0].token_ids == solo, n


def test_arrival_is_when_it_was_added_however_long_it_waits():
    """B93, B98: of two who come together, the one who waits for the seat was there as long."""
    clock = HandClock()
    llm = engine(max_seqs=1, clock=clock)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    names, ended = [llm.add([n], params) for n in (1, 2)], {}
    while llm.has_unfinished:
        clock.now += 1
        ended |= {out.request_id: out.metrics for out in llm.step() if out.finished}
    its = (ended[name] for name in names)
    times = [(m.arrival, m.scheduled, m.first_token, m.last_token, m.finished) for m in its]
    assert times == [(0, 1, 1, 4, 4), (0, 5, 5, 8, 8)]


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "generate", "add", "abort", "stream", "next", "close"])
def test_a_second_thread_is_refused_at_once_and_the_first_is_not_hurt(call):
    """While one is in the middle of a step another may do nothing; afterwards it may."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    expected = alone(MODELS["llama"], [1, 2], params)
    llm = engine()
    stream = llm.stream([5], params)
    calls = {
        "step": llm.step,
        "generate": lambda: llm.generate([3], params),
        "add": lambda: llm.add([3], params),
        "abort": lambda: llm.abort("request-0"),
        "stream": lambda: llm.stream([3], params),
        "next": lambda: next(stream),
        "close": stream.close,
    }
    run, refused = llm._runner.run, []

    def intrude():
        with pytest.raises(RequestError, match="at work for another thread; expected one thread"):
            calls[call]()
        refused.append(call)

    def watched(plan):
        worker = threading.Thread(target=intrude)
        worker.start()
        worker.join()
        return run(plan)

    llm._runner.run = watched
    assert llm.generate([1, 2], params)[0].outputs[0].token_ids == expected
    assert set(refused) == {call}
    llm._runner.run = run
    worker = threading.Thread(target=calls[call])
    worker.start()
    worker.join()
    stream.close()
    while llm.has_unfinished:
        llm.step()
    assert llm.stats["blocks_held"] == 0


def test_several_are_queued_or_none():
    """A neighbour stays; and the ids of those that were not queued are free again."""
    llm = LLM(MODELS["llama"], max_seqs=4, max_model_len=40)
    llm.add([1, 2], request_id="neighbour")
    with pytest.raises(RequestError, match="prompt 2: "):
        llm.add_all([[1], [2], [-1]], [None] * 3, ["a", "b", "c"])
    assert llm.stats["waiting"] == 1
    greedy = SamplingParams(max_tokens=3, temperature=0)
    llm.add_all([[1], [2]], [greedy] * 2, ["a", "b"])
    ended = {o.request_id for _ in range(40) for o in llm.step() if o.finished}
    assert ended == {"neighbour", "a", "b"} and llm.stats["blocks_held"] == 0


# --- calls from within a call --------------------------------------------------------------------


def in_mid_pass(llm, act):
    """Have `act` called once in the middle of a step."""
    run, calls = llm._runner.run, []

    def watched(plan):
        if not calls:
            calls.append(None)
            act()
        return run(plan)

    llm._runner.run = watched


THREE = [[1, 2, 3, 4, 5], [9, 8, 7, 1], [10, 20, 30]]
EIGHT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
WITHIN = {
    "step": lambda llm, stream: llm.step(),
    "add": lambda llm, stream: llm.add([5], EIGHT),
    "add_all": lambda llm, stream: llm.add_all([[5]], [EIGHT], ["a"]),
    "generate": lambda llm, stream: llm.generate([5], EIGHT),
    "chat": lambda llm, stream: llm.chat([{"role": "user", "content": "a"}]),
    "beam_search": lambda llm, stream: llm.beam_search([5]),
    "stream": lambda llm, stream: llm.stream([5], EIGHT),
    "has_unfinished": lambda llm, stream: llm.has_unfinished,
    "stats": lambda llm, stream: llm.stats,
    "next": lambda llm, stream: next(stream),
}


@pytest.mark.parametrize("call", WITHIN)
@pytest.mark.parametrize("way", ["step", "generate"])
def test_a_call_from_within_a_step_is_refused_and_changes_nothing(call, way):
    expected = [alone(MODELS["llama"], prompt, EIGHT) for prompt in THREE]
    llm, refused = engine(), []
    stream = llm.stream([5], EIGHT)

    def act():
        with pytest.raises(
            RequestError, match="in the middle of a call, from which this one comes"
        ):
            WITHIN[call](llm, stream)
        refused.append(call)

    in_mid_pass(llm, act)
    if way == "generate":
        outputs = llm.generate(THREE, EIGHT)
    else:
        names, done = [llm.add(prompt, EIGHT) for prompt in THREE], {}
        while llm.has_unfinished:
            done |= {output.request_id: output for output in llm.step() if output.finished}
        outputs = [done[name] for name in names]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert refused == [call] and [i for d in stream for i in d.token_ids] == alone(
        MODELS["llama"], [5], EIGHT
    )


def test_an_abort_from_within_a_step_comes_after_it_and_the_next_step_says_so():
    expected = [alone(MODELS["llama"], prompt, EIGHT) for prompt in THREE]
    llm, done = engine(), {}
    names = [llm.add(prompt, EIGHT) for prompt in THREE]
    told = []
    in_mid_pass(llm, lambda: told.extend([llm.abort(names[1]), llm.abort("never")]))
    assert llm.step() and told == [None, None]
    assert llm.has_unfinished and llm.stats["running"] == 2  # it has given back what it held
    while llm.has_unfinished:
        done |= {output.request_id: output for output in llm.step() if output.finished}
    answers = [done[name].outputs[0] for name in names]
    assert [one.finish_reason for one in answers] == ["length", "abort", "length"]
    assert answers[1].token_ids == expected[1][: len(answers[1].token_ids)] != []
    assert [answers[0].token_ids, answers[2].token_ids] == [expected[0], expected[2]]
    assert llm.stats["blocks_held"] == 0 and llm.abort(names[1]) is None


def test_an_abort_from_within_generate_ends_that_answer_and_no_other():
    llm = engine()
    in_mid_pass(llm, lambda: llm.abort("request-1"))
    reasons = [output.outputs[0].finish_reason for output in llm.generate(THREE, EIGHT)]
    assert reasons == ["length", "abort", "length"] and llm.stats["blocks_held"] == 0


def test_a_noted_abort_is_of_the_request_that_was_there_not_of_the_next_with_its_name():
    llm, one = engine(), SamplingParams(max_tokens=1, temperature=0)
    llm.add(THREE[0], one, "mine")
    in_mid_pass(llm, lambda: llm.abort("mine"))
    (output,) = llm.step()  # its last one
    assert output.finished and output.outputs[0].finish_reason == "length"
    llm.add(THREE[0], EIGHT, "mine")
    while llm.has_unfinished:
        outputs = llm.step()
    assert outputs[0].outputs[0].token_ids == alone(MODELS["llama"], THREE[0], EIGHT)


def test_closing_a_stream_from_within_a_step_aborts_it_after_that():
    llm = engine()
    stream, name = llm.stream(THREE[0], EIGHT), llm.add(THREE[1], EIGHT)
    in_mid_pass(llm, stream.close)
    llm.step()
    assert llm.has_unfinished and list(llm._requests) == [name] and list(stream) == []
    while llm.has_unfinished:
        outputs = llm.step()
    assert outputs[0].outputs[0].token_ids == alone(MODELS["llama"], THREE[1], EIGHT)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signal here")
def test_a_signal_handler_may_abort_at_any_moment(monkeypatch):
    """By a timer, at 60 moments: whoever stays has the answer that he has alone."""
    expected = [alone(MODELS["llama"], prompt, EIGHT) for prompt in THREE]
    rng, reasons = random.Random(2), []
    before = signal.getsignal(signal.SIGALRM)
    try:
        for _ in range(60):
            llm, done = engine(), {}
            names = [llm.add(prompt, EIGHT) for prompt in THREE]
            signal.signal(signal.SIGALRM, lambda *_, llm=llm, name=names[1]: llm.abort(name))
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
            while llm.has_unfinished:
                done |= {output.request_id: output for output in llm.step() if output.finished}
            signal.setitimer(signal.ITIMER_REAL, 0)
            for n in (0, 2):
                assert done[names[n]].outputs[0].token_ids == expected[n]
            reasons += (
                [done[names[1]].outputs[0].finish_reason] if names[1] in done else ["at once"]
            )
            llm.scheduler.check()
            assert llm.stats["blocks_held"] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(reasons) <= {"length", "abort", "at once"}


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_more_sequences_than_blocks_cost_no_memory(tiny, speculate):
    """Each that runs writes into a block of its own, so that no step has as many rows as that."""
    most = 10**11
    model, few = tiny[0], LLM(tiny[0], num_blocks=16)
    llm = LLM(model, max_seqs=most, max_batch_tokens=10 * most, num_blocks=16, speculate=speculate)
    prompts, params = [[5], [7, 8], [9] * 5], SamplingParams(max_tokens=8, temperature=0)
    wanted = [output.outputs[0].token_ids for output in few.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted


# --- prompts without an end ----------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [itertools.repeat("a"), itertools.count(), iter(int, 1)])
def test_an_iterator_of_prompts_ends_or_is_refused(prompts):
    with pytest.raises(RequestError, match="prompts: more than 65536 from an iterator; expected a"):
        engine().generate(prompts, EIGHT)


def test_what_has_no_order_is_no_list_of_prompts():
    for prompts in ({"a": 1}, {"a", "b"}, frozenset("a"), {1: [2]}):
        with pytest.raises(RequestError, match="prompts: expected a list of them, got"):
            engine().generate(prompts, EIGHT)
    outputs = engine().generate(iter(THREE), EIGHT)  # one that ends is a list
    assert len(outputs) == 3


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(tiny):
    """Text by its length in characters, ids by their number."""
    model, tokenizer = tiny
    llm = LLM(model, tokenizer=tokenizer, num_blocks=40)
    text, start = "hello " * 1_000_000, time.process_time()
    for call in (
        lambda: llm.add(text),
        lambda: llm.generate(["a", text]),
        lambda: llm.add([1] * 10_000_000),
        lambda: llm.add(range(10**12)),
        lambda: llm.beam_search(text),
        lambda: llm.stream(text),
    ):
        with pytest.raises(RequestError, match=r"the prompt has .*at most 512 fit"):
            call()
    assert time.process_time() - start < 2  # one of the texts takes 20 s to read
    assert not llm.has_unfinished


def test_a_long_name_is_not_a_long_message():
    llm = engine()
    llm.add([1], EIGHT, "x" * 1_000_000)
    with pytest.raises(
        RequestError, match=r"request_id 'x{299}\.\.\.: in use by a request"
    ) as caught:
        llm.add([1], EIGHT, "x" * 1_000_000)
    assert len(str(caught.value)) < 400
