"""The chunks of a streamed answer, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spindle.openai_form import Asked, chat_logprobs, legacy_logprobs, usage
from spindle.serve.outputs import Completion, RequestOutput
from spindle.tokenizer import StreamDecoder, Tokenizer

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A server-sent event; in ASCII, so that no reader takes a character for the end of a line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class _Told:
    """How much of one answer has been told."""

    chars: int = 0
    tokens: int = 0
    ended: bool = False
    decoder: StreamDecoder | None = None  # of the tokens whose logprobs were told
    offset: int = 0  # and the characters that they completed


class Chunks:
    """Turns what is known of a request's answers into the chunks that say what is new of them.

    head: the fields that all chunks share. Answers are numbered through all prompts.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer, head: dict[str, Any]) -> None:
        self._asked, self._tokenizer, self._head = asked, tokenizer, head
        self._told: dict[int, _Told] = {}

    def new(self, outputs: Sequence[RequestOutput | None]) -> Iterator[dict[str, Any]]:
        """What there is now and was not there at the last call."""
        for position, output in enumerate(outputs):
            if output is None:
                continue
            for answer in output.outputs:
                index = position * self._asked.params.n + answer.index
                for choice in self._choices(index, output, answer):
                    yield self._chunk([{"index": index, **choice}])

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The chunk that counts the tokens, after all others."""
        return self._chunk([]) | {"usage": usage(outputs)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        counted = {"usage": None} if self._asked.include_usage else {}
        return {**self._head, "choices": choices, **counted}

    def _choices(
        self, index: int, output: RequestOutput, answer: Completion
    ) -> Iterator[dict[str, Any]]:
        """The role first, then what is new, then how it ended: the last two in one for texts."""
        chat, told = self._asked.messages is not None, self._told.get(index)
        if told is None:
            told = self._told[index] = _Told()
            if chat:
                yield _delta({"role": "assistant", "content": "", "refusal": None})
        text, tokens = answer.text[told.chars :], len(answer.token_ids) - told.tokens
        ends = answer.finish_reason is not None and not told.ended
        logprobs = self._logprobs(told, output, answer) if tokens else None
        ending = {"finish_reason": answer.finish_reason, "seed": output.seed} if ends else {}
        told.chars, told.tokens = len(answer.text), len(answer.token_ids)
        told.ended = told.ended or ends
        said = bool(text) or logprobs is not None
        if chat and said:
            yield _delta({"content": text}) | {"logprobs": logprobs}
        if chat and ends:
            yield _delta({}) | ending
        if not chat and (said or ends):
            yield {"text": text, "logprobs": logprobs, "finish_reason": None} | ending

    def _logprobs(
        self, told: _Told, output: RequestOutput, answer: Completion
    ) -> dict[str, Any] | None:
        """Of the tokens that are new; None if nobody asked for any."""
        if answer.logprobs is None:
            return None
        records = answer.logprobs[told.tokens :]
        if self._asked.messages is not None:
            return chat_logprobs(records, self._tokenizer, self._asked.params.logprobs or 0)
        if told.decoder is None:
            told.decoder = StreamDecoder(self._tokenizer, prompt_ids=output.prompt_ids)
        offsets = []
        for token in answer.token_ids[told.tokens :]:
            offsets.append(told.offset)
            told.offset += len(told.decoder.push(token))
        return legacy_logprobs(records, offsets, self._tokenizer)


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": None}
