"""RoPE's angles: plain (Su et al. 2021), or stretched to a context longer than the trained one.

Dimensions turn in pairs; pair i goes round once in 2 pi theta^(2i/D) positions, its wavelength. In
training the fast pairs went round many times, the slow ones not once. So the later ways to stretch
slow the pairs unequally: those of a long wavelength by the whole factor, those of a short one not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spindle.config import RopeConfig


class Rope:
    """Tables of the rotary angles' cosines and sines, [positions, D/2], in float32.

    A table, not a formula a step: a position has the same bits whatever else is in the step.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        inv_freq = inverse_frequencies(rope, head_dim)
        angles = torch.arange(positions).float()[:, None] * inv_freq  # [positions, D/2]
        self.cos = (angles.cos() * rope.attention_factor).to(device)
        self.sin = (angles.sin() * rope.attention_factor).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, D/2] of positions [T]."""
        return self.cos[positions], self.sin[positions]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of dimensions [D/2], float32 (Su et al. 2021, eq. 15)."""
    spans = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # positions a radian
    return KINDS[rope.kind](rope, spans)


def plain(rope: RopeConfig, spans: Tensor) -> Tensor:
    """As trained. "dynamic" is this, too: its base changes only beyond the original context."""
    return 1.0 / spans


def linear(rope: RopeConfig, spans: Tensor) -> Tensor:
    """Every pair slowed by the factor: position interpolation (Chen et al. 2023)."""
    return 1.0 / spans / rope.factor


def llama3(rope: RopeConfig, spans: Tensor) -> Tensor:
    """Slow pairs slowed (Dubey et al. 2024, section 3.4.2 and the released code).

    The bounds are turns within the original context; from one to the other the frequency goes in a
    straight line.
    """
    inv_freq = 1.0 / spans
    wavelength = 2 * math.pi / inv_freq  # positions a turn
    turns = rope.original_positions / wavelength  # turns within the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 1: left alone, 0: slowed whole
    return (1 - share) * inv_freq / rope.factor + share * inv_freq


def yarn(rope: RopeConfig, spans: Tensor) -> Tensor:
    """Slow pairs slowed, by their number (Peng et al. 2023, YaRN, section 3.2 "NTK-by-parts").

    The bounds are turns within the original context, too, but the way from one to the other is a
    straight line of the pair's index, as in the released code, where the paper has the turns.
    """
    pairs = len(spans)
    first = _pair_that_turns(rope.beta_fast, rope, pairs)
    last = _pair_that_turns(rope.beta_slow, rope, pairs)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if first == last else last  # a step, not a division by zero
    kept = 1 - ((torch.arange(pairs).float() - first) / (last - first)).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * spans) * (1 - kept) + 1.0 / spans * kept


def _pair_that_turns(times: float, rope: RopeConfig, pairs: int) -> float:
    """The index, a fraction, of the pair that turns this often within the original context."""
    return pairs * math.log(rope.original_positions / (times * 2 * math.pi)) / math.log(rope.theta)


KINDS: dict[str, Callable[[RopeConfig, Tensor], Tensor]]
KINDS = {"default": plain, "dynamic": plain, "linear": linear, "llama3": llama3, "yarn": yarn}
