"""Steps of one engine, measured here, and the line of fleet_costs.py through them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from tqdm import tqdm

from spindle import hub
from spindle.bench import machine
from spindle.bench.fleet_costs import PS, Costs
from spindle.config import ModelConfig
from spindle.decode.params import SamplingParams
from spindle.model.layers import Model
from spindle.model.weights import load, pick_device, pick_dtype
from spindle.serve.llm import LLM
from spindle.serve.scheduler import Plan

ROWS, NEW = (1, 4, 16, 32), 8  # sequences that are measured together, and tokens of each
BUDGET, LONGEST, TOGETHER = 256, 1024, 4096  # prompt tokens: of a step, a sequence, all of them


@dataclass(frozen=True)
class Timed:
    """A step: what was in it, in the order of the terms of Costs, and what it took."""

    terms: tuple[int, ...]
    seconds: float


def measure(name: str, repeat: int = 5) -> dict[str, Any]:
    """The costs of a model's steps here, as `LLM` runs them, and how well they fit.

    ModelNotFound, before anything is measured, for a name that is none.
    """
    directory = hub.resolve(name)
    config, device = ModelConfig.from_directory(directory), pick_device()
    dtype = pick_dtype("auto", device, config)
    model = load(directory, config, dtype, device)
    steps, longest = steps_of(model, repeat)
    costs, errors = fit(steps)
    return {
        "costs": asdict(costs),
        "fit": {
            "steps": len(steps),
            "longest": longest,
            "median_error": float(np.median(errors)),
            "p90_error": float(np.percentile(errors, 90)),
        },
        "model": name,
        "machine": machine.here(device, dtype),
        "recorded": False,
    }


def steps_of(model: Model, repeat: int) -> tuple[list[Timed], int]:
    """Steps of several sizes, each the median of its turns, and the longest sequence in them."""
    longest = min(model.config.max_positions, LONGEST)
    kinds = [
        (rows, prompt)
        for rows in ROWS
        for prompt in (16, longest // 4, longest - NEW)
        if 1 <= prompt <= longest - NEW and rows * prompt <= TOGETHER
    ]
    llm = LLM(model, max_seqs=max(ROWS), max_batch_tokens=BUDGET, prefix_cache=False, trace=1)
    for rows, prompt in kinds:
        turn(llm, rows, prompt)  # threads, what is built on first use, what is recorded
    turns = [
        [step for kind in kinds for step in turn(llm, *kind)]
        for _ in tqdm(range(repeat), desc="steps", disable=None)
    ]
    medians = []
    for its in zip(*turns, strict=True):
        assert len({step.terms for step in its}) == 1, "each turn does the same"
        medians.append(Timed(its[0].terms, float(np.median([step.seconds for step in its]))))
    return medians, longest


def turn(llm: LLM, rows: int, prompt: int) -> list[Timed]:
    """So many prompts at once, and then tokens of each, to the end."""
    params = SamplingParams(max_tokens=NEW, temperature=0, seed=0, ignore_eos=True)
    vocab, steps, decoding = llm.model.config.vocab_size, list[Timed](), set[int]()
    for row in range(rows):
        llm.add([(row * prompt + n) % vocab for n in range(prompt)], params)
    while llm.has_unfinished:
        start = time.perf_counter()
        llm.step()
        seconds = time.perf_counter() - start
        steps.append(Timed(terms_of(llm.trace[-1], decoding), seconds))
        decoding = {chunk.sequence.request.order for chunk in llm.trace[-1].chunks if chunk.samples}
    return steps


def terms_of(plan: Plan, decoding: set[int]) -> tuple[int, ...]:
    """What a step has of each term of Costs; decoding: who gained a token in the step before."""
    chunks = rows = pairs = decodes = keys = 0
    for chunk in plan.chunks:
        if chunk.sequence.request.order in decoding:
            decodes, keys = decodes + 1, keys + chunk.start + 1
        else:
            chunks, rows = chunks + 1, rows + chunk.count
            pairs += chunk.count * (2 * chunk.start + chunk.count + 1) // 2
    return 1, chunks, rows, pairs, decodes, keys


def fit(steps: Sequence[Timed]) -> tuple[Costs, np.ndarray]:
    """The costs that are nearest to these steps, and how far each is from them, as a share [N].

    What is squared is an error's share of its step. A term that would be negative is left out.
    """
    terms = np.array([step.terms for step in steps], float)  # [N, 6]
    seconds = np.array([step.seconds for step in steps])
    found = np.zeros(terms.shape[1])
    kept = [n for n in range(terms.shape[1]) if terms[:, n].any()]
    while kept:
        scale = terms[:, kept].max(axis=0)  # so that all columns count alike
        shares = terms[:, kept] / scale / seconds[:, None]
        best, *_ = np.linalg.lstsq(shares, np.ones(len(steps)), rcond=None)
        if best.min() >= 0:
            found[kept] = best / scale
            break
        del kept[int(best.argmin())]
    values = [max(round(value * PS), int(n == 0)) for n, value in enumerate(found)]
    costs = Costs(**dict(zip((one.name for one in fields(Costs)), values, strict=True)))
    return costs, np.abs(terms @ np.array(values) / PS / seconds - 1)
