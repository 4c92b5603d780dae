"""Bookkeeping is done whole or not at all: Ctrl-C waits until it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Hold:
    """Where a SIGINT waits: it is handled at the end, or by `let_through` at once."""

    def __init__(self, handler: Handler) -> None:
        self._handler, self._holds = handler, True
        self._came: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        if not self._holds:
            self.deliver()

    def deliver(self) -> None:
        """Handle what has come, once, as it would have been."""
        came, self._came = self._came, []
        if came:
            self._handler(*came[0])

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """A part of the block that may be broken off, as if nobody held anything back."""
        self._holds = False
        try:
            self.deliver()
            yield
        finally:
            self._holds = True


@contextmanager
def held_back() -> Iterator[Hold]:
    """A SIGINT that comes inside the block is handled after it, as it would have been.

    Only Python's main thread gets any: elsewhere, and where a handler was set by other means than
    Python's, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield Hold(lambda number, frame: None)
        return
    hold = Hold(handler)
    signal.signal(signal.SIGINT, hold)
    try:
        yield hold
    finally:
        signal.signal(signal.SIGINT, handler)
        hold.deliver()
