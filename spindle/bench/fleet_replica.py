"""One replica of a fleet: what the scheduler and its pool would do, in counts, and when.

A replica has the state of `serve.Scheduler` over a `BlockPool`, but no ids and no blocks: a request
is a number of tokens, what is remembered of a conversation is a number of blocks. It plans as they
do: the oldest first, a token to each decode, what the budget has left to prompts in chunks; the
youngest is preempted when blocks run out and computed anew; blocks that nobody holds are remembered
until they are needed, the least recently used go first.

What is alike is done at once. Between two endings, if nobody is admitted, every step has the same
decodes and each sees one key more than before: k such steps last k d + g k (k - 1) / 2, if the
first lasts d and each g longer than the one before. An arrival that could be admitted ends such a
run at the end of the step that is under way. Times are integers, in picoseconds, so the sum is not
near to that of the steps one by one: it is the same number.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from math import isqrt

import numpy as np

from spindle.bench.fleet_costs import Costs
from spindle.errors import RequestError

IDLE = -1


@dataclass(frozen=True)
class Shape:
    """What one replica is: the limits of its scheduler, and the blocks of its pool."""

    max_seqs: int = 32
    max_batch_tokens: int = 512
    num_blocks: int = 4096
    block_size: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise RequestError(f"{name}={value}: expected 1 or more")
        if self.block_size > 4096:
            raise RequestError(f"block_size={self.block_size}: expected 4096 or less")
        if self.max_batch_tokens < self.max_seqs:
            words = f"expected max_seqs={self.max_seqs} or more"
            raise RequestError(f"max_batch_tokens={self.max_batch_tokens}: {words}")


class Sequence:
    """A request on its way through a replica, in tokens."""

    __slots__ = (
        *("request", "order", "session", "system", "prompt", "length", "last"),
        *("stored", "since", "ends", "waits", "twice", "gained_ps"),
    )

    def __init__(
        self, request: int, order: int, session: int, system: int, prompt: int, output: int
    ) -> None:
        self.request, self.order = request, order  # the smaller order came first
        self.session, self.system, self.prompt = session, system, prompt
        self.length, self.last = prompt, prompt + output  # tokens now, and in the end
        self.stored = 0  # of them, while its prompt runs; in a decode, as they were at `since`
        self.since = self.ends = IDLE  # the steps after which it decodes, and has ended
        self.waits = IDLE  # a preempted one resumes after that many endings
        self.twice = 0  # blocks that it computed though another one had by then
        self.gained_ps = IDLE  # when its last token came, if it was preempted since


class Gaps:
    """How long tokens waited for the one before, counted in buckets 1/64 wide at most.

    Only steps that begin in a window count. A bucket is known by its leading 7 bits, as in Tene's
    HdrHistogram.
    """

    BITS = 7

    def __init__(self, window_ps: tuple[int, int]) -> None:
        self.window_ps, self.counts = window_ps, defaultdict[int, int](int)

    def add(self, start: int, k: int, first: int, growth: int, rows: int) -> None:
        """`k` steps from `start` on, of `rows` tokens each; see the module for first and growth."""
        low, high = self.window_ps
        if start < low or start + lasting(k, first, growth) > high:
            skipped = begun(low - start, first, growth) if start < low else 0
            k = min(k, begun(high - start, first, growth) if start < high else 0)
            k, first = k - skipped, first + growth * skipped
            if k <= 0:
                return
        counts, bits = self.counts, self.BITS
        while k:
            shift = first.bit_length() - bits
            if shift < 0:
                shift = 0
            bucket, here = first >> shift, k
            if growth and (first + growth * (k - 1)) >> shift != bucket:
                here = -((first - ((bucket + 1) << shift)) // growth)  # those below the next one
            counts[(shift << bits) + bucket] += here * rows
            k -= here
            first += growth * here

    def percentile_ps(self, share: float) -> float | None:
        """The middle of the bucket below which that share of the gaps lies; None without gaps."""
        left = share / 100 * sum(self.counts.values())
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                shift, lead = bucket >> self.BITS, bucket & ((1 << self.BITS) - 1)
                return ((lead << shift) + ((lead + 1) << shift) - 1) / 2
        return None


def lasting(k: int, first: int, growth: int) -> int:
    """Picoseconds of k steps."""
    return k * first + growth * (k * (k - 1) // 2)


def begun(elapsed: int, first: int, growth: int) -> int:
    """How many of such steps have begun before `elapsed` picoseconds, 1 or more, are over."""
    if not growth:
        return -(-elapsed // first)
    b = 2 * first - growth
    k = max(1, (isqrt(b * b + 8 * growth * elapsed) - b) // (2 * growth))
    while lasting(k, first, growth) < elapsed:
        k += 1
    while k > 1 and lasting(k - 1, first, growth) >= elapsed:
        k -= 1
    return k


class Cache:
    """The blocks of a replica, counted: held ones, and remembered ones that nobody holds.

    What is remembered are prefixes: so many blocks of a system prompt (its key is ~system), and so
    many of a session (its number) that continue it. Whoever holds a session's blocks holds those of
    its system prompt too and lets go of them later, so a prefix is always younger than what
    continues it, and goes later. Within one the last block goes first.
    """

    __slots__ = (
        *("num_blocks", "full", "known", "depth", "unheld", "holders", "used", "cached", "evicted"),
    )

    def __init__(self, num_blocks: int, full: list[int], known: np.ndarray) -> None:
        self.num_blocks, self.full = num_blocks, full  # blocks that a system prompt has in all
        self.known = known  # by system prompt: what a router is told of them
        self.depth: dict[int, int] = {}  # blocks remembered, by key
        self.unheld: dict[int, None] = {}  # the least recently used first
        self.holders = [0] * len(full)
        self.used = 0  # blocks that are held
        self.cached = 0  # blocks that are remembered and not held
        self.evicted = 0

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.num_blocks - self.used

    def evict(self) -> None:
        """Forget what had to make way for the blocks taken so far."""
        excess = self.used + self.cached - self.num_blocks
        while excess > 0:
            key = next(iter(self.unheld))
            have = self.depth[key]
            gone = min(have, excess)
            self._set_depth(key, have - gone)
            if gone == have:
                del self.unheld[key]
            self.cached -= gone
            self.evicted += gone
            excess -= gone

    def adopt(self, session: int, system: int) -> int:
        """Hold what is remembered of a prompt; returns the blocks."""
        self.evict()
        shared = self.depth.get(~system, 0)
        self.holders[system] += 1
        if self.holders[system] == 1 and shared:
            self._hold(~system, shared)
        own = self.depth.get(session, 0)
        if own:
            self._hold(session, own)
        return shared + own

    def put_back(self, session: int, system: int) -> None:
        """Let go of what was adopted, and of nothing else."""
        own = self.depth.get(session, 0)
        self.used -= own
        self._release_session(session, own)
        self._release_system(system)

    def learn(self, system: int, start: int, stop: int) -> int:
        """Blocks `start` to `stop` of a system prompt were computed; returns those known before."""
        depth, stop = self.depth.get(~system, 0), min(stop, self.full[system])
        if stop > depth:
            self._set_depth(~system, stop)
        return max(0, min(depth, stop) - start)

    def release(self, session: int, system: int, total: int, complete: int, twice: int) -> None:
        """Let go of `total` blocks, `complete` of them to be remembered, `twice` known by others'.

        The blocks of the system prompt stay held if others hold them.
        """
        self.evict()
        shared = min(self.full[system], complete)
        self.used -= total - shared + twice
        self._release_session(session, complete - shared)
        self._release_system(system)

    def _hold(self, key: int, blocks: int) -> None:
        del self.unheld[key]
        self.cached -= blocks
        self.used += blocks

    def _release_session(self, session: int, blocks: int) -> None:
        if blocks:
            self.depth[session] = blocks
            self.unheld[session] = None
            self.cached += blocks

    def _release_system(self, system: int) -> None:
        self.holders[system] -= 1
        blocks = self.depth.get(~system, 0)
        if blocks and not self.holders[system]:
            self.unheld[~system] = None
            self.used -= blocks
            self.cached += blocks

    def _set_depth(self, key: int, blocks: int) -> None:
        if blocks:
            self.depth[key] = blocks
        else:
            del self.depth[key]
        if key < 0:
            self.known[~key] = blocks

    def check(self) -> None:
        """Assert what always holds between steps."""
        assert 0 <= self.used <= self.num_blocks, "no more blocks are held than there are"
        assert self.cached == sum(self.depth[key] for key in self.unheld), "counts add up"
        assert all(0 < self.depth[~s] <= n for s, n in enumerate(self.full) if ~s in self.depth)


class Replica:
    """One engine; `add` requests when they arrive, and `wake` it at `end_ps`.

    ended: requests that a `wake` has brought to their end, for the caller to take.
    """

    __slots__ = (
        *("shape", "costs", "cache", "gaps", "first_ps", "found", "jump", "waiting", "running"),
        *("prompts", "partial", "ends", "crossing", "decodes", "keys", "now_ps", "end_ps", "k"),
        *("first", "growth", "tick", "busy_ps", "orders", "endings", "preemptions", "twice"),
        *("blocked", "ended"),
    )

    def __init__(
        self, shape: Shape, costs: Costs, cache: Cache, gaps: Gaps, first_ps: list[int],
        found: list[int], jump: bool,
    ) -> None:  # fmt: skip
        self.shape, self.costs, self.cache, self.gaps = shape, costs, cache, gaps
        self.first_ps, self.found, self.jump = first_ps, found, jump  # by request, written here
        self.waiting: deque[Sequence] = deque()  # the oldest first
        self.running: dict[Sequence, None] = {}  # the oldest first; a dict: any can leave at once
        self.prompts: list[tuple[Sequence, int]] = []  # of this step, and how many tokens of each
        self.partial: Sequence | None = None  # the youngest, if its prompt has not been all through
        self.ends: list[tuple[int, int, Sequence]] = []  # a heap: the step, and who ends with it
        self.crossing = [0] * shape.block_size  # decodes that take a block in step n, by n % P
        self.decodes = self.keys = 0  # sequences, and what they see, in this step
        self.now_ps, self.end_ps = 0, IDLE  # of the run of steps under way
        self.k = self.first = self.growth = 0  # of these steps, as the module says
        self.tick = self.busy_ps = self.orders = self.endings = self.preemptions = self.twice = 0
        self.blocked = (IDLE, 0, 0)  # who did not fit, and when that was
        self.ended: list[int] = []

    def add(self, now_ps: int, one: Sequence) -> bool:
        """A request arrives; true if `end_ps` has changed."""
        could = not self.waiting and len(self.running) < self.shape.max_seqs
        self.waiting.append(one)
        if self.end_ps == IDLE:
            self.now_ps = self.end_ps = now_ps
            return True
        if not could or self.k <= 1:
            return False
        k = begun(now_ps - self.now_ps, self.first, self.growth)
        if k >= self.k:
            return False
        self.k = k
        self.end_ps = self.now_ps + lasting(k, self.first, self.growth)
        return True

    def wake(self) -> None:
        """The steps under way are done; the next ones begin."""
        if self.k:
            self._commit()
        self._plan()

    # --- the end of a run of steps --------------------------------------------------------------

    def _commit(self) -> None:
        k, cache, decodes = self.k, self.cache, self.decodes
        if k > 1:
            cache.used += self._crossings(k - 1)
        if decodes:
            self.gaps.add(self.now_ps, k, self.first, self.growth, decodes)
        low, high = self.gaps.window_ps
        start, end, ends = self.now_ps, self.end_ps, self.ends
        if low <= start and end <= high:
            self.busy_ps += end - start
        else:
            self.busy_ps += max(0, min(end, high) - max(start, low))
        self.tick += k
        self.keys += decodes * k
        self.now_ps, self.k = end, 0
        while ends and ends[0][0] <= self.tick:
            tick, _, one = heapq.heappop(ends)
            if one.ends == tick:  # else it was preempted since
                self._stop_decoding(one)
                self._end(one)
        for one, count in self.prompts:
            self._store(one, count)
        self.prompts = []

    def _crossings(self, steps: int) -> int:
        """Blocks that the decodes take in so many steps after the first."""
        P, start = self.shape.block_size, (self.tick + 1) % self.shape.block_size
        whole, rest = divmod(steps, P)
        need = whole * self.decodes
        if rest:
            need += sum(self.crossing[start : start + rest])
            if start + rest > P:
                need += sum(self.crossing[: start + rest - P])
        return need

    def _store(self, one: Sequence, count: int) -> None:
        """So many more tokens of a prompt are stored; if they are the last, it gains a token."""
        P, before = self.shape.block_size, one.stored
        one.stored += count
        if before < self.cache.full[one.system] * P:
            twice = self.cache.learn(one.system, before // P, one.stored // P)
            one.twice += twice
            self.twice += twice
        if one.stored < one.length:
            self.partial = one
            return
        if one.length == one.prompt:
            self.first_ps[one.request] = self.now_ps
        if one.gained_ps != IDLE:
            self.gaps.add(one.gained_ps, 1, self.now_ps - one.gained_ps, 0, 1)
        one.length += 1
        if one.length == one.last:
            self._end(one)
        else:
            self._begin_decoding(one)

    def _begin_decoding(self, one: Sequence) -> None:
        one.since, one.ends = self.tick, self.tick + one.last - one.length
        heapq.heappush(self.ends, (one.ends, one.order, one))
        self.decodes += 1
        self.keys += one.stored + 1
        self.crossing[(self.tick - one.stored) % self.shape.block_size] += 1

    def _stop_decoding(self, one: Sequence) -> None:
        """It has stored a token a step since it began."""
        self.crossing[(one.since - one.stored) % self.shape.block_size] -= 1
        gained = self.tick - one.since
        one.stored += gained
        one.length += gained
        one.since = one.ends = IDLE
        self.decodes -= 1
        self.keys -= one.stored + 1

    def _end(self, one: Sequence) -> None:
        del self.running[one]
        self.endings += 1
        self._release(one)
        self.ended.append(one.request)

    def _release(self, one: Sequence) -> None:
        P = self.shape.block_size
        total, complete = -(-one.stored // P), one.stored // P
        self.cache.release(one.session, one.system, total, complete, one.twice)
        one.twice = 0

    # --- the next run of steps ------------------------------------------------------------------

    def _plan(self) -> None:
        """Whoever runs goes on, or is preempted; who can is admitted; then as far as all is alike.

        What there is to do without a prompt is alike until someone ends, or blocks run out.
        """
        budget = self.shape.max_batch_tokens - self.decodes
        budget -= self._go_on(budget)
        if self.waiting and budget > 0:
            self._admit(budget)
        if not self.running:
            self.end_ps = IDLE
            return
        costs, decodes, k, growth = self.costs, self.decodes, 1, 0
        first = costs.step_ps + decodes * costs.decode_row_ps + self.keys * costs.key_ps
        if self.prompts:
            for one, count in self.prompts:
                first += costs.prompt_ps(one.stored, count)
        else:
            growth = decodes * costs.key_ps
            k = self._alike() if self.jump else 1
        self.k, self.first, self.growth = k, first, growth
        self.end_ps = self.now_ps + lasting(k, first, growth)

    def _go_on(self, budget: int) -> int:
        """Take the blocks of the running ones' next tokens; returns a prompt's share of budget."""
        cache, one, count = self.cache, self.partial, 0
        need = self.crossing[self.tick % self.shape.block_size]
        if one is not None:
            count = min(one.length - one.stored, budget)
            need += self._blocks(one, count)
        if cache.used + need <= cache.num_blocks:
            cache.used += need
        else:
            self._make_room(budget)
        if self.partial is None:
            return 0
        self.prompts.append((self.partial, count))
        self.partial = None
        return count

    def _blocks(self, one: Sequence, count: int) -> int:
        """Blocks to take for so many more tokens."""
        P = self.shape.block_size
        return -(-(one.stored + count) // P) - -(-one.stored // P)

    def _make_room(self, budget: int) -> None:
        """Take each one's blocks, the oldest first, and preempt the youngest where they lack."""
        order, at = list(self.running), 0
        while at < len(order):
            one = order[at]
            if one is self.partial:
                need = self._blocks(one, min(one.length - one.stored, budget))
            else:
                need = int((one.stored + self.tick - one.since) % self.shape.block_size == 0)
            while need > self.cache.free and len(order) > at:
                self._preempt(order.pop())
            if len(order) > at:
                self.cache.used += need
            at += 1

    def _preempt(self, one: Sequence) -> None:
        """It is computed anew, once another one has ended."""
        if one is self.partial:
            self.partial = None
        else:
            self._stop_decoding(one)
            one.gained_ps = self.now_ps
        self._release(one)
        del self.running[one]
        one.stored = 0
        one.waits = self.endings + 1
        self.waiting.appendleft(one)
        self.preemptions += 1

    def _admit(self, budget: int) -> None:
        """Admit the oldest that wait while seats, blocks and budget last."""
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_seqs:
            one = self.waiting[0]
            if (self.running and self.endings < one.waits) or not self._fits(one):
                return
            self.waiting.popleft()
            self.running[one] = None
            count = min(one.length - one.stored, budget)
            self.cache.used += self._blocks(one, count)
            self.prompts.append((one, count))
            budget -= count

    def _fits(self, one: Sequence) -> bool:
        """Hold what is remembered of it, if what is left fits, and a block for each that runs."""
        cache, running, P = self.cache, len(self.running), self.shape.block_size
        order, free, ran = self.blocked
        if running and order == one.order and cache.free <= free and running >= ran:
            return False  # nothing was freed since
        held = cache.adopt(one.session, one.system)
        if running and (one.length + P) // P - held + running > cache.free:
            cache.put_back(one.session, one.system)
            self.blocked = (one.order, cache.free, running)
            return False
        one.stored = held * P
        if one.length == one.prompt and one.waits == IDLE:
            self.found[one.request] = one.stored
        return True

    def _alike(self) -> int:
        """How many steps from this one on have the same decodes, and blocks for all of them."""
        while self.ends[0][2].ends != self.ends[0][0]:  # it was preempted since
            heapq.heappop(self.ends)
        k, free = self.ends[0][0] - self.tick, self.cache.free
        if (k // self.shape.block_size + 1) * self.decodes <= free:
            return k
        P = self.shape.block_size
        for step in range(1, k):
            free -= self.crossing[(self.tick + step) % P]
            if free < 0:
                return step
        return k

    def check(self) -> None:
        """Assert what always holds between steps."""
        self.cache.check()
        assert self.decodes == sum(self.crossing), "each decode takes a block in one of P steps"
        assert len(self.running) <= self.shape.max_seqs, "no more run than may"
