"""Each op against its definition, written another way; packed linear against plain, in bits."""

import ctypes
import gc
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import shapes
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spindle import kernels
from spindle.kernels import build, native, packed, room, twins
from spindle.model.weights import random_model

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


# --- linear, in each of its forms ----------------------------------------------------------------

ROWS = [1, 2, 3, 4, 5, 8, 12, 13, 15, 16, 17, 33, 64]
INPUTS = [48, 100, 576, 768, 1536, 3072]
OUTPUTS = [1, 48, 1000]
FORMS = ["panels", "onednn"]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """The form that `pack` takes; skipped, in words, where this machine has not got it."""
    if request.param == "onednn":
        monkeypatch.setattr(native, "available", lambda: False)
        if not packed.packs(torch.zeros(2, 2)):
            pytest.skip("no oneDNN form on this processor")
    elif not native.available():
        pytest.skip(f"no native form here: {build.why_not('cpu')}")
    return request.param


def packed_and_plain(K: int, N: int) -> tuple[kernels.Weight, Tensor, Tensor, Tensor]:
    weight = random(N, K, dtype=torch.float32) / K**0.5
    bias, x = random(N, dtype=torch.float32), random(max(ROWS), K, seed=1, dtype=torch.float32)
    return kernels.pack(weight, bias), weight, bias, x


@pytest.mark.parametrize("K", INPUTS)
def test_packed_linear_is_linear_within_the_rounding_of_a_sum(K, form):
    """K products and a bias, added in any order: off by at most K eps sum|x||w| (Higham 2002, 3.1)

    from the exact sum, for plain and packed alike, so by twice that from each other.
    """
    for N in OUTPUTS:
        weight, plain, bias, x = packed_and_plain(K, N)
        assert form_of(weight) == form
        ours, theirs = kernels.linear(x, weight), twins.linear(x, plain, bias)
        exact = twins.linear(x.double(), plain.double(), bias.double())
        bound = (
            K * EPS32 * twins.linear(x.abs().double(), plain.abs().double(), bias.abs().double())
        )
        assert ((ours - exact).abs() <= bound).all()
        assert ((ours - theirs).abs() <= 2 * bound).all()
        assert ours.dtype == torch.float32 and ours.shape == (64, N)


def form_of(weight: kernels.Weight) -> str:
    """The one form that a weight is in."""
    (held,) = [name for name in ("plain", *FORMS) if getattr(weight, name) is not None]
    return held


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("K", INPUTS)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(K, threads, form):
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


def test_the_native_sum_is_the_one_that_the_source_states():
    """Blocks of 512 inputs, each summed k by k with one rounding a step, then added in turn."""
    if not native.available():
        pytest.skip(f"no native form here: {build.why_not('cpu')}")
    K = 1200
    x, w = random(1, K, dtype=torch.float32), random(1, K, seed=1, dtype=torch.float32)
    total = 0.0
    for start in range(0, K, 512):
        block = torch.zeros((), dtype=torch.float32)
        for a, b in zip(x[0, start : start + 512], w[0, start : start + 512], strict=True):
            block = (a.double() * b.double() + block.double()).float()  # a fused multiply-add
        total = (torch.as_tensor(total, dtype=torch.float32) + block).item()
    assert kernels.linear(x, kernels.pack(w)).item() == total


@given(st.integers(1, 600), st.integers(1, 200), st.integers(1, 30))
def test_packed_linear_fits_any_shape(K, N, T):
    """Panels and blocks are padded; nothing of the padding may be read, nor anything beside y."""
    weight, x = random(N, K, dtype=torch.float32), random(T, K, seed=1, dtype=torch.float32)
    bound = K * EPS32 * (x.abs() @ weight.abs().t())
    packed_form = kernels.pack(weight)
    ours = kernels.linear(x, packed_form)
    assert ((ours - x @ weight.t()).abs() <= 2 * bound).all()
    assert torch.equal(kernels.unpack(packed_form), weight)


@pytest.mark.parametrize("N", [1, 31, 32, 33, 1000])
def test_linear_writes_its_result_and_nothing_beside_it(N, monkeypatch):
    if not native.available():
        pytest.skip(f"no native form here: {build.why_not('cpu')}")
    weight, x = kernels.pack(random(N, 40, dtype=torch.float32)), torch.ones(13, 40)
    around = torch.full((15 * N,), 7.0)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, T, n: around[N : N + T * n].view(T, n))
    assert native.linear(x, weight.panels, None, N).data_ptr() == around[N:].data_ptr()
    assert (around[:N] == 7).all() and (around[14 * N :] == 7).all()


WRONG = {
    "float16": torch.zeros(2, 48, dtype=torch.float16),
    "float64": torch.zeros(2, 48, dtype=torch.float64),
    "int64": torch.zeros(2, 48, dtype=torch.int64),
    "too narrow": torch.zeros(2, 40),
    "too wide": torch.zeros(2, 64),
}


@pytest.mark.parametrize("fault", WRONG)
def test_linear_refuses_what_native_code_would_read_wrongly(form, fault):
    weight = kernels.pack(torch.zeros(64, 48))
    with pytest.raises(TypeError, match=r"linear: x is .*, its weight is torch.float32 \[64, 48\]"):
        kernels.linear(WRONG[fault], weight)


def test_pack_refuses_a_bias_that_does_not_fit_and_reads_a_strided_one(form):
    for bias in (torch.zeros(63), torch.zeros(64, dtype=torch.float64)):
        with pytest.raises(TypeError, match="pack: the bias is"):
            kernels.pack(torch.zeros(64, 48), bias)
    strided = torch.arange(128.0)[::2]
    y = kernels.linear(torch.zeros(1, 48), kernels.pack(torch.zeros(64, 48), strided))
    assert torch.equal(y[0], strided)


def test_linear_takes_no_rows_and_strided_rows(form):
    """No row of a step may be up for sampling; and rows may be columns of something wider."""
    weight = kernels.pack(random(6, 8, dtype=torch.float32))
    x = random(5, 16, dtype=torch.float32)
    assert kernels.linear(x[:0, :8], weight).shape == (0, 6)
    assert torch.equal(kernels.linear(x[:, 8:], weight), kernels.linear(x[:, 8:].clone(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pack_keeps_nothing_of_what_it_was_given(dtype, form):
    """The space of the input is used again for the next matrix while a checkpoint is loaded."""
    matrix = random(6, 8, dtype=dtype)
    weight, x, given = kernels.pack(matrix), random(3, 8, dtype=dtype), matrix.clone()
    before = kernels.linear(x, weight)
    matrix.fill_(torch.nan)
    assert torch.equal(kernels.linear(x, weight), before)
    assert torch.equal(kernels.unpack(weight), given)
    assert weight.shape == (6, 8)
    assert form_of(weight) == (form if dtype == torch.float32 else "plain")


def in_a_process(program: str, **environment: str) -> list[str]:
    """The lines that a program prints in a process of its own, where native forms are allowed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"SPINDLE_NO_EXT": "0"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WHICH_FORM = (
    "import torch; from spindle import kernels; from spindle.kernels import build;"
    "w = kernels.pack(torch.arange(6.0).view(2, 3));"
    "print(next(n for n in ('plain', 'panels', 'onednn') if getattr(w, n) is not None));"
    "print(kernels.linear(torch.ones(1, 3), w).tolist()); print(build.why_not('cpu'))"
)


def test_the_environment_chooses_the_plain_form():
    lines = in_a_process(WHICH_FORM, SPINDLE_NO_EXT="1")
    assert lines == ["plain", "[[3.0, 12.0]]", "SPINDLE_NO_EXT=1"]


# --- norms, angles and gates in their native form ------------------------------------------------

needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")
WIDTHS = [1, 15, 16, 17, 48, 100, 576]


@needs_native
@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_native_norm_is_the_twin_within_rounding(E, eps):
    """E squares in a sum: off by at most E eps, half of that under the root; then four products."""
    x, weight = 3 * random(7, E, dtype=torch.float32), random(E, dtype=torch.float32)
    residual = random(7, E, seed=1, dtype=torch.float32)
    for given_ in (None, residual):
        added = x if given_ is None else x + residual
        exact = twins.rms_norm(added.double(), weight.double(), eps)
        if given_ is None:
            ours = kernels.rms_norm(x, weight, eps)
        else:
            ours, carried = kernels.add_rms_norm(x, residual.clone(), weight, eps)
            assert torch.equal(carried, added)
        assert ours.dtype == torch.float32 and ours.shape == x.shape
        assert ((ours - exact).abs() <= (E / 2 + 4) * EPS32 * exact.abs()).all()


@needs_native
@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_the_native_layer_norm_is_the_twin_within_rounding(E, eps):
    """The mean is off by E eps of the mean size; what it is taken from keeps that as it is."""
    x, residual = (3 * random(7, E, seed=n, dtype=torch.float32) for n in (0, 1))
    weight, bias = (random(E, seed=n, dtype=torch.float32) for n in (2, 3))
    for given_ in (None, residual):
        added = x if given_ is None else x + residual
        wide = added.double()
        exact = twins.layer_norm(wide, weight.double(), bias.double(), eps)
        if given_ is None:
            ours = kernels.layer_norm(x, weight, bias, eps)
        else:
            ours, carried = kernels.add_layer_norm(x, residual.clone(), weight, bias, eps)
            assert torch.equal(carried, added)
        spread = (wide.var(dim=-1, unbiased=False, keepdim=True) + eps).sqrt()
        size = (wide.abs().mean(-1, keepdim=True) + wide.abs()) / spread
        assert ours.dtype == torch.float32 and ours.shape == x.shape
        bound = (E + 8) * EPS32 * ((size + size**2) * weight.abs() + bias.abs())
        assert ((ours - exact).abs() <= bound).all()


@needs_native
@pytest.mark.parametrize("F", WIDTHS)
def test_the_native_gelu_is_the_twin_within_rounding(F):
    """The exponent 2 z is off by 6 eps of itself; (1 + tanh z) / 2 loses nothing as a sigmoid."""
    x = torch.linspace(-12, 12, 40 * F).view(40, F)
    x[::2] = 2 * random(20, F, dtype=torch.float32)
    ours, wide = kernels.gelu_tanh(x), x.double()
    assert ours.dtype == torch.float32 and ours.shape == x.shape
    exponent = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    exact = wide / (1 + (-exponent).exp())
    bound = (6 + 6 * exponent.abs()) * EPS32 * exact.abs() + 1e-30
    assert ((ours - exact).abs() <= bound).all()
    assert ((twins.gelu_tanh(x) - exact).abs() <= bound + EPS32 * wide.abs()).all()


@needs_native
@pytest.mark.parametrize("D", [2, 6, 16, 34, 64, 128])
def test_the_native_rope_is_the_twin_within_rounding(D):
    """Two products and a sum; q and k are slices of one product, and v beside them stays."""
    heads, angles = random(5, 7, D, dtype=torch.float32), 3 * random(5, D // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = heads.clone().split((4, 2, 1), dim=1)
    assert kernels.rope(q, k, cos, sin) is None
    exact = [x.double() for x in heads.split((4, 2, 1), dim=1)]
    sizes = [torch.cat([sum(x.abs().chunk(2, -1))] * 2, -1) for x in exact]
    twins.rope(exact[0], exact[1], cos.double(), sin.double())
    for ours, right, size in zip((q, k), exact, sizes, strict=False):
        assert ((ours - right).abs() <= 2 * EPS32 * size).all()
    assert torch.equal(v, heads[:, 6:])
    lone, spread = heads[:, :4].clone(), heads[:, 4:6].repeat_interleave(3, dim=1)[:, ::3]
    kernels.rope(lone, spread, cos, sin)  # rows and heads as far apart as each has them
    assert torch.equal(lone, q) and torch.equal(spread, k)


@needs_native
@pytest.mark.parametrize("F", WIDTHS)
def test_the_native_gate_is_the_twin_within_rounding(F):
    """An exponential within 2e-7, a sum, a quotient, two products: 6 eps. Far below 0 it is 0."""
    gate = torch.linspace(-110, 110, 40 * F).view(40, F)
    gate[::2] = 4 * random(20, F, dtype=torch.float32)
    up = random(40, F, dtype=torch.float32)
    both = torch.cat((gate, up), -1)
    ours, exact = kernels.silu_mul(both), twins.silu_mul(both.double())
    assert ours.dtype == torch.float32 and ours.shape == (40, F)
    assert ((ours - exact).abs() <= 6 * EPS32 * exact.abs() + 1e-35).all()


@needs_native
def test_the_native_forms_take_what_is_no_number_as_the_twins_do():
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40])
    both = torch.cat((odd, torch.ones(8)))[None]
    torch.testing.assert_close(
        kernels.silu_mul(both), twins.silu_mul(both), equal_nan=True, rtol=1e-6, atol=1e-37
    )
    torch.testing.assert_close(
        kernels.gelu_tanh(both), twins.gelu_tanh(both), equal_nan=True, rtol=1e-6, atol=1e-37
    )
    rows = odd[:, None] + torch.ones(8, 5)
    torch.testing.assert_close(
        kernels.rms_norm(rows, torch.ones(5), 1e-6),
        twins.rms_norm(rows, torch.ones(5), 1e-6),
        equal_nan=True,
        rtol=1e-6,
        atol=1e-37,
    )


def each_op(x: Tensor, T: slice) -> list[Tensor]:
    """Every row-wise op on the rows T of x [rows, 9, 64]: a norm of heads, and of whole rows."""
    angles = torch.arange(32.0) * torch.arange(len(x))[:, None]
    cos, sin = angles.cos()[T], angles.sin()[T]
    flat, weight = x[T].flatten(1), torch.linspace(-1, 1, 576)
    q, k = x[T].clone().split((6, 3), dim=1)
    normed_heads = kernels.rms_norm(q, weight[:64], 1e-5)
    kernels.rope(q, k, cos, sin)
    norms = kernels.add_rms_norm(flat, flat.flip(1).clone(), weight, 1e-5)
    return [
        normed_heads,
        q,
        k,
        kernels.silu_mul(flat),
        kernels.gelu_tanh(flat),
        kernels.rms_norm(flat, weight, 1e-5),
        kernels.layer_norm(flat, weight, weight.flip(0), 1e-5),
        *norms,
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(threads):
    """B29: alone, among few, among so many that two threads share them."""
    x = 3 * random(200, 9, 64, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = each_op(x, slice(0, 200))
        for T in (slice(0, 1), slice(199, 200), slice(3, 11), slice(50, 200)):
            for ours, expected in zip(each_op(x, T), whole, strict=True):
                assert torch.equal(ours, expected[T])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("width", [1, 16, 33])
def test_the_native_forms_write_their_result_and_nothing_beside_it(width, monkeypatch):
    T = 5
    around, sums = torch.full((2, (T + 2) * width), 7.0)
    inner = around[width : (T + 1) * width].view(T, width)
    residual = sums[width : (T + 1) * width].view(T, width)
    monkeypatch.setattr(torch, "empty_like", lambda x: inner)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *shape: inner)
    x = torch.ones(T, width)
    assert kernels.add_rms_norm(x, residual, x[0], 0.0)[1].data_ptr() == residual.data_ptr()
    assert (inner == 1).all() and (residual == 8).all()
    kernels.silu_mul(torch.zeros(T, 2 * width))
    assert (inner == 0).all()
    kernels.layer_norm(x, x[0], x[0], 1.0)
    assert (inner == 1).all()
    kernels.gelu_tanh(torch.zeros(T, width))
    assert (inner == 0).all()
    for outer in (around, sums):
        assert (outer[:width] == 7).all() and (outer[-width:] == 7).all()


def test_what_native_code_would_read_wrongly_is_left_to_the_twin():
    """Other dtypes, strides, and shapes that torch spreads or refuses."""
    x, weight = random(3, 8, dtype=torch.float32), random(8, dtype=torch.float32)
    for other in (weight.double(), weight[:1], torch.stack((weight, weight), 1)[:, 0]):
        assert torch.equal(kernels.rms_norm(x, other, 1e-5), twins.rms_norm(x, other, 1e-5))
        ours = kernels.add_rms_norm(x, x.clone(), other, 1e-5)
        for one, right in zip(ours, twins.add_rms_norm(x, x.clone(), other, 1e-5), strict=True):
            assert torch.equal(one, right)
    for residual in (x.double(), torch.stack((x, x), 2)[..., 0]):
        added = x + residual
        ours, carried = kernels.add_rms_norm(x, residual, weight, 1e-5)
        assert carried is residual and torch.equal(carried, added)
        assert torch.equal(ours, twins.rms_norm(added, weight, 1e-5))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        kernels.add_rms_norm(x, x[:1].clone(), weight, 1e-5)
    for refused in (weight[:5], torch.ones(9)):
        with pytest.raises(RuntimeError, match="must match"):
            kernels.rms_norm(x, refused, 1e-5)
    with pytest.raises(RuntimeError, match="must match"):
        kernels.silu_mul(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match="must match"):
        kernels.rope(x.view(3, 1, 8), x.view(3, 1, 8), torch.ones(3, 3), torch.ones(3, 3))
    apart = [torch.zeros(3, 2, 8, 2)[..., 0] + 1 for _ in range(2)]
    angles = random(3, 4, dtype=torch.float64)
    kernels.rope(*apart, angles.cos(), angles.sin())
    right = [torch.ones(3, 2, 8) for _ in range(2)]
    twins.rope(*right, angles.cos(), angles.sin())
    assert torch.equal(apart[0], right[0]) and torch.equal(apart[1], right[1])


# --- attention over long contexts, in parts ------------------------------------------------------

EDGES = [0, 1, 16, 127, 128, 129, 256, 257, 511, 512, 513, 1024, 1025]  # a part has 128 positions
HEADS = [(9, 3, 64), (5, 1, 20), (4, 4, 7), (2, 2, 300)]  # H, Hk, D
Paged = tuple[Tensor, Tensor, Tensor, Tensor]


def long_rows(lengths: list[int], heads: tuple[int, int, int], C: int = 1) -> list[Tensor]:
    """q [R * C, H, D]; keys, values [R, S, Hk, D], NaN beyond each length."""
    (H, Hk, D), S = heads, max(lengths)
    q = 2 * random(len(lengths) * C, H, D, dtype=torch.float32)
    caches = [random(len(lengths), S, Hk, D, seed=n, dtype=torch.float32) for n in (1, 2)]
    for cache in caches:
        for row, length in zip(cache, lengths, strict=True):
            row[length:] = torch.nan
    return [q, *caches]


def in_blocks(keys: Tensor, values: Tensor, lengths: list[int], P: int) -> Paged:
    """keys, values [N, P, Hk, D] in blocks that lie anywhere, tables [R, B], lengths [R].

    NaN where nothing belongs; a table's entries beyond its row are no block's.
    """
    R, S, Hk, D = keys.shape
    B = -(-S // P)
    tables = torch.randperm(R * B, generator=torch.Generator().manual_seed(P)).view(R, B)
    pools = []
    for cache in (keys, values):
        pool = torch.full((R * B, P, Hk, D), torch.nan, dtype=cache.dtype)
        filled = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, B * P - S), value=torch.nan)
        pool[tables] = filled.view(R, B, P, Hk, D)
        pools.append(pool)
    n = torch.tensor(lengths)
    tables = tables.masked_fill(torch.arange(B) * P >= n[:, None], 2**40)
    return pools[0], pools[1], tables, n


@needs_native
@pytest.mark.parametrize("heads", HEADS)
def test_a_long_context_is_the_twin_within_rounding(heads):
    """The mean of the parts' means, each with the weight of all that went into it."""
    q, keys, values = long_rows(EDGES, heads)
    scale = heads[2] ** -0.5
    ours = kernels.paged_attend(q, *in_blocks(keys, values, EDGES, 16), scale)
    k, v, tables, n = in_blocks(keys.double(), values.double(), EDGES, 16)
    exact = twins.paged_attend(q.double(), k.double(), v.double(), tables, n, scale)
    assert (ours[0] == 0).all()  # the row of length 0
    assert (ours - exact).abs().max() < 5e-6


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("heads", HEADS)
def test_a_querys_bits_depend_on_its_own_keys_alone(heads, threads):
    """B29: not on the rows beside it, on threads, on the block size, on where blocks lie."""
    q, keys, values = long_rows(EDGES, heads)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = []
        for r, length in enumerate(EDGES):
            row = slice(r, r + 1)
            k, v = keys[row, : max(length, 1)], values[row, : max(length, 1)]
            alone.append(
                kernels.paged_attend(
                    q[row], k, v, torch.zeros(1, 1).long(), torch.tensor([length]), 0.125
                )
            )
        torch.set_num_threads(threads)
        for P in (1, 3, 16, 128, max(EDGES)):
            together = kernels.paged_attend(q, *in_blocks(keys, values, EDGES, P), 0.125)
            assert torch.equal(together, torch.cat(alone)), P
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("C", [2, 5])
def test_the_last_queries_of_a_row_have_the_bits_of_one_query_each(C, threads):
    """Those that see a part more than others of their row, too; none sees a later key."""
    q, keys, values = long_rows(EDGES, (6, 2, 64), C)
    k, v, tables, n = in_blocks(keys, values, EDGES, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = kernels.paged_attend(q, k, v, tables, n, 0.125)
        seen = (n[:, None] + torch.arange(1 - C, 1)).flatten()
        alone = kernels.paged_attend(q, k, v, tables.repeat_interleave(C, 0), seen, 0.125)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    assert (together[seen < 1] == 0).all()
    assert not together.isnan().any()


def attend_to(scores: Tensor, values: Tensor) -> Tensor:
    """What one query with these scores [S] makes of values [S], by the op and by its twin."""
    keys = torch.zeros(1, len(scores), 1, 16)
    keys[0, :, 0, 0] = scores
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1
    v = values[None, :, None, None].expand(1, len(scores), 1, 16).contiguous()
    rest = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([len(scores)]), 1.0
    forms = kernels.paged_attend, twins.paged_attend
    results = [form(q, keys, v, *rest)[0, 0] for form in forms]
    assert all((x == x[0]).all() or x.isnan().all() for x in results)
    return torch.stack([x[0] for x in results])


@needs_native
@pytest.mark.parametrize("S", [1, 100, 128, 129, 300])
def test_parts_whose_scores_are_minus_infinity_weigh_nothing(S):
    """The first, the middle, the last; if all are, there is no mean, as in the twin."""
    values = torch.linspace(1, 2, S)
    for hidden in (slice(0, 128), slice(128, 256), slice(256, 300), slice(0, 256)):
        scores = torch.zeros(S)
        scores[hidden] = -torch.inf
        if scores.isinf().all():
            assert attend_to(scores, values).isnan().all()
        else:
            ours, right = attend_to(scores, values)
            assert abs(ours - right) < 1e-6
    assert attend_to(torch.full((S,), -torch.inf), values).isnan().all()


@needs_native
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 127, 128, 299])
def test_a_score_that_is_no_number_breaks_the_whole_row_as_in_the_twin(broken, at):
    """B69: in any part; the others' scores may be -inf."""
    for others in (0.0, -torch.inf):
        scores = torch.full((300,), others)
        scores[at] = broken
        assert attend_to(scores, torch.ones(300)).isnan().all()


@needs_native
@pytest.mark.parametrize("largest", [0, 127, 128, 299])
def test_the_merge_holds_at_any_spread_of_scores_and_for_large_values(largest):
    """A part far below another weighs nothing, even with values of 3e38; none overflows."""
    scores = torch.full((300,), -1000.0)
    scores[largest] = 1000.0
    values = torch.full((300,), 3e38)
    values[largest] = 5.0
    assert attend_to(scores, values).tolist() == [5.0, 5.0]
    ours, _ = attend_to(torch.zeros(300), torch.full((300,), 3e38))
    assert abs(ours / 3e38 - 1) < 1e-5


# --- the build -----------------------------------------------------------------------------------


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="nothing is built elsewhere")


@on_linux
def test_without_a_compiler_another_form_does_the_work_and_the_words_say_why(tmp_path):
    lines = in_a_process(WHICH_FORM, CXX="no-such-compiler", SPINDLE_CACHE=str(tmp_path))
    assert lines[0] in ("onednn", "plain") and lines[1] == "[[3.0, 12.0]]"
    assert lines[2] == "no C++ compiler: no-such-compiler not found"


@on_linux
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path):
    broken = fake_compiler(tmp_path, "printf 'cc1plus: out of luck \\377' >&2; exit 3")
    lines = in_a_process(WHICH_FORM, CXX=broken, SPINDLE_CACHE=str(tmp_path / "cache"))
    assert lines[1] == "[[3.0, 12.0]]"
    assert lines[2] == f"{broken} failed with status 3: cc1plus: out of luck \ufffd"
    assert not list((tmp_path / "cache" / "build").iterdir())


@on_linux
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    lines = in_a_process(WHICH_FORM, SPINDLE_CACHE=str(tmp_path / "file"))
    assert lines[1] == "[[3.0, 12.0]]" and lines[2] != "None"


@on_linux
def test_a_library_is_built_once_and_found_again(tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    counting = fake_compiler(
        tmp_path, f'echo "$@" >> {tmp_path}/calls; exec {build.compiler()} "$@"'
    )
    for _ in range(2):
        lines = in_a_process(WHICH_FORM, CXX=counting, SPINDLE_CACHE=str(tmp_path / "cache"))
        assert lines == ["panels", "[[3.0, 12.0]]", "None"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([call for call in calls if "-c" in call.split()]) == 1
    (made,) = (tmp_path / "cache" / "build").iterdir()
    assert re.fullmatch(r"cpu-[0-9a-f]{16}\.so", made.name)


@on_linux
@pytest.mark.parametrize("kept", [0, 3000])
def test_a_damaged_library_is_built_again(tmp_path, kept):
    """One that is cut off would be mapped beyond its end, and end the process with SIGBUS."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    in_a_process(WHICH_FORM, SPINDLE_CACHE=str(tmp_path))
    (made,) = (tmp_path / "build").iterdir()
    whole = made.stat().st_size
    os.truncate(made, kept)
    lines = in_a_process(WHICH_FORM, SPINDLE_CACHE=str(tmp_path))
    assert lines == ["panels", "[[3.0, 12.0]]", "None"]
    assert made.stat().st_size == whole


@on_linux
def test_a_library_is_for_one_processor_compiler_and_source(monkeypatch):
    """Its name holds all that its machine code depends on: a cache may be shared by machines."""
    monkeypatch.delenv("SPINDLE_NO_EXT", raising=False)
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    places = [build.place("cpu")]
    for name, value in (
        ("_processor", lambda: b"another"),
        ("version", lambda command: b"another"),
        ("FLAGS", ["-O0"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            places.append(build.place("cpu"))
    assert len(set(places)) == 4 and build.place("cpu") == places[0]


@on_linux
def test_the_native_forms_share_the_threads_of_torch():
    """One OpenMP runtime in the process: two would wait for each other's threads."""
    if not native.available():
        pytest.skip(f"no native form here: {build.why_not('cpu')}")
    program = (
        "import torch; from spindle.kernels import native; native.available();"
        "maps = open('/proc/self/maps').read().split();"
        "print(len({m for m in maps if m.startswith('/') and 'omp' in m.rpartition('/')[2]}))"
    )
    assert in_a_process(program) == ["1"]


# --- on other processors -------------------------------------------------------------------------

X86 = platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"
needs_gcc = pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="no g++ on an x86")


@needs_gcc
@pytest.mark.parametrize("level", ["x86-64-v2", "haswell"])
def test_products_of_other_processors_are_the_twins(level, tmp_path):
    """Whoever has fewer or narrower registers gets the same sums, by other instructions."""
    if level == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here")
    made = tmp_path / "made.so"
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    file = build.SOURCES / "cpu.cpp"
    command = ["g++", *flags, f"-march={level}", "-shared", str(file), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    lib, N, K = ctypes.CDLL(str(made)), 70, 600
    weight, bias = random(N, K, dtype=torch.float32), random(N, dtype=torch.float32)
    integers, scale = twins.quantize(weight)
    for T in (1, 2, 5, 13, 40):
        x = random(T, K, seed=T, dtype=torch.float32)
        for w, scales in ((weight, None), (integers, scale)):
            panels, y = w.new_empty(-(-N // 32), K, 32), torch.empty(T, N)
            pack = lib.spindle_pack if scales is None else lib.spindle_int8_pack
            sizes = [ctypes.c_int64(n) for n in (T, K, N)]
            given = [x, panels, *([] if scales is None else [scales]), bias, y]
            pack(*pointers(w, panels), ctypes.c_int64(N), ctypes.c_int64(K), 1)
            multiply = lib.spindle_linear if scales is None else lib.spindle_int8_linear
            multiply(*pointers(*given), *sizes, 1)
            exact = w.double() if scales is None else w.double() * scales[:, None].double()
            bound = (K + 4) * EPS32 * (x.abs().double() @ exact.abs().t() + bias.abs())
            assert ((y - (x.double() @ exact.t() + bias)).abs() <= bound).all()


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


# --- where packed weights lie --------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.booleans()), max_size=12))
def test_parts_of_a_piece_are_apart_and_aligned(sizes):
    """Each keeps what is written to it, whatever is written to the others; pieces are aligned."""
    space, made = room.Room(), []
    with mock.patch.object(room, "PIECE", 4096):
        for a, b, whole in sizes:
            dtype = torch.int8 if whole else torch.float32
            made.append(space.empty((a, b), dtype).fill_(len(made)))
    for n, (x, (a, b, whole)) in enumerate(zip(made, sizes, strict=True)):
        assert x.shape == (a, b) and x.is_contiguous() and (x == n).all()
        assert x.dtype == (torch.int8 if whole else torch.float32)
        assert x.data_ptr() % room.LINE == 0


@pytest.mark.parametrize("nbytes", [1, room.PAGE - 1, room.PAGE, 3 * room.PAGE + 1])
def test_large_pieces_are_whole_pages(nbytes):
    piece = room.large(nbytes)
    assert nbytes <= len(piece) < nbytes + room.PAGE and len(piece) % room.PAGE == 0
    assert piece.data_ptr() % room.PAGE == 0
    piece.fill_(7)  # all of it is there


def test_the_weights_of_a_model_share_pieces_and_a_model_that_is_gone_frees_them(form):
    model = random_model(shapes.llama(), dtype=torch.float32)
    weights = [w for x in model.layers for w in vars(x).values() if isinstance(w, kernels.Weight)]
    panels = [w.panels for w in weights if w.panels is not None]
    if form == "panels":
        homes = {x.untyped_storage().data_ptr() for x in panels}
        assert len(panels) == 12 and len(homes) == 1
        gone = weakref.ref(panels[0].untyped_storage())
        del model, weights, panels
        gc.collect()
        assert gone() is None
