"""The CUDA sources of csrc/, run on the CPU: each CUDA thread a fibre (csrc/cpu_cuda.h says how).

It is for correctness, and to watch a fault happen: `thread_order` chooses who goes first, `edited`
changes a source for a while. What a kernel does wrong is a KernelFault that names block, thread and
line. Arguments and results are those of the twins; float32, bfloat16 and float16. Compiled by g++.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spindle.kernels import build
from spindle.paths import cache_dir

__all__ = [
    "ORDERS",
    "KernelFault",
    "add_rms_norm",
    "call",
    "copy_blocks",
    "edited",
    "library",
    "races_ignored",
    "rms_norm",
    "rope",
    "silu_mul",
    "source",
    "thread_order",
    "unit",
    "write_kv",
]

ORDERS = ("up", "down", "random")  # as cpu_cuda.h counts them
HEADERS = ("cpu_language.h", "cpu_cuda.h")  # before each source
FLAGS = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-threadsafe-statics"]
OF_EMULATOR = ["-O2", "-fvisibility=hidden"]
# Calls before accesses, which cpu_checks.h takes: no library of the sanitizers is linked.
OF_KERNELS = ["-O1", "-g1", "-DSPINDLE_EMULATED", "-fsanitize=thread,alignment,bounds"]
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as common.cuh counts them


class KernelFault(RuntimeError):
    """What a kernel did that a GPU refuses, or punishes with chance: where, by whom, in words."""


# --- from CUDA C++ to C++ ------------------------------------------------------------------------

INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
TYPE_ARGUMENTS = r"<[^<>;]*(?:<[^<>;]*>[^<>;]*)*>"  # of a template; one may have some itself
LAUNCH = re.compile(rf"(\w+(?:{TYPE_ARGUMENTS})?)<<<(.*?)>>>\s*\(", re.DOTALL)
ALIGNED = r"(?:(?:__align__|alignas)\(\d+\)\s*)?"
TYPE = r"([\w:<>, ]+?)"
DYNAMIC = re.compile(rf"extern\s+__shared__\s+{ALIGNED}{TYPE}\s+(\w+)\[\];")
STATIC = re.compile(rf"__shared__\s+{ALIGNED}{TYPE}\s+(\w+)((?:\[[^\]]+\])*);")


def source(file: str) -> str:
    """The text of a file of csrc/, as `edited` has it at the moment. OSError: there is none."""
    if file in _edits:
        return _edits[file]
    return (build.SOURCES / file).read_text(encoding="utf-8")


def unit(text: str, file: str) -> str:
    """CUDA C++ -> what g++ is given: the emulator, the includes, and three things respelt.

    Lines keep the numbers that they have in `file`, so that compiler and emulator name them.
    """
    text = INCLUDE.sub(lambda found: _included(found, file), f'#line 1 "{file}"\n{text}')
    text = LAUNCH.sub(r"emulator::launch(\1, \2)(", text)
    text = DYNAMIC.sub(r"auto* \2 = emulator::dynamic_shared<\1>();", text)
    text = STATIC.sub(r"auto& \2 = emulator::shared<\1\3>([] {});", text)
    return _inlined(*HEADERS) + text


def _inlined(*files: str) -> str:
    """Files of csrc/ one after the other, without what includes the next."""
    texts = (re.sub(r'#pragma once|#include "cpu_.*"', "", source(file)) for file in files)
    pairs = zip(files, texts, strict=True)
    return "".join(f'#line 1 "{file}"\n{text}\n' for file, text in pairs)


def _included(found: re.Match[str], file: str) -> str:
    """The included file in the place of its #include, and then the line that comes after."""
    line = found.string.count("\n", 0, found.start())  # the first is a #line of ours
    return f'{_inlined(found[1])}#line {line + 1} "{file}"'


@contextlib.contextmanager
def edited(file: str, old: str, new: str) -> Iterator[None]:
    """For a while, csrc/FILE has `new` in the place of `old`, which it must have exactly once.

    Nothing is written: the next call compiles the changed text. May be nested. ValueError: `old`
    is not there, or more than once.
    """
    text, before = source(file), _edits.get(file)
    if text.count(old) != 1:
        raise ValueError(f"{file} has {text.count(old)} times {old!r}: it must be there once")
    _edit(file, text.replace(old, new))
    try:
        yield
    finally:
        _edit(file, before)


def _edit(file: str, text: str | None) -> None:
    """Have this text for the file; None: what is on the disk."""
    if text is None:
        del _edits[file]
    else:
        _edits[file] = text
    _library_of.cache_clear()


_edits: dict[str, str] = {}


# --- a library of it -----------------------------------------------------------------------------


def library(text: str, file: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """CUDA C++ with `extern "C"` launchers -> a library that runs it here; cached by content.

    OSError: no compiler, or it fails; then its words are in the message.
    """
    command = build.compiler()
    if command is None:
        raise OSError(f"no C++ compiler: {os.environ.get('CXX') or ', '.join(build.COMPILERS)}")
    machine = _inlined(*HEADERS, "cpu_cuda.cpp", "cpu_checks.h")
    compile_machine = [command, *FLAGS, *OF_EMULATOR, *flags]
    compile_kernels = [command, *FLAGS, *OF_KERNELS, *flags]
    made = unit(text, file)
    path = _place(Path(file).stem, ".so", compile_machine, machine, compile_kernels, made)
    if path not in _libraries:
        if not build._is_whole(path):
            first = _place("cpu_cuda", ".o", compile_machine, machine)
            if not build._is_whole(first):
                _make([*compile_machine, "-c"], machine, first)
            _make([*compile_kernels, "-c"], made, path, first)
        _libraries[path] = ctypes.CDLL(str(path))
        _libraries[path].spindle_take_report.restype = ctypes.c_char_p
    return _libraries[path]


_libraries: dict[Path, ctypes.CDLL] = {}
_version = functools.cache(build._version)  # asked for once: a process is started for it


def _place(stem: str, suffix: str, command: list[str], *parts: str | list[str]) -> Path:
    """Where a file lies, or would: named by all that goes into it."""
    texts = [part if isinstance(part, str) else " ".join(part) for part in (command, *parts)]
    digest = hashlib.sha256("\0".join(texts).encode() + _version(command[0])).hexdigest()[:16]
    return cache_dir() / "build" / f"{stem}-emulated-{digest}{suffix}"


def _make(command: list[str], text: str, target: Path, *linked: Path) -> None:
    """Compile, and link if there is something to link with: a half-written file is never found."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source_file, made = Path(folder) / "unit.cpp", Path(folder) / "unit.o"
        source_file.write_text(text, encoding="utf-8")
        build._run([*command, str(source_file), "-o", str(made)])
        if linked:
            library = made.with_suffix(".so")
            objects = map(str, (made, *linked))
            build._run([command[0], "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(library)])
            made = library
        build._seal(made)
        os.replace(made, target)


# --- calls ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def thread_order(order: str, seed: int = 0) -> Iterator[None]:
    """For a while, blocks, warps and lanes go on "up", "down" or in a "random" order of this seed.

    Correct kernels give the same in each. ValueError: no such order.
    """
    global _order
    if order not in ORDERS:
        raise ValueError(f"the order is {order!r}; it is one of {', '.join(ORDERS)}")
    before, _order = _order, (ORDERS.index(order), seed)
    try:
        yield
    finally:
        _order = before


@contextlib.contextmanager
def races_ignored() -> Iterator[None]:
    """For a while, a race is no fault: what comes of it depends on the order alone."""
    global _races
    before, _races = _races, False
    try:
        yield
    finally:
        _races = before


_order, _races = (0, 0), True
_one_at_a_time = threading.Lock()  # a library has one set of fibres

Argument = Tensor | int | float | None


def call(emulated: ctypes.CDLL, launcher: str, *arguments: Argument) -> None:
    """Call a launcher: tensors as their addresses, integers as int64_t, floats as float.

    KernelFault: the emulator saw a fault, or the launcher refused its arguments.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    starts = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    sizes = (ctypes.c_int64 * len(tensors))(*map(_extent_bytes, tensors))
    run = getattr(emulated, launcher)
    with _one_at_a_time:
        emulated.spindle_set_memory(starts, sizes, len(tensors), int(_races))
        emulated.spindle_set_order(ctypes.c_int(_order[0]), ctypes.c_uint64(_order[1]))
        status = run(*map(_as_c, arguments))
        report = emulated.spindle_take_report().decode(errors="replace")
    if report:
        raise KernelFault(re.sub(r"{(\w+)}", lambda code: _line_of(emulated, code[1]), report))
    if status:
        raise KernelFault(f"{launcher} refused its arguments, with status {status}")


def _extent_bytes(x: Tensor) -> int:
    """From a tensor's first element to the end of its last; what a view leaves out counts too."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def _line_of(emulated: ctypes.CDLL, code: str) -> str:
    """The source line of a place in a library, and those that it was inlined from."""
    command = shutil.which("addr2line")
    if command is None:
        return f"code {code} (addr2line is not here to tell the line)"
    done = subprocess.run(
        [command, "-i", "-s", "-e", emulated._name, code], capture_output=True, text=True
    )
    lines = [line.split(" ")[0] for line in done.stdout.splitlines()]
    return ", from ".join(lines)


def _as_c(value: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


@functools.cache
def _library_of(file: str) -> ctypes.CDLL:
    return library(source(file), file)


def _launch(file: str, launcher: str, *arguments: Argument) -> None:
    stream = None
    call(_library_of(file), launcher, *arguments, stream)


def _unwritten(*shape: int, like: Tensor) -> Tensor:
    """Where a kernel writes: NaN, so that what it leaves out is seen."""
    return like.new_full(shape, torch.nan)


def _check(op: str, fits: bool, *tensors: Tensor) -> None:
    """TypeError for what a kernel would read wrongly."""
    fits = fits and all(x.device.type == "cpu" for x in tensors)
    if not fits:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in tensors)
        raise TypeError(f"{op}, emulated: {shapes} do not go together, or are not for kernels")


# --- the ops -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [..., E] at root mean square 1, times weight [E].

    TypeError: they do not go together. KernelFault, here as in all ops: a row beyond 47 kB.
    """
    return _norm("rms_norm", x.contiguous(), None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [T, E] to the residual, then RMS-normalise the sum; returns (normed, residual).

    The residual that was passed in is consumed: use the returned one. TypeError: they do not fit.
    """
    fits = residual.shape == x.shape and residual.dtype == x.dtype
    _check("add_rms_norm", fits, x, residual)
    residual = residual.contiguous()
    return _norm("add_rms_norm", x.contiguous(), residual, weight, eps), residual


def _norm(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    E = x.shape[-1]
    _check(op, x.dtype in DTYPES and weight.dtype == x.dtype and weight.shape == (E,), x, weight)
    out, weight = _unwritten(*x.shape, like=x), weight.contiguous()
    sizes = (x.numel() // E, E, float(eps), DTYPES[x.dtype])
    _launch("rmsnorm.cu", "spindle_rms_norm", x, residual, weight, out, *sizes)
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D], in place, by the angles of cos, sin [T, D/2] float32.

    Tokens and heads may lie apart, elements may not. TypeError: they do not go together.
    """
    T, H, D = q.shape
    angles = cos.shape == sin.shape == (T, D / 2) and cos.dtype == sin.dtype == torch.float32
    heads = k.shape[::2] == (T, D) and k.dtype == q.dtype and q.stride(2) == k.stride(2) == 1
    _check("rope", angles and heads and q.dtype in DTYPES, q, k, cos, sin)
    sizes = (T, H, k.shape[1], D, *q.stride()[:2], *k.stride()[:2], DTYPES[q.dtype])
    _launch("rope.cu", "spindle_rope", q, k, cos.contiguous(), sin.contiguous(), *sizes)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first -> [T, F]. TypeError: an odd width."""
    _check("silu_mul", gate_up.dtype in DTYPES and gate_up.shape[1] % 2 == 0, gate_up)
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = _unwritten(T, F, like=gate_up)
    sizes = (T, F, DTYPES[gate_up.dtype])
    _launch("silu.cu", "spindle_silu_mul", gate_up.contiguous(), out, *sizes)
    return out


def write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Put new [T, Hk, D] into slots [T] of cache [N, P, Hk, D]; slot n * P + p is p of block n.

    The cache is changed; of any dtype. TypeError: they do not go together, the cache has gaps.
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

    The cache is changed; of any dtype. No target may be a source too: the copies are done at once.
    TypeError: they do not go together, the cache has gaps.
    """
    indexed = source.shape == target.shape and source.dtype == target.dtype == torch.int64
    _check("copy_blocks", cache.is_contiguous() and indexed, cache, source, target)
    L, N = cache.shape[:2]
    block_bytes = cache[0, 0].numel() * cache.element_size()
    source, target = source.contiguous(), target.contiguous()
    sizes = (len(source), L, N, block_bytes)
    _launch("copy.cu", "spindle_copy_blocks", cache, source, target, *sizes)
