"""One answer's text as it comes: ids become text, and stop strings end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spindle.decode.detokenize import AnswerText
from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.params import SamplingParams, check_params
from spindle.decode.stats import Stats
from spindle.decode.stream import Stream, Streams
from spindle.tokenizer import Tokenizer


def stream_text(
    engine: Streams, tokenizer: Tokenizer, prompt: str | Sequence[int], params: SamplingParams
) -> TextStream:
    """The text that follows a prompt (a string, or its ids), piece by piece.

    Of the forms of an answer, the one that knows stop strings: they are looked for in the answer,
    never in the prompt, and not in what the first `min_tokens` tokens complete. Raises
    RequestError before anything runs. As with `Engine.stream`, one stream at a time.
    """
    ids = _ids_of(engine, tokenizer, prompt)
    stream = engine.stream_with(ids, replace(check_params(params), stop=None))
    return TextStream(stream, AnswerText.of(tokenizer, stream.prompt_ids, params))


def stream_texts(
    engine: Streams, tokenizer: Tokenizer, prompt: str | Sequence[int], params: SamplingParams
) -> Iterator[TextStream]:
    """The `params.n` answers to a prompt, one after another: each is run, or closed, in its turn.

    The prompt is run once. Raises RequestError before anything runs.
    """
    ids = _ids_of(engine, tokenizer, prompt)
    streams = engine.streams(ids, replace(check_params(params), stop=None))
    return (TextStream(s, AnswerText.of(tokenizer, s.prompt_ids, params)) for s in streams)


def _ids_of(engine: Streams, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Sequence[int]:
    return (
        tokenizer.encode_within(prompt, engine.max_seq_len) if isinstance(prompt, str) else prompt
    )


class TextStream(Iterator[str]):
    """The text of one answer: a delta a token, maybe empty, and what was held back at the end.

    `token_ids` and `logprobs` grow with it and end with the token that completes the stop, though
    `text` ends before the stop: its characters may begin in one token and end in the middle of
    another. What is text and what is not: `AnswerText`.
    """

    def __init__(self, stream: Stream, answer: AnswerText) -> None:
        self.token_ids: list[int] = []
        self._stream, self._answer = stream, answer

    @property
    def text(self) -> str:
        """All of the text so far: the deltas, joined."""
        return self._answer.text

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One record for each of `token_ids`; None if none were asked for."""
        return self._stream.logprobs

    @property
    def stats(self) -> Stats:
        """When the tokens came; complete at the end."""
        return self._stream.stats

    @property
    def finish_reason(self) -> str | None:
        """None, then "stop", "length", "abort" or "error"."""
        return self.stats.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the stop id that ended the answer; None for an EOS, or no stop."""
        return self.stats.stop_reason

    def __next__(self) -> str:
        if self._answer.stop is not None:
            raise StopIteration
        try:
            token = next(self._stream)
        except StopIteration:
            rest = self._answer.flush()
            self._note_the_stop()
            if rest:
                return rest
            raise
        self.token_ids.append(token)
        delta = self._answer.push(token, ends=self.finish_reason == "stop")
        self._note_the_stop()
        return delta

    def close(self) -> str:
        """End the answer here; returns the text that was still held back, which `text` gains."""
        self._stream.close()
        rest = self._answer.flush()
        self._note_the_stop()
        return rest

    def _note_the_stop(self) -> None:
        if self._answer.stop is not None:
            self._stream.stop(self._answer.stop)
