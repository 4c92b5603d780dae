"""What the tokens so far do to the logits of the next one: min_tokens, and three penalties.

A row is a sequence up to some token, its `Prefix`. Rows of one step may share a sequence: to verify
drafts, row i's output ends with draft i. What a row's prefix says is a row of [R, V] here, built
from lists of ids, or kept up to date on the device by `append`, at the same cost for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spindle.decode.params import SamplingParams


class Prefix(NamedTuple):
    """What stands before the token that a row draws."""

    prompt: Sequence[int]
    output: Sequence[int] = ()


@dataclass(frozen=True)
class MinTokens:
    """The ids that end an answer cannot be sampled while it owes tokens; the counts go down."""

    ends: Tensor  # [R, V] bool, all false in a row without min_tokens
    owed: Tensor  # [R] int64, tokens that must come before one that ends the answer

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        prefixes: Sequence[Prefix],
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> MinTokens:
        """Rows for answers that are `prefixes` so far; EOS ids that no logit has are left out."""
        owed = [max(0, p.min_tokens - len(f.output)) for p, f in zip(params, prefixes, strict=True)]
        ends = [
            [i for i in p.end_ids(eos_ids) if 0 <= i < vocab_size] if count else []
            for p, count in zip(params, owed, strict=True)
        ]
        return MinTokens(counted(ends, vocab_size, device) > 0, torch.tensor(owed, device=device))

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [R, V] with -inf for what cannot be sampled yet."""
        return logits.masked_fill(self.ends & (self.owed > 0)[:, None], -torch.inf)

    def append(self) -> None:
        """Each row has gained a token: changes `owed`."""
        self.owed.sub_(1)


@dataclass(frozen=True)
class Penalties:
    """Repetition counts prompt and output; frequency and presence the output alone.

    A row without penalties divides by 1 and subtracts 0: its bits do not change.
    """

    presence: Tensor  # [R] float64
    frequency: Tensor  # [R] float64
    repetition: Tensor  # [R] float64
    prompted: Tensor  # [R, V] bool: whether the prompt has the id
    counts: Tensor  # [R, V] int64: how often the output has it

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        prefixes: Sequence[Prefix],
        vocab_size: int,
        device: torch.device | str,
    ) -> Penalties:
        """Rows for answers that are `prefixes` so far."""

        def column(field: str) -> Tensor:
            values = [getattr(p, field) for p in params]
            return torch.tensor(values, dtype=torch.float64, device=device)

        return Penalties(
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
            repetition=column("repetition_penalty"),
            prompted=counted([p.prompt for p in prefixes], vocab_size, device) > 0,
            counts=counted([p.output for p in prefixes], vocab_size, device),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [R, V] after repetition, then frequency, then presence."""
        presence, frequency, repetition = (
            penalty.to(logits.dtype)[:, None]
            for penalty in (self.presence, self.frequency, self.repetition)
        )
        seen = self.prompted | (self.counts > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - frequency * self.counts
        return logits - presence * (self.counts > 0)

    def append(self, tokens: Tensor) -> None:
        """Each row's output has gained its one of `tokens` [R]: changes `counts`."""
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens)[:, None])


def counted(lists: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str) -> Tensor:
    """How often each id stands in each of R lists -> [R, V] int64."""
    rows = [row for row, ids in enumerate(lists) for _ in ids]
    columns = [i for ids in lists for i in ids]
    cells = torch.tensor(rows, dtype=torch.long) * vocab_size + torch.tensor(
        columns, dtype=torch.long
    )
    counts = torch.bincount(cells, minlength=len(lists) * vocab_size)
    return counts.view(len(lists), vocab_size).to(device)
