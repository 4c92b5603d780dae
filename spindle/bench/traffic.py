"""Many users: static batches against continuous ones, and transformers, on the same requests.

A static batch ends when its longest member ends, and every seat freed before then idles. Scheduling
per step gives the seat to whoever waits. What is measured, all of it by turns in one run:

    long-tailed   all requests at 0 s: static, dropping, continuous, transformers' `generate`
    uniform       the control: equal lengths, so that no seat is freed early
    Poisson       requests that come one by one, at several shares of what continuous can serve

The speed-up is fewer steps x cheaper steps; what makes a step cheaper is looked up in the times
of steps with as many rows. A mean over steps, not a median: it has to multiply out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from spindle import hub
from spindle.bench import machine, peers, report
from spindle.bench.load import (
    MAX_NEW,
    POLICIES,
    PROMPT_RANGE,
    Record,
    Request,
    Run,
    Step,
    drain,
    engine,
    long_tailed,
    poisson,
    scheduler_of,
    serve,
    uniform,
)
from spindle.config import ModelConfig
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool
from spindle.model.weights import RandomSource, load, pick_device, pick_dtype, wishes
from spindle.serve.llm import LLM

GPT2_124M = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257}
GPT2_124M |= {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
RANDOM = {"random-gpt2-124m": GPT2_124M}  # shapes whose weights are drawn, not read
BLOCK_SIZE = 16
LONGEST = PROMPT_RANGE[1] + MAX_NEW  # tokens of a request
RATES = (0.25, 0.5, 0.75, 1.0)

Runs = dict[str, Run]  # by policy, or "transformers"


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench traffic`."""
    add = partial(parser.add_argument, type=int, metavar="N")
    names = f"a model, or {', '.join(RANDOM)} (default: tiny)"
    parser.add_argument("-m", "--model", default="tiny", help=names)
    add("--seqs", default=8, help="seats: requests that run at once (default: 8)")
    add("--requests", default=24, help="requests of a load (default: 24)")
    add("--seeds", default=3, help="loads that are timed, seeds 0 to N - 1 (default: 3)")
    add("--step-seeds", default=20, help="loads whose steps are counted (default: 20)")
    text = "Poisson arrivals, as shares of what continuous can serve (default: %(default)s)"
    parser.add_argument(
        "--rates", type=float, nargs="*", default=list(RATES), metavar="R", help=text
    )
    parser.add_argument("--skip-transformers", action="store_true", help="leave that peer out")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print markdown tables, and write JSON if a file was named."""
    report.check_json(args.json)
    result = measure(
        args.model,
        args.seqs,
        args.requests,
        args.seeds,
        args.step_seeds,
        args.rates,
        args.skip_transformers,
    )
    report.publish(result, as_markdown(result), args.json)
    return 0


def measure(
    model: str = "tiny",
    seqs: int = 8,
    requests: int = 24,
    seeds: int = 3,
    step_seeds: int = 20,
    rates: Sequence[float] = RATES,
    skip_transformers: bool = False,
) -> dict[str, Any]:
    """Everything that the command prints. RequestError, before it begins, for what cannot be."""
    counts = {"--seqs": seqs, "--requests": requests, "--seeds": seeds, "--step-seeds": step_seeds}
    _check(counts, rates)
    names, gaps = peers.engines()
    if skip_transformers:
        names, gaps = ["spindle"], {"transformers": "--skip-transformers was given"}
    with checkpoint_of(model) as directory:
        bench = Bench(directory, seqs, requests, "transformers" in names)
    bench.warm_up()
    timed = [bench.long_tailed(seed) for seed in tqdm(range(seeds), desc="loads", disable=None)]
    control = [bench.uniform(seed) for seed in tqdm(range(seeds), desc="uniform", disable=None)]
    figures = {
        name: _medians([runs[name].summary() for runs in timed if name in runs])
        for name in (*POLICIES, "transformers")
    }
    return {
        **figures,
        "transformers": _transformers(bench.llms["continuous"], timed, figures["transformers"]),
        "uniform": _uniform(control),
        "ratios": _ratios(timed),
        "step_seeds": count_steps(seqs, requests, step_seeds),
        "speed_up": speed_up(timed),
        "poisson": bench.poisson(rates, figures["continuous"]["useful_tok_s"]),
        "gaps": gaps,
        "settings": {"model": model, "rates": list(rates), "prefix_cache": False}
        | {name.strip("-").replace("-", "_"): count for name, count in counts.items()},
        "machine": bench.machine,
    }


def _check(counts: dict[str, int], rates: Sequence[float]) -> None:
    for option, count in counts.items():
        if count < 1:
            raise RequestError(f"{option} {count}: expected 1 or more")
    for rate in rates:
        if not 0 < rate <= 100:
            raise RequestError(f"--rates {rate:g}: expected shares above 0, up to 100")


@contextmanager
def checkpoint_of(model: str) -> Iterator[Path]:
    """The directory of a model; one of RANDOM is drawn and written, and is gone afterwards."""
    if model not in RANDOM:
        yield hub.resolve(model)
        return
    with TemporaryDirectory() as directory:
        write_random(RANDOM[model], Path(directory))
        yield Path(directory)


def write_random(settings: dict[str, Any], directory: Path, seed: int = 0) -> None:
    """Write a checkpoint of seeded random weights in float32, as transformers reads them too."""
    config = ModelConfig.from_dict(settings)
    source = RandomSource(config, seed, torch.float32, torch.device("cpu"), gain=2.0)
    wanted = wishes(config)
    if config.tie_embeddings:
        del wanted.shapes[wanted.pair[1]]
    tensors = {name: torch.empty(shape) for name, shape in wanted.shapes.items()}
    for name, tensor in tensors.items():
        source.fill(tensor, name)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")


# --- measuring ----------------------------------------------------------------------------------


class Bench:
    """A model, an engine for each policy, and transformers where it is there; each warm.

    The engines share the weights, and keep no prefix: what a run stored is of no use to the next.
    """

    def __init__(self, directory: Path, seqs: int, requests: int, with_peer: bool) -> None:
        config = ModelConfig.from_directory(directory)
        if config.max_positions < LONGEST:
            words = f"the model has {config.max_positions} positions"
            raise RequestError(f"{words}; expected {LONGEST} or more (prompt and answer)")
        device = pick_device()
        dtype = pick_dtype("auto", device, config)
        self.model = load(directory, config, dtype, device)
        self.llms = {name: engine(name, self.model, **_options(seqs)) for name in POLICIES}
        self.peer = peers.transformers_model(directory) if with_peer else None
        self.seqs, self.requests, self.vocab = seqs, requests, config.vocab_size
        self.machine = machine.here(device, dtype)

    def warm_up(self) -> None:
        """Once through everything, uncounted: threads, caches, what is compiled on first use."""
        self.all(uniform(self.seqs, 0, self.vocab, PROMPT_RANGE[1], 3))

    def all(self, load: list[Request]) -> Runs:
        """The load in every engine, one after the other."""
        runs = {name: serve(llm, load) for name, llm in self.llms.items()}
        if self.peer is not None:
            runs["transformers"] = generate_in_batches(self.peer, load, self.seqs)
        return runs

    def long_tailed(self, seed: int) -> Runs:
        """The long-tailed load of a seed in every engine."""
        return self.all(long_tailed(self.requests, seed, self.vocab))

    def uniform(self, seed: int) -> Runs:
        """The control: static and continuous, the one that begins alternates."""
        load = uniform(self.requests, seed, self.vocab)
        names = ("static", "continuous") if seed % 2 == 0 else ("continuous", "static")
        return {name: serve(self.llms[name], load) for name in names}

    def poisson(self, rates: Sequence[float], capacity_tok_s: float) -> list[dict[str, Any]]:
        """The load of seed 0, at shares of the requests a second that a full engine can serve."""
        load, rows = long_tailed(self.requests, 0, self.vocab), []
        mean = statistics.fmean(one.output for one in load)
        for share in tqdm(rates, desc="Poisson", disable=None):
            rate = share * capacity_tok_s / mean
            arriving = poisson(load, rate)
            runs = {name: serve(self.llms[name], arriving) for name in ("static", "continuous")}
            summaries = {name: run.summary() for name, run in runs.items()}
            rows.append({"share": share, "requests_s": rate, **summaries})
        return rows


def _options(seqs: int) -> dict[str, Any]:
    """Of an LLM: room for all, and a step takes as many prompts as there are seats."""
    return {
        "max_seqs": seqs,
        "max_batch_tokens": seqs * (PROMPT_RANGE[1] + 1),
        "max_model_len": LONGEST,
        "block_size": BLOCK_SIZE,
        "num_blocks": _blocks(seqs),
        "prefix_cache": False,
    }


def _blocks(seqs: int) -> int:
    return seqs * (-(-LONGEST // BLOCK_SIZE) + 1)  # and one spare for each that runs


def count_steps(seqs: int, requests: int, seeds: int) -> dict[str, Any]:
    """Steps of each policy for the loads of many seeds; no model runs."""
    counts: dict[str, list[int]] = {name: [] for name in POLICIES}
    for seed in range(seeds):
        load = long_tailed(requests, seed)
        for name, steps in counts.items():
            pool = BlockPool(_blocks(seqs), BLOCK_SIZE, prefix_cache=False)
            budget = seqs * (PROMPT_RANGE[1] + 1)
            steps.append(len(list(drain(scheduler_of(name, pool, seqs, budget, LONGEST), load))))
    ratios = [a / b for a, b in zip(counts["static"], counts["continuous"], strict=True)]
    least = sum(ratio >= 2 for ratio in ratios)
    return {**counts, "ratios": ratios, "median_ratio": statistics.median(ratios), "twice": least}


def generate_in_batches(model: Any, load: Sequence[Request], seqs: int) -> Run:
    """transformers' `generate` on batches in the load's order, padded on the left.

    All wait from 0 s on. A batch makes as many tokens as its longest asks for; of each row those
    that were asked for are noted. Rows of a step do not include the padding of the prompts.
    """
    start, records, steps = time.perf_counter(), list[Record](), list[Step]()
    for first in range(0, len(load), seqs):
        batch = load[first : first + seqs]
        new_ids, times = _generate(model, batch)
        came = [seen - start for seen in times]
        for request, ids in zip(batch, new_ids, strict=True):
            events = [(when, 1) for when in came[1 : request.output + 1]]
            records.append(Record(request, 0.0, came[0], events[-1][0], "length", ids, events))
        steps += _steps_of(batch, came)
    return Run(records, steps, seqs)


def _generate(model: Any, batch: Sequence[Request]) -> tuple[list[list[int]], list[float]]:
    """The ids that each request asked for, and when the prompt was taken and each token came."""
    width = max(len(one.prompt) for one in batch)
    pads = [width - len(one.prompt) for one in batch]
    rows = [[0] * pad + list(one.prompt) for pad, one in zip(pads, batch, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    longest, times = max(one.output for one in batch), peers.Times()
    answer = model.generate(
        torch.tensor(rows, device=model.device),  # [B, width]
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=longest,
        streamer=times,
    )
    assert len(times.seen) == longest + 1, "the prompt, and then each token"
    new = answer[:, width:].tolist()
    return [ids[: one.output] for ids, one in zip(new, batch, strict=True)], times.seen


def _steps_of(batch: Sequence[Request], came: Sequence[float]) -> list[Step]:
    steps = []
    for n in range(len(came) - 1):
        filler = sum(one.output <= n for one in batch)
        rows = sum(len(one.prompt) for one in batch) if n == 0 else len(batch)
        steps.append(Step(rows, filler, len(batch) - filler, came[n], came[n + 1]))
    return steps


# --- what the runs amount to --------------------------------------------------------------------


def _medians(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the runs; None where a run had none."""
    if not summaries:
        return {}
    columns = {key: [one[key] for one in summaries] for key in summaries[0]}
    return {
        key: None if None in values else statistics.median(values)
        for key, values in columns.items()
    }


def _ratios(timed: Sequence[Runs]) -> dict[str, float]:
    """How many times better continuous is than static: of each load, then the median."""
    both = [(runs["static"].summary(), runs["continuous"].summary()) for runs in timed]
    speed = statistics.median(b["useful_tok_s"] / a["useful_tok_s"] for a, b in both)
    less_is_better = [
        key
        for key in ("steps", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms")
        if all(b[key] for _, b in both)  # there are no gaps where all answers are of one token
    ]
    return {"useful_tok_s": speed} | {
        key: statistics.median(a[key] / b[key] for a, b in both) for key in less_is_better
    }


def _uniform(control: Sequence[Runs]) -> dict[str, Any]:
    """Steps and rows of the control, which should be equal, and what the clock says."""
    static, continuous = ([runs[name] for runs in control] for name in ("static", "continuous"))
    ratios = [a.seconds / b.seconds for a, b in zip(static, continuous, strict=True)]
    return {
        "static_steps": len(static[0].steps),
        "continuous_steps": len(continuous[0].steps),
        "static_rows": sum(step.rows for step in static[0].steps),
        "continuous_rows": sum(step.rows for step in continuous[0].steps),
        "speedup": statistics.median(ratios),
        "speedups": ratios,
    }


def _transformers(
    llm: LLM, timed: Sequence[Runs], figures: dict[str, Any]
) -> dict[str, Any] | None:
    """The peer's figures; `same_tokens`: every answer has the ids of ours."""
    if not figures:
        return None
    both = [(runs["continuous"], runs["transformers"]) for runs in timed]
    speeds = [(ours.summary(), theirs.summary()) for ours, theirs in both]
    pairs = [pair for a, b in both for pair in zip(a.records, b.records, strict=True)]
    other = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
    return figures | {
        "same_tokens": not other,
        "same_answers": len(pairs) - len(other),
        "answers": len(pairs),
        "differences": [_difference(llm, a, b) for a, b in other],
        "ratio": statistics.median(a["useful_tok_s"] / b["useful_tok_s"] for a, b in speeds),
    }


def _difference(llm: LLM, ours: Record, theirs: Record) -> dict[str, Any]:
    """Where two answers part, and how far apart the two likeliest tokens are there for us."""
    ids = zip(ours.token_ids, theirs.token_ids, strict=True)
    at = next(n for n, (a, b) in enumerate(ids) if a != b)
    prompt = [*ours.request.prompt, *ours.token_ids[:at]]
    params = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True, logprobs=2)
    records = llm.generate(prompt, params)[0].outputs[0].logprobs
    assert records is not None
    first, second = records[0].top[:2]
    return {"request": ours.request.name, "token": at, "top2_gap": first.logprob - second.logprob}


def speed_up(timed: Sequence[Runs]) -> dict[str, Any]:
    """Static / continuous in seconds over all loads = fewer steps x cheaper steps, and why cheaper.

    `by_rows`: cheaper steps if every step took the mean time of steps with as many rows, whatever
    the policy; `rest`: what that leaves unexplained.
    """
    steps = {name: [step for runs in timed for step in runs[name].steps] for name in POLICIES}
    seconds = {name: sum(runs[name].seconds for runs in timed) for name in POLICIES}
    count = {name: len(its) for name, its in steps.items()}
    mean_s = {name: seconds[name] / count[name] for name in POLICIES}
    expected_s = _expected_s(steps)
    cheaper, by_rows = (each["static"] / each["continuous"] for each in (mean_s, expected_s))
    return {
        "speed_up": seconds["static"] / seconds["continuous"],
        "fewer_steps": count["static"] / count["continuous"],
        "cheaper_steps": cheaper,
        "by_rows": by_rows,
        "rest": cheaper / by_rows,
        "dropping": seconds["static"] / seconds["dropping"],
        "ms_a_step": {name: mean_s[name] * 1e3 for name in POLICIES},
        "rows_a_step": {n: statistics.fmean(s.rows for s in its) for n, its in steps.items()},
        "with_a_prompt": {
            n: sum(s.rows > s.busy + s.filler for s in its) for n, its in steps.items()
        },
        "ms_by_rows": {name: _ms_by_rows(its) for name, its in steps.items()},
        "each_load": [_factors(runs) for runs in timed],
    }


def _factors(runs: Runs) -> dict[str, float]:
    static, continuous = runs["static"], runs["continuous"]
    fewer, total = len(static.steps) / len(continuous.steps), static.seconds / continuous.seconds
    return {"speed_up": total, "fewer_steps": fewer, "cheaper_steps": total / fewer}


def _ms(step: Step) -> float:
    return (step.end_s - step.start_s) * 1e3


def _decodes(step: Step) -> bool:
    return step.rows == step.busy + step.filler


def _ms_by_rows(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Steps that only decode, by their rows: how many, and their mean milliseconds."""
    groups = defaultdict(list)
    for step in steps:
        if _decodes(step):
            groups[step.rows].append(_ms(step))
    return {
        str(rows): {"steps": len(groups[rows]), "ms": statistics.fmean(groups[rows])}
        for rows in sorted(groups)
    }


def _expected_s(steps: dict[str, list[Step]]) -> dict[str, float]:
    """Mean seconds a step, if only the rows mattered: the mean of their number, of all policies.

    Steps with a prompt have almost any number of rows: a straight line through those stands for
    them.
    """
    together = [step for its in steps.values() for step in its]
    decodes = {int(rows): row["ms"] for rows, row in _ms_by_rows(together).items()}
    prompts = [step for step in together if not _decodes(step)]
    line = _line([step.rows for step in prompts], [_ms(step) for step in prompts])

    def expected_ms(step: Step) -> float:
        return decodes[step.rows] if _decodes(step) else line(step.rows)

    return {n: statistics.fmean(map(expected_ms, its)) / 1e3 for n, its in steps.items()}


def _line(x: Sequence[int], y: Sequence[float]) -> Any:
    """The straight line of least squares; level if all x are one."""
    if len(set(x)) < 2:
        return lambda rows: statistics.fmean(y)
    slope, intercept = statistics.linear_regression(x, y)
    return lambda rows: intercept + slope * rows


# --- the tables ---------------------------------------------------------------------------------

ROWS: tuple[tuple[str, str, str], ...] = (
    ("useful tok/s", "useful_tok_s", ".1f"),
    ("steps", "steps", "g"),
    ("TTFT p50, ms", "ttft_p50_ms", ",.0f"),
    ("TTFT p99, ms", "ttft_p99_ms", ",.0f"),
    ("ITL p50, ms", "itl_p50_ms", ".1f"),
    ("ITL p99, ms", "itl_p99_ms", ".1f"),
    ("idle slots", "idle_slots", ",g"),
    ("of them computed as filler", "filler_rows", ",g"),
)


def as_markdown(result: dict[str, Any]) -> str:
    """The tables, and what explains their figures."""
    parts = [_about(result), _policies(result), _in_words(result), _loads(result), _by_rows(result)]
    parts += [_control(result), _arrivals(result), _peer(result)]
    return "\n\n".join(part for part in parts if part)


def _about(result: dict[str, Any]) -> str:
    settings, here = result["settings"], machine.in_words(result["machine"])
    return (
        f"{settings['requests']} requests at 0 s, {settings['seqs']} seats, {settings['model']}, "
        f"{here}; medians, loads timed: {settings['seeds']}, of "
        f"{result['continuous']['useful_tokens']:g} useful tokens."
    )


def _policies(result: dict[str, Any]) -> str:
    names = [name for name in (*POLICIES, "transformers") if result[name]]
    rows = [[label, *(_cell(result[name][key], how) for name in names)] for label, key, how in ROWS]
    for row, (_, key, _) in zip(rows, ROWS, strict=True):
        ratio = result["ratios"].get(key)
        row.append("" if ratio is None else f"{ratio:.2f}")
    return report.table(["", *names, "continuous better, times"], rows)


def _cell(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _in_words(result: dict[str, Any]) -> str:
    counted, factors = result["step_seeds"], result["speed_up"]
    ms, rows = factors["ms_a_step"], factors["rows_a_step"]
    return "\n".join(
        [
            f"Steps over {len(counted['ratios'])} loads, static / continuous: median "
            f"{counted['median_ratio']:.2f}, {min(counted['ratios']):.2f} to "
            f"{max(counted['ratios']):.2f}; 2 or more in {counted['twice']}.",
            f"Speed-up: {factors['speed_up']:.2f} = {factors['fewer_steps']:.2f} (fewer steps) x "
            f"{factors['cheaper_steps']:.2f} (cheaper steps), over all timed loads.",
            f"Cheaper: {ms['static']:.2f} ms a step of {rows['static']:.1f} rows against "
            f"{ms['continuous']:.2f} of {rows['continuous']:.1f}. By their rows alone it would be "
            f"{factors['by_rows']:.2f}; {factors['rest']:.2f} is left for all else.",
            f"Static batches that drop their finished rows: {factors['dropping']:.2f} times static,"
            f" {ms['dropping']:.2f} ms a step of {rows['dropping']:.1f} rows.",
            f"ITL: {factors['with_a_prompt']['continuous']} continuous steps carry a prompt, and "
            "whoever streams waits for it; static batches read theirs while nobody streams.",
        ]
    )


def _loads(result: dict[str, Any]) -> str:
    rows = [
        [str(seed), *(f"{load[key]:.2f}" for key in ("fewer_steps", "cheaper_steps", "speed_up"))]
        for seed, load in enumerate(result["speed_up"]["each_load"])
    ]
    return report.table(["load", "fewer steps", "cheaper steps", "speed-up"], rows)


def _by_rows(result: dict[str, Any]) -> str:
    """Steps that only decode: how many of each number of rows, and how long they took."""
    tables = result["speed_up"]["ms_by_rows"]
    columns = ["rows in a step"]
    columns += [f"{name}, {what}" for name in POLICIES for what in ("steps", "ms")]
    lines = []
    for rows in sorted({int(rows) for table in tables.values() for rows in table}):
        found = [tables[name].get(str(rows)) for name in POLICIES]
        cells = [(f"{row['steps']}", f"{row['ms']:.2f}") if row else ("", "") for row in found]
        lines.append([str(rows), *(cell for pair in cells for cell in pair)])
    prompts = result["speed_up"]["with_a_prompt"]
    lines.append(["with a prompt", *(c for name in POLICIES for c in (f"{prompts[name]}", ""))])
    return report.table(columns, lines)


def _control(result: dict[str, Any]) -> str:
    one = result["uniform"]
    spread = f"{min(one['speedups']):.3f} to {max(one['speedups']):.3f}"
    return (
        f"Uniform lengths: {one['static_steps']} steps static, {one['continuous_steps']} "
        f"continuous; {one['static_rows']:,} and {one['continuous_rows']:,} rows. Speed-up "
        f"{one['speedup']:.3f} ({spread}): with equal steps and rows, what is not 1 is noise."
    )


def _arrivals(result: dict[str, Any]) -> str:
    columns = ["Poisson, share of capacity", "requests/s"]
    labels = {"ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "TTFT p99", "itl_p99_ms": "ITL p99"}
    columns += [f"{label}, ms: {n}" for label in labels.values() for n in ("static", "continuous")]
    rows = [
        [f"{row['share']:g}", f"{row['requests_s']:.2f}"]
        + [_cell(row[n][key], ",.1f") for key in labels for n in ("static", "continuous")]
        for row in result["poisson"]
    ]
    return report.table(columns, rows) if rows else ""


def _peer(result: dict[str, Any]) -> str:
    lines = [f"{name}: not measured, {reason}." for name, reason in result["gaps"].items()]
    peer = result["transformers"]
    if peer:
        same = f"{peer['same_answers']} of {peer['answers']} answers are the same"
        lines.append(f"spindle, continuous / transformers: {peer['ratio']:.2f}; {same}.")
        lines += [
            f"Request {one['request']}: they part at token {one['token']}, where the two likeliest "
            f"are {one['top2_gap']:.2g} apart."
            for one in peer["differences"]
        ]
    return "\n".join(lines)
