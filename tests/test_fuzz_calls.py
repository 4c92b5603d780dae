"""Hostile calls: a sample of the seeds, each fault that they found, and what a fuzzer must notice.

`make fuzz` runs more of them. Two threads on one LLM are here too.
"""

import itertools
import os
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import shapes
import torch
from fuzz import calls, files, turns, weird

from spindle import LLM, Engine, SamplingParams, cli, hub, speculative
from spindle.decode.text import stream_text, stream_texts
from spindle.errors import ModelNotFound, RequestError, SpindleError
from spindle.model.weights import random_model

COUNT = 500
MODEL = random_model(shapes.llama(), dtype=torch.float64)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return calls.World(tmp_path_factory.mktemp("checkpoint"))


def engine(model=MODEL, **options):
    usual = dict(max_model_len=40, max_seqs=3, max_batch_tokens=16, num_blocks=20, block_size=4)
    return LLM(model, **(usual | options))


def test_a_sample_of_the_calls_works_or_is_refused_and_no_neighbour_notices():
    counts, findings = Counter(), []
    for told in calls.run(turns.by_turns(calls.KINDS, 0, COUNT)):
        counts += Counter(worked=told.get("worked", 0), refused=told.get("refused", 0))
        if told["outcome"] != "passed":
            findings.append(calls.in_words(told))
    assert not findings, "\n".join(findings)
    assert counts["worked"] > COUNT / 2 and counts["refused"] > COUNT


# --- what a fuzzer must notice -------------------------------------------------------------------


class Plain:
    """Enough of a World for a case that makes one call."""


def reported(monkeypatch, made):
    monkeypatch.setitem(calls.KINDS, "made", made)
    return calls.report("made", 0, Plain())


def refuse(words):
    raise RequestError(words)


@pytest.mark.parametrize(
    ("call", "replaced", "words"),
    [
        (lambda: 1 / 0, ["x"], "ZeroDivisionError"),
        (lambda: refuse("x=1: expected 2"), [], "refused what is right"),
        (lambda: refuse("something is wrong"), ["x"], "names none of"),
        (lambda: refuse("x " + "x" * 5000), ["x"], "a message of 5002 characters"),
        (lambda: refuse("x=\x1b[31m"), ["x"], "in a message"),
    ],
)
def test_what_is_no_good_refusal_is_a_finding(monkeypatch, call, replaced, words):
    def made(case, world):
        case.call("call", call, {"x": 1}, replaced)

    told = reported(monkeypatch, made)
    assert told["outcome"] == "finding" and words in told["fault"]


def test_a_good_refusal_and_a_call_that_works_are_none(monkeypatch):
    def made(case, world):
        case.call("call", lambda: refuse("x=1: expected 2"), {"x": 1}, ["x"])
        case.call("call", lambda: 1, {"x": 1}, [])

    told = reported(monkeypatch, made)
    assert (told["outcome"], told["worked"], told["refused"]) == ("passed", 1, 1)


@pytest.mark.parametrize(
    "fault",
    [
        lambda llm: llm.add([1], GREEDY),
        lambda llm: llm.step(),
        lambda llm: llm._kv.pool.take(1),
        lambda llm: llm._watched.update(x=None),
    ],
)
def test_a_change_in_the_engine_is_seen(fault):
    llm = engine()
    llm.add([1, 2, 3], GREEDY)
    before = calls.state(llm)
    assert calls.state(llm) == before
    fault(llm)

    def changed():
        try:
            return calls.state(llm) != before
        except AssertionError:  # the pool's own accounts
            return True

    assert changed()


def test_a_crash_and_a_hang_are_told_with_their_seed(monkeypatch):
    monkeypatch.setattr(files, "LIMIT_S", 1.0)
    script = (
        "import sys, os, time, json\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    os.abort() if line.split()[1] == '1' else time.sleep(60)\n"
    )
    crash, hang = files.run([("llm", 1), ("llm", 2)], (sys.executable, "-c", script))
    assert crash["outcome"] == hang["outcome"] == "finding"
    assert "died, status -6" in crash["fault"] and "no end after" in hang["fault"]


def test_a_seed_is_the_same_calls_again(world):
    first, again = (calls.report("text", 5, world) for _ in range(2))
    assert first["what"] == again["what"] and first["refused"] == again["refused"]
    assert calls.report("text", 6, world)["what"] != first["what"]


def test_every_odd_value_has_words():
    for value in [*weird.NUMBERS, *weird.TEXTS, *(make() for make in weird.ALL)]:
        words = weird.in_words(value)
        assert words and len(words) < 300 and words.encode()


# --- what it found -------------------------------------------------------------------------------

ODD = [5, None, "x", [1], np.array([1, 2]), b"x", weird.Mute()]


@pytest.mark.parametrize("params", ODD, ids=lambda value: type(value).__name__)
def test_parameters_of_another_kind_are_refused_by_name(world, params):
    one = Engine(MODEL, max_seq_len=40)
    text = (world.engine(), world.tokenizer, "a", params)
    for call in (
        lambda: one.answers([1], params),
        lambda: one.streams([1], params),
        lambda: one.stream_with([1], params),
        lambda: speculative.Speculator(one, speculative.NgramDrafter()).stream_with([1], params),
        lambda: stream_text(*text),
        lambda: stream_texts(*text),
    ):
        with pytest.raises(RequestError, match="params: expected SamplingParams, got"):
            call()
    assert one.lengths == [0]


@pytest.mark.parametrize("ids", [range(10**12), range(10**30), itertools.repeat(1)], ids=str)
def test_a_prompt_without_an_end_is_too_long(ids):
    with pytest.raises(RequestError, match="more than 40 tokens; at most 40 fit"):
        Engine(MODEL, max_seq_len=40).generate(ids)
    with pytest.raises(RequestError, match="more than 40 tokens; at most 40 fit"):
        engine().add(ids)
    assert engine().add(iter([1, 2])) == engine().add(range(2))


NAMES = [["a"], {}, weird.Mute(), 10**5000, "x" * 100_000]


@pytest.mark.parametrize("name", NAMES, ids=lambda value: type(value).__name__)
def test_what_is_no_name_of_a_model_is_refused_briefly(name):
    for call in (hub.fetch, hub.resolve):
        with pytest.raises(SpindleError, match="model") as caught:
            call(name)
        assert isinstance(caught.value, ModelNotFound) and len(str(caught.value)) < 1000


def test_an_error_is_a_line_for_a_terminal(capsys):
    """What a user typed may be a whole file, or what a terminal takes for a command."""
    assert cli.main(["generate", "x" * 5000]) == 2
    line = capsys.readouterr().err
    assert line.startswith("spindle: error: unrecognized arguments: xxx") and len(line) < 1100
    assert line.endswith("try `spindle --help`\n")
    assert cli.main(["generate", "\x1b[31m\0"]) == 2
    assert r"unrecognized arguments: \x1b[31m\x00; try" in capsys.readouterr().err


# --- the same in a process -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "--temperature", "nan"], "--temperature=nan: expected a number from 0"),
        (["generate", "-p", b"\xff\xfe"], "text to encode: expected whole characters"),
        (["generate", "-n", "9" * 5000], "argument -n/--max-new-tokens"),
    ],
)
def test_a_process_ends_with_one_line(args, words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SPINDLE_NO_EXT": "1"}
    command = [sys.executable, "-m", "spindle", *args]
    run = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    said = run.stderr.decode()
    assert (run.returncode, run.stdout) == (2, b"") and said.count("\n") == 1
    assert said.startswith("spindle: error: ") and words in said


# --- two threads ---------------------------------------------------------------------------------


class Slow:
    """A model whose pass waits to be told that it may go on."""

    def __init__(self):
        self.config, self.dtype, self.device = MODEL.config, MODEL.dtype, MODEL.device
        self.directory, self.logits, self.head = None, MODEL.logits, MODEL.head
        self.inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.inside.set()
        assert self.may_go_on.wait(60)
        return MODEL(*args)


def test_a_second_thread_is_told_at_once_and_changes_nothing():
    model, told = Slow(), []
    llm = engine(model, graphs=False)
    reader = llm.stream([4, 5], GREEDY)
    name = llm.add([1, 2, 3], GREEDY)
    first = threading.Thread(target=lambda: told.extend(llm.step()))
    first.start()
    assert model.inside.wait(60)
    try:
        for call in (
            llm.step,
            lambda: llm.add([1], GREEDY),
            lambda: llm.abort(name),
            lambda: llm.stream([1], GREEDY),
            lambda: llm.generate([[1]], GREEDY),
            lambda: llm.beam_search([1]),
            lambda: llm.has_unfinished,
            lambda: llm.stats,
            lambda: next(reader),
            reader.close,
        ):
            with pytest.raises(RequestError, match="another thread; expected one thread at a time"):
                call()
    finally:
        model.may_go_on.set()
        first.join(60)
    while llm.has_unfinished:
        told += llm.step()
    alone = Engine(MODEL, max_seq_len=40)
    ends = {output.request_id: output for output in told if output.finished}
    assert ends[name].outputs[0].token_ids == list(alone.stream_with([1, 2, 3], GREEDY))
    read = [token for delta in reader for token in delta.token_ids]
    assert read == list(alone.stream_with([4, 5], GREEDY))


def test_many_threads_each_get_the_right_answer_or_an_error_at_once():
    prompts = {n: [n] * 5 for n in range(1, 5)}
    alone = Engine(MODEL, max_seq_len=40)
    right = {n: list(alone.stream_with(ids, GREEDY)) for n, ids in prompts.items()}
    llm, got, refused = engine(), [], []

    def work(n):
        for _ in range(5):
            try:
                (output,) = llm.generate([prompts[n]], GREEDY)
                got.append(output.outputs[0].token_ids == right[n])
            except RequestError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in prompts]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not any(one.is_alive() for one in threads)
    assert all(got) and len(got) + len(refused) == 20 and got
    assert all("another thread" in words for words in refused)
    calls.idle(llm)


def test_threads_that_hold_a_lock_share_one_llm():
    llm, lock, done = engine(), threading.Lock(), {}

    def work(n):
        with lock:
            name = llm.add([n] * 5, GREEDY)
        for _ in range(1000):
            with lock:
                done.update({o.request_id: o for o in llm.step() if o.finished})
                if name in done:
                    return

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(done) == 3
    alone = Engine(MODEL, max_seq_len=40)
    answers = sorted(output.outputs[0].token_ids for output in done.values())
    assert answers == sorted(list(alone.stream_with([n] * 5, GREEDY)) for n in (1, 2, 3))
