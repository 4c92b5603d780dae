"""What a step of one engine costs: a line through steps that were measured, or a recorded one.

    step_ps          any step: planning, sampling, the weights read once
    chunk_ps         each chunk of a prompt: its tokens go through the layers in a call of their own
    prompt_row_ps    each prompt token of a step
    pair_ps          each key that a prompt token sees
    decode_row_ps    each decode of a step
    key_ps           each key that a decode sees

The terms are those of arithmetic: a pass reads weights once, multiplies once a row, and meets the
keys. A bend, as where weights stop being what bounds a pass, is not among them; so whoever draws
the line (fleet_measure.py) says how far from it the steps lie.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spindle.errors import RequestError, brief

PS = 10**12  # in a second
SAID = {  # of costs, in a table
    "fit": ("steps", "longest", "median_error", "p90_error"),
    "machine": ("device", "dtype", "threads", "torch"),
}


@dataclass(frozen=True)
class Costs:
    """Picoseconds, as the module says. RequestError unless they are integers, 0 or more."""

    step_ps: int
    chunk_ps: int = 0
    prompt_row_ps: int = 0
    pair_ps: int = 0
    decode_row_ps: int = 0
    key_ps: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low = int(name == "step_ps")  # time goes on
            if type(value) is not int or not low <= value <= 1000 * PS:
                raise RequestError(
                    f"costs: {name}={value!r}: expected {low} to 10^15, an integer in picoseconds"
                )

    def prompt_ps(self, start: int, count: int) -> int:
        """What a chunk of a prompt adds to a step: `count` tokens from position `start` on."""
        pairs = count * (2 * start + count + 1) // 2
        return self.chunk_ps + count * self.prompt_row_ps + pairs * self.pair_ps

    def full_s(self, prompt: np.ndarray, output: np.ndarray, seqs: float, budget: int) -> float:
        """Seconds of an engine a request, if none is remembered and `seqs` run all the time.

        prompt, output: tokens of requests [N], of which it is the mean.
        """
        chunks = np.ceil(prompt / budget) * self.chunk_ps
        pairs = prompt * (prompt + 1) / 2 * self.pair_ps
        keys = output * (prompt + output / 2) * self.key_ps
        steps = output * (self.step_ps / seqs + self.decode_row_ps)
        return float(np.mean(chunks + prompt * self.prompt_row_ps + pairs + steps + keys)) / PS


# --- recorded -----------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Any]:
    """What `--json` wrote: the costs, their fit, and where they were measured.

    RequestError for a file that cannot be read, or that has no costs in it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["measured"]
        Costs(**found["costs"])
        _check_said(found)
        return {name: found[name] for name in ("costs", "model", *SAID)} | {"recorded": True}
    except OSError as cause:
        raise RequestError(f"--costs {file}: {cause.strerror or cause}") from None
    except RequestError as cause:
        raise RequestError(f"--costs {file}: {cause}") from None
    except (ValueError, KeyError, TypeError) as cause:
        right = "expected a file that `spindle bench fleet --json` has written"
        words = brief(f"{type(cause).__name__}: {cause}")
        raise RequestError(f"--costs {file}: {right} ({words})") from None


def _check_said(found: dict[str, Any]) -> None:
    """KeyError or TypeError unless all is there that a table says of costs."""
    for part, names in SAID.items():
        for name in names:
            value = found[part][name]
            if part == "fit" and not (isinstance(value, int | float) and math.isfinite(value)):
                raise TypeError(f"{name}: expected a number")
    if not isinstance(found["model"], str):
        raise TypeError("model: expected a name")
