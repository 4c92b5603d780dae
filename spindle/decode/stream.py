"""What an engine gives: a Stream of token ids while an answer comes, an Answer once it is there."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.params import SamplingParams
from spindle.decode.stats import Stats
from spindle.threads import OneThread, by_one_thread


class Streams(Protocol):
    """What makes streams: an Engine, or a Speculator over one."""

    @property
    def max_seq_len(self) -> int:
        """Prompt and answer together, in tokens."""

    def stream_with(self, ids: Iterable[int], params: SamplingParams) -> Stream:
        """One answer to a prompt."""

    def streams(self, ids: Iterable[int], params: SamplingParams) -> Iterator[Stream]:
        """`params.n` answers, one after another."""


class Stream(Iterator[int]):
    """The token ids of one answer as they come; `stats` is complete when they end.

    `logprobs` has one record for each id that has come, or is None if none were asked for;
    `prompt_ids` is what it follows.
    """

    def __init__(
        self,
        tokens: Generator[int, None, None],
        stats: Stats,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_ids: Sequence[int] = (),
        one_thread: OneThread | None = None,
    ) -> None:
        self._tokens, self.stats, self.logprobs = tokens, stats, logprobs
        self.prompt_ids = prompt_ids
        self.one_thread = one_thread or OneThread(
            "stream"
        )  # that of the engine, where there is one

    @by_one_thread
    def __next__(self) -> int:
        try:
            return next(self._tokens)
        except StopIteration:
            raise
        except BaseException as cause:  # an interrupt is no error
            self.stats.finish_reason = "error" if isinstance(cause, Exception) else "abort"
            raise

    @by_one_thread
    def close(self) -> None:
        """End the answer here; its finish reason is then "abort"."""
        if self.stats.finish_reason is None:
            self.stats.finish_reason = "abort"
        self._tokens.close()

    @by_one_thread
    def stop(self, reason: str) -> None:
        """End the answer here, for its text has this stop string; the finish reason is "stop"."""
        self.stats.finish_reason, self.stats.stop_reason = "stop", reason
        self._tokens.close()


@dataclass(frozen=True)
class Answer:
    """One answer as a whole.

    `finish_reason` is "stop" or "length"; `stop_reason` the stop id, None for an EOS; `logprobs`
    one record a token, or None if none were asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    stats: Stats

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the tokens' logprobs; 0 if none were asked for."""
        return sum(record.sampled.logprob for record in self.logprobs or ())
