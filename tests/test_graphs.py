"""Replayed = run: recorded steps of the engine and of the batch, token for token.

There is no GPU here. `graphs.recording` stands in for a CUDA graph: it does the same operations
again on the same memory, and is wrong where a graph would be.
"""

import contextlib
import itertools
import logging
import random

import pytest
import shapes
import torch
from ctrl_c import broken_off
from hypothesis import given, settings
from hypothesis import strategies as st
from test_llm import CONFIGS, MODELS, V, alone
from test_rows import PROMPTS, WISHES, run
from test_rows import alone as solo

from spindle import graphs
from spindle.decode.capture import Recording, capture, check_same
from spindle.decode.engine import Engine
from spindle.decode.fake_device import check_on_fake_device
from spindle.decode.params import SamplingParams
from spindle.decode.sampling import SamplingRows
from spindle.errors import RequestError
from spindle.kvcache.paged import PagedKV
from spindle.model.weights import random_model
from spindle.serve.llm import LLM
from spindle.serve.recorded import PagedStep, RecordedDecodes, Row, buckets

PROMPT = [5, 81, 17, 3, 3, 60, 22]


class Counted:
    """A recorder that counts what it records."""

    def __init__(self):
        self.steps = []

    def __call__(self, step):
        self.steps.append(step)
        return graphs.recording(step)


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


# --- one engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", WISHES)
def test_an_engine_whose_steps_are_replayed_gives_the_same_tokens(model, wish):
    """Beyond the length at the capture, to the end of the context (B104)."""
    count = model.config.max_positions - max(map(len, PROMPTS))
    right = run(Engine(model, rows=3), PROMPTS, WISHES[wish], count)
    counted = Counted()
    engine = graphs.enable(Engine(model, rows=3), counted)
    assert run(engine, PROMPTS, WISHES[wish], count) == right
    assert len(counted.steps) == 1


def test_a_step_is_recorded_once_for_all_answers_of_its_kind(model):
    """B105: its seeds are those of the answer, not those of the capture."""
    counted, plain = Counted(), Engine(model)
    engine = graphs.enable(Engine(model), counted)
    texts = []
    for seed in (1, 2, 1):
        ids, _ = engine.generate(PROMPT, 12, seed=seed)
        assert ids == plain.generate(PROMPT, 12, seed=seed)[0]
        texts.append(ids)
    assert texts[0] == texts[2] != texts[1]
    assert len(counted.steps) == 1
    engine.generate(PROMPT, 5, temperature=0)
    engine.generate([1], 5, seed=3, top_k=5)
    engine.generate([1, 2], 5, seed=3, presence_penalty=1.0)
    assert len(counted.steps) == 4
    engine.generate(PROMPT, 12, seed=9)
    assert len(counted.steps) == 4


def test_an_answer_of_penalties_does_not_count_the_one_before(model):
    options = {"seed": 1, "repetition_penalty": 1.5, "frequency_penalty": 0.9, "min_tokens": 3}
    engine, plain = graphs.enable(Engine(model), graphs.recording), Engine(model)
    for prompt in (PROMPT, [9, 9], PROMPT):
        got = engine.generate(prompt, 12, **options)[0]
        assert got == plain.generate(prompt, 12, **options)[0]


def test_chunks_are_recorded_by_their_size(model):
    """A draft of k tokens is verified by a chunk of k + 1, and taken back by a rewind."""
    counted, plain = Counted(), Engine(model, rows=2)
    engine = graphs.enable(Engine(model, rows=2), counted)
    for each in (engine, plain):
        for row in range(2):
            each.prefill(PROMPTS[row], row)
    for size, keep in ((3, 1), (1, 1), (3, 3), (2, 0), (3, 2)):
        more = torch.randint(V, (2, size), generator=torch.Generator().manual_seed(size))
        assert torch.equal(engine.chunk(more), plain.chunk(more))
        for each in (engine, plain):
            for row in range(2):
                each.rewind(each.lengths[row] - size + keep, row)
    assert len(counted.steps) == 3


def test_answers_together_keep_their_rows(model):
    """A recorded step has a fixed number of rows: those that have ended are computed on."""
    params = SamplingParams(n=4, seed=3, max_tokens=16, stop_token_ids=list(range(0, V, 9)))
    counted = Counted()
    engine = graphs.enable(Engine(model), counted)
    got = engine.answers(PROMPT, params)
    assert got == [
        type(one)(**{**vars(one), "stats": mine.stats})
        for one, mine in zip(Engine(model).answers(PROMPT, params), got, strict=True)
    ]
    assert len({len(one.token_ids) for one in got}) > 1
    assert [len(step.tokens) for step in counted.steps] == [4]


def test_the_cache_is_as_large_as_it_may_become_before_anything_is_recorded(model):
    engine = graphs.enable(Engine(model), graphs.recording)
    before = engine._kv
    engine.generate(PROMPT, model.config.max_positions, temperature=0)
    assert engine._kv is before and before.capacity == model.config.max_positions


def test_a_cache_that_is_made_anew_drops_what_was_recorded(model):
    """B104: `answers` has more rows; afterwards steps are recorded over the new tensors."""
    counted = Counted()
    engine, plain = graphs.enable(Engine(model), counted), Engine(model)
    right = plain.generate(PROMPT, 9, temperature=0)[0]
    assert engine.generate(PROMPT, 9, temperature=0)[0] == right
    engine.answers(PROMPT, SamplingParams(n=2, seed=1, max_tokens=3))
    assert engine.generate(PROMPT, 9, temperature=0)[0] == right
    assert len(counted.steps) == 3


def test_what_is_not_recorded_is_said(model, caplog):
    """In float64 a CPU has no native code."""
    engine = Engine(model)
    with caplog.at_level(logging.WARNING):
        assert graphs.enable(engine) is engine
    (record,) = caplog.records
    assert "native code is for float32, and the model is float64" in record.getMessage()
    assert not engine.recorded
    assert len(engine.generate(PROMPT, 9, temperature=0, ignore_eos=True)[0]) == 9


def test_an_interrupt_between_replays_leaves_the_engine_usable(model):
    engine = graphs.enable(Engine(model), graphs.recording)
    right = engine.generate(PROMPT, 9, temperature=0)[0]
    ((step, _),) = engine._bodies.items()

    def broken():
        step.seq_lens.add_(1)
        raise KeyboardInterrupt

    stream = engine.stream(PROMPT, 9, temperature=0)
    next(stream)
    replay, engine._bodies[step] = engine._bodies[step], broken
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert engine.lengths == engine.seq_lens.tolist()
    engine._bodies[step] = replay
    assert engine.generate(PROMPT, 9, temperature=0)[0] == right


def test_a_cuda_graph_is_warmed_up_aside_and_captured_without_being_run(model, monkeypatch):
    """The order of things, with stand-ins for torch.cuda: the buffers are as they were before."""
    log = []

    class Stream:
        def __init__(self, name="aside"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    class Graph:
        def replay(self):
            self.recording.replay()

    @contextlib.contextmanager
    def captured(graph, pool):
        assert pool == (0, 7)
        log.append("capture")
        graph.recording = Recording()
        with torch.inference_mode(), graph.recording:
            yield
        graph.recording.restore()
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("here"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "_pool", lambda device: (0, 7))
    monkeypatch.setattr(torch.cuda, "graph", captured)
    options = WISHES["penalised"]
    right = run(Engine(model, rows=3), PROMPTS, options, 9)
    assert (
        run(graphs.enable(Engine(model, rows=3), graphs.cuda_graph), PROMPTS, options, 9) == right
    )
    assert log == [
        "aside waits for here",
        "on aside",
        "off aside",
        "here waits for aside",
        "capture",
        "captured",
    ]


# --- the batch -----------------------------------------------------------------------------------


def test_buckets_are_powers_of_two_and_the_most_there_can_be():
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_buckets_of_a_cpu_waste_few_rows():
    assert buckets(6, steep=True) == [1, 2, 4, 6]
    assert buckets(18, steep=True) == [1, 2, 4, 8, 12, 16, 18]
    for most in range(1, 100):
        sizes = buckets(most, steep=True)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
        for rows in range(1, most + 1):
            bucket = next(size for size in sizes if size >= rows)
            assert bucket - rows < max(4, rows)


def served(model, requests, **options):
    """All requests at once -> their ids, in the order given, and the LLM."""
    options = {"max_model_len": 64, "block_size": 4, "num_blocks": 60, "max_seqs": 6} | options
    llm = LLM(model, **{"graphs": graphs.recording} | options)
    for cache in (llm._kv.keys, llm._kv.values):
        cache.fill_(torch.nan)  # the scratch block's too (B106)
    outputs = llm.generate([p for p, _ in requests], [params for _, params in requests])
    llm.scheduler.check()
    return [[one.token_ids for one in output.outputs] for output in outputs], llm


def some_requests(count, seed=0):
    rng = random.Random(seed)
    wishes = [
        {"temperature": 0},
        {"top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"min_tokens": 3, "top_k": 10},
    ]
    return [
        (
            [rng.randrange(V) for _ in range(rng.randint(1, 20))],
            SamplingParams(max_tokens=rng.randint(3, 24), seed=n, **rng.choice(wishes)),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("count", range(1, 8))
def test_every_number_of_rows_is_as_if_alone(model, count):
    """B101, B103: buckets 1, 2, 4, 6 and as many sequences as fit, and one more that waits."""
    requests = some_requests(count, seed=count)
    got, llm = served(model, requests)
    assert got == [[alone(model, *request)] for request in requests]
    assert 0 < llm.stats["replayed"] < llm.stats["steps"]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([1, 3, 8]),
    st.integers(0, 40),
    st.integers(1, 9),
    st.sampled_from(["recompute", "swap"]),
    st.sampled_from(["continuous", "static"]),
)
def test_replayed_together_is_alone(seed, name, size, spare, count, preemption, policy):
    """Wide steps and narrow ones by turns, preempted, swapped, with little room (B100, B106)."""
    model, requests = MODELS[name], some_requests(count, seed)
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    got, llm = served(
        model,
        requests,
        block_size=size,
        num_blocks=-(-longest // size) + spare // size,
        preemption=preemption,
        policy=policy,
        max_batch_tokens=12,
    )
    assert got == [[alone(model, *request)] for request in requests]
    assert not llm.has_unfinished and llm.stats["blocks_held"] == 0


def test_a_context_filled_to_its_last_slot(model):
    """B100, B104: the table as wide as it gets; recorded at a short length, run to the longest."""
    for prompt in (15, 16, 17, 1):
        requests = [(list(range(prompt)), SamplingParams(max_tokens=None, temperature=0))] * 2
        got, _ = served(model, requests, prefix_cache=False, num_blocks=32)
        assert got == [[alone(model, *requests[0])]] * 2
        assert prompt + len(got[0][0]) <= 64
        if 7 not in got[0][0]:  # no end of sequence
            assert prompt + len(got[0][0]) == 64


def test_a_wide_batch_and_then_a_narrow_one(model):
    """B100: what the wide one left in the columns of the tables is not read."""
    wide, narrow = some_requests(6, seed=1), some_requests(1, seed=2)
    llm = LLM(model, block_size=4, max_model_len=64, max_seqs=6, graphs=graphs.recording)
    for requests in (wide, narrow, wide, narrow):
        outputs = llm.generate([p for p, _ in requests], [params for _, params in requests])
        assert [o.outputs[0].token_ids for o in outputs] == [alone(model, *r) for r in requests]


def test_logprobs_answers_and_beams_beside_each_other(model):
    """What a replayed step does not draw itself is read from its logits."""
    params = SamplingParams(max_tokens=9, seed=2, n=3, logprobs=2)
    got, plain = (
        LLM(model, block_size=4, max_model_len=64, max_seqs=6, graphs=how)
        for how in (graphs.recording, False)
    )
    for mine, right in zip(
        got.generate([PROMPT], params), plain.generate([PROMPT], params), strict=True
    ):
        for one, other in zip(mine.outputs, right.outputs, strict=True):
            assert one.token_ids == other.token_ids
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.sampled.token_id == b.sampled.token_id
                assert a.sampled.logprob == pytest.approx(b.sampled.logprob, abs=1e-9)
    beams = [llm.beam_search(PROMPT, 3, 8) for llm in (got, plain)]
    assert [o.token_ids for o in beams[0].outputs] == [o.token_ids for o in beams[1].outputs]
    assert got.stats["replayed"] > 0 == plain.stats["replayed"]


def test_a_step_with_a_prompt_in_it_is_run(model):
    llm = LLM(model, block_size=4, max_model_len=64, max_seqs=6, graphs=graphs.recording)
    llm.add(PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    llm.step()
    assert (llm.stats["steps"], llm.stats["replayed"]) == (1, 0)
    llm.step()
    assert (llm.stats["steps"], llm.stats["replayed"]) == (2, 1)
    llm.add(PROMPT[::-1], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    llm.step()
    assert (llm.stats["steps"], llm.stats["replayed"]) == (3, 1)


def test_a_row_that_is_no_distribution_ends_alone(model):
    """NaN in one sequence's keys: its row alone is lost, though others share the step."""
    llm = LLM(model, block_size=4, max_model_len=64, max_seqs=3, prefix_cache=False,
              graphs=graphs.recording)  # fmt: skip
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    names = [llm.add([n + 1] * 5, params) for n in range(3)]
    llm.step()
    llm.step()
    broken = llm._requests[names[1]].sequences[0]
    llm._kv.keys[:, broken.table.blocks] = torch.nan
    done = {}
    while llm.has_unfinished:
        done |= {o.request_id: o.outputs[0] for o in llm.step() if o.finished}
    assert done[names[1]].finish_reason == "error"
    for n in (0, 2):
        assert done[names[n]].token_ids == alone(model, [n + 1] * 5, params)


@pytest.mark.parametrize("wrong", [1, "yes", 0.5])
def test_a_choice_of_graphs_that_cannot_be_is_refused(model, wrong):
    with pytest.raises(RequestError, match="graphs="):
        LLM(model, graphs=wrong)


def test_graphs_where_nothing_records_are_refused_if_asked_for(model):
    with pytest.raises(RequestError, match="graphs=True: native code is for float32"):
        LLM(model, graphs=True)
    assert LLM(model, max_model_len=64)._runner.recorded is None


# --- a step of the batch, looked at --------------------------------------------------------------


def paged_step(name, device="cpu", rows=4, width=16, model=None):
    model = model or MODELS[name]
    kv = PagedKV(model.config, 60, 4, model.dtype, device)
    params = [SamplingParams(seed=n, top_k=5, top_p=0.9) for n in range(rows)]
    sampling = SamplingRows.of(params, device)
    sampling = type(sampling)(**{**vars(sampling), "fixed_shapes": True})
    return PagedStep(model, kv, rows, sampling, width)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_the_batch_is_the_same_operations_whatever_its_rows_are(name):
    """B103, B104: lengths, tables, slots and tokens change, and nothing but values does."""
    step = paged_step(name)

    def prepare(n):
        length = 3 + 5 * n
        columns = torch.tensor([9 + n, length, 4 * n + 3, length + 1]).repeat_interleave(4)
        step.index.copy_(torch.cat((columns, torch.tensor([n, n + 1] * 32))))

    log = check_same(step.run, times=4, prepare=prepare, index=step.index)
    assert len(log.launches) > 20


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_the_batch_reads_nothing_on_the_host(name):
    config = CONFIGS[name]

    def make(device):
        model = random_model(config, dtype=torch.float32, device=device)
        return paged_step(name, device, model=model).run

    check_on_fake_device(make)


def test_padding_rows_touch_the_scratch_block_alone():
    """B106: five rows in a bucket of eight; every block but theirs and the scratch is as it was."""
    model = MODELS["llama"]
    llm = LLM(model, block_size=4, max_model_len=64, max_seqs=8, num_blocks=40,
              prefix_cache=False, graphs=graphs.recording)  # fmt: skip
    llm._kv.keys.zero_()
    for n in range(5):
        llm.add([n + 1] * 3, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    llm.step()
    before = llm._kv.keys.clone()
    llm.step()
    assert llm.stats["replayed"] == 1
    changed = (llm._kv.keys != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    own = {one.table.blocks[0] for one in llm.scheduler.running}
    assert set(changed) == own | {llm._kv.scratch}
    assert llm._kv.scratch == 40 and llm.scheduler.pool.num_blocks == 40


def test_all_that_a_step_is_told_is_told_anew_each_time():
    """B103: the index has the bucket's size, with defined values for the rows that are nobody's."""
    model = MODELS["llama"]
    kv = PagedKV(model.config, 20, 4, model.dtype)
    decodes = RecordedDecodes(model, kv, graphs.recording, 8, 32)
    rows = decodes._rows([], 4)
    assert rows == [(0, 0, 80, 1, [20])] * 4 and kv.scratch == 20
    step = paged_step("llama", rows=4, width=8)
    step.tell([Row(5, 9, 13, 10, [3, 7, 1])] * 2 + rows[:2])
    step.tell([Row(6, 4, 28, 5, [3, 7]), *rows[:3]])
    columns, tables = step.index[:16].view(4, 4), step.index[16:].view(4, 8)
    assert columns.tolist() == [[6, 0, 0, 0], [4, 0, 0, 0], [28, 80, 80, 80], [5, 1, 1, 1]]
    assert tables[0, :2].tolist() == [3, 7]
    assert tables[1:, 0].tolist() == [20] * 3


@pytest.mark.cuda
@pytest.mark.parametrize("wish", WISHES)
def test_on_a_gpu_graphs_give_the_tokens_of_eager_steps(wish):
    """Capture, then 64 replays and more."""
    raw = shapes.LLAMA | {"max_position_embeddings": 256}
    config = type(CONFIGS["llama"]).from_dict(raw)
    model = random_model(config, dtype=torch.float32, device="cuda")
    right = run(Engine(model, rows=3), PROMPTS, WISHES[wish], 80)
    assert run(graphs.enable(Engine(model, rows=3)), PROMPTS, WISHES[wish], 80) == right


def test_what_solo_means_here_is_what_it_means_there(model):
    """The two oracles of these tests agree."""
    params = WISHES["sampled"]
    assert solo(model, PROMPT, params, 5) == alone(
        model, PROMPT, SamplingParams(seed=params.seed, max_tokens=5, ignore_eos=True)
    )


def test_a_step_recorded_by_hand(model):
    """`capture` leaves the buffers as they were; then each replay is a step."""
    engine = Engine(model)
    engine.begin([PROMPT], SamplingParams(temperature=0, seed=0))
    right = Engine(model).generate(PROMPT, 6, temperature=0)[0]
    step = engine._last
    replay = capture(step.run).replay
    got = [int(step.tokens)]
    for _ in range(5):
        replay()
        got.append(int(step.tokens))
    assert got == right or 7 in right


def test_a_filtered_step_of_a_large_vocabulary_can_be_recorded():
    """Beyond the candidates that a CPU looks at first, shapes would follow the values."""
    wide = random_model(shapes.llama(vocab_size=700), dtype=torch.float64)
    params = SamplingParams(seed=2, top_p=0.7, top_k=40)
    right = run(Engine(wide), [PROMPT], params, 12)
    engine = graphs.enable(Engine(wide), graphs.recording)
    assert run(engine, [PROMPT], params, 12) == right
    llm = LLM(wide, block_size=4, max_model_len=64, graphs=graphs.recording)
    (output,) = llm.generate([PROMPT], SamplingParams(seed=2, top_p=0.7, top_k=40, max_tokens=12))
    assert [output.outputs[0].token_ids] == right


def test_what_a_warm_up_must_give_back(model):
    """`state` is all that a step changes but for the cache: a run between leaves it as it was."""
    engine = Engine(model, rows=2, keep_probs=True)
    engine.begin(PROMPTS[:2], WISHES["penalised"])
    step = engine._last
    before = [tensor.clone() for tensor in step.state()]
    engine.step(step.tokens)
    changed = [not torch.equal(*pair) for pair in zip(step.state(), before, strict=True)]
    assert changed[:4] == [True] * 4  # tokens, lengths, logits, probs
    assert any(changed[4:])  # what is counted
    chunk = engine.chunk(torch.ones(2, 2, dtype=torch.int64))
    (kept,) = engine._chunks.values()
    assert any(tensor is chunk for tensor in kept.state())


def test_chunks_of_one_size_and_other_rows_are_other_recordings(model):
    counted, plain = Counted(), Engine(model, rows=3)
    engine = graphs.enable(Engine(model, rows=3), counted)
    for rows in (3, 1, 2, 3):
        more = torch.randint(V, (rows, 2), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(engine.chunk(more), plain.chunk(more))
    assert len(counted.steps) == 3


def test_fillers_of_a_static_batch_are_run(model):
    """Their step is no pure decode step, though each of its chunks is one token."""
    requests = [
        ([1, 2, 3], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)) for n in (2, 9)
    ]
    got, llm = served(model, requests, policy="static")
    assert got == [[alone(model, *request)] for request in requests]
    assert llm.stats["replayed"] == 1  # of nine steps: a prompt, one for both, then fillers


def test_a_load_that_fails_is_not_taken_for_done(model, monkeypatch):
    """The next step with the sequences from before loads their parameters again."""
    llm = LLM(model, block_size=4, max_model_len=64, max_seqs=2, graphs=graphs.recording)
    params = [SamplingParams(max_tokens=12, seed=n, ignore_eos=True) for n in range(2)]
    names = [llm.add([5 + n] * 4, one) for n, one in enumerate(params)]
    llm.step()
    llm.step()
    recorded = llm._runner.recorded
    before, (step, _) = list(recorded._loaded), recorded._step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recorded, "_record", lambda step: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(recorded, "_steps", {})
        recorded._load(before[::-1], 2)
    step.sampling.seed.fill_(99)  # as another kind of rows would have left it
    done = {}
    while llm.has_unfinished:
        done |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
    for name, one, n in zip(names, params, range(2), strict=True):
        assert done[name] == alone(model, [5 + n] * 4, one)


def test_wherever_a_replayed_step_of_the_batch_is_broken_off_it_can_be_done_again(ctrl_c):
    """B103: a Ctrl-C at each line of recorded.py in turn, in a step whose tables have grown."""
    model, params = MODELS["llama"], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    options = {"block_size": 4, "max_model_len": 32, "max_seqs": 2, "num_blocks": 16}
    prompts = [[3, 1, 4], [1, 5, 9, 2]]
    right = [alone(model, prompt, params) for prompt in prompts]
    for at in range(400):
        llm = LLM(model, graphs=graphs.recording, prefix_cache=False, **options)
        names, told, came = [llm.add(prompt, params) for prompt in prompts], [], False

        def step(llm=llm, told=told):
            told += llm.step()

        for n in itertools.count():
            if not llm.has_unfinished:
                break
            if n in (2, 3):
                came |= broken_off(step, at // (n - 1), "serve/recorded.py")
            step()
        done = {o.request_id: o.outputs[0].token_ids for o in told if o.finished}
        assert [done[name] for name in names] == right, at
        if not came:
            assert at > 20
            return
    raise AssertionError("a step has more lines than that?")
