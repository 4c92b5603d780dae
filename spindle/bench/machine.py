"""The two speeds of a machine that bound a pass: how fast it reads, and how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spindle.kernels import native
from spindle.kernels.room import large

READ_BYTES = 512 * 2**20  # far more than any cache holds


def here(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What figures depend on beside the code: for JSON, and for `in_words`."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def in_words(found: dict[str, Any]) -> str:
    """The same, for the line before a table."""
    return "{device}, {dtype}, {threads} threads, torch {torch}".format_map(found)


def read_buffer(device: torch.device | str = "cpu") -> Tensor:
    """A tensor that is too large for a cache, to be read again and again; lies as weights do."""
    if torch.device(device).type == "cpu":
        return large(READ_BYTES).view(torch.float32).fill_(1.0)
    return torch.ones(READ_BYTES // 4, device=device)


def read_bytes_per_s(buffer: Tensor | None = None, repeats: int = 5) -> float:
    """Bytes a second at which a sum reads memory, median; `buffer` is `read_buffer`'s.

    The native sum where it is to be had: it asks ahead, and torch's, which does not, is slower than
    the products that are held against it.
    """
    x = read_buffer() if buffer is None else buffer
    read = native.read if native.takes(x) else lambda x: x.sum().item()  # which waits for a GPU
    return x.nbytes / _median_s(lambda: read(x), repeats)


def flops_per_s(size: int = 1536, repeats: int = 5) -> float:
    """Floating-point operations a second of a float32 product of two square matrices, median."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _median_s(lambda: a @ b, repeats)


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `work`, after one call that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
