"""SamplingParams: what one request asks for, checked when it is made."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral, Real
from typing import Any

from spindle.errors import RequestError, shown
from spindle.tokenizer import check_ids

MAX_N = 128  # answers to one prompt
MAX_LOGPROBS = 20  # likeliest tokens reported beside each sampled one
MAX_STOPS = 64  # stop strings: each is compared with every character
MAX_STOP_IDS = 1024


def check_prompt(ids: Iterable[int], vocab_size: int, most: int) -> list[int]:
    """The ids of a prompt as Python integers. RequestError: none, too many, or one out of range."""
    if isinstance(ids, str | bytes):
        raise RequestError("the prompt is text; expected token ids: encode it first")
    if isinstance(ids, Iterator | range):  # there may be no end to it
        ids = list(islice(ids, most + 1))
        if len(ids) > most:
            raise RequestError(f"the prompt has more than {most} tokens; at most {most} fit")
    if (
        isinstance(ids, Sized) and getattr(ids, "ndim", 1) == 1 and len(ids) > most
    ):  # not one by one
        raise RequestError(f"the prompt has {len(ids)} tokens; at most {most} fit")
    prompt = check_ids(ids, vocab_size)
    if not prompt:
        raise RequestError("the prompt has no tokens; expected at least one")
    if len(prompt) > most:  # of an iterable that did not say so
        raise RequestError(f"the prompt has {len(prompt)} tokens; at most {most} fit")
    return prompt


def check_params(params: object) -> SamplingParams:
    """The parameters of a request. RequestError: something else was given."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params: expected SamplingParams, got {type(params).__name__}")
    return params


def check_count(
    name: str, value: object, least: int = 1, words: str = "", most: int | None = None
) -> int:
    """A whole number that an option must be; RequestError names it. `words`: what `least` is."""
    number = isinstance(value, Integral) and not isinstance(value, bool)
    if not number or value < least or (most is not None and value > most):  # type: ignore[operator]
        to = "or more" if most is None else f"to {most}"
        right = f"a whole number of {words or least} {to}"
        raise RequestError(f"{name}={shown(value)}: expected {right}")
    return int(value)  # type: ignore[call-overload]


def check_bool(name: str, value: object) -> bool:
    """True or False, which an option must be; RequestError names it."""
    if not isinstance(value, bool):
        raise RequestError(f"{name}={shown(value)}: expected True or False")
    return value


def check_real(name: str, value: object, low: float, high: float, right: str) -> float:
    """A number that an option must be, `right` in words; RequestError names it."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_real and low <= value <= high):  # type: ignore[operator]
        raise RequestError(f"{name}={shown(value)}: expected {right}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; names, meanings and defaults as in vLLM's class of that name.

    max_tokens: tokens to generate at most; None: as many as the context allows; 0: none.
    temperature: 0 is greedy; else logits are divided by it.
    top_k: keep the k likeliest; 0 or -1: all. Ties go to the lower id: exactly k are kept.
    top_p: keep the smallest set of likeliest tokens that holds this much probability; 1: all.
    min_p: keep tokens at least this fraction as likely as the likeliest; 0: all.
    seed: 0 .. 2**63 - 1; None: one is drawn when the request is made, and reported.
    ignore_eos: go on after an end-of-sequence token.
    min_tokens: tokens that come before any EOS, stop id or the end of a stop string can.
    stop: a string or up to 64, none empty; the answer ends before the first one in its text.
    stop_token_ids: up to 1,024 ids that end the answer, as its last id, besides the EOS ids.
    presence_penalty: -2 .. 2, off the logit of each id that the output has.
    frequency_penalty: -2 .. 2, off the logit of an id for each time that the output has it.
    repetition_penalty: 0.0001 .. 10,000; divides the positive logits, and multiplies the others,
        of the ids that prompt or output have (Keskar et al. 2019, section 4.1); 1: none.
    logprobs: report so many likeliest tokens at each step, 0 .. 20, besides the sampled one; None:
        no log-probabilities at all.
    n: answers to the prompt, 1 .. 128; each draws its own numbers, so greedy ones are all equal.
    best_of: answers that are made, n .. 128, of which the n likeliest are given, the likeliest
        first (the sum of their tokens' logprobs, as reported, decides); None: n. (As in
        OpenAI's completions.)

    `stop` and `stop_token_ids` are kept as tuples, empty for None. Raises RequestError, naming
    the field, on construction.

    Examples:

        >>> from spindle import SamplingParams
        >>> SamplingParams(temperature=0.7, top_p=0.9, stop="END").stop
        ('END',)
        >>> SamplingParams(top_p=2)
        Traceback (most recent call last):
        spindle.errors.RequestError: top_p=2: expected a number above 0 and at most 1
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        self._check_length()
        self._check_shape_of_the_distribution()
        self._set("stop", self._stops())
        self._set("stop_token_ids", self._stop_ids())
        if self.logprobs is not None:
            right = f"a whole number from 0 to {MAX_LOGPROBS}, or None"
            self._whole("logprobs", 0, MAX_LOGPROBS, right)
        self._whole("n", 1, MAX_N, f"a whole number from 1 to {MAX_N}")
        if self.best_of is not None:
            right = f"a whole number from n={self.n} to {MAX_N}, or None"
            self._whole("best_of", self.n, MAX_N, right)

    def seeded(self) -> SamplingParams:
        """The same parameters with a seed: the one they have, or a fresh one."""
        if self.seed is not None:
            return self
        from spindle import parallel  # which brings torch

        return replace(self, seed=parallel.current().number(secrets.randbits(63)))

    @property
    def samples(self) -> int:
        """How many answers are made."""
        return self.best_of or self.n

    @property
    def selects(self) -> bool:
        """Whether the likeliest answers are picked at the end, and come first."""
        return self.samples > 1 and self.best_of is not None

    @property
    def penalises(self) -> bool:
        """Whether logits depend on what the prompt and the output are."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)

    def end_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer, where the model has these EOS ids."""
        return (*(() if self.ignore_eos else eos_ids), *(self.stop_token_ids or ()))

    def end(self, token: int, eos_ids: Sequence[int]) -> tuple[bool, int | None]:
        """Whether this token ends an answer, and the stop reason: the id, or None for an EOS."""
        is_eos = token in eos_ids and not self.ignore_eos
        return token in self.end_ids(eos_ids), None if is_eos else token

    def check_ids(self, vocab_size: int) -> None:
        """RequestError: names a stop id that the model does not have."""
        try:
            check_ids(self.stop_token_ids or (), vocab_size)
        except RequestError as error:
            raise RequestError(f"stop_token_ids: {error}") from None

    def check_stream(self, instead: str) -> None:
        """RequestError if the answers cannot be told as they come; `instead` names what can."""
        if self.selects:
            raise RequestError(
                f"best_of={self.best_of}: which {self.n} are given is known at the end; "
                f"expected `{instead}`, or best_of=None"
            )

    def _check_length(self) -> None:
        most, largest = self.max_tokens, 2**63 - 1
        if most is not None:
            self._whole("max_tokens", 0, largest, "a whole number of 0 or more, or None")
        self._whole("min_tokens", 0, largest, "a whole number of 0 or more")
        if most is not None and self.min_tokens > most:
            self._refuse("min_tokens", f"at most max_tokens={most}")
        check_bool("ignore_eos", self.ignore_eos)

    def _check_shape_of_the_distribution(self) -> None:
        right = "a number from 0 to 10,000 (where all tokens are equal)"
        self._real("temperature", 0, 1e4, right)
        right = "a whole number of 1 or more, or 0 or -1 for all"
        self._whole("top_k", -1, 2**63 - 1, right)
        self._real("top_p", 0, 1, right := "a number above 0 and at most 1")
        if self.top_p == 0:
            self._refuse("top_p", f"{right} (temperature=0 is greedy)")
        self._real("min_p", 0, 1, "a number from 0 to 1")
        if self.seed is not None:
            self._whole("seed", 0, 2**63 - 1, "a whole number from 0 to 2**63 - 1, or None")
        self._real("presence_penalty", -2, 2, "a number from -2 to 2")
        self._real("frequency_penalty", -2, 2, "a number from -2 to 2")
        right = "a number from 0.0001 to 10,000 (1 is no penalty)"
        self._real("repetition_penalty", 1e-4, 1e4, right)

    def _stops(self) -> tuple[str, ...]:
        right = "a string, a list of strings, or None"
        stops = (
            () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        )
        if not isinstance(stops, list | tuple):
            self._refuse("stop", right)
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: {len(stops)} strings; expected at most {MAX_STOPS}")
        for position, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise RequestError(
                    f"stop: {shown(stop)} at position {position}: expected a string, not empty"
                )
        return tuple(stops)

    def _stop_ids(self) -> tuple[int, ...]:
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids
        unordered = isinstance(ids, str | bytes | bytearray | memoryview | Mapping | Set)
        if unordered or not hasattr(ids, "__len__") or getattr(ids, "ndim", 1) != 1:
            self._refuse("stop_token_ids", "a list of token ids, or None")
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids: {len(ids)} ids; expected at most {MAX_STOP_IDS}")
        try:
            return tuple(check_ids(ids))
        except RequestError as error:
            raise RequestError(f"stop_token_ids: {error}") from None

    def _refuse(self, field: str, right: str) -> None:
        raise RequestError(f"{field}={shown(getattr(self, field))}: expected {right}")

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _whole(self, field: str, low: int, high: int, right: str) -> None:
        value = getattr(self, field)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not (is_whole and low <= value <= high):
            self._refuse(field, right)
        self._set(field, int(value))  # numpy's integers become plain ones

    def _real(self, field: str, low: float, high: float, right: str) -> None:
        self._set(field, check_real(field, getattr(self, field), low, high, right))
