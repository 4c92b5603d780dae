"""What the families share: what they ask of a cache, where weights come from, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spindle.config import ModelConfig
from spindle.kernels import Weight, gelu_tanh, pack, packs
from spindle.kernels.room import Room


class KVView(Protocol):
    """All that a model knows of a cache: this step's positions, and two verbs.

    `write` comes before `attend` in every layer, so a token sees itself.
    """

    positions: Tensor  # [T]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values [T, Hk, D]."""

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Causal attention of q [T, H, D] over what is stored -> [T, H, D]."""


class Table(Protocol):
    """A token embedding: a tensor [V, E], or what does its work."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    def __getitem__(self, ids: Tensor, /) -> Tensor:
        """ids [T] -> their rows [T, E]."""


class Source:
    """Where a model takes its weights from: a checkpoint, a random generator, a list of wishes.

    A subclass says how to `fill` a tensor that is there; what models ask for stands here.
    """

    tied = False  # the output head is the token embedding
    spare = True  # memory allows a tied embedding to be packed once more, for the head

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> None:
        self.dtype, self.device, self.quantize = dtype, device, quantize
        self._scratch, self._packed = self._empty(0), Room()

    def fill(self, out: Tensor, name: str) -> None:
        """Write the tensor `name` into `out`, which has its shape and may be strided."""
        raise NotImplementedError

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name and shape, in the model's dtype and on its device."""
        out = self._empty(*shape)
        self.fill(out, name)
        return out

    def linear(
        self, parts: dict[str, int], inputs: int, biased: bool, transposed: bool = False
    ) -> Weight:
        """One weight of several [outputs, inputs] that read the same input; name -> outputs.

        `transposed`: stored as [inputs, outputs].
        """
        outputs = list(parts.values())
        weight = self._room(sum(outputs), inputs)
        bias = self._empty(sum(outputs)) if biased else None
        for name, block in zip(parts, weight.split(outputs), strict=True):
            self.fill(block.t() if transposed else block, f"{name}.weight")
        if bias is not None:
            for name, block in zip(parts, bias.split(outputs), strict=True):
                self.fill(block, f"{name}.bias")
        return pack(weight, bias, self.quantize, self._packed)

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Table, Weight]:
        """The token embedding [rows, width] and the output head; one tensor where they are tied.

        The table stays in floats when the head is quantized: a lookup reads few of its rows.
        """
        table = self(embed, rows, width)
        if self.tied:
            return table, self.tied_head(table)
        return table, pack(self(head, rows, width), None, self.quantize, self._packed)

    def tied_head(self, table: Tensor) -> Weight:
        """The embedding as the head: packed once more if it packs and fits, else shared."""
        if self.quantize is not None:
            return pack(table, None, self.quantize, self._packed)
        if self.spare and packs(table):
            return pack(table, room=self._packed)
        return Weight(table.shape, plain=table)

    def _room(self, rows: int, columns: int) -> Tensor:
        """Space [rows, columns] for a matrix that is packed at once, then overwritten by the next.

        One buffer for all of them: a new one each would leave holes in memory between the packed.
        """
        if self._scratch.numel() < rows * columns:
            self._scratch = self._empty(rows * columns)
        return self._scratch[: rows * columns].view(rows, columns)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Model(Protocol):
    """A forward pass over one flat row of tokens. It owns weights and nothing that changes."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    head: Weight
    directory: Path | None  # of the checkpoint

    @property
    def layers(self) -> Sequence[Any]:
        """The weights of each block."""

    def __call__(self, ids: Tensor, view: KVView) -> Tensor:
        """ids [T] -> hidden [T, E], after the final norm; writes keys and values to the view."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V], of the rows that are to be sampled only."""


def layer_weights(model: Model) -> list[Weight]:
    """The matrices of a model's layers, which a pass reads once; the head comes on top of them."""
    parts = [part for layer in model.layers for part in vars(layer).values()]
    return [part for part in parts if isinstance(part, Weight)]


def is_native(config: ModelConfig) -> bool:
    """Whether all ops between the products have native forms; relu needs none."""
    gated = config.rope is not None and config.activation in ("silu", "swish")
    return gated or ACTIVATIONS[config.activation] in (gelu_tanh, F.relu)


def activation(name: str, x: Tensor) -> Tensor:
    """The elementwise function that a config.json calls by this name."""
    return ACTIVATIONS[name](x)


def fast_gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU with the constant sqrt(2/pi) cut to ten digits."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))


def laplace(x: Tensor) -> Tensor:
    """The normal distribution function that follows squared ReLU (Ma et al. 2022, Mega)."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # Hendrycks & Gimpel 2016: x times the normal distribution function
    "gelu_python": F.gelu,
    "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "gelu_new": gelu_tanh,  # the same paper's approximation; then the same again
    "gelu_accurate": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_fast": fast_gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # the same paper's other one
    "silu": F.silu,  # Elfwing et al. 2017; "swish" in Ramachandran et al. 2017
    "swish": F.silu,
    "hardswish": F.hardswish,  # Howard et al. 2019
    "mish": F.mish,  # Misra 2019
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021, Primer
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,  # with torch's slope of 0.01
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "laplace": laplace,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "linear": lambda x: x,
}
