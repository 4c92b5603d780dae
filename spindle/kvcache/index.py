"""StepIndex: where this step's tokens stand. The same for every cache and every kind of step.

Tokens are one flat row [T]. A decode is a chunk of one, a prefill a chunk of many: no batch axis
to pad, and no flag that says which is which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepIndex:
    """One step: sequence `rows[i]` gets `counts[i]` tokens from position `starts[i]` on."""

    rows: tuple[int, ...]  # the sequence of each chunk
    starts: tuple[int, ...]  # tokens that it has stored before this step
    counts: tuple[int, ...]  # tokens that this step adds to it
    row: Tensor  # [T] the sequence of each token
    position: Tensor  # [T] the position of each token in its sequence

    @staticmethod
    def of(chunks: Iterable[tuple[int, int, int]], device: torch.device | str = "cpu") -> StepIndex:
        """Lay the chunks (row, start, count) end to end, in the order given."""
        chunks = list(chunks)
        assert chunks and all(start >= 0 and count >= 1 for _, start, count in chunks), chunks
        row = [r for r, _, count in chunks for _ in range(count)]
        position = [p for _, start, count in chunks for p in range(start, start + count)]
        rows, starts, counts = zip(*chunks, strict=True)
        return StepIndex(
            rows,
            starts,
            counts,
            torch.tensor(row, device=device),
            torch.tensor(position, device=device),
        )
