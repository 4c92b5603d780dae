"""OpenAI's form: every field of a body is understood, without use, neutral, or refused by name."""

import json
import math
import shutil
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle import LLM, SamplingParams, Tokenizer, hub, openai_form
from spindle.decode.logprobs import Logprob, TokenLogprobs
from spindle.errors import RequestError
from spindle.openai_form import BodyError, chat_request, completion_request, read_body

HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", max_model_len=64)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """`tiny`, with a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "tiny"
    shutil.copytree(hub.resolve("tiny"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(folder, max_model_len=64)


def completion(**fields: Any) -> openai_form.Asked:
    return completion_request({"prompt": "A list is"} | fields)


def chat(**fields: Any) -> openai_form.Asked:
    return chat_request({"messages": HELLO} | fields)


# What a body asks for.


def test_every_parameter_reaches_the_engine():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "min_tokens": 1,
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
    }
    wanted = SamplingParams(**given)
    assert completion(**given).params == wanted
    assert chat(**given).params == wanted
    one = completion(logprobs=2, best_of=3, n=2).params
    assert (one.logprobs, one.best_of, one.n, one.max_tokens) == (2, 3, 2, 16)


def test_null_is_as_good_as_not_given():
    fields = (*openai_form.COMPLETION_FIELDS, *openai_form.NEUTRAL)
    nothing = {name: None for name in fields if name != "prompt"}
    assert completion(**nothing) == completion()
    nothing = {name: None for name in (*openai_form.CHAT_FIELDS, *openai_form.NEUTRAL)}
    assert chat_request(nothing | {"messages": HELLO}) == chat()


def test_a_chat_has_no_limit_but_the_one_that_it_names():
    assert chat().params.max_tokens is None
    assert chat(max_tokens=3).params.max_tokens == 3
    assert chat(max_completion_tokens=4).params.max_tokens == 4


@pytest.mark.parametrize(
    "fields, count",
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)]
    + [({"logprobs": True, "top_logprobs": k}, k) for k in (0, 5, 20)],
)
def test_a_chat_asks_for_logprobs_in_two_fields(fields, count):
    assert chat(**fields).params.logprobs == count


@pytest.mark.parametrize("name", openai_form.WITHOUT_USE)
def test_what_has_no_effect_is_told(name):
    assert completion(**{name: "x"}).unused == (name,)
    assert chat(**{name: None}).unused == (name,)


def test_stream_options_go_with_a_stream():
    assert not completion().stream
    asked = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert asked.stream and asked.include_usage
    assert asked.unused == ("stream_options.include_obfuscation",)
    assert not chat(stream=True, stream_options={}).include_usage


NEUTRAL = [(name, value) for name, values in openai_form.NEUTRAL.items() for value in values]


@pytest.mark.parametrize("name, value", NEUTRAL, ids=str)
def test_what_we_cannot_do_may_be_asked_for_where_it_means_nothing(name, value):
    assert completion(**{name: value}) == completion()
    with pytest.raises(BodyError, match=rf"^{name}=.*: not offered here; expected .*null$") as info:
        completion(**{name: {"something": 1}})
    assert info.value.param == name


@pytest.mark.parametrize(
    "kind, fields, param, words",
    [
        (completion, {"heat": 1}, "heat", "heat: an unknown field; expected one"),
        (completion, {"messages": HELLO}, "messages", "messages: an unknown field"),
        (completion, {"top_logprobs": 1}, "top_logprobs", "unknown field"),
        (completion, {"echo": True}, "echo", "echo=True: not offered here"),
        (completion, {"echo": 0}, "echo", "echo=0: not offered here; expected false or null"),
        (completion, {"prompt": None}, "prompt", "prompt: None; expected a string"),
        (completion, {"prompt": []}, "prompt", "expected a string"),
        (completion, {"prompt": ["a", 1]}, "prompt", "expected a string"),
        (completion, {"prompt": [True]}, "prompt", "expected a string"),
        (completion, {"prompt": [[]]}, "prompt", "expected a string"),
        (completion, {"temperature": "hot"}, "temperature", "temperature='hot': expected a number"),
        (completion, {"temperature": True}, "temperature", "temperature=True: expected a number"),
        (completion, {"logprobs": 21}, "logprobs", "logprobs=21: expected a whole number"),
        (completion, {"stop": [""]}, "stop", "stop: '' at position 0"),
        (completion, {"model": 5}, "model", "model=5: expected a name"),
        (completion, {"stream": 1}, "stream", "stream=1: expected true or false"),
        (completion, {"stream_options": {}}, "stream_options", "expected stream=true with it"),
        (chat, {"prompt": "a"}, "prompt", "prompt: an unknown field"),
        (chat, {"messages": None}, "messages", "messages: expected a list of objects"),
        (chat, {"messages": []}, "messages", "messages: there are none"),
        (chat, {"messages": [{"content": "a"}]}, "messages", "message at position 0: role None"),
        (chat, {"max_completion_tokens": -3}, "max_completion_tokens", "max_completion_tokens=-3:"),
        (chat, {"max_tokens": -3}, "max_tokens", "max_tokens=-3: expected"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "expected one of them"),
        (chat, {"logprobs": 1}, "logprobs", "logprobs=1: expected true or false"),
        (chat, {"top_logprobs": 1}, "top_logprobs", "top_logprobs: expected logprobs=true"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21: expected"),
        (chat, {"stream": True, "stream_options": {"a": 1}}, "stream_options", "stream_options={"),
    ],
)
def test_what_is_refused_is_named(kind, fields, param, words):
    with pytest.raises(BodyError) as info:
        kind(**fields)
    assert info.value.param == param
    assert words in str(info.value)


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "text"}, "a", None])
def test_a_part_of_a_message_that_is_no_text_is_refused(part):
    with pytest.raises(BodyError, match="message at position 1: a part"):
        chat(messages=[*HELLO, {"role": "user", "content": [part]}])


def test_prompts_are_texts_or_ids_one_or_several(llm):
    ids = llm.tokenizer.encode("A list is")
    for prompt, wanted in (
        ("A list is", [ids]),
        (["A list is", "a"], [ids, llm.tokenizer.encode("a")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ):
        assert completion(prompt=prompt).prompt_ids(llm) == wanted


@pytest.mark.parametrize(
    "prompt, words, code",
    [
        ([1] * 65, "the prompt has 65 tokens; at most 64 fit", "context_length_exceeded"),
        ([4096], "token id 4096 at position 0", None),
        ([[5], [-1]], "token id -1 at position 0", None),
        ("", "the prompt has no tokens", None),
        ("\ud800", "expected whole characters", None),
    ],
)
def test_a_prompt_that_does_not_fit_the_model_is_refused(llm, prompt, words, code):
    with pytest.raises(BodyError) as info:
        completion(prompt=prompt).prompt_ids(llm)
    assert words in str(info.value)
    assert (info.value.param, info.value.code) == ("prompt", code)


def test_messages_go_through_the_chat_template(talker):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    for content in ("Hello", parts):
        asked = chat(messages=[{"role": "user", "content": content}])
        wanted = talker.tokenizer.encode("user: Hello\nassistant: ", add_special_tokens=False)
        assert asked.prompt_ids(talker) == [wanted]


# Bytes.


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text()), max_size=3))
def test_an_object_is_read_as_it_was_written(value):
    assert read_body(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not JSON"),
        (b"[]", "a list; expected a JSON object"),
        (b"null", "a NoneType; expected a JSON object"),
        (b'{"a": NaN}', "NaN: JSON has no such number"),
        (b'{"a": -Infinity}', "-Infinity: JSON has no such number"),
        (b'{"a": {"b": 1, "b": 1}}', "b: given twice in one object"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_bytes_that_are_no_body_are_refused(data, words):
    with pytest.raises(BodyError) as info:
        read_body(data)
    assert words in str(info.value) and len(str(info.value)) < 400


def test_the_last_of_many_names_given_twice_is_found_in_one_look():
    names = [f'"{n}": 1' for n in range(100_000)]
    start = time.process_time()
    with pytest.raises(BodyError, match="99999: given twice"):
        read_body(f"{{{', '.join([*names, names[-1]])}}}".encode())
    assert time.process_time() - start < 20  # name by name it takes minutes


# How answers are written.


def answered(llm: LLM, asked: openai_form.Asked) -> dict[str, Any]:
    outputs = llm.generate(asked.prompt_ids(llm), asked.params)
    return openai_form.response(
        asked, outputs, llm.tokenizer, response_id="id", model="tiny", created_s=7
    )


def test_a_completion_is_what_generate_gives(llm):
    types = pytest.importorskip("openai.types")
    asked = completion(prompt=["A list is", "A tuple"], n=2, seed=1, logprobs=2, max_tokens=9)
    body = answered(llm, asked)
    outputs = llm.generate(["A list is", "A tuple"], asked.params)
    parsed = types.Completion.model_validate(body, strict=True)
    flat = [one for output in outputs for one in output.outputs]
    assert [choice.index for choice in parsed.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in parsed.choices] == [one.text for one in flat]
    assert {choice.finish_reason for choice in parsed.choices} == {"length"}
    assert (body["id"], body["object"], body["created"]) == ("id", "text_completion", 7)
    assert parsed.usage.completion_tokens == 36 == sum(len(one.token_ids) for one in flat)
    prompts = sum(len(output.prompt_ids) for output in outputs)
    assert (parsed.usage.prompt_tokens, parsed.usage.total_tokens) == (prompts, prompts + 36)
    for choice, one in zip(parsed.choices, flat, strict=True):
        said = choice.logprobs
        assert said.token_logprobs == [record.sampled.logprob for record in one.logprobs]
        assert [len(top) for top in said.top_logprobs] == [len(r.top) for r in one.logprobs]
        pieces = zip(said.tokens, said.text_offset, strict=True)
        assert all(choice.text.startswith(token, at) for token, at in pieces)


def test_a_chat_is_what_generate_gives(talker):
    types = pytest.importorskip("openai.types.chat")
    body = answered(talker, chat(seed=1, logprobs=True, top_logprobs=2, max_tokens=9, n=2))
    parsed = types.ChatCompletion.model_validate(body, strict=True)
    (output,) = talker.chat(HELLO, chat(seed=1, logprobs=True, n=2, max_tokens=9).params)
    assert [c.message.content for c in parsed.choices] == [one.text for one in output.outputs]
    assert [c.message.role for c in parsed.choices] == ["assistant"] * 2
    for choice, one in zip(parsed.choices, output.outputs, strict=True):
        said = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in said).decode() == one.text
        assert [token.logprob for token in said] == [r.sampled.logprob for r in one.logprobs]
        assert [len(token.top_logprobs) for token in said] == [2] * 9
        assert all(t.top_logprobs[0].logprob >= t.top_logprobs[1].logprob for t in said)
    plain = answered(talker, chat(logprobs=True, max_tokens=1, temperature=0))
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert answered(talker, chat(max_tokens=1))["choices"][0]["logprobs"] is None


def test_minus_infinity_and_tokens_that_are_no_text_can_be_written():
    tokenizer = Tokenizer("tiny")
    half = next(n for n in range(4096) if tokenizer.token_bytes(n) == b"\xe2")
    token = Logprob(half, -math.inf, 1)
    said = openai_form.chat_logprobs([TokenLogprobs(token, (token,))], tokenizer, 1)
    (content,) = json.loads(json.dumps(said, allow_nan=False))["content"]
    assert (content["token"], content["logprob"]) == (r"bytes:\xe2", -9999.0)
    assert content["bytes"] == [0xE2] and len(content["top_logprobs"]) == 1
    beyond = Logprob(tokenizer.vocab_size, 0.0, 1)
    assert openai_form.token_text(beyond, tokenizer) == f"token_id:{tokenizer.vocab_size}"


def test_an_error_says_what_and_where():
    error = BodyError("n=0: expected more", "n", "some_code")
    wanted = {"message": str(error), "type": "t", "param": "n", "code": "some_code"}
    assert openai_form.error_body(error, kind="t") == {"error": wanted}
    ours = openai_form.error_body(RequestError("prompt 1: n=5: expected less"))["error"]
    assert (ours["param"], ours["code"]) == ("n", None)
    assert openai_form.error_body(RequestError("heat=5: expected less"))["error"]["param"] is None
    plain = openai_form.error_body("gone", kind="server_error", code="gone")["error"]
    assert plain == {"message": "gone", "type": "server_error", "param": None, "code": "gone"}


def test_the_fields_of_openai_are_all_known():
    """A field that their client can send is understood, without use, or refused in words."""
    chats = pytest.importorskip("openai.types.chat.completion_create_params")
    completions = pytest.importorskip("openai.types.completion_create_params")
    others = {*openai_form.WITHOUT_USE, *openai_form.NEUTRAL}
    theirs = chats.CompletionCreateParamsBase.__annotations__.keys()
    assert theirs - {*openai_form.CHAT_FIELDS} <= others
    theirs = completions.CompletionCreateParamsBase.__annotations__.keys()
    assert theirs - {*openai_form.COMPLETION_FIELDS} <= others
