"""Each op against its definition, written another way; packed linear against plain, in bits."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spindle import kernels
from spindle.kernels import packed, twins

EPS32 = torch.finfo(torch.float32).eps


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    worst = (ours - expected).abs().max().item()
    assert worst <= 1e-12 * max(1.0, expected.abs().max().item()), worst


# --- the twins, in float64 -----------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_a_row_at_unit_length_times_root_of_width(T, eps):
    x, weight = 3 * random(T, 10), random(10)
    expected = torch.stack(
        [row * weight * math.sqrt(10) / math.sqrt(row.dot(row) + 10 * eps) for row in x]
    )
    assert_close(twins.rms_norm(x, weight, eps), expected)


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm_takes_out_mean_and_spread(T, eps):
    x, weight, bias = 3 * random(T, 10) + 5, random(10), random(10, seed=1)
    centred = x - torch.einsum("te,e->t", x, torch.ones(10, dtype=x.dtype))[:, None] / 10
    spread = [math.sqrt(sum(v * v for v in row) / 10 + eps) for row in centred.tolist()]
    expected = centred / torch.tensor(spread, dtype=x.dtype)[:, None] * weight + bias
    assert_close(twins.layer_norm(x, weight, bias, eps), expected)


def test_add_then_norm_gives_both_and_takes_the_sum_on():
    x, residual, weight, bias = random(5, 10), random(5, 10, seed=1), random(10), random(10, seed=1)
    normed, carried = twins.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert_close(carried, x + residual)
    assert_close(normed, twins.rms_norm(x + residual, weight, 1e-6))
    normed, carried = twins.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    assert_close(carried, x + residual)
    assert_close(normed, twins.layer_norm(x + residual, weight, bias, 1e-5))


def test_rope_turns_pairs_as_complex_numbers():
    """The pair (i, i + D/2) is a complex number; its angle grows, its length stays."""
    q, k, angles = random(5, 4, 8), random(5, 2, 8), 3 * random(5, 4)
    turned = [x.clone() for x in (q, k)]
    assert twins.rope(*turned, angles.cos(), angles.sin()) is None
    for before, after in zip((q, k), turned, strict=True):
        pairs = torch.complex(before[..., :4], before[..., 4:])
        expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        assert_close(after, torch.cat((expected.real, expected.imag), -1))


def test_rope_works_on_slices_of_one_product():
    """The model turns views of the qkv product in place; values beside them must not change."""
    heads = random(3, 7, 8)
    before = heads.clone()
    q, k, v = heads.split((4, 2, 1), dim=1)
    angles = random(3, 4)
    twins.rope(q, k, angles.cos(), angles.sin())
    assert torch.equal(v, before[:, 6:])
    lone = before[:, 4:6].clone()
    twins.rope(before[:, :4].clone(), lone, angles.cos(), angles.sin())
    assert torch.equal(k, lone)


def test_silu_mul_gates_with_the_first_half():
    gate, up = 4 * random(5, 6), random(5, 6, seed=1)
    expected = gate * up / (1 + (-gate).exp())
    assert_close(twins.silu_mul(torch.cat((gate, up), -1)), expected)


def test_linear_is_a_sum_over_the_inputs():
    x, weight, bias = random(3, 5), random(4, 5), random(4)
    expected = torch.einsum("tk,nk->tn", x, weight)
    assert_close(twins.linear(x, weight), expected)
    assert_close(kernels.linear(x, kernels.pack(weight, bias)), expected + bias)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """One query and one head at a time, over the keys it may see and no others."""
    T, H, _ = q.shape
    group = H // k.shape[1]
    out = torch.empty_like(q)
    for t in range(T):
        for h in range(H):
            seen = slice(0, start + t + 1)
            scores = [float(key @ q[t, h]) * scale for key in k[seen, h // group]]
            weights = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(w * value for w, value in zip(weights, v[seen, h // group], strict=True))
            out[t, h] = mixed / sum(weights)
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(("start", "T"), [(0, 1), (0, 6), (5, 1), (5, 4)])
def test_attend_is_causal_attention_by_hand(heads, start, T):
    H, Hk = heads
    q, k, v = 2 * random(T, H, 8), random(start + T, Hk, 8), random(start + T, Hk, 8, seed=1)
    assert_close(twins.attend(q, k, v, start, 0.3), attention_by_hand(q, k, v, start, 0.3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """Statistics and softmax of 16-bit inputs: the result is the exact one, rounded once."""
    eps = torch.finfo(dtype).eps
    x, weight = 100 * random(3, 512, dtype=dtype), torch.ones(512, dtype=dtype)
    exact = twins.rms_norm(x.double(), weight.double(), 1e-6)
    ours = twins.rms_norm(x, weight, 1e-6)
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= eps * exact.abs().max()
    q, k, v = (random(64, 2, 8, seed=n, dtype=dtype) for n in range(3))
    exact = twins.attend(q.double(), k.double(), v.double(), 0, 0.3)
    ours = twins.attend(q, k, v, 0, 0.3)
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= eps * exact.abs().max()


def test_scores_beyond_what_exp_can_hold_are_no_nan():
    q = torch.full((2, 1, 4), 1e4, dtype=torch.float32)
    out = twins.attend(q, q, torch.ones(2, 1, 4), 0, 1.0)
    assert torch.equal(out, torch.ones(2, 1, 4))


# --- packed linear -------------------------------------------------------------------------------

ROWS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64]
INPUTS = [48, 100, 576, 768, 1536, 3072]
OUTPUTS = [1, 48, 1000]

needs_packing = pytest.mark.skipif(
    not packed.packs(torch.zeros(2, 2)), reason="no packed linear on this processor"
)


def packed_and_plain(K: int, N: int) -> tuple[kernels.Weight, Tensor, Tensor, Tensor]:
    weight = random(N, K, dtype=torch.float32) / K**0.5
    bias, x = random(N, dtype=torch.float32), random(max(ROWS), K, seed=1, dtype=torch.float32)
    return kernels.pack(weight, bias), weight, bias, x


@needs_packing
@pytest.mark.parametrize("K", INPUTS)
def test_packed_linear_is_linear_within_the_rounding_of_a_sum(K):
    """K products and a bias, added in any order: off by at most K eps sum|x||w| (Higham 2002, 3.1)

    from the exact sum, for plain and packed alike, so by twice that from each other.
    """
    for N in OUTPUTS:
        weight, plain, bias, x = packed_and_plain(K, N)
        assert weight.packed is not None and weight.plain is None
        ours, theirs = kernels.linear(x, weight), twins.linear(x, plain, bias)
        exact = twins.linear(x.double(), plain.double(), bias.double())
        bound = (
            K * EPS32 * twins.linear(x.abs().double(), plain.abs().double(), bias.abs().double())
        )
        assert ((ours - exact).abs() <= bound).all()
        assert ((ours - theirs).abs() <= 2 * bound).all()
        assert ours.dtype == torch.float32 and ours.shape == (64, N)


@needs_packing
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("K", INPUTS)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(K, threads):
    """B29: a request's logits must not depend on who shares its batch.

    Packed with one number of threads and read with another, too.
    """
    before = torch.get_num_threads()
    try:
        for N in OUTPUTS:
            torch.set_num_threads(3 - threads)
            weight, _, _, x = packed_and_plain(K, N)
            torch.set_num_threads(threads)
            whole = kernels.linear(x, weight)
            for T in ROWS:
                assert torch.equal(kernels.linear(x[:T], weight), whole[:T]), (K, N, T)
                assert torch.equal(kernels.linear(x[-T:], weight), whole[-T:]), (K, N, T)
    finally:
        torch.set_num_threads(before)


@needs_packing
@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 20))
def test_packed_linear_fits_any_shape(K, N, T):
    """Blocks of oneDNN's layout are padded; nothing of the padding may be read."""
    weight, x = random(N, K, dtype=torch.float32), random(T, K, seed=1, dtype=torch.float32)
    bound = K * EPS32 * (x.abs() @ weight.abs().t())
    ours = kernels.linear(x, kernels.pack(weight))
    assert ((ours - x @ weight.t()).abs() <= 2 * bound).all()


def test_linear_takes_no_rows_and_strided_rows():
    """No row of a step may be up for sampling; and rows may be columns of something wider."""
    weight = kernels.pack(random(6, 8, dtype=torch.float32))
    x = random(5, 16, dtype=torch.float32)
    assert kernels.linear(x[:0, :8], weight).shape == (0, 6)
    assert torch.equal(kernels.linear(x[:, 8:], weight), kernels.linear(x[:, 8:].clone(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pack_keeps_nothing_of_what_it_was_given(dtype):
    """The space of the input is used again for the next matrix while a checkpoint is loaded."""
    matrix = random(6, 8, dtype=dtype)
    weight, x = kernels.pack(matrix), random(3, 8, dtype=dtype)
    before = kernels.linear(x, weight)
    matrix.fill_(torch.nan)
    assert torch.equal(kernels.linear(x, weight), before)
    assert weight.shape == (6, 8)
    assert (weight.plain is None) != (weight.packed is None)


def test_the_environment_chooses_the_plain_form():
    program = (
        "import torch; from spindle import kernels; w = torch.arange(6.0).view(2, 3);"
        "p = kernels.pack(w); print('packed' if p.plain is None else 'plain');"
        "print(kernels.linear(torch.ones(1, 3), p).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"SPINDLE_NO_EXT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["plain", "[[3.0, 12.0]]"]
