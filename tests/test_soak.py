"""The soak: a thousand requests through every kind of engine, and what a soak must notice."""

import sys

import pytest
from fuzz import soak
from fuzz.calls import World

from spindle.serve.llm import LLM

COUNT = 1000


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("checkpoint"))


def test_nothing_is_held_nothing_grows_and_everybody_is_answered_as_alone(ctrl_c):
    results = list(soak.soak_all(COUNT, 0, None, lambda requests: None))
    assert [result.name for result in results] == list(soak.ENGINES)
    assert sum(result.requests for result in results) >= COUNT
    assert sum(result.compared for result in results) > COUNT / 20
    happened = sum((result.kinds for result in results), start=type(results[0].kinds)())
    for kind in ("preemption", "found in the cache", "ended in error", "draft accepted", "Ctrl-C"):
        assert happened[kind] > 5, f"{kind}: {happened[kind]}"
    first, last = results[0].blocks[-1], results[-1].blocks[-1]
    assert last - first < soak.BLOCKS_A_REQUEST * COUNT + soak.BLOCKS  # from engine to engine


KEPT = []


def forget_texts(soaked, monkeypatch):
    """An aborted request's text stays."""
    close = LLM._close

    def kept(self, request):
        texts = dict(self._texts)
        output = close(self, request)
        self._texts |= texts
        return output

    monkeypatch.setattr(LLM, "_close", kept)


def keep_an_object(soaked, monkeypatch):
    """A list that grows by a few small objects with each request."""
    queue = LLM._queue

    def kept(self, request):
        KEPT.extend(object() for _ in range(8))
        return queue(self, request)

    monkeypatch.setattr(LLM, "_queue", kept)


def keep_a_block(soaked, monkeypatch):
    pool, add = soaked.llm._kv.pool, soaked.llm.scheduler.add

    def kept(request):
        if request.order == 20:
            pool.take(1)
        add(request)

    monkeypatch.setattr(soaked.llm.scheduler, "add", kept)


def say_something_else(soaked, monkeypatch):
    """The 30th request gets another token."""
    read = LLM._read

    def other(self, sequence):
        if sequence.request.order % 10 == 0 and sequence.new_tokens == 1:
            sequence.ids[-1] = (sequence.ids[-1] + 1) % 200 + 2
        read(self, sequence)

    monkeypatch.setattr(LLM, "_read", other)


def do_more_and_more(soaked, monkeypatch):
    schedule, past = soaked.llm.scheduler.schedule, []

    def slower():
        past.append(None)
        for _ in past[::5]:
            len(past)
        return schedule()

    monkeypatch.setattr(soaked.llm.scheduler, "schedule", slower)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (forget_texts, "_texts at idle"),
        (keep_an_object, "blocks of memory more"),
        (keep_a_block, "counts|free"),
        (say_something_else, "alone"),
        (do_more_and_more, "function calls for what took"),
    ],
)
def test_a_fault_is_noticed(world, monkeypatch, ctrl_c, fault, words):
    if fault is not keep_an_object:
        monkeypatch.setattr(soak, "BLOCKS", 10**9)
    monkeypatch.setattr(soak, "SHARE", 0.5)
    monkeypatch.setattr(soak, "BURST", 40)
    soaked = soak.Soak(world, "recompute", 1)
    fault(soaked, monkeypatch)
    with pytest.raises(AssertionError, match=words):
        soaked.run(120, lambda requests: None)
    KEPT.clear()


def test_a_seed_is_the_same_soak_again(world, ctrl_c):
    first, again = (soak.Soak(world, "swap", 3) for _ in range(2))
    for one in (first, again):
        one.burst(30)
    assert first.result.kinds == again.result.kinds
    assert sys.getprofile() is None
