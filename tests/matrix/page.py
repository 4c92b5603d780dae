"""The book's page of the matrix: written by a run of all rows, from the claims and its record."""

from __future__ import annotations

import json
import math
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from matrix.claims import CLAIMS, COLUMNS, NOT_APPLICABLE, NOT_PROVEN
from matrix.digest import whole
from matrix.judges import NEAR, NEAR_DRAW
from matrix.law import CHANCE, DRAFT_FAULTS, FAULTS, Evidence, nats_needed
from matrix.models import FAMILIES
from matrix.rows import ALL_ROWS, Row
from matrix.table import SYMBOLS, Findings

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "last_run.json", HERE.parents[1] / "book" / "proven.md"
HEADS = {"transformers": "theirs", "plain path": "plain", "drawn": "drawn", "law": "law"}
TEXT = """\
# What is proven

An engine that serves many people at once must give each of them what they would have had alone. A
fault there writes good English, only not the model's. So we do not read the answers, we compare
their ids.

Each row of the table is something that the engine does beside plain decoding. Schedules of requests
are drawn by lot so that it does happen, and a counter in the run shows that it did: a cell whose
feature happened to nobody fails. Each column is a way to know what the answers have to be.

- **theirs**: a greedy answer is, id for id, what `generate` of transformers gives for that request
  alone.
- **plain**: the same against our model without a cache, a batch or an engine: the whole sequence
  goes through it again for each token, with attention written as its formula. In float64 the
  log-probabilities of the ids agree as well, within 1e-9.
- **drawn**: an answer that is drawn with a seed is, id for id, what the definitions make of
  transformers' logits: min_tokens, three penalties, temperature, min-p, top-k, top-p, and the
  random number that (seed, answer, position) stand for, all of them written once more in the tests.
- **law**: how often each token is drawn. After the ids before it each token has its own
  distribution, by the same definitions; all tokens of a row are weighed together. A draft model
  changes which tokens come, so there the law alone can say whether they are right.

{table}

{legend}.

The numbers count the requests that the feature happened to; other requests ran beside them, and
were compared as well. The run was on {date}, from seed {seed}, in {minutes}
minutes on one thread, with {versions}. The code it ran on,
hashed without its comments, is `{code}`.
<!-- since -->

The models are random and tiny, of five families ({families}), with
logits that spread by about 2, so that the likeliest token is a clear one. In float64 nothing is
excused. float32 is a sample: each id has to be the reference's own after the ids before it, or
within {near} of its logit (of an id that was drawn: within {near_draw} of the interval that its
random number falls into, where a cut may have fallen 0.0001 further out or in).
{gaps}

## What a wrong law would look like

Two things are asked of the drawn tokens of a row. First: do they look more like the work of an
engine with a fault? Of each fault in this table we know what such an engine would draw. If all is
well, odds of a million to one for it come once in a million runs at most, however long a run is. If
the fault is there, the odds grow with every token. The table says how many tokens bring them to a
million, as an average over those of this run, and in how many rows this run was long enough. (Where
no draft model drafts, the column *drawn* sees the same faults, by the first token that is changed.)

{power}

Second: all tokens are laid on the line from 0 to 1, each as wide as it is likely, the likeliest
first, or in the order of ids; and a point is thrown on the one that was drawn. These points have to
be uniform. With the {fewest:,} to {most:,} tokens that a row has here, it is seen if the share of
points below some place is off by {coarse:.3f} to {fine:.3f}, whatever the reason.

## How to run it

`make matrix` runs a schedule for each row and architecture, in about a minute.
`.venv/bin/python tests/matrix/run.py --long 10` goes on for ten minutes, `--only swap` takes one
row, `--seed 7` draws others. The seed is printed, and a failure names the one that brings it back:
the same seed makes the same requests. `make test` runs the smallest round, from another seed each
day (or from `SPINDLE_MATRIX_SEED`), so that a fault of yesterday may turn up today; and it fails if
this page no longer says what the table in the code claims.

## The rows

{rows}

## Cells with a word to them

{reasons}

## What is not proven

{unproven}
"""
BEYOND = """\
- Anything on a GPU. The sources of the CUDA kernels are executed here, by the
  [emulator](../notebooks/C_emulator.ipynb), and a step is recorded under the rules of a CUDA graph;
  but no run on a GPU enters this table. 16-bit weights and caches do not either.
- Large models. `smollm2` is the only one here that anybody would talk to, and it is a sample of a
  few sentences. Long contexts are those of a few hundred tokens.
- Stop strings and text: everything here is ids. `LLM.stream`, which gives the tokens of the same
  steps as they come; `best_of`, which gives the likeliest of several answers; beam searches in
  float32. Other tests have these, on fewer examples.
- That there is no bias at all in what is drawn: the table above says what would be seen. A longer
  run sees less than that.
- Speed. That is measured in the chapters."""


def record(found: Findings, seed: int, seconds: float, code: dict[str, str]) -> None:
    """Keep what a whole run has found on code of these digests, for the page."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    kept: dict[str, Any] = {"date": date.today().isoformat(), "seed": seed}
    kept |= {"minutes": round(seconds / 60), "code": code}
    cells: dict[str, dict[str, Any]] = {row.name: {} for row in ALL_ROWS}
    for (row, column), claim in CLAIMS.items():
        if claim.is_tested:
            tally = found.cells[row, column]
            cells[row][column] = {
                "schedules": tally.schedules,
                "touched": tally.touched,
                "tokens": tally.tokens,
                "largest_gap": tally.largest_gap,
            }
            if column == "law":
                cells[row][column] |= weighed(found.laws[row])
    whole = kept | {"versions": versions, "cells": cells}
    RECORD.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def weighed(evidence: Evidence) -> dict[str, Any]:
    """What is kept of a row's law: the least chance, and what each fault would have looked like."""
    nats = {name: round(value, 2) for name, value in evidence.nats.items()}
    return {"p": min(evidence.chances().values()), "nats": nats}


def read() -> dict[str, Any]:
    """The record of the last run that was written."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write() -> None:
    """Write the page into the book."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The page as it should be, in Markdown. KeyError: the record lacks a cell that is claimed."""
    kept = read()
    return TEXT.format(
        table=table(kept["cells"]),
        legend=", ".join(f"{symbol} {status}" for status, symbol in SYMBOLS.items()),
        date=kept["date"],
        seed=kept["seed"],
        minutes=kept["minutes"],
        versions=", ".join(f"{name} {version}" for name, version in kept["versions"].items()),
        families=", ".join(FAMILIES),
        near=NEAR,
        near_draw=NEAR_DRAW,
        gaps=gaps(kept["cells"]),
        code=whole(kept["code"]),
        power=power(kept["cells"]),
        **reach(kept["cells"]),
        rows="\n\n".join(row_in_words(row, kept["cells"][row.name]) for row in ALL_ROWS),
        reasons=reasons(),
        unproven=unproven(),
    )


def table(cells: dict[str, Any]) -> str:
    """A symbol a cell, and how many requests stand behind it."""
    lines = ["| | " + " | ".join(HEADS[column] for column in COLUMNS) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for row in ALL_ROWS:
        shown = []
        for column in COLUMNS:
            claim = CLAIMS[row.name, column]
            proven = claim.status not in (NOT_APPLICABLE, NOT_PROVEN)
            count = f" {cells[row.name][column]['touched']:,}" if proven else ""
            shown.append(SYMBOLS[claim.status] + count)
        lines.append(f"| {row.name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def gaps(cells: dict[str, Any]) -> str:
    """What was let pass in float32."""
    of_logits, of_draws = (
        max(its[c]["largest_gap"] for its in cells.values() for c in columns if c in its)
        for columns in (("transformers", "plain path"), ("drawn",))
    )
    if not (of_logits or of_draws):
        return "In this run every float32 id was the reference's own."
    return (
        f"In this run the furthest off were {of_logits:.1e} of a logit, {of_draws:.1e} of a draw."
    )


def laws(cells: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of the column "law" that are proven."""
    return [its["law"] for its in cells.values() if "law" in its]


def power(cells: dict[str, Any]) -> str:
    """Each fault of the law: tokens that show it, and the rows that had as many."""
    lines = ["| an engine with this fault | tokens that show it | rows that would have |"]
    lines.append("|---|---:|---:|")
    for name in (*FAULTS, *DRAFT_FAULTS):
        its = [law for law in laws(cells) if name in law["nats"]]
        of_a_token = sum(law["nats"][name] for law in its) / sum(law["tokens"] for law in its)
        enough = sum(law["nats"][name] > nats_needed(len(law["nats"])) for law in its)
        tokens = nats_needed(max(len(law["nats"]) for law in its)) / of_a_token
        lines.append(f"| {name} | {math.ceil(tokens):,} | {enough} of {len(its)} |")
    return "\n".join(lines)


def reach(cells: dict[str, Any]) -> dict[str, float]:
    """The fewest and the most tokens of a row, and how far off a share is seen with them."""
    counts = [law["tokens"] for law in laws(cells)]
    found: dict[str, float] = {"fewest": min(counts), "most": max(counts)}
    for name, n in (("coarse", min(counts)), ("fine", max(counts))):
        found[name] = math.sqrt(math.log(2 / CHANCE) / (2 * n))
    return found


def row_in_words(row: Row, cells: dict[str, Any]) -> str:
    """What a row is, how one sees that it happened, and how much was compared."""
    compared = [
        f"{its['tokens']:,} {HEADS[column]}" for column, its in cells.items() if column != "law"
    ]
    words = f"**{row.name}.** {row.says} Counted where {row.seen_by}. "
    words += f"Tokens compared: {', '.join(compared)}."
    if "law" in cells:
        its = cells["law"]
        words += f" {its['tokens']:,} drawn tokens weighed; the least likely of what was looked at"
        words += f" has p ≤ {its['p']:.2g}."
    return words


def reasons() -> str:
    """Why a cell is not there, or what exactly it compares; the same words once."""
    cells: dict[str, list[str]] = {}
    for (row, column), claim in CLAIMS.items():
        if claim.words and claim.status != NOT_PROVEN:
            symbol = SYMBOLS[claim.status]
            cells.setdefault(claim.words, []).append(f"{symbol} {row}, {HEADS[column]}")
    return "\n".join(f"- **{'; '.join(names)}**: {words}." for words, names in cells.items())


def unproven() -> str:
    """The cells that are not proven, and what has no cell."""
    lines = [
        f"- {SYMBOLS[NOT_PROVEN]} *{row}, {HEADS[column]}*: {claim.words}."
        for (row, column), claim in CLAIMS.items()
        if claim.status == NOT_PROVEN
    ]
    return "\n".join([*lines, BEYOND])
