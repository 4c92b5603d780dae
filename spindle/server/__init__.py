"""An LLM behind OpenAI's endpoints: one thread steps the engine, an event loop talks to clients.

options    where it listens, whom it lets in, how much it takes on
run        Server and `serving`: the port, the threads, the signals
app        the endpoints: bodies in, answers and streams out
protocol   HTTP, and what is none
guard      the API key, the Host, what is counted
loop       the engine's thread, and how the event loop talks with it
chunks     what a stream says, step by step
metrics    what /metrics says
refusals   errors with their HTTP status

from spindle.server import serving
with serving("tiny") as server:
    client = openai.OpenAI(base_url=server.url, api_key="none")
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from spindle.errors import SpindleError

if TYPE_CHECKING:
    from spindle.server.options import Options
    from spindle.server.run import Server, bound, serving

__all__ = ["Options", "Server", "bound", "serving"]

NEEDS = ("starlette", "uvicorn", "h11", "prometheus_client")


def __getattr__(name: str) -> Any:
    """The names above, once they are asked for. SpindleError: the extra is not installed."""
    if name not in __all__:
        raise AttributeError(f"module 'spindle.server' has no attribute {name!r}")
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        raise SpindleError(
            f"a server needs {', '.join(missing)}: `pip install 'spindle[serve]'` brings it"
        )
    home = "options" if name == "Options" else "run"
    return getattr(importlib.import_module(f"spindle.server.{home}"), name)
