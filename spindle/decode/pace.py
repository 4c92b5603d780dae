"""Pace: how many tokens to draft, by what became of a sequence's earlier drafts.

A pass over k + 1 rows gives E(k) = (1 - a^(k+1)) / (1 - a) tokens if each draft is accepted with
probability a (Leviathan et al. 2023, section 3.1). It costs more than a pass over one row: a little
for each row more, and what the drafts cost. `Pace` takes the k that gives most for its price.

Only the sequence's own accepted and rejected drafts count, never the clock or who else is there. So
a request has the same rounds wherever it runs; from a drafter that samples, the same tokens too.
"""

from __future__ import annotations

from spindle.decode.params import check_count

MOST = 32  # drafts a pass
ROW = 0.06  # what a row more costs, in passes over one row, where rows are cheap
MEMORY = 0.95  # of each judged draft, when the next one comes
HOPE = 1.6, 2.0  # before the first: accepted, of so many
REST = 16, 256  # tokens without a draft after one that did not pay: at first, and at most


def check_k(k: object) -> int:
    """RequestError: no number of drafts from 0 to 32."""
    return check_count("k", k, 0, most=MOST)


def tokens_a_pass(a: float, k: int) -> float:
    """E: the tokens that a pass over k drafts gives, each accepted with probability a."""
    return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def levels(k: int) -> list[int]:
    """The numbers of drafts that are used, the largest first: k, halved until nothing is left.

    Few, as a graph is recorded for each.
    """
    return [k, *levels(k // 2)] if k else [0]


class Pace:
    """The number of drafts of one sequence, round by round: ask for `next`, then `note` what came.

    cost: of a draft, in passes of the target over one row. adaptive False: the most that fit.
    """

    def __init__(self, k: int, cost: float = 0.0, adaptive: bool = True) -> None:
        self._levels, self._cost, self._adaptive = levels(check_k(k)), cost, adaptive
        self._accepted, self._judged = HOPE
        self._rest = REST[0]  # the length of the next pause
        self._resting = 0  # tokens that it still lasts

    def next(self, most: int) -> int:
        """How many drafts the next round is to have, `most` at most. Changes nothing."""
        fits = [k for k in self._levels if k <= most]
        if not self._adaptive:
            return fits[0]
        if self._resting:
            return 0
        return max(fits, key=self._gain)

    def note(self, accepted: int, judged: int) -> None:
        """A round had so many drafts accepted, of so many that were judged; none: it had none."""
        if not judged:
            self._resting = max(0, self._resting - 1)
            return
        for n in range(judged):
            self._accepted = self._accepted * MEMORY + (n < accepted)
            self._judged = self._judged * MEMORY + 1
        if accepted:
            self._rest = REST[0]
        if max(self._levels, key=self._gain) == 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, REST[1])
            self._accepted, self._judged = HOPE  # then another try

    def _gain(self, k: int) -> float:
        """Tokens for the price of a pass over one row."""
        price = 1 + k * (ROW + self._cost)
        return tokens_a_pass(self._accepted / self._judged, k) / price
