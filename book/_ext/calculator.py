"""The calculator of the cover: from a model and a machine to bounds, knee and break-even.

The page shows the results for the values that it starts with; _static/calculator.js repeats these
formulas for whatever is typed, and a test holds the two together. Both bills of a pass are the
roofline's (Williams et al. 2009), the gain is that of Leviathan et al. 2023 over a price: n rows
cost max(1, n / knee) passes, a draft `draft_cost` of a pass over as many users.
"""

from html import escape
from typing import NamedTuple

from spindle.bench.spec_costs import predict
from spindle.decode.pace import tokens_a_pass
from spindle.lesson import users_that_gain
from spindle.plots import Machine

BISECTIONS = 60


class Field(NamedTuple):
    """What can be typed. `least`, `most`, `step`: as of an HTML number input."""

    name: str
    label: str
    unit: str
    value: float
    least: float = 0
    most: float | None = None
    step: str = "any"


class Result(NamedTuple):
    """What is shown. `empty`: what it says where there is no such number; `unit`: "%" is joined."""

    name: str
    label: str
    unit: str
    empty: str = "–"


GROUPS = {
    "A model on a machine": (
        Field("weights_m", "weights of the model", "million", 134.5, 0.001),
        Field("weight_bytes", "bytes a weight", "bytes", 4, 0.001),
        Field("memory_gb_s", "memory", "GB/s", 29, 0.001),
        Field("gflop_s", "arithmetic", "GFLOP/s", 140, 0.001),
    ),
    "Guessing ahead": (
        Field("k", "drafts in a pass", "drafts", 5, 1, 64, "1"),
        Field("acceptance", "accepted", "% of drafts", 80, 0, 100),
        Field("draft_cost", "a draft costs", "passes", 0.25),
    ),
}
RESULTS = {
    "Without guessing": (
        Result("weights_gb", "a pass reads", "GB"),
        Result("passes_s", "memory allows", "passes a second"),
        Result("tokens_s", "arithmetic allows", "tokens a second"),
        Result("knee_rows", "knee: rows that ride for the price of one", "rows"),
    ),
    "With drafts": (
        Result("tokens_pass", "tokens from a pass", "tokens"),
        Result("speedup", "one user is served", "times as fast"),
        Result("break_even", "break-even: drafts that must be accepted", "%", "more than all"),
        Result("users", "drafts pay for up to", "users", "nobody"),
    ),
}


def figures(
    weights_m: float,
    weight_bytes: float,
    memory_gb_s: float,
    gflop_s: float,
    k: int,
    acceptance: float,
    draft_cost: float,
) -> dict[str, float | None]:
    """Every result by its name; None where there is no such number.

    weights_m: millions; acceptance, and the break-even in the results: percent.
    """
    nbytes, a = 1e6 * weights_m * weight_bytes, acceptance / 100
    machine = Machine("", nbytes, 1e9 * memory_gb_s, 2e6 * weights_m, 1e9 * gflop_s)
    knee, tokens = machine.knee(), tokens_a_pass(a, k)

    def price(rows: int) -> float:
        return max(1.0, rows / knee)

    least = break_even(k, price(k + 1) / price(1) + k * draft_cost)
    worth = tokens - k * draft_cost  # what is left of a pass once its drafts are paid
    users = users_that_gain.right(knee, worth, k) if worth > 1 else 0.0
    one = predict({k: 1}, a, lambda rows: price(rows) / price(1), draft_cost)
    return {
        "weights_gb": nbytes / 1e9,
        "passes_s": machine.memory_bound(1),
        "tokens_s": machine.compute_bound(),
        "knee_rows": knee,
        "tokens_pass": tokens,
        "speedup": one.speedup,
        "break_even": None if least is None else 100 * least,
        "users": users if users >= 1 else None,
    }


def break_even(k: int, cost: float) -> float | None:
    """The share of drafts at which k of them bring the tokens that a pass costs, or None."""
    if tokens_a_pass(1.0, k) <= cost:
        return None
    if cost <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        low, high = (low, share) if tokens_a_pass(share, k) > cost else (share, high)
    return high


def short(value: float) -> str:
    """Three digits, or all of a larger number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def html() -> str:
    """The calculator with the results for the values that it starts with."""
    fields = [field for group in GROUPS.values() for field in group]
    values = figures(**{field.name: field.value for field in fields})  # type: ignore[arg-type]
    inputs = "\n".join(fieldset(title, group) for title, group in GROUPS.items())
    shown = "\n".join(listing(title, group, values) for title, group in RESULTS.items())
    return f"""<form class="calculator" data-calculator aria-label="Bounds of a machine">
<div class="calculator-inputs">
{inputs}
</div>
<div class="calculator-results" aria-live="polite">
{shown}
</div>
<noscript><p>The results are those of the values above; with scripts they follow what you type.
</p></noscript>
</form>"""


def fieldset(title: str, fields: tuple[Field, ...]) -> str:
    """One group of inputs, each with its label and unit."""
    return "\n".join([f"<fieldset><legend>{title}</legend>", *map(control, fields), "</fieldset>"])


def control(field: Field) -> str:
    most = "" if field.most is None else f' max="{field.most:g}"'
    return (
        f'<label><span>{escape(field.label)}</span> <input type="number" name="{field.name}"'
        f' value="{field.value:g}" min="{field.least:g}"{most} step="{field.step}" required>'
        f" <span>{escape(field.unit)}</span></label>"
    )


def listing(title: str, results: tuple[Result, ...], values: dict[str, float | None]) -> str:
    """One group of results."""
    lines = [f"<h3>{title}</h3>", "<dl>"]
    for result in results:
        value = values[result.name]
        said = result.empty if value is None else short(value)
        lines += [
            f'<div><dt>{escape(result.label)}</dt><dd><output data-result="{result.name}"'
            f' data-empty="{escape(result.empty)}">{said}</output>'
            f" <span{' hidden' * (value is None)}>{result.unit}</span>"
            "</dd></div>"
        ]
    return "\n".join([*lines, "</dl>"])
