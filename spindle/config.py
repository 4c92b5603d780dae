"""config.json -> one frozen ModelConfig, in our names, checked once and trusted ever after.

Checkpoints say the same thing in several dialects: GPT-2 says `n_embd` where Llama says
`hidden_size`, and RoPE's base moved from `rope_theta` into `rope_parameters` with transformers 5.
All of that ends here. What a file leaves out is what transformers' config class of the family has,
but for the shape of a Llama, which must be stated, and special ids, of which none are assumed.

A key that changes the computation is honoured, or refused by name. Any other is left alone, known
or not, as transformers leaves it: a config.json also carries the notes of whatever wrote it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle.errors import CheckpointError, ConfigError, brief, shown
from spindle.paths import why_no_file

# The names of transformers' table that are functions of one number, without weights of their own.
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
    *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear"),
    *("mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus"),
    *("swish", "tanh"),
)

# What transformers, 4 or 5, reads in any family's file -> the value at which it changes nothing.
NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "attention_chunk_size": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "kv_sharing_modes": None,
    "per_layer_config": {},
    "pruned_heads": {},
    "transformers_weights": None,  # another file to take the weights from
}

MOST = 2**31 - 1  # of anything that is counted: its products with another fit in 64 bits
ID_LIMIT = 2**32  # the tokenizers library counts ids in 32 bits

FULL_ATTENTION = ("full_attention", "attention")  # the second as transformers 4 had it

# How RoPE may be stretched to a longer context -> the keys that say how far.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
ROPE_NOTES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    """How rotary angles grow with the position (Su et al. 2021, RoFormer, section 3.2.2)."""

    theta: float = 10_000.0  # base of the geometric series of wavelengths
    kind: str = "default"  # one of ROPE_KINDS; model/rope.py has a function for each
    factor: float = 1.0  # long wavelengths are stretched by this; in "linear", all of them
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are stretched whole
    high_freq_factor: float = 4.0  # llama3: those below original / high are left alone
    original_positions: int = 0  # the context length before stretching
    beta_fast: float = 32.0  # yarn: pairs with more turns in the original context are left alone
    beta_slow: float = 1.0  # yarn: those with fewer are stretched whole
    truncate: bool = True  # yarn: both bounds are rounded outwards to whole pairs
    attention_factor: float = 1.0  # yarn: on cos and sin, so q·k grows by its square


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the constants of a model. Lengths are counts; nothing here ever changes."""

    model_type: str
    vocab_size: int  # V
    num_layers: int  # L
    width: int  # E
    num_heads: int  # H
    num_kv_heads: int  # Hk, divides H
    head_dim: int  # D, read where the file states it: D * H need not be E
    mlp_width: int  # F
    max_positions: int
    norm_eps: float
    activation: str
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: queries and keys are RMS-normalised, head by head, before RoPE
    rope: RopeConfig | None = None  # None: learned positions (GPT-2)
    scale_by_head: bool = True  # GPT-2's scale_attn_weights: divide scores by sqrt(D)
    scale_by_layer: bool = False  # GPT-2's scale_attn_by_inverse_layer_idx
    dtype: str | None = None  # what the checkpoint was saved in, "float16" and the like
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def attention_scale(self, layer: int) -> float:
        """The factor on q·k in `layer`: 1/sqrt(D) (Vaswani et al. 2017, section 3.2.1)."""
        scale = self.head_dim**-0.5 if self.scale_by_head else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers, in numbers of `itemsize` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def positions_in_words(self) -> str:
        """How many positions there are, for the error that refuses one more; and why if not plain.

        A key keeps the rotation it was stored with, so dynamic RoPE ends where its base begins to
        follow the length: beyond, the logits would depend on how a prompt was cut into steps.
        """
        words = f"{self.max_positions} positions"
        if self.rope and self.rope.kind == "dynamic":
            words += (
                f" (its dynamic RoPE changes with the length beyond {self.rope.original_positions}"
                ", and cached keys keep the base of their time)"
            )
        return words

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Translate the content of a config.json; `source` names it in errors (ConfigError)."""
        reader = _Reader(raw, source)
        model_type = reader.text("model_type")
        if model_type not in READERS:
            known = ", ".join(sorted(READERS))
            reader.refuse("model_type", model_type, f"one of the known families: {known}")
        if raw.get("quantization_config"):
            reader.refuse("quantization_config", "present", "weights in fp32, fp16 or bf16")
        for key, neutral in NEUTRAL.items():
            reader.only(key, neutral)
        return READERS[model_type](reader)

    @staticmethod
    def from_directory(directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json, and the EOS ids of generation_config.json if it has any."""
        path = Path(directory) / "config.json"
        raw = read_json(path)
        generation = Path(directory) / "generation_config.json"
        if os.path.lexists(generation):
            stated = {k: v for k, v in read_json(generation).items() if v is not None}
            for key in ("eos_token_id", "bos_token_id"):
                raw[key] = stated.get(key, raw.get(key))
        return ModelConfig.from_dict(raw, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError that names the file if there is none."""
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: not found; a checkpoint directory has one")
    try:
        if why := why_no_file(path):
            raise OSError(why)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: not readable as JSON ({brief(cause)})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
    return content


class _Reader:
    """Typed access to one config.json; every refusal names the file, the key, and what is right."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def refuse(self, key: str, got: object, right: str) -> None:
        raise ConfigError(f"{self.source}: {brief(key)} is {shown(got)}; expected {right}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            self.refuse(key, value, f"a whole number from 1 to {MOST}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            self.refuse(key, value, "a finite number above 0")
        return float(value)

    def number_if_any(self, key: str) -> float | None:
        """A number that may be left out; null and 0 leave it out as well."""
        return self.number(key) if self.raw.get(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.refuse(key, value, "a string")
        return str(value)

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a key that changes the computation unless it has one of these values."""
        if self.raw.get(key) not in (None, *allowed):
            right = " or ".join(repr(value) for value in allowed if value is not None) or "nothing"
            self.refuse(key, self.raw[key], f"{right}: other values are not implemented")

    def activation(self, key: str, default: str) -> str:
        name = self.text(key, default)
        if name in ("prelu", "xielu"):
            self.refuse(key, name, "an activation that has no weights of its own")
        if name not in ACTIVATIONS:
            self.refuse(key, name, "one of " + ", ".join(ACTIVATIONS))
        return name

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < ID_LIMIT for i in ids):
            self.refuse(key, value, f"an id from 0 to {ID_LIMIT - 1}, a list of ids, or null")
        return tuple(ids)

    def full_attention(self, layers: int, positions: int, window: object) -> None:
        """Refuse layers that do not see the whole context; a window as long as it hides nothing."""
        types = self.raw.get("layer_types")
        if types is not None and not (
            isinstance(types, list)
            and any(len(types) == layers == types.count(name) for name in FULL_ATTENTION)
        ):
            self.refuse("layer_types", types, f"'full_attention' for each of {layers} layers")
        fits = isinstance(window, int) and not isinstance(window, bool) and window >= positions
        if window is not None and not fits:
            right = f"null, or a window that hides nothing: at least {positions}, the positions"
            self.refuse("sliding_window", window, f"{right}; attention in a window is not done")

    def common(self) -> dict[str, Any]:
        """What every family states under the same key."""
        return {
            "model_type": self.raw["model_type"],
            "vocab_size": self.whole("vocab_size"),
            "dtype": self.text("dtype", self.text("torch_dtype", "")) or None,
            "bos_id": next(iter(self.ids("bos_token_id")), None),
            "eos_ids": self.ids("eos_token_id"),
        }

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            self.refuse(key, None, "a value: the file does not state it")
        return default


GPT2_ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
GPT2_ALIASES |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}


def _gpt2(r: _Reader) -> ModelConfig:
    """GPT-2's dialect (Radford et al. 2019); defaults as in transformers' GPT2Config.

    Its `reorder_and_upcast_attn` is the same mathematics: attention's softmax is in float32 here
    in any case. The dropouts and `summary_*` concern training and other heads.
    """
    stated = {own: r.raw[name] for name, own in GPT2_ALIASES.items() if r.raw.get(name) is not None}
    r = _Reader({**r.raw, **stated}, r.source)  # transformers, too, prefers the common name
    width, heads = r.whole("n_embd", 768), r.whole("n_head", 12)
    if width % heads:
        r.refuse("n_head", heads, f"a divisor of n_embd = {width}")
    layers, positions = r.whole("n_layer", 12), r.whole("n_positions", 1024)
    r.full_attention(layers, positions, r.raw.get("sliding_window"))
    return ModelConfig(
        **r.common(),
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        mlp_width=r.whole("n_inner", 4 * width),
        max_positions=positions,
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("activation_function", "gelu_new"),
        tie_embeddings=r.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        scale_by_head=r.flag("scale_attn_weights", True),
        scale_by_layer=r.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _llama(r: _Reader) -> ModelConfig:
    """Llama (Touvron et al. 2023): biases everywhere or nowhere. `pretraining_tp` only rounds."""
    bias, mlp_bias = r.flag("attention_bias", False), r.flag("mlp_bias", False)
    fields = _llama_fields(r, positions=2048, window=r.raw.get("sliding_window"))
    return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(r: _Reader) -> ModelConfig:
    """Mistral (Jiang et al. 2023), where its window is as long as the context, or null.

    A window that is not stated is one of 4,096.
    """
    window = r.raw.get("sliding_window", 4096)
    return ModelConfig(**_llama_fields(r, positions=131_072, window=window, kv_heads=8))


def _qwen2(r: _Reader) -> ModelConfig:
    """Qwen2 (Yang et al. 2024, arXiv:2407.10671): q, k and v have biases, the output has none."""
    fields = _llama_fields(r, positions=32_768, window=_qwen_window(r), kv_heads=32)
    return ModelConfig(**fields, qkv_bias=True)


def _qwen3(r: _Reader) -> ModelConfig:
    """Qwen3 (Yang et al. 2025, arXiv:2505.09388): norms on queries and keys, heads of 128."""
    bias, window = r.flag("attention_bias", False), _qwen_window(r)
    fields = _llama_fields(r, positions=32_768, window=window, kv_heads=32, head_dim=128)
    return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen_window(r: _Reader) -> object:
    """The window of the layers from `max_window_layers` on; None if it is off or there are none."""
    windowed = r.flag("use_sliding_window", False)
    first = r.raw.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        r.refuse("max_window_layers", first, "a whole number")
    used = windowed and int(first) < r.whole("num_hidden_layers")
    return r.raw.get("sliding_window", 4096) if used else None


def _llama_fields(
    r: _Reader,
    positions: int,
    window: object,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """What Llama and its kin state alike; a family's own defaults come as arguments."""
    width, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    stated = r.raw.get("num_key_value_heads", kv_heads)  # null: every head its own
    kv_heads = heads if stated is None else r.whole("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        r.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if width % heads and r.raw.get("head_dim", head_dim) is None:
        r.refuse("num_attention_heads", heads, f"a divisor of hidden_size = {width}, or a head_dim")
    head_dim = r.whole("head_dim", head_dim or max(1, width // heads))
    if head_dim % 2:
        r.refuse("head_dim", head_dim, "an even number: RoPE turns pairs of dimensions")
    layers, positions = r.whole("num_hidden_layers"), r.whole("max_position_embeddings", positions)
    r.full_attention(layers, positions, window)
    rope = _rope(r, positions)
    return {
        **r.common(),
        "num_layers": layers,
        "width": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": r.whole("intermediate_size"),
        "max_positions": rope.original_positions if rope.kind == "dynamic" else positions,
        "norm_eps": r.number("rms_norm_eps", 1e-6),
        "activation": r.activation("hidden_act", "silu"),
        "tie_embeddings": r.flag("tie_word_embeddings", False),
        "rope": rope,
    }


READERS = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}


# --- RoPE ----------------------------------------------------------------------------------------


def _rope(r: _Reader, positions: int) -> RopeConfig:
    """RoPE from either layout: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    As in transformers 5, `rope_scaling` is read first where both stand, a `rope_theta` inside the
    dictionary wins over one beside it, and an original length beside it over one inside.
    """
    key = "rope_scaling" if r.raw.get("rope_scaling") else "rope_parameters"
    stated = r.raw.get(key) or {}
    if not isinstance(stated, Mapping) or any(isinstance(v, Mapping) for v in stated.values()):
        r.refuse(key, stated, "one flat object, for all layers")
    inner = _Reader(stated, f"{r.source}: {key}")
    theta = inner.number("rope_theta", r.number("rope_theta", 10_000.0))
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind not in ROPE_KINDS:
        inner.refuse("rope_type", kind, "one of " + ", ".join(map(repr, ROPE_KINDS)))
    for where in (r, inner):
        where.only("partial_rotary_factor", 1, 1.0)
    for name, value in stated.items():
        if value is not None and name not in (*ROPE_KINDS[kind], *ROPE_NOTES, ORIGINAL):
            inner.refuse(name, value, f"nothing: RoPE of type {kind!r} has no such key")
    original = r.whole(ORIGINAL, inner.whole(ORIGINAL, positions))
    if kind == "linear":
        return RopeConfig(theta, kind, inner.number("factor"))
    if kind == "dynamic":
        shorter = min(original, positions)  # unscaled up to there by any reading of the file
        return RopeConfig(theta, kind, inner.number("factor"), original_positions=shorter)
    if kind == "llama3":
        return _llama3(inner, theta, original)
    return _yarn(inner, theta, original, positions) if kind == "yarn" else RopeConfig(theta)


def _llama3(r: _Reader, theta: float, original: int) -> RopeConfig:
    low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
    if low >= high:
        r.refuse("low_freq_factor", low, f"less than high_freq_factor = {high}")
    return RopeConfig(theta, "llama3", r.number("factor"), low, high, original)


def _yarn(r: _Reader, theta: float, original: int, positions: int) -> RopeConfig:
    """YaRN (Peng et al. 2023); a factor of null is the context's growth, as DeepSeek has it."""
    if theta <= 1:
        r.refuse("rope_theta", theta, "more than 1 with YaRN, so that wavelengths grow")
    factor = r.number("factor", positions / original if "factor" in r.raw else None)
    fast, slow = r.number_if_any("beta_fast") or 32.0, r.number_if_any("beta_slow") or 1.0
    if fast < slow:
        r.refuse("beta_fast", fast, f"no less than beta_slow = {slow}")
    mscale, all_dim = r.number_if_any("mscale"), r.number_if_any("mscale_all_dim")
    attention = _magnitude(factor)
    if mscale and all_dim:
        attention = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=r.flag("truncate", "truncate" not in r.raw),  # a null is false to transformers
        attention_factor=r.number("attention_factor", attention),
    )


def _magnitude(factor: float, share: float = 1.0) -> float:
    """sqrt(1/t) of YaRN's attention temperature t (Peng et al. 2023, section 3.4)."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
