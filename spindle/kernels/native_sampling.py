"""Sampling natively on a CPU, from Python: pointers and lengths into csrc/sampling.cpp.

`decode.sampling` says in plain torch what is computed, and does what is left over here.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from spindle.kernels import build

UNSETTLED = -2  # in place of a token, as in sampling.cpp
_POINTER, _LENGTH = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = build.library("sampling")
    if found is not None:
        found.spindle_sample.argtypes = [_POINTER] * 9 + [_LENGTH] * 2 + [ctypes.c_int]
        found.spindle_sample.restype = _LENGTH
        found.spindle_weights.argtypes = [_POINTER] * 2 + [_LENGTH]
        found.spindle_weights.restype = None
        found.spindle_uniform.argtypes = [_POINTER] * 4 + [_LENGTH] * 2
        found.spindle_uniform.restype = None
    return found


def available() -> bool:
    """Whether the native forms are here; the first call may compile them, a second or three."""
    return _library() is not None


def takes(*tensors: Tensor) -> bool:
    """Whether the native forms are for these: on a CPU, and nobody watches torch's operations."""
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    return on_cpu and not is_in_torch_dispatch_mode() and available()


def greedy(adjusted: Tensor, logits: Tensor) -> Tensor:
    """Of float32 rows [R, V] the first of the largest -> [R] int64; -1: no distribution.

    `logits` are what the adjusted ones were made of, or they themselves.
    """
    return _sample(adjusted, logits, None, [None] * 5)[0]


def sample(
    adjusted: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, int]:
    """A token of each row [R], `greedy`'s where the temperature is 0; and how many are left over.

    Those are sound rows, and have `UNSETTLED`: fewer of them where the weights [R, V] are given
    that plain torch has for temperature and min-p. u [R] is float64, all else as in `SamplingRows`.
    """
    return _sample(adjusted, logits, weights, [temperature, top_k, top_p, min_p, u])


def _sample(
    adjusted: Tensor,
    logits: Tensor,
    weights: Tensor | None,
    parameters: list[Tensor] | list[None],
) -> tuple[Tensor, int]:
    R, V = adjusted.shape
    tokens = torch.empty(R, dtype=torch.int64)
    raw = None if adjusted is logits else logits
    # Named, so that what is copied here outlives the call.
    given = [None if x is None else x.contiguous() for x in (adjusted, raw, weights, *parameters)]
    pointers = [None if x is None else x.data_ptr() for x in (*given, tokens)]
    lib = _library()
    assert lib is not None
    return tokens, lib.spindle_sample(*pointers, R, V, torch.get_num_threads())


def uniform(seed: Tensor, sample: Tensor, position: Tensor, purpose: int) -> Tensor:
    """The twin's numbers [R], for int64 [R] each."""
    u = torch.empty(len(seed), dtype=torch.float64)
    given = [x.contiguous() for x in (seed, sample, position)]
    lib = _library()
    assert lib is not None
    lib.spindle_uniform(*(x.data_ptr() for x in (*given, u)), len(seed), purpose)
    return u


def weights(x: Tensor) -> Tensor:
    """e^x [n] for contiguous float32 x of at most 0, as `sample` weighs its tokens."""
    made = torch.empty_like(x)
    lib = _library()
    assert lib is not None
    lib.spindle_weights(x.data_ptr(), made.data_ptr(), len(x))
    return made
