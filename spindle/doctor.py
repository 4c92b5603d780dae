"""What is on this machine, what is missing, and what that costs: `spindle doctor`.

Nothing that is looked for here is required: where something is missing, spindle does with less, and
the report says with how much less. `--build` compiles ahead of time all that can be compiled here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import spindle
from spindle import hub
from spindle.errors import RequestError

EXTRAS = {  # module -> the extra that installs it, what it is for
    "transformers": ("hf", "the tests and `spindle bench peers` have nothing to compare with"),
    "ctranslate2": ("peers", "`spindle bench peers` compares without CTranslate2"),
    "starlette": ("serve", "there is no `spindle serve`"),
    "matplotlib": ("notebooks", "the notebooks cannot draw"),
    "sphinx": ("book", "`make book` cannot build the book"),
}
NATIVE = {  # -> the source in csrc, and what it costs to have none
    "native ops": ("cpu", "decoding is slower on a CPU"),
    "native sampling": ("sampling", "decoding is slower on a CPU"),
    "native fleet": ("fleet", "`spindle bench fleet` is slower"),
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked for: what was found, or what its absence costs."""

    name: str
    found: str | None  # None: it is missing
    cost: str = ""  # in words, where something is missing


def examine() -> list[Check]:
    """Look at everything; changes nothing, downloads nothing, takes as long as torch does."""
    machine = [*interpreter(), *torch_and_device(), cpp_compiler(), *native_code(), nvcc()]
    return [*machine, cuda_kernels(), emulator(), *models(), *extras()]


def build_all() -> tuple[list[Check], bool]:
    """Compile what can be compiled here; what there is now, and whether all of that went well.

    Of each: the file and the seconds, or why there is none, in the compiler's words if it failed.
    """
    from spindle.kernels import build, emulate

    made = [
        _built(what, partial(build.place, name), partial(build.built, name))
        for what, (name, _) in NATIVE.items()
    ]
    for gpu in _gpus():
        parts = partial(build.cuda_place, gpu), partial(build.cuda_built, gpu)
        made.append(_built(_for_gpu(gpu), *parts))
    for path in sorted(build.SOURCES.glob("*.cu")):
        make = partial(emulate.built, path.name)
        made.append(_built(f"emulated {path.name}", emulate.refuse, make))
    return [check for check, _ in made], all(well for _, well in made)


def _built(name: str, refuse: Callable[[], object], make: Callable[[], Path]) -> tuple[Check, bool]:
    """What came of one build, and whether it went well; it does if nothing can be built."""
    try:
        refuse()
    except OSError as cause:
        return Check(name, None, f"cannot be built: {cause}"), True
    start = time.perf_counter()
    try:
        path = make()
    except OSError as cause:
        return Check(name, None, str(cause)), False
    return Check(name, f"{path}, {time.perf_counter() - start:.1f} s"), True


def _gpus() -> list[tuple[int, int] | None]:
    """The kinds of GPU that are here; [None], which stands for any kind, if there is none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kinds = {torch.cuda.get_device_capability(n) for n in range(count)}
    return [*sorted(kinds)] or [None]


def _for_gpu(gpu: tuple[int, int] | None) -> str:
    return "cuda kernels" if gpu is None else "cuda kernels for {}.{}".format(*gpu)


def as_text(checks: list[Check]) -> str:
    """A line for each check, `-` before what is missing."""
    width = max(len(check.name) for check in checks)
    return "\n".join(_line(check, width) for check in checks)


def _line(check: Check, width: int) -> str:
    mark = " " if check.found is not None else "-"
    told = " · ".join(part for part in (check.found or "missing", check.cost) if part)
    return f"{mark} {check.name:<{width}}  {told}"


def as_json(checks: list[Check]) -> str:
    """An object with a member for each check: {"found": text or null, "cost": text}."""
    members = {check.name: asdict(check) for check in checks}
    for member in members.values():
        del member["name"]
    return json.dumps(members, indent=2)


def interpreter() -> Iterator[Check]:
    """The package, and the Python and the system that it runs on."""
    yield Check("spindle", spindle.__version__)
    system = f"{platform.system()} {platform.machine()}"
    yield Check("python", f"{platform.python_version()} on {system}")


def torch_and_device() -> Iterator[Check]:
    """torch, the device that "auto" means here, and the threads."""
    try:
        import torch

        from spindle.model.weights import pick_device
    except Exception as error:  # a broken installation fails in many ways
        yield Check("torch", None, f"nothing runs without it ({error})")
        return
    yield Check("torch", torch.__version__)
    device = pick_device("auto")
    if device.type == "cuda":
        yield Check("device", f"cuda, {torch.cuda.get_device_name()}")
    else:
        yield Check("device", "cpu", _why_no_gpu(torch.backends.mps.is_available()))
    yield Check("threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS changes it)")


def _why_no_gpu(has_apple_gpu: bool) -> str:
    """Why models run on the CPU; an Apple GPU is refused in the words of `pick_device`."""
    from spindle.model.weights import pick_device

    if has_apple_gpu:
        try:
            pick_device("mps")
        except RequestError as refusal:
            return str(refusal)
    return "no CUDA GPU: models run on the CPU, tests marked cuda are skipped"


def cpp_compiler() -> Check:
    """$CXX, or the first of the usual names; nothing is compiled to find out."""
    from spindle.kernels import build  # needs torch, which `torch_and_device` has tried

    cost = "nothing is built from C++: plain torch does all the work, tests that build are skipped"
    wanted = os.environ.get("CXX")
    path = build.compiler()
    if path is None:
        usual = f"none of {', '.join(build.COMPILERS)}"
        tried = f"$CXX is {wanted!r}, no command" if wanted else usual
        return Check("c++ compiler", None, f"{tried}: {cost}")
    return Check("c++ compiler", f"{path}, {_version(path, '')}")


def native_code() -> Iterator[Check]:
    """The libraries in C++ for a CPU: built, or to be built by whoever needs them first."""
    from spindle.kernels import build

    for what, (name, cost) in NATIVE.items():
        try:
            path = build.place(name)
        except OSError as cause:
            yield Check(what, None, f"{cause}: {cost}")
        else:
            yield Check(what, str(path) if path.exists() else "built when first needed")


def nvcc() -> Check:
    """The CUDA compiler; build.py says where it is looked for."""
    from spindle.kernels import build

    path = build.nvcc()
    if path is None:
        cost = "CUDA sources are not compiled, tests that compile them are skipped"
        return Check("nvcc", None, f"{build.no_nvcc()}: {cost}")
    return Check("nvcc", f"{path}, {_version(path, 'release')}")


def cuda_kernels() -> Check:
    """The CUDA sources, compiled by nvcc: built, or to be built for the first tensor on a GPU."""
    from spindle.kernels import build

    gpu = _gpus()[0]
    try:
        paths = [build.cuda_place(gpu), build.cuda_place(None)]
    except OSError as cause:
        return Check("cuda kernels", None, f"{cause}: on a GPU, plain torch does their work")
    there = [str(path) for path in paths if path.exists()]
    later = "built when they are first needed, or by `spindle doctor --build`"
    return Check("cuda kernels", there[0] if there else later)


def emulator() -> Check:
    """The CUDA sources on CPU tensors, which SPINDLE_EMULATE=1 asks for."""
    from spindle.kernels import emulate

    try:
        emulate.refuse()
    except OSError as cause:
        return Check("cuda emulator", None, f"{cause}: CUDA sources cannot be run on the CPU")
    asked = os.environ.get("SPINDLE_EMULATE") == "1"
    return Check(
        "cuda emulator", "SPINDLE_EMULATE=1: all ops" if asked else "SPINDLE_EMULATE=1 uses it"
    )


def _version(program: str, word: str) -> str:
    """The first line of `program --version` that holds `word`."""
    try:
        run = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"which does not run ({error})"
    lines = [line.strip() for line in run.stdout.splitlines() if word in line]
    return lines[0] if lines else "of unknown version"


def models() -> Iterator[Check]:
    """The cache, and each model that has a name here."""
    yield Check("cache", str(hub.cache_dir()))
    for model in hub.known_models():
        size = f"{model.size_bytes / 1e6:,.0f} MB"
        if model.present:
            yield Check(f"model {model.name}", f"{model.about} ({size}, {model.directory})")
        else:
            brought = f"`{model.command}` brings it" if model.command else "the package is damaged"
            yield Check(f"model {model.name}", None, f"{model.about} ({size}); {brought}")


def extras() -> Iterator[Check]:
    """The optional packages, and what each is for."""
    for module, (extra, cost) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Check(module, None, f"{cost}; `pip install -e '.[{extra}]'` brings it")
        else:
            yield Check(module, importlib.metadata.version(module))
