"""Scheduler: which sequences run in the next step, and with which of their tokens.

    waiting  --admit-->  running  --finish-->  gone
       ^                    |
       +-----preempt--------+      the youngest, when blocks run out

A step has a budget of tokens (Yu et al. 2022, Orca: iteration-level scheduling; Agrawal et al.
2024, Sarathi-Serve: prompts in chunks beside the decodes). Running sequences come first, the
oldest first, a token each; what the budget has left goes to prompts. Whoever arrived first is
admitted first, and preempted sequences come before new ones, so nothing overtakes.

Nobody starves: the oldest unfinished sequence is never preempted and gains a token in every step.
So a request has ended after at most as many steps as its sequences and all older ones have tokens,
those of their prompts included, whoever comes after it.

A preempted sequence resumes when another one has ended since, or when nothing runs; so not in the
step that preempts it, for whoever needed its blocks runs. So it is preempted at most once more than
sequences end during its life: the pool cannot thrash.

A *group* is what is planned, preempted and admitted as one: the sequences of a beam search, and of
everything else each sequence alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from spindle.decode.beam import Pick
from spindle.errors import OutOfBlocks, RequestError
from spindle.kvcache.blocks import BlockPool, BlockTable, Copy, move, needed
from spindle.serve.request import Request, Sequence


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence from position `start` on; it samples if they are its last.

    The last `drafts` of them are guesses at what follows. It samples after each, and after the
    token before them.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    filler: bool = False  # computed, and of no account: a finished row of a static batch
    drafts: int = 0

    @property
    def stop(self) -> int:
        """The position after its last token that is no guess."""
        return self.start + self.count - self.drafts

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        own = self.sequence.ids[self.start : self.stop]
        return own + self.sequence.drafts[: self.drafts]


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
    drafts: dict[Sequence, int] = field(default_factory=dict)  # how many each sequence may have
    swap_out: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def plan(self) -> Plan:
        parts = (self.swap_out, self.swap_in, self.copies, self.chunks)
        return Plan(*map(tuple, parts))  # type: ignore[arg-type]


class Scheduler:
    """The only writer of queues, tables and `stored`; `schedule`, then `commit`, step by step.

    max_seqs: sequences that run at once. max_batch_tokens: rows of a step, at least max_seqs (a
    static batch takes all of its prompts at once).
    max_model_len: tokens of a sequence. preemption: "recompute", or "swap" to the host's pool
    while that has room. policy: "continuous", or "static": a batch is admitted when the one before
    has ended, and its finished rows are computed on until then, as padded batches do. drafts: how
    many guesses a sequence's next step looks at, of so many at most; by default none. It is asked
    once a step for each sequence with an answer, and max_batch_tokens has to be enough for all.
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
        drafts: Callable[[Sequence, int], int] | None = None,
    ) -> None:
        self.pool, self.host = pool, host
        self._drafts_of = drafts
        self.max_seqs, self.max_batch_tokens = max_seqs, max_batch_tokens
        self.max_model_len, self.preemption, self.policy = max_model_len, preemption, policy
        self.waiting: deque[Sequence] = deque()  # the oldest first
        self.running: list[Sequence] = []  # the oldest first
        self._endings = 0
        self._blocked = ((-1, 0), 0, 0)  # the age of who did not fit, and when that was

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
        resumable = (one for one in self.waiting if one.new_tokens > 0)
        drafts = {one: k for one in [*self.running, *resumable] if (k := self._drafts(one))}
        decodes = sum(1 + drafts.get(one, 0) for one in self.running if one.pending == 1)
        static = self.policy == "static"  # a padded batch takes all of its prompts at once
        draft = _Draft(2**62 if static else self.max_batch_tokens - decodes, drafts)
        groups, at = _groups(self.running), 0
        while at < len(groups):  # they become fewer if some are preempted
            self._go_on(groups, at, draft)
            at += 1
        if not (static and self.running):
            self._admit(draft)
        return draft.plan()

    def commit(
        self,
        plan: Plan,
        outputs: Many[Many[int]],
        read: Callable[[Gain], None] = lambda gain: None,
    ) -> list[Gain]:
        """What a step gave: a list of ids for each chunk, empty if it does not sample.

        A chunk that samples for the first time has an id for each of its request's n answers, and
        the others are forked off here. A chunk with drafts has one for each that was accepted, and
        one more: they are taken as that many steps would give them. An id of -1 ends its sequence
        with "error". Returns what became of each id. A sequence that was aborted while the step ran
        stays as it was. read: hears of each id when its sequence has it, and may end the sequence;
        the rest of its ids is then dropped.
        """
        gained = []
        for at, (chunk, ids) in enumerate(zip(plan.chunks, outputs, strict=True)):
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                continue
            steps = [[token] for token in ids] if chunk.drafts else [ids]
            for accepted, tokens in enumerate(steps):
                self._store(sequence, chunk.stop + accepted, tokens)
                branches = [sequence, *(self._fork(sequence, n) for n in range(1, len(tokens)))]
                for n, (branch, token) in enumerate(zip(branches, tokens, strict=False)):
                    gained.append(Gain(branch, at, accepted + n))
                    if token < 0:
                        self.finish(branch, "error")
                    else:
                        branch.ids.append(token)
                    read(gained[-1])
                if sequence.finish_reason is not None:
                    break
            else:
                self._roll_back(chunk)
        return gained

    def _store(self, sequence: Sequence, stored: int, tokens: Many[int]) -> None:
        """So many of its ids are stored, and these follow: whatever was computed is remembered."""
        sequence.stored = stored
        if min(tokens, default=0) < 0:  # no distribution: what it stored is not to be trusted
            for block in sequence.table.blocks:
                self.pool.forget(block)
        else:
            sequence.table.commit(sequence.ids, sequence.known)

    def _roll_back(self, chunk: Chunk) -> None:
        """Let go of what rejected drafts have stored; a draft model did not get to the last one."""
        one = chunk.sequence
        if chunk.drafts:
            one.table.truncate(one.stored)
            if one.draft_stored is not None:
                one.draft_stored = min(one.stored, chunk.stop + chunk.drafts - 1)

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
        else:  # a filler, which computes its last token over and over
            sequence.stored = min(sequence.stored, len(sequence.ids) - 1)

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

    def _go_on(self, groups: list[list[Sequence]], at: int, draft: _Draft) -> None:
        """Plan the next tokens of a running group, at the cost of the youngest if it must be."""
        group = groups[at]
        counts = self._with_drafts(group, draft)
        while not self._reserve(group, counts, draft):
            self._preempt(groups.pop(), draft)
            if len(groups) == at:  # it was the youngest itself
                return
        prompts = (n for one, n in zip(group, counts, strict=True) if one.pending > 1)
        draft.budget -= sum(prompts)

    def _with_drafts(self, group: list[Sequence], draft: _Draft) -> list[int]:
        """What `_counts` says of a group, and its drafts on top.

        They come with the last of its ids. So where those fit and the drafts don't, as after a
        preemption, one id waits for them: what is drafted for whom depends on no one else.
        """
        counts = _counts(group, draft.budget)
        if drafts := draft.drafts.get(group[0], 0):
            (count,), pending = counts, group[0].pending  # who has drafts is alone
            if count == pending and (pending == 1 or pending + drafts <= draft.budget):
                return [pending + drafts]
            return [min(count, pending - 1)]
        return counts

    def _reserve(self, group: list[Sequence], counts: list[int], draft: _Draft) -> bool:
        """Plan so many tokens of each; false, and nothing has changed, if blocks are missing."""
        pairs = [(one, count) for one, count in zip(group, counts, strict=True) if count]
        if len(pairs) > 1:
            spans = [(one.table, one.stored, one.stored + count) for one, count in pairs]
            if needed(spans) > self.pool.free:
                return False
        try:
            for one, count in pairs:
                draft.copies += one.table.reserve(one.stored, one.stored + count)
        except OutOfBlocks:
            return False
        for one, count in pairs:
            filler = one.finish_reason is not None
            samples = count >= one.pending and not filler
            drafts = max(0, count - one.pending)
            draft.chunks.append(Chunk(one, one.stored, count, samples, filler, drafts))
        return True

    def _preempt(self, group: list[Sequence], draft: _Draft) -> None:
        """Take a running group's blocks away; it waits in front of all that are younger."""
        group[0].request.preemptions += 1
        for one in reversed(group):
            self.running.remove(one)
            self.waiting.appendleft(one)
            one.waits_for_ending = self._endings + 1
        tables, host = [one.table for one in group], self.host
        if self.preemption == "swap" and host is not None and _held(tables) <= host.free:
            moved, copies = move(tables, host)
            for one, table in zip(group, moved, strict=True):
                one.table, one.swapped = table, True
            draft.swap_out += copies
        else:
            for one in group:
                one.table.release()
                one.store(0)

    def _admit(self, draft: _Draft) -> None:
        """Start or resume the oldest waiting group while slots, blocks and budget last."""
        seats = self.max_seqs - sum(one.width for one in self.running)
        while self.waiting:
            group = self._next_group()
            width = sum(one.width for one in group)
            drafts = draft.drafts.get(group[0], 0)
            blocked = bool(self.running) and self._endings < group[0].waits_for_ending
            too_many = len(group) + drafts > draft.budget or width > seats
            if too_many or blocked or not self._start(group, draft):
                return
            seats -= width
            for one in group:
                self.waiting.popleft()
                self.running.append(one)
            counts = self._with_drafts(group, draft)
            assert self._reserve(group, counts, draft), "its blocks were counted"
            draft.budget -= sum(counts)
            self._drop_finished()

    def _next_group(self) -> list[Sequence]:
        """The oldest that wait: one, or all of a beam."""
        first = self.waiting[0]
        beam = first.request.sequences if first.request.beam else ()
        return [one for one in beam if not one.finish_reason] or [first]

    def _start(self, group: list[Sequence], draft: _Draft) -> bool:
        """Give a waiting group what it has in a cache; false if its blocks do not fit.

        All of its tokens must fit, and a block for each that runs: else it would be the first to
        be preempted again.
        """
        if self._still_blocked(group[0]):
            return False
        swapped, tables = group[0].swapped, [one.table for one in group]
        if not swapped:
            for one in group:
                one.store(one.table.adopt(one.ids))
        held = 0 if swapped else sum(len(table.blocks) for table in tables)
        spare = len(self.running) if self.policy == "continuous" else self._promised()
        need = sum(self._blocks_to_begin(one, draft.drafts.get(one, 0)) for one in group)
        if need - held + spare > self.pool.free and self.running:
            if not swapped:
                for one in group:
                    one.table.release()
                    one.store(0)
            self._blocked = (group[0].age, self.pool.free, len(self.running))
            return False
        if swapped:
            moved, copies = move(tables, self.pool)
            for one, table in zip(group, moved, strict=True):
                one.table, one.swapped = table, False
            draft.swap_in += copies
        elif group[0].new_tokens == 0 and group[0].waits_for_ending < 0:
            group[0].request.cached_tokens = group[0].stored
        return True

    def _drafts(self, sequence: Sequence) -> int:
        """How many guesses at what follows it has: none before its first token, or in a beam."""
        request, begun = sequence.request, sequence.new_tokens > 0
        goes_on = begun and sequence.finish_reason is None and request.beam is None
        if self._drafts_of is None or not goes_on:
            return 0
        return self._drafts_of(sequence, self.longest(request) - len(sequence.ids) - 1)

    def _blocks_to_begin(self, sequence: Sequence, drafts: int) -> int:
        """Blocks for what it has, drafts and a token; in a static batch for all it may ever have.

        Whatever it may share is not counted on.
        """
        static = self.policy == "static"
        length = len(sequence.ids) + drafts + 1
        if static:
            length = self.longest(sequence.request)
        return -(-length // self.pool.block_size) * sequence.width

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether it did not fit before, and nothing was freed since: then it need not be tried."""
        before, free, running = self._blocked
        same = before == sequence.age and self.pool.free <= free and len(self.running) >= running
        return same and bool(self.running)

    def _promised(self) -> int:
        """Blocks that the rows of a static batch will still take."""
        size = self.pool.block_size
        return sum(
            -(-self.longest(one.request) // size) * one.width - len(one.table.blocks)
            for one in self.running
        )

    def branch(self, request: Request, picks: Many[Pick]) -> None:
        """The sequences of a beam search become what was picked of them, each with its new token.

        They share the blocks of the ones that they continue; who was not picked gives them back.
        """
        before, after = request.sequences, []
        for sample, (parent, token, cumulative) in enumerate(picks):
            one = before[parent]
            twin = Sequence(request, sample, [*one.ids, token], one.table.fork())
            twin.stored, twin.draft_stored = one.stored, one.draft_stored
            twin.cumulative = cumulative
            after.append(twin)
        at = self.running.index(before[0])
        self.running[at : at + len(before)] = after
        for one in before:
            one.table.release()
        request.sequences = after

    def _fork(self, parent: Sequence, sample: int) -> Sequence:
        """Another answer to the same prompt: the same blocks, until one of them writes."""
        request = parent.request
        ids = parent.ids[: len(request.prompt)]
        branch = Sequence(request, sample, ids, parent.table.fork())
        branch.stored, branch.draft_stored = parent.stored, parent.draft_stored
        request.sequences.append(branch)
        self.running.insert(self.running.index(parent) + sample, branch)
        return branch

    def _refuse_what_cannot_fit(self, request: Request) -> None:
        width, longest = request.width, self.longest(request)
        together = 1 if request.beam is None else width  # as many are never preempted apart
        blocks = -(-(longest - 1) // self.pool.block_size) * together  # the last is never stored
        if blocks > self.pool.num_blocks:
            who = "prompt and answer" if together == 1 else f"each of {together} beams"
            raise RequestError(
                f"{who} may take {longest} tokens, {blocks} blocks of {self.pool.block_size} in "
                f"all; the pool has {self.pool.num_blocks}: lower max_tokens or raise num_blocks"
            )
        if width > self.max_seqs:
            name = "width" if request.beam else "n" if width == request.params.n else "best_of"
            raise RequestError(
                f"{name}={width}: at most max_seqs={self.max_seqs} sequences run at once"
            )

    def _drop_finished(self) -> None:
        """Let go of aborted ones at the head of the queue, and of a static batch that has ended."""
        while self.waiting and self.waiting[0].finish_reason is not None:
            self.waiting.popleft().table.release()
        if self.policy == "static" and all(one.finish_reason for one in self.running):
            for one in self.running:
                one.table.release()
            self.running.clear()


def _groups(sequences: list[Sequence]) -> list[list[Sequence]]:
    """What is planned, preempted and admitted as one, the oldest first."""
    groups = list[list[Sequence]]()
    for one in sequences:
        if one.request.beam and groups and groups[-1][0].request is one.request:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _counts(group: list[Sequence], budget: int) -> list[int]:
    """How many tokens each of a group does next: one each, or what the budget has for prompts.

    The last tokens of a beam's sequences go in one step, once all that is before them is stored.
    """
    pending = [one.pending for one in group]
    if max(pending) == 1:
        return pending
    counts = []
    for tokens in pending:
        counts.append(min(tokens - (len(group) > 1), budget))
        budget -= counts[-1]
    return counts


def _held(tables: list[BlockTable]) -> int:
    """Blocks that these tables have together."""
    return len({block for table in tables for block in table.blocks})
