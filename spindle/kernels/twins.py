"""Every op in plain torch: the specification that each faster form is tested against.

T tokens this step, S visible keys, H query heads, Hk key/value heads, D head size, E width.
Statistics, angles and the softmax are computed in float32 at least, whatever the inputs are in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if that is what it is."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]."""
    return F.linear(x, weight, bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] in -127..127 and scale [N] float32; row n is about q[n] s[n].

    The largest number of a row is 127 steps of it, so none is further off than half a step, but for
    rounding: |w - q s| <= s (1/2 + 2^-16). A row that is not finite has a scale that is not, and
    stands for NaN.
    """
    w = weight.float()
    tiny = torch.finfo(torch.float32).tiny  # zeros have a scale to be divided by, too
    scale = (w.abs().amax(dim=1) / 127).clamp(min=tiny)  # [N]
    steps = (w / scale[:, None]).nan_to_num_().round_().clamp_(-127, 127)
    return steps.to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q [N, K] times scale [N] by rows, rounded to `dtype` once."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return (q.to(exact) * scale[:, None]).to(dtype)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times integers [N, K] with a scale [N] a row, transposed, plus bias -> [T, N]."""
    return F.linear(x, dequantize(q, scale, x.dtype), bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Shift and scale each row of x [T, E] to mean 0, variance 1 (Ba et al. 2016), then affine."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, in place, then normalise it; returns (normed, residual)."""
    residual += x
    return layer_norm(residual, weight, bias, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [T, E] at root mean square 1, times weight [E] (Zhang & Sennrich 2019)."""
    h = wide(x)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, in place, then RMS-normalise it; returns (normed, residual)."""
    residual += x
    return rms_norm(residual, weight, eps), residual


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D], in place, by the angles of cos, sin [T, D/2].

    Dimension i is paired with i + D/2, as Hugging Face's checkpoints have it (the paper pairs
    2i with 2i + 1: Su et al. 2021, equation 34; the two differ by a permutation of the weights).
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D/2]
    for x in (q, k):
        a, b = x.chunk(2, dim=-1)  # [T, heads, D/2] each
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first (Shazeer 2020, SwiGLU) -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks & Gimpel 2016, section 2) of x [T, F]."""
    return F.gelu(x, approximate="tanh")


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one sequence's new queries over all of its keys.

    q [T, H, D] are the tokens at positions start .. start+T-1; k, v [S, Hk, D] those at 0 .. S-1,
    with S = start + T. Query t sees key j when j <= start + t. Each key head serves H / Hk query
    heads, and is never copied for them (Ainslie et al. 2023, GQA). Returns [T, H, D].
    """
    T, H, D = q.shape
    S, Hk, _ = k.shape
    q = q.reshape(T, Hk, H // Hk, D)
    scores = torch.einsum("tkgd,skd->kgts", wide(q), wide(k)) * scale  # [Hk, G, T, S]
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(start + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgts,skd->tkgd", weights, wide(v)).reshape(T, H, D).to(q.dtype)


def write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Put new [T, Hk, D] into slots [T] of cache [N, P, Hk, D]; slot n * P + p is p of block n."""
    cache.view(-1, *cache.shape[2:])[slots] = new


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the blocks source [C] of cache [L, N, P, Hk, D] over the blocks target [C]."""
    cache[:, target] = cache[:, source]


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Attention of each row's last C queries over that row's keys, which lie in blocks.

    q [R * C, H, D], row by row, C = len(q) / R; keys, values [N, P, Hk, D]; tables [R, B] name each
    row's blocks in the order of its positions, lengths [R] say how many keys its last query sees;
    each query before it sees one key less. A query that sees none gets zeros. Slots beyond a row's
    length, and table entries beyond ceil(length / P), are not read: they may be NaN, or any number.
    A length above B * P is the caller's mistake, and cannot be refused: it stands on the device.
    Returns [R * C, H, D]. (Kwon et al. 2023, section 4.1.)
    """
    (T, H, D), (_, P, Hk, _), (R, B) = q.shape, keys.shape, tables.shape
    C, S = T // max(R, 1), B * P
    unused = torch.arange(B, device=q.device) * P >= lengths[:, None]  # [R, B]
    slots, ahead = torch.arange(S, device=q.device), torch.arange(C - 1, -1, -1, device=q.device)
    seen = lengths[:, None] - ahead  # [R, C]
    hidden = slots >= seen[:, :, None]  # [R, C, S]
    beyond = slots >= lengths[:, None]  # [R, S]
    k, v = (x[tables.masked_fill(unused, 0)].view(R, S, Hk, D) for x in (keys, values))
    k, v = (wide(x).masked_fill(beyond[:, :, None, None], 0.0) for x in (k, v))
    q_of_head = wide(q).reshape(R, C, Hk, H // Hk, D)
    scores = torch.einsum("rckgd,rskd->rckgs", q_of_head, k) * scale  # [R, C, Hk, G, S]
    weights = scores.masked_fill(hidden[:, :, None, None], -torch.inf).softmax(dim=-1)
    out = torch.einsum("rckgs,rskd->rckgd", weights, v).reshape(T, H, D)
    return out.masked_fill(seen.reshape(T, 1, 1) < 1, 0.0).to(q.dtype)
