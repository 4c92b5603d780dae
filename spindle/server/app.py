"""The endpoints: a body becomes a Reply of the engine's loop, and the Reply a response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spindle.errors import SpindleError, brief, shown
from spindle.openai_form import Asked, BodyError, chat_request, completion_request, read_body
from spindle.serve.llm import LLM
from spindle.server.answer import Answer
from spindle.server.guard import Guard
from spindle.server.loop import EngineLoop, Reply
from spindle.server.metrics import Meter
from spindle.server.options import Options
from spindle.server.refusals import CLIENT_GONE, Refusal, response_to, unavailable

Reader = Callable[[Mapping[str, Any]], Asked]


class Service:
    """The endpoints over one engine; `app` is what a web server runs."""

    def __init__(
        self, llm: LLM, engine: EngineLoop, meter: Meter, options: Options, on_loopback: bool
    ) -> None:
        self._llm, self._engine, self._meter, self._options = llm, engine, meter, options
        assert llm.tokenizer is not None, "the engine's loop has refused it"
        self._tokenizer, self._created_s = llm.tokenizer, int(time.time())
        self._tasks = set[asyncio.Task[Any]]()
        guard = Middleware(Guard, meter, options.api_key, on_loopback)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
        self.app = Starlette(
            routes=self._routes(),
            middleware=[cors, guard] if options.allow_origins else [guard],
            exception_handlers={
                HTTPException: _no_such_place,
                SpindleError: _say,
                ClientDisconnect: _gone,
                Exception: _say,
            },
        )
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or several."""
        with self._unready():
            return await self._answer(request, completion_request, "cmpl")

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        with self._unready():
            return await self._answer(request, chat_request, "chatcmpl")

    async def models(self, request: Request) -> Response:
        """The list of models: there is one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """What is known of one model. Raises Refusal: there is no such one."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, else 503 with the reason."""
        trouble = self._engine.trouble
        if trouble is not None:
            return response_to(unavailable(trouble))
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(self._meter.page(), media_type=CONTENT_TYPE_LATEST)

    def break_off(self) -> None:
        """Refuse the requests that are still being read or prepared: the server ends."""
        for task in self._tasks:
            task.cancel()

    # --- the parts of the above -----------------------------------------------------------------

    @contextmanager
    def _unready(self) -> Iterator[None]:
        """The part of a request that `break_off` breaks off; then it is the engine's."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.remove(task)

    async def _answer(self, request: Request, read: Reader, kind: str) -> Response:
        arrival_s = time.perf_counter()
        self._engine.check_room(1)  # before it is read
        _check_type(request.headers.get("content-type", ""))
        data = await self._body(request)
        asked, prompts = await asyncio.to_thread(self._prepared, data, read)
        reply = Reply(f"{kind}-{uuid.uuid4().hex}", prompts, asked.params, arrival_s)
        head = {"id": reply.name, "created": int(time.time()), "model": self._options.name}
        return Answer(self._engine, self._tokenizer, asked, reply, head)

    async def _body(self, request: Request) -> bytes:
        """Raises Refusal: it is too long, which is said before it is read if the client says so."""
        most, data = self._options.max_body_bytes, bytearray()
        message = f"the body has more than {most} bytes: expected at most {most}"
        too_large = Refusal(413, message, "request_too_large")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                data += part
                if len(data) > most:
                    raise too_large
        return bytes(data)

    def _prepared(self, data: bytes, read: Reader) -> tuple[Asked, list[list[int]]]:
        """What a body asks for, checked, and the ids of its prompts; not on the event loop."""
        asked = read(read_body(data))
        if asked.model is not None:
            self._check_model(asked.model)
        if asked.stream:
            asked.params.check_stream("stream=false")
        self._check_counts(asked)
        return asked, self._prompts(asked)

    def _prompts(self, asked: Asked) -> list[list[int]]:
        where = asked.prompt_field
        try:
            prompts = asked.prompt_ids(self._llm)
        except SpindleError as error:  # a template's names its folder, which is not for clients
            words = str(error).replace(str(self._tokenizer._path.parent), self._options.name)
            raise BodyError(words, where, getattr(error, "code", None)) from None
        most, longest = self._options.max_prompt_tokens, max(map(len, prompts))
        if most is not None and longest > most:
            message = f"the prompt has {longest} tokens; at most {most} are taken"
            raise BodyError(message, where, "context_length_exceeded")
        return prompts

    def _check_counts(self, asked: Asked) -> None:
        prompts, samples = max(len(asked.prompts), 1), asked.params.samples
        options = self._options
        if prompts > options.max_prompts:
            right = f"expected at most {options.max_prompts} in a request"
            raise BodyError(f"prompt: {prompts} prompts: {right}", "prompt")
        if samples > options.max_n:
            name = "n" if samples == asked.params.n else "best_of"
            raise BodyError(f"{name}={samples}: expected at most {options.max_n}", name)
        if prompts * samples > self._engine.most:
            right = f"expected at most {self._engine.most}: max_seqs and max_queue"
            raise BodyError(f"{prompts} prompts, {samples} answers each: {right}", "prompt")

    def _check_model(self, name: str) -> None:
        if name != self._options.name:
            message = f"the model {shown(name)} is not here: expected {self._options.name!r}"
            raise Refusal(404, message, "model_not_found", param="model")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "spindle",
            "max_model_len": self._llm.max_model_len,
        }


def _check_type(header: str) -> None:
    """Raises Refusal: no JSON by name, which no page sends elsewhere without being allowed to."""
    kind = header.partition(";")[0].strip().lower()
    if kind != "application/json":
        right = "expected Content-Type: application/json"
        raise Refusal(415, f"the body is {shown(kind)}: {right}", "unsupported_media_type")


async def _say(request: Request, error: Exception) -> Response:
    return response_to(error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _no_such_place(request: Request, error: Exception) -> Response:
    """A path or a method that is not there, as the router says it."""
    assert isinstance(error, HTTPException)
    where = f"{brief(request.method)} {brief(request.url.path)}"
    words = {404: "no such path here", 405: "another method is expected"}
    message = f"{where}: {words.get(error.status_code, error.detail)}"
    return response_to(Refusal(error.status_code, message, "unknown_url", headers=error.headers))
