"""Where a decode step's time goes, and the way from the plain step to the bound.

    parts       a step, through `Engine` for one row and `LLM` for more, greedy and sampled: what
                each part takes, what it has to move, and what that is of this machine's memory
    waterfall   from plain torch to this engine, one lever at a time (levers.py)
    prefill     a prompt, against this machine's fastest matrix product

Parts are timed by wrapping functions (spans.py, parts.py). Steps that are timed in parts take turns
with steps that are not, and these say how long a step is: what the parts leave over, or have too
much, is a line of the table. A GPU runs behind the clock's back, so all of this is on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spindle import hub
from spindle.bench import latency, levers, machine, prefill, report, steps
from spindle.bench.peers.jobs import bytes_per_token
from spindle.bench.spans import Clock, call_cost
from spindle.config import ModelConfig
from spindle.errors import RequestError
from spindle.kernels import emulate
from spindle.model.layers import Model
from spindle.model.weights import load
from spindle.tokenizer import Tokenizer

CONTEXT, PREFILL = 64, 512  # tokens before the first step, and of the prompt that is timed
MATRICES = (512, 1024, 2048)  # sizes of square products, the fastest of which counts


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench profile`."""
    add = partial(parser.add_argument, type=int, metavar="N")
    parser.add_argument("-m", "--model", default="tiny", help="what to run (default: tiny)")
    text = "rows of a step: 1 through Engine, more through LLM (default: 1 8)"
    add("--rows", nargs="+", default=[1, 8], help=text)
    text = f"tokens before the first step and of the prefill (default: {CONTEXT}, and {PREFILL})"
    add("--context", help=text)
    add("--new", default=16, help="tokens of a turn (default: 16)")
    add("--repeat", default=5, help="turns of each (default: 5)")
    report.add_json(parser)
    text = "draw the waterfall there (needs matplotlib)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Measure, print markdown tables, write JSON and draw the waterfall if files were named."""
    report.check_json(args.json)
    check_plot(args.plot)
    result = measure(args.model, args.rows, args.context, args.new, args.repeat)
    report.publish(result, as_markdown(result), args.json)
    if args.plot is not None:
        levers.draw(result["waterfall"]).savefig(args.plot)
    return 0


def check_plot(file: Path | None) -> None:
    """RequestError if no figure could be drawn there: before anything is measured."""
    if file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot: matplotlib is not installed: pip install -e '.[notebooks]'")
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise RequestError(f"--plot {file}: expected a name that ends in .png, .svg or .pdf")
    if file.is_dir() or not file.resolve().parent.is_dir():
        raise RequestError(f"--plot {file}: expected a file in a directory that is there")
    report.check_writable("--plot", file)


def measure(
    name: str = "tiny",
    rows: Sequence[int] = (1, 8),
    context: int | None = None,
    new: int = 16,
    repeat: int = 5,
) -> dict[str, Any]:
    """Everything that the command prints. RequestError, before it begins, for what cannot be."""
    directory = hub.resolve(name)
    config = ModelConfig.from_directory(directory)
    check(config, rows, context, new, repeat)
    tokenizer, cpu = Tokenizer(directory), torch.device("cpu")
    model = load(directory, config, torch.float32, cpu)
    with latency.plain_ops():
        plain = load(directory, config, torch.float32, cpu)
    result = profile(plain, model, tokenizer, rows, context, new, repeat)
    return result | {"settings": {"model": name} | result["settings"]}


def check(
    config: ModelConfig, rows: Sequence[int], context: int | None, new: int, repeat: int
) -> None:
    """RequestError for numbers that cannot be."""
    check_not_emulated()
    for count in rows:
        if not 1 <= count <= 256:
            raise RequestError(f"--rows {count}: expected 1 to 256")
    if len(set(rows)) < len(rows):
        raise RequestError(f"--rows {' '.join(map(str, rows))}: expected each number once")
    if repeat < 1:
        raise RequestError(f"--repeat {repeat}: expected 1 or more")
    if not 2 <= new < config.max_positions:
        raise RequestError(f"--new {new}: expected 2 to {config.max_positions - 1}")
    room = config.max_positions - new
    if context is not None and not 1 <= context <= room:
        raise RequestError(f"--context {context}: expected 1 to {room} (what leaves room for new)")


def check_not_emulated() -> None:
    """RequestError where the emulator is what would be timed."""
    if emulate.enabled():
        words = "SPINDLE_EMULATE=1: the emulator's times say nothing of any machine"
        raise RequestError(f"{words}; expected it to be unset")


def profile(
    plain: Model,
    model: Model,
    tokenizer: Tokenizer | None,
    rows: Sequence[int],
    context: int | None = None,
    new: int = 16,
    repeat: int = 5,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The same for two models of one checkpoint; `plain` was made in `latency.plain_ops`."""
    config = model.config
    before = context or min(CONTEXT, config.max_positions - new)
    length = context or min(PREFILL, config.max_positions)
    prompts = prompts_of(tokenizer, config, max(rows), max(before, length))
    short = [ids[:before] for ids in prompts]
    cost, here = call_cost(clock), Machine()
    bar = tqdm(total=3 * repeat, desc="rounds", disable=None)

    def next_round() -> None:
        here.read()
        bar.update()

    jobs = steps.jobs(model, tokenizer, short, rows, new, clock)
    for n in range(repeat):
        next_round()
        for job in jobs if n % 2 == 0 else jobs[::-1]:
            job.turns(new - 1, plain_first=n % 2 == 0)
    found, gaps = levers.stages(plain, model, short[: rows[0]], new)
    stages = levers.compare(found, new - 1, repeat, next_round, clock)
    prompt = prefill.Prefill(model, prompts[0][:length], clock)
    for n in range(repeat):
        next_round()
        here.multiply()
        prompt.turns(plain_first=n % 2 == 0)
    bar.close()
    return {
        "steps": [job.figures(cost, here.read_bytes_per_s) for job in jobs],
        "waterfall": _waterfall(model, stages, gaps, rows[0], before, new, here.read_bytes_per_s),
        "prefill": prompt.figures(cost, here.flops_per_s),
        "read_gb_s": here.read_bytes_per_s / 1e9,
        "matrix_gflop_s": here.flops_per_s / 1e9,
        "call_us": {"inside": cost.inside_s * 1e6, "outside": cost.outside_s * 1e6},
        "settings": {
            "rows": list(rows),
            "context": before,
            "new": new,
            "repeat": repeat,
            "prefill": length,
        },
        "machine": machine.here(model.device, model.dtype),
    }


def _waterfall(
    model: Model,
    stages: list[dict[str, Any]],
    gaps: dict[str, str],
    rows: int,
    context: int,
    new: int,
    bytes_per_s: float,
) -> dict[str, Any]:
    """The stages, and the bound: weights once for all rows, each row's own keys and values."""
    kv = rows * latency.token_bytes(model, context, new)["kv"]
    sizes = {"weights": bytes_per_token(model.config, model.dtype), "kv": kv}
    bound_ms = sum(sizes.values()) / bytes_per_s * 1e3
    return {"rows": rows, "stages": stages, "bound_ms": bound_ms, "bytes": sizes, "gaps": gaps}


def prompts_of(
    tokenizer: Tokenizer | None, config: ModelConfig, rows: int, length: int
) -> list[list[int]]:
    """A prompt a row, each other tokens: Python's own help, which is English; else drawn ids.

    What a sampled step costs depends on how sure the model is, so the text should be one.
    """
    draw, needed = random.Random(0), rows * length
    if tokenizer is None:
        ids = [draw.randrange(config.vocab_size) for _ in range(needed)]
    else:
        ids = tokenizer.encode(_english(), add_special_tokens=False)
        ids *= math.ceil(needed / len(ids))
    return [ids[row * length : (row + 1) * length] for row in range(rows)]


def _english() -> str:
    from pydoc_data.topics import topics  # half a megabyte, which no other command needs

    return "\n".join(text for _, text in sorted(topics.items()))


class Machine:
    """The two speeds of the machine, each asked for again and again while other things run."""

    def __init__(self) -> None:
        self._buffer = machine.read_buffer()
        self._reads: list[float] = []
        self._products: dict[int, list[float]] = {}

    def read(self) -> None:
        """Ask how fast it reads."""
        self._reads.append(machine.read_bytes_per_s(self._buffer, 1))

    def multiply(self) -> None:
        """Ask how fast it multiplies."""
        for size in MATRICES:
            self._products.setdefault(size, []).append(machine.flops_per_s(size, 1))

    @property
    def read_bytes_per_s(self) -> float:
        """The median of what was asked for."""
        return statistics.median(self._reads)

    @property
    def flops_per_s(self) -> float:
        """The median for the size that is the fastest."""
        return max(map(statistics.median, self._products.values()))


# --- the tables ---------------------------------------------------------------------------------


def as_markdown(result: dict[str, Any]) -> str:
    """A table a kind of step, the waterfall, and the prefill; before them, what they stand on."""
    settings, here = result["settings"], result["machine"]
    about = (
        f"{settings['model']}: {settings['context']} tokens before the first step, "
        f"{settings['repeat']} turns of {settings['new'] - 1} steps, of each step the "
        f"middle half of the turns; {machine.in_words(here)}. Read bandwidth "
        f"{result['read_gb_s']:.1f} GB/s, the fastest square product "
        f"{result['matrix_gflop_s']:.0f} GFLOP/s, both between the turns."
    )
    fall = result["waterfall"]
    heading = f"From the plain step to the bound, {_rows(fall['rows'])}, greedy, through Engine:"
    texts = [about, *itertools.chain.from_iterable(map(steps.tables, result["steps"]))]
    texts += [heading, levers.table(fall), _bound(result)]
    texts += [*prefill.tables(result["prefill"]), *_above(result)]
    return "\n\n".join(texts)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _bound(result: dict[str, Any]) -> str:
    sizes = result["waterfall"]["bytes"]
    return (
        f"The bound: {sizes['weights'] / 1e6:,.1f} MB of weights and {sizes['kv'] / 1e6:,.2f} MB "
        f"of keys and values, at {result['read_gb_s']:.1f} GB/s."
    )


def _above(result: dict[str, Any]) -> list[str]:
    parts = [part for job in result["steps"] for part in job["parts"].values()]
    if max(part["of_read_speed"] or 0.0 for part in parts) <= 1:
        return []
    why = "some of it came from a cache, or the machine was busy when its memory was measured"
    return [f"Above 100% of the read speed: {why}."]
