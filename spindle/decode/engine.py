"""Engine: one sequence at a time. Prefill the prompt, then one token a step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from spindle.decode.sampling import SamplingParams, SamplingRows, sample
from spindle.decode.stats import Stats
from spindle.errors import NumericsError, RequestError
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.model.layers import Model
from spindle.tokenizer import check_ids

ROW = 0  # this engine's only sequence
OPTIONS = ["max_new_tokens", *(f.name for f in fields(SamplingParams) if f.name != "max_tokens")]


class Engine:
    """Runs one sequence through a model over a KV cache of its own.

    max_seq_len: prompt and answer together, in tokens; by default what the model has positions for.
    prefill_chunk: tokens of a prompt that go through the model at once; it bounds the memory for
    attention scores and changes no result. Raises RequestError for a length that cannot be.
    """

    def __init__(
        self, model: Model, max_seq_len: int | None = None, prefill_chunk: int = 512
    ) -> None:
        limit = model.config.max_positions
        self.model = model
        self.max_seq_len = _length("max_seq_len", limit if max_seq_len is None else max_seq_len)
        self.prefill_chunk = _length("prefill_chunk", prefill_chunk)
        if self.max_seq_len > limit:
            raise RequestError(f"max_seq_len={max_seq_len}: the model has {limit} positions")
        self.length = 0  # tokens stored in the cache
        self._kv = ContiguousKV(model.config, model.dtype, model.device)
        self._extensions = 0  # of the sequence, by whomever: a stream sees if it was not alone

    def prefill(self, ids: Iterable[int]) -> Tensor:
        """Start over with this prompt; returns the logits [1, V] that follow it."""
        prompt = self._checked(ids)
        self._kv.release(ROW)
        self.length = 0
        return self._extend(prompt)

    def step(self, token: int) -> Tensor:
        """Append one token to the sequence; returns the logits [1, V] that follow it."""
        ids = check_ids([token], self.model.config.vocab_size, start=self.length)
        if self.length >= self.max_seq_len:
            raise RequestError(f"the sequence is full: {self.length} of {self.max_seq_len} tokens")
        return self._extend(ids)

    def generate(
        self, ids: Iterable[int], max_new_tokens: int | None = 16, **sampling: Any
    ) -> tuple[list[int], Stats]:
        """The tokens that follow the prompt, and when they came.

        max_new_tokens: None is as many as the context allows, and never are there more than that.
        `sampling` takes what SamplingParams takes. An end-of-sequence token ends the answer and is
        its last id. Raises RequestError before anything runs, NumericsError if logits are NaN.
        An interrupt loses the tokens; `stream` keeps them.
        """
        stream = self.stream(ids, max_new_tokens, **sampling)
        return list(stream), stream.stats

    def stream(
        self, ids: Iterable[int], max_new_tokens: int | None = 16, **sampling: Any
    ) -> Stream:
        """Like `generate`, one token at a time: iterate over it, then read its `stats`.

        One stream at a time: the prompt runs when the first token is asked for, and a stream that
        is unfinished when the engine is given anything else raises RequestError from then on.
        """
        for name in sampling:
            if name not in OPTIONS:
                raise RequestError(f"{name}: no such option; expected one of {', '.join(OPTIONS)}")
        params = SamplingParams(max_tokens=max_new_tokens, **sampling).seeded()
        prompt = self._checked(ids)
        assert params.seed is not None
        stats = Stats(len(prompt), params.seed)
        return Stream(self._tokens(prompt, params, stats), stats)

    def _tokens(
        self, prompt: list[int], params: SamplingParams, stats: Stats
    ) -> Generator[int, None, None]:
        room = self.max_seq_len - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        if limit == 0:
            stats.finish_reason = "length"
            return
        rows = SamplingRows.of([params], self.model.device)
        stops = () if params.ignore_eos else self.model.config.eos_ids
        logits = self.prefill(prompt)
        while True:
            extensions = self._extensions
            token = self._pick(logits, rows)
            stats.record()
            if token in stops or stats.new_tokens == limit:
                stats.finish_reason = "stop" if token in stops else "length"
            yield token
            if stats.finish_reason is not None:
                return
            if self._extensions != extensions:
                raise RequestError(
                    "the engine was given other tokens before this stream had ended; one stream "
                    "at a time, or an engine each"
                )
            logits = self.step(token)

    def _pick(self, logits: Tensor, rows: SamplingRows) -> int:
        position = torch.tensor([self.length], device=logits.device)
        token = int(sample(logits, rows, position))
        if token < 0:
            raise NumericsError(
                f"the logits for position {self.length} are no distribution (NaN, +inf, or all "
                "-inf); the weights or the dtype are at fault"
            )
        return token

    def _extend(self, ids: list[int]) -> Tensor:
        """Run ids on top of what is stored, a chunk at a time; logits [1, V] of the last one."""
        self._extensions += 1
        for at in range(0, len(ids), self.prefill_chunk):
            chunk = ids[at : at + self.prefill_chunk]
            index = StepIndex.of([(ROW, self.length, len(chunk))], self.model.device)
            tokens = torch.tensor(chunk, device=self.model.device)
            hidden = self.model(tokens, self._kv.view(index))  # [T, E]
            self.length += len(chunk)
        return self.model.logits(hidden[-1:])

    def _checked(self, ids: Iterable[int]) -> list[int]:
        if isinstance(ids, str | bytes):
            raise RequestError("the prompt is text; expected token ids: encode it first")
        prompt = check_ids(ids, self.model.config.vocab_size)
        if not prompt:
            raise RequestError("the prompt has no tokens; expected at least one")
        if len(prompt) > self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; at most {self.max_seq_len} fit"
            )
        return prompt


class Stream(Iterator[int]):
    """The token ids of one answer as they come; `stats` is complete when they end."""

    def __init__(self, tokens: Generator[int, None, None], stats: Stats) -> None:
        self._tokens, self.stats = tokens, stats

    def __next__(self) -> int:
        try:
            return next(self._tokens)
        except StopIteration:
            raise
        except BaseException as cause:  # an interrupt is no error
            self.stats.finish_reason = "error" if isinstance(cause, Exception) else "abort"
            raise

    def close(self) -> None:
        """End the answer here; its finish reason is then "abort"."""
        if self.stats.finish_reason is None:
            self.stats.finish_reason = "abort"
        self._tokens.close()


def _length(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name}={value!r}: expected a whole number of 1 or more")
    return int(value)
