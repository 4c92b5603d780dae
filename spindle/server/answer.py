"""Answer: a Reply of the engine's loop as a response, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from spindle import __version__
from spindle.errors import SpindleError
from spindle.openai_form import Asked, check_numbers
from spindle.openai_form import response as whole_answer
from spindle.serve.outputs import RequestOutput
from spindle.server.chunks import DONE, Chunks, event
from spindle.server.loop import EngineLoop, Reply
from spindle.server.refusals import SHUTTING_DOWN, body_of, unavailable
from spindle.tokenizer import Tokenizer


class Answer(Response):
    """Runs a reply to its end, and writes it whole or as it comes; a client that leaves ends it.

    head: the fields that whole answers and chunks share. Nothing is written before the first token,
    so that a refusal by the engine has its status.
    """

    def __init__(
        self,
        engine: EngineLoop,
        tokenizer: Tokenizer,
        asked: Asked,
        reply: Reply,
        head: dict[str, Any],
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._asked, self._reply, self._head = asked, reply, head
        self._extra = {"system_fingerprint": f"spindle-{__version__}"}
        self._notes = {"spindle-unused-fields": ", ".join(asked.unused)} if asked.unused else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what ends the reply before anything was written."""
        self._engine.submit(self._reply)
        async with _followed(self._engine, self._reply, receive):
            await self._reply.wait()
            self._check()
            if self._asked.stream:
                await self._stream(send)
            else:
                response = await self._whole()
                await response(scope, receive, send)

    async def _whole(self) -> Response:
        while not self._reply.is_over:
            await self._reply.wait()
        self._check()
        outputs, head = self._outputs(), self._head
        answer = whole_answer(
            self._asked,
            outputs,
            self._tokenizer,
            response_id=head["id"],
            model=head["model"],
            created_s=head["created"],
        )
        seeds = [output.seed for output in outputs for _ in output.outputs]
        for choice, seed in zip(answer["choices"], seeds, strict=True):
            choice["seed"] = seed
        return JSONResponse(answer | self._extra, headers=self._notes)

    async def _stream(self, send: Send) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **self._notes}
        begin = Response(None, headers=headers, media_type="text/event-stream")
        raw = [pair for pair in begin.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            last = await self._send_chunks(send)
        except asyncio.CancelledError:  # the server ends, in the middle of a step
            last = event(body_of(unavailable(SHUTTING_DOWN)))
        except SpindleError as error:  # the status is out: the error is the last event
            last = event(body_of(error))
        await send({"type": "http.response.body", "body": last})

    async def _send_chunks(self, send: Send) -> bytes:
        """Send what there is as it comes; returns what is to be sent last."""
        chat = self._asked.messages is not None
        kind = "chat.completion.chunk" if chat else "text_completion"
        chunks = Chunks(self._asked, self._tokenizer, self._head | {"object": kind} | self._extra)
        over = False
        while not over:
            over = self._reply.is_over  # before it is read: so nothing comes after that
            self._check()
            events = b"".join(map(event, chunks.new(self._reply.outputs)))
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if not over:
                await self._reply.wait()
        counted = event(chunks.usage(self._outputs())) if self._asked.include_usage else b""
        return counted + DONE

    def _outputs(self) -> list[RequestOutput]:
        return [output for output in self._reply.outputs if output is not None]

    def _check(self) -> None:
        """Raises what ended the reply, or NumericsError: a model that could not go on."""
        if self._reply.error is not None:
            raise self._reply.error
        check_numbers(self._outputs())


@asynccontextmanager
async def _followed(engine: EngineLoop, reply: Reply, receive: Receive) -> AsyncIterator[None]:
    """Cancel a reply when its client goes away, or where the block is left before its end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        engine.cancel(reply)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        engine.cancel(reply)
