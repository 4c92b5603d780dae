"""Sources of ours -> libraries in the cache: compiled on first use, found again by their content.

csrc/cpu.cpp by a C++ compiler, for CPU tensors; all csrc/*.cu by nvcc, for those on a GPU. Nothing
here is required. Where there is no compiler, or it fails, `library` and `cuda_library` give None,
`why_not` says so in words, and the ops take another form. SPINDLE_NO_EXT=1 asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from spindle.paths import STAGING, cache_dir, staging_beside, sweep

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"]
TIMEOUT_S = 120

CUDA_HOMES = ("/usr/local/cuda",)  # where nvcc lies when nothing says where
# CUDA's runtime is linked in (nvcc's default): the library then loads beside any version that torch
# has brought, and where torch brought none. Streams, the current device and a graph's capture are
# the driver's, which both share; the last error is each runtime's own, so ours hides none of
# torch's. The shared one would have to be of nvcc's version, and be found where this is loaded.
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
# For whatever GPU comes: machine code for two of them, and PTX, which newer drivers compile.
ANY_GPU = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    "--threads=2",  # one for each
]
OLDEST_OF_ANY = (8, 0)
CUDA_TIMEOUT_S = 600

Capability = tuple[int, int]  # of a GPU, as torch.cuda.get_device_capability gives it

_log = logging.getLogger(__name__)
_reasons: dict[str, str] = {}


# --- the CPU forms -------------------------------------------------------------------------------


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The library of csrc/NAME.cpp, built if it is not in the cache; None where it cannot be.

    Safe when several processes build at once: each compiles for itself, and the last one stays. Why
    there is none of the ops is said once, as a warning of the logger `spindle.kernels.build`.
    """
    try:
        return ctypes.CDLL(str(built(name)))
    except OSError as cause:
        _reasons[name] = str(cause)
        if name == "cpu" and not isinstance(cause, Unwanted):
            _log.warning("native CPU code: not used, plain torch is slower: %s", cause)
        return None


def why_not(name: str) -> str | None:
    """Why there is no library of this name, in words; None if there is one, or nobody asked."""
    return _reasons.get(name)


def built(name: str) -> Path:
    """The file of `library`, compiled if it must be. OSError: why there is none."""
    path = place(name)
    if not is_whole(path):
        _compile(SOURCES / f"{name}.cpp", path)
    return path


def place(name: str) -> Path:
    """Where the library lies, or would: named by all that its machine code depends on.

    Builds nothing. OSError says why nothing can be built.
    """
    refuse()
    command = compiler()
    if command is None:
        raise OSError(no_compiler())
    files = [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]
    parts = [*(file.read_bytes() for file in files), " ".join(FLAGS).encode(), version(command)]
    parts += [_processor(), _openmp().encode()]
    return _place(name, parts)


def compiler() -> str | None:
    """The path of $CXX, or of the first of the usual names; None if there is no such command.

    Of these a clang comes last, whatever it is called: its OpenMP is another one than torch's.
    """
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else COMPILERS
    found = [path for name in names if (path := shutil.which(name))]
    return min(found, key=_is_clang, default=None)


def _is_clang(command: str) -> bool:
    try:
        return b"clang" in version(command)
    except OSError:  # it does not answer
        return True


def no_compiler() -> str:
    """What is said where `compiler` gives None."""
    return f"no C++ compiler: {os.environ.get('CXX') or ', '.join(COMPILERS)} not found"


def _compile(source: Path, target: Path) -> None:
    """Compile and link into a folder of its own, then move: a half-written file is never found."""
    command = compiler()
    assert command is not None
    sweep(target.parent, f"*{STAGING}*")
    with staging_beside(target) as folder:
        unit, made = folder / "unit.o", folder / "made.so"
        run([command, *FLAGS, "-c", str(source), "-o", str(unit)])
        # Linked by path to the OpenMP that torch has loaded: a second runtime would bring a second
        # set of threads, and each would wait for the other's.
        folder_of_openmp = f"-Wl,-rpath,{Path(_openmp()).parent}"
        run([command, "-shared", str(unit), _openmp(), folder_of_openmp, "-o", str(made)])
        seal(made)
        os.replace(made, target)


# --- the CUDA sources ----------------------------------------------------------------------------


@functools.cache
def cuda_library(capability: Capability) -> ctypes.CDLL | None:
    """The library of all csrc/*.cu for such a GPU, built if it is not in the cache; or None.

    Why there is none is said once, as a warning of the logger `spindle.kernels.build`. As safe as
    `library` when several processes build at once.
    """
    try:
        return ctypes.CDLL(str(cuda_built(capability)))
    except OSError as cause:
        _reasons["cuda"] = str(cause)
        _log.warning("CUDA kernels: not used, plain torch does their work: %s", cause)
        return None


def cuda_built(capability: Capability | None) -> Path:
    """The file of `cuda_library`, compiled if it must be; None: for any GPU, ahead of time.

    One for any GPU that is there already serves as well. OSError: why there is none.
    """
    wanted = cuda_place(capability)
    for_any = capability is None or capability >= OLDEST_OF_ANY
    for path in (wanted, cuda_place(None) if for_any else wanted):
        if is_whole(path):
            return path
    _log.info("CUDA kernels: compiling into %s", wanted)
    _compile_cuda(capability, wanted)
    return wanted


def cuda_place(capability: Capability | None) -> Path:
    """Where that library lies, or would: named by sources, headers, flags and nvcc's version.

    Builds nothing. OSError says why nothing can be built.
    """
    refuse()
    command = nvcc()
    if command is None:
        raise OSError(no_nvcc())
    files = sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")])
    sources = [part for file in files for part in (file.name.encode(), file.read_bytes())]
    flags = " ".join([*CUDA_FLAGS, *_for_gpu(capability), platform.machine()])
    return _place("cuda", [*sources, flags.encode(), version(command)])


def nvcc() -> str | None:
    """The path of $CUDACXX, or of nvcc by $CUDA_HOME, $CUDA_PATH, the path, or the usual folder."""
    wanted = os.environ.get("CUDACXX")
    if wanted:
        return shutil.which(wanted)
    given = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home) / "bin") if home else None for home in (*given, *CUDA_HOMES)]
    folders.insert(len(given), os.environ.get("PATH", os.defpath))
    return next((found for folder in folders if folder and (found := _in(folder))), None)


def _in(folders: str) -> str | None:
    return shutil.which("nvcc", path=folders)


def no_nvcc() -> str:
    """What is said where `nvcc` gives None."""
    wanted = os.environ.get("CUDACXX")
    looked = f"$CUDACXX is {wanted}" if wanted else f"not on the path, nor in {CUDA_HOMES[0]}"
    return f"no nvcc: {looked}"


def _for_gpu(capability: Capability | None) -> list[str]:
    return ANY_GPU if capability is None else ["-arch=sm_{}{}".format(*capability)]


def _compile_cuda(capability: Capability | None, target: Path) -> None:
    """All sources as one, so that CUDA's headers are read once; then as `_compile`."""
    command = nvcc()
    assert command is not None
    sweep(target.parent, f"*{STAGING}*")
    with staging_beside(target) as folder:
        unit, made = folder / "unit.cu", folder / "made.so"
        names = sorted(path.name for path in SOURCES.glob("*.cu"))
        unit.write_text("".join(f'#include "{name}"\n' for name in names))
        flags = [*CUDA_FLAGS, *_for_gpu(capability), f"-I{SOURCES}"]
        run([command, *flags, str(unit), "-o", str(made)], CUDA_TIMEOUT_S)
        seal(made)
        os.replace(made, target)


# --- what all builds need ------------------------------------------------------------------------


def seal(library: Path) -> None:
    """End the file with the hash of what is before: the loader reads no further than it must."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def is_whole(library: Path) -> bool:
    """Whether the file is there as it was sealed; one that was cut off would end the process."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def run(command: list[str], timeout_s: int = TIMEOUT_S) -> None:
    """Run a compiler. OSError: it fails, or takes too long; its last words are in the message."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} was not done after {timeout_s} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise OSError(f"{command[0]} failed with status {done.returncode}: {said[-2000:]}")


@functools.cache
def version(command: str) -> bytes:
    """What a compiler says of itself; it is asked once. OSError: it does not answer."""
    try:
        return subprocess.run([command, "--version"], capture_output=True, timeout=20).stdout
    except subprocess.TimeoutExpired:
        raise OSError(f"{command} --version was not done after 20 s") from None


class Unwanted(OSError):
    """Nothing is built, and nothing is wrong."""


def refuse() -> None:
    """Unwanted where nothing is to be built: it was asked for, or this is no Linux."""
    if os.environ.get("SPINDLE_NO_EXT") == "1":
        raise Unwanted("SPINDLE_NO_EXT=1")
    if sys.platform != "linux":  # elsewhere torch brings another OpenMP runtime
        raise Unwanted(f"not tried on {platform.system()}: plain torch does the work")


def _place(stem: str, parts: list[bytes]) -> Path:
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_dir() / "build" / f"{stem}-{digest}.so"


@functools.cache
def _openmp() -> str:
    """The file of the OpenMP runtime that torch has loaded into this process."""
    assert torch is not None  # imported, so loaded
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path[0]
    raise OSError("torch has loaded no OpenMP runtime")


def _processor() -> bytes:
    """What -march=native stands for: the cache may be shared by machines that differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    keys = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)})).encode()
