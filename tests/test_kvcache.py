"""The step's index and the first cache: what is written is attended to, and nothing else is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spindle.config import ModelConfig
from spindle.kernels import twins
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex

L, H, HK, D = 2, 4, 2, 6
CONFIG = ModelConfig.from_dict(
    dict(
        model_type="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=HK,
        head_dim=D,
    )
)
SCALE = 0.4


def cache() -> ContiguousKV:
    return ContiguousKV(CONFIG, torch.float64)


def tokens(row: int, start: int, count: int, layer: int = 0, heads: int = HK) -> Tensor:
    """Keys (or queries) [count, heads, D] that only (row, position, layer) decide."""
    rows = []
    for position in range(start, start + count):
        generator = torch.Generator().manual_seed(row * 10_000 + position * 10 + layer)
        rows.append(torch.randn(heads, D, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def run(kv: ContiguousKV, chunks: list[tuple[int, int, int]]) -> list[Tensor]:
    """One step, every layer: write, then attend; the output of each layer."""
    view = kv.view(StepIndex.of(chunks))
    out = []
    for layer in range(L):
        k = torch.cat([tokens(*chunk, layer) for chunk in chunks])
        view.write(layer, k, -k)
        q = torch.cat([tokens(*chunk, layer, heads=H) for chunk in chunks])
        out.append(view.attend(layer, q, SCALE))
    return out


def alone(row: int, length: int, layer: int) -> Tensor:
    """What a sequence gives when it is attended to in one pass, with no cache."""
    k = tokens(row, 0, length, layer)
    return twins.attend(tokens(row, 0, length, layer, heads=H), k, -k, 0, SCALE)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Sums over at most 150 keys of size 1: other orders differ by far less than this."""
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-12


def poison(kv: ContiguousKV) -> None:
    """NaN wherever a buffer is: what is read before it is written shows."""
    for buffer in kv._buffers.values():
        buffer.fill_(torch.nan)


# --- StepIndex -----------------------------------------------------------------------------------

CHUNKS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6
)


@given(CHUNKS)
def test_an_index_lays_its_chunks_end_to_end(chunks):
    index = StepIndex.of(chunks)
    flat = [(row, start + n) for row, start, count in chunks for n in range(count)]
    assert list(zip(index.row.tolist(), index.position.tolist(), strict=True)) == flat
    assert list(zip(index.rows, index.starts, index.counts, strict=True)) == chunks
    assert index.row.dtype == index.position.dtype == torch.int64


@given(CHUNKS, st.integers(1, 5))
def test_an_index_of_two_halves_is_the_two_indices_joined(chunks, at):
    head, tail = chunks[:at], chunks[at:]
    if tail:
        whole, first, second = map(StepIndex.of, (chunks, head, tail))
        assert torch.equal(whole.position, torch.cat((first.position, second.position)))
        assert torch.equal(whole.row, torch.cat((first.row, second.row)))
        assert whole.starts == first.starts + second.starts


def test_a_chunk_split_in_two_is_the_same_row_of_tokens():
    whole, split = StepIndex.of([(3, 5, 4)]), StepIndex.of([(3, 5, 1), (3, 6, 3)])
    assert torch.equal(whole.position, split.position) and torch.equal(whole.row, split.row)


@pytest.mark.parametrize("chunks", [[], [(0, -1, 2)], [(0, 0, 0)], [(0, 3, -1)]])
def test_an_index_of_nothing_or_of_negative_tokens_cannot_be(chunks):
    with pytest.raises(AssertionError):
        StepIndex.of(iter(chunks))


# --- the contiguous cache ------------------------------------------------------------------------


def test_a_cache_grows_by_doubling_and_keeps_what_it_held():
    kv, capacities, length = cache(), [], 0
    for count in (1, 15, 1, 60, 3):
        outs = run(kv, [(0, length, count)])
        length += count
        capacities.append(kv.capacity(0))
        for layer, out in enumerate(outs):
            assert_close(out, alone(0, length, layer)[-count:])
    assert capacities == [16, 16, 32, 77, 154]
    assert kv.nbytes() == 2 * L * 154 * HK * D * 8


def test_release_gives_the_bytes_back_and_the_row_starts_anew():
    kv = cache()
    run(kv, [(0, 0, 20), (1, 0, 5)])
    assert kv.nbytes() == 2 * L * (20 + 16) * HK * D * 8
    kv.release(0)
    kv.release(7)
    assert (kv.capacity(0), kv.capacity(1)) == (0, 16)
    kv.release(1)
    assert kv.nbytes() == 0
    assert torch.equal(run(kv, [(0, 0, 3)])[0], alone(0, 3, 0))


def test_a_buffer_has_the_models_dtype_heads_and_head_size():
    """B77: the cache's shape uses head_dim, which here is not width / heads."""
    kv = ContiguousKV(CONFIG, torch.bfloat16)
    kv.view(StepIndex.of([(0, 0, 1)]))
    assert kv.nbytes() == 2 * L * 16 * HK * D * 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), min_size=1, max_size=12))
def test_any_interleaving_of_chunks_equals_each_sequence_alone(chunks):
    """B15: several sequences, any chunks, buffers full of NaN: each row as if it were alone."""
    kv, lengths = cache(), [0, 0, 0]
    kv.view(StepIndex.of([(row, 0, 1) for row in range(3)]))
    poison(kv)
    while chunks:
        step: dict[int, int] = {}
        while chunks and chunks[0][0] not in step:
            row, count = chunks.pop(0)
            step[row] = count
        outs = run(kv, [(row, lengths[row], count) for row, count in step.items()])
        for layer in range(L):
            parts = outs[layer].split(list(step.values()))
            for (row, count), part in zip(step.items(), parts, strict=True):
                assert_close(part, alone(row, lengths[row] + count, layer)[-count:])
        for row, count in step.items():
            lengths[row] += count


def test_unwritten_slots_are_never_read():
    """B15: NaN in what is not written yet, and in what a growth brought."""
    kv = cache()
    kv.view(StepIndex.of([(0, 0, 40)]))
    poison(kv)
    for start, count in ((0, 7), (7, 1), (8, 1)):
        for layer, out in enumerate(run(kv, [(0, start, count)])):
            assert_close(out, alone(0, start + count, layer)[-count:])


@pytest.mark.parametrize("keep", [1, 4, 9])
def test_an_earlier_start_rewinds_and_stale_entries_are_never_read(keep):
    """Rewinding is a smaller start: entries from there on are NaN here, and must not show."""
    kv = cache()
    run(kv, [(0, 0, 10)])
    kv._buffers[0][:, :, keep:] = torch.nan
    for start in (keep, keep + 1):
        for layer, out in enumerate(run(kv, [(0, start, 1)])):
            assert_close(out, alone(0, start + 1, layer)[-1:])


def assert_every_layer_sees_its_step(kv) -> None:
    """Prefill, decode, chunk: each layer's output is that of a pass with no cache."""
    for start, count in ((0, 5), (5, 1), (6, 3)):
        for layer, out in enumerate(run(kv, [(0, start, count)])):
            expected = alone(0, start + count, layer)[-count:]
            off = (out - expected).abs().max().item()
            assert off < 1e-12, f"layer {layer}, {count} tokens from {start} on: off by {off:.2g}"


def test_every_layer_sees_its_step():
    """The first layer attends to the step it is in, and so does the last."""
    assert_every_layer_sees_its_step(cache())


class MovingKV:
    """A fault: a length that the cache keeps, and that moves when layer `moves_in` appends."""

    def __init__(self, moves_in: int) -> None:
        self.kv = torch.zeros(2, L, 32, HK, D, dtype=torch.float64)
        self.moves_in, self.length = moves_in, 0

    def view(self, index: StepIndex) -> "MovingKV":
        self.start = self.length  # positions are right: taken before anything moves
        return self

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        end = self.length + len(k)
        self.kv[:, layer, self.length : end] = torch.stack((k, v))
        if layer == self.moves_in:
            self.length = end

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        keys, values = self.kv[:, layer, : self.length]
        return twins.attend(q, keys, values, self.start, scale)


@pytest.mark.parametrize(("moves_in", "caught_in"), [(L - 1, 0), (0, 1)])
def test_a_length_that_moves_within_a_step_is_caught_in_the_layer_it_misleads(moves_in, caught_in):
    with pytest.raises(AssertionError, match=f"layer {caught_in}, 5 tokens from 0 on"):
        assert_every_layer_sees_its_step(MovingKV(moves_in))


def test_a_layer_writes_to_itself_alone():
    kv = cache()
    run(kv, [(0, 0, 5)])
    view = kv.view(StepIndex.of([(0, 2, 1)]))
    before = kv._buffers[0][:, :, :5].clone()
    view.write(1, torch.ones(1, HK, D, dtype=torch.float64), torch.zeros(1, HK, D).double())
    changed = (kv._buffers[0][:, :, :5] != before).nonzero()[:, :3].unique(dim=0)
    assert changed.tolist() == [[0, 1, 2], [1, 1, 2]]
    assert (kv._buffers[0][0, 1, 2] == 1).all() and (kv._buffers[0][1, 1, 2] == 0).all()


def test_one_sequence_may_have_two_chunks_in_a_step():
    outs = run(cache(), [(0, 0, 3), (0, 3, 2)])
    for layer, out in enumerate(outs):
        assert_close(out, alone(0, 5, layer))
