"""A step recorded once, then replayed: hundreds of launches become one.

A launch costs the host some microseconds whatever it launches, and a step of a small model is
hundreds of them. A CUDA graph keeps what a step has sent to the GPU and sends it again as a whole.
It keeps addresses and numbers as they were, so a step has to be fit for it: `decode.step` is
written to be, and `decode.capture` checks that it is, where there is no GPU. On a CPU the pass of
a step is native calls for the most part, and they are kept and done again in the same manner.

Examples:

    >>> from spindle import Engine, Tokenizer, graphs, load_hf
    >>> tok, model = Tokenizer("tiny"), load_hf("tiny")
    >>> prompt = tok.encode("A list is")
    >>> run, _ = Engine(model).generate(prompt, temperature=0)
    >>> replayed, _ = graphs.enable(Engine(model)).generate(prompt, temperature=0)
    >>> run == replayed
    True
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from spindle.decode.capture import capture
from spindle.decode.cpu_graph import CpuGraph
from spindle.decode.engine import Engine
from spindle.errors import RequestError, shown
from spindle.kernels import emulate, native
from spindle.model.layers import Model

WARM_UPS = 2  # the first builds kernels and workspaces, which a capture must not do


class Recordable(Protocol):
    """A step over tensors that stay where they are."""

    def run(self) -> None:
        """All of it, in tensor operations: `forward`, then `draw`."""

    def forward(self) -> None:
        """The pass, up to the logits."""

    def draw(self) -> None:
        """What follows from the logits."""

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""


Replay = Callable[[], None]
Recorder = Callable[[Recordable], Replay]
_log = logging.getLogger(__name__)


def enable(engine: Engine, record: Recorder | None = None) -> Engine:
    """Have each step of the engine recorded when it is first run, and replayed from then on.

    One graph a number of rows, a chunk size and a kind of sampling (greedy, filtered, penalised).
    `record`: by default `cuda_graph` on a GPU, for which the cache is made as large as it may
    become, as a larger one would be elsewhere, and `cpu_graph` on a CPU, where steps are recorded
    anew when the cache has grown. Where neither is to be had nothing is recorded, and that is said,
    as a warning of this module's logger. Returns the engine, changed. RequestError: no memory.
    """
    if not isinstance(engine, Engine):
        raise RequestError(f"engine={shown(engine)}: expected an Engine")
    record = record or recorder_for(engine.model)
    if record is None:
        _log.warning("graphs: steps run as ever; %s", why_none(engine.model))
        return engine
    if record is not cpu_graph:
        engine.reserve(engine.max_seq_len)
    engine.record_with(record, fixed_shapes=record is not cpu_graph)
    return engine


def enable_if_free(engine: Engine) -> Engine:
    """`enable` where it takes no memory ahead, on a CPU with native code; else change nothing."""
    return enable(engine) if recorder_for(engine.model) is cpu_graph else engine


def recorder_for(model: Model) -> Recorder | None:
    """What records steps of this model; None where nothing does (`why_none`)."""
    if why_none(model):
        return None
    return cuda_graph if model.device.type == "cuda" else cpu_graph


def why_none(model: Model) -> str:
    """Why steps of this model are not recorded, in words; "" if they are."""
    kind = model.device.type
    if kind == "cuda":
        return ""
    if kind != "cpu":
        return f"nothing is recorded on a {kind}"
    if emulate.enabled():
        return "SPINDLE_EMULATE=1 has the CUDA sources in place of native code"
    if model.dtype != torch.float32:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"native code is for float32, and the model is {dtype}"
    return "" if native.available() else f"there is no native code ({native.why_not()})"


def cuda_graph(step: Recordable) -> Replay:
    """The step as a CUDA graph; what it has in `state` is afterwards as it was.

    To capture is not to run. But what a first run does besides, building a kernel or making room
    for a library, cannot be captured: so the step is run before, on a stream of its own.
    """
    device = step.state()[0].device
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                with _state_kept(step):
                    step.run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool(device)):
            step.run()
    return graph.replay


@contextmanager
def _state_kept(step: Recordable) -> Iterator[None]:
    """What the step has in `state` is afterwards as it was, also if it fails."""
    before = [tensor.clone() for tensor in step.state()]
    try:
        yield
    finally:
        for tensor, value in zip(step.state(), before, strict=True):
            tensor.copy_(value)


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


def cpu_graph(step: Recordable) -> Replay:
    """The step's pass as a CpuGraph, then its draw as ever; its `state` is afterwards as it was.

    To record is to run: so the slots that the step writes to hold that run's keys and values, until
    the first replay writes to the same ones.
    """
    graph = CpuGraph()
    with _state_kept(step), torch.inference_mode(), graph:
        step.forward()
    graph.seal()

    def replay() -> None:
        graph.replay()
        step.draw()

    return replay


def recording(step: Recordable) -> Replay:
    """What `cuda_graph` is on a GPU, on a CPU: for tests, and to watch it. It is no faster."""
    return capture(step.run).replay
