"""Runs the matrix: schedules by lot, each judged by every column that applies to its row.

    python tests/matrix/run.py                    a schedule a family and row, in a minute
    python tests/matrix/run.py --seed 7           another one
    python tests/matrix/run.py --long 10          for ten minutes; without a number, for an hour
    python tests/matrix/run.py --only swap        one row; may be repeated
    python tests/matrix/run.py --long 5 --write   and write the page of the book

A cell fails if an answer is not what it has to be, and also if the feature of its row happened to
none of the requests that it looked at. A failure names the seed that brings it back.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from matrix import judges, models
from matrix.claims import CLAIMS, COLUMNS, SMOLLM2
from matrix.digest import OF_MATRIX, digests, whole
from matrix.judges import Tally
from matrix.law import CHANCE, Evidence
from matrix.models import FAMILIES, Subject
from matrix.rows import ALL_ROWS, BY_NAME, Row
from matrix.traffic import Served, by_lot
from spindle import hub
from spindle.kernels import emulate, native

SYMBOLS = {"proven": "●", "sample": "◐", "not applicable": "–", "not proven": "○"}
WEIGHTS = 8  # random models of a family, in turn
ROUNDS = 2  # at least: a schedule of each of the two architectures
MOST_ROUNDS = 12  # where time is no reason for more
SMOLLM2_EVERY = 20  # rounds: it is large
Cell = tuple[str, str]  # names of row and column


@dataclass
class Findings:
    """All cells, and what the drawn tokens of each row say of its law."""

    cells: dict[Cell, Tally] = field(default_factory=lambda: defaultdict(Tally))
    laws: dict[str, Evidence] = field(default_factory=lambda: defaultdict(Evidence))

    def judge_laws(self, seed: int) -> None:
        """Whether what was drawn can come of the law, over all schedules together."""
        for row, evidence in self.laws.items():
            tally = self.cells[row, "law"]
            tally.where = f"schedules from seed {seed}"
            for what, p in evidence.chances().items():
                tally.expect(p > CHANCE, f"{what}: chance would do this with p <= {p:.1e}")

    def due(self, names: Sequence[str], rounds: int, has_time: bool) -> list[str]:
        """The rows of a round; without time, those that have not seen their feature."""
        if has_time:
            return [n for n in names if n != SMOLLM2 or rounds % SMOLLM2_EVERY == 0]
        if rounds >= MOST_ROUNDS:
            return []
        return [n for n in names if not all(self.has_seen(n, column) for column in COLUMNS)]

    def has_seen(self, row: str, column: str) -> bool:
        """Whether the feature happened to a request that the column looked at."""
        return not CLAIMS[row, column].is_tested or self.cells[row, column].touched > 0

    def failures(self, cell: Cell) -> list[str]:
        """What is wrong with a cell: its answers, or that it has seen nothing."""
        tally = self.cells[cell]
        if tally.schedules and not tally.touched:
            return [*tally.failures, f"it happened to none in {tally.schedules} schedules"]
        return tally.failures


# --- a schedule ----------------------------------------------------------------------------------

JUDGES = {
    "transformers": judges.against_transformers,
    "plain path": judges.against_plain,
    "drawn": judges.against_definitions,
}


def run_row(name: str, seed: int, found: Findings) -> None:
    """A schedule of a row, judged by its columns, and one that is drawn for the law alone."""
    rng, row = random.Random(f"{name} {seed}"), BY_NAME[name]
    if name == SMOLLM2:
        judge_answers(row, rng, models.smollm2(), found, f"seed {seed}")
        return
    family = FAMILIES[seed % len(FAMILIES)]
    number, kind = seed // len(FAMILIES) % WEIGHTS, (row.dtype, row.int8)
    where = f"seed {seed}, {family}"
    judge_answers(row, rng, models.subject(family, row.size, number, *kind), found, where)
    if row.law_count and CLAIMS[name, "law"].is_tested:
        subject = models.subject(family, "flat", number, *kind)
        asked = judges.many(rng, subject, row.law_count, row.answers)
        served = row.serve(rng, subject, asked)
        if not judges.has_draft_model(served):
            judge_column(row, "drawn", subject, served, found, where)
        weigh(row, rng, subject, served, found, where)


def judge_answers(
    row: Row, rng: random.Random, subject: Subject, found: Findings, where: str
) -> None:
    """Greedy answers, beams and drawn answers, from one engine."""
    asked = by_lot(rng, subject, row.count, row.most, row.answers, row.beams, row.apart, row.least)
    served = row.serve(rng, subject, asked)
    for column in JUDGES:
        judge_column(row, column, subject, served, found, where)
    if CLAIMS[row.name, "law"].is_tested:
        weigh(row, rng, subject, served, found, where)


def judge_column(
    row: Row, column: str, subject: Subject, served: Served, found: Findings, where: str
) -> None:
    """What a column says of a schedule, if it applies to the row."""
    if CLAIMS[row.name, column].is_tested:
        tally = found.cells[row.name, column]
        tally.schedules, tally.where = tally.schedules + 1, where
        JUDGES[column](subject, served, row.touched(served), tally)


def weigh(
    row: Row, rng: random.Random, subject: Subject, served: Served, found: Findings, where: str
) -> None:
    """Add the drawn tokens of a schedule to what is known of the row's law."""
    requests = [n for n, one in enumerate(served.asked) if one.is_drawn]
    if not requests:
        return
    drawn = judges.drawn_by(subject, served)
    tally = found.cells[row.name, "law"]
    tally.schedules, tally.where = tally.schedules + 1, where
    tally.touched += len(row.touched(served) & set(requests))
    tally.tokens += len(drawn.draws)
    for words in found.laws[row.name].weigh(drawn, rng):
        tally.expect(False, f"a token that cannot be drawn: {words}")


def run(names: Sequence[str], seed: int, minutes: float = 0.0) -> Findings:
    """Schedules of all these rows, round by round, until the minutes are over.

    At least a schedule for each architecture, and some more where the feature has not happened yet.
    """
    found, begun, has_time = Findings(), time.monotonic(), True
    with tqdm(disable=None, unit="schedule") as bar:
        for n in range(seed, sys.maxsize):
            due = found.due(names, n - seed, has_time)
            if not (due or has_time):
                break
            for name in due:
                try:
                    run_row(name, n, found)
                except Exception as error:
                    error.add_note(f"row {name!r}, --seed {n}")
                    raise
                bar.update()
            has_time = n - seed < ROUNDS - 1 or time.monotonic() - begun < 60 * minutes
    found.judge_laws(seed)
    return found


def show(found: Findings, names: Sequence[str]) -> str:
    """The table with its counts, in plain text."""
    lines = [f"{'':22}" + "".join(f"{column:>23}" for column in COLUMNS)]
    for name in names:
        cells = [cell_in_words(found, (name, column)) for column in COLUMNS]
        lines.append(f"{name:22}" + "".join(f"{cell:>23}" for cell in cells))
    return "\n".join(lines)


def cell_in_words(found: Findings, cell: Cell) -> str:
    """Such as "● 2 / 5 / 61": schedules, requests that the feature happened to, tokens."""
    tally, claim = found.cells[cell], CLAIMS[cell]
    symbol = "FAILED" if found.failures(cell) else SYMBOLS[claim.status]
    counts = f" {tally.schedules} / {tally.touched} / {tally.tokens}" if claim.is_tested else ""
    return symbol + counts


def missing(name: str) -> str:
    """Why a row cannot be run on this machine; "" if it can."""
    if name == SMOLLM2 and not hub.is_cached(SMOLLM2):
        return "it is not in the cache; `spindle fetch smollm2` brings it"
    if name == "emulated kernels" and not emulate.available():
        return "nothing here compiles the sources"
    return native.why_not() if BY_NAME[name].dtype == torch.float32 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if no cell fails, else 1; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Run the exactness matrix.")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedules")
    parser.add_argument("--long", type=float, nargs="?", const=60.0, default=0.0, metavar="MINUTES")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), default=[], metavar="ROW")
    parser.add_argument("--write", action="store_true", help="write the record and the book's page")
    args = parser.parse_args(argv)
    names = [row.name for row in ALL_ROWS if not args.only or row.name in args.only]
    for name in [name for name in names if missing(name)]:
        print(f"{name} is left out: {missing(name)}")
        names.remove(name)
    if args.write and len(names) < len(ALL_ROWS):
        parser.error("--write needs all rows")
    code = digests(OF_MATRIX, "tests/matrix")
    print(f"seed {args.seed}, code {whole(code)}", flush=True)
    begun = time.monotonic()
    try:
        found = run(names, args.seed, args.long)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130
    seconds = time.monotonic() - begun
    print("schedules / requests that the row happened to / tokens compared")
    print(show(found, names))
    wrong = [(cell, words) for cell in CLAIMS for words in found.failures(cell)]
    for (row, column), words in wrong:
        print(f"FAILED {row}, {column}: {words}")
    print(f"seed {args.seed}, {seconds:.0f} s, {len(wrong)} failures", flush=True)
    if args.write and not wrong:
        from matrix import page

        page.record(found, args.seed, seconds, code)
        page.write()
    return int(bool(wrong))
