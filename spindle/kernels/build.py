"""C++ of ours -> a library in the cache: compiled on first use, found again by its content.

Nothing here is required. Where there is no compiler, or it fails, `library` gives None, `why_not`
says so in words, and the ops take another form.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from spindle.paths import cache_dir

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"]
TIMEOUT_S = 120


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The library of csrc/NAME.cpp, built if it is not in the cache; None where it cannot be.

    Safe when several processes build at once: each compiles for itself, and the last one stays.
    """
    try:
        path = place(name)
        if not _is_whole(path):
            _compile(SOURCES / f"{name}.cpp", path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.TimeoutExpired) as cause:
        _reasons[name] = str(cause)
        return None


def why_not(name: str) -> str | None:
    """Why there is no library of this name, in words; None if there is one, or nobody asked."""
    return _reasons.get(name)


def compiler() -> str | None:
    """The path of $CXX, or of the first of the usual names; None if there is no such command."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


_reasons: dict[str, str] = {}


def place(name: str) -> Path:
    """Where the library lies, or would: named by all that its machine code depends on.

    Builds nothing. OSError says why nothing can be built.
    """
    if os.environ.get("SPINDLE_NO_EXT") == "1":
        raise OSError("SPINDLE_NO_EXT=1")
    if sys.platform != "linux":  # elsewhere torch brings another OpenMP runtime
        raise OSError(f"not tried on {platform.system()}: plain torch does the work")
    command = compiler()
    if command is None:
        wanted = os.environ.get("CXX")
        raise OSError(f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found")
    source = (SOURCES / f"{name}.cpp").read_bytes()
    parts = [source, " ".join(FLAGS).encode(), _version(command), _processor(), _openmp().encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_dir() / "build" / f"{name}-{digest}.so"


def _compile(source: Path, target: Path) -> None:
    """Compile and link into a folder of its own, then move: a half-written file is never found."""
    command = compiler()
    assert command is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unit, made = Path(folder) / "unit.o", Path(folder) / "made.so"
        _run([command, *FLAGS, "-c", str(source), "-o", str(unit)])
        # Linked by path to the OpenMP that torch has loaded: a second runtime would bring a second
        # set of threads, and each would wait for the other's.
        folder_of_openmp = f"-Wl,-rpath,{Path(_openmp()).parent}"
        _run([command, "-shared", str(unit), _openmp(), folder_of_openmp, "-o", str(made)])
        _seal(made)
        os.replace(made, target)


def _seal(library: Path) -> None:
    """End the file with the hash of what is before: the loader reads no further than it must."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def _is_whole(library: Path) -> bool:
    """Whether the file is there as it was sealed; one that was cut off would end the process."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise OSError(f"{command[0]} failed with status {done.returncode}: {said[-2000:]}")


@functools.cache
def _openmp() -> str:
    """The file of the OpenMP runtime that torch has loaded into this process."""
    assert torch is not None  # imported, so loaded
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path[0]
    raise OSError("torch has loaded no OpenMP runtime")


def _version(command: str) -> bytes:
    return subprocess.run([command, "--version"], capture_output=True, timeout=TIMEOUT_S).stdout


def _processor() -> bytes:
    """What -march=native stands for: the cache may be shared by machines that differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    keys = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)})).encode()
