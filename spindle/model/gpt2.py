"""GPT-2 (Radford et al. 2019): learned positions, layer norm, GELU, every head its own keys.

    ids -> embedding + position -> L x [ norm, attention, add, norm, mlp, add ] -> norm -> head

The residual stream is carried beside the normed one, because "add, then norm" is one memory pass
when it is one op.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from spindle.config import ModelConfig
from spindle.kernels import Weight, add_layer_norm, layer_norm, linear
from spindle.model.layers import KVView, Source, activation


@dataclass(frozen=True)
class Norm:
    """Weight and bias [E] of one layer norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Layer:
    """One block's weights. `qkv` holds queries, keys, values one above the other: one product."""

    ln_1: Norm
    qkv: Weight  # [3E, E]
    out: Weight  # [E, E]
    ln_2: Norm
    up: Weight  # [F, E]
    down: Weight  # [E, F]


class GPT2:
    """The forward pass of GPT-2 over a flat row of tokens; weights are frozen once built."""

    prefix: ClassVar = (
        "transformer."  # some checkpoints have it before every name, the hub's own has not
    )
    buffers: ClassVar = (
        ".attn.bias",
        ".attn.masked_bias",
    )  # causal masks that were saved along: no weights
    stacked: ClassVar = {"attn.c_attn": 3}  # tensors that are several matrices: q, k and v
    directory: Path | None = None  # of the checkpoint

    def __init__(self, config: ModelConfig, source: Source) -> None:
        self.config = config
        V, E = config.vocab_size, config.width
        self.wte, self.head = source.embeddings("wte.weight", "lm_head.weight", V, E)
        self.wpe = source("wpe.weight", config.max_positions, E)
        self.layers = [_layer(config, source, f"h.{n}.") for n in range(config.num_layers)]
        self.ln_f = _norm(config, source, "ln_f")
        self.dtype, self.device = self.wte.dtype, self.wte.device

    @torch.inference_mode()
    def __call__(self, ids: Tensor, view: KVView) -> Tensor:
        """ids [T] -> hidden [T, E], after the final norm.

        Positions must lie inside the position table; the engine sees to it.
        """
        residual = self.wte[ids] + self.wpe[view.positions]  # [T, E]
        norms = [*(layer.ln_1 for layer in self.layers[1:]), self.ln_f]
        h = self._norm(residual, self.layers[0].ln_1)
        for n, (layer, following) in enumerate(zip(self.layers, norms, strict=True)):
            a = self._attention(n, layer, h, view)
            h, residual = self._add_norm(a, residual, layer.ln_2)
            m = linear(activation(self.config.activation, linear(h, layer.up)), layer.down)
            h, residual = self._add_norm(m, residual, following)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        return linear(hidden, self.head)

    def _attention(self, n: int, layer: Layer, h: Tensor, view: KVView) -> Tensor:
        c = self.config
        q, k, v = linear(h, layer.qkv).view(-1, 3, c.num_heads, c.head_dim).unbind(1)  # [T, H, D]
        view.write(n, k, v)
        a = view.attend(n, q, c.attention_scale(n))  # [T, H, D]
        return linear(a.flatten(1), layer.out)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)

    def _add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, residual, norm.weight, norm.bias, self.config.norm_eps)


def _layer(config: ModelConfig, source: Source, at: str) -> Layer:
    E, F = config.width, config.mlp_width
    heads = config.num_heads * config.head_dim  # E, or a part of it

    def conv1d(name: str, inputs: int, outputs: int) -> Weight:
        """GPT-2 stores a linear layer as [inputs, outputs]: the transpose of nn.Linear's."""
        return source.linear({f"{at}{name}": outputs}, inputs, biased=True, transposed=True)

    return Layer(
        ln_1=_norm(config, source, f"{at}ln_1"),
        qkv=conv1d("attn.c_attn", E, 3 * heads),
        out=conv1d("attn.c_proj", heads, E),
        ln_2=_norm(config, source, f"{at}ln_2"),
        up=conv1d("mlp.c_fc", E, F),
        down=conv1d("mlp.c_proj", F, E),
    )


def _norm(config: ModelConfig, source: Source, at: str) -> Norm:
    return Norm(source(f"{at}.weight", config.width), source(f"{at}.bias", config.width))
