"""What speculation should gain, by arithmetic from what a pass and a draft cost here.

    E(a, j)   (1 - a^(j+1)) / (1 - a): the tokens of a round whose j drafts are each accepted with
              probability a (Leviathan et al. 2023, equation 1)
    v(n)      a pass over n rows / a pass over one: chapter 06's cost of a pass, here of the chunk
              that a verification runs, at the length of the text
    c         a draft / a pass over one row

A round with j drafts gives E(a, j) tokens for the price of v(j + 1) + j c. With k drafts in every
round speculation decodes E(a, k) / (v(k + 1) + k c) times as fast as plain steps; with v = 1, as
textbooks have it, that is theorem 3.8 of the same paper.

But rounds differ. N-grams propose nothing where the text is new, an adaptive k goes down to 0, and
at the end of an answer there are never more drafts than leave room for one more token. If r_j of
the rounds have j drafts, tokens and prices add up:

    speed-up = sum r_j E(a, j) / sum r_j (v(j + 1) + j c)

A round without drafts is a step: 1 token, at the price of v(1) = 1. So if a share s of the rounds
has k drafts and the others none, it is (s E + 1 - s) / (s (v(k + 1) + k c) + 1 - s). The r_j and a
are counted in the run that is predicted. An end-of-sequence token within an accepted run is not
foreseen, nor that drafts are accepted in streaks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from spindle.bench.spans import Clock
from spindle.decode.drafters import Drafter
from spindle.decode.engine import Engine
from spindle.decode.pace import tokens_a_pass
from spindle.decode.params import SamplingParams
from spindle.decode.sampling import SamplingRows

DRAFTS = 3  # that are timed in a turn, and one before them that is not


# --- the law ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Tokens of a pass, and times as fast as plain steps: with the measured v, and with v = 1."""

    tokens_per_pass: float
    speedup: float
    textbook: float


def predict(
    rounds: Mapping[int, int], a: float | None, v: Callable[[int], float], c: float
) -> Predicted:
    """What follows if `rounds[j]` of the rounds have j drafts, as the module says.

    a: the acceptance rate, None where nothing was drafted; v: of a number of rows; c: of a draft.
    """
    count = sum(rounds.values())
    tokens = sum(r * tokens_a_pass(a or 0.0, j) for j, r in rounds.items())
    price = sum(r * (v(j + 1) + j * c) for j, r in rounds.items())
    flat_price = sum(r * (1 + j * c) for j, r in rounds.items())
    return Predicted(tokens / count, tokens / price, tokens / flat_price)


# --- what is measured for it --------------------------------------------------------------------


class PassTimes:
    """Passes over so many rows of one sequence, all from the same length on, by turns.

    engine: no one else may use it; as many tokens as `ids`, and then the most rows, must fit.
    rows: the numbers to be timed; 1 is always among them.
    """

    def __init__(
        self, engine: Engine, ids: Sequence[int], rows: Iterable[int], clock: Clock
    ) -> None:
        self._engine, self._clock, self._length = engine, clock, len(ids)
        self.seconds: dict[int, list[float]] = {n: [] for n in sorted({1, *rows})}
        most, device = max(self.seconds), engine.model.device
        engine.reserve(len(ids) + most)
        engine.prefill(ids)
        self._tokens = torch.full((1, most), ids[-1], dtype=torch.int64, device=device)
        for n in self.seconds:
            self._pass(n)  # recorded where it can be, built on first use

    def turn(self) -> None:
        """A pass of each number of rows, after one that is not timed; then the other way round."""
        self._pass(1)
        for n in sorted(self.seconds, reverse=len(self.seconds[1]) % 2 == 1):
            self.seconds[n].append(self._pass(n))

    def _pass(self, rows: int) -> float:
        start = self._clock()
        self._engine.chunk(self._tokens[:, :rows])[0, -1, 0].item()  # which waits for a GPU
        took_s = self._clock() - start
        self._engine.rewind(self._length)
        return took_s

    @property
    def one_row_s(self) -> float:
        """Seconds of a pass over one row, median."""
        return statistics.median(self.seconds[1])

    def v(self, rows: int) -> float:
        """A pass over so many rows / a pass over one."""
        return statistics.median(self.seconds[rows]) / self.one_row_s


class DraftTimes:
    """Rounds of drafts for one text that goes on a token at a time, as if none were accepted."""

    def __init__(
        self, drafter: Drafter, target: Engine, ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._drafter, self._target, self._ids, self._params = drafter, target, ids, params
        self.seconds: dict[int, list[float]] = defaultdict(list)  # of all drafts, by how many

    def turn(self, k: int, clock: Clock) -> None:
        """A few rounds of k drafts; the first is not counted, as it takes in the whole text."""
        drafter, model = self._drafter.begin(), self._target.model
        for n in range(DRAFTS + 1):
            ids = self._ids[: len(self._ids) - DRAFTS + n]
            rows = SamplingRows.of([self._params], model.device)
            start = clock()
            drafter.draft(ids, k, rows, model).ids.tolist()
            if n > 0:
                self.seconds[k].append(clock() - start)

    def draft_s(self, k: int) -> float:
        """Seconds of one of k drafts, median; of n-grams, a lookup's k-th part."""
        return statistics.median(self.seconds[k]) / k
