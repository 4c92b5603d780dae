"""`spindle batch`: from its options to its exit status."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import combinations
from pathlib import Path
from typing import IO

from tqdm import tqdm

from spindle import hub
from spindle.batch.digest import settings_of
from spindle.batch.ledger import Ledger
from spindle.batch.lines import (
    RESULT_ID,
    Refused,
    RunWith,
    Task,
    numbered,
    read_line,
    result,
    tasks,
)
from spindle.batch.results import Results
from spindle.batch.work import Ended, EngineOptions, answer_here, engine
from spindle.decode.params import check_count
from spindle.errors import RequestError, SpindleError, brief, shown
from spindle.openai_form import BodyError, error_body
from spindle.paths import why_no_file


def run(args: argparse.Namespace) -> int:
    """Answer the lines of a file into another; returns how many were refused.

    What was done before is not done again. SpindleError: a file or an option that cannot be used,
    or results that belong to other lines; then nothing has been written.
    """
    options, replicas = _options(args), check_count("--replicas", args.replicas)
    source, out, errors = _paths(args)
    name = args.served_model_name or args.model
    if not name.isprintable():
        right = "expected printable characters, which --served-model-name can give it"
        raise RequestError(f"the model is called {shown(name)}: {right}")
    hub.resolve(options.model)  # there is such a model
    try:
        with ExitStack() as stack:
            results = stack.enter_context(Results(out))
            ledger = stack.enter_context(closing(Ledger()))
            done = read_results(results, ledger, source)
            if replicas == 1:
                llm = engine(options)
                results.check(run_with := RunWith(name, settings_of(llm, options)))
            file = None if errors is None else stack.enter_context(_opened(errors))
            results.repair()
            journal = stack.enter_context(closing(Journal(source, results, file, args.quiet, done)))
            todo = journal.noted(tasks(source, name, ledger, journal.take))
            if replicas == 1:
                answer_here(llm, run_with, todo, journal.take, options.window)
            else:
                from spindle.batch.cluster import answer_on_cluster

                there = results.made_with
                answer_on_cluster(options, name, there, todo, journal.take, replicas)
            results.sync()
    except sqlite3.Error as cause:
        elsewhere = "TMPDIR=DIRECTORY puts it elsewhere"
        raise SpindleError(f"the table of custom_ids: {cause}; {elsewhere}") from None
    return journal.refused


def _options(args: argparse.Namespace) -> EngineOptions:
    """The engine's options, those checked that are cheap to. RequestError: names the option."""
    for name in ("max_seqs", "max_model_len", "num_blocks"):
        if getattr(args, name) is not None:
            check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    names = EngineOptions.__dataclass_fields__
    return EngineOptions(**{name: getattr(args, name) for name in names})


def _paths(args: argparse.Namespace) -> tuple[Path, Path, Path | None]:
    """IN, OUT and the file for errors. RequestError: one is none, or two are the same."""
    source, out, errors = args.input, args.output, args.errors
    for path in (source, out, errors):
        if path == Path("-"):
            raise RequestError("-: a kill would lose what a pipe holds; expected a file")
    if why := why_no_file(source):
        raise RequestError(f"{source}: {why}; expected a file of lines to answer")
    if not os.access(source, os.R_OK):
        raise RequestError(f"{source}: it may not be read")
    for path in filter(None, (out, errors)):
        if os.path.lexists(path) and (why := why_no_file(path)):
            raise RequestError(f"{path}: {why}; expected a file, or none yet")
        if not path.absolute().parent.is_dir():
            raise RequestError(f"{path}: there is no directory {path.parent}")
    given = [path for path in (source, out, errors) if path is not None]
    if any(_is_same(one, other) for one, other in combinations(given, 2)):
        raise RequestError("IN, OUT and --errors: two of them are the same file; expected others")
    return source, out, errors


def _is_same(one: Path, other: Path) -> bool:
    both = os.path.exists(one) and os.path.exists(other)  # which takes names that no file can have
    return one.samefile(other) if both else one.resolve() == other.resolve()


def _opened(errors: Path) -> IO[str]:
    try:
        return errors.open("w", encoding="utf-8")
    except OSError as cause:
        raise SpindleError(f"--errors {errors}: {cause.strerror}") from None


def read_results(results: Results, ledger: Ledger, source: Path) -> int:
    """Note what is done already, and return how much. SpindleError: it belongs to other lines.

    Where something is, the lines are read once more than else, for each result to find its own.
    """
    done = 0
    for custom_id, its_id in results.read():
        done += 1
        if not ledger.note_result(custom_id, its_id):
            raise SpindleError(f"{results.path}: {shown(custom_id)} is there twice")
    for number, raw in numbered(source) if done else ():
        try:
            custom_id = read_line(raw)["custom_id"]
        except BodyError:
            continue
        result_id = ledger.find_line(custom_id, number)
        assert results.made_with is not None, "some were read"
        if result_id not in (None, results.made_with.result_id(raw)):
            raise _other(results, custom_id, f"not of line {number} of {source} as it is now")
    missing = ledger.without_line()
    if missing is not None:
        raise _other(results, missing, f"of no line of {source}")
    return done


def _other(results: Results, custom_id: str, why: str) -> SpindleError:
    right = "expected results of these lines, or a new file"
    return SpindleError(f"{results.path}: the result of {shown(custom_id)} is {why}; {right}")


class Journal:
    """Where lines end: as a result in OUT, or refused, on stderr and in the file of errors."""

    def __init__(
        self, source: Path, results: Results, errors: IO[str] | None, quiet: bool, done: int
    ) -> None:
        self._source, self._results, self._errors, self._quiet = source, results, errors, quiet
        self._before, self._start, self._unused = done, time.perf_counter(), set[str]()
        self.answered = self.refused = self._new_tokens = 0
        shows = not quiet and sys.stderr is not None and sys.stderr.isatty()
        total = sum(1 for _ in numbered(source)) if shows else None
        self._bar = tqdm(total=total, initial=done, disable=not shows, unit="line")

    def noted(self, todo: Iterator[Task]) -> Iterator[Task]:
        """The same tasks, their fields that have no effect remembered, to be told at the end."""
        self._start = time.perf_counter()  # the model is loaded
        for task in todo:
            self._unused.update(task.asked.unused)
            yield task

    def take(self, ended: Ended) -> None:
        """Write how a line ended, at once."""
        if isinstance(ended, Refused):
            self.refused += 1
            self._refuse(ended)
        else:
            self._results.append(ended.result)
            self.answered += 1
            body = ended.result["response"]["body"]
            self._new_tokens += body["usage"]["completion_tokens"]
        self._bar.update()

    def _refuse(self, refused: Refused) -> None:
        words = f"{self._source}: line {refused.number}: {refused.error}"
        _tell(brief(words))
        if self._errors is None:
            return
        its_id, body = f"{RESULT_ID}line_{refused.number}", error_body(refused.error)
        line = result(its_id, refused.custom_id, refused.status_code, body)
        line["line"] = refused.number
        try:
            print(json.dumps(line), file=self._errors, flush=True)
        except OSError as cause:
            raise SpindleError(f"{self._errors.name}: {cause.strerror}") from None

    def close(self) -> None:
        """Say what was done, however it ended."""
        self._bar.close()
        if self._quiet:
            return
        if self._unused:
            _tell(f"without effect here: {', '.join(sorted(self._unused))}")
        seconds = time.perf_counter() - self._start
        _tell(
            f"{self.answered} lines answered, {self._before} before, {self.refused} refused · "
            f"{seconds:.2f} s · {self._new_tokens / seconds:.1f} tok/s"
        )


def _tell(words: str) -> None:
    """Say it on stderr, above the bar; where that cannot be written, no answer is lost for it."""
    if sys.stderr is not None:  # it was closed before we began
        with suppress(OSError):
            tqdm.write(words, file=sys.stderr)
