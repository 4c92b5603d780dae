"""Checkpoints that fit, that almost fit, and that are damaged; and what memory loading takes."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shapes import parameters
from torch import Tensor

from spindle import load_hf
from spindle.config import ModelConfig
from spindle.errors import CheckpointError, ConfigError, ModelNotFound, RequestError
from spindle.kernels import packs
from spindle.model import weights
from spindle.model.weights import pick_device, pick_dtype, random_model, wishes

GPT2 = dict(model_type="gpt2", vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2)
LLAMA = dict(model_type="llama", vocab_size=31, max_position_embeddings=16, hidden_size=8)
LLAMA |= dict(intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
LLAMA |= dict(num_key_value_heads=1, head_dim=6, attention_bias=True, mlp_bias=True)
PLAIN = {key: value for key, value in LLAMA.items() if not key.endswith("bias")}
MISTRAL = PLAIN | dict(model_type="mistral", sliding_window=None)
QWEN2 = PLAIN | dict(model_type="qwen2")
QWEN3 = PLAIN | dict(model_type="qwen3")
RAW = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
FAMILIES = list(RAW)


def tensors_of(raw: dict) -> dict[str, Tensor]:
    """Numbered tensors under the names of a file: no two alike, so that a mix-up shows."""
    config = ModelConfig.from_dict(raw)
    prefix = weights.FAMILIES[config.model_type].prefix
    named, value = {}, 0.0
    for name, shape in wishes(config).shapes.items():
        if config.tie_embeddings and name == "lm_head.weight":
            continue
        count = torch.Size(shape).numel()
        stored = name if name == "lm_head.weight" else prefix + name
        named[stored] = (torch.arange(count) + value).view(shape) / 1024
        value += count
    return named


def write(directory: Path, raw: dict, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, raw: dict, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    names = sorted(tensors)
    where = {name: f"model-{n % 2 + 1}-of-2.safetensors" for n, name in enumerate(names)}
    for shard in set(where.values()):
        part = {n: tensors[n].contiguous() for n in names if where[n] == shard}
        save_file(part, directory / shard)
    write_index(directory, where)
    return directory


def write_index(directory: Path, where: object) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def refusal(directory: Path) -> str:
    """The words of the CheckpointError that loading raises."""
    with pytest.raises(CheckpointError) as caught:
        load_hf(directory, device="cpu")
    return str(caught.value)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def checkpoint(family, tmp_path):
    return write(tmp_path / "model", RAW[family], tensors_of(RAW[family]))


# --- every number arrives ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_parameter_stays_uninitialised(checkpoint, family, dtype, monkeypatch):
    """B71: fresh memory is NaN here, so what is not written shows; and nothing is there twice."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.device.type != "cpu":
            return out
        return out.fill_(255 if out.dtype == torch.uint8 else torch.nan)  # four of these are NaN

    monkeypatch.setattr(torch, "empty", poisoned)
    model = load_hf(checkpoint, device="cpu", dtype=dtype)
    held = {at: tensor for at, tensor in parameters(model).items() if ".rope." not in at}
    assert not [at for at, tensor in held.items() if tensor.isnan().any()]
    assert {tensor.dtype for tensor in held.values()} == {dtype}
    stored = sorted(torch.cat([t.flatten() for t in tensors_of(RAW[family]).values()]).tolist())
    once = {
        t.data_ptr(): t for at, t in held.items() if at != "model.head.weight" or untied(family)
    }
    loaded = torch.cat([t.flatten() for t in once.values()]).double()
    expected = torch.tensor(stored).to(dtype).double()
    assert torch.equal(loaded.sort().values, expected.sort().values)


def untied(family: str) -> bool:
    return not ModelConfig.from_dict(RAW[family]).tie_embeddings


def test_shards_hold_what_one_file_holds(family, checkpoint, tmp_path):
    shards = write_shards(tmp_path / "shards", RAW[family], tensors_of(RAW[family]))
    one, many = (parameters(load_hf(d, device="cpu")) for d in (checkpoint, shards))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[at], many[at]) for at in one)


def test_a_weight_does_not_change_with_its_file(checkpoint):
    model = load_hf(checkpoint, device="cpu", dtype=torch.float32)
    before = {at: tensor.clone() for at, tensor in parameters(model).items()}
    path = checkpoint / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-400, os.SEEK_END)
        file.write(b"\xff" * 400)
    assert all(torch.equal(tensor, before[at]) for at, tensor in parameters(model).items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tied_embedding_is_one_tensor_where_it_is_not_packed(dtype, monkeypatch):
    tied = LLAMA | {"tie_word_embeddings": True}
    model = random_model(ModelConfig.from_dict(tied), dtype=dtype)
    if packs(model.embed):
        assert model.head.plain is None
        monkeypatch.setattr(weights, "spare_head", lambda config: False)
        model = random_model(ModelConfig.from_dict(tied), dtype=dtype)
    assert model.head.plain is model.embed


def test_the_head_is_packed_again_only_where_memory_allows():
    """SmolLM2's embedding is a fifth of its weights: packed. GPT-2's smallest: a third: shared."""
    smollm2 = dict(model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536)
    smollm2 |= dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    smollm2 |= dict(tie_word_embeddings=True)
    gpt2 = dict(model_type="gpt2", vocab_size=50257)
    assert weights.spare_head(ModelConfig.from_dict(smollm2))
    assert not weights.spare_head(ModelConfig.from_dict(gpt2))
    assert weights.spare_head(ModelConfig.from_dict(GPT2))


def test_random_weights_depend_on_name_and_seed_alone():
    deep, shallow = (
        parameters(random_model(ModelConfig.from_dict(LLAMA | {"num_hidden_layers": n}), seed=3))
        for n in (2, 1)
    )
    assert all(torch.equal(tensor, deep[at]) for at, tensor in shallow.items())
    other = parameters(random_model(ModelConfig.from_dict(LLAMA), seed=4))
    drawn = [at for at in deep if ".rope." not in at]
    assert not any(torch.equal(deep[at], other[at]) for at in drawn)


# --- checkpoints that do not fit -----------------------------------------------------------------


def test_all_that_differs_is_listed_in_one_error(family, tmp_path):
    tensors = tensors_of(RAW[family])
    names = list(tensors)
    missing, misshapen = names[3], names[5]
    del tensors[missing]
    tensors[misshapen] = torch.zeros(5, 3)
    tensors["left.over"] = torch.zeros(2)
    words = refusal(write(tmp_path / "model", RAW[family], tensors))
    prefix = weights.FAMILIES[family].prefix
    assert f"missing: {missing.removeprefix(prefix)} [" in words
    assert "unexpected: left.over [2] in model.safetensors" in words
    assert f"misshapen: {misshapen} is [5, 3] in model.safetensors, expected [" in words
    assert str(tmp_path / "model") in words


def test_what_differs_is_listed_with_its_shard(family, tmp_path):
    tensors = tensors_of(RAW[family]) | {"left.over": torch.zeros(2)}
    directory = write_shards(tmp_path / "model", RAW[family], tensors)
    assert re.search(
        r"unexpected: left\.over \[2\] in model-[12]-of-2\.safetensors", refusal(directory)
    )


def test_a_long_list_is_cut_with_a_count(tmp_path):
    words = refusal(write(tmp_path / "model", GPT2 | {"n_layer": 40}, tensors_of(GPT2)))
    assert words.count("missing:") == 20
    assert re.search(r"and \d+ more$", words)


@pytest.mark.parametrize(
    ("raw", "change"),
    [
        (GPT2 | {"vocab_size": 40}, "wte.weight is [31, 8] in model.safetensors, expected [40, 8]"),
        (
            GPT2 | {"n_positions": 32},
            "wpe.weight is [16, 8] in model.safetensors, expected [32, 8]",
        ),
        (
            GPT2 | {"n_inner": 16},
            "mlp.c_fc.weight is [8, 32] in model.safetensors, expected [8, 16]",
        ),
        (GPT2 | {"n_layer": 1}, "unexpected: transformer.h.1.ln_1.weight [8]"),
        (GPT2 | {"n_layer": 3}, "missing: h.2.attn.c_attn.weight [8, 24]"),
        (GPT2 | {"tie_word_embeddings": False}, "missing: lm_head.weight [31, 8]"),
        (LLAMA | {"head_dim": 4}, "q_proj.weight is [12, 8] in model.safetensors, expected [8, 8]"),
        (
            LLAMA | {"num_key_value_heads": 2},
            "k_proj.bias is [6] in model.safetensors, expected [12]",
        ),
        (
            LLAMA | {"attention_bias": False},
            "unexpected: model.layers.0.self_attn.q_proj.bias [12]",
        ),
        (LLAMA | {"mlp_bias": False}, "unexpected: model.layers.1.mlp.down_proj.bias [8]"),
    ],
)
def test_a_config_of_another_model_is_refused_by_tensor(raw, change, tmp_path):
    """B71, B77, B83: the position table, head_dim, biases, layers, an absent untied head."""
    written = GPT2 if raw["model_type"] == "gpt2" else LLAMA
    assert change in refusal(write(tmp_path / "model", raw, tensors_of(written)))


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("written", "raw", "faults"),
    [
        (QWEN3, QWEN2, [f"unexpected: {ATTENTION}.q_norm.weight [6]", "missing: layers.0.self"]),
        (QWEN3, PLAIN, [f"unexpected: {ATTENTION}.k_norm.weight [6]"]),
        (PLAIN, QWEN3, ["missing: layers.0.self_attn.q_norm.weight [6]"]),
        (QWEN2, PLAIN, [f"unexpected: {ATTENTION}.v_proj.bias [6]"]),
        (PLAIN, QWEN2, ["missing: layers.1.self_attn.k_proj.bias [6]"]),
        (LLAMA, QWEN2, [f"unexpected: {ATTENTION}.o_proj.bias [8]"]),
        (LLAMA, MISTRAL, [f"unexpected: {ATTENTION}.q_proj.bias [12]"]),
        (QWEN3 | {"attention_bias": True}, QWEN3, [f"unexpected: {ATTENTION}.o_proj.bias [8]"]),
        (QWEN3, QWEN3 | {"head_dim": 4}, ["q_norm.weight is [6] in model.safetensors, expected"]),
    ],
)
def test_the_weights_of_another_family_are_refused_by_tensor(written, raw, faults, tmp_path):
    """B71: nothing in a file goes unused, nothing that a family has is made up."""
    words = refusal(write(tmp_path / "model", raw, tensors_of(written)))
    assert f"({raw['model_type']})" in words
    assert all(fault in words for fault in faults)


def test_a_tied_pair_with_neither_tensor_is_refused_by_name(tmp_path):
    """B71: one of the two suffices, none does not."""
    tensors = {k: v for k, v in tensors_of(GPT2).items() if "wte" not in k}
    assert "missing: wte.weight [31, 8]" in refusal(write(tmp_path / "model", GPT2, tensors))


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path):
    """B79: which of the two would it be?"""
    tensors = tensors_of(GPT2)
    tensors["wte.weight"] = tensors["transformer.wte.weight"].clone()
    words = refusal(write(tmp_path / "model", GPT2, tensors))
    assert "wte.weight is in model.safetensors too; expected once" in words


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.int8, "I8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
    ],
)
def test_weights_of_an_unknown_kind_are_refused_by_name(dtype, kind, tmp_path):
    tensors = tensors_of(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = torch.zeros(tensors[name].shape, dtype=dtype)
    words = refusal(write(tmp_path / "model", LLAMA, tensors))
    assert f"{name} is stored as {kind}; expected one of F64, F32, F16, BF16" in words
    assert "model.safetensors" in words


# --- damaged files -------------------------------------------------------------------------------


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_in_header(data: bytes) -> bytes:
    return data[:60]


def longer(data: bytes) -> bytes:
    return data + b"\0" * 7


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


DAMAGES = {
    "cut short": cut,
    "cut in the header": cut_in_header,
    "too long": longer,
    "empty": lambda data: b"",
    "four bytes": lambda data: b"abcd",
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n",
    "a header longer than the file": lambda data: struct.pack("<Q", 2**40) + data[8:],
    "a header that is no JSON": lambda data: header(b"{nonsense}"),
    "a header that is a list": lambda data: header(b"[1]"),
    "a header without offsets": lambda data: header(b'{"wte.weight": {"dtype": "F32"}}'),
    "offsets beyond the file": lambda data: header(
        b'{"wte.weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'
    ),
    "bytes flipped in the header": lambda data: data[:40] + b"\xff\xfe" + data[42:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_a_damaged_file_is_named(damage, sharded, tmp_path):
    writer = write_shards if sharded else write
    directory = writer(tmp_path / "model", LLAMA, tensors_of(LLAMA))
    path = sorted(directory.glob("*.safetensors"))[-1]
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    words = refusal(directory)
    assert str(path) in words
    assert "a whole safetensors file" in words and "bring it again" in words


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    directory = write(tmp_path / "model", LLAMA, tensors_of(LLAMA))
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    assert str(directory / "model.safetensors") in refusal(directory)


# --- the index of shards -------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "model", GPT2, tensors_of(GPT2))


def test_a_missing_shard_is_named(shards):
    (shards / "model-2-of-2.safetensors").unlink()
    words = refusal(shards)
    assert str(shards / "model-2-of-2.safetensors") in words
    assert "model.safetensors.index.json names it" in words


def test_an_index_that_names_absent_tensors_is_refused(shards):
    names = [*tensors_of(GPT2), "transformer.h.9.ghost"]
    write_index(shards, {n: f"model-{i % 2 + 1}-of-2.safetensors" for i, n in enumerate(names)})
    words = refusal(shards)
    assert "index.json: names tensors that no shard holds: transformer.h.9.ghost" in words


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", ""]
)
def test_an_index_reaches_no_file_but_those_beside_it(shard, shards):
    outside = shards.parent / "outside.safetensors"
    outside.write_bytes((shards / "model-1-of-2.safetensors").read_bytes())
    write_index(shards, dict.fromkeys(tensors_of(GPT2), shard))
    words = refusal(shards)
    assert "index.json" in words
    assert f"shard {shard!r} is a path; expected a file beside it" in words


@pytest.mark.parametrize("where", [{}, [], None, "model-1-of-2.safetensors"])
def test_an_index_without_a_map_is_named(where, shards):
    write_index(shards, where)
    assert "index.json: no weight_map; expected tensor name -> file name" in refusal(shards)


@pytest.mark.parametrize("name", [7, None, ["model-1-of-2.safetensors"]])
def test_a_map_to_what_is_no_name_is_refused(name, shards):
    write_index(shards, dict.fromkeys(tensors_of(GPT2), name))
    assert "index.json" in refusal(shards)


def test_one_file_is_taken_before_an_index(family, checkpoint):
    """As in transformers: an index left over from another save does not matter."""
    write_index(checkpoint, {"ghost": "nowhere.safetensors"})
    assert load_hf(checkpoint, device="cpu").config.vocab_size == 31


# --- directories that are no checkpoint ----------------------------------------------------------


def test_pickles_are_not_loaded(tmp_path):
    write(tmp_path, GPT2, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    words = refusal(tmp_path)
    assert "pytorch_model.bin" in words and "pickle" in words and "safetensors" in words
    config = ModelConfig.from_dict(GPT2)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        weights.load(tmp_path, config, torch.float32, torch.device("cpu"))


def test_a_directory_without_weights_or_config_is_named(tmp_path):
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    words = refusal(tmp_path)
    assert str(tmp_path) in words and "safetensors" in words
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors, or model\.safe"):
        weights.load(tmp_path, ModelConfig.from_dict(GPT2), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("{", CheckpointError, "not readable as JSON"),
        ("[]", CheckpointError, "expected a JSON object"),
        ('{"model_type": "bert"}', ConfigError, "one of the known families: gpt2, llama"),
        ('{"model_type": "gpt2", "vocab_size": "many"}', ConfigError, "vocab_size is 'many'"),
    ],
)
def test_a_bad_config_is_refused_before_any_weight_is_read(content, error, words, checkpoint):
    (checkpoint / "config.json").write_text(content)
    with pytest.raises(error, match=words) as caught:
        load_hf(checkpoint)
    assert str(checkpoint / "config.json") in str(caught.value)


def test_a_name_that_is_no_model_is_refused():
    with pytest.raises(ModelNotFound, match="no-such-model"):
        load_hf("no-such-model")


# --- where and in what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strange", [2**63, 10**5000, [1, 2], object()], ids=lambda x: type(x).__name__
)
def test_a_device_or_dtype_of_any_kind_is_refused_in_words(strange):
    with pytest.raises(RequestError, match=r"^device .*: expected 'auto', 'cpu' or 'cuda'"):
        pick_device(strange)
    config = ModelConfig.from_dict(GPT2)
    with pytest.raises(RequestError, match=r"^dtype .*: expected 'auto' or one of"):
        pick_dtype(strange, torch.device("cpu"), config)


def test_auto_is_float32_on_a_cpu_and_the_files_own_on_a_gpu():
    config = ModelConfig.from_dict(GPT2 | {"dtype": "bfloat16"})
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert pick_dtype("auto", cpu, config) == torch.float32
    assert pick_dtype("auto", gpu, config) == torch.bfloat16
    assert pick_dtype("auto", gpu, ModelConfig.from_dict(GPT2)) == torch.float32
    old = ModelConfig.from_dict(GPT2 | {"torch_dtype": "float16"})
    assert pick_dtype("auto", gpu, old) == torch.float16
    assert pick_dtype(torch.float64, cpu, config) == torch.float64
    assert pick_dtype("float16", cpu, config) == torch.float16


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "float", "", 16, None])
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype):
    with pytest.raises(RequestError, match="expected 'auto' or one of float64, float32, float16"):
        pick_dtype(dtype, torch.device("cpu"), ModelConfig.from_dict(GPT2))


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cpu:x", "", "cuda:99", 3, None])
def test_a_device_that_cannot_be_had_is_refused_in_words(device):
    with pytest.raises(RequestError, match="device"):
        pick_device(device)
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.cuda
def test_a_model_on_a_gpu_is_the_model_on_the_cpu(checkpoint):
    here, there = (parameters(load_hf(checkpoint, device=d)) for d in ("cpu", "cuda"))
    for at, tensor in there.items():
        assert tensor.device.type == "cuda"
        assert torch.allclose(tensor.cpu(), here[at])


# --- memory --------------------------------------------------------------------------------------

# Sampled from a thread while the weights load, in a process of its own; the baseline is taken after
# torch has done each kind of work once, so that what it sets up for itself is not counted.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from spindle import kernels, load_hf

def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

kernels.linear(torch.randn(3, 64), kernels.pack(torch.randn(64, 64)))
load_hf(sys.argv[2], device="cpu")
before, peak, done = anonymous_bytes(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
model = load_hf(sys.argv[1], device="cpu", dtype="float32")
done = True
watcher.join()
print(max(peak, anonymous_bytes()) - before)
"""


def printed(script: str, *arguments: Path) -> int:
    """The number that a script prints, run in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


BIG = {
    "llama, untied": dict(vocab_size=16384, num_hidden_layers=4, tie_word_embeddings=False),
    "llama, tied, head packed again": dict(
        vocab_size=10240, num_hidden_layers=6, tie_word_embeddings=True
    ),
    "gpt2, tied, head shared": dict(model_type="gpt2", vocab_size=32768, n_embd=768, n_layer=6),
}
BIG_LLAMA = dict(model_type="llama", hidden_size=1024, intermediate_size=2816)
BIG_LLAMA |= dict(num_attention_heads=16, num_key_value_heads=4)
CASES = [("llama, untied", d) for d in ("float32", "float16", "bfloat16")]
CASES += [("llama, tied, head packed again", "float16"), ("gpt2, tied, head shared", "float16")]


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon of /proc/self/status is Linux's")
@pytest.mark.parametrize(("shape", "stored"), CASES)
def test_loading_holds_little_more_than_the_weights(shape, stored, tmp_path):
    """About 300 MB of float32: anonymous memory stays below 1.25 times that while it loads."""
    raw = BIG[shape] if "model_type" in BIG[shape] else BIG_LLAMA | BIG[shape]
    config = ModelConfig.from_dict(raw)
    if config.tie_embeddings:
        assert weights.spare_head(config) == ("packed again" in shape)
    zeros = {
        name: torch.zeros(size, dtype=weights.DTYPES[stored])
        for name, size in wishes(config).shapes.items()
        if not (config.tie_embeddings and name == "lm_head.weight")
    }
    weights_bytes = 4 * sum(tensor.numel() for tensor in zeros.values())
    assert 250e6 < weights_bytes < 400e6
    big, small = write(tmp_path / "big", raw, zeros), tmp_path / "small"
    write(small, RAW[config.model_type], tensors_of(RAW[config.model_type]))
    del zeros
    ratio = printed(MEASURE, big, small) / weights_bytes
    print(f"{shape}, {stored} on disk: {ratio:.3f} times the weights")
    assert 0.95 < ratio <= 1.25


# --- hostile files -------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("place", [pipe, device, loop])
def test_what_is_no_file_is_named_and_not_waited_for(name, place, tmp_path):
    directory = write(tmp_path / "model", GPT2, tensors_of(GPT2))
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    place(directory / name)
    assert str(directory / name) in refusal(directory)


@pytest.mark.parametrize("place", [pipe, device, loop])
def test_a_shard_that_is_no_file_is_named_and_not_waited_for(place, shards):
    (shards / "model-1-of-2.safetensors").unlink()
    place(shards / "model-1-of-2.safetensors")
    assert str(shards / "model-1-of-2.safetensors") in refusal(shards)


@pytest.mark.parametrize(
    "name", ["a" * 5000 + ".safetensors", "\0.safetensors", "\ud800.safetensors", "x.bin", "model"]
)
def test_a_shard_of_a_name_that_no_file_has_is_refused(name, shards):
    write_index(shards, dict.fromkeys(tensors_of(GPT2), name))
    words = refusal(shards)
    assert "index.json" in words and len(words) < 1000
    assert words.isprintable()


def test_pickles_beside_the_weights_are_never_opened(checkpoint, monkeypatch):
    """Nor is a module that auto_map names: whoever opens one of them fails here."""
    for name in ("pytorch_model.bin", "x.pt", "evil.py", "pytorch_model.bin.index.json"):
        os.mkfifo(checkpoint / name)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw |= {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "trust_remote_code": True}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    before = set(sys.modules)
    assert load_hf(checkpoint, device="cpu").config.vocab_size == 31
    assert "evil" not in set(sys.modules) - before


def test_links_are_followed_as_in_the_hubs_cache(family, checkpoint, tmp_path):
    """snapshots/COMMIT holds links to ../../blobs/HASH; a user's own link may lead anywhere."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for n, path in enumerate(sorted(checkpoint.iterdir())):
        (blobs / str(n)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(n))
    linked, plain = (
        parameters(load_hf(snapshot, device="cpu")),
        parameters(load_hf(checkpoint)),
    )
    assert all(torch.equal(tensor, plain[at]) for at, tensor in linked.items())


def test_a_name_that_stands_twice_in_a_header_is_refused(tmp_path):
    """One reader takes the first of two, another the last."""
    directory = write(tmp_path / "model", LLAMA, tensors_of(LLAMA))
    path = directory / "model.safetensors"
    (length,) = struct.unpack("<Q", (data := path.read_bytes())[:8])
    text, body = data[8 : 8 + length].decode().rstrip(), data[8 + length :]
    entry = json.dumps(json.loads(text)["model.layers.0.mlp.gate_proj.weight"])
    text = text[:-1] + f', "model.layers.0.mlp.gate_proj.weight": {entry}}}'
    path.write_bytes(header(text.encode()) + body)
    words = refusal(directory)
    assert str(path) in words and "a whole safetensors file" in words


def test_a_name_that_cannot_be_printed_is_escaped(tmp_path):
    tensors = tensors_of(GPT2) | {"\x1b[2J\0" + "x" * 9999: torch.zeros(2)}
    words = refusal(write(tmp_path / "model", GPT2, tensors))
    assert r"unexpected: \x1b[2J\x00xxx" in words
    assert len(words) < 1000 and words.replace("\n", "").isprintable()


HUGE = {
    "layers": (GPT2, {"n_layer": 2**31 - 1}, "it has at least"),
    "a width": (GPT2, {"n_embd": 2**28}, "misshapen"),
    "a vocabulary": (LLAMA, {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "2147483647 x"),
    "a head": (LLAMA, {"head_dim": 2**31 - 2, "hidden_size": 2**31 - 1}, "the weights are not"),
    "an mlp": (LLAMA, {"intermediate_size": 2**31 - 1}, "misshapen"),
    "learned positions": (GPT2, {"n_positions": 2**31 - 1}, "misshapen: transformer.wpe.weight"),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_config_that_asks_for_the_impossible_is_refused_at_once(case, tmp_path):
    raw, change, words = HUGE[case]
    said = refusal(write(tmp_path / "model", raw | change, tensors_of(raw)))
    assert "the weights are not those of its config.json" in said
    assert words in said


@pytest.mark.parametrize("positions", [2**25, 2**31 - 1])
def test_a_table_of_rope_beyond_all_proportion_is_refused(positions, tmp_path):
    """Nothing in the weights says how long it is; a gigabyte for a file of 9 kB is no model."""
    raw = LLAMA | {"max_position_embeddings": positions}
    directory = write(tmp_path / "model", raw, tensors_of(LLAMA))
    with pytest.raises(ConfigError, match=f"config.json: max_position_embeddings is {positions}"):
        load_hf(directory, device="cpu")


def test_the_bound_of_ropes_table_is_the_larger_of_two(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "TABLE_BYTES", 16 * 6 * 4)
    assert load_hf(write(tmp_path / "a", LLAMA, tensors_of(LLAMA)), device="cpu")
    floats = sum(tensor.numel() for tensor in tensors_of(LLAMA).values())
    for positions, fits in ((floats // 6, True), (floats // 6 + 1, False)):
        raw = LLAMA | {"max_position_embeddings": positions}
        directory = write(tmp_path / str(positions), raw, tensors_of(LLAMA))
        if fits:
            assert load_hf(directory, device="cpu").config.max_positions == positions
        else:
            with pytest.raises(ConfigError, match="max_position_embeddings"):
                load_hf(directory, device="cpu")
