"""The CUDA sources of csrc/, run on the CPU: each CUDA thread a fibre (csrc/cpu_cuda.h says how).

It is for correctness, and to watch a fault happen: `thread_order` chooses who goes first, `edited`
changes a source for a while. What a kernel does wrong is a KernelFault that names block, thread and
line. Compiled by g++. The wrappers are in cuda.py; with SPINDLE_EMULATE=1 all ops go through them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from spindle.kernels import build
from spindle.paths import cache_dir, staging_beside

__all__ = [
    "ORDERS",
    "KernelFault",
    "available",
    "call",
    "edited",
    "enabled",
    "library",
    "library_of",
    "ops_emulated",
    "races_ignored",
    "source",
    "thread_order",
    "unit",
]

ORDERS = ("up", "down", "random")  # as cpu_cuda.h counts them
HEADERS = ("cpu_language.h", "cpu_cuda.h")  # before each source
FLAGS = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-threadsafe-statics"]
OF_EMULATOR = ["-O2", "-fvisibility=hidden"]
# Calls before accesses, which cpu_checks.h takes: no library of the sanitizers is linked.
# DWARF 5 has the file of a source's first function in a way that addr2line 2.40 misreads.
OF_KERNELS = ["-O1", "-g1", "-gdwarf-4", "-DSPINDLE_EMULATED"]
OF_KERNELS += ["-fsanitize=thread,alignment,bounds"]


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
    library_of.cache_clear()


_edits: dict[str, str] = {}


# --- a library of it -----------------------------------------------------------------------------


def library(text: str, file: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """CUDA C++ with `extern "C"` launchers -> a library that runs it here; cached by content.

    OSError: no compiler, or it fails; then its words are in the message.
    """
    command = build.compiler()
    if command is None:
        raise OSError(build.no_compiler())
    machine = _inlined(*HEADERS, "cpu_cuda.cpp", "cpu_checks.h")
    compile_machine = [command, *FLAGS, *OF_EMULATOR, *flags]
    compile_kernels = [command, *FLAGS, *OF_KERNELS, *flags]
    made = unit(text, file)
    path = _place(Path(file).stem, ".so", compile_machine, machine, compile_kernels, made)
    if path not in _libraries:
        if not build.is_whole(path):
            first = _place("cpu_cuda", ".o", compile_machine, machine)
            if not build.is_whole(first):
                _make([*compile_machine, "-c"], machine, first)
            _make([*compile_kernels, "-c"], made, path, first)
        _libraries[path] = ctypes.CDLL(str(path))
        _libraries[path].spindle_take_report.restype = ctypes.c_char_p
    return _libraries[path]


_libraries: dict[Path, ctypes.CDLL] = {}


def _place(stem: str, suffix: str, command: list[str], *parts: str | list[str]) -> Path:
    """Where a file lies, or would: named by all that goes into it."""
    texts = [part if isinstance(part, str) else " ".join(part) for part in (command, *parts)]
    digest = hashlib.sha256("\0".join(texts).encode() + build.version(command[0])).hexdigest()[:16]
    return cache_dir() / "build" / f"{stem}-emulated-{digest}{suffix}"


def _make(command: list[str], text: str, target: Path, *linked: Path) -> None:
    """Compile, and link if there is something to link with: a half-written file is never found."""
    with staging_beside(target) as folder:
        source_file, made = folder / "unit.cpp", folder / "unit.o"
        source_file.write_text(text, encoding="utf-8")
        build.run([*command, str(source_file), "-o", str(made)])
        if linked:
            library = made.with_suffix(".so")
            objects = map(str, (made, *linked))
            build.run([command[0], "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(library)])
            made = library
        build.seal(made)
        os.replace(made, target)


@functools.cache
def library_of(file: str) -> ctypes.CDLL:
    """The library of a file of csrc/, as `edited` has it at the moment. OSError: as `library`."""
    return library(source(file), file)


def refuse() -> None:
    """OSError where no source is to be compiled, or none can be."""
    build.refuse()
    if build.compiler() is None:
        raise OSError(build.no_compiler())


def built(file: str) -> Path:
    """The file of `library_of`, compiled if it must be."""
    return Path(library_of(file)._name)


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
        status = run(*map(as_c, arguments))
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


def as_c(value: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    """As a launcher takes it: a tensor as its address, an integer as int64_t, a float as float."""
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


# --- the ops, all of them emulated ---------------------------------------------------------------

_log = logging.getLogger(__name__)
_on = os.environ.get("SPINDLE_EMULATE") == "1"  # read once: `ops_emulated` is for changing it


@contextlib.contextmanager
def ops_emulated(on: bool = True) -> Iterator[None]:
    """For a while, the ops run their CUDA source on CPU tensors, as with SPINDLE_EMULATE=1."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def enabled() -> bool:
    """Whether CPU tensors go to the emulator: it is asked for, and can be had."""
    return _on and available()


@functools.cache
def available() -> bool:
    """Whether a source compiles here. If not, it is said once, as a warning of this logger."""
    try:
        refuse()
        library_of("copy.cu")
    except OSError as cause:
        _log.warning("the emulator: not used, the ops run without it: %s", cause)
        return False
    return True


def give_up(cause: OSError) -> None:
    """Have the ops run without the emulator from now on, and say why: a source does not compile.

    One that is `edited` is somebody's own: then the cause is raised.
    """
    global _on
    if _edits:
        raise cause
    _on = False
    _log.warning("the emulator: not used any more, the ops run without it: %s", cause)
