"""One thread at a time, one call at a time: who comes in between hears so, and changes nothing."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from spindle.errors import RequestError
from spindle.interrupts import held_back

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Lets a thread in, and in again; RequestError for any other until it is out."""

    def __init__(self, what: str) -> None:
        _check_fork()
        self._what, self._lock = what, threading.RLock()
        _fork.has_used_threads = True

    def __enter__(self) -> None:
        if _fork.is_child:
            _check_fork()
        if not self._lock.acquire(False):
            raise RequestError(
                f"this {self._what} is at work for another thread; expected one thread at a time: "
                "give threads a lock that they share, or one of them all the calls"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class OneCall:
    """One call at a time, of the one thread that is let in; RequestError for one within another.

    Such a call can only come from what a call runs on its way: a signal handler, a drafter.
    """

    def __init__(self, one_thread: OneThread, instead: str) -> None:
        self._one_thread, self._instead, self._inside = one_thread, instead, False

    def __enter__(self) -> None:
        self._one_thread.__enter__()
        if self._inside:
            self._one_thread.__exit__()
            raise RequestError(
                f"this {self._one_thread._what} is in the middle of a call, from which this one "
                f"comes (a signal handler, a drafter); expected {self._instead}"
            )
        self._inside = True  # a handler that comes before this line has the call for itself

    def __exit__(self, *error: object) -> None:
        self._inside = False
        self._one_thread.__exit__()

    def is_within(self) -> bool:
        """Whether this thread is in a call already. RequestError: another one is."""
        with self._one_thread:
            return self._inside


class _OfOneThread(Protocol):
    one_thread: OneThread


class _Guarded(Protocol):
    @property
    def one_call(self) -> OneCall: ...


S = TypeVar("S", bound=_OfOneThread)
G = TypeVar("G", bound=_Guarded)


def by_one_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that a second thread may not call while the first is in one of its kind."""

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.one_thread:
            return method(self, *args, **kwargs)

    return guarded


def one_at_a_time(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """A method that nobody may call while a thread is in one of its kind, not even that thread.

    Ctrl-C waits while somebody is let in or out: else a thread might never be out.
    """

    @functools.wraps(method)
    def guarded(self: G, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back() as hold, self.one_call, hold.let_through():
            return method(self, *args, **kwargs)

    return guarded


class NoCopies:
    """What is used where it was made: it is not copied, and not sent to another process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise RequestError(
            f"{kind}: it cannot be copied or pickled (threads, caches and memory are its own); "
            f"expected a new {kind} where it is needed"
        )


# libgomp's teams do not survive a fork: a child's torch waits for its parent's threads for ever.


class _Fork:
    """What is known of forks in this process."""

    has_used_threads = is_child = False  # a child: of a process that had used them

    def note_child(self) -> None:
        self.is_child |= self.has_used_threads


_fork = _Fork()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_fork.note_child)


def _check_fork() -> None:
    """RequestError: torch would wait here for threads that a fork did not take along."""
    if _fork.is_child and sys.modules["torch"].get_num_threads() > 1:
        raise RequestError(
            "this process was forked off one that had used torch's threads, which a fork does not "
            'take along: work would wait for them for ever; expected the start method "spawn", or '
            "torch.set_num_threads(1) in the child"
        )
