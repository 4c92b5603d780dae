"""config.json -> ModelConfig: every dialect, both layouts of RoPE, and refusals in words.

Each key that transformers has for a family is honoured, refused or without a part in the
computation; which of the three is declared here, tried, and complete by transformers' own source.
"""

import dataclasses
import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spindle.config import NEUTRAL, READERS, ROPE_KINDS, ModelConfig, RopeConfig
from spindle.errors import CheckpointError, ConfigError, SpindleError
from spindle.model.rope import KINDS, Rope, inverse_frequencies

RAW = {family: dict(model_type=family, **shape) for family, shape in oracle.SHAPES.items()}
GPT2, LLAMA = RAW["gpt2"], RAW["llama"]
MISTRAL, QWEN2, QWEN3 = RAW["mistral"], RAW["qwen2"], RAW["qwen3"]
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
    assert config.tie_embeddings and config.qkv_bias and config.out_bias and config.mlp_bias
    assert config.rope is None and not config.qk_norm


def test_llama_states_or_implies():
    """B77: head_dim is read where it is stated, else width / heads."""
    config = ModelConfig.from_dict(LLAMA)
    assert (config.width, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 2, 12)
    assert (config.mlp_width, config.num_layers, config.max_positions) == (80, 3, 128)
    assert not (config.tie_embeddings or config.qkv_bias or config.out_bias or config.mlp_bias)
    assert ModelConfig.from_dict(LLAMA | {"head_dim": 16}).head_dim == 16
    assert ModelConfig.from_dict(LLAMA | {"hidden_size": 50, "head_dim": 16}).head_dim == 16
    assert ModelConfig.from_dict({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


BIASES = {
    "gpt2": (True, True, True),
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, False),
}


@pytest.mark.parametrize("family", RAW)
def test_defaults_are_those_of_transformers(family):
    """What a file leaves out is what transformers' config class has."""
    theirs = oracle.CONFIGS[family]()
    required = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    required += ["num_attention_heads"]
    stated = {key: getattr(theirs, key) for key in required if hasattr(theirs, key)}
    if family == "mistral":
        stated["sliding_window"] = None  # its default of 4096 is refused, in a test of its own
    config = ModelConfig.from_dict({"model_type": family, **stated})
    assert config.width == theirs.hidden_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_heads == theirs.num_attention_heads
    assert config.max_positions == theirs.max_position_embeddings
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == BIASES[family]
    assert config.qk_norm == (family == "qwen3")
    if family == "gpt2":
        assert config.norm_eps == theirs.layer_norm_epsilon
        assert config.activation == theirs.activation_function
        assert config.scale_by_head == theirs.scale_attn_weights
        assert config.scale_by_layer == theirs.scale_attn_by_inverse_layer_idx
        assert not ModelConfig.from_dict({"model_type": "gpt2", "vocab_size": 5}).rope
    else:
        derived = theirs.hidden_size // theirs.num_attention_heads
        assert config.head_dim == getattr(theirs, "head_dim", derived)
        assert config.num_kv_heads == theirs.num_key_value_heads
        assert config.norm_eps == theirs.rms_norm_eps
        assert config.activation == theirs.hidden_act
        assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize(("family", "count"), {"mistral": 8, "qwen2": 32, "qwen3": 32}.items())
def test_a_count_of_kv_heads_that_is_not_stated_is_the_familys(family, count):
    raw = RAW[family] | {"num_attention_heads": 32, "hidden_size": 128}
    missing = {key: value for key, value in raw.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_dict(missing).num_kv_heads == count
    assert oracle.CONFIGS[family]().num_key_value_heads == count
    assert ModelConfig.from_dict(raw | {"num_key_value_heads": None}).num_kv_heads == 32
    if family != "mistral":  # whose class takes no null
        theirs = oracle.CONFIGS[family](num_attention_heads=64, num_key_value_heads=None)
        assert theirs.num_key_value_heads == 64


# --- every key of every family -------------------------------------------------------------------

# Honoured: the key -> another value, which makes another ModelConfig.
EVERYWHERE: dict[str, Any] = dict(vocab_size=98, dtype="float16", torch_dtype="bfloat16")
EVERYWHERE |= dict(bos_token_id=1, eos_token_id=[2, 3])
LLAMA_LIKE = EVERYWHERE | dict(
    hidden_size=96,
    intermediate_size=81,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=20,
    hidden_act="relu",
    max_position_embeddings=64,
    rms_norm_eps=0.1,
    tie_word_embeddings=True,
    rope_parameters={"rope_theta": 5.0},
    rope_scaling={"type": "linear", "factor": 2.0},
    rope_theta=5.0,
)
HONOURED: dict[str, dict[str, Any]] = {
    "gpt2": EVERYWHERE
    | dict(
        n_positions=64,
        n_embd=96,
        n_layer=2,
        n_head=2,
        n_inner=50,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        activation_function="relu",
        layer_norm_epsilon=0.1,
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "llama": LLAMA_LIKE | dict(attention_bias=True, mlp_bias=True),
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | dict(attention_bias=True),
}

# Refused: a change of one key, or of several that have an effect together only.
GENERIC: list[dict[str, Any]] = [
    dict(add_cross_attention=True),
    dict(attention_chunk_size=64),
    dict(is_causal=False),
    dict(is_encoder_decoder=True),
    dict(kv_sharing_modes=["own", "own", "reuse"]),
    dict(layer_types=["full_attention", "full_attention", "sliding_attention"]),
    dict(per_layer_config={"0": {"skip": ["attention"]}}),
    dict(pruned_heads={"1": [0]}),
    dict(transformers_weights="other.safetensors"),
    dict(quantization_config={"bits": 4}),
]
WINDOW = [*GENERIC, dict(sliding_window=64)]
QWEN = [*GENERIC, dict(sliding_window=64, use_sliding_window=True, max_window_layers=2)]
REFUSED_KEYS: dict[str, list[dict[str, Any]]] = {
    "gpt2": WINDOW,
    "llama": [*WINDOW, dict(partial_rotary_factor=0.5)],
    "mistral": [*WINDOW, dict(partial_rotary_factor=0.5)],
    "qwen2": [*QWEN, dict(partial_rotary_factor=0.5)],
    "qwen3": [*QWEN, dict(partial_rotary_factor=0.5)],
}

# Without a part in the computation of logits: the key -> another value, which changes nothing.
OUTSIDE: dict[str, Any] = dict(
    architectures=["Another"],
    attn_implementation="eager",  # another program for the same mathematics
    chunk_size_feed_forward=3,  # the same mathematics in pieces, where it is done at all
    id2label={"0": "a"},
    initializer_range=0.5,
    label2id={"a": 0},
    number_of_conv_states=2,  # of caches that these families do not have
    output_hidden_states=True,
    pad_token_id=7,  # the row of the embedding that is not trained
    problem_type="regression",
    return_dict=False,
    transformers_version="9.9",
    use_cache=False,
)
NO_PART: dict[str, dict[str, Any]] = {
    "gpt2": OUTSIDE
    | dict(
        attn_pdrop=0.5,
        embd_pdrop=0.5,
        resid_pdrop=0.5,
        reorder_and_upcast_attn=True,  # softmax in float32: ours is in any case
        summary_type="last",  # heads other than the language model's
        summary_use_proj=False,
        summary_activation="tanh",
        summary_proj_to_labels=False,
        summary_first_dropout=0.5,
        summary_last_dropout=0.5,
        classifier_dropout=0.5,
        hidden_dropout=0.5,
        num_labels=3,
    ),
    "llama": OUTSIDE | dict(attention_dropout=0.5, pretraining_tp=2),
    "mistral": OUTSIDE | dict(attention_dropout=0.5),
    "qwen2": OUTSIDE | dict(attention_dropout=0.5),
    "qwen3": OUTSIDE | dict(attention_dropout=0.5),
}


@pytest.mark.parametrize("family", RAW)
def test_every_key_of_transformers_is_in_one_of_three_sets(family):
    """A key that transformers gains, or begins to read, is a failure here, by its name."""
    refused = {key for change in REFUSED_KEYS[family] for key in change}
    sets = [set(HONOURED[family]), refused, set(NO_PART[family])]
    assert not sets[0] & sets[1] and not sets[1] & sets[2] and not sets[0] & sets[2]
    theirs = oracle.common_keys() | set(oracle.config_defaults(family)) | oracle.keys_read(family)
    assert theirs - set().union(*sets) == {"get_text_config"}  # a method
    assert set(NEUTRAL) <= refused


@pytest.mark.parametrize("family", RAW)
def test_honoured_keys_make_another_config(family):
    """B74, B77, B80."""
    for key, value in HONOURED[family].items():
        assert ModelConfig.from_dict(RAW[family] | {key: value}) != ModelConfig.from_dict(
            RAW[family]
        ), key


@pytest.mark.parametrize("family", RAW)
def test_refused_keys_are_refused_by_name_and_null_is_none(family):
    for change in REFUSED_KEYS[family]:
        with pytest.raises(ConfigError) as refusal:
            ModelConfig.from_dict(RAW[family] | change)
        assert f"{next(iter(change))} is " in str(refusal.value)
        assert "expected" in str(refusal.value)
        absent = RAW[family] | dict.fromkeys(change)
        if "max_window_layers" not in change:
            assert ModelConfig.from_dict(absent) == ModelConfig.from_dict(RAW[family]), change


@pytest.mark.parametrize("family", RAW)
def test_keys_without_a_part_in_the_computation_change_nothing(family):
    plain = ModelConfig.from_dict(RAW[family])
    assert ModelConfig.from_dict(RAW[family] | NO_PART[family]) == plain
    assert ModelConfig.from_dict(RAW[family] | {"a note": ["of", "whatever"]}) == plain
    assert ModelConfig.from_dict(RAW[family] | NEUTRAL) == plain


def test_every_family_is_declared():
    assert set(READERS) == set(RAW) == set(HONOURED) == set(REFUSED_KEYS) == set(NO_PART)


def test_gpt2_prefers_the_common_name_as_transformers_does():
    theirs = oracle.CONFIGS["gpt2"](n_embd=48, hidden_size=96, n_layer=3, num_hidden_layers=5)
    ours = ModelConfig.from_dict(GPT2 | {"hidden_size": 96, "num_hidden_layers": 5})
    assert (ours.width, ours.num_layers) == (theirs.n_embd, theirs.n_layer) == (96, 5)


WINDOWS = {
    "mistral's default": ("mistral", {"sliding_window": ...}, 4096),
    "mistral, one short": ("mistral", {"sliding_window": 127}, 127),
    "mistral, in words": ("mistral", {"sliding_window": "none"}, "none"),
    "mistral, true": ("mistral", {"sliding_window": True}, True),
    "llama": ("llama", {"sliding_window": 127}, 127),
    "qwen2, from the first layer": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
        64,
    ),
    "qwen3, the last layer": (
        "qwen3",
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64},
        64,
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_a_window_that_hides_something_is_refused_with_the_numbers(case):
    family, change, window = WINDOWS[case]
    raw = RAW[family] | {"max_position_embeddings": 128} | change
    if change.get("sliding_window") is ...:
        raw = {k: v for k, v in raw.items() if k != "sliding_window"}
        raw["max_position_embeddings"] = 8192
    positions = raw["max_position_embeddings"]
    with pytest.raises(ConfigError, match=f"sliding_window is {window!r}; .* at least {positions}"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 128}),
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {"layer_types": 3 * ["full_attention"]}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}),
        ("qwen3", {"layer_types": 3 * ["full_attention"]}),
        ("qwen3", {"layer_types": 3 * ["attention"]}),
    ],
)
def test_a_window_that_hides_nothing_is_no_window(family, change):
    assert ModelConfig.from_dict(RAW[family] | change) == ModelConfig.from_dict(RAW[family])


@pytest.mark.parametrize("types", [[], ["full_attention"], {}, ["full_attention", "attention"]])
@pytest.mark.parametrize("family", sorted(RAW))
def test_a_number_of_layers_that_is_a_lie_makes_nothing(family, types):
    """Not even a list of as many names, which would take 16 GB."""
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    tracemalloc.start()
    with pytest.raises(ConfigError, match=f"for each of {2**31 - 1} layers"):
        ModelConfig.from_dict(RAW[family] | {name: 2**31 - 1, "layer_types": types})
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_bias_flags_of_other_families_mean_nothing_here(family):
    """As in transformers: the family decides. A bias that is in the file then is left over."""
    other = {"attention_bias": family == "mistral", "mlp_bias": True, "qkv_bias": False}
    assert ModelConfig.from_dict(RAW[family] | other) == ModelConfig.from_dict(RAW[family])


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

YARN = dict(factor=4.0, original_max_position_embeddings=32)
YARNED = RopeConfig(
    500.0, "yarn", 4.0, original_positions=32, attention_factor=0.1 * math.log(4) + 1
)

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
    "old, linear": (
        {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.5}},
        RopeConfig(500.0, "linear", 2.5),
    ),
    "new, linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500, "factor": 2.5}},
        RopeConfig(500.0, "linear", 2.5),
    ),
    "old, dynamic": (
        {"rope_theta": 500, "rope_scaling": {"type": "dynamic", "factor": 2.5}},
        RopeConfig(500.0, "dynamic", 2.5, original_positions=128),
    ),
    "new, dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500, "factor": 2.5}},
        RopeConfig(500.0, "dynamic", 2.5, original_positions=128),
    ),
    "old, yarn": (
        {"rope_theta": 500, "rope_scaling": {"type": "yarn", **YARN, "finetuned": True}},
        YARNED,
    ),
    "new, yarn": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500, **YARN}},
        YARNED,
    ),
    "yarn, the original length stands outside": (
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500, "factor": 4.0},
        },
        YARNED,
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
    """B73, B74, B76: theta and type from either layout, conflicts included; equal frequencies."""
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


TABLES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": dict(rope_type="linear", factor=2.5),
    "dynamic": dict(rope_type="dynamic", factor=2.5),
    "llama3": dict(rope_type="llama3", **LONG),
    "yarn": dict(rope_type="yarn", **YARN),
    "yarn, attention_factor": dict(rope_type="yarn", **YARN, attention_factor=0.5),
    "yarn, both mscales": dict(rope_type="yarn", **YARN, mscale=0.707, mscale_all_dim=0.3),
    "yarn, equal mscales": dict(rope_type="yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
    "yarn, one mscale": dict(rope_type="yarn", **YARN, mscale=0.707),
    "yarn, the other mscale": dict(rope_type="yarn", **YARN, mscale_all_dim=0.707),
    "yarn, mscale of 0": dict(rope_type="yarn", **YARN, mscale=0.707, mscale_all_dim=0),
    "yarn, attention_factor before mscale": dict(
        rope_type="yarn", **YARN, attention_factor=1.5, mscale=0.707, mscale_all_dim=0.3
    ),
    "yarn, bounds": dict(rope_type="yarn", **YARN, beta_fast=8, beta_slow=2),
    "yarn, bounds of null": dict(rope_type="yarn", **YARN, beta_fast=None, beta_slow=None),
    "yarn, not truncated": dict(rope_type="yarn", **YARN, beta_fast=8, truncate=False),
    "yarn, truncate of null": dict(rope_type="yarn", **YARN, beta_fast=8, truncate=None),
    "yarn, one bound": dict(rope_type="yarn", **YARN, beta_fast=1.5, beta_slow=1.5, truncate=False),
    "yarn, factor of null": dict(rope_type="yarn", **YARN | dict(factor=None)),
    "yarn, a factor below 1": dict(rope_type="yarn", **YARN | dict(factor=0.5)),
    "yarn, nothing turns": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2),
    "yarn, one pair between": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=6
    ),
    "yarn, everything turns": dict(
        rope_type="yarn", rope_theta=2.0, factor=4.0, original_max_position_embeddings=10**9
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_rotary_tables_are_those_of_transformers_to_the_last_position(case, tmp_path):
    """B75, B76: frequencies bit for bit; cos and sin, with YaRN's attention factor in them."""
    rope = {"rope_theta": 1e4} | TABLES[case]
    config = read(tmp_path, LLAMA | {"head_dim": 32, "rope_parameters": rope})
    assert config.rope is not None
    theirs = oracle.inverse_frequencies(tmp_path)
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), theirs)
    rope = Rope(config.rope, config.head_dim, config.max_positions, torch.device("cpu"))
    cos, sin = rope.at(torch.arange(128))
    assert cos.dtype == torch.float32 and cos.shape == (128, 16)
    expected = oracle.rope_tables(tmp_path, 128)
    # An ulp: torch's vector cosine and its scalar one for a row's last elements may differ in it.
    assert torch.allclose(cos, expected[0], rtol=0, atol=2**-22)
    assert torch.allclose(sin, expected[1], rtol=0, atol=2**-22)
    factor = TABLES[case].get("attention_factor", config.rope.attention_factor)
    assert torch.equal(cos[0], torch.full((16,), factor)) and torch.equal(sin[0], torch.zeros(16))


def test_the_tables_of_yarn_differ_from_one_another():
    """B76: each key has an effect, so none can be dropped unseen; but for what says the same."""
    same = ("yarn, one mscale", "yarn, the other mscale", "yarn, mscale of 0")
    same += ("yarn, bounds of null", "yarn, factor of null")
    seen = {}
    for case, keys in TABLES.items():
        config = ModelConfig.from_dict(LLAMA | {"rope_parameters": {"rope_theta": 1e4} | keys})
        assert config.rope is not None
        rope = Rope(config.rope, 32, 128, torch.device("cpu"))
        seen[case] = (rope.cos, rope.sin)
    for case in same:
        assert torch.equal(seen[case][0], seen["yarn"][0])
    others = [case for case in seen if case not in (*same, "dynamic", "yarn, truncate of null")]
    for n, case in enumerate(others):
        for other in others[:n]:
            assert not torch.equal(seen[case][0], seen[other][0]), (case, other)


def test_every_kind_of_rope_that_is_read_is_computed():
    assert set(ROPE_KINDS) == set(KINDS)


def test_dynamic_rope_ends_at_the_original_length():
    """B75: transformers' original length is max_position_embeddings; a shorter one is kept to."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    config = ModelConfig.from_dict(LLAMA | {"rope_parameters": dynamic})
    assert config.max_positions == 128
    assert config.positions_in_words().startswith("128 positions (its dynamic RoPE changes")
    stated = dynamic | {"original_max_position_embeddings": 64}
    shorter = ModelConfig.from_dict(LLAMA | {"rope_parameters": stated})
    assert shorter.max_positions == 64 and "beyond 64," in shorter.positions_in_words()
    longer = dynamic | {"original_max_position_embeddings": 256}  # than the positions there are
    assert ModelConfig.from_dict(LLAMA | {"rope_parameters": longer}).max_positions == 128
    plain = ModelConfig.from_dict(LLAMA)
    assert plain.positions_in_words() == "128 positions"
    assert ModelConfig.from_dict(GPT2).positions_in_words() == "128 positions"


UNKNOWN_ROPE = {
    "longrope": {"rope_scaling": {"rope_type": "longrope", "short_factor": [], "long_factor": []}},
    "su": {"rope_scaling": {"type": "su", "short_factor": [], "long_factor": []}},
    "proportional": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
    "axial": {"rope_parameters": {"rope_type": "axial"}},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
    "new kind": {"rope_parameters": {"rope_type": "new kind"}},
}


@pytest.mark.parametrize("kind", UNKNOWN_ROPE)
def test_an_unknown_rope_type_is_refused_by_name(kind):
    """B73: what we do not compute is not approximated."""
    known = "'default', 'linear', 'dynamic', 'llama3', 'yarn'"
    with pytest.raises(ConfigError, match=f"rope_type is '{kind}'; expected one of {known}"):
        ModelConfig.from_dict(LLAMA | UNKNOWN_ROPE[kind])


STRAY = {
    "a factor of no type": ("factor", {"factor": 4.0}),
    "a band of llama3's": ("low_freq_factor", {"type": "linear", "factor": 2.0}),
    "a bound of yarn's": ("beta_fast", {"type": "dynamic", "factor": 2.0}),
    "sections": ("mrope_section", {"type": "default"}),
    "another spelling": ("attn_factor", {"type": "yarn", **YARN}),
    "long factors": ("long_factor", {"type": "yarn", **YARN}),
}


@pytest.mark.parametrize("case", STRAY)
def test_a_key_that_a_type_of_rope_does_not_have_is_refused_by_name(case):
    """B73, B76: a type that was meant otherwise, or a key that would have been dropped."""
    key, stated = STRAY[case]
    for layout in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=f"{layout}: {key} is 4.0; expected nothing: RoPE of"):
            ModelConfig.from_dict(LLAMA | {layout: stated | {key: 4.0}})
        unset = stated | {key: None} if stated.get(key) is None else {"rope_theta": 1e4}
        ModelConfig.from_dict(LLAMA | {layout: unset})


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
    "linear without a factor": (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
    "dynamic without a factor": (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "factor"),
    "yarn without a factor": (LLAMA, {"rope_scaling": {"type": "yarn"}}, "factor"),
    "yarn, no attention": (
        LLAMA,
        {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 0}},
        "attention_factor",
    ),
    "yarn, bounds swapped": (
        LLAMA,
        {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1, "beta_slow": 32}},
        "beta_fast",
    ),
    "yarn, wavelengths that do not grow": (
        LLAMA,
        {"rope_theta": 1, "rope_scaling": {"type": "yarn", **YARN}},
        "rope_theta",
    ),
    "yarn, a negative mscale": (
        LLAMA,
        {"rope_scaling": {"type": "yarn", **YARN, "mscale": -1.0}},
        "mscale",
    ),
    "yarn, truncated in words": (
        LLAMA,
        {"rope_scaling": {"type": "yarn", **YARN, "truncate": "no"}},
        "truncate",
    ),
    "layer types in words": (QWEN3, {"layer_types": "full_attention"}, "layer_types"),
    "too few layer types": (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
    "a window in words": (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window"),
    "windowed layers in words": (QWEN2, {"max_window_layers": "all"}, "max_window_layers"),
    "an activation with a weight": (LLAMA, {"hidden_act": "prelu"}, "hidden_act"),
    "an activation with four": (GPT2, {"activation_function": "xielu"}, "activation_function"),
    "qwen3, odd head": (QWEN3, {"head_dim": 17}, "head_dim"),
    "qwen2's kv heads, not stated": (
        {k: v for k, v in QWEN2.items() if k != "num_key_value_heads"},
        {},
        "num_key_value_heads",
    ),
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
    with pytest.raises(ConfigError, match="gpt2, llama, mistral, qwen2, qwen3"):
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
KEYS += ["beta_fast", "mscale", "mscale_all_dim", "attention_factor", "truncate", "layer_types"]
KEYS += ["sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"]
KEYS += ["layer_norm_epsilon", "tie_word_embeddings", "hidden_act", "quantization_config"]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.sampled_from(["", "llama3", "default", "yarn", "linear", "gelu", "float16", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=4,
)


@given(
    st.sampled_from(list(RAW.values())), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3)
)
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


# --- hostile files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, 2**31, 10**30, 10**4000, -(2**63), 1e999, 2.0, "9", [[]], True]
)
@pytest.mark.parametrize("key", ["vocab_size", "n_layer", "n_positions", "n_embd"])
def test_a_count_that_no_model_has_is_refused_in_few_words(key, value, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"config\.json: {key} is .*whole number from 1 to 2147483"
    ):
        read(tmp_path, GPT2 | {key: value})
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, GPT2 | {key: "x" * 10**6})
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("value", [-1, 2**32, 10**30, [1, -1], [2**64]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_id_that_no_tokenizer_has_is_refused(name, value, tmp_path):
    write(tmp_path, GPT2)
    write(tmp_path, (GPT2 if name == "config.json" else {}) | {"eos_token_id": value}, name)
    with pytest.raises(
        ConfigError, match=r"eos_token_id is .*; expected an id from 0 to 4294967295"
    ):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ['{"vocab_size": ' + "9" * 5000 + "}", "\ufeff{}", "{" * 10**5])
def test_json_that_python_cannot_read_is_named(text, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON") as refusal:
        read(tmp_path, text)
    assert len(str(refusal.value)) < 500


def test_a_key_of_rope_that_cannot_be_printed_is_escaped(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "\x1b[2J\ud800" + "x" * 999: 1}
    with pytest.raises(ConfigError, match=r"\\x1b\[2J\\ud800xxx.*\.\.\. is 1; expected") as refusal:
        read(tmp_path, LLAMA | {"rope_scaling": rope})
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_not_waited_for_and_a_device_is_not_read(name, tmp_path):
    write(tmp_path, GPT2)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: not readable as JSON .it is no file, but"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}: not readable as JSON .it is no file, but"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)  # a link to itself
    with pytest.raises(CheckpointError, match=f"{name}: not readable as JSON"):
        ModelConfig.from_directory(tmp_path)
