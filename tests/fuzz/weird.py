"""Values that nobody should give to anything, and words for them.

Made anew by each call: some can be read once, some change when they are looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import count, repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch


class Mute:
    """What cannot be printed."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class MuteInt(int):
    """A number that cannot be printed."""

    __repr__ = Mute.__repr__


class MuteStr(str):
    """A text that cannot be printed."""

    __repr__ = Mute.__repr__


class Colour(Enum):
    """Names instead of numbers."""

    RED = 1


def nested() -> list[Any]:
    """A list in a list, so often that recursion ends."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def endless() -> list[Any]:
    """A list that has itself."""
    value: list[Any] = []
    value.append(value)
    return value


NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 40, 41, 64, 65, 128, 129, 261, 262, 10**6, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -2, -(2**31), -(2**63), 10**400, 10**5000, -(10**5000)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 2.0, 1e4, 1e5, 1e-4, 1e-5, 1e308, -1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, 1j, True, False),
    *(Decimal("NaN"), Decimal(1), Fraction(1, 3), Fraction(10**400, 3), MuteInt(3), Colour.RED),
]
SCALARS: list[Callable[[], Any]] = [
    *(
        lambda: np.float64("nan"),
        lambda: np.int64(-1),
        lambda: np.int64(3),
        lambda: np.float32(0.5),
    ),
    *(lambda: np.bool_(True), lambda: np.array(3), lambda: np.array("x"), lambda: np.uint8(255)),
    *(lambda: torch.tensor(3), lambda: torch.tensor(math.nan), lambda: torch.tensor(True)),
]
TEXTS: list[Any] = [
    *("", " ", "a", "the cat", "nan", "1", "None", "\n", "\0", "a\0b", "\ud800", "x\udfffy"),
    *("é€\U0001f600", "\u202e\x1b[31m", "<s>", "</s>", "../..", "~nobody", "%s{}", "x" * 5000),
    *("\r\n", "x" * 100_000, "\ufeff", "\U0010ffff", MuteStr("a"), "ngram", "int8", "auto"),
    *("~nosuchuser/x", "hello " * 300_000),
]
THINGS: list[Callable[[], Any]] = [
    *(lambda: None, object, lambda: int, lambda: len, lambda: ..., lambda: NotImplemented, Mute),
    *(lambda: b"abc", lambda: b"\xff", lambda: bytearray(b"a"), lambda: memoryview(b"abc")),
    *(lambda: Path("nowhere"), lambda: Path("/dev/zero"), lambda: sys, lambda: torch.float32),
    *(lambda: ValueError("x"), lambda: torch.device("cpu"), lambda: Random(0)),
]
LISTS: list[Callable[[], Any]] = [
    *(list, tuple, dict, set, frozenset, lambda: [[]], lambda: [None], lambda: ["a"], lambda: [""]),
    *(lambda: [1], lambda: [1, 2, 3], lambda: (4, 5), lambda: {6}, lambda: {7: 8}, lambda: [1.0]),
    *(lambda: [True], lambda: [math.nan], lambda: [-1], lambda: [262], lambda: [2**64]),
    *(lambda: [10**5000], lambda: ["\ud800"], lambda: [[1, 2], [3]], lambda: [Mute()]),
    *(lambda: [1] * 100_000, lambda: range(100_000), lambda: range(3), lambda: range(10**12)),
    *(lambda: ["stop"] * 10_000, lambda: [f"s{n}" for n in range(64)], lambda: ["x" * 100_000]),
    *(lambda: list(range(1024)), lambda: [3] * 1025, lambda: [0] * 40, lambda: [b"a", "b"]),
    *(lambda: repeat("a"), lambda: repeat(1), count, lambda: iter(int, 1)),  # without an end
    *(lambda: ["ab" * 50_000 + str(n) for n in range(64)], lambda: [1] * 3_000_000),
    *(lambda: ["ab" * 50_000] * 64, lambda: frozenset("ab"), lambda: {"a": 1}),
    *(lambda: iter([1, 2]), lambda: (n for n in "ab"), lambda: map(int, "12"), lambda: iter([])),
    *(lambda: np.array([1, 2]), lambda: np.array([[1, 2]]), lambda: np.array([0.5, math.nan])),
    *(lambda: np.array([]), lambda: np.array(["a"]), lambda: np.array([True, False])),
    *(lambda: np.array([None, 1]), lambda: np.array([], dtype=int), lambda: np.arange(3)[::-1]),
    *(lambda: torch.tensor([1, 2]), lambda: torch.tensor([[1]]), lambda: torch.tensor([0.5])),
    *(lambda: torch.tensor([]), lambda: torch.tensor([True]), lambda: torch.zeros(2, 0)),
    *(lambda: torch.empty(2, device="meta"), lambda: torch.eye(2).to_sparse()),
    *(lambda: torch.ones(2, requires_grad=True), lambda: torch.tensor([1 + 1j])),
    *(lambda: [torch.tensor(1), np.int64(2), 3], lambda: [np.array([1])], lambda: [[[1]]]),
    *(lambda: [torch.empty((), device="meta")], lambda: {"role": "user", "content": "x"}),
    *(
        lambda: [{"role": "user"}],
        lambda: [{"content": "x"}],
        lambda: [{"role": 1, "content": "x"}],
    ),
    *(lambda: [{"role": "\ud800", "content": "\ud800"}], lambda: [{}], nested, endless),
    *(lambda: [{"role": "user", "content": Mute()}], lambda: [{"role": Mute(), "content": "x"}]),
    *(lambda: [{1: 2, "role": "user", "content": "x"}], lambda: [{"role": "user", "content": [1]}]),
]


ALL = [*SCALARS, *THINGS, *LISTS]


def value(rng: Random) -> Any:
    """One of all of them."""
    which = rng.choice(("number", "number", "scalar", "text", "thing", "list", "list"))
    if which in ("number", "text"):
        return rng.choice(NUMBERS if which == "number" else TEXTS)
    return rng.choice({"scalar": SCALARS, "thing": THINGS, "list": LISTS}[which])()


def in_words(value: object) -> str:
    """What it is, in less than a line, whatever it does when it is asked."""
    kind = type(value).__name__
    try:
        text = f"{value!r}"
    except (RecursionError, ValueError):  # nested, mute, or a number of thousands of digits
        text = "..."
    text = f"{kind} {text if len(text) < 60 else text[:60] + '...'}"
    return text.encode("utf-8", "backslashreplace").decode()
