"""A Llama checkpoint -> a GGUF file in float32, for llama.cpp: what `gguf_import` does, backwards.

The keys and names are those of the documentation of GGUF (ggml). The tokenizer's words are written
because llama.cpp will not load a model without any; nothing is ever tokenized with them.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch

from spindle.config import ModelConfig, RopeConfig
from spindle.errors import ConfigError
from spindle.gguf_import import CONTROL_TOKEN, ONE_LAYER, WHOLE_MODEL
from spindle.model.llama import Llama
from spindle.model.weights import Checkpoint, wishes

NORMAL_TOKEN, UNUSED_TOKEN = 1, 5


def refusal(config: ModelConfig) -> str | None:
    """Why no file is written of a model, in words; None if one is."""
    if config.model_type != "llama":
        return f"a GGUF is written of Llama models alone, and this is {config.model_type}"
    plain_rope = RopeConfig(theta=config.rope.theta) if config.rope else None
    biased = config.qkv_bias or config.out_bias or config.mlp_bias
    if biased or config.rope != plain_rope or config.activation != "silu":
        return "a GGUF is written of Llama models without biases, with plain RoPE and SiLU alone"
    return None


def write(directory: Path, file: Path) -> None:
    """Write the checkpoint of `directory` to `file`. ConfigError for what `refusal` refuses."""
    config = ModelConfig.from_directory(directory)
    if words := refusal(config):
        raise ConfigError(f"{directory}: {words}")
    writer = gguf.GGUFWriter(file, "llama")
    _add_shape(writer, config)
    _add_words(writer, directory, config)
    _add_tensors(writer, directory, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    assert config.rope is not None, "what `refusal` lets through has RoPE"
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _add_words(writer: gguf.GGUFWriter, directory: Path, config: ModelConfig) -> None:
    """The tokens of tokenizer.json, a byte-level BPE; ids without a token are filled up."""
    stored = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[unused {n}]" for n in range(config.vocab_size)]
    kinds = [UNUSED_TOKEN] * config.vocab_size
    for token, n in stored["model"]["vocab"].items():
        tokens[n], kinds[n] = token, NORMAL_TOKEN
    for added in stored.get("added_tokens", ()):
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL_TOKEN
    merges = [one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["! !"])  # llama.cpp insists on one
    for n in config.eos_ids[:1]:
        writer.add_eos_token_id(n)


def _add_tensors(writer: gguf.GGUFWriter, directory: Path, config: ModelConfig) -> None:
    """All weights in float32; a tied head is left out, as llama.cpp has it."""
    checkpoint = Checkpoint(directory, config, Llama.prefix, Llama.buffers)
    wanted = wishes(config)
    checkpoint.check(wanted)
    reader = checkpoint.reader(torch.float32, torch.device("cpu"))
    for name, shape in wanted.shapes.items():
        if name not in checkpoint.files or (config.tie_embeddings and name == wanted.pair[1]):
            continue
        weight = torch.empty(shape)
        reader.fill(weight, name)
        writer.add_tensor(gguf_name(name), _ordered(name, weight.numpy(), config))


def gguf_name(name: str) -> str:
    """`layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem = name.removesuffix(".weight")
    for ours, theirs in WHOLE_MODEL.items():
        if stem == theirs.removeprefix("model."):
            return f"{ours}.weight"
    _, layer, inner = stem.split(".", 2)
    (found,) = (ours for ours, theirs in ONE_LAYER.items() if theirs == inner)
    return f"blk.{layer}.{found}.weight"


def _ordered(name: str, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    if name.endswith("q_proj.weight"):
        return pairs_from_halves(weight, config.num_heads)
    if name.endswith("k_proj.weight"):
        return pairs_from_halves(weight, config.num_kv_heads)
    return weight


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp rotates them: of each head 0, D/2, 1, D/2+1, ..."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])  # [H, 2, D/2, E]
    return halves.swapaxes(1, 2).reshape(weight.shape)  # [H*D, E]
