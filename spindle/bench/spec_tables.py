"""What `spindle bench spec` prints: a table, how it was predicted, and who wins, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from spindle.bench import machine, report

WIDTH = 98
NOISE = 0.02  # a gain that is no larger is none: turns differ by as much
COLUMNS = ["text", "k", "plain", "spec", "gain", "law", "v=1", "kept", "a pass", "E"]
COLUMNS += ["passes", "rows", "draft", "same"]
LEGEND = (
    "k: drafts in every round that has any (k halved, at the end, where fewer fit); ≤k: as many as "
    "pay. plain, spec: tokens a second after the first. gain: the median of the turns' ratios. "
    "law: the same, predicted as below; v=1: by the textbook's. kept: of the drafts that were "
    "judged. a pass: tokens; E: the same, by the law. passes: of the model. rows: drafts that went "
    "through it. draft: share of the time. same: whether the tokens are those of plain decoding "
    "(n/a: drafts are drawn, and the distribution is the same)."
)
LAW = (
    "Predicted: if r_j of the rounds have j drafts, sum r_j E(a, j) / sum r_j (v(j+1) + j c), with "
    "E(a, j) = (1 - a^(j+1)) / (1 - a) and a = kept. A round without drafts costs v(1) = 1 and "
    "gives 1 token; the last rounds of an answer have no more drafts than leave room for one token."
)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Where it was measured, the table, the law with its numbers, and the verdict."""
    table = report.table(COLUMNS, [_cells(row) for row in rows])
    texts = [[row for row in rows if row["text"] == text] for text in _texts(rows)]
    notes = [LEGEND, LAW, *map(_costs, texts), *_partings(rows), verdict(rows)]
    return "\n\n".join([_wrapped(_about(texts)), table, *map(_wrapped, notes)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _texts(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["text"] for row in rows))


def _about(texts: Sequence[Sequence[dict[str, Any]]]) -> str:
    one = texts[0][0]
    prompts = ", ".join(f"{rows[0]['text']} {rows[0]['prompt_tokens']} tokens" for rows in texts)
    how = f"temperature {one['temperature']:g}" if one["temperature"] else "greedy"
    return (
        f"One stream, {one['model']}, drafts by {one['drafter']}, {how}; prompts: {prompts}; "
        f"{one['turns']} turns of each, medians. {machine.in_words(one['machine'])}, "
        f"{one['date']}, reads {one['read_gb_s']:.1f} GB/s."
    )


def _k(row: dict[str, Any]) -> str:
    return f"≤{row['k']}" if row["adaptive"] else str(row["k"])


def _cells(row: dict[str, Any]) -> list[str]:
    kept, same = row["acceptance_rate"], row["same_tokens"]
    return [
        row["text"],
        _k(row),
        f"{row['plain_tok_s']:.1f}",
        f"{row['speculative_tok_s']:.1f}",
        f"{row['speedup']:.2f}",
        f"{row['predicted_speedup']:.2f}",
        f"{row['textbook_speedup']:.2f}",
        "—" if kept is None else f"{kept:.0%}",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['predicted_tokens_per_pass']:.2f}",
        str(row["passes"]),
        str(row["drafted_rows"]),
        f"{row['draft_share']:.1%}",
        "n/a" if same is None else "yes" if same else "NO",
    ]


def _costs(rows: Sequence[dict[str, Any]]) -> str:
    """What passes and drafts cost beside this text, and how many rounds had drafts."""
    v = ", ".join(f"v({n}) {ratio:.2f}" for n, ratio in rows[0]["v"].items())
    c = ", ".join(f"{row['c']:.2g} (k = {row['k']})" for row in rows if not row["adaptive"])
    drafted = ", ".join(
        f"{row['passes'] - row['rounds'].get('0', 0)} of {row['passes']} (k = {row['k']})"
        for row in rows
        if not row["adaptive"]
    )
    return (
        f"{rows[0]['text'].capitalize()}: {v}, of {rows[0]['one_row_ms']:.3f} ms for one row "
        f"(a plain step: {1e3 / rows[0]['plain_tok_s']:.3f}); c {c}; rounds with drafts: {drafted}."
    )


def _partings(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{row['text'].capitalize()}, k {_k(row)}: another token than plain decoding at "
        f"{row['parting']['at']}, where the two likeliest logits are {row['parting']['gap']:.3g} "
        "apart."
        for row in rows
        if row["parting"] is not None
    ]


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Where drafts win and where they lose, text by text, by how much; within NOISE, neither."""
    parts = []
    for text in _texts(rows):
        ranked = sorted((r for r in rows if r["text"] == text), key=lambda r: r["speedup"])
        won = [(f"{r['speedup']:.2f}", _k(r)) for r in ranked if r["speedup"] > 1 + NOISE]
        falling, most = ranked[::-1], 1 - NOISE
        lost = [(f"{1 - r['speedup']:.1%}", _k(r)) for r in falling if r["speedup"] < most]
        even = [_k(r) for r in ranked if most <= r["speedup"] <= 1 + NOISE]
        said = [f"wins, {_span(won, 'times as fast')}"] if won else []
        said += [f"loses, {_span(lost, 'slower')}"] if lost else []
        said += [f"neither wins nor loses more than {NOISE:.0%} (k {', '.join(even)})"] * bool(even)
        parts.append(f"{text.capitalize()}: {'; '.join(said)}.")
    return " ".join(parts)


def _span(ranked: Sequence[tuple[str, str]], unit: str) -> str:
    """The first and the last of some figures, each with its k."""
    (first, k), (last, last_k) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        return f"{first} {unit} (k {k})"
    return f"{first} (k {k}) to {last} {unit} (k {last_k})"
