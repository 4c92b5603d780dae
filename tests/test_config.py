"""config.json -> ModelConfig: both layouts of RoPE, every dialect, and refusals in words."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spindle.config import ModelConfig, RopeConfig
from spindle.errors import CheckpointError, ConfigError, SpindleError
from spindle.model.layers import Rope, inverse_frequencies

GPT2 = dict(model_type="gpt2", **oracle.GPT2_SHAPE)
LLAMA = dict(model_type="llama", **oracle.LLAMA_SHAPE)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = dict(**LLAMA3, original_max_position_embeddings=64)
STRETCHED = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 64)


def write(directory: Path, content: Any, name: str = "config.json") -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text)
    return directory


def read(directory: Path, content: Any) -> ModelConfig:
    return ModelConfig.from_directory(write(directory, content))


# --- what is read --------------------------------------------------------------------------------


def test_gpt2_says_it_in_its_own_words():
    config = ModelConfig.from_dict(GPT2)
    assert (config.vocab_size, config.max_positions, config.num_layers) == (97, 128, 3)
    assert (config.width, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 4, 12)
    assert (config.mlp_width, config.activation, config.norm_eps) == (192, "gelu_new", 1e-5)
    assert config.tie_embeddings and config.attention_bias and config.mlp_bias
    assert config.rope is None


def test_llama_states_or_implies():
    """B77: head_dim is read where it is stated, else width / heads."""
    config = ModelConfig.from_dict(LLAMA)
    assert (config.width, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 2, 12)
    assert (config.mlp_width, config.num_layers, config.max_positions) == (80, 3, 128)
    assert not (config.tie_embeddings or config.attention_bias or config.mlp_bias)
    assert ModelConfig.from_dict(LLAMA | {"head_dim": 16}).head_dim == 16
    assert ModelConfig.from_dict(LLAMA | {"hidden_size": 50, "head_dim": 16}).head_dim == 16
    assert ModelConfig.from_dict({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_defaults_are_those_of_transformers(family):
    """What a file leaves out is what transformers' config class has."""
    theirs = oracle.CONFIGS[family]()
    required = {"vocab_size"} | set(oracle.LLAMA_SHAPE if family == "llama" else ())
    stated = {key: getattr(theirs, key) for key in required - {"max_position_embeddings"}}
    config = ModelConfig.from_dict({"model_type": family, **stated})
    assert config.width == theirs.hidden_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_heads == theirs.num_attention_heads
    assert config.max_positions == theirs.max_position_embeddings
    assert config.tie_embeddings == theirs.tie_word_embeddings
    if family == "gpt2":
        assert config.norm_eps == theirs.layer_norm_epsilon
        assert config.activation == theirs.activation_function
        assert config.scale_by_head == theirs.scale_attn_weights
        assert config.scale_by_layer == theirs.scale_attn_by_inverse_layer_idx
    else:
        assert config.norm_eps == theirs.rms_norm_eps
        assert config.activation == theirs.hidden_act
        assert config.attention_bias == theirs.attention_bias
        assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])


def test_attention_scale_has_both_of_gpt2s_flags():
    scale = ModelConfig.from_dict(GPT2).attention_scale
    assert scale(0) == scale(2) == pytest.approx(12**-0.5)
    plain = ModelConfig.from_dict(GPT2 | {"scale_attn_weights": False})
    assert plain.attention_scale(2) == 1.0
    layered = ModelConfig.from_dict(GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    assert layered.attention_scale(2) == pytest.approx(12**-0.5 / 3)


def test_nothing_in_a_config_can_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig.from_dict(GPT2).width = 1


# --- RoPE ----------------------------------------------------------------------------------------

LAYOUTS = {
    "neither": ({}, RopeConfig()),
    "old": ({"rope_theta": 500_000.0}, RopeConfig(500_000.0)),
    "old, nothing scaled": ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(500_000.0)),
    "old, rope_type": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LONG}},
        STRETCHED,
    ),
    "old, type": ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LONG}}, STRETCHED),
    "old, both spellings": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "llama3", **LONG}},
        STRETCHED,
    ),
    "new": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000}},
        RopeConfig(500_000.0),
    ),
    "new, no type": ({"rope_parameters": {"rope_theta": 500_000}}, RopeConfig(500_000.0)),
    "new, llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LONG}},
        STRETCHED,
    ),
    "theta conflicts: the inner wins": (
        {"rope_theta": 20_000, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        RopeConfig(500_000.0),
    ),
    "theta beside the new layout": (
        {"rope_theta": 20_000, "rope_parameters": {"rope_type": "default"}},
        RopeConfig(20_000.0),
    ),
    "both dictionaries: rope_scaling wins": (
        {
            "rope_scaling": {"rope_type": "llama3", "rope_theta": 5e5, **LONG},
            "rope_parameters": {"rope_type": "default", "rope_theta": 30_000},
        },
        STRETCHED,
    ),
    "the original length is the present one": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        dataclasses.replace(STRETCHED, original_positions=128),
    ),
    "the original length stands outside": (
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
        STRETCHED,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_in_every_layout_is_what_transformers_reads(layout, tmp_path):
    """B73, B74: theta and type from either layout, conflicts included; equal frequencies."""
    keys, expected = LAYOUTS[layout]
    config = read(tmp_path, LLAMA | keys)
    assert config.rope == expected
    theirs = oracle.inverse_frequencies(tmp_path)
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), theirs)


def test_llama3_stretches_in_three_bands(tmp_path):
    """B73, B75: Llama 3.1's own constants: some pairs alone, some slowed whole, some between."""
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}
    rope["original_max_position_embeddings"] = 8192
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    config = read(tmp_path, LLAMA | shape | {"rope_parameters": rope})
    ours = inverse_frequencies(config.rope, 64)
    plain = inverse_frequencies(RopeConfig(500_000.0), 64)
    alone, whole = ours == plain, ours == plain / 8
    between = (ours < plain) & (ours > plain / 8)
    assert alone.sum() + whole.sum() + between.sum() == 32
    assert min(alone.sum(), whole.sum(), between.sum()) >= 2
    assert torch.equal(ours, oracle.inverse_frequencies(tmp_path))


def test_rotary_tables_are_those_of_transformers_to_the_last_position(tmp_path):
    """B75: beyond the original length too; position 0 is no rotation."""
    keys, _ = LAYOUTS["new, llama3"]
    config = read(tmp_path, LLAMA | keys)
    rope = Rope(config.rope, config.head_dim, config.max_positions, torch.device("cpu"))
    cos, sin = rope.at(torch.arange(128))
    assert cos.dtype == torch.float32 and cos.shape == (128, 6)
    theirs = oracle.rope_tables(tmp_path, 128)
    # An ulp: torch's vector cosine and its scalar one for a row's last elements may differ in it.
    assert torch.allclose(cos, theirs[0], rtol=0, atol=2**-23)
    assert torch.allclose(sin, theirs[1], rtol=0, atol=2**-23)
    assert torch.equal(cos[0], torch.ones(6)) and torch.equal(sin[0], torch.zeros(6))


UNKNOWN_ROPE = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "longrope": {"rope_scaling": {"rope_type": "longrope", "short_factor": [], "long_factor": []}},
    "new kind": {"rope_parameters": {"rope_type": "new kind"}},
}


@pytest.mark.parametrize("kind", UNKNOWN_ROPE)
def test_an_unknown_rope_type_is_refused_by_name(kind):
    """B73, B75, B76: what we do not compute is not approximated."""
    with pytest.raises(
        ConfigError, match=rf"rope_type is '{kind}'; expected 'default' or 'llama3'"
    ):
        ModelConfig.from_dict(LLAMA | UNKNOWN_ROPE[kind])


# --- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "no vocabulary": (GPT2, {"vocab_size": None}, "vocab_size"),
    "width in words": (GPT2, {"n_embd": "wide"}, "n_embd"),
    "half a layer": (GPT2, {"n_layer": 2.5}, "n_layer"),
    "no layers": (GPT2, {"n_layer": 0}, "n_layer"),
    "true is no number": (GPT2, {"n_head": True}, "n_head"),
    "heads that do not divide": (GPT2, {"n_head": 5}, "n_head"),
    "negative epsilon": (GPT2, {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon"),
    "infinite epsilon": (GPT2, {"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon"),
    "an epsilon that is not a number": (GPT2, {"layer_norm_epsilon": float("nan")}, "epsilon"),
    "an epsilon no float can hold": (GPT2, {"layer_norm_epsilon": 10**400}, "epsilon"),
    "unknown activation": (GPT2, {"activation_function": "swishy"}, "activation_function"),
    "cross attention": (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    "tied in words": (GPT2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "a quantised file": (GPT2, {"quantization_config": {"bits": 4}}, "quantization_config"),
    "eos in words": (GPT2, {"eos_token_id": "</s>"}, "eos_token_id"),
    "eos, one of them in words": (GPT2, {"eos_token_id": [1, "</s>"]}, "eos_token_id"),
    "bos in words": (GPT2, {"bos_token_id": "<s>"}, "bos_token_id"),
    "dtype is a number": (GPT2, {"dtype": 16}, "dtype"),
    "kv heads that do not divide": (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd head": (LLAMA, {"head_dim": 15}, "head_dim"),
    "width that heads do not divide": (LLAMA, {"hidden_size": 50}, "num_attention_heads"),
    "no width": (LLAMA, {"hidden_size": None}, "hidden_size"),
    "sliding window": (LLAMA, {"sliding_window": 64}, "sliding_window"),
    "rope is a list": (LLAMA, {"rope_parameters": [1]}, "rope_parameters"),
    "rope by layer type": (
        LLAMA,
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
        "rope_parameters",
    ),
    "theta in words": (LLAMA, {"rope_theta": "1e4"}, "rope_theta"),
    "part of the head": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "llama3 without factors": (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor"),
    "llama3, bands swapped": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", **LONG, "low_freq_factor": 8.0}},
        "low_freq_factor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_with_file_key_and_what_is_right(case, tmp_path):
    base, change, key = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, base | change)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert key in str(refusal.value) and "expected" in str(refusal.value)


@pytest.mark.parametrize("model_type", ["bert", "", None, 7])
def test_an_unknown_family_is_told_the_known_ones(model_type):
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.from_dict({"model_type": model_type})
    with pytest.raises(ConfigError, match="gpt2, llama"):
        ModelConfig.from_dict({"model_type": "bert"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not readable as JSON"),
        ('{"model_type": "gpt2"', "not readable as JSON"),
        ("[1, 2]", "holds a list, expected a JSON object"),
        ("null", "expected a JSON object"),
        ("[" * 100_000, "not readable as JSON"),
    ],
    ids=["empty", "cut off", "a list", "null", "too deep"],
)
def test_a_file_that_is_no_config_is_named(text, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as refusal:
        read(tmp_path, text)
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_bytes_that_are_no_text_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        ModelConfig.from_directory(tmp_path)


KEYS = [*GPT2, *LLAMA, *LONG, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "type"]
KEYS += ["rope_type", "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "n_inner"]
KEYS += ["layer_norm_epsilon", "tie_word_embeddings", "hidden_act", "quantization_config"]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.sampled_from(["", "llama3", "default", "gelu", "float16", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=4,
)


@given(st.sampled_from([GPT2, LLAMA]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_object_at_all_is_read_or_refused_in_our_words(base, change):
    try:
        config = ModelConfig.from_dict(base | change)
    except SpindleError as refusal:
        assert "config.json" in str(refusal)
    else:
        assert config.head_dim >= 1 and config.num_heads % config.num_kv_heads == 0


# --- generation_config.json ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), (2, [2, 7], (2, 7)), (None, 7, (7,)), (2, 0, (0,)), (None, None, ())],
)
def test_end_of_sequence_ids_come_from_generation_config_first(
    config, generation, expected, tmp_path
):
    write(tmp_path, GPT2 | {"eos_token_id": config})
    write(tmp_path, {"eos_token_id": generation, "bos_token_id": 1}, "generation_config.json")
    read_back = ModelConfig.from_directory(tmp_path)
    assert read_back.eos_ids == expected
    assert read_back.bos_id == 1
