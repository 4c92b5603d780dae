"""Device: a dry run does all that a GPU would, each check can fail, and the record says what it is.

There is no GPU here: what a GPU alone can do is done by fakes of torch.cuda, and by the rehearsal.
"""

import ctypes
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spindle import cli
from spindle.bench import device, gpu, kernel_checks, stages
from spindle.bench.device import Result, apart, as_markdown, measure
from spindle.bench.gpu import Gpu, Rehearsal
from spindle.bench.kernel_checks import Random, judged, paged_is_contiguous
from spindle.bench.stages import STAGES
from spindle.config import ModelConfig
from spindle.errors import SpindleError
from spindle.kernels import build, cuda, emulate
from spindle.model.weights import wishes

needs_emulator = pytest.mark.skipif(
    sys.platform != "linux" or build.compiler() is None or os.environ.get("SPINDLE_NO_EXT") == "1",
    reason="nothing can be emulated here",
)
TIMED = {"seconds", "ms", "gb_s", "of_copy", "reached", "tok_s", "run_tok_s", "recorded_tok_s"}
TIMED |= {"eager_step_ms", "graph_step_ms", "step_p50_ms", "step_p99_ms", "of_read_speed"}
TIMED |= {"floor_ms"}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """Nothing is left in the user's cache, and the emulated kernels are compiled quickly.

    Without the head sizes that a rehearsal does not use.
    """
    flags = ["-O0" if flag == "-O1" else flag for flag in emulate.OF_KERNELS]
    text = emulate.source("decode.cu")
    unused = text[text.index("  if (D == 64)") : text.index("  return cudaErrorInvalidValue;\n}")]
    with pytest.MonkeyPatch.context() as patch, emulate.edited("decode.cu", unused, ""):
        patch.setenv("SPINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(emulate, "OF_KERNELS", flags)
        emulate.library_of.cache_clear()
        yield


@pytest.fixture
def small(monkeypatch) -> Rehearsal:
    """A rehearsal with fewer replays."""
    monkeypatch.setattr(Rehearsal, "sizes", dataclasses.replace(gpu.REHEARSED, replays=8))
    return Rehearsal()


# --- the dry run ---------------------------------------------------------------------------------


@needs_emulator
def test_a_dry_run_does_all_stages_and_tells_no_times(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "device", "--dry-run", "--out", "there"]) == 0
    out, err = capsys.readouterr()
    (file,) = tmp_path.rglob("*.json")
    assert file == tmp_path / "there" / "device-dry-run-no-gpu.json"
    record = json.loads(file.read_text())
    assert record["device"] == "dry run, no GPU" and record["dry_run"] is True
    assert list(record["stages"]) == list(STAGES)
    for name, stage in record["stages"].items():
        assert stage["failed"] is None and stage["rows"], name
        for row in stage["rows"]:
            assert "wrong" not in row, row
            assert all(row[key] is None for key in TIMED & set(row)), row
    assert out.startswith("# dry run, no GPU\n") and err == ""
    for name in STAGES:
        assert f"## {name}, " in out and f"\n{name}: well\n" in out
    tables = {row["table"] for stage in record["stages"].values() for row in stage["rows"]}
    assert all(f"{table}:\n" in out for table in tables)
    corners = [row["corner"] for row in record["stages"]["latency"]["rows"]]
    assert corners == ["eager torch", "eager fused", "graph torch", "graph fused"]
    assert all(row["same_tokens"] for row in record["stages"]["latency"]["rows"])


def test_a_dry_run_leaves_nothing_unless_it_is_asked_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "x.json"
    options = ["--dry-run", "--stages", "build", "--json", str(file)]
    assert cli.main(["bench", "device", *options[:3]]) == 0
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["bench", "device", *options]) == 0
    assert list(tmp_path.iterdir()) == [file]
    assert list(json.loads(file.read_text())["stages"]) == ["build"]


def test_without_a_gpu_it_is_a_dry_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "device", "--stages", "build"]) == 0
    assert capsys.readouterr().out.startswith("# dry run, no GPU\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Generator", lambda place: SimpleNamespace(manual_seed=str))
    assert type(gpu.machine(False)) is Gpu and gpu.machine(True).rehearsed


def test_a_checkpoint_can_be_measured_too(small):
    rows = [row for row in STAGES["latency"](small, "tiny") if row["table"] == "latency, tiny"]
    assert len(rows) == 4 and all(row["same_tokens"] for row in rows)
    assert rows[0]["token_megabytes"] > 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stages", "build", "sleep"], "--stages sleep: expected of build, kernels, capture"),
        (["--seconds", "0"], "--seconds 0.0: expected more than 0"),
        (["--seconds", "nan"], "--seconds nan: expected more than 0"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory; expected a folder"),
        (["-m", "no-such-model-here"], "no-such-model-here"),
    ],
)
def test_the_command_refuses_before_it_begins(options, words, capsys):
    assert cli.main(["bench", "device", "--dry-run", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith("spindle: error: ")


# --- stages that fail ----------------------------------------------------------------------------


def breaks(gpu: Gpu, model: str | None) -> Iterator[dict]:
    yield {"table": "toy", "n": 1}
    raise ZeroDivisionError("by nothing")


def finds(gpu: Gpu, model: str | None) -> Iterator[dict]:
    yield {"table": "toy", "n": 2, "wrong": "two"}


def test_a_stage_that_fails_keeps_its_rows_and_the_others_run(monkeypatch, capsys, tmp_path):
    file = tmp_path / "x.json"
    monkeypatch.setitem(STAGES, "build", breaks)
    monkeypatch.setitem(STAGES, "kernels", finds)
    monkeypatch.setitem(STAGES, "capture", lambda gpu, model: iter([{"table": "toy", "n": 3}]))
    options = ["--dry-run", "--stages", "capture", "kernels", "build", "--json", str(file)]
    assert cli.main(["bench", "device", *options]) == 1
    out, written = capsys.readouterr().out, json.loads(file.read_text())["stages"]
    assert list(written) == ["build", "kernels", "capture"], "in the order of the script"
    assert written["build"]["failed"] == "ZeroDivisionError: by nothing"
    assert [one["rows"][0]["n"] for one in written.values()] == [1, 2, 3]
    assert "FAILED: ZeroDivisionError: by nothing" in out
    ends = ["build: ZeroDivisionError: by nothing", "kernels: something is wrong", "capture: well"]
    assert out.splitlines()[-3:] == ends


def test_what_was_found_is_written_after_each_stage(monkeypatch, tmp_path, capsys):
    file = tmp_path / "x.json"

    def looks(gpu: Gpu, model: str | None) -> Iterator[dict]:
        assert list(json.loads(file.read_text())["stages"]) == ["build"]
        yield {"table": "toy"}

    monkeypatch.setitem(STAGES, "build", finds)
    monkeypatch.setitem(STAGES, "kernels", looks)
    assert measure(Rehearsal(), ["build", "kernels"], files=[file])["kernels"].went_well


def test_no_stage_begins_when_the_time_is_over(monkeypatch, capsys):
    monkeypatch.setitem(STAGES, "build", lambda gpu, model: iter([time.sleep(0.02) or {}][1:]))
    results = measure(Rehearsal(), ["build", "kernels", "capture"], 0.01)
    assert results["build"].went_well
    for name in ("kernels", "capture"):
        assert results[name].failed == "not begun: the 0 seconds were over"
        assert results[name].rows == []


def dies(sender, *rest: object) -> None:
    sender.send(("row", {"table": "toy", "n": 1}))
    time.sleep(0.1)
    os._exit(7)


def hangs(sender, *rest: object) -> None:
    sender.send(("row", {"table": "toy", "n": 1}))
    time.sleep(600)


def test_a_process_that_dies_is_in_the_record_with_what_it_found(monkeypatch):
    monkeypatch.setattr(device, "_work", dies)
    result = apart(Rehearsal(), "build", None, 120.0)
    assert result.failed == "its process died, with exit code 7"
    assert result.rows == [{"table": "toy", "n": 1}]


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(device, "_work", hangs)
    start = time.monotonic()
    result = apart(Rehearsal(), "build", None, 1.0)
    assert result.failed == "ended, as the 1 seconds that were left are over"
    assert time.monotonic() - start < 60


def test_a_stage_apart_gives_what_it_gives_here(monkeypatch):
    """On a GPU each is in a process of its own; its rows come through a pipe."""
    monkeypatch.setenv("SPINDLE_NO_EXT", "1")  # there: nothing is compiled for it
    result = apart(Rehearsal(), "latency", None, 300.0)
    assert result.failed is None and result.went_well
    assert [row["corner"] for row in result.rows] == [
        *("eager torch", "eager fused", "graph torch", "graph fused"),
    ]
    assert result.rows[1]["fused"] == "plain torch, too: SPINDLE_NO_EXT=1"


@pytest.mark.parametrize(
    ("stage", "end"), [(finds, None), (breaks, "ZeroDivisionError: by nothing")]
)
def test_a_process_sends_its_rows_and_its_end(stage, end, monkeypatch):
    monkeypatch.setitem(STAGES, "build", stage)
    monkeypatch.setattr(device.signal, "signal", lambda *given: None)
    sent: list = []
    device._work(SimpleNamespace(send=sent.append), True, "build", None)
    assert [kind for kind, _ in sent] == ["row", "end"] and sent[-1][1] == end


def test_on_a_gpu_a_stage_has_what_time_is_left(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(device, "apart", lambda *all_of: given.append(all_of) or Result())
    there = Rehearsal()
    there.rehearsed = False
    measure(there, ["build", "kernels"], 100.0, "tiny")
    assert [(name, model) for _, name, model, _ in given] == [
        ("build", "tiny"),
        ("kernels", "tiny"),
    ]
    assert 90 < given[1][3] < given[0][3] <= 100


def test_a_record_is_json_whatever_is_in_it():
    rows = [{"table": "toy", "x": math.inf, "y": math.nan, "z": 1.5}]
    record = device.as_record(Rehearsal(), {"build": Result(rows)})
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["stages"]["build"]["rows"] == [
        {"table": "toy", "x": "inf", "y": "nan", "z": 1.5}
    ]


def test_a_table_has_a_column_for_whatever_a_row_has():
    rows = [{"table": "a", "x": True, "y": 1.23456}, {"table": "a", "x": None, "wrong": "b|c\nd"}]
    text = as_markdown("toy", Result([*rows, {"table": "e", "x": False}], 1.25))
    lines = ["| x | y | wrong |", "| --- | --- | --- |", "| yes | 1.235 | — |", "| — | — | b/c d |"]
    assert text.splitlines()[:8] == ["## toy, 1.2 s", "", "a:", "", *lines]
    assert text.endswith("e:\n\n| x |\n| --- |\n| NO |")


# --- kernels that are wrong ----------------------------------------------------------------------

FAULTS = {  # of each op: what a wrapper that is wrong does with the result
    "rms_norm": lambda op, x, weight, eps: op(x, weight, 0.03),
    "add_rms_norm": lambda op, x, residual, *rest: op(x, residual.clone(), *rest),
    "silu_mul": lambda op, x: op(x) * 1.02,
    "rope": lambda op, q, k, cos, sin: op(q, k[:, :0], cos, sin),
    "write_kv": lambda op, cache, slots, new: op(cache, slots.clamp(max=30), new),
    "copy_blocks": lambda op, cache, source, target: op(cache, source, target.flip(0)),
    "paged_attend": lambda op, q, k, v, t, lengths, scale: op(q, k, v, t, lengths, scale * 1.02),
}


@needs_emulator
@pytest.mark.parametrize("dtype", gpu.REHEARSED.dtypes)
@pytest.mark.parametrize("op", FAULTS)
def test_a_kernel_that_is_wrong_is_seen(op, dtype, monkeypatch):
    """B62: within bounds that no correct kernel leaves, and a wrong one does."""
    with Rehearsal().kernels():
        sound = judged(op, dtype, Random(Rehearsal(), dtype).cases()[op])
        assert "wrong" not in sound and 0 <= sound["of_its_bound"] <= 1
        monkeypatch.setattr(cuda, op, partial(FAULTS[op], getattr(cuda, op)))
        row = judged(op, dtype, Random(Rehearsal(), dtype).cases()[op])
    assert "times the bound" in row["wrong"]


@needs_emulator
def test_a_paged_result_with_other_bits_is_seen(monkeypatch):
    make, op = Random(Rehearsal(), torch.float32), cuda.paged_attend

    def depends(q: Tensor, keys: Tensor, *rest) -> Tensor:
        return op(q, keys, *rest) * (1 if keys.shape[1] == 16 else 1 + 2**-23)

    assert "wrong" not in paged_is_contiguous(make)
    monkeypatch.setattr(cuda, "paged_attend", depends)
    assert paged_is_contiguous(make)["wrong"].count("other bits") == 2


def test_what_a_kernel_leaves_out_is_nan_and_what_it_raises_is_told():
    exact = torch.ones(2, dtype=torch.float64)

    def fails() -> None:
        raise emulate.KernelFault("status 700")

    cases = [
        ("a", lambda: (kernel_checks.poisoned(2, like=torch.ones(1)), exact, exact)),
        ("b", fails),
        ("c", lambda: (torch.ones(2), exact, 0 * exact)),
    ]
    row = judged("toy", torch.float32, cases)
    assert row["wrong"] == "a: nan times the bound; b: KernelFault: status 700"
    assert row["cases"] == 3 and row["of_its_bound"] == row["largest_error"] == 0.0


def test_without_kernels_the_stages_that_need_them_say_why(monkeypatch):
    monkeypatch.setattr(emulate, "available", lambda: False)
    for name in ("kernels", "bandwidth"):
        with pytest.raises(SpindleError, match="no emulator: there is no C"):
            list(STAGES[name](Rehearsal(), None))


# --- captures that are wrong ---------------------------------------------------------------------


def stuck(step):
    """A recorder whose replays do not move the rows on."""

    def replay() -> None:
        step.run()
        step.state()[1].sub_(1)

    return replay


@pytest.mark.parametrize("wish", stages.WISHES)
def test_a_replay_that_is_wrong_is_seen(wish, small):
    config = ModelConfig.from_dict(gpu.SMALL)
    model = stages.random_model(config, torch.float32, small.device)
    right = stages._replays(small, model, stages.WISHES[wish])
    assert right["same_tokens"] and right["largest_logit_difference"] == 0 and "wrong" not in right
    small.record = stuck
    row = stages._replays(small, model, stages.WISHES[wish])
    assert not row["same_tokens"] and row["wrong"].startswith("other tokens from step ")


def test_a_chunk_that_is_wrong_is_seen(small):
    model = stages.random_model(ModelConfig.from_dict(gpu.SMALL), torch.float32, small.device)
    assert "wrong" not in stages._chunks(small, model)

    def off(step):
        def replay() -> None:
            step.run()
            step.logits.mul_(1.001)

        return replay

    small.record = off
    assert "apart" in stages._chunks(small, model)["wrong"]


def test_a_batch_that_is_wrong_is_seen(small):
    model = stages.random_model(ModelConfig.from_dict(gpu.SMALL), torch.float32, small.device)
    row = stages._batch(small, model)
    assert row["same_answers"] and 0 < row["replayed"] < row["steps"] and "wrong" not in row

    def other(step):
        return lambda: (step.run(), step.tokens.add_(1).remainder_(97))

    small.record = other
    row = stages._batch(small, model)
    assert row["wrong"] == "tokens differ that are not near" and row["other_answers"] > 0
    bf16 = stages.random_model(model.config, torch.bfloat16, small.device)
    assert "wrong" not in stages._batch(small, bf16), "in 16 bits it is told, and no fault"


def test_a_batch_in_which_nothing_is_replayed_is_no_check(small, monkeypatch):
    model = stages.random_model(ModelConfig.from_dict(gpu.SMALL), torch.float32, small.device)
    monkeypatch.setattr("spindle.serve.recorded.RecordedDecodes.takes", lambda *given: False)
    assert stages._batch(small, model)["wrong"] == "no step was replayed"


def test_a_corner_that_fails_is_told_and_the_others_are_measured(small, monkeypatch):
    def refuses(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    small.record = refuses
    rows = list(STAGES["latency"](small, None))
    wrong = {row["corner"]: row["wrong"] for row in rows if "wrong" in row}
    assert set(wrong) == {"graph torch", "graph fused"}
    assert set(wrong.values()) == {"RuntimeError: operation not permitted when stream is capturing"}
    assert [row["corner"] for row in rows if "wrong" not in row] == ["eager torch", "eager fused"]
    monkeypatch.setattr(stages, "random_model", refuses)
    (row,) = STAGES["latency"](small, None)
    assert row["table"] == "latency, a small shape, float32" and "TypeError" in row["wrong"]


# --- bandwidth -----------------------------------------------------------------------------------


class Timed(Rehearsal):
    """A rehearsal on which everything takes 2 ms, but for what is named."""

    ms = 2.0

    def median_ms(self, works, repeats):
        super().median_ms(works, repeats)
        return self.ms

    def told(self, figure):
        return figure


@needs_emulator
def test_bytes_and_shares_and_goals():
    """A copy reads and writes; contiguous attention is the measure of blocks of 64."""
    rows = {row["what"]: row for row in stages.bandwidth_stage(Timed(), None)}
    copied = 4 * 2**10 / 2e-3
    assert rows["copy"]["gb_s"] == pytest.approx(copied / 1e9)
    tensor = 10 * 96 * 2
    assert rows["rms_norm"]["megabytes"] * 1e6 == 2 * tensor
    assert rows["add_rms_norm"]["megabytes"] * 1e6 == 4 * tensor
    assert rows["silu_mul"]["megabytes"] * 1e6 == 5 * 3 * 96 * 2
    keys = 2 * 2 * 64 * 2 * 32 * 2
    assert rows["attention, contiguous"]["megabytes"] * 1e6 == keys + 2 * 2 * 4 * 32 * 2
    for row in rows.values():
        if row["what"] != "copy":
            rate = row["megabytes"] * 1e6 / 2e-3
            assert row["gb_s"] == pytest.approx(rate / 1e9)
            assert row["of_copy"] == pytest.approx(rate / copied)
            assert row["reached"] == (row["of_copy"] >= row["goal"])
    assert rows["rms_norm"]["goal"] == 0.85 and rows["attention, contiguous"]["goal"] == 0.75
    assert rows["attention, blocks of 16"]["goal"] == 0.65
    whole = rows["attention, contiguous"]["of_copy"]
    assert rows["attention, blocks of 64"]["goal"] == pytest.approx(0.9 * whole)


@needs_emulator
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "paged_attend"])
def test_speed_without_the_right_result_is_wrong(op, small, monkeypatch):
    fast = getattr(cuda, op)

    def wrong(first: Tensor, *rest):
        out = fast(first, *rest)
        part = out[0] if op == "add_rms_norm" else out
        part[0] *= 1.1
        return out

    monkeypatch.setattr(cuda, op, wrong)
    rows = list(stages.bandwidth_stage(small, None))
    told = [row["what"] for row in rows if "wrong" in row]
    assert told and all(what == op or op == "paged_attend" for what in told)


def test_the_same_keys_in_blocks():
    caches = [[torch.randn(3, 64, 2, 4) for _ in range(2)] for _ in range(2)]
    moved, tables = stages._in_blocks(caches, 3, 16)
    assert tables.shape == (3, 4) and sorted(tables.flatten().tolist()) == list(range(12))
    for pair, theirs in zip(caches, moved, strict=True):
        for x, blocks in zip(pair, theirs, strict=True):
            assert torch.equal(blocks[tables].view_as(x), x)
            assert not torch.equal(blocks.view_as(x), x)


def test_other_bits_in_blocks_are_infinitely_wrong():
    q, cache = torch.randn(2, 1, 4), [torch.randn(2, 8, 1, 4) for _ in range(2)]
    whole = torch.randn(2, 1, 4)
    assert stages._attended(lambda: whole + 1, whole, q, cache, 8, 0.5) == math.inf
    exact = stages.twins.paged_attend(
        q, *cache, torch.arange(2)[:, None], torch.tensor([8, 8]), 0.5
    )
    assert stages._attended(lambda: exact, exact, q, cache, 8, 0.5) < 1
    assert stages._attended(lambda: exact * 1.01, exact * 1.01, q, cache, 8, 0.5) > 1


# --- the machine ---------------------------------------------------------------------------------


class Event:
    """A CUDA event on a clock that each call of a work turns on."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def fake_cuda(monkeypatch) -> Gpu:
    """A Gpu whose torch.cuda is made of fakes."""
    own = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=141e9)
    fakes = {
        "Event": Event,
        "synchronize": lambda *given: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda *given: "Some GPU 9000",
        "get_device_capability": lambda *given: (9, 0),
        "get_device_properties": lambda *given: own,
        "mem_get_info": lambda *given: (140e9, 141e9),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    here = Gpu.__new__(Gpu)
    here.device = torch.device("cuda", 0)
    return here


def test_the_median_call_by_events(fake_cuda):
    """Works take turns, and the first call of each does not count."""
    taken = iter([100.0, 100.0, 1.0, 5.0, 2.0, 6.0, 3.0])
    order = []

    def work(name: str) -> None:
        order.append(name)
        Event.now += next(taken)

    assert fake_cuda.median_ms([partial(work, "a"), partial(work, "b")], 5) == 3.0
    assert "".join(order) == "ab" + "ababa"


def test_what_is_told_of_a_gpu(fake_cuda, monkeypatch, tmp_path):
    about = fake_cuda.about()
    assert about["device"] == fake_cuda.name == "Some GPU 9000" and about["capability"] == "9.0"
    assert about["memory_gb"] == 141.0 and about["free_gb"] == 140.0
    assert fake_cuda.told(3.0) == 3.0 and fake_cuda.seconds(lambda: None) >= 0
    fake_cuda.settle()
    assert device._file(fake_cuda, tmp_path).name == "device-some-gpu-9000.json"
    monkeypatch.chdir(tmp_path)
    assert device._file(fake_cuda, None) == device.RECORDED / "device-some-gpu-9000.json"
    assert (tmp_path / "notebooks" / "recorded").is_dir()


def test_a_gpu_builds_for_itself_and_says_why_it_has_no_library(fake_cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "cuda_built", lambda capability: asked.append(capability))
    ((name, compile_it),) = fake_cuda.build()
    compile_it()
    assert name == "CUDA library" and asked == [(9, 0)]
    monkeypatch.setattr(cuda, "compiled", lambda device: None)
    monkeypatch.setattr(build, "why_not", lambda name: "no nvcc")
    with pytest.raises(SpindleError, match="no CUDA library: no nvcc"):
        fake_cuda.need_kernels()
    monkeypatch.setattr(cuda, "compiled", lambda device: ctypes)
    fake_cuda.need_kernels()


def test_a_program_that_is_not_there_says_nothing():
    assert gpu._last_line(["no-such-program-here"]) is None
    assert gpu._last_line([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert gpu._last_line([sys.executable, "-c", "print(1); print(2)"]) == "2"


@pytest.mark.parametrize("raw", [gpu.SMOLLM2, gpu.LLAMA_8B])
def test_the_shapes_are_those_of_their_models(raw):
    shapes_of = wishes(ModelConfig.from_dict(raw)).shapes
    count = sum(math.prod(shape) for shape in shapes_of.values())
    if raw is gpu.SMOLLM2:  # its head is the embedding
        assert count - 49152 * 576 == 134_515_008
    else:
        assert count == 8_030_261_248


def test_random_weights_where_they_are():
    """The same for a name, whatever is drawn besides; logits spread as those of `weights`."""
    config = ModelConfig.from_dict(gpu.SMALL)
    one, two = (stages.random_model(config, torch.float32, torch.device("cpu")) for _ in range(2))
    assert torch.equal(one.embed, two.embed)
    assert not torch.equal(one.layers[0].mlp_norm, one.layers[1].mlp_norm)
    assert float(one.embed.std()) == pytest.approx(2 / 8, rel=0.05)
    assert float(one.norm.mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.cuda
def test_a_gpu_passes(capsys):
    results = measure(Gpu(), list(STAGES), 300.0)
    assert all(result.went_well for result in results.values()), capsys.readouterr().out
