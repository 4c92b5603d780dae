"""Protocol: HTTP as uvicorn reads it; what is none is refused in OpenAI's form, as all else is."""

from __future__ import annotations

import sys
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from spindle.errors import brief
from spindle.server.refusals import Refusal, response_to


class Protocol(H11Protocol):
    """One connection; it is over when its client hangs up, be it for sending alone.

    The FIN of a client that has gone looks the same, and its answer would hold blocks for nobody.
    """

    responded: Callable[[int], None]  # is told the status of what is refused here

    def send_400_response(self, msg: str) -> None:
        """Say why this cannot be read, unless an answer has begun, and hang up."""
        if self.cycle is not None:  # an answer that is being made goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            cause = sys.exception()  # it is called where h11's is handled
            status = cause.error_status_hint if isinstance(cause, h11.RemoteProtocolError) else 400
            message = f"this cannot be read ({brief(cause or msg)}); expected a request of HTTP/1.1"
            answer = response_to(Refusal(status, message, "invalid_http"))
            headers = [*answer.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            self.responded(status)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def counted(responded: Callable[[int], None]) -> type[Protocol]:
    """Protocol, for a server that counts its responses."""
    return type("Protocol", (Protocol,), {"responded": staticmethod(responded)})
