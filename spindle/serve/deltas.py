"""DeltaStream: one request as it comes, a Delta for each step that adds to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spindle.serve.outputs import Delta, RequestOutput
from spindle.threads import OneCall, one_at_a_time

if TYPE_CHECKING:
    from spindle.serve.llm import LLM


class DeltaStream(Iterator[Delta]):
    """What each step adds to one request; whoever steps the engine meanwhile, nothing is lost."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._name, self._open = llm, name, True
        self._ready: deque[Delta] = deque()
        self._seen: dict[int, tuple[int, int, bool]] = {}

    @property
    def one_call(self) -> OneCall:
        """Whom the engine lets in."""
        return self._llm.one_call

    def __next__(self) -> Delta:
        if not self._ready:
            self._go_on()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    @one_at_a_time
    def _go_on(self) -> None:
        """Step until there is something new, or all has been said."""
        watched = self._llm._watched
        while self._open and not self._ready:
            output = watched[self._name]
            if output is None:
                self._llm._advance()
                continue
            self._ready.extend(_new_in(output, self._seen))
            watched[self._name] = None
            if output.finished:
                del watched[self._name]
                self._open = False

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:  # not aborted here: this may be in the middle of anything
            self._llm._abandoned.append(self._name)

    def close(self) -> None:
        """Abort the request, if it has not ended; from a signal handler, after the step."""
        if not self._llm.one_call.is_within():
            self._close()
        elif self._open:
            self._open = False
            self._llm._abandoned.append(self._name)

    @one_at_a_time
    def _close(self) -> None:
        if self._open:
            self._open = False
            self._llm._watched.pop(self._name, None)
            self._llm._abort(self._name)
        self._ready.clear()


def _new_in(output: RequestOutput, seen: dict[int, tuple[int, int, bool]]) -> Iterator[Delta]:
    """What an output has beyond the characters, tokens and ends in `seen`, which are moved on."""
    for one in output.outputs:
        before = seen.get(one.index, (0, 0, False))
        now = len(one.text), len(one.token_ids), one.finish_reason is not None
        if now != before:
            seen[one.index] = now
            text, ids = one.text[before[0] :], one.token_ids[before[1] :]
            yield Delta(text, ids, one.index, one.finish_reason)
