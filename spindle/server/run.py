"""Server: an engine and its endpoints behind a port; in the foreground, or in a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from spindle.errors import RequestError, SpindleError, shown
from spindle.model.layers import Model
from spindle.serve.llm import LLM
from spindle.server.app import Service
from spindle.server.guard import is_loopback
from spindle.server.loop import EngineLoop
from spindle.server.metrics import Meter
from spindle.server.options import Options
from spindle.server.protocol import counted
from spindle.server.refusals import SHUTTING_DOWN

LOG = logging.getLogger(__name__)
FLUSH_S = 2  # that clients have to read the last of what they are sent; what runs on is broken off
BACKLOG = 2048  # connections that the kernel holds for us
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


class _Web(uvicorn.Server):
    """uvicorn, but for signals, which are ours to handle."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves an LLM until it is told to stop; nobody else may use the LLM meanwhile.

    port: the one that was chosen, if the options leave it open. A client connects from the moment
    that there is a Server, and is answered once it runs. Raises RequestError as EngineLoop does,
    and for a port that cannot be had; `listener`: one from `bound` that is there already.
    """

    def __init__(self, llm: LLM, options: Options, listener: socket.socket | None = None) -> None:
        self._options, meter = options, Meter()
        self._engine = EngineLoop(llm, meter, options.max_queue)
        self._socket = bound(options) if listener is None else listener
        with _in_words(options):
            self._socket.listen(BACKLOG)
        address, self.port = self._socket.getsockname()[:2]
        self.on_loopback = is_loopback(address)
        self._service = Service(llm, self._engine, meter, options, self.on_loopback)
        config = uvicorn.Config(
            self._service.app,
            http=counted(meter.responded),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # it warns of what strangers send
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=FLUSH_S,
        )
        self._web = _Web(config)
        self._running, self._told = threading.Event(), False

    @property
    def url(self) -> str:
        """What clients take for the base of all paths: http://127.0.0.1:8000/v1."""
        host = self._options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    @property
    def stats(self) -> dict[str, int]:
        """`LLM.stats`, as it was after the last step."""
        return self._engine.stats

    def wait_idle(self, timeout_s: float) -> bool:
        """Until nothing is unfinished, and `stats` says so; whether it is so in that time."""
        return self._engine.idle.wait(timeout_s)

    async def run(self) -> None:
        """Serve, until `stop` or `drain`; then nothing is left of it but the LLM."""
        self._loop = asyncio.get_running_loop()
        self._running.set()
        self._engine.start()
        try:
            await self._web.serve(sockets=[self._socket])
        finally:
            await self._engine.stop()

    async def drain(self) -> None:
        """Take nothing more, let what runs end within `grace_s`, abort the rest, and stop."""
        self._engine.refuse(SHUTTING_DOWN)
        self._service.break_off()
        if not self._engine.idle.is_set() and self._options.grace_s:
            LOG.warning("shutting down: what runs has %g s to end", self._options.grace_s)
        await asyncio.to_thread(self._engine.idle.wait, self._options.grace_s)
        self._engine.abort_all()
        self._web.should_exit = True

    def stop(self) -> None:
        """Begin to drain, from any thread, unless it has begun, or all is over."""
        if not self._told and not self._loop.is_closed():
            self._told = True
            asyncio.run_coroutine_threadsafe(self.drain(), self._loop)

    def start(self) -> threading.Thread:
        """Run in a thread with an event loop of its own; back when it does."""
        thread = threading.Thread(target=asyncio.run, args=(self.run(),), name="spindle-server")
        thread.start()
        self._running.wait()
        return thread

    def run_until_signal(self, ready: Callable[[], None]) -> int:
        """Run in this thread, the main one, until SIGINT or SIGTERM; returns which, 0 for `stop`.

        `ready` is called when a signal will be heeded. A second one ends the process where it is,
        with status 130.
        """
        return asyncio.run(self._until_signal(ready))

    async def _until_signal(self, ready: Callable[[], None]) -> int:
        loop, came = asyncio.get_running_loop(), list[int]()

        def note(number: int, frame: FrameType | None) -> None:
            if came:
                os._exit(INTERRUPTED)
            came.append(number)
            loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            ready()
            await self.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return came[0] if came else 0


def bound(options: Options) -> socket.socket:
    """A socket at the options' address, which does not listen yet. SpindleError: it is in use."""
    with _in_words(options):
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    return listener


@contextmanager
def _in_words(options: Options) -> Iterator[None]:
    """What the system says of an address, as an error of ours."""
    try:
        yield
    except (OSError, UnicodeError, ValueError) as cause:
        said = getattr(cause, "strerror", None) or str(cause)
        right = "expected an address of this machine and a free port; port 0 takes one"
        raise SpindleError(f"{shown(options.host)}, port {options.port}: {said}: {right}") from None


@contextmanager
def serving(
    model: str | Path | Model | LLM, options: Options | None = None, **llm_options: Any
) -> Iterator[Server]:
    """A server in a thread, for as long as the block takes; beside a running event loop, too.

    model: an LLM, which is the server's alone meanwhile, or what LLM takes, with `llm_options`.
    options: by default those of Options, but at any free port, and with a name that is given. At
    the end running requests are aborted after `grace_s`. Raises what LLM and Server raise.
    """
    if isinstance(model, LLM) and llm_options:
        raise RequestError(f"{', '.join(llm_options)}: expected where the LLM was made")
    if options is None:
        name = model if isinstance(model, str) else Options.name
        options = Options(port=0, name=name, grace_s=0)
    server = Server(model if isinstance(model, LLM) else LLM(model, **llm_options), options)
    thread = server.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
