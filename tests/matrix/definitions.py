"""How a token is drawn, written down again from its definitions, with nothing of the package's.

Where `spindle.decode.sampling` works on rows of a step, with shapes that no value changes, here a
row is one token of an answer, and each line is a sentence of the definition: what would end the
answer too early is out; the repetition penalty (Keskar et al. 2019, section 4.1), then frequency
and presence; temperature; min-p; top-k; top-p (Holtzman et al. 2020, section 3.1). The token is
the first id whose cumulative probability exceeds a number, and that number is a hash of four
integers by SplitMix64's finaliser (Steele et al. 2014, constants of Stafford, variant 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spindle import SamplingParams

Columns = dict[str, Tensor]  # a parameter's values, one a row [N, 1]
REALS = ("temperature", "top_p", "min_p")  # which the engine keeps in float32
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Draw:
    """A token that was drawn, and what stood before it."""

    params: SamplingParams
    prompt: Sequence[int]
    before: Sequence[int]  # the ids of the answer so far
    token: int
    sample: int = 0  # which of a request's answers

    @property
    def u(self) -> float:
        """The random number that decides it."""
        assert self.params.seed is not None
        return uniform(self.params.seed, self.sample, len(self.prompt) + len(self.before))


def uniform(seed: int, sample: int, position: int, purpose: int = 0) -> float:
    """A number in [0, 1): what the four integers are hashed to, 53 bits of it."""
    golden = 0x9E3779B97F4A7C15
    state = finalised(seed + golden)
    for value in (sample, position, purpose):
        state = finalised(state + value * golden + 1)
    return (state >> 11) / 2**53


def finalised(z: int) -> int:
    """SplitMix64's last steps on a word of 64 bits."""
    z &= WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def columns_of(draws: Sequence[Draw]) -> Columns:
    """The parameters of each draw, as the engine keeps them."""
    found = {}
    for name in (*REALS, "top_k", *PENALTIES):
        values = torch.tensor([[getattr(draw.params, name)] for draw in draws])
        found[name] = values.float().double() if name in REALS else values.double()
    return found


@dataclass(frozen=True, eq=False)
class Past:
    """What stood before each draw, as far as it counts."""

    counts: Tensor  # [N, V]: how often the answer has each id
    seen: Tensor  # [N, V] bool: whether prompt or answer have it
    held: Tensor  # [N, V] bool: whether it would end an answer of fewer than min_tokens


def past_of(draws: Sequence[Draw], vocab_size: int, eos_ids: Sequence[int]) -> Past:
    """Counted draw by draw."""
    counts = torch.zeros(len(draws), vocab_size, dtype=torch.float64)
    seen, held = torch.zeros(2, len(draws), vocab_size, dtype=torch.bool)
    for row, draw in enumerate(draws):
        for token in draw.before:
            counts[row, token] += 1
        seen[row, [*draw.prompt, *draw.before]] = True
        if len(draw.before) < draw.params.min_tokens:
            held[row, ends_of(draw.params, eos_ids)] = True
    return Past(counts, seen, held)


def ends_of(params: SamplingParams, eos_ids: Sequence[int]) -> list[int]:
    """The ids that end an answer."""
    return [*(() if params.ignore_eos else eos_ids), *(params.stop_token_ids or ())]


def distributions(logits: Tensor, past: Past, columns: Columns) -> Tensor:
    """What each token is drawn from: logits [N, V] that follow the ids before it -> [N, V]."""
    x = penalised(logits.double().masked_fill(past.held, -torch.inf), past, columns)
    p = (x / columns["temperature"]).softmax(-1)
    p = p.where(p >= columns["min_p"] * p.amax(-1, keepdim=True), 0)
    likely, order = p.sort(dim=-1, descending=True, stable=True)  # of equals the lower id first
    rank, k = torch.arange(p.shape[-1]), columns["top_k"]
    likely = likely.where((k <= 0) | (rank < k), 0)
    share_before = (likely.cumsum(-1) - likely) / likely.sum(-1, keepdim=True)
    likely = likely.where((share_before < columns["top_p"]) | (columns["top_p"] >= 1), 0)
    return torch.zeros_like(p).scatter(-1, order, likely / likely.sum(-1, keepdim=True))


def penalised(x: Tensor, past: Past, columns: Columns) -> Tensor:
    """Logits after the penalties; the first counts prompt and answer, the others the answer."""
    repetition, frequency, presence = (columns[name] for name in PENALTIES)
    x = torch.where(past.seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * past.counts - presence * (past.counts > 0)


def off_the_draw(p: Tensor, draws: Sequence[Draw]) -> Tensor:
    """How far each random number lies outside the interval of the token that was drawn [N].

    Negative: it lies inside. Infinite: the token cannot be drawn at all.
    """
    token = torch.tensor([[draw.token] for draw in draws])
    u = torch.tensor([draw.u for draw in draws], dtype=torch.float64)
    end, mine = p.cumsum(-1).gather(-1, token)[:, 0], p.gather(-1, token)[:, 0]
    return torch.maximum(u - end, end - mine - u).where(mine > 0, torch.inf)
