"""The machine that `spindle bench device` measures: a GPU, or a rehearsal without one.

All that only a GPU has is in `Gpu`: events, its driver, its memory, the compiled library. The
`Rehearsal` has the same on a CPU: the emulator is the library, `graphs.recording` the recorder,
sizes are small, and no time that it took is told. So what a test rehearses is the script itself.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spindle.decode import graphs
from spindle.errors import SpindleError
from spindle.kernels import build, cuda, emulate

Work = Callable[[], object]
Raw = dict[str, Any]  # a config.json

SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "head_dim": 64}
SMOLLM2 |= {"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0}
SMOLLM2 |= {"tie_word_embeddings": True}
LLAMA_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "head_dim": 128}
LLAMA_8B |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0}
SMALL = {"model_type": "llama", "vocab_size": 97, "hidden_size": 64, "head_dim": 32}
SMALL |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 128}


@dataclass(frozen=True)
class Sizes:
    """How much of everything: enough to tell, or enough to run every line."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]  # of rows that are normed; of gates
    heads: tuple[tuple[int, int, int], ...]  # (H, Hk, D)
    queries: tuple[int, ...]  # a row, in attention
    lengths: tuple[int, ...]  # of rows, in attention
    captured: Raw  # the model of the capture stage
    captured_dtypes: tuple[torch.dtype, ...]
    replays: int
    requests: int
    wide: tuple[int, int]  # where bandwidth is measured: of a row, of a gate
    elements: int  # of a tensor there
    attention: tuple[tuple[int, int, tuple[int, int, int]], ...]  # rows, keys a row, heads
    repeats: int  # of what is timed
    shapes: tuple[tuple[str, Raw, torch.dtype], ...]  # of the latency stage
    prompt: int
    new: int  # tokens a turn
    turns: int


FULL = Sizes(
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    widths=(50, 576, 4096, 7168),
    heads=((8, 2, 32), (9, 3, 64), (8, 8, 80), (10, 2, 96), (32, 8, 128)),
    queries=(1, 2, 5, 16),
    lengths=(0, 1, 255, 256, 257, 700),
    captured=SMOLLM2 | {"num_hidden_layers": 4},
    captured_dtypes=(torch.float32, torch.bfloat16),
    replays=64,
    requests=24,
    wide=(4096, 14336),
    elements=2**28,  # 512 MB of bfloat16
    attention=((32, 8192, (32, 8, 128)), (1, 262144, (32, 8, 128)), (96, 16384, (9, 3, 64))),
    repeats=20,
    shapes=(
        ("smollm2's shape", SMOLLM2, torch.bfloat16),
        ("smollm2's shape", SMOLLM2, torch.float32),
        ("8B shape", LLAMA_8B, torch.bfloat16),
    ),
    prompt=128,
    new=96,
    turns=3,
)
REHEARSED = Sizes(
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    widths=(50, 96),
    heads=((4, 2, 32),),
    queries=(1, 5),
    lengths=(0, 1, 257),
    captured=SMALL | {"num_hidden_layers": 1},
    captured_dtypes=(torch.float32,),
    replays=64,
    requests=5,
    wide=(96, 96),
    elements=2**10,
    attention=((2, 64, (4, 2, 32)),),
    repeats=1,
    shapes=(("a small shape", SMALL, torch.float32),),
    prompt=6,
    new=6,
    turns=1,
)


class Gpu:
    """The first CUDA device."""

    sizes, rehearsed = FULL, False
    record: graphs.Recorder | None = None  # that of `graphs.enable`

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.chance = torch.Generator(self.device).manual_seed(0)

    @property
    def name(self) -> str:
        """As its driver calls it."""
        return torch.cuda.get_device_name(self.device)

    def about(self) -> dict[str, Any]:
        """The device, as torch and the driver see it."""
        own = torch.cuda.get_device_properties(self.device)
        return {
            "device": self.name,
            "capability": f"{own.major}.{own.minor}",
            "multiprocessors": own.multi_processor_count,
            "memory_gb": own.total_memory / 1e9,
            "free_gb": torch.cuda.mem_get_info(self.device)[0] / 1e9,
            "cuda": torch.version.cuda,
            "nvcc": _last_line([build.nvcc() or "nvcc", "--version"]),
            "driver, clocks": _last_line(["nvidia-smi", "--query-gpu=" + QUERY, "--format=csv"]),
        }

    def build(self) -> list[tuple[str, Work]]:
        """What is to be compiled, by name; each raises OSError, in the compiler's words."""
        capability = torch.cuda.get_device_capability(self.device)
        return [("CUDA library", lambda: build.cuda_built(capability))]

    def need_kernels(self) -> None:
        """SpindleError: there is no library, and why."""
        if cuda.compiled(self.device) is None:
            raise SpindleError(f"no CUDA library: {build.why_not('cuda')}")

    def kernels(self) -> AbstractContextManager[None]:
        """What to be in so that the models' ops run the CUDA sources."""
        return nullcontext()

    def median_ms(self, works: Sequence[Work], repeats: int) -> float | None:
        """Of one call, by events in the stream; the works take turns."""
        for work in works:
            work()
        pairs = []
        for n in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            works[n % len(works)]()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def seconds(self, work: Work) -> float | None:
        """Of one call, to the end of what it has sent to the device."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def told(self, figure: float | None) -> float | None:
        """The figure, as it was measured."""
        return figure

    def settle(self) -> None:
        """Give unused memory back."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def _last_line(command: list[str]) -> str | None:
    """What a program says last; None if there is no such program, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines and done.returncode == 0 else None


class Rehearsal(Gpu):
    """The same without a GPU, on small tensors on a CPU; what it times, it does not tell."""

    sizes, record, rehearsed = REHEARSED, staticmethod(graphs.recording), True
    name = "dry run, no GPU"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.chance = torch.Generator(self.device).manual_seed(0)

    def about(self) -> dict[str, Any]:
        """That there is no GPU; what would be compiled by, if anything."""
        return {"device": self.name, "nvcc": _last_line([build.nvcc() or "nvcc", "--version"])}

    def build(self) -> list[tuple[str, Work]]:
        """The emulated libraries."""
        files = sorted(path.name for path in build.SOURCES.glob("*.cu"))
        return [(f"emulated {file}", partial(emulate.built, file)) for file in files]

    def need_kernels(self) -> None:
        """SpindleError: there is no emulator."""
        with self.kernels():
            if not emulate.enabled():
                raise SpindleError("no emulator: there is no C++ compiler, or none that works")

    def kernels(self) -> AbstractContextManager[None]:
        """What to be in so that the models' ops are emulated."""
        return emulate.ops_emulated()

    def median_ms(self, works: Sequence[Work], repeats: int) -> None:
        """Each is done; how long it took is no GPU's time."""
        for work in works:
            work()

    def seconds(self, work: Work) -> None:
        """It is done."""
        work()

    def told(self, figure: float | None) -> None:
        """Nothing: a CPU's figure could be mistaken for a GPU's."""

    def settle(self) -> None:
        """Nothing to give back."""


def machine(dry_run: bool) -> Gpu:
    """The GPU, unless it is a dry run, or there is none."""
    return Rehearsal() if dry_run or not torch.cuda.is_available() else Gpu()
