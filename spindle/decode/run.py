"""Run: one answer of an engine on its way, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spindle.decode.logprobs import TokenLogprobs, token_logprobs
from spindle.decode.params import SamplingParams
from spindle.decode.stats import Stats
from spindle.decode.stream import Answer


@dataclass(frozen=True)
class Run:
    """What was asked for, and the records that grow with the answer."""

    params: SamplingParams
    sample: int  # which of the n answers
    limit: int  # tokens at most
    eos_ids: Sequence[int]
    stats: Stats
    logprobs: list[TokenLogprobs] | None
    token_ids: list[int] = field(default_factory=list)

    def take(self, row: list[list[float]], at: float | None = None) -> int:
        """Take the token of a row of `logprob_table`, which came at that time; returns its id.

        Sets the reasons if it is the last: an EOS, a stop id, or as many as may be.
        """
        token = int(row[0][0])
        if self.logprobs is not None:
            self.logprobs.append(token_logprobs(row))
        self.token_ids.append(token)
        stats = self.stats
        stats.record(at=at)
        ends, reason = self.params.end(token, self.eos_ids)
        if ends:
            stats.finish_reason, stats.stop_reason = "stop", reason
        elif stats.new_tokens == self.limit:
            stats.finish_reason = "length"
        return token

    @property
    def ended(self) -> bool:
        """Whether it has had its last token."""
        return self.stats.finish_reason is not None

    def answer(self) -> Answer:
        """The answer, once it has ended."""
        ends = self.stats.finish_reason, self.stats.stop_reason
        return Answer(self.token_ids, self.logprobs, *ends, self.stats)
