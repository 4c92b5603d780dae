"""One greedy stream beside transformers: same weights, same prompt, how many tokens a second?

Each engine lives in a process of its own, so that its peak memory is its own, and the engines take
turns, so that a machine that slows down slows down for all. Before each turn the read bandwidth is
measured: a token needs every weight once, so bandwidth / weight bytes bounds the tokens a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from spindle import hub
from spindle.bench import machine, report
from spindle.config import ModelConfig
from spindle.decode.engine import Engine
from spindle.errors import RequestError, SpindleError
from spindle.model.weights import load_hf, pick_device, pick_dtype, wishes
from spindle.tokenizer import Tokenizer

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class Turn:
    """One answer of one engine: its ids, when they came, and the process's peak memory so far."""

    token_ids: list[int]
    seconds: float
    ttft_s: float
    peak_bytes: int


Generate = Callable[[list[int], int], tuple[list[int], float, float]]  # -> ids, seconds, ttft


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench peers`."""
    parser.add_argument("-m", "--model", default="tiny", help="what to run (default: tiny)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--repeat", type=int, default=5, metavar="K", help="turns (default: 5)")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a markdown table, and write JSON if a file was named."""
    report.check_json(args.json)
    result = measure(args.model, args.new, args.repeat)
    report.publish(result, as_markdown(result), args.json)
    return 0


def measure(model: str, new: int, repeat: int) -> dict[str, Any]:
    """`repeat` turns of `new` tokens for each engine. RequestError for a length that cannot be."""
    directory = hub.resolve(model)
    config, prompt = ModelConfig.from_directory(directory), Tokenizer(directory).encode(PROMPT)
    _check_lengths(new, repeat, config.max_positions - len(prompt))
    names, gaps = engines()
    turns, read_gb_s = _take_turns(directory, names, prompt, new, repeat)
    reference = turns["spindle"][0].token_ids
    device = pick_device()
    dtype = pick_dtype("auto", device, config)
    weight_bytes = bytes_per_token(config, dtype)
    return {
        "jobs": {"one_stream": {name: _figures(turns[name], reference) for name in names}},
        "read_gb_s": read_gb_s,
        "weight_bytes": weight_bytes,
        "bound_tok_s": read_gb_s * 1e9 / weight_bytes,
        "gaps": gaps,
        "settings": {"model": model, "prompt_tokens": len(prompt), "new": new, "repeat": repeat},
        "machine": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }


def _check_lengths(new: int, repeat: int, room: int) -> None:
    if not 2 <= new <= room:
        raise RequestError(f"--new {new}: expected 2 to {room} (what fits after the prompt)")
    if repeat < 1:
        raise RequestError(f"--repeat {repeat}: expected 1 or more")


def engines() -> tuple[list[str], dict[str, str]]:
    """The engines that can run here, and for each of the others the reason why not."""
    if importlib.util.find_spec("transformers") is None:
        return ["spindle"], {"transformers": "not installed; `pip install -e '.[hf]'` brings it"}
    return ["spindle", "transformers"], {}


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that one token reads: all but the tables of which it reads a single row.

    A tied embedding is read whole, as the head.
    """
    wanted = wishes(config)
    tables = {wanted.pair[0], "wpe.weight"}  # the embedding, the positions
    read = [math.prod(shape) for name, shape in wanted.shapes.items() if name not in tables]
    return sum(read) * dtype.itemsize


def _figures(turns: Sequence[Turn], reference: list[int]) -> dict[str, Any]:
    """Medians over the turns. `same_tokens`: every turn gave the ids of spindle's first."""
    return {
        "useful_tok_s": statistics.median(len(turn.token_ids) / turn.seconds for turn in turns),
        "ttft_ms": statistics.median(turn.ttft_s * 1e3 for turn in turns),
        "same_tokens": all(turn.token_ids == reference for turn in turns),
        "peak_mb": max(turn.peak_bytes for turn in turns) / 1e6,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """The result as a table, the bound and what is missing below it."""
    job, settings, bound = result["jobs"]["one_stream"], result["settings"], result["bound_tok_s"]
    about = (
        f"One greedy stream, {settings['model']}: {settings['prompt_tokens']} prompt tokens, "
        f"{settings['new']} new ones, median of {settings['repeat']} turns, {_machine(result)}."
    )
    columns = ["engine", "tok/s", "of the bound", "ttft, ms", "peak, MB", "same tokens"]
    rows = []
    for name, row in job.items():
        cells = [name, f"{row['useful_tok_s']:.1f}", f"{row['useful_tok_s'] / bound:.0%}"]
        cells += [f"{row['ttft_ms']:.1f}", f"{row['peak_mb']:,.0f}"]
        rows.append([*cells, "yes" if row["same_tokens"] else "NO"])
    lines = [about, "", report.table(columns, rows), "", _bound(result), *_ratios(job)]
    lines += [f"{name}: not measured, {reason}." for name, reason in result["gaps"].items()]
    return "\n".join(lines)


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"{machine['device']}, {machine['dtype']}, {machine['threads']} threads, "
        f"torch {machine['torch']}"
    )


def _bound(result: dict[str, Any]) -> str:
    return (
        f"The bound: {result['read_gb_s']:.1f} GB/s read / {result['weight_bytes'] / 1e9:.3f} GB "
        f"of weights = {result['bound_tok_s']:.1f} tok/s."
    )


def _ratios(job: dict[str, Any]) -> list[str]:
    ours = job["spindle"]["useful_tok_s"]
    peers = {name: row["useful_tok_s"] for name, row in job.items() if name != "spindle"}
    return [f"spindle / {name}: {ours / theirs:.2f}." for name, theirs in peers.items()]


# Taking turns, each engine in its own process.


def _take_turns(
    directory: Path, names: Sequence[str], prompt: list[int], new: int, repeat: int
) -> tuple[dict[str, list[Turn]], float]:
    """The turns of each engine in order, and the median read bandwidth between them in GB/s."""
    buffer = machine.read_buffer(pick_device())
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    bandwidths = []
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker()) for name in names}
        for name, worker in workers.items():
            worker.submit(_load, name, directory).result()
            worker.submit(_turn, prompt, new).result()  # warm: caches, threads, lazy imports
        for _ in tqdm(range(repeat), desc="turns", disable=None):  # None: only at a terminal
            for name, worker in workers.items():
                bandwidths.append(machine.read_bytes_per_s(buffer, repeats=3) / 1e9)
                turns[name].append(worker.submit(_turn, prompt, new).result())
    return turns, statistics.median(bandwidths)


def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_leave_interrupts)


def _leave_interrupts() -> None:
    """Ctrl-C is the parent's: it ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_generate: Generate  # in a worker: its engine


def _load(name: str, directory: Path) -> None:
    global _generate
    _generate = LOADERS[name](directory)


def _turn(prompt: list[int], new: int) -> Turn:
    ids, seconds, ttft_s = _generate(prompt, new)
    if len(ids) != new:
        raise SpindleError(f"{len(ids)} tokens came where {new} were asked for: no fair comparison")
    return Turn(ids, seconds, ttft_s, _peak_bytes())


def _peak_bytes() -> int:
    """Peak memory of this process: on the GPU where one is used, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _load_spindle(directory: Path) -> Generate:
    engine = Engine(load_hf(directory))

    def generate(prompt: list[int], new: int) -> tuple[list[int], float, float]:
        start = time.perf_counter()
        stream = engine.stream(prompt, new, temperature=0.0, ignore_eos=True)
        ids, ttft_s = [next(stream)], time.perf_counter() - start
        ids += stream
        return ids, time.perf_counter() - start, ttft_s

    return generate


def transformers_model(directory: Path) -> Any:
    """The checkpoint as transformers runs it: greedy, to the last token asked for, same dtype."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the checkpoint is a directory: nothing to ask for
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config, device = ModelConfig.from_directory(directory), pick_device()
    dtype = pick_dtype("auto", device, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device)  # type: ignore[arg-type]  # its decorator hides the argument
    # Greedy and nothing else: whatever the checkpoint's generation_config.json asks for is dropped,
    # its end tokens too, so that all engines make the same number of tokens.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def _load_transformers(directory: Path) -> Generate:
    model = transformers_model(directory)

    def generate(prompt: list[int], new: int) -> tuple[list[int], float, float]:
        ids, times = torch.tensor([prompt], device=model.device), Times()
        start = time.perf_counter()
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, streamer=times
        )
        new_ids = answer[0, len(prompt) :].tolist()
        return new_ids, time.perf_counter() - start, times.seen[1] - start

    return generate


class Times:
    """A streamer of transformers that notes when each piece came; the first is the prompt."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by transformers with the prompt, then with each new token of all rows."""
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        """Called by transformers when all have come."""


LOADERS: dict[str, Callable[[Path], Generate]] = {
    "spindle": _load_spindle,
    "transformers": _load_transformers,
}
