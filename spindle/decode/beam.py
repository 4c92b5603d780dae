"""Beam search: of all ways to go on, the `width` likeliest are kept at every length.

A candidate is a live beam and one more token; its cumulative logprob is the sum over the answer's
tokens. Of the `considered` likeliest candidates those that end (EOS) are hypotheses if they are
among the first `width`, and the others live on, `width` of them. Hypotheses are compared by

    score = cumulative logprob / tokens ** length_penalty

with the EOS counted (Wu et al. 2016, section 7, in the simple form of Hugging Face's `generate`,
whose rules these are). The search ends at the longest length, or when no live beam can overtake the
worst of `width` hypotheses any more; no guess is made there (`early_stopping="never"`). A width of
1 is a search too, and not greedy decoding: where the likeliest token ends, the next one lives on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Pick(NamedTuple):
    """A beam that lives on: the number of the one that it continues, its token, its sum."""

    parent: int
    token: int
    cumulative: float


@dataclass(frozen=True)
class Hypothesis:
    """An answer that has ended: its ids, the sum of their logprobs, its score, how it ended."""

    ids: list[int]
    cumulative: float
    score: float
    finish_reason: str  # "stop" | "length"


@dataclass
class Beam:
    """A search on its way. limit: tokens of an answer at most; end_ids: those that end one."""

    width: int
    limit: int
    length_penalty: float = 1.0
    end_ids: Collection[int] = ()
    hypotheses: list[Hypothesis] = field(default_factory=list)  # the best first, `width` at most

    @property
    def considered(self) -> int:
        """Candidates to look at: with so many, `width` do not end, whichever they are."""
        return self.width * max(2, 1 + len(self.end_ids))

    def advance(
        self,
        beams: Sequence[tuple[list[int], float]],
        candidates: Sequence[Sequence[tuple[int, float]]],
    ) -> list[Pick]:
        """One more token: `beams` are (ids, cumulative), the `candidates` of each (token, logprob).

        Returns who lives on, the likeliest first; none when the search has ended. Of equal
        candidates the one of the likelier beam comes first, then the lower id.
        """
        every = [
            Pick(parent, token, beams[parent][1] + logprob)
            for parent, its in enumerate(candidates)
            for token, logprob in its
        ]
        every.sort(key=lambda pick: (-pick.cumulative, pick.parent, pick.token))
        live = list[Pick]()
        for rank, pick in enumerate(every[: self.considered]):
            ids = [*beams[pick.parent][0], pick.token]
            if pick.token in self.end_ids:
                if rank < self.width:
                    self._keep(ids, pick.cumulative, "stop")
            elif len(live) < self.width:
                live.append(pick)
                if len(ids) == self.limit:
                    self._keep(ids, pick.cumulative, "length")
        return [] if not live or self._decided(live[0], len(ids)) else live

    def score(self, cumulative: float, tokens: int) -> float:
        """By what hypotheses are compared; the larger is the better."""
        return float(cumulative / tokens**self.length_penalty)

    def _keep(self, ids: list[int], cumulative: float, reason: str) -> None:
        self.hypotheses.append(
            Hypothesis(ids, cumulative, self.score(cumulative, len(ids)), reason)
        )
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[self.width :]

    def _decided(self, best: Pick, tokens: int) -> bool:
        """Whether no beam can become one of the `width` best: a sum of logprobs never grows."""
        if tokens == self.limit:
            return True
        at = self.limit if self.length_penalty > 0 else tokens
        worst = self.hypotheses[-1].score if len(self.hypotheses) == self.width else None
        return worst is not None and self.score(best.cumulative, at) <= worst
