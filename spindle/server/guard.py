"""Guard: who is let in, before anything of a request is read; and what is counted of it."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spindle.errors import shown
from spindle.server.metrics import Meter
from spindle.server.refusals import SHUTTING_DOWN, Refusal, response_to, unavailable

OPEN = ("/health",)  # for whoever restarts servers and has no key


class Guard:
    """Middleware that asks for the key, or for a Host of loopback, and counts the responses.

    A page on the web may have its own name resolve to 127.0.0.1, and is then of the same origin as
    a server there. Its requests carry that name, so a server that listens on loopback alone and
    asks for no key takes requests for loopback only.
    """

    def __init__(self, app: ASGIApp, meter: Meter, api_key: str | None, on_loopback: bool) -> None:
        self._app, self._meter, self._on_loopback = app, meter, on_loopback
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with the refusal."""

        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._meter.responded(message["status"])
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        app = self._app if refusal is None else response_to(refusal)
        try:
            await app(scope, receive, counted)
        except asyncio.CancelledError:  # the server ends, and does not wait for it
            if not begun:
                await response_to(unavailable(SHUTTING_DOWN))(scope, receive, counted)
        except Exception:  # a fault of ours: it is answered farther out
            self._meter.responded(500)
            raise

    def _refusal(self, path: str, headers: Headers) -> Refusal | None:
        if path in OPEN:
            return None
        if self._key is not None:
            return None if self._has_key(headers) else _no_key(headers)
        if self._on_loopback and not _is_for_loopback(headers.get("host")):
            right = "expected localhost; a server for other names is started with an API key"
            said = shown(headers.get("host"))
            return Refusal(403, f"this request is for the host {said}: {right}", "host_not_allowed")
        return None

    def _has_key(self, headers: Headers) -> bool:
        """Compared in a time that does not tell how much of it is right."""
        assert self._key is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip(" ").encode("latin-1"), self._key)
        return same and scheme.lower() == "bearer"


def _no_key(headers: Headers) -> Refusal:
    wrong = "this is not the API key" if "authorization" in headers else "there is no API key"
    message = f"{wrong}; expected the header `Authorization: Bearer KEY`"
    ask = {"WWW-Authenticate": "Bearer"}
    return Refusal(401, message, "invalid_api_key", headers=ask)


def is_loopback(address: str) -> bool:
    """Whether an address, or localhost, is this machine for itself alone."""
    if address == "localhost" or address.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_for_loopback(host: str | None) -> bool:
    """Whether a Host header, with or without a port, names loopback; browsers always send one."""
    if host is None:
        return True
    match = re.fullmatch(r"\[(?P<v6>[^\]]*)\](:\d*)?|(?P<name>[^:]*)(:\d*)?", host)
    return match is not None and is_loopback((match["v6"] or match["name"] or "").lower())
