"""Rows of an engine: each is its own forward pass, whatever the others have stored."""

import itertools
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from ctrl_c import broken_off
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_engine import CONTEXT, LLAMA, MODELS, PROMPT, MockModel, forward, saying, tiny

from spindle import graphs
from spindle.config import ModelConfig
from spindle.decode import rows as rows_module
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, probabilities, sample
from spindle.errors import RequestError
from spindle.model.weights import random_model

GREEDY = SamplingParams(temperature=0, seed=0)
PROMPTS = [PROMPT, [9], [4, 4, 4, 80, 2, 7, 1, 33, 12, 50, 61]]  # of different lengths
WISHES = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=11),
    "filtered": SamplingParams(seed=3, top_k=30, top_p=0.8, min_p=0.01),
    "penalised": SamplingParams(seed=4, repetition_penalty=1.4, frequency_penalty=0.5),
    "min_tokens": SamplingParams(seed=5, min_tokens=4, stop_token_ids=[1, 2, 3]),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def alone(model, prompt, params, count):
    """What a row gives by itself, by forward passes without a cache."""
    ids = list(prompt)
    rows = SamplingRows.of([params], prefixes=[Prefix(prompt)], vocab_size=97)
    for _ in range(count):
        tokens = sample(forward(model, ids)[-1:], rows, torch.tensor([len(ids)]))
        rows.append(tokens)
        ids.append(int(tokens))
    return ids[len(prompt) :]


def run(engine, prompts, params, count):
    """As many tokens a row, one after the other -> [R][count]."""
    tokens = engine.begin(prompts, params)
    columns = [tokens.tolist()]
    for _ in range(count - 1):
        tokens = engine.step(tokens)
        columns.append(tokens.tolist())
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("wish", WISHES)
def test_each_row_is_its_solo_run(model, wish):
    engine = Engine(model, rows=3)
    got = run(engine, PROMPTS, WISHES[wish], 9)
    assert got == [alone(model, prompt, WISHES[wish], 9) for prompt in PROMPTS]
    assert engine.lengths == engine.seq_lens.tolist() == [len(p) + 8 for p in PROMPTS]


def test_rows_may_ask_for_different_things(model):
    params = list(WISHES.values())[:3]
    got = run(Engine(model, rows=3), PROMPTS, params, 9)
    assert got == [alone(model, *pair, 9) for pair in zip(PROMPTS, params, strict=True)]


def test_fewer_rows_than_there_are_and_then_others(model):
    """Steps that are kept from before are loaded with the new rows' values, counts included."""
    engine = Engine(model, rows=3)
    for wish, seed in itertools.product(("penalised", "sampled", "min_tokens"), (1, 2, 1)):
        params = WISHES[wish].__class__(**{**WISHES[wish].__dict__, "seed": seed})
        prompts = PROMPTS[: 1 + seed]
        got = run(engine, prompts, params, 5)
        assert got == [alone(model, prompt, params, 5) for prompt in prompts]


def test_a_cache_that_grows_in_mid_run_changes_no_token(model, monkeypatch):
    """B104: whatever was made over the old tensors is made anew; counts and tokens go over."""
    for wish in ("greedy", "penalised"):
        right = run(Engine(model, rows=3), PROMPTS, WISHES[wish], 20)
        monkeypatch.setattr(rows_module, "FIRST_CAPACITY", 2)
        engine = Engine(model, rows=3)
        assert engine._kv.capacity == 2
        assert run(engine, PROMPTS, WISHES[wish], 20) == right
        assert engine._kv.capacity == CONTEXT
        monkeypatch.undo()


def test_room_can_be_made_beforehand():
    engine = Engine(MODELS["llama"])
    before = engine._kv
    engine.reserve(3)
    assert engine._kv is before  # it was there
    with pytest.raises(RequestError, match="0 of 32 tokens, and 33 more"):
        engine.reserve(33)


def test_the_capacity_doubles_up_to_the_limit():
    long = tiny(LLAMA, max_position_embeddings=700)
    engine = Engine(long)
    seen = [engine._kv.capacity]
    for length in (256, 257, 513, 700):
        engine.prefill([1] * length)
        seen.append(engine._kv.capacity)
    assert seen == [256, 256, 512, 700, 700]


def test_a_cache_without_memory_is_refused_in_words(model):
    with pytest.raises(RequestError, match=r"no memory for .* rows .* GB .*lower max_seq_len"):
        Engine(model, rows=1 << 40)


def test_a_chunk_is_the_forward_pass_of_its_tokens(model):
    """Three tokens on top of each of three rows of different lengths."""
    engine = Engine(model, rows=3)
    for row, prompt in enumerate(PROMPTS):
        engine.prefill(prompt, row)
    more = torch.tensor([[5, 6, 7], [0, 96, 1], [3, 3, 3]])
    logits = engine.chunk(more)
    for row, prompt in enumerate(PROMPTS):
        right = forward(model, [*prompt, *more[row].tolist()])[-3:]
        assert torch.allclose(logits[row], right, rtol=0, atol=1e-9)
    assert engine.lengths == engine.seq_lens.tolist() == [len(p) + 3 for p in PROMPTS]


def test_rewound_rows_go_on_as_if_nothing_had_come_after(model):
    engine = Engine(model, rows=2)
    tokens = engine.begin(PROMPTS[:2], GREEDY).clone()
    engine.chunk(torch.tensor([[1, 2, 3, 4]] * 2))
    for row in range(2):
        engine.rewind(len(PROMPTS[row]), row)
    got = [tokens.tolist(), engine.step(tokens).tolist()]
    assert list(map(list, zip(*got, strict=True))) == [
        alone(model, prompt, GREEDY, 2) for prompt in PROMPTS[:2]
    ]


def test_the_distributions_are_kept_if_asked_for(model):
    params = WISHES["filtered"]
    engine = Engine(model, rows=3, keep_probs=True)
    tokens = engine.begin(PROMPTS, params)
    rows = SamplingRows.of([params] * 3)
    for _ in range(3):
        assert torch.equal(engine.probs, probabilities(engine.logits, rows))
        assert (engine.probs.gather(1, tokens[:, None]) > 0).all()
        tokens = engine.step(tokens)
    greedy = Engine(model, keep_probs=True)
    token = greedy.begin([PROMPT], GREEDY)
    assert greedy.probs[0, token] == greedy.probs.sum() == 1


def test_other_tokens_may_be_put_in(model):
    engine = Engine(model)
    engine.begin([PROMPT], GREEDY)
    got = engine.step(torch.tensor([42]))
    assert got.tolist() == alone(model, [*PROMPT, 42], GREEDY, 1)


def test_a_row_that_is_no_distribution_gets_minus_one_and_the_other_goes_on():
    table = torch.zeros(CONTEXT, 10)
    table[:, 4] = 1.0
    table[3] = torch.nan
    engine = Engine(MockModel(table), rows=2)
    assert run(engine, [[1, 2], [1]], GREEDY, 3) == [[4, 4, -1], [4, 4, 4]]


def test_a_step_that_failed_can_be_repeated():
    """The lengths on the device go back to what they were, wherever in the step it failed."""
    mock = saying(1, on_pass=lambda n: (_ for _ in ()).throw(KeyboardInterrupt) if n == 3 else None)
    engine = Engine(mock)
    tokens = engine.begin([[1, 2]], GREEDY)
    engine.step(tokens)
    step = engine._last
    for fail in (None, "draw"):
        if fail is not None:
            step.draw = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(tokens)
        assert engine.lengths == engine.seq_lens.tolist() == [3]
    del step.draw
    assert engine.step(tokens).tolist() == [1]
    assert engine.lengths == engine.seq_lens.tolist() == [4]


@pytest.mark.parametrize("grows", ["chunk", "extend", "prefill", "reserve", "enable"])
@pytest.mark.parametrize("wish", ["greedy", "penalised"])
def test_what_was_begun_goes_on_whatever_makes_the_cache_anew(model, wish, grows, monkeypatch):
    """B104: tokens, logits, counts and distributions go over to the new tensors."""
    monkeypatch.setattr(rows_module, "FIRST_CAPACITY", 16)
    engine = Engine(model, rows=3, keep_probs=True)
    tokens = engine.begin(PROMPTS[:2], WISHES[wish])
    got, logits = [tokens.tolist()], engine.logits.clone()
    if grows == "chunk":
        engine.chunk(torch.ones(2, 9, dtype=torch.int64))
        for row in range(2):
            engine.rewind(len(PROMPTS[row]), row)
    elif grows == "extend":
        engine.extend([1] * 20, 2)
    elif grows == "prefill":
        engine.prefill([1] * 20, 2)
    elif grows == "reserve":
        engine.reserve(30)
    else:
        graphs.enable(engine, graphs.recording)
    assert torch.equal(engine.logits, logits) and engine.probs.shape == logits.shape
    for _ in range(6):
        tokens = engine.step(tokens)
        got.append(tokens.tolist())
    for row in range(2):
        assert [column[row] for column in got] == alone(model, PROMPTS[row], WISHES[wish], 7)


@pytest.mark.parametrize("grows", [False, True], ids=["as it is", "cache grows"])
def test_wherever_a_step_is_broken_off_it_can_be_done_again(model, grows, monkeypatch, ctrl_c):
    """An interrupt at each line of rows.py and step.py in turn; the caller has its tokens still."""
    if grows:  # in the step that is broken off
        monkeypatch.setattr("spindle.decode.rows.FIRST_CAPACITY", len(PROMPT) + 1)
    right = alone(model, PROMPT, WISHES["penalised"], 6)
    for at in range(200):
        engine = Engine(model)
        tokens, got = engine.begin([PROMPT], WISHES["penalised"]), []
        got.append(int(tokens))
        tokens = engine.step(tokens)
        got.append(int(tokens))
        step = partial(engine.step, tokens)
        if not broken_off(step, at, "decode/rows.py", "decode/step.py"):
            assert at > 20
            return
        assert engine.lengths == engine.seq_lens.tolist()
        if engine.lengths == [len(PROMPT) + 1]:  # else it was done, and the next one goes on
            tokens = engine.step(tokens)
        got.append(int(tokens))
        while len(got) < 6:
            tokens = engine.step(tokens)
            got.append(int(tokens))
        assert got == right, at
    raise AssertionError("a step has more lines than that?")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_distributions_are_kept_in_32_bits_at_least(dtype):
    model = random_model(ModelConfig.from_dict(LLAMA), dtype=dtype)
    engine = Engine(model, keep_probs=True)
    engine.begin([PROMPT], SamplingParams(seed=1))
    assert engine.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(engine.probs.sum()) == pytest.approx(1, abs=1e-5)


def test_steps_by_hand_are_not_timed_for_an_answer_that_has_ended(model):
    engine = Engine(model)
    _, stats = engine.generate(PROMPT, 5, temperature=0, ignore_eos=True)
    tokens = engine.begin([PROMPT], GREEDY)
    for _ in range(5):
        tokens = engine.step(tokens)
    assert len(stats.steps.ms()) == len(stats.step_ms) == 4


def test_answers_of_unlike_lengths_have_their_own_steps():
    """They share the steps; an answer that ended early has the first of them."""
    mock = MockModel(torch.zeros(CONTEXT, 2), eos_ids=(0,))
    answers = Engine(mock).answers([1], SamplingParams(n=12, seed=1, max_tokens=6))
    lengths = {len(one.token_ids) for one in answers}
    assert len(lengths) > 2
    for one in answers:
        assert len(one.stats.step_ms) == len(one.token_ids) - 1


def refusals(engine):
    one = torch.tensor([1])
    return {
        "begin() first|nothing has been begun": lambda: Engine(engine.model).step(one),
        r"tokens are torch.int64 \[1\] .* \[2\]": lambda: engine.step(one),
        "tokens are torch.float32": lambda: engine.step(torch.ones(2)),
        "row 0 has stored|length=99": lambda: engine.rewind(99),
        "length=-1": lambda: engine.rewind(-1),
        "row 2: the engine has rows 0 to 1": lambda: engine.prefill([1], 2),
        "row -1": lambda: engine.extend([1], -1),
        "no tokens to extend": lambda: engine.extend([]),
        "and 40 more to come": lambda: engine.extend([1] * 40),
        r"torch.int64 \[R, C\]": lambda: engine.chunk(one),
        "row 2": lambda: engine.chunk(torch.ones(3, 1, dtype=torch.int64)),
        "and 30 more": lambda: engine.chunk(torch.ones(2, 30, dtype=torch.int64)),
        "probs: not kept": lambda: engine.probs,
        "3 prompts; expected 1 to 2": lambda: engine.begin([[1]] * 3, GREEDY),
        "one for each of 1 prompts": lambda: engine.begin([[1]], [GREEDY] * 2),
        "1000000000000 prompts; expected 1 to 2": lambda: engine.begin(range(10**12), GREEDY),
        "0 prompts": lambda: engine.begin([], GREEDY),
        "97": lambda: engine.begin([[1], [97]], GREEDY),
        "n=2": lambda: engine.begin([[1]], SamplingParams(n=2)),
        "stop": lambda: engine.begin([[1]], SamplingParams(stop="x")),
        "length=2.5": lambda: engine.rewind(2.5),
        "length=True": lambda: engine.rewind(True),
        "row True": lambda: engine.prefill([1], True),
        "row 0.0": lambda: engine.extend([1], 0.0),
        "row 'a'": lambda: engine.rewind(0, "a"),
        "token id 97 at": lambda: engine.step(torch.tensor([1, 97])),
        "token id -1 at": lambda: engine.chunk(torch.tensor([[-1]])),
        "tokens=None": lambda: engine.step(None),
        "tokens=\\[": lambda: engine.chunk([[1]]),
        "on meta": lambda: engine.step(torch.ones(2, dtype=torch.int64, device="meta")),
        "prompts=None": lambda: engine.begin(None, GREEDY),
        "params=None": lambda: engine.begin([[1]], None),
        "params=\\[3\\]": lambda: engine.begin([[1]], [3]),
        "model='tiny'": lambda: Engine("tiny"),
        "keep_probs='no'": lambda: Engine(engine.model, keep_probs="no"),
        "record=3": lambda: graphs.enable(engine, 3),
        "engine=None": lambda: graphs.enable(None),
    }


@pytest.mark.parametrize("message", refusals(Engine(MODELS["llama"])))
def test_what_cannot_be_is_refused_and_changes_nothing(model, message):
    engine = Engine(model, rows=2)
    tokens = engine.begin(PROMPTS[:2], GREEDY)
    before = [tokens.tolist(), engine.lengths, engine.changes]
    with pytest.raises(RequestError, match=message):
        refusals(engine)[message]()
    assert [tokens.tolist(), engine.lengths, engine.changes] == before
    got = engine.step(tokens).tolist()
    assert got == [alone(model, prompt, GREEDY, 2)[1] for prompt in PROMPTS[:2]]


def test_a_full_row_is_refused_before_the_step(model):
    engine = Engine(model, rows=2)
    tokens = engine.begin([[1] * CONTEXT, [1]], GREEDY)
    with pytest.raises(RequestError, match="full: 32 of 32"):
        engine.step(tokens)
    assert engine.lengths == [CONTEXT, 1]


@pytest.mark.parametrize("rows", [0, -1, 1.5, "2", True])
def test_a_number_of_rows_that_cannot_be_is_refused(model, rows):
    with pytest.raises(RequestError, match="rows"):
        Engine(model, rows=rows)


def test_a_steps_time_is_noted_where_somebody_asked():
    _, stats = Engine(MODELS["llama"]).generate(PROMPT, 6, temperature=0)
    assert len(stats.step_ms) == 5 and min(stats.step_ms) > 0
    assert sum(stats.step_ms) <= sum(stats.itl_ms)
    answers = Engine(MODELS["llama"]).answers(PROMPT, SamplingParams(n=3, seed=1, max_tokens=6))
    assert [len(one.stats.step_ms) for one in answers] == [5, 5, 5]  # they had the same steps


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done to the rows in whatever order, a row is the forward pass of its ids."""

    tokens = st.lists(st.integers(0, 96), min_size=1, max_size=5)
    row = st.integers(0, 2)

    @initialize(name=st.sampled_from(sorted(MODELS)), capacity=st.sampled_from([1, 8, 256]))
    def start(self, name, capacity):
        self.model = MODELS[name]
        rows_module.FIRST_CAPACITY = capacity
        self.engine, self.ids = Engine(self.model, rows=3), [[], [], []]
        rows_module.FIRST_CAPACITY = 256

    def same(self, logits, row, count=1):
        right = forward(self.model, self.ids[row])[-count:]
        assert torch.allclose(logits, right, rtol=0, atol=1e-9)

    @rule(row=row, ids=tokens)
    def prefill(self, row, ids):
        logits = self.engine.prefill(ids, row)
        self.ids[row] = list(ids)
        self.same(logits, row)

    @rule(row=row, ids=tokens)
    def extend(self, row, ids):
        if len(self.ids[row]) + len(ids) <= CONTEXT:
            logits = self.engine.extend(ids, row)
            self.ids[row] += ids
            self.same(logits, row)

    @rule(row=row, share=st.floats(0, 1))
    def rewind(self, row, share):
        length = int(share * len(self.ids[row]))
        self.engine.rewind(length, row)
        del self.ids[row][length:]

    @precondition(lambda self: max(map(len, self.ids)) < CONTEXT - 4)
    @rule(data=st.data(), count=st.integers(1, 4), R=st.integers(1, 3))
    def chunk(self, data, count, R):
        more = data.draw(
            st.lists(
                st.lists(st.integers(0, 96), min_size=count, max_size=count), min_size=R, max_size=R
            )
        )
        logits = self.engine.chunk(torch.tensor(more))
        for row, ids in enumerate(more):
            self.ids[row] += ids
            self.same(logits[row], row, count)

    @rule(prompts=st.lists(tokens, min_size=1, max_size=3), count=st.integers(1, 4))
    def run(self, prompts, count):
        got = run(self.engine, prompts, GREEDY, count)
        for row, (prompt, answer) in enumerate(zip(prompts, got, strict=True)):
            assert answer == alone(self.model, prompt, GREEDY, count)
            self.ids[row] = [*prompt, *answer[:-1]]

    @invariant()
    def lengths_are_those_of_the_ids(self):
        if hasattr(self, "ids"):
            assert self.engine.lengths == self.engine.seq_lens.tolist() == list(map(len, self.ids))


AnyOrder.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestAnyOrder = AnyOrder.TestCase
