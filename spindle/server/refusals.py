"""Refusal: an error with its HTTP status, and how it is written for a client."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

from spindle.errors import NumericsError, SpindleError
from spindle.openai_form import error_body

CLIENT_GONE = 499  # nobody reads it; it is counted
SHUTTING_DOWN = "the server is shutting down"


class Refusal(SpindleError):
    """What a client hears instead of an answer: a status, and what OpenAI says beside it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.kind, self.headers = kind, headers


def busy(message: str) -> Refusal:
    """Too many wait: the client may try again, in a second or later."""
    again = {"Retry-After": "1"}
    return Refusal(429, message, "rate_limit_exceeded", kind="rate_limit_error", headers=again)


def unavailable(message: str) -> Refusal:
    """The engine takes no requests any more."""
    return Refusal(503, message, "service_unavailable", kind="server_error")


def broken(message: str) -> Refusal:
    """It is not the client's fault."""
    return Refusal(500, message, "internal_error", kind="server_error")


def refusal_of(error: Exception) -> Refusal:
    """What a client is told of an error: the words of our own, and of others that there was one."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, NumericsError):
        return broken(str(error))
    if isinstance(error, SpindleError):
        return Refusal(400, str(error))
    return broken(f"the server failed ({type(error).__name__}); its log says where")


def body_of(error: Exception) -> dict[str, object]:
    """An error in OpenAI's form."""
    refusal = refusal_of(error)
    if isinstance(error, Refusal) or refusal.status != 400:
        return error_body(refusal, kind=refusal.kind, param=refusal.param, code=refusal.code)
    return error_body(error)


def response_to(error: Exception) -> Response:
    """An error as a whole response; in ASCII, for it may quote what has no bytes in UTF-8."""
    refusal, body = refusal_of(error), json.dumps(body_of(error))
    return Response(body, refusal.status, refusal.headers, media_type="application/json")
