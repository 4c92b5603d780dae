"""Steps whose native calls are done again by C++: bit for bit what they are when Python runs them.

float32, since native code is for that.
"""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import served, some_requests
from test_rows import PROMPTS, WISHES, run

from spindle import graphs
from spindle.decode import rows as rows_module
from spindle.decode.cpu_graph import CpuGraph
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kernels import emulate, native, ops
from spindle.kernels.program import CACHE_LINE, Program, Span, place
from spindle.model.weights import random_model
from spindle.serve.llm import LLM

pytestmark = pytest.mark.skipif(not native.available(), reason="no native code here")

GREEDY = SamplingParams(temperature=0, seed=0)
QWEN3 = {"model_type": "qwen3"}  # normalises queries and keys: on copies, which torch makes
MODELS = {
    "llama": random_model(shapes.llama(), dtype=torch.float32),
    "gpt2": random_model(shapes.gpt2(), dtype=torch.float32),
    "qwen3": random_model(shapes.llama(**QWEN3), dtype=torch.float32),
    "int8": random_model(shapes.llama(), dtype=torch.float32, quantize="int8"),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture
def graph_of():
    """The graph of the one step that an engine has recorded."""

    def find(engine):
        ((_, replay),) = engine._bodies.items()
        cells = (cell.cell_contents for cell in replay.__closure__)
        return next(one for one in cells if isinstance(one, CpuGraph))

    return find


# --- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", WISHES)
def test_a_replayed_step_is_the_step(model, wish, monkeypatch):
    """Tokens, and the last logits to the last bit; over caches that double twice (B104)."""
    monkeypatch.setattr(rows_module, "FIRST_CAPACITY", 16)
    plain, taped = Engine(model, rows=3), graphs.enable(Engine(model, rows=3))
    count = model.config.max_positions - max(map(len, PROMPTS))
    assert taped.recorded and taped._kv.capacity == 16
    assert run(taped, PROMPTS, WISHES[wish], count) == run(plain, PROMPTS, WISHES[wish], count)
    assert torch.equal(taped.logits, plain.logits)
    assert taped._kv.capacity == model.config.max_positions


def test_a_chunk_is_replayed_too(model):
    plain, taped = Engine(model, rows=2), graphs.enable(Engine(model, rows=2))
    for size, keep in ((3, 1), (1, 1), (3, 3), (2, 0), (3, 2)):
        more = torch.randint(97, (2, size), generator=torch.Generator().manual_seed(size))
        assert torch.equal(taped.chunk(more), plain.chunk(more))
        for each in (taped, plain):
            for row in range(2):
                each.rewind(each.lengths[row] - size + keep, row)


def test_of_a_llama_all_but_the_ends_are_programs(graph_of):
    """Python comes back for the places at the start and the logits at the end, and for no layer."""
    engine = graphs.enable(Engine(MODELS["llama"], rows=2))
    run(engine, PROMPTS[:2], GREEDY, 3)
    names = [name for name, _ in graph_of(engine).timed()]
    assert names.count("linear") == 3 * 4 + 1 and names.count("write_kv") == 6
    programs = [part for part in graph_of(engine)._parts if isinstance(part, Program)]
    assert len(programs) == 2 and len(programs[0].names) == 1 + 3 * 11  # all layers; the head
    assert not any(name.startswith("spindle") for name in names)


def test_of_a_gpt2_too(graph_of):
    """Its embeddings are torch's, and each layer is native."""
    engine = graphs.enable(Engine(MODELS["gpt2"], rows=2))
    run(engine, PROMPTS[:2], GREEDY, 3)
    programs = [part for part in graph_of(engine)._parts if isinstance(part, Program)]
    assert [len(one.names) for one in programs] == [1 + 3 * 10, 1]


def test_what_torch_copies_for_an_op_is_left_to_torch(graph_of):
    """Qwen3's norms get copies of q and k, made within the op and gone with it."""
    engine = graphs.enable(Engine(MODELS["qwen3"], rows=2))
    run(engine, PROMPTS[:2], GREEDY, 3)
    names = [name for name, _ in graph_of(engine).timed()]
    assert names.count("spindle.rms_norm.default") == 6


def test_layers_share_memory(graph_of):
    """What a step makes is in one buffer; 12 layers need no more of it than 3."""
    sizes = {}
    for layers in (3, 12):
        config = shapes.llama(num_hidden_layers=layers)
        engine = graphs.enable(Engine(random_model(config, dtype=torch.float32)))
        run(engine, PROMPTS[:1], GREEDY, 3)
        sizes[layers] = graph_of(engine)._held[0].nbytes
    assert sizes[3] == sizes[12] > 0


def test_the_threads_are_those_of_the_day(two_threads):
    """Not those of the recording: the number is filled in at each replay."""
    plain, taped = Engine(MODELS["llama"]), graphs.enable(Engine(MODELS["llama"]))
    right = run(plain, PROMPTS[:1], GREEDY, 20)
    assert run(taped, PROMPTS[:1], GREEDY, 20) == right
    (step,) = taped._bodies
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run(taped, PROMPTS[:1], GREEDY, 20) == right
    finally:
        torch.set_num_threads(before)
    assert list(taped._bodies) == [step]


def test_an_engine_that_is_gone_leaves_nothing():
    """Its cache, its step and what was recorded of it."""
    engine = graphs.enable(Engine(MODELS["llama"]))
    run(engine, PROMPTS[:1], GREEDY, 3)
    seen = [weakref.ref(engine._kv), weakref.ref(next(iter(engine._bodies)))]
    del engine
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_the_recording_leaves_the_state_as_it_was(model):
    """What was begun goes on from the recorded step's start: tokens, lengths and counts."""
    engine = Engine(model, rows=3)
    engine.begin(PROMPTS, WISHES["penalised"])
    step = engine._last
    before = [x.clone() for x in step.state()]
    graphs.cpu_graph(step)
    for x, value in zip(step.state(), before, strict=True):
        assert torch.equal(x, value)


def test_a_recording_that_fails_leaves_it_too(model, monkeypatch):
    engine = Engine(model, rows=3)
    engine.begin(PROMPTS, GREEDY)
    step, logits = engine._last, model.logits
    before = [x.clone() for x in step.state()]

    def broken(hidden):
        logits(hidden)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "logits", lambda self, hidden: broken(hidden))
    with pytest.raises(KeyboardInterrupt):
        graphs.cpu_graph(step)
    for x, value in zip(step.state(), before, strict=True):
        assert torch.equal(x, value)


def test_another_threads_calls_are_not_noted():
    """Two engines in two threads: each recording has its own calls."""
    x, weight, noted = torch.ones(1, 48), torch.ones(48), []

    def elsewhere():
        native.rms_norm(x, None, weight, 1e-5)

    with native.noting() as calls:
        native.silu_mul(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with native.noting() as inner:
            native.silu_mul(x)
        noted += [len(calls), len(inner)]
    native.silu_mul(x)
    assert noted == [1, 1] and [call.name for call in calls] == ["silu_mul"]


# --- many requests -------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([1, 3, 8]),
    st.integers(0, 40),
    st.integers(1, 14),
    st.sampled_from(["recompute", "swap"]),
)
def test_batches_replayed_are_batches_run(seed, name, size, spare, count, preemption):
    """Whole runs, preempted and swapped, by default and with graphs=False: the same ids."""
    requests = some_requests(count, seed)
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    options = {"max_seqs": 12, "max_batch_tokens": 20, "block_size": size, "preemption": preemption}
    options["num_blocks"] = -(-longest // size) + spare // size
    replayed, run = (served(MODELS[name], requests, graphs=how, **options) for how in (None, False))
    assert replayed[0] == run[0]
    assert run[1].stats["replayed"] == 0 < replayed[1].stats["replayed"]


def test_graphs_can_be_asked_for_and_done_without():
    model = MODELS["llama"]
    assert LLM(model, max_model_len=64, graphs=True)._runner.recorded is not None
    assert LLM(model, max_model_len=64)._runner.recorded is not None
    assert LLM(model, max_model_len=64, graphs=False)._runner.recorded is None


def test_where_there_is_no_native_code_steps_are_run(monkeypatch):
    """And it is said in words if graphs were asked for."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native.build, "why_not", lambda name: "SPINDLE_NO_EXT=1")
    assert graphs.recorder_for(MODELS["llama"]) is None
    with pytest.raises(RequestError, match=r"graphs=True: there is no native code \(SPINDLE_NO"):
        LLM(MODELS["llama"], max_model_len=64, graphs=True)
    assert LLM(MODELS["llama"], max_model_len=64)._runner.recorded is None


def test_the_emulator_is_not_passed_by():
    with emulate.ops_emulated():
        assert graphs.recorder_for(MODELS["llama"]) is None
        assert "SPINDLE_EMULATE=1" in graphs.why_none(MODELS["llama"])


# --- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 63, 64, 1000, 50_000])
def test_reading_is_summing(n):
    x = torch.randn(n)
    assert native.read(x) == pytest.approx(x.double().sum().item(), abs=1e-4 * n**0.5)


def test_a_program_does_its_calls_in_their_order():
    x, weight = torch.randn(4, 48), torch.randn(48)
    with native.noting() as calls:
        h = native.rms_norm(x, None, weight, 1e-5)
        y = native.silu_mul(h)
    right = y.clone()
    program = Program(calls)
    h.zero_(), y.zero_()
    program.run()
    assert torch.equal(y, right)
    y.zero_()
    assert [name for name, _ in program.timed()] == ["rms_norm", "silu_mul"]
    assert torch.equal(y, right)


def test_a_program_is_told_where_memory_has_gone():
    x, weight = torch.randn(4, 48), torch.randn(48)
    with native.noting() as calls:
        h = native.rms_norm(x, None, weight, 1e-5)
    elsewhere = torch.zeros_like(h)
    Program(calls, {h.data_ptr(): elsewhere.data_ptr()}).run()
    assert torch.equal(elsewhere, h)


def test_what_cannot_be_in_a_program_is_refused():
    with native.noting() as calls:
        native.to_panels(torch.randn(32, 16))
    with pytest.raises(ValueError, match="pack cannot be in a program"):
        Program(calls)


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_that_is_not_there_is_refused_and_nothing_written(slot):
    """Run and replayed: native code would write beyond the cache."""
    cache, new = torch.zeros(3, 4, 2, 16), torch.randn(2, 2, 16)
    slots = torch.tensor([5, 2])
    with native.noting() as calls:
        ops.PLAIN["write_kv"](cache, slots, new)
    program = Program(calls)
    assert torch.equal(cache.view(12, 2, 16)[[5, 2]], new)
    cache.zero_()
    slots[1] = slot
    for write in (lambda: ops.PLAIN["write_kv"](cache, slots, new), program.run, program.timed):
        with pytest.raises(IndexError, match="slot"):
            write()
        assert not cache.any()


def test_rows_of_keys_that_lie_apart_are_written():
    cache, rows = torch.zeros(3, 4, 2, 16), torch.randn(3, 7, 16)
    new = rows[:, 2:4]  # heads 2 and 3 of 7
    with native.noting() as calls:
        ops.PLAIN["write_kv"](cache, torch.tensor([11, 0, 7]), new)
    assert len(calls) == 1
    assert torch.equal(cache.view(12, 2, 16)[[11, 0, 7]], new)
    assert cache.view(12, -1).any(dim=1).sum() == 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 20)), max_size=30)
)
def test_spans_in_use_together_do_not_overlap(drawn):
    spans = [Span(nbytes, min(a, b), max(a, b)) for nbytes, a, b in drawn]
    total = place(spans)
    for n, one in enumerate(spans):
        assert one.offset % CACHE_LINE == 0 and 0 <= one.offset <= total - one.nbytes
        for other in spans[:n]:
            together = one.first <= other.last and other.first <= one.last
            apart = one.offset >= other.offset + other.nbytes
            apart |= other.offset >= one.offset + one.nbytes
            assert apart or not together
    assert total <= sum(-(-one.nbytes // CACHE_LINE) * CACHE_LINE for one in spans)


def test_a_chain_takes_the_room_of_two():
    spans = [Span(640, n, n + 1) for n in range(50)]
    assert place(spans) == 2 * 640


def test_to_record_a_step_imports_no_compiler():
    """A dispatch mode brings torch's compiler along if it is let: a second, at the second token."""
    program = (
        "import sys; from spindle import Engine, SamplingParams, graphs, load_hf;"
        "e = graphs.enable(Engine(load_hf('tiny', dtype='float32')));"
        "e.step(e.begin([[1, 2, 3]], SamplingParams(temperature=0, seed=0)));"
        "print(e.recorded, sum(name.startswith('torch._dynamo.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[0] == "True", done.stderr
    assert int(done.stdout.split()[1]) < 10
