"""What spindle raises when the fault is in what it was given.

    SpindleError
    ├── ModelNotFound        a name that is no model here, and the command that would bring it
    ├── CheckpointError      a file that is missing, damaged, or does not fit its config.json
    ├── ConfigError          a config.json that asks for a computation we do not do
    ├── TokenizerError       a tokenizer.json that cannot be read or is of an unknown kind
    ├── RequestError         a prompt or parameter that cannot be honoured (a ValueError too)
    ├── NumericsError        logits that are no distribution: NaN, +inf, or nothing but -inf
    ├── CaptureError         a step that a graph would refuse, or replay wrongly (decode.oplog)
    ├── OutOfBlocks          a pool of KV blocks with fewer left than are needed
    └── BlockError           a block given back twice, or one that the pool does not have

A message names the thing, says what was wrong with it, and says what would be right. It is raised
before anything has changed. Asserts are for what cannot happen; these are for what users do.
"""

from __future__ import annotations

from typing import Any


class SpindleError(Exception):
    """The root of every error that spindle raises on purpose.

    Examples:

        >>> from spindle import LLM, SpindleError
        >>> llm = LLM("tiny", max_seqs=2)
        >>> try:
        ...     llm.generate("")
        ... except SpindleError as error:
        ...     print(f"{type(error).__name__}: {error}")
        RequestError: the prompt has no tokens; expected at least one
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Through a pipe as it was: a child's own arguments are not those of an exception."""
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[SpindleError], args: tuple[Any, ...]) -> SpindleError:
    return kind.__new__(kind, *args)


class ModelNotFound(SpindleError):
    """A model that is neither bundled, nor a directory, nor in the cache, nor to be downloaded."""


class CheckpointError(SpindleError):
    """A checkpoint whose files are missing, damaged, or disagree with its config.json."""


class ConfigError(SpindleError):
    """A config.json that asks for something we would compute wrongly, so we refuse by name."""


class TokenizerError(SpindleError):
    """A tokenizer that is missing, unreadable, or of a kind we do not decode."""


class RequestError(SpindleError, ValueError):
    """A prompt or a parameter that cannot be honoured; nothing has been changed."""


class NumericsError(SpindleError, ArithmeticError):
    """Logits from which nothing can be sampled."""


class OutOfBlocks(SpindleError):
    """A pool with fewer blocks to take than are `needed`; `free` and `total` are counts too."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        words = "block" if needed == 1 else "blocks"
        super().__init__(f"{needed} {words} needed, {free} of {total} free; nothing was taken")
        self.needed, self.free, self.total = needed, free, total


class BlockError(SpindleError):
    """A block or a position used against the rules of its pool; nothing has been changed."""


def shown(value: object) -> str:
    """A user's value for a message: its repr, or its type where that is long or cannot be made."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, an object that will not be printed
        text = ""
    return text if 0 < len(text) <= 200 else f"a {type(value).__name__}"


def brief(words: object) -> str:
    """Words out of a file or a library, for a message: 300 characters, all fit for a terminal."""
    text = str(words)
    return printable(text if len(text) <= 300 else f"{text[:300]}...")


def printable(text: str) -> str:
    """The text with its control characters spelled out: what a terminal shows, and does not do."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
