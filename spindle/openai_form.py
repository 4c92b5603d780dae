"""OpenAI's form: what the body of a request asks for, and how its answers and refusals are written.

Files of prompts and the server speak it alike, so both read and write it here. A body is checked
whole before anything runs, and each of its fields is one of four:

    understood   it becomes a prompt or one of the SamplingParams; null is as good as not given
    without use  known to OpenAI, and of no effect in one process with one model: told in `unused`
    neutral      what we cannot do, such as tools, may be asked for only where that means nothing
    unknown      refused by name, for it may be a misspelled one

The fields are those of OpenAI's API reference (completions and chat completions), and of vLLM's
server those that SamplingParams has beyond them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from spindle.chat_template import checked_messages
from spindle.decode.params import SamplingParams, check_prompt
from spindle.errors import NumericsError, RequestError, brief, shown

if TYPE_CHECKING:
    from spindle.decode.logprobs import Logprob, TokenLogprobs
    from spindle.serve.llm import LLM
    from spindle.serve.outputs import Completion, RequestOutput
    from spindle.tokenizer import Tokenizer

Body = Mapping[str, Any]
Prompt = str | list[int]

SAMPLING = (  # the same in OpenAI's form, vLLM's and ours
    *("temperature", "top_p", "seed", "stop", "n", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
)
SHARED = (*SAMPLING, "model", "max_tokens", "logprobs", "stream", "stream_options")
COMPLETION_FIELDS = (*SHARED, "prompt", "best_of")
CHAT_FIELDS = (*SHARED, "messages", "max_completion_tokens", "top_logprobs")
WITHOUT_USE = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what we cannot do, and values that ask for nothing
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
}
LEAST_LOGPROB = -9999.0  # what OpenAI writes for less, and JSON has no minus infinity


class BodyError(RequestError):
    """A body that cannot be honoured; `param` is the field at fault, `code` OpenAI's for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = None if param is None else brief(param), code


@dataclass(frozen=True)
class Asked:
    """What a body asks for: prompts, or else messages, and how to go on from them."""

    model: str | None  # the name given, which is the caller's to compare
    prompts: list[Prompt]
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    stream: bool
    include_usage: bool  # at the end of a stream
    unused: tuple[str, ...]  # fields that were given, and have no effect

    @property
    def prompt_field(self) -> str:
        """What the body calls its prompts."""
        return "prompt" if self.messages is None else "messages"

    def prompt_ids(self, llm: LLM) -> list[list[int]]:
        """The ids of each prompt, all fit for this engine. BodyError: one of them is not."""
        param = self.prompt_field
        try:
            if self.messages is not None:
                text = _tokenizer(llm).render_chat(self.messages)
                return [
                    _checked_ids(_encoded(text, llm, param, add_special_tokens=False), llm, param)
                ]
            return [
                _checked_ids(_encoded(p, llm, param) if isinstance(p, str) else p, llm, param)
                for p in self.prompts
            ]
        except BodyError:
            raise
        except RequestError as error:
            raise BodyError(str(error), param) from None


def read_body(data: bytes) -> dict[str, Any]:
    """The object that the bytes are as JSON. BodyError: they are none, or not quite JSON.

    Python's own reader takes NaN, and the last of two equal names; here both are refused.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise BodyError(f"not UTF-8 at byte {error.start}; expected JSON in UTF-8") from None
    except RecursionError:
        raise BodyError("nested too deeply; expected a JSON object of a few levels") from None
    except BodyError:
        raise
    except ValueError as error:  # among them an integer of thousands of digits
        raise BodyError(f"not JSON ({brief(error)}); expected a JSON object") from None
    if not isinstance(value, dict):
        raise BodyError(f"a {type(value).__name__}; expected a JSON object")
    return value


def completion_request(body: Body) -> Asked:
    """What the body of a `/v1/completions` asks for. BodyError: names the field at fault."""
    unused = _check_fields(body, COMPLETION_FIELDS)
    logprobs = _given(body, "logprobs", "best_of", "max_tokens")
    return _asked(body, _prompts(body.get("prompt")), None, _params(body, logprobs, {}), unused)


def chat_request(body: Body) -> Asked:
    """What the body of a `/v1/chat/completions` asks for. BodyError: names the field at fault.

    Without a limit the answer may be as long as the context allows. Content in parts is their
    text, joined.
    """
    unused = _check_fields(body, CHAT_FIELDS)
    limits = list(_given(body, "max_completion_tokens", "max_tokens"))
    if len(limits) == 2:
        right = "expected one of them, of which max_tokens is the older name"
        raise BodyError(f"max_completion_tokens and max_tokens: {right}", "max_tokens")
    fields: dict[str, Any] = {"max_tokens": body[limits[0]] if limits else None}
    if _flag(body, "logprobs"):
        fields["logprobs"] = 0 if body.get("top_logprobs") is None else body["top_logprobs"]
    elif body.get("top_logprobs") is not None:
        raise BodyError("top_logprobs: expected logprobs=true with it", "top_logprobs")
    names = {"max_tokens": limits[0] if limits else "", "logprobs": "top_logprobs"}
    return _asked(body, [], _messages(body.get("messages")), _params(body, fields, names), unused)


# How answers are written.


def check_numbers(outputs: Sequence[RequestOutput]) -> None:
    """NumericsError: a model could not go on with one of them."""
    if any(one.finish_reason == "error" for output in outputs for one in output.outputs):
        why = "logits that are no distribution (NaN, +inf, or nothing that min_tokens allows)"
        right = "the weights or the dtype are at fault, or min_tokens is too large"
        raise NumericsError(f"{why}; {right}")


def response(
    asked: Asked,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    response_id: str,
    model: str,
    created_s: int,
) -> dict[str, Any]:
    """The whole answer to a body that is not streamed; `outputs` has one for each prompt."""
    chat = asked.messages is not None
    return {
        "id": response_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": (
            chat_choices(outputs, tokenizer, asked.params.logprobs or 0)
            if chat
            else completion_choices(outputs, tokenizer)
        ),
        "usage": usage(outputs),
    }


def completion_choices(
    outputs: Sequence[RequestOutput], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """All answers to all prompts, numbered through, as `/v1/completions` writes them."""
    answers = [(output, one) for output in outputs for one in output.outputs]
    return [
        {
            "index": index,
            "text": one.text,
            "logprobs": completion_logprobs(output, one, tokenizer),
            "finish_reason": one.finish_reason,
        }
        for index, (output, one) in enumerate(answers)
    ]


def chat_choices(
    outputs: Sequence[RequestOutput], tokenizer: Tokenizer, num_top: int = 0
) -> list[dict[str, Any]]:
    """The answers to a conversation, as `/v1/chat/completions` writes them."""
    answers = [one for output in outputs for one in output.outputs]
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": chat_logprobs(one.logprobs, tokenizer, num_top),
            "finish_reason": one.finish_reason,
        }
        for index, one in enumerate(answers)
    ]


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """How many tokens the prompts have, each counted once, and the answers that are given."""
    asked = sum(len(output.prompt_ids) for output in outputs)
    new = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def completion_logprobs(
    output: RequestOutput, answer: Completion, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """The log-probabilities of an answer's tokens; None if nobody asked for them."""
    if answer.logprobs is None:
        return None
    offsets = _offsets(output.prompt_ids, answer.token_ids, tokenizer)
    return legacy_logprobs(answer.logprobs, offsets, tokenizer)


def legacy_logprobs(
    records: Sequence[TokenLogprobs], offsets: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The log-probabilities of tokens as `/v1/completions` writes them, a column each.

    offsets: the characters of the answer that are whole before each token.
    """
    return {
        "tokens": [token_text(one.sampled, tokenizer) for one in records],
        "token_logprobs": [_finite(one.sampled) for one in records],
        "top_logprobs": [
            {token_text(top, tokenizer): _finite(top) for top in one.top} for one in records
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(
    records: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer, num_top: int
) -> dict[str, Any] | None:
    """The log-probabilities of tokens, each with the `num_top` likeliest; None as above."""
    if records is None:
        return None
    content = [
        _chat_logprob(one.sampled, tokenizer)
        | {"top_logprobs": [_chat_logprob(top, tokenizer) for top in one.top[:num_top]]}
        for one in records
    ]
    return {"content": content, "refusal": None}


def token_text(one: Logprob, tokenizer: Tokenizer) -> str:
    """A token's text; "bytes:\\xe2\\x82" where it is no text by itself, "token_id:5" if empty."""
    spelled = tokenizer.token_bytes(one.token_id)
    try:
        return spelled.decode() or f"token_id:{one.token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def error_body(
    error: object,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """What went wrong; a BodyError brings its own `param` and `code`.

    Of another RequestError `param` is the field that its message begins with.
    """
    if isinstance(error, BodyError):
        param, code = error.param, error.code
    elif isinstance(error, RequestError):
        param = _field_named(str(error))
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _field_named(message: str) -> str | None:
    """The field that an error begins with, as in "n=5: expected ..."; None: with another word."""
    match = re.match(r"(?:prompt \d+: )?([a-z_]+)[=:]", message)  # of several prompts: of which
    return match[1] if match and match[1] in {*COMPLETION_FIELDS, *CHAT_FIELDS} else None


# The fields of a body.


def _check_fields(body: Body, understood: Sequence[str]) -> tuple[str, ...]:
    """The fields that have no effect. BodyError: one that is unknown, or asks for too much."""
    unused = []
    for name, value in body.items():
        if name in understood:
            continue
        if name in WITHOUT_USE:
            unused.append(name)
        elif name not in NEUTRAL:
            right = f"expected one of {', '.join(sorted(understood))}"
            raise BodyError(f"{brief(name)}: an unknown field; {right}", name)
        elif value is not None and not any(_same(value, one) for one in NEUTRAL[name]):
            allowed = " or ".join(json.dumps(one) for one in (*NEUTRAL[name], None))
            raise BodyError(f"{name}={shown(value)}: not offered here; expected {allowed}", name)
    return tuple(unused)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False


def _given(body: Body, *names: str) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


def _params(body: Body, fields: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """The parameters that the body has and the `fields`; `names`: what it calls some of them."""
    try:
        return SamplingParams(**_given(body, *SAMPLING), **fields)
    except RequestError as error:
        message = str(error)
        (field,) = re.findall(r"^[a-z_]+", message)
        name = names.get(field, field)
        raise BodyError(name + message.removeprefix(field), name) from None


def _asked(
    body: Body,
    prompts: list[Prompt],
    messages: list[dict[str, Any]] | None,
    params: SamplingParams,
    unused: tuple[str, ...],
) -> Asked:
    model = body.get("model")
    if not isinstance(model, str | None):
        raise BodyError(f"model={shown(model)}: expected a name", "model")
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return Asked(model, prompts, messages, params, stream, False, unused)
    if not stream:
        raise BodyError("stream_options: expected stream=true with it", "stream_options")
    known = {"include_usage", "include_obfuscation"}
    if not isinstance(options, dict) or not options.keys() <= known:
        right = 'expected {"include_usage": true}'
        raise BodyError(f"stream_options={shown(options)}: {right}", "stream_options")
    if "include_obfuscation" in options:
        unused = (*unused, "stream_options.include_obfuscation")
    include_usage = _flag(options, "include_usage", "stream_options.")
    return Asked(model, prompts, messages, params, stream, include_usage, unused)


def _flag(body: Body, name: str, where: str = "") -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        name = f"{where}{name}"
        raise BodyError(f"{name}={shown(value)}: expected true or false", name)
    return bool(value)


def _prompts(given: Any) -> list[Prompt]:
    """One prompt or several, each a text or token ids; the ids are checked with the model."""
    if isinstance(given, str) or _all(given, int):
        return [given]
    if _all(given, str) or (_all(given, list) and all(_all(one, int) for one in given)):
        return list(given)
    right = "expected a string, a list of token ids, or a list of either"
    raise BodyError(f"prompt: {shown(given)}; {right}", "prompt")


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(one) is kind for one in values)


def _messages(given: Any) -> list[dict[str, Any]]:
    try:
        messages = checked_messages(given)
    except RequestError as error:
        raise BodyError(str(error), "messages") from None
    return [message | _content(message, n) for n, message in enumerate(messages)]


def _content(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """The content as one text, where it comes in parts. BodyError: a part that is no text."""
    content = message.get("content")
    if isinstance(content, str | None):
        return {}
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            right = 'expected text, or parts such as {"type": "text", "text": "Hello"}'
            where = f"message at position {position}"
            raise BodyError(f"{where}: a part {shown(part)}; {right}", "messages")
    return {"content": "".join(part["text"] for part in parts)}


# Small parts.


def _refuse_constant(name: str) -> NoReturn:
    raise BodyError(f"{name}: JSON has no such number; expected one, or null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise BodyError(f"{brief(twice)}: given twice in one object; expected once", twice)
    return result


def _tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise BodyError("the prompt is text, and the model has no tokenizer; expected token ids")
    return llm.tokenizer


def _encoded(text: str, llm: LLM, param: str, add_special_tokens: bool = True) -> list[int]:
    tokenizer, most = _tokenizer(llm), llm.max_model_len
    if (least := tokenizer.least_ids(text)) > most:  # others wait while a text is read
        message = f"the prompt has {least} tokens or more; at most {most} fit"
        raise BodyError(message, param, "context_length_exceeded")
    return tokenizer.encode(text, add_special_tokens)


def _checked_ids(ids: list[int], llm: LLM, param: str) -> list[int]:
    most = llm.max_model_len
    if len(ids) > most:
        message = f"the prompt has {len(ids)} tokens; at most {most} fit"
        raise BodyError(message, param, "context_length_exceeded")
    return check_prompt(ids, llm.model.config.vocab_size, most)


def _finite(one: Logprob) -> float:
    return max(one.logprob, LEAST_LOGPROB)


def _chat_logprob(one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = list(tokenizer.token_bytes(one.token_id))
    return {"token": token_text(one, tokenizer), "logprob": _finite(one), "bytes": spelled}


def _offsets(prompt: list[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """For each id, how many characters of the answer the ids before it have completed."""
    from spindle.tokenizer import StreamDecoder

    decoder, offsets, at = StreamDecoder(tokenizer, prompt_ids=prompt), list[int](), 0
    for token in ids:
        offsets.append(at)
        at += len(decoder.push(token))
    return offsets
