"""One rank's part of a model: which heads, which columns, which rows of each weight.

A part is a smaller model: 1/n of the heads, of the KV heads and of the MLP. So its tensors are
smaller than those of the checkpoint in at most one dimension, and that is the one to cut. Where the
outputs are fewer (queries, keys, values, gate and up) a product needs nothing further; where the
inputs are fewer (the output of attention, down) it is one term of a sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spindle.config import ModelConfig
from spindle.errors import RequestError
from spindle.parallel import Ranks

Index = tuple[slice, ...]


def part_of(config: ModelConfig, ranks: int, name: str = "the model") -> ModelConfig:
    """The shape of one rank's part. RequestError, with the numbers: it cannot be cut so often.

    Width, vocabulary and all else are the whole model's.
    """
    counts = {
        "query heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "columns of the MLP": config.mlp_width,
        "ids": config.vocab_size,
    }
    odd = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    if odd:
        common = math.gcd(*counts.values())
        fits = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise RequestError(
            f"{name} has {' and '.join(odd)}, which {ranks} ranks do not divide; expected "
            f"{' or '.join(fits)} ranks"
        )
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        mlp_width=config.mlp_width // ranks,
    )


def cuts(
    part: Sequence[int], whole: Sequence[int], rank: int, stacked: int = 1
) -> Iterator[tuple[Index, Index]]:
    """Where the values of a rank's part of a tensor stand: places in the part, and in the whole.

    stacked: the tensor is so many matrices one behind the other along the dimension that is cut, of
    each of which the rank has a part.
    """
    cut = [d for d, (mine, all_) in enumerate(zip(part, whole, strict=True)) if mine != all_]
    if not cut:
        yield _along(0, 0, part[0]), _along(0, 0, whole[0])
        return
    (d,) = cut
    mine, all_ = part[d] // stacked, whole[d] // stacked
    for n in range(stacked):
        start = n * all_ + rank * mine
        yield _along(d, n * mine, (n + 1) * mine), _along(d, start, start + mine)


def _along(d: int, start: int, stop: int) -> Index:
    return (*[slice(None)] * d, slice(start, stop))


def ranks_of(model: object) -> int:
    """How many ranks have a part of the model each; 1 for a whole one."""
    tables = (its for its in vars(model).values() if isinstance(its, SplitTable))
    return next((table.ranks.count for table in tables), 1)


class SplitTable:
    """A rank's rows [V/n, E] of a token embedding, which looks up ids of the whole vocabulary.

    It is what a pass begins with: here the ranks make sure that they run the same one.
    """

    def __init__(self, rows: Tensor, ranks: Ranks) -> None:
        self.rows, self.ranks = rows, ranks
        self.dtype, self.device = rows.dtype, rows.device

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, E]: a row from the rank that has it, and zeros from the others, added."""
        self.ranks.meet(ids)
        at = ids - self.ranks.rank * len(self.rows)
        mine = (at >= 0) & (at < len(self.rows))  # [T]
        found = self.rows[torch.where(mine, at, 0)]
        return self.ranks.sum(found.masked_fill(~mine[:, None], 0))
