"""Options: where a server listens, whom it lets in, and how much it takes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle.decode.params import MAX_N, check_count, check_real
from spindle.errors import RequestError, shown


@dataclass(frozen=True)
class Options:
    """What a server is told when it starts; RequestError names what cannot be.

    host, port: where it listens; 0 takes a free port. name: of the model, as clients give it.
    api_key: what they send as a bearer token; None: nobody is asked, but where it listens on
    loopback alone, requests have to be for loopback too (a web page can have its own name point
    here). allow_origins: of which pages a browser may show the answers; "*": of all.
    max_body_bytes: of a request. max_prompts: in a request. max_prompt_tokens: of each; None: as
    many as fit. max_n: answers to each. max_queue: answers that may wait beside those that run.
    grace_s: seconds that running requests have to end when the server stops.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "spindle"
    api_key: str | None = None
    allow_origins: Sequence[str] = ()
    max_body_bytes: int = 2**20
    max_prompts: int = 64
    max_prompt_tokens: int | None = None
    max_n: int = 16
    max_queue: int = 256
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        check_count("port", self.port, 0, most=65535)
        for name in ("max_body_bytes", "max_prompts"):
            check_count(name, getattr(self, name))
        if self.max_prompt_tokens is not None:
            check_count("max_prompt_tokens", self.max_prompt_tokens)
        check_count("max_n", self.max_n, most=MAX_N)
        check_count("max_queue", self.max_queue, 0)
        check_real("grace_s", self.grace_s, 0, 86400, "seconds from 0 to 86400")
        for name in ("host", "name"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not value.isprintable():
                raise RequestError(f"{name}={shown(value)}: expected printable characters")
        self._check_key()

    def _check_key(self) -> None:
        """The key itself is in no message."""
        key = self.api_key
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise RequestError("api_key: expected printable ASCII characters, as a header has them")
        if key is not None and (not key or key.strip() != key):
            raise RequestError("api_key: expected at least one character, and no space around it")
