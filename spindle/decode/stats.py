"""When each token came, and what follows from it: ttft, gaps, tokens a second.

The clock is passed in, so a test can turn it by hand. Times are kept in seconds of that clock; what
is reported is in milliseconds and says so in its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Stats:
    """One answer's times: the engine calls `record` as tokens arrive, the rest only reads."""

    def __init__(
        self,
        prompt_tokens: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        steps: StepTimes | None = None,
    ) -> None:
        self.prompt_tokens, self.seed, self.steps = prompt_tokens, seed, steps
        self.new_tokens = 0
        self.finish_reason: str | None = None  # "stop" | "length" | "abort" | "error", at the end
        self.stop_reason: int | str | None = None  # the stop id or string; None for an EOS
        self.speculation: Speculation | None = None  # what became of drafts, where there are any
        self._clock = clock
        self._arrival = clock()
        self._events: list[tuple[float, int]] = []  # when, how many tokens at once

    def record(self, tokens: int = 1, at: float | None = None) -> None:
        """`tokens` tokens, one at least, have arrived together: just now, or at that time."""
        assert tokens >= 1, tokens
        if at is not None and self._events and self._events[-1][0] == at:
            tokens_then = self._events.pop()[1]
        else:
            tokens_then, at = 0, self.now() if at is None else at
        self._events.append((at, tokens_then + tokens))
        self.new_tokens += tokens

    def now(self) -> float:
        """The time on the clock of these stats, in seconds."""
        return self._clock()

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from the call to the first token; None if there was none."""
        return (self._events[0][0] - self._arrival) * 1e3 if self._events else None

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies, one a token after the first.

        Tokens that arrive together share the gap before them in equal parts; those that arrive
        with the first token have a gap of 0.
        """
        gaps = [0.0] * (self._events[0][1] - 1) if self._events else []
        for (before, _), (now, count) in zip(self._events, self._events[1:], strict=False):
            gaps += [(now - before) * 1e3 / count] * count
        return gaps

    @property
    def tok_s(self) -> float | None:
        """New tokens a second from the call to the last token, the prompt's pass included."""
        if not self._events or self._events[-1][0] == self._arrival:
            return None
        return self.new_tokens / (self._events[-1][0] - self._arrival)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first one: the pace of the answer once it flows."""
        gaps = self.itl_ms
        return len(gaps) / sum(gaps) * 1e3 if sum(gaps) > 0 else None

    @property
    def step_ms(self) -> list[float]:
        """How long each step after the prompt took on the device; empty where no engine says so.

        An inter-token latency is a step and what the host did beside it. Answers that are made
        together have their steps in common, the first of them.
        """
        return self.steps.ms()[: self.new_tokens - 1] if self.steps and self.new_tokens else []

    @property
    def acceptance_rate(self) -> float | None:
        """Of the drafts that were judged, the share that was accepted; None without any."""
        return None if self.speculation is None else self.speculation.acceptance_rate

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        step_ms = self.step_ms
        drafted = {} if self.speculation is None else {"speculation": self.speculation.as_dict()}
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "ttft_ms": self.ttft_ms,
            "itl_p50_ms": percentile(self.itl_ms, 50),
            "itl_p99_ms": percentile(self.itl_ms, 99),
            "step_p50_ms": percentile(step_ms, 50),
            "step_p99_ms": percentile(step_ms, 99),
            "tok_s": self.tok_s,
            "decode_tok_s": self.decode_tok_s,
            **drafted,
        }

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.new_tokens} tokens after a prompt of {self.prompt_tokens}"]
        if self.ttft_ms is not None:
            parts.append(f"ttft {self.ttft_ms:.0f} ms")
        if self.tok_s is not None:
            parts.append(f"{self.tok_s:.1f} tok/s")
        p50, p99 = percentile(self.itl_ms, 50), percentile(self.itl_ms, 99)
        if p50 is not None and p99 is not None:
            parts.append(f"itl p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        step_ms = percentile(self.step_ms, 50)
        if step_ms is not None:
            parts.append(f"step p50 {step_ms:.1f} ms")
        if self.speculation is not None:
            parts.append(self.speculation.summary())
        return " · ".join(parts)


@dataclass
class Speculation:
    """What became of one answer's drafts.

    Of the drafts of a pass those are judged whose predecessors were all accepted: the first that is
    rejected is the last. What the answer does not have counts as neither judged nor accepted, as
    where it ends in the middle of an accepted run.
    """

    passes: int = 0  # of the target, after the prompt's
    tokens: int = 0  # that they gave
    proposed: int = 0  # drafts that went through the target
    judged: int = 0
    accepted: int = 0
    draft_s: float = 0.0  # seconds spent on drafting
    pass_s: float = 0.0  # and on the passes, and on judging

    @staticmethod
    def total(parts: Iterable[Speculation | None]) -> Speculation | None:
        """The sum of several; None if there are none."""
        there = [vars(part) for part in parts if part is not None]
        if not there:
            return None
        return Speculation(**{name: sum(one[name] for one in there) for name in there[0]})

    def note(self, drafted: bool, accepted: bool) -> None:
        """The answer gained a token, for which there was a draft or not, which it is or not."""
        self.tokens += 1
        self.judged += drafted
        self.accepted += drafted and accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Of the judged drafts, the share that was accepted (Leviathan et al. 2023, 3.1: alpha)."""
        return self.accepted / self.judged if self.judged else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that a pass of the target gave, the prompt's left out."""
        return self.tokens / self.passes if self.passes else None

    @property
    def draft_share(self) -> float | None:
        """The share of the time after the prompt that went into drafting."""
        total = self.draft_s + self.pass_s
        return self.draft_s / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "passes": self.passes,
            "tokens": self.tokens,
            "proposed": self.proposed,
            "judged": self.judged,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
            "draft_share": self.draft_share,
        }

    def summary(self) -> str:
        """A few words for people."""
        if self.acceptance_rate is None:
            return "no drafts"
        return (
            f"{self.tokens_per_pass:.2f} tokens a pass, {self.acceptance_rate:.0%} of "
            f"{self.judged} drafts accepted"
        )


class StepTimes:
    """How long steps take on their device, at no cost while they run.

    On a GPU a pair of events is put into the stream around each step, and nobody waits: the times
    are there once the last event is. On a CPU it is a clock that never runs backwards.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._of_gpu, self._clock = device.type == "cuda", clock
        self._started: Any = None
        self._pairs: list[tuple[Any, Any]] = []  # of events, or of times in seconds

    def start(self) -> None:
        """A step begins. One that was not stopped is forgotten."""
        self._started = self._now()

    def stop(self) -> None:
        """It has been asked for in full."""
        self._pairs.append((self._started, self._now()))

    def ms(self) -> list[float]:
        """The milliseconds of each step so far; on a GPU this waits for the last of them."""
        if not self._of_gpu:
            return [(end - start) * 1e3 for start, end in self._pairs]
        if self._pairs:
            self._pairs[-1][1].synchronize()
        return [start.elapsed_time(end) for start, end in self._pairs]

    def _now(self) -> Any:
        if not self._of_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def percentile(values: Sequence[float], p: float) -> float | None:
    """The smallest value that at least p percent of the values do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]
