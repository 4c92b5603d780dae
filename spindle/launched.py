"""A `spindle` command that torchrun has started: each of its processes is one rank of several.

All run the same command with the same options. Rank 0 alone reads stdin and is heard; it alone
minds Ctrl-C, and its end ends the others, with its exit status.
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress

from spindle import cli
from spindle.errors import SpindleError

OFFERED = ("generate", "-h", "--help")


def main(argv: Sequence[str]) -> int:
    """Run one rank's share of a command; returns the exit status of rank 0."""
    try:
        from spindle import parallel  # which takes seconds, as it brings torch

        ranks = parallel.init()
        if ranks.rank > 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (SpindleError, KeyboardInterrupt) as error:
        return cli.report(error)
    if ranks.rank == 0:
        return ranks.close(_command(argv))
    status, said = _in_silence(argv)
    return ranks.close(status, said)


def note(error: str) -> None:
    """Have torchrun say it at the end of what it says of a command that has failed."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        # Torch's own ErrorHandler adds a traceback, and then these words are not shown.
        with suppress(OSError), open(file, "w") as its:
            extra = {"timestamp": str(int(time.time()))}
            json.dump({"message": {"message": error, "extraInfo": extra}}, its)


def _command(argv: Sequence[str]) -> int:
    if argv and argv[0] not in OFFERED:
        words = f"{argv[0]}: not done by several ranks; expected `spindle generate`, or one process"
        cli.complain(words)
        return cli.USER_FAULT
    return cli.command(argv)


def _in_silence(argv: Sequence[str]) -> tuple[int, str]:
    """Run it unheard; its status, and the error that it would have said last."""
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        if "--debug" not in argv:  # which shows where every rank was
            stack.enter_context(redirect_stderr(said))
        status = _command(argv)
    lines = [line.partition(cli.ERROR)[2] for line in said.getvalue().splitlines()]
    return status, next(filter(None, reversed(lines)), "")
