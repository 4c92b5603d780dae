"""Small models for tests that need one and do not care which; and all that a model holds."""

from typing import Any

from torch import Tensor

from spindle.config import ModelConfig
from spindle.kernels import Weight, unpack

GPT2 = dict(model_type="gpt2", vocab_size=97, n_positions=64, n_embd=48, n_layer=3, n_head=4)
LLAMA = dict(model_type="llama", vocab_size=97, max_position_embeddings=64, hidden_size=48)
LLAMA |= dict(intermediate_size=80, num_hidden_layers=3, head_dim=16)
LLAMA |= dict(num_attention_heads=4, num_key_value_heads=2)


def gpt2(**changes: Any) -> ModelConfig:
    """3 layers, 97 tokens, 64 positions."""
    return ModelConfig.from_dict(GPT2 | changes)


def llama(**changes: Any) -> ModelConfig:
    """The same, with two query heads to a key head."""
    return ModelConfig.from_dict(LLAMA | changes)


def parameters(model: object) -> dict[str, Tensor]:
    """Every tensor that a model holds, by where it holds it; packed ones unpacked."""
    found: dict[str, Tensor] = {}

    def visit(at: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[at] = value
        elif isinstance(value, Weight):
            visit(f"{at}.weight", unpack(value))
            visit(f"{at}.bias", value.bias)
        elif isinstance(value, list):
            for n, item in enumerate(value):
                visit(f"{at}.{n}", item)
        elif not isinstance(value, ModelConfig) and hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                visit(f"{at}.{name}", item)

    visit("model", model)
    return found
