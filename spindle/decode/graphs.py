"""A step recorded once, then replayed: hundreds of launches become one.

A launch costs the host some microseconds whatever it launches, and a step of a small model is
hundreds of them. A CUDA graph keeps what a step has sent to the GPU and sends it again as a whole.
It keeps addresses and numbers as they were, so a step has to be fit for it: `decode.step` is
written to be, and `decode.capture` checks that it is, where there is no GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from spindle.decode.capture import capture
from spindle.decode.engine import Engine
from spindle.errors import RequestError, shown

WARM_UPS = 2  # the first builds kernels and workspaces, which a capture must not do


class Recordable(Protocol):
    """A step over tensors that stay where they are."""

    def run(self) -> None:
        """All of it, in tensor operations."""

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""


Replay = Callable[[], None]
Recorder = Callable[[Recordable], Replay]
_log = logging.getLogger(__name__)


def enable(engine: Engine, record: Recorder | None = None) -> Engine:
    """Have each step of the engine recorded when it is first run, and replayed from then on.

    One graph a number of rows, a chunk size and a kind of sampling (greedy, filtered, penalised).
    The cache is made as large as it may become: a larger one would be elsewhere. `record`: by
    default `cuda_graph`; where there is no GPU nothing is recorded, and that is said, as a warning
    of this module's logger. Returns the engine, changed. RequestError: no memory for the cache.
    """
    if not isinstance(engine, Engine):
        raise RequestError(f"engine={shown(engine)}: expected an Engine")
    if record is None and engine.model.device.type != "cuda":
        _log.warning("graphs: nothing is captured on a %s; steps run as ever", engine.model.device)
        return engine
    engine.reserve(engine.max_seq_len)
    engine.record_with(record or cuda_graph)
    return engine


def cuda_graph(step: Recordable) -> Replay:
    """The step as a CUDA graph; what it has in `state` is afterwards as it was.

    To capture is not to run. But what a first run does besides, building a kernel or making room
    for a library, cannot be captured: so the step is run before, on a stream of its own.
    """
    before = [tensor.clone() for tensor in step.state()]
    device = before[0].device
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                step.run()
                for tensor, value in zip(step.state(), before, strict=True):
                    tensor.copy_(value)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool(device)):
            step.run()
    return graph.replay


def _pool(device: torch.device) -> Any:
    """Memory for what is made within steps, in common: none of it is used after its step."""
    return _keeper(device).pool()


@functools.cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """The graph that keeps the pool: one that no graph has any more cannot be used again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device=device)
    return graph


def recording(step: Recordable) -> Replay:
    """What `cuda_graph` is on a GPU, on a CPU: for tests, and to watch it. It is no faster."""
    return capture(step.run).replay
