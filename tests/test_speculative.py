"""Speculation in one stream: whatever is drafted, the target decides what comes out.

The rule is integrated, and not only sampled. One stream is compared with `Engine.generate`, in
float64, token by token; what a drafter that draws gives, with the enumerated distribution.
Statistical tests have fixed seeds, so they are decided once; their p-value must exceed 0.001.
"""

import functools
import itertools
import random
from fractions import Fraction

import oracle
import pytest
import shapes
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_engine import MockModel, forward
from test_sampling import LAST_U, chi_square_p

from spindle import graphs, load_hf
from spindle.decode import rows as rows_module
from spindle.decode import speculative
from spindle.decode.drafters import Draft, Drafter, ModelDrafter, NgramDrafter, drawn_from
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, probabilities, sample
from spindle.decode.speculative import Speculator, accepted, judged, verified
from spindle.decode.text import stream_text
from spindle.errors import NumericsError, RequestError
from spindle.kernels import native
from spindle.model.weights import random_model
from spindle.tokenizer import Tokenizer

ALPHA = 0.001
PROMPT = [5, 81, 17, 3, 3, 60, 22]
CONTEXT, V = 64, 97
MODELS = {
    name: random_model(config, dtype=torch.float64)
    for name, config in {"gpt2": shapes.gpt2(), "llama": shapes.llama()}.items()
}
DRAFT = random_model(shapes.llama(num_hidden_layers=1), seed=4, dtype=torch.float64)
GREEDY = {"temperature": 0, "seed": 0}
SAMPLED = [
    {"seed": 1},
    {"seed": 2, "temperature": 1.7, "top_k": 9},
    {"seed": 3, "temperature": 0.6, "top_p": 0.8, "min_p": 0.02},
    {"seed": 4, "repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.9},
    {"seed": 5, "top_k": 40, "top_p": 0.9, "frequency_penalty": -1.0},
    GREEDY | {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
]


# --- the rule ------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any)


def shares(weights: list[int]) -> list[Fraction]:
    return [Fraction(w, sum(weights)) for w in weights]


def law(p: list[Fraction], q: list[Fraction], draft: int) -> list[Fraction]:
    """How likely each token is, given the draft: the rule, in fractions."""
    keep = min(Fraction(1), p[draft] / q[draft])
    residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    rest = [r / sum(residual) for r in residual] if any(residual) else [Fraction(0)] * len(p)
    return [keep * (token == draft) + (1 - keep) * r for token, r in enumerate(rest)]


@given(WEIGHTS, WEIGHTS)
@example([1, 2, 3, 4], [1, 2, 3, 4])
@example([1, 1, 0, 0], [0, 0, 1, 1])
@example([0, 0, 5, 0], [0, 0, 1, 0])
@example([0, 0, 5, 0], [1, 0, 0, 0])
@example([1, 2, 3, 4], [0, 1, 0, 0])
@example([0, 1, 0, 0], [1, 2, 3, 4])
@settings(max_examples=60)
def test_the_rule_gives_the_targets_distribution(p_weights, q_weights):
    """B39, B40: integrated over the draft, and over both uniform numbers on a grid of G x G.

    First the law: sum over d of q(d) (min(1, p/q) at d, else the residual) is p, exactly. Then
    `judged` against the law, for each draft. Of G midpoints an interval of length x has between
    G x - 1 and G x + 1, and one from 0 on has G x to within 1/2: 1.5 / G in all.
    """
    p, q, G = shares(p_weights), shares(q_weights), 40
    laws = {d: law(p, q, d) for d in range(4) if q[d]}
    assert [sum(q[d] * laws[d][t] for d in laws) for t in range(4)] == p
    middle = (torch.arange(G, dtype=torch.float64) + 0.5) / G
    u_accept, u = (x.flatten() for x in torch.meshgrid(middle, middle, indexing="ij"))
    both = [torch.tensor([list(map(float, x))]).double().expand(G * G, 4) for x in (p, q)]
    for d, right in laws.items():
        tokens = judged(*both, torch.full((G * G,), d), u_accept, u)
        got = tokens.bincount(minlength=4) / G**2
        assert all(abs(g - r) <= 1.5 / G for g, r in zip(got.tolist(), right, strict=True))


@given(WEIGHTS)
def test_a_row_without_a_draft_is_the_targets(p_weights):
    """The last row of a pass; among rows that have one."""
    p, G = shares(p_weights), 64
    u = (torch.arange(G, dtype=torch.float64) + 0.5) / G
    target = torch.tensor([list(map(float, p))]).double().expand(G, 4)
    drafts = torch.full((G,), -1)
    tokens = judged(target, torch.zeros(G, 4).double(), drafts, torch.rand(G).double(), u)
    got = tokens.bincount(minlength=4) / G
    assert all(abs(g - x) <= 1 / G for g, x in zip(got.tolist(), p, strict=True))


@st.composite
def rounded_pairs(draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    """p, and a q that differs from it in last bits alone, in float32 or float64; a draft of q's."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    weights = draw(st.lists(st.integers(0, 1000), min_size=5, max_size=5).filter(any))
    p = torch.tensor(weights, dtype=dtype) / sum(weights)
    towards = draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=5, max_size=5))
    to = torch.tensor(towards, dtype=dtype)
    q = torch.where((to == 0) | (p == 0), p, torch.nextafter(p, to))
    return p[None], q[None], draw(st.sampled_from(q.nonzero().flatten().tolist()))


@given(rounded_pairs(), st.sampled_from([0.0, 0.5, LAST_U]), st.sampled_from([0.0, 0.3, LAST_U]))
def test_rounding_gives_no_token_that_cannot_be(pair, u_accept, u):
    """p and q are the same but for last bits: what is left of p - q says nothing, or little."""
    p, q, draft = pair
    numbers = torch.tensor([[u_accept], [u]], dtype=torch.float64)
    token = judged(p, q, torch.tensor([draft]), *numbers)
    assert p[0, token] > 0
    assert token == draft or q[0, draft] > p[0, draft] * (1 - 1e-6)


def test_where_nothing_is_left_of_p_without_q_the_token_is_the_targets():
    """p is q but for last bits, and smaller everywhere: the draft may be rejected all the same."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    q = torch.where(p > 0, torch.nextafter(p, torch.ones_like(p)), p)
    last = torch.tensor([LAST_U], dtype=torch.float64)
    for u, right in ((0.0, 1), (0.49, 1), (0.51, 3), (LAST_U, 3)):
        numbers = last, torch.tensor([u], dtype=torch.float64)
        assert judged(p, q, torch.tensor([1]), *numbers).tolist() == [right]


@given(WEIGHTS, WEIGHTS, st.sampled_from([0.0, LAST_U]), st.sampled_from([0.0, LAST_U]))
@example([0, 1, 1, 0], [1, 0, 0, 0], 0.0, 0.0)
def test_no_uniform_number_gives_a_token_that_cannot_be(p_weights, q_weights, u_accept, u):
    p, q = (torch.tensor([w]).double() / sum(w) for w in (p_weights, q_weights))
    numbers = torch.tensor([[u_accept], [u]], dtype=torch.float64)
    for draft in q[0].nonzero().flatten().tolist():
        token = judged(p, q, torch.tensor([draft]), *numbers)
        assert p[0, token] > 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.data())
def test_accepted_counts_up_to_the_first_other_token(said, data):
    drafts = [data.draw(st.integers(0, 2)) for _ in said[1:]]
    agree = [a == b for a, b in zip(said, drafts, strict=False)]
    right = len(list(itertools.takewhile(bool, agree)))
    assert int(accepted(torch.tensor(said), torch.tensor(drafts, dtype=torch.int64))) == right


def many(params: SamplingParams, count: int) -> SamplingRows:
    """Rows that differ in their seeds alone."""
    rows = SamplingRows.of([params])
    which = torch.zeros(count, dtype=torch.int64)
    rows = rows.select(which)
    rows.seed.copy_(torch.arange(count))
    return rows


VOCAB = 6
TARGET_LOGITS = torch.tensor([[0.3, 1.2, -0.5, 0.8, -2.0, 0.1]]).double()
DRAFT_LOGITS = torch.tensor([[1.5, -0.4, 0.2, 0.9, 0.3, -1.0]]).double()
SHAPED = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3, "temperature": 2.0},
    "min_p": {"min_p": 0.3},
}


@pytest.mark.parametrize("shape", SHAPED)
def test_a_drawn_draft_and_its_judgement_have_the_targets_law(shape):
    """B39, B40: 20,000 seeds; the numbers that draft, accept and resample know nothing of each
    other, and what the filters cut never comes.
    """
    N, params = 20_000, SamplingParams(seed=0, **SHAPED[shape])
    rows, position = many(params, N), torch.full((N,), 9)
    drafts, q = drawn_from(DRAFT_LOGITS.expand(N, -1), rows, position)
    tokens = verified(TARGET_LOGITS.expand(N, -1), rows, position, Draft(drafts, q))
    right = probabilities(TARGET_LOGITS, SamplingRows.of([params]))[0]
    counts = tokens.bincount(minlength=VOCAB)
    assert counts[right == 0].sum() == 0
    assert chi_square_p(counts[right > 0], right[right > 0]) > ALPHA
    assert 0.2 < (tokens == drafts).double().mean() < 0.95  # so both ways were gone


@pytest.mark.parametrize("shape", SHAPED)
def test_a_guess_and_its_judgement_are_plain_sampling(shape):
    """B40: a drafter that takes the argmax at temperature 1: 20,000 seeds fit the target's law, and
    each token is the one that is sampled without a draft.
    """
    N, params = 20_000, SamplingParams(seed=0, **SHAPED[shape])
    rows, position = many(params, N), torch.full((N,), 9)
    guess = DRAFT_LOGITS.argmax(dim=-1).expand(N)
    tokens = verified(TARGET_LOGITS.expand(N, -1), rows, position, Draft(guess))
    assert torch.equal(tokens, sample(TARGET_LOGITS.expand(N, -1), rows, position))
    right = probabilities(TARGET_LOGITS, SamplingRows.of([params]))[0]
    assert chi_square_p(tokens.bincount(minlength=VOCAB)[right > 0], right[right > 0]) > ALPHA


def test_a_guess_whose_weight_is_spelled_out_has_the_same_law():
    """q is one-hot: min(1, p / 1) accepts p of it, and the residual is p without it."""
    N, params = 20_000, SamplingParams(seed=0)
    rows, position = many(params, N), torch.full((N,), 9)
    q = torch.zeros(N, VOCAB).double()
    q[:, 3] = 1
    drafts = torch.full((N,), 3)
    tokens = verified(TARGET_LOGITS.expand(N, -1), rows, position, Draft(drafts, q))
    right = TARGET_LOGITS.softmax(dim=-1)[0]
    assert chi_square_p(tokens.bincount(minlength=VOCAB), right) > ALPHA


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_row_that_is_no_distribution_leaves_the_others_alone(bad, drawn):
    params = SamplingParams(seed=0)
    rows, position = many(params, 4), torch.arange(4)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).double()
    drafts, q = drawn_from(DRAFT_LOGITS.expand(4, -1), rows, position)
    draft = Draft(drafts, q if drawn else None)
    right = verified(logits, rows, position, draft).tolist()
    logits[2] = bad
    assert verified(logits, rows, position, draft).tolist() == [*right[:2], -1, right[3]]


def test_a_draft_model_that_says_nothing_is_still_exact():
    """NaN among its logits: the draft is id 0, drawn from all weight on id 0; 20,000 seeds."""
    N, params = 20_000, SamplingParams(seed=0)
    rows, position = many(params, N), torch.full((N,), 9)
    broken = torch.full((N, VOCAB), torch.nan).double()
    drafts, q = drawn_from(broken, rows, position)
    tokens = verified(TARGET_LOGITS.expand(N, -1), rows, position, Draft(drafts, q))
    assert drafts.unique().tolist() == [0]
    right = TARGET_LOGITS.softmax(dim=-1)[0]
    assert chi_square_p(tokens.bincount(minlength=VOCAB), right) > ALPHA


# --- one stream: the same tokens -----------------------------------------------------------------


class Told(Drafter):
    """Knows the answer, and proposes what `spoil` makes of it: (right ids, k, round) -> ids."""

    def __init__(self, whole: list[int], spoil=lambda right, k, turn: right) -> None:
        self.whole, self.spoil, self.asked = whole, spoil, []

    def propose(self, ids, k):
        right = (self.whole + [0] * k)[len(ids) : len(ids) + k]
        self.asked.append(len(ids))
        return self.spoil(right, k, len(self.asked))


def wrong(ids: list[int]) -> list[int]:
    return [(i + 1) % V for i in ids]


def garbage(right: list[int], k: int, turn: int) -> list[int]:
    return random.Random(turn).choices(range(V), k=k)


ADVERSARIES = {
    "always right": lambda right, k, turn: right,
    "always wrong": lambda right, k, turn: wrong(right),
    "right, then wrong": lambda right, k, turn: right[: k // 2] + wrong(right[k // 2 :]),
    "wrong, then right": lambda right, k, turn: wrong(right[:1]) + right[1:],
    "right by turns": lambda right, k, turn: right if turn % 2 else wrong(right),
    "garbage": garbage,
    "none": lambda right, k, turn: [],
    "fewer": lambda right, k, turn: right[: turn % (k + 1)],
    "more": lambda right, k, turn: right + [0] * 5,
}
DRAFTERS = {
    **{name: lambda whole, spoil=spoil: Told(whole, spoil) for name, spoil in ADVERSARIES.items()},
    "ngram": lambda whole: NgramDrafter(),
    "unigram": lambda whole: NgramDrafter(3, 1),
    "model": lambda whole: ModelDrafter(Engine(DRAFT)),
}


def plain(model, prompt, count, **options) -> list[int]:
    return Engine(model).generate(prompt, count, **options)[0]


@functools.cache
def greedy_text(model, count: int) -> list[int]:
    """PROMPT, and what is said after it."""
    return PROMPT + plain(model, PROMPT, count, **GREEDY)


def check_counts(stats, k: int) -> None:
    """B48: no counter says more than what was given; each pass gives a token and its drafts."""
    s = stats.speculation
    assert 0 <= s.accepted <= s.judged <= s.proposed <= k * s.passes
    assert s.passes <= s.tokens == max(0, stats.new_tokens - 1) <= s.accepted + s.passes
    if stats.finish_reason == "length":
        assert s.tokens == s.accepted + s.passes
    assert s.draft_s >= 0 and s.pass_s >= 0


def check_same(engine: Engine, speculator: Speculator, prompt: list[int], count, **options) -> list:
    """The speculator's answer is the engine's: ids, reasons, logprobs, and what the cache holds."""
    right, got = (one.stream(prompt, count, **options) for one in (engine, speculator))
    ids = list(right)
    assert list(got) == ids
    for name in ("new_tokens", "prompt_tokens", "finish_reason", "stop_reason", "seed"):
        assert getattr(got.stats, name) == getattr(right.stats, name)
    check_same_logprobs(got.logprobs, right.logprobs)
    check_counts(got.stats, speculator.k)
    if ids:
        assert speculator.engine.length == engine.length == len(prompt) + len(ids) - 1
    return ids


def check_same_logprobs(got, right) -> None:
    """B44: one record a token; the same ids and ranks, and numbers within 1e-9."""
    assert (got is None) == (right is None)
    for mine, its in zip(got or [], right or [], strict=True):
        assert [(t.token_id, t.rank) for t in mine.top] == [(t.token_id, t.rank) for t in its.top]
        for a, b in zip((mine.sampled, *mine.top), (its.sampled, *its.top), strict=True):
            assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-9)


def test_the_models_spread_their_logits():
    """So that greedy tokens are decided by more than rounding, and drafts are often wrong."""
    for model in MODELS.values():
        assert forward(model, PROMPT).std() >= 1
        answer = plain(model, PROMPT, 40, **GREEDY)
        assert len(set(answer)) > 10
        top = forward(model, PROMPT + answer).topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 1e-6


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_greedy_whatever_is_drafted(drafter, k):
    model = MODELS["llama"]
    whole = greedy_text(model, 20)
    ids, stats = speculative.generate(
        Engine(model), DRAFTERS[drafter](whole), PROMPT, k, 20, adaptive_k=False, **GREEDY
    )
    assert PROMPT + ids == whole
    check_counts(stats, k)
    if drafter == "always right":
        assert stats.acceptance_rate == 1
        assert stats.speculation.tokens_per_pass > min(k, 3)
    if drafter == "always wrong":
        assert stats.acceptance_rate == 0 and stats.speculation.passes == 19
    if drafter == "none":
        assert (stats.acceptance_rate, stats.speculation.proposed) == (None, 0)


CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "drafter": st.sampled_from(sorted(set(DRAFTERS) - {"model"})),
        "k": st.integers(0, 8),
        "adaptive": st.booleans(),
        "chunk": st.sampled_from([1, 3, 512]),
        "recorded": st.booleans(),
        "sampling": st.sampled_from([GREEDY, *SAMPLED]),
        "extra": st.fixed_dictionaries(
            {},
            optional={
                "logprobs": st.integers(0, 5),
                "stop_token_ids": st.just(list(range(0, V, 7))),
            },
        ),
        "min_tokens": st.sampled_from([0, 9]),
        "count": st.sampled_from([1, 2, 14, None]),
    }
)


@given(CASES)
@settings(max_examples=40)
def test_with_guesses_any_answer_is_the_plain_one(case):
    """B39, B42, B44, B45: every option means what it means without drafts, token for token.

    The cache grows in mid-run, from 16 tokens to 32 and 64.
    """
    model, options = MODELS[case["model"]], case["sampling"] | case["extra"]
    if case["count"] in (14, None):
        options = options | {"min_tokens": case["min_tokens"]}
    whole = PROMPT + plain(model, PROMPT, 30, **options | {"min_tokens": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "FIRST_CAPACITY", 16)
        engine = Engine(model, prefill_chunk=case["chunk"])
        if case["recorded"]:
            graphs.enable(engine, graphs.recording)
        else:
            assert engine._kv.capacity == 16
    drafter = DRAFTERS[case["drafter"]](whole)
    speculator = Speculator(engine, drafter, case["k"], case["adaptive"])
    check_same(Engine(model), speculator, PROMPT, case["count"], **options)


@pytest.mark.parametrize("options", SAMPLED, ids=str)
@pytest.mark.parametrize("drafter", ["always right", "right, then wrong", "garbage"])
def test_guesses_leave_seeded_sampling_as_it_is(drafter, options):
    """B39, B42, B44: with logprobs; another seed, another answer."""
    model, options = MODELS["gpt2"], options | {"logprobs": 2}
    whole = PROMPT + plain(model, PROMPT, 24, **options)
    speculator = Speculator(Engine(model), DRAFTERS[drafter](whole), 4, adaptive_k=False)
    assert PROMPT + check_same(Engine(model), speculator, PROMPT, 24, **options) == whole
    if options.get("temperature", 1) > 0:
        check_same(Engine(model), speculator, PROMPT, 12, **options | {"seed": 77})
        assert plain(model, PROMPT, 24, **options | {"seed": 77}) != whole[len(PROMPT) :]


def test_guesses_at_temperature_1_that_are_often_right():
    """The n-grams of a text that repeats itself: accepted drafts among the sampled tokens."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    model = random_model(shapes.gpt2(n_layer=1, vocab_size=12), dtype=torch.float64, gain=6.0)
    prompt = [i % 12 for i in prompt]
    speculator = Speculator(Engine(model), NgramDrafter(2, 1), 4, adaptive_k=False)
    rates = []
    for seed in range(5):
        check_same(Engine(model), speculator, prompt, 30, seed=seed)
        rates.append(speculator.generate(prompt, 30, seed=seed)[1].acceptance_rate)
    assert min(rates) < max(rates) and max(rates) > 0.2


def test_top_k_1_is_greedy_at_any_temperature():
    """B39"""
    model = MODELS["llama"]
    right = greedy_text(model, 20)[len(PROMPT) :]
    for drafter in ("ngram", "model", "garbage"):
        speculator = Speculator(Engine(model), DRAFTERS[drafter](PROMPT + right), 4)
        assert speculator.generate(PROMPT, 20, temperature=1.0, top_k=1, seed=9)[0] == right


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_is_that_of_transformers(family, tmp_path):
    checkpoint = oracle.make_checkpoint(tmp_path, family)
    right = oracle.greedy(oracle.load(checkpoint), PROMPT, 24)
    model = load_hf(checkpoint, dtype=torch.float64)
    for drafter in ("ngram", "always right", "right, then wrong", "garbage", "model"):
        mine = DRAFTERS[drafter](PROMPT + right)
        ids, _ = speculative.generate(Engine(model), mine, PROMPT, 3, 24, **GREEDY)
        assert ids == right


@pytest.mark.parametrize("repeats", [True, False])
def test_the_bundled_models(repeats):
    """In float64; of a text that repeats itself more than half of the drafts are accepted."""
    target, small = (load_hf(name, dtype=torch.float64) for name in ("tiny", "tiny-draft"))
    text = "def add(a, b):\n    return a + b\n\n" * 3 if repeats else "A list is a sequence of"
    ids = Tokenizer("tiny").encode(text)
    engine, options = Engine(target), GREEDY | {"ignore_eos": True, "logprobs": 1}
    for drafter in (NgramDrafter(), ModelDrafter(Engine(small))):
        speculator = Speculator(Engine(target), drafter, 5, adaptive_k=repeats)
        check_same(engine, speculator, ids, 32, **options)
        if repeats:
            assert speculator.generate(ids, 32, **options)[1].acceptance_rate > 0.5


class Rounds(Told):
    """Right for as many drafts as each round is to accept, and wrong then; of k each."""

    def __init__(self, whole, plan) -> None:
        super().__init__(whole)
        self.plan, self.spoil = plan, self.some

    def some(self, right, k, turn):
        agree = self.plan[(turn - 1) % len(self.plan)]
        return right[:agree] + wrong(right[agree:])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from(sorted(MODELS)))
@settings(max_examples=20)
def test_what_the_target_has_stored_is_what_a_prefill_stores(plan, name):
    """Rounds with any number of rejected drafts: their keys and values are gone or overwritten."""
    model = MODELS[name]
    whole = greedy_text(model, 20)
    engine, fresh = Engine(model), Engine(model)
    stream = Speculator(engine, Rounds(whole, plan), 4, False).stream(PROMPT, 20, **GREEDY)
    assert PROMPT + list(stream) == whole
    fresh.prefill(whole[:-1])
    for mine, its in zip(
        (engine._kv.keys, engine._kv.values), (fresh._kv.keys, fresh._kv.values), strict=True
    ):
        stored = slice(len(whole) - 1)
        assert torch.allclose(mine[:, 0, stored], its[:, 0, stored], rtol=0, atol=1e-9)


# --- recorded steps ------------------------------------------------------------------------------


class Counted:
    """A recorder that counts what it records, and how often each of it is replayed."""

    def __init__(self, record) -> None:
        self.record, self.replays = record, {}

    def __call__(self, step):
        body, size = self.record(step), step.tokens.shape[-1]
        self.replays[size] = 0

        def replay():
            self.replays[size] += 1
            body()

        return replay


@pytest.mark.parametrize("drafter", ["always right", "right by turns", "ngram", "model"])
def test_verification_replays_the_chunk_graph(drafter):
    """One graph for each number of drafts of a few: 5, 2, 1 and 0 of them, whatever is asked."""
    model = MODELS["llama"]
    whole = greedy_text(model, 40)
    counted = Counted(graphs.recording)
    engine = graphs.enable(Engine(model), counted)
    mine, passes = DRAFTERS[drafter](whole), 0
    for count in (40, 3, 40):
        ids, stats = Speculator(engine, mine, 5).generate(PROMPT, count, **GREEDY)
        assert PROMPT + ids == whole[: len(PROMPT) + count]
        passes += stats.speculation.passes
    assert set(counted.replays) <= {6, 3, 2, 1}
    assert sum(counted.replays.values()) == passes > 3


@pytest.mark.skipif(not native.available(), reason="no native code here")
@pytest.mark.parametrize("name", ["tiny", "random"])
def test_on_a_cpu_the_replayed_passes_are_those_that_are_run(name, monkeypatch):
    """float32, bit for bit, logprobs too; as many replays as passes, and no more than 4 graphs."""
    model = load_hf("tiny") if name == "tiny" else random_model(shapes.llama(eos_token_id=None))
    counted = Counted(graphs.cpu_graph)
    monkeypatch.setattr(graphs, "cpu_graph", counted)
    engine = graphs.enable(Engine(model))
    assert engine.recorded
    prompt, answers, passes = [n % 90 for n in (3, 1, 4, 1, 5) * 4], [], 0
    for options in ({"temperature": 0}, {"seed": 3, "top_p": 0.9}):
        options = options | {"ignore_eos": True, "logprobs": 2}
        streams = [
            Speculator(one, NgramDrafter(3, 1), 5).stream(prompt, 30, **options)
            for one in (engine, Engine(model))
        ]
        answers.append([(list(one), one.logprobs) for one in streams])
        passes += streams[0].stats.speculation.passes
        assert streams[0].stats.speculation.proposed > 0
    for replayed, run in answers:
        assert replayed == run
    assert set(counted.replays) <= {6, 3, 2, 1}
    assert sum(counted.replays.values()) == passes


# --- one stream: the same distribution -----------------------------------------------------------

SMALL = 5  # tokens of a vocabulary whose answers of 4 can be enumerated: 625
SHAPE_SMALL = shapes.gpt2(vocab_size=SMALL, n_embd=8, n_head=2, n_layer=1, n_positions=16)
TARGET_SMALL, DRAFT_SMALL = (
    random_model(SHAPE_SMALL, seed=seed, dtype=torch.float64, gain=1.3) for seed in (3, 4)
)


def enumerated(model, prompt: list[int], count: int, params: SamplingParams) -> torch.Tensor:
    """How likely each answer of `count` tokens is, [SMALL ** count]: from passes, no cache."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(count):
        step = []
        for answer in itertools.product(range(SMALL), repeat=length):
            rows = SamplingRows.of(
                [params], prefixes=[Prefix(prompt, answer)], vocab_size=model.config.vocab_size
            )
            step.append(probabilities(forward(model, [*prompt, *answer])[-1:], rows)[0])
        law = (law[:, None] * torch.stack(step)).flatten()
    return law


def fits(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's p-value, over cells of which 5 are expected, as the test needs, and the others."""
    counts, law = counts.double().flatten(), law.flatten()
    order = law.argsort(descending=True)
    counts, law = counts[order], law[order]
    most = int((law * counts.sum() >= 5).sum())
    if law[most:].sum() * counts.sum() < 5:
        most -= 1
    pooled = (torch.cat((x[:most], x[most:].sum()[None])) for x in (counts, law))
    return chi_square_p(*pooled)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
        {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    ],
    ids=["temperature", "filters", "penalties"],
)
def test_whole_answers_have_the_targets_distribution(options):
    """B34, B39, B40: 640 answers of 4 tokens, 2 drafts a round from another model, through both
    caches. All 4 tokens, the last 3, the last 2 and each one alone fit what is enumerated.
    """
    prompt, draws, count = [1, 3, 1], 5, 4
    speculator = Speculator(Engine(TARGET_SMALL), ModelDrafter(Engine(DRAFT_SMALL)), 2, False)
    params = SamplingParams(seed=0, max_tokens=count, **options)
    law = enumerated(TARGET_SMALL, prompt, count, params).view((SMALL,) * count)
    counts, speculations = torch.zeros_like(law), []
    for seed in range(draws):
        many = SamplingParams(seed=seed, max_tokens=count, n=128, **options)
        for stream in speculator.streams(prompt, many):
            counts[tuple(stream)] += 1
            speculations.append(stream.stats.speculation)
    total = speculative.Speculation.total(speculations)
    assert counts.sum() == 640 and counts[law == 0].sum() == 0
    assert 0.2 < total.acceptance_rate < 0.9
    assert {one.passes for one in speculations} == {1, 2, 3}  # both drafts accepted, one, none
    assert fits(counts, law) > ALPHA
    for summed in ([0], [0, 1], [0, 1, 3], [0, 2, 3], [1, 2, 3], [0, 1, 2]):
        assert fits(counts.sum(summed), law.sum(summed)) > ALPHA


def test_a_nucleus_is_never_left():
    """B39: top_p 0.4: what is outside never comes, whatever the draft model likes."""
    prompt, params = [1, 3, 1], SamplingParams(seed=0, top_p=0.4, max_tokens=4, n=128)
    law = enumerated(TARGET_SMALL, prompt, 4, params).view((SMALL,) * 4)
    speculator = Speculator(Engine(TARGET_SMALL), ModelDrafter(Engine(DRAFT_SMALL)), 2, False)
    assert (law == 0).sum() > 300
    assert all(law[tuple(stream)] > 0 for stream in speculator.streams(prompt, params))


def test_seeds_reproduce_and_differ():
    """B42: a drafter that draws: the same seed, the same tokens, whatever ran before."""
    target, prompts = MODELS["llama"], [[n, 5, n + 3, 1] for n in range(10)]

    def answers(seed, speculator):
        return [speculator.generate(prompt, 8, seed=seed)[0] for prompt in prompts]

    one, other = (Speculator(Engine(target), ModelDrafter(Engine(DRAFT)), 4) for _ in range(2))
    first = answers(7, one)
    assert answers(7, other) == first == answers(7, one)
    assert answers(8, one) != first


# --- a draft model -------------------------------------------------------------------------------


class Watched(ModelDrafter):
    """Notes, when it has drafted, how long the sequence and both caches are."""

    def __init__(self, engine, target) -> None:
        super().__init__(engine)
        self.target, self.seen = target, []

    def draft(self, ids, k, rows, target):
        draft = super().draft(ids, k, rows, target)
        self.seen.append((len(ids), len(draft.ids), self.target.length, self.engine.length))
        return draft


@pytest.mark.parametrize("options", [GREEDY, *SAMPLED], ids=str)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_draft_model_that_is_the_target_is_always_accepted(k, options):
    """B33: every draft of every round; each round but the last gives k + 1 tokens.

    The target has stored all but the sequence's last token, the draft model the same and all
    drafts but the last.
    """
    model = MODELS["llama"]
    engine = Engine(model)
    drafter = Watched(Engine(model), engine)
    ids, stats = speculative.generate(engine, drafter, PROMPT, k, 30, False, **options)
    counts = stats.speculation
    assert len(ids) == 30 and counts.accepted == counts.judged == counts.proposed
    sizes = [n for _, n, _, _ in drafter.seen]
    assert sizes[: 29 // (k + 1)] == [k] * (29 // (k + 1)) and sorted(sizes, reverse=True) == sizes
    for length, drafts, target_length, draft_length in drafter.seen:
        assert target_length == length - 1
        assert draft_length == target_length + drafts


def test_one_that_adapts_keeps_to_the_most_if_all_are_accepted():
    """B33: the draft costs next to nothing, so there is no reason for fewer."""
    target = random_model(shapes.llama(), dtype=torch.float64)
    whole = PROMPT + plain(target, PROMPT, 31, **GREEDY)
    _, stats = speculative.generate(Engine(target), Told(whole), PROMPT, 5, 31, **GREEDY)
    assert (stats.speculation.passes, stats.acceptance_rate) == (5, 1)


WORDS = [f"w{n}" for n in range(98)]


def padded(directory, vocab_size: int, words=WORDS, seed=0):
    """A checkpoint with more rows than its tokenizer has tokens."""
    oracle.make_checkpoint(directory, "llama", seed=seed, vocab_size=vocab_size)
    vocabulary = {word: n for n, word in enumerate(words)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    return load_hf(directory, dtype=torch.float64)


class Proposed(ModelDrafter):
    """Keeps what it drafts."""

    def begin(self):
        self.drafts = []
        return super().begin()

    def draft(self, ids, k, rows, target):
        self.drafts.append(super().draft(ids, k, rows, target))
        return self.drafts[-1]


@pytest.mark.parametrize("sizes", [(104, 100), (100, 104)], ids=str)
def test_a_vocabulary_that_is_padded_differently(sizes, tmp_path):
    """B43: 98 tokens, and 104 and 100 rows: works; no id is drafted that one of them lacks."""
    target, small = (
        padded(tmp_path / str(size), size, seed=seed) for seed, size in enumerate(sizes)
    )
    drafter = Proposed(Engine(small))
    speculator = Speculator(Engine(target), drafter, 4, adaptive_k=False)
    for options in (GREEDY, GREEDY | {"frequency_penalty": 1.5}):
        assert check_same(Engine(target), speculator, PROMPT, 20, **options)
    for seed in range(2):
        speculator.generate(PROMPT, 40, seed=seed, temperature=3.0)
        ids = torch.cat([draft.ids for draft in drafter.drafts])
        assert len(ids) > 0 and ids.max() < 100
        for draft in drafter.drafts:
            if draft.probs is not None:
                assert draft.probs.shape[1] == target.config.vocab_size
                assert (draft.probs[:, 100:] == 0).all()


def test_another_tokenizer_is_refused_on_construction(tmp_path):
    """B43: as many words, two of them the other way round."""
    swapped = [WORDS[1], WORDS[0], *WORDS[2:]]
    target = padded(tmp_path / "target", 100)
    other = ModelDrafter(Engine(padded(tmp_path / "other", 100, swapped)))
    with pytest.raises(RequestError, match=r"tokenizer is another one than the target's: .*other"):
        Speculator(Engine(target), other)
    with pytest.raises(RequestError, match="expected two models of one vocabulary"):
        speculative.generate(Engine(target), other, PROMPT)
    Speculator(Engine(target), ModelDrafter(Engine(DRAFT)))  # of random weights nothing is known


def test_a_draft_model_with_fewer_positions_stops_drafting():
    """The answer goes on without it, and is the plain one."""
    model = MODELS["gpt2"]
    drafter = Watched(Engine(DRAFT, max_seq_len=20), engine := Engine(model))
    speculator = Speculator(engine, drafter, 4, adaptive_k=False)
    check_same(Engine(model), speculator, PROMPT, None, **GREEDY)
    drafted = [length for length, drafts, _, _ in drafter.seen if drafts]
    assert drafted and max(drafted) + 3 <= 20 < CONTEXT
    assert [drafts for _, drafts, _, _ in drafter.seen][-10:] == [0] * 10
    ids, stats = speculator.generate(list(range(30)), 10, **GREEDY)
    assert ids == plain(model, list(range(30)), 10, **GREEDY) and stats.acceptance_rate is None


def test_ids_that_the_draft_model_does_not_know():
    """B43: in the prompt, and from the target in mid-answer."""
    model = MODELS["gpt2"]
    narrow = random_model(shapes.llama(vocab_size=80), seed=4, dtype=torch.float64)
    speculator = Speculator(Engine(model), ModelDrafter(Engine(narrow)), 3, adaptive_k=False)
    for prompt in ([9, 9, 9], [9, 96, 9]):
        ids = check_same(Engine(model), speculator, prompt, 40, **GREEDY)
        assert max(ids) >= 80
        _, stats = speculator.generate(prompt, 40, **GREEDY)
        assert stats.speculation.proposed > 0


def test_a_draft_model_of_nan_is_still_exact():
    """Its drafts are id 0, or the first NaN: wrong, and judged as what they are."""
    broken = random_model(shapes.llama(), dtype=torch.float64)
    broken.norm.fill_(torch.nan)
    model = MODELS["llama"]
    speculator = Speculator(Engine(model), ModelDrafter(Engine(broken)), 3, adaptive_k=False)
    check_same(Engine(model), speculator, PROMPT, 20, **GREEDY)
    ids, stats = speculator.generate(PROMPT, 20, seed=1)
    assert len(ids) == 20 and stats.speculation.proposed > 0


# --- where an answer ends ------------------------------------------------------------------------


class Passes:
    """A model that notes how many tokens go through it at once; `at_pass` is called before each."""

    def __init__(self, model, at_pass=lambda number: None) -> None:
        self._model, self.at_pass, self.sizes = model, at_pass, []

    def __call__(self, ids, view):
        self.sizes.append(len(ids))
        self.at_pass(len(self.sizes))
        return self._model(ids, view)

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize("count", [0, 1])
def test_an_answer_of_no_token_or_one_drafts_nothing(count):
    """B45: the draft model is not run, and of no tokens the target neither."""
    model, small = Passes(MODELS["llama"]), Passes(DRAFT)
    speculator = Speculator(Engine(model), ModelDrafter(Engine(small)), 5)
    ids, stats = speculator.generate(PROMPT, count, **GREEDY)
    assert ids == plain(MODELS["llama"], PROMPT, count, **GREEDY)
    assert small.sizes == [] and model.sizes == [len(PROMPT)] * count
    assert stats.speculation.as_dict() | {"draft_share": None} == dict.fromkeys(
        ("acceptance_rate", "tokens_per_pass", "draft_share")
    ) | dict.fromkeys(("passes", "tokens", "proposed", "judged", "accepted"), 0)
    assert "no drafts" in stats.summary()


@pytest.mark.parametrize("drafter", ["always right", "right by turns", "ngram", "model", "garbage"])
def test_exactly_as_many_tokens_as_were_asked_for(drafter):
    """B36, B37, B48: max_tokens 1 to 13, drafts of 4; as many in the answer as in the stats."""
    model = MODELS["llama"]
    prompt = [4, 8, 15, 4, 8, 15, 4, 8]
    whole = prompt + plain(model, prompt, 20, **GREEDY)
    engine = Engine(Passes(model))
    speculator = Speculator(engine, DRAFTERS[drafter](whole), 4, adaptive_k=False)
    for count in range(1, 14):
        stream = speculator.stream(prompt, count, ignore_eos=True, **GREEDY)
        pieces = [(token, stream.stats.new_tokens) for token in stream]
        assert pieces == [(token, n + 1) for n, token in enumerate(whole[len(prompt) :][:count])]
        assert stream.stats.finish_reason == "length"
        check_counts(stream.stats, 4)


def test_no_more_rows_than_tokens_to_come():
    """B37: n-grams of 3 drafts, 2 tokens: the second needs no draft, and has none."""
    model = Passes(MODELS["llama"])
    prompt = [4, 8, 15, 4, 8, 15, 4, 8]
    speculator = Speculator(Engine(model), NgramDrafter(), 3)
    assert speculator.generate(prompt, 2, **GREEDY)[0] == plain(model, prompt, 2, **GREEDY)
    assert model.sizes[:2] == [8, 1]


@pytest.mark.parametrize("by", ["eos", "stop id"])
@pytest.mark.parametrize("k", [2, 5])
def test_an_end_inside_an_accepted_run(by, k):
    """B38, B48: it is the last id; the rest of the run is neither given nor counted."""
    known = greedy_text(MODELS["llama"], 20)[len(PROMPT) :]
    for at in (1, 2, 3, 5, 8, 13):
        end = known[at]
        if end in known[:at]:
            continue
        eos = end if by == "eos" else None
        model = random_model(shapes.llama(eos_token_id=eos), dtype=torch.float64)
        options = GREEDY | ({} if by == "eos" else {"stop_token_ids": [end]})
        speculator = Speculator(Engine(model), Told(PROMPT + known), k, adaptive_k=False)
        ids = check_same(Engine(model), speculator, PROMPT, 20, **options | {"logprobs": 1})
        assert ids == known[: at + 1]
        stream = speculator.stream(PROMPT, 20, **options)
        list(stream)
        assert stream.stats.finish_reason == "stop"
        assert stream.stats.stop_reason == (None if by == "eos" else end)
        assert stream.stats.speculation.tokens == at
        longer = options | {"min_tokens": at + 2}
        assert len(check_same(Engine(model), speculator, PROMPT, 20, **longer)) > at + 1


def test_the_end_as_the_first_token():
    """B32: nothing is drafted."""
    first = plain(MODELS["llama"], PROMPT, 1, **GREEDY)
    model = random_model(shapes.llama(eos_token_id=first[0]), dtype=torch.float64)
    ids, stats = speculative.generate(Engine(model), NgramDrafter(), PROMPT, **GREEDY)
    assert (ids, stats.finish_reason, stats.speculation.passes) == (first, "stop", 0)


@pytest.mark.parametrize("drafter", ["told", "ngram", "model"])
def test_a_stop_string_inside_an_accepted_run(drafter):
    """B38, B48: text, ids, logprobs and counts are those of the plain stream, and end together.

    Cuts of three characters of the text are stops; ids and logprobs end with the token that
    completes it, and nothing of the rest of its run is left anywhere.
    """
    model, tokenizer = load_hf("tiny", dtype=torch.float64), Tokenizer("tiny")
    engine, prompt = Engine(model), "def add(a, b):\n    return a + b\n\n" * 3
    ids = tokenizer.encode(prompt)
    answer = plain(model, ids, 24, **GREEDY, ignore_eos=True)
    text = tokenizer.decode(answer)
    made = {
        "told": lambda: Told(ids + answer),
        "ngram": NgramDrafter,
        "model": lambda: ModelDrafter(Engine(load_hf("tiny-draft", dtype=torch.float64))),
    }
    mine = Engine(model)
    speculator, cut_runs = Speculator(mine, made[drafter](), 5, adaptive_k=False), 0
    for at in range(4, len(text) - 3, 3):
        params = SamplingParams(
            max_tokens=24, ignore_eos=True, logprobs=1, stop=[text[at : at + 3]], **GREEDY
        )
        right, got = (stream_text(one, tokenizer, ids, params) for one in (engine, speculator))
        assert list(got) == list(right)  # piece by piece
        assert (got.text, got.token_ids) == (right.text, right.token_ids)
        assert (got.finish_reason, got.stop_reason) == ("stop", text[at : at + 3])
        check_same_logprobs(got.logprobs, right.logprobs)
        assert len(got.logprobs) == got.stats.new_tokens == len(got.token_ids)
        check_counts(got.stats, 5)
        assert mine.length == engine.length == len(ids) + len(got.token_ids) - 1
        counts = got.stats.speculation
        cut_runs += counts.accepted + counts.passes > counts.tokens  # it ends with a draft
        if cut_runs == 2:
            return
    raise AssertionError("no stop was completed in mid-run")


@pytest.mark.parametrize("drafter", ["always right", "garbage", "ngram", "model"])
@pytest.mark.parametrize("length", [CONTEXT - 10, CONTEXT - 2, CONTEXT - 1, CONTEXT])
def test_the_end_of_the_context(drafter, length):
    """B49: 7 drafts a round up to the last position, and no error."""
    model = MODELS["gpt2"]
    prompt = [(3 * n) % 5 for n in range(length)]
    whole = prompt + plain(model, prompt, None, **GREEDY)
    for adaptive in (True, False):
        speculator = Speculator(Engine(model), DRAFTERS[drafter](whole), 7, adaptive)
        ids = check_same(Engine(model), speculator, prompt, None, **GREEDY)
        assert len(ids) == CONTEXT - length


# --- broken off ----------------------------------------------------------------------------------


def test_a_stream_that_is_closed_leaves_the_engine_usable():
    """After each of its tokens, so in the middle of runs; the engine has what was given."""
    model = MODELS["llama"]
    whole = greedy_text(model, 20)
    engine = Engine(model)
    speculator = Speculator(engine, Told(whole), 5, adaptive_k=False)
    for count in range(1, 12):
        stream = speculator.stream(PROMPT, 20, **GREEDY)
        assert [next(stream) for _ in range(count)] == whole[len(PROMPT) :][:count]
        stream.close()
        assert (stream.stats.finish_reason, stream.stats.new_tokens) == ("abort", count)
        assert next(stream, None) is None
        assert engine.length == len(PROMPT) + count - 1 == engine.seq_lens[0]
        logits = engine.extend([whole[engine.length]])
        right = forward(model, whole[: engine.length])[-1]
        assert torch.allclose(logits[0], right, rtol=0, atol=1e-9)
    check_same(Engine(model), speculator, PROMPT, 20, **GREEDY)


class Halting:
    """Raises a KeyboardInterrupt at one of its calls, and never again."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, *_) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["target", "draft", "propose", "judging", "counting"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_interrupt_leaves_the_engine_usable(where, at, monkeypatch):
    """Wherever it comes: host and device agree, and the next answer is right."""
    model, halt = MODELS["llama"], Halting(at)
    whole = greedy_text(model, 20)
    target, small = Passes(model), Passes(DRAFT)
    drafter = ModelDrafter(Engine(small)) if where == "draft" else Told(whole)
    if where == "target":
        target.at_pass = halt
    elif where == "draft":
        small.at_pass = halt
    elif where == "propose":
        drafter.spoil = lambda right, k, turn: (halt(), right)[1]
    else:
        name = {"judging": "verified", "counting": "accepted"}[where]
        original = getattr(speculative, name)
        monkeypatch.setattr(speculative, name, lambda *args: (halt(), original(*args))[1])
    engine = Engine(target)
    speculator = Speculator(engine, drafter, 3, adaptive_k=False)
    stream, got = speculator.stream(PROMPT, 20, **GREEDY), []
    with pytest.raises(KeyboardInterrupt):
        got.extend(iter(lambda: next(stream), None))
    assert got == whole[len(PROMPT) :][: len(got)]
    assert stream.stats.finish_reason == "abort" and stream.stats.new_tokens == len(got)
    assert engine.length == int(engine.seq_lens[0])
    assert halt.calls == at
    if engine.length:
        assert engine.length in (len(PROMPT) + len(got) - 1, len(PROMPT) + len(got))
        logits = engine.extend([11])
        right = forward(model, [*whole[: engine.length - 1], 11])[-1]
        assert torch.allclose(logits[0], right, rtol=0, atol=1e-9)
    check_same(Engine(model), speculator, PROMPT, 20, **GREEDY)


def test_one_stream_at_a_time():
    """Of the speculator and its engine: the one that was there first says so, and once."""
    model = MODELS["llama"]
    engine = Engine(model)
    speculator = Speculator(engine, NgramDrafter(), 3)
    for other in (speculator.stream, engine.stream):
        one, two = speculator.stream(PROMPT, 9, **GREEDY), other([1, 2, 3], 9, **GREEDY)
        next(one)
        right = plain(model, [1, 2, 3], 9, **GREEDY)
        head = [next(two)]
        with pytest.raises(RequestError, match="one stream at a time"):
            next(one)
        assert one.stats.finish_reason == "error"
        assert head + list(two) == right
    one = engine.stream(PROMPT, 9, **GREEDY)
    next(one)
    assert list(speculator.stream([1, 2, 3], 9, **GREEDY)) == right
    with pytest.raises(RequestError, match="one stream at a time"):
        next(one)


def test_a_stream_that_is_closed_late_takes_nothing_from_the_next():
    model = MODELS["llama"]
    whole = greedy_text(model, 20)
    speculator = Speculator(Engine(model), Told(whole), 5, adaptive_k=False)
    one, two = speculator.stream([1, 2, 3], 20, **GREEDY), speculator.stream(PROMPT, 20, **GREEDY)
    next(one)
    head = [next(two) for _ in range(4)]
    one.close()
    assert PROMPT + head + list(two) == whole


def test_several_answers_to_one_prompt():
    """Each is the engine's own, and the prompt runs once."""
    model = Passes(MODELS["llama"])
    params = SamplingParams(n=4, seed=3, max_tokens=12, temperature=1.2)
    right = [list(stream) for stream in Engine(MODELS["llama"]).streams(PROMPT, params)]
    whole = PROMPT + right[2]
    speculator = Speculator(Engine(model), Told(whole, ADVERSARIES["right by turns"]), 4, False)
    got = [list(stream) for stream in speculator.streams(PROMPT, params)]
    assert got == right and len({tuple(one) for one in got}) == 4
    assert model.sizes.count(len(PROMPT)) == 1 and max(model.sizes[1:]) <= 5
    with pytest.raises(RequestError, match="n=4: a stream is one answer"):
        speculator.stream_with(PROMPT, params)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_logits_that_are_none_end_the_answer_where_they_are(bad):
    """What came before them is given; the message names the position."""
    table = torch.nn.functional.one_hot(torch.arange(32) % 10, 10).float() * 5
    table[6] = bad
    for drafter in (NgramDrafter(), Told([n % 10 for n in range(40)])):
        engine = Engine(MockModel(table))
        stream = Speculator(engine, drafter, 4, adaptive_k=False).stream([2, 1], 20, **GREEDY)
        got = []
        with pytest.raises(NumericsError, match="logits for position 7 are no distribution"):
            got.extend(iter(lambda stream=stream: next(stream), None))
        assert got == [1, 2, 3, 4, 5] and stream.stats.finish_reason == "error"
        assert engine.length == 6


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": -1}, "k=-1: expected a whole number of 0 to 32"),
        ({"k": 33}, "k=33"),
        ({"k": 2.0}, "k=2.0"),
        ({"k": True}, "k=True"),
        ({"adaptive_k": 1}, "adaptive_k=1: expected True or False"),
        ({"drafter": None}, "drafter=None: expected a Drafter"),
        ({"drafter": "ngram"}, "drafter='ngram': expected a Drafter"),
        ({"drafter": NgramDrafter}, "drafter=.*: expected a Drafter"),
        ({"engine": DRAFT}, "engine=.*: expected an Engine"),
    ],
)
def test_what_cannot_be_is_refused_on_construction(change, words):
    given_ = {"engine": Engine(DRAFT), "drafter": NgramDrafter()} | change
    with pytest.raises(RequestError, match=words):
        Speculator(**given_)


def test_the_engine_itself_is_no_drafter():
    engine = Engine(DRAFT)
    with pytest.raises(RequestError, match="the drafter has the engine itself; expected one of"):
        Speculator(engine, ModelDrafter(engine))
    Speculator(engine, ModelDrafter(Engine(DRAFT)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_j": 1}, "top_j: no such option"),
        ({"stop": "x"}, "stop: token ids have no text"),
        ({"n": 2}, "n=2: a stream is one answer"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop_token_ids": [V]}, f"stop_token_ids: token id {V}"),
    ],
)
def test_options_are_refused_as_without_drafts(options, words):
    """B45: nothing is ignored; and nothing has run."""
    model = Passes(MODELS["llama"])
    speculator = Speculator(Engine(model), NgramDrafter())
    for call in (speculator.generate, Engine(model).generate):
        with pytest.raises(RequestError, match=words):
            call(PROMPT, **options)
    assert model.sizes == []


def test_a_bad_guess_ends_the_stream_and_not_the_engine():
    model = MODELS["llama"]
    whole = greedy_text(model, 20)
    drafter = Told(whole, lambda right, k, turn: [V] if turn == 2 else right)
    speculator = Speculator(Engine(model), drafter, 3, adaptive_k=False)
    stream = speculator.stream(PROMPT, 20, **GREEDY)
    with pytest.raises(RequestError, match=rf"Told: proposed token id {V} at position 0"):
        list(stream)
    assert stream.stats.finish_reason == "error" and stream.stats.new_tokens == 5
    check_same(Engine(model), speculator, PROMPT, 20, **GREEDY)


def test_a_round_has_no_more_rows_than_tokens_to_come():
    """B37: of a drafter that is always right, and would go on: what is not wanted is not asked."""
    known = greedy_text(MODELS["llama"], 20)
    for most in range(2, 8):
        model, to_come, rows = Passes(MODELS["llama"]), most - 1, []
        Speculator(Engine(model), Told(known), 5, adaptive_k=False).generate(PROMPT, most, **GREEDY)
        for size in model.sizes[1:]:
            rows.append((size, to_come))
            to_come -= size
        assert to_come == 0 and all(size <= wanted for size, wanted in rows), rows
        assert most == 2 or rows[0][0] > 1


def test_nan_behind_a_mask_is_no_distribution_for_drawn_drafts_either():
    """As in `sample`: min_tokens masks the end of an answer, and what is broken there too."""
    params = SamplingParams(seed=0, max_tokens=9, min_tokens=3)
    rows = SamplingRows.of([params], prefixes=[Prefix([1])], eos_ids=(0,), vocab_size=4)
    draft = Draft(torch.tensor([2]), torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    for first, sound in ((0.5, True), (torch.nan, False), (torch.inf, False)):
        logits = torch.tensor([[first, 0.1, 0.2, 0.3]])
        token = verified(logits, rows, torch.tensor([1]), draft)
        assert (token >= 0).item() == sound == (sample(logits, rows, torch.tensor([1])) >= 0).item()
