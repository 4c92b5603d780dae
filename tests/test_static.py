"""The static cache against the contiguous one, and a step that is the same ops every time."""

from collections.abc import Callable

import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spindle.decode.capture import CaptureError, check_same
from spindle.errors import RequestError
from spindle.kernels import build, native, twins
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.kvcache.static import StaticKV, StaticView, attend_chunks
from spindle.model.layers import Model
from spindle.model.weights import random_model

V, POSITIONS = 97, 64  # of the models in `tiny_models`
FAMILIES = ("gpt2", "llama")  # the second has two query heads to a key head
SMALL = shapes.llama(num_hidden_layers=2)


def static(model: Model, rows: int, capacity: int) -> StaticKV:
    """A cache full of NaN."""
    kv = StaticKV(model.config, rows, capacity, model.dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    return kv


def ids_of(salt: int, row: int, start: int, count: int) -> list[int]:
    """Other tokens after a rollback than before it: `salt` counts the steps."""
    return [(7 * row + 3 * p + p * p + 11 * salt) % V for p in range(start, start + count)]


class Pair:
    """The same steps on a static cache and on a contiguous one; every step is compared."""

    def __init__(self, model: Model, rows: int, capacity: int) -> None:
        self.model, self.kv = model, static(model, rows, capacity)
        self.oracle = ContiguousKV(model.config, model.dtype)
        self.lengths = [0] * rows
        self.seq_lens = torch.zeros(rows, dtype=torch.int64)
        self.views: dict[int, StaticView] = {}  # one a chunk size, used again at every step
        self.steps = 0

    def prefill(self, row: int, count: int) -> None:
        start = self.lengths[row]
        self._compare([(row, start, count)], self.kv.prefill(row, start, count))

    def chunk(self, count: int) -> None:
        """`count` tokens on top of every row."""
        self.kv.check_room(self.lengths, count)
        if count not in self.views:
            self.views[count] = self.kv.chunk(self.seq_lens, count)
        chunks = [(row, length, count) for row, length in enumerate(self.lengths)]
        self._compare(chunks, self.views[count].begin())

    def rewind(self, row: int, length: int) -> None:
        self.lengths[row] = length
        self.seq_lens[row] = length

    def _compare(self, chunks: list[tuple[int, int, int]], view) -> None:
        self.steps += 1
        ids = torch.tensor([i for chunk in chunks for i in ids_of(self.steps, *chunk)])
        index = StepIndex.of(chunks)
        ours = self.model.logits(self.model(ids, view))
        expected = self.model.logits(self.model(ids, self.oracle.view(index)))
        assert torch.equal(view.positions, index.position)
        assert (ours - expected).abs().max() < 1e-9
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))
        for row, start, count in chunks:
            self.rewind(row, start + count)

    @property
    def room(self) -> int:
        return self.kv.capacity - max(self.lengths)


# --- static is contiguous ------------------------------------------------------------------------

OPS = st.one_of(
    st.tuples(st.just("prefill"), st.integers(0, 3), st.integers(1, 12)),
    st.tuples(st.just("chunk"), st.sampled_from([1, 1, 1, 2, 3, 6]), st.just(0)),
    st.tuples(st.just("rewind"), st.integers(0, 3), st.floats(0, 1)),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(rows=st.integers(1, 4), capacity=st.integers(1, POSITIONS), ops=st.lists(OPS, max_size=12))
def test_static_is_contiguous(tiny_models, family, rows, capacity, ops):
    """B15, B18: any prefills, decodes, chunks and rewinds, ragged rows, a cache full of NaN."""
    pair = Pair(tiny_models[family], rows, capacity)
    for name, first, second in ops:
        if name == "chunk":
            if first <= pair.room:
                pair.chunk(first)
            continue
        row = first % rows
        if name == "rewind":
            pair.rewind(row, int(second * pair.lengths[row]))
        elif second <= capacity - pair.lengths[row]:
            pair.prefill(row, second)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 14, 15, 16])
def test_a_row_is_filled_to_its_last_slot(tiny_models, family, prompt):
    """B18: prompts around the capacity, which is used up to the last token, and no further."""
    pair = Pair(tiny_models[family], 1, 16)
    pair.prefill(0, prompt)
    while pair.room:
        pair.chunk(1)
    with pytest.raises(RequestError, match=r"row 0 has 16 tokens and room for 0 more, not for 1"):
        pair.chunk(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_contiguous_cache(tiny_models, family):
    """B18: prompts of 1 to 40 tokens, each a row, to the end of the capacity."""
    model, capacity, prompts = tiny_models[family], POSITIONS, range(1, 41)
    kv, oracle = static(model, len(prompts), capacity), ContiguousKV(model.config, model.dtype)
    seq_lens, lengths = torch.tensor(prompts), list(prompts)
    view, after = kv.decode(seq_lens), []
    for row, length in enumerate(lengths):
        ids = torch.tensor(ids_of(0, row, 0, length))
        hidden = [model(ids, kv.prefill(row, 0, length))]
        hidden.append(model(ids, oracle.view(StepIndex.of([(row, 0, length)]))))
        after.append([model.logits(h[-1:]).argmax(-1) for h in hidden])
    ours, expected = (torch.cat(tokens) for tokens in zip(*after, strict=True))
    for _ in range(capacity - max(prompts)):
        assert torch.equal(ours, expected)
        ours = model.logits(model(ours, view.begin())).argmax(-1)
        index = StepIndex.of([(row, length, 1) for row, length in enumerate(lengths)])
        expected = model.logits(model(expected, oracle.view(index))).argmax(-1)
        seq_lens += 1
        lengths = [length + 1 for length in lengths]
    assert torch.equal(ours, expected) and max(lengths) == capacity


@pytest.mark.parametrize("count", [1, 3])
def test_rejected_tokens_are_never_read_again(tiny_models, count):
    """B15: what a rewind left behind is NaN here, in every row."""
    pair = Pair(tiny_models["llama"], 3, 32)
    for row, length in enumerate((4, 9, 17)):
        pair.prefill(row, length)
    pair.chunk(6)
    for row, length in enumerate((4, 11, 20)):
        pair.rewind(row, length)
        pair.kv.keys[:, row, length:] = torch.nan
        pair.kv.values[:, row, length:] = torch.nan
    pair.chunk(count)
    pair.chunk(count)


def test_fewer_rows_than_the_cache_has_may_step(tiny_models):
    """The first R rows, by a slice of the lengths: the others are neither read nor written."""
    for count in (1, 2):
        pair = Pair(tiny_models["llama"], 4, 32)
        for row in range(4):
            pair.prefill(row, 3 + 5 * row)
        rest = pair.kv.keys[:, 2:].clone()
        pair.lengths, pair.seq_lens = pair.lengths[:2], pair.seq_lens[:2]
        pair.chunk(count)
        assert torch.equal(pair.kv.keys[:, 2:].nan_to_num(7), rest.nan_to_num(7))


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_that_is_full_and_steps_on_touches_no_other(tiny_models, count):
    """A row that has ended stays in the batch; its length may grow past the capacity."""
    model, kv = tiny_models["gpt2"], static(tiny_models["gpt2"], 3, 16)
    oracle, lengths = ContiguousKV(model.config, model.dtype), [5, 16, 7]
    for row, length in enumerate(lengths):
        ids = torch.tensor(ids_of(0, row, 0, length))
        model(ids, kv.prefill(row, 0, length))
        model(ids, oracle.view(StepIndex.of([(row, 0, length)])))
    seq_lens = torch.tensor(lengths)
    view = kv.chunk(seq_lens, count)
    for _ in range(3):
        ids = [torch.tensor(ids_of(0, row, seq_lens[row], count)) for row in range(3)]
        hidden = model(torch.cat(ids), view.begin()).split(count)
        assert int(view.positions.max()) == 15
        for row in (0, 2):
            index = StepIndex.of([(row, int(seq_lens[row]), count)])
            assert (hidden[row] - model(ids[row], oracle.view(index))).abs().max() < 1e-9
        seq_lens += count


def test_a_fork_goes_on_by_itself(tiny_models):
    pair = Pair(tiny_models["llama"], 3, 16)
    pair.prefill(0, 6)
    for twin in (1, 2):
        pair.kv.fork(0, twin)
        pair.oracle.fork(0, twin)
        pair.rewind(twin, 6)
    for count in (1, 2, 1):
        pair.chunk(count)


def test_a_layer_writes_to_itself_alone():
    kv = StaticKV(SMALL, 2, 8, torch.float64)
    for cache in (kv.keys, kv.values):
        cache.zero_()
    view = kv.decode(torch.tensor([3, 5])).begin()
    ones = torch.ones(2, SMALL.num_kv_heads, SMALL.head_dim, dtype=torch.float64)
    view.write(1, ones, 2 * ones)
    for cache, value in ((kv.keys, 1), (kv.values, 2)):
        assert cache.nonzero()[:, :3].unique(dim=0).tolist() == [[1, 0, 3], [1, 1, 5]]
        assert (cache[1, 0, 3] == value).all() and (cache[1, 1, 5] == value).all()


# --- float32 on a CPU, where decode rows and chunks are one native op ----------------------------

needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")


def drive(kv: StaticKV, lengths: list[int], count: int, q: Tensor, scale: float = 0.25) -> Tensor:
    """The attention of one chunk on rows that hold random keys up to their lengths, then NaN."""
    generator = torch.Generator().manual_seed(3)
    for cache in (kv.keys, kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator, dtype=torch.float64))
        for row, length in enumerate(lengths):
            cache[:, row, length:] = torch.nan
    view = kv.chunk(torch.tensor(lengths), count).begin()
    shape = (2, len(q), kv.keys.shape[3], kv.keys.shape[4])
    k, v = torch.randn(shape, generator=generator, dtype=torch.float64).to(q.dtype)
    view.write(1, k, v)
    return view.attend(1, q, scale)


@needs_native
@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_native_form_gives_what_the_plain_one_gives(count):
    lengths = [0, 1, 15, 26]
    shape = (len(lengths) * count, SMALL.num_heads, SMALL.head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    ours = drive(StaticKV(SMALL, 4, 32, torch.float32), lengths, count, q)
    exact = drive(StaticKV(SMALL, 4, 32, torch.float64), lengths, count, q.double())
    assert (ours - exact).abs().max() < 2e-5  # as of the op itself


@needs_native
def test_a_chunk_has_the_bits_of_its_tokens_one_by_one():
    """A draft that is verified in a chunk is judged by the logits that plain decoding has."""
    model = random_model(SMALL, dtype=torch.float32)
    hidden = []
    for sizes in ([6], [1] * 6, [2, 1, 3]):
        kv, seq_lens, got = static(model, 2, 16), torch.tensor([2, 9]), []
        for row, length in enumerate(seq_lens.tolist()):
            model(torch.tensor(ids_of(0, row, 0, length)), kv.prefill(row, 0, length))
        for size in sizes:
            ids = [i for row in range(2) for i in ids_of(0, row, int(seq_lens[row]), size)]
            out = model(torch.tensor(ids), kv.chunk(seq_lens, size).begin())
            got.append(out.view(2, size, -1))
            seq_lens += size
        hidden.append(torch.cat(got, dim=1))
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3), (5, 1)])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_folded_groups_are_attend_row_by_row(dtype, heads, count):
    """The op by itself: every way to share key heads, NaN from each row's last query on."""
    (H, Hk), D, S, starts = heads, 8, 20, [0, 1, 12, 13]
    generator = torch.Generator().manual_seed(H)
    keys, values = torch.randn(2, 4, S, Hk, D, generator=generator, dtype=torch.float64).to(dtype)
    q = torch.randn(4 * count, H, D, generator=generator, dtype=torch.float64).to(dtype)
    at = torch.tensor(starts)[:, None] + torch.arange(count)
    for row, start in enumerate(starts):
        keys[row, start + count :] = values[row, start + count :] = torch.nan
    ours = attend_chunks(q, keys, values, torch.arange(S) > at[:, :, None], 0.4)
    assert ours.dtype == dtype
    for row, start in enumerate(starts):
        k, v = (x[row, : start + count] for x in (keys, values))
        part = slice(row * count, (row + 1) * count)
        expected = twins.attend(q[part], k, v, start, 0.4)
        bound = 1e-12 if dtype == torch.float64 else 2**-7  # of a result below 2: one rounding
        assert (ours[part] - expected).abs().max() <= bound


# --- refusals ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_is_written(tiny_models):
    kv = static(tiny_models["llama"], 2, 16)
    with pytest.raises(RequestError, match=r"row 1 has 10 tokens and room for 6 more, not for 7"):
        kv.prefill(1, 10, 7)
    with pytest.raises(RequestError, match=r"row 1 has 14 tokens .* capacity is 16 tokens a row"):
        kv.check_room([13, 14], 3)
    for row in (-1, 2):
        with pytest.raises(RequestError, match=rf"row {row}: the cache has rows 0 to 1"):
            kv.prefill(row, 0, 1)
    kv.check_room([13, 13], 3)
    kv.check_room([], 99)
    assert kv.keys.isnan().all() and kv.values.isnan().all()


@pytest.mark.parametrize(("rows", "capacity"), [(0, 4), (4, 0), (-1, 4)])
def test_a_cache_of_nothing_is_refused(rows, capacity):
    with pytest.raises(RequestError, match="expected at least 1 of each"):
        StaticKV(SMALL, rows, capacity, torch.float32)


@pytest.mark.parametrize(
    "seq_lens",
    [
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ],
)
def test_lengths_that_are_no_lengths_are_refused(seq_lens):
    with pytest.raises(TypeError, match=r"expected torch.int64 \[1 to 2\] on cpu"):
        StaticKV(SMALL, 2, 8, torch.float32).decode(seq_lens)


def test_the_bytes_of_a_cache_are_known():
    """B77: the shape uses head_dim, which here is not width / heads."""
    assert StaticKV(SMALL, 3, 10, torch.bfloat16).nbytes() == 2 * 2 * 3 * 10 * 2 * 16 * 2


# --- every step is the same ----------------------------------------------------------------------


def step_of(model: Model, view_of: Callable[..., StaticView], count: int) -> Callable[[], None]:
    """Begin, the model, the next tokens, the lengths' advance: three rows of different lengths."""
    kv, seq_lens, tokens = static(model, 3, 40), torch.tensor([1, 6, 15]), torch.arange(3 * count)
    for row, length in enumerate(seq_lens.tolist()):
        model(torch.tensor(ids_of(0, row, 0, length)), kv.prefill(row, 0, length))
    view = view_of(kv, seq_lens, count)

    def step() -> None:
        tokens.copy_(model.logits(model(tokens, view.begin())).argmax(-1))
        seq_lens.add_(count)

    return step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 4])
def test_every_step_is_the_same_ops_on_the_same_shapes(tiny_models, family, count):
    log = check_same(step_of(tiny_models[family], StaticKV.chunk, count), times=6)
    assert log.counts()["spindle.write_kv"] == 2 * 3  # keys and values of three layers


class AsFarAsNeeded(StaticView):
    """A fault: it attends to as many slots as the longest row has by now."""

    calls = 0

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        self.calls += layer == 0
        S = 15 + self.calls
        keys, values = (cache[:, :S] for cache in self._kv.layers[layer])
        return attend_chunks(q, keys, values, self._hidden[:, :, :S], scale)


class BakedIn(StaticView):
    """A fault: Python counts the tokens that are there; right, until it is replayed."""

    calls = 0

    def __init__(self, kv: StaticKV, seq_lens: Tensor, count: int) -> None:
        super().__init__(kv, seq_lens, count)
        self._context = seq_lens.clone()

    def begin(self) -> StaticView:
        super().begin()
        self.positions = self._context + self.calls
        self.calls += 1
        return self


class Asks(StaticView):
    """A fault: Python looks at a length."""

    def begin(self) -> StaticView:
        self._seq_lens.max().item()
        return super().begin()


class Brings(StaticView):
    """A fault: a number travels to the device in the middle of the step."""

    def begin(self) -> StaticView:
        super().begin()
        self.positions = self.positions + torch.tensor([0])
        return self


class Picks(StaticView):
    """A fault: how many rows are left is counted on the device, for a shape."""

    def begin(self) -> StaticView:
        super().begin()
        self.positions = self.positions[self._seq_lens >= 0]
        return self


FAULTS = {
    AsFarAsNeeded: "run 1, .*a (number|shape) was",
    BakedIn: "run 1, .*a number was 0 and is 1",
    Asks: "run 0, .*Python reads a number",
    Brings: "run 0, .*brings a number of Python's to the device",
    Picks: "run 0, .*the shape follows the data",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_cannot_be_replayed_is_seen(tiny_models, fault):
    with pytest.raises(CaptureError, match=FAULTS[fault]):
        check_same(step_of(tiny_models["llama"], fault, 1), times=6)


def step_elsewhere(view_of: Callable[..., StaticView], count: int) -> Tensor:
    """One layer's step on tensors that hold nothing, and cannot be brought to the CPU."""
    kv = StaticKV(SMALL, 2, 32, torch.bfloat16, "meta")
    H, Hk = SMALL.num_heads, SMALL.num_kv_heads
    view = view_of(kv, torch.zeros(2, dtype=torch.int64, device="meta"), count).begin()
    qkv = torch.zeros(2 * count, H + 2 * Hk, SMALL.head_dim, dtype=torch.bfloat16, device="meta")
    q, k, v = qkv.split((H, Hk, Hk), dim=1)
    view.write(0, k, v)
    assert view.positions.device.type == "meta"
    return view.attend(0, q, 0.25)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_stays_on_its_device(count):
    """Ops that mix devices raise, and so does Python when it asks for a number."""
    out = step_elsewhere(StaticKV.chunk, count)
    assert out.shape == (2 * count, SMALL.num_heads, SMALL.head_dim)
    assert out.device.type == "meta" and out.dtype == torch.bfloat16


@pytest.mark.parametrize("fault", [Asks, Brings])
def test_a_step_that_leaves_its_device_is_seen(fault):
    with pytest.raises((RuntimeError, NotImplementedError)):
        step_elsewhere(fault, 1)
