"""Request: what a user asked for. Sequence: one answer to it on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from spindle.decode.beam import Beam
from spindle.decode.drafters import Drafter
from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.pace import Pace
from spindle.decode.params import SamplingParams
from spindle.decode.stats import Speculation
from spindle.kvcache.blocks import BlockTable


@dataclass(eq=False)
class Request:
    """A prompt, how to sample, and what became of it; times are in seconds of the engine's clock.

    `order` counts arrivals: the smaller is the older, whatever the clock says.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    order: int
    arrival: float
    beam: Beam | None = None  # a beam search: its sequences are planned and preempted as one
    scheduled: float | None = None  # first planned
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when first planned
    preemptions: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all of its answers have ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def width(self) -> int:
        """Sequences that it becomes after its prompt."""
        return self.params.samples if self.beam is None else self.beam.width


class Sequence:
    """One answer: its ids, its blocks, and how many of its ids are stored in them.

    `table` and `stored` belong to the scheduler. A sequence that is not running holds no blocks of
    the device; a swapped one has a table of the host's pool.
    """

    def __init__(self, request: Request, sample: int, ids: list[int], table: BlockTable) -> None:
        self.request, self.sample = request, sample  # which of the request's answers
        self.ids, self.table = ids, table  # prompt and output
        self.stored = 0
        self.draft_stored: int | None = None  # of a draft model, in the same blocks; None: no model
        self.drafts: list[int] = []  # guessed to follow, for the next step to look at
        self.drafter: Drafter | None = None  # its own, if it guesses from ids
        self.pace: Pace | None = None  # how many drafts it has next
        self.swapped = False
        self.waits_for_ending = -1  # a preempted one resumes after that many endings
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative = 0.0  # sum of its tokens' logprobs, where somebody asks for it
        self.finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
        self.stop_reason: int | str | None = None
        self.speculation: Speculation | None = None  # what became of its drafts, if there are any

    @property
    def known(self) -> int:
        """Of its first ids, how many every cache has stored."""
        return self.stored if self.draft_stored is None else min(self.stored, self.draft_stored)

    def store(self, stored: int) -> None:
        """So many are in the caches now: none of a new table, or what was remembered."""
        self.stored = stored
        if self.draft_stored is not None:
            self.draft_stored = stored

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return self.request.order, self.sample

    @property
    def output(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[len(self.request.prompt) :]

    @property
    def new_tokens(self) -> int:
        """How many ids there are after the prompt."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Ids that are not stored yet: 1 in a decode, more before that."""
        return len(self.ids) - self.stored

    @property
    def width(self) -> int:
        """The seats that it takes: all of its request's before the first token, then 1.

        A beam search keeps its seats until it ends: the first takes those that are not in use.
        """
        request = self.request
        leads = request.beam is not None and request.sequences[:1] == [self]
        if self.new_tokens == 0 or leads:
            return request.width - len(request.sequences) + 1
        return 1

    def __repr__(self) -> str:
        return f"{self.request.id}.{self.sample} ({self.stored} of {len(self.ids)} stored)"
