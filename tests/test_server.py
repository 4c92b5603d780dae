"""`spindle serve`: OpenAI's own client, over a port, gets what `LLM.generate` gives."""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import spindle
from spindle import LLM, SamplingParams, Tokenizer, cli, load_hf, server
from spindle.errors import RequestError
from spindle.hub import resolve
from spindle.openai_form import completion_request, token_text
from spindle.serve.outputs import Completion, Metrics, RequestOutput
from spindle.server import Options, Server, run, serving
from spindle.server.app import Service
from spindle.server.chunks import Chunks
from spindle.server.guard import _is_for_loopback
from spindle.server.loop import MOST_FAILURES, EngineLoop
from spindle.server.metrics import Meter

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% endif %}"
)
LONG_S = 60  # what takes so long is broken


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """tiny in float64, where a batch gives the tokens of a solo run; its tokenizer, with turns."""
    folder = tmp_path_factory.mktemp("tiny")
    for path in resolve("tiny").glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_hf("tiny", dtype=torch.float64), Tokenizer(folder)


def engine(parts, **options):
    model, tokenizer = parts
    return LLM(model, tokenizer=tokenizer, **{"max_model_len": 128, "max_seqs": 16} | options)


@contextlib.contextmanager
def served(llm, **options):
    """A server at a port of its own, which is idle in the end, and leaves no thread."""
    before = set(threading.enumerate())
    with serving(llm, Options(**{"port": 0, "name": NAME, "grace_s": 0} | options)) as it:
        yield it
        assert it.wait_idle(LONG_S)
        assert {it.stats[key] for key in ("waiting", "running", "blocks_held")} == {0}
        assert it._engine._answers == 0  # the queue has all its places
        assert "has ended" not in (it._engine.trouble or "")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith(("spindle", "asyncio")) for name in left)


@pytest.fixture(scope="module")
def live(parts):
    with served(engine(parts)) as it:
        yield it


def client_of(it, key="none", **options):
    return openai.OpenAI(base_url=it.url, api_key=key, max_retries=0, timeout=LONG_S, **options)


@pytest.fixture
def client(live):
    with client_of(live) as client:
        yield client


def web(method, url, **options):
    """A response over a connection of its own, whatever proxy the environment names."""
    return httpx.request(method, url, timeout=LONG_S, trust_env=False, **options)


def root(it):
    return it.url.removesuffix("/v1")


# --- what LLM.generate gives ---------------------------------------------------------------------

GREEDY = {"max_tokens": 12, "temperature": 0}
SEEDED = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 7}
WAYS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "three answers": SEEDED | {"n": 3},
    "three greedy answers": GREEDY | {"n": 3},
    "a stop string": GREEDY | {"max_tokens": 40, "stop": [" is"]},
    "no tokens": GREEDY | {"max_tokens": 0},
    "penalties": SEEDED | {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "ours alone": SEEDED | {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3},
}
OWN = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")


def in_form(fields):
    """The arguments of the client's call: what is not OpenAI's goes by the side."""
    own = {name: value for name, value in fields.items() if name in OWN}
    return {name: fields[name] for name in fields if name not in own} | {"extra_body": own}


def spelled(answer, tokenizer):
    return [token_text(one.sampled, tokenizer) for one in answer.logprobs]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_completions_are_those_of_generate(client, parts, way, streamed):
    """Text, tokens, logprobs, ends and counts; of texts and of ids; B36, B64, B65, B90."""
    fields, tokenizer = WAYS[way] | {"logprobs": 2}, parts[1]
    prompts = ["The capital of France is", "A list is"]
    wanted = engine(parts).generate(prompts, SamplingParams(**fields))
    answers = [answer for output in wanted for answer in output.outputs]
    asked = [tokenizer.encode(one) for one in prompts] if way == "seeded" else prompts
    call = in_form(fields) | {"model": NAME, "prompt": asked}
    if streamed:
        options = {"include_usage": True}
        got, usage = joined(client.completions.create(**call, stream=True, stream_options=options))
    else:
        whole = client.completions.create(**call)
        got, usage = {one.index: one for one in whole.choices}, whole.usage
    for index, answer in enumerate(answers):
        one = got[index]
        assert (one.text, one.finish_reason) == (answer.text, answer.finish_reason)
        assert one.seed == 7 or "seed" not in fields
        if answer.logprobs or not streamed:
            assert one.logprobs.tokens == spelled(answer, tokenizer)
            logprobs = [record.sampled.logprob for record in answer.logprobs]
            assert one.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-9)
            assert len(one.logprobs.top_logprobs) == len(one.logprobs.text_offset) == len(logprobs)
    assert len(got) == len(answers)
    new = sum(len(answer.token_ids) for answer in answers)
    assert usage.completion_tokens == new
    assert usage.prompt_tokens == sum(len(output.prompt_ids) for output in wanted)


def joined(stream):
    """The choices of a stream, each put together again, and its usage."""
    got, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            one = got.setdefault(part.index, part)
            if one is part:
                continue
            assert one.finish_reason is None, "nothing comes after the end"
            one.text += part.text
            one.finish_reason = part.finish_reason
            one.seed = getattr(part, "seed", None)
            if part.logprobs is not None and one.logprobs is not None:
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    getattr(one.logprobs, name).extend(getattr(part.logprobs, name))
    return got, usage


def test_a_streams_logprobs_are_the_whole_answers(client):
    """Their offsets, too, which count from the beginning of the answer."""
    call = {"model": NAME, "prompt": "A list is", "logprobs": 1, **SEEDED}
    got, _ = joined(client.completions.create(**call, stream=True))
    (whole,) = client.completions.create(**call).choices
    assert got[0].logprobs == whole.logprobs


TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a list?"}]


@pytest.mark.parametrize("fields", [GREEDY, SEEDED | {"n": 2}], ids=["greedy", "two, seeded"])
def test_chats_are_those_of_chat(client, parts, fields):
    """The role comes first and once; what follows joins to the text; the reason is the last."""
    (wanted,) = engine(parts).chat(TALK, SamplingParams(**fields, logprobs=2))
    call = {"model": NAME, "messages": TALK, "logprobs": True, "top_logprobs": 2, **fields}
    whole = client.chat.completions.create(**call)
    chunks = list(client.chat.completions.create(**call, stream=True))
    for index, answer in enumerate(wanted.outputs):
        one = whole.choices[index]
        assert (one.message.role, one.message.content) == ("assistant", answer.text)
        assert one.finish_reason == answer.finish_reason
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part.delta.content or "" for part in mine) == answer.text
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == answer.finish_reason
        told = [token for part in mine if part.logprobs for token in part.logprobs.content]
        assert told == one.logprobs.content
        assert [token.token for token in told] == spelled(answer, parts[1])
        assert {len(token.top_logprobs) for token in told} == {2}
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id != whole.id


def test_a_stream_is_events_and_ends_as_openais(live):
    """Each is one line of JSON in ASCII; usage is null but in the last; then [DONE]."""
    body = {"prompt": "é", "stream": True, "max_tokens": 3, "stream_options": {}, "user": "me"}
    body["stream_options"]["include_usage"] = True
    answer = web("POST", f"{live.url}/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["spindle-unused-fields"] == "user"
    assert answer.content.isascii()
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [value["usage"] for value in values[:-1]] == [None] * (len(values) - 1)
    assert values[-1]["choices"] == [] and values[-1]["usage"]["completion_tokens"] == 3
    assert {value["object"] for value in values} == {"text_completion"}


def test_without_a_seed_one_is_drawn_and_reported(client):
    """The same request with it gives the same text."""
    call = {"model": NAME, "prompt": ["A list is", "A list is"], "max_tokens": 12}
    first, second = client.completions.create(**call).choices
    assert first.seed != second.seed
    (again,) = client.completions.create(**call | {"prompt": "A list is"}, seed=second.seed).choices
    assert again.text == second.text


def test_best_of_gives_the_likeliest(client, parts):
    fields = SEEDED | {"n": 2, "best_of": 4}
    (wanted,) = engine(parts).generate("A list is", SamplingParams(**fields))
    got = client.completions.create(model=NAME, prompt="A list is", **fields)
    assert [one.text for one in got.choices] == [one.text for one in wanted.outputs]
    with pytest.raises(openai.BadRequestError, match="known at the end"):
        client.completions.create(model=NAME, prompt="A list is", **fields, stream=True)


def test_greedy_answers_are_all_equal(client):
    """As OpenAI gives them; with logprobs, and where the best of them are asked for, too."""
    call = {"model": NAME, "prompt": "A list is", "logprobs": 2, **GREEDY}
    (one,) = client.completions.create(**call).choices
    for fields in ({"n": 3}, {"n": 2, "best_of": 3}):
        several = client.completions.create(**call, **fields)
        assert [choice.index for choice in several.choices] == list(range(fields["n"]))
        for choice in several.choices:
            assert choice.text == one.text
            assert choice.logprobs.tokens == one.logprobs.tokens
        assert several.usage.completion_tokens == fields["n"] * 12


def test_models_are_listed(client):
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == (NAME, 128)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError, match="'other' is not here") as caught:
        client.models.retrieve("other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


# --- many at once --------------------------------------------------------------------------------


def requests_by_lot(seed, count):
    """Prompts that share beginnings, of all ways of sampling."""
    rng, words = random.Random(seed), "the list of a string that is returned if not".split()
    for number in range(count):
        prompt = "A list is " + " ".join(rng.choices(words, k=rng.randint(0, 20)))
        fields = {"max_tokens": rng.randint(1, 14), "seed": number}
        yield prompt, fields | {"temperature": rng.choice([0, 0.7, 1.0]), "top_p": 0.9}


async def text_of(client, prompt, fields):
    stream = await client.completions.create(model=NAME, prompt=prompt, stream=True, **fields)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def all_texts(it, requests):
    async with openai.AsyncOpenAI(
        base_url=it.url, api_key="none", max_retries=0, timeout=60
    ) as client:
        return await asyncio.gather(*(text_of(client, *request) for request in requests))


def test_64_streams_at_once_are_each_as_alone(parts):
    """In a pool that has to preempt, with drafts; then nothing is held and no task is left."""
    requests = list(requests_by_lot(0, 64))
    llm = engine(parts, max_seqs=24, block_size=4, num_blocks=24, speculate="ngram")
    solo = engine(parts)
    wanted = [
        solo.generate(p, SamplingParams(**fields))[0].outputs[0].text for p, fields in requests
    ]
    with served(llm) as it:
        assert asyncio.run(all_texts(it, requests)) == wanted
        assert it.wait_idle(LONG_S)
        metrics = scraped(it)
        assert metrics["spindle_preemptions_total"] > 0 < metrics["spindle_drafts_accepted_total"]
    assert it._web.server_state.tasks == set() and it._engine._owners == {}
    llm.scheduler.check()


def test_it_runs_beside_a_running_event_loop(parts):
    """As in a notebook, whose own loop is running."""
    requests = list(requests_by_lot(1, 4))

    async def main():
        with serving(engine(parts), Options(port=0, name=NAME, grace_s=0)) as it:
            return await all_texts(it, requests)

    got = asyncio.run(main())
    wanted = [
        engine(parts).generate(p, SamplingParams(**f))[0].outputs[0].text for p, f in requests
    ]
    assert got == wanted


def test_meanwhile_the_llm_is_the_servers_alone_and_then_free_again(parts):
    llm = engine(parts)
    with served(llm) as it, client_of(it) as client:
        client.completions.create(model=NAME, prompt="A", max_tokens=1)
        with pytest.raises(RequestError, match="at work for another thread"):
            llm.generate("A")
    assert llm.generate("A", SamplingParams(max_tokens=2))[0].finished
    llm.add("A")
    with pytest.raises(RequestError, match="unfinished requests"), serving(llm):
        pass
    model, _ = parts
    with pytest.raises(RequestError, match="no tokenizer"), serving(LLM(model)):
        pass
    with pytest.raises(RequestError, match="max_seqs: expected where"), serving(llm, max_seqs=1):
        pass


# --- steps by hand -------------------------------------------------------------------------------


class Gate:
    """Lets an engine step as often as it is told to, and tells when it has come to a step."""

    def __init__(self, llm):
        self._step, self._passes = llm.step, threading.Semaphore(0)
        self.came = threading.Semaphore(0)
        llm.step = self

    def __call__(self):
        self.came.release()
        assert self._passes.acquire(timeout=LONG_S)
        return self._step()

    def let(self, steps):
        """So many steps, each once the engine has come to it."""
        for _ in range(steps):
            assert self.came.acquire(timeout=LONG_S)
            self._passes.release()

    def open(self):
        self._passes.release(100_000)


def told(monkeypatch, name):
    """A semaphore that counts the calls of a method of the engine's loop."""
    calls, method = threading.Semaphore(0), getattr(EngineLoop, name)

    def noted(self, *args):
        method(self, *args)
        calls.release()

    monkeypatch.setattr(EngineLoop, name, noted)
    return calls


def post(port, body, headers=""):
    """A request on a socket of its own, which has been sent."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += headers
    connection = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def read_an_event(connection):
    """Until a stream has begun."""
    data = b""
    while b"data: " not in data:
        part = connection.recv(2**16)
        assert part, f"it ended: {data}"
        data += part


ENDLESS = {"prompt": "A list is", "max_tokens": 60, "ignore_eos": True, "seed": 0}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_holds_nothing(parts, monkeypatch, streamed):
    """Its blocks are free before the next step; the one that runs is the last."""
    gone, submitted = told(monkeypatch, "cancel"), told(monkeypatch, "submit")
    llm = engine(parts)
    gate = Gate(llm)
    with served(llm) as it:
        connection = post(it.port, ENDLESS | {"stream": streamed, "n": 2})
        assert submitted.acquire(timeout=LONG_S)
        gate.let(5)
        if streamed:
            read_an_event(connection)
        assert gate.came.acquire(timeout=LONG_S)  # the sixth step has begun
        assert it.stats["running"] == 2 and it.stats["blocks_held"] > 0
        connection.close()
        assert gone.acquire(timeout=LONG_S)
        gate.open()
        assert it.wait_idle(LONG_S)
        assert (it.stats["steps"], it.stats["blocks_held"]) == (6, 0)
        assert scraped(it)['spindle_answers_total{"finish_reason": "abort"}'] == 2


def test_a_client_that_has_only_ended_what_it_sends_counts_as_gone(parts, monkeypatch):
    """Its FIN is that of one that hangs up."""
    gone, submitted = told(monkeypatch, "cancel"), told(monkeypatch, "submit")
    llm = engine(parts)
    gate = Gate(llm)
    with served(llm) as it, post(it.port, ENDLESS) as connection:
        assert submitted.acquire(timeout=LONG_S)
        connection.shutdown(socket.SHUT_WR)
        assert gone.acquire(timeout=LONG_S)
        gate.open()
        assert connection.recv(2**16) == b""


def test_a_client_that_hangs_up_while_it_waits_is_not_run(parts, monkeypatch):
    gone, submitted = told(monkeypatch, "cancel"), told(monkeypatch, "submit")
    llm = engine(parts, max_seqs=1)
    gate = Gate(llm)
    with served(llm) as it:
        first = post(it.port, ENDLESS | {"max_tokens": 3})
        assert submitted.acquire(timeout=LONG_S)
        gate.let(1)
        second = post(it.port, ENDLESS)
        assert submitted.acquire(timeout=LONG_S)
        gate.let(1)
        second.close()
        assert gone.acquire(timeout=LONG_S)
        gate.open()
        assert it.wait_idle(LONG_S) and it.stats["steps"] == 3
        assert b" 200 OK" in first.recv(2**16)
        first.close()


def test_what_a_slow_reader_has_not_seen_is_kept_once(parts, monkeypatch):
    """Sixty steps between two looks are one output, and one wake-up."""
    submitted, wakes = told(monkeypatch, "submit"), told(monkeypatch, "_wake")
    llm = engine(parts)
    gate = Gate(llm)
    with served(llm) as it:
        blocked, go_on = threading.Event(), threading.Event()
        connection = post(it.port, ENDLESS | {"stream": True})
        assert submitted.acquire(timeout=LONG_S)
        assert gate.came.acquire(timeout=LONG_S)
        it._loop.call_soon_threadsafe(lambda: (blocked.set(), go_on.wait(LONG_S)))
        assert blocked.wait(LONG_S)
        gate.open()
        assert it.wait_idle(LONG_S)
        go_on.set()
        with connection, connection.makefile("rb") as file:
            data = iter(file.readline, b"data: [DONE]\n")
            texts = [line for line in data if line.startswith(b"data: ")]
        assert wakes.acquire(blocking=False) and not wakes.acquire(blocking=False)
    (choice,) = json.loads(texts[0][6:])["choices"]  # one event, and all 60 tokens in it
    (wanted,) = engine(parts).generate("A list is", SamplingParams(60, ignore_eos=True, seed=0))
    assert len(texts) == 1 and len(wanted.outputs[0].token_ids) == 60
    assert (choice["text"], choice["finish_reason"]) == (wanted.outputs[0].text, "length")


# --- limits --------------------------------------------------------------------------------------

LIMITS = {
    "body": ({"prompt": "x" * 2000}, 413, "request_too_large", None),
    "prompts": ({"prompt": ["a"] * 4}, 400, None, "prompt"),
    "ids": ({"prompt": [[1]] * 4}, 400, None, "prompt"),
    "n": ({"prompt": "a", "n": 4}, 400, None, "n"),
    "best_of": ({"prompt": "a", "best_of": 4}, 400, None, "best_of"),
    "prompt": ({"prompt": [5] * 31}, 400, "context_length_exceeded", "prompt"),
    "context": ({"prompt": [5] * 129}, 400, "context_length_exceeded", "prompt"),
    "messages": ({"messages": [{"role": "user", "content": "a " * 30}]}, 400, None, "messages"),
    "both": ({"prompt": ["a"] * 3, "n": 3}, 400, None, "prompt"),
}


@pytest.fixture(scope="module")
def narrow(parts):
    """A server with small limits."""
    limits = {"max_body_bytes": 1000, "max_prompts": 3, "max_prompt_tokens": 30, "max_n": 3}
    with served(engine(parts, max_seqs=4, num_blocks=4), **limits, max_queue=4) as it:
        yield it


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_named_before_anything_runs(narrow, limit):
    body, status, code, param = LIMITS[limit]
    path = "chat/completions" if "messages" in body else "completions"
    before = narrow.stats
    answer = web("POST", f"{narrow.url}/{path}", json=body)
    assert answer.status_code == status
    error = error_in(answer)
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert "expected at most" in error["message"] or "at most" in error["message"]
    assert narrow.wait_idle(LONG_S) and narrow.stats == before


def test_a_body_without_a_length_is_read_no_further_than_its_limit(narrow):
    read = []

    def parts_of_it():
        for number in range(100):
            read.append(number)
            yield b" " * 500

    head = {"content-type": "application/json"}
    answer = web("POST", f"{narrow.url}/completions", content=parts_of_it(), headers=head)
    assert answer.status_code == 413


def test_several_prompts_are_queued_all_or_none(narrow):
    """The second one's answer could never have blocks enough: the first is not run either."""
    before = narrow.stats["steps"]
    body = {"prompt": [[5], [5] * 30], "max_tokens": 50}
    answer = web("POST", f"{narrow.url}/completions", json=body)
    assert answer.status_code == 400
    assert "the pool has 4" in error_in(answer)["message"]
    assert narrow.wait_idle(LONG_S) and narrow.stats["steps"] == before
    assert not any("spindle_answers" in name for name in scraped(narrow))


def test_a_full_queue_says_when_to_come_again(parts, monkeypatch):
    """One runs and two wait; the next hears so, and those are answered."""
    submitted = told(monkeypatch, "submit")
    llm = engine(parts, max_seqs=1)
    gate = Gate(llm)
    with served(llm, max_queue=2) as it, client_of(it) as client:
        waiting = [post(it.port, {"prompt": "A", "max_tokens": 1}) for _ in range(3)]
        for _ in waiting:
            assert submitted.acquire(timeout=LONG_S)
        for count in (1, 2):
            with pytest.raises(openai.RateLimitError, match="try again") as caught:
                client.completions.create(model=NAME, prompt=["A"] * count)
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "rate_limit_exceeded"
        gate.open()
        for connection in waiting:
            with connection:
                assert b" 200 OK" in connection.recv(2**16)
        assert it.wait_idle(LONG_S)
        assert client.completions.create(model=NAME, prompt=["A"] * 3, max_tokens=1).usage
        assert scraped(it)['spindle_http_responses_total{"status": "429"}'] == 2


# --- errors --------------------------------------------------------------------------------------


def error_in(answer):
    """The error of a response, which has OpenAI's four fields."""
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    kinds = {400: "invalid_request_error", 429: "rate_limit_error", 500: "server_error"}
    assert error["type"] == kinds.get(answer.status_code, error["type"])
    return error


BODIES = {
    "no JSON": (b"{", 400, None),
    "nothing": (b"", 400, None),
    "no object": (b"[1]", 400, None),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, None),
    "infinity": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, None),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), 400, None),
    "half a pair": (rb'{"prompt": "\ud800"}', 400, "prompt"),
    "half a pair for a model": (rb'{"prompt": "a", "model": "\ud800"}', 404, "model"),
    "half a pair for a field": (rb'{"prompt": "a", "\ud800": 1}', 400, "\\ud800"),
    "half a pair for a stop": (rb'{"prompt": "a", "stop": "\ud800", "max_tokens": 1}', 200, None),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    "deep enough": (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "prompt"),
    "many digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None),
    "a large number": (b'{"prompt": "a", "seed": 99999999999999999999}', 400, "seed"),
    "twice": (b'{"prompt": "a", "prompt": "b"}', 400, "prompt"),
    "no prompt": (b'{"max_tokens": 1}', 400, "prompt"),
    "an empty prompt": (b'{"prompt": ""}', 400, "prompt"),
    "an id too many": (b'{"prompt": [4096]}', 400, "prompt"),
    "an unknown field": (b'{"prompt": "a", "temperatures": 1}', 400, "temperatures"),
    "tools": (b'{"prompt": "a", "tools": [1]}', 400, "tools"),
    "a stop id": (b'{"prompt": "a", "stop_token_ids": [5000]}', 400, "stop_token_ids"),
    "another model": (b'{"prompt": "a", "model": "gpt-4"}', 404, "model"),
    "a stream of the best": (b'{"prompt": "a", "best_of": 2, "stream": true}', 400, "best_of"),
    "a number for a stop": (b'{"prompt": "a", "stop": 5}', 400, "stop"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_bad_body_has_an_error_in_openais_form(live, kind):
    """B107, B108, B113, B114: and the server is as it was."""
    body, status, param = BODIES[kind]
    head = {"content-type": "application/json; charset=utf-8"}
    answer = web("POST", f"{live.url}/completions", content=body, headers=head)
    assert answer.status_code == status
    if status != 200:
        assert error_in(answer)["param"] == param


PLACES = [
    ("GET", "/v1/completions", 405),
    ("DELETE", "/v1/models", 405),
    ("POST", "/v1/embeddings", 404),
    ("GET", "/", 404),
    ("GET", "/v1/models/", 404),
    ("GET", "/v1/models/%00", 404),
    ("GET", "/v1/models/%ff", 404),
    ("X" * 5000, "/health", 405),
    ("GET", f"/{'x' * 5000}", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), PLACES)
def test_a_wrong_place_is_an_error_in_openais_form(live, method, path, status):
    answer = web(method, f"{root(live)}{path}")
    assert answer.status_code == status and error_in(answer)
    assert ("allow" in answer.headers) == (status == 405)
    assert len(answer.content) < 1000 and "a str" not in answer.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_is_json_by_name(live, kind):
    """A page can send these anywhere without being asked, and JSON it cannot."""
    head = {"content-type": kind}
    answer = web("POST", f"{live.url}/completions", content=b'{"prompt": "a"}', headers=head)
    assert answer.status_code == 415 and error_in(answer)["code"] == "unsupported_media_type"


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
NO_HTTP = {
    "words": (b"hello\r\n\r\n", 400, "illegal request line"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "illegal request line"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host"),
    "a bad length": (HEAD + b"Content-Length: -1\r\n\r\n", 400, "bad Content-Length"),
    "a long head": (HEAD + b"X: %s\r\n\r\n" % (b"x" * 200_000), 431, "too long"),
    "a coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
}
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\nContent-Type: %s\r\n\r\n2\r\n{}\r\n"
NO_HTTP["a chunk"] = (CHUNKED % b"application/json" + b"zz\r\n", 400, "illegal chunk header")


@pytest.mark.parametrize("kind", NO_HTTP)
def test_what_is_no_http_is_an_error_in_openais_form(live, caplog, kind):
    """And an answer that was on its way to it fails for nobody."""
    data, status, words = NO_HTTP[kind]
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONG_S) as connection:
        connection.sendall(data)
        head, body = response_on(connection)
        with contextlib.suppress(ConnectionResetError):  # it was not read to its end
            assert connection.recv(1) == b""
    error = error_in(httpx.Response(int(head.split()[1]), text=body))
    assert words in error["message"] and error["code"] == "invalid_http"
    assert f" {status} " in head and "application/json" in head
    assert not caplog.records


def test_what_is_no_http_is_counted(parts):
    with served(engine(parts)) as it:
        for kind in ("words", "words", "a long head"):
            with socket.create_connection(("127.0.0.1", it.port), timeout=LONG_S) as connection:
                connection.sendall(NO_HTTP[kind][0])
                response_on(connection)
        got = scraped(it)
    assert got['spindle_http_responses_total{"status": "400"}'] == 2
    assert got['spindle_http_responses_total{"status": "431"}'] == 1


def test_an_upgrade_is_answered_as_if_it_had_not_been_asked_for(live, caplog):
    """And nobody is told to install anything."""
    head = {"connection": "Upgrade", "upgrade": "websocket"}
    assert web("GET", f"{root(live)}/health", headers=head).status_code == 200
    assert not caplog.records


def test_an_answer_that_is_out_stays_one(live, caplog):
    """What comes after it is none of its business; the connection is over."""
    data = CHUNKED.partition(b"2\r\n")[0] % b"text/plain"
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONG_S) as connection:
        connection.sendall(data)
        assert "unsupported_media_type" in response_on(connection)[1]
        connection.sendall(b"zz\r\n")
        assert connection.recv(2**16) == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_what_a_template_refuses_is_said_without_where_it_lies(client, parts):
    talk = [{"role": "tool", "content": "x", "tool_call_id": "1"}]
    with pytest.raises(openai.BadRequestError, match="no tools") as caught:
        client.chat.completions.create(model=NAME, messages=talk)
    assert caught.value.param == "messages"
    assert str(parts[1]._path.parent) not in caught.value.message


def test_a_model_without_a_template_says_so():
    llm = LLM("tiny", max_seqs=2, num_blocks=8)
    with served(llm) as it, client_of(it) as client:
        with pytest.raises(openai.BadRequestError, match="tiny: it has no chat template"):
            client.chat.completions.create(model=NAME, messages=TALK)


# --- faults --------------------------------------------------------------------------------------


def test_a_step_that_raises_ends_who_was_in_it_and_no_other(parts, monkeypatch):
    """The one that runs has an error; the one that waits is answered as alone."""
    submitted = told(monkeypatch, "submit")
    llm = engine(parts, max_seqs=1)
    gate, run, broken = Gate(llm), llm._runner.run, []

    def once(plan):
        if not broken:
            broken.append(plan)
            raise RuntimeError("a fault of the model")
        return run(plan)

    llm._runner.run = once
    with served(llm) as it:
        bodies = [ENDLESS, {"prompt": "A list is", **GREEDY}]
        connections = []
        for body in bodies:
            connections.append(post(it.port, body))
            assert submitted.acquire(timeout=LONG_S)
        gate.open()
        first, second = (text_from(connection) for connection in connections)
        assert " 500 " in first and "RuntimeError" in first and "a fault" not in first
        (wanted,) = engine(parts).generate("A list is", SamplingParams(**GREEDY))
        assert json.dumps(wanted.outputs[0].text) in second
        assert web("GET", f"{root(it)}/health").status_code == 200
    assert len(broken) == 1


def text_from(connection):
    """The last response on a connection."""
    with connection:
        return "".join(response_on(connection))


def response_on(connection):
    """The head and the body of the next response on a connection."""
    with connection.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n")).decode()
        size = int(re.search(r"content-length: (\d+)", head)[1])
        return head, file.read(size).decode()


def test_a_prompt_that_had_ended_when_the_other_failed_is_told_once(parts):
    """The full context has nothing to run for: its end is still to be told when a step raises."""
    llm = engine(parts)
    run, calls = llm._runner.run, []

    def once(plan):
        calls.append(plan)
        if len(calls) == 1:
            raise RuntimeError
        return run(plan)

    llm._runner.run = once
    with served(llm) as it, client_of(it) as client:
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=NAME, prompt=[[5] * 128, [5]], max_tokens=2)
        again = client.completions.create(model=NAME, prompt=[[5] * 128, [5]], max_tokens=2)
        assert [one.finish_reason for one in again.choices] == ["length", "length"]


def test_an_engine_that_has_died_says_so(parts):
    """Steps that raise one after another: nobody waits for ever, and /health has the reason."""
    llm = engine(parts, max_seqs=1)

    def always(plan):
        raise RuntimeError("no device")

    llm._runner.run = always
    with serving(llm, Options(port=0, grace_s=0)) as it, client_of(it) as client:
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="spindle", prompt=["A"] * (MOST_FAILURES + 2))
        for _ in range(MOST_FAILURES):
            with contextlib.suppress(openai.InternalServerError):
                client.completions.create(model="spindle", prompt="A")
        health = web("GET", f"{root(it)}/health")
        assert health.status_code == 503 and "RuntimeError" in error_in(health)["message"]
        with pytest.raises(openai.InternalServerError, match="has ended") as caught:
            client.completions.create(model="spindle", prompt="A")
        assert caught.value.status_code == 503


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_logits_that_are_none_are_an_error(parts, streamed):
    """B69: also where some of the answer was there; the others go on."""
    llm = engine(parts)
    run = llm._runner.run

    def broken(plan):
        outputs = run(plan)
        for chunk, output in zip(plan.chunks, outputs, strict=True):
            if chunk.sequence.request.params.seed == 13 and chunk.sequence.new_tokens == 3:
                output.ids[:] = [-1]
        return outputs

    llm._runner.run = broken
    with served(llm) as it, client_of(it) as client:
        call = {"model": NAME, "prompt": "A", "max_tokens": 8, "stream": streamed}
        with pytest.raises(openai.APIError, match="no distribution"):
            list(client.completions.create(**call, seed=13))
        assert list(client.completions.create(**call, seed=14))
        assert scraped(it)['spindle_answers_total{"finish_reason": "error"}'] == 1


# --- the end -------------------------------------------------------------------------------------


def test_at_the_end_what_runs_may_end_and_nothing_new_begins(parts, monkeypatch):
    submitted, refused = told(monkeypatch, "submit"), told(monkeypatch, "refuse")
    llm = engine(parts)
    gate = Gate(llm)
    with served(llm, grace_s=LONG_S) as it:
        connection = post(it.port, {"prompt": "A list is", **GREEDY})
        assert submitted.acquire(timeout=LONG_S)
        it.stop()
        assert refused.acquire(timeout=LONG_S)
        answer = web("POST", f"{it.url}/completions", json={"prompt": "A"})
        assert answer.status_code == 503 and "shutting down" in error_in(answer)["message"]
        assert web("GET", f"{root(it)}/health").status_code == 503
        gate.open()
        (wanted,) = engine(parts).generate("A list is", SamplingParams(**GREEDY))
        assert json.dumps(wanted.outputs[0].text) in text_from(connection)


def test_a_server_that_has_ended_by_itself_may_be_stopped(parts):
    server = Server(engine(parts), Options(name=NAME, port=0))
    thread = server.start()
    asyncio.run_coroutine_threadsafe(server.drain(), server._loop).result(LONG_S)
    thread.join(LONG_S)
    assert not thread.is_alive()
    server.stop()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_at_the_end_what_takes_too_long_hears_so(parts, monkeypatch, streamed):
    submitted = told(monkeypatch, "submit")
    llm = engine(parts)
    gate = Gate(llm)
    with served(llm) as it:
        connection = post(it.port, ENDLESS | {"stream": streamed})
        assert submitted.acquire(timeout=LONG_S)
        gate.let(2)
        if streamed:
            read_an_event(connection)
        it.stop()
        gate.open()
        with connection, connection.makefile("rb") as file:
            rest = file.read().decode()
        assert "shutting down" in rest and "[DONE]" not in rest
        assert streamed or " 503 " in rest


@pytest.mark.parametrize("phase", ["read", "prepared", "in a step", "in a step, streamed"])
def test_at_the_end_nobody_is_waited_for_without_end(parts, monkeypatch, caplog, phase):
    """Neither a slow client nor slow work keeps the server, and all hear why, in the form."""
    monkeypatch.setattr(run, "FLUSH_S", 0.1 if "step" in phase else LONG_S)
    submitted, llm, go_on = told(monkeypatch, "submit"), engine(parts), threading.Event()
    begun, gate, streamed = threading.Event(), Gate(llm), phase.endswith("streamed")

    def slowly(*args):
        begun.set()
        go_on.wait(LONG_S)

    if phase == "prepared":
        monkeypatch.setattr(Service, "_prepared", slowly)
    with served(llm) as it:
        if phase == "read":
            connection = socket.create_connection(("127.0.0.1", it.port), timeout=LONG_S)
            connection.sendall(
                HEAD + b"Content-Type: application/json\r\nContent-Length: 5\r\n\r\n{"
            )
            web("GET", f"{root(it)}/health")  # it has come
        else:
            connection = post(it.port, ENDLESS | {"stream": streamed})
            assert begun.wait(LONG_S) if phase == "prepared" else submitted.acquire(timeout=LONG_S)
        if streamed:
            gate.let(2)
            read_an_event(connection)
        it.stop()
        with connection, connection.makefile("rb") as file:
            rest = file.read().decode()
        go_on.set()
        gate.open()
    assert "shutting down" in rest and "service_unavailable" in rest and "[DONE]" not in rest
    assert streamed or " 503 " in rest
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_command_ends_with_a_signal(ctrl_c, monkeypatch, capsys, number, status):
    said = []

    def signalled(text):
        said.append(text)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(cli, "say", lambda text: signalled(text) if text else None)
    monkeypatch.delenv("SPINDLE_API_KEY", raising=False)
    command = ["serve", "-m", "tiny", "--port", "0", "--max-seqs", "2", "--num-blocks", "8"]
    assert cli.main([*command, "--ngram", "-k", "3"]) == status
    assert re.fullmatch(r"serving tiny at http://127\.0\.0\.1:\d+/v1\n", said[0])
    assert cli.main([*command, "--host", "0.0.0.0", "--max-batch-tokens", "64"]) == status
    assert "warning: whoever reaches http://0.0.0.0:" in capsys.readouterr().err


def test_a_second_ctrl_c_ends_it_at_once():
    """While a request runs that would take its time."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    program += "from spindle.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", "-m", "tiny", "--port", "0"]
    environment = os.environ | {"SPINDLE_API_KEY": "secret"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--grace", "60"], env=environment, **pipes) as process:
        try:
            line = process.stdout.readline()
            port = re.fullmatch(r"serving tiny at http://127\.0\.0\.1:(\d+)/v1\n", line)[1]
            body = {"prompt": ["A"] * 64, "max_tokens": 500, "ignore_eos": True, "stream": True}
            with post(int(port), body, "Authorization: Bearer secret\r\n") as connection:
                read_an_event(connection)
                process.send_signal(signal.SIGINT)
                assert "shutting down" in process.stderr.readline()
                process.send_signal(signal.SIGINT)
                assert process.wait(LONG_S) == 130
                with connection.makefile("rb") as file, contextlib.suppress(ConnectionError):
                    assert b"[DONE]" not in file.read()  # it was in the middle
        finally:
            process.kill()


def test_a_port_that_is_in_use_is_said_before_the_model_is_loaded(live, capsys, monkeypatch):
    monkeypatch.setattr(spindle, "LLM", None)
    assert cli.main(["serve", "-m", "tiny", "--port", str(live.port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'127.0.0.1', port {live.port}: Address already in use" in line


COMMANDS = [
    (["--host", "no.such.host.invalid"], "'no.such.host.invalid', port 8000"),
    (["--port", "65536"], "port=65536: expected a whole number of 0 to 65535"),
    (["--max-queue", "-1"], "max_queue=-1"),
    (["--grace", "nan"], "grace_s=nan"),
    (["--served-model-name", "\udcff"], "name='\\udcff': expected printable characters"),
    (["--api-key", ""], "api_key: expected at least one character"),
    (["--api-key", "ключ"], "api_key: expected printable ASCII"),
    (["-k", "3"], "-k: it counts drafts"),
    (["--port", "0", "--max-seqs", "0"], "max_seqs=0"),
    (["--port", "0", "--model", "no-such"], "no-such"),
]


@pytest.mark.parametrize(("options", "words"), COMMANDS)
def test_the_command_refuses_in_one_line(capsys, options, words):
    assert cli.main(["serve", "-m", "tiny", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spindle: error: ") and words in line


def test_a_missing_extra_is_named(monkeypatch, capsys):
    find = server.importlib.util.find_spec
    monkeypatch.setattr(
        server.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    assert cli.main(["serve", "-m", "tiny"]) == 2
    assert "a server needs uvicorn: `pip install 'spindle[serve]'`" in capsys.readouterr().err


# --- who is let in -------------------------------------------------------------------------------

KEYS = [
    ("Bearer right", 200),
    ("bearer right", 200),
    ("Bearer wrong", 401),
    ("Bearer right2", 401),
    ("Bearer", 401),
    ("Basic right", 401),
    ("right", 401),
    ("Bearer r\xefght", 401),
    (None, 401),
]


@pytest.fixture(scope="module")
def locked(parts):
    with served(engine(parts), api_key="right", allow_origins=("https://page.example",)) as it:
        yield it


@pytest.mark.parametrize(("header", "status"), KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nowhere"])
def test_the_key_opens_everything_and_nothing_else_does(locked, header, status, path):
    head = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = web("GET", f"{root(locked)}{path}", headers=head)
    assert answer.status_code == (404 if status == 200 and "nowhere" in path else status)
    if status == 401:
        assert error_in(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "right" not in answer.text


def test_the_client_sends_its_key(locked):
    with client_of(locked, key="right") as client:
        assert client.completions.create(model=NAME, prompt="A", max_tokens=1).usage
    with client_of(locked, key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=NAME, prompt="A")
    assert web("GET", f"{root(locked)}/health").json() == {"status": "ok"}
    host = {"host": "any.example", "authorization": "Bearer right"}
    assert web("GET", f"{locked.url}/models", headers=host).status_code == 200


@pytest.mark.parametrize("origin", ["https://page.example", "https://other.example"])
def test_pages_may_read_what_they_were_allowed_to(locked, live, origin):
    ask = {"origin": origin, "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization,content-type"
    allowed = "access-control-allow-origin"
    before = web("OPTIONS", f"{locked.url}/completions", headers=ask)
    answer = web("GET", f"{locked.url}/models", headers={"origin": origin})
    given = origin if "page" in origin else None
    assert before.headers.get(allowed) == answer.headers.get(allowed) == given
    assert allowed not in web("GET", f"{live.url}/models", headers={"origin": origin}).headers
    assert web("OPTIONS", f"{live.url}/completions", headers=ask).status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_on_loopback_a_page_cannot_come_under_its_own_name(live, host):
    """DNS rebinding: the browser takes us for the page's own server, and says so in Host."""
    answer = web("GET", f"{live.url}/models", headers={"host": host})
    assert answer.status_code == 403 and error_in(answer)["code"] == "host_not_allowed"


HOSTS = ["localhost", "localhost:80", "a.localhost", "127.0.0.1:1", "127.9.9.9", "[::1]:5", "[::1]"]


@pytest.mark.parametrize("host", [*HOSTS, "LOCALHOST", None])
def test_loopback_has_many_names(host):
    assert _is_for_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "[::2]", "[::1", "::1", "localhost.evil", "a:b:c"])
def test_and_no_others(host):
    assert not _is_for_loopback(host)


# --- metrics -------------------------------------------------------------------------------------


def scraped(it):
    """Every sample of /metrics, by its name and labels."""
    text = web("GET", f"{root(it)}/metrics").text
    return {
        f"{one.name}{json.dumps(one.labels) if one.labels else ''}": one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_metrics_count_what_was_asked_and_given(parts):
    llm = engine(parts)
    llm.generate("A list is", SamplingParams(max_tokens=4))  # before the server: not its own
    before = llm.stats["steps"]
    with served(llm) as it, client_of(it) as client:
        call = {"model": NAME, "temperature": 1, "seed": 1, "extra_body": {"ignore_eos": True}}
        client.completions.create(prompt="A list is", n=3, max_tokens=5, **call)
        client.completions.create(prompt=[[5] * 40, [5] * 40], max_tokens=1, **call)
        client.completions.create(prompt=[7], max_tokens=0, **call)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(prompt="", **call)
        assert it.wait_idle(LONG_S)
        got = scraped(it)
        steps = it.stats["steps"]
    asked = len(parts[1].encode("A list is"))
    assert got['spindle_answers_total{"finish_reason": "length"}'] == 3 + 2 + 1
    assert got["spindle_output_tokens_total"] == 3 * 5 + 2
    assert got["spindle_prompt_tokens_total"] == asked + 80  # of the one that was read
    assert got["spindle_cached_prompt_tokens_total"] == 0  # the two ran side by side
    assert got["spindle_ttft_seconds_count"] == 3
    assert got["spindle_itl_seconds_count"] == 3 * 4
    assert got["spindle_e2e_seconds_count"] == 4
    assert got["spindle_blocks_total"] == llm.stats["blocks_total"]
    assert got["spindle_blocks_cached"] == llm.stats["blocks_cached"] > 0
    assert got["spindle_steps_total"] == steps - before
    assert got['spindle_http_responses_total{"status": "200"}'] == 3
    assert got['spindle_http_responses_total{"status": "400"}'] == 1
    assert got["spindle_ttft_seconds_sum"] <= got["spindle_e2e_seconds_sum"]


def output(name, tokens, finish=None, **metrics):
    """A request's output with answers of so many tokens."""
    answers = [
        Completion(index, "", [5] * count, None, None, finish, None)
        for index, count in enumerate(tokens)
    ]
    first = 1.0 if any(tokens) else None
    times = Metrics(
        0.0, 0.0, first, first, None, **{"preemptions": 0, "cached_tokens": 0} | metrics
    )
    return RequestOutput(name, [5] * 4, answers, finish is not None, 0, times)


def test_times_are_of_tokens_from_the_arrival():
    """B91, B93, B95, B96: a step of three tokens is three gaps, and no token no ttft."""
    meter = Meter()
    meter.arrived("a", 10.0)
    meter.arrived("b", 10.5)
    meter.note([output("a", [1])], 11.0)
    meter.note([output("a", [4], preemptions=2)], 11.3)
    meter.note([output("a", [5], "length", preemptions=3, cached_tokens=2)], 11.4)
    meter.note([output("b", [0], "length")], 12.0)
    value = meter.registry.get_sample_value
    assert value("spindle_ttft_seconds_sum") == pytest.approx(1.0)
    assert value("spindle_ttft_seconds_count") == 1
    assert value("spindle_itl_seconds_sum") == pytest.approx(0.4)
    assert value("spindle_itl_seconds_count") == 4
    assert value("spindle_itl_seconds_bucket", {"le": "0.05"}) == 0
    assert value("spindle_itl_seconds_bucket", {"le": "0.25"}) == 4
    assert value("spindle_e2e_seconds_sum") == pytest.approx(1.4 + 1.5)
    assert value("spindle_preemptions_total") == 3
    assert value("spindle_cached_prompt_tokens_total") == 2
    meter.arrived("c", 12.0)
    meter.note([output("c", [1, 1])], 12.5)
    meter.ended(output("c", [1, 1], "abort"))
    assert value("spindle_answers_total", {"finish_reason": "abort"}) == 2
    assert value("spindle_e2e_seconds_count") == 2 and meter._seen == {}


# --- chunks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def snapshots(parts):
    """What each step gave of two prompts, three answers each, with a stop string that is held."""
    llm = engine(parts, speculate="ngram")
    fields = SEEDED | {"n": 3, "stop": ["zzz", " the st"], "max_tokens": 40, "logprobs": 1}
    names = [llm.add(prompt, SamplingParams(**fields)) for prompt in ("A list is", "é, the")]
    steps, now = [], [None, None]
    while llm.has_unfinished:
        for one in llm.step():
            now[names.index(one.request_id)] = one
        steps.append(list(now))
    return fields, steps


@settings(max_examples=60)
@given(st.data())
def test_whichever_steps_are_seen_the_chunks_join_to_the_whole(parts, snapshots, data):
    """B84: nothing is lost, told twice, or told after the end."""
    fields, steps = snapshots
    seen = [one for one in steps[:-1] if data.draw(st.booleans())] + [steps[-1]]
    asked = completion_request({"prompt": ["a", "b"], "stream": True, **fields})
    chunks, got = Chunks(asked, parts[1], {}), {}
    for outputs in seen:
        for chunk in chunks.new(outputs):
            (choice,) = chunk["choices"]
            one = got.setdefault(choice["index"], {"text": "", "tokens": [], "ends": []})
            assert one["ends"] == []
            one["text"] += choice["text"]
            one["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
            one["ends"] += [] if choice["finish_reason"] is None else [choice["finish_reason"]]
    answers = [answer for output in steps[-1] for answer in output.outputs]
    for index, answer in enumerate(answers):
        whole = {"text": answer.text, "tokens": spelled(answer, parts[1])}
        assert got[index] == whole | {"ends": [answer.finish_reason]}
    assert list(chunks.new(steps[-1])) == []


def test_the_commands_defaults_are_those_of_the_options(monkeypatch):
    """`--help` tells them without the server's libraries, so they stand in both."""
    made = []
    monkeypatch.setattr("spindle.server.bound", lambda options: made.append(options) or 1 / 0)
    monkeypatch.delenv("SPINDLE_API_KEY", raising=False)
    assert cli.main(["serve", "-m", "tiny"]) == cli.OUR_FAULT
    (options,) = made
    its = vars(options) | {"allow_origins": ()}
    assert its == vars(Options()) | {"name": "tiny"}
