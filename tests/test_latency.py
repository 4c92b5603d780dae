"""Latency: what the corners are, what a token reads, and that the command says what it found."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import shapes
import torch
from torch import Tensor

from spindle import cli, kernels
from spindle.bench import latency, machine
from spindle.bench.latency import Corner, Turn, compare, corners, parting, plain_ops, token_bytes
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.kernels import Weight, build, emulate, native, ops, twins
from spindle.model.weights import random_model

PROMPT = [5, 81, 17, 3]
needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)


def llama(**changes):
    return random_model(shapes.llama(**changes))


# --- plain ops -----------------------------------------------------------------------------------


def calls(x: Tensor) -> dict[str, object]:
    """An op by name, and a call of it."""
    cache, one, heads = x.view(4, 4, 1, 4), torch.tensor([[0, 1]]), x.view(16, 1, 4)
    angles = x.view(16, 4)[:, :2]
    return {
        "rms_norm": lambda: kernels.rms_norm(x, x[0], 1e-5),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, x.clone(), x[0], 1e-5),
        "silu_mul": lambda: kernels.silu_mul(x),
        "layer_norm": lambda: kernels.layer_norm(x, x[0], x[1], 1e-5),
        "add_layer_norm": lambda: kernels.add_layer_norm(x, x.clone(), x[0], x[1], 1e-5),
        "gelu_tanh": lambda: kernels.gelu_tanh(x),
        "rope": lambda: kernels.rope(heads, heads.clone(), angles, angles),
        "write_kv": lambda: kernels.write_kv(cache, one[0], heads[:2].clone()),
        "copy_blocks": lambda: kernels.copy_blocks(cache[None], one[0, :1], one[0, 1:]),
        "paged_attend": lambda: kernels.paged_attend(
            heads[:1], cache, cache, one, torch.tensor([7]), 0.5
        ),
    }


@pytest.mark.parametrize("name", [n for n in ops.SCHEMAS if n not in ops.PRODUCTS])
def test_a_plain_op_is_its_twin_whatever_else_there_is(name, monkeypatch):
    seen, twin = [], getattr(twins, name)

    def spy(*given):
        seen.append(name)
        return twin(*given)

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    right = calls(x.clone())[name]()
    monkeypatch.setattr(twins, name, spy)
    with emulate.ops_emulated(), plain_ops():
        assert not emulate.enabled() and not native.available()
        ours = calls(x.clone())[name]()
    assert seen == [name]
    if right is not None:
        torch.testing.assert_close(ours, right)
    calls(x.clone())[name]()
    assert seen == [name] or not native.available(), "outside they are what they were"


def test_a_model_that_is_made_among_plain_ops_has_plain_weights():
    with plain_ops():
        model = llama()
    weights = [w for layer in model.layers for w in vars(layer).values() if isinstance(w, Weight)]
    assert len(weights) == 4 * len(model.layers)
    assert all(weight.plain is not None for weight in [*weights, model.head])


def test_plain_ops_end_with_an_error_too():
    before = kernels._rms_norm
    with pytest.raises(ZeroDivisionError), plain_ops():
        raise ZeroDivisionError
    assert kernels._rms_norm is before


# --- the corners ---------------------------------------------------------------------------------


@needs_native
def test_four_corners_give_the_same_tokens_and_plain_steps_are_longer():
    found = corners(llama, PROMPT, 12, graphs.recording)
    names = ["eager torch", "eager fused", "graph torch", "graph fused"]
    assert [corner.name for corner in found] == names
    assert [corner.engine.recorded for corner in found] == [False, False, True, True]
    assert len({corner.engine._kv.capacity for corner in found}) == 1
    result = compare(found, PROMPT, 12, 2, lambda: 1e9)
    assert list(result["corners"]) == names and set(result["tokens"].values()) == {None}
    counts = [its["operations"] for its in result["corners"].values()]
    assert counts[0] == counts[2] > counts[1] == counts[3] > 0
    for corner in found:
        assert len(corner.turns) == 2
        assert all(len(turn.token_ids) == 12 == len(turn.step_ms) + 1 for turn in corner.turns)


@needs_native
def test_on_a_cpu_what_is_native_code_is_recorded():
    found = corners(llama, PROMPT, 4)
    assert [corner.name for corner in found] == ["eager torch", "eager fused", "graph fused"]
    assert [corner.engine.recorded for corner in found] == [False, False, True]
    assert len({corner.engine._kv.capacity for corner in found}) == 1


def test_operations_that_no_capture_can_have_are_not_counted():
    engine = Engine(llama())
    step = type(engine).step

    class Reads(Engine):
        def step(self, tokens: Tensor) -> Tensor:
            assert tokens.sum().item() >= 0
            return step(self, tokens)

    assert latency.operations(engine, PROMPT) > 0
    assert latency.operations(Reads(engine.model), PROMPT) is None


def test_turns_go_there_and_back(monkeypatch):
    found, order = corners(llama, PROMPT, 6)[:2], []

    def turn(self: Corner, prompt: list[int], new: int) -> Turn:
        order.append((self.ops, new))
        return Turn([1, 2], [0.5], 2000.0)

    monkeypatch.setattr(Corner, "take_turn", turn)
    rates = iter([3e9, 1e9, 2e9])
    result = compare(found, PROMPT, 6, 3, lambda: next(rates))
    there = [("torch", 6), ("fused", 6)]
    assert order == [("torch", 4), ("fused", 4), *there, *there[::-1], *there]
    assert result["read_gb_s"] == 2.0, "the median of what was read between the rounds"
    token = result["bytes"]["token"]
    assert result["bound_ms"] == pytest.approx(token / 2e9 * 1e3)
    figures = result["corners"]["eager torch"]
    assert figures["step_p50_ms"] == 0.5 and figures["tok_s"] == 2000.0
    assert figures["of_read_speed"] == pytest.approx(result["bound_ms"] / 0.5)


def weight_bytes(model) -> int:
    """Of every tensor that the model has, but for the embedding's table and RoPE's."""
    tensors = [model.norm, *(x for layer in model.layers for x in vars(layer).values())]
    tensors = [x for x in [*tensors, model.head] if x is not None]
    plain = [x.plain if isinstance(x, Weight) else x for x in tensors]
    biases = [x.bias for x in tensors if isinstance(x, Weight) and x.bias is not None]
    return sum(x.nbytes for x in [*plain, *biases])


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_weight_once_and_what_is_stored(tied):
    """The keys and values of the tokens that the steps see, on average, counted step by step."""
    with plain_ops():
        model = llama(tie_word_embeddings=tied, attention_bias=True)
    each = 2 * 3 * 2 * 16 * 4  # K and V, layers, KV heads, head size, bytes
    steps = [each * (length + 1) for length in range(10, 10 + 7)]  # of 8 new tokens, 7 steps
    sizes = token_bytes(model, 10, 8)
    assert sizes["weights"] == weight_bytes(model)
    assert sizes["kv"] == sum(steps) / len(steps)
    assert sizes["token"] == sizes["weights"] + sizes["kv"]


def test_where_answers_part_and_how_near_the_two_tokens_are():
    first, other = corners(llama, PROMPT, 6)[:2]
    right, _ = first.engine.generate(PROMPT, 6, temperature=0.0)
    first.turns.append(Turn(right, [], 1.0))
    other.turns += [Turn(right, [], 1.0), Turn([*right[:3], 1 - right[3], *right[4:]], [], 1.0)]
    assert parting(first, first, PROMPT) is None
    logits = Engine(other.engine.model).prefill([*PROMPT, *right[:3]])[0]
    best = logits.sort(descending=True).values
    where = parting(other, first, PROMPT)
    assert where["at"] == 3
    assert where["gap"] == pytest.approx(float(best[0] - best[1]), rel=1e-3)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latency.json"
    options = ["--new", "6", "--repeat", "2", "--json", str(file)]
    assert cli.main(["bench", "latency", "--tiny", *options]) == 0
    out, err = capsys.readouterr()
    written = json.loads(file.read_text())
    assert err == "", "a bar is for a terminal"
    assert written["settings"] == {"model": "tiny", "prompt_tokens": 10, "new": 6, "repeat": 2}
    recorded = ["graph fused"] if native.available() else []
    assert list(written["corners"]) == ["eager torch", "eager fused", *recorded]
    for name, its in written["corners"].items():
        steps, kind = name.split()
        assert 0 < its["step_p50_ms"] <= its["step_p99_ms"] and its["tok_s"] > 0
        assert its["of_read_speed"] == pytest.approx(written["bound_ms"] / its["step_p50_ms"])
        cells = f"{its['step_p50_ms']:.3f} | {its['step_p99_ms']:.3f} | {its['tok_s']:.1f}"
        assert f"| {steps} | {kind} | {cells} | " in out
        assert written["tokens"][name] is None
    assert out.count("| yes |") == 2 + len(recorded)
    assert "| graph | torch | — | — | — | — | — | — |" in out
    assert "—: nothing is recorded there; on a CPU, only what is native code is." in out
    assert f"that is {written['bound_ms']:.3f} ms." in out


def test_what_is_not_the_same_is_said(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    take = Corner.take_turn

    def other(self: Corner, prompt: list[int], new: int) -> Turn:
        turn = take(self, prompt, new)
        ids = [*turn.token_ids[:2], 7, *turn.token_ids[3:]]
        return turn if self.ops == "torch" else dataclasses.replace(turn, token_ids=ids)

    monkeypatch.setattr(Corner, "take_turn", other)
    assert cli.main(["bench", "latency", "-m", "tiny", "--new", "5", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("| NO |") == 1 + native.available()
    assert "eager fused has another token than the first turn of eager torch, at 2, where" in out


def test_a_recorded_corner_has_its_line():
    found = corners(llama, PROMPT, 5, graphs.recording)
    result = compare(found, PROMPT, 5, 1, lambda: 1e9)
    lines = latency.corner_table(result).splitlines()
    count = result["corners"]["graph fused"]["operations"]
    assert lines[-1].startswith("| graph | fused | ")
    assert lines[-1].endswith(f" | {count}, recorded | yes |")
    assert latency._missing(result) == []


@pytest.mark.parametrize(("ms", "said"), [(1.0, []), (0.999, ["Above 100% of the read speed: "])])
def test_a_share_above_the_whole_is_explained(ms, said):
    corners = {"eager torch": {"of_read_speed": 1 / ms}, "eager fused": {"of_read_speed": None}}
    notes = latency._above({"corners": corners})
    assert [note[:30] for note in notes] == said


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is built elsewhere")
def test_fused_is_told_in_words(monkeypatch):
    here = torch.device("cpu")
    with emulate.ops_emulated(False):
        expected = "native code" if native.available() else "plain torch, too: "
        assert latency.fused_form(here).startswith(expected)
        with plain_ops():
            assert latency.fused_form(here).startswith("plain torch, too: ")
            assert latency.fused_form(torch.device("cuda", 0)).startswith("plain torch, too: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--new", "1"], "--new 1: expected 2 to "),
        (["--new", "100000"], "--new 100000: expected 2 to "),
        (["--repeat", "0"], "--repeat 0: expected 1 or more"),
        (["tiny", "-m", "tiny-draft"], "tiny and tiny-draft: expected one model"),
        (["tiny-draft", "--tiny"], "tiny-draft and tiny: expected one model"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no"),
        (["no-such-model-here"], "no-such-model-here"),
    ],
)
def test_the_command_refuses_before_it_measures(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "latency", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith("spindle: error: ")
