"""Who runs when, and what the runs amount to."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spindle import hub
from spindle.bench import machine
from spindle.bench.load import Request
from spindle.bench.peers import ENGINES, JOBS, jobs, roster
from spindle.bench.peers.process import EngineProcess
from spindle.config import ModelConfig
from spindle.errors import RequestError, SpindleError
from spindle.model.weights import pick_device, pick_dtype
from spindle.tokenizer import Tokenizer

Ids = list[list[int]]  # of a job: the answer to each request
OURS = "spindle"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    model: str = "tiny"
    engines: Sequence[str] = ENGINES
    jobs: Sequence[str] = JOBS
    new: int = 128
    requests: int = 24
    repeat: int = 5
    device: str = "auto"


@dataclass(frozen=True)
class Turn:
    """One run of one job by one engine: the answers, when the first tokens came, peak memory."""

    ids: Ids
    seconds: float
    ttft_s: float  # median over the requests
    peak_bytes: int

    @property
    def tok_s(self) -> float:
        """Tokens that were asked for and came, a second."""
        return sum(map(len, self.ids)) / self.seconds


def measure(asked: Asked) -> dict[str, Any]:
    """Everything that the command prints. RequestError, before it begins, for what cannot be."""
    jobs.choose("--engines", asked.engines, ENGINES)
    if asked.repeat < 1:
        raise RequestError(f"--repeat {asked.repeat}: expected 1 or more")
    device, directory = pick_device(asked.device), hub.resolve(asked.model)
    config, prompt = ModelConfig.from_directory(directory), Tokenizer(directory).encode(jobs.PROMPT)
    work = jobs.build(asked.jobs, config, prompt, asked.new, asked.requests)
    setting = roster.Setting(
        directory=directory,
        config=config,
        device=str(device),
        threads=torch.get_num_threads(),
        seats=jobs.SEATS,
        max_len=jobs.longest(work),
        max_prompt=max(len(one.prompt) for job in work.values() for one in job),
    )
    names = [name for name in ENGINES if name in asked.engines or name == OURS]
    with ExitStack() as stack:
        bench = Bench(stack, setting, names, work)
        bench.take_turns(asked.repeat)
        figures = {job: bench.figures(job) for job in work}
    dtype = pick_dtype("auto", device, config)
    weight_bytes = jobs.bytes_per_token(config, dtype)
    read_gb_s = statistics.median(bench.read_gb_s)
    return {
        "jobs": figures,
        "read_gb_s": read_gb_s,
        "weight_bytes": weight_bytes,
        "bound_tok_s": read_gb_s * 1e9 / weight_bytes,
        "gaps": bench.gaps,
        "versions": bench.versions,
        "settings": {"model": asked.model, "prompt_tokens": len(prompt), "new": asked.new}
        | {"requests": asked.requests, "repeat": asked.repeat, "seats": jobs.SEATS},
        "machine": machine.here(device, dtype)
        | {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "processor": _processor(),
            "date": date.today().isoformat(),
        },
    }


def _processor() -> str | None:
    """The processor's name, where the system says it in a file (Linux)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


@dataclass
class Bench:
    """The engines that run here, loaded and warm, and the turns they have taken.

    Whoever cannot run, or fails in mid-run, is a gap with the reason; SpindleError if that is us.
    """

    stack: ExitStack
    setting: roster.Setting
    names: Sequence[str]
    work: dict[str, list[Request]]
    gaps: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    turns: dict[tuple[str, str], list[Turn]] = field(default_factory=dict)  # (engine, job)
    read_gb_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in tqdm(self.names, desc="loading", disable=None):  # None: only at a terminal
            reason = roster.PEERS[name].missing(self.setting)
            if reason is not None:
                self.gaps[name] = reason
                continue
            try:
                self.load(name)
            except Exception as error:  # a conversion fails in the words of another's library
                self.drop(name, error)

    def load(self, name: str) -> None:
        """Start the engine's process, and let it do everything once, uncounted."""
        command, besides = roster.PEERS[name].start(self.setting)
        threads = str(self.setting.threads)
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        process = self.stack.enter_context(EngineProcess(command, {**os.environ, **env}))
        self.processes[name] = process
        self.versions[name] = process.ask(load=self.setting.message() | besides)["version"]
        for requests in self.work.values():
            self.run(name, jobs.warm_up(requests))

    def drop(self, name: str, error: Exception) -> None:
        """The engine is a gap from now on."""
        words = (
            str(error) if isinstance(error, SpindleError) else f"{type(error).__name__}: {error}"
        )
        if name == OURS:
            raise SpindleError(f"{name}: {words}") from error
        self.gaps[name] = " ".join(words.split())
        if name in self.processes:
            self.processes.pop(name).close()

    def take_turns(self, repeat: int) -> None:
        """Every engine does each job `repeat` times; the one that begins rotates."""
        buffer = machine.read_buffer(self.setting.device)
        with tqdm(total=repeat * len(self.processes), desc="turns", disable=None) as bar:
            for turn in range(repeat):
                for name in rotated(list(self.processes), turn):
                    self.read_gb_s.append(machine.read_bytes_per_s(buffer, repeats=3) / 1e9)
                    bar.set_postfix_str(name)
                    try:
                        for job, requests in self.work.items():
                            self.turns.setdefault((name, job), []).append(self.run(name, requests))
                    except SpindleError as error:
                        self.drop(name, error)
                    bar.update()

    def run(self, name: str, requests: Sequence[Request]) -> Turn:
        """One run of one job. SpindleError if not all tokens came."""
        process = self.processes[name]
        resident = self.setting.device == "cpu" and process.reset_peak()
        reply = process.ask(run=[(one.prompt, one.output) for one in requests])
        wanted, came = [one.output for one in requests], [len(ids) for ids in reply["ids"]]
        if came != wanted:
            raise SpindleError(
                f"{sum(came)} tokens came in {len(came)} answers where {sum(wanted)} in "
                f"{len(wanted)} were asked for, or of other lengths: no fair comparison"
            )
        peak_bytes = process.peak_bytes() if resident else reply["peak_bytes"]
        ttft_s = statistics.median(reply["first_s"])
        return Turn(reply["ids"], reply["seconds"], ttft_s, peak_bytes)

    def figures(self, job: str) -> dict[str, dict[str, Any]]:
        """The figures of a job, by engine; those of an engine that fell out are left out."""
        ours = self.turns[OURS, job]
        rows = {}
        for name in self.processes:
            theirs = self.turns[name, job]
            rows[name] = figures(ours, theirs)
            rows[name]["first_difference"] = self.difference(job, ours[0].ids, theirs)
        return rows

    def difference(self, job: str, ours: Ids, theirs: Sequence[Turn]) -> dict[str, Any] | None:
        """Where the first answer that differs does so, and how near our two likeliest are there."""
        found = next(differences(ours, theirs), None)
        if found is None:
            return None
        request, token = found
        prompt = [*self.work[job][request].prompt, *ours[request][:token]]
        gap = self.processes[OURS].ask(top2=prompt)["gap"]
        return {"request": request, "token": token, "top2_gap": gap}


def rotated(names: list[str], turn: int) -> list[str]:
    """The names in their order, begun at another one each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


def differences(ours: Ids, theirs: Sequence[Turn]) -> Iterator[tuple[int, int]]:
    """(request, token) of each answer that was another one than ours in any of the turns."""
    for request, ids in enumerate(ours):
        firsts = [parting(ids, turn.ids[request]) for turn in theirs]
        if any(first is not None for first in firsts):
            yield request, min(first for first in firsts if first is not None)


def parting(ours: list[int], theirs: list[int]) -> int | None:
    """Where two answers of one length part; None if they are the same."""
    pairs = zip(ours, theirs, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), None)


def figures(ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, Any]:
    """Medians over the turns; `ratio` is ours / theirs of the same turn, then the median."""
    answers = len(ours[0].ids)
    other = len(list(differences(ours[0].ids, theirs)))
    ratios = [a.tok_s / b.tok_s for a, b in zip(ours, theirs, strict=True)]
    return {
        "useful_tok_s": statistics.median(turn.tok_s for turn in theirs),
        "ratio": statistics.median(ratios),
        "peak_mb": max(turn.peak_bytes for turn in theirs) / 1e6,
        "ttft_ms": statistics.median(turn.ttft_s for turn in theirs) * 1e3,
        "same_tokens": other == 0,
        "same_answers": answers - other,
        "answers": answers,
        "turns_tok_s": [turn.tok_s for turn in theirs],
    }
