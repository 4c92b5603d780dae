"""Profile: parts add up and move what the model says; levers are what they say, and are undone."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import pytest
import shapes
import torch
from clocks import HandClock
from matplotlib.patches import Rectangle

from spindle import cli, hub, kernels, plots
from spindle.bench import latency, levers, machine, parts, profile, steps
from spindle.bench.levers import FULL, LEVERS, PLAIN, REPLAYED, levers_on
from spindle.bench.parts import ATTENTION, HEAD, LINEARS, NORMS, OUTSIDE, PARTS, REST, Tally, places
from spindle.bench.peers.jobs import bytes_per_token
from spindle.bench.prefill import Prefill
from spindle.bench.spans import CallCost, Noted, Place, Spans, call_cost, wrapped
from spindle.config import ModelConfig
from spindle.kernels import build, emulate, native, ops, packed, twins
from spindle.model.weights import random_model
from spindle.tokenizer import Tokenizer

FREE = CallCost(0.0, 0.0)
needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")

CONFIGS = {
    "llama": shapes.llama(),
    "untied": shapes.llama(tie_word_embeddings=False, attention_bias=True),
    "qwen3": shapes.llama(model_type="qwen3"),
    "gelu": shapes.llama(hidden_act="gelu"),
    "gpt2": shapes.gpt2(),
}


pytestmark = pytest.mark.usefixtures("small_machine")


def both(config: ModelConfig):
    """The plain model and this engine's."""
    with latency.plain_ops():
        plain = random_model(config)
    return plain, random_model(config)


def jobs(model, rows, new=4, clock=None, context=5, recorded=False):
    prompts = profile.prompts_of(None, model.config, max(rows), context)
    return steps.jobs(model, None, prompts, rows, new, clock or HandClock(), recorded)


# --- spans ---------------------------------------------------------------------------------------


def test_each_second_is_noted_once_for_the_innermost_part():
    clock = HandClock()

    class Here:
        def deep():
            clock.now += 1

        def leaf():
            clock.now += 10
            Here.deep()

        def box():
            clock.now += 100
            Here.leaf()
            Here.deep()
            Here.deep()

    spans = Spans(clock)
    found = [Place(Here, "deep", "d"), Place(Here, "leaf", "l"), Place(Here, "box", "b", False)]
    with wrapped(found, spans.wrap):
        Here.box()
        Here.leaf()
    assert spans.take() == {"d": Noted(2, 2, 0), "l": Noted(22, 2, 0), "b": Noted(100, 1, 3)}
    assert set(map(str, spans.take().values())) == {str(Noted())}, "what was taken is gone"
    Here.box()
    assert spans.take()["b"].calls == 0, "outside nothing is noted"


def test_a_part_that_fails_is_noted_and_everything_is_put_back():
    clock = HandClock()

    class Here:
        def leaf():
            clock.now += 1
            raise ZeroDivisionError

    before, spans = Here.leaf, Spans(clock)
    with pytest.raises(ZeroDivisionError), wrapped([Place(Here, "leaf", "l")], spans.wrap):
        Here.leaf()
    assert Here.leaf is before and spans.take()["l"] == Noted(1, 1, 0)
    with wrapped([Place(Here, "leaf", "l")], spans.wrap), pytest.raises(ZeroDivisionError):
        Here.leaf()
    assert spans.take()["l"] == Noted(1, 1, 0), "a failure leaves no span open"


def test_what_timing_costs_is_measured_and_taken_off():
    """A clock whose every reading takes a second: a span costs one inside, and one outside."""
    cost = call_cost(HandClock(1.0), 100_000, 1)
    assert cost.inside_s == pytest.approx(1, abs=1e-4)
    assert cost.outside_s == pytest.approx(1, abs=1e-4)
    spans = Spans(HandClock(1.0))

    class Here:
        def leaf():
            pass

        def box():
            for _ in range(7):
                Here.leaf()

    with wrapped([Place(Here, "leaf", "l"), Place(Here, "box", "b", False)], spans.wrap):
        Here.box()
    noted = spans.take()
    assert noted["l"].seconds == 7 and noted["b"].seconds == 15 - 7
    left = {name: one.corrected(CallCost(1, 1)) for name, one in noted.items()}
    assert left == {"l": 0, "b": 0}


def test_here_too_a_call_costs_something():
    cost = call_cost(calls=200, batches=3)
    assert 0 < cost.inside_s + cost.outside_s < 1e-3


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_all_seconds_of_a_function_go_to_its_part_and_to_no_other(name):
    """Each place in turn is given a function that takes a second longer."""
    model, called = random_model(CONFIGS[name]), set()
    for rows in (1, 2):
        for place in places(model):
            clock = HandClock(1e-6)
            job = jobs(model, [rows], 3, clock)[0]

            def longer(place, function, clock=clock):
                def later(*args, **kwargs):
                    clock.now += 1.0
                    return function(*args, **kwargs)

                return later

            with wrapped([place], longer):
                job.turns(2, plain_first=True)
            figures = job.figures(FREE, 1e9)
            late = {part: its["ms"] for part, its in figures["parts"].items() if its["ms"] > 500}
            if place.name == "linear":  # what the head calls is its own
                assert late.pop(HEAD) == pytest.approx(1e3, abs=1)
            assert set(late) <= {place.part}
            assert figures["left_over_ms"] == pytest.approx(0, abs=1)
            called |= {(rows, place.name)} if late else set()
    always = {"__call__", "logits", "linear", "write", "attend"}
    always |= {"add_layer_norm", "layer_norm"} if name == "gpt2" else {"rms_norm", "add_rms_norm"}
    always |= {"activation"} if name in ("gpt2", "gelu") else {"silu_mul"}
    always |= set() if name == "gpt2" else {"rope", "at"}
    around = {1: {"draw"}, 2: {"sample", "sampling_rows", "schedule", "commit"}}
    assert called == {(rows, name) for rows in (1, 2) for name in always | around[rows]}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_places_are_put_back(name):
    model = random_model(CONFIGS[name])
    before = [vars(place.owner)[place.name] for place in places(model)]
    job = jobs(model, [2])[0]
    job.turns(3, plain_first=True)
    assert [vars(place.owner)[place.name] for place in places(model)] == before


def test_an_op_that_nobody_has_heard_of_is_a_part_of_the_model(monkeypatch):
    from spindle.model import llama

    def fused(x):
        return x

    monkeypatch.setattr(kernels, "fused", fused, raising=False)
    monkeypatch.setattr(llama, "fused", fused, raising=False)
    found = places(random_model(CONFIGS["llama"]))
    assert [place.part for place in found if place.name == "fused"] == ["fused"]
    assert "fused" not in OUTSIDE


def counted(model, rows, context=5, new=4) -> Tally:
    """What a turn of a greedy job moves."""
    job = jobs(model, [rows], new, context=context)[0]
    job.timed.count(job.begin(), new - 1)
    return job.timed.tally


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_the_models_own_count_however_many_rows(name):
    """Bytes of R rows are weights + R activations: two counts give both."""
    model, steps_of_a_turn = random_model(CONFIGS[name]), 3
    read = []
    for rows in (1, 3):
        moved = counted(model, rows).bytes
        read.append(sum(moved[part] for part in (LINEARS, HEAD, NORMS)) / steps_of_a_turn)
    weights = (3 * read[0] - read[1]) / 2
    assert weights == bytes_per_token(model.config, model.dtype)


def test_bytes_of_a_weight_in_each_form():
    """17 outputs of 5: panels have room for 32, which need not be read."""
    plain, bias = torch.randn(17, 5), torch.zeros(17)
    assert kernels.Weight((17, 5), plain=plain).nbytes == 4 * 85
    assert kernels.pack(plain, bias).nbytes == 4 * 85 + 4 * 17
    assert kernels.pack(plain, bias, "int8").nbytes == 85 + 4 * 17 + 4 * 17


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "untied"])
def test_bytes_of_each_part_by_arithmetic(name, rows):
    """Each token is written once, read once; keys and values of 6, 7, 8 tokens are read."""
    c = CONFIGS[name]
    E, F, V, L = c.width, c.mlp_width, c.vocab_size, c.num_layers
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    products = [(E, q + 2 * kv), (q, E), (E, 2 * F), (F, E)]
    biases = (q + 2 * kv + E) if name == "untied" else 0
    numbers = {
        LINEARS: L * (sum(n * m + rows * (n + m) for n, m in products) + biases),
        HEAD: V * E + rows * (E + V),
        ATTENTION: L * rows * (2 * q + 2 * kv * 7),
        parts.WRITES: L * rows * 4 * kv,
        NORMS: rows * 2 * E + E + 2 * L * (rows * 4 * E + E),
        parts.ACTIVATION: L * rows * 3 * F,
    }
    moved = counted(random_model(c), rows).bytes
    assert {part: moved[part] / 3 for part in numbers} == {p: 4 * n for p, n in numbers.items()}
    turned = L * rows * (2 * (q + kv) + c.head_dim) + rows * 2 * c.head_dim
    assert moved[parts.ROPE] / 3 == 4 * turned + 8 * rows  # and the positions


def test_keys_and_values_are_those_that_latency_counts():
    model = random_model(CONFIGS["llama"])
    c = model.config
    moved = counted(model, 1, context=9, new=6).bytes[ATTENTION] / 5
    queries = 2 * c.num_layers * c.num_heads * c.head_dim * 4  # and what is made of them
    assert moved - queries == latency.token_bytes(model, 9, 6)["kv"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_operations_of_a_prefill_by_arithmetic(name):
    model, T = random_model(CONFIGS[name]), 11
    c = model.config
    prefill = Prefill(model, list(range(T)), HandClock(1.0))
    prefill.turns(plain_first=True)
    figures = prefill.figures(FREE, 1e9)["parts"]
    weights = [w for layer in model.layers for w in vars(layer).values()]
    sizes = [w.shape[0] * w.shape[1] for w in weights if isinstance(w, kernels.Weight)]
    products = 2 * T * sum(sizes) + 2 * c.vocab_size * c.width  # logits of the last token alone
    pairs = T * (T + 1) // 2  # a query and a key that it sees
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * pairs
    assert figures["linears and head"]["gflop"] == pytest.approx(products / 1e9)
    assert figures["attention"]["gflop"] == pytest.approx(attention / 1e9)
    whole = figures["the prefill"]
    assert whole["gflop"] == pytest.approx((products + attention) / 1e9)
    assert whole["gflop_s"] == pytest.approx(whole["gflop"] / whole["ms"] * 1e3)
    assert whole["of_matrix_speed"] == pytest.approx(whole["gflop_s"] * 1e9 / 1e9)
    three = [figures[part]["ms"] for part in ("linears and head", "attention", "all else")]
    assert sum(three) == pytest.approx(whole["ms"])


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_parts_and_what_is_left_over_are_the_step(name, rows):
    """Whatever the clock says; and calls are as many as the layers ask for."""
    model = random_model(CONFIGS[name])
    job = jobs(model, [rows], 4, HandClock(1.0))[1]
    for n in range(3):
        job.turns(3, plain_first=n == 1)
    figures = job.figures(FREE, 1e9)
    its, L = figures["parts"], model.config.num_layers
    total = sum(part["ms"] for part in its.values()) + figures["left_over_ms"]
    assert total == pytest.approx(figures["step_ms"])
    assert sum(part["ms"] for part in its.values()) == pytest.approx(figures["in_parts_ms"])
    shares = sum(part["share"] for part in its.values())
    assert shares == pytest.approx(1 - figures["left_over_ms"] / figures["step_ms"])
    outside = sum(its[part]["share"] for part in OUTSIDE if part in its)
    assert figures["outside_share"] == pytest.approx(outside)
    assert its[LINEARS]["calls"] == 4 * L and its[NORMS]["calls"] == 2 * L + 1
    assert its[ATTENTION]["calls"] == its[parts.WRITES]["calls"] == L
    assert its[HEAD]["calls"] == its[REST]["calls"] == 1
    assert (parts.SCHEDULER in its) == (rows > 1)
    assert list(its) == [part for part in PARTS if part in its]
    for part in its.values():
        if part["bytes"] is not None:
            assert part["gb_s"] == pytest.approx(part["bytes"] / part["ms"] / 1e6)
            assert part["of_read_speed"] == pytest.approx(part["gb_s"])


@needs_native
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_parts_of_a_replayed_step_are_the_step_too(name, rows):
    """C++ times its own calls; bytes are those of a step that is run."""
    model = random_model(CONFIGS[name])
    run, replayed = (
        jobs(model, [rows], 4, HandClock(1.0), recorded=recorded)[1] for recorded in (False, True)
    )
    for n in range(3):
        for job in (run, replayed):
            job.turns(3, plain_first=n == 1)
    right, figures = (job.figures(FREE, 1e9) for job in (run, replayed))
    its, L = figures["parts"], model.config.num_layers
    total = sum(part["ms"] for part in its.values()) + figures["left_over_ms"]
    assert total == pytest.approx(figures["step_ms"])
    assert its[LINEARS]["calls"] == 4 * L and its[NORMS]["calls"] == 2 * L + 1
    assert its[ATTENTION]["calls"] == its[parts.WRITES]["calls"] / 2 == L
    assert its[parts.ACTIVATION]["calls"] == L and its[HEAD]["calls"] == its[REST]["calls"] == 1
    assert all(0 < its[part]["ms"] < 100 for part in (LINEARS, NORMS, ATTENTION, HEAD))
    for part in right["parts"]:
        assert its[part]["bytes"] == right["parts"][part]["bytes"], part


def test_the_last_product_is_the_head():
    timed = [("linear", 1.0), ("rope", 2.0), ("aten.add.Tensor", 3.0), ("int8_linear", 4.0)]
    timed += [("write_kv", 5.0), ("paged_attend", 6.0)]
    found = [LINEARS, parts.ROPE, parts.OTHER, HEAD, parts.WRITES, ATTENTION]
    assert parts.replayed(timed) == [(part, n + 1.0) for n, part in enumerate(found)]
    assert parts.replayed([]) == []


def test_what_another_clock_has_timed_is_noted_once():
    clock = HandClock()
    spans = Spans(clock)

    class Here:
        def box():
            clock.now += 10
            spans.note("n", 7)

    with wrapped([Place(Here, "box", "b", False)], spans.wrap):
        Here.box()
    assert spans.take() == {"b": Noted(3, 1, 0), "n": Noted(7, 1, 0, 1)}
    assert Noted(7, 1, 0, 1).corrected(CallCost(1, 1)) == 7


def test_what_timing_took_is_nobodys():
    clock = HandClock()
    spans = Spans(clock)

    class Here:
        def box():
            clock.now += 10
            spans.leave_out(4)

    with wrapped([Place(Here, "box", "b", False)], spans.wrap):
        Here.box()
    assert spans.take() == {"b": Noted(6, 1, 0)}


def test_a_step_is_the_middle_of_its_turns_and_the_mean_of_its_kind():
    """Two steps, five turns: of each the fastest and the slowest turn fall out."""
    turns = [[1.0, 20.0], [99.0, 10.0], [2.0, 10.0], [3.0, 99.0], [0.0, 0.0]]
    assert steps.typical(turns) == pytest.approx((2.0 + 40 / 3) / 2 * 1e3)
    assert steps.typical([[4.0], [9.0], [5.0]]) == pytest.approx(5e3)
    assert steps.typical([[4.0, 6.0]]) == pytest.approx(5e3)
    assert steps.middle([3, 1, 2, 9, 7, 8, 0], float) == [2, 3, 7]


def test_the_parts_are_those_of_the_turns_that_were_kept():
    """A turn in which one part was held up is left out with all of its parts."""
    timed = steps.Timed(random_model(CONFIGS["gpt2"]), HandClock())
    for fast, slow in ((1.0, 2.0), (2.0, 1.0), (1.0, 50.0)):
        timed.noted.append([{LINEARS: Noted(fast, 1), REST: Noted(slow, 1, 1)}])
    assert timed.part_ms(FREE) == {LINEARS: 2e3, REST: 1e3}, "of equal ones the later"
    assert timed.part_ms(CallCost(0.25, 0.5)) == {LINEARS: 1750, REST: 250}


@pytest.mark.parametrize("kind", ["job", "prefill"])
def test_whole_and_in_parts_take_turns(kind, monkeypatch):
    order, model = [], random_model(CONFIGS["gpt2"])
    for name in ("count", "time", "time_parts"):

        def note(self, step, count, name=name):
            order.append((name, count))
            self.tallied += name == "count"

        monkeypatch.setattr(steps.Timed, name, note)
    some = (3,) if kind == "job" else ()
    timed = jobs(model, [1])[0] if kind == "job" else Prefill(model, [1, 2], HandClock())
    timed.turns(*some, plain_first=True)
    timed.turns(*some, plain_first=False)
    count = 3 if kind == "job" else 1
    names = ["count", "time", "time_parts", "time_parts", "time"]
    assert order == [(name, count) for name in names]


def test_a_profile_has_every_kind_of_step_and_the_bound_of_its_first_rows():
    config = CONFIGS["llama"]
    result = profile.profile(*both(config), None, [2, 1], 7, 4, 1, HandClock(1.0))
    kinds = [(job["rows"], job["sampling"]) for job in result["steps"]]
    assert kinds == [(2, "greedy"), (2, "sampled"), (1, "greedy"), (1, "sampled")]
    fall = result["waterfall"]
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert fall["rows"] == 2 and fall["bytes"]["kv"] == 2 * each * 9, "8, 9 and 10 tokens"
    assert result["prefill"]["tokens"] == 7 and result["settings"]["prefill"] == 7
    whole = profile.profile(*both(config), None, [1], None, 4, 1, HandClock(1.0))
    settings = whole["settings"]
    assert (settings["context"], settings["prefill"]) == (60, 64), "as many as it has positions for"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("which", [0, 1])
def test_timed_steps_give_the_tokens_that_they_would_give(rows, which):
    model = random_model(CONFIGS["llama"])
    job = jobs(model, [rows], 6)[which]
    runs = []

    def keep(step):
        got = step()
        ids = [got] if rows == 1 else [list(one.outputs[0].token_ids) for one in got]
        runs[-1].append(ids)

    for time in (job.timed.count, job.timed.time, job.timed.time_parts, job.timed.time):
        runs.append([])
        step = job.begin()
        time(lambda step=step: keep(step), 5)
    assert runs[0] == runs[1] == runs[2] == runs[3] and len(runs[0]) == 5
    greedy, sampled = (job.params(0) for job in jobs(model, [rows], 6))
    assert greedy.temperature == 0 and sampled.temperature > 0 and sampled.top_p < 1


def test_text_is_a_part_where_there_is_a_tokenizer():
    directory = hub.resolve("tiny")
    tokenizer, model = Tokenizer(directory), random_model(shapes.gpt2(vocab_size=4096))
    prompts = profile.prompts_of(tokenizer, model.config, 2, 6)
    assert "".join(map(tokenizer.decode, prompts)) in profile._english()
    for job in steps.jobs(model, tokenizer, prompts, [1, 2], 3, HandClock(1.0)):
        job.turns(2, plain_first=True)
        assert job.figures(FREE, 1e9)["parts"][parts.TEXT]["calls"] >= len(job.prompts)


def test_prompts_are_as_long_as_asked_for_and_the_same_again():
    config, tokenizer = shapes.gpt2(), Tokenizer(hub.resolve("tiny"))
    for of in (None, tokenizer):
        prompts = profile.prompts_of(of, config, 3, 10)
        assert [len(ids) for ids in prompts] == [10] * 3
        assert prompts == profile.prompts_of(of, config, 3, 10) and prompts[0] != prompts[1]
    assert max(max(ids) for ids in profile.prompts_of(None, config, 3, 99)) < config.vocab_size
    long = profile.prompts_of(tokenizer, config, 2, 200_000)
    assert [len(ids) for ids in long] == [200_000] * 2, "the text begins anew"


# --- levers --------------------------------------------------------------------------------------


def used(names: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ops whose twin a step of llama calls where these levers are on."""
    called, prompt = set(), [[5, 81, 17]]

    def spy(name):
        twin = getattr(twins, name)

        def call(*given):
            called.add(name)
            return twin(*given)

        return call

    with monkeypatch.context() as patch:
        for name in ops.SCHEMAS:
            patch.setattr(twins, name, spy(name))
        with levers_on(names):
            engine = levers._engine(random_model(CONFIGS["llama"]), prompt, 4)
            tokens = engine.begin(prompt, latency.GREEDY)
            called.clear()
            engine.step(tokens)
    return called


@needs_native
@pytest.mark.parametrize("on", [[], *([name] for name in ops.SCHEMAS), ["rope", "paged_attend"]])
def test_ops_are_plain_but_for_those_that_are_on(on, monkeypatch):
    """Without its lever attention is no op at all: it goes over all slots, with a mask."""
    plain = {"linear", "rms_norm", "add_rms_norm", "rope", "silu_mul", "write_kv"}
    inside = set() if "add_rms_norm" in on else {"rms_norm"}  # the twin of one calls the other's
    assert used(on, monkeypatch) == plain - set(on) | inside


@needs_native
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_stage_gives_the_same_tokens(name, rows):
    prompts = profile.prompts_of(None, CONFIGS[name], rows, 6)
    found, gaps = levers.stages(*both(CONFIGS[name]), prompts, 12)
    result = levers.compare(found, 11, 2, clock=HandClock())
    assert [its["same_tokens"] for its in result] == [True] * len(found)
    ids = found[0].token_ids
    assert len(ids) == 11 and {len(row) for row in ids} == {rows}
    assert all(stage.engine.lengths == [6 + 11] * rows for stage in found)
    assert all(len(stage.seconds) == 2 and len(stage.seconds[0]) == 11 for stage in found)
    there = {"llama": 5, "untied": 5, "qwen3": 5, "gelu": 4, "gpt2": 4}[name]
    assert len(found) == 3 + there and len(gaps) == len(LEVERS) - there
    assert [stage.engine.recorded for stage in found] == [False] * (2 + there) + [True]
    assert set(gaps.values()) <= {"no step of this model calls it"}
    in_place = [stage.engine._last.view._in_place for stage in found]
    assert in_place == [False] * there + [True] * 3, "the last lever, and the engine as it is"
    forms = [levers.first_weight(stage.engine.model).panels is not None for stage in found]
    assert forms == [False] + [True] * (there + 2)


@needs_native
def test_levers_are_undone_after_an_error_too():
    def state():
        forms = [getattr(kernels, f"_{name}") for name in ops.SCHEMAS]
        return [*forms, kernels.attends_in_place, native.available, packed._has_onednn]

    before = state()
    with pytest.raises(ZeroDivisionError), levers_on(["rope"]):
        assert state() != before
        assert kernels._rope is before[list(ops.SCHEMAS).index("rope")]
        assert kernels._silu_mul is twins.silu_mul
        raise ZeroDivisionError
    assert state() == before
    found, _ = levers.stages(*both(CONFIGS["llama"]), [[1, 2, 3]], 4)
    levers.compare(found, 3, 2)
    assert state() == before


def test_without_native_code_every_lever_is_a_gap_with_a_reason(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(packed, "_has_onednn", lambda: False)
    monkeypatch.setattr(build, "why_not", lambda name: "SPINDLE_NO_EXT=1 is set")
    found, gaps = levers.stages(*both(CONFIGS["llama"]), [[1, 2, 3]], 4)
    assert [stage.name for stage in found] == [PLAIN, FULL]
    assert list(gaps) == [*(lever.name for lever in LEVERS), REPLAYED]
    assert all("SPINDLE_NO_EXT=1 is set" in why for why in gaps.values())
    result = levers.compare(found, 3, 1)
    assert all(its["same_tokens"] for its in result)
    text = levers.table({"stages": result, "bound_ms": 1.0, "gaps": gaps})
    for name, why in gaps.items():
        assert f"No stage for {name}: {why}." in text


@pytest.mark.skipif(not packed._has_onednn(), reason="no oneDNN")
def test_without_native_code_weights_may_still_be_laid_out(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    found, gaps = levers.stages(*both(CONFIGS["gpt2"]), [[1, 2, 3]], 4)
    assert [stage.name for stage in found] == [PLAIN, "weights in blocks", FULL]
    assert len(gaps) == len(LEVERS)
    assert all(its["same_tokens"] for its in levers.compare(found, 3, 1))


def test_stages_take_turns_there_and_back_and_gains_add_up(monkeypatch):
    found, _ = levers.stages(*both(CONFIGS["gpt2"]), [[1, 2, 3]], 4)
    order, clock = [], HandClock()
    costs = dict(
        zip([stage.name for stage in found], (8.0, 5.0, 6.0, 3.0, 2.5, 2.0, 1.5), strict=True)
    )

    def turn(self, count, clock):
        order.append(self.name)
        self.seconds.append([costs[self.name]] * count)
        self.token_ids = [[1], [2]] if self.name == REPLAYED else [[1], [1]]

    monkeypatch.setattr(levers.Stage, "turn", turn)
    result = levers.compare(found, 2, 3, lambda: order.append("read"), clock)
    names = [stage.name for stage in found]
    assert order == ["read", *names, "read", *names[::-1], "read", *names]
    assert [its["step_ms"] for its in result] == [costs[name] * 1e3 for name in names]
    gained = sum(its["gained_ms"] for its in result)
    assert gained == pytest.approx(result[0]["step_ms"] - result[-1]["step_ms"])
    assert result[0]["gained_ms"] == 0
    assert [its["same_tokens"] for its in result] == [True] * (len(found) - 1) + [False]
    text = levers.table({"stages": result, "bound_ms": 1.0, "gaps": {}})
    assert text.count("| NO |") == 1


# --- the figure ----------------------------------------------------------------------------------

FALL = {
    "stages": [
        {"stage": "plain", "step_ms": 50.0, "gained_ms": 0.0, "same_tokens": True},
        {"stage": "panels", "step_ms": 30.0, "gained_ms": 20.0, "same_tokens": True},
        {"stage": "norms", "step_ms": 31.0, "gained_ms": -1.0, "same_tokens": True},
        {"stage": "rest", "step_ms": 24.0, "gained_ms": 7.0, "same_tokens": True},
    ],
    "bound_ms": 18.5,
    "gaps": {},
}


def test_the_waterfall_falls_from_each_stage_to_the_next_and_the_bound_comes_first():
    ax = levers.draw(FALL).axes[0]
    bars = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    spans = {round(p.get_y() + 0.32): (p.get_x(), p.get_x() + p.get_width()) for p in bars}
    expected = [(0, 50), (30, 50), (30, 31), (24, 31), (0, 24), (0, 18.5)]
    assert [spans[line] for line in range(6)] == [pytest.approx(span) for span in expected]
    assert bars[0].get_width() == 18.5, "the prediction is drawn first"
    assert ax.lines[0].get_label() == "bound" and set(ax.lines[0].get_xdata()) == {18.5}
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["plain", "panels", "norms", "rest", "this engine", "the bound"]
    said = [text.get_text() for text in ax.texts]
    assert sorted(said) == sorted(["18.5", "50", "−20", "+1", "−7", "24"])
    colours = {round(p.get_y() + 0.32): matplotlib.colors.to_hex(p.get_facecolor()) for p in bars}
    assert colours[1].upper() == plots.COLOURS["measured"] != colours[2].upper()
    assert ax.get_xlim()[1] > 50 and ax.get_xlabel() == "ms a step"
    title = " ".join(ax.figure.get_suptitle().split())
    assert title == (
        "From 50 ms a step to 24, where memory allows 18.5; the largest lever: panels, 20 ms"
    )


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict, str, str, Path]:
    """What the command writes and prints for the bundled model, and the figure that it draws."""
    folder = tmp_path_factory.mktemp("profile")
    file, figure = folder / "profile.json", folder / "fall.png"
    options = ["--rows", "1", "2", "--context", "20", "--new", "4", "--repeat", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "READ_BYTES", 2**20)
        patch.setattr(profile, "MATRICES", (16, 32))
        from contextlib import redirect_stderr, redirect_stdout
        from io import StringIO

        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            command = ["bench", "profile", "-m", "tiny", *options]
            assert cli.main([*command, "--json", str(file), "--plot", str(figure)]) == 0
    return json.loads(file.read_text()), out.getvalue(), err.getvalue(), figure


def test_the_command_prints_what_it_writes(said):
    written, out, err, figure = said
    assert err == "", "a bar is for a terminal"
    settings = {"model": "tiny", "rows": [1, 2], "context": 20, "new": 4, "repeat": 2}
    assert written["settings"] == settings | {"prefill": 20}
    assert figure.read_bytes().startswith(b"\x89PNG")
    kinds = [(job["rows"], job["through"], job["sampling"]) for job in written["steps"]]
    assert kinds == [
        (rows, through, sampling)
        for rows, through in ((1, "Engine"), (2, "LLM"))
        for sampling in ("greedy", "sampled")
    ]
    for job in written["steps"]:
        for name, part in job["parts"].items():
            line = f"| {name} | {part['ms']:.3f} | {part['share']:.1%} | {part['calls']:.4g} | "
            assert line in out
            if part["bytes"]:
                end = f"{part['bytes'] / 1e6:,.3f} | {part['gb_s']:.2f} | "
                assert f"{line}{end}{part['of_read_speed']:.0%} |" in out
        assert f"| left over | {job['left_over_ms']:.3f} | " in out
        assert f"| the step, timed whole | {job['step_ms']:.3f} | 100.0% |" in out
        assert f"Outside the model: {job['outside_share']:.1%}." in out
        total = sum(part["ms"] for part in job["parts"].values()) + job["left_over_ms"]
        assert total == pytest.approx(job["step_ms"])


def test_the_command_prints_the_waterfall_and_the_prefill(said):
    written, out, _, _ = said
    fall = written["waterfall"]
    for its in fall["stages"]:
        assert f"{its['stage']} | {its['step_ms']:.3f} | " in out and its["same_tokens"]
    assert f"| the bound | {fall['bound_ms']:.3f} | " in out
    sizes, config = fall["bytes"], ModelConfig.from_directory(hub.resolve("tiny"))
    assert sizes["weights"] == bytes_per_token(config, torch.float32)
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert sizes["kv"] == each * (2 * 20 + 4) // 2
    bound_s = sum(sizes.values()) / written["read_gb_s"] / 1e9
    assert fall["bound_ms"] == pytest.approx(bound_s * 1e3)
    assert len(fall["gaps"]) + len(fall["stages"]) == len(LEVERS) + 3
    for name, part in written["prefill"]["parts"].items():
        assert f"| {name} | {part['ms']:.3f} | " in out
    assert f"A prompt of {written['prefill']['tokens']} tokens" in out
    assert written["machine"]["device"] == "cpu" and written["matrix_gflop_s"] > 0


def test_without_native_code_the_command_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(packed, "_has_onednn", lambda: False)
    options = ["--rows", "2", "--context", "8", "--new", "2", "--repeat", "1"]
    assert cli.main(["bench", "profile", *options]) == 0
    out = capsys.readouterr().out
    assert out.count("No stage for ") == len(LEVERS) + 1
    assert "From the plain step to the bound, 2 rows, greedy, through Engine:" in out


def test_above_the_read_speed_is_explained():
    def result(share):
        return {"steps": [{"parts": {"a": {"of_read_speed": share}, "b": {"of_read_speed": None}}}]}

    assert profile._above(result(1.0)) == []
    assert profile._above(result(1.01))[0].startswith("Above 100% of the read speed: ")


def test_the_machine_is_asked_between_the_turns(monkeypatch):
    rates, asked = iter([3e9, 1e9, 2e9]), []
    monkeypatch.setattr(machine, "read_bytes_per_s", lambda buffer, repeats: next(rates))
    monkeypatch.setattr(
        machine, "flops_per_s", lambda size, repeats: asked.append(size) or size * len(asked)
    )
    here = profile.Machine()
    for _ in range(3):
        here.read()
        here.multiply()
    assert here.read_bytes_per_s == 2e9
    assert asked == [16, 32] * 3 and here.flops_per_s == 32 * 4, "the median of the faster size"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "0"], "--rows 0: expected 1 to 256"),
        (["--rows", "8", "8"], "--rows 8 8: expected each number once"),
        (["--new", "1"], "--new 1: expected 2 to 511"),
        (["--new", "512"], "--new 512: expected 2 to 511"),
        (["--repeat", "0"], "--repeat 0: expected 1 or more"),
        (["--context", "0"], "--context 0: expected 1 to 496"),
        (["--context", "500", "--new", "13"], "--context 500: expected 1 to 499"),
        (["--json", "/no/such/folder/x.json"], "there is no directory"),
        (["--plot", "/no/such/folder/x.png"], "expected a file in a directory that is there"),
        (["--plot", "x.txt"], "--plot x.txt: expected a name that ends in .png"),
        (["-m", "no-such-model-here"], "no-such-model-here"),
    ],
)
def test_the_command_refuses_before_it_measures(options, words, capsys, monkeypatch):
    monkeypatch.setattr(profile, "profile", None)
    assert cli.main(["bench", "profile", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith("spindle: error: ")


def test_the_emulator_is_not_measured_and_a_figure_needs_matplotlib(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(emulate, "enabled", lambda: True)
        assert cli.main(["bench", "profile"]) == 2
    assert "SPINDLE_EMULATE=1" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "profile", "--plot", "x.png"]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err
