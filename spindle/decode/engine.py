"""Engine: one stream, or a few rows of them. Prefill the prompt, then one token a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from spindle.decode.logprobs import TokenLogprobs, logprob_table
from spindle.decode.params import SamplingParams, check_params
from spindle.decode.penalties import Prefix
from spindle.decode.rows import StaticRows
from spindle.decode.run import Run
from spindle.decode.sampling import SamplingRows
from spindle.decode.stats import Stats, StepTimes
from spindle.decode.stream import Answer, Stream
from spindle.errors import NumericsError, RequestError, brief, shown
from spindle.model.layers import Model
from spindle.threads import by_one_thread

# max_new_tokens, `answers` and `stream_text` have these.
ELSEWHERE = ("max_tokens", "n", "best_of", "stop")
OPTIONS = ["max_new_tokens", *(f.name for f in fields(SamplingParams) if f.name not in ELSEWHERE)]
Tokens = Callable[[Run, list[int], Callable[[], Tensor]], Generator[int, None, None]]


class Engine(StaticRows):
    """Runs a sequence, or `rows` of them, through a model over a static cache of its own.

    max_seq_len: prompt and answer together, in tokens a row; by default what the model has
        positions for.
    prefill_chunk: tokens of a prompt that go through the model at once; it bounds the memory for
        attention scores and changes no result.
    rows: sequences that a step carries.
    keep_probs: `step` also keeps the distributions that it drew from.

    Raises RequestError for a number that cannot be. An Engine is for one thread at a time, its
    streams as well, and refuses a second; to be copied or pickled; and a child of fork, where
    torch's threads are gone. A signal handler must not use the one that it interrupts (an LLM
    refuses that).

    Examples:

        >>> from spindle import Engine, Tokenizer, load_hf
        >>> tok, eng = Tokenizer("tiny"), Engine(load_hf("tiny"))
        >>> prompt = tok.encode("The capital of France is")
        >>> ids, stats = eng.generate(prompt, max_new_tokens=4, temperature=0)
        >>> tok.decode(prompt + ids), stats.finish_reason
        ('The capital of France is the same as the', 'length')
        >>> [tok.decode([token]) for token in eng.stream(prompt, 4, temperature=0)]
        [' the', ' same', ' as', ' the']
    """

    def __init__(
        self,
        model: Model,
        max_seq_len: int | None = None,
        prefill_chunk: int = 512,
        rows: int = 1,
        keep_probs: bool = False,
    ) -> None:
        super().__init__(model, max_seq_len, prefill_chunk, rows, keep_probs)

    @by_one_thread
    def begin(
        self, prompts: Sequence[Iterable[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Tensor:
        """Start the first R rows over; returns the token that follows each prompt, [R].

        params: for all rows, or one a row; what ends an answer is the caller's to look for. The
        tokens are on the device, and `step` goes on from them. RequestError before anything runs.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise RequestError(f"prompts={shown(prompts)}: expected a list of lists of token ids")
        count = len(prompts)
        if not 1 <= count <= self.rows:
            raise RequestError(
                f"{count} prompts; expected 1 to {self.rows}, which are the engine's rows"
            )
        each = [params] * count if isinstance(params, SamplingParams) else params
        fits = isinstance(each, Sequence) and len(each) == count
        if not fits or not all(isinstance(one, SamplingParams) for one in each):
            right = f"expected SamplingParams, or a list of them, one for each of {count} prompts"
            raise RequestError(f"params={shown(params)}: {right}")
        checked = [self._checked(ids) for ids in prompts]
        for one in each:
            self._check_single(one)
        each = [self._checked_params(one) for one in each]
        logits = [self.prefill(ids, row) for row, ids in enumerate(checked)]
        sampling = self.sampling(each, [0] * len(each), [Prefix(ids) for ids in checked])
        return self._draw(torch.cat(logits), sampling)

    @by_one_thread
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
        params = params_of(max_new_tokens, sampling)
        return self.stream_with(ids, params)

    def stream_with(
        self, ids: Iterable[int], params: SamplingParams, tokens: Tokens | None = None
    ) -> Stream:
        """Like `stream`, for parameters that are made already. RequestError: for more answers."""
        self._check_single(check_params(params))
        return next(self.streams(ids, params, tokens))

    @by_one_thread
    def answers(self, ids: Iterable[int], params: SamplingParams) -> list[Answer]:
        """The `params.n` answers to a prompt, which is run once; each is what it is without others.

        They are rows of one cache, and a pass gives each of them a token; of `best_of` the n
        likeliest are given, the likeliest first. Raises RequestError before anything runs,
        NumericsError if nothing can be sampled. Afterwards the engine holds the prompt.
        """
        if not check_params(params).selects:
            return self._together(ids, params)
        summed = replace(params, n=params.samples, best_of=None, logprobs=params.logprobs or 0)
        answers = self._together(ids, summed)
        best = sorted(answers, key=lambda answer: -answer.cumulative_logprob)[: params.n]
        return best if params.logprobs is not None else [replace(a, logprobs=None) for a in best]

    def streams(
        self, ids: Iterable[int], params: SamplingParams, tokens: Tokens | None = None
    ) -> Iterator[Stream]:
        """The same answers as streams, one after another: each is run to its end, or closed, first.

        The stats of each begin with its turn. tokens: what makes a Run's ids, given the prompt and
        a function that runs it and returns the logits [1, V] that follow; by default, a step a
        token. RequestError, as `answers`, and for best_of > 1.
        """
        check_params(params).check_stream("answers")
        prompt, params = self._checked(ids), self._checked_params(params)
        make = self._tokens if tokens is None else tokens
        held: list[
            tuple[int, Tensor]
        ] = []  # the rewinds so far, the logits [1, V] after the prompt

        def start() -> Tensor:
            if held and held[0][0] == self._rewinds:  # the prompt is still there: nobody else came
                after_prompt = held[0][1]
                self.rewind(len(prompt))
            else:
                after_prompt = self.prefill(prompt)
            held[:] = [(self._rewinds, after_prompt)]
            return after_prompt

        runs = (self._run_of(prompt, params, sample) for sample in range(params.n))
        return (
            Stream(make(r, prompt, start), r.stats, r.logprobs, prompt, self.one_thread)
            for r in runs
        )

    def _together(self, ids: Iterable[int], params: SamplingParams) -> list[Answer]:
        """All answers at once, each a row of the cache; those that have ended leave the steps."""
        prompt, params = self._checked(ids), self._checked_params(params)
        n, steps = params.n, StepTimes(self.model.device)
        runs = [self._run_of(prompt, params, sample, steps) for sample in range(n)]
        if runs[0].limit > 0:
            after_prompt = self.prefill(prompt)  # [1, V]
            try:
                self._make_room(n, len(prompt))
                sampling = self.sampling([params] * n, range(n), [Prefix(prompt)] * n)
                self._run_rows(runs, after_prompt, sampling)
            finally:
                if self._kv.rows > self.rows:
                    self._resize(self.rows, self._kv.capacity)
                self.rewind(len(prompt))
        return [run.answer() for run in runs]

    def _run_rows(self, runs: list[Run], after_prompt: Tensor, sampling: SamplingRows) -> None:
        """Run to the ends. A recorded step keeps its number of rows: what they say is not heard."""
        live = list(runs)  # of row 0, row 1, ...
        for row in range(1, len(live)):
            self._copy_row(0, row)
        tokens = self._draw(after_prompt.expand(len(live), -1), sampling)
        while True:
            self._take(tokens, live)
            gone = [row for row, run in enumerate(live) if run.ended]
            if len(gone) == len(live):
                return
            if gone and not self.recorded:
                tokens = self._without(gone, live)
            tokens = self._timed_step(tokens, live[0])

    def _without(self, gone: list[int], live: list[Run]) -> Tensor:
        """Take rows out: the last ones move to where they were. Returns the tokens [R] left."""
        step, order = self._drawn(), list(range(len(live)))
        for row in reversed(gone):
            last = len(live) - 1
            if row != last:
                self._copy_row(last, row)
            live[row], order[row] = live[last], order[last]
            del live[last], order[last]
        which = torch.tensor(order, device=step.tokens.device)
        return self._go_on(step.tokens[which], step.sampling.select(which))

    def _run_of(
        self, prompt: list[int], params: SamplingParams, sample: int, steps: StepTimes | None = None
    ) -> Run:
        assert params.seed is not None
        room = self.max_seq_len - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        stats = Stats(len(prompt), params.seed, steps=steps or StepTimes(self.model.device))
        if limit == 0:
            stats.finish_reason = "length"
        records: list[TokenLogprobs] | None = None if params.logprobs is None else []
        return Run(params, sample, limit, self.model.config.eos_ids, stats, records)

    def sampling(
        self, params: Sequence[SamplingParams], samples: Sequence[int], prefixes: Sequence[Prefix]
    ) -> SamplingRows:
        """How rows of these parameters are sampled, that have these tokens before them."""
        config = self.model.config
        of_model = (config.eos_ids, config.vocab_size)
        return SamplingRows.of(params, self.model.device, samples, prefixes, *of_model)

    def _tokens(
        self, run: Run, prompt: list[int], start: Callable[[], Tensor]
    ) -> Generator[int, None, None]:
        """The answer's ids; `start` runs the prompt and gives the logits [1, V] that follow it."""
        if run.limit == 0:
            return
        sampling = self.sampling([run.params], [run.sample], [Prefix(prompt)])
        tokens = self._draw(start(), sampling)
        while True:
            self._take(tokens, [run])
            with self.alone(run):
                yield run.token_ids[-1]
            if run.ended:
                return
            tokens = self._timed_step(tokens, run)

    @contextmanager
    def alone(self, run: Run) -> Iterator[None]:
        """RequestError, after the block, if it gave the engine other tokens and the run goes on."""
        changes = self.changes
        yield
        if self.changes != changes and not run.ended:
            raise RequestError(
                "the engine was given other tokens before this stream had ended; one stream "
                "at a time, or an engine each"
            )

    def _timed_step(self, tokens: Tensor, run: Run) -> Tensor:
        with self.timed(run):
            return self.step(tokens)

    @contextmanager
    def timed(self, run: Run) -> Iterator[None]:
        """Steps of this block are timed in the stats of the run."""
        self.times = run.stats.steps
        try:
            yield
        finally:
            self.times = None

    def _take(self, tokens: Tensor, runs: list[Run]) -> None:
        """Read the tokens [R] that were drawn, with their log-probabilities if asked for."""
        k = runs[0].params.logprobs
        columns = tokens[:, None, None] if k is None else logprob_table(self.logits, tokens, k)
        rows = columns.tolist()  # the one copy from the device
        for row, (run, values) in enumerate(zip(runs, rows, strict=True)):
            if run.ended:
                continue
            if values[0][0] < 0:
                refuse_logits(self.logits[row], self.lengths[row])
            run.take(values)

    def _check_single(self, params: SamplingParams) -> None:
        params.check_stream("answers")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream is one answer; use Engine.answers for more")

    def _checked_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed; RequestError for what token ids alone cannot honour."""
        if params.stop:
            raise RequestError(
                "stop: token ids have no text to look for it in; expected the text form, "
                "spindle.decode.text.stream_text"
            )
        params.check_ids(self.model.config.vocab_size)
        return params.seeded()


def refuse_logits(logits: Tensor, position: int) -> NoReturn:
    """NumericsError: why no token could be sampled from logits [V] for this position."""
    where = f"the logits for position {position}"
    if logits.amax().isfinite():
        raise NumericsError(
            f"{where} leave nothing to sample: only tokens that would end the answer are "
            "possible, and min_tokens forbids them; lower min_tokens"
        )
    raise NumericsError(
        f"{where} are no distribution (NaN, +inf, or all -inf); the weights or the dtype are "
        "at fault"
    )


def params_of(max_new_tokens: int | None, sampling: dict[str, Any]) -> SamplingParams:
    """The parameters of one answer from keywords. RequestError: in the words of these."""
    for name in sampling:
        if name not in (*OPTIONS, "n", "best_of", "stop"):  # those are refused in better words
            raise RequestError(
                f"{brief(name)}: no such option; expected one of {', '.join(OPTIONS)}"
            )
    try:
        return SamplingParams(max_tokens=max_new_tokens, **sampling)
    except RequestError as error:
        raise RequestError(str(error).replace("max_tokens", "max_new_tokens")) from None
