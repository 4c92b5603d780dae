"""One stream: what a token costs, with steps run or replayed, and ops plain or fused.

    eager   a step is sent to the device operation by operation
    graph   it is recorded once and replayed as a whole; on a CPU only what is native code can be
    torch   each op is its twin: plain torch
    fused   each op is the fastest form here: native code on a CPU, the CUDA sources on a GPU

The four corners take turns, there and back, so that a machine that slows down slows down for all.
A token reads every weight once, and the keys and values of all tokens before it. That many bytes,
at the speed at which this machine reads memory in the same run, bound what a token costs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from spindle import hub, kernels
from spindle.bench import machine, peers, report
from spindle.config import ModelConfig
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.decode.oplog import CaptureError, Log
from spindle.decode.params import SamplingParams
from spindle.decode.stats import percentile
from spindle.errors import RequestError
from spindle.kernels import build, cuda, emulate, native, ops, packed, twins
from spindle.model.layers import Model
from spindle.model.weights import load, pick_device, pick_dtype
from spindle.tokenizer import Tokenizer

STEPS, OPS = ("eager", "graph"), ("torch", "fused")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
WARM_UP = 4  # tokens before anything is timed: caches, threads, builds, captures


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench latency`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="what to run (default: tiny)")
    add("-m", "--model", dest="also", metavar="MODEL", help="the same")
    add("--tiny", action="store_true", help="the bundled model, which runs anywhere")
    add("--new", type=int, default=128, metavar="N", help="tokens (default: 128)")
    add("--repeat", type=int, default=5, metavar="K", help="turns of each corner (default: 5)")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a markdown table, and write JSON if a file was named."""
    report.check_json(args.json)
    result = measure(_name(args), args.new, args.repeat)
    report.publish(result, as_markdown(result), args.json)
    return 0


def _name(args: argparse.Namespace) -> str:
    named = [name for name in (args.model, args.also, "tiny" if args.tiny else None) if name]
    if len(set(named)) > 1:
        raise RequestError(f"{' and '.join(named)}: expected one model")
    return named[0] if named else "tiny"


def measure(name: str = "tiny", new: int = 128, repeat: int = 5) -> dict[str, Any]:
    """`repeat` turns of `new` tokens in each corner. RequestError for a length that cannot be."""
    directory = hub.resolve(name)
    config, prompt = (
        ModelConfig.from_directory(directory),
        Tokenizer(directory).encode(peers.PROMPT),
    )
    room = config.max_positions - len(prompt)
    if not 2 <= new <= room:
        raise RequestError(f"--new {new}: expected 2 to {room} (what fits after the prompt)")
    if repeat < 1:
        raise RequestError(f"--repeat {repeat}: expected 1 or more")
    device = pick_device()
    dtype = pick_dtype("auto", device, config)
    found = corners(lambda: load(directory, config, dtype, device), prompt, new)
    buffer = _read_buffer(device)
    result = compare(found, prompt, new, repeat, lambda: machine.read_bytes_per_s(buffer, 3))
    return result | {
        "forms": {"fused": fused_form(device)},
        "settings": {"model": name, "prompt_tokens": len(prompt), "new": new, "repeat": repeat},
        "machine": machine.here(device, dtype),
    }


def _read_buffer(device: torch.device) -> torch.Tensor:
    """Larger on a GPU, which reads the usual one in the time of a few calls."""
    if device.type == "cuda":
        return torch.ones(2**30, device=device)
    return machine.read_buffer(device)


# --- ops, plain or fused -------------------------------------------------------------------------


@contextmanager
def plain_ops() -> Iterator[None]:
    """For a while, the models' ops are their twins, called directly; nothing is native or compiled.

    A model that is made meanwhile has plain weights. An engine that is made meanwhile attends as
    where there are no kernels, and its steps are to be run meanwhile, too.
    """
    named = {name: getattr(twins, name) for name in ops.SCHEMAS if name != "linear"}
    named |= {name: ops.normed(getattr(twins, name)) for name in ops.ADDING}
    with ExitStack() as stack:
        stack.enter_context(emulate.ops_emulated(False))
        for name, twin in named.items():
            stack.enter_context(patch.object(kernels, f"_{name}", twin))
        stack.enter_context(patch.object(native, "available", lambda: False))
        stack.enter_context(patch.object(packed, "_has_onednn", lambda: False))
        stack.enter_context(patch.object(cuda, "compiled", lambda device: None))
        yield


def ops_of(kind: str) -> AbstractContextManager[None]:
    """What to be in for "torch" or "fused" ops."""
    return plain_ops() if kind == "torch" else nullcontext()


def fused_form(device: torch.device) -> str:
    """What computes the fused ops on this device, in words."""
    if device.type == "cuda":
        there = cuda.compiled(device) is not None
        return "the CUDA sources" if there else f"plain torch, too: {build.why_not('cuda')}"
    if emulate.enabled():
        return "the CUDA sources, emulated"
    return "native code" if native.available() else f"plain torch, too: {build.why_not('cpu')}"


# --- the corners ---------------------------------------------------------------------------------


@dataclass
class Corner:
    """An engine, how its steps and ops are done, and the turns that it has had."""

    steps: str
    ops: str
    engine: Engine
    operations: int | None  # that a step sends to the device, one by one; None: it cannot be told
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Such as "eager torch"."""
        return f"{self.steps} {self.ops}"

    def take_turn(self, prompt: list[int], new: int) -> Turn:
        """An answer of `new` tokens."""
        with ops_of(self.ops):
            ids, stats = self.engine.generate(prompt, new, temperature=0.0, ignore_eos=True)
        return Turn(ids, stats.step_ms, stats.decode_tok_s or math.nan)


@dataclass(frozen=True)
class Turn:
    """One answer: its ids, how long each step took, and the tokens a second after the first."""

    token_ids: list[int]
    step_ms: list[float]
    tok_s: float


def corners(
    make_model: Callable[[], Model],
    prompt: list[int],
    new: int,
    record: graphs.Recorder | None = None,
) -> list[Corner]:
    """The corners that can be had here, eager ones first; all have room for this prompt and answer.

    Plain and fused ops share a model where its weights are plain anyway: on a GPU. `record` as in
    `graphs.enable`.
    """
    found, shared = [], None
    for kind in OPS:
        with ops_of(kind):
            model = shared or make_model()
            shared = model if model.device.type == "cuda" else None
            eager, graph = (Engine(model, len(prompt) + new) for _ in range(2))
            eager.reserve(eager.max_seq_len)
            count, recorder = operations(eager, prompt), record or graphs.recorder_for(model)
        found.append(Corner("eager", kind, eager, count))
        if recorder is not None:
            graph.reserve(graph.max_seq_len)
            found.append(Corner("graph", kind, graphs.enable(graph, recorder), count))
    return sorted(found, key=lambda corner: STEPS.index(corner.steps))


def operations(engine: Engine, prompt: list[int]) -> int | None:
    """How many operations a greedy step after this prompt sends to the device.

    None: it does what no capture can have, and the log ends there.
    """
    tokens, log = engine.begin([prompt], GREEDY), Log("a step")
    try:
        with log:
            engine.step(tokens)
    except CaptureError:
        return None
    return len(log.launches)


def compare(
    found: Sequence[Corner],
    prompt: list[int],
    new: int,
    repeat: int,
    bytes_per_s: Callable[[], float],
) -> dict[str, Any]:
    """Turns of all corners, and what they come to; bytes_per_s is asked for before each round."""
    for corner in found:
        corner.take_turn(prompt, min(new, WARM_UP))
    rates = []
    for n in tqdm(range(repeat), desc="turns", disable=None):  # None: only at a terminal
        rates.append(bytes_per_s())
        for corner in found if n % 2 == 0 else found[::-1]:
            corner.turns.append(corner.take_turn(prompt, new))
    rate = statistics.median(rates)
    sizes = token_bytes(found[0].engine.model, len(prompt), new)
    return {
        "corners": {corner.name: _figures(corner, sizes["token"] / rate) for corner in found},
        "tokens": {corner.name: parting(corner, found[0], prompt) for corner in found},
        "bytes": sizes,
        "read_gb_s": rate / 1e9,
        "bound_ms": sizes["token"] / rate * 1e3,
    }


def _figures(corner: Corner, bound_s: float) -> dict[str, float | None]:
    """Percentiles over the steps of all turns; tokens a second are the median of the turns."""
    step_ms = [ms for turn in corner.turns for ms in turn.step_ms]
    p50 = percentile(step_ms, 50)
    return {
        "step_p50_ms": p50,
        "step_p99_ms": percentile(step_ms, 99),
        "tok_s": statistics.median(turn.tok_s for turn in corner.turns),
        "of_read_speed": bound_s * 1e3 / p50 if p50 else None,
        "operations": corner.operations,
    }


def token_bytes(model: Model, prompt: int, new: int) -> dict[str, int]:
    """Bytes that a token reads: weights, and the keys and values of as many tokens as on average.

    The steps of an answer see prompt + 1 .. prompt + new - 1 tokens, each token itself included.
    """
    weights = peers.bytes_per_token(model.config, model.dtype)
    kv = model.config.kv_bytes(model.dtype.itemsize) * (2 * prompt + new) // 2
    return {"weights": weights, "kv": kv, "token": weights + kv}


def parting(corner: Corner, first: Corner, prompt: list[int]) -> dict[str, Any] | None:
    """Where an answer first has another token than that of the first corner; None: nowhere.

    `gap`: by how much the likeliest logit there is ahead of the next, in the first corner. Where it
    is within rounding, either token is right.
    """
    right = first.turns[0].token_ids
    for turn in corner.turns:
        pairs = enumerate(zip(turn.token_ids, right, strict=True))
        at = next((n for n, (ours, its) in pairs if ours != its), None)
        if at is not None:
            with ops_of(first.ops):
                logits = first.engine.prefill([*prompt, *right[:at]])  # [1, V]
            best, second = logits[0].float().topk(2).values.tolist()
            return {"at": at, "gap": best - second}
    return None


# --- the table -----------------------------------------------------------------------------------

COLUMNS = ["steps", "ops", "p50, ms a token", "p99", "tok/s", "MB a token", "of the read speed"]
COLUMNS += ["operations a step", "same tokens"]


def as_markdown(result: dict[str, Any]) -> str:
    """The result as a table, and below it what a token reads, and what is missing."""
    settings, here = result["settings"], result["machine"]
    about = (
        f"One greedy stream, {settings['model']}: {settings['prompt_tokens']} prompt tokens, "
        f"{settings['new']} new ones, {settings['repeat']} turns of each, "
        f"{machine.in_words(here)}. "
        f"fused: {result['forms']['fused']}."
    )
    notes = [*_partings(result), *_above(result), *_missing(result)]
    return "\n\n".join([about, corner_table(result), bytes_line(result), *notes])


def corner_table(result: dict[str, Any]) -> str:
    """A line for each corner, also for those that were not to be had."""
    rows = [_row(result, *pair) for pair in itertools.product(STEPS, OPS)]
    return report.table(COLUMNS, rows)


def _row(result: dict[str, Any], steps: str, kind: str) -> list[str]:
    name = f"{steps} {kind}"
    if name not in result["corners"]:
        return [steps, kind, *["—"] * (len(COLUMNS) - 2)]
    its = result["corners"][name]
    figures = ("step_p50_ms", "step_p99_ms", "tok_s", "of_read_speed")
    formats = ("{:.3f}", "{:.3f}", "{:.1f}", "{:.0%}")
    cells = [
        "—" if its[key] is None else text.format(its[key])
        for key, text in zip(figures, formats, strict=True)
    ]
    cells.insert(3, f"{result['bytes']['token'] / 1e6:,.1f}")
    sent = str(its["operations"] or "—")
    sent = sent if steps == "eager" else f"{sent}, recorded"
    return [steps, kind, *cells, sent, "yes" if result["tokens"][name] is None else "NO"]


def bytes_line(result: dict[str, Any]) -> str:
    """What a token reads, and how long that takes at least."""
    sizes = result["bytes"]
    read = (
        f"A token reads {sizes['weights'] / 1e6:,.1f} MB of weights and "
        f"{sizes['kv'] / 1e6:,.2f} MB of keys and values"
    )
    if result["bound_ms"] is None:
        return f"{read}."
    return f"{read}; at {result['read_gb_s']:,.1f} GB/s that is {result['bound_ms']:.3f} ms."


def _partings(result: dict[str, Any]) -> list[str]:
    first = next(iter(result["tokens"]))
    return [
        f"{name} has another token than the first turn of {first}, at {where['at']}, where the two "
        f"likeliest logits are {where['gap']:.3g} apart."
        for name, where in result["tokens"].items()
        if where is not None
    ]


def _above(result: dict[str, Any]) -> list[str]:
    shares = [its["of_read_speed"] or 0.0 for its in result["corners"].values()]
    if max(shares) <= 1:
        return []
    why = "some of it came from a cache, or the machine was busy when its memory was measured"
    return [f"Above 100% of the read speed: {why}."]


def _missing(result: dict[str, Any]) -> list[str]:
    if all(f"graph {kind}" in result["corners"] for kind in OPS):
        return []
    return ["—: nothing is recorded there; on a CPU, only what is native code is."]
