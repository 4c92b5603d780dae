"""Ranks give one process's tokens, hold their share, and end together (ranks.py is one rank)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks as one_rank
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import FAMILIES, GPT2, LLAMA, PROMPT, PROMPTS, RAW, answers, speculated, write
from shapes import parameters
from torch import Tensor

from spindle import Engine, Tokenizer, cli, hub, load_hf, parallel
from spindle.config import ModelConfig
from spindle.errors import RequestError, SpindleError
from spindle.model import weights
from spindle.model.layers import Model
from spindle.model.split import cuts, part_of
from spindle.serve import room

ODD = GPT2 | dict(
    n_head=3, vocab_size=4096, n_positions=512
)  # tiny's ids, and heads that 2 does not divide
Found = list[dict[str, Any]]  # of each rank


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    for name, raw in RAW.items():
        write(directory / name, raw)
    write(directory / "odd", ODD)
    shutil.copy(hub.resolve("tiny") / "tokenizer.json", directory / "odd")
    return directory


def started(root: Path, count: int) -> Found:
    """What `count` ranks have written; the last one was killed, and no other has failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", one_rank.__file__, str(rank), str(count), str(root)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    ends = [*[0] * (count - 1), -signal.SIGKILL]
    assert [rank.returncode for rank in ranks] == ends, "\n".join(said)
    assert said == [""] * count
    reports = (root / f"rank-{rank}-of-{count}.json" for rank in range(count))
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def two(root: Path) -> Found:
    return started(root, 2)


@pytest.fixture(scope="module")
def three(root: Path) -> Found:
    return started(root, 3)


@pytest.fixture(params=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> Found:
    return request.getfixturevalue(request.param)


CASES = [(count, family) for count in FAMILIES for family in FAMILIES[count]]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Found, str]:
    """What each rank has found, of a family."""
    count, family = request.param
    found = request.getfixturevalue({2: "two", 3: "three"}[count])
    return [its[family] for its in found], family


@pytest.fixture(scope="module")
def alone(root: Path) -> Callable[[str], dict[str, Any]]:
    """What one process finds, of a family."""
    return functools.cache(lambda family: answers(load_hf(root / family, dtype="float64")))


# --- tokens and bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_ranks_give_the_tokens_of_one_process(case, alone, preemption):
    """Under prefix hits, forks of n = 2 and preemption; every rank has the same."""
    found, family = case
    right = alone(family)[preemption]
    assert right["preemptions"] > 0 and right["cached_tokens"] > 0 and right["copied"] > 0
    assert (right["swapped"] > 0) == (preemption == "swap") and right["held"] == 0
    assert len({tuple(tokens) for tokens in right["tokens"]}) > 4
    for its in (one[preemption] for one in found):
        assert its | {"logprobs": None} == right | {"logprobs": None}
        assert its["logprobs"] == pytest.approx(right["logprobs"], rel=0, abs=1e-9)


def test_logits_are_those_of_one_process(case, alone):
    found, family = case
    right = torch.tensor(alone(family)["logits"])
    assert right.std() > 1
    for its in found:
        assert its["logits"] == found[0]["logits"]  # to the last bit
        assert (torch.tensor(its["logits"]) - right).abs().max() < 1e-9


def test_a_rank_holds_its_share_of_the_cache(case, alone):
    found, family = case
    for its in found:
        assert [size * len(found) for size in its["kv_bytes"]] == alone(family)["kv_bytes"]


def test_predicted_bytes_are_counted(case):
    found, family = case
    config = ModelConfig.from_dict(RAW[family])
    for its in found:
        for counted, rows in zip(its["counted"], (len(PROMPT), 1), strict=True):
            assert counted == parallel.predicted_bytes(config, rows, 1, len(found), itemsize=8)


def test_recorded_steps_have_the_collectives_in_them(two):
    if two[0]["replayed"] is None:
        pytest.skip("no native code here: nothing is recorded")
    config = ModelConfig.from_directory(hub.resolve("tiny"))
    for found in two:
        assert found["replayed"]["replayed"] == found["replayed"]["plain"]
        assert found["replayed"]["bytes"] == parallel.predicted_bytes(config, 4, 4, 2)


def test_batch_invariant_is_so_with_three_ranks(three):
    """The order of a sum over three depends on the row, so each token has a pass of its own."""
    for found in three:
        batch, solo = found["invariant"]
        assert batch == solo and len(set(batch)) == 3 * len(PROMPTS)


def test_a_draft_model_is_whole_in_every_rank(root, two):
    right = speculated(root)  # also drawn, with as many drafts in a pass
    assert [found["speculated"] for found in two] == [right, right]


# --- one word for all ----------------------------------------------------------------------------


def test_what_differs_is_rank_0s_word(ranks):
    for found in ranks:
        assert (found["number"], found["text"]) == (10, "é of 0")
        assert found["least"] == 8 - len(ranks)
        assert found["seed"] == ranks[0]["seed"] and found["blocks"] == ranks[0]["blocks"]


def test_rank_0_alone_is_heard(two, root):
    heard, unheard = (found["commands"] for found in two)
    texts = {"generate": [" a list of strings, which"], "stdin": [" a list of strings, which"]}
    texts["two"] = [" a list of strings, which", " of the type of the type"]
    for name, right in texts.items():
        assert heard[name][:2] == [0, "\n---\n".join(right)]
    drawn = json.loads(heard["drawn"][1])
    assert len(drawn["token_ids"]) == 6
    assert [its for its in unheard.values() if its[1:] != ["", ""]] == []
    assert [its[0] for its in unheard.values()] == [its[0] for its in heard.values()]


REFUSALS = {
    "not utf-8": "stdin: byte 0xff at offset 7 is not UTF-8",
    "odd": "odd has 3 query heads and 3 KV heads, which 2 ranks do not divide; expected 1 ranks",
    "int8": "quantize='int8': not done for the part of a rank",
    "usage": "unrecognized arguments: --no-such-option",
    "chat": "chat: not done by several ranks; expected `spindle generate`, or one process",
    "one rank fails": "rank 1 ended: ",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_error_is_said_once(two, name):
    status, out, err = two[0]["commands"][name]
    assert (status, out) == (2, "")
    assert err.startswith(f"spindle: error: {REFUSALS[name]}") and err.count("\n") == 1


def test_ctrl_c_at_rank_0_ends_all(two):
    """What there is of the answer is there; the others are told, and end with the same status."""
    (status, out, err), unheard = (found["commands"]["ctrl-c"] for found in two)
    assert status == 130 and out.count(" ") >= 3 and "tokens after a prompt of" in err
    assert len(out) < 300 and unheard == [130, "", ""]


# --- the end -------------------------------------------------------------------------------------


def test_a_rank_that_leaves_the_path_is_not_waited_for(two):
    """Whatever it does instead: others learn of it from what it has said, and nobody hangs."""
    ends = [found["endings"] for found in two]
    for name in ("other ids", "other length", "draws a seed", "stops early"):
        assert ends[1][name].startswith("SpindleError: rank 1 came to ") or name == "stops early"
        assert ends[0][name].startswith("SpindleError: rank 1 ended: rank 1 came to ")
        assert "rank 0 to a pass over 9 tokens (checksum " in ends[0][name]
    assert "came to a pass over 8 tokens" in ends[1]["other length"]
    assert "came to its end" in ends[0]["stops early"]
    assert "came to a number of rank 0's" in ends[1]["draws a seed"]
    assert "came to a pass over 9 tokens" in ends[1]["goes on alone"]
    assert ends[1]["goes on alone"].split("; ")[0].endswith("and rank 0 to its end")


def test_the_end_of_rank_0_is_the_end_of_all(two):
    assert [found["endings"]["leaves early"] for found in two] == ["SystemExit: 7"] * 2


def test_the_death_of_a_rank_ends_the_others_in_seconds(ranks):
    gone = f"SpindleError: one of the {len(ranks)} ranks has gone, or answers no more ("
    for number, found in enumerate(ranks[:-1]):
        assert found["killed"]["seconds"] < 10
        said = found["killed"]["said"]  # or, where rank 0 knew it first and has ended: its status
        assert said.startswith(gone) or (number > 0 and said == "SystemExit: 0")


def test_a_part_is_of_no_use_without_the_others(ranks):
    for found in ranks:
        assert found["after the end"].startswith("SpindleError: the model is the part of one rank")


# --- without other processes ---------------------------------------------------------------------


@pytest.mark.parametrize(("count", "right"), [(2, "1 or 3"), (9, "1 or 3"), (4, "1 or 3")])
def test_smollm2_is_refused_with_the_numbers(count, right):
    heads = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    config = ModelConfig.from_dict(
        LLAMA | heads | dict(hidden_size=576, intermediate_size=1536, vocab_size=49152)
    )
    with pytest.raises(RequestError) as caught:
        part_of(config, count, "smollm2")
    odd = {2: "9 query heads and 3 KV heads", 4: "9 query heads and 3 KV heads", 9: "3 KV heads"}
    assert f"smollm2 has {odd[count]}" in str(caught.value)
    assert str(caught.value).endswith(f"{count} ranks do not divide; expected {right} ranks")
    part = part_of(config, 3)
    assert (part.num_heads, part.num_kv_heads, part.mlp_width) == (3, 1, 512)
    assert part.kv_bytes(4) * 3 == config.kv_bytes(4)


def test_every_count_must_divide():
    for name in ("intermediate_size", "vocab_size"):
        with pytest.raises(RequestError, match="expected 1"):
            part_of(ModelConfig.from_dict(LLAMA | {name: 101}), 2)


@given(st.data())
def test_the_cuts_of_all_ranks_are_the_whole(data):
    """Each value once, in order within each of the stacked matrices."""
    count, stacked, dims = (data.draw(st.integers(1, most)) for most in (4, 3, 2))
    cut = data.draw(st.integers(0, dims - 1))
    whole = [data.draw(st.integers(1, 3)) for _ in range(dims)]
    part = list(whole)
    part[cut], whole[cut] = stacked * whole[cut], stacked * whole[cut] * count
    values = torch.arange(torch.Size(whole).numel()).view(whole)
    parts = []
    for rank in range(count):
        held = torch.full(part, -1)
        for here, there in cuts(part, whole, rank, stacked):
            held[here] = values[there]
        parts.append(held)
    put = [x for n in range(stacked) for x in (p.chunk(stacked, dim=cut)[n] for p in parts)]
    assert torch.equal(torch.cat(put, dim=cut), values)


class Noted:
    """A safetensors file that notes how many numbers are read; whole tensors are not given."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self._file, self._read = file, read

    def get_slice(self, name: str) -> Noted:
        return Noted(self._file.get_slice(name), self._read)

    def __getitem__(self, where: Any) -> Tensor:
        part = self._file[where]
        self._read.append(part.numel())
        return part


@pytest.mark.parametrize("family", RAW)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_reads_its_slice_and_no_more(family, shards, count, tmp_path, monkeypatch):
    """What all ranks hold, put together, is what one process holds; each number is read once."""
    directory = write(tmp_path / "model", RAW[family], shards)
    config, place = ModelConfig.from_directory(directory), (torch.float64, torch.device("cpu"))
    whole = tensors_of(weights.load(directory, config, *place))
    read, file_of = list[int](), weights.Reader._file_of

    def noted(reader: weights.Reader, name: str) -> tuple[Noted, str]:
        file, stored = file_of(reader, name)
        return Noted(file, read), stored

    monkeypatch.setattr(weights.Reader, "_file_of", noted)
    parts = []
    for rank in range(count):
        read.clear()
        parts.append(
            tensors_of(weights.load(directory, config, *place, None, parallel.Ranks(rank, count)))
        )
        held = {x.data_ptr(): x.numel() for x in parts[-1].values()}
        assert sum(read) == sum(held.values())
    for at, tensor in whole.items():
        assert _together([part[at] for part in parts], tensor, at, config), at


def tensors_of(model: Model) -> dict[str, Tensor]:
    """All that a model holds that is in its files, by where a whole model holds it."""
    held = parameters(model).items()
    return {
        at.removesuffix(".rows"): x for at, x in held if ".rope" not in at and ".ranks" not in at
    }


def _together(parts: list[Tensor], whole: Tensor, at: str, config: ModelConfig) -> bool:
    """Whether the parts are the whole, cut along a dimension, or the same in all ranks."""
    n = len(parts)
    if parts[0].shape == whole.shape:
        last = at.endswith((".out.bias", ".down.bias"))  # added once
        return torch.equal(parts[0], whole) and all(
            torch.equal(x, torch.zeros_like(x) if last else whole) for x in parts[1:]
        )
    (d,) = (d for d in range(whole.ndim) if parts[0].shape[d] != whole.shape[d])
    D = config.head_dim
    sizes = [config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D]
    if ".gate_up." in at:
        sizes = [config.mlp_width, config.mlp_width]
    if ".qkv." not in at and ".gate_up." not in at:
        sizes = [whole.shape[d]]
    pieces = [part.split([size // n for size in sizes], dim=d) for part in parts]
    put = [torch.cat([piece[k] for piece in pieces], dim=d) for k in range(len(sizes))]
    return torch.equal(torch.cat(put, dim=d), whole)


def test_bytes_over_the_wire_by_hand():
    config = ModelConfig.from_dict(LLAMA)  # 2 layers, 48 wide, 102 ids
    found = parallel.predicted_bytes(config, 10, 4, 3)
    assert found == {"all_reduce": 5 * 10 * 48 * 4, "all_gather": 4 * 34 * 4, "broadcast": 24}
    assert parallel.ring_bytes(found, 3) == 9600 * 4 // 3 + 544 * 2 + 24
    assert parallel.ring_bytes({"all_reduce": 800}, 2) == 800


def test_a_process_that_nobody_has_started_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with parallel.init() as ranks:
        assert (ranks.rank, ranks.count, ranks.number(3), ranks.least(4)) == (0, 1, 3, 4)
        assert ranks.text(lambda: "here") == "here"
    assert parallel.current() is ranks and ranks.close(5) == 5


@pytest.mark.parametrize(
    "wrong",
    [{"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2", "RANK": ""}, {"LOCAL_WORLD_SIZE": "-1"}],
    ids=str,
)
def test_a_wrong_environment_is_refused(wrong, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"WORLD_SIZE": "2", "RANK": "0"} | wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError):
        parallel.init()
    assert parallel.current().count == 1


def test_ranks_of_a_machine_share_its_memory(root, monkeypatch):
    """By default all of their pools take no more than one process's would."""
    models = [load_hf(root / "llama")]
    monkeypatch.setattr(room, "_free_bytes", lambda device: 2**24)
    monkeypatch.setattr(parallel, "_current", parallel.Ranks(here=4))
    shared = room.default_blocks(models, 16, 10**6, 64)
    monkeypatch.setattr(parallel, "_current", parallel.ALONE)
    assert shared + 1 == (room.default_blocks(models, 16, 10**6, 64) + 1) // 4 > 10


def test_each_rank_needs_a_gpu_where_there_are_any(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RequestError, match=r"this is rank 2 of its machine, .* torch sees 2 GPU"):
        parallel.init("tcp://127.0.0.1:1?rank=2&world_size=3", timeout_s=1)


@pytest.mark.parametrize("url", ["nowhere://", "file:///nowhere?rank=0", "tcp://x"])
def test_a_wrong_url_is_refused(url):
    with pytest.raises(RequestError, match="init: "):
        parallel.init(url, timeout_s=1)


def test_who_does_not_come_is_not_waited_for_any_longer(tmp_path):
    with pytest.raises(SpindleError, match="did not find each other"):
        parallel.init(f"file://{tmp_path}/meet?rank=0&world_size=2", timeout_s=0.5)
    assert parallel.current().count == 1


def test_torchrun_says_at_its_end_what_was_wrong(tmp_path, monkeypatch, capsys, caplog):
    """It looks in a file for what it says of each process that has failed."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

    file = tmp_path / "error.json"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": file}.items():
        monkeypatch.setenv(name, str(value))
    cli.complain("2 ranks do not divide\n9 heads")
    assert capsys.readouterr().err == "spindle: error: 2 ranks do not divide; 9 heads\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["message"] == "2 ranks do not divide; 9 heads"
    assert abs(failure.timestamp - time.time()) < 60
    written = json.loads(file.read_text())
    ErrorHandler().override_error_code_in_rootcause_data(str(file), written, 2)
    assert written["message"]["errorCode"] == 2 and not caplog.records
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    cli.complain("it cannot be written")
    assert capsys.readouterr().err == "spindle: error: it cannot be written\n"


@pytest.mark.smollm2
def test_torchrun_runs_smollm2_on_three_ranks():
    """The command itself: one answer, once, and it is that of one process."""
    argv = ("-m", "spindle", "generate", "-m", "smollm2", "-p", "The capital of France is")
    argv += ("-n", "5", "--temperature", "0", "-q")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run = subprocess.run(
        [sys.executable, *launch, *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    model = load_hf("smollm2")
    tokenizer = Tokenizer(model.directory)
    ids = Engine(model).generate(tokenizer.encode("The capital of France is"), 5, temperature=0)[0]
    assert (run.returncode, run.stdout) == (0, tokenizer.decode(ids)), run.stderr
