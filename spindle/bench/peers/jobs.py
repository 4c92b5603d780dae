"""The three jobs, as requests that all wait from the start; and the bytes a token reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spindle.bench.load import MAX_NEW, PROMPT_RANGE, Request, long_tailed, uniform
from spindle.bench.peers import JOBS
from spindle.config import ModelConfig
from spindle.errors import RequestError, shown
from spindle.model.weights import wishes

PROMPT = "The capital of France is"
SEATS = 8  # requests that run at once, where an engine can
WARM = 3  # tokens of a request, before anything counts


def build(
    names: Sequence[str], config: ModelConfig, prompt: list[int], new: int, requests: int
) -> dict[str, list[Request]]:
    """The requests of each job; `prompt` is that of the one stream, the others' ids are drawn.

    RequestError for an unknown job, and for lengths that the model has no positions for.
    """
    choose("--jobs", names, JOBS)
    if requests < 1:
        raise RequestError(f"--requests {requests}: expected 1 or more")
    eight = uniform(SEATS, 0, config.vocab_size)
    longest = max(len(prompt), *(len(one.prompt) for one in eight))
    room = config.max_positions - longest
    if not 2 <= new <= room:
        raise RequestError(f"--new {new}: expected 2 to {room} (what fits after the prompt)")
    needed = PROMPT_RANGE[1] + MAX_NEW
    if "traffic" in names and config.max_positions < needed:
        words = f"the model has {config.max_positions} positions, and traffic needs {needed}"
        raise RequestError(f"--jobs: {words}; expected {', '.join(JOBS[:2])} alone")
    jobs = {
        "one_stream": [Request(0, tuple(prompt), new)],
        "eight_streams": uniform(SEATS, 0, config.vocab_size, output=new),
        "traffic": long_tailed(requests, 0, config.vocab_size),
    }
    return {name: jobs[name] for name in JOBS if name in names}


def choose(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """RequestError for a name that is not among those known."""
    for name in names:
        if name not in known:
            raise RequestError(f"{option} {shown(name)}: expected some of {', '.join(known)}")


def warm_up(requests: Sequence[Request]) -> list[Request]:
    """The same requests, cut short: caches, threads, what is compiled or imported on first use."""
    return [Request(one.name, one.prompt, min(one.output, WARM)) for one in requests]


def longest(jobs: dict[str, list[Request]]) -> int:
    """Tokens of the longest request, prompt and answer."""
    return max(len(one.prompt) + one.output for job in jobs.values() for one in job)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that one token reads: all but the tables of which it reads a single row.

    A tied embedding is read whole, as the head.
    """
    wanted = wishes(config)
    tables = {wanted.pair[0], "wpe.weight"}  # the embedding, the positions
    read = [math.prod(shape) for name, shape in wanted.shapes.items() if name not in tables]
    return sum(read) * dtype.itemsize
