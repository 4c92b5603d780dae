"""Blocks: who holds which, who shares which, and which are remembered. No tensors here.

A pool has N blocks of P slots. A sequence's table names the blocks that hold its tokens: position p
is slot p % P of block table.blocks[p // P] (Kwon et al. 2023, PagedAttention, section 4.2).

    free    nobody's, content of no account        take ->  held
    held    by as many tables as its count says    give ->  free, or cached if the index names it
    cached  nobody's, content remembered           share -> held, or evicted by a take, oldest first

Everything that can fail counts its need first, then takes: an error has changed nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from spindle.errors import BlockError, OutOfBlocks

Copy = tuple[int, int]  # a block's content goes from the first id to the second


class BlockPool:
    """N blocks of P slots: a count for each, the free ones, and the index of what is remembered.

    take, share and give cost the same however large the pool is.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BlockError(f"{num_blocks} blocks of {block_size}: expected at least one of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.index = PrefixIndex(prefix_cache)
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: 0 is the first to be taken
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def free(self) -> int:
        """Blocks that a `take` can have: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and the index remembers."""
        return len(self._cached)

    def count(self, block: int) -> int:
        """How many tables name the block."""
        return self._counts[self._known(block)]

    def take(self, count: int = 1) -> list[int]:
        """Hold `count` blocks that nobody held, forgetting the oldest content if it must be.

        Raises OutOfBlocks and takes none if there are not as many.
        """
        if count < 0:
            raise BlockError(f"{count} blocks: expected 0 or more")
        if count > self.free:
            raise OutOfBlocks(count, self.free, self.num_blocks)
        return [self._take_one() for _ in range(count)]

    def share(self, block: int) -> None:
        """Hold a block once more: one that is held, or one that is cached. BlockError if free."""
        if self._counts[self._known(block)] == 0:
            if block not in self._cached:
                raise BlockError(f"block {block} is free: only what is held or cached is shared")
            del self._cached[block]
        self._counts[block] += 1

    def give(self, block: int) -> None:
        """Let go of a block once. BlockError if nobody holds it (a double free)."""
        if self._counts[self._known(block)] == 0:
            raise BlockError(f"block {block} is given back, but nobody holds it")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if self.index.names(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, block: int) -> None:
        """Drop a block, and all that continues it, from the index; who holds what stays."""
        for dropped in self.index.drop(block):
            if dropped in self._cached:
                del self._cached[dropped]
                self._free.append(dropped)

    def clear(self) -> None:
        """Forget all content: the index is empty, and every block that nobody holds is free."""
        for block in self.index.roots():
            self.forget(block)

    def check(
        self, tables: Iterable[BlockTable] = (), content: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Assert what always holds; `tables` are all the tables of this pool.

        content: what tokens each block holds, where somebody knows; the pool does not.
        """
        named = Counter(block for table in tables for block in table.blocks)
        assert named == Counter({b: n for b, n in enumerate(self._counts) if n}), "counts"
        places = [*self._free, *self._cached, *named]
        assert sorted(places) == list(range(self.num_blocks)), "free + cached + held = total"
        assert all(self.index.names(block) for block in self._cached), "cached, so in the index"
        assert not any(self.index.names(block) for block in self._free), "free, so in no index"
        assert len(self.index) <= self.num_blocks, "the index is never larger than the pool"
        self.index.check(content)

    def _take_one(self) -> int:
        if not self._free:
            self.forget(next(iter(self._cached)))
        block = self._free.pop()
        self._counts[block] = 1
        return block

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block}: this pool has blocks 0 to {self.num_blocks - 1}")
        return block


class Entry:
    """What the index knows of one full block: its tokens, and the entry that it continues."""

    __slots__ = ("block", "children", "key", "parent", "tokens")

    def __init__(
        self, block: int, key: bytes, parent: Entry | None, tokens: tuple[int, ...]
    ) -> None:
        self.block: int | None = block  # None once it is dropped
        self.key, self.parent, self.tokens = key, parent, tokens
        self.children: dict[int, Entry] = {}  # by block


class PrefixIndex:
    """From the content of full blocks to the block that holds it: a tree, found by chained hashes.

    A key is the hash of a block's tokens and of the key before it, so it stands for the whole
    prefix. A hit compares the token ids too: two prefixes of one key are still told apart.
    An entry never outlives the one that it continues, so whatever is in the index can be reached.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def names(self, block: int) -> bool:
        """Whether the block's content is remembered."""
        return block in self._of_block

    def find(self, parent: Entry | None, tokens: tuple[int, ...]) -> Entry | None:
        """The entry of these tokens after that prefix (None: at the start), or None."""
        entry = self._entries.get(chained_hash(parent.key if parent else b"", tokens))
        if entry is None or entry.tokens != tokens or entry.parent is not parent:
            return None
        return entry

    def add(self, parent: Entry | None, tokens: tuple[int, ...], block: int) -> Entry | None:
        """Remember that `block` holds these tokens after that prefix.

        Returns the entry of that content: another block's, if one had it first. None if it cannot
        be remembered: the index is off, or its key stands for something else.
        """
        key = chained_hash(parent.key if parent else b"", tokens)
        if not self.enabled or key in self._entries or self.names(block):
            return self.find(parent, tokens) if self.enabled else None
        entry = Entry(block, key, parent, tokens)
        self._entries[key] = self._of_block[block] = entry
        if parent is not None:
            parent.children[block] = entry
        return entry

    def drop(self, block: int) -> list[int]:
        """Forget a block and all that continues it; returns the blocks that were forgotten."""
        top = self._of_block.get(block)
        if top is None:
            return []
        if top.parent is not None:
            del top.parent.children[block]
        doomed, dropped = [top], []
        while doomed:
            entry = doomed.pop()
            doomed.extend(entry.children.values())
            assert entry.block is not None
            dropped.append(entry.block)
            del self._entries[entry.key], self._of_block[entry.block]
            entry.block = None
        return dropped

    def roots(self) -> list[int]:
        """The blocks that begin a prefix."""
        return [block for block, entry in self._of_block.items() if entry.parent is None]

    def check(self, content: Mapping[int, Sequence[int]] | None = None) -> None:
        """Assert that both maps are one, and that every entry is reached from its parent."""
        assert len(self._entries) == len(self._of_block), "an entry a block"
        for block, entry in self._of_block.items():
            if content is not None:
                assert tuple(content[block]) == entry.tokens, "an entry has its block's content"
            assert entry.block == block and self._entries[entry.key] is entry, "maps agree"
            parent = entry.parent
            assert parent is None or parent.children.get(block) is entry, "a parent outlives it"
            assert parent is None or parent.block is not None, "no parent is dropped first"


def chained_hash(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """The key of a block after the key of the block before it; the same in every process."""
    content = before + b"".join(token.to_bytes(8, "little") for token in tokens)
    return hashlib.blake2b(content, digest_size=16).digest()


class BlockTable:
    """The blocks of one sequence, in the order of its positions.

    How many of its slots are written is the sequence's own affair: a rewound sequence keeps its
    blocks and writes over them, or truncates.
    """

    __slots__ = ("_chain", "blocks", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self._chain: list[Entry] = []  # what the index knows of the first blocks

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have slots for."""
        return len(self.blocks) * self.pool.block_size

    def adopt(self, tokens: Sequence[int]) -> int:
        """Begin an empty table with the remembered blocks of a prompt; returns the tokens found.

        The last token is never among them: its logits are wanted, so it must be computed. So what
        was found is never written to.
        """
        if self.blocks:
            raise BlockError(f"the table has {len(self.blocks)} blocks: only an empty one adopts")
        P, entry = self.pool.block_size, None
        for start in range(0, (len(tokens) - 1) // P * P, P):
            entry = self.pool.index.find(entry, tuple(tokens[start : start + P]))
            if entry is None or entry.block is None:
                break
            self.pool.share(entry.block)
            self.blocks.append(entry.block)
            self._chain.append(entry)
        return self.capacity

    def reserve(self, start: int, stop: int) -> list[Copy]:
        """Make the slots of positions start .. stop - 1 this table's own, to be written.

        Takes new blocks at the end. A block that others hold too is replaced by a fresh one (copy
        on write); what it held before `start` has to be copied, and the copies are returned. Raises
        OutOfBlocks, and changes nothing, if the pool has not as many; BlockError for a gap.
        """
        if not 0 <= start <= min(stop, self.capacity):
            raise BlockError(f"positions {start} to {stop}: the table ends at {self.capacity}")
        pool, blocks = self.pool, self.blocks
        first, end = start // pool.block_size, -(-stop // pool.block_size)
        shared = [n for n, block in enumerate(blocks[first:end], first) if pool.count(block) > 1]
        more = max(0, end - len(blocks))
        fresh = pool.take(len(shared) + more) if shared or more else []
        for block in blocks[first:end]:
            if pool.count(block) == 1:  # ours alone, but perhaps remembered as it was
                pool.forget(block)
        copies = []
        for n, new in zip(shared, fresh, strict=False):
            if n == first and start % pool.block_size:
                copies.append((blocks[n], new))
            pool.give(blocks[n])
            blocks[n] = new
        blocks.extend(fresh[len(shared) :])
        del self._chain[first:]
        return copies

    def commit(self, tokens: Sequence[int], count: int | None = None) -> None:
        """Let the index remember the full blocks of these tokens, computed and accepted.

        `tokens` are the sequence's from its start, of which the first `count` (all by default) lie
        in the table's blocks.
        """
        P, index = self.pool.block_size, self.pool.index
        count = len(tokens) if count is None else count
        if not 0 <= count <= min(len(tokens), self.capacity):
            have = f"{len(tokens)} are given, and the table ends at {self.capacity}"
            raise BlockError(f"{count} tokens to remember: {have}")
        while self._chain and self._chain[-1].block is None:  # evicted in another table's block
            self._chain.pop()
        for n in range(len(self._chain), count // P):
            parent = self._chain[-1] if self._chain else None
            entry = index.add(parent, tuple(tokens[n * P : (n + 1) * P]), self.blocks[n])
            if entry is None:
                return
            self._chain.append(entry)

    def fork(self) -> BlockTable:
        """A second table of the same blocks; whoever writes first gets a copy."""
        for block in self.blocks:
            self.pool.share(block)
        twin = BlockTable(self.pool)
        twin.blocks, twin._chain = self.blocks.copy(), self._chain.copy()
        return twin

    def truncate(self, length: int) -> None:
        """Give back the blocks that hold nothing of the first `length` tokens."""
        if not 0 <= length <= self.capacity:
            raise BlockError(f"truncate to {length}: the table ends at {self.capacity}")
        keep = -(-length // self.pool.block_size)
        del self._chain[length // self.pool.block_size :]
        for block in reversed(self.blocks[keep:]):  # the last first: it will be evicted first
            self.pool.give(block)
        del self.blocks[keep:]

    def release(self) -> None:
        """Give all blocks back; releasing an empty table does nothing."""
        self.truncate(0)


def needed(spans: Sequence[tuple[BlockTable, int, int]]) -> int:
    """How many blocks it takes to `reserve` all of these (table, start, stop), one after another.

    Of those who share a block and write to it, the last one left keeps it. One span or more.
    """
    pool, more, writers = spans[0][0].pool, 0, Counter[int]()
    for table, start, stop in spans:
        first, end = start // pool.block_size, -(-stop // pool.block_size)
        more += max(0, end - len(table.blocks))
        writers.update(table.blocks[first:end])
    return more + sum(min(n, pool.count(block) - 1) for block, n in writers.items())


def move(tables: Sequence[BlockTable], to: BlockPool) -> tuple[list[BlockTable], list[Copy]]:
    """The same tables in another pool, sharing what they shared; returns them and the copies.

    The tables given are released. Raises OutOfBlocks, and changes nothing, if `to` is too small.
    """
    for table in tables:
        if table.pool.block_size != to.block_size:
            raise BlockError(f"blocks of {table.pool.block_size} into a pool of {to.block_size}")
    needed = list(dict.fromkeys(block for table in tables for block in table.blocks))
    copies = list(zip(needed, to.take(len(needed)), strict=True))
    place, seen, moved = dict(copies), set[int](), []
    for table in tables:
        twin = BlockTable(to)
        for block in table.blocks:
            twin.blocks.append(place[block])
            if block in seen:
                to.share(place[block])
            seen.add(block)
        moved.append(twin)
    for table in tables:
        table.release()
    return moved, copies
