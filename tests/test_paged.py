"""The paged cache against the contiguous one: whatever the blocks, the chunks and the tables."""

import random
from itertools import pairwise

import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spindle import kernels
from spindle.errors import OutOfBlocks
from spindle.kernels import build, native, twins
from spindle.kvcache.blocks import BlockTable, move
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.kvcache.paged import PagedKV, _at_once
from spindle.model.weights import random_model

L, H, HK, D, V = 2, 6, 2, 8, 50
CONFIG = shapes.llama(
    vocab_size=V,
    num_hidden_layers=L,
    num_attention_heads=H,
    num_key_value_heads=HK,
    head_dim=D,
    max_position_embeddings=256,
)
MODEL = random_model(CONFIG, dtype=torch.float64)


def paged(num_blocks: int, block_size: int, seed: int = 0, **options: object) -> PagedKV:
    """A cache full of NaN, whose pool hands out its blocks in a shuffled order."""
    kv = PagedKV(CONFIG, num_blocks, block_size, torch.float64, **options)
    random.Random(seed).shuffle(kv.pool._free)
    for cache in (kv.keys, kv.values, kv._host_keys, kv._host_values):
        cache.fill_(torch.nan)
    return kv


def ids_of(row: int, start: int, count: int) -> list[int]:
    return [(7 * row + 3 * p + p * p) % V for p in range(start, start + count)]


def step(kv: PagedKV, tables: dict[int, BlockTable], chunks: list, batched: bool) -> Tensor:
    """One step of the model on the paged cache: reserve, copy, run -> hidden [T, E]."""
    for row, start, count in chunks:
        kv.copy(tables[row].reserve(start, start + count))
    view = kv.view(StepIndex.of(chunks), [tables[row] for row, _, _ in chunks])
    view.batched = batched
    return MODEL(torch.tensor([i for chunk in chunks for i in ids_of(*chunk)]), view)


def step_contiguous(kv: ContiguousKV, chunks: list) -> Tensor:
    ids = torch.tensor([i for chunk in chunks for i in ids_of(*chunk)])
    return MODEL(ids, kv.view(StepIndex.of(chunks)))


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Steps of up to four sequences, in chunks of 1 to 9 tokens, some of them left out of some."""
    lengths, steps = [0] * draw(st.integers(1, 4)), []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.permutations(range(len(lengths))))
        counts = draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 9]), min_size=1, max_size=len(rows)))
        chunks = [(row, lengths[row], n) for row, n in zip(rows, counts, strict=False)]
        for row, _, n in chunks:
            lengths[row] += n
        steps.append(chunks)
    return steps


@settings(max_examples=60)
@given(schedules(), st.sampled_from([1, 2, 3, 4, 7, 16, 64]), st.integers(0, 5))
def test_paged_is_contiguous(steps, block_size, seed):
    """B15, B18. Bit for bit where chunks gather; within 1e-9 where the decode rows are one op."""
    contiguous = ContiguousKV(CONFIG, torch.float64)
    for batched in (False, True):
        kv = paged(-(-220 // block_size), block_size, seed)
        tables = {row: BlockTable(kv.pool) for row in range(4)}
        for chunks in steps:
            ours = step(kv, tables, chunks, batched)
            expected = step_contiguous(contiguous, chunks)
            assert torch.equal(ours, expected) if not batched else True
            assert (ours - expected).abs().max() < 1e-9
            assert torch.equal(MODEL.logits(ours).argmax(-1), MODEL.logits(expected).argmax(-1))
        kv.pool.check(tables.values())


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 64])
def test_any_chunking_gives_what_one_pass_gives(block_size):
    whole = step_contiguous(ContiguousKV(CONFIG, torch.float64), [(0, 0, 40)])
    for sizes in ([40], [1] * 40, [16, 16, 8], [39, 1], [7, 1, 1, 20, 11]):
        kv, got, at = paged(64, block_size), [], 0
        tables = {0: BlockTable(kv.pool)}
        for size in sizes:
            got.append(step(kv, tables, [(0, at, size)], True))
            at += size
        assert (torch.cat(got) - whole).abs().max() < 1e-9


def test_forks_write_apart_and_share_what_they_do_not_write():
    """B13: after 13 tokens, four branches: each goes on as if it were alone."""
    kv = paged(16, 4)
    parent = BlockTable(kv.pool)
    tables = {0: parent}
    step(kv, tables, [(0, 0, 13)], True)
    tables |= {row: parent.fork() for row in (1, 2, 3)}
    copied = [kv.pool.free]
    hidden = []
    for row in range(4):
        kv.copy(tables[row].reserve(13, 14))
        view = kv.view(StepIndex.of([(row, 13, 1)]), [tables[row]])
        hidden.append(MODEL(torch.tensor([40 + row]), view))
        copied.append(kv.pool.free)
    assert [a - b for a, b in pairwise(copied)] == [1, 1, 1, 0]
    for row in range(4):
        ids = torch.tensor([*ids_of(0, 0, 13), 40 + row])
        alone = MODEL(ids, ContiguousKV(CONFIG, torch.float64).view(StepIndex.of([(0, 0, 14)])))
        assert (hidden[row][0] - alone[-1]).abs().max() < 1e-9
    kv.pool.check(tables.values())


def test_a_swapped_sequence_comes_back_as_it_was():
    kv = paged(8, 4, host_blocks=6)
    tables = {0: BlockTable(kv.pool)}
    step(kv, tables, [(0, 0, 9)], True)
    tables[1] = tables[0].fork()
    step(kv, tables, [(0, 9, 2), (1, 9, 1)], True)
    rest = step_contiguous(ContiguousKV(CONFIG, torch.float64), [(0, 0, 14)])[11:]
    away, copies = move([tables[0], tables[1]], kv.host)
    kv.swap_out(copies)
    assert kv.pool.free == 8 and kv.host.free == 2  # two full blocks shared, a third of each
    for cache in (kv.keys, kv.values):
        cache.fill_(torch.nan)
    (tables[0], tables[1]), copies = move(away, kv.pool)
    kv.swap_in(copies)
    for cache in (kv._host_keys, kv._host_values):
        assert kv.host.free == 6
        cache.fill_(torch.nan)
    assert (step(kv, tables, [(0, 11, 3)], True) - rest).abs().max() < 1e-9
    kv.pool.check(tables.values())
    kv.host.check()


def test_a_swap_that_does_not_fit_changes_nothing():
    kv = paged(8, 4, host_blocks=1)
    tables = {0: BlockTable(kv.pool)}
    step(kv, tables, [(0, 0, 9)], True)
    with pytest.raises(OutOfBlocks, match="3 blocks needed, 1 of 1 free"):
        move([tables[0]], kv.host)
    whole = step_contiguous(ContiguousKV(CONFIG, torch.float64), [(0, 0, 10)])
    assert (step(kv, tables, [(0, 9, 1)], True)[0] - whole[-1]).abs().max() < 1e-9


def test_the_bytes_of_a_pool_are_known():
    kv = PagedKV(CONFIG, 10, 16, torch.float32)
    assert kv.nbytes() == 2 * L * (10 + 1) * 16 * HK * D * 4  # and the scratch block


# --- the op --------------------------------------------------------------------------------------


def paged_rows(lengths: list[int], P: int, heads: tuple[int, int, int], dtype: torch.dtype):
    """q, keys, values, tables, lengths: NaN wherever nothing belongs to a row."""
    H, Hk, D = heads
    generator = torch.Generator().manual_seed(sum(lengths) + P)
    width = max(-(-n // P) for n in lengths)
    N = len(lengths) * width + 1
    order = torch.randperm(N - 1, generator=generator) + 1
    tables = torch.zeros(len(lengths), width, dtype=torch.int64)
    keys, values = torch.full((2, N, P, Hk, D), torch.nan, dtype=dtype)
    for r, n in enumerate(lengths):
        tables[r, : -(-n // P)] = order[r * width : r * width + -(-n // P)]
        for cache in (keys, values):
            new = torch.randn(n, Hk, D, generator=generator, dtype=torch.float64).to(dtype)
            slots = tables[r, torch.arange(n) // P] * P + torch.arange(n) % P
            kernels.write_kv(cache, slots, new)
    q = 2 * torch.randn(len(lengths), H, D, generator=generator, dtype=torch.float64).to(dtype)
    return q, keys, values, tables, torch.tensor(lengths)


SHAPES = [(4, 4, 8), (6, 2, 16), (9, 3, 64), (5, 1, 7), (2, 1, 20), (4, 2, 128)]


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("P", [1, 3, 16])
def test_paged_attend_is_attend_row_by_row(heads, P):
    lengths = [1, 2, 15, 16, 17, 33, 50]
    q, keys, values, tables, n = paged_rows(lengths, P, heads, torch.float64)
    ours = twins.paged_attend(q, keys, values, tables, n, 0.3)
    for r, length in enumerate(lengths):
        k, v = (x[tables[r]].flatten(0, 1)[:length] for x in (keys, values))
        expected = twins.attend(q[r : r + 1], k, v, length - 1, 0.3)
        assert (ours[r] - expected[0]).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["twin", "native"])
@pytest.mark.parametrize("C", [2, 5, 16])
def test_several_queries_a_row_are_the_last_of_its_sequence(C, dtype):
    """As `attend` has them; those before the first key have zeros. Unused entries are any number.

    In float32 it is the native form, if it is here: with the bits of C rows of one query each.
    """
    lengths = [1, 4, 15, 17, 50]
    _, keys, values, tables, n = paged_rows(lengths, 4, (6, 2, 16), dtype)
    q = torch.randn(len(lengths), C, 6, 16, dtype=dtype, generator=torch.Generator().manual_seed(C))
    tables[torch.arange(tables.shape[1]) * 4 >= n[:, None]] = -1
    together = kernels.paged_attend(q.flatten(0, 1), keys, values, tables, n, 0.3).view(q.shape)
    for r, length in enumerate(lengths):
        slots = tables[r, torch.arange(length) // 4] * 4 + torch.arange(length) % 4
        k, v = (x.flatten(0, 1)[slots] for x in (keys, values))
        blind = max(C - length, 0)
        assert (together[r, :blind] == 0).all()
        expected = twins.attend(q[r, blind:], k, v, max(length - C, 0), 0.3)
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        assert (together[r, blind:] - expected).abs().max() < bound
    rows = tables.repeat_interleave(C, 0), (n[:, None] + torch.arange(1 - C, 1)).flatten()
    alone = kernels.paged_attend(q.flatten(0, 1), keys, values, *rows, 0.3).view(q.shape)
    if dtype == torch.float32 and native.available():
        assert torch.equal(alone, together)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, t, n: (q, k, v, t.int(), n.int()),
        lambda q, k, v, t, n: (q, k, v, t[:1], n),
        lambda q, k, v, t, n: (q[..., :4], k, v, t, n),
        lambda q, k, v, t, n: (q[:, :3], k, v, t, n),
        lambda q, k, v, t, n: (q, k, v[:2], t, n),
        lambda q, k, v, t, n: (q, k.double(), v.double(), t, n),
    ],
)
def test_what_does_not_go_together_is_refused(change):
    parts = paged_rows([3, 5], 4, (4, 2, 8), torch.float32)
    if native.available():
        with pytest.raises(TypeError, match=r"paged_attend: .* do not go together"):
            kernels.paged_attend(*change(*parts), 0.3)


needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")


@needs_native
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("P", [1, 3, 16])
def test_the_native_form_is_the_twin(heads, P):
    """A dot product of D, an exponential off by 2e-7, and sums of S weights: in float32."""
    lengths = [1, 2, 15, 16, 17, 33, 50, 300]
    q, keys, values, tables, n = paged_rows(lengths, P, heads, torch.float32)
    ours = kernels.paged_attend(q, keys, values, tables, n, 0.3)
    exact = twins.paged_attend(q.double(), keys.double(), values.double(), tables, n, 0.3)
    D, largest = heads[2], torch.nan_to_num(values).abs().max()
    scores = 0.3 * D * float(q.abs().max() * torch.nan_to_num(keys).abs().max())
    eps = torch.finfo(torch.float32).eps
    bound = (D * eps * scores + 4 * eps + max(lengths) * eps) * 2 * largest
    assert not ours.isnan().any()
    assert (ours - exact).abs().max() <= bound
    assert (ours - exact).abs().max() < 2e-5


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_attention_does_not_depend_on_the_rows_beside_it(threads):
    """B29: bit for bit, alone and among others, with one thread and with two."""
    lengths = [1, 16, 40, 7, 300]
    q, keys, values, tables, n = paged_rows(lengths, 16, (9, 3, 64), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = kernels.paged_attend(q, keys, values, tables, n, 0.125)
        for r in range(len(lengths)):
            one = slice(r, r + 1)
            width = -(-lengths[r] // 16)
            alone = kernels.paged_attend(
                q[one], keys, values, tables[one, :width].contiguous(), n[one], 0.125
            )
            assert torch.equal(alone[0], together[r])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("spread", [0.0, 1.0, 60.0, 1e4])
def test_the_native_softmax_holds_at_any_spread(spread):
    """Scores far apart: what float32 has no normal number for is nothing, nothing overflows."""
    P, S, D = 4, 37, 16
    keys = torch.linspace(-1, 1, S)[:, None, None] * torch.ones(1, D)
    cache = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, 3)).view(10, P, 1, D).contiguous()
    q, tables = torch.full((1, 1, D), spread), torch.arange(10)[None]
    ours = kernels.paged_attend(q, cache, cache, tables, torch.tensor([S]), 1.0)
    exact = twins.paged_attend(
        q.double(), cache.double(), cache.double(), tables, torch.tensor([S]), 1.0
    )
    assert (ours - exact).abs().max() < 1e-5


@needs_native
@pytest.mark.parametrize("below", [88.0, 104.0, 1000.0, 1e30, torch.inf])
def test_a_score_far_below_the_largest_weighs_nothing(below):
    """Nothing times a value of 3e38 is nothing; a floor under the exponential would be 5."""
    keys, values = torch.zeros(2, 1, 4, 1, 16)
    keys[0, 1, 0, 0] = -below
    values[0, :2, 0] = torch.tensor([1.0, 3e38])[:, None]
    q, table = torch.zeros(1, 1, 16), torch.zeros(1, 1, dtype=torch.int64)
    q[..., 0] = 1
    ours = kernels.paged_attend(q, keys, values, table, torch.tensor([2]), 1.0)
    assert torch.equal(ours, torch.ones(1, 1, 16))


@needs_native
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_is_nan_as_in_the_twin_and_alone(broken):
    """B69: a score that is no number, at the first key, in the middle, at the last."""
    lengths = [20, 20, 20, 33]
    q, keys, values, tables, n = paged_rows(lengths, 4, (4, 2, 16), torch.float32)
    whole = kernels.paged_attend(q, keys, values, tables, n, 0.3)
    for r, position in enumerate((0, 9, 19)):
        keys[tables[r, position // 4], position % 4, 0, 0] = broken
    q[:3, :2, 0] = 1.0
    ours = kernels.paged_attend(q, keys, values, tables, n, 0.3)
    assert ours[:3, :2].isnan().all()  # the heads that share the key head
    assert torch.equal(ours[:3, 2:], whole[:3, 2:]) and torch.equal(ours[3], whole[3])
    expected = twins.paged_attend(q, keys, values, tables, n, 0.3)
    assert torch.equal(ours.isnan(), expected.isnan())


@pytest.mark.parametrize("rows", [2, 40])
def test_a_row_of_length_0_is_zeros_and_the_others_are_as_without_it(rows):
    """Nothing to attend to; a padded row may have that length, and must not read anything."""
    torch.manual_seed(0)
    q, cache = torch.randn(rows, 6, 16), torch.randn(8, 4, 2, 16)
    tables = torch.arange(8).expand(rows, 8).contiguous()
    n = torch.arange(rows) % 5
    for form in (kernels.paged_attend, twins.paged_attend):
        ours = form(q, cache, cache, tables, n, 0.3)
        assert (ours[n == 0] == 0).all()
        some = n > 0
        alone = form(q[some], cache, cache, tables[some], n[some], 0.3)
        assert torch.allclose(ours[some], alone, atol=1e-6)


@pytest.mark.parametrize("few", [1, 5, 16])
def test_the_tokens_of_a_short_chunk_are_rows_of_one_table_where_keys_are_read_in_place(
    few, monkeypatch
):
    """As `paged_attend` is one op for all of them, whatever the numbers; longer ones are gathered.

    The place says whether keys are read in place: here the twin stands for the form that does.
    """
    kv, other = paged(60, 4), ContiguousKV(CONFIG, torch.float64)
    tables = {row: BlockTable(kv.pool) for row in range(4)}
    before = [(0, 0, 5), (1, 0, 9), (3, 0, 2)]
    step(kv, tables, before, True)
    step_contiguous(other, before)
    monkeypatch.setattr("spindle.kvcache.paged.FEW", few)
    monkeypatch.setattr(kernels, "attends_in_place", lambda cache, queries=1: True)
    op, rows, gathered = kernels.paged_attend, [], []
    attend = kernels.attend
    monkeypatch.setattr(
        kernels, "paged_attend", lambda q, *rest: rows.append(len(q)) or op(q, *rest)
    )
    monkeypatch.setattr(
        kernels, "attend", lambda q, *rest: gathered.append(len(q)) or attend(q, *rest)
    )
    chunks = [(3, 2, 6), (0, 5, 1), (2, 0, 17), (1, 9, 4)]
    ours = step(kv, tables, chunks, True)
    counts = [count for _, _, count in chunks]
    assert rows == [sum(n for n in counts if n <= few)] * L
    assert gathered == [n for n in counts if n > few] * L
    assert (ours - step_contiguous(other, chunks)).abs().max() < 1e-9


@pytest.mark.parametrize("alone", [True, False])
def test_single_tokens_are_one_op_whatever_stands_beside_them(alone, monkeypatch):
    """The rows of a step that are decodes go through paged_attend once a layer, all of them."""
    kv = paged(32, 4)
    tables = {row: BlockTable(kv.pool) for row in range(3)}
    step(kv, tables, [(0, 0, 5), (1, 0, 9)], True)
    op, rows = kernels.paged_attend, []
    monkeypatch.setattr(
        kernels, "paged_attend", lambda q, *rest: rows.append(len(q)) or op(q, *rest)
    )
    chunks = [(0, 5, 1), (1, 9, 1)] if alone else [(0, 5, 1), (2, 0, 3), (1, 9, 1)]
    ours = step(kv, tables, chunks, True)
    assert rows == [2] * L
    other = ContiguousKV(CONFIG, torch.float64)
    step_contiguous(other, [(0, 0, 5), (1, 0, 9)])
    assert (ours - step_contiguous(other, chunks)).abs().max() < 1e-9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_copies_are_done_as_if_one_after_the_other(pairs):
    """A block may be given back by its copier, and be the next one's target in the same step."""
    kv = PagedKV(CONFIG, 10, 2, torch.float64)
    for cache in (kv.keys, kv.values):
        cache.copy_(torch.arange(11.0)[None, :, None, None, None].expand_as(cache))
    right = kv.keys.clone()
    for source, target in pairs:
        right[:, target] = right[:, source]
    kv.copy(pairs)
    assert torch.equal(kv.keys, right)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_copies_at_once_do_not_touch_each_other(pairs):
    """On a GPU the copies of a run are done in any order: none uses what another one writes."""
    runs = _at_once(pairs)
    assert [pair for run in runs for pair in run] == pairs
    for run in runs:
        sources, targets = [s for s, _ in run], [t for _, t in run]
        assert len(set(targets)) == len(targets)
        for n, target in enumerate(targets):
            assert target not in sources[:n] + sources[n + 1 :]
