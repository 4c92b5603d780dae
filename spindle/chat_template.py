"""Chat templates: from a list of messages to the one text that a model was trained to continue.

A model knows a conversation as a text with marks in it, such as "<|im_start|>user", and every
family has marks of its own. The checkpoint says which: a program in the language of Jinja, which
sees the messages and prints the text. What is printed here equals transformers'
`apply_chat_template(..., tokenize=False)`, character for character.

The program comes with the model, from whoever made that. It runs in Jinja's immutable sandbox: no
file, no import, no attribute with an underscore in front, no change to what it was given, and what
it was given is a copy in plain JSON types. `range` ends at 100,000 steps and a recursion at
Python's limit; all else that takes time or memory is counted, and ends (`sandbox`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spindle.errors import RequestError, TokenizerError, brief, shown
from spindle.paths import why_no_file

if TYPE_CHECKING:  # jinja2 takes 40 ms to import: only who renders waits for it
    import jinja2

    from spindle.sandbox import MeteredEnvironment

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names that transformers gives templates
SPECIAL_TOKENS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing, as three APIs name it


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of one checkpoint by name, and the special tokens that they may print."""

    folder: Path
    sources: dict[str, str]  # name -> Jinja; empty where the checkpoint has none
    special_tokens: dict[str, str]  # "bos_token" -> "<s>"

    @staticmethod
    def read(folder: Path) -> ChatTemplates:
        """What a directory says. TokenizerError: names the file that is damaged."""
        config = read_json(folder / "tokenizer_config.json")
        return ChatTemplates(folder, _sources(folder, config), _special_tokens(folder, config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation; `Tokenizer.render_chat` says what goes in and what may fail.

        Nothing is kept from one rendering to the next but the compiled template.
        """
        name = self._chosen(template, has_tools=tools is not None)
        where = f"{self.folder}: chat template {name!r}"
        given = {
            "messages": [_with_reasoning(message) for message in checked_messages(messages)],
            "tools": checked_objects("tools", tools),
            "documents": checked_objects("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
            **self.special_tokens,
            **{key: plain(value, f"variable {key!r}") for key, value in variables.items()},
        }
        return _rendered(_compiled(self.sources[name], where), given, where)

    def _chosen(self, template: str | None, has_tools: bool) -> str:
        """The name of the template to use, as transformers chooses."""
        if not self.sources:
            raise TokenizerError(
                f"{self.folder}: it has no chat template; expected chat_template.jinja, or "
                "chat_template in tokenizer_config.json, as models tuned for chat have it"
            )
        if template is None:
            template = WITH_TOOLS if has_tools and WITH_TOOLS in self.sources else DEFAULT
        if not isinstance(template, str) or template not in self.sources:
            raise RequestError(
                f"chat template {shown(template)}: {self.folder} has no template of that name; "
                f"expected one of {', '.join(sorted(self.sources))}"
            )
        return template


# What a template is given: checked, and copied into plain JSON types.


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages, without keys that are None. RequestError: names the position."""
    expected = 'expected a list of objects such as {"role": "user", "content": "Hello"}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages: {expected}, got {type(messages).__name__}")
    if not messages:
        raise RequestError(f"messages: there are none; {expected}")
    return [_checked_message(message, n, expected) for n, message in enumerate(messages)]


def _checked_message(message: Mapping[str, Any], position: int, expected: str) -> dict[str, Any]:
    """Content may be text, a list of parts, or an object; None or nothing with tool calls."""
    where = f"message at position {position}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: {expected}, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: role {shown(message.get('role'))}; {expected}")
    if "content" not in message and "tool_calls" not in message:
        raise RequestError(f"{where}: it has no content; {expected}")
    content = message.get("content")
    if not isinstance(content, str | list | tuple | Mapping | None):
        raise RequestError(
            f"{where}: content of type {type(content).__name__}; expected text, or a list of "
            'parts such as {"type": "text", "text": "Hello"}'
        )
    copy: dict[str, Any] = plain(message, where)
    return {key: value for key, value in copy.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under the two names that templates read, whichever it came under."""
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def checked_objects(
    name: str, objects: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]] | None:
    """A copy of the tools (as JSON schemas) or documents. RequestError: names the position."""
    if objects is None:
        return None
    if not isinstance(objects, Sequence) or isinstance(objects, str | bytes):
        raise RequestError(f"{name}: expected a list of objects, got {type(objects).__name__}")
    for position, one in enumerate(objects):
        if not isinstance(one, Mapping):
            kind = type(one).__name__
            raise RequestError(f"{name}: expected an object at position {position}, got {kind}")
    return [plain(one, f"{name} at position {n}") for n, one in enumerate(objects)]


def plain(value: Any, where: str) -> Any:
    """A copy in plain JSON types, whose methods the sandbox knows. RequestError: `where`.

    A class derived from str or int may have methods that write files; it becomes its base.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise RequestError(f"{where}: nested too deeply; expected plain JSON data") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        copy = [_plain(inner, where) for inner in value]
        return tuple(copy) if isinstance(value, tuple) else copy
    raise RequestError(f"{where}: expected plain JSON data, got {type(value).__name__}")


# Jinja.


def _rendered(template: jinja2.Template, given: dict[str, Any], where: str) -> str:
    from jinja2.exceptions import SecurityError

    from spindle.sandbox import metered

    try:
        with metered(given):
            return template.render(given)
    except RequestError:  # the template's own raise_exception
        raise
    except SecurityError as error:
        said = brief(error)
        raise TokenizerError(f"{where}: it asks for what no template may do: {said}") from error
    except Exception as error:  # a template is a program: whatever a program may raise
        kind = "" if type(error).__name__ == "UndefinedError" else f"{type(error).__name__}: "
        said = f"{kind}{brief(error)}"
        raise RequestError(f"{where} cannot render these messages: {said}") from error


@functools.lru_cache(maxsize=32)
def _compiled(source: str, where: str) -> jinja2.Template:
    from jinja2.exceptions import TemplateSyntaxError

    from spindle.sandbox import SOURCE_LENGTH

    if len(source) > SOURCE_LENGTH:
        raise TokenizerError(
            f"{where}: it has {len(source)} characters; expected at most {SOURCE_LENGTH}"
        )
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        said = brief(error.message)
        raise TokenizerError(f"{where}, line {error.lineno}: {said}") from error
    except Exception as error:  # such as nesting that Python's own compiler refuses
        raise TokenizerError(f"{where}: {type(error).__name__}: {brief(error)}") from error


@functools.cache
def _environment() -> MeteredEnvironment:
    """Jinja as templates for transformers expect it; the same settings, the same names."""
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from spindle.sandbox import METER, MeteredEnvironment

    class Generation(Extension):
        """{% generation %}: marks what an assistant said, for training; prints what is inside."""

        tags = {"generation"}  # noqa: RUF012 - Extension's own declaration

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Jinja's, without names that Python gives a meaning to."""

        def __init__(*args: Any, **names: Any) -> None:  # `self` is a name like any other
            for name in dict(*args[1:], **names):
                _refuse_underscore(name)
            jinja2.utils.Namespace.__init__(*args, **names)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            super().__setitem__(name, METER.get().made(value))

    def _refuse_underscore(name: str) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace stores no name with an underscore first: {name!r}")

    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
    }
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {brief(message)}")


def _strftime_now(layout: str) -> str:
    if isinstance(layout, str) and len(layout) > 1000:  # C's tries ever larger buffers
        raise RequestError(f"strftime_now: a layout of {len(layout)} characters; expected a date's")
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would write < as \\u003c, for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# Files.


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: from *.jinja files if there are any, else from what the JSON files say."""
    own = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = ({DEFAULT: own} if os.path.lexists(own) else {}) | {file.stem: file for file in named}
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        content = config if path.name == "tokenizer_config.json" else read_json(path)
        if content.get("chat_template") is not None:
            return _named(content["chat_template"], path)
    return {}


def _named(stated: Any, path: Path) -> dict[str, str]:
    """A template, or a list of {"name": ..., "template": ...}."""
    if isinstance(stated, str):
        return {DEFAULT: stated}
    entries: list[Any] = stated if isinstance(stated, list) else [None]
    for entry in entries:
        texts = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise TokenizerError(
                f"{path}: chat_template: expected a text, or a list of objects with the texts "
                f"name and template, got {stated!r:.60}"
            )
    return {entry["name"]: entry["template"] for entry in entries}


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token and its like; an older layout has them in a file of their own."""
    if "added_tokens_decoder" not in config:
        config = config | read_json(folder / "special_tokens_map.json")
    stated = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: _content(token) for name, token in stated.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _content(token: Any) -> Any:
    """A token is its text, or an object with that and with how it is matched."""
    return token.get("content") if isinstance(token, dict) else token


def _read_text(path: Path, what: str = "text") -> str:
    try:
        if why := why_no_file(path):
            raise OSError(why)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: expected {what} in UTF-8: {brief(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a tokenizer; empty where there is no file. TokenizerError: else."""
    if not os.path.lexists(path):
        return {}
    try:
        content = json.loads(_read_text(path, "a JSON object"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: expected a JSON object in UTF-8: {brief(error)}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
