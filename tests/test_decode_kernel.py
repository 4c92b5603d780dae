"""The decode attention kernel, csrc/decode.cu: emulated against its twin, planted faults, mutants.

The bound comes from the arithmetic, as in test_emulator.py: what float32 may make of the exact
result lies between two ends, and rounding to the result's dtype keeps the order of numbers.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from test_emulator import DTYPES, EPS32, ORDERS
from torch import Tensor

from spindle.kernels import build, cuda, emulate, twins

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or build.compiler() is None, reason="no C++ compiler, or no Linux"
    ),
    pytest.mark.usefixtures("own_cache"),
]
GARBAGE = [-1, 10**6, -(2**40)]  # what stands in a table where no block is needed


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, keys, values, tables, lengths


def rows(
    lengths: list[int],
    heads: tuple[int, int, int] = (6, 2, 32),
    C: int = 1,
    P: int = 16,
    capacity: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Parts:
    """Rows in a pool of shuffled blocks: NaN in every slot, garbage in every entry without use."""
    (H, Hk, D), R = heads, len(lengths)
    generator = torch.Generator().manual_seed(sum(lengths) + 31 * C + D)
    B = -(-max(capacity, 1, *lengths) // P)
    blocks = [-(-n // P) for n in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=generator)
    keys, values = torch.full((2, len(order), P, Hk, D), torch.nan, dtype=dtype)
    garbage = torch.randint(len(GARBAGE), (R, B), generator=generator)
    tables = torch.tensor(GARBAGE)[garbage]
    for r, n in enumerate(lengths):
        tables[r, : blocks[r]], order = order[: blocks[r]], order[blocks[r] :]
        slots = tables[r, torch.arange(n) // P] * P + torch.arange(n) % P
        for cache in (keys, values):
            twins.write_kv(cache, slots, torch.randn(n, Hk, D, generator=generator).to(dtype))
    q = 2 * torch.randn(R * C, H, D, generator=generator).to(dtype)
    return q, keys, values, tables, torch.tensor(lengths)


def ends(parts: Parts, scale: float) -> tuple[Tensor, Tensor]:
    """Between which two results lies what float32 may come to, from the twin in float64.

    In units of eps / 2, a score is off by D + 4 times |q| |k| scale, which bounds its size too, and
    score - peak by two more. All that is a factor in a weight, and the weights are in numerator
    and denominator. There too are the sums of a split and of the splits, and eight more steps.
    """
    q, keys, values, tables, lengths = parts
    q, keys, values = (x.double() for x in (q, keys, values))
    exact = twins.paged_attend(q, keys, values, tables, lengths, scale)
    mean_size = twins.paged_attend(q, keys, values.abs(), tables, lengths, scale)
    S, D = tables.shape[1] * keys.shape[1], q.shape[2]
    size = q.norm(dim=-1).max() * keys.nan_to_num(0.0).norm(dim=-1).max() * scale
    off = 2 * ((D + 4 + 2) * size + 256 + S / 256 + 8) * EPS32 / 2 * mean_size
    return (exact - off).to(parts[0].dtype), (exact + off).to(parts[0].dtype)


def assert_is_twin(parts: Parts, scale: float = 0.2) -> Tensor:
    ours = cuda.paged_attend(*parts, scale)
    low, high = ends(parts, scale)
    assert ours.dtype == low.dtype and ours.shape == low.shape
    assert ((low <= ours) & (ours <= high)).all(), (ours - low).abs().max()
    return ours


# --- equal to the twin ---------------------------------------------------------------------------

ALL = list(itertools.product(cuda.HEAD_SIZES, DTYPES, [1, 2, 5, 16]))


@pytest.mark.parametrize(("D", "dtype", "C"), ALL)
def test_every_head_size_and_dtype_with_few_queries_and_many(D, dtype, C):
    """With ragged rows, one shorter than its queries; a thread order from the list, in turn."""
    with emulate.thread_order(*ORDERS[ALL.index((D, dtype, C)) % len(ORDERS)]):
        assert_is_twin(rows([0, 1, 257, 300], (4, 2, D), C, dtype=dtype))


@pytest.mark.parametrize(
    "heads", [(1, 1), (6, 6), (9, 3), (8, 2), (8, 1), (10, 2), (7, 1), (17, 1)]
)
@pytest.mark.parametrize("C", [1, 5])
def test_any_number_of_query_heads_shares_a_key(heads, C, in_order):
    """Tiles that are full, begun and more than one; a row at each end of a split, and full."""
    assert_is_twin(rows([0, 1, 2, 255, 256, 257, 288], (*heads, 32), C, 32))


@pytest.mark.parametrize("P", [1, 7, 8, 16, 256, 300])
def test_any_block_size_one_block_a_row_too_with_nan_in_what_is_unused(P, in_order):
    for C in (1, 3):
        ours = assert_is_twin(rows([0, 1, 255, 256, 257, 300, 9], C=C, P=P))
        assert not ours.isnan().any()


def test_rows_of_many_splits_and_of_few(in_order):
    """B * P decides how many splits there are; what nobody wrote of their results is NaN."""
    assert_is_twin(rows([4100, 1024, 1025, 3, 0], (2, 1, 32), P=16, capacity=5000))
    assert_is_twin(rows([1500, 513, 2, 0], (3, 1, 64), C=5, P=1, dtype=torch.bfloat16))


def test_a_query_that_sees_no_key_has_zeros(in_order):
    for capacity in (0, 700):
        parts = rows([0, 1, 3], C=5, capacity=capacity)
        ours = cuda.paged_attend(*parts, 0.2).view(3, 5, 6, 32)
        blind = torch.tensor([[1] * 5, [1] * 4 + [0], [1, 1, 0, 0, 0]]).bool()
        assert (ours[blind] == 0).all() and (ours[~blind] != 0).all()


def test_no_rows_and_no_blocks_are_no_work():
    q, keys, values, tables, lengths = rows([5])
    assert cuda.paged_attend(q[:0], keys, values, tables[:0], lengths[:0], 0.2).shape == (0, 6, 32)
    ours = cuda.paged_attend(q, keys, values, tables[:, :0], 0 * lengths, 0.2)
    assert (ours == 0).all()


@pytest.mark.parametrize("spread", [60.0, 1e4, 1e30])
def test_scores_far_apart_neither_overflow_nor_lose_the_largest(spread, in_order):
    """The largest of 600, in each split in turn, has all of the weight."""
    for largest in (0, 255, 256, 599):
        keys, values = torch.zeros(2, 600, 1, 1, 32)
        keys[:, 0, 0, 0] = -spread
        keys[largest, 0, 0, 0] = spread
        values[:, 0, 0] = torch.arange(600.0)[:, None]
        q = torch.zeros(1, 1, 32)
        q[..., 0] = 1.0
        ours = cuda.paged_attend(q, keys, values, torch.arange(600)[None], torch.tensor([600]), 1.0)
        assert (ours == largest).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [40, 600])
def test_a_broken_score_is_nan_as_in_the_twin_and_stays_in_its_row(broken, n, in_order):
    """B69: at the first key, in the middle, at the last; for the heads that share the key head."""
    parts = rows([n, n, n, n], P=4)
    q, keys, _, tables, _ = parts
    whole = cuda.paged_attend(*parts, 0.2)
    for r, position in enumerate((0, 21, n - 1)):
        keys[tables[r, position // 4], position % 4, 0, 0] = broken
    q[:3, :3, 0] = 1.0
    ours, twin = cuda.paged_attend(*parts, 0.2), twins.paged_attend(*parts, 0.2)
    assert ours[:3, :3].isnan().all() and torch.equal(ours.isnan(), twin.isnan())
    assert torch.equal(ours[3], whole[3]) and torch.equal(ours[:, 3:], whole[:, 3:])


# --- equal bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("P", [1, 16, 256])
def test_paged_is_contiguous_bit_for_bit(P, dtype, in_order):
    """A static cache is a pool with one block a row; its capacity does not show either."""
    parts = rows([300, 17, 256, 0], C=2, P=P, dtype=dtype)
    q, keys, values, tables, lengths = parts
    ours = cuda.paged_attend(*parts, 0.2)
    for capacity in (300, 900):
        static = torch.full((2, 4, capacity, 2, 32), torch.nan, dtype=dtype)
        for r, n in enumerate(lengths.tolist()):
            slots = tables[r, torch.arange(n) // P] * P + torch.arange(n) % P
            static[0, r, :n], static[1, r, :n] = (
                keys.flatten(0, 1)[slots],
                values.flatten(0, 1)[slots],
            )
        theirs = cuda.paged_attend(q, *static, torch.arange(4)[:, None], lengths, 0.2)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "C"), [((6, 2, 64), 5), ((8, 1, 80), 3), ((9, 3, 32), 16)])
def test_a_querys_bits_depend_on_nothing_beside_it(heads, C, dtype):
    """B29: among other rows and alone, in a chunk and as a step of one, in tiles of any size."""
    q, keys, values, tables, lengths = rows([300, 4, 513], heads, C, dtype=dtype)
    together = cuda.paged_attend(q, keys, values, tables, lengths, 0.2).view(3, C, *heads[::2])
    for r, n in enumerate(lengths.tolist()):
        table = tables[r : r + 1, : -(-n // 16)]
        for c in range(C):
            seen = torch.tensor([n - (C - 1 - c)])
            one = q.view(3, C, *heads[::2])[r, c : c + 1]
            alone = cuda.paged_attend(one, keys, values, table, seen, 0.2)
            assert torch.equal(alone[0], together[r, c])


def test_a_launch_has_nothing_that_depends_on_the_lengths(monkeypatch):
    """The same numbers at every length: a graph that was captured at one may be replayed."""
    calls = []
    monkeypatch.setattr(cuda, "_launch", lambda *arguments: calls.append(arguments))
    q, keys, values, tables, lengths = rows([900, 300])
    for step in (lengths, lengths // 2, 0 * lengths):
        cuda.paged_attend(q, keys, values, tables, step, 0.2)
    shown = [[x.shape if isinstance(x, Tensor) else x for x in call] for call in calls]
    assert shown[0] == shown[1] == shown[2] and len(shown) == 3


# --- what is refused -----------------------------------------------------------------------------


def unaligned(x: Tensor) -> Tensor:
    """The same, from an address between two multiples of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "float64": lambda q, k, v, t, n: (q.double(), k.double(), v.double(), t, n),
    "another dtype": lambda q, k, v, t, n: (q.half(), k, v, t, n),
    "a head size of its own": lambda q, k, v, t, n: (
        *(x[..., :16].contiguous() for x in (q, k, v)),
        *(t, n),
    ),
    "another head size": lambda q, k, v, t, n: (q.repeat(1, 1, 2), k, v, t, n),
    "heads that do not share": lambda q, k, v, t, n: (q[:, :5], k, v, t, n),
    "17 queries": lambda q, k, v, t, n: (q.repeat(17, 1, 1), k, v, t, n),
    "one query and a half": lambda q, k, v, t, n: (q.repeat(2, 1, 1)[:3], k, v, t, n),
    "a pool with gaps": lambda q, k, v, t, n: (q, k[:, ::2], v[:, ::2], t, n),
    "fewer values": lambda q, k, v, t, n: (q, k, v[1:], t, n),
    "keys between two vectors": lambda q, k, v, t, n: (q, unaligned(k), v, t, n),
    "values between two vectors": lambda q, k, v, t, n: (q, k, unaligned(v), t, n),
    "tables in int32": lambda q, k, v, t, n: (q, k, v, t.int(), n),
    "lengths in int32": lambda q, k, v, t, n: (q, k, v, t, n.int()),
    "a length too few": lambda q, k, v, t, n: (q, k, v, t, n[:1]),
    "another device": lambda q, k, v, t, n: (q, k, v, t, n.to("meta")),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_the_kernel_is_not_made_for_is_refused(fault):
    with pytest.raises(cuda.Unfit, match=r"paged_attend: torch\.\w+ \[.*do not go together"):
        cuda.paged_attend(*REFUSED[fault](*rows([3, 5])), 0.2)


@pytest.mark.parametrize(
    "change",
    [
        *({"D": 48}, {"C": 0}, {"C": 17}, {"H": 5}, {"Hk": 0}, {"B": 10**8}, {"R": 32768}),
        *({"dtype": 3}, {"B": 17}),  # the last: two splits, and no room for what they leave
    ],
    ids=str,
)
def test_the_launcher_refuses_what_it_has_no_kernel_for(change):
    """By itself too: nothing is launched."""
    parts = rows([3, 5])
    sizes = {"R": 2, "C": 1, "H": 6, "Hk": 2, "D": 32, "P": 16, "B": 1, "scale": 1.0, "dtype": 0}
    out, emulated = torch.zeros_like(parts[0]), emulate.library_of("decode.cu")

    def launch(**changed: float) -> None:
        arguments = (*parts, out, None, None, *{**sizes, **changed}.values(), None)
        emulate.call(emulated, "spindle_paged_attend", *arguments)

    with pytest.raises(emulate.KernelFault, match="refused its arguments, with status 1"):
        launch(**change)
    assert (out == 0).all()
    launch()
    assert (out != 0).all()


# --- planted faults ------------------------------------------------------------------------------


@pytest.fixture
def quickly_compiled(monkeypatch) -> Iterator[None]:
    """Two of the 48 kernels, and not made fast."""
    flags = ["-O0" if flag == "-O1" else flag for flag in emulate.OF_KERNELS]
    monkeypatch.setattr(emulate, "OF_KERNELS", flags)
    text = emulate.source("decode.cu")
    sizes = text[text.index("  if (D == 64)") : text.index("  return cudaErrorInvalidValue;\n}")]
    with emulate.edited("decode.cu", sizes, ""), emulate.edited("decode.cu", TILE_OF_8, ""):
        with emulate.edited("common.cuh", DTYPE_BF16, ""):
            with emulate.edited("common.cuh", DTYPE_FP16, ""):
                yield


def far_apart(n: int) -> Parts:
    """Scores of hundreds, whole numbers, at which an exponential without a peak overflows."""
    q, keys, values, tables, lengths = rows([n], (4, 1, 32))
    q[..., 1:], keys[..., 0] = 0.0, keys[..., 0] * 400
    return q.round(), keys.round(), values, tables, lengths


TILE_OF_8 = "  if (pairs <= 8) return run(Constant<8>{});\n"
DTYPE_BF16 = "  if (dtype == BFLOAT16) return run(__nv_bfloat16{});\n"
DTYPE_FP16 = "  if (dtype == FLOAT16) return run(__half{});\n"
CASES = [
    rows([0, 1, 40, 256, 257, 700], (6, 2, 32), 1, 16, 800),  # three heads a tile, four splits
    rows([1, 3, 37], (9, 3, 32), 5, 8, 40),  # fifteen pairs a tile, one split
    rows([300, 2, 258], (5, 1, 32), 5, 16, 512),  # two tiles, two splits, not all see the second
    far_apart(600),
]


def sees(parts: Parts) -> bool:
    """Whether the kernel's result is another than the twin's; NaN is."""
    ours, twin = cuda.paged_attend(*parts, 0.25), twins.paged_attend(*parts, 0.25)
    return not torch.allclose(ours, twin, rtol=1e-4, atol=1e-5)


def test_without_a_fault_the_cases_show_none(in_order):
    assert not any(sees(parts) for parts in CASES)


BARRIERS = {  # what comes after each
    "slots and queries": "  __syncthreads();  // slots and queries are there\n",
    "scores": "  __syncthreads();  // so are the scores of all keys\n",
    "peaks": "  __syncthreads();  // the peaks of all warps are there\n",
    "weights": "  __syncthreads();  // and the weights\n",
    "weights read": "  __syncthreads();  // all have read the weights: the sums take their room\n",
    "sums": "  __syncthreads();  // and the sums of all groups\n",
}
MUTANTS = {
    "a barrier deleted": (BARRIERS["sums"], "\n"),
    "a barrier for the warp alone": (BARRIERS["weights read"], "  __syncwarp();\n"),
    "every key is seen by every query": ("key < room.sees[m] ? sum[m] : -INFINITY", "sum[m]"),
    "each query sees one key more": ("p.C - 1 - query", "p.C - 2 - query"),
    "one key too many": (
        "int(min(seen - start, int64_t(SPLIT)))",
        "int(min(seen - start + 1, 256l))",
    ),
    "the last query's length for all": (
        "seen_by(p, tile.row, query_of(p, tile.first + m))",
        "seen_by(p, tile.row, p.C - 1)",
    ),
    "no rescale in the merge": ("expf(lse[split] - peak)", "1.0f"),
    "the merge keeps the peak of a split": ("peak = fmaxf(peak, lse[split])", "peak = lse[split]"),
    "an empty split has an lse of 0": ("blockIdx.z] = -INFINITY", "blockIdx.z] = 0.0f"),
    "lse without the sum": ("peak_of(room, m) + logf(total)", "peak_of(room, m)"),
    "lse without the peak": ("peak_of(room, m) + logf(total)", "logf(total)"),
    "no peak taken off": ("expf(room.scores[key][m] - peak)", "expf(20 * room.scores[key][m])"),
    "-inf minus -inf": ("if (peak == -INFINITY) peak = 0.0f;", ""),
    "a mean without its total": ("room.sees[m] > 0 ? sum / total", "room.sees[m] > 0 ? sum"),
    "the wrong head of the group": (
        "kv_head * group + pair % group",
        "kv_head + pair % group * p.Hk",
    ),
    "the keys of KV head 0": (
        "p.keys + (room.slots[key] * p.Hk + kv_head) * D",
        "p.keys + room.slots[key] * p.Hk * D",
    ),
    "the block of the next page": ("table[j / p.P] * p.P", "table[(j + 1) / p.P] * p.P"),
    "every split has the first keys": ("const int j = start + key", "const int j = key"),
    "blind queries get a mean": ("blind ? 0.0f : sum / total", "sum / total"),
}


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    """By a wrong result or a report, in at least one of the orders; races are not reported here."""
    old, new = MUTANTS[name]
    caught = []
    with emulate.edited("decode.cu", old, new), emulate.races_ignored():
        for order in ORDERS:
            with emulate.thread_order(*order):
                try:
                    caught.append(any(sees(parts) for parts in CASES))
                except emulate.KernelFault:
                    caught.append(True)
    assert any(caught)


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("barrier", BARRIERS)
def test_every_barrier_is_needed_and_a_race_names_both_lines(barrier):
    """In every order: the race is there whether it does harm or not.

    With 16 pairs: in a tile of four, a thread finds the scores that it put there itself.
    """
    place = r"(decode\.cu|common\.cuh):\d+(, from decode\.cu:\d+)*"
    race = (
        rf"{place}: thread .* in block .* (reads|writes) shared memory that thread .* "
        rf"(read|wrote) at {place}, and no barrier is between them"
    )
    if barrier == "slots and queries":  # a key that is looked for at no slot comes first
        race += rf"|{place}: thread .* reads 16 bytes from byte .* of a tensor, which has \d+"
    with emulate.edited("decode.cu", BARRIERS[barrier], "\n"):
        for order in ORDERS:
            with emulate.thread_order(*order), pytest.raises(emulate.KernelFault) as fault:
                cuda.paged_attend(*CASES[1], 0.25)
            assert re.fullmatch(race, str(fault.value)), str(fault.value)


def line_of(code: str) -> int:
    text = emulate.source("decode.cu")
    assert text.count(code) == 1
    return text[: text.index(code)].count("\n") + 1


def test_a_length_one_past_the_table_is_reported(in_order):
    """It would read the table of the next row; behind the last one there is none."""
    q, keys, values, tables, lengths = rows([3, 32])
    report = (
        rf"^decode\.cu:{line_of('table[j / p.P]')}, from .*: thread \(32, 0, 0\) in block "
        r"\(0, [23], 0\) reads 8 bytes from byte -?\d+ on of a tensor, which has \d+$"
    )
    with pytest.raises(emulate.KernelFault, match=report):
        cuda.paged_attend(q, keys, values, tables, lengths + 1, 0.2)


def test_a_block_beyond_the_pool_is_reported(in_order):
    q, keys, values, tables, lengths = rows([3, 32])
    tables[0, 0] = len(keys)
    with pytest.raises(
        emulate.KernelFault, match=r"^common.cuh:\d+, from decode\.cu:.* reads \d+ bytes"
    ):
        cuda.paged_attend(q, keys, values, tables, lengths, 0.2)
