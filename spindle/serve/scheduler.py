"""Scheduler: which sequences run in the next step, and with which of their tokens.

    waiting  --admit-->  running  --finish-->  gone
       ^                    |
       +-----preempt--------+      the youngest, when blocks run out

A step has a budget of tokens (Yu et al. 2022, Orca: iteration-level scheduling; Agrawal et al.
2024, Sarathi-Serve: prompts in chunks beside the decodes). Running sequences come first, the
oldest first, a token each; what the budget has left goes to prompts. Whoever arrived first is
admitted first, and preempted sequences come before new ones, so nothing overtakes: the oldest
unfinished sequence gains in every step, and each of the others after a bounded wait.

A preempted sequence resumes when another one has ended since, or when nothing runs. So it is
preempted at most once more than sequences end during its life: the pool cannot thrash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from spindle.errors import OutOfBlocks, RequestError
from spindle.kvcache.blocks import BlockPool, BlockTable, Copy, move
from spindle.serve.request import Request, Sequence


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence from position `start` on; it samples if they are its last."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    filler: bool = False  # computed, and of no account: a finished row of a static batch


@dataclass(frozen=True)
class Plan:
    """One step, done in this order; a step that swaps out swaps nothing in."""

    swap_out: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    chunks: tuple[Chunk, ...]


class Gain(NamedTuple):
    """A sequence has the n-th id that chunk `chunk` of a plan gave."""

    sequence: Sequence
    chunk: int
    n: int


@dataclass
class _Draft:
    """A plan in the making."""

    budget: int  # tokens left for prompts, once every decode has its own
    swap_out: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: bool = False

    def plan(self) -> Plan:
        parts = (self.swap_out, self.swap_in, self.copies, self.chunks)
        return Plan(*map(tuple, parts))  # type: ignore[arg-type]


class Scheduler:
    """The only writer of queues, tables and `stored`; `schedule`, then `commit`, step by step.

    max_seqs: sequences that run at once. max_batch_tokens: rows of a step, at least max_seqs (a
    static batch takes all of its prompts at once).
    max_model_len: tokens of a sequence. preemption: "recompute", or "swap" to the host's pool
    while that has room. policy: "continuous", or "static": a batch is admitted when the one before
    has ended, and its finished rows are computed on until then, as padded batches do.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool | None = None,
        *,
        max_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        preemption: str = "recompute",
        policy: str = "continuous",
    ) -> None:
        self.pool, self.host = pool, host
        self.max_seqs, self.max_batch_tokens = max_seqs, max_batch_tokens
        self.max_model_len, self.preemption, self.policy = max_model_len, preemption, policy
        self.waiting: deque[Sequence] = deque()  # the oldest first
        self.running: list[Sequence] = []  # the oldest first
        self._endings = 0
        self._blocked: tuple[Sequence | None, int, int] = (None, 0, 0)  # who did not fit, and when

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        self._drop_finished()
        return bool(self.waiting) or any(not s.finish_reason for s in self.running)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError, with the numbers, if it could never run to its end."""
        self._refuse_what_cannot_fit(request)
        first = Sequence(request, 0, request.prompt.copy(), BlockTable(self.pool))
        request.sequences.append(first)
        self.waiting.append(first)

    def schedule(self) -> Plan:
        """Plan the next step: reserve its slots, preempt for them, admit what fits."""
        self._drop_finished()
        decodes = sum(one.pending == 1 for one in self.running)
        static = self.policy == "static"  # a padded batch takes all of its prompts at once
        draft = _Draft(2**62 if static else self.max_batch_tokens - decodes)
        for sequence in self.running.copy():
            if sequence in self.running:  # not preempted in the meantime
                self._go_on(sequence, draft)
        if not draft.preempted and not (static and self.running):
            self._admit(draft)
        return draft.plan()

    def commit(self, plan: Plan, outputs: Many[Many[int]]) -> list[Gain]:
        """What a step gave: a list of ids for each chunk, empty if it does not sample.

        A chunk that samples for the first time has an id for each of its request's n answers, and
        the others are forked off here. An id of -1 ends its sequence with "error". Returns what
        became of each id. A sequence that was aborted while the step ran stays as it was.
        """
        gained = []
        for at, (chunk, ids) in enumerate(zip(plan.chunks, outputs, strict=True)):
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                continue
            sequence.stored = chunk.start + chunk.count
            if min(ids, default=0) < 0:  # no distribution: what it stored is not to be trusted
                for block in sequence.table.blocks:
                    self.pool.forget(block)
            else:
                sequence.table.commit(sequence.ids, sequence.stored)
            branches = [sequence, *(self._fork(sequence, n) for n in range(1, len(ids)))]
            for n, (branch, token) in enumerate(zip(branches, ids, strict=False)):
                gained.append(Gain(branch, at, n))
                if token < 0:
                    self.finish(branch, "error")
                else:
                    branch.ids.append(token)
        return gained

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, wherever it is, and give its blocks back; done twice it does nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._endings += 1
        if self.policy == "continuous" or sequence not in self.running or reason == "abort":
            sequence.table.release()
            if sequence in self.running:
                self.running.remove(sequence)

    def longest(self, request: Request) -> int:
        """The most tokens that one of its sequences can have."""
        limit, most = self.max_model_len, request.params.max_tokens
        return limit if most is None else min(limit, len(request.prompt) + most)

    def check(self) -> None:
        """Assert what always holds between steps."""
        live = [*self.running, *self.waiting]
        self.pool.check([s.table for s in live if not s.swapped])
        if self.host is not None:
            self.host.check([s.table for s in live if s.swapped])
        assert sum(s.width for s in self.running) <= self.max_seqs, "no more run than may"
        assert self.running == sorted(self.running, key=lambda s: s.age), "the oldest first"
        started = [s for s in self.waiting if s.waits_for_ending >= 0 and not s.finish_reason]
        assert started == list(self.waiting)[: len(started)] or any(
            s.finish_reason for s in self.waiting
        ), "preempted ones before new ones"
        for sequence in live:
            assert sequence.stored <= sequence.table.capacity or sequence.finish_reason
            assert sequence in self.running or sequence.swapped or not sequence.table.blocks

    # --- the parts of a step --------------------------------------------------------------------

    def _go_on(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan a running sequence's next tokens, at the cost of younger ones if it must be."""
        count = 1 if sequence.pending == 1 else min(sequence.pending, draft.budget)
        if count <= 0:
            return
        while not self._reserve(sequence, count, draft):
            victim = self.running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return
        if sequence.pending > 1:
            draft.budget -= count

    def _reserve(self, sequence: Sequence, count: int, draft: _Draft) -> bool:
        start, stop = sequence.stored, sequence.stored + count
        try:
            draft.copies += sequence.table.reserve(start, stop)
        except OutOfBlocks:
            return False
        filler = sequence.finish_reason is not None
        samples = stop == len(sequence.ids) and not filler
        draft.chunks.append(Chunk(sequence, start, count, samples, filler))
        return True

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Take a running sequence's blocks away; it waits in front of all that are younger."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.waits_for_ending = self._endings + 1
        sequence.request.preemptions += 1
        draft.preempted = True
        table, host = sequence.table, self.host
        if self.preemption == "swap" and host is not None and len(table.blocks) <= host.free:
            (sequence.table,), copies = move([table], host)
            sequence.swapped = True
            draft.swap_out += copies
        else:
            table.release()
            sequence.stored = 0

    def _admit(self, draft: _Draft) -> None:
        """Start or resume the oldest waiting sequences while slots, blocks and budget last."""
        while self.waiting and draft.budget > 0:
            sequence = self.waiting[0]
            seats = self.max_seqs - sum(one.width for one in self.running)
            blocked = bool(self.running) and self._endings < sequence.waits_for_ending
            if sequence.width > seats or blocked or not self._start(sequence, draft):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            count = min(sequence.pending, draft.budget)
            assert self._reserve(sequence, count, draft), "its blocks were counted"
            draft.budget -= count
            self._drop_finished()

    def _start(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give a waiting sequence what it has in a cache; false if its blocks do not fit.

        All of its tokens must fit, and a block for each that runs: else it would be the first to
        be preempted again.
        """
        pool, length = self.pool, len(sequence.ids) + 1
        if self.policy == "static":
            length = self.longest(sequence.request)
        if self._still_blocked(sequence):
            return False
        if not sequence.swapped:
            sequence.stored = sequence.table.adopt(sequence.ids)
        held = 0 if sequence.swapped else len(sequence.table.blocks)
        blocks = -(-length // pool.block_size) * sequence.width
        spare = len(self.running) if self.policy == "continuous" else self._promised()
        if blocks - held + spare > pool.free and self.running:
            if not sequence.swapped:
                sequence.table.release()
                sequence.stored = 0
            self._blocked = (sequence, pool.free, len(self.running))
            return False
        if sequence.swapped:
            (sequence.table,), copies = move([sequence.table], pool)
            sequence.swapped = False
            draft.swap_in += copies
        elif sequence.new_tokens == 0 and sequence.waits_for_ending < 0:
            sequence.request.cached_tokens = sequence.stored
        return True

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether it did not fit before, and nothing was freed since: then it need not be tried."""
        before, free, running = self._blocked
        same = before is sequence and self.pool.free <= free and len(self.running) >= running
        return same and bool(self.running)

    def _promised(self) -> int:
        """Blocks that the rows of a static batch will still take."""
        size = self.pool.block_size
        return sum(
            -(-self.longest(one.request) // size) * one.width - len(one.table.blocks)
            for one in self.running
        )

    def _fork(self, parent: Sequence, sample: int) -> Sequence:
        """Another answer to the same prompt: the same blocks, until one of them writes."""
        request = parent.request
        ids = parent.ids[: len(request.prompt)]
        branch = Sequence(request, sample, ids, parent.table.fork())
        branch.stored = parent.stored
        request.sequences.append(branch)
        self.running.insert(self.running.index(parent) + sample, branch)
        return branch

    def _refuse_what_cannot_fit(self, request: Request) -> None:
        n, longest = request.params.n, self.longest(request)
        blocks = -(-(longest - 1) // self.pool.block_size)  # the last token is never stored
        if blocks > self.pool.num_blocks:
            raise RequestError(
                f"prompt and answer may take {longest} tokens, {blocks} blocks of "
                f"{self.pool.block_size}; the pool has {self.pool.num_blocks}: lower max_tokens "
                "or raise num_blocks"
            )
        if n > self.max_seqs:
            raise RequestError(f"n={n}: at most max_seqs={self.max_seqs} sequences run at once")

    def _drop_finished(self) -> None:
        """Let go of aborted ones at the head of the queue, and of a static batch that has ended."""
        while self.waiting and self.waiting[0].finish_reason is not None:
            self.waiting.popleft().table.release()
        if self.policy == "static" and all(one.finish_reason for one in self.running):
            for one in self.running:
                one.table.release()
            self.running.clear()
