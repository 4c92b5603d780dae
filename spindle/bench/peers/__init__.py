"""This engine beside what a reader would use instead: same weights, same prompts, same lengths.

Each engine is loaded once, into a process of its own, so that its threads and its peak memory are
its own, and they take turns, so that a machine that slows down slows down for all. Between turns
the read bandwidth is measured: a token of one stream needs every weight once, so bandwidth / weight
bytes bounds the tokens a second. What is not installed is a gap with a name, and is not installed
by us. All is greedy, to the last token asked for.

    jobs.py      what is asked for: one stream, eight, long-tailed traffic
    roster.py    the engines: what each needs here, and how its process is started
    process.py   an engine in a process of its own, spoken to in lines of JSON
    child.py     that process, where it is Python: ours.py, hf.py, ct2.py; or llama_cpp.mjs (Node)
    turns.py     who runs when, and what the runs amount to
    tables.py    the same in Markdown

A child imports this package before its engine, and torch would count as CTranslate2's memory: so
nothing here imports torch before it is needed.
"""

from __future__ import annotations

import argparse
import importlib
import time
from functools import partial
from typing import Any

from spindle.bench import report

JOBS = ("one_stream", "eight_streams", "traffic")
ENGINES = (
    *("spindle", "spindle_int8", "transformers", "transformers_cb"),
    *("ctranslate2_float32", "ctranslate2_int8", "llama_cpp_f32", "llama_cpp_q4"),
)
# Names that other benchmarks use, and where they are.
ELSEWHERE = {"PROMPT": "jobs", "bytes_per_token": "jobs", "engines": "roster"}
ELSEWHERE |= {"Times": "hf", "transformers_model": "hf"}


def __getattr__(name: str) -> Any:
    if name not in ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{ELSEWHERE[name]}"), name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench peers`."""
    add, count = parser.add_argument, partial(parser.add_argument, type=int, metavar="N")
    add("-m", "--model", default="tiny", help="what to run (default: tiny)")
    names = f"of {', '.join(ENGINES)} (default: all; spindle is always among them)"
    add("--engines", nargs="+", default=list(ENGINES), metavar="ENGINE", help=names)
    names = f"of {', '.join(JOBS)} (default: all)"
    add("--jobs", nargs="+", default=list(JOBS), metavar="JOB", help=names)
    count("--new", default=128, help="tokens of a stream, but for traffic (default: 128)")
    count("--requests", default=24, help="requests of the traffic (default: 24)")
    count("--repeat", default=5, help="turns of each engine (default: 5)")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table a job in Markdown, and write JSON if a file was named."""
    from spindle.bench.peers import tables, turns

    report.check_json(args.json)
    start = time.perf_counter()
    asked = turns.Asked(
        args.model, args.engines, args.jobs, args.new, args.requests, args.repeat, args.device
    )
    result = turns.measure(asked)
    result["minutes"] = (time.perf_counter() - start) / 60
    report.publish(result, tables.as_markdown(result), args.json)
    return 0
