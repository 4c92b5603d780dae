"""CUDA sources on the CPU: the emulator by itself, each kernel against its twin, planted faults.

A bound comes from the arithmetic: what a kernel may compute in float32 lies within a known distance
of the exact value, and rounding keeps the order of numbers; so each result must lie between the
rounded ends. In 16 bits the ends are nearly always the same number.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from spindle.kernels import build, cuda, emulate, twins

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or build.compiler() is None, reason="no C++ compiler, or no Linux"
    ),
    pytest.mark.usefixtures("own_cache"),
]
EPS32 = torch.finfo(torch.float32).eps
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORDERS = [("up", 0), ("down", 0), ("random", 1), ("random", 2)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


# --- the emulator by itself, on small kernels ----------------------------------------------------

# Each writes what it saw; `spindle_NAME` launches it with a grid and a block of any shape.
KIT = """
#include "common.cuh"
#define LAUNCHER(name, Out, In) \\
  extern "C" int spindle_##name(Out* out, const In* in, int64_t blocks, int64_t threads, void*)

__global__ void who(int* out, int* turn) {  // the turns, and how many were taken
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[atomicAdd(turn, 1)] = block * blockDim.x * blockDim.y * blockDim.z + thread;
}
LAUNCHER(who, int, int) {
  who<<<dim3(2, blocks, 3), dim3(threads, 2, 2)>>>(out, out + 480);
  return cudaGetLastError();
}

__global__ void shuffles(int* out, const int* in) {
  const int lane = threadIdx.x, x = in[lane];
  const bool low = lane < 16;
  out[lane] = __shfl_xor_sync(WHOLE_WARP, x, 5);
  out[32 + lane] = __shfl_down_sync(WHOLE_WARP, x, 3);
  out[64 + lane] = __shfl_sync(WHOLE_WARP, x, 7);
  out[96 + lane] = __shfl_sync(WHOLE_WARP, x, 9, 8);
  out[128 + lane] = __shfl_down_sync(WHOLE_WARP, x, 3, 8);
  out[160 + lane] = __shfl_xor_sync(low ? 0xffff : 0xffff0000, x, 1);
  if (low) out[192 + lane] = __shfl_down_sync(0xffff, x, 1, 16);
}
LAUNCHER(shuffles, int, int) { shuffles<<<1, 32>>>(out, in); return cudaGetLastError(); }

// Neighbours by shared memory inside a warp, and two sums of a block one after the other.
__global__ void passes(float* out, const float* in) {
  __shared__ float shifted[64];
  const int i = threadIdx.x;
  shifted[i] = in[i];
  __syncwarp();
  out[i] = shifted[i ^ 1];
  out[64 + i] = block_sum(in[i]);
  out[128 + i] = block_sum(in[i] * in[i]);
}
LAUNCHER(passes, float, float) { passes<<<1, threads>>>(out, in); return cudaGetLastError(); }

// What a block finds in shared memory that it did not write.
__global__ void found(float* out) {
  __shared__ float fixed[2];
  extern __shared__ float sized[];
  out[4 * blockIdx.x] = fixed[0];
  out[4 * blockIdx.x + 1] = sized[0];
  fixed[0] = sized[0] = 1.0f;
  out[4 * blockIdx.x + 2] = fixed[0];
  out[4 * blockIdx.x + 3] = sized[0];
}
LAUNCHER(found, float, float) { found<<<blocks, 1, 8>>>(out); return cudaGetLastError(); }

__global__ void fours(float* out, const float* in) {
  const float4 x = *reinterpret_cast<const float4*>(in + threadIdx.x);
  *reinterpret_cast<float4*>(out + 4 * threadIdx.x) = make_float4(x.w, x.z, x.y, rsqrtf(x.x));
}
LAUNCHER(fours, float, float) { fours<<<1, threads>>>(out, in); return cudaGetLastError(); }

__global__ void narrow(__half* out, const float* in) {
  out[threadIdx.x] = __float2half(in[threadIdx.x]);
}
__global__ void narrow_bf(__nv_bfloat16* out, const float* in) {
  out[threadIdx.x] = __float2bfloat16(in[threadIdx.x]);
}
__global__ void widen(float* out, const __half* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = __half2float(in[i]);
}
__global__ void widen_bf(float* out, const __nv_bfloat16* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = __bfloat162float(in[i]);
}
LAUNCHER(narrow, __half, float) { narrow<<<1, threads>>>(out, in); return cudaGetLastError(); }
LAUNCHER(narrow_bf, __nv_bfloat16, float) {
  narrow_bf<<<1, threads>>>(out, in); return cudaGetLastError();
}
LAUNCHER(widen, float, __half) { widen<<<blocks, threads>>>(out, in); return cudaGetLastError(); }
LAUNCHER(widen_bf, float, __nv_bfloat16) {
  widen_bf<<<blocks, threads>>>(out, in); return cudaGetLastError();
}
"""


def kit(name: str, out: Tensor, given: Tensor, blocks: int = 1, threads: int = 32) -> Tensor:
    emulated = emulate.library(KIT, "kit.cu")
    emulate.call(emulated, f"spindle_{name}", out, given, blocks, threads, None)
    return out


RESPELT = {
    "f<<<1, 32>>>(x);": "emulator::launch(f, 1, 32)(x);",
    "f<T, 4><<<dim3(2, n), g(b), 0, s>>>(\n  x);": (
        "emulator::launch(f<T, 4>, dim3(2, n), g(b), 0, s)(\n  x);"
    ),
    "f<Pack<T, 2>><<<\n  a,\n  b>>>(x)": "emulator::launch(f<Pack<T, 2>>, \n  a,\n  b)(x)",
    "__shared__ float a;": "auto& a = emulator::shared<float>([] {});",
    "__shared__ unsigned char a[2][N + 1];": (
        "auto& a = emulator::shared<unsigned char[2][N + 1]>([] {});"
    ),
    "__shared__ alignas(16) Pack<T, 2> a[4];": "auto& a = emulator::shared<Pack<T, 2>[4]>([] {});",
    "extern __shared__ __align__(16) int a[];": "auto* a = emulator::dynamic_shared<int>();",
    "a << 3 >> 2; b<c>(d);": "a << 3 >> 2; b<c>(d);",
}


@pytest.mark.parametrize("text", RESPELT)
def test_what_is_no_cpp_is_respelt_and_stays_on_its_line(text):
    ours = emulate.unit(f'\n#include "common.cuh"\n{text}\n', "some.cu")
    assert ours.endswith(f'#line 3 "some.cu"\n{RESPELT[text]}\n')
    assert ours.count("\n") == emulate.unit('\n#include "common.cuh"\n\n', "some.cu").count(
        "\n"
    ) + text.count("\n")


def turns(order: str, seed: int = 0) -> list[int]:
    """Who ran first, second, ... of 2 x 1 x 3 blocks of 20 x 2 x 2 threads: block * 80 + thread."""
    with emulate.thread_order(order, seed):
        out = torch.tensor([-1] * 480 + [0], dtype=torch.int32)
        return kit("who", out, out, 1, 20).tolist()[:-1]


def test_every_thread_of_every_block_runs_once_in_the_order_that_was_set():
    assert turns("up") == list(range(480))
    assert turns("down") == list(range(480))[::-1]
    draws = [turns("random", seed) for seed in (1, 2, 1)]
    assert all(sorted(draw) == turns("up") for draw in draws)
    assert draws[0] == draws[2] != draws[1]


def test_a_random_order_mixes_blocks_and_warps_and_lanes():
    draw = turns("random", 3)
    blocks = [at // 80 for at in draw[::80]]
    first = [at % 80 for at in draw if at // 80 == blocks[0]]
    assert blocks != sorted(blocks) and first[:16] != sorted(first[:16])
    assert any(turns("random", seed)[0] % 80 >= 32 for seed in range(4, 12))  # not always warp 0


def test_shuffles_give_each_lane_the_value_it_asked_for(in_order):
    x = 100 + torch.arange(32, dtype=torch.int32)
    out = kit("shuffles", torch.full((208,), -1, dtype=torch.int32), x)
    lanes = torch.arange(32)
    part, place = lanes // 8 * 8, lanes % 8
    assert torch.equal(out[:32], x[lanes ^ 5])
    assert torch.equal(out[32:64], x[torch.where(lanes + 3 < 32, lanes + 3, lanes)])
    assert torch.equal(out[64:96], x[7].expand(32))
    assert torch.equal(out[96:128], x[part + 9 % 8])
    assert torch.equal(out[128:160], x[torch.where(place + 3 < 8, lanes + 3, lanes)])
    assert torch.equal(out[160:192], x[lanes ^ 1])
    assert torch.equal(out[192:], x[(lanes[:16] + 1).clamp(max=15)])


@pytest.mark.parametrize("flags", [(), ("-DSPINDLE_UCONTEXT",)], ids=["asm", "ucontext"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_barriers_hold_and_two_sums_in_a_row_do_not_meet(order, flags):
    """Exact: the values are whole numbers. With both ways to switch between fibres."""
    x, out = torch.arange(64.0), torch.full((192,), torch.nan)
    with emulate.thread_order(*order):
        emulated = emulate.library(KIT, "kit.cu", flags)
        emulate.call(emulated, "spindle_passes", out, x, 1, 64, None)
    assert torch.equal(out[:64], x[torch.arange(64) ^ 1])
    assert (out[64:128] == x.sum()).all() and (out[128:] == x.square().sum()).all()


def test_each_block_finds_nan_in_shared_memory():
    out = kit("found", torch.zeros(12), torch.zeros(1), blocks=3).view(3, 4)
    assert out[:, :2].isnan().all() and (out[:, 2:] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sixteen_bits_mean_what_they_mean_to_torch(dtype):
    """All 65536 patterns to float, in bits; and back, with all that lies half way between two."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    end = "_bf" if dtype == torch.bfloat16 else ""
    wide = kit(f"widen{end}", torch.empty(2**16), bits, 64, 1024)
    assert torch.equal(wide.nan_to_num(7.0), bits.view(dtype).float().nan_to_num(7.0))
    assert torch.equal(wide.isnan(), bits.view(dtype).isnan())
    finite = wide[wide.isfinite()].sort()[0]
    between = (finite[:-1].double() + finite[1:].double()) / 2  # ties: to even
    near = between.float().nextafter(finite[1:])
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 3.4e38])
    for start in torch.cat((finite, between.float(), near, -near, odd)).split(1024):
        narrow = kit(f"narrow{end}", torch.empty(len(start), dtype=dtype), start, 1, len(start))
        expected = start.to(dtype)
        assert torch.equal(narrow.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(narrow[kept].view(torch.int16), expected[kept].view(torch.int16))


def test_a_vector_is_loaded_whole_and_never_from_between_two():
    x, out = 1 + torch.arange(24.0), torch.zeros(4)
    kit("fours", out, x[4:], threads=1)
    assert torch.equal(out, torch.cat((x[[7, 6, 5]], 1 / x[4:5].sqrt())))
    with pytest.raises(
        emulate.KernelFault,
        match=r"^kit.cu:\d+: thread \(1, 0, 0\) in block \(0, 0, 0\): misaligned address 0x",
    ):
        kit("fours", torch.zeros(8), x, threads=2)


# --- each kernel against its twin ----------------------------------------------------------------


def assert_between(ours: Tensor, low: Tensor, high: Tensor) -> None:
    """Each element of ours lies between the two, ends included; NaN does nowhere."""
    assert ours.dtype == low.dtype == high.dtype and ours.shape == low.shape
    assert (ours >= torch.minimum(low, high)).all() and (ours <= torch.maximum(low, high)).all()


def product(x: Tensor, y: Tensor) -> Tensor:
    """Of two tensors in one dtype, rounded once."""
    return (x.double() * y.double()).to(x.dtype)


def assert_normed(ours: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """E squares in a sum: off by at most E eps, half of that under the root; then four products."""
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    off = (x.shape[-1] / 2 + 4) * EPS32
    ends = [product((exact * (1 + by)).to(x.dtype), weight.expand_as(x)) for by in (-off, off)]
    assert_between(ours, *ends)
    assert_between(twins.rms_norm(x, weight, eps), *ends)


def guarded(x: Tensor, off: int = 0) -> Tensor:
    """A copy of x that starts `off` elements behind a multiple of 16 bytes, NaN on both sides."""
    around = x.new_full((x.numel() + 64,), torch.nan)
    inner = around[16 + off : 16 + off + x.numel()]
    inner.copy_(x.flatten())
    return inner.view(x.shape)


@pytest.fixture
def guards(monkeypatch) -> Iterator[None]:
    """What the ops return lies between NaN too; afterwards nothing has been written there."""
    made = []

    def unwritten(*shape: int, like: Tensor) -> Tensor:
        made.append(guarded(like.new_full(shape, torch.nan)))
        return made[-1]

    monkeypatch.setattr(cuda, "_unwritten", unwritten)
    yield
    assert made
    for inner in made:
        around = inner.new_empty(0).set_(inner.untyped_storage())
        assert around.numel() == inner.numel() + 64
        assert around[:16].isnan().all() and around[-48:].isnan().all()


WIDTHS = [1, 8, 31, 50, 96, 257, 576, 1000]  # below a warp, ragged, whole vectors, several a thread


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [*WIDTHS, 4160, 8192])
def test_rms_norm_is_the_twin_within_rounding(E, dtype, in_order, guards):
    for off in (0, 1):  # whole vectors where E allows it, and never
        x, weight = guarded(3 * random(3, E, dtype=dtype), off), random(E, dtype=dtype)
        assert_normed(cuda.rms_norm(x, weight, 1e-5), x, weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", WIDTHS)
def test_add_rms_norm_is_the_twin_within_rounding(E, dtype, in_order, guards):
    for off in (0, 1):
        x, residual = guarded(random(3, E, dtype=dtype)), random(3, E, seed=1, dtype=dtype)
        weight, taken = random(E, dtype=dtype), guarded(residual, off)
        normed, carried = cuda.add_rms_norm(x, taken, weight, 0.5)
        assert torch.equal(carried, x + residual)
        assert_normed(normed, carried, weight, 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [2, 6, 16, 34, 64, 80, 128])
def test_rope_is_the_twin_within_rounding(D, dtype, in_order):
    """Two products and a sum in float32, rounded once. q and k are slices; v beside them stays."""
    heads, angles = random(3, 9, D, dtype=dtype), 3 * random(3, D // 2)
    cos, sin = angles.cos(), angles.sin()
    expected = heads.clone().split((6, 2, 1), dim=1)
    turned = guarded(heads)
    q, k, v = turned.split((6, 2, 1), dim=1)
    assert cuda.rope(q, k, cos, sin) is None
    twins.rope(*expected[:2], cos, sin)
    for ours, twin, before in zip((q, k), expected, heads.split((6, 2, 1), 1), strict=False):
        (a, b), c, s = before.double().chunk(2, -1), cos.double()[:, None], sin.double()[:, None]
        exact = torch.cat((a * c - b * s, b * c + a * s), -1)
        off = 2 * EPS32 * torch.cat([a.abs() + b.abs()] * 2, -1)
        ends = (exact - off).to(dtype), (exact + off).to(dtype)
        assert_between(ours, *ends)
        assert_between(twin, *ends)
    assert torch.equal(v, heads[:, 8:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("F", WIDTHS)
def test_silu_mul_is_the_twin_within_rounding(F, dtype, in_order, guards):
    """An exponential, a sum and a quotient in float32, rounded; then one product, rounded."""
    gate, up = 4 * random(3, F, dtype=dtype), random(3, F, seed=1, dtype=dtype)
    both = guarded(torch.cat((gate, up), -1))
    exact = gate.double() * gate.double().sigmoid()
    ends = [product((exact * (1 + by)).to(dtype), up) for by in (-6 * EPS32, 6 * EPS32)]
    assert_between(cuda.silu_mul(both), *ends)
    assert_between(twins.silu_mul(both), *ends)


ODD = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, -1e4, 1e4]


def test_what_is_no_number_goes_through_as_in_the_twins(in_order):
    """And stays in its row: the others have the same bits as without it."""
    odd = torch.tensor(ODD)
    both = torch.cat((odd, torch.ones(len(odd))))[None]
    torch.testing.assert_close(
        cuda.silu_mul(both), twins.silu_mul(both), equal_nan=True, rtol=1e-6, atol=1e-37
    )
    rows = torch.cat((odd[:, None] + torch.zeros(len(odd), 40), random(2, 40)))
    weight = random(40)
    ours = cuda.rms_norm(rows, weight, 1e-6)
    torch.testing.assert_close(
        ours, twins.rms_norm(rows, weight, 1e-6), equal_nan=True, rtol=1e-5, atol=1e-37
    )
    assert torch.equal(ours[-2:], cuda.rms_norm(rows[-2:], weight, 1e-6))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("D", [1, 3, 8, 64])
def test_write_kv_writes_the_slots_and_nothing_else(D, dtype, in_order):
    """All else in the pool is NaN before and after. The rows are slices of something wider."""
    pool = torch.full((7, 4, 2, D), torch.nan, dtype=dtype)
    qkv, slots = random(5, 9, D, dtype=dtype), torch.tensor([27, 0, 9, 8, 14])
    for new in (qkv[:, 4:6], qkv[:, 4:6].clone(), qkv[:, ::4][:, :2]):
        ours, theirs = pool.clone(), pool.clone()
        assert cuda.write_kv(ours, slots, new) is None
        twins.write_kv(theirs, slots, new)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("D", [1, 3, 64])
def test_copy_blocks_is_the_twin_in_every_layer(D, dtype, in_order):
    pool = random(3, 7, 4, 2, D, dtype=dtype)
    pool[:, 6] = torch.nan
    source, target = torch.tensor([0, 3, 3]), torch.tensor([5, 1, 6])
    ours, theirs = pool.clone(), pool.clone()
    assert cuda.copy_blocks(ours, source, target) is None
    twins.copy_blocks(theirs, source, target)
    assert torch.equal(ours, theirs) and not ours.isnan().any()


@pytest.mark.parametrize("T", [0, 1, 33])
def test_any_number_of_rows_and_a_row_has_the_same_bits_in_each(T, in_order):
    x, weight, angles = random(40, 6, 16), random(96), random(40, 8)
    for op in (
        lambda x: cuda.rms_norm(x.flatten(1), weight, 1e-5),
        lambda x: torch.stack(cuda.add_rms_norm(x.flatten(1), x.flatten(1) + 1, weight, 1e-5)),
        lambda x: cuda.silu_mul(x.flatten(1)),
    ):
        assert torch.equal(op(x[:T]), op(x)[..., :T, :])
    whole, part = x.clone(), x[:T].clone()
    cuda.rope(whole[:, :4], whole[:, 4:], angles.cos(), angles.sin())
    cuda.rope(part[:, :4], part[:, 4:], angles[:T].cos(), angles[:T].sin())
    assert torch.equal(part, whole[:T])
    pool, slots = torch.zeros(12, 4, 6, 16), torch.arange(40)[:T]
    cuda.write_kv(pool, slots, x[:T])
    assert torch.equal(pool.flatten(0, 1)[:T], x[:T]) and (pool.flatten(0, 1)[T:] == 0).all()


x32, w32 = torch.ones(3, 8), torch.ones(8)
REFUSED = {
    "float64": lambda: cuda.rms_norm(x32.double(), w32.double(), 1e-5),
    "a weight of another dtype": lambda: cuda.rms_norm(x32, w32.half(), 1e-5),
    "a weight too short": lambda: cuda.rms_norm(x32, w32[:4], 1e-5),
    "a residual of one row": lambda: cuda.add_rms_norm(x32, x32[:1], w32, 1e-5),
    "a residual with gaps": lambda: cuda.add_rms_norm(x32, torch.ones(3, 16)[:, :8], w32, 1e-5),
    "an odd width": lambda: cuda.silu_mul(torch.ones(2, 7)),
    "angles in 16 bits": lambda: cuda.rope(*[x32.view(3, 1, 8)] * 2, *[x32[:, :4].half()] * 2),
    "elements apart": lambda: cuda.rope(*[torch.ones(3, 8, 2).mT] * 2, *[x32[:, :4]] * 2),
    "a pool with gaps": lambda: cuda.write_kv(
        torch.ones(4, 4, 2, 16)[..., :8], torch.tensor([1]), torch.ones(1, 2, 8)
    ),
    "a slot too few": lambda: cuda.write_kv(
        torch.ones(4, 4, 2, 8), torch.tensor([1]), torch.ones(2, 2, 8)
    ),
    "blocks in int32": lambda: cuda.copy_blocks(
        torch.ones(1, 4, 4, 2, 8), *[torch.ones(1, dtype=torch.int32)] * 2
    ),
    "another device": lambda: cuda.silu_mul(torch.ones(2, 8, device="meta")),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_kernel_would_read_wrongly_is_refused(fault):
    with pytest.raises(cuda.Unfit, match=r"\w+: torch\.\w+ \[.*do not go together"):
        REFUSED[fault]()


def test_a_row_that_does_not_fit_into_shared_memory_is_refused():
    x, weight = torch.ones(1, 13000), torch.ones(13000)
    with pytest.raises(cuda.Unfit, match=r"rms_norm: .* are not for kernels"):
        cuda.rms_norm(x, weight, 1e-5)
    with pytest.raises(emulate.KernelFault, match="spindle_rms_norm refused its arguments"):
        cuda._launch(
            "rmsnorm.cu", "spindle_rms_norm", x, None, weight, x.clone(), 1, 13000, 1e-5, 0
        )
    assert cuda.rms_norm(torch.ones(1, 13000).half(), torch.ones(13000).half(), 0.0).eq(1).all()


# --- planted faults ------------------------------------------------------------------------------


def sees_norm() -> bool:
    """Several packs a thread, ragged, in vectors and one by one, a weight, a large eps."""
    for E in (4100, 576, 1001, 33):
        x, weight, residual = random(3, E), random(E), random(3, E, seed=1)
        right = twins.add_rms_norm(x, residual.clone(), weight, 0.5)
        both = cuda.add_rms_norm(x, residual.clone(), weight, 0.5)
        for ours, twin in zip(both, right, strict=True):
            if not torch.allclose(ours, twin, rtol=1e-4, atol=1e-5):
                return True
    return False


def sees_norm_rounding() -> bool:
    x, weight = random(3, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16)
    return not torch.equal(cuda.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5))


def sees_rope() -> bool:
    heads, angles = random(3, 7, 10), random(3, 5)
    ours, theirs = ((h[:, :4], h[:, 4:6]) for h in (heads.clone(), heads.clone()))
    cuda.rope(*ours, angles.cos(), angles.sin())
    twins.rope(*theirs, angles.cos(), angles.sin())
    pairs = zip(ours, theirs, strict=True)
    return not all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)


def sees_silu() -> bool:
    both = random(3, 2 * 301)
    return not torch.allclose(cuda.silu_mul(both), twins.silu_mul(both), rtol=1e-4, atol=1e-6)


def sees_copy() -> bool:
    pool, new = random(2, 7, 4, 2, 6), random(3, 5, 6)[:, 1:3]
    ours, theirs = pool.clone(), pool.clone()
    for op, cache in ((cuda, ours), (twins, theirs)):
        op.write_kv(cache[1], torch.tensor([3, 27, 8]), new)
        op.copy_blocks(cache, torch.tensor([0, 6]), torch.tensor([5, 3]))
    return not torch.equal(ours, theirs)


ALL_THERE = "  __syncthreads();  // all sums are there before anyone reads one\n"
ALL_READ = "  __syncthreads();  // all have been read before a next call writes\n"
MUTANTS: dict[str, tuple[Callable[[], bool], str, str, str]] = {
    "a barrier deleted": (sees_norm, "common.cuh", ALL_THERE, "\n"),
    "a barrier for the warp alone": (sees_norm, "common.cuh", ALL_THERE, "  __syncwarp();\n"),
    "a mask forgotten": (
        *(sees_norm, "common.cuh"),
        *("lane < blockDim.x / WARP ? sums[lane] : 0.0f", "sums[lane]"),
    ),
    "one step of the shuffle short": (sees_norm, "common.cuh", "apart > 0;", "apart > 1;"),
    "not divided by the width": (sees_norm, "rmsnorm.cu", "(squares) / width", "(squares)"),
    "eps forgotten": (sees_norm, "rmsnorm.cu", " / width + eps", " / width"),
    "the weight of another column": (sees_norm, "rmsnorm.cu", "(weight + i)", "(weight + first)"),
    "the sum not carried on": (
        *(sees_norm, "rmsnorm.cu"),
        *("      store_pack<V>(residual + start + i, values);\n", "\n"),
    ),
    "not rounded before the weight": (
        *(sees_norm_rounding, "rmsnorm.cu"),
        *(
            "normed = rounded<T>(to_float(values.at[v]) * scale)",
            "normed = to_float(values.at[v]) * scale",
        ),
    ),
    "vectors beyond the row's end": (
        *(sees_norm, "common.cuh"),
        *("bytes % VECTOR_BYTES == 0;", "true;"),
    ),
    "turned the other way": (sees_rope, "rope.cu", "a * cos - b * sin", "a * cos + b * sin"),
    "read after it was written": (
        *(sees_rope, "rope.cu"),
        *("b * cos + a * sin", "b * cos + to_float(head[i]) * sin"),
    ),
    "the keys' heads not counted from 0": (sees_rope, "rope.cu", "(head - H) *", "head *"),
    "the keys forgotten": (sees_rope, "rope.cu", "(H + Hk) * half;", "H * half;"),
    "gate and up swapped": (
        *(sees_silu, "silu.cu"),
        *(
            "gate_up + row * 2 * width + i)",
            "gate_up + row * 2 * width + (width + i) % (2 * width))",
        ),
    ),
    "the end of the row forgotten": (sees_silu, "silu.cu", "if (i >= width) return;", ""),
    "the rows' distance forgotten": (sees_copy, "copy.cu", "row * from_row", "row * units"),
    "the first layer alone": (
        *(sees_copy, "copy.cu"),
        *("cache + blockIdx.y * blocks * units", "cache"),
    ),
    "source and target swapped": (
        *(sees_copy, "copy.cu"),
        *("layer + source[blockIdx.x] * units", "layer + target[blockIdx.x] * units"),
    ),
}


@pytest.mark.parametrize(
    "check", sorted({m[0] for m in MUTANTS.values()}, key=lambda f: f.__name__)
)
def test_without_a_fault_the_checks_see_none(check, in_order):
    assert not check()


@pytest.fixture
def quickly_compiled(monkeypatch) -> None:
    flags = ["-O0" if flag == "-O1" else flag for flag in emulate.OF_KERNELS]
    monkeypatch.setattr(emulate, "OF_KERNELS", flags)


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name):
    """By a wrong result or a report, in at least one of the orders; races are not reported here."""
    check, file, old, new = MUTANTS[name]
    caught = []
    with emulate.edited(file, old, new), emulate.races_ignored():
        for order in ORDERS:
            with emulate.thread_order(*order):
                try:
                    caught.append(check())
                except emulate.KernelFault:
                    caught.append(True)
    assert any(caught), caught


# --- faults, told by block, thread and line ------------------------------------------------------

# Of each: the body of a kernel of 64 threads in 2 blocks, out [128] ints; and what is said of it,
# where N, M stand for the lines that end in `// N`, `// M`.
FAULTS: dict[str, tuple[str, str]] = {
    "a barrier for half of the block": (
        """
        if (threadIdx.x < 40)
          __syncthreads();  // N
        """,
        r"kit.cu:N: __syncthreads\(\) in block \(., 0, 0\) is reached by 40 of 64 threads, "
        r"thread \(0, 0, 0\) among them; thread \(40, 0, 0\) has returned",
    ),
    "two barriers at once": (
        """
        if (threadIdx.x % 2 == 0)
          __syncthreads();  // N
        else
          __syncthreads();  // M
        """,
        r"kit.cu:N: __syncthreads\(\) in block \(., 0, 0\) is reached by 32 of 64 threads, "
        r"thread \(0, 0, 0\) among them; thread \(1, 0, 0\) waits in __syncthreads\(\) at kit.cu:M",
    ),
    "a barrier beside a shuffle": (
        """
        if (threadIdx.x == 5)
          __syncthreads();  // M
        out[threadIdx.x] = __shfl_xor_sync(WHOLE_WARP, 1, 1);  // N
        """,
        r"kit.cu:N: __shfl_xor_sync\(\) in block \(., 0, 0\) is reached by (31|63) of 64 threads, "
        r"thread \(0, 0, 0\) among them; thread \(5, 0, 0\) waits in __syncthreads\(\) at kit.cu:M",
    ),
    "a shuffle with a lane that has returned": (
        """
        if (threadIdx.x == 37) return;
        out[threadIdx.x] = __shfl_down_sync(WHOLE_WARP, 1, 1);  // N
        """,
        r"kit.cu:N: __shfl_down_sync\(\) in block \(., 0, 0\): thread \(32, 0, 0\) waits for "
        r"lane 5, which has returned",
    ),
    "a shuffle from a lane that was left out": (
        """
        if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffff, 1, 16);  // N
        """,
        r"kit.cu:N: thread \((0|15|\d+), 0, 0\) in block \(., 0, 0\) calls __shfl_xor_sync\(\) for "
        r"the lanes 0x0000ffff, but reads from another",
    ),
    "a shuffle by a lane that was left out": (
        """
        out[threadIdx.x] = __shfl_sync(0x7fffffff, 1, 0);  // N
        """,
        r"kit.cu:N: thread \((31|63), 0, 0\) in block \(., 0, 0\) calls __shfl_sync\(\) for "
        r"the lanes 0x7fffffff, but is none of them|"
        r"kit.cu:N: __shfl_sync\(\) .*",
    ),
    "lanes that name each other differently": (
        """
        __syncwarp(threadIdx.x % 32 < 16 ? 0xffffffff : 0xffff0000);  // N
        out[0] = __shfl_sync(threadIdx.x % 32 < 16 ? 0xffff : WHOLE_WARP, 1, threadIdx.x % 32);
        """,
        r"kit.cu:N: __syncwarp\(\) in block \(., 0, 0\) is reached by \d+ of 64 threads, .*",
    ),
    "a race between warps": (
        """
        __shared__ int last;
        last = threadIdx.x;                   // N
        """,
        r"kit.cu:N: thread \(\d+, 0, 0\) in block \(., 0, 0\) writes shared memory that "
        r"thread \(\d+, 0, 0\) wrote at kit.cu:N, and no barrier is between them",
    ),
    "a race inside a warp": (
        """
        __shared__ int all[64];
        __syncwarp();
        all[threadIdx.x] = 1;                 // N
        out[threadIdx.x] = all[threadIdx.x ^ 1];  // M
        """,
        r"kit.cu:(N|M): thread \(\d+, 0, 0\) in block \(., 0, 0\) (reads|writes) shared memory "
        r"that thread \(\d+, 0, 0\) (read|wrote) at kit.cu:(N|M), and no barrier is between them",
    ),
    "read by all while it is written": (
        """
        __shared__ int word;
        if (threadIdx.x == 63)
          word = 1;  // N
        else
          out[threadIdx.x] = word;  // M
        """,
        r"kit.cu:(N|M): thread \(\d+, 0, 0\) in block \(., 0, 0\) (reads|writes) shared memory "
        r"that thread \(\d+, 0, 0\) (read|wrote) at kit.cu:(N|M), and no barrier is between them",
    ),
    "counted without an atomic": (
        """
        __shared__ int count;
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        count += 1;  // N
        """,
        r"kit.cu:N: thread \(\d+, 0, 0\) in block \(., 0, 0\) reads shared memory that "
        r"thread \(\d+, 0, 0\) wrote at kit.cu:N, and no barrier is between them",
    ),
    "lanes that met others": (
        """
        __shared__ int all[64];
        all[threadIdx.x] = 1;                 // N
        __syncwarp(threadIdx.x % 32 < 16 ? 0xffff : 0xffff0000);
        out[threadIdx.x] = all[threadIdx.x ^ 16];  // M
        """,
        r"kit.cu:(N|M): thread \(\d+, 0, 0\) in block \(., 0, 0\) (reads|writes) shared memory .*",
    ),
    "an index beyond the array": (
        """
        __shared__ int all[63];
        all[threadIdx.x] = 1;  // N
        """,
        r"kit.cu:N: thread \(63, 0, 0\) in block \(., 0, 0\): beyond the array, index 0x3f",
    ),
    "beyond dynamic shared memory": (
        """
        extern __shared__ int all[];
        all[threadIdx.x + 1] = 1;  // N
        """,
        r"kit.cu:N: thread \(63, 0, 0\) in block \(., 0, 0\) writes 4 bytes from byte 256 on of "
        r"dynamic shared memory, which has 256",
    ),
    "a write beyond the tensor": (
        """
        out[blockIdx.x * 64 + threadIdx.x + 1] = 1;  // N
        """,
        r"kit.cu:N: thread \(63, 0, 0\) in block \(1, 0, 0\) writes 4 bytes from byte 512 on of "
        r"a tensor, which has 512",
    ),
    "a read before the tensor": (
        """
        if (threadIdx.x == 9) out[9] = out[-2];  // N
        """,
        r"kit.cu:N: thread \(9, 0, 0\) in block \(., 0, 0\) reads 4 bytes from byte -8 on of "
        r"a tensor, which has 512",
    ),
}
HARMLESS = {
    "counted together": """
        __shared__ int count;
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        atomicAdd(&count, 1);
        __syncthreads();
        out[blockIdx.x * 64 + threadIdx.x] = count - 63;
    """,
    "passed on from lane to lane": """
        __shared__ int all[64];
        all[threadIdx.x] = 1;
        __syncwarp();
        out[blockIdx.x * 64 + threadIdx.x] = all[threadIdx.x ^ 1];
    """,
    "known by way of a third": """
        __shared__ int all[64];
        const int lane = threadIdx.x % 32;
        all[threadIdx.x] = 1;
        __syncwarp(lane < 16 ? 0xffff : 0xffff0000);
        if (lane < 8 || lane >= 24) __syncwarp(0xff0000ff);
        out[blockIdx.x * 64 + threadIdx.x] = lane < 8 ? all[threadIdx.x + 20] : 1;
    """,
    "some return early": """
        out[blockIdx.x * 64 + threadIdx.x] = 1;
        if (threadIdx.x >= 32) return;
        __syncwarp();
    """,
}


GRIDS = {
    "1, 1025": "a block of 1025 x 1 x 1 threads",
    "1, 0": "a block of 0 x 1 x 1 threads",
    "dim3(1, 1, 70000), 32": "a grid of 1 x 1 x 70000 blocks",
    "0, 32": "a grid of 0 x 1 x 1 blocks",
    "1, 32, 50000": "50000 bytes of shared memory: a block has 49152",
}
BODIES = {
    **{name: (body, "2, 64, 64 * sizeof(int)") for name, (body, _) in FAULTS.items()},
    **{name: (body, "2, 64, 64 * sizeof(int)") for name, body in HARMLESS.items()},
    **{grid: ("out[0] = 1;", grid) for grid in GRIDS},
}


def kernels_of_bodies() -> str:
    """One source for all of them: `run3` launches the third."""
    text = '#include "common.cuh"\n'
    for number, (body, grid) in enumerate(BODIES.values()):
        text += f"__global__ void kernel{number}(int* out) {{ {body} }}\n"
        text += f'extern "C" int run{number}(int* out, void*) {{\n'
        text += f"  kernel{number}<<<{grid}>>>(out);\n  return cudaGetLastError();\n}}\n"
    return text


def run_body(name: str) -> Tensor:
    out = torch.zeros(128, dtype=torch.int32)
    emulated = emulate.library(kernels_of_bodies(), "kit.cu")
    emulate.call(emulated, f"run{list(BODIES).index(name)}", out, None)
    return out


def lines_of(body: str) -> dict[str, str]:
    """Where in that source the lines of a body stand that end in `// N` and `// M`."""
    text = kernels_of_bodies()
    first = text[: text.index(body)].count("\n") + 1
    lines = enumerate(body.splitlines(), first)
    return {line[-1]: str(number) for number, line in lines if re.search(r"// [NM]$", line)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_by_block_thread_and_line(name):
    """In every order; and it is told once: the next call is a new one."""
    body, said = FAULTS[name]
    for letter, line in lines_of(body).items():
        said = re.sub(rf"(?<=[:(|]){letter}(?=[:,|)]|$)", line, said)
    for order in ORDERS:
        with emulate.thread_order(*order), pytest.raises(emulate.KernelFault) as fault:
            run_body(name)
        assert re.fullmatch(said, str(fault.value)), (said, str(fault.value))
        assert (run_body("counted together") == 1).all()


@pytest.mark.parametrize("change", ["a[1] = 2.0f;", "a[1] += 1.0f;"])
def test_a_reader_is_remembered_when_the_writer_reads_first(change, in_order):
    """Thread 1's own read does not make thread 0's forgotten."""
    text = f"""
__global__ void two(float* out) {{
  __shared__ float a[64];
  a[threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = a[1];
  if (threadIdx.x == 1) {change}
}}
extern "C" int run(float* out) {{ two<<<1, 64>>>(out); return cudaGetLastError(); }}
"""
    with pytest.raises(emulate.KernelFault, match=r"two.cu:[67]: thread .* two.cu:[67], and no"):
        emulate.call(emulate.library(text, "two.cu"), "run", torch.zeros(1))


def test_a_shuffle_orders_no_memory_and_a_syncwarp_does(in_order):
    """Lanes that shuffle have waited for each other; what was written before may be on its way."""
    text = """
__global__ void met(float* out) {
  __shared__ float row[32];
  row[threadIdx.x] = threadIdx.x;
  MEET;
  out[threadIdx.x] = row[31 - threadIdx.x];
}
extern "C" int run(float* out) { met<<<1, 32>>>(out); return cudaGetLastError(); }
"""
    out = torch.zeros(32)
    emulate.call(emulate.library(text.replace("MEET", "__syncwarp()"), "met.cu"), "run", out)
    assert torch.equal(out, torch.arange(32.0).flip(0))
    shuffled = emulate.library(text.replace("MEET", "__shfl_xor_sync(0xffffffff, 0, 1)"), "met.cu")
    with pytest.raises(emulate.KernelFault, match=r"met.cu:[46]: thread .* met.cu:[46], and no"):
        emulate.call(shuffled, "run", out)


def test_a_fault_in_the_first_function_of_a_source_is_told_by_its_file():
    text = """
__global__ void first(float* out) { out[threadIdx.x + 1] = 0.0f; }
extern "C" int run(float* out) { first<<<1, 4>>>(out); return cudaGetLastError(); }
"""
    with pytest.raises(emulate.KernelFault, match=r"^mine.cu:2: thread \(3, 0, 0\) in block"):
        emulate.call(emulate.library(text, "mine.cu"), "run", torch.zeros(4))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_is_let_through(name, in_order):
    assert (run_body(name) == 1).all()


def test_a_missing_barrier_is_reported_in_every_order_with_both_lines(in_order):
    text = emulate.source("common.cuh")
    writes, reads = (
        text[: text.index(code)].count("\n") + 1 for code in ("sums[warp] = x", "? sums[lane]")
    )
    reports = (
        rf"common.cuh:({writes}|{reads}), from rmsnorm.cu:\d+: thread .* (writes|reads) shared "
        rf"memory that .* at common.cuh:({writes}|{reads}), from rmsnorm.cu:\d+, and no barrier"
    )
    for barrier in (ALL_THERE, "  __syncthreads();  // all have been read"):
        assert barrier in text
    with emulate.edited("common.cuh", ALL_THERE, "\n"):
        with pytest.raises(emulate.KernelFault, match=reports):
            cuda.rms_norm(random(1, 576), random(576), 1e-5)


def test_two_sums_need_the_second_barrier():
    """The first sum's values are overwritten by those of the second, if a warp is ahead."""
    x, out, wrong = torch.arange(64.0), torch.full((192,), torch.nan), 0
    with emulate.edited("common.cuh", ALL_READ, "\n"):
        for order in ORDERS:
            with emulate.thread_order(*order):
                with emulate.races_ignored():
                    kit("passes", out, x, 1, 64)
                wrong += not (out[64:128] == x.sum()).all()
                with pytest.raises(emulate.KernelFault, match=r"(reads|writes) shared memory that"):
                    kit("passes", out, x, 1, 64)
    assert wrong >= 1


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_gpu_would_not_start_is_not_started(grid):
    with pytest.raises(emulate.KernelFault, match=f"^{GRIDS[grid]}"):
        run_body(grid)


# --- the build -----------------------------------------------------------------------------------


def test_what_the_compiler_says_is_passed_on_with_file_and_line():
    with emulate.edited("rmsnorm.cu", "squares = 0.0f;", "squares = no_such_name;"):
        line = emulate.source("rmsnorm.cu").split("no_such_name")[0].count("\n") + 1
        with pytest.raises(OSError, match=rf"rmsnorm.cu:{line}:\d+: error: .*no_such_name"):
            cuda.rms_norm(random(1, 8), random(8), 1e-5)
    with emulate.edited("common.cuh", "constexpr int WARP = 32;", "constexpr int WARP = no_such;"):
        with pytest.raises(OSError, match=r"common.cuh:\d+:\d+: error: .*no_such"):
            cuda.rms_norm(random(1, 8), random(8), 1e-5)


def test_an_edit_ends_with_its_block_even_by_an_error():
    x, before = random(3, 50), emulate.source("silu.cu")
    with pytest.raises(KeyError), emulate.edited("silu.cu", "1.0f + expf", "2.0f + expf"):
        with emulate.edited("silu.cu", "2.0f + expf", "3.0f + expf"):
            third = cuda.silu_mul(x)
        second = cuda.silu_mul(x)
        raise KeyError
    first = cuda.silu_mul(x)
    assert emulate.source("silu.cu") == before and torch.allclose(first, twins.silu_mul(x))
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_an_edit_has_to_fit_once():
    for old in ("no such words", "const"):
        with pytest.raises(ValueError, match=r"rope.cu has (0|\d\d+) times .* be there once"):
            with emulate.edited("rope.cu", old, ""):
                raise AssertionError("edited")
    with pytest.raises(ValueError, match="the order is 'sideways'; it is one of up, down, random"):
        with emulate.thread_order("sideways"):
            raise AssertionError("set")


def test_without_a_compiler_the_words_say_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OSError, match=r"no C\+\+ compiler: no-such-compiler"):
        emulate.library(KIT, "kit.cu")


def test_a_library_is_compiled_once_for_its_content_and_again_if_it_is_cut(tmp_path, monkeypatch):
    """The emulator once for all sources: two compilations and a link, then one and a link."""
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    folder, commands = tmp_path / "cache" / "build", []
    monkeypatch.setattr(
        build, "run", lambda command, run=build.run: (commands.append(command), run(command))
    )

    def commands_for(text: str) -> int:
        monkeypatch.setattr(emulate, "_libraries", {})
        commands.clear()
        emulate.call(emulate.library(text, "kit.cu"), "spindle_found", *[torch.ones(4)] * 2, 1, 1)
        return len(commands)

    assert [commands_for(text) for text in (KIT, KIT, KIT + "\n")] == [3, 0, 2]
    names = sorted(re.sub(r"[0-9a-f]{16}", "#", path.name) for path in folder.iterdir())
    assert names == ["cpu_cuda-emulated-#.o", "kit-emulated-#.so", "kit-emulated-#.so"]
    for path in folder.glob("kit-*.so"):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:3000])
        (tmp_path / "cut").replace(path)
    assert commands_for(KIT) == 2


# --- the same sources by nvcc --------------------------------------------------------------------

SOURCES = sorted(path.name for path in build.SOURCES.glob("*.cu"))
# Of each kernel: how many there are of it, and the most registers that one may have. 40 let 1536
# threads be on a multiprocessor at once, 168 still 384: three blocks of attend_kernel.
KERNELS = {
    "attend_kernel": (45, 168),
    "copy_blocks_kernel": (5, 40),
    "merge_kernel": (3, 40),
    "rms_norm_kernel": (6, 40),
    "rope_kernel": (3, 40),
    "silu_mul_kernel": (6, 40),
    "write_rows_kernel": (5, 40),
}


def nvcc() -> str:
    found = build.nvcc()
    if found is None:
        pytest.skip("NO NVCC HERE: the CUDA sources are not compiled for a GPU in this run")
    return found


def test_every_kernel_is_known_here():
    texts = "".join((build.SOURCES / file).read_text() for file in SOURCES)
    assert set(re.findall(r"__global__ void (?:__\w+\(.*?\) )?(\w+)\(", texts)) == set(KERNELS)


@pytest.mark.parametrize("arch", ["80", "90"])
def test_nvcc_keeps_every_kernel_in_registers(arch, tmp_path):
    """No stack, which is memory, and not too many registers: neither shows as an error."""
    unit = tmp_path / "all.cu"
    unit.write_text("".join(f'#include "{file}"\n' for file in SOURCES))
    flags = ["-O3", "-std=c++17", f"-arch=sm_{arch}", "-Xptxas=-v", "-Werror=all-warnings"]
    done = subprocess.run(
        [nvcc(), "-cubin", *flags, f"-I{build.SOURCES}", str(unit), "-o", f"{unit}bin"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = {name: [] for name in KERNELS}
    for said in done.stderr.split("Compiling entry function")[1:]:
        [name] = [name for name in KERNELS if name in said.split("'")[1]]
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, said
        found[name].append(int(re.search(r"Used (\d+) registers", said)[1]))
    for name, (count, most) in KERNELS.items():
        assert len(found[name]) == count and max(found[name]) <= most, (name, found[name])
