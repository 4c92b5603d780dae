"""IN: lines in the form of OpenAI's batch files, each of which is a task or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spindle.batch.ledger import Ledger
from spindle.errors import SpindleError, shown
from spindle.openai_form import Asked, BodyError, chat_request, completion_request, read_body

MAX_LINE_BYTES = 16 * 2**20
MAX_PROMPTS = 1024  # of a line, which are all queued at once
URLS: dict[Any, Callable[[dict[str, Any]], Asked]] = {
    "/v1/completions": completion_request,
    "/v1/chat/completions": chat_request,
}
FIELDS = ("custom_id", "method", "url", "body")
RESULT_ID = "batch_req_"  # how the ids of results begin, as OpenAI's do


@dataclass(frozen=True)
class Task:
    """A line that can be run; `number` counts lines from 1."""

    number: int
    raw: bytes
    custom_id: str
    asked: Asked


@dataclass(frozen=True)
class Refused:
    """A line that cannot be run, or of which the model made nothing."""

    number: int
    custom_id: str | None  # None: not even that can be read
    error: SpindleError
    status_code: int = 400


@dataclass(frozen=True)
class RunWith:
    """What decides a result beside its line: the model's name, and an engine's settings.

    Each result has both in its body, as OpenAI's `model` and `system_fingerprint`.
    """

    model: str
    settings: str  # "checkpoint=0f3a, device=cpu, ...": see `digest.settings_of`

    def result_id(self, raw: bytes) -> str:
        """The id of the result of a line: of the same line and the same engine, the same."""
        digest = hashlib.sha256(f"{self.model}\n{self.settings}\n".encode() + raw)
        return RESULT_ID + digest.hexdigest()[:32]

    def unlike(self, there: RunWith | None) -> str:
        """What is not the same as where results were made that are there; "" if all is."""
        if there is None or there == self:
            return ""
        was, now = ([f"model={one.model}", *one.settings.split(", ")] for one in (there, self))
        theirs = ", ".join(part for part in was if part not in now)
        ours = ", ".join(part for part in now if part not in was)
        return f"made with {theirs}, and here it is {ours}; expected the same, or a new file"


def result(its_id: str, custom_id: str | None, status_code: int, body: Any) -> dict[str, Any]:
    """How a line ended, in OpenAI's form."""
    response = {"status_code": status_code, "request_id": its_id, "body": body}
    return {"id": its_id, "custom_id": custom_id, "response": response, "error": None}


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and their numbers, from 1, without space around them or empty ones.

    Of one that is too long, the beginning, which is too long too. SpindleError: what the system
    says if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                _skip_rest(file, raw)
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # some editors begin a file with it
                if raw := raw.strip(b" \t\r\n"):
                    yield number, raw
    except OSError as cause:
        raise SpindleError(f"{path}: {cause.strerror}") from None


def _skip_rest(file: BinaryIO, raw: bytes) -> None:
    while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
        raw = file.readline(MAX_LINE_BYTES + 1)


def read_line(raw: bytes) -> dict[str, Any]:
    """The object of a line, of which the custom_id is known to be one. BodyError: it is none."""
    if len(raw) > MAX_LINE_BYTES:
        raise BodyError(f"longer than {MAX_LINE_BYTES} bytes; expected a shorter line")
    line = read_body(raw)
    custom_id = line.get("custom_id")
    whole = isinstance(custom_id, str) and not any("\ud800" <= c <= "\udfff" for c in custom_id)
    if not custom_id or not whole:
        right = "expected a text, not empty, by which its result is found"
        raise BodyError(f"custom_id={shown(custom_id)}: {right}", "custom_id")
    return line


def ask(line: dict[str, Any], model: str) -> Asked:
    """What a line asks for. BodyError: it is none of the form, or of another model."""
    for name in line:
        if name not in FIELDS:
            right = f"expected {', '.join(FIELDS)}"
            raise BodyError(f"{shown(name)}: an unknown field; {right}", name)
    if line.get("method") != "POST":
        raise BodyError(f"method={shown(line.get('method'))}: expected 'POST'", "method")
    url = line.get("url")
    if not isinstance(url, str) or url not in URLS:
        raise BodyError(f"url={shown(url)}: expected {' or '.join(URLS)}", "url")
    if not isinstance(line.get("body"), dict):
        right = 'expected an object such as {"prompt": "A list is"}'
        raise BodyError(f"body={shown(line.get('body'))}: {right}", "body")
    asked = URLS[url](line["body"])
    if asked.model not in (None, model):
        right = f"expected {model!r}, which runs here (--served-model-name names it otherwise)"
        raise BodyError(f"model={shown(asked.model)}: {right}", "model")
    if len(asked.prompts) > MAX_PROMPTS:
        right = f"expected at most {MAX_PROMPTS} in a line"
        raise BodyError(f"prompt: {len(asked.prompts)} prompts; {right}", "prompt")
    if asked.stream:
        raise BodyError("stream=true: a file has no streams; expected false, or nothing", "stream")
    return asked


def tasks(
    path: Path, model: str, ledger: Ledger, refuse: Callable[[Refused], object]
) -> Iterator[Task]:
    """The lines that are not done, as tasks; what is wrong with others goes to `refuse`."""
    for number, raw in numbered(path):
        custom_id = None
        try:
            line = read_line(raw)
            custom_id = line["custom_id"]
            first, done = ledger.first_line(custom_id, number)
            if first != number:
                raise BodyError(f"custom_id {shown(custom_id)}: line {first} has it", "custom_id")
            task = None if done else Task(number, raw, custom_id, ask(line, model))
        except BodyError as error:
            refuse(Refused(number, custom_id, error))
            continue
        if task is not None:
            yield task
