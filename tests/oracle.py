"""All that the tests ask of transformers: random checkpoints, logits, greedy continuations.

transformers computes some things in float32 whatever the model's dtype is, and float64 equality to
1e-9 cannot be had through them. Here the oracle is float64 throughout:

- the softmax of its eager attention is float32, so attention is torch's own ("sdpa");
- each family's RMSNorm takes its mean in float32: `in_float64` puts the same formula in its place;
- rotary angles are float32 tables cast up. So are ours, by design: this one stays.
"""

import dataclasses
import importlib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CONFIGS: dict[str, Any] = {"gpt2": GPT2Config, "llama": LlamaConfig, "mistral": MistralConfig}
CONFIGS |= {"qwen2": Qwen2Config, "qwen3": Qwen3Config}

# Tiny, and with no two lengths equal, so that nothing fits by accident.
GPT2_SHAPE = dict(vocab_size=97, n_positions=128, n_embd=48, n_layer=3, n_head=4)
LLAMA_SHAPE = dict(
    vocab_size=97,
    max_position_embeddings=128,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SHAPES = {"gpt2": GPT2_SHAPE, "llama": LLAMA_SHAPE, "qwen2": LLAMA_SHAPE}
SHAPES |= {"mistral": LLAMA_SHAPE | dict(sliding_window=None)}  # transformers' own is 4096
SHAPES |= {"qwen3": LLAMA_SHAPE | dict(head_dim=16)}  # transformers' own is 128
NO_SPECIAL_IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


# --- checkpoints ---------------------------------------------------------------------------------


def make_checkpoint(
    directory: Path,
    family: str,
    seed: int = 0,
    gain: float = 3.0,
    shards: str = "5GB",
    **config: Any,
) -> Path:
    """Save a random model of this config as transformers does, in float32; returns the directory.

    Norm weights lie around 1 and biases around 0, none at the value that would hide its absence;
    matrices are scaled so that logits spread by about `gain` and argmax means something.
    """
    stated = CONFIGS[family](**{**SHAPES[family], **NO_SPECIAL_IDS, **config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(stated)
    model = model.to_empty(device="cpu").to(torch.float32)
    model.tie_weights()
    randomise(model, seed, gain)
    model.save_pretrained(directory, max_shard_size=shards)
    return directory


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, gain: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.ndim == 1:
            parameter.mul_(0.2).add_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.mul_(gain / width**0.5)


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite the one safetensors file of a checkpoint as `change` has it."""
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def edit_config(directory: Path, *absent: str, **values: Any) -> None:
    """Set keys of a checkpoint's config.json to `values`, and take the `absent` ones out."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))


# --- the oracle ----------------------------------------------------------------------------------


def load(directory: str | Path, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' own model of a checkpoint."""
    with any_width():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa"
        )
    for key in NO_SPECIAL_IDS:
        setattr(model.generation_config, key, None)
    return in_float64(model.eval()) if dtype == torch.float64 else model.eval()


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> Tensor:
    """Logits [T, V] of one prompt in one pass, with no cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The `count` ids that transformers' generate appends, greedily and with its cache."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
    )
    return out[0, len(ids) :].tolist()


@torch.inference_mode()
def beam_search(
    model: Any, ids: list[int], width: int, count: int, penalty: float, eos: int | list[int]
) -> list[list[int]]:
    """The answers of transformers' beam search, the best first, each up to its EOS."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping="never",
        eos_token_id=eos,
        pad_token_id=0,
    )
    ends = eos if isinstance(eos, list) else [eos]
    answers = [row[len(ids) :].tolist() for row in out]
    lengths = [next((n for n, i in enumerate(a, 1) if i in ends), len(a)) for a in answers]
    return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def inverse_frequencies(directory: Path) -> Tensor:
    """RoPE's radians a position [D/2], as transformers reads them from a config.json."""
    return LlamaRotaryEmbedding(LlamaConfig.from_pretrained(directory)).inv_freq


def rope_tables(directory: Path, positions: int) -> tuple[Tensor, Tensor]:
    """RoPE's cosines and sines [positions, D/2] in float32."""
    rope = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(directory))
    cos, sin = rope(torch.zeros(1), torch.arange(positions)[None])
    return cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """transformers' activation of that name."""
    return ACT2FN[name]


def activation_names() -> set[str]:
    """Every name that transformers' table of activations has."""
    return set(ACT2FN)


def config_defaults(family: str) -> dict[str, Any]:
    """The keys that transformers' config class of a family has of its own, and their defaults."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = dataclasses.fields(CONFIGS[family])
    return {field.name: field.default for field in own if field.name not in common}


def common_keys() -> set[str]:
    """The keys that every config class of transformers has."""
    return {field.name for field in dataclasses.fields(PreTrainedConfig)}


def keys_read(family: str) -> set[str]:
    """The keys of a config that transformers' source reads: of the model, its masks, its cache."""
    modules = (f"models.{family}.modeling_{family}", "masking_utils", "cache_utils")
    names: set[str] = set()
    for module in modules:
        source = inspect.getsource(importlib.import_module(f"transformers.{module}"))
        names |= set(re.findall(r"config\.(\w+)", source))
        names |= set(re.findall(r"attr\(\w*\.?\w*config, \"(\w+)\"", source))
    return {name.lstrip("_") for name in names}


def in_float64(model: Any) -> Any:
    """The model with the mean of its RMS norms taken in the dtype that it is in."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    return model


@contextmanager
def any_width() -> Iterator[None]:
    """Let LlamaConfig take a width that its heads do not divide.

    It refuses one even where head_dim is stated, though its model computes with head_dim alone.
    """
    kept = LlamaConfig.__class_validators__
    LlamaConfig.__class_validators__ = [v for v in kept if v.__name__ != "validate_architecture"]
    try:
        yield
    finally:
        LlamaConfig.__class_validators__ = kept
