"""What /metrics says: counts and times of the engine and of its requests, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spindle.serve.outputs import Completion, RequestOutput

GAUGES = {  # name -> the key of LLM.stats, what it means
    "spindle_sequences_waiting": (
        "waiting",
        "Sequences in the queue: for a seat (max_seqs) or for KV blocks. A request is one of them "
        "until its prompt has been read, however many answers it asks for.",
    ),
    "spindle_sequences_running": ("running", "Sequences that have a part in every step."),
    "spindle_blocks_total": ("blocks_total", "KV blocks of the pool."),
    "spindle_blocks_held": (
        "blocks_held",
        "KV blocks that sequences hold, a shared one counted once; at blocks_total the youngest "
        "sequence is preempted.",
    ),
    "spindle_blocks_cached": (
        "blocks_cached",
        "KV blocks that nobody holds and that are remembered for a prompt that begins like theirs; "
        "they are free to take.",
    ),
}
COUNTS = {  # name -> the key of LLM.stats, what it means
    "spindle_steps": ("steps", "Passes of the model over the tokens of a step."),
    "spindle_drafts_proposed": ("proposed", "Drafted tokens that went through the model."),
    "spindle_drafts_accepted": (
        "accepted",
        "Drafted tokens that the model accepted; by spindle_drafts_proposed it is the share of the "
        "drafts that was worth its pass.",
    ),
}
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # between two tokens
WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # for an end


@dataclass
class _Seen:
    """How far a request was when it was last looked at."""

    arrival_s: float
    preemptions: int = 0
    tokens: dict[int, int] = field(default_factory=dict)  # of each answer
    token_s: dict[int, float] = field(default_factory=dict)  # when the newest of them came


class Meter:
    """Counts what the engine's thread tells it, in a registry of its own; times are in seconds.

    A time between tokens is a step's time by the tokens that it gave. A request without a token has
    no time to the first one, and one that was aborted has no time to its end.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: dict[str, _Seen] = {}
        self._stats: Mapping[str, int] = {}
        self._gauges = {key: self._gauge(name, text) for name, (key, text) in GAUGES.items()}
        self._counts = {key: self._counter(name, text) for name, (key, text) in COUNTS.items()}
        self._prompt_tokens = self._counter(
            "spindle_prompt_tokens", "Tokens of the prompts that were read."
        )
        self._cached_tokens = self._counter(
            "spindle_cached_prompt_tokens",
            "Those of them whose keys and values were there, from a prompt that began alike.",
        )
        self._output_tokens = self._counter("spindle_output_tokens", "Tokens of answers.")
        self._preemptions = self._counter(
            "spindle_preemptions",
            "Times that a sequence lost its blocks to an older one, and had to be put back later.",
        )
        text = "Answers that ended, by why: stop, length, abort (the client left), error."
        self._answers = self._counter("spindle_answers", text, "finish_reason")
        text = "Responses by HTTP status; 429: the queue was full; 499: the client had left."
        self._responses = self._counter("spindle_http_responses", text, "status")
        text = "Seconds from a request's arrival to its first token: the queue, then the prompt."
        self._ttft = self._histogram("spindle_ttft_seconds", text, WAIT_S)
        text = "Seconds between two tokens of an answer, as its client may see them."
        self._itl = self._histogram("spindle_itl_seconds", text, TOKEN_S)
        text = "Seconds from a request's arrival to the last token of all its answers."
        self._e2e = self._histogram("spindle_e2e_seconds", text, WAIT_S)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def responded(self, status: int) -> None:
        """A response was begun, or would have been if its client had not left."""
        self._responses.labels(str(status)).inc()

    def arrived(self, name: str, arrival_s: float) -> None:
        """The engine has a request that came to us then."""
        self._seen[name] = _Seen(arrival_s)

    def note(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """What a step gave; it ended now."""
        for output in outputs:
            seen = self._seen[output.request_id]
            self._note_tokens(seen, output, now_s)
            self._preemptions.inc(output.metrics.preemptions - seen.preemptions)
            seen.preemptions = output.metrics.preemptions
            if output.finished:
                self.ended(output)
                self._e2e.observe(now_s - seen.arrival_s)

    def ended(self, output: RequestOutput) -> None:
        """A request is over; it is forgotten."""
        del self._seen[output.request_id]
        if output.metrics.first_token is not None:
            self._prompt_tokens.inc(len(output.prompt_ids))
            self._cached_tokens.inc(output.metrics.cached_tokens)
        for answer in output.outputs:
            self._answers.labels(answer.finish_reason).inc()

    def stands(self, stats: Mapping[str, int]) -> None:
        """How things stand in the engine: `LLM.stats`."""
        for key, gauge in self._gauges.items():
            gauge.set(stats[key])
        for key, counter in self._counts.items():
            counter.inc(stats[key] - self._stats.get(key, stats[key]))
        self._stats = stats

    # --- the parts of the above -----------------------------------------------------------------

    def _note_tokens(self, seen: _Seen, output: RequestOutput, now_s: float) -> None:
        if not seen.tokens and any(answer.token_ids for answer in output.outputs):
            self._ttft.observe(now_s - seen.arrival_s)
        for answer in output.outputs:
            self._note_answer(seen, answer, now_s)

    def _note_answer(self, seen: _Seen, answer: Completion, now_s: float) -> None:
        new = len(answer.token_ids) - seen.tokens.get(answer.index, 0)
        if new == 0:
            return
        self._output_tokens.inc(new)
        if answer.index in seen.token_s:
            for _ in range(new):
                self._itl.observe((now_s - seen.token_s[answer.index]) / new)
        seen.tokens[answer.index] = len(answer.token_ids)
        seen.token_s[answer.index] = now_s

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)
