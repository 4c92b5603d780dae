"""batch_invariant=True: the bits of a request are its own, whatever runs beside it; in float32."""

import random
from dataclasses import replace

import pytest
import shapes
import torch
from asked import requests_by_lot

from spindle import LLM, Engine, SamplingParams
from spindle.decode import graphs
from spindle.decode.drafters import ModelDrafter, NgramDrafter
from spindle.errors import RequestError
from spindle.kernels import native, native_sampling
from spindle.model.weights import random_model
from spindle.serve.passes import has_own_bits

CONFIGS = {
    "llama": shapes.llama(eos_token_id=7, max_position_embeddings=128),
    "gpt2": shapes.gpt2(eos_token_id=7, n_positions=128),
    "gelu by torch": shapes.gpt2(n_positions=128, activation_function="gelu"),
}
FORMS = ["llama: native", "gpt2: native", "llama: int8", "llama: plain torch"]
V = shapes.LLAMA["vocab_size"]
CROWDED = [
    dict(max_seqs=4, max_batch_tokens=9, num_blocks=18, block_size=4),
    dict(max_seqs=6, max_batch_tokens=64, num_blocks=10, block_size=8, preemption="swap"),
    dict(max_seqs=3, max_batch_tokens=23, num_blocks=26, block_size=3, prefix_cache=False),
]

DRAFTS = dict(speculate=NgramDrafter(1, 1), k=2, max_batch_tokens=24, adaptive_k=False)


@pytest.fixture
def plain_torch(monkeypatch):
    """No native code, as where there is no compiler."""
    monkeypatch.setenv("SPINDLE_NO_EXT", "1")
    for module in (native, native_sampling):
        monkeypatch.setattr(module, "available", lambda: False)


@pytest.fixture(params=FORMS)
def model(request):
    """In float32, made of products of this kind; "plain torch" last, as it is patched in."""
    name, _, form = request.param.partition(": ")
    if form == "plain torch":
        request.getfixturevalue("plain_torch")
    elif not native.available():
        pytest.skip(native.why_not())
    return model_of(name, quantize="int8" if form == "int8" else None)


def model_of(name, **options):
    return random_model(CONFIGS[name], dtype=torch.float32, **options)


def by_lot(seed, count=9):
    """Requests that say their log-probabilities, some prompts longer than a few tokens."""
    asked = requests_by_lot(random.Random(seed), count, V, 30)
    return [(at % 3, prompt, replace(params, logprobs=2)) for at, prompt, params in asked]


def answers(model, requests, **options):
    """Of each request, by its place, what every answer is: ids, and the bits of their logprobs."""
    llm = LLM(model, max_model_len=66, trace=9999, **options)
    names, done, step, waiting = {}, {}, 0, sorted(enumerate(requests), key=lambda r: r[1][0])
    while waiting or llm.has_unfinished:
        while waiting and waiting[0][1][0] <= step:
            place, (_, prompt, params) = waiting.pop(0)
            names[llm.add(prompt, params)] = place
        done |= {o.request_id: o for o in llm.step() if o.finished}
        llm.scheduler.check()
        step += 1
    llm.preemptions = sum(output.metrics.preemptions for output in done.values())
    got = {
        names[name]: [(one.token_ids, bits(one.logprobs)) for one in output.outputs]
        for name, output in done.items()
    }
    return [got[place] for place in range(len(requests))], llm


def bits(records):
    return [[(x.token_id, x.logprob) for x in (one.sampled, *one.top)] for one in records]


def alone(model, requests, crowd, **options):
    """A pool for each; the block size is a setting, and may be part of what a sum is made of."""
    options |= dict(num_blocks=99, block_size=crowd["block_size"])
    return [answers(model, [(0, *request[1:])], **options)[0][0] for request in requests]


def test_the_bits_of_a_request_are_its_own(model):
    """B29: chunks, prefix hits, both ways to preempt, n answers; and n-grams beside none at all."""
    happened = set()
    for seed, crowd in enumerate(CROWDED):
        requests = by_lot(seed)
        mine = alone(model, requests, crowd, batch_invariant=True)
        for more in (
            {},
            dict(speculate=NgramDrafter(1, 1), k=2, max_batch_tokens=24, adaptive_k=False),
        ):
            got, llm = answers(model, requests, batch_invariant=True, **(crowd | more))
            assert got == mine
            chunks = [chunk for plan in llm.trace for chunk in plan.chunks]
            happened |= {"long"} if any(chunk.count > 16 for chunk in chunks) else set()
            happened |= {"cut"} if any(not chunk.samples for chunk in chunks) else set()
            happened |= {"beside"} if any(len(plan.chunks) > 2 for plan in llm.trace) else set()
            happened |= {"swap"} if any(plan.swap_in for plan in llm.trace) else set()
            happened |= {"drafts"} if any(chunk.drafts for chunk in chunks) else set()
            happened |= {"preempted"} if llm.preemptions else set()
    assert happened == {"long", "cut", "beside", "swap", "drafts", "preempted"}


def test_a_draft_model_drafts_the_same_for_a_request_whatever_is_beside_it(model):
    near = random_model(model.config, dtype=torch.float32, gain=1.7)
    requests = by_lot(7)
    options = dict(batch_invariant=True, k=3, adaptive_k=False)
    options |= dict(speculate=ModelDrafter(Engine(near)))
    crowd = dict(max_seqs=4, max_batch_tokens=21, num_blocks=30, block_size=4)
    mine = alone(model, requests, crowd, **options)
    got, llm = answers(model, requests, **crowd, **options)
    assert got == mine
    assert llm.stats["proposed"] > llm.stats["accepted"] > 0


def test_what_drafts_are_drawn_from_are_the_same_bits_however_a_prompt_is_cut(model):
    """They decide which draft is drawn and whether it is accepted: so ids hang on them."""
    near = random_model(model.config, dtype=torch.float32, gain=1.7)
    prompt = [random.Random(3).randrange(V) for _ in range(40)]
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    seen = []
    for most in (64, 9):
        options = dict(speculate=ModelDrafter(Engine(near)), k=2, adaptive_k=False, max_seqs=1)
        options |= dict(batch_invariant=True, max_batch_tokens=most, max_model_len=66)
        llm = LLM(model, num_blocks=20, **options)
        seen.append(noted := [])

        def draft(chunks, run=llm._drafting.draft, noted=noted):
            drawn = run(chunks)
            noted += [its.probs for its in drawn.values()]
            return drawn

        llm._drafting.draft = draft
        llm.generate([prompt], params)
    assert len(seen[0]) > 2
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_without_it_the_last_bits_depend_on_the_company(model):
    """And no more than they: what is summed in another order is off by some roundings."""
    off = []
    for seed, crowd in enumerate(CROWDED):
        requests = by_lot(seed)
        pairs = zip(
            alone(model, requests, crowd), answers(model, requests, **crowd)[0], strict=True
        )
        for mine, its in pairs:
            for (ids, records), (others, other_records) in zip(mine, its, strict=True):
                if ids == others:
                    both = zip(records, other_records, strict=True)
                    off += [abs(a[0][1] - b[0][1]) for a, b in both]
    assert 0 < max(off) < 1e-3


def test_a_token_has_a_pass_of_its_own_where_the_order_of_sums_is_not_known():
    model = model_of("gelu by torch")
    assert not has_own_bits(model)
    seen, run = [], type(model).__call__
    spy = type("Spy", (type(model),), {"__call__": lambda *a: seen.append(len(a[1])) or run(*a)})
    model.__class__ = spy
    answers(model, by_lot(1), batch_invariant=True, **CROWDED[1])
    assert set(seen) == {1}


def test_what_it_is_given_is_checked():
    model = random_model(CONFIGS["llama"], dtype=torch.float64)
    with pytest.raises(RequestError, match="batch_invariant='yes': expected True or False"):
        LLM(model, batch_invariant="yes")
    with pytest.raises(RequestError, match=r"graphs=True: expected graphs=None: with batch_inv"):
        LLM(model, batch_invariant=True, graphs=True)
    llm = LLM(model, batch_invariant=True, graphs=graphs.recording)
    assert llm.generate([[1]], SamplingParams(max_tokens=3))[0].finished
    assert llm.stats["replayed"] == 0


def test_two_orders_of_a_sum_are_no_further_apart_than_their_roundings():
    """Higham 2002, section 4.2: each is within n u of the sum of the products' sizes."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 512, generator=generator) for n in (8, 300))
    together, alone = x @ w.T, torch.cat([row @ w.T for row in x.split(1)])
    sizes = x.double().abs() @ w.double().abs().T
    gap = (together.double() - alone.double()).abs()
    assert (gap <= 2 * 512 * 2.0**-24 * sizes).all()
