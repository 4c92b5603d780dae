"""The traffic of a fleet: conversations that share system prompts, and come when chance wants it.

A conversation begins when chance wants it, and each further message comes some time after the
answer to the one before has ended: what Schroeder et al. 2006 ("Open versus closed") call a partly
open system. A turn's prompt is the system prompt, then all messages and answers so far, then a new
message; so it begins with all that the turn before has stored.

What is drawn, and after whom the default is:

    turns       geometric; mean 2.0, as in LMSYS-Chat-1M (Zheng et al. 2023, table 1)
    message     lognormal; mean 69.5 tokens (the same table); the spread is a choice
    answer      lognormal; mean 214.5 tokens (the same table); the spread is a choice
    system      which prompt: Zipf's law. That few prefixes have most of the hits is Mooncake's
                finding (Qin et al. 2024); that there are 100, and the exponent, are choices
    its length  lognormal; mean 512 tokens: a choice
    think       exponential; mean 10 s from an answer to the next message: a choice
    gaps        between conversations: exponential, so that they are Poisson's, or gamma with a
                larger coefficient of variation, as BurstGPT (Wang et al. 2024) fits bursts
    swing       the rate goes up and down as a sine does: a choice, and none by default

Nothing is drawn of what depends on the engine: which requests there are, and how long, is the same
at every rate, for every policy and every number of replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import numpy as np

from spindle.bench.fleet_costs import PS
from spindle.bench.fleet_replica import Shape
from spindle.errors import RequestError


@dataclass(frozen=True)
class Traffic:
    """The law that conversations are drawn from; the module says whose each number is.

    RequestError for what cannot be.
    """

    turns: float = field(default=2.0, metadata={"help": "turns of a conversation, mean"})
    message: float = field(default=69.5, metadata={"help": "tokens of a user's message, mean"})
    answer: float = field(default=214.5, metadata={"help": "tokens of an answer, mean"})
    spread: float = field(default=1.0, metadata={"help": "sigma of the lognormal lengths"})
    systems: int = field(default=100, metadata={"help": "system prompts"})
    system: float = field(default=512.0, metadata={"help": "tokens of a system prompt, mean"})
    zipf: float = field(default=1.0, metadata={"help": "exponent of their popularity"})
    think_s: float = field(default=10.0, metadata={"help": "seconds to the next message, mean"})
    burst: float = field(
        default=1.0, metadata={"help": "coefficient of variation of gaps; 1: Poisson's"}
    )
    swing: float = field(
        default=0.0, metadata={"help": "how far the rate goes up and down, as a share of it"}
    )
    period_s: float = field(default=3600.0, metadata={"help": "seconds of a swing"})
    context: int = field(
        default=4096, metadata={"help": "tokens that a conversation ends before it has"}
    )
    warm_up: float = field(
        default=0.25, metadata={"help": "share of the arrivals' time that is not counted"}
    )
    seed: int = field(default=0, metadata={"help": "of all that is drawn"})

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]]
        limits = {"turns": (1, 1000), "message": (1, 1e6), "answer": (1, 1e6), "spread": (0, 3)}
        limits |= {"systems": (1, 100_000), "system": (1, 1e6), "zipf": (0, 10), "swing": (0, 1)}
        limits |= {"think_s": (1e-6, 1e6), "burst": (0.01, 100), "period_s": (1e-3, 1e9)}
        limits |= {"context": (16, 10**7), "warm_up": (0, 0.9), "seed": (0, 2**63 - 1)}
        for one in fields(self):
            low, high = limits[one.name]
            value = getattr(self, one.name)
            if not low <= value <= high:
                raise RequestError(f"{one.name}={value:g}: expected {low:g} to {high:g}")


@dataclass(frozen=True)
class Trace:
    """Requests, conversation by conversation, each turn after the one before it.

    session, system: numbers [N]. prompt, output: tokens [N]; a prompt holds all that came before.
    gap_ps [N]: of a first turn when it arrives, of another how long after the end of the answer
    before. system_tokens [S]: of each system prompt. window_ps: what counts, from and to. Numbers
    are int64. RequestError if they do not fit together.
    """

    session: np.ndarray
    system: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    gap_ps: np.ndarray
    system_tokens: np.ndarray
    window_ps: tuple[int, int]

    def __post_init__(self) -> None:
        columns = (self.session, self.system, self.prompt, self.output, self.gap_ps)
        if not len(self.session) or len({len(column) for column in columns}) > 1:
            raise RequestError("trace: expected one request at least, and columns of one length")
        if any(c.dtype != np.int64 for c in (*columns, self.system_tokens)):
            raise RequestError("trace: expected columns of int64")
        if not 0 <= self.window_ps[0] < self.window_ps[1]:
            raise RequestError(f"trace: window_ps={self.window_ps}: expected 0 <= from < to")
        self._check_tokens()
        self._check_turns()

    @property
    def first(self) -> np.ndarray:
        """Whether a request begins its conversation [N]."""
        return np.diff(self.session, prepend=self.session[0] - 1) != 0

    def _check_tokens(self) -> None:
        if self.output.min() < 1 or self.session.min() < 0 or self.system_tokens.min() < 0:
            raise RequestError("trace: expected an output of 1 token or more, and sessions from 0")
        if not 0 <= self.system.min() <= self.system.max() < len(self.system_tokens):
            raise RequestError(f"trace: expected systems of 0 to {len(self.system_tokens) - 1}")
        if (self.prompt <= self.system_tokens[self.system]).any():
            raise RequestError("trace: expected prompts longer than their system prompts")

    def _check_turns(self) -> None:
        first = self.first
        if len(np.unique(self.session[first])) < first.sum():
            raise RequestError("trace: expected the turns of a session one after the other")
        later = np.flatnonzero(~first)
        before = self.prompt[later - 1] + self.output[later - 1]
        same = self.system[later] == self.system[later - 1]
        if (self.prompt[later] <= before).any() or not same.all():
            raise RequestError("trace: expected each turn to hold the one before, and a message")
        if self.gap_ps.min() < 0 or (self.gap_ps[later] < 1).any():
            raise RequestError("trace: expected arrivals from 0 on, and 1 ps to think at least")


@dataclass(frozen=True)
class Conversations:
    """What will be asked, before it is known when: the columns of a Trace, and gaps of rate 1."""

    traffic: Traffic
    session: np.ndarray
    system: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    think_s: np.ndarray
    system_tokens: np.ndarray
    gaps: np.ndarray  # before each conversation, 1 on average

    def part(self, requests: int) -> Conversations:
        """The first so many requests."""
        names = ("session", "system", "prompt", "output", "think_s")
        cut = {name: getattr(self, name)[:requests] for name in names}
        return replace(self, gaps=self.gaps[: int(cut["session"][-1]) + 1], **cut)

    def at_rate(self, requests_s: float) -> Trace:
        """The requests as they come if there are so many a second on average."""
        if not 1e-9 <= requests_s <= 1e9:
            raise RequestError(f"{requests_s:g} requests a second: expected 1e-9 to 1e9")
        a_session = len(self.session) / len(self.gaps)
        arrivals_s = _swung(np.cumsum(self.gaps) * a_session / requests_s, self.traffic)
        gap_s = self.think_s.copy()
        gap_s[np.diff(self.session, prepend=-1) != 0] = arrivals_s
        if gap_s.max() > 1e6:
            raise RequestError(f"{requests_s:g} requests a second: expected arrivals within 10^6 s")
        gap_ps = np.maximum(1, np.rint(gap_s * PS)).astype(np.int64)
        last = max(1, round(arrivals_s[-1] * PS))
        window = (round(last * self.traffic.warm_up), last)
        columns = (self.session, self.system, self.prompt, self.output, gap_ps)
        return Trace(*columns, self.system_tokens, window)


def draw(traffic: Traffic, requests: int) -> Conversations:
    """So many requests, all turns of most conversations; the last one may be cut short."""
    if not 1 <= requests <= 10**7:
        raise RequestError(f"requests={requests}: expected 1 to 10^7")
    rng = np.random.default_rng(np.random.SeedSequence(traffic.seed))
    system_tokens = _lengths(rng, traffic.systems, traffic.system, traffic, traffic.context // 2)
    sessions = max(16, math.ceil(1.5 * requests / traffic.turns))
    while True:
        drawn = _turns(np.random.default_rng([traffic.seed, sessions]), sessions, system_tokens,
                       traffic)  # fmt: skip
        if len(drawn[0]) >= requests:
            break
        sessions *= 2  # many were cut short by the context
    session, system, prompt, output, think_s = (column[:requests] for column in drawn)
    gaps = _gaps(rng, int(session[-1]) + 1, traffic.burst)
    return Conversations(traffic, session, system, prompt, output, think_s, system_tokens, gaps)


def _turns(
    rng: np.random.Generator, sessions: int, system_tokens: np.ndarray, traffic: Traffic
) -> tuple[np.ndarray, ...]:
    """Columns of all turns [N]: session, system, prompt, output, seconds to think."""
    weights = 1 / np.arange(1, traffic.systems + 1) ** traffic.zipf
    system = rng.choice(traffic.systems, sessions, p=weights / weights.sum())
    counts = rng.geometric(1 / traffic.turns, sessions)
    session = np.repeat(np.arange(sessions), counts)
    most = traffic.context // 4  # so that a first turn always fits: half, a quarter, a quarter
    message = _lengths(rng, len(session), traffic.message, traffic, most)
    output = _lengths(rng, len(session), traffic.answer, traffic, most)
    think_s = rng.exponential(traffic.think_s, len(session))
    sums = np.cumsum(message + output)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    before = (sums - (message + output))[starts]
    held = system_tokens[system][session] + sums - before[session]  # [N], at the end of the turn
    keep = held <= traffic.context
    columns = (session, system[session], held - output, output, think_s)
    return tuple(column[keep] for column in columns)


def _lengths(
    rng: np.random.Generator, count: int, mean: float, traffic: Traffic, most: int
) -> np.ndarray:
    """Lognormal lengths of that mean before they are rounded and cut at 1 and `most`, int64."""
    sigma = traffic.spread
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def _gaps(rng: np.random.Generator, count: int, burst: float) -> np.ndarray:
    """Gamma gaps of mean 1 whose coefficient of variation is `burst`."""
    shape = 1 / burst**2
    return rng.gamma(shape, 1 / shape, count)


def _swung(even_s: np.ndarray, traffic: Traffic) -> np.ndarray:
    """Arrivals at an even rate, moved: the rate at t is 1 + swing sin(2 pi t / period) times that.

    By time t as many have come as otherwise by t + swing / turn (1 - cos(turn t)), where turn is
    2 pi / period; a grid turns that round.
    """
    if not traffic.swing:
        return even_s
    period, turn = traffic.period_s, 2 * math.pi / traffic.period_s
    points = 64 * math.ceil(even_s[-1] / period + 1)
    if points > 10**7:
        raise RequestError(f"period_s={period:g}: expected 1/10^5 of {even_s[-1]:g} s or more")
    t = np.linspace(0, points / 64 * period, points + 1)
    return np.interp(even_s, t + traffic.swing / turn * (1 - np.cos(turn * t)), t)


def check_room(conversations: Conversations | Trace, shape: Shape) -> None:
    """RequestError, with the numbers, if a request could never run to its end."""
    tokens = int((conversations.prompt + conversations.output).max())
    blocks = -(-(tokens - 1) // shape.block_size)  # the last one is never stored
    if blocks > shape.num_blocks:
        words = f"num_blocks={shape.num_blocks}: a request takes {blocks} blocks"
        raise RequestError(f"{words} of {shape.block_size} tokens; expected as many or more")
