"""config.json -> one frozen ModelConfig, in our names, checked once and trusted ever after.

Checkpoints say the same thing in several dialects: GPT-2 says `n_embd` where Llama says
`hidden_size`, and RoPE's base moved from `rope_theta` into `rope_parameters` with transformers 5.
All of that ends here. A key that changes the computation in a way we do not do is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle.errors import CheckpointError, ConfigError

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish")


@dataclass(frozen=True)
class RopeConfig:
    """How rotary angles grow with the position (Su et al. 2021, RoFormer, section 3.2.2)."""

    theta: float = 10_000.0  # base of the geometric series of wavelengths
    kind: str = "default"  # "default" | "llama3"
    factor: float = 1.0  # llama3: long wavelengths are stretched by this
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are stretched whole
    high_freq_factor: float = 4.0  # llama3: those below original / high are left alone
    original_positions: int = 0  # llama3: the context length before stretching


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
    attention_bias: bool = False
    mlp_bias: bool = False
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
        return READERS[model_type](reader)

    @staticmethod
    def from_directory(directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json, and the EOS ids of generation_config.json if it has any."""
        path = Path(directory) / "config.json"
        raw = read_json(path)
        generation = Path(directory) / "generation_config.json"
        if generation.exists():
            stated = {k: v for k, v in read_json(generation).items() if v is not None}
            for key in ("eos_token_id", "bos_token_id"):
                raw[key] = stated.get(key, raw.get(key))
        return ModelConfig.from_dict(raw, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError that names the file if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; a checkpoint directory has one") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: not readable as JSON ({cause})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
    return content


class _Reader:
    """Typed access to one config.json; every refusal names the file, the key, and what is right."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def refuse(self, key: str, got: object, right: str) -> None:
        raise ConfigError(f"{self.source}: {key} is {got!r}; expected {right}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, value, "a whole number of 1 or more")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            self.refuse(key, value, "a finite number above 0")
        return float(value)

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
            right = " or ".join(map(repr, allowed)) or "nothing"
            self.refuse(key, self.raw[key], f"{right}: other values are not implemented")

    def activation(self, key: str, default: str) -> str:
        name = self.text(key, default)
        if name not in ACTIVATIONS:
            self.refuse(key, name, "one of " + ", ".join(ACTIVATIONS))
        return name

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.refuse(key, value, "an id, a list of ids, or null")
        return tuple(ids)

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


def _gpt2(r: _Reader) -> ModelConfig:
    """GPT-2's dialect (Radford et al. 2019); defaults as in transformers' GPT2Config."""
    r.only("add_cross_attention", False)
    width, heads = r.whole("n_embd", 768), r.whole("n_head", 12)
    if width % heads:
        r.refuse("n_head", heads, f"a divisor of n_embd = {width}")
    return ModelConfig(
        **r.common(),
        num_layers=r.whole("n_layer", 12),
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        mlp_width=r.whole("n_inner", 4 * width),
        max_positions=r.whole("n_positions", 1024),
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("activation_function", "gelu_new"),
        tie_embeddings=r.flag("tie_word_embeddings", True),
        attention_bias=True,
        mlp_bias=True,
        scale_by_head=r.flag("scale_attn_weights", True),
        scale_by_layer=r.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _llama(r: _Reader) -> ModelConfig:
    """Llama's dialect (Touvron et al. 2023); defaults as in transformers' LlamaConfig."""
    r.only("pretraining_tp", 1)
    r.only("sliding_window")
    width, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    if r.raw.get("head_dim") is None and width % heads:
        r.refuse("num_attention_heads", heads, f"a divisor of hidden_size = {width}, or a head_dim")
    kv_heads = r.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        r.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    head_dim = r.whole("head_dim", width // heads)
    if head_dim % 2:
        r.refuse("head_dim", head_dim, "an even number: RoPE turns pairs of dimensions")
    return ModelConfig(
        **r.common(),
        num_layers=r.whole("num_hidden_layers"),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=r.whole("intermediate_size"),
        max_positions=r.whole("max_position_embeddings", 2048),
        norm_eps=r.number("rms_norm_eps", 1e-6),
        activation=r.activation("hidden_act", "silu"),
        tie_embeddings=r.flag("tie_word_embeddings", False),
        attention_bias=r.flag("attention_bias", False),
        mlp_bias=r.flag("mlp_bias", False),
        rope=_rope(r),
    )


def _rope(r: _Reader) -> RopeConfig:
    """RoPE from either layout: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    As in transformers 5, `rope_scaling` is read first where both stand, and a `rope_theta` inside
    the dictionary wins over one beside it.
    """
    key = "rope_scaling" if r.raw.get("rope_scaling") else "rope_parameters"
    stated = r.raw.get(key) or {}
    if not isinstance(stated, Mapping) or any(isinstance(v, Mapping) for v in stated.values()):
        r.refuse(key, stated, "one flat object, for all layers")
    inner = _Reader(stated, f"{r.source}: {key}")
    theta = inner.number("rope_theta", r.number("rope_theta", 10_000.0))
    kind = inner.text("rope_type", inner.text("type", "default"))
    for where in (r, inner):
        where.only("partial_rotary_factor", 1, 1.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        inner.refuse("rope_type", kind, "'default' or 'llama3'")
    original_key = "original_max_position_embeddings"  # beside the dictionary it wins
    original = r.whole(
        original_key, inner.whole(original_key, r.whole("max_position_embeddings", 2048))
    )
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        inner.refuse("low_freq_factor", low, f"less than high_freq_factor = {high}")
    return RopeConfig(theta, kind, inner.number("factor"), low, high, original)


READERS = {"gpt2": _gpt2, "llama": _llama}
