"""What the two families share: what they ask of a cache, where weights come from, and RoPE."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spindle.config import ModelConfig, RopeConfig
from spindle.kernels import Weight, pack, packs


class KVView(Protocol):
    """All that a model knows of a cache: this step's positions, and two verbs.

    `write` comes before `attend` in every layer, so a token sees itself.
    """

    positions: Tensor  # [T]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values [T, Hk, D]."""

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Causal attention of q [T, H, D] over what is stored -> [T, H, D]."""


class Source:
    """Where a model takes its weights from: a checkpoint, a random generator, a list of wishes.

    A subclass says how to `fill` a tensor that is there; what models ask for stands here.
    """

    tied = False  # the output head is the token embedding
    spare = True  # memory allows a tied embedding to be packed once more, for the head

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._scratch = self._empty(0)

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
        return pack(weight, bias)

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Tensor, Weight]:
        """The token embedding [rows, width] and the output head; one tensor where they are tied."""
        table = self(embed, rows, width)
        return table, self.tied_head(table) if self.tied else pack(self(head, rows, width))

    def tied_head(self, table: Tensor) -> Weight:
        """The embedding as the head: packed once more if it packs and fits, else shared."""
        return pack(table) if self.spare and packs(table) else Weight(table, None, None)

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

    def __call__(self, ids: Tensor, view: KVView) -> Tensor:
        """ids [T] -> hidden [T, E], after the final norm; writes keys and values to the view."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V], of the rows that are to be sampled only."""


def activation(name: str, x: Tensor) -> Tensor:
    """The elementwise function that a config.json calls by this name."""
    if name in ("gelu_new", "gelu_pytorch_tanh"):  # Hendrycks & Gimpel 2016: the tanh form
        return F.gelu(x, approximate="tanh")
    if name == "gelu":
        return F.gelu(x)
    if name == "relu":
        return F.relu(x)
    return F.silu(x)


class Rope:
    """Tables of the rotary angles' cosines and sines, [positions, D/2], in float32.

    A table, not a formula a step: a position has the same bits whatever else is in the step.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        inv_freq = inverse_frequencies(rope, head_dim)
        angles = torch.arange(positions).float()[:, None] * inv_freq  # [positions, D/2]
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, D/2] of positions [T]."""
        return self.cos[positions], self.sin[positions]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of dimensions [D/2], float32 (Su et al. 2021, eq. 15).

    kind "llama3" (Dubey et al. 2024, section 3.4.2 and the released code) slows the pairs whose
    wavelength is long against the original context by `factor`, leaves the short ones alone, and
    goes from one to the other in a straight line of the frequency.
    """
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "default":
        return inv_freq
    assert rope.kind == "llama3", rope.kind
    wavelength = 2 * math.pi / inv_freq  # positions a turn
    turns = rope.original_positions / wavelength  # turns within the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 1: left alone, 0: slowed whole
    return (1 - share) * inv_freq / rope.factor + share * inv_freq
