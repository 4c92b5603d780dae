"""The parts of a step: which functions they are, and what each of their calls has to do.

What a call must move is what it is given and what it makes, each byte once: the weights, the
activations, the logits, and of keys and values as many as its tokens see. Whether it comes from
memory or from a cache is not asked.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spindle import kernels
from spindle.bench.spans import Function, Place
from spindle.config import ModelConfig
from spindle.decode import detokenize, step
from spindle.decode.oplog import leaves, tensors_of
from spindle.kernels import Weight
from spindle.kernels.ops import PRODUCTS
from spindle.kvcache import paged, static
from spindle.model import rope
from spindle.model.layers import Model
from spindle.serve import recorded, runner, scheduler

LINEARS, HEAD, ATTENTION, WRITES = "linears", "head", "attention", "K/V writes"
NORMS, ROPE, ACTIVATION, OTHER = "norms", "rope", "activation", "the model's small ops"
SAMPLING, SCHEDULER, TEXT, REST = "sampling", "scheduler", "detokenizer", "the rest: Python"

OUTSIDE = (SAMPLING, SCHEDULER, TEXT, REST)  # of the model
PARTS = (LINEARS, HEAD, ATTENTION, WRITES, NORMS, ROPE, ACTIVATION, OTHER, *OUTSIDE)

PART_OF = {
    "linear": LINEARS,
    "rms_norm": NORMS,
    "add_rms_norm": NORMS,
    "layer_norm": NORMS,
    "add_layer_norm": NORMS,
    "rope": ROPE,
    "silu_mul": ACTIVATION,
    "gelu_tanh": ACTIVATION,
    "activation": ACTIVATION,
}
REPLAYED = PART_OF | {"int8_linear": LINEARS, "write_kv": WRITES, "paged_attend": ATTENTION}


def places(model: Model) -> list[Place]:
    """Every function that a step of this model is timed by, but for the step itself."""
    return [*_of_model(model), *_of_views(), *_around()]


def _of_model(model: Model) -> list[Place]:
    """The pass, the head, and the ops that the model's file calls; an unknown one is a part."""
    kind = type(model)
    module = sys.modules[kind.__module__]
    names = [name for name, x in vars(module).items() if _is_op(name, x)]
    return [
        Place(kind, "__call__", OTHER, whole=False),
        Place(kind, "logits", HEAD),
        Place(rope.Rope, "at", ROPE),
        *(Place(module, name, PART_OF.get(name, name)) for name in names),
    ]


def _is_op(name: str, x: object) -> bool:
    return inspect.isfunction(x) and (name == "activation" or getattr(kernels, name, None) is x)


def _of_views() -> list[Place]:
    kinds = (static.StaticView, static.PrefillView, paged.PagedView)
    parts = {"write": WRITES, "attend": ATTENTION}
    pairs = itertools.product(kinds, parts.items())
    return [Place(_definer(kind, name), name, part) for kind, (name, part) in pairs]


def _definer(kind: type, name: str) -> type:
    """The class that a kind has its method from."""
    return next(one for one in kind.__mro__ if name in vars(one))


def _around() -> list[Place]:
    """What is beside the model: the draw, who runs, and text."""
    return [
        Place(step.DecodeStep, "draw", SAMPLING),
        Place(recorded.PagedStep, "draw", SAMPLING),
        Place(recorded, "sampling_rows", SAMPLING),
        Place(runner, "sample", SAMPLING),
        Place(runner, "sampling_rows", SAMPLING),
        Place(scheduler.Scheduler, "schedule", SCHEDULER),
        Place(scheduler.Scheduler, "commit", SCHEDULER, whole=False),  # tokens are read in it
        *(Place(detokenize.AnswerText, name, TEXT) for name in ("push", "flush")),
    ]


def replayed(timed: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The parts that a recorded pass is made of, from its operations: the last product is the head.

    timed: each operation's name and seconds. What torch does between native calls is "the model's
    small ops", the angles of RoPE among them.
    """
    head = max((n for n, (name, _) in enumerate(timed) if name in PRODUCTS), default=-1)
    return [
        (HEAD if n == head else REPLAYED.get(name, OTHER), seconds)
        for n, (name, seconds) in enumerate(timed)
    ]


class Tally:
    """Counts for each part the bytes that its calls must move, and their operations."""

    def __init__(self, config: ModelConfig) -> None:
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self._config, self._whole = config, False

    def wrap(self, place: Place, function: Function) -> Function:
        """The function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._whole:
                return function(*args, **kwargs)
            self._whole = place.whole
            try:
                out = function(*args, **kwargs)
            finally:
                self._whole = False
            if place.whole:
                self.bytes[place.part] += moved_bytes(self._config, place, args, out)
                self.flops[place.part] += flops(self._config, place, args)
            return out

        return counted


def moved_bytes(config: ModelConfig, place: Place, args: tuple, out: Any) -> int:
    """Bytes that a call reads and writes at least; its step gives each sequence one token."""
    given, made = tensors_of(args), tensors_of(out)
    weights = [x for x in leaves(args) if isinstance(x, Weight)]
    total = _nbytes(given) + _nbytes(made) + sum(weight.nbytes for weight in weights)
    if place.part == ATTENTION:
        view, _, q, _ = args
        total += 2 * config.num_kv_heads * config.head_dim * q.dtype.itemsize * _seen(view)
    elif place.part == WRITES:
        total += _nbytes(given)
    elif place.part == HEAD:  # logits(model, hidden)
        total += args[0].head.nbytes
    elif place.part == ROPE:  # turned in place; the angles are looked up in a table
        total += _nbytes(given[:2] if place.name == "rope" else made)
    return total


def flops(config: ModelConfig, place: Place, args: tuple) -> int:
    """Multiplications and additions of a call's products; of all else none are counted."""
    if place.part == LINEARS:
        x, weight = args[:2]
        return 2 * len(x) * math.prod(weight.shape)
    if place.part == HEAD:
        model, hidden = args
        return 2 * len(hidden) * math.prod(model.head.shape)
    if place.part == ATTENTION:  # each query with each key that it sees, and the same with values
        return 4 * config.num_heads * config.head_dim * _seen(args[0])
    return 0


def _seen(view: Any) -> int:
    """Keys that the tokens of a step see, all tokens together."""
    return int((view.positions + 1).sum())


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
