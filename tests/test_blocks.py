"""Pool, tables and index against a plain model that keeps every sequence as a list of tokens."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from spindle.errors import BlockError, OutOfBlocks, SpindleError
from spindle.kvcache import blocks
from spindle.kvcache.blocks import BlockPool, BlockTable, move


def values(tokens: list[int]) -> list[int]:
    """What a slot of each position holds: like a key or a value, it depends on all before it."""
    found = [0]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found[1:]


class Store:
    """What PagedKV will do, with one number in place of keys and values: slots, writes, copies."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots = {b: [None] * pool.block_size for b in range(pool.num_blocks)}
        self.tokens = {b: [None] * pool.block_size for b in range(pool.num_blocks)}

    def write(self, table: BlockTable, start: int, tokens: list[int]) -> list[tuple[int, int]]:
        """Reserve, copy, write positions start on of `tokens`, a sequence's; returns the copies."""
        copies = table.reserve(start, len(tokens))
        for source, target in copies:
            self.slots[target] = self.slots[source].copy()
            self.tokens[target] = self.tokens[source].copy()
        for position, value in list(enumerate(values(tokens)))[start:]:
            block, slot = divmod(position, self.pool.block_size)
            self.slots[table.blocks[block]][slot] = value
            self.tokens[table.blocks[block]][slot] = tokens[position]
        return copies

    def read(self, table: BlockTable, length: int) -> list[int]:
        P = self.pool.block_size
        return [self.slots[table.blocks[p // P]][p % P] for p in range(length)]

    def check(self, tables: list[BlockTable]) -> None:
        self.pool.check(tables, self.tokens)
        for block, entry in self.pool.index._of_block.items():
            prefix = prefix_of(entry)
            expected = values(prefix)[len(prefix) - self.pool.block_size :]
            assert self.slots[block] == expected, "an entry has its block's content"


def prefix_of(entry: blocks.Entry) -> list[int]:
    """The tokens of a block and of all before it, as the index has them."""
    before = prefix_of(entry.parent) if entry.parent else []
    return [*before, *entry.tokens]


class Sequence:
    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table, self.tokens = table, tokens

    def __repr__(self) -> str:
        return f"Sequence({self.tokens}, {self.table.blocks})"


def machine(block_size: int, num_blocks: int, constant_hash: bool = False) -> type:
    """A state machine over one pool; few token values and few blocks, so that all of it happens."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3 * block_size)

    class Blocks(RuleBasedStateMachine):
        alive = Bundle("alive")

        def __init__(self) -> None:
            super().__init__()
            self.pool = BlockPool(num_blocks, block_size)
            self.store, self.sequences = Store(self.pool), list[Sequence]()
            self.kept_hash = blocks.chained_hash
            if constant_hash:
                blocks.chained_hash = lambda before, tokens: b"one for all"

        def teardown(self) -> None:
            blocks.chained_hash = self.kept_hash
            for sequence in self.sequences:
                sequence.table.release()
            self.pool.check()
            self.pool.clear()
            self.pool.check()
            assert (self.pool.free, self.pool.cached) == (num_blocks, 0), "everything comes back"

        def attempt(self, table: BlockTable, start: int, tokens: list[int]) -> bool:
            """Write, or see that a refusal has changed nothing."""
            before = [t.table.blocks.copy() for t in self.sequences]
            state = (self.pool._counts.copy(), self.pool._free.copy(), list(self.pool._cached))
            entries, chain = dict(self.pool.index._of_block), table._chain.copy()
            try:
                self.store.write(table, start, tokens)
                return True
            except OutOfBlocks as refusal:
                assert refusal.needed > refusal.free == self.pool.free
                assert state == (self.pool._counts, self.pool._free, list(self.pool._cached))
                assert before == [t.table.blocks for t in self.sequences]
                assert entries == self.pool.index._of_block and chain == table._chain
                return False

        @rule(target=alive, prompt=tokens)
        def begin(self, prompt: list[int]) -> Sequence:
            table = BlockTable(self.pool)
            found = table.adopt(prompt)
            assert found % block_size == 0 and found < len(prompt)
            assert self.store.read(table, found) == values(prompt[:found]), "a hit is the prompt's"
            sequence = Sequence(table, prompt[:found])
            self.sequences.append(sequence)
            if self.attempt(table, found, prompt):
                sequence.tokens = prompt
            return sequence

        @rule(sequence=alive, prompt=tokens)
        def begin_again(self, sequence: Sequence, prompt: list[int]) -> None:
            """As after a preemption: the same table, another start."""
            sequence.table.release()
            found = sequence.table.adopt(prompt)
            sequence.tokens = prompt[:found]
            if self.attempt(sequence.table, found, prompt):
                sequence.tokens = prompt

        @rule(sequence=alive, new=tokens)
        def extend(self, sequence: Sequence, new: list[int]) -> None:
            if self.attempt(sequence.table, len(sequence.tokens), sequence.tokens + new):
                sequence.tokens = sequence.tokens + new

        @rule(sequence=alive, share=st.floats(0, 1), new=tokens)
        def rewind_and_write(self, sequence: Sequence, share: float, new: list[int]) -> None:
            """As after rejected drafts: the blocks stay, a later write starts earlier."""
            start = int(share * len(sequence.tokens))
            tokens = sequence.tokens[:start] + new
            if self.attempt(sequence.table, start, tokens):
                sequence.tokens = tokens

        @rule(target=alive, sequence=alive)
        def fork(self, sequence: Sequence) -> Sequence:
            twin = Sequence(sequence.table.fork(), sequence.tokens)
            self.sequences.append(twin)
            return twin

        @rule(sequence=alive)
        def commit(self, sequence: Sequence) -> None:
            sequence.table.commit(sequence.tokens)

        @rule(sequence=alive, share=st.floats(0, 1))
        def truncate(self, sequence: Sequence, share: float) -> None:
            sequence.tokens = sequence.tokens[: int(share * len(sequence.tokens))]
            sequence.table.truncate(len(sequence.tokens))

        @rule(sequence=consumes(alive))
        def release(self, sequence: Sequence) -> None:
            sequence.table.release()
            self.sequences.remove(sequence)

        @rule()
        def evict(self) -> None:
            """Another request takes all there is, and gives it back unused."""
            for block in self.pool.take(self.pool.free):
                self.pool.give(block)

        @rule()
        def clear(self) -> None:
            self.pool.clear()
            assert self.pool.cached == 0 and len(self.pool.index) == 0

        @invariant()
        def holds(self) -> None:
            self.store.check([sequence.table for sequence in self.sequences])
            assert len(self.pool.index) <= num_blocks
            for sequence in self.sequences:
                held = self.store.read(sequence.table, len(sequence.tokens))
                assert held == values(sequence.tokens)

    return Blocks


# 4 x 25 x 40 = 4,000 steps.
STEPS = settings(max_examples=25, stateful_step_count=40, deadline=None)

TestBlocksOfOne = machine(1, 6).TestCase
TestBlocksOfTwo = machine(2, 7).TestCase
TestBlocksOfFour = machine(4, 12).TestCase
TestOneHashForAll = machine(2, 8, constant_hash=True).TestCase  # B14
for _case in (TestBlocksOfOne, TestBlocksOfTwo, TestBlocksOfFour, TestOneHashForAll):
    _case.settings = STEPS


def begin(pool: BlockPool, prompt: list[int]) -> tuple[BlockTable, int]:
    """A prompt as an engine runs it: adopt, reserve the rest, commit; and how much was found."""
    table = BlockTable(pool)
    found = table.adopt(prompt)
    table.reserve(found, len(prompt))
    table.commit(prompt)
    return table, found


# --- forks ---------------------------------------------------------------------------------------


def test_four_sequences_of_one_16_token_prompt_hold_64_tokens_in_16_slots():
    pool = BlockPool(16, 16)
    parent = BlockTable(pool)
    parent.reserve(0, 16)
    tables = [parent, *(parent.fork() for _ in range(3))]
    assert sum(table.capacity for table in tables) == 64
    assert (pool.num_blocks - pool.free) * 16 == 16
    assert [table.reserve(16, 17) for table in tables] == [[], [], [], []]
    pool.check(tables)


def test_after_13_tokens_the_first_three_writers_copy_and_the_last_owner_writes_in_place():
    """B13: the shared block is partly filled; nobody's tokens may change under another's write."""
    pool = BlockPool(16, 16)
    store, prompt = Store(pool), list(range(13))
    parent = BlockTable(pool)
    store.write(parent, 0, prompt)
    tables = [parent, *(parent.fork() for _ in range(3))]
    first = parent.blocks[0]
    copies = [store.write(table, 13, [*prompt, 100 + n]) for n, table in enumerate(tables)]
    assert [len(copy) for copy in copies] == [1, 1, 1, 0]
    assert tables[-1].blocks == [first]
    for n, table in enumerate(tables):
        assert store.read(table, 14) == values([*prompt, 100 + n])
    store.check(tables)


def test_a_write_at_the_border_of_a_shared_block_copies_nothing():
    """What stood there is rewound: the block is replaced, its content of no account."""
    pool = BlockPool(8, 4)
    parent = BlockTable(pool)
    parent.reserve(0, 8)
    twin = parent.fork()
    assert twin.reserve(4, 6) == []
    assert twin.blocks[0] == parent.blocks[0] and twin.blocks[1] != parent.blocks[1]
    pool.check([parent, twin])


# --- the prefix index ----------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "found"), [(4, 0), (7, 4), (8, 4), (9, 8)])
def test_a_prompt_sent_twice_leaves_at_least_one_token_to_compute(length, found):
    """B03: the logits of the last token are wanted, so it is never among the found."""
    pool, prompt = BlockPool(16, 4), list(range(length))
    first, none = begin(pool, prompt)
    first.release()
    second, hit = begin(pool, prompt)
    assert (none, hit) == (0, found)
    pool.check([second])


def test_a_longer_prompt_finds_all_that_the_shorter_one_left():
    """B04: a second run of the same prompt computed its last block again, and broke no chain."""
    pool, prompt = BlockPool(16, 4), list(range(8))
    for _ in range(2):
        begin(pool, prompt)[0].release()
    assert begin(pool, [*prompt, 9, 9, 9, 9])[1] == 8


def test_overwritten_blocks_are_no_hit():
    """B01, B02: run A, let B have all blocks, run A again."""
    pool, prompt = BlockPool(3, 4), list(range(8))
    begin(pool, prompt)[0].release()
    other, _ = begin(pool, [50 + n for n in range(12)])
    pool.check([other])
    other.release()
    assert begin(pool, prompt)[1] == 0


def test_a_hit_is_looked_up_when_it_is_held():
    """B07: `adopt` finds and shares at once; an eviction in between has no place to be."""
    pool, prompt = BlockPool(4, 4), list(range(9))
    begin(pool, prompt)[0].release()
    table = BlockTable(pool)
    assert table.adopt(prompt) == 8
    with pytest.raises(OutOfBlocks):
        pool.take(3)
    assert len(pool.take(2)) == 2  # of the four, two are held by the hit
    assert table.blocks and all(pool.index.names(block) for block in table.blocks)


def test_two_prefixes_of_one_key_are_told_apart(monkeypatch):
    """B14: were all hashes equal, a hit would still be the prompt's own content."""
    monkeypatch.setattr(blocks, "chained_hash", lambda before, tokens: b"same")
    pool = BlockPool(16, 4)
    begin(pool, [1] * 9)[0].release()
    assert begin(pool, [2] * 9)[1] == 0
    assert begin(pool, [1] * 9)[1] == 4  # the second block had no key of its own


def test_a_key_stands_for_the_whole_prefix():
    """The same four tokens after others are other keys and values."""
    pool = BlockPool(16, 4)
    begin(pool, [1, 1, 1, 1, 7, 7, 7, 7, 0])[0].release()
    assert begin(pool, [2, 2, 2, 2, 7, 7, 7, 7, 0])[1] == 0


def test_hashes_are_the_same_in_every_process():
    """B14: Python's own hash of bytes is not."""
    program = "from spindle.kvcache.blocks import chained_hash as h; print(h(b'a', (1, 2)).hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {blocks.chained_hash(b"a", (1, 2)).hex()}


def test_500_prefixes_stay_in_the_pool_and_the_oldest_go_first():
    """B19: what is remembered is bounded by the pool, in the order of last use, and clears."""
    pool = BlockPool(8, 4)
    for n in range(500):
        begin(pool, [n, n, n, n, 0])[0].release()
        pool.check()
    assert len(pool.index) == 7 == pool.cached  # and one for the fifth token, that is not full
    begin(pool, [493, 493, 493, 493, 0])[0].release()  # the oldest, and now the newest
    begin(pool, [600, 600, 600, 600, 0])[0].release()
    found = [n for n in range(490, 601) if pool.index.find(None, (n, n, n, n))]
    assert found == [493, 495, 496, 497, 498, 499, 600]
    pool = BlockPool(8, 4)
    begin(pool, list(range(9)))[0].release()
    pool.clear()
    assert (pool.cached, len(pool.index), pool.free) == (0, 0, 8)
    assert begin(pool, list(range(9)))[1] == 0


def test_of_a_prefix_the_last_block_is_evicted_first():
    """Else what is left of it could not be found."""
    pool = BlockPool(4, 4)
    begin(pool, list(range(13)))[0].release()
    pool.take(2)  # one was free, one is evicted
    assert BlockTable(pool).adopt(list(range(13))) == 8


def test_same_content_twice_in_one_step_is_remembered_once():
    pool, prompt = BlockPool(16, 4), list(range(9))
    first, second = BlockTable(pool), BlockTable(pool)
    for table in (first, second):
        table.adopt(prompt)
        table.reserve(0, 9)
    for table in (first, second):
        table.commit(prompt)
        pool.check([first, second])
    assert len(pool.index) == 2
    second.commit([*prompt, 1, 2, 3])  # goes on from an entry that is the first one's
    assert len(pool.index) == 3
    first.release()
    pool.take(pool.free)  # and that is evicted: what continued it goes too
    assert len(pool.index) == 0
    second.commit([*prompt, 1, 2, 3])  # but can be remembered anew, in the second's own blocks
    assert len(pool.index) == 3


def test_a_block_that_is_rewound_into_is_remembered_no_more():
    pool = BlockPool(8, 4)
    table, _ = begin(pool, list(range(8)))
    table.reserve(6, 9)
    assert pool.index.names(table.blocks[0]) and not pool.index.names(table.blocks[1])
    pool.check([table])


def test_what_a_rewound_sequence_writes_is_remembered_under_its_own_prefix():
    pool = BlockPool(16, 4)
    store, tables = Store(pool), [BlockTable(pool)]
    store.write(tables[0], 0, [1] * 8)
    tables[0].commit([1] * 8)
    tables.append(tables[0].fork())
    other = [1] * 4 + [2] * 8
    store.write(tables[1], 4, other)
    tables[1].commit(other)
    store.check(tables)
    assert BlockTable(pool).adopt([*other, 0]) == 12
    assert BlockTable(pool).adopt([1] * 8 + [2] * 5) == 8


def test_a_released_table_begins_anew():
    pool = BlockPool(16, 4)
    store, table = Store(pool), BlockTable(pool)
    for prompt in ([1] * 9, [2] * 9):
        begin(pool, prompt)[0].release()
    for prompt in ([1] * 9, [2] * 4 + [3] * 9):
        for entry in pool.index._of_block.values():
            store.slots[entry.block] = values(prefix_of(entry))[-4:]
            store.tokens[entry.block] = list(entry.tokens)
        found = table.adopt(prompt)
        store.write(table, found, prompt)
        table.commit(prompt)
        store.check([table])
        table.release()
    assert len(pool.index) == 2 + 2 + 2


def test_without_a_prefix_cache_nothing_is_remembered():
    """B16: blocks held are what the length needs, and all of them come back."""
    pool = BlockPool(8, 4, prefix_cache=False)
    table, _ = begin(pool, list(range(12)))
    assert len(table.blocks) == 3
    table.release()
    assert (pool.cached, len(pool.index), pool.free) == (0, 0, 8)
    assert begin(pool, list(range(12)))[1] == 0


# --- errors --------------------------------------------------------------------------------------


def test_what_cannot_be_met_changes_nothing_and_says_the_numbers():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.reserve(0, 9)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 of 4 free; nothing was taken") as no:
        table.reserve(9, 20)
    assert (no.value.needed, no.value.free, no.value.total) == (2, 1, 4)
    assert len(table.blocks) == 3
    pool.check([table])


def test_copies_are_counted_before_anything_is_taken():
    pool = BlockPool(2, 4)
    parent = BlockTable(pool)
    parent.reserve(0, 3)
    twin = parent.fork()
    with pytest.raises(OutOfBlocks):
        twin.reserve(3, 6)  # a copy and a new block; one is free
    assert twin.blocks == parent.blocks
    pool.check([parent, twin])


FAULTS = {
    "a double free": (lambda pool: pool.give(1), "block 1 is given back, but nobody holds it"),
    "a free block shared": (lambda pool: pool.share(1), "block 1 is free"),
    "a foreign block": (lambda pool: pool.give(9), "block 9: this pool has blocks 0 to 3"),
    "a negative block": (lambda pool: pool.count(-1), "block -1: this pool has blocks 0 to 3"),
    "a truncation past the end": (
        lambda pool: BlockTable(pool).truncate(1),
        "truncate to 1: the table ends at 0",
    ),
    "a gap": (lambda pool: BlockTable(pool).reserve(1, 2), "positions 1 to 2: the table ends at 0"),
    "a backward step": (lambda pool: BlockTable(pool).reserve(2, 1), "positions 2 to 1"),
    "tokens without slots": (
        lambda pool: BlockTable(pool).commit([1]),
        "1 tokens to remember: 1 are given, and the table ends at 0",
    ),
    "more tokens than given": (
        lambda pool: BlockTable(pool).commit([], 1),
        "1 tokens to remember: 0 are given",
    ),
    "less than nothing": (lambda pool: pool.take(-1), "-1 blocks: expected 0 or more"),
    "no blocks": (lambda pool: BlockPool(0, 4), "0 blocks of 4"),
    "no slots": (lambda pool: BlockPool(4, 0), "4 blocks of 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_misuse_is_an_error_by_name_and_changes_nothing(fault):
    """B08: a block freed twice would be handed to two."""
    pool = BlockPool(4, 4)
    held = pool.take()
    act, words = FAULTS[fault]
    with pytest.raises(BlockError, match=words) as error:
        act(pool)
    assert isinstance(error.value, SpindleError)
    for block in held:
        pool.give(block)
    pool.check()


def test_a_table_that_holds_blocks_adopts_nothing():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.reserve(0, 1)
    with pytest.raises(BlockError, match="only an empty one adopts"):
        table.adopt([1] * 9)


# --- moving --------------------------------------------------------------------------------------


def test_a_move_keeps_what_is_shared_shared():
    pool, host = BlockPool(8, 4), BlockPool(3, 4)
    parent = BlockTable(pool)
    parent.reserve(0, 8)
    twin = parent.fork()
    twin.reserve(7, 8)
    before = [parent.blocks.copy(), twin.blocks.copy()]
    moved, copies = move([parent, twin], host)
    there = dict(copies)
    assert [t.blocks for t in moved] == [[there[b] for b in table] for table in before]
    assert len(copies) == 3 and host.free == 0 and pool.free == 8
    host.check(moved)
    pool.check([parent, twin])


def test_a_move_goes_to_blocks_of_the_same_size():
    table = BlockTable(BlockPool(8, 4))
    table.reserve(0, 8)
    with pytest.raises(BlockError, match="blocks of 4 into a pool of 2"):
        move([table], BlockPool(8, 2))
    assert len(table.blocks) == 2


def test_a_move_that_does_not_fit_changes_nothing():
    pool, host = BlockPool(8, 4), BlockPool(1, 4)
    table = BlockTable(pool)
    table.reserve(0, 8)
    with pytest.raises(OutOfBlocks):
        move([table], host)
    assert len(table.blocks) == 2 and host.free == 1
    pool.check([table])
