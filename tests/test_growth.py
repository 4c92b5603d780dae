"""Growth: points do the work that they say, predictions are by arithmetic, and fits are exact."""

import json
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("agg")

import psutil
import pytest
import shapes
import torch
from clocks import HandClock
from hypothesis import given
from hypothesis import strategies as st

from spindle import LLM, cli
from spindle.bench import (
    growth,
    growth_figure,
    growth_memory,
    growth_tables,
    latency,
    machine,
    profile,
)
from spindle.bench.growth import DEFAULTS, Settings, points, timed
from spindle.bench.growth_fit import fit, off_line, power, share
from spindle.bench.growth_points import (
    BatchPoint,
    DecodePoint,
    Here,
    PrefillPoint,
    Work,
    attention_work,
    prefill_work,
    step_work,
)
from spindle.bench.parts import ATTENTION, HEAD, LINEARS
from spindle.bench.peers.jobs import bytes_per_token
from spindle.bench.spans import CallCost
from spindle.bench.steps import Timed
from spindle.decode.engine import Engine
from spindle.errors import RequestError
from spindle.kernels import emulate
from spindle.model.weights import random_model

CONFIGS = {
    "llama": shapes.llama(),
    "untied": shapes.llama(tie_word_embeddings=False, attention_bias=True),
    "gpt2": shapes.gpt2(),
}
HERE = Here(1e9, 1e9, CallCost(0.0, 0.0))


pytestmark = pytest.mark.usefixtures("small_machine")


def settings(config, **given) -> Settings:
    """Of all parts, and small."""
    sizes = {"contexts": [8, 20, 33], "batches": [1, 2, 5], "lengths": [3, 9, 20]}
    sizes |= {"tokens": [10, 40, 100], "new": 4, "repeat": 3}
    return Settings.of(config, **(sizes | given))


# --- what arithmetic predicts -------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_steps_work_is_what_its_calls_are_counted_to_do(name, rows):
    """Three steps see 6, 7 and 8 tokens: on average 7."""
    model = random_model(CONFIGS[name])
    engine, timed_calls = Engine(model, rows=rows), Timed(model, HandClock(1.0))
    tokens = engine.begin([[1, 2, 3, 4, 5]] * rows, latency.GREEDY)
    timed_calls.count(lambda: engine.step(tokens), 3)
    flops = timed_calls.tally.flops
    work = step_work(model, rows, 7)
    assert 3 * work.flops == sum(flops[part] for part in (LINEARS, HEAD, ATTENTION))
    kv = rows * latency.token_bytes(model, 5, 4)["kv"]
    assert work.bytes == bytes_per_token(model.config, model.dtype) + kv


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefills_work_is_what_its_calls_are_counted_to_do(name, chunk):
    model = random_model(CONFIGS[name])
    engine, timed_calls = Engine(model, 11, chunk), Timed(model, HandClock(1.0))
    timed_calls.count(lambda: engine.prefill(range(11)), 1)
    flops = timed_calls.tally.flops
    work = prefill_work(model, 11, chunk)
    assert work.flops == sum(flops[part] for part in (LINEARS, HEAD, ATTENTION))
    assert attention_work(model, 11).flops == flops[ATTENTION]


def test_each_chunk_of_a_prompt_reads_the_layers_and_what_is_there_by_then():
    """11 tokens by 4: three chunks, which see 4, 8 and 11 keys; the head is read once."""
    c = CONFIGS["llama"]
    model = random_model(c)
    weights, head = bytes_per_token(c, model.dtype), 4 * c.vocab_size * c.width
    key_value = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    expected = 3 * (weights - head) + head + (4 + 8 + 11) * key_value
    assert prefill_work(model, 11, 4).bytes == expected


def test_attention_alone_is_quadratic():
    model = random_model(CONFIGS["llama"])
    sizes = [1, 10, 100, 1000]
    whole = [prefill_work(model, n, 10**6).flops for n in sizes]
    attention = [attention_work(model, n).flops for n in sizes]
    rest = [a - b for a, b in zip(whole, attention, strict=True)]
    assert share(sizes, rest) == pytest.approx(0, abs=1e-9)
    assert share(sizes, attention) == pytest.approx(1000 / 1001)


def test_the_larger_bill_is_predicted():
    fetch, multiply = Work(bytes=6e6, flops=1e6), Work(bytes=6e6, flops=20e6)
    speeds = (3e9, 5e9)  # bytes and operations a second
    assert fetch.predicted_ms(*speeds) == pytest.approx(2) and fetch.bound_by(*speeds) == "memory"
    assert multiply.predicted_ms(*speeds) == pytest.approx(4)
    assert multiply.bound_by(*speeds) == "arithmetic"


# --- the points ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("context", [4, 64])
def test_every_turn_fills_the_context_with_the_same_tokens(name, context):
    """The last step sees as many tokens as the context has, also where the model has no more."""
    model, ids = random_model(CONFIGS[name]), list(range(context))
    point = DecodePoint(model, ids, 4, HandClock(1.0))
    right, _ = Engine(model).generate(ids[: context - 3], 4, temperature=0, ignore_eos=True)
    for _ in range(3):
        point.turn()
        assert point._stage.engine.lengths == [context]
        made = [token for (token,) in point._stage.token_ids]
        assert len(made) == 3 and made[: len(right) - 1] == right[1:]
    figures = point.figures(HERE)
    assert figures["ms"] == pytest.approx(1e3), "a step is between two readings of the clock"
    assert figures["turns_ms"] == pytest.approx([1e3] * 3)
    assert figures["ratio"] == pytest.approx(1e3 / figures["predicted_ms"])
    each = model.config.kv_bytes(model.dtype.itemsize)
    seen = sum(range(context - 2, context + 1)) / 3
    weights = bytes_per_token(model.config, model.dtype)
    assert figures["bytes"] == pytest.approx(weights + seen * each)


def test_every_timed_step_of_a_batch_gives_each_row_a_token_at_the_same_length():
    model, clock = random_model(CONFIGS["llama"]), HandClock(1.0)
    llm = LLM(model, max_seqs=3, trace=99)
    prompts = profile.prompts_of(None, model.config, 3, 20)
    point = BatchPoint(llm, prompts, 4, clock)
    llm.trace.clear()
    for _ in range(2):
        point.turn()
    assert not llm.has_unfinished and len(llm.trace) == 2 * 4
    for turn in (list(llm.trace)[:4], list(llm.trace)[4:]):
        ends = [[chunk.start + chunk.count for chunk in plan.chunks] for plan in turn]
        assert ends == [[length] * 3 for length in (17, 18, 19, 20)]
        assert {chunk.count for plan in turn[1:] for chunk in plan.chunks} == {1}
    figures = point.figures(HERE)
    assert figures["rows"] == 3 and figures["ms"] == pytest.approx(1e3)
    assert figures["tok_s"] == pytest.approx(3) and figures["turns_ms"] == [1e3, 1e3]
    assert (figures["bytes"], figures["flop"]) == step_work(model, 3, 19)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefill_is_attention_and_all_else(name):
    model, ids = random_model(CONFIGS[name]), [5, 6, 7, 8, 9]
    engine = Engine(model)
    point = PrefillPoint(engine, ids, HandClock(1.0))
    for _ in range(3):
        point.turn()
        assert engine.length == 5
    figures = point.figures(HERE)
    layers = model.config.num_layers
    assert figures["attention"]["ms"] == pytest.approx(layers * 1e3), "a call a layer"
    parts = [figures[part] for part in ("attention", "rest")]
    for key in ("ms", "flop"):
        assert sum(part[key] for part in parts) == pytest.approx(figures[key])
    assert figures["tok_s"] == pytest.approx(5 / figures["ms"] * 1e3)
    assert figures["attention"]["bytes"] == 0 and parts[1]["bytes"] == figures["bytes"]
    less = point.figures(HERE._replace(cost=CallCost(0.25, 0.0)))
    assert less["attention"]["ms"] == pytest.approx(layers * 750), "what timing costs is taken off"


def test_points_are_those_of_the_parts_in_their_order():
    config = CONFIGS["llama"]
    model, given_ = random_model(config), settings(config)
    made = list(points(model, None, given_, HandClock(1.0)))
    assert [point.part for point in made] == ["decode"] * 3 + ["batch"] * 3 + ["prefill"] * 3
    assert growth._count(given_) == len(made)
    one = settings(config, parts=["batch"])
    made = list(points(model, None, one, HandClock(1.0)))
    assert [point.part for point in made] == ["batch"] * 3 and growth._count(one) == 3


def test_points_take_turns_there_and_back_and_speeds_are_asked_for_before_each_round(monkeypatch):
    order = []

    def fake(name, rows):
        figures = {"rows": rows, "ms": rows * 2.0, "predicted_ms": rows * 1.0, "turns_ms": [1.0]}
        return SimpleNamespace(
            part="batch", turn=lambda: order.append(name), figures=lambda here: figures
        )

    made = [fake(name, rows) for name, rows in (("a", 1), ("b", 2), ("c", 3))]
    monkeypatch.setattr(growth, "points", lambda *given: iter(made))
    speeds = SimpleNamespace(
        read=lambda: order.append("read"),
        multiply=lambda: order.append("multiply"),
        read_bytes_per_s=2e9,
        flops_per_s=3e9,
    )
    model = random_model(CONFIGS["gpt2"])
    its = settings(model.config, parts=["batch"])
    result = timed(model, None, its, HandClock(1.0), lambda: speeds)
    turns = ["read", "multiply", "a", "b", "c"], ["read", "multiply", "c", "b", "a"]
    assert order == [*turns[0], *turns[1], *turns[0]]
    assert (result["read_gb_s"], result["matrix_gflop_s"]) == (2, 3)
    assert [row["rows"] for row in result["batch"]["points"]] == [1, 2, 3]
    assert result["batch"]["growth"]["linear"] == pytest.approx(6)


# --- memory -------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(1, 600))
def test_lengths_come_to_the_tokens_and_none_is_too_long(tokens, longest):
    lengths = growth_memory.lengths_of(tokens, longest)
    assert sum(lengths) == tokens and min(lengths) >= 1 and max(lengths) <= longest
    assert lengths == growth_memory.lengths_of(tokens, longest)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.data())
def test_spans_store_each_token_once_and_in_order(lengths, data):
    total = sum(lengths)
    points_ = sorted(data.draw(st.sets(st.integers(1, total), max_size=5)) | {total})
    held, last = [0] * len(lengths), 0
    for point, needed in zip(points_, growth_memory.spans(lengths, points_), strict=True):
        for row, start, count in needed:
            assert start == held[row] and count >= 1 and row >= last
            held[row], last = start + count, row
        assert sum(held) == point
    assert held == lengths


@pytest.mark.parametrize("name", growth_memory.CACHES)
def test_what_is_held_is_written_in_all_layers(name):
    """Each token's keys and values, once."""
    config, lengths = CONFIGS["llama"], [21, 16, 3]
    cache = growth_memory.CACHES[name](config, lengths, 30)
    cache._kv.keys.zero_()
    cache._kv.values.zero_()
    cache._new.fill_(1.0)
    for (needed,) in (growth_memory.spans(lengths, [part]) for part in [sum(lengths)]):
        for span in needed:
            cache.hold(span)
    layers = config.num_layers * config.num_kv_heads * config.head_dim
    assert cache._kv.keys.sum() == cache._kv.values.sum() == 40 * layers


def test_memory_by_each_account(monkeypatch):
    """9 tokens, then 40, in sequences of 21, 16 and 3; blocks of 16, rows of 30."""
    config = CONFIGS["llama"]
    monkeypatch.setattr(growth_memory, "lengths_of", lambda tokens, longest: [21, 16, 3])
    monkeypatch.setattr(growth_memory, "LONGEST", 30)
    seen = iter([100, 107, 150, 200, 203, 290])
    result = growth_memory.measure(config, [9, 40], lambda: next(seen))
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert result["token_bytes"] == each
    expected = [
        {"tokens": 9, "predicted_bytes": 9 * each}
        | {"paged_taken_bytes": 16 * each, "paged_resident_bytes": 7}
        | {"static_taken_bytes": 30 * each, "static_resident_bytes": 3},
        {"tokens": 40, "predicted_bytes": 40 * each}
        | {"paged_taken_bytes": (32 + 16 + 16) * each, "paged_resident_bytes": 50}
        | {"static_taken_bytes": 90 * each, "static_resident_bytes": 90},
    ]
    assert result["points"] == expected
    assert result["taken"] == result["resident"] == {"paged": None, "static": None}, "two points"


def test_what_is_written_becomes_resident():
    before = growth_memory.resident_bytes()
    kept = torch.empty(2**26)
    reserved = growth_memory.resident_bytes()
    kept.fill_(1.0)
    assert growth_memory.resident_bytes() - before > 0.9 * kept.nbytes
    assert reserved - before < 0.1 * kept.nbytes


# --- how it grows -------------------------------------------------------------------------------


def test_a_fit_finds_the_terms_of_a_parabola():
    x = [1, 2, 4, 8, 16]
    y = [5 + 3 * n + 0.25 * n * n for n in x]
    assert fit(x, y, 2) == pytest.approx([5, 48, 64])
    assert share(x, y) == pytest.approx(64 / 117)
    line = [5 + 3 * n for n in x]
    assert fit(x, line, 1) == pytest.approx([5, 48])
    assert off_line(x, line) == pytest.approx(0, abs=1e-12)
    assert off_line(x, y) > 0.01
    assert power(x, [n**1.5 for n in x]) == pytest.approx(1.5)


def test_errors_are_shares_of_their_points():
    """The constant that is as far, in shares, from 1 as from 3: not their mean."""
    (constant,) = fit([1, 2], [1, 3], 0)
    assert constant == pytest.approx((1 + 1 / 3) / (1 + 1 / 9))
    assert off_line([1, 2, 3], [2, 2, 2]) == pytest.approx(0, abs=1e-12)


def test_growth_says_how_sure_it_is_by_turns():
    x, line = [1, 2, 4], [2.0, 4.0, 8.0]
    bent = [[n + f * n * n for n in x] for f in (0.0, 0.25, 0.5, 0.75)]
    grown = growth.growth(x, line, line, bent)
    assert grown["quadratic_share"] == pytest.approx(0, abs=1e-9)
    assert grown["share_by_turn"] == pytest.approx([1 / 2, 2 / 3]), "the middle of four"
    assert growth.growth(x, line, bent[1])["predicted_share"] == pytest.approx(1 / 2)
    assert growth.growth(x, line, line)["share_by_turn"] is None
    assert growth.growth([1, 2], [1, 2], [1, 2]) is None


def test_nothing_grows_without_an_error():
    """A process may have no more than before, or less."""
    grown = growth.growth([1, 2, 3], [0, 0, 0], [1, 2, 3])
    assert grown["quadratic_share"] == grown["off_line"] == 0 and grown["power"] != grown["power"]
    assert growth.growth([1, 2, 3], [-4, 0, 9], [1, 2, 3])["off_line"] > 0


def test_a_quadratic_term_is_said_in_words():
    grown = {"quadratic_share": -0.0004, "share_by_turn": [-0.01, 0.02], "predicted_share": 0.4}
    grown |= {"off_line": 0.031, "power": 0.987, "predicted_power": 1.0}
    assert growth_tables.in_words("a step", grown) == (
        "Of a step, 0.0% is the quadratic term, -1.0% to 2.0% by turns (of the predicted line's, "
        "40.0%); a straight line is off by up to 3.1%; between the last two points it grows with "
        "the power 0.99 (1.00)."
    )
    assert growth_tables.in_words("a step", None).startswith("Too few points")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "contexts", "lengths"),
    [
        (48, (48,), (48,)),
        (64, (64,), (64,)),
        (512, (64, 128, 256, 512), (64, 128, 256, 512)),
        (600, (64, 128, 256, 512, 600), (64, 128, 256, 512, 600)),
        (8192, DEFAULTS["contexts"], DEFAULTS["lengths"]),
        (9000, DEFAULTS["contexts"], DEFAULTS["lengths"]),
    ],
)
def test_sizes_go_as_far_as_the_model_has_positions(positions, contexts, lengths):
    its = Settings.of(shapes.llama(max_position_embeddings=positions))
    assert (its.contexts, its.lengths, its.batches) == (contexts, lengths, DEFAULTS["batches"])
    assert its.context == min(64, positions // 2), "then the pool has room for all rows"


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"contexts": [8, 65]}, "--contexts 8 65: expected numbers that rise, from 2 to 64"),
        ({"contexts": [20, 8]}, "--contexts 20 8: expected numbers that rise, from 2 to 64"),
        ({"batches": [0]}, "--batches 0: expected numbers that rise, from 1 to 256"),
        ({"batches": [2, 2]}, "--batches 2 2: expected numbers that rise"),
        ({"batches": [257]}, "--batches 257: expected"),
        ({"lengths": [65]}, "--lengths 65: expected numbers that rise, from 1 to 64"),
        ({"tokens": [0, 5]}, "--tokens 0 5: expected numbers that rise, from 1 on"),
        ({"new": 1}, "--new 1: expected 2 to 8 (tokens of the least context)"),
        ({"new": 33, "contexts": [40]}, "--new 33: expected 2 to 32"),
        ({"new": 9}, "--new 9: expected 2 to 8"),
        ({"repeat": 0}, "--repeat 0: expected 1 or more"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given_, words):
    with pytest.raises(RequestError) as refused:
        settings(CONFIGS["llama"], **given_)
    assert str(refused.value).startswith(words)


def test_more_tokens_than_there_is_memory_for_are_refused(monkeypatch):
    free = SimpleNamespace(available=3 * 100 * CONFIGS["llama"].kv_bytes(4))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    settings(CONFIGS["llama"], tokens=[100])
    with pytest.raises(RequestError, match="--tokens 101: rows for as many take up to"):
        settings(CONFIGS["llama"], tokens=[101])
    settings(CONFIGS["llama"], tokens=[101], parts=["decode"])


def test_the_emulators_times_are_refused(monkeypatch):
    monkeypatch.setattr(emulate, "enabled", lambda: True)
    with pytest.raises(RequestError, match="SPINDLE_EMULATE=1"):
        settings(CONFIGS["llama"])


# --- the command --------------------------------------------------------------------------------

SMALL = ["--contexts", "8", "20", "40", "--batches", "1", "2", "3", "--lengths", "4", "9", "30"]
SMALL += ["--tokens", "50", "200", "700", "--new", "4", "--repeat", "2"]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict, str, str, Path]:
    """What the command writes and prints for the bundled model, and the figure that it draws."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    folder = tmp_path_factory.mktemp("growth")
    file, figure = folder / "growth.json", folder / "growth.png"
    files = ["--json", str(file), "--plot", str(figure)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "READ_BYTES", 2**20)
        patch.setattr(profile, "MATRICES", (16, 32))
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            parts = ["--only", *growth.PARTS]
            assert cli.main(["bench", "scale", *parts, *SMALL, *files]) == 0
    return json.loads(file.read_text()), out.getvalue(), err.getvalue(), figure


def test_the_command_prints_what_it_writes(said):
    written, out, err, figure = said
    assert err == "", "a bar is for a terminal"
    assert figure.read_bytes().startswith(b"\x89PNG")
    its = written["settings"]
    assert (its["model"], its["new"], its["repeat"], its["context"]) == ("tiny", 4, 2, 64)
    for part, size in growth.SIZE.items():
        for point in written[part]["points"]:
            assert f"| {point[size]:,} | " in out
    for part, sizes in (("decode", [8, 20, 40]), ("batch", [1, 2, 3]), ("prefill", [4, 9, 30])):
        rows = written[part]["points"]
        assert [row[growth.SIZE[part]] for row in rows] == sizes
        for row in rows:
            cells = f"| {row['ms']:,.3f} | {row['predicted_ms']:,.3f} | {row['ratio']:.2f} |"
            assert cells in out and len(row["turns_ms"]) == 2
            assert row["ratio"] == pytest.approx(row["ms"] / row["predicted_ms"])
    speeds = written["read_gb_s"] * 1e9, written["matrix_gflop_s"] * 1e9
    for row in (*written["decode"]["points"], *written["batch"]["points"]):
        predicted_ms = Work(row["bytes"], row["flop"]).predicted_ms(*speeds)
        assert row["predicted_ms"] == pytest.approx(predicted_ms)  # speeds went through GB/s


def test_the_command_says_how_each_part_grows(said):
    written, out, _, _ = said
    whats = {"growth": "a step at 40 tokens"}, {"growth": "a step of 3 rows"}
    whats += ({"growth": "a prefill", "attention_growth": "attention", "rest_growth": "all else"},)
    for part, its in zip(("decode", "batch", "prefill"), whats, strict=True):
        for key, what in its.items():
            grown = written[part][key]
            assert f"Of {what}" in out
            assert f" {growth_tables.percent(grown['quadratic_share'])} is the quadratic" in out
            assert f" off by up to {growth_tables.percent(grown['off_line'])};" in out
    memory = written["memory"]
    for name, unit in (("paged", "blocks"), ("static", "rows")):
        for kind, what in (("taken", unit), ("resident", f"what is resident of the {unit}")):
            assert f"Of {what} at 700 tokens, " in out
            grown = memory[kind][name]
            assert f" {growth_tables.percent(grown['quadratic_share'])} is the quadratic" in out


def test_the_figure_has_a_panel_a_part_that_states_what_it_shows(said):
    written, _, _, _ = said
    figure = growth_figure.draw(written)
    claims = [" ".join(ax.get_title(loc="left").split()) for ax in figure.axes]
    first, last = written["decode"]["points"][0], written["decode"]["points"][-1]
    times = last["ms"] / first["ms"]
    assert claims[0].startswith(f"40 tokens of context take {times:.1f} times as long as 8; a")
    assert claims[1].startswith("3 rows take ") and "the power" in claims[1]
    assert claims[2].startswith("30 tokens: attention has ") and "quadratic terms: " in claims[2]
    assert claims[3].startswith("A token takes 9.2 kB, ") and len(claims) == 4
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    predicted = [row["predicted_ms"] for row in written["decode"]["points"]]
    assert list(lines[0].get_ydata()) == predicted
    alone = growth_figure.draw({key: written[key] for key in ("settings", "memory")})
    assert len(alone.axes) == 1


def test_few_points_are_measured_and_not_fitted(capsys, tmp_path):
    options = ["--only", "decode", "memory", "--contexts", "8", "--tokens", "30", "90"]
    figure = tmp_path / "few.svg"
    options += ["--new", "3", "--repeat", "1", "--plot", str(figure)]
    assert cli.main(["bench", "scale", *options]) == 0
    out = capsys.readouterr().out
    assert out.count("Too few points to say how it grows") == 2 and "LLM" not in out
    assert figure.read_text().startswith("<?xml")
