"""How measured figures grow: a parabola through them, and how much of it is no straight line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spindle.bench.steps import middle


def growth(
    x: Sequence[float],
    y: Sequence[float],
    predicted: Sequence[float],
    turns: Sequence[Sequence[float]] = (),
) -> dict[str, Any] | None:
    """The terms of y = constant + linear + quadratic, each as it is at the largest x; None if few.

    quadratic_share: of the whole there; predicted_share: the same of the predicted line, which may
    have a bend, too. off_line: how far the best straight line is from the worst point, as a share
    of that point. turns: y as each turn has it; share_by_turn: the least and the largest share of
    the middle half of them, which says how sure it is. power: that of x which y grows with from the
    last point but one to the last, where a kink in the line is of no account.
    """
    if len(x) < 3:
        return None
    constant, linear, quadratic = fit(x, y, 2)
    shares = middle([share(x, its) for its in turns], float)
    return {
        "constant": constant,
        "linear": linear,
        "quadratic": quadratic,
        "quadratic_share": share(x, y),
        "share_by_turn": [shares[0], shares[-1]] if shares else None,
        "predicted_share": share(x, predicted),
        "off_line": off_line(x, y),
        "power": power(x, y),
        "predicted_power": power(x, predicted),
    }


def share(x: Sequence[float], y: Sequence[float]) -> float:
    """The quadratic term's share of the fitted parabola, at the largest x."""
    terms = fit(x, y, 2)
    return terms[2] / (sum(terms) or 1.0)


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """p, if y grows as x to the power p between the last two points; NaN if one of them is none."""
    if min(y[-2:]) <= 0:
        return math.nan
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


def fit(x: Sequence[float], y: Sequence[float], degree: int) -> list[float]:
    """Terms of a polynomial by least squares, from the constant up, each as at the largest x.

    What is squared is an error's share of its point: a long time is off by more than a short one.
    """
    powers, values, scale = _powers(x, degree), np.asarray(y, float), _scale(y)
    terms, *_ = np.linalg.lstsq(powers / scale[:, None], values / scale, rcond=None)
    return [float(term) for term in terms]


def off_line(x: Sequence[float], y: Sequence[float]) -> float:
    """How far the best straight line is from the worst point, as a share of that point."""
    line = _powers(x, 1) @ np.asarray(fit(x, y, 1))
    return float(np.max(np.abs(line - np.asarray(y, float)) / _scale(y)))


def _powers(x: Sequence[float], degree: int) -> np.ndarray:
    share = np.asarray(x, float) / max(x)  # 1 at the largest, where a term is its coefficient
    return share[:, None] ** np.arange(degree + 1)


def _scale(y: Sequence[float]) -> np.ndarray:
    """The points, but for those that are nothing: what a process takes may be less than before."""
    values = np.asarray(y, float)
    return np.maximum(values, np.abs(values).max() / 1000 or 1.0)
