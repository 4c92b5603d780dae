"""What is asked: the same random weights as our model, as transformers' model, and as a draft."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import oracle
import torch
from transformers.pytorch_utils import Conv1D

from spindle import Tokenizer, hub, kernels
from spindle.model.layers import Model
from spindle.model.weights import load_hf

FAMILIES = ("llama", "gpt2", "qwen2", "mistral", "qwen3")
EOS = 5
TEXT = """\
The capital of France is Paris, and the capital of Spain is Madrid. A dictionary maps keys to
values; a list keeps things in order. It rained on Monday, it rained on Tuesday, and on Wednesday
the river came over the bridge, so that nobody could cross it before the end of the week.
"""
VOCAB = 24
# Heads of 32, as a CUDA source is compiled for.
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_head=2)
LLAMA = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, head_dim=32)
LLAMA |= dict(num_attention_heads=4, num_key_value_heads=2)
LAYERS = {"gpt2": "n_layer"}  # what config.json calls their number
LENGTHS = {"gpt2": "n_positions"}


class Size(NamedTuple):
    """How large a model is, and how sure of itself; noise: how far from it its draft model is."""

    positions: int = 64
    layers: int = 2
    spread: float = 2.0  # of the logits: the likeliest token is a clear one
    noise: float = 0.2  # near, for long runs of accepted drafts
    eos: int | None = EOS


SIZES = {
    "large": Size(),
    "long": Size(positions=320),
    "flat": Size(layers=1, spread=1.0, noise=1.0, eos=None),  # many tokens, all of them likely
}


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
    draft_directory: Path | None = None  # where the draft is, for transformers
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
    near = checkpoint(family, size, number, noise=SIZES[size].noise)
    draft = load_hf(near, "cpu", dtype)
    draft.directory = None  # where its tokenizer would be looked for
    return Subject(ours, theirs(directory, int8), plain, draft, near)


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
    its, shape = SIZES[size], dict(GPT2 if family == "gpt2" else LLAMA)
    shape[LAYERS.get(family, "num_hidden_layers")] = its.layers
    shape[LENGTHS.get(family, "max_position_embeddings")] = its.positions
    directory = Path(_folder().name) / f"{family}-{size}-{number}-{noise}"
    seed = number * len(FAMILIES) + FAMILIES.index(family)
    oracle.make_checkpoint(directory, family, seed, its.spread, **shape)
    oracle.edit_config(directory, eos_token_id=its.eos)

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
