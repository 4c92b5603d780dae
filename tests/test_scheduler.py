"""The scheduler alone, with a stand-in for the model: what is planned, preempted, given back."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spindle.decode.beam import Beam, Pick
from spindle.decode.params import SamplingParams
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockPool
from spindle.serve.request import Request, Sequence
from spindle.serve.scheduler import Plan, Scheduler


def token_after(sequence: Sequence, sample: int, ids: list[int]) -> int:
    """The stand-in's next token: it depends on all tokens before, and on which answer it is."""
    return hash((sample, *ids)) % 50


def picks_after(beams: list[list[int]], width: int) -> list[Pick]:
    """The stand-in's beam search: who lives on is as good as drawn by lot."""
    seen = [hash((rank, *map(tuple, beams))) for rank in range(width)]
    return [Pick(one % len(beams), one // 7 % 50, 0.0) for one in seen]


@dataclass
class Loop:
    """An engine of a scheduler and the stand-in; checks what must hold in every step."""

    scheduler: Scheduler
    plans: list[Plan] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def add(self, prompt: list[int], max_tokens: int, n: int = 1, beams: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=0)
        request = Request(str(len(self.requests)), prompt, params, len(self.requests), 0.0)
        request.beam = Beam(beams, max_tokens) if beams else None
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Plan:
        before = self.preemptions(), set(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.look_at(plan)
        if self.preemptions() > before[0]:
            assert {c.sequence for c in plan.chunks} <= before[1], "it preempts, or it admits"
        outputs = []
        for chunk in plan.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            first = sequence.new_tokens == 0 and len(request.sequences) == 1
            samples = range(request.params.n) if first else [sequence.sample]
            ids = [token_after(sequence, s, sequence.ids) for s in samples]
            outputs.append(ids if chunk.samples and request.beam is None else [])
        for sequence, _, _ in self.scheduler.commit(plan, outputs):
            if sequence.new_tokens == sequence.request.params.max_tokens:
                self.scheduler.finish(sequence, "length")
        self.branch(plan)
        self.scheduler.check()
        self.plans.append(plan)
        return plan

    def preemptions(self) -> int:
        return sum(request.preemptions for request in self.requests)

    def branch(self, plan: Plan) -> None:
        """What a beam search does with a step in which it ran."""
        ran = [c.sequence.request for c in plan.chunks if c.samples and c.sequence.request.beam]
        for request in dict.fromkeys(ran):
            if not request.is_finished:
                beams = [one.ids for one in request.sequences]
                self.scheduler.branch(request, picks_after(beams, request.width))
                if request.sequences[0].new_tokens == request.params.max_tokens:
                    for one in request.sequences:
                        self.scheduler.finish(one, "length")

    def look_at(self, plan: Plan) -> None:
        scheduler = self.scheduler
        assert not (plan.swap_out and plan.swap_in), "a step that swaps out swaps nothing in"
        assert len({c.sequence for c in plan.chunks}) == len(plan.chunks), "one chunk a sequence"
        if scheduler.policy == "continuous":
            assert sum(c.count for c in plan.chunks) <= scheduler.max_batch_tokens, "the budget"
        for c in plan.chunks:
            ids, table = c.sequence.ids, c.sequence.table
            assert c.count >= 1 and c.start + c.count <= len(ids), "tokens that are there"
            assert c.start + c.count <= table.capacity, "slots that are there"
            assert c.samples == (c.start + c.count == len(ids) and not c.filler)
            assert c.sequence in scheduler.running and not c.sequence.swapped
            group = c.sequence.request.sequences if c.sequence.request.beam else [c.sequence]
            assert all(one in scheduler.running for one in group), "a group moves as one"
            together = [other.samples for other in plan.chunks if other.sequence in group]
            assert not c.samples or together == [True] * len(group), "and samples as one"

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "it comes to an end"

    def nothing_is_held(self) -> None:
        pool = self.scheduler.pool
        pool.clear()
        pool.check()
        assert pool.free == pool.num_blocks
        if self.scheduler.host is not None:
            assert self.scheduler.host.free == self.scheduler.host.num_blocks


def loop(
    blocks: int,
    size: int = 4,
    host: int = 0,
    seqs: int = 4,
    budget: int = 16,
    length: int = 40,
    **options: str,
) -> Loop:
    hosts = BlockPool(host, size, False) if host else None
    options |= {"preemption": "swap"} if host else {}
    return Loop(
        Scheduler(
            BlockPool(blocks, size),
            hosts,
            max_seqs=seqs,
            max_batch_tokens=budget,
            max_model_len=length,
            **options,
        )
    )


def alone(request: Request, sample: int) -> list[int]:
    """What the stand-in answers to a request that has the engine to itself."""
    ids = request.prompt.copy()
    if request.beam is not None:
        beams = [ids]
        for _ in range(request.sequences[sample].new_tokens):
            picks = picks_after(beams, request.width)
            beams = [[*beams[pick.parent], pick.token] for pick in picks]
        return beams[sample][len(request.prompt) :]
    for _ in range(request.params.max_tokens or 0):
        ids.append(token_after(request.sequences[0], sample, ids))
    return ids[len(request.prompt) :]


def preempt(it: Loop, request: Request) -> None:
    """Send a request back, though there are blocks."""
    it.scheduler._preempt(request.sequences, type("Draft", (), {"swap_out": []})())
    it.scheduler.check()


# --- a state machine -----------------------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """B09: requests come, are aborted, are stepped, over pools too small for them; none leaks."""

    @initialize(
        blocks=st.integers(4, 12),
        size=st.sampled_from([1, 2, 4]),
        host=st.sampled_from([0, 0, 3, 12]),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        policy=st.sampled_from(["continuous", "continuous", "continuous", "static"]),
        cache=st.booleans(),
    )
    def begin(self, blocks, size, host, seqs, budget, policy, cache):
        length = min(24, blocks * size)
        self.loop = loop(blocks, size, host, seqs, budget, length, policy=policy)
        self.loop.scheduler.pool.index.enabled = cache
        self.aborted = set()
        self.ends_by = {}  # request: the step

    @rule(data=st.data())
    def add(self, data):
        scheduler = self.loop.scheduler
        room = scheduler.max_model_len
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=room - 1))
        most = data.draw(st.integers(1, room - len(prompt)))
        n = data.draw(st.integers(1, min(3, scheduler.max_seqs)))
        self.note(self.loop.add(prompt, most, n))

    def note(self, request):
        """The bound: a step for each token that it and all older ones may have."""
        alive = [r for r in self.loop.requests if not r.is_finished]
        tokens = sum(r.width * (len(r.prompt) + r.params.max_tokens) for r in alive)
        self.ends_by[request] = len(self.loop.plans) + tokens

    @rule(data=st.data())
    def search(self, data):
        scheduler = self.loop.scheduler
        width = data.draw(st.integers(1, min(3, scheduler.max_seqs)))
        blocks = scheduler.pool.num_blocks // width
        room = min(scheduler.max_model_len, blocks * scheduler.pool.block_size + 1)
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=room - 1))
        most = data.draw(st.integers(1, room - len(prompt)))
        self.note(self.loop.add(prompt, most, beams=width))

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.loop.step()

    @rule(data=st.data())
    def abort(self, data):
        alive = [r for r in self.loop.requests if not r.is_finished]
        if alive:
            request = data.draw(st.sampled_from(alive))
            for sequence in request.sequences:
                self.loop.scheduler.finish(sequence, "abort")
            self.aborted.add(request)

    @invariant()
    def holds(self):
        if hasattr(self, "loop"):
            self.loop.scheduler.check()
            endings = sum(bool(s.finish_reason) for r in self.loop.requests for s in r.sequences)
            for request in self.loop.requests:
                n = request.params.n
                assert request.preemptions <= n * (endings + 1), "the pool does not thrash"
                in_time = len(self.loop.plans) <= self.ends_by[request]
                assert request.is_finished or in_time, "nobody starves"

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        self.loop.run()
        for request in self.loop.requests:
            for one in request.sequences:
                expected = alone(request, one.sample)
                if request in self.aborted:
                    assert one.output == expected[: one.new_tokens]
                else:
                    assert one.output == expected
                    assert one.new_tokens == request.params.max_tokens
            assert request in self.aborted or len(request.sequences) == request.width
        self.loop.nothing_is_held()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- admission -----------------------------------------------------------------------------------


def test_whoever_arrived_first_is_admitted_first_and_nobody_overtakes():
    """B27, B28: the second is too large for now; the third, which would fit, waits behind it."""
    it = loop(blocks=6, budget=64)
    first, large, small = (it.add([n] * size, 4) for n, size in enumerate((8, 16, 2)))
    started = []
    while it.scheduler.has_unfinished:
        for chunk in it.step().chunks:
            if chunk.sequence.request not in started:
                started.append(chunk.sequence.request)
    assert started == [first, large, small]


def test_who_did_not_fit_begins_in_the_step_in_which_it_does():
    """It is not tried in every step, and not forgotten either."""
    it = loop(blocks=8, budget=64)
    it.add([1] * 8, 2), it.add([2] * 8, 9)
    large = it.add([3] * 12, 2)
    running = []
    while not large.sequences[0].stored:
        running.append(len(it.step().chunks))
    assert running == [2, 2, 2]


def test_what_can_never_fit_is_refused_on_add_with_the_numbers():
    """B20, B21, B22: it would block the queue for ever, or outgrow the pool alone."""
    it = loop(blocks=4, length=64)
    with pytest.raises(RequestError, match="20 tokens, 5 blocks of 4 in all; the pool has 4"):
        it.add([0] * 15, 5)
    with pytest.raises(RequestError, match="n=5: at most max_seqs=4"):
        it.add([0], 1, n=5)
    assert not it.scheduler.has_unfinished
    fits = it.add([0] * 8, 8)
    it.run(10)
    assert fits.sequences[0].output == alone(fits, 0)


def test_prompts_take_what_the_decodes_leave_of_the_budget():
    """A long prompt goes in chunks, and nobody's token waits for it."""
    it = loop(blocks=40, budget=8, length=100)
    it.add([1] * 3, 30)
    it.step()
    it.add([2] * 40, 5)
    counts = []
    while len(counts) < 6:
        counts.append([chunk.count for chunk in it.step().chunks])
    assert counts == [[1, 7]] * 5 + [[1, 5]]


def test_a_prompt_in_three_chunks_computes_each_token_once():
    """B16, with the prefix cache and without."""
    for cached in (True, False):
        it = loop(blocks=8, budget=5, length=32)
        it.scheduler.pool.index.enabled = cached
        request = it.add(list(range(13)), 2)
        it.run()
        rows = [(c.start, c.count) for plan in it.plans for c in plan.chunks]
        assert rows == [(0, 5), (5, 5), (10, 3), (13, 1)]
        assert request.preemptions == 0


def test_a_block_is_remembered_once_its_tokens_are_computed_and_not_before():
    it = loop(blocks=8, budget=5, length=32)
    it.add(list(range(13)), 2)
    remembered = []
    for _ in range(3):
        it.step()
        remembered.append(len(it.scheduler.pool.index))
    assert remembered == [1, 2, 3]  # 5, 10 and 13 tokens, in blocks of 4


def test_what_gave_no_distribution_is_not_remembered():
    it = loop(blocks=8, budget=5, length=32)
    request = it.add(list(range(13)), 2)
    it.step()
    it.step()
    plan = it.scheduler.schedule()
    it.scheduler.commit(plan, [[-1]])
    assert request.sequences[0].finish_reason == "error"
    assert len(it.scheduler.pool.index) == 0
    it.nothing_is_held()


def test_the_oldest_gains_in_every_step_and_the_others_after_a_bounded_wait():
    """No starvation: an endless supply of short requests does not keep a long one out."""
    it = loop(blocks=12, budget=16, seqs=3)
    for n in range(3):
        it.add([n] * 4, 3)
    long = it.add([9] * 30, 8)
    waited = 0
    while not long.sequences[0].stored:
        it.add([waited % 7] * 4, 3)
        it.step()
        waited += 1
    assert waited <= 4  # the three before it end within their three tokens
    it.run()
    assert long.sequences[0].output == alone(long, 0)


# --- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [0, 20])
def test_the_youngest_is_preempted_and_comes_back_before_new_ones(host):
    it = loop(blocks=7, budget=64, host=host)
    old, young = it.add([1] * 8, 12), it.add([2] * 8, 12)
    new = it.add([3] * 4, 4)
    it.run()
    assert (old.preemptions, young.preemptions, new.preemptions) == (0, 1, 0)
    for request in (old, young, new):
        assert request.sequences[0].output == alone(request, 0)
    first_row = {
        r: next(n for n, p in enumerate(it.plans) if any(c.sequence.request is r for c in p.chunks))
        for r in (young, new)
    }
    assert first_row[young] < first_row[new]
    swaps = [(bool(p.swap_out), bool(p.swap_in)) for p in it.plans]
    assert ((True, False) in swaps) == ((False, True) in swaps) == bool(host)
    it.nothing_is_held()


def test_two_long_sequences_in_a_pool_for_one_and_a_half_do_not_thrash():
    """B26: resumed only when something has ended: each at most once more than that."""
    it = loop(blocks=15, budget=64, length=40)
    requests = [it.add([n] * 20, 20) for n in range(2)]
    it.run()
    assert [r.preemptions for r in requests] == [0, 1]
    computed = sum(c.count for plan in it.plans for c in plan.chunks)
    assert computed <= 40 + 2 * 40  # its own rows once more


@pytest.mark.parametrize("size", [1, 4])
def test_preempted_at_any_length_the_answer_is_the_same(size):
    """B05, B23, B24: at a block's edge, and one token past it; twice, too."""
    for length in range(1, 14):
        for host in (0, 30):
            it = loop(blocks=64 // size, size=size, budget=8, host=host)
            request = it.add([5, 6, 7], 20)
            for at in (length, length + 3):
                while request.sequences[0].new_tokens < at:
                    it.step()
                preempt(it, request)
            it.run()
            assert request.sequences[0].output == alone(request, 0)
            assert request.preemptions == 2
            it.nothing_is_held()


@pytest.mark.parametrize("host", [0, 40])
def test_a_preempted_one_waits_for_an_ending_even_if_there_is_room(host):
    """B26: blocks that come free otherwise are no reason to resume: they may be wanted again."""
    it = loop(blocks=40, host=host)
    old, young = it.add([1] * 4, 12), it.add([2] * 4, 12)
    it.step()
    preempt(it, young)
    while not old.is_finished:
        assert [c.sequence.request for c in it.step().chunks] == [old]
    it.run()
    assert young.sequences[0].output == alone(young, 0)


@pytest.mark.parametrize("host", [0, 40])
def test_a_group_resumes_when_the_budget_has_room_for_all_of_it(host):
    """Three beams, and two rows left beside the end of a prompt: they wait a step."""
    it = loop(blocks=40, host=host, seqs=5, budget=5)
    prompt, beams = it.add([1] * 2, 9), it.add([2] * 2, 9, beams=3)
    it.step()
    it.step()
    preempt(it, beams)
    for one in beams.sequences:
        one.waits_for_ending = 0
    (old,) = prompt.sequences
    old.ids[2:], old.stored = [1] * 3, 2  # three more, to be stored as a prompt is
    chunks = it.scheduler.schedule().chunks
    assert [(chunk.sequence, chunk.count) for chunk in chunks] == [(old, 3)]


def test_a_group_is_swapped_if_there_is_room_for_its_blocks_each_once():
    """Three beams over four shared blocks and one each: seven, not fifteen."""
    it = loop(blocks=40, host=7, seqs=5, budget=32)
    beams = it.add([2] * 16, 4, beams=3)
    it.step()
    it.step()
    assert len({b for one in beams.sequences for b in one.table.blocks}) == 7
    preempt(it, beams)
    assert it.scheduler.host.free == 0 and all(one.swapped for one in beams.sequences)
    it.run()
    for one in beams.sequences:
        assert one.output == alone(beams, one.sample)


def test_all_answers_of_a_request_must_fit_before_it_begins():
    """Three of three blocks each: not beside one that has four of thirteen, though one would."""
    it = loop(blocks=13, budget=64)
    old, three = it.add([1] * 16, 4), it.add([2] * 8, 4, n=3)
    while not old.is_finished:
        assert [c.sequence.request for c in it.step().chunks] == [old]
    it.run()
    assert three.preemptions == 0


def test_cached_tokens_are_those_of_the_first_time():
    """What a preempted one finds of itself in the cache is no hit of its prompt."""
    it = loop(blocks=40, budget=8)
    request = it.add([1, 2, 3, 4] * 3, 12)
    for _ in range(3):  # before the prompt has ended, and after
        it.step()
        preempt(it, request)
        it.step()
        assert request.sequences[0].stored > 8 and request.cached_tokens == 0
    it.run()
    again = it.add([1, 2, 3, 4] * 3, 2)
    it.step()
    assert again.cached_tokens == 8


# --- aborts --------------------------------------------------------------------------------------


def test_aborts_at_any_moment_leak_nothing_and_hurt_nobody():
    """B10: waiting, running, preempted, finished, and twice."""
    for moment in range(12):
        it = loop(blocks=7, budget=8)
        requests = [it.add([n] * 8, 10) for n in range(3)]
        for _ in range(moment):
            it.step()
        for _ in range(2):
            it.scheduler.finish(requests[1].sequences[0], "abort")
            it.scheduler.check()
        it.run()
        for request in (requests[0], requests[2]):
            assert request.sequences[0].output == alone(request, 0)
        it.nothing_is_held()


def test_an_abort_between_a_plan_and_its_result_stands():
    """B11: the step that would have ended it has been launched."""
    it = loop(blocks=8)
    request = it.add([1, 2, 3], 1)
    plan = it.scheduler.schedule()
    it.scheduler.finish(request.sequences[0], "abort")
    assert it.scheduler.commit(plan, [[7]]) == []
    assert request.sequences[0].finish_reason == "abort" and request.sequences[0].output == []
    it.nothing_is_held()


# --- answers that share a prompt -----------------------------------------------------------------


def test_n_answers_share_the_blocks_of_their_prompt():
    it = loop(blocks=16, budget=32)
    request = it.add(list(range(16)), 4, n=4)
    it.step()
    held = it.scheduler.pool.num_blocks - it.scheduler.pool.free
    assert len(request.sequences) == 4 and held == 4
    plan = it.step()
    assert plan.copies == () and len(plan.chunks) == 4
    it.run()
    for one in request.sequences:
        assert one.output == alone(request, one.sample)
    it.nothing_is_held()


def test_after_13_tokens_three_of_four_copy():
    it = loop(blocks=16, budget=32)
    it.add(list(range(13)), 4, n=4)
    it.step()
    assert len(it.step().copies) == 3


# --- the static policy ---------------------------------------------------------------------------


def test_a_static_batch_ends_with_its_longest_and_computes_its_finished_rows():
    it = loop(blocks=60, budget=16, policy="static")
    requests = [it.add([n] * 3, most) for n, most in enumerate((2, 5, 3, 4, 1))]
    it.run()
    widths = [len(plan.chunks) for plan in it.plans]
    assert widths == [4] * 5 + [1]
    fillers = sum(c.filler for plan in it.plans for c in plan.chunks)
    assert fillers == 5 * 4 - (2 + 5 + 3 + 4)
    for request in requests:
        assert request.sequences[0].output == alone(request, 0)
    it.nothing_is_held()


def test_equal_lengths_take_the_same_steps_either_way():
    """The control: with nothing to reclaim, nothing is."""
    steps = []
    for policy in ("static", "continuous"):
        it = loop(blocks=100, budget=64, seqs=8, policy=policy)
        for n in range(24):
            it.add([n] * 6, 10)
        it.run()
        steps.append(len(it.plans))
    assert steps == [30, 30]


def test_long_tailed_lengths_take_fewer_steps_when_scheduled_by_iteration():
    lengths = random.Random(0).choices([2, 3, 4, 30], k=24)
    steps = {}
    for policy in ("static", "continuous"):
        it = loop(blocks=200, budget=64, seqs=8, policy=policy)
        for n, most in enumerate(lengths):
            it.add([n] * 6, most)
        it.run()
        steps[policy] = len(it.plans)
    assert steps["static"] == sum(max(lengths[n : n + 8]) for n in (0, 8, 16))
    assert steps["continuous"] < 0.75 * steps["static"]


def test_an_aborted_row_of_a_static_batch_is_gone_at_once():
    """Nobody waits for it: its blocks are free, and it is not computed on."""
    it = loop(blocks=60, budget=16, policy="static")
    stays, goes = it.add([1] * 4, 6), it.add([2] * 4, 6)
    it.step()
    it.scheduler.finish(goes.sequences[0], "abort")
    assert goes.sequences[0].table.blocks == []
    assert [chunk.sequence.request for chunk in it.step().chunks] == [stays]
    it.run()
    it.nothing_is_held()


def test_a_static_batch_has_room_for_all_that_its_rows_may_take():
    """Two of six blocks each at their ends do not begin together in a pool of ten."""
    it = loop(blocks=10, budget=64, policy="static")
    one, two = it.add([1] * 4, 20), it.add([2] * 4, 20)
    widths = []
    while it.scheduler.has_unfinished:
        widths.append(len(it.step().chunks))
    assert set(widths) == {1} and one.preemptions == two.preemptions == 0


def test_what_is_found_in_the_cache_counts_for_admission():
    """Five blocks of eight are held; the same prompt needs two more, not five."""
    it = loop(blocks=8, budget=64)
    it.add([1, 2, 3, 4] * 4, 4)
    it.step()
    it.step()
    again = it.add([1, 2, 3, 4] * 4, 2)
    plan = it.step()
    assert again in [chunk.sequence.request for chunk in plan.chunks]
    assert again.cached_tokens == 12
    it.run()
