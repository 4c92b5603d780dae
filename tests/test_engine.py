"""One stream: cached decode is the plain forward pass, and nothing leaks from call to call."""

import contextlib
import itertools
import math

import numpy as np
import oracle
import oracle_sampling
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spindle.config import ModelConfig
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, sample
from spindle.errors import NumericsError, RequestError
from spindle.model.weights import load_hf, random_model

CONTEXT = 32  # positions of every model here
LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
}
PROMPT = [5, 81, 17, 3, 3, 60, 22]


def tiny(raw: dict, **changed):
    """A random model in float64, logits a few units apart, so that argmax means something."""
    return random_model(ModelConfig.from_dict(raw | changed), seed=1, dtype=torch.float64)


MODELS = {"llama": tiny(LLAMA), "gpt2": tiny(GPT2)}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


class WholeView:
    """A view without a cache: the step is the whole sequence, attention is torch's own."""

    def __init__(self, length: int) -> None:
        self.positions = torch.arange(length)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kv = k.transpose(0, 1), v.transpose(0, 1)  # [Hk, T, D] each

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            *(x[None] for x in self.kv),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def forward(model, ids: list[int]) -> Tensor:
    """Logits [T, V] of a whole sequence, from scratch."""
    return model.logits(model(torch.tensor(ids), WholeView(len(ids))))


class MockModel:
    """A model whose logits after position p are `table[p]`; `on_pass` is called at each pass."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, table: Tensor, eos_ids: tuple[int, ...] = (), on_pass=None) -> None:
        self.config = ModelConfig.from_dict(
            LLAMA | {"vocab_size": table.shape[1], "eos_token_id": list(eos_ids)}
        )
        self.table, self.on_pass = table, on_pass
        self.passes: list[list[int]] = []  # the positions of each

    def __call__(self, ids: Tensor, view) -> Tensor:
        self.passes.append(view.positions.tolist())
        if self.on_pass is not None:
            self.on_pass(len(self.passes))
        return view.positions[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()]


def saying(*tokens: int, vocab: int = 10, **mock) -> MockModel:
    """A model that, whatever the prompt, wants tokens[p] after position p; the last for ever."""
    wanted = torch.tensor([tokens[min(p, len(tokens) - 1)] for p in range(CONTEXT)])
    return MockModel(F.one_hot(wanted, vocab).float() * 4, **mock)


# What is generated


def test_greedy_is_argmax_over_a_forward_pass_without_a_cache(model):
    ids = list(PROMPT)
    for _ in range(20):
        top = forward(model, ids)[-1].topk(2).values
        assert top[0] - top[1] > 1e-6  # no tie that rounding could turn
        ids.append(int(forward(model, ids)[-1].argmax()))
    got, stats = Engine(model).generate(PROMPT, max_new_tokens=20, temperature=0)
    assert got == ids[len(PROMPT) :]
    assert stats.finish_reason == "length"
    assert len(set(got)) > 3  # no constant that any cache would get right


def test_sampling_is_sample_over_a_forward_pass_without_a_cache(model):
    """The number drawn belongs to the position of the token, counted from the prompt's first."""
    params = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, seed=11)
    rows, ids = SamplingRows.of([params]), list(PROMPT)
    for _ in range(20):
        logits = forward(model, ids)[-1:]
        ids.append(int(sample(logits, rows, torch.tensor([len(ids)]))))
    got, _ = Engine(model).generate(
        PROMPT, 20, temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, seed=11
    )
    assert got == ids[len(PROMPT) :]


def test_prefill_and_step_give_the_logits_of_the_whole_sequence(model):
    engine, ids = Engine(model), [*PROMPT, 9, 1, 44]
    right = forward(model, ids)
    assert engine.prefill(PROMPT).shape == (1, 97)
    assert torch.allclose(engine.prefill(PROMPT)[0], right[len(PROMPT) - 1], rtol=0, atol=1e-9)
    for at in range(len(PROMPT), len(ids)):
        got = engine.extend([ids[at]])
        assert torch.allclose(got[0], right[at], rtol=0, atol=1e-9)
        assert engine.length == at + 1


@pytest.mark.parametrize("chunk", [*range(1, 9), 512])
def test_no_chunking_of_the_prompt_changes_anything(model, chunk):
    """In float64: the same ids, and logits within 1e-9."""
    whole, chunked = Engine(model), Engine(model, prefill_chunk=chunk)
    assert torch.allclose(whole.prefill(PROMPT), chunked.prefill(PROMPT), rtol=0, atol=1e-9)
    for sampling in ({"temperature": 0}, {"seed": 4}):
        ids, _ = whole.generate(PROMPT, 12, **sampling)
        assert chunked.generate(PROMPT, 12, **sampling)[0] == ids


def test_the_prompt_goes_through_in_chunks_then_one_token_a_pass():
    mock = saying(1)
    Engine(mock, prefill_chunk=3).generate([2] * 7, 3, temperature=0)
    assert mock.passes == [[0, 1, 2], [3, 4, 5], [6], [7], [8]]


def test_generate_is_the_list_of_its_stream(model):
    engine = Engine(model)
    for sampling in ({"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 5}):
        ids, stats = engine.generate(PROMPT, 9, **sampling)
        stream = engine.stream(PROMPT, 9, **sampling)
        assert list(stream) == ids
        assert stream.stats.new_tokens == stats.new_tokens == len(ids) == 9
        assert stream.stats.prompt_tokens == stats.prompt_tokens == len(PROMPT)
        assert stream.stats.finish_reason == stats.finish_reason == "length"
        assert next(stream, None) is None  # and it has ended for good


def test_a_stream_gives_each_token_before_the_next_is_computed():
    mock = saying(1)
    stream = Engine(mock).stream([2], 5, temperature=0)
    assert len(mock.passes) == 0
    for passes, _ in enumerate(stream, 1):
        assert len(mock.passes) == passes == stream.stats.new_tokens
    assert len(mock.passes) == 5  # the last token is not put through the model


# Seeds


def test_seeds_reproduce_and_differ(model):
    answers = [tuple(Engine(model).generate(PROMPT, 10, seed=s)[0]) for s in range(6)]
    again = [tuple(Engine(model).generate(PROMPT, 10, seed=s)[0]) for s in range(6)]
    assert answers == again
    assert len(set(answers)) == 6


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_the_seed_given_is_the_seed_reported(model, seed):
    """B114: 0 is a seed like any other."""
    ids, stats = Engine(model).generate(PROMPT, 8, seed=seed)
    assert stats.seed == seed
    assert Engine(model).generate(PROMPT, 8, seed=seed)[0] == ids


def test_without_a_seed_one_is_drawn_and_reported(model):
    engine = Engine(model)
    runs = [engine.generate(PROMPT, 8) for _ in range(3)]
    assert len({stats.seed for _, stats in runs}) == 3
    assert len({tuple(ids) for ids, _ in runs}) > 1
    for ids, stats in runs:
        assert engine.generate(PROMPT, 8, seed=stats.seed)[0] == ids


def test_a_longer_answer_begins_with_the_shorter_one(model):
    """A token depends on its position and seed, not on how many were asked for."""
    engine = Engine(model)
    long, _ = engine.generate(PROMPT, 12, seed=8)
    for n in range(12):
        assert engine.generate(PROMPT, n, seed=8)[0] == long[:n]


# How long an answer is


@pytest.mark.parametrize("asked", [0, np.int64(0)])
def test_no_tokens_asked_for(model, asked):
    """B110: no tokens, reason "length", and the model is not run."""
    engine = Engine(model)
    before = engine.prefill(PROMPT)
    ids, stats = engine.generate([1, 2, 3], asked, temperature=0)
    assert ids == []
    assert stats.finish_reason == "length"
    assert (stats.new_tokens, stats.prompt_tokens, stats.ttft_ms) == (0, 3, None)
    assert engine.length == len(PROMPT)
    assert torch.equal(before, engine.prefill(PROMPT))


def test_one_token_and_as_many_as_fit(model):
    """B110: 1, the default of 16, and None."""
    engine = Engine(model)
    full, stats = engine.generate(PROMPT, None, temperature=0)
    assert len(full) == stats.new_tokens == CONTEXT - len(PROMPT)
    assert stats.finish_reason == "length"
    assert engine.generate(PROMPT, 1, temperature=0)[0] == full[:1]
    assert engine.generate(PROMPT, temperature=0)[0] == full[:16]
    assert engine.generate(PROMPT, 10**9, temperature=0)[0] == full


@pytest.mark.parametrize("wrong", [-1, 1.5, "5", True, 2**63, math.nan])
def test_a_bad_number_of_tokens_is_refused(model, wrong):
    """B110: -1 is no way to say all; None is."""
    with pytest.raises(RequestError, match=r"max_new_tokens=.*0 or more, or None"):
        Engine(model).generate(PROMPT, wrong)


@pytest.mark.parametrize(
    ("length", "new"), [(1, CONTEXT - 1), (CONTEXT - 2, 2), (CONTEXT - 1, 1), (CONTEXT, 0)]
)
def test_prompt_and_answer_share_the_context(model, length, new):
    """B83, B111: context L: a prompt of L-1 gets one token, one of L none, reason "length"."""
    prompt = [n % 97 for n in range(length)]
    ids, stats = Engine(model).generate(prompt, None, temperature=0)
    assert len(ids) == stats.new_tokens == new
    assert stats.finish_reason == "length"
    if new:
        assert ids[0] == int(forward(model, prompt)[-1].argmax())


def test_a_prompt_of_30_in_32_positions_gets_2_of_10(model):
    """B83: no look-up beyond the position table."""
    ids, stats = Engine(model).generate([4] * 30, 10, temperature=0)
    assert len(ids) == 2
    assert stats.finish_reason == "length"


def test_a_prompt_longer_than_the_context_is_refused(model):
    """B83, B111: with both lengths, before anything runs; one of exactly the context is stored."""
    engine = Engine(model)
    before = engine.prefill([1] * CONTEXT)
    for call in (engine.prefill, engine.generate, engine.stream):
        with pytest.raises(RequestError, match=f"prompt has {CONTEXT + 1} tokens.*{CONTEXT} fit"):
            call([1] * (CONTEXT + 1))
    assert engine.length == CONTEXT
    with pytest.raises(RequestError, match=f"full: {CONTEXT} of {CONTEXT}"):
        engine.extend([1])
    assert torch.equal(engine.prefill([1] * CONTEXT), before)


def test_a_shorter_context_can_be_asked_for(model):
    engine = Engine(model, max_seq_len=10)
    assert len(engine.generate(PROMPT, None, temperature=0)[0]) == 3
    assert (
        engine.generate(PROMPT, 3, temperature=0)[0]
        == (Engine(model).generate(PROMPT, 3, temperature=0)[0])
    )
    with pytest.raises(RequestError, match="11 tokens; at most 10 fit"):
        engine.generate([1] * 11)


@pytest.mark.parametrize("name", ["max_seq_len", "prefill_chunk"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True, math.nan])
def test_a_length_that_cannot_be_is_refused(model, name, wrong):
    with pytest.raises(RequestError, match=f"{name}={wrong!r}: expected a whole number"):
        Engine(model, **{name: wrong})


def test_a_context_beyond_the_models_is_refused(model):
    assert Engine(model).max_seq_len == Engine(model, max_seq_len=CONTEXT).max_seq_len == CONTEXT
    assert Engine(model, max_seq_len=np.int64(9)).max_seq_len == 9
    with pytest.raises(RequestError, match=f"max_seq_len=33: .*{CONTEXT}"):
        Engine(model, max_seq_len=33)
    with pytest.raises(RequestError, match="prefill_chunk=None"):
        Engine(model, prefill_chunk=None)


# Where an answer stops


def test_eos_ends_the_answer_and_is_its_last_id():
    mock = saying(1, 2, 3, 7, 4, eos_ids=(7,))
    ids, stats = Engine(mock).generate([5], 9, temperature=0)
    assert ids == [1, 2, 3, 7]
    assert stats.finish_reason == "stop"
    assert stats.new_tokens == 4
    assert len(mock.passes) == 4


def test_eos_as_the_first_token():
    """B32: an answer of the EOS alone; the engine goes on."""
    engine = Engine(saying(7, 7, 7, 2, eos_ids=(7,)))
    ids, stats = engine.generate([5], 9, temperature=0)
    assert (ids, stats.finish_reason) == ([7], "stop")
    assert engine.generate([5] * 4, 3, temperature=0)[0] == [2, 2, 2]


def test_each_of_several_eos_ids_stops_and_ignore_eos_ignores_all():
    """B68: also the second one, which only generation_config.json may know."""
    for stop in (2, 7):
        ids, stats = Engine(saying(1, stop, 4, eos_ids=(2, 7))).generate([5], 9, temperature=0)
        assert (ids, stats.finish_reason) == ([1, stop], "stop")
    engine = Engine(saying(1, 2, 7, 2, 4, eos_ids=(2, 7)))
    ids, stats = engine.generate([5], 6, temperature=0, ignore_eos=True)
    assert (ids, stats.finish_reason) == ([1, 2, 7, 2, 4, 4], "length")


def test_eos_as_the_last_token_that_fits_is_a_stop():
    for limit in (2, 3):
        ids, stats = Engine(saying(1, 7, eos_ids=(7,))).generate([5], limit, temperature=0)
        assert (ids, stats.finish_reason) == ([1, 7], "stop")


def test_eos_ids_in_the_prompt_stop_nothing():
    ids, stats = Engine(saying(1, eos_ids=(7,))).generate([7, 7], 3, temperature=0)
    assert (ids, stats.finish_reason) == ([1, 1, 1], "length")


def test_without_eos_ids_the_last_of_the_vocabulary_is_a_token_like_any_other():
    """B57: no end id of -1 that indexes the last entry."""
    for options in ({}, {"ignore_eos": True}):
        ids, _ = Engine(saying(9)).generate([1], 3, temperature=0, **options)
        assert ids == [9, 9, 9]


# What is refused, and that it changes nothing

BAD_PROMPTS = [
    ([-1], "-1 at position 0"),
    ([97], "97 at position 0"),
    ([1, 2, 2**63], f"{2**63} at position 2"),
    ([1, 2**64], f"{2**64} at position 1"),
    ([1, 1.5], "1.5 at position 1"),
    ([1, 1.0], "1.0 at position 1"),
    ([True], "True at position 0"),
    ([0, np.bool_(True)], "True.* at position 1"),
    ([0, torch.tensor(True)], "True.* at position 1"),
    ([1, None], "None at position 1"),
    ([1, "2"], "'2' at position 1"),
    ([[1, 2]], r"\[1, 2\] at position 0"),
    ([[1], [2]], r"\[1\] at position 0"),
    (np.array([[1, 2]]), r"\[1, 2\] at position 0"),
    (np.array([1.0, 2.0]), "1.0 at position 0"),
    (torch.tensor([[1, 2]]), r"\[1, 2\] at position 0"),
    (torch.tensor([1.0]), "1.0 at position 0"),
    (torch.tensor([True]), "True at position 0"),
    ([1, torch.tensor([2])], r"\[2\].* at position 1"),
    ([], "no tokens"),
    ((), "no tokens"),
    (torch.tensor([], dtype=torch.long), "no tokens"),
    (np.array([], dtype=np.int64), "no tokens"),
    ("The capital", "text"),
    (b"12", "text"),
    ("", "text"),
    (None, "NoneType"),
    (5, "int"),
    (torch.tensor(5), "int|Tensor"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_changes_nothing(model, prompt, message):
    """B107, B108: by position, before the cache of an earlier prompt is touched."""
    engine = Engine(model)
    engine.prefill(PROMPT)
    for call in (engine.prefill, engine.generate, engine.stream):
        with pytest.raises(RequestError, match=message):
            call(prompt)
    assert engine.length == len(PROMPT)
    right = forward(model, [*PROMPT, 9])[-1]
    assert torch.allclose(engine.extend([9])[0], right, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, dtype=np.uint8),
        [np.int32(i) for i in PROMPT],
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        [torch.tensor(i) for i in PROMPT],
        (i for i in PROMPT),
        {i: None for i in (5, 81, 17)}.keys(),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_whole_numbers_of_any_kind_are_a_prompt(prompt):
    """B108: of Python, numpy and torch."""
    got, _ = Engine(MODELS["llama"]).generate(prompt, 5, temperature=0)
    expected = PROMPT if not isinstance(prompt, type({}.keys())) else [5, 81, 17]
    assert got == Engine(MODELS["llama"]).generate(expected, 5, temperature=0)[0]
    assert all(type(i) is int for i in got)


def test_first_and_last_id_of_the_vocabulary_are_prompts(model):
    for token in (0, 96):
        assert Engine(model).generate([token], 1, temperature=0)[0] == [
            int(forward(model, [token])[-1].argmax())
        ]


@pytest.mark.parametrize("token", [-1, 97, 2**63, 1.5, True, "1", None, [1]])
def test_a_bad_token_to_step_is_refused_and_changes_nothing(model, token):
    """B108: a negative index would wrap around and look like the vocabulary's last token."""
    engine = Engine(model)
    engine.prefill(PROMPT)
    with pytest.raises(RequestError, match="expected"):
        engine.extend([token])
    assert engine.length == len(PROMPT)
    assert torch.allclose(
        engine.extend([np.int64(9)])[0], forward(model, [*PROMPT, 9])[-1], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"topp": 0.9}, "topp.*temperature, top_k, top_p, min_p, seed, ignore_eos"),
        ({"temperature": 0, "stop": ["x"]}, "stop"),
        ({"max_tokens": 5}, "max_tokens.*max_new_tokens"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"seed": 2**63}, "seed="),
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_changes_nothing(model, sampling, message):
    """B113"""
    engine = Engine(model)
    engine.prefill(PROMPT)
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=message):
            call([1, 2], **sampling)
    assert engine.length == len(PROMPT)
    assert torch.allclose(
        engine.extend([9])[0], forward(model, [*PROMPT, 9])[-1], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 5, 9])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 2}])
def test_broken_logits_are_an_error_that_names_the_position(value, at, sampling):
    """B69: at the third token; what came before is kept, the engine can go on."""
    mock = saying(1)
    mock.table[5, at] = value
    engine = Engine(mock)
    stream, ids = engine.stream([2] * 4, 9, **sampling), []
    with pytest.raises(NumericsError, match="position 6 "):
        ids.extend(stream)
    assert stream.stats.new_tokens == 2
    assert stream.stats.finish_reason == "error"
    stream.close()
    assert stream.stats.finish_reason == "error"
    assert engine.generate([2], 4, temperature=0)[0] == [1] * 4


def test_logits_of_minus_infinity_are_an_error():
    """B69"""
    mock = saying(1)
    mock.table[0] = -math.inf
    with pytest.raises(NumericsError, match="position 1 "):
        Engine(mock).generate([2])


# One engine, many calls


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=20), st.integers(0, 6)),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from(sorted(MODELS)),
)
def test_an_engine_used_before_is_as_good_as_new(calls, name):
    engine = Engine(MODELS[name])
    for seed, (prompt, n) in enumerate(calls):
        right, _ = Engine(MODELS[name]).generate(prompt, n, seed=seed)
        assert engine.generate(prompt, n, seed=seed)[0] == right


def test_two_engines_on_one_model_do_not_disturb_each_other(model):
    prompts = PROMPT, [8, 90, 1]
    right = [Engine(model).generate(p, 12, seed=s)[0] for s, p in enumerate(prompts)]
    streams = [Engine(model).stream(p, 12, seed=s) for s, p in enumerate(prompts)]
    pairs = list(zip(*streams, strict=True))
    assert [list(ids) for ids in zip(*pairs, strict=True)] == right


def test_a_closed_stream_is_aborted_and_the_engine_usable(model):
    engine = Engine(model)
    with contextlib.closing(engine.stream(PROMPT, 10, temperature=0)) as stream:
        begun = [next(stream) for _ in range(3)]
    assert stream.stats.finish_reason == "abort"
    assert stream.stats.new_tokens == 3
    assert list(stream) == []
    assert stream.stats.finish_reason == "abort"
    whole, _ = engine.generate(PROMPT, 10, temperature=0)
    assert whole[:3] == begun


def test_a_stream_closed_before_it_began_or_after_it_ended(model):
    engine = Engine(model)
    stream = engine.stream(PROMPT, 3, temperature=0)
    stream.close()
    assert stream.stats.finish_reason == "abort"
    assert list(stream) == []
    assert engine.length == 0
    stream = engine.stream(PROMPT, 3, temperature=0)
    assert len(list(stream)) == 3
    stream.close()
    assert stream.stats.finish_reason == "length"


@pytest.mark.parametrize("other", ["generate", "stream", "prefill", "step", "same prompt"])
def test_an_unfinished_stream_never_reads_another_calls_cache(model, other):
    """The engine has one sequence: who is pushed out is told so, and the other is unharmed."""
    engine = Engine(model)
    first = engine.stream(PROMPT, 10, temperature=0)
    begun = [next(first) for _ in range(2)]
    fresh = Engine(model)
    if other == "generate":
        right = fresh.generate([9, 8, 7], 6, temperature=0)[0]
        assert engine.generate([9, 8, 7], 6, temperature=0)[0] == right
    elif other == "stream":
        right = fresh.generate([9, 8, 7], 6, temperature=0)[0]
        second = engine.stream([9, 8, 7], 6, temperature=0)
        got = [next(second)]
    elif other == "prefill":
        engine.prefill([1, 2])
    elif other == "step":
        engine.extend([3])
    else:  # the length is as before: a comparison of lengths would not notice
        engine.prefill([*reversed(PROMPT), 4])
        assert engine.length == len(PROMPT) + 1
    with pytest.raises(RequestError, match="one stream at a time"):
        next(first)
    assert first.stats.finish_reason == "error"
    assert first.stats.new_tokens == len(begun) == 2
    assert list(first) == []
    if other == "stream":
        assert got + list(second) == right
    assert engine.generate(PROMPT, 10, temperature=0)[0][:2] == begun


def test_a_stream_that_has_not_begun_does_no_harm(model):
    """The sequence starts over at the first token asked for, not at the call."""
    engine = Engine(model)
    right = engine.generate(PROMPT, 6, temperature=0)[0]
    first = engine.stream(PROMPT, 6, temperature=0)
    begun = [next(first) for _ in range(2)]
    engine.stream([1, 2, 3], 6)
    assert begun + list(first) == right


def test_a_refused_call_does_not_end_an_unfinished_stream(model):
    engine = Engine(model)
    right = engine.generate(PROMPT, 6, temperature=0)[0]
    stream = engine.stream(PROMPT, 6, temperature=0)
    begun = [next(stream) for _ in range(2)]
    for refused in ({"ids": [-1]}, {"ids": [1], "top_p": 2}, {"ids": [1] * 33}):
        with pytest.raises(RequestError):
            engine.generate(**refused)
    with pytest.raises(RequestError):
        engine.extend([97])
    assert engine.generate([1, 2], 0)[0] == []
    assert begun + list(stream) == right


@pytest.mark.parametrize("interrupted", [1, 2, 4])
def test_an_interrupt_keeps_what_was_generated(interrupted):
    """Ctrl-C in the first pass of the prompt, in the second, in the second token's."""

    def on_pass(n: int) -> None:
        if n == interrupted:
            raise KeyboardInterrupt

    mock = saying(1, on_pass=on_pass)
    engine, ids = Engine(mock, prefill_chunk=2), []
    stream = engine.stream([2, 3, 4], 5, temperature=0)
    with pytest.raises(KeyboardInterrupt):
        for token in stream:
            ids.append(token)
    assert ids == [1] * max(0, interrupted - 2)
    assert stream.stats.new_tokens == len(ids)
    assert stream.stats.finish_reason == "abort"
    assert engine.generate([2, 3, 4], 5, temperature=0)[0] == [1] * 5


def test_a_step_that_failed_can_be_repeated(model):
    """The length grows only once the pass is done: K and V that were written are overwritten."""
    engine = Engine(model)
    engine.prefill(PROMPT)
    model_, fail = engine.model, itertools.count()

    class FailsOnce:
        config, dtype, device = model_.config, model_.dtype, model_.device
        logits = staticmethod(model_.logits)

        def __call__(self, ids, view):
            hidden = model_(ids, view)
            if next(fail) == 0:
                raise KeyboardInterrupt
            return hidden

    engine.model = FailsOnce()
    with pytest.raises(KeyboardInterrupt):
        engine.extend([50])
    assert engine.length == len(PROMPT)
    assert torch.allclose(
        engine.extend([9])[0], forward(model, [*PROMPT, 9])[-1], rtol=0, atol=1e-9
    )


def test_stats_are_in_order(model):
    """B93: call <= first <= last, one gap a token after the first."""
    _, stats = Engine(model).generate(PROMPT, 6, seed=1)
    assert stats.ttft_ms > 0
    assert len(stats.itl_ms) == 5
    assert min(stats.itl_ms) > 0
    assert stats.as_dict()["finish_reason"] == "length"


def test_a_stop_before_the_limit_counts_what_came():
    """B90, B99: real tokens, not those asked for."""
    ids, stats = Engine(saying(1, 7, eos_ids=(7,))).generate([5], 30, temperature=0)
    assert stats.new_tokens == len(ids) == 2


# What the tokens so far change


PENALTIES = dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 5}])
def test_penalties_over_a_forward_pass_without_a_cache(model, sampling):
    """B59: repetition counts prompt and output, the others the output alone: a loop over lists."""
    new: list[int] = []
    rows = SamplingRows.of([SamplingParams(seed=sampling.get("seed", 0), temperature=1.2)])
    while len(new) < 20:
        ids = [*PROMPT, *new]
        logits = forward(model, ids)[-1].clone()
        for token in set(ids):
            logits[token] *= 1 / 1.3 if logits[token] > 0 else 1.3
            logits[token] -= 0.4 * new.count(token) + 0.6 * (token in new)
        greedy = sampling["temperature"] == 0
        drawn = logits.argmax() if greedy else sample(logits[None], rows, torch.tensor([len(ids)]))
        new.append(int(drawn))
    got, _ = Engine(model).generate(PROMPT, 20, **sampling, **PENALTIES)
    assert got == new
    assert got != Engine(model).generate(PROMPT, 20, **sampling)[0]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_with_a_repetition_penalty_is_transformers_generate(family, tmp_path):
    """In float64: 48 ids, none excused, and other ones than without the penalty."""
    directory = oracle.make_checkpoint(tmp_path, family)
    theirs, engine = oracle.load(directory), Engine(load_hf(directory, dtype="float64"))
    right = oracle_sampling.greedy(theirs, PROMPT, 48, repetition_penalty=1.3)
    got, _ = engine.generate(PROMPT, 48, temperature=0, repetition_penalty=1.3)
    assert got == right
    assert got != engine.generate(PROMPT, 48, temperature=0)[0]


@pytest.mark.parametrize("eos_ids", [(7,), (2, 7), (9,)])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3}])
@pytest.mark.parametrize("least", [0, 1, 4])
def test_min_tokens_come_before_the_first_eos(eos_ids, sampling, least):
    """B57: the EOS ids are always by far the likeliest; a prompt of 10 does not count."""
    table = torch.zeros(CONTEXT, 10)
    table[:, eos_ids] = 60.0
    ids, stats = Engine(MockModel(table, eos_ids)).generate(
        [1] * 10, 9, min_tokens=least, **sampling
    )
    assert len(ids) == least + 1
    assert set(eos_ids).isdisjoint(ids[:-1])
    assert ids[-1] in eos_ids
    assert (stats.finish_reason, stats.stop_reason) == ("stop", None)


def test_min_tokens_hold_back_stop_ids_too_and_with_ignore_eos_only_them():
    """B57, B68: with ignore_eos the last id of the vocabulary, an EOS, can be sampled."""
    table = torch.zeros(CONTEXT, 10)
    table[:, 9], table[:, 3], table[:, 1] = 60.0, 50.0, 40.0
    engine = Engine(MockModel(table, (9,)))
    options = dict(temperature=0, min_tokens=2, stop_token_ids=[3])
    assert engine.generate([5], 6, **options)[0] == [1, 1, 9]
    assert engine.generate([5], 4, **options, ignore_eos=True)[0] == [9] * 4
    table[:, 9] = 0.0
    ids, stats = engine.generate([5], 6, **options, ignore_eos=True)
    assert (ids, stats.finish_reason, stats.stop_reason) == ([1, 1, 3], "stop", 3)


def test_min_tokens_with_nothing_else_to_say_is_an_error_in_words():
    """B69: every id but the EOS is impossible; it fails in the first step, and the engine lives."""
    mock = saying(7, eos_ids=(7,))
    mock.table[mock.table == 0] = -math.inf
    engine = Engine(mock)
    for sampling in ({"temperature": 0}, {"seed": 1}):
        stream = engine.stream([1, 2], 5, min_tokens=2, **sampling)
        with pytest.raises(NumericsError, match=r"position 2 leave nothing to sample.*min_tokens"):
            next(stream)
        assert stream.stats.finish_reason == "error"
    assert engine.generate([1, 2], 5)[0] == [7]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_does_not_hide_broken_logits(value):
    """B69: what is broken is the EOS's own logit, which min_tokens masks."""
    mock = saying(1, eos_ids=(7,))
    mock.table[:, 7] = value
    with pytest.raises(NumericsError, match=r"position 1 are no distribution \(NaN"):
        Engine(mock).generate([1], 5, temperature=0, min_tokens=3)


# Stop ids


def test_stop_ids_stop_and_say_which():
    """B68: besides the EOS ids, also with ignore_eos; the id is the answer's last."""
    engine = Engine(saying(1, 2, 7, 5, 4, eos_ids=(2, 7)))

    def answer(**options):
        ids, stats = engine.generate([5], 5, temperature=0, **options)
        return ids, stats.finish_reason, stats.stop_reason

    assert answer() == ([1, 2], "stop", None)
    assert answer(stop_token_ids=[1]) == ([1], "stop", 1)
    assert answer(ignore_eos=True) == ([1, 2, 7, 5, 4], "length", None)
    assert answer(ignore_eos=True, stop_token_ids=[7]) == ([1, 2, 7], "stop", 7)
    assert answer(ignore_eos=True, stop_token_ids=[6, 4]) == ([1, 2, 7, 5, 4], "stop", 4)
    assert answer(stop_token_ids=[2]) == ([1, 2], "stop", None)  # it is an EOS all the same


def test_stop_ids_in_the_prompt_stop_nothing():
    ids, _ = Engine(saying(1)).generate([3, 3], 2, temperature=0, stop_token_ids=[3])
    assert ids == [1, 1]


def test_what_token_ids_cannot_honour_is_refused_and_changes_nothing(model):
    """B113: stop strings, stop ids beyond the vocabulary, and n where one answer is given."""
    engine = Engine(model)
    engine.prefill(PROMPT)
    cases = [
        ({"stop": "x"}, "stop: token ids have no text.*stream_text"),
        ({"stop_token_ids": [3, 97]}, "stop_token_ids: token id 97 at position 1: .* 0 to 96"),
        ({"n": 2}, "n=2: .*Engine.answers"),
        ({"logprobs": -1}, "logprobs=-1: expected a whole number from 0 to 20"),
    ]
    for options, message in cases:
        for call in (engine.generate, engine.stream):
            with pytest.raises(RequestError, match=message):
                call([1], **options)
    for options, message in cases[:2]:
        with pytest.raises(RequestError, match=message):
            engine.answers([1], SamplingParams(**options))
    assert engine.length == len(PROMPT)
    assert len(engine.generate([1], 2, stop=None, stop_token_ids=None, n=1)[0]) == 2


# Log-probabilities


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0, **PENALTIES},
        {"temperature": 1.5, "seed": 3, "top_p": 0.5, "top_k": 9},
        {"temperature": 0.2, "seed": 3, "min_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("k", [0, 3, 20])
def test_logprobs_are_the_raw_log_softmax(model, sampling, k):
    """B62: whatever is filtered or penalised: real values, k entries, the sampled one among them.

    Also in a list of the same length as the ids at each moment.
    """
    stream, ids = Engine(model).stream(PROMPT, 8, logprobs=k, **sampling), list(PROMPT)
    for token in stream:
        right = forward(model, ids)[-1].log_softmax(-1)
        ids.append(token)
        assert len(stream.logprobs) == len(ids) - len(PROMPT)
        record = stream.logprobs[-1]
        likeliest = right.argsort(descending=True)[:k].tolist()
        expected = likeliest + [token] * (token not in likeliest)
        assert [one.token_id for one in record.top] == expected
        for one in (record.sampled, *record.top):
            assert one.logprob == pytest.approx(right[one.token_id].item(), abs=1e-9)
            assert math.isfinite(one.logprob)
            assert one.rank == 1 + int((right > right[one.token_id]).sum())
        assert record.sampled.token_id == token
    assert [one.sampled.token_id for one in stream.logprobs] == ids[len(PROMPT) :]


def test_logprobs_change_no_token_and_are_absent_by_default(model):
    engine = Engine(model)
    plain, asked = engine.stream(PROMPT, 8, seed=4), engine.stream(PROMPT, 8, seed=4, logprobs=2)
    assert list(plain) == list(asked)
    assert plain.logprobs is None
    assert len(asked.logprobs) == 8


def test_logprobs_beyond_the_vocabulary_are_the_vocabulary():
    """B56: 10 logits, 20 asked for."""
    stream = Engine(saying(1)).stream([2], 2, temperature=0, logprobs=20)
    list(stream)
    assert [len(record.top) for record in stream.logprobs] == [10, 10]


def test_an_eos_has_its_record_and_an_interrupt_keeps_them():
    stream = Engine(saying(1, 7, eos_ids=(7,))).stream([5], 9, temperature=0, logprobs=1)
    assert [next(stream)] == [1]
    assert len(stream.logprobs) == 1
    assert list(stream) == [7]
    assert stream.logprobs[-1].sampled.token_id == 7


# Several answers


def solo_answer(model, params: SamplingParams, sample_index: int, count: int) -> list[int]:
    """One answer by itself: a forward pass without a cache a token, and its own sample number."""
    ids = list(PROMPT)
    rows = SamplingRows.of(
        [params], samples=[sample_index], prefixes=[Prefix(PROMPT)], vocab_size=97
    )
    for _ in range(count):
        tokens = sample(forward(model, ids)[-1:], rows, torch.tensor([len(ids)]))
        rows.append(tokens)
        ids.append(int(tokens))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, PENALTIES], ids=str)
def test_each_of_n_answers_is_its_solo_run(model, options):
    """B60: three different ones, the same three again, the first as without n."""
    params = SamplingParams(n=3, seed=7, max_tokens=9, logprobs=1, **options)
    engine = Engine(model)
    answers = engine.answers(PROMPT, params)
    assert [a.token_ids for a in answers] == [solo_answer(model, params, i, 9) for i in range(3)]
    assert len({tuple(a.token_ids) for a in answers}) == 3
    again = engine.answers(PROMPT, params)
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]
    assert engine.generate(PROMPT, 9, seed=7, **options)[0] == answers[0].token_ids
    for answer in answers:
        assert [one.sampled.token_id for one in answer.logprobs] == answer.token_ids
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert (answer.stats.new_tokens, answer.stats.seed) == (9, 7)


def test_the_prompt_of_n_answers_is_run_once_and_a_pass_gives_each_a_token():
    mock = saying(1)
    engine = Engine(mock)
    engine.answers([2] * 7, SamplingParams(n=3, max_tokens=3))
    assert mock.passes == [[0, 1, 2, 3, 4, 5, 6], [7] * 3, [8] * 3]
    mock.passes.clear()
    list(itertools.chain(*engine.streams([2] * 7, SamplingParams(n=3, max_tokens=3))))
    assert mock.passes == [[0, 1, 2, 3, 4, 5, 6], *[[7], [8]] * 3]


def test_after_n_answers_the_engine_holds_the_prompt(model):
    """Whatever the rows wrote after it is of no account, and no row but the first is left."""
    engine, fresh = Engine(model), Engine(model)
    answers = engine.answers(PROMPT, SamplingParams(n=3, seed=1, max_tokens=9))
    fresh.prefill(PROMPT)
    assert engine.length == len(PROMPT) and len({tuple(a.token_ids) for a in answers}) == 3
    assert torch.equal(engine.extend([5]), fresh.extend([5]))
    assert engine._kv.rows == len(engine.seq_lens) == 1


def test_rows_that_end_leave_the_pass():
    """Of 20 answers that end at an EOS, each pass has those that have not."""
    mock = MockModel(torch.zeros(CONTEXT, 2), eos_ids=(0,))
    answers = Engine(mock).answers([1], SamplingParams(n=20, seed=1, max_tokens=4))
    lengths = [len(a.token_ids) for a in answers]
    assert [len(rows) for rows in mock.passes] == [
        1,
        *(sum(n > k for n in lengths) for k in (1, 2, 3)),
    ]


def test_an_answer_of_an_eos_alone_leaves_the_others_as_they_are():
    """B32: the first token of one is the EOS."""
    table = torch.zeros(CONTEXT, 2)
    engine = Engine(MockModel(table, eos_ids=(0,)))
    answers = engine.answers([1], SamplingParams(n=20, seed=1, max_tokens=4))
    reasons = {len(a.token_ids): a.finish_reason for a in answers}
    assert reasons[1] == "stop" and len(reasons) > 2
    for answer in answers:
        ended = answer.token_ids[-1] == 0
        assert answer.finish_reason == ("stop" if ended else "length")
        assert 0 not in answer.token_ids[:-1]


def test_n_answers_of_no_tokens(model):
    """B110"""
    engine = Engine(model)
    answers = engine.answers(PROMPT, SamplingParams(n=2, max_tokens=0))
    assert [(a.token_ids, a.finish_reason) for a in answers] == [([], "length")] * 2
    assert engine.length == 0


def test_without_a_seed_n_answers_share_one_that_is_drawn(model):
    answers = Engine(model).answers(PROMPT, SamplingParams(n=4, max_tokens=8))
    (seed,) = {a.stats.seed for a in answers}
    again = Engine(model).answers(PROMPT, SamplingParams(n=4, max_tokens=8, seed=seed))
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


def test_a_stream_that_answers_pushed_out_is_told_so(model):
    engine = Engine(model)
    stream = engine.stream(PROMPT, 9, seed=1)
    next(stream)
    engine.answers(PROMPT, SamplingParams(n=2, max_tokens=1))
    with pytest.raises(RequestError, match="one stream at a time"):
        next(stream)
