"""The book's page of the matrix: written by a run of all rows, from the claims and its record."""

from __future__ import annotations

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from matrix.claims import CLAIMS, COLUMNS, NOT_APPLICABLE, NOT_PROVEN
from matrix.judges import CHANCE, LENGTH, NEAR, NEAR_DRAW, WAYS
from matrix.models import FAMILIES, POSITIONS, SIZES
from matrix.rows import ALL_ROWS, Row
from matrix.table import SYMBOLS, Findings

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "last_run.json", HERE.parents[1] / "book" / "proven.md"
HEADS = {"transformers": "theirs", "plain path": "plain", "alone": "alone", "law": "law"}
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
- **alone**: an answer that is drawn with a seed is, id for id, the one which that request has in a
  fresh engine to itself, without the feature.
- **law**: answers of {length} tokens to one prompt are counted. How often each comes is what
  transformers' logits and the definitions of temperature, top-k and top-p say, by a chi-square over
  whole answers.

{table}

{legend}.

The numbers count the requests that the feature happened to; other requests ran beside them, and
were compared as well. The run was on {date}, from seed {seed}, in {minutes}
minutes on one thread, with {versions}.

The models are random and tiny, of five families ({families}), with
logits that spread by about 2, so that the likeliest token is a clear one. In float64 nothing is
excused. float32 is a sample: each id has to be the reference's own after the ids before it, or
within {near} of its logit (of an id that was drawn: within {near_draw} of the interval that its
random number falls into).
{gaps}

## How to run it

`make matrix` runs a schedule for each row and architecture, in less than a minute.
`.venv/bin/python tests/matrix/run.py --long 10` goes on for ten minutes, `--only swap` takes one
row, `--seed 7` draws others. The seed is printed, and a failure names the one that brings it back:
the same seed makes the same requests. `make test` runs the smallest round each time, and fails if
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
- Large models, and long contexts: these have {positions} positions. `smollm2` is the only one here
  that anybody would talk to, and it is a sample of a few sentences.
- The law of answers longer than {length} tokens, of more than {vocab} possible ids, or with `min_p`
  and penalties. These run in the column *alone*.
- That there is no bias at all in what is drawn: a chi-square shows one that is large for the number
  of answers counted, and is not to cry wolf more than once in {odds} times. A longer run sees
  smaller ones.
- Speed. That is measured in the chapters."""


def record(found: Findings, seed: int, seconds: float) -> None:
    """Keep what a whole run has found, for the page."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    kept = {"date": date.today().isoformat(), "seed": seed, "minutes": round(seconds / 60)}
    cells: dict[str, dict[str, Any]] = {row.name: {} for row in ALL_ROWS}
    for (row, column), claim in CLAIMS.items():
        if claim.is_tested:
            tally = found.cells[row, column]
            cells[row][column] = {
                "schedules": tally.schedules,
                "touched": tally.touched,
                "tokens": tally.tokens,
                "largest_gap": tally.largest_gap,
                "p": tally.p,
            }
    whole = kept | {"versions": versions, "cells": cells}
    RECORD.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


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
        length=LENGTH,
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
        for columns in (("transformers", "plain path"), ("alone",))
    )
    if not (of_logits or of_draws):
        return "In this run every float32 id was the reference's own."
    return (
        f"In this run the furthest off were {of_logits:.1e} of a logit, {of_draws:.1e} of a draw."
    )


def row_in_words(row: Row, cells: dict[str, Any]) -> str:
    """What a row is, how one sees that it happened, and how much was compared."""
    compared = [
        f"{its['tokens']:,} {HEADS[column]}" for column, its in cells.items() if column != "law"
    ]
    words = f"**{row.name}.** {row.says} Counted where {row.seen_by}. "
    words += f"Tokens compared: {', '.join(compared)}."
    if "law" in cells:
        its = cells["law"]
        words += (
            f" {its['tokens'] // LENGTH:,} answers counted; of {len(WAYS)} ways to draw in each"
        )
        words += f" model, the one that fits worst has p = {its['p']:.2g}."
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
    odds, vocab = f"{1 / CHANCE:,.0f}", SIZES["small"][0]
    beyond = BEYOND.format(positions=POSITIONS, length=LENGTH, odds=odds, vocab=vocab)
    return "\n".join([*lines, beyond])
