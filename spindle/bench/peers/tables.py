"""The figures in Markdown: a table a job, and below it where answers part."""

from __future__ import annotations

from typing import Any

from spindle.bench import report

TITLES = {
    "one_stream": "One greedy stream: {prompt_tokens} prompt tokens, {new} new ones",
    "eight_streams": "{seats} greedy streams at once: {new} new tokens each",
    "traffic": "Long-tailed traffic: {requests} requests, all from the start, {seats} seats",
}
FEWER_BYTES = ("spindle_int8", "ctranslate2_int8", "llama_cpp_q4")  # another bound than ours


def as_markdown(result: dict[str, Any]) -> str:
    """All tables, the bound, and what is missing."""
    parts = [_about(result)]
    parts += [_job(result, job) for job in result["jobs"]]
    parts += [_bound(result), _versions(result), _gaps(result)]
    return "\n\n".join(part for part in parts if part)


def _about(result: dict[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    where = machine["device"]
    if machine["processor"] and where == "cpu":
        where = f"{machine['processor']}, {machine['cores']} cores"
    return (
        f"{settings['model']}, {machine['dtype']}, median of {settings['repeat']} turns, {where}, "
        f"{machine['threads']} threads, torch {machine['torch']}, {machine['date']}."
    )


def _job(result: dict[str, Any], job: str) -> str:
    columns = ["engine", "tok/s", "ours is", "ttft, ms", "peak, MB", "same answers"]
    if job == "one_stream":
        columns.insert(3, "of the bound")
    rows, notes = [], []
    for name, row in result["jobs"][job].items():
        ratio = "" if name == "spindle" else f"{row['ratio']:.2f} times"
        cells = [name, f"{row['useful_tok_s']:.1f}", ratio]
        if job == "one_stream":
            share = row["useful_tok_s"] / result["bound_tok_s"]
            cells.append("" if name in FEWER_BYTES else f"{share:.0%}")
        cells += [f"{row['ttft_ms']:,.1f}", f"{row['peak_mb']:,.0f}"]
        rows.append([*cells, f"{row['same_answers']} of {row['answers']}"])
        notes += _difference(name, row["first_difference"])
    title = TITLES[job].format(**result["settings"])
    return "\n".join([f"{title}.", "", report.table(columns, rows), *[""][: len(notes)], *notes])


def _difference(name: str, found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return [
        f"{name}: request {found['request']} parts from ours at token {found['token']}, where our "
        f"two likeliest are {found['top2_gap']:.2g} apart.  "
    ]


def _bound(result: dict[str, Any]) -> str:
    return (
        f"The bound of one stream: {result['read_gb_s']:.1f} GB/s read / "
        f"{result['weight_bytes'] / 1e9:.3f} GB of weights = {result['bound_tok_s']:.1f} tok/s."
    )


def _versions(result: dict[str, Any]) -> str:
    return f"Versions: {'; '.join(dict.fromkeys(result['versions'].values()))}."


def _gaps(result: dict[str, Any]) -> str:
    return "\n".join(f"{name}: not measured: {reason}." for name, reason in result["gaps"].items())
