"""The two speeds of a machine that bound a pass: how fast it reads, and how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def read_bytes_per_s(megabytes: int = 512, repeats: int = 5) -> float:
    """Bytes a second of reading memory: the median of sums over a tensor too large for a cache."""
    x = torch.ones(megabytes * 250_000)  # float32
    return x.nbytes / _median_s(lambda: x.sum(), repeats)


def flops_per_s(size: int = 1536, repeats: int = 5) -> float:
    """Floating-point operations a second of a float32 product of two square matrices: median."""
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
