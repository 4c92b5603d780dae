"""Every family against transformers, and each against itself in any cut of the same tokens.

Exact means: in float64, identical token ids, and logits within 1e-9. Random models are scaled so
that logits have a standard deviation of 1 or more; see oracle.py for how the oracle is float64.
"""

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spindle import Engine, hub, load_hf
from spindle.config import ACTIVATIONS, ModelConfig
from spindle.errors import RequestError
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.model.layers import ACTIVATIONS as ACTIVATION_TABLE
from spindle.model.layers import Model, activation
from spindle.model.weights import random_model

EXACT = 1e-9
LLAMA3 = dict(rope_type="llama3", rope_theta=500_000.0, factor=8.0)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def prompt(length: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


class Run:
    """Sequences on one cache, advanced by steps of any chunks."""

    def __init__(self, model: Model) -> None:
        self.model, self.lengths = model, dict[int, int]()
        self.kv = ContiguousKV(model.config, model.dtype, model.device)

    def step(self, *chunks: tuple[int, list[int]]) -> Tensor:
        """Append (sequence, ids) chunks in one step; logits of every token, [T, V]."""
        index = StepIndex.of([(row, self.lengths.get(row, 0), len(ids)) for row, ids in chunks])
        flat = torch.tensor([token for _, ids in chunks for token in ids])
        hidden = self.model(flat, self.kv.view(index))
        for row, ids in chunks:
            self.lengths[row] = self.lengths.get(row, 0) + len(ids)
        return self.model.logits(hidden)


def one_pass(model: Model, ids: list[int]) -> Tensor:
    return Run(model).step((0, ids))


def greedy(model: Model, ids: list[int], count: int) -> tuple[list[int], Tensor]:
    """`count` ids, one at a time through the cache, and the logits [count, V] of each."""
    run, seen = Run(model), []
    logits = run.step((0, ids))[-1:]
    for _ in range(count):
        seen.append(logits)
        logits = run.step((0, [int(logits.argmax())]))
    rows = torch.cat(seen)
    return rows.argmax(-1).tolist(), rows


def smallest_gap(logits: Tensor) -> float:
    best, second = logits.topk(2).values.unbind(-1)
    return (best - second).min().item()


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Model:
    return load_hf(directory, device="cpu", dtype=dtype)


def assert_equals_transformers(directory: Path, length: int = 21) -> None:
    """Prefill and 64 greedy tokens in float64; prefill in float32."""
    ids = prompt(length)
    ours, theirs = load(directory), oracle.load(directory)
    expected = oracle.logits(theirs, ids)
    assert expected.dtype == torch.float64 and expected.std() >= 1
    assert (one_pass(ours, ids) - expected).abs().max() < EXACT

    tokens, logits = greedy(ours, ids, 64)
    assert tokens == oracle.greedy(theirs, ids, 64)
    assert len(set(tokens)) > 4  # no fixed point that any model would reach
    assert smallest_gap(logits) > EXACT
    again = oracle.logits(theirs, ids + tokens)[length - 1 : -1]
    assert (logits - again).abs().max() < EXACT

    expected = oracle.logits(oracle.load(directory, torch.float32), ids)
    assert (one_pass(load(directory, torch.float32), ids) - expected).abs().max() < 2e-4


# --- a grid of configurations --------------------------------------------------------------------


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10_000.0, **keys))


YARN = dict(factor=4.0, original_max_position_embeddings=32)
WINDOWED = dict(use_sliding_window=True, sliding_window=8)

GRID: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, one head": dict(n_head=1),
    "gpt2, one layer": dict(n_layer=1),
    "gpt2, every matrix square": dict(n_inner=48),
    "gpt2, n_inner": dict(n_inner=3 * 48),
    "gpt2, epsilon": dict(layer_norm_epsilon=0.1),
    "gpt2, gelu": dict(activation_function="gelu"),
    "gpt2, relu": dict(activation_function="relu"),
    "gpt2, scores not scaled": dict(scale_attn_weights=False),
    "gpt2, scaled by layer": dict(scale_attn_by_inverse_layer_idx=True),
    "gpt2, scaled by layer alone": dict(
        scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt2, upcast": dict(reorder_and_upcast_attn=True),
    "gpt2, untied": dict(tie_word_embeddings=False),
    "llama": {},
    "llama, mha": dict(num_key_value_heads=4),
    "llama, mqa": dict(num_key_value_heads=1),
    "llama, six heads on three": dict(num_attention_heads=6, num_key_value_heads=3),
    "llama, one layer": dict(num_hidden_layers=1),
    "llama, head_dim": dict(head_dim=16),
    "llama, tied": dict(tie_word_embeddings=True),
    "llama, attention bias": dict(attention_bias=True),
    "llama, mlp bias": dict(mlp_bias=True),
    "llama, every matrix square": dict(intermediate_size=48, num_key_value_heads=4),
    "llama, epsilon": dict(rms_norm_eps=0.1),
    "llama, gelu": dict(hidden_act="gelu"),
    "llama, theta": dict(rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "llama, llama3": dict(rope_parameters=LLAMA3),
    "llama, linear": rope("linear", factor=2.5),
    "llama, dynamic": rope("dynamic", factor=2.5),
    "llama, yarn": rope("yarn", **YARN),
    "llama, yarn, attention_factor": rope("yarn", **YARN, attention_factor=0.7),
    "llama, yarn, mscale": rope("yarn", **YARN, mscale=2.0, mscale_all_dim=0.5),
    "llama, yarn, bounds": rope("yarn", **YARN, beta_fast=4.0, beta_slow=2.0, truncate=False),
    "llama, yarn, factor from the lengths": rope("yarn", **YARN | dict(factor=None)),
    "mistral": {},
    "mistral, a window as long as the context": dict(sliding_window=128),
    "mistral, head_dim": dict(head_dim=16),
    "mistral, yarn": rope("yarn", **YARN),
    "qwen2": {},
    "qwen2, head_dim": dict(head_dim=16),
    "qwen2, tied": dict(tie_word_embeddings=True),
    "qwen2, yarn": rope("yarn", **YARN),
    "qwen2, a window for no layer": dict(**WINDOWED, max_window_layers=3),
    "qwen2, layer_types": dict(layer_types=3 * ["full_attention"]),
    "qwen3": {},
    "qwen3, attention bias": dict(attention_bias=True),
    "qwen3, heads of 128": dict(head_dim=128),
    "qwen3, epsilon": dict(rms_norm_eps=0.1),
    "qwen3, yarn": rope("yarn", **YARN),
    "qwen3, a window for no layer": dict(**WINDOWED, max_window_layers=28),
}


@pytest.mark.parametrize("name", GRID)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """B76, B77, B79, B80: each key of a config that changes the computation changes it alike."""
    oracle.make_checkpoint(tmp_path, name.split(",")[0], **GRID[name])
    assert_equals_transformers(tmp_path)


# The mathematics is the same: a matter of training, of what lies beyond the context, of no layer.
SAME = ("upcast", "dynamic", "as long as the context", "for no layer", "layer_types")


@pytest.mark.parametrize("name", [n for n in GRID if "," in n and not n.endswith(SAME)])
def test_each_configuration_of_the_grid_is_one_that_shows(name):
    """No row of the grid is there for nothing: the weights of one seed give other logits."""
    family = name.split(",")[0]
    base, other = (
        ModelConfig.from_dict(oracle.CONFIGS[family](**(oracle.SHAPES[family] | keys)).to_dict())
        for keys in ({}, GRID[name])
    )
    assert base != other
    ids = prompt(21)
    one, two = (one_pass(random_model(c, dtype=torch.float64), ids) for c in (base, other))
    assert (one - two).abs().max() > 1e-3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_that_of_transformers(name, tmp_path):
    """B80: alone, and in both models: behind one matrix (GPT-2), as a gate (Llama)."""
    x = torch.linspace(-15, 15, 997, dtype=torch.float64)
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        expected = oracle.activation(name)(x.to(dtype))
        assert (activation(name, x.to(dtype)) - expected).abs().max() < bound
    for family, key in (("gpt2", "activation_function"), ("llama", "hidden_act")):
        oracle.make_checkpoint(tmp_path / family, family, **{key: name})
        expected = oracle.logits(oracle.load(tmp_path / family), prompt(21))
        difference = (one_pass(load(tmp_path / family), prompt(21)) - expected).abs().max()
        assert difference < EXACT * max(1.0, expected.std())  # what does not fade grows


def test_the_table_of_activations_is_transformers_own_but_for_two_with_weights():
    """A name that transformers gains is a failure here, by that name."""
    assert set(ACTIVATIONS) == set(ACTIVATION_TABLE)
    assert oracle.activation_names() - set(ACTIVATIONS) == {"prelu", "xielu"}


# --- every flag at once --------------------------------------------------------------------------

# No key at its default, but for those that are refused at any other value: the test below asks.
TRAINING = dict(initializer_range=0.3, use_cache=False, pad_token_id=5)
TRAINING |= dict(bos_token_id=3, eos_token_id=[4, 6])
ATTENTION = dict(
    num_attention_heads=6, num_key_value_heads=3, head_dim=20, rms_norm_eps=0.05, hidden_act="mish"
)
STRETCHED = rope("yarn", factor=3.0, original_max_position_embeddings=40, beta_fast=8.0)
STRETCHED["rope_parameters"] |= dict(rope_theta=700.0, beta_slow=0.5, truncate=False)
STRETCHED["rope_parameters"] |= dict(mscale=1.5, mscale_all_dim=0.5)
LLAMA_FLAGS = TRAINING | ATTENTION | STRETCHED
LLAMA_FLAGS |= dict(tie_word_embeddings=True, attention_dropout=0.3)
NO_WINDOW = dict(use_sliding_window=True, sliding_window=16, max_window_layers=3)
NO_WINDOW |= dict(layer_types=3 * ["full_attention"])

EVERY_FLAG: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        **TRAINING,
        n_inner=112,
        activation_function="quick_gelu",
        layer_norm_epsilon=0.05,
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
        tie_word_embeddings=False,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.3,
        summary_type="last",
        summary_use_proj=False,
        summary_activation="tanh",
        summary_proj_to_labels=False,
        summary_first_dropout=0.3,
    ),
    "llama": dict(**LLAMA_FLAGS, attention_bias=True, mlp_bias=True, pretraining_tp=2),
    "mistral": dict(**LLAMA_FLAGS, sliding_window=128),
    "qwen2": LLAMA_FLAGS | NO_WINDOW,
    "qwen3": LLAMA_FLAGS | NO_WINDOW | dict(attention_bias=True),
}
FAMILIES = list(EVERY_FLAG)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_flag_set_differently_at_once_gives_transformers_logits(family, tmp_path):
    """B76, B77, B80: and no flag of transformers' config class is left out of it."""
    defaults = oracle.config_defaults(family)
    stated = oracle.SHAPES[family] | EVERY_FLAG[family]
    refused = {"add_cross_attention"}
    assert set(defaults) - refused <= set(stated)
    assert not [key for key in stated if key in defaults and stated[key] == defaults[key]]
    oracle.make_checkpoint(tmp_path, family, **EVERY_FLAG[family])
    assert_equals_transformers(tmp_path)


@pytest.fixture(scope="module")
def flagged_models() -> dict[str, Model]:
    """Random float64 models, one a family, of those configurations."""
    return {
        family: random_model(
            ModelConfig.from_dict(dict(model_type=family, **oracle.SHAPES[family] | flags)),
            dtype=torch.float64,
        )
        for family, flags in EVERY_FLAG.items()
    }


# --- where a position ends -----------------------------------------------------------------------


def test_a_width_that_the_heads_do_not_divide(tmp_path):
    """B77: hidden 50, 4 heads, head_dim 16; transformers' config refuses it, its model does not."""
    with oracle.any_width():
        oracle.make_checkpoint(tmp_path, "llama", hidden_size=50, head_dim=16)
    assert_equals_transformers(tmp_path)


OLD_LAYOUTS = {
    "theta": dict(rope_theta=500.0),
    "llama3, rope_type": dict(rope_theta=500_000.0, rope_scaling=LLAMA3),
    "llama3, type": dict(
        rope_theta=500_000.0,
        rope_scaling={{"rope_type": "type"}.get(key, key): value for key, value in LLAMA3.items()},
    ),
    "linear": dict(rope_theta=500.0, rope_scaling=dict(type="linear", factor=4.0)),
    "dynamic": dict(rope_scaling=dict(type="dynamic", factor=4.0)),
    "yarn": dict(rope_theta=500.0, rope_scaling=dict(type="yarn", finetuned=True, **YARN)),
    "neither": {},
}


@pytest.mark.parametrize("layout", OLD_LAYOUTS)
def test_rope_of_the_old_layout(layout, tmp_path):
    """B73, B74: rope_theta and rope_scaling, as checkpoints had them before transformers 5.

    Positions run to 85, well beyond the original 32.
    """
    oracle.make_checkpoint(tmp_path, "llama")
    oracle.edit_config(tmp_path, "rope_parameters", **OLD_LAYOUTS[layout])
    assert_equals_transformers(tmp_path)


def test_gpt2_may_say_it_in_llamas_words(tmp_path):
    """transformers takes the common names for GPT-2's own, and prefers them."""
    oracle.make_checkpoint(tmp_path, "gpt2")
    common = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4)
    oracle.edit_config(tmp_path, "n_embd", "n_head", n_layer=7, **common)
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_the_last_position_works_and_a_long_prompt_leaves_no_trace(kind, tmp_path):
    """B75, B83: all 128 positions; a short prompt before and after a long one is the same."""
    keys = dict(linear=dict(factor=4.0), dynamic=dict(factor=4.0), yarn=YARN, llama3=LLAMA3)
    stretch = dict(rope_parameters=dict(rope_theta=10_000.0, rope_type=kind) | keys.get(kind, {}))
    oracle.make_checkpoint(tmp_path, "llama", **stretch)
    ours, long = load(tmp_path), prompt(128)
    before = one_pass(ours, long[:9])
    expected = oracle.logits(oracle.load(tmp_path), long)
    assert (one_pass(ours, long) - expected).abs().max() < EXACT
    assert torch.equal(one_pass(ours, long[:9]), before)


def test_dynamic_rope_is_plain_up_to_the_original_length_and_refused_beyond(tmp_path):
    """B75: cached keys keep the base of their time; the refusal has both numbers."""
    oracle.make_checkpoint(tmp_path, "llama", **rope("dynamic", factor=4.0))
    dynamic, ids = load(tmp_path), prompt(128)
    oracle.edit_config(tmp_path, "rope_parameters")
    assert torch.equal(one_pass(dynamic, ids), one_pass(load(tmp_path), ids))
    assert "128 positions" in dynamic.config.positions_in_words()
    assert "keep the base of their time" in dynamic.config.positions_in_words()
    with pytest.raises(RequestError, match=r"129\b.*\b128"):
        Engine(dynamic, max_seq_len=129)
    with pytest.raises(RequestError, match=r"129\b.*\b128"):
        Engine(dynamic).prefill([*ids, 0])


def test_gpt2_has_a_row_for_its_last_position(tmp_path):
    """B83: prompt of exactly n_positions tokens."""
    oracle.make_checkpoint(tmp_path, "gpt2")
    ids = prompt(128)
    expected = oracle.logits(oracle.load(tmp_path), ids)
    assert (one_pass(load(tmp_path), ids) - expected).abs().max() < EXACT


# --- the same weights, otherwise written ---------------------------------------------------------


def masked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The causal masks that old GPT-2 files carry along, and their fill value."""
    mask = torch.ones(128, 128).tril().bool().view(1, 1, 128, 128)
    for n in range(3):
        tensors[f"transformer.h.{n}.attn.bias"] = mask.clone() if n else mask.float()
        tensors[f"transformer.h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
    return tensors


def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("transformer."): value for name, value in tensors.items()}


def with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    embed = next(value for name, value in tensors.items() if name.endswith(EMBEDDINGS))
    return tensors | {"lm_head.weight": embed.clone()}


def only_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in with_head(tensors).items() if not k.endswith(EMBEDDINGS)}


def with_other_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.flip(0) if k == "lm_head.weight" else v for k, v in with_head(tensors).items()}


def with_angles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(6) for n in (0, 1)
    }


EMBEDDINGS = ("wte.weight", "embed_tokens.weight")
WRITINGS = {
    "gpt2, no prefix": ("gpt2", bare),
    "gpt2, mask buffers": ("gpt2", masked),
    "gpt2, no prefix, mask buffers": ("gpt2", lambda tensors: bare(masked(tensors))),
    "gpt2, head in the file": ("gpt2", with_head),
    "gpt2, only the head": ("gpt2", only_head),
    "gpt2, another head": ("gpt2", with_other_head),
    "gpt2, no prefix, head": ("gpt2", lambda tensors: bare(with_head(tensors))),
    "llama, head in the file": ("llama", with_head),
    "llama, only the head": ("llama", only_head),
    "llama, another head": ("llama", with_other_head),
    "llama, saved angles": ("llama", with_angles),
    "qwen3, only the head": ("qwen3", only_head),
}


@pytest.mark.parametrize("writing", WRITINGS)
def test_a_checkpoint_may_be_written_in_other_ways(writing, tmp_path):
    """B70, B71, B79: prefix, mask buffers, a tied pair with both, one or two differing tensors."""
    family, change = WRITINGS[writing]
    oracle.make_checkpoint(tmp_path, family, tie_word_embeddings=True)
    oracle.edit_weights(tmp_path, change)
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_any_float_on_disk_is_widened_without_a_change(family, dtype, tmp_path):
    oracle.make_checkpoint(tmp_path, family)
    oracle.edit_weights(tmp_path, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_shards_are_read_as_one_file(family, tmp_path):
    oracle.make_checkpoint(tmp_path, family, shards="50KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_equals_transformers(tmp_path)


# --- against itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_any_chunking_of_any_mix_equals_one_pass(family, data, flagged_models):
    """Three sequences, cut anywhere, in steps that mix them: logits of each as in one pass."""
    model = flagged_models[family]
    sequences = {row: prompt(data.draw(st.integers(1, 40)), seed=row) for row in range(3)}
    expected = {row: one_pass(model, ids) for row, ids in sequences.items()}
    run, got = Run(model), {row: [] for row in sequences}
    left = dict(sequences)
    while left:
        rows = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        cuts = [data.draw(st.integers(1, len(left[row]))) for row in rows]
        logits = run.step(*((row, left[row][:cut]) for row, cut in zip(rows, cuts, strict=True)))
        for row, part in zip(rows, logits.split(cuts), strict=True):
            got[row].append(part)
            left[row] = left[row][len(part) :]
        left = {row: ids for row, ids in left.items() if ids}
    for row, parts in got.items():
        logits = torch.cat(parts)
        assert (logits - expected[row]).abs().max() < EXACT
        assert torch.equal(logits.argmax(-1), expected[row].argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decode_equals_one_pass_over_what_it_wrote(family, flagged_models):
    model, ids = flagged_models[family], prompt(7)
    tokens, logits = greedy(model, ids, 50)
    whole = one_pass(model, ids + tokens)[6:-1]
    assert logits.std() >= 1
    assert (logits - whole).abs().max() < EXACT
    assert whole.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_matter(family, flagged_models):
    """What makes the tests above able to fail: the order of the same tokens changes the logits."""
    ids = prompt(20)
    orders = (ids, [*ids[1::-1], *ids[2:]])
    last = [one_pass(flagged_models[family], order)[-1] for order in orders]
    assert (last[0] - last[1]).abs().max() > 0.01


WIDE = dict(model_type="llama", vocab_size=512, max_position_embeddings=64, hidden_size=576)
WIDE |= dict(intermediate_size=1536, num_hidden_layers=2)
WIDE |= dict(num_attention_heads=9, num_key_value_heads=3)
DEEP = dict(model_type="gpt2", vocab_size=512, n_positions=64, n_embd=192, n_layer=2, n_head=3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("raw", [WIDE, DEEP], ids=["llama", "gpt2"])
def test_a_rows_bits_do_not_depend_on_who_shares_the_step(raw, threads):
    """B29: float32 decode and prefill, alone and among eight sequences: the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = random_model(ModelConfig.from_dict(raw))
        prompts = [prompt(n, 512, seed=n) for n in (5, 1, 9, 17, 3, 12, 8, 2)]
        alone = [Run(model), *(Run(model) for _ in prompts[1:])]
        together = Run(model)
        chunks = list(enumerate(prompts))
        for _ in range(3):
            shared = together.step(*chunks).split([len(ids) for _, ids in chunks])
            for (row, ids), logits in zip(chunks, shared, strict=True):
                assert torch.equal(alone[row].step((row, ids)), logits), row
            chunks = [(row, [int(logits[-1].argmax())]) for row, logits in enumerate(shared)]
    finally:
        torch.set_num_threads(before)


# --- real shapes ---------------------------------------------------------------------------------


def assert_float32_equals_transformers(directory: Path, prompts: list[list[int]]) -> None:
    """Prefill logits, and 64 greedy tokens each; a failure states the smallest top-2 gap."""
    ours, theirs = load(directory, torch.float32), oracle.load(directory, torch.float32)
    for ids in prompts:
        difference = (one_pass(ours, ids) - oracle.logits(theirs, ids)).abs().max().item()
        assert difference < 1e-4 * max(1.0, oracle.logits(theirs, ids).std().item()), difference
        tokens, logits = greedy(ours, ids, 64)
        expected = oracle.greedy(theirs, ids, 64)
        gap = smallest_gap(logits)
        assert tokens == expected, (gap, tokens, expected)
        print(f"largest difference {difference:.1e}, smallest top-2 gap {gap:.1e}")


@pytest.fixture(scope="module")
def gpt2_124m(tmp_path_factory):
    shape = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
    return oracle.make_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2", gain=1.0, **shape)


def test_gpt2_at_the_shape_of_its_smallest_release(gpt2_124m):
    """124M random weights: float32 prefill logits; and the next token in steps of one."""
    ids = prompt(48, 50257)
    expected = oracle.logits(oracle.load(gpt2_124m, torch.float32), ids)
    assert expected.std() >= 1
    model = load(gpt2_124m, torch.float32)
    assert sum(math.prod(w.shape) for layer in model.layers for w in (layer.qkv, layer.up)) > 4e7
    assert (one_pass(model, ids) - expected).abs().max() < 2e-3
    run = Run(model)
    run.step((0, ids[:40]))
    steps = torch.cat([run.step((0, [token])) for token in ids[40:]])
    assert (steps - expected[40:]).abs().max() < 2e-3
    assert torch.equal(steps.argmax(-1), expected[40:].argmax(-1))
    assert_float32_equals_transformers(gpt2_124m, [ids[:16]])


def test_tiny_is_what_transformers_makes_of_it():
    """The bundled model, on real text: float64 exactly, and float32 token for token."""
    if "tiny" not in [m.name for m in hub.known_models() if m.present]:
        pytest.skip("the bundled model is not there: spindle/checkpoints/train.py makes it")
    from spindle import Tokenizer

    directory = hub.resolve("tiny")
    tok = Tokenizer(directory)
    texts = ["The list of names is", "Return the", "If the object has no"]
    prompts = [tok.encode(text) for text in texts]
    ours, theirs = load(directory), oracle.load(directory)
    for ids in prompts:
        expected = oracle.logits(theirs, ids)
        assert (one_pass(ours, ids) - expected).abs().max() < EXACT
        tokens, logits = greedy(ours, ids, 64)
        assert tokens == oracle.greedy(theirs, ids, 64)
        again = oracle.logits(theirs, ids + tokens)[len(ids) - 1 : -1]
        assert (logits - again).abs().max() < EXACT
    assert_float32_equals_transformers(directory, prompts)


@pytest.mark.smollm2
def test_smollm2_is_what_transformers_makes_of_it():
    from spindle import Tokenizer

    directory = hub.resolve("smollm2")
    tok = Tokenizer(directory)
    texts = ["The capital of France is", "Once upon a time, a small", "def fibonacci(n):\n"]
    assert_float32_equals_transformers(directory, [tok.encode(text) for text in texts])


@pytest.mark.smollm2
def test_smollm2_gives_the_same_logits_however_its_prompt_is_cut():
    """float64: one pass, and chunks that end in steps of one, agree within 1e-9."""
    model, ids = load(hub.resolve("smollm2")), prompt(24, 49152)
    expected, run = one_pass(model, ids), Run(model)
    pieces = [ids[:1], ids[1:8], ids[8:20], *([token] for token in ids[20:])]
    cut = torch.cat([run.step((0, piece)) for piece in pieces])
    assert (cut - expected).abs().max() < EXACT
    assert torch.equal(cut.argmax(-1), expected.argmax(-1))


@pytest.mark.network
def test_gpt2_from_the_hub_is_what_transformers_makes_of_it():
    from spindle import Tokenizer

    directory = hub.resolve("gpt2")
    ids = Tokenizer(directory).encode("The capital of France is")
    assert_float32_equals_transformers(directory, [ids])
