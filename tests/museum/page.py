"""The book's page of the museum: written by a whole run, from the collection and its record."""

from __future__ import annotations

import json
from typing import Any

from museum.collection import KINDS
from museum.fault import ROOT, Fault
from museum.runner import RECORD, Outcome, score

PAGE = ROOT / "book" / "museum.md"
OPENING = """\
# The fault museum

Most faults on this page were reported of a real engine, or are kin to one that was, and then the
page says which. The others belong to a chapter, or were met in making it. Many of them go on
writing good English. Each is planted in a copy of the package as a change of **one line**, and the
tests that are to notice are run on the copy. A fault that survives shows where a test is missing.

**{score}**, on {date}. `make museum` does it again, in {minutes} minutes of one core;
`.venv/bin/python tests/museum/run.py --only NAME` does it to one fault, and `make test` takes a
handful of them each time. <!-- since -->

Read a room as you would a crime novel: what a user saw, then the line, and guess what goes wrong
before you read why. The minus is our line, the plus is the fault.

{table}
"""
ROOM = """
## {title}

{faults}"""
FAULT = """\
### {title}

**Seen.** {seen}

```diff
# spindle/{file}
- {before}
+ {after}
```

{why} {source}

*{caught} by* `{test}` *in* `tests/{file_of_test}`.
"""


def read() -> dict[str, Any]:
    """The record of the last whole run."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def render() -> str:
    """The page as it should be, in Markdown."""
    record = read()
    outcomes = {name: outcome_of(its) for name, its in record["faults"].items()}
    rooms = [
        ROOM.format(title=kind, faults="\n".join(section(f, outcomes[f.name]) for f in faults))
        for kind, faults in KINDS.items()
    ]
    opening = OPENING.format(
        score=score(outcomes.values()),
        date=record["date"],
        minutes=round(record["cpu_minutes"]),
        table=table(outcomes),
    )
    return opening + "".join(rooms)


def write() -> None:
    """Write the page into the book."""
    PAGE.write_text(render(), encoding="utf-8")


def outcome_of(kept: dict[str, Any]) -> Outcome:
    return Outcome(**{name: value for name, value in kept.items() if name != "digest"})


def table(outcomes: dict[str, Outcome]) -> str:
    """The rooms, with how many faults each has and how many of them are caught."""
    rows = ["| room | faults | caught |", "|---|---:|---:|"]
    for kind, faults in KINDS.items():
        caught = sum(outcomes[fault.name].is_caught for fault in faults)
        anchor = kind.lower().replace(" ", "-")
        rows.append(f"| [{kind}](#{anchor}) | {len(faults)} | {caught} |")
    return "\n".join(rows)


def section(fault: Fault, outcome: Outcome) -> str:
    """One fault: what was seen, its line, why, where it was met, and who noticed."""
    before, after = (part.strip() for part in fault.lines())
    file, test = (outcome.test or fault.tests[0]).split("::")
    caught = {"caught": "Caught", "hung": "Caught, as it hung,"}.get(outcome.verdict, "Not caught")
    return FAULT.format(
        title=fault.title,
        seen=fault.seen,
        file=fault.file,
        before=before,
        after=after or "(nothing)",
        why=fault.why,
        source=source_of(fault),
        caught=caught,
        test=test,
        file_of_test=file,
    )


def source_of(fault: Fault) -> str:
    """Where it was met, with links."""
    sentences = []
    if fault.report:
        _, _, _, owner, project, _, number = fault.report.split("/")
        link = f"[{owner}/{project} #{number}]({fault.report})"
        sentences.append(f"Kin to {link}: there {fault.kin}." if fault.kin else f"Met in {link}.")
    if fault.chapter:
        (notebook,) = ROOT.glob(f"notebooks/{fault.chapter}_*.ipynb")
        link = f"[chapter {fault.chapter}](../notebooks/{notebook.name})"
        sentences.append(f"Planted in {link}." if fault.breaks else f"More in {link}.")
    return " ".join(sentences)
