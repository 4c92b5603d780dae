"""What is asked: the same random weights as our model, as transformers' model, and as a draft."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import oracle
import torch
from transformers.pytorch_utils import Conv1D

from spindle import Tokenizer, hub, kernels
from spindle.model.layers import Model
from spindle.model.weights import load_hf

FAMILIES = ("llama", "gpt2", "qwen2", "mistral", "qwen3")
POSITIONS, EOS = 64, 5
TEXT = """\
The capital of France is Paris, and the capital of Spain is Madrid. A dictionary maps keys to
values; a list keeps things in order. It rained on Monday, it rained on Tuesday, and on Wednesday
the river came over the bridge, so that nobody could cross it before the end of the week.
"""
# Heads of 32, as a CUDA source is compiled for; "small" has so few tokens that answers are counted.
GPT2 = dict(n_positions=POSITIONS, n_embd=64, n_head=2)
LLAMA = dict(max_position_embeddings=POSITIONS, hidden_size=48, intermediate_size=80, head_dim=32)
LLAMA |= dict(num_attention_heads=4, num_key_value_heads=2)
LAYERS = {"gpt2": "n_layer"}  # what config.json calls their number
SIZES = {"large": (24, 2, 2.0), "small": (4, 1, 1.0)}  # tokens, layers, spread of the logits
NOISE = {"large": 0.2, "small": 1.0}  # of a draft: near for long runs, far for rejected drafts


@dataclass(frozen=True, eq=False)
class Subject:
    """One set of weights in every form that a schedule and its judges need.

    `ours` is under test. `theirs` is transformers' and `plain` is ours in float64 (smollm2: both in
    float32). Where `ours` has int8 weights, both have what these stand for. `draft` says nearly the
    same as `ours`.
    """

    ours: Model
    theirs: Any
    plain: Model
    draft: Model | None = None
    text: tuple[int, ...] = ()  # that prompts are cut from; by default they are any ids

    @property
    def is_exact(self) -> bool:
        """Whether ids have to be the same, all of them."""
        return self.ours.dtype == torch.float64

    @property
    def vocab_size(self) -> int:
        return self.ours.config.vocab_size


@functools.cache
def subject(
    family: str, size: str, number: int, dtype: torch.dtype = torch.float64, int8: bool = False
) -> Subject:
    """The `number`-th random model of a family and size."""
    directory = checkpoint(family, size, number)
    quantize = "int8" if int8 else None
    plain = load_hf(directory, "cpu", torch.float64, quantize)
    ours = plain if dtype == torch.float64 else load_hf(directory, "cpu", dtype, quantize)
    draft = load_hf(checkpoint(family, size, number, noise=NOISE[size]), "cpu", dtype)
    draft.directory = None  # where its tokenizer would be looked for
    return Subject(ours, theirs(directory, int8), plain, draft)


@functools.cache
def theirs(directory: Path, int8: bool) -> Any:
    """transformers' model in float64; int8: with what the integers of each weight stand for."""
    model = oracle.load(directory)
    for module in model.modules() if int8 else ():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(dequantised(module.weight.detach()))
        elif isinstance(module, Conv1D):
            module.weight = torch.nn.Parameter(dequantised(module.weight.detach().t()).t())
    return model


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """What [N, K] becomes in 8 bits; the embedding that it may be tied to stays as it is."""
    return kernels.unpack(kernels.pack(weight, None, "int8"))


@functools.cache
def checkpoint(family: str, size: str, number: int, noise: float = 0.0) -> Path:
    """A directory with random weights, the same each time; noise: and others on top of them."""
    vocab, layers, gain = SIZES[size]
    shape = GPT2 if family == "gpt2" else LLAMA
    shape = shape | {"vocab_size": vocab, LAYERS.get(family, "num_hidden_layers"): layers}
    directory = Path(_folder().name) / f"{family}-{size}-{number}-{noise}"
    seed = number * len(FAMILIES) + FAMILIES.index(family)
    oracle.make_checkpoint(directory, family, seed, gain, **shape)
    oracle.edit_config(directory, eos_token_id=EOS if size == "large" else None)

    def shaken(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {
            name: x + noise * x.std() * torch.randn(x.shape, generator=generator)
            for name, x in sorted(tensors.items())
        }

    if noise:
        oracle.edit_weights(directory, shaken)
    return directory


@functools.cache
def _folder() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="spindle-matrix-")


@functools.cache
def smollm2() -> Subject:
    """SmolLM2-135M-Instruct in float32 here and there."""
    directory = hub.resolve("smollm2")
    ours, text = load_hf(directory, "cpu", torch.float32), Tokenizer(directory).encode(TEXT)
    return Subject(ours, oracle.load(directory, torch.float32), ours, text=tuple(text))
