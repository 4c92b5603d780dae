"""Which form computes an op, and when: dispatch, the build of the CUDA library, and what is said.

What is compiled here is compiled without decode.cu, which takes nvcc longer than all the others.
"""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import shapes
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spindle import cli, doctor, kernels
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.kernels import build, cuda, emulate, native, ops, twins
from spindle.model.weights import random_model
from spindle.serve.llm import LLM

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="nothing is built elsewhere")
needs_native = pytest.mark.skipif(not native.available(), reason=f"{build.why_not('cpu')}")
needs_emulator = pytest.mark.skipif(
    sys.platform != "linux" or build.compiler() is None or os.environ.get("SPINDLE_NO_EXT") == "1",
    reason="nothing can be emulated here",
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """Nothing is left in the user's cache, and the emulated kernels are compiled quickly."""
    flags = ["-O0" if flag == "-O1" else flag for flag in emulate.OF_KERNELS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(emulate, "OF_KERNELS", flags)
        emulate.library_of.cache_clear()
        yield
    emulate.library_of.cache_clear()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def arguments(name: str, dtype: torch.dtype = torch.float32, D: int = 32) -> list:
    """What one call of an op may be given, always the same; three rows, two queries each."""
    angles = random(3, D // 2)
    q, k = random(3, 6, D, dtype=dtype).split((4, 2), dim=1)
    cache = random(5, 4, 2, D, dtype=dtype)
    tables, lengths = torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.tensor([7, 5, 3])
    given = {
        "rms_norm": [random(3, 64, dtype=dtype), random(64, dtype=dtype), 1e-5],
        "add_rms_norm": [
            *(random(3, 64, dtype=dtype), random(3, 64, seed=1, dtype=dtype)),
            *(random(64, dtype=dtype), 1e-5),
        ],
        "rope": [q, k, angles.cos(), angles.sin()],
        "silu_mul": [random(3, 64, dtype=dtype)],
        "layer_norm": [
            *(random(3, 64, dtype=dtype), random(64, dtype=dtype)),
            *(random(64, seed=2, dtype=dtype), 1e-5),
        ],
        "add_layer_norm": [
            *(random(3, 64, dtype=dtype), random(3, 64, seed=1, dtype=dtype)),
            *(random(64, dtype=dtype), random(64, seed=2, dtype=dtype), 1e-5),
        ],
        "gelu_tanh": [random(3, 64, dtype=dtype)],
        "write_kv": [cache, torch.tensor([19, 3, 8]), random(3, 2, D, dtype=dtype)],
        "copy_blocks": [
            random(2, 5, 4, 2, D, dtype=dtype),
            *(torch.tensor([0, 0, 1]), torch.tensor([2, 3, 4])),
        ],
        "paged_attend": [
            *(random(6, 4, D, dtype=dtype), cache, cache.flip(0), tables, lengths, 0.3),
        ],
        "linear": [random(3, 48), random(2, 48, 32), random(50), 50],
        "int8_linear": [random(3, 48), random(2, 48, 32).to(torch.int8), random(50), random(50)],
    }
    return given[name]


TWINNED = [name for name in ops.SCHEMAS if name not in ops.PRODUCTS]
OPS = [name for name in TWINNED if name not in ops.FOR_GPT2]  # with a CUDA source, too
LAUNCHERS = {
    "rms_norm": "spindle_rms_norm",
    "add_rms_norm": "spindle_rms_norm",
    "rope": "spindle_rope",
    "silu_mul": "spindle_silu_mul",
    "write_kv": "spindle_write_kv",
    "copy_blocks": "spindle_copy_blocks",
    "paged_attend": "spindle_paged_attend",
}


def outcome(op: Callable, given: list) -> list[Tensor]:
    """What a call returns, and then its tensors, of which it may have changed some."""
    returned = op(*given)
    returned = [] if returned is None else [returned] if isinstance(returned, Tensor) else returned
    return [*returned, *(x for x in given if isinstance(x, Tensor))]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, right in zip(ours, expected, strict=True):
        assert one.dtype == right.dtype and torch.equal(one, right)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The launchers that are called from here on."""
    seen, launch = [], cuda._launch

    def spy(file: str, launcher: str, *rest: object) -> None:
        seen.append(launcher)
        launch(file, launcher, *rest)

    monkeypatch.setattr(cuda, "_launch", spy)
    return seen


@pytest.fixture
def natives(monkeypatch) -> list[str]:
    """The native forms that are called from here on."""
    seen: list[str] = []
    forms = ("rms_norm", "layer_norm", "rope", "silu_mul", "gelu_tanh", "write_kv", "paged_attend")
    for name in forms:
        form = getattr(native, name)
        spy = lambda *rest, name=name, form=form: seen.append(name) or form(*rest)  # noqa: E731
        monkeypatch.setattr(native, name, spy)
    return seen


# --- each is one op to torch ---------------------------------------------------------------------


class Log(TorchDispatchMode):
    """The names of the ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TWINNED)
def test_a_dispatch_mode_sees_one_op_whatever_computes_it(name, dtype):
    given = arguments(name, dtype)
    with Log() as log:
        getattr(kernels, name)(*given)
    assert log.names == [f"spindle.{name}.default"]


@needs_native
def test_a_dispatch_mode_sees_the_native_product():
    weight = kernels.pack(random(50, 48), random(50))
    x = random(3, 48)
    with Log() as log:
        ours = kernels.linear(x, weight)
    assert log.names == ["spindle.linear.default"] and ours.shape == (3, 50)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", TWINNED)
def test_fake_tensors_get_the_twins_shapes_and_dtypes(name, device, dtype):
    """Of a GPU too, on a machine that has none."""
    op, given = getattr(kernels, name), arguments(name, dtype)
    expected = outcome(getattr(twins, name), arguments(name, dtype))
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            if isinstance(x, Tensor)
            else x
            for x in given
        ]
        ours = outcome(op, fakes)
    for one, right in zip(ours, expected, strict=True):
        assert (one.shape, one.dtype, one.device.type) == (right.shape, right.dtype, device)


@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=needs_emulator)])
@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_the_schema_names_what_is_changed_and_nothing_is_returned_twice(name, emulated):
    if name in ops.PRODUCTS and not native.available():
        pytest.skip(f"{build.why_not('cpu')}")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    with emulate.ops_emulated(emulated):
        op = getattr(torch.ops.spindle, name).default
        torch.library.opcheck(op, tuple(arguments(name)), test_utils=checks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_changed_in_place_and_returned(dtype):
    x, residual, weight, eps = arguments("add_rms_norm", dtype)
    added = x + residual
    for form in (kernels.add_rms_norm, twins.add_rms_norm):
        taken = residual.clone()
        normed, carried = form(x, taken, weight, eps)
        assert carried is taken and torch.equal(taken, added)
        assert normed.shape == x.shape


# --- on a CPU ------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", TWINNED)
def test_float32_on_a_cpu_goes_to_the_native_form(name, natives, launched):
    with emulate.ops_emulated(False):
        getattr(kernels, name)(*arguments(name))
    own = [] if name == "copy_blocks" else [name.removeprefix("add_")]
    assert natives == own and launched == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", TWINNED)
def test_other_dtypes_on_a_cpu_go_to_the_twin(name, dtype, natives, launched):
    with emulate.ops_emulated(False):
        ours = outcome(getattr(kernels, name), arguments(name, dtype))
    assert_same(ours, outcome(getattr(twins, name), arguments(name, dtype)))
    assert natives == launched == []


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_asked_to_the_emulator_runs_the_source(name, dtype, natives, launched):
    """And gives what the wrapper gives, in bits; without being asked, it does not run."""
    with emulate.ops_emulated():
        ours = outcome(getattr(kernels, name), arguments(name, dtype))
    assert launched == [LAUNCHERS[name]] and natives == []
    assert_same(ours, outcome(getattr(cuda, name), arguments(name, dtype)))
    expected = outcome(getattr(twins, name), arguments(name, dtype))
    eps = torch.finfo(dtype).eps
    for one, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=4 * eps, atol=4 * eps)


def spread(x: Tensor) -> Tensor:
    """The same, with gaps."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def unfit(name: str) -> list:
    """What a kernel is not made for, and the op takes all the same."""
    if name in ("rms_norm", "add_rms_norm"):  # more than 47 kB a row
        x = random(2, 13000)
        return [x, *([x.clone()] if name == "add_rms_norm" else []), x[0].clone(), 1e-5]
    if name in ("rope", "silu_mul"):
        return arguments(name, torch.float64)
    if name in ("write_kv", "copy_blocks"):
        cache, *rest = arguments(name)
        return [spread(cache), *rest]
    if name == "a residual with gaps":
        x, residual, *rest = arguments("add_rms_norm")
        return [x, spread(residual), *rest]
    if name == "head size":
        return arguments("paged_attend", D=48)
    q, keys, values, *rest = arguments("paged_attend")
    if name == "17 queries":
        return [q.repeat(9, 1, 1)[:51], keys, values, *rest]
    return [q, spread(keys), spread(values), *rest]


UNFIT = {name: name for name in OPS if name != "paged_attend"}  # -> the op
UNFIT |= {"a residual with gaps": "add_rms_norm"}
UNFIT |= dict.fromkeys(("head size", "17 queries", "a pool with gaps"), "paged_attend")


@needs_emulator
@pytest.mark.parametrize("name", UNFIT)
def test_what_a_kernel_is_not_made_for_is_computed_as_without_it(name, launched):
    op = UNFIT[name]
    with pytest.raises(cuda.Unfit):
        getattr(cuda, op)(*unfit(name))
    with emulate.ops_emulated():
        ours = outcome(getattr(kernels, op), unfit(name))
    with emulate.ops_emulated(False):
        assert_same(ours, outcome(getattr(kernels, op), unfit(name)))
    assert launched == []


@needs_emulator
def test_a_fault_in_a_kernel_is_no_reason_to_take_the_twin():
    old = "lane < blockDim.x / WARP ? sums[lane] : 0.0f"
    with emulate.ops_emulated(), emulate.edited("common.cuh", old, "sums[2 * lane]"):
        with pytest.raises(emulate.KernelFault, match="beyond the array"):
            kernels.rms_norm(random(1, 64), random(64), 1e-5)


def answers(model, dtype) -> list[list[int]]:
    """Greedy, of one stream and of three requests at once."""
    params = SamplingParams(temperature=0, max_tokens=8)
    one = list(Engine(model, max_seq_len=64).stream_with([5, 9, 11], params))
    prompts = [[5, 9, 11], [3] * 20, [8, 2]]
    many = LLM(model, num_blocks=30, dtype=dtype).generate(prompts, params, progress=False)
    return [one, *(request.outputs[0].token_ids for request in many)]


@needs_emulator
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_both_engines_run_on_the_emulator(family, launched):
    """The tokens of the plain path; every op of the step by its CUDA source."""
    config = shapes.llama(head_dim=32) if family == "llama" else shapes.gpt2(n_embd=128)
    model = random_model(config, dtype=torch.float32)
    expected = answers(model, torch.float32)
    assert launched == []
    with emulate.ops_emulated():
        assert answers(model, torch.float32) == expected
    of_llama = set(LAUNCHERS.values()) - {"spindle_copy_blocks"}
    used = of_llama if family == "llama" else {"spindle_write_kv", "spindle_paged_attend"}
    assert set(launched) == used


ASK = (
    "import torch; from spindle import kernels; from spindle.kernels import emulate;"
    "x = torch.ones(1, 8); print([kernels.rms_norm(x, x[0], 0.0).sum().item() for _ in 'ab']);"
    "print(emulate.enabled())"
)


def in_a_process(program: str, **environment: str) -> tuple[list[str], list[str]]:
    """The lines that a program prints, and those that it says beside that."""
    clean = {"SPINDLE_NO_EXT": "0", "SPINDLE_EMULATE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | clean | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@needs_emulator
def test_the_environment_asks_for_the_emulator_and_nothing_is_said_of_what_is_not_needed():
    assert in_a_process(ASK, SPINDLE_EMULATE="1") == (["[8.0, 8.0]", "True"], [])
    assert in_a_process(ASK, CUDACXX="no-such-nvcc") == (["[8.0, 8.0]", "False"], [])


@on_linux
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CXX", "no-such-compiler", r"no C\+\+ compiler: no-such-compiler not found"),
        ("CXX", "false", r".*/false failed with status 1: "),
        ("SPINDLE_NO_EXT", "1", "SPINDLE_NO_EXT=1"),
    ],
)
def test_an_emulator_that_cannot_be_had_is_said_once(name, value, why, monkeypatch, caplog):
    monkeypatch.setenv("SPINDLE_NO_EXT", "0")
    monkeypatch.setenv(name, value)
    emulate.available.cache_clear()
    emulate.library_of.cache_clear()
    x = random(3, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING), emulate.ops_emulated():
        assert all(torch.equal(kernels.silu_mul(x), twins.silu_mul(x)) for _ in range(3))
    emulate.available.cache_clear()
    (said,) = caplog.messages
    assert re.fullmatch(f"the emulator: not used, the ops run without it: {why}", said)


@needs_native
def test_whether_a_cache_is_read_where_it_lies():
    ours, half, odd = torch.empty(2, 64), torch.empty(2, 64).half(), torch.empty(2, 48).half()
    with emulate.ops_emulated(False):
        assert kernels.attends_in_place(ours) and kernels.attends_in_place(ours, 17)
        assert not kernels.attends_in_place(half) and not kernels.attends_in_place(ours.double())
    with FakeTensorMode():
        there = torch.empty(2, 64, device="cuda", dtype=torch.bfloat16)
        assert kernels.attends_in_place(there, 16)
        assert not kernels.attends_in_place(there, 17)
        assert not kernels.attends_in_place(there.double())
        assert not kernels.attends_in_place(torch.empty(2, 48, device="cuda").half())
    if emulate.available():
        with emulate.ops_emulated():
            assert kernels.attends_in_place(half, 16) and kernels.attends_in_place(ours, 17)
            assert not kernels.attends_in_place(half, 17) and not kernels.attends_in_place(odd)


# --- on a GPU, as far as it goes without one -----------------------------------------------------


@pytest.mark.parametrize("there_is_one", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_a_cuda_tensor_goes_to_the_compiled_source_else_to_the_twin(
    there_is_one, fits, monkeypatch
):
    def source(x: Tensor) -> str:
        if not fits:
            raise cuda.Unfit
        return "source"

    monkeypatch.setattr(cuda, "compiled", lambda device: "a library" if there_is_one else None)
    op = ops._on_cuda(source, lambda x: "twin")
    assert op(torch.empty(1)) == ("source" if there_is_one and fits else "twin")


def test_every_op_has_a_form_for_each_device():
    for name in OPS:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"spindle::{name}", key)


def test_an_error_that_is_no_misfit_is_passed_on(monkeypatch):
    def source(x: Tensor) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(cuda, "compiled", lambda device: "a library")
    with pytest.raises(TypeError, match="a mistake of ours"):
        ops._on_cuda(source, lambda x: None)(torch.empty(1))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(("start", "T"), [(0, 1), (0, 6), (5, 1), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_fused_attention_is_the_twin(dtype, start, T, heads):
    """q is a slice of something wider, as in the models."""
    H, Hk = heads
    q = (2 * random(T, H + 3, 8)).to(dtype)[:, :H]
    k, v = (random(start + T, Hk, 8, seed=n).to(dtype) for n in range(2))
    ours, right = ops.attend(q, k, v, start, 0.3), twins.attend(q, k, v, start, 0.3)
    assert ours.dtype == dtype and ours.shape == right.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, right, rtol=16 * eps, atol=16 * eps)


def test_attention_of_a_prompt_is_fused_but_in_float64_the_twin(monkeypatch):
    """64 bits are for being exact, and the twin says what that is."""
    q = random(3, 4, 8)
    exact = q.double()
    right = twins.attend(exact, exact, exact, 0, 0.3)
    assert torch.equal(kernels.attend(exact, exact, exact, 0, 0.3), right)
    seen: list[str] = []
    for forms, name in ((twins, "twin"), (ops, "fused")):
        monkeypatch.setattr(forms, "attend", lambda *given, name=name: seen.append(name))
    kernels.attend(exact, exact, exact, 0, 0.3)
    kernels.attend(q, q, q, 0, 0.3)
    with FakeTensorMode():
        kernels.attend(*[torch.empty(3, 4, 8, device="cuda")] * 3, 0, 0.3)
    assert seen == ["twin", "fused", "fused"]


# --- the library that nvcc makes -----------------------------------------------------------------


@pytest.fixture
def small_sources(tmp_path, monkeypatch) -> Path:
    """csrc without decode.cu."""
    folder = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, folder, ignore=shutil.ignore_patterns("decode.cu"))
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("SPINDLE_NO_EXT", "0")
    return folder


@pytest.fixture
def fake_nvcc(tmp_path, small_sources, monkeypatch) -> Path:
    """An nvcc that writes an empty library, slowly, and its arguments into a file beside it."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    script = (
        "#!/bin/sh\n[ $1 = --version ] && echo one && exit\n"
        f'echo "$@" >> {tmp_path}/calls; sleep 0.2; for target; do :; done\n'
        f'exec {build.compiler()} -shared -x c++ /dev/null -o "$target"\n'
    )
    path = tmp_path / "fake-nvcc"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    build.cuda_library.cache_clear()
    yield path
    build.cuda_library.cache_clear()


def calls(fake_nvcc: Path) -> list[str]:
    path = fake_nvcc.with_name("calls")
    return path.read_text().splitlines() if path.exists() else []


def made(fake_nvcc: Path) -> list[Path]:
    return sorted((fake_nvcc.parent / "cache" / "build").iterdir())


@on_linux
def test_it_is_built_once_for_a_kind_of_gpu_and_found_again(fake_nvcc):
    first = build.cuda_built((7, 5))
    assert build.cuda_built((7, 5)) == first and build.cuda_built((9, 0)) != first
    assert [re.search(r"-arch=\S+", call)[0] for call in calls(fake_nvcc)] == [
        "-arch=sm_75",
        "-arch=sm_90",
    ]
    for call in calls(fake_nvcc):
        assert {"-std=c++17", "-shared", "-fPIC", "static"} < set(call.split())
    assert len(made(fake_nvcc)) == 2
    assert all(re.fullmatch(r"cuda-[0-9a-f]{16}\.so", path.name) for path in made(fake_nvcc))
    assert isinstance(build.cuda_library((9, 0)), ctypes.CDLL) and len(calls(fake_nvcc)) == 2


@on_linux
def test_one_for_any_gpu_serves_those_that_it_is_for(fake_nvcc):
    any_gpu = build.cuda_built(None)
    (call,) = calls(fake_nvcc)
    assert "sm_80" in call and "[sm_90,compute_90]" in call
    assert build.cuda_built((9, 0)) == build.cuda_built((12, 0)) == any_gpu
    assert build.cuda_built((7, 5)) != any_gpu and len(calls(fake_nvcc)) == 2


@on_linux
@pytest.mark.parametrize("kept", [0, 3000])
def test_one_that_was_cut_off_is_built_again(fake_nvcc, kept):
    path = build.cuda_built((9, 0))
    os.truncate(path, kept)
    assert build.cuda_built((9, 0)) == path and build.is_whole(path)
    assert len(calls(fake_nvcc)) == 2


@on_linux
def test_two_processes_may_build_at_once(fake_nvcc):
    program = (
        "from spindle.kernels import build; from pathlib import Path;"
        f"build.SOURCES = Path({str(build.SOURCES)!r});"
        "print(build.cuda_library((9, 0)) is not None)"
    )
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["True\n", "True\n"]
    (only,) = made(fake_nvcc)
    assert build.is_whole(only)


@on_linux
def test_its_name_holds_all_that_it_is_made_of(fake_nvcc, small_sources, monkeypatch):
    places = [build.cuda_place((9, 0)), build.cuda_place((8, 0)), build.cuda_place(None)]
    for name in ("silu.cu", "common.cuh"):
        (small_sources / name).write_text((small_sources / name).read_text() + "\n")
        places.append(build.cuda_place((9, 0)))
    (small_sources / "another.cu").write_text("")
    places.append(build.cuda_place((9, 0)))
    monkeypatch.setattr(build, "CUDA_FLAGS", ["-O1"])
    places.append(build.cuda_place((9, 0)))
    monkeypatch.setattr(build, "version", lambda command: b"another")
    places.append(build.cuda_place((9, 0)))
    assert len(set(places)) == len(places)
    assert calls(fake_nvcc) == []


FAILS = "#!/bin/sh\n[ $1 = --version ] && exit\necho 'decode.cu(7): error: out of luck' >&2; exit 2"
WITHOUT = {
    "no nvcc": ({"CUDACXX": "no-such-nvcc"}, None, r"no nvcc: \$CUDACXX is no-such-nvcc"),
    "not wanted": ({"SPINDLE_NO_EXT": "1"}, None, "SPINDLE_NO_EXT=1"),
    "it fails": (
        *({}, FAILS),
        r".*/fake-nvcc failed with status 2: decode\.cu\(7\): error: out of luck",
    ),
    "no library comes of it": (
        *({}, "#!/bin/sh\n[ $1 = --version ] && exit\nfor target; do :; done; echo none > $target"),
        r".*\.so: (file too short|invalid ELF header)",
    ),
}


@on_linux
@pytest.mark.parametrize("case", WITHOUT)
def test_without_the_library_it_is_said_once_and_the_twins_do_the_work(
    case, fake_nvcc, monkeypatch, caplog
):
    """As for a tensor on a GPU of that kind, whose ops ask for the library each time."""
    environment, script, why = WITHOUT[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if script is not None:
        fake_nvcc.write_text(script)
    build.version.cache_clear()
    monkeypatch.setattr(cuda, "compiled", lambda device: build.cuda_library((9, 0)))
    op = ops._on_cuda(cuda.silu_mul, twins.silu_mul)
    x = random(3, 64)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(op(x), twins.silu_mul(x)) for _ in range(3))
    (said,) = caplog.messages
    assert re.fullmatch(f"CUDA kernels: not used, plain torch does their work: {why}", said)
    assert re.fullmatch(why, str(build.why_not("cuda")))


@on_linux
def test_nvcc_is_found_by_what_says_where_it_is(tmp_path, monkeypatch):
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("cxx", "home/bin", "path/bin", "onpath", "usual/bin"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(0o755)
    monkeypatch.setattr(build, "CUDA_HOMES", (str(tmp_path / "none"),))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert build.nvcc() is None and build.no_nvcc().startswith("no nvcc: not on the path")
    monkeypatch.setattr(build, "CUDA_HOMES", (str(tmp_path / "usual"),))
    assert build.nvcc() == str(tmp_path / "usual/bin/nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "onpath"))
    assert build.nvcc() == str(tmp_path / "onpath/nvcc")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    assert build.nvcc() == str(tmp_path / "path/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.nvcc() == str(tmp_path / "home/bin/nvcc")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "cxx/nvcc"))
    assert build.nvcc() == str(tmp_path / "cxx/nvcc")
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    assert build.nvcc() is None


def test_every_launcher_that_is_called_is_in_the_sources():
    called = set(re.findall(r'"(\w+\.cu)",\s+"(spindle_\w+)"', Path(cuda.__file__).read_text()))
    assert {launcher for _, launcher in called} == set(LAUNCHERS.values())
    for file, launcher in called:
        assert f'extern "C" int {launcher}(' in (build.SOURCES / file).read_text()


@on_linux
def test_the_real_library_loads_without_a_gpu_and_a_launch_says_why_not(small_sources):
    """By nvcc. A status that is not 0 is told with the launcher's name."""
    if build.nvcc() is None:
        pytest.skip("NO NVCC HERE: the CUDA library is not built in this run")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the tests marked cuda do more")
    library = ctypes.CDLL(str(build.cuda_built((9, 0))))
    for launcher in set(LAUNCHERS.values()) - {"spindle_paged_attend"}:
        assert getattr(library, launcher)
    x = random(3, 64)
    sizes = (x, None, x[0], x.clone(), 3, 64, 1e-5, 0)
    with pytest.raises(emulate.KernelFault, match=r"^spindle_rms_norm: CUDA returned status 35 "):
        cuda.run(library, "spindle_rms_norm", sizes, None)
    cuda.run(library, "spindle_rms_norm", (*sizes[:4], 0, *sizes[5:]), None)  # no rows, no launch


# --- spindle doctor ------------------------------------------------------------------------------


def built_by_doctor(capsys) -> tuple[int, list[str]]:
    status = cli.main(["doctor", "--build"])
    return status, capsys.readouterr().out.splitlines()


@on_linux
def test_doctor_builds_all_that_can_be_built(fake_nvcc, small_sources, capsys):
    for name in ("rmsnorm.cu", "rope.cu", "silu.cu"):
        (small_sources / name).unlink()
    emulate.library_of.cache_clear()
    status, lines = built_by_doctor(capsys)
    names = ("native ops", "native sampling", "native fleet", "cuda kernels", "emulated copy.cu")
    assert status == 0 and len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        found = re.fullmatch(rf"  {name} +(/\S+\.so), \d+\.\d s", line)
        assert found and build.is_whole(Path(found[1]))
    assert doctor.cuda_kernels().found == str(build.cuda_place(None))


@on_linux
def test_doctor_shows_a_failing_compilers_words_and_fails(fake_nvcc, small_sources, capsys):
    for name in ("rmsnorm.cu", "rope.cu", "silu.cu"):
        (small_sources / name).unlink()
    fake_nvcc.write_text(FAILS)
    status, lines = built_by_doctor(capsys)
    assert status == 1
    (line,) = [line for line in lines if line.startswith("- cuda kernels")]
    assert line.endswith("failed with status 2: decode.cu(7): error: out of luck")


@on_linux
def test_doctor_does_not_fail_where_nothing_can_be_built(fake_nvcc, monkeypatch, capsys):
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, lines = built_by_doctor(capsys)
    assert status == 0 and calls(fake_nvcc) == []
    assert all(line.startswith("- ") and "cannot be built: no " in line for line in lines)
    assert "no nvcc: $CUDACXX is no-such-nvcc" in doctor.cuda_kernels().cost
    assert "cannot be run on the CPU" in doctor.emulator().cost


@on_linux
def test_doctor_says_what_would_be_built_and_what_is_emulated(fake_nvcc, monkeypatch):
    assert "built when they are first needed" in doctor.cuda_kernels().found
    assert doctor.emulator().found == "SPINDLE_EMULATE=1 uses it"
    monkeypatch.setenv("SPINDLE_EMULATE", "1")
    assert doctor.emulator().found == "SPINDLE_EMULATE=1: all ops"
    one = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 3,
        get_device_capability=lambda n: [(9, 0), (8, 0), (9, 0)][n],
    )
    monkeypatch.setattr(torch, "cuda", one)
    assert doctor._gpus() == [(8, 0), (9, 0)]
    assert doctor._for_gpu((9, 0)) == "cuda kernels for 9.0"


# --- on a GPU ------------------------------------------------------------------------------------


def on_gpu(given: list) -> list:
    return [x.cuda() if isinstance(x, Tensor) else x for x in given]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_compiled_kernel_is_the_twin(name, dtype, launched):
    """Both compute in float32 and round to the dtype, some ops twice."""
    ours = outcome(getattr(kernels, name), on_gpu(arguments(name, dtype)))
    torch.cuda.synchronize()
    assert launched == [LAUNCHERS[name]]
    expected = outcome(getattr(twins, name), arguments(name, dtype))
    eps = torch.finfo(dtype).eps
    for one, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), right, rtol=8 * eps, atol=8 * eps)


@pytest.mark.cuda
@pytest.mark.parametrize("D", cuda.HEAD_SIZES)
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_attention_is_the_twin_over_many_splits(D, queries, dtype, launched):
    """Rows of 0 to 3000 keys, 9 query heads on 3, NaN in what is not to be read."""
    lengths, P = torch.tensor([0, 16, 700, 3000]), 16
    tables = torch.randperm(4 * 188, generator=torch.Generator().manual_seed(0)).view(4, 188)
    q = random(4 * queries, 9, D, dtype=dtype)
    keys, values = (random(4 * 188, P, 3, D, seed=n, dtype=dtype) for n in range(2))
    for row, length in enumerate(lengths.tolist()):
        for cache in (keys, values):
            slots = cache[tables[row]].view(-1, 3, D)
            slots[length:] = torch.nan
            cache[tables[row]] = slots.view(-1, P, 3, D)
    given = [q, keys, values, tables, lengths, D**-0.5]
    ours = kernels.paged_attend(*on_gpu(given)).cpu()
    assert launched == ["spindle_paged_attend"]
    off = max(4 * torch.finfo(dtype).eps, 1e-5)  # sums of 3000, of scores that are sums of D
    torch.testing.assert_close(ours, twins.paged_attend(*given), rtol=off, atol=off)


@pytest.mark.cuda
@pytest.mark.parametrize("name", UNFIT)
def test_what_a_compiled_kernel_is_not_made_for_the_twin_computes_there(name, launched):
    op = UNFIT[name]
    ours = outcome(getattr(kernels, op), on_gpu(unfit(name)))
    expected = outcome(getattr(twins, op), on_gpu(unfit(name)))
    for one, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, right)
    assert launched == []


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPS)
def test_an_op_is_captured_in_a_graph_on_the_stream_that_captures(name):
    """The replay computes with what stands in the tensors by then."""
    op, given = getattr(kernels, name), on_gpu(arguments(name))
    kept = [x.clone() if isinstance(x, Tensor) else x for x in given]
    op(*[x.clone() if isinstance(x, Tensor) else x for x in given])  # built before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*given)
    for x, was in zip(given, kept, strict=True):
        if isinstance(x, Tensor):
            x.copy_(was * 2 if x.is_floating_point() else was)
            was.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    ours = [*returned, *(x for x in given if isinstance(x, Tensor))]
    for one, right in zip(ours, outcome(op, kept), strict=True):
        assert torch.equal(one, right)


@pytest.mark.cuda
def test_fused_attention_on_a_gpu_is_the_twin():
    for start, T in ((0, 1), (0, 70), (33, 1), (33, 40)):
        q = random(T, 9, 64, dtype=torch.bfloat16).cuda()
        k, v = (random(start + T, 3, 64, seed=n, dtype=torch.bfloat16).cuda() for n in range(2))
        ours, right = kernels.attend(q, k, v, start, 0.125), twins.attend(q, k, v, start, 0.125)
        torch.testing.assert_close(ours, right, rtol=2**-6, atol=2**-6)


@on_linux
def test_an_emulated_source_that_does_not_compile_is_said_once_and_the_ops_run_on(
    monkeypatch, caplog
):
    """The op that needed it, and all after it, take another form: no answer ends in the middle."""
    q, keys, values, *rest = arguments("paged_attend")
    right = twins.paged_attend(q, keys, values, *rest)

    def broken(file):
        raise OSError(f"g++ failed with status 1: {file}: out of luck")

    with emulate.ops_emulated():
        monkeypatch.setattr(emulate, "available", lambda: True)
        monkeypatch.setattr(emulate, "library_of", broken)
        for _ in range(3):
            torch.testing.assert_close(kernels.paged_attend(q, keys, values, *rest), right)
        assert not emulate.enabled()
    (record,) = caplog.records
    assert "decode.cu: out of luck" in record.getMessage()


@on_linux
def test_an_edited_source_that_does_not_compile_is_an_error(monkeypatch):
    """Whoever edits it wants to see what the compiler says."""
    x, weight = random(2, 8), random(8)
    with emulate.ops_emulated(), emulate.edited("rmsnorm.cu", "float squares", "flaot squares"):
        with pytest.raises(OSError, match="flaot"):
            kernels.rms_norm(x, weight, 1e-5)
