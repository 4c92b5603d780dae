"""When each token came, and what follows from it: ttft, gaps, tokens a second.

The clock is passed in, so a test can turn it by hand. Times are kept in seconds of that clock; what
is reported is in milliseconds and says so in its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
        self._clock = clock
        self._arrival = clock()
        self._events: list[tuple[float, int]] = []  # when, how many tokens at once

    def record(self, tokens: int = 1) -> None:
        """`tokens` tokens, one at least, have just arrived together."""
        assert tokens >= 1, tokens
        self._events.append((self._clock(), tokens))
        self.new_tokens += tokens

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

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        step_ms = self.step_ms
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
        return " · ".join(parts)


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
