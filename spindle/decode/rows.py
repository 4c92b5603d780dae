"""StaticRows: a few sequences over a static cache, a row at a time or all of them in one step.

A step's work is the same whatever the lengths are: `DecodeStep` has it as one function over
tensors that stay where they are, and `graphs.enable` has it replayed instead of run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spindle.decode.params import check_bool, check_count, check_prompt
from spindle.decode.sampling import SamplingRows
from spindle.decode.stats import StepTimes
from spindle.decode.step import ChunkStep, DecodeStep
from spindle.errors import RequestError, shown
from spindle.interrupts import held_back
from spindle.kvcache.static import StaticKV
from spindle.model.layers import Model
from spindle.threads import NoCopies, OneThread, by_one_thread
from spindle.tokenizer import check_ids

FIRST_CAPACITY = 256  # tokens a row; doubled when one is full, up to max_seq_len
Body = Callable[[], None]


class StaticRows(NoCopies):
    """The sequences of an engine: what they have stored, and the steps that lengthen them.

    `seq_lens` [rows] on the device says how many tokens each row has stored; `lengths` says it on
    the host. Both are written here alone; `rewind` makes a row shorter. When a row is full the
    cache doubles, up to max_seq_len, and the steps are made anew over the larger one.
    """

    lengths: list[int]
    _last: DecodeStep | None  # whose tokens were drawn last

    def __init__(
        self, model: Model, max_seq_len: int | None, prefill_chunk: int, rows: int, keep_probs: bool
    ) -> None:
        self.one_thread = OneThread(type(self).__name__)
        if not hasattr(model, "config"):
            raise RequestError(f"model={shown(model)}: expected a loaded model (see load_hf)")
        check_bool("keep_probs", keep_probs)
        limit = model.config.max_positions
        self.model, self.keep_probs = model, keep_probs
        self.max_seq_len = check_count("max_seq_len", limit if max_seq_len is None else max_seq_len)
        self.prefill_chunk = check_count("prefill_chunk", prefill_chunk)
        self.rows = check_count("rows", rows)
        if self.max_seq_len > limit:
            raise RequestError(
                f"max_seq_len={shown(max_seq_len)}: the model has "
                f"{model.config.positions_in_words()}"
            )
        self._record: Callable[[Any], Body] | None = None
        self._fixed_shapes = False
        self.times: StepTimes | None = None  # where each step notes how long it took
        self.changes = 0  # to the sequences, by whomever: a stream sees if it was not alone
        self._rewinds = 0  # times that something stored was given up
        self._last, self._settled = None, True
        kv = self._new_cache(self.rows, min(FIRST_CAPACITY, self.max_seq_len))
        self._take_over(kv, [0] * self.rows)

    @by_one_thread
    def record_with(self, record: Callable[[Any], Body] | None, fixed_shapes: bool = True) -> None:
        """Have each step recorded by this when it is first run, then replayed (`graphs.enable`).

        record: gets a DecodeStep or a ChunkStep, returns what to call instead of its `run`. None:
        run them as ever. fixed_shapes: draw in operations that are the same whatever the logits
        are, as is needed where the draw is recorded. RequestError: it cannot be called.
        """
        if record is not None and not callable(record):
            raise RequestError(f"record={shown(record)}: expected a function of a step, or None")
        self._record, self._fixed_shapes = record, record is not None and fixed_shapes
        self._forget_steps()

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded and replayed."""
        return self._record is not None

    @property
    def length(self) -> int:
        """Tokens stored in the first row."""
        return self.lengths[0]

    # --- a row at a time -------------------------------------------------------------------------

    @by_one_thread
    def prefill(self, ids: Iterable[int], row: int = 0) -> Tensor:
        """Start a row over with this prompt; returns the logits [1, V] that follow it.

        RequestError, and nothing has changed: no prompt, a bad one, too long, or no such row.
        """
        prompt = self._checked(ids)
        self._check_row(row)
        self.rewind(0, row)
        return self._extend(prompt, row)

    @by_one_thread
    def extend(self, ids: Iterable[int], row: int = 0) -> Tensor:
        """Append tokens to a row; returns the logits [1, V] that follow the last of them.

        RequestError, and nothing has changed: no tokens, a bad one, no room, or no such row.
        """
        self._check_row(row)
        more = check_ids(ids, self.model.config.vocab_size, start=self.lengths[row])
        if not more:
            raise RequestError("no tokens to extend the sequence by; expected one at least")
        self._check_room([self.lengths[row]], len(more))
        return self._extend(more, row)

    @by_one_thread
    def rewind(self, length: int, row: int = 0) -> None:
        """Make a row that short; what it had stored beyond is written anew. RequestError."""
        self._check_row(row)
        check_count("length", length, 0)
        if length > self.lengths[row]:
            raise RequestError(
                f"length={length}: row {row} has stored {self.lengths[row]} tokens; expected 0 to "
                "that many"
            )
        self._rewinds += 1
        self.shorten(int(length), row)

    @by_one_thread
    def shorten(self, length: int, row: int = 0) -> None:
        """`rewind` by one who gives up no more than the drafts that it appended itself."""
        self.changes += 1
        with self._changing():
            self.lengths[row] = length
            self.seq_lens[row] = length

    @by_one_thread
    def reserve(self, tokens: int) -> None:
        """Make the cache large enough for as many tokens a row now. RequestError: max_seq_len."""
        self._check_room([0], check_count("tokens", tokens))
        self._make_room(self.rows, tokens)

    def _extend(self, ids: list[int], row: int) -> Tensor:
        """Run ids on top of what is stored, a chunk at a time; logits [1, V] of the last one."""
        self.changes += 1
        self._make_room(self.rows, self.lengths[row] + len(ids))
        for at in range(0, len(ids), self.prefill_chunk):
            chunk = ids[at : at + self.prefill_chunk]
            view = self._kv.prefill(row, self.lengths[row], len(chunk))
            hidden = self.model(torch.tensor(chunk, device=self.model.device), view)  # [T, E]
            with self._changing():
                self.lengths[row] += len(chunk)
                self.seq_lens[row] = self.lengths[row]
        return self.model.logits(hidden[-1:])

    # --- all of them in a step -------------------------------------------------------------------

    @by_one_thread
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each of the first R rows; returns the next ones, [R], drawn.

        tokens [R]: those that were returned last, or others, int64 on the device. Fills `logits`
        [R, V], and with keep_probs `probs` [R, V]; these and what is returned are overwritten by
        the next step. A row from which nothing can be drawn gets -1, and is of no account from then
        on. Nothing waits for the device, so a GPU is not asked whether the tokens are ids.
        RequestError before the step: nothing was begun, other rows than those, or one is full.
        """
        step = self._drawn()
        R = len(step.tokens)
        own = tokens is step.tokens
        if not own:
            self._check_tokens(tokens, step.tokens.shape)
        self._check_room(self.lengths[:R], 1)
        if self._make_room(R, max(self.lengths[:R]) + 1):
            step = self._drawn()  # over the larger cache, and with the tokens of the other
        if not own:
            step.tokens.copy_(tokens)
        self._run(step, R, 1)
        return step.tokens

    @by_one_thread
    def chunk(self, tokens: Tensor) -> Tensor:
        """Append C given tokens to each of the first R rows; the logits after each, [R, C, V].

        tokens [R, C], int64 on the device. The logits are overwritten by the next chunk of that
        shape. RequestError before the step: other tensors, or a row has no room for C.
        """
        self._check_tokens(tokens)
        (R, C), key = tokens.shape, tuple(tokens.shape)
        self._check_row(R - 1)
        self._check_room(self.lengths[:R], C)
        self._make_room(R, max(self.lengths[:R]) + C)
        if key not in self._chunks:
            self._chunks[key] = ChunkStep(self.model, self._kv, self.seq_lens[:R], C)
        self._chunks[key].tokens.copy_(tokens)
        self._run(self._chunks[key], R, C)
        return self._chunks[key].logits

    @property
    def logits(self) -> Tensor:
        """The logits [R, V] that the last tokens were drawn from. RequestError: none were."""
        return self._drawn().logits

    @property
    def probs(self) -> Tensor:
        """The distribution [R, V] that they were drawn from. RequestError: needs keep_probs."""
        probs = self._drawn().probs
        if probs is None:
            raise RequestError("probs: not kept; expected Engine(model, keep_probs=True)")
        return probs

    def _draw(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The tokens [R] that follow from the prompts' logits [R, V]; `step` goes on from them."""
        step = self._step_for(sampling)
        step.logits.copy_(logits)
        step.draw()
        return step.tokens

    def _go_on(self, tokens: Tensor, sampling: SamplingRows) -> Tensor:
        """Have `step` go on with these tokens [R] and rows; returns the tokens."""
        step = self._step_for(sampling)
        step.tokens.copy_(tokens)
        return step.tokens

    def _step_for(self, sampling: SamplingRows) -> DecodeStep:
        """The step of rows of that kind, over tensors of its own, with these values in them."""
        R = len(sampling.seed)
        key = (R, *sampling.kind)
        if key not in self._steps:
            own = sampling.select(torch.arange(R, device=sampling.seed.device))
            own = replace(own, fixed_shapes=self._fixed_shapes)
            lengths = self.seq_lens[:R]
            self._steps[key] = DecodeStep(self.model, self._kv, lengths, own, self.keep_probs)
        self._last = self._steps[key]
        self._last.sampling.load(sampling)
        return self._last

    def _copy_row(self, source: int, target: int) -> None:
        """Have row `target` store what row `source` has."""
        self._kv.fork(source, target)
        self.lengths[target] = self.lengths[source]
        self.seq_lens[target] = self.lengths[target]

    def _drawn(self) -> DecodeStep:
        if self._last is None:
            raise RequestError("nothing has been begun; expected begin(prompts, params) first")
        return self._last

    def _run(self, step: DecodeStep | ChunkStep, rows: int, count: int) -> None:
        """Run the step, or replay it; whatever breaks it off, it has then not been."""
        self.changes += 1
        before = [(tensor, tensor.clone()) for tensor in step.inputs()]
        after = [n + count if row < rows else n for row, n in enumerate(self.lengths)]
        try:
            with self._changing():
                if step not in self._bodies:
                    self._bodies[step] = step.run if self._record is None else self._record(step)
                if self.times is not None:
                    self.times.start()
                self._bodies[step]()
                if self.times is not None:
                    self.times.stop()
                self.lengths = after
        except BaseException:  # an interrupt too
            if self.lengths is not after:
                for tensor, value in before:
                    tensor.copy_(value)
            self._settle()
            raise

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lengths are about to differ on host and device; broken off, the host's hold."""
        self._settle()
        self._settled = False
        yield
        self._settled = True

    def _settle(self) -> None:
        if not self._settled:
            self.seq_lens.copy_(torch.tensor(self.lengths))
            self._settled = True

    # --- memory ----------------------------------------------------------------------------------

    def _make_room(self, rows: int, tokens: int) -> bool:
        """At least as many rows and tokens a row; whether the cache is another one now."""
        old = self._kv
        if rows <= old.rows and tokens <= old.capacity:
            return False
        doubled = max(old.capacity, 1 << (tokens - 1).bit_length())
        self._resize(max(rows, old.rows), min(doubled, self.max_seq_len))
        return True

    def _resize(self, rows: int, capacity: int) -> None:
        """A cache of that size, with what the rows of the old one have stored."""
        old, kept = self._kv, min(rows, self._kv.rows)
        kv, lengths = self._new_cache(rows, capacity), (self.lengths + [0] * rows)[:rows]
        for new, before in ((kv.keys, old.keys), (kv.values, old.values)):
            new[:, :kept, : old.capacity] = before[:, :kept]
        self._take_over(kv, lengths)

    def _take_over(self, kv: StaticKV, lengths: list[int]) -> None:
        """Have another cache; the steps of the old one are forgotten, as they write to that."""
        seq_lens = torch.tensor(lengths, device=self.model.device)
        with held_back():
            self._kv, self.lengths, self.seq_lens, self._settled = kv, lengths, seq_lens, True
            self._forget_steps()

    def _new_cache(self, rows: int, capacity: int) -> StaticKV:
        """An empty cache of that size. RequestError: no memory."""
        model = self.model
        try:
            return StaticKV(model.config, rows, capacity, model.dtype, model.device)
        except RuntimeError as cause:  # torch has no narrower one for a CPU
            size = rows * capacity * model.config.kv_bytes(model.dtype.itemsize)
            raise RequestError(
                f"no memory for {rows} rows of {capacity} tokens: {size / 1e9:.1f} GB of keys and "
                "values; lower max_seq_len"
            ) from cause

    def _forget_steps(self) -> None:
        """Make the steps anew when they are needed; at once the one that has been begun."""
        self._steps: dict[tuple[int, ...], DecodeStep] = {}
        self._chunks: dict[tuple[int, ...], ChunkStep] = {}
        self._bodies: dict[DecodeStep | ChunkStep, Body] = {}
        begun, self._last = self._last, None
        if begun is not None and len(begun.tokens) <= self._kv.rows:
            self._last = self._again(begun)

    def _again(self, step: DecodeStep) -> DecodeStep:
        """The same step over the cache as it is: its tokens, and what its rows have counted."""
        R, sampling = len(step.tokens), replace(step.sampling, fixed_shapes=self._fixed_shapes)
        made = DecodeStep(self.model, self._kv, self.seq_lens[:R], sampling, self.keep_probs)
        made.tokens = step.tokens  # the caller may have it
        made.logits.copy_(step.logits)
        if made.probs is not None and step.probs is not None:
            made.probs.copy_(step.probs)
        self._steps[(R, *sampling.kind)] = made
        return made

    # --- what is refused -------------------------------------------------------------------------

    def _checked(self, ids: Iterable[int]) -> list[int]:
        return check_prompt(ids, self.model.config.vocab_size, self.max_seq_len)

    def _check_row(self, row: int) -> None:
        whole = isinstance(row, int) and not isinstance(row, bool)
        if not whole or not 0 <= row < len(self.lengths):
            last = len(self.lengths) - 1
            raise RequestError(f"row {shown(row)}: the engine has rows 0 to {last}")

    def _check_tokens(self, tokens: Tensor, shape: Sequence[int] | None = None) -> None:
        """RequestError for what is no tensor of ids; on a GPU their values are not looked at."""
        device, V = self.model.device, self.model.config.vocab_size
        want = "[R, C]" if shape is None else str(list(shape))
        right = f"torch.int64 {want} on {device}"
        if not isinstance(tokens, Tensor):
            raise RequestError(f"tokens={shown(tokens)}: expected a tensor, {right}")
        fits = tokens.ndim == 2 and 0 not in tokens.shape
        fits = fits if shape is None else tokens.shape == torch.Size(shape)
        if not fits or tokens.dtype != torch.int64 or tokens.device != device:
            got = f"{tokens.dtype} {list(tokens.shape)} on {tokens.device}"
            raise RequestError(f"tokens are {got}; expected {right}")
        if device.type == "cpu":
            check_ids(tokens.flatten(), V)

    def _check_room(self, lengths: Sequence[int], count: int) -> None:
        for length in lengths:
            if length + count > self.max_seq_len:
                raise RequestError(
                    f"the sequence is full: {length} of {self.max_seq_len} tokens, and "
                    f"{shown(count)} more to come"
                )
