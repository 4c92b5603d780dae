"""The tables of growth.py, a sentence under each that says how it grows."""

from __future__ import annotations

from typing import Any

from spindle.bench import machine, report

Result = dict[str, Any]
TIMES = ["measured, ms", "predicted, ms", "measured / predicted"]
CACHES = {"paged": "blocks", "static": "rows"}  # and what each takes memory in


# --- the tables ---------------------------------------------------------------------------------


def as_markdown(result: Result) -> str:
    """What the figures stand on, then for each part a table and how it grows."""
    texts = [_about(result)] if "machine" in result else []
    for part, tables in TABLES.items():
        if part in result:
            texts += tables(result)
    return "\n\n".join(texts)


def _about(result: Result) -> str:
    settings = result["settings"]
    steps = "replayed" if result["replayed"] else "run as ever"
    return (
        f"{settings['model']}, {machine.in_words(result['machine'])}: {settings['repeat']} turns "
        f"of each point, of which the middle half counts; {settings['new'] - 1} steps a turn, "
        f"{steps}. Predicted: the larger of bytes at {result['read_gb_s']:.1f} GB/s and operations "
        f"at {result['matrix_gflop_s']:.0f} GFLOP/s, which this machine did between the turns."
    )


def _decode(result: Result) -> list[str]:
    its, steps = result["decode"], result["settings"]["new"] - 1
    heading = f"A decode step of 1 row against its context, the {steps} steps that fill it: Engine."
    columns = ["context, tokens", *TIMES, "bound by", "must read, MB"]
    rows = [
        [f"{p['context']:,}", *_times(p), p["bound_by"], f"{mb(p['bytes']):,.1f}"]
        for p in its["points"]
    ]
    grown = in_words(f"a step at {_largest(its, 'context')} tokens", its["growth"])
    return [heading, report.table(columns, rows), grown]


def _batch(result: Result) -> list[str]:
    its, context = result["batch"], result["settings"]["context"]
    heading = f"A decode step against its rows, each with a context of {context} tokens: LLM."
    columns = ["rows", *TIMES, "bound by", "tok/s"]
    rows = [
        [str(p["rows"]), *_times(p), p["bound_by"], f"{p['tok_s']:,.1f}"] for p in its["points"]
    ]
    grown = in_words(f"a step of {_largest(its, 'rows')} rows", its["growth"])
    return [heading, report.table(columns, rows), grown]


def _prefill(result: Result) -> list[str]:
    its = result["prefill"]
    heading = "A prompt against its length, and what attention has of it: Engine.prefill."
    columns = ["tokens", *TIMES, "tok/s"]
    for part in ("attention", "all else"):
        columns += [f"{part}, ms", *TIMES[1:]]
    rows = []
    for p in its["points"]:
        inside = [*_times(p["attention"]), *_times(p["rest"])]
        rows.append([f"{p['tokens']:,}", *_times(p), f"{p['tok_s']:,.0f}", *inside])
    where = f"at {_largest(its, 'tokens')} tokens"
    kinds = {"a prefill": "growth", "attention": "attention_growth", "all else": "rest_growth"}
    grown = [in_words(f"{name} {where}", its[key]) for name, key in kinds.items()]
    why = "In attention each token meets all before it; nothing else may have a quadratic term."
    return [heading, report.table(columns, rows), "\n".join([why, *dict.fromkeys(grown)])]


def _memory(result: Result) -> list[str]:
    its = result["memory"]
    heading = (
        f"Memory against tokens held, in {its['sequences']} sequences of 1 to {its['longest']} "
        f"tokens: taken, in blocks of {its['block_size']} slots or rows of {its['longest']}; and "
        "resident, what the process has more than without the cache. In brackets: times predicted."
    )
    columns = ["tokens held", "predicted, MB"]
    for name, unit in CACHES.items():
        columns += [f"{name}: {unit}, MB", "resident, MB"]
    rows = [[f"{p['tokens']:,}", *_sizes(p)] for p in its["points"]]
    where = f"at {_largest(its, 'tokens')} tokens"
    grown = [
        in_words(f"{what} {where}", its[kind][name])
        for name, unit in CACHES.items()
        for what, kind in ((unit, "taken"), (f"what is resident of the {unit}", "resident"))
    ]
    return [heading, report.table(columns, rows), "\n".join(dict.fromkeys(grown))]


TABLES = {"decode": _decode, "batch": _batch, "prefill": _prefill, "memory": _memory}


def in_words(what: str, grown: dict[str, Any] | None) -> str:
    """How much of it is the quadratic term, and how far a straight line is off."""
    if grown is None:
        return "Too few points to say how it grows: expected three or more."
    turns, (power, predicted) = grown["share_by_turn"], (grown["power"], grown["predicted_power"])
    spread = "" if turns is None else f", {percent(turns[0])} to {percent(turns[1])} by turns"
    return (
        f"Of {what}, {percent(grown['quadratic_share'])} is the quadratic term{spread} (of the "
        f"predicted line's, {percent(grown['predicted_share'])}); a straight line is off by up to "
        f"{percent(grown['off_line'])}; between the last two points it grows with the power "
        f"{power:.2f} ({predicted:.2f})."
    )


def percent(share: float) -> str:
    """With a digit after the point, and no sign before a zero."""
    return f"{round(share, 3) + 0.0:.1%}"


def _times(point: Result) -> list[str]:
    return [f"{point['ms']:,.3f}", f"{point['predicted_ms']:,.3f}", f"{point['ratio']:.2f}"]


def _sizes(point: Result) -> list[str]:
    predicted = point["predicted_bytes"]
    sizes = [point[f"{name}_{kind}_bytes"] for name in CACHES for kind in ("taken", "resident")]
    cells = [f"{mb(size):,.2f} ({size / predicted:.2f})" for size in sizes]
    return [f"{mb(predicted):,.2f}", *cells]


def mb(size: float) -> float:
    """Megabytes."""
    return size / 1e6


def _largest(its: Result, key: str) -> str:
    return f"{its['points'][-1][key]:,}"
