"""The Llama family (Touvron et al. 2023): RoPE, RMS norm, SwiGLU, query heads in groups.

    ids -> embedding -> L x [ norm, attention with rope, add, norm, swiglu, add ] -> norm -> head

Llama, TinyLlama, Llama 3, SmolLM2 and Mistral differ in their config.json alone; Qwen2 has biases
on queries, keys and values; Qwen3 normalises the queries and keys of each head before RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from spindle.config import ModelConfig
from spindle.kernels import Weight, add_rms_norm, linear, rms_norm, rope, silu_mul
from spindle.model.layers import KVView, Source, activation
from spindle.model.rope import Rope


@dataclass(frozen=True)
class Layer:
    """One block's weights; what reads the same input stands in one matrix, so it is one product."""

    input_norm: Tensor  # [E]
    qkv: Weight  # [(H + 2 Hk) D, E]
    q_norm: Tensor | None  # [D], Qwen3's
    k_norm: Tensor | None  # [D], Qwen3's
    out: Weight  # [E, H D]
    mlp_norm: Tensor  # [E]
    gate_up: Weight  # [2F, E]
    down: Weight  # [E, F]


class Llama:
    """The forward pass of a Llama over a flat row of tokens; weights are frozen once built."""

    prefix: ClassVar = "model."
    buffers: ClassVar = ("rotary_emb.inv_freq",)  # saved by old versions; follows from config.json
    stacked: ClassVar[dict[str, int]] = {}  # no tensor is several matrices
    directory: Path | None = None  # of the checkpoint

    def __init__(self, config: ModelConfig, source: Source) -> None:
        assert config.rope is not None
        self.config = config
        V, E = config.vocab_size, config.width
        self.embed, self.head = source.embeddings("embed_tokens.weight", "lm_head.weight", V, E)
        self.layers = [_layer(config, source, f"layers.{n}.") for n in range(config.num_layers)]
        self.norm = source("norm.weight", E)
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.rope = Rope(config.rope, config.head_dim, config.max_positions, self.device)

    @torch.inference_mode()
    def __call__(self, ids: Tensor, view: KVView) -> Tensor:
        """ids [T] -> hidden [T, E], after the final norm.

        Positions must be below the model's max_positions; the engine sees to it.
        """
        eps = self.config.norm_eps
        angles = self.rope.at(view.positions)  # cos, sin [T, D/2]
        residual = self.embed[ids]  # [T, E]
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        h = rms_norm(residual, self.layers[0].input_norm, eps)
        for n, (layer, following) in enumerate(zip(self.layers, norms, strict=True)):
            a = self._attention(n, layer, h, angles, view)
            h, residual = add_rms_norm(a, residual, layer.mlp_norm, eps)
            m = linear(self._gated(linear(h, layer.gate_up)), layer.down)
            h, residual = add_rms_norm(m, residual, following, eps)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        return linear(hidden, self.head)

    def _attention(
        self, n: int, layer: Layer, h: Tensor, angles: tuple[Tensor, Tensor], view: KVView
    ) -> Tensor:
        c = self.config
        heads = linear(h, layer.qkv).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, c.norm_eps)  # each head by itself
            k = rms_norm(k, layer.k_norm, c.norm_eps)
        rope(q, k, *angles)
        view.write(n, k, v)
        a = view.attend(n, q, c.attention_scale(n))  # [T, H, D]
        return linear(a.reshape(-1, c.num_heads * c.head_dim), layer.out)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """SwiGLU, or what config.json puts in silu's place: [T, 2F] -> [T, F]."""
        if self.config.activation in ("silu", "swish"):
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(self.config.activation, gate) * up


def _layer(config: ModelConfig, source: Source, at: str) -> Layer:
    E, F, D = config.width, config.mlp_width, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D

    def stacked(parts: dict[str, int], inputs: int, biased: bool) -> Weight:
        return source.linear({f"{at}{name}": n for name, n in parts.items()}, inputs, biased)

    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    return Layer(
        input_norm=source(f"{at}input_layernorm.weight", E),
        qkv=stacked(qkv, E, config.qkv_bias),
        q_norm=source(f"{at}self_attn.q_norm.weight", D) if config.qk_norm else None,
        k_norm=source(f"{at}self_attn.k_norm.weight", D) if config.qk_norm else None,
        out=stacked({"self_attn.o_proj": E}, queries, config.out_bias),
        mlp_norm=source(f"{at}post_attention_layernorm.weight", E),
        gate_up=stacked({"mlp.gate_proj": F, "mlp.up_proj": F}, E, config.mlp_bias),
        down=stacked({"mlp.down_proj": E}, F, config.mlp_bias),
    )
