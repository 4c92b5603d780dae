"""What an LLM says of a request: its answers as far as they are, and when things happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.stats import Speculation
from spindle.serve.request import Request, Sequence

Words = Callable[[Sequence], str]  # an answer's text so far, "" without a tokenizer


@dataclass(slots=True)
class Completion:
    """One of a request's answers, as far as it is; `finish_reason` is None until it has ended.

    It is "stop", "length", "abort" or "error" then; `stop_reason` is the stop string or the stop
    id, None for an EOS. `index` is the number by which it draws its random numbers; of a beam
    search, its rank.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None  # the sum of the tokens' logprobs, if anything asked for it
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Metrics:
    """When things happened to a request, in seconds of the engine's clock; None: not yet."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float | None
    preemptions: int
    cached_tokens: int
    speculation: Speculation | None = None  # of all its answers; None: no drafts are made


@dataclass(slots=True)
class RequestOutput:
    """A request as a whole, as far as it is."""

    request_id: str
    prompt_ids: list[int]
    outputs: list[Completion]
    finished: bool
    seed: int
    metrics: Metrics


@dataclass(slots=True)
class Delta:
    """What one step added to an answer."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None


def output_of(request: Request, words: Words) -> RequestOutput:
    """The request as it is now."""
    assert request.params.seed is not None
    return RequestOutput(
        request.id,
        request.prompt.copy(),
        [_completion(one, words(one)) for one in _given(request)],
        request.is_finished,
        request.params.seed,
        Metrics(
            request.arrival,
            request.scheduled,
            request.first_token,
            request.last_token,
            request.finished,
            request.preemptions,
            request.cached_tokens,
            Speculation.total(one.speculation for one in request.sequences),
        ),
    )


def _given(request: Request) -> list[Sequence]:
    """The answers that the user gets: of more than were asked for, the likeliest at the end."""
    sequences, params = request.sequences, request.params
    if not (params.selects and request.is_finished):
        return sequences
    broken = ("error", "abort")
    ranked = sorted(sequences, key=lambda one: (one.finish_reason in broken, -one.cumulative))
    return ranked[: params.n]


def _completion(sequence: Sequence, text: str) -> Completion:
    request = sequence.request
    wanted = request.params.logprobs is not None
    summed = wanted or request.params.selects or request.beam is not None
    return Completion(
        sequence.sample,
        text,
        sequence.output,
        sequence.logprobs.copy() if wanted else None,
        sequence.cumulative if summed else None,
        sequence.finish_reason,
        sequence.stop_reason,
    )
