"""The table of fleet.py, what it stands on, whether a fleet scales; and the figure."""

from __future__ import annotations

from typing import Any

from spindle.bench import machine, report

Found = dict[str, Any]
DISTURBED = 0.6  # beyond which a line is not to be believed
COLUMNS = ["policy", "replicas", "hit rate", "TTFT p50, ms", "TTFT p99, ms", "ITL p99, ms"]
COLUMNS += ["goodput, 1/s", "a replica", "of those that came", "busy"]


def as_markdown(result: Found) -> str:
    """What the costs are, what comes, a line a policy and number of replicas, and what it shows."""
    rows = report.table(COLUMNS, [_row(row) for row in result["rows"]])
    return "\n\n".join([_costs(result), _traffic(result), rows, _notes(result)])


def _costs(result: Found) -> str:
    its, fit = result["measured"], result["measured"]["fit"]
    costs = {name: value / 1e6 for name, value in its["costs"].items()}
    how = "recorded" if its["recorded"] else f"{fit['steps']} steps measured here"
    text = (
        f"A step of {its['model']} ({how}; {machine.in_words(its['machine'])}): "
        "{step_ps:,.1f} us, {chunk_ps:,.1f} a chunk of a prompt, {prompt_row_ps:,.2f} each of its "
        "tokens, {pair_ps:.4f} each key that these see, {decode_row_ps:,.2f} a decode, "
        "{key_ps:.4f} each key that it sees.".format_map(costs)
    )
    text += (
        f" Half of the steps lie within {fit['median_error']:.0%} of that, nine in ten within "
        f"{fit['p90_error']:.0%}."
    )
    if fit["p90_error"] > DISTURBED:
        text += " " + report.disturbed(f"a step in ten is {fit['p90_error']:.0%} off the line")
    if result["longest"] > fit["longest"]:
        text += (
            f" Sequences of up to {fit['longest']:,} tokens were measured; the longest here has "
            f"{result['longest']:,}, for which the line is drawn on."
        )
    return text


def _traffic(result: Found) -> str:
    settings, law = result["settings"], result["settings"]["traffic"]
    shape = settings["shape"]
    if settings["total_rate_s"] is not None:
        load = f"{settings['total_rate_s']:g} requests a second in all"
    elif settings["rate_s"] is not None:
        load = f"{settings['rate_s']:g} requests a second a replica"
    else:
        load = (
            f"{settings['load'] * result['full_requests_s']:.3g} requests a second a replica, "
            f"{settings['load']:g} of what a full one could do that remembers nothing"
        )
    windows = sorted({round(row["window_s"], 1) for row in result["rows"]})
    shown = " to ".join(f"{seconds:,}" for seconds in dict.fromkeys((windows[0], windows[-1])))
    return (
        f"Seed {law['seed']}; {load}. Conversations of {law['turns']:g} turns on average, messages "
        f"of {law['message']:g} tokens and answers of {law['answer']:g}, {law['think_s']:g} s from "
        f"an answer to the next message, {law['systems']} system prompts of {law['system']:g} "
        f"tokens (Zipf {law['zipf']:g}); gaps vary by {law['burst']:g}, the rate swings by "
        f"{law['swing']:g}. A replica: {shape['max_seqs']} seats, {shape['max_batch_tokens']} "
        f"tokens a step, {shape['num_blocks']:,} blocks of {shape['block_size']}. The first "
        f"{law['warm_up']:.0%} of the arrivals' time does not count, nor what comes after the last "
        f"conversation has begun: {shown} s count."
    )


def _row(row: Found) -> list[str]:
    times = (row[key] for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms"))
    return [
        row["policy"],
        f"{row['replicas']:,}",
        f"{row['hit_rate']:.1%}",
        *("—" if ms is None else f"{ms:,.1f}" for ms in times),
        f"{row['goodput_s']:,.2f}",
        f"{row['goodput_s'] / row['replicas']:.3f}",
        f"{_in_time(row):.1%}",
        f"{row['utilisation']:.1%}",
    ]


def _in_time(row: Found) -> float:
    """The share of those that came."""
    return row["goodput_s"] / row["offered_s"] if row["offered_s"] else 0.0


def _notes(result: Found) -> str:
    settings, rows = result["settings"], result["rows"]
    total = sum(row["requests"] for row in rows)
    lines = [
        f"Goodput: first token within {settings['ttft_slo_ms']:g} ms, and a mean gap of at most "
        f"{settings['itl_slo_ms']:g} ms. {total:,} requests and {sum(r['steps'] for r in rows):,} "
        f"steps in {result['seconds']:.1f} s of {'C++' if result['native'] else 'Python'}, "
        f"{result['seconds'] / total * 1e6:.1f} us a request; "
        f"{sum(r['preemptions'] for r in rows):,} preemptions, "
        f"{sum(r['twice'] for r in rows):,} blocks computed twice at once."
    ]
    lines += [line for policy in settings["policies"] if (line := _scaling(rows, policy))]
    return "\n".join(lines)


def _scaling(rows: list[Found], policy: str) -> str:
    its = [row for row in rows if row["policy"] == policy]
    first, last = its[0], its[-1]
    if first is last:
        return ""
    shares = [_in_time(row) for row in (first, last)]
    return (
        f"{policy}: {shares[0]:.1%} of those that came were in time at {first['replicas']:,} "
        f"replica{'s' * (first['replicas'] > 1)}, {shares[1]:.1%} at {last['replicas']:,}."
    )


def draw(result: Found) -> Any:
    """The table as a figure; needs matplotlib."""
    from spindle import plots

    lines = {
        policy: [
            (row["replicas"], row["hit_rate"], row["ttft_p99_ms"], row["goodput_s"])
            for row in result["rows"]
            if row["policy"] == policy
        ]
        for policy in result["settings"]["policies"]
    }
    return plots.fleet(lines, _claim(result))


def _claim(result: Found) -> str:
    most = result["rows"][-1]["replicas"]
    rates = {row["policy"]: row["hit_rate"] for row in result["rows"] if row["replicas"] == most}
    best, worst = (pick(rates, key=rates.__getitem__) for pick in (max, min))
    replicas = "1 replica" if most == 1 else f"{most:,} replicas"
    if best == worst:
        return f"{best}, {replicas}: {rates[best]:.0%} of the prompts' tokens are remembered"
    return (
        f"{replicas}: {best} finds {rates[best]:.0%} of the prompts' tokens remembered, "
        f"{worst} {rates[worst]:.0%}"
    )
