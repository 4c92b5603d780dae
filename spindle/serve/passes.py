"""A model's passes over its paged cache: the tokens of a step together, or each by itself.

Together they share one reading of the weights, which is what a batch is for. But the last bits of a
token's logits may then depend on who is beside it: a product of many rows may be summed in another
order than one of few, and so may attention of a prompt that was cut elsewhere. `batch_invariant`
asks for the bits that a token has alone. (He et al. 2025, Defeating Nondeterminism in LLM
Inference.)

Native code takes every sum in an order that the row alone decides. Then the only thing to change is
attention in prompts, which is torch's: each of their tokens is a row by itself there too. Elsewhere
nothing is known of the order, and each token has a pass of its own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TypeVar

import torch
from torch import Tensor

from spindle import kernels
from spindle.decode.sampling import SamplingRows
from spindle.kvcache.blocks import BlockTable
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model, is_native, layer_weights

Span = tuple[int, int, int]  # (which table, start, count)
T = TypeVar("T")


def has_own_bits(model: Model) -> bool:
    """Whether each token of a pass has the bits of a pass by itself, whatever is beside it.

    In a sum over ranks the order may depend on which row it is.
    """
    weights = [*layer_weights(model), model.head]
    panels = all(weight.in_panels and weight.join is None for weight in weights)
    return panels and is_native(model.config) and kernels.rows_are_apart(model.dtype, model.device)


def kernels_of(model: Model) -> str:
    """Whose code computes a model's passes, on a CPU for which vectors.

    A pass has other last bits where it is another's, or where sums are taken by other vectors.
    """
    if model.device.type == "cuda":
        return "torch" if kernels.cuda.compiled(model.device) is None else "cuda"
    if kernels.emulate.enabled():
        return "emulated"
    if kernels.rows_are_apart(model.dtype, model.device):
        return f"native ({kernels.native.lanes()} lanes of {platform.machine()})"
    return f"torch ({torch.backends.cpu.get_cpu_capability()} of {platform.machine()})"


class Passes:
    """What runs a model over its cache. batch_invariant: no token depends on those beside it."""

    def __init__(self, model: Model, kv: PagedKV, batch_invariant: bool = False) -> None:
        self.model, self.kv, self._invariant = model, kv, batch_invariant
        self.one_by_one = batch_invariant and not has_own_bits(model)

    def hidden(self, ids: list[int], spans: Many[Span], tables: Many[BlockTable]) -> Tensor:
        """All tokens of the spans, end to end -> hidden [T, E]; keys and values are stored."""
        if not self.one_by_one:
            return self._run(ids, spans, tables)
        each = [(n, at, 1) for n, start, count in spans for at in range(start, start + count)]
        return torch.cat(
            [self._run([token], [span], tables) for token, span in zip(ids, each, strict=True)]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        if not self.one_by_one:
            return self.model.logits(hidden)
        return torch.cat([self.model.logits(row) for row in hidden.split(1)])

    def each(
        self, draw: Callable[..., T], logits: Tensor, *columns: Tensor | SamplingRows | None
    ) -> list[T]:
        """What `draw` makes of logits [R, V] and what else there is of these rows: in parts."""
        if not self._invariant:
            return [draw(logits, *columns)]
        rows = torch.arange(len(logits), device=logits.device).split(1)
        return [draw(logits[r], *(_of(column, r) for column in columns)) for r in rows]

    def _run(self, ids: list[int], spans: Many[Span], tables: Many[BlockTable]) -> Tensor:
        device = self.kv.keys.device
        index = StepIndex.of(spans, device)
        view = self.kv.view(index, [tables[n] for n in index.rows])
        return self.model(torch.tensor(ids, device=device), view)


def _of(column: Tensor | SamplingRows | None, rows: Tensor) -> Tensor | SamplingRows | None:
    if column is None:
        return None
    return column.select(rows) if isinstance(column, SamplingRows) else column[rows]
