"""How often each token is drawn: the law of a row, by all of its tokens together.

Each token has a distribution of its own, the one that follows from the ids before it. So no two are
counted together, and yet all of them are weighed in common, in two ways. Neither is an
approximation: they hold for any number of tokens.

*Against engines with a fault.* For each of some faults we know what an engine with it would draw
from, q where p is right. If all is well, the product of q / p over the tokens drawn exceeds 1 / a
with probability a at most, whenever one looks (Ville 1939), and so does the mean over the faults.
If the engine is such a one, the logarithm grows by the divergence of q from p with every token.

*Against everything else.* The tokens are laid on [0, 1) in some order, each with its probability
for a width, and a point is thrown onto the one that was drawn. If all is well, these points are
uniform and independent of each other (Rosenblatt 1952). Their largest distance from that is
bounded by Dvoretzky, Kiefer and Wolfowitz, with the constant of Massart (1990). One order has the
likeliest token first: there temperatures and cuts show. The other is that of the ids.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from matrix.definitions import (
    Columns,
    Draw,
    Past,
    columns_of,
    distributions,
    off_the_draw,
    past_of,
)

CHANCE = 1e-6  # a law is denied where chance would do what was seen as rarely as this
MOST_NATS = 20.0  # that one token counts for, at most: where q has it, and p has not
JUDGED = 0.75  # of the tokens of an engine that drafts: how many come of a draft's judgement, about

Faulty = Callable[[Columns], Columns]


def scaled(name: str, factor: float) -> Faulty:
    """A parameter of every row, times a factor; a top_p of 1 stays."""
    return lambda columns: (
        columns
        | {name: torch.where((columns[name] < 1) | (name != "top_p"), columns[name] * factor, 1.0)}
    )


def ignored(name: str, neutral: float) -> Faulty:
    """A parameter of every row, as if nobody had set it."""
    return lambda columns: columns | {name: torch.full_like(columns[name], neutral)}


FAULTS: dict[str, Faulty] = {
    "temperature x 0.85": scaled("temperature", 0.85),
    "temperature x 1.15": scaled("temperature", 1.15),
    "top_p x 0.9": scaled("top_p", 0.9),
    "top_p ignored": ignored("top_p", 1.0),
    "top_k ignored": ignored("top_k", 0.0),
    "min_p ignored": ignored("min_p", 0.0),
    "repetition_penalty ignored": ignored("repetition_penalty", 1.0),
    "frequency_penalty ignored": ignored("frequency_penalty", 0.0),
    "presence_penalty ignored": ignored("presence_penalty", 0.0),
}


def accepted_too_often(p: Tensor, q: Tensor) -> Tensor:
    """What comes of drafts from q that are accepted where u < 1.5 p / q."""
    taken = torch.minimum(q, 1.5 * p)
    return taken + (1 - taken.sum(-1, keepdim=True)) * residual(p, q)


def replaced_from_the_target(p: Tensor, q: Tensor) -> Tensor:
    """What comes of rejected drafts that are replaced from p, and not from the residual."""
    taken = torch.minimum(q, p)
    return taken + (1 - taken.sum(-1, keepdim=True)) * p


def judged_by_what_drew_it(p: Tensor, q: Tensor) -> Tensor:
    """What comes of drafts whose own random number decides whether they are accepted."""
    end = q.cumsum(-1)
    taken = torch.minimum(end, torch.where(q > 0, p / q, 0)) - (end - q)
    taken = taken.clamp(min=0)
    return taken + (1 - taken.sum(-1, keepdim=True)) * residual(p, q)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ with a sum of 1."""
    more = (p - q).clamp(min=0)
    return (more / more.sum(-1, keepdim=True)).nan_to_num()


DRAFT_FAULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "drafts accepted at 1.5 p / q": accepted_too_often,
    "rejected drafts replaced from p": replaced_from_the_target,
    "one number for draft and judge": judged_by_what_drew_it,
}


@dataclass
class Drawn:
    """Tokens that were drawn, and what the definitions say of each, in float64."""

    draws: Sequence[Draw]
    logits: Tensor  # [N, V] that follow the ids before each, from transformers
    eos_ids: Sequence[int] = ()
    draft_logits: Tensor | None = None  # [N, V] of the draft model, if one drafts
    is_exact: bool = True  # whether the engine rounds as finely as this
    requests: Sequence[int] = ()  # whose each token is
    past: Past = field(init=False)
    columns: Columns = field(init=False)
    p: Tensor = field(init=False)  # [N, V]

    def __post_init__(self) -> None:
        self.past = past_of(self.draws, self.logits.shape[-1], self.eos_ids)
        self.columns = columns_of(self.draws)
        self.p = self.said(self.columns)

    def said(self, columns: Columns) -> Tensor:
        """What the tokens would be drawn from by other parameters [N, V]."""
        return distributions(self.logits, self.past, columns)

    def rounded(self) -> list[Tensor]:
        """What they are drawn from if a cut falls a little further out, or in."""
        return [
            self.said(
                self.columns
                | {"min_p": self.columns["min_p"] * (1 - by), "top_p": self.columns["top_p"] + by}
            )
            for by in (1e-4, -1e-4)
        ]

    def faulty(self) -> dict[str, Tensor]:
        """What they would be drawn from [N, V] with each of the faults that would make a change."""
        found = {name: self.said(change(self.columns)) for name, change in FAULTS.items()}
        if self.draft_logits is not None:
            q = distributions(self.draft_logits, self.past, self.columns)
            for name, law in DRAFT_FAULTS.items():
                found[name] = JUDGED * law(self.p, q) + (1 - JUDGED) * self.p
        return {name: q for name, q in found.items() if not torch.allclose(q, self.p)}

    def off(self) -> Tensor:
        """How far each random number is off its token [N]; in float32, by the nearest rounding."""
        off = off_the_draw(self.p, self.draws)
        for p in () if self.is_exact else self.rounded():
            off = torch.minimum(off, off_the_draw(p, self.draws))
        return off


@dataclass
class Evidence:
    """What all tokens of a row say of its law."""

    tokens: int = 0
    odds: dict[str, float] = field(default_factory=dict)  # log of the product of q / p, by fault
    nats: dict[str, float] = field(default_factory=dict)  # its mean, were that the engine
    points: dict[str, list[float]] = field(default_factory=lambda: {"rank": [], "id": []})

    def weigh(self, drawn: Drawn, rng: random.Random) -> list[str]:
        """Add tokens to what was seen; words for each that cannot be."""
        token = torch.tensor([[draw.token] for draw in drawn.draws])
        sound = drawn.p.gather(-1, token)[:, 0] > 0
        possible = sound.clone()
        for p in () if drawn.is_exact else drawn.rounded():
            possible |= p.gather(-1, token)[:, 0] > 0
        self.tokens += int(sound.sum())
        for name, q in drawn.faulty().items():
            ratio = (q / drawn.p).log().clamp(max=MOST_NATS)  # [N, V]
            log = ratio.gather(-1, token)[:, 0][sound].sum()
            self.odds[name] = self.odds.get(name, 0.0) + float(log)
            mean = torch.where(q > 0, q * ratio, 0).sum()
            self.nats[name] = self.nats.get(name, 0.0) + float(mean)
        self._throw(drawn.p[sound], token[sound], rng)
        impossible = (~possible).nonzero()[:, 0].tolist()
        return [f"{drawn.draws[n].token} after {drawn.draws[n].before}" for n in impossible]

    def _throw(self, p: Tensor, token: Tensor, rng: random.Random) -> None:
        """A point on the token's stretch of [0, 1), in either order."""
        u = torch.tensor([rng.random() for _ in p], dtype=torch.float64)
        mine, at = p.gather(-1, token)[:, 0], torch.arange(p.shape[-1])
        likelier = (p > mine[:, None]) | ((p == mine[:, None]) & (at < token))
        before = {"rank": (p * likelier).sum(-1), "id": (p * (at < token)).sum(-1)}
        for order, start in before.items():
            self.points[order] += (start + u * mine).tolist()

    @property
    def fault(self) -> str:
        """The one that explains best what was drawn, if that is any better than the law."""
        return max(self.odds, key=lambda name: self.odds[name], default="")

    def chances(self) -> dict[str, float]:
        """How rarely chance would do what was seen, at most, by what was looked at."""
        found = {f"points by {order}": bound(points) for order, points in self.points.items()}
        if self.odds:
            least = log_mean_exp(list(self.odds.values()))
            found[f"as with {self.fault}"] = math.exp(min(0.0, -least))
        return found


def nats_needed(faults: int) -> float:
    """The log of the odds at which one of so many faults denies the law."""
    return math.log(max(1, faults) / CHANCE)


def log_mean_exp(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).logsumexp(0)) - math.log(len(values))


def distance(points: Sequence[float]) -> float:
    """The largest between the share of points below a place in [0, 1) and the place."""
    n, ordered = len(points), sorted(points)
    return max((max((i + 1) / n - u, u - i / n) for i, u in enumerate(ordered)), default=0.0)


def bound(points: Sequence[float]) -> float:
    """The chance that uniform points are as far from uniform as these, at most."""
    return min(1.0, 2 * math.exp(-2 * len(points) * distance(points) ** 2))
