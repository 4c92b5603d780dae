"""StopScanner: text that comes in pieces, up to the first stop string.

A stop may lie across any number of pieces, so text that may be the beginning of one is held back:
the longest suffix of the text so far that is a proper prefix of a stop, and no more. It is released
by the character that breaks it, and at the end.

Which stop is the match does not depend on how the text is cut: the first one to be complete, read
character by character; of several that the same character completes, the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopScanner:
    """Releases text up to the first of the `stops`; then `matched` is that stop, before it None.

    Never is a character of the match released, and never is more held back than may be one. The
    work is a constant number of comparisons a character and stop, however the text repeats.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = [_Progress(stop) for stop in stops]
        self._held: deque[str] = deque()  # characters that may be the beginning of a stop

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that can be shown now. A stop completed while `may_stop` is false is text."""
        if not self._stops:  # nothing is ever held back
            return text
        released: list[str] = []
        for character in text if self.matched is None else "":
            self._held.append(character)
            complete = [one.stop for one in self._stops if one.push(character)]
            if complete and may_stop:
                self.matched = max(complete, key=len)
                self._release(len(self.matched), released)
                self._held.clear()
                break
            self._release(max((one.length for one in self._stops), default=0), released)
        return "".join(released)

    def flush(self) -> str:
        """What is held back, at the end of the text: nothing after a match."""
        rest = "".join(self._held)
        self._held.clear()
        return rest

    def _release(self, kept: int, released: list[str]) -> None:
        while len(self._held) > kept:
            released.append(self._held.popleft())


class _Progress:
    """How much of one stop the text so far ends with (Knuth, Morris and Pratt 1977).

    Borders are worked out as far as the text has come: a long stop costs no more than a short one.
    """

    def __init__(self, stop: str) -> None:
        self.stop, self.length = stop, 0
        self._borders = [0, 0]

    def push(self, character: str) -> bool:
        """Whether this character completes the stop; `length` then is what may begin the next."""
        self.length = self._longer(self.length, character)
        if self.length == len(self._borders):
            self._borders.append(self._longer(self._borders[-1], character))
        if self.length < len(self.stop):
            return False
        self.length = self._borders[self.length]
        return True

    def _longer(self, length: int, character: str) -> int:
        """What a prefix of that length comes to with one more character; or a shorter one."""
        while length and self.stop[length] != character:
            length = self._borders[length]
        return length + (self.stop[length] == character)
