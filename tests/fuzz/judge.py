"""Load a damaged checkpoint as a user would, and hold what comes out against a second reading."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import shapes
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from fuzz import bases, readers
from fuzz.cases import Case
from spindle import gguf_import
from spindle.config import ModelConfig
from spindle.errors import RequestError, SpindleError
from spindle.kernels import Weight, pack
from spindle.model import weights
from spindle.model.layers import Source
from spindle.tokenizer import Tokenizer

LONGEST = 5000  # characters of a message
TEXTS = ["hello world", "", "Příliš €5 12345  x\n", "<s>he</s>", "\U0001f600 \u0301a"]
TEXTS += ["a" * 60 + "b", "x" * 40, "lllll"]
HELLO = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}] * 2


def warm() -> None:
    """Have imports and first calls behind us, so that no case is charged with their memory."""
    import tempfile

    import gguf
    import jinja2.ext
    import jinja2.sandbox

    assert gguf and jinja2.sandbox and jinja2.ext
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as parent:
        for n, kind in enumerate(JUDGES):
            files = {"config": bases.one_file("llama"), "safetensors": bases.one_file("gpt2")}
            files |= {"shards": bases.sharded("qwen3"), "gguf": {"model.gguf": bases.gguf()[0]}}
            case = Case(kind, 0, files.get(kind) or bases.tokenizer("byte level"))
            folder = Path(parent) / str(n)
            folder.mkdir()
            for name, content in case.files.items():
                (folder / name).write_bytes(content)
            assert judge(case, folder) == "loaded", kind


def judge(case: Case, folder: Path) -> str:
    """ "loaded", and right, or "refused", in words that name a file; AssertionError: neither."""
    try:
        JUDGES[case.kind](case, folder)
    except SpindleError as error:
        check_words(str(error), case, folder)
        assert case.what != "nothing", f"a whole checkpoint is refused: {error}"
        return "refused"
    return "loaded"


def check_words(words: str, case: Case, folder: Path) -> None:
    """A message names a file of the checkpoint, is not endless, and can be printed."""
    names = {*case.files, *case.odd, "chat template"}
    assert any(name in words for name in names), f"no file is named: {words[:500]}"
    assert len(words) < LONGEST, f"{len(words)} characters: {words[:300]}"
    printable = words.encode("utf-8", "replace").decode() == words and "\0" not in words
    assert printable, f"cannot be printed: {words[:300]!a}"


# Models.


def judge_model(case: Case, folder: Path) -> None:
    """Every number of the model is the one that another reading finds under its name."""
    config = ModelConfig.from_directory(folder)
    check_config(config, json.loads((folder / "config.json").read_text()))
    model = weights.load_hf(folder, device="cpu", dtype="float64")
    given = second_reading(folder)
    family = weights.FAMILIES[config.model_type]
    expected = family(config, Second(config, given, family.prefix))
    ours, theirs = shapes.parameters(model), shapes.parameters(expected)
    assert ours.keys() == theirs.keys()
    for at, tensor in ours.items():
        assert torch.equal(bits(tensor), bits(theirs[at])), f"a wrong tensor: {at}"


def bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN when its bits do."""
    return tensor.contiguous().flatten().view(torch.uint8)


def second_reading(folder: Path) -> dict[str, Tensor]:
    """All tensors of a directory, read by other code; AssertionError: the files are not whole."""
    single = folder / "model.safetensors"
    named = [single]
    if not single.exists():
        where = json.loads((folder / bases.INDEX).read_text())  # the last of two, as everywhere
        named = [folder / name for name in sorted(set(where["weight_map"].values()))]
    found: dict[str, Tensor] = {}
    for path in named:
        try:
            more = readers.safetensors(path)
        except (readers.Refused, ValueError, KeyError) as error:
            raise AssertionError(f"loaded, but {path.name} is not whole: {error}") from error
        assert not found.keys() & more.keys(), "a tensor is there twice"
        found |= more
    return found


class Second(Source):
    """The weights of a second reading, asked for by a model."""

    def __init__(self, config: ModelConfig, given: dict[str, Tensor], prefix: str) -> None:
        super().__init__(torch.float64, torch.device("cpu"))
        self.given = {name.removeprefix(prefix): tensor for name, tensor in given.items()}

    def fill(self, out: Tensor, name: str) -> None:
        assert out.shape == self.given[name].shape, f"{name} has another shape"
        out.copy_(self.given[name])

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Tensor, Weight]:
        table = self(embed if embed in self.given else head, rows, width)
        return table, pack(self(head if head in self.given else embed, rows, width))


STATED = {
    "gpt2": {
        "n_embd": "width",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_inner": "mlp_width",
    },
    "llama": {
        "hidden_size": "width",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "mlp_width",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
}


def check_config(config: ModelConfig, raw: dict[str, Any]) -> None:
    """What a config says is what the file says, number by number."""
    stated = STATED["gpt2" if config.model_type == "gpt2" else "llama"] | {
        "vocab_size": "vocab_size"
    }
    for theirs, ours in stated.items():
        if raw.get(theirs) is not None:
            value = getattr(config, ours)
            assert value == raw[theirs], f"{ours} is {value}, the file's {theirs} is {raw[theirs]}"
    for value in (config.norm_eps, config.rope.theta if config.rope else 1.0):
        assert math.isfinite(value) and value > 0
    assert all(0 <= i < 2**32 for i in (*config.eos_ids, config.bos_id or 0)), config.eos_ids


# Tokenizers.


def judge_tokenizer(case: Case, folder: Path) -> None:
    """Texts have the library's ids; ids have the library's text, where it has one."""
    ours = Tokenizer(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None
    assert ours.vocab_size == max(library.get_vocab().values(), default=-1) + 1
    for text in TEXTS:
        try:
            ids = ours.encode(text)
        except RequestError:  # it has none here
            with pytest.raises(Exception):  # noqa: B017 - the library raises no narrower kind
                library.encode(text)
            continue
        assert ids == library.encode(text).ids, f"other ids for {text!r}"
        again, theirs = ours.decode(ids), library.decode(ids)
        if "\ufffd" not in again + theirs:
            assert again == theirs, f"{ids} is {again!r}, and {theirs!r} to the library"
    for token_id in [*range(min(ours.vocab_size, 300)), ours.vocab_size - 1, ours.vocab_size]:
        if token_id >= 0:
            ours.token_bytes(token_id)
    if ours.chat_template is not None:
        assert isinstance(ours.render_chat(HELLO), str)


def judge_template(case: Case, folder: Path) -> None:
    """A text, or an error in words; the messages are what they were."""
    before = json.dumps(HELLO)
    ours = Tokenizer(folder)
    for name in ours._chat.sources:
        assert isinstance(ours.render_chat(HELLO, template=name, tools=[{"a": 1}]), str)
    assert json.dumps(HELLO) == before


# GGUF.


def judge_gguf(case: Case, folder: Path) -> None:
    """The converted tensors are those of a second reading, and the result can be loaded."""
    out = folder / "out"
    out.mkdir()
    try:
        gguf_import.convert(folder / "model.gguf", out)
    except SpindleError:
        assert not list(out.iterdir()), "a refused file has left something behind"
        raise
    try:
        metadata, tensors = readers.gguf(folder / "model.gguf")
    except (readers.Refused, ValueError, KeyError, OverflowError) as error:
        raise AssertionError(f"converted, but it is not whole: {error}") from error
    found = load_file(out / "model.safetensors")
    heads = {"attn_q": bases.G_H, "attn_k": bases.G_HK}
    for name, values in tensors.items():
        theirs = bases.G_TENSORS[name][0]
        stem = name.split(".")[-2]
        if stem in heads:  # from neighbouring pairs to two halves
            rows = values.reshape(heads[stem], -1, 2, values.shape[1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        assert torch.equal(bits(found.pop(theirs)), bits(torch.tensor(values))), f"wrong: {name}"
    assert not found
    loaded = weights.load_hf(out, device="cpu", dtype="float64")
    assert loaded.config.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    ours = Tokenizer(out)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [ours.id_to_token(n) for n in range(len(tokens))] == tokens
    ours.encode("hello world")


JUDGES = {
    "config": judge_model,
    "safetensors": judge_model,
    "shards": judge_model,
    "tokenizer": judge_tokenizer,
    "template": judge_template,
    "gguf": judge_gguf,
}
