"""Traffic: the loads, the open loop on a clock turned by hand, the three policies, the command."""

import heapq
import json
import random
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle import cli
from spindle.bench import load as loads
from spindle.bench import peers, traffic
from spindle.bench import replay as paged_replay
from spindle.bench.load import (
    POLICIES,
    Record,
    Request,
    Run,
    Step,
    drain,
    engine,
    long_tailed,
    poisson,
    scheduler_of,
    serve,
    uniform,
)
from spindle.config import ModelConfig
from spindle.decode.engine import Engine
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool
from spindle.model.weights import load_hf, random_model
from spindle.serve.llm import LLM
from spindle.serve.runner import Output, Runner
from spindle.serve.scheduler import Plan, Scheduler

MODEL = random_model(shapes.gpt2(), dtype=torch.float64)


@dataclass
class Clock:
    """A clock that stands until somebody turns it; who sleeps turns it too."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class StandIn(Runner):
    """A runner without a model: a step takes `cost(plan)` seconds, and every token is 7.

    `spoiled`: the step, counted from 0, in which no distribution comes.
    """

    def __init__(self, llm: LLM, clock: Clock, cost: Any, spoiled: int | None = None) -> None:
        super().__init__(llm.model, llm._kv)
        self.clock, self.cost, self.spoiled, self.done = clock, cost, spoiled, 0

    def run(self, plan: Plan) -> list[Output]:
        self.clock.now += self.cost(plan)
        token = -1 if self.done == self.spoiled else 7
        self.done += 1
        return [Output([token], [None]) if c.samples else Output([], []) for c in plan.chunks]


def stand_in(clock: Clock, cost: Any, policy: str = "continuous", **options: Any) -> LLM:
    spoiled = options.pop("spoiled", None)
    options = {"max_seqs": 4, "num_blocks": 64, "prefix_cache": False} | options
    llm = engine(policy, MODEL, clock=clock, **options)
    llm._runner = StandIn(llm, clock, cost, spoiled)
    return llm


def a_second(plan: Plan) -> float:
    return 1.0


def requests(*sizes: tuple[int, int, float]) -> list[Request]:
    """Each a prompt's length, an output's, an arrival."""
    return [Request(n, (1,) * prompt, new, at) for n, (prompt, new, at) in enumerate(sizes)]


def run_of(load: list[Request], cost: Any = a_second, **options: Any) -> Run:
    clock = Clock()
    return serve(stand_in(clock, cost, **options), load, clock, clock.sleep)


# --- loads ---------------------------------------------------------------------------------------


def test_the_long_tail_is_what_it_says() -> None:
    many = [request for seed in range(200) for request in long_tailed(20, seed)]
    outputs, prompts = [one.output for one in many], [len(one.prompt) for one in many]
    assert sum(n <= loads.OUTPUT_MEDIAN for n in outputs) == pytest.approx(2000, abs=150)
    longer = 1 / (1 + (192 / 16) ** (1 / 1.2))
    assert 1 / longer == pytest.approx(9, abs=0.1)
    assert sum(n == loads.MAX_NEW for n in outputs) == pytest.approx(4000 * longer, abs=60)
    assert statistics.median(prompts) == loads.PROMPT_MEDIAN
    assert (min(prompts), max(prompts)) == loads.PROMPT_RANGE


def test_a_seed_gives_the_same_load_whatever_the_vocabulary() -> None:
    small, large = long_tailed(24, 3, 10), long_tailed(24, 3, 50_000)
    assert small == long_tailed(24, 3, 10) != long_tailed(24, 4, 10)
    assert [(len(a.prompt), a.output) for a in small] == [(len(a.prompt), a.output) for a in large]
    assert {i for one in small for i in one.prompt} == set(range(10))
    assert [one.name for one in small] == list(range(24))


def test_uniform_lengths_differ_in_ids_only() -> None:
    load = uniform(8, vocab_size=97)
    assert {(len(one.prompt), one.output, one.arrival_s) for one in load} == {(16, 16, 0.0)}
    assert len({one.prompt for one in load}) == 8


def test_poisson_arrivals_keep_the_order_and_the_rate() -> None:
    load = uniform(4000, vocab_size=97, prompt=1)
    arriving = poisson(load, 5.0, seed=1)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(arriving)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) == pytest.approx(4000 * 0.3679, abs=120)
    assert [replace(one, arrival_s=0.0) for one in arriving] == load
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="rate="):
            poisson(load, rate)


@pytest.mark.parametrize("bad", [((), 1, 0.0), ((1,), 0, 0.0), ((1,), 1, -1.0)])
def test_a_request_that_cannot_be_is_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="request 0: "):
        Request(0, *bad)


# --- the open loop -------------------------------------------------------------------------------


def test_b91_tokens_that_come_together_share_their_gap() -> None:
    """B91: 1, 3, 1 tokens at 1.0, 1.3, 1.4: TTFT 1.0 and 4 gaps of 0.1 on average."""
    events = [(1.0, 1), (1.3, 3), (1.4, 1)]
    record = Record(Request(0, (1,), 5), 0.0, events=events, token_ids=[7] * 5)
    assert record.stats.ttft_ms == 1000
    assert record.stats.itl_ms == pytest.approx([100.0] * 4)
    figures = Run([record], [Step(1, 0, 1, 0.0, 1.4)], 1).summary()
    assert figures["ttft_p99_ms"] == 1000
    assert figures["itl_p99_ms"] == pytest.approx(100)


class Drafting:
    """As much of an LLM as `serve` asks for; its steps give 1, 3 and 1 tokens of one request."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.trace, self.came = clock, deque[Plan](maxlen=1), list[int]()
        self.scheduler = SimpleNamespace(max_seqs=1)
        self.left: list[tuple[float, int]] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    def add(self, prompt: list[int], params: Any) -> str:
        self.left = [(101.0, 1), (101.3, 3), (101.4, 1)]
        return "only"

    def step(self) -> list[Any]:
        self.clock.now, new = self.left.pop(0)
        self.came += [7] * new
        answer = SimpleNamespace(token_ids=self.came.copy(), finish_reason=None)
        times = SimpleNamespace(scheduled=100.0, last_token=self.clock.now, finished=None)
        return [SimpleNamespace(request_id="only", metrics=times, outputs=[answer])]


def test_b91_an_engine_that_gives_several_tokens_a_step() -> None:
    """B91: the same through the open loop: what came in each step is counted."""
    clock = Clock()
    llm: Any = Drafting(clock)
    (record,) = serve(llm, requests((1, 5, 0.0)), clock, clock.sleep).records
    assert [count for _, count in record.events] == [1, 3, 1]
    assert record.stats.ttft_ms == pytest.approx(1000)
    assert record.stats.itl_ms == pytest.approx([100.0] * 4)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES))
def test_b93_times_are_in_order(seed: int, policy: str) -> None:
    """B93: arrival <= scheduled <= first <= last <= finished. B92: no peak below the average."""
    draw = random.Random(seed)
    load = requests(
        *((draw.randint(1, 20), draw.randint(1, 20), draw.random() * 20) for _ in range(9))
    )
    run = run_of(load, lambda plan: draw.random(), policy=policy, num_blocks=16)
    assert [record.request for record in run.records] == load
    for record in run.records:
        times = [record.arrival_s, record.scheduled_s, record.first_s, record.last_s]
        times.append(record.finished_s)
        assert all(a <= b for a, b in pairwise(times))
        assert record.arrival_s == pytest.approx(record.request.arrival_s)
        assert record.token_ids == [7] * record.request.output
        if record.request.output == 1:
            assert record.first_s == record.last_s and record.stats.itl_ms == []
    tokens, width = run.bins()
    figures = run.summary()
    assert sum(tokens) == run.useful_tokens == sum(one.output for one in load)
    assert width * len(tokens) == pytest.approx(run.seconds) and width <= 1
    assert figures["peak_tok_s"] >= figures["useful_tok_s"] * (1 - 1e-12)


def test_b94_queue_prefill_and_decode_are_told_apart() -> None:
    """B94: the one seat is taken for 1 s more; then the prompt takes 2 s, 5 tokens 1 s each."""
    load = requests((1, 2, 0.0), (30, 6, 1.0))
    run = run_of(load, lambda plan: 2.0 if plan.chunks[0].count > 1 else 1.0, max_seqs=1)
    assert run.records[1].phases_ms == (1000, 2000, 5000)
    assert sum((1000, 2000, 5000)) == (run.records[1].finished_s - 1.0) * 1e3
    assert Record(load[0], 0.0).phases_ms is None


def test_b96_who_got_no_token_has_no_latency() -> None:
    """B96: it is counted apart, and of nobody there is no percentile."""
    run = run_of(requests((1, 3, 0.0)), spoiled=0)
    figures = run.summary()
    assert (figures["requests"], figures["without_tokens"]) == (1, 1)
    assert run.records[0].finish_reason == "error"
    for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"):
        assert figures[key] is None
    one_of_two = run_of(requests((1, 3, 0.0), (1, 3, 1.5)), spoiled=0).summary()
    assert one_of_two["without_tokens"] == 1
    assert one_of_two["ttft_p50_ms"] == one_of_two["ttft_p99_ms"] == 1000


def test_b98_a_stall_counts_for_all_who_were_due_in_it() -> None:
    """B98: one a second, 0.1 s each; the engine stalls from 2 to 7: 3, 4, 5, 6 wait for it."""
    clock = Clock()

    def cost(plan: Plan) -> float:
        return 5.0 if clock.now - 100.0 == 2.0 else 0.1

    load = requests(*((1, 1, float(at)) for at in range(10)))
    run = serve(stand_in(clock, cost), load, clock, clock.sleep)
    waited = [record.stats.ttft_ms for record in run.records]
    for at, least in ((3, 4100), (4, 3100), (5, 2100), (6, 1100)):
        assert waited[at] == pytest.approx(least)
    assert [waited[at] for at in (0, 1, 8, 9)] == pytest.approx([100] * 4)
    assert waited[2] == 5000 and waited[7] == pytest.approx(200), "four seats were taken"
    assert all(seconds > 0 for seconds in clock.slept), "it sleeps while nothing is due"


def test_b99_what_came_is_counted_not_what_was_planned() -> None:
    """B99: 10 tokens are asked for, 3 come; prompts have rates of their own."""
    run = run_of(requests((5, 10, 0.0)), spoiled=3)
    figures = run.summary()
    assert (figures["useful_tokens"], figures["prompt_tokens"], figures["seconds"]) == (3, 5, 4.0)
    assert figures["useful_tok_s"] == 3 / 4
    assert figures["prompt_tok_s"] == 5 / 4
    assert figures["total_tok_s"] == 8 / 4


def test_the_mistake_of_building_a_group_when_its_turn_comes() -> None:
    """Two figures of one and the same engine: who is due at 0 and waits for two groups, waited.

    Built just before it is run, the third group's clock starts when the two before it have ended.
    """
    load = requests(*((1, 10, 0.0) for _ in range(12)))
    right = run_of(load, policy="static").summary()
    assert (right["ttft_p50_ms"], right["ttft_p99_ms"]) == (11_000, 21_000)
    clock = Clock()
    llm, wrong = stand_in(clock, a_second, "static"), list[float | None]()
    for group in (load[:4], load[4:8], load[8:]):
        run = serve(llm, group, clock, clock.sleep)
        wrong += [record.stats.ttft_ms for record in run.records]
    assert wrong == [1000] * 12, "the same steps, and nobody seems to have waited"
    assert clock.now - 100 == right["seconds"] == 30


def test_serve_wants_an_engine_that_is_idle_and_keeps_its_plans() -> None:
    clock = Clock()
    busy = stand_in(clock, a_second)
    busy.add([1])
    for llm in (busy, stand_in(clock, a_second, trace=0)):
        with pytest.raises(RequestError, match="trace=1 or more, and nothing unfinished"):
            serve(llm, [], clock, clock.sleep)


# --- policies ------------------------------------------------------------------------------------


def test_three_policies_by_hand() -> None:
    """Two seats, outputs of 1, 4, 2, 2: which rows are computed, and which seats are idle."""
    load = requests((3, 1, 0.0), (1, 4, 0.0), (1, 2, 0.0), (1, 2, 0.0))
    runs = {name: run_of(load, policy=name, max_seqs=2) for name in POLICIES}
    rows = {name: [(s.rows, s.filler, s.busy) for s in run.steps] for name, run in runs.items()}
    two = [(2, 0, 2)] * 2
    assert rows == {
        "static": [(4, 0, 2), *[(2, 1, 1)] * 3, *two],
        "dropping": [(4, 0, 2), *[(1, 0, 1)] * 3, *two],
        "continuous": [(4, 0, 2), *two, (2, 0, 2), (1, 0, 1)],
    }
    idle = {
        name: (run.summary()["idle_slots"], run.summary()["empty_slots"])
        for name, run in runs.items()
    }
    assert idle == {"static": (3, 0), "dropping": (3, 3), "continuous": (1, 1)}
    first = {name: [record.first_s for record in run.records] for name, run in runs.items()}
    assert first == {"static": [1, 1, 5, 5], "dropping": [1, 1, 5, 5], "continuous": [1, 1, 2, 4]}


def test_every_policy_serves_the_same_tokens() -> None:
    """With a real model, in float64: the work is the same, whatever is computed beside it."""
    load = [replace(one, output=min(one.output, 30)) for one in long_tailed(10, 2, 97)]
    load = [replace(one, prompt=one.prompt[:20]) for one in load]
    options = {"max_seqs": 4, "num_blocks": 64, "prefix_cache": False}
    runs = [serve(engine(name, MODEL, **options), load) for name in POLICIES]
    ids = [[record.token_ids for record in run.records] for run in runs]
    assert ids[0] == ids[1] == ids[2]
    assert [len(one) for one in ids[0]] == [one.output for one in load]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(RequestError, match="policy='swift': expected static, dropping, continuous"):
        engine("swift", MODEL)


# --- the scheduler without a model ---------------------------------------------------------------


def test_the_scheduler_gives_the_paged_replays_steps_and_peak() -> None:
    """64 requests at once in 512 blocks of 16: 192 steps, and 3,152 slots held at most."""
    trace = paged_replay.long_tailed(64)
    load = [Request(one.name, (1,) * one.prompt, one.output) for one in trace]
    pool = BlockPool(512, 16, prefix_cache=False)
    options = {"max_seqs": 64, "max_batch_tokens": 1 << 20, "max_model_len": 1 << 20}
    held = [(pool.num_blocks - pool.free) * 16 for _ in drain(Scheduler(pool, **options), load)]
    theirs = paged_replay.replay(trace, paged_replay.Paged(8192, 16))
    assert held == [sum(seat.held for seat in step.seats.values()) for step in theirs]
    assert (len(held), max(held)) == (192, 3152)
    assert pool.free == pool.num_blocks


def steps_by_hand(outputs: list[int], seats: int) -> tuple[int, int]:
    """Steps of a static and of a continuous drain: a batch's longest; whoever is free is next."""
    batches = [outputs[n : n + seats] for n in range(0, len(outputs), seats)]
    free_at = [0] * seats
    for output in outputs:
        heapq.heapreplace(free_at, free_at[0] + output)
    return sum(map(max, batches)), max(free_at)


def test_steps_are_those_of_a_queue() -> None:
    found = traffic.count_steps(8, 24, 5)
    assert found["static"] == found["dropping"]
    for seed in range(5):
        by_hand = steps_by_hand([one.output for one in long_tailed(24, seed)], 8)
        assert (found["static"][seed], found["continuous"][seed]) == by_hand
    assert found["ratios"][0] == 412 / 231
    assert found["twice"] == sum(ratio >= 2 for ratio in found["ratios"]) == 4


def test_the_shares_of_seeds_that_the_source_states() -> None:
    """In batches of 8, static / continuous: a median of 2.06 over 200 seeds, 115 reach 2."""
    loads_ = [[one.output for one in long_tailed(24, seed)] for seed in range(200)]
    ratios = [a / b for a, b in (steps_by_hand(outputs, 8) for outputs in loads_)]
    assert round(statistics.median(ratios), 2) == 2.06
    assert round(statistics.median(ratios[:20]), 2) == 2.30
    assert sum(ratio >= 2 for ratio in ratios) == 115


def rows_of(policy: str, load: list[Request], budget: int) -> list[list[int]]:
    """The rows of each request in each step."""
    pool = BlockPool(256, 16, prefix_cache=False)
    plans = drain(scheduler_of(policy, pool, 8, budget, 256), load)
    return [[chunk.count for chunk in plan.chunks] for plan in plans]


def test_the_uniform_control_is_exact() -> None:
    """Equal lengths, and a budget for eight prompts at once: the same rows in the same 48 steps."""
    load = uniform(24)
    static = rows_of("static", load, 8 * 17)
    assert static == rows_of("continuous", load, 8 * 17)
    assert static == ([[16] * 8] + [[1] * 8] * 15) * 3
    assert len(rows_of("static", uniform(8, output=48), 8 * 17)) == 48
    assert len(rows_of("continuous", load, 4 * 17)) > 48, "a budget that admits fewer"


def test_the_uniform_control_on_a_clock() -> None:
    load = [replace(one, prompt=one.prompt[:4]) for one in uniform(12, vocab_size=97)]
    runs = [{name: run_of(load, policy=name) for name in ("static", "continuous")}]
    assert traffic._uniform(runs) == {
        "static_steps": 48,
        "continuous_steps": 48,
        "static_rows": 12 * 19,
        "continuous_rows": 12 * 19,
        "speedup": 1.0,
        "speedups": [1.0],
    }


# --- what explains the speed-up ------------------------------------------------------------------


def timed(cost: Any) -> list[dict[str, Run]]:
    load = requests((4, 30, 0.0), (3, 2, 0.0), (5, 9, 0.0), (2, 3, 0.0), (6, 5, 0.0), (1, 8, 0.0))
    return [{name: run_of(load, cost, policy=name, max_seqs=2) for name in POLICIES}]


def rows(plan: Plan) -> int:
    return sum(chunk.count for chunk in plan.chunks)


def test_a_speed_up_is_fewer_steps_times_cheaper_steps() -> None:
    """If only the number of rows matters, nothing is left to explain."""
    runs = timed(lambda plan: 3 + 0.5 * rows(plan))
    found = traffic.speed_up(runs)
    static, continuous = runs[0]["static"], runs[0]["continuous"]
    assert found["speed_up"] == pytest.approx(static.seconds / continuous.seconds)
    assert found["fewer_steps"] == len(static.steps) / len(continuous.steps)
    assert found["fewer_steps"] * found["cheaper_steps"] == pytest.approx(found["speed_up"])
    assert found["by_rows"] == pytest.approx(found["cheaper_steps"])
    assert found["rest"] == pytest.approx(1)
    assert found["ms_by_rows"]["continuous"]["1"]["ms"] == pytest.approx(3500)
    assert found["dropping"] > 1, "fewer rows, no fewer steps"


def test_what_rows_do_not_explain_is_left() -> None:
    """A step that is dear because it holds filler: dearer than its rows."""
    runs = timed(lambda plan: 8.0 if any(c.filler for c in plan.chunks) else 4.0)
    assert traffic.speed_up(runs)["rest"] > 1.1


# --- transformers --------------------------------------------------------------------------------


class Fake:
    """Instead of transformers' model: row r answers r, r + 1, ...; a token takes a second."""

    device = "cpu"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, list[tuple[Any, Any, int]]()

    def generate(self, ids: Any, attention_mask: Any, max_new_tokens: int, streamer: Any) -> Any:
        self.calls.append((ids.tolist(), attention_mask.tolist(), max_new_tokens))
        streamer.put(ids)
        for _ in range(max_new_tokens):
            self.clock.now += 1
            streamer.put(ids)
        new = torch.arange(max_new_tokens) + torch.arange(len(ids))[:, None]
        return torch.cat((ids, new), dim=1)


def test_batches_of_transformers_are_padded_left_and_run_to_their_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(peers.time, "perf_counter", clock)
    fake, load = Fake(clock), requests((3, 1, 0.0), (1, 4, 0.0), (2, 2, 0.0))
    run = traffic.generate_in_batches(fake, load, 2)
    assert fake.calls == [
        ([[1, 1, 1], [0, 0, 1]], [[1, 1, 1], [0, 0, 1]], 4),
        ([[1, 1]], [[1, 1]], 2),
    ]
    assert [record.token_ids for record in run.records] == [[0], [1, 2, 3, 4], [0, 1]]
    assert [record.first_s for record in run.records] == [1, 1, 5]
    assert [record.last_s for record in run.records] == [1, 4, 6]
    assert [(s.rows, s.filler, s.busy) for s in run.steps] == [
        (4, 0, 2),
        *[(2, 1, 1)] * 3,
        (2, 0, 1),
        (1, 0, 1),
    ]
    figures = run.summary()
    assert (figures["useful_tokens"], figures["seconds"]) == (7, 6)
    assert (figures["ttft_p50_ms"], figures["ttft_p99_ms"], figures["idle_slots"]) == (
        1000,
        5000,
        5,
    )


def test_answers_that_differ_are_shown_with_their_gap() -> None:
    """same_tokens is true only if all are; else where they part, and how near the tie was."""
    load = [replace(one, output=6) for one in long_tailed(3, 5, 97)]
    llm = engine("continuous", MODEL, max_seqs=2, num_blocks=32)
    ours = serve(llm, load)
    changed = [replace(record, token_ids=list(record.token_ids)) for record in ours.records]
    theirs = Run(changed, ours.steps, 2)
    figures = theirs.summary()
    pair = {"continuous": ours, "transformers": theirs}
    same = traffic._transformers(llm, [pair], figures)
    assert same is not None and same["same_tokens"] and same["differences"] == []
    assert same["ratio"] == 1
    changed[1].token_ids[4] += 1
    other = traffic._transformers(llm, [pair], figures)
    assert other is not None and other["same_tokens"] is False
    assert (other["same_answers"], other["answers"]) == (2, 3)
    one = Engine(MODEL, max_seq_len=64)
    logits = one.prefill([*load[1].prompt, *ours.records[1].token_ids[:4]])
    first, second = logits.flatten().topk(2).values.tolist()
    assert other["differences"] == [
        {"request": 1, "token": 4, "top2_gap": pytest.approx(first - second, abs=1e-5)}
    ]


def test_random_weights_are_written_as_they_are_drawn(tmp_path: Path) -> None:
    settings_ = shapes.GPT2 | {"architectures": ["GPT2LMHeadModel"]}
    traffic.write_random(settings_, tmp_path)
    drawn = random_model(ModelConfig.from_dict(settings_), dtype=torch.float32)
    ids = Engine(load_hf(tmp_path)).generate([1, 2, 3], 20, temperature=0.0)[0]
    assert ids == Engine(drawn).generate([1, 2, 3], 20, temperature=0.0)[0]


# --- the command ---------------------------------------------------------------------------------

SMALL = shapes.GPT2 | {"architectures": ["GPT2LMHeadModel"], "n_positions": 256}
FEW = ["--requests", "5", "--seqs", "2", "--seeds", "2", "--step-seeds", "3"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options for a small model with random weights."""
    monkeypatch.setitem(traffic.RANDOM, "random-small", SMALL)
    return ["bench", "traffic", "-m", "random-small"]


def test_the_command_prints_what_it_writes(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "traffic.json"
    assert cli.main([*small, *FEW, "--rates", "4", "--json", str(file)]) == 0
    text, written = capsys.readouterr().out, json.loads(file.read_text())
    keys = {"useful_tok_s", "steps", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms"}
    assert keys <= written["static"].keys() == written["continuous"].keys()
    assert {"static_steps", "continuous_steps", "speedup"} <= written["uniform"].keys()
    assert written["transformers"]["same_tokens"] is True, written["transformers"]["differences"]
    assert written["transformers"]["useful_tok_s"] > 0 and written["gaps"] == {}
    uniform_ = written["uniform"]
    assert uniform_["static_steps"] == uniform_["continuous_steps"] == 48
    wanted = traffic.count_steps(2, 5, 3)
    assert written["step_seeds"] == wanted
    for name in POLICIES:
        assert written[name]["steps"] == statistics.median(wanted[name][:2])
        assert written[name]["useful_tokens"] == statistics.median(
            sum(one.output for one in long_tailed(5, seed)) for seed in range(2)
        )
    assert written["transformers"]["steps"] == written["static"]["steps"]
    assert written["transformers"]["idle_slots"] == written["static"]["idle_slots"]
    (arrivals,) = written["poisson"]
    assert arrivals["share"] == 4 and arrivals["static"]["requests"] == 5
    speeds = [f"{written[name]['useful_tok_s']:.1f}" for name in (*POLICIES, "transformers")]
    assert f"| useful tok/s | {' | '.join(speeds)} | " in text
    factors = written["speed_up"]
    assert f"Speed-up: {factors['speed_up']:.2f} = {factors['fewer_steps']:.2f} (fewer" in text
    assert "Uniform lengths: 48 steps static, 48 continuous; " in text
    assert "10 of 10 answers are the same." in text


def test_without_transformers_there_is_a_gap_with_its_reason(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.json"
    options = ["--seeds", "1", "--step-seeds", "1", "--rates", "--skip-transformers"]
    assert cli.main([*small, *FEW, *options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["transformers"] is None and written["poisson"] == []
    reason = "transformers: not measured, --skip-transformers was given."
    assert capsys.readouterr().out.endswith(f"{reason}\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seqs", "0"], "--seqs 0: expected 1 or more"),
        (["--requests", "0"], "--requests 0: expected 1 or more"),
        (["--seeds", "0"], "--seeds 0: expected 1 or more"),
        (["--step-seeds", "-1"], "--step-seeds -1: expected 1 or more"),
        (["--rates", "1", "0"], "--rates 0: expected shares above 0"),
        (["--rates", "nan"], "--rates nan: expected shares above 0"),
        (["-m", "no such model"], "no model 'no such model'"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no"),
    ],
)
def test_the_command_refuses_before_it_measures(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(traffic.Bench, "warm_up")
    assert cli.main(["bench", "traffic", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"spindle: error: {words}")


def test_a_model_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic.write_random(SMALL | {"n_positions": 255}, tmp_path)
    assert cli.main(["bench", "traffic", "-m", str(tmp_path)]) == 2
    assert "the model has 255 positions; expected 256 or more" in capsys.readouterr().err


def test_tokens_that_come_together_are_all_in_the_peak() -> None:
    """B92: 1, 3 and 1 tokens, all in the second half of 1.4 s: the peak is twice the average."""
    clock = Clock()
    llm: Any = Drafting(clock)
    served = serve(llm, requests((1, 5, 0.0)), clock, clock.sleep)
    run = replace(served, steps=[Step(5, 0, 1, 0.0, 1.4)])
    assert run.bins() == ([0, 5], pytest.approx(0.7))
    assert run.summary()["peak_tok_s"] == pytest.approx(2 * run.summary()["useful_tok_s"])
