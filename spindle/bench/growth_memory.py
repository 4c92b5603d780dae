"""What the caches take for the tokens that they hold: by their own account, and by the system's.

Sequences of drawn lengths come one after another, and their keys and values are written through the
caches' own views, until so many tokens are held. No model runs, and what is written is nothing.

    paged     blocks that sequences hold; of each sequence's last one, some slots are empty
    static    rows of as many slots as a sequence may need, whatever it has of them
    resident  what the process has more than before the cache was made: memory that was never
              written to is reserved, and not resident
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch

from spindle.bench.growth_fit import growth
from spindle.config import ModelConfig
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool, BlockTable
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV
from spindle.kvcache.static import StaticKV

BLOCK_SIZE = 16
LONGEST = 512  # tokens of a sequence, at most
DTYPE = torch.float32
Span = tuple[int, int, int]  # sequence, start, count


def check(config: ModelConfig, tokens: Sequence[int]) -> None:
    """RequestError if so many tokens are more than fit, in rows that are half empty."""
    needed = 3 * tokens[-1] * config.kv_bytes(DTYPE.itemsize)
    free = psutil.virtual_memory().available
    if needed > free:
        raise RequestError(
            f"--tokens {tokens[-1]}: rows for as many take up to {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; expected fewer"
        )


# --- caches that are filled ---------------------------------------------------------------------


class Filled(ABC):
    """A cache with room for sequences of these lengths, none of which has begun."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], longest: int) -> None:
        self._layers = config.num_layers
        heads = (config.num_kv_heads, config.head_dim)
        self._new = torch.zeros(longest, *heads, dtype=DTYPE)  # [T, Hk, D]

    def hold(self, span: Span) -> None:
        """Store so many more tokens of a sequence."""
        view, new = self._view(*span), self._new[: span[2]]
        for layer in range(self._layers):
            view.write(layer, new, new)

    @abstractmethod
    def _view(self, row: int, start: int, count: int) -> Any: ...

    @property
    @abstractmethod
    def taken_bytes(self) -> int:
        """What belongs to sequences, by the cache's own account."""


class FilledPages(Filled):
    """A paged cache: a table of blocks a sequence."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], longest: int) -> None:
        super().__init__(config, lengths, longest)
        blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        self._kv = PagedKV(config, blocks, BLOCK_SIZE, DTYPE)
        self._tables = [BlockTable(self._kv.pool) for _ in lengths]

    def _view(self, row: int, start: int, count: int) -> Any:
        table = self._tables[row]
        assert table.reserve(start, start + count) == [], "nothing is shared"
        return self._kv.view(StepIndex.of([(row, start, count)]), [table])

    @property
    def taken_bytes(self) -> int:
        """Of the blocks that are taken."""
        pool: BlockPool = self._kv.pool
        of_a_block = self._kv.nbytes() // (pool.num_blocks + 1)  # and the scratch block
        return (pool.num_blocks - pool.free) * of_a_block


class FilledRows(Filled):
    """A static cache: a row a sequence."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], longest: int) -> None:
        super().__init__(config, lengths, longest)
        self._kv, self._rows = StaticKV(config, len(lengths), longest, DTYPE), set[int]()

    def _view(self, row: int, start: int, count: int) -> Any:
        self._rows.add(row)
        return self._kv.prefill(row, start, count)

    @property
    def taken_bytes(self) -> int:
        """Of the rows that are taken."""
        return len(self._rows) * (self._kv.nbytes() // self._kv.rows)


CACHES: dict[str, Callable[[ModelConfig, Sequence[int], int], Filled]] = {
    "paged": FilledPages,
    "static": FilledRows,
}


# --- the points ---------------------------------------------------------------------------------


def lengths_of(tokens: int, longest: int) -> list[int]:
    """Lengths of 1 to `longest` that come to so many tokens, the same each time."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(1, longest), tokens - sum(lengths)))
    return lengths


def spans(lengths: Sequence[int], points: Sequence[int]) -> Iterator[list[Span]]:
    """What has to be stored to come from each point to the next, in tokens held."""
    row = start = held = 0
    for point in points:
        needed = list[Span]()
        while held < point:
            count = min(point - held, lengths[row] - start)
            needed.append((row, start, count))
            held, start = held + count, start + count
            if start == lengths[row]:
                row, start = row + 1, 0
        yield needed


def resident_bytes() -> int:
    """What this process has in memory."""
    return psutil.Process().memory_info().rss


def measure(
    config: ModelConfig, tokens: Sequence[int], resident: Callable[[], int] = resident_bytes
) -> dict[str, Any]:
    """Bytes of each cache at each number of tokens held, and how they grow."""
    longest = min(LONGEST, config.max_positions)
    lengths = lengths_of(tokens[-1], longest)
    each = config.kv_bytes(DTYPE.itemsize)
    rows = [{"tokens": count, "predicted_bytes": count * each} for count in tokens]
    for name, kind in CACHES.items():
        found = _fill(kind, config, lengths, longest, tokens, resident)
        for row, pair in zip(rows, found, strict=True):
            row[f"{name}_taken_bytes"], row[f"{name}_resident_bytes"] = pair
    return {
        "points": rows,
        "taken": {name: _growth(rows, f"{name}_taken_bytes") for name in CACHES},
        "resident": {name: _growth(rows, f"{name}_resident_bytes") for name in CACHES},
        "token_bytes": each,
        "sequences": len(lengths),
        "longest": longest,
        "block_size": BLOCK_SIZE,
    }


def _fill(
    kind: Callable[[ModelConfig, Sequence[int], int], Filled],
    config: ModelConfig,
    lengths: Sequence[int],
    longest: int,
    tokens: Sequence[int],
    resident: Callable[[], int],
) -> list[tuple[int, int]]:
    """Of one cache, at each point: bytes by its own account, and resident."""
    kind(config, [1], 1).hold((0, 0, 1))  # what a first write brings with it is not the cache's
    before, found = resident(), list[tuple[int, int]]()
    cache = kind(config, lengths, longest)
    for needed in spans(lengths, tokens):
        for span in needed:
            cache.hold(span)
        found.append((cache.taken_bytes, resident() - before))
    return found


def _growth(rows: Sequence[dict[str, int]], key: str) -> dict[str, Any] | None:
    sizes, predicted = ([row[name] for row in rows] for name in ("tokens", "predicted_bytes"))
    return growth(sizes, [row[key] for row in rows], predicted)
