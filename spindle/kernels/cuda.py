"""The CUDA sources of csrc/ behind their wrappers: arguments and results are those of the twins.

float32, bfloat16 and float16. On a GPU it is nvcc's library that runs (build.py), on CPU tensors
the emulator (emulate.py). What a kernel is not made for is Unfit, told before anything is written.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from spindle.kernels import build, emulate
from spindle.kernels.emulate import Argument, KernelFault

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as common.cuh counts them
MOST_ROW_BYTES = 47 << 10  # of a row that rms_norm keeps in shared memory, as rmsnorm.cu has it
HEAD_SIZES = (32, 64, 80, 96, 128)  # that decode.cu is compiled for
MOST_QUERIES = 16  # a row, as decode.cu has it
SPLIT = 256  # keys that a block of decode.cu takes


class Unfit(TypeError):
    """Tensors that a kernel would read wrongly, or is not made for; nothing has been written."""


# --- calls ---------------------------------------------------------------------------------------


def compiled(device: torch.device) -> ctypes.CDLL | None:
    """nvcc's library for this GPU; the first call may build it. None, said once: there is none."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _compiled_for(index)


@functools.cache
def _compiled_for(index: int) -> ctypes.CDLL | None:
    return build.cuda_library(torch.cuda.get_device_capability(index))


def _launch(file: str, launcher: str, *arguments: Argument) -> None:
    """Run a launcher of csrc/FILE where the first argument lies; KernelFault: it went wrong."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.is_cuda:
        library = compiled(first.device)
        assert library is not None, "there is no library: the caller asks `compiled` first"
        with torch.cuda.device(first.device):
            run(library, launcher, arguments, torch.cuda.current_stream().cuda_stream)
    else:
        no_stream = None
        emulate.call(emulate.library_of(file), launcher, *arguments, no_stream)


def run(
    library: ctypes.CDLL, launcher: str, arguments: tuple[Argument, ...], stream: int | None
) -> None:
    """Call a launcher of nvcc's library; it returns when the kernel is in the stream's queue.

    KernelFault: CUDA refused to start it.
    """
    status = getattr(library, launcher)(*map(emulate.as_c, arguments), ctypes.c_void_p(stream))
    if status:
        raise KernelFault(f"{launcher}: CUDA returned status {status} (see cudaError_t)")


def _unwritten(*shape: int, like: Tensor) -> Tensor:
    """Where a kernel writes; emulated, it is NaN, so that what is left out is seen."""
    return like.new_empty(shape) if like.is_cuda else like.new_full(shape, torch.nan)


def _check(op: str, fits: bool, *tensors: Tensor) -> None:
    """Unfit for what a kernel would read wrongly."""
    device = tensors[0].device
    if fits and device.type in ("cpu", "cuda") and all(x.device == device for x in tensors):
        return
    shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in tensors)
    raise Unfit(f"{op}: {shapes} do not go together, or are not for kernels")


def attends(cache: Tensor, queries: int) -> bool:
    """Whether decode.cu is made for this cache [..., D], and so many queries a row."""
    small = 1 <= queries <= MOST_QUERIES
    return cache.dtype in DTYPES and cache.shape[-1] in HEAD_SIZES and small


# --- the ops -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [..., E] at root mean square 1, times weight [E].

    Unfit, here as in all ops: they do not go together, or a row is larger than 47 kB.
    """
    return _norm("rms_norm", x.contiguous(), None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, then RMS-normalise the sum; returns (normed, residual).

    The residual is changed, and is the one returned; it has to lie whole.
    """
    same = residual.shape == x.shape and residual.dtype == x.dtype
    _check("add_rms_norm", same and residual.is_contiguous(), x, residual)
    return _norm("add_rms_norm", x.contiguous(), residual, weight, eps), residual


def _norm(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    E = x.shape[-1]
    small = 0 < E * x.element_size() <= MOST_ROW_BYTES
    same = weight.dtype == x.dtype and weight.shape == (E,)
    _check(op, x.dtype in DTYPES and same and small, x, weight)
    out, weight = _unwritten(*x.shape, like=x), weight.contiguous()
    sizes = (x.numel() // E, E, float(eps), DTYPES[x.dtype])
    _launch("rmsnorm.cu", "spindle_rms_norm", x, residual, weight, out, *sizes)
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D], in place, by the angles of cos, sin [T, D/2] float32.

    Tokens and heads may lie apart, elements may not.
    """
    T, H, D = q.shape
    angles = cos.shape == sin.shape == (T, D / 2) and cos.dtype == sin.dtype == torch.float32
    heads = k.shape[::2] == (T, D) and k.dtype == q.dtype and q.stride(2) == k.stride(2) == 1
    _check("rope", angles and heads and q.dtype in DTYPES, q, k, cos, sin)
    sizes = (T, H, k.shape[1], D, *q.stride()[:2], *k.stride()[:2], DTYPES[q.dtype])
    _launch("rope.cu", "spindle_rope", q, k, cos.contiguous(), sin.contiguous(), *sizes)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first -> [T, F]."""
    _check("silu_mul", gate_up.dtype in DTYPES and gate_up.shape[1] % 2 == 0, gate_up)
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = _unwritten(T, F, like=gate_up)
    sizes = (T, F, DTYPES[gate_up.dtype])
    _launch("silu.cu", "spindle_silu_mul", gate_up.contiguous(), out, *sizes)
    return out


def write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Put new [T, Hk, D] into slots [T] of cache [N, P, Hk, D]; slot n * P + p is p of block n.

    The cache is changed; of any dtype, and without gaps.
    """
    whole = cache.is_contiguous() and new.shape[1:] == cache.shape[2:] and new.dtype == cache.dtype
    indexed = slots.shape == new.shape[:1] and slots.dtype == torch.int64
    _check("write_kv", whole and indexed, cache, slots, new)
    if not new[:1].is_contiguous():  # a row has to lie whole; rows may lie apart
        new = new.contiguous()
    item = cache.element_size()
    sizes = (len(new), new[0].numel() * item if len(new) else 0, new.stride(0) * item)
    _launch("copy.cu", "spindle_write_kv", cache, slots.contiguous(), new, *sizes)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the blocks source [C] of cache [L, N, P, Hk, D] over the blocks target [C].

    The cache is changed; of any dtype, and without gaps. No target may be a source too, or be named
    twice: the copies are done in any order.
    """
    indexed = source.shape == target.shape and source.dtype == target.dtype == torch.int64
    _check("copy_blocks", cache.is_contiguous() and indexed, cache, source, target)
    L, N = cache.shape[:2]
    block_bytes = cache[0, 0].numel() * cache.element_size()
    source, target = source.contiguous(), target.contiguous()
    sizes = (len(source), L, N, block_bytes)
    _launch("copy.cu", "spindle_copy_blocks", cache, source, target, *sizes)


def paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The last C queries of each row, q [R * C, H, D], over that row's keys -> [R * C, H, D].

    keys, values [N, P, Hk, D] have no gaps, lie at a multiple of 16 bytes, and are never copied.
    tables [R, B]; lengths [R] count the keys that a row's last query sees.
    """
    (T, H, D), (_, P, Hk, _), (R, B) = q.shape, keys.shape, tables.shape
    C = T // max(R, 1)
    made_for = attends(keys, C if R else 1) and keys.dtype == values.dtype == q.dtype
    whole = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (keys, values))
    heads = keys.shape == values.shape and keys.shape[3] == D and H % Hk == 0
    rows = T == R * C and lengths.shape == (R,) and tables.dtype == lengths.dtype == torch.int64
    fits = made_for and whole and heads and rows
    _check("paged_attend", fits, q, keys, values, tables, lengths)
    out, splits = _unwritten(T, H, D, like=q), max(-(-B * P // SPLIT), 1)
    means, lse = _split_room(q, splits) if splits > 1 else (None, None)
    q, tables, lengths = q.contiguous(), tables.contiguous(), lengths.contiguous()
    sizes = (R, C, H, Hk, D, P, B, float(scale), DTYPES[q.dtype])
    pointers = (q, keys, values, tables, lengths, out, means, lse)
    _launch("decode.cu", "spindle_paged_attend", *pointers, *sizes)
    return out


def _split_room(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """What the splits leave for the merge: their means [T, H, splits, D] and lse [T, H, splits]."""
    like = q.new_empty(0, dtype=torch.float32)
    T, H, D = q.shape
    return _unwritten(T, H, splits, D, like=like), _unwritten(T, H, splits, like=like)
