"""One thread at a time: a second one hears so at once, before anything is half done."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from spindle.errors import RequestError
from spindle.interrupts import held_back

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Lets a thread in, and in again; RequestError for any other until it is out."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RequestError(
                "this LLM is at work for another thread; expected one thread at a time: give "
                "threads a lock that they share, or one of them all the calls"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class _Guarded(Protocol):
    @property
    def one_thread(self) -> OneThread: ...


G = TypeVar("G", bound=_Guarded)


def by_one_thread(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """A method that a second thread may not call while the first is in one of its kind.

    Ctrl-C waits while somebody is let in or out: else a thread might never be out.
    """

    @functools.wraps(method)
    def guarded(self: G, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back() as hold, self.one_thread, hold.let_through():
            return method(self, *args, **kwargs)

    return guarded
