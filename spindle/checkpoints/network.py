"""GPT-2 as a module that can be trained; its state_dict is already a Hugging Face checkpoint.

Names and layouts are those of `GPT2LMHeadModel`: `Conv1D` keeps a weight as [in, out], the head is
the embedding, no mask is stored. Source: Radford et al. 2019, section 2.3.
A forward pass drops out what enters the residual stream if it is given the noise to do it with:
the generator is an argument, since two workers share one network and each has its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of one GPT-2."""

    width: int
    layers: int
    heads: int
    vocab: int = 4096
    context: int = 512
    dropout: float = 0.0


class Dropout(nn.Module):
    """Zero a share of x and scale up the rest (Srivastava et al. 2014); without noise, x itself."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor, noise: torch.Generator | None) -> Tensor:
        if noise is None or not self.share:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.share, generator=noise)
        return x * kept / (1 - self.share)


class Conv1D(nn.Module):
    """A linear layer whose weight lies as [in, out], as GPT-2's checkpoints have it."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, shape: Shape, out_std: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Conv1D(shape.width, 3 * shape.width, 0.02)
        self.c_proj = Conv1D(shape.width, shape.width, out_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, -1)  # [B, T, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D]
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))  # [B, T, E]


class MLP(nn.Module):
    def __init__(self, width: int, out_std: float) -> None:
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width, 0.02)
        self.c_proj = Conv1D(4 * width, width, out_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * shape.layers)  # 2L additions to one residual stream
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape, out_std)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape.width, out_std)
        self.drop = Dropout(shape.dropout)

    def forward(self, x: Tensor, noise: torch.Generator | None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)), noise)
        return x + self.drop(self.mlp(self.ln_2(x)), noise)


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.drop = Dropout(shape.dropout)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.01)

    def forward(self, ids: Tensor, noise: torch.Generator | None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)  # [T]
        x = self.drop(self.wte(ids) + self.wpe(positions), noise)  # [B, T, E]
        for block in self.h:
            x = block(x, noise)
        return self.ln_f(x)


class GPT2(nn.Module):
    """ids [B, T] -> logits [B, T, V]; with noise (changed) as in training, without as in use."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape)

    def forward(self, ids: Tensor, noise: torch.Generator | None = None) -> Tensor:
        return F.linear(self.transformer(ids, noise), self.transformer.wte.weight)
