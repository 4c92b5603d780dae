"""The process of an engine that is Python: `python -m spindle.bench.peers.child NAME`.

What the engines print goes to stderr; stdout is for answers alone.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

from spindle.errors import SpindleError

# Engine -> the module that has it, and what of it. Each takes the settings of the load message.
HOMES = {
    "spindle": ("ours", "Spindle"),
    "spindle_int8": ("ours", "SpindleInt8"),
    "transformers": ("hf", "Padded"),
    "transformers_cb": ("hf", "Continuous"),
    "ctranslate2_float32": ("ct2", "CTranslate2"),
    "ctranslate2_int8": ("ct2", "CTranslate2"),
}
WATCH_S = 1.0


class Engine(Protocol):
    """What a peer is made of."""

    version: str

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Answer (ids, new tokens) each: `ids`, when each one's first came, seconds of it all."""


def serve(lines: Iterable[str], answers: TextIO, make: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer each message with a line; an exception is an answer too."""
    engine: Any = None
    for line in lines:
        message = json.loads(line)
        try:
            if "load" in message:
                engine = make(message["load"])
                reply = {"version": engine.version}
            elif "run" in message:
                reply = {"peak_bytes": 0} | engine.run(message["run"])
                reply["peak_bytes"] = reply["peak_bytes"] or _peak_bytes()
            else:
                reply = {"gap": engine.top2_gap(message["top2"])}
            answer: dict[str, Any] = {"reply": reply}
        except SpindleError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _peak_bytes() -> int:
    """Peak of this process's resident memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_with(parent: int) -> None:
    """End in the middle of a run, too, when the parent was killed and can end nobody."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def main(name: str) -> None:
    """Serve one engine on stdin and stdout until the input ends."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, kind = HOMES[name]

    def make(settings: dict[str, Any]) -> Engine:
        engine: Engine = getattr(importlib.import_module(f"spindle.bench.peers.{module}"), kind)(
            settings
        )
        return engine

    status = 0
    try:
        serve(sys.stdin, answers, make)
    except Exception:  # as when nobody reads the answer
        traceback.print_exc()
        status = 1
    os._exit(status)  # threads of an engine that wait for work would keep the process


if __name__ == "__main__":
    main(sys.argv[1])
