"""Drafting for a batch: who gets how many drafts in the next step, and what they are.

Two kinds. What guesses from ids alone does so when the step is planned. A draft model runs within
the step, over a second paged cache that has the same block tables: its keys and values of a token
lie in the block where the target's do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from spindle.decode.drafters import Draft, Drafter, ModelDrafter, aligned, drawn_from, known
from spindle.decode.pace import Pace
from spindle.decode.stats import Speculation
from spindle.errors import RequestError
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.serve.passes import Passes
from spindle.serve.recorded import Next, RecordedDecodes, Row, sampling_rows
from spindle.serve.request import Sequence
from spindle.serve.scheduler import Chunk

Drawn = dict[Sequence, Draft]  # of those whose drafts were drawn, what they were drawn from


class Seconds(NamedTuple):
    """How long the parts of a step took: for all sequences together."""

    drafting: float = 0.0
    passing: float = 0.0


class Drafting:
    """Drafts that follow from ids: made when a step is planned, and read when it runs.

    A sequence's own drafter and pace begin with its first round, and depend on nothing but its ids
    and on what became of its drafts.
    """

    caches: Many[PagedKV] = ()  # that move as the target's does

    def __init__(self, drafter: Drafter, model: Model, k: int, adaptive_k: bool) -> None:
        drafter.check(model)
        self.model, self.k = model, k
        self._drafter, self._adaptive_k = drafter, adaptive_k
        self._cost = drafter.cost(model)
        self._guessing_s = 0.0  # since the last step

    def wanted(self, sequence: Sequence, most: int) -> int:
        """How many drafts its next step has, `most` at most. Changes its `drafts`."""
        if sequence.pace is None:
            sequence.pace = Pace(self.k, self._cost, self._adaptive_k)
        k = sequence.pace.next(most)
        sequence.drafts = self._guesses(sequence, k) if k else []
        return len(sequence.drafts)

    def _guesses(self, sequence: Sequence, k: int) -> list[int]:
        start = time.perf_counter()
        if sequence.drafter is None:
            sequence.drafter = self._drafter.begin()
        try:
            return sequence.drafter.guesses(sequence.ids, k, self.model)
        except Exception as cause:
            name, kind = type(sequence.drafter).__name__, type(cause).__name__
            said = f"{kind}: {cause}" if not isinstance(cause, RequestError) else str(cause)
            raise RequestError(
                f"request {sequence.request.id!r}: {name} failed ({said}); nothing was run: abort "
                "the request, or mend its drafter"
            ) from cause
        finally:
            self._guessing_s += time.perf_counter() - start

    def guessed_s(self) -> float:
        """The seconds of all guesses since this was asked last."""
        spent, self._guessing_s = self._guessing_s, 0.0
        return spent

    def draft(self, chunks: Many[Chunk]) -> Drawn:
        """What is left to do when the step runs, before the target's pass; here nothing."""
        return {}

    def note(self, sequence: Sequence, drafts: int, accepted: int, seconds: Seconds) -> None:
        """A step has looked at so many drafts of a sequence, and accepted some; it took so long."""
        if sequence.pace is not None:
            sequence.pace.note(accepted, min(accepted + 1, drafts))
        counts = sequence.speculation = sequence.speculation or Speculation()
        counts.passes += 1
        counts.proposed += drafts
        counts.draft_s += seconds.drafting if drafts else 0.0
        counts.pass_s += seconds.passing


class ModelDrafting(Drafting):
    """Drafts of a draft model, which keeps up with the target.

    It runs over each prompt beside the target, and then when its sequence has drafts coming, or a
    block of tokens behind. So a block is remembered only once both caches have it, and what was
    found in one was found in both. It never writes to a block that somebody else holds. A beam
    search has no drafts, and its draft model stays behind.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        model: Model,
        k: int,
        adaptive_k: bool,
        kv: PagedKV,
        recorded: Callable[[Model, PagedKV], RecordedDecodes | None],
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(drafter, model, k, adaptive_k)
        self.draft_model = drafter.engine.model
        config = self.draft_model.config
        if config.max_positions < max_model_len:
            raise RequestError(
                f"the draft model has {config.positions_in_words()}, and max_model_len is "
                f"{max_model_len}; lower max_model_len"
            )
        pool, host = kv.pool, 0 if kv.host is None else kv.host.num_blocks
        at = self.draft_model.dtype, self.draft_model.device
        shape = pool.num_blocks, pool.block_size, *at, host
        self.kv = PagedKV(self.draft_model.config, *shape, beside=kv, apart=batch_invariant)
        self._passes = Passes(self.draft_model, self.kv, batch_invariant)
        self.caches = [self.kv]
        self._recorded = recorded(self.draft_model, self.kv)

    def _guesses(self, sequence: Sequence, k: int) -> list[int]:
        return [0] * k  # whatever they will be

    def draft(self, chunks: Many[Chunk]) -> Drawn:
        """Run the draft model over what it has not stored, then draft a token at a time."""
        due = [chunk for chunk in chunks if self._is_due(chunk)]
        if not due:
            return {}
        for chunk in due:
            chunk.sequence.drafts = []
        logits = self._catch_up(due)
        live, drawn = [chunk for chunk in due if chunk.drafts], dict[Sequence, list[Tensor]]()
        for n in range(max((chunk.drafts for chunk in live), default=0)):
            self._draw(live, n, logits, drawn)
            live = [chunk for chunk in live if chunk.drafts > n + 1]
            if live:
                spans = [(at, chunk.stop + n, 1) for at, chunk in enumerate(live)]
                rows = [self._row(chunk, chunk.stop + n) for chunk in live]
                logits = self._pass(rows, spans, live)
        device = self.model.device
        return {
            one: Draft(torch.tensor(one.drafts, device=device), torch.stack(q))
            for one, q in drawn.items()
        }

    def _is_due(self, chunk: Chunk) -> bool:
        """Whether the draft model runs over a chunk's tokens now, and not later."""
        one = chunk.sequence
        behind = chunk.stop - (one.draft_stored or 0)
        if chunk.drafts or one.new_tokens == 0:
            return behind > 0 or chunk.drafts > 0
        return one.request.beam is None and behind >= self.kv.pool.block_size

    def _catch_up(self, chunks: list[Chunk]) -> Tensor:
        """Store what is missing of the chunks; the logits [n, V'] after those with drafts."""
        spans, rows, last = list[tuple[int, int, int]](), list[Row](), list[int]()
        for n, chunk in enumerate(chunks):
            start = chunk.sequence.draft_stored or 0
            if chunk.drafts:  # a step that was broken off may have stored all of them
                start = min(start, chunk.stop - 1)
            spans.append((n, start, chunk.stop - start))
            rows += [self._row(chunk, at) for at in range(start, chunk.stop)]
            last += [len(rows) - 1] if chunk.drafts else []
        if all(count <= 2 for _, _, count in spans) and len(last) == len(chunks):
            logits = self._pass(rows, spans, chunks)[last]
        else:
            hidden = self._hidden(rows, spans, chunks)[last]
            logits = self._passes.logits(hidden) if last else hidden
        for chunk in chunks:
            chunk.sequence.draft_stored = chunk.stop
        return logits

    def _draw(
        self, live: list[Chunk], n: int, logits: Tensor, drawn: dict[Sequence, list[Tensor]]
    ) -> None:
        """The n-th draft of each chunk, from logits [R, V']; what it was drawn from, to `drawn`."""
        tokens = [Next(chunk.sequence, chunk.sequence.sample, n) for chunk in live]
        position = torch.tensor([token.position for token in tokens], device=logits.device)
        rows = sampling_rows(self.model, tokens)
        logits = aligned(logits, self.model.config.vocab_size)
        parts = self._passes.each(drawn_from, logits, rows, position)
        ids = [i for its, _ in parts for i in its.tolist()]
        probs = [p for its, q in parts for p in ([None] * len(its) if q is None else q)]
        for chunk, token, p in zip(live, ids, probs, strict=True):
            one = chunk.sequence
            one.drafts.append(token)
            if one.request.params.temperature > 0 and p is not None:
                drawn.setdefault(one, []).append(p)

    def _row(self, chunk: Chunk, at: int) -> Row:
        """The row of a token at some position, of its own or a draft."""
        one, P = chunk.sequence, self.kv.pool.block_size
        token = one.ids[at] if at < len(one.ids) else one.drafts[at - len(one.ids)]
        return Row.of(known(token, self.draft_model.config.vocab_size), at, one.table.blocks, P)

    def _pass(
        self,
        rows: list[Row],
        spans: list[tuple[int, int, int]],
        chunks: list[Chunk],
    ) -> Tensor:
        """Rows through the draft model -> logits [R, V']: replayed, where that is to be had."""
        if self._recorded is not None and self._recorded.takes(len(rows)):
            return self._recorded.logits(rows)
        return self._passes.logits(self._hidden(rows, spans, chunks))

    def _hidden(
        self, rows: list[Row], spans: list[tuple[int, int, int]], chunks: list[Chunk]
    ) -> Tensor:
        """Rows through the layers of the draft model -> [R, E]; spans: (chunk, start, count)."""
        ids, tables = [row.token for row in rows], [chunk.sequence.table for chunk in chunks]
        return self._passes.hidden(ids, spans, tables)
