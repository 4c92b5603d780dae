"""One size of one kind of work: how it is done again and again, and what arithmetic predicts."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from spindle.bench.latency import GREEDY
from spindle.bench.levers import Stage
from spindle.bench.parts import ATTENTION
from spindle.bench.peers.jobs import bytes_per_token
from spindle.bench.spans import CallCost, Clock, Noted
from spindle.bench.steps import Timed, middle, typical
from spindle.config import ModelConfig
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.model.layers import Model, layer_weights
from spindle.serve.llm import LLM

# --- what arithmetic predicts -------------------------------------------------------------------


class Work(NamedTuple):
    """What must be done at least: bytes read, operations of products."""

    bytes: float
    flops: float

    def predicted_ms(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The larger bill, in milliseconds."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s) * 1e3

    def bound_by(self, bytes_per_s: float, flops_per_s: float) -> str:
        """Whose bill is the larger one."""
        fetch_s, multiply_s = self.bytes / bytes_per_s, self.flops / flops_per_s
        return "memory" if fetch_s >= multiply_s else "arithmetic"


def step_work(model: Model, rows: int, keys: float) -> Work:
    """A decode step of rows that see `keys` keys each: weights once, a row's K/V for itself."""
    weights = bytes_per_token(model.config, model.dtype)
    kv = rows * keys * model.config.kv_bytes(model.dtype.itemsize)
    products = 2 * (_layer_factors(model) + _head_factors(model)) + keys * _key_flops(model.config)
    return Work(weights + kv, rows * products)


def prefill_work(model: Model, tokens: int, chunk: int) -> Work:
    """A prompt in chunks: each reads the layers, and the keys that there are by then; one head."""
    weights, head = bytes_per_token(model.config, model.dtype), model.head.nbytes
    ends = [min(at + chunk, tokens) for at in range(0, tokens, chunk)]
    kv = sum(ends) * model.config.kv_bytes(model.dtype.itemsize)
    products = 2 * (tokens * _layer_factors(model) + _head_factors(model))
    flops = products + attention_work(model, tokens).flops
    return Work(len(ends) * (weights - head) + head + kv, flops)


def attention_work(model: Model, tokens: int) -> Work:
    """What of a prompt is quadratic: each token meets itself and all before it."""
    return Work(0, tokens * (tokens + 1) / 2 * _key_flops(model.config))


def _key_flops(config: ModelConfig) -> int:
    """A query meets a key, and its share the value, in each head: two products of D each."""
    return 4 * config.num_layers * config.num_heads * config.head_dim


def _layer_factors(model: Model) -> int:
    """Numbers of the layers' matrices: each is multiplied once for each token."""
    return sum(math.prod(weight.shape) for weight in layer_weights(model))


def _head_factors(model: Model) -> int:
    return math.prod(model.head.shape)


# --- the points ---------------------------------------------------------------------------------


class Here(NamedTuple):
    """The machine's two speeds, and what timing a part of a call costs."""

    bytes_per_s: float
    flops_per_s: float
    cost: CallCost


class Point(ABC):
    """One size of one kind of work, measured again and again."""

    part: str

    @abstractmethod
    def turn(self) -> None:
        """Measure once."""

    @abstractmethod
    def figures(self, here: Here) -> dict[str, Any]:
        """What was measured, what is predicted, and the ratio."""


class DecodePoint(Point):
    """Steps of one row, the last of which sees `context` tokens."""

    part = "decode"

    def __init__(self, model: Model, ids: list[int], new: int, clock: Clock) -> None:
        self.context, self.new, self._clock = len(ids), new, clock
        prompt = ids[: len(ids) - new + 1]
        engine = Engine(model, self.context)
        engine.reserve(self.context)
        graphs.enable_if_free(engine)
        first = engine.begin([prompt], GREEDY).clone()
        engine.step(first)  # recorded, if it is; threads, and what is built on first use
        self._stage = Stage("", None, engine, first, [len(prompt)])

    def turn(self) -> None:
        """All steps, from the end of the prompt on."""
        self._stage.turn(self.new - 1, self._clock)

    @property
    def replayed(self) -> bool:
        """Whether steps are recorded and replayed."""
        return self._stage.engine.recorded

    def figures(self, here: Here) -> dict[str, Any]:
        """Of a step of these."""
        keys = self.context - self.new / 2 + 1  # on average
        work = step_work(self._stage.engine.model, 1, keys)
        return {"context": self.context, **_of_steps(self._stage.seconds, work, here)}


class BatchPoint(Point):
    """Steps of so many rows, the last of which sees as many tokens of each as a prompt has."""

    part = "batch"

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], new: int, clock: Clock) -> None:
        self._llm, self.new, self._clock = llm, new, clock
        self._prompts = [ids[: len(ids) - new + 1] for ids in prompts]
        self._context = len(prompts[0])
        self._seconds: list[list[float]] = []  # a list a turn
        self.replayed = 0
        self.turn()  # prompts are remembered, steps recorded
        self._seconds.clear()

    def turn(self) -> None:
        """Prompts in one step, then a token for each of them, step by step to the end."""
        llm, clock = self._llm, self._clock
        for row, ids in enumerate(self._prompts):
            llm.add(ids, replace(GREEDY, max_tokens=self.new, seed=row))
        gained = [len(llm.step())]
        before, seconds = llm.stats["replayed"], list[float]()
        for _ in range(self.new - 1):
            start = clock()
            outputs = llm.step()
            seconds.append(clock() - start)
            gained.append(len(outputs))
        assert gained == [len(self._prompts)] * self.new, "each row gains a token in each step"
        assert not llm.has_unfinished
        self.replayed = llm.stats["replayed"] - before
        self._seconds.append(seconds)

    def figures(self, here: Here) -> dict[str, Any]:
        """Of a step of these, and the tokens a second that it gives."""
        rows, keys = len(self._prompts), self._context - self.new / 2 + 1
        found = _of_steps(self._seconds, step_work(self._llm.model, rows, keys), here)
        return {"rows": rows, **found, "tok_s": rows / found["ms"] * 1e3}


class PrefillPoint(Point):
    """A prompt, timed in parts: attention, and all else."""

    part = "prefill"

    def __init__(self, engine: Engine, ids: list[int], clock: Clock) -> None:
        self._engine, self._ids, self._timed = engine, ids, Timed(engine.model, clock)

    def turn(self) -> None:
        """The whole prompt, from the first token on."""
        self._timed.time_parts(partial(self._engine.prefill, self._ids), 1)

    def figures(self, here: Here) -> dict[str, Any]:
        """Of the prompt, of attention, and of all that is not attention."""
        model, tokens = self._engine.model, len(self._ids)
        whole = prefill_work(model, tokens, self._engine.prefill_chunk)
        attention = attention_work(model, tokens)
        rest = Work(whole.bytes, whole.flops - attention.flops)
        turns = [noted for (noted,) in self._timed.noted]  # a call a turn
        all_ms = [_corrected_ms(noted.values(), here) for noted in turns]
        attention_ms = [_corrected_ms([noted[ATTENTION]], here) for noted in turns]
        rest_ms = [a - b for a, b in zip(all_ms, attention_ms, strict=True)]
        found = _figures(_middle(all_ms), all_ms, whole, here)
        return {
            "tokens": tokens,
            **found,
            "attention": _figures(_middle(attention_ms), attention_ms, attention, here),
            "rest": _figures(_middle(rest_ms), rest_ms, rest, here),
            "tok_s": tokens / found["ms"] * 1e3,
        }


def _corrected_ms(parts: Iterable[Noted], here: Here) -> float:
    return sum(part.corrected(here.cost) for part in parts) * 1e3


def _middle(turns_ms: Sequence[float]) -> float:
    return statistics.fmean(middle(turns_ms, float))


def _of_steps(turns: Sequence[Sequence[float]], work: Work, here: Here) -> dict[str, Any]:
    """Of a step, from the seconds of the steps of each turn."""
    return _figures(typical(turns), [statistics.fmean(its) * 1e3 for its in turns], work, here)


def _figures(ms: float, turns_ms: list[float], work: Work, here: Here) -> dict[str, Any]:
    speeds = (here.bytes_per_s, here.flops_per_s)
    predicted_ms = work.predicted_ms(*speeds)
    return {
        "ms": ms,
        "predicted_ms": predicted_ms,
        "ratio": ms / predicted_ms,
        "bound_by": work.bound_by(*speeds),
        "bytes": work.bytes,
        "flop": work.flops,
        "turns_ms": turns_ms,
    }
