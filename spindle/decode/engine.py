"""Engine: one sequence at a time. Prefill the prompt, then one token a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from spindle.decode.logprobs import TokenLogprobs, logprob_table, token_logprobs
from spindle.decode.params import SamplingParams, check_count, check_prompt
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, sample
from spindle.decode.stats import Stats
from spindle.decode.stream import Answer, Stream
from spindle.errors import NumericsError, RequestError
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.model.layers import Model
from spindle.tokenizer import check_ids

ROW = 0  # this engine's only sequence
# max_new_tokens, `answers` and `stream_text` have these.
ELSEWHERE = ("max_tokens", "n", "best_of", "stop")
OPTIONS = ["max_new_tokens", *(f.name for f in fields(SamplingParams) if f.name not in ELSEWHERE)]


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
        self.max_seq_len = check_count("max_seq_len", limit if max_seq_len is None else max_seq_len)
        self.prefill_chunk = check_count("prefill_chunk", prefill_chunk)
        if self.max_seq_len > limit:
            raise RequestError(
                f"max_seq_len={max_seq_len}: the model has {model.config.positions_in_words()}"
            )
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
        `sampling` takes what SamplingParams takes, but for `n` and `best_of` (`answers` has them)
        and `stop` (`stream_text` has it). An end-of-sequence token or a stop id ends the answer
        and is its last id. Raises RequestError before anything runs, NumericsError if nothing can
        be sampled. An interrupt loses the tokens; `stream` keeps them.
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
            if name not in (*OPTIONS, "n", "best_of", "stop"):  # those are refused in better words
                raise RequestError(f"{name}: no such option; expected one of {', '.join(OPTIONS)}")
        try:
            params = SamplingParams(max_tokens=max_new_tokens, **sampling)
        except RequestError as error:  # in the words of the caller
            raise RequestError(str(error).replace("max_tokens", "max_new_tokens")) from None
        return self.stream_with(ids, params)

    def stream_with(self, ids: Iterable[int], params: SamplingParams) -> Stream:
        """Like `stream`, for parameters that are made already. RequestError: for more answers."""
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream is one answer; use Engine.answers for more")
        return next(self.streams(ids, params))

    def answers(self, ids: Iterable[int], params: SamplingParams) -> list[Answer]:
        """The `params.n` answers to a prompt, which is run once; each is what it is without others.

        They are rows of one cache, and a pass gives each of them a token; of `best_of` the n
        likeliest are given, the likeliest first. Raises RequestError before anything runs,
        NumericsError if nothing can be sampled. Afterwards the engine holds the prompt.
        """
        if not params.selects:
            return self._together(ids, params)
        summed = replace(params, n=params.samples, best_of=None, logprobs=params.logprobs or 0)
        answers = self._together(ids, summed)
        best = sorted(answers, key=lambda answer: -answer.cumulative_logprob)[: params.n]
        return best if params.logprobs is not None else [replace(a, logprobs=None) for a in best]

    def streams(self, ids: Iterable[int], params: SamplingParams) -> Iterator[Stream]:
        """The same answers as streams, one after another: each is run to its end, or closed, first.

        The stats of each begin with its turn. RequestError, as `answers`, and for best_of > 1.
        """
        params.check_stream("answers")
        prompt, params = self._checked(ids), self._checked_params(params)
        after_prompt: list[Tensor] = []

        def start() -> Tensor:
            if not after_prompt:
                after_prompt.append(self.prefill(prompt))
            self.length = len(prompt)  # to rewind is to be shorter; the rest is written anew
            return after_prompt[0]

        runs = (self._run(prompt, params, sample) for sample in range(params.n))
        return (Stream(self._tokens(r, start), r.stats, r.logprobs, prompt) for r in runs)

    def _together(self, ids: Iterable[int], params: SamplingParams) -> list[Answer]:
        """All answers at once: row n of the cache is that of answer n, all of one length."""
        prompt, params = self._checked(ids), self._checked_params(params)
        runs = [self._run(prompt, params, sample) for sample in range(params.n)]
        if runs[0].limit > 0:
            after_prompt = self.prefill(prompt)  # [1, V]
            try:
                self._run_rows(runs, after_prompt)
            finally:
                for row in range(1, params.n):
                    self._kv.release(row)
                self.length = len(prompt)
        return [run.answer() for run in runs]

    def _run_rows(self, runs: list[_Run], after_prompt: Tensor) -> None:
        for row in range(1, len(runs)):
            self._kv.fork(ROW, row)
        live, logits = dict(enumerate(runs)), after_prompt.expand(len(runs), -1)  # [R, V]
        while True:
            for run, its in zip(live.values(), logits.split(1), strict=True):
                token = self._pick(its, run)
                run.stats.record()
                self._note_the_end(token, run)
            live = {row: run for row, run in live.items() if run.stats.finish_reason is None}
            if not live:
                return
            logits = self._extend_rows(list(live), [run.token_ids[-1] for run in live.values()])

    def _run(self, prompt: list[int], params: SamplingParams, sample: int) -> _Run:
        assert params.seed is not None
        room, config = self.max_seq_len - len(prompt), self.model.config
        rows = SamplingRows.of(
            [params],
            self.model.device,
            [sample],
            [Prefix(prompt)],
            config.eos_ids,
            config.vocab_size,
        )
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        stats = Stats(len(prompt), params.seed)
        if limit == 0:
            stats.finish_reason = "length"
        return _Run(params, rows, limit, stats, None if params.logprobs is None else [])

    def _tokens(self, run: _Run, start: Callable[[], Tensor]) -> Generator[int, None, None]:
        """The answer's ids; `start` runs the prompt and gives the logits [1, V] that follow it."""
        if run.limit == 0:
            return
        logits = start()
        while True:
            extensions = self._extensions
            token = self._pick(logits, run)
            run.stats.record()
            self._note_the_end(token, run)
            yield token
            if run.stats.finish_reason is not None:
                return
            if self._extensions != extensions:
                raise RequestError(
                    "the engine was given other tokens before this stream had ended; one stream "
                    "at a time, or an engine each"
                )
            logits = self.step(token)

    def _pick(self, logits: Tensor, run: _Run) -> int:
        """The next token: counted in the rows, its log-probabilities noted if asked for."""
        tokens = sample(logits, run.rows, torch.tensor([self.length], device=logits.device))  # [1]
        columns = tokens[:, None, None]
        if run.params.logprobs is not None:
            columns = logprob_table(logits, tokens, run.params.logprobs)
        row = columns[0].tolist()  # the one copy from the device
        token = int(row[0][0])
        if token < 0:
            self._refuse_logits(logits)
        if run.logprobs is not None:
            run.logprobs.append(token_logprobs(row))
        run.rows.append(tokens)
        run.token_ids.append(token)
        return token

    def _note_the_end(self, token: int, run: _Run) -> None:
        """Set the reasons if this token is the last: an EOS, a stop id, or as many as may be."""
        stats, (ends, reason) = run.stats, run.params.end(token, self.model.config.eos_ids)
        if ends:
            stats.finish_reason, stats.stop_reason = "stop", reason
        elif stats.new_tokens == run.limit:
            stats.finish_reason = "length"

    def _refuse_logits(self, logits: Tensor) -> NoReturn:
        where = f"the logits for position {self.length}"
        if logits.amax().isfinite():
            raise NumericsError(
                f"{where} leave nothing to sample: only tokens that would end the answer are "
                "possible, and min_tokens forbids them; lower min_tokens"
            )
        raise NumericsError(
            f"{where} are no distribution (NaN, +inf, or all -inf); the weights or the dtype are "
            "at fault"
        )

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

    def _extend_rows(self, rows: list[int], tokens: list[int]) -> Tensor:
        """One token on top of each of these rows; the logits [R, V] that follow."""
        self._extensions += 1
        index = StepIndex.of([(row, self.length, 1) for row in rows], self.model.device)
        ids = torch.tensor(tokens, device=self.model.device)
        hidden = self.model(ids, self._kv.view(index))  # [R, E]
        self.length += 1
        return self.model.logits(hidden)

    def _checked_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed; RequestError for what token ids alone cannot honour."""
        if params.stop:
            raise RequestError(
                "stop: token ids have no text to look for it in; expected the text form, "
                "spindle.decode.text.stream_text"
            )
        params.check_ids(self.model.config.vocab_size)
        return params.seeded()

    def _checked(self, ids: Iterable[int]) -> list[int]:
        return check_prompt(ids, self.model.config.vocab_size, self.max_seq_len)


@dataclass(frozen=True)
class _Run:
    """One answer on its way: what was asked for, and the records that grow with it."""

    params: SamplingParams
    rows: SamplingRows  # of one row
    limit: int  # tokens at most
    stats: Stats
    logprobs: list[TokenLogprobs] | None
    token_ids: list[int] = field(default_factory=list)

    def answer(self) -> Answer:
        """The answer, once it has ended."""
        ends = self.stats.finish_reason, self.stats.stop_reason
        return Answer(self.token_ids, self.logprobs, *ends, self.stats)
