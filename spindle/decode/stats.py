"""When each token came, and what follows from it: ttft, gaps, tokens a second.

The clock is passed in, so a test can turn it by hand. Times are kept in seconds of that clock; what
is reported is in milliseconds and says so in its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stats:
    """One answer's times: the engine calls `record` as tokens arrive, the rest only reads."""

    def __init__(
        self, prompt_tokens: int, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.prompt_tokens, self.seed = prompt_tokens, seed
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

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "ttft_ms": self.ttft_ms,
            "itl_p50_ms": percentile(self.itl_ms, 50),
            "itl_p99_ms": percentile(self.itl_ms, 99),
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
        return " · ".join(parts)


def percentile(values: Sequence[float], p: float) -> float | None:
    """The smallest value that at least p percent of the values do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]
