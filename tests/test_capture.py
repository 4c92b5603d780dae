"""What makes a step safe to capture: each kind of fault is seen by its check, on a CPU."""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import shapes
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_static import BakedIn
from torch import Tensor

from spindle.decode import fake_device
from spindle.decode.capture import (
    CaptureError,
    Log,
    Step,
    capture,
    check_same,
)
from spindle.decode.fake_device import check_on_fake_device
from spindle.decode.params import SamplingParams
from spindle.decode.penalties import Prefix
from spindle.decode.sampling import SamplingRows, sample
from spindle.decode.step import ChunkStep, DecodeStep
from spindle.errors import SpindleError
from spindle.kernels import build, native
from spindle.kvcache.static import StaticKV, StaticView, attend_chunks
from spindle.model.layers import Model
from spindle.model.weights import random_model


def refused(pattern: str) -> AbstractContextManager[object]:
    """A CaptureError whose message has this regular expression in it."""
    return pytest.raises(CaptureError, match=pattern)


# --- small steps, each with one fault ------------------------------------------------------------


class Toy:
    """Buffers, and a step of two operations; a fault adds something to it."""

    fault = "none"

    def __init__(self, device: str = "cpu") -> None:
        self.x = torch.arange(6.0, device=device).view(2, 3)
        self.count = torch.ones(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(2, 3, device=device)
        self.calls = 0  # Python's

    def __call__(self) -> None:
        self.out.copy_(self.x * self.count)
        self.count.add_(1)
        self.extra()
        self.calls += 1

    def extra(self) -> None:
        pass


class Item(Toy):
    def extra(self) -> None:
        self.out.mul_(self.count.item())


class Branches(Toy):
    def extra(self) -> None:
        if self.count > 0:
            self.out.neg_()


class Lists(Toy):
    def extra(self) -> None:
        assert int(self.count[0]) > 0


class Compares(Toy):
    def extra(self) -> None:
        assert not torch.equal(self.out, self.x + 100)


class Masks(Toy):
    def extra(self) -> None:
        self.out.add_(self.x[self.x > 2].sum())


class WritesByMask(Toy):
    def extra(self) -> None:
        self.out[self.x > 2] = self.x.sum()


class Finds(Toy):
    def extra(self) -> None:
        self.out.add_(len(self.x.nonzero()))


class Selects(Toy):
    def extra(self) -> None:
        self.out.add_(self.x.masked_select(self.x > 2).sum())


class Brings(Toy):
    def extra(self) -> None:
        self.out.mul_(torch.tensor([1.0, 2.0, 3.0]))


class Draws(Toy):
    def extra(self) -> None:
        self.out.add_(torch.rand_like(self.out))


class DrawsInPlace(Toy):
    def extra(self) -> None:
        self.out.uniform_()


REFUSED = {  # by a capture on a GPU too, and loudly
    Item: r"aten\._local_scalar_dense\.default, in Item\.extra: Python reads a number",
    Branches: r"aten\._local_scalar_dense\.default, in Branches\.extra: Python reads a number",
    Lists: r"aten\._local_scalar_dense\.default, in Lists\.extra: Python reads a number",
    Compares: r"aten\.equal\.default, in Compares\.extra: Python reads a number",
    Masks: r"aten\.index\.Tensor, in Masks\.extra: .*an index by a mask counts what is True",
    WritesByMask: r"aten\.index_put_\.default, in WritesByMask\.extra: .*an index by a mask",
    Finds: r"aten\.nonzero\.default, in Finds\.extra: the shape follows the data",
    Selects: r"aten\.masked_select\.default, in Selects\.extra: the shape follows the data",
    Brings: r"aten\.lift_fresh\.default, in Brings\.extra: brings a number of Python's",
    Draws: r"aten\.rand_like\.default, in Draws\.extra: draws from a generator",
    DrawsInPlace: r"aten\.uniform_\.default, in DrawsInPlace\.extra: draws from a generator",
}


class BakesIn(Toy):
    def extra(self) -> None:
        self.out.add_(self.calls)


class BakesInAFloat(Toy):
    def extra(self) -> None:
        self.out.add_(self.calls / 2)


class Grows(Toy):
    def extra(self) -> None:
        self.out.add_(self.x[:, : self.calls + 1].sum())


class Lengthens(Toy):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.seen = self.x.clone()

    def extra(self) -> None:
        self.seen = torch.cat([self.seen, self.x])
        self.out.add_(self.seen.sum())


class Rebinds(Toy):
    def extra(self) -> None:
        self.x = self.x + 1


class Moves(Toy):
    """The same shape and stride, elsewhere in the same buffer."""

    def extra(self) -> None:
        self.out.add_(self.views[self.calls % 2].sum())

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.views = self.x.split(1)


class Turns(Toy):
    """The same shape in the same buffer, with other strides."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        square = self.x[:, :2]
        self.views = (square, square.t())

    def extra(self) -> None:
        self.out[:, :2].add_(self.views[self.calls % 2])


class TakesAnotherWay(Toy):
    def extra(self) -> None:
        self.out.neg_() if self.calls % 2 else self.out.abs_()


class EndsEarly(Toy):
    def extra(self) -> None:
        if self.calls == 0:
            self.out.neg_()


class GoesOn(Toy):
    def extra(self) -> None:
        if self.calls > 0:
            self.out.neg_()


DIFFERENT = {  # captured without a word; a replay is wrong from its second time on
    BakesIn: r"run 1, operation 3, aten.add_.Tensor, in BakesIn.extra: a number was 0 and is 1: a",
    BakesInAFloat: r"run 1, .* in BakesInAFloat.extra: a number was 0.0 and is 0.5: a graph has",
    Grows: r"run 1, operation 3, aten.slice.Tensor, in Grows.extra: a number was 1 and is 2",
    Lengthens: r"run 1, .*aten.cat.default, in Lengthens.extra: a shape was \[2, 3\] and is \[4, 3",
    Rebinds: r"run 1, .*aten.mul.Tensor, in Toy.__call__: works on buffer 3, and did on buffer 0",
    Moves: r"run 1, .*aten.sum.default, in Moves.extra: a tensor was .*offset=0.* and is .*set=3",
    Turns: r"run 1, .*in Turns.extra: a tensor was .*stride=\(3, 1\).* and is .*stride=\(1, 3\)",
    TakesAnotherWay: r"run 1, .*aten.neg_.*aten.abs_.default came here before: Python took another",
    EndsEarly: r"run 1, .*the end, in .*aten.neg_.default came here before: Python took",
    GoesOn: r"run 1, operation 3, aten.neg_.default, in GoesOn.extra: nothing came here before",
}


def test_a_good_step_is_the_same_every_time_and_is_replayed_as_it_runs():
    check_same(Toy())
    eager, recorded = Toy(), Toy()
    replay = capture(recorded).replay
    for _ in range(5):
        eager()
        replay()
        assert torch.equal(eager.out, recorded.out) and torch.equal(eager.count, recorded.count)


@pytest.mark.parametrize("fault", REFUSED)
def test_what_no_capture_takes_is_refused_at_once(fault):
    for run in (check_same, capture):
        with refused(REFUSED[fault]):
            run(fault())


@pytest.mark.parametrize("fault", DIFFERENT)
def test_what_differs_from_run_to_run_is_named(fault):
    with refused(DIFFERENT[fault]):
        check_same(fault())


@pytest.mark.parametrize("fault", DIFFERENT)
def test_a_replay_of_it_is_right_once_and_silently_wrong_after_that(fault):
    eager, recorded = fault(), fault()
    replay = capture(recorded).replay
    right = []
    for _ in range(2):
        eager()
        replay()
        right.append(torch.equal(eager.out, recorded.out))
    assert right == [True, False]


def test_a_message_says_which_operation_where_and_why():
    with pytest.raises(CaptureError) as caught:
        check_same(BakesIn())
    assert isinstance(caught.value, SpindleError)
    assert str(caught.value) == (
        "run 1, operation 3, aten.add_.Tensor, in BakesIn.extra: a number was 0 and is 1: a graph "
        "has the first one baked in"
    )


def test_what_is_only_set_between_runs_has_to_be_set_for_it_to_be_seen():
    """A number that Python keeps is one number to the log, until `prepare` changes it."""

    class Scales(Toy):
        factor = 2

        def extra(self) -> None:
            self.out.mul_(self.factor)

    step = Scales()
    check_same(step)
    with refused("run 3, .* a number was 10 and is 11"):
        check_same(step, prepare=lambda n: setattr(step, "factor", 10 + (n == 3)))
    with refused("run 1, .* a number was 0 and is 1"):
        check_same(step, times=2, prepare=lambda n: setattr(step, "factor", n))


# --- identity ------------------------------------------------------------------------------------


def test_memory_that_is_used_again_within_a_step_is_not_the_same_memory():
    """Temporaries die at once here; without their keeper the next one would have their address."""
    log = Log()
    with log:
        x = torch.ones(1000)
        for _ in range(50):
            x = x + 1
    made = [op.made[0].memory for op in log.ops]
    assert made == [f"temporary {n}" for n in range(51)]
    assert [op.given[0].memory for op in log.ops[1:]] == made[:-1]


def test_when_python_lets_a_temporary_go_is_no_difference():
    kept: list[Tensor] = []

    def step() -> None:
        for n in range(20):
            made = torch.ones(500) + n
            if len(kept) % 3:
                kept.append(made)
        kept.append(made)

    check_same(step, times=6)


def test_buffers_go_by_their_names_and_views_by_their_buffers():
    toy = Toy()
    log = check_same(toy, x=toy.x, count=toy.count)
    product, copy, add = log.ops
    assert str(product) == "aten.mul.Tensor(float32 [2, 3] in x, int64 [1] in count) -> " + str(
        product.made[0]
    )
    assert copy.writes == ("buffer 2",) and add.writes == ("count",) and product.writes == ()
    assert log.reads == {"x", "count"} and log.writes == {"buffer 2", "count"}
    with Log(row=toy.x) as log:
        toy.x[1].sum()
    assert [op.kind for op in log.ops] == ["view", "launch"]
    assert log.ops[1].given[0].memory == "row" and log.ops[1].given[0].offset == 3


def test_launches_are_what_computes():
    with Log() as log:
        x = torch.empty(4, 6)
        x.fill_(1.0)
        x.view(2, 12).t()[3:].unsqueeze(0).expand(3, -1, -1)
        x.t().contiguous()
        torch.empty_like(x).copy_(x)
    assert [op.name.split(".")[1] for op in log.launches] == ["fill_", "clone", "copy_"]
    assert log.counts() == {"aten.fill_": 1, "aten.clone": 1, "aten.copy_": 1}
    with log:
        x.fill_(2.0)
    assert log.table().splitlines()[0] == "     2 aten.fill_"
    assert log.table().splitlines()[-1] == "     4 launches"
    assert {op.kind for op in log.ops} == {"view", "memory", "launch"}


@pytest.mark.parametrize("inference", [True, False])
def test_operations_made_of_others_are_seen_as_these(inference):
    with torch.inference_mode(inference), torch.no_grad(), Log() as log:
        x, w = torch.ones(2, 3), torch.ones(4, 3)
        torch.nn.functional.linear(x, w)
        x[None] @ w.t()
        x.t().reshape(6)
    names = [op.name.split(".")[1] for op in log.launches]
    assert names == ["ones", "ones", "mm", "mm", "clone"]


def test_native_code_that_torch_does_not_see_is_refused():
    """A replay would leave it out: what it wrote at the capture would stay for ever."""
    source, out = torch.arange(4.0), torch.zeros(4)

    def step() -> None:
        made = torch.empty(4)
        ctypes.memmove(made.data_ptr(), source.data_ptr(), 16)
        out.copy_(made.view(2, 2).view(4))

    for run in (check_same, capture):
        with refused("reads temporary 0, which nothing that torch sees"):
            run(step)


def test_memory_that_is_written_before_it_is_read_is_no_fault():
    out = torch.zeros(4)

    def step() -> None:
        made = torch.empty(2, 2)
        made[0].copy_(out[:2])
        made[1].zero_()
        torch.cat([made.flatten(), torch.empty(0)], out=out)

    check_same(step)


# --- operations of torch.library -----------------------------------------------------------------


@pytest.fixture(scope="module")
def scale_and_sum() -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """One that changes what it is given, and makes something new."""
    library = torch.library.Library("spindle_test_capture", "DEF")
    library.define("scale_and_sum(Tensor(a!) x, Tensor factor) -> Tensor")

    def scale_and_sum(x: Tensor, factor: Tensor) -> Tensor:
        total = torch.empty(())
        return total.copy_(x.mul_(factor).sum())

    def put(x: Tensor, value: Tensor) -> None:
        x.copy_(value)

    library.impl("scale_and_sum", scale_and_sum, "CPU")
    library.define("put(Tensor(a!) x, Tensor value) -> ()")
    library.impl("put", put, "CPU")
    yield torch.ops.spindle_test_capture.scale_and_sum.default
    library._destroy()


def test_an_operation_of_ours_is_one_launch_whatever_is_inside(scale_and_sum):
    def fresh() -> tuple[Tensor, Tensor, Tensor, Step]:
        x, factor, out = torch.ones(3), torch.full((), 2.0), torch.zeros(())
        return x, factor, out, lambda: out.copy_(scale_and_sum(x, factor))

    x, _, _, step = fresh()
    log = check_same(step, x=x)
    assert log.ops[0].name == "spindle_test_capture.scale_and_sum.default"
    assert log.ops[0].kind == "launch" and log.ops[0].writes == ("x",) and len(log.launches) == 2
    (x, _, out, step), (y, factor, other, again) = fresh(), fresh()
    replay = capture(again).replay
    for _ in range(4):
        step()
        replay()
        assert torch.equal(x, y) and torch.equal(out, other)
    factor.fill_(0.5)
    replay()
    assert other == x.sum() / 2


def test_an_operation_that_gives_nothing_back_has_written(scale_and_sum):
    source, out = torch.arange(3.0), torch.zeros(3)

    def step() -> None:
        made = torch.empty(3)
        torch.ops.spindle_test_capture.put(made, source)
        out.copy_(made)

    check_same(step)
    replay = capture(step).replay
    source.add_(1)
    replay()
    assert torch.equal(out, source)


# --- the whole decode step -----------------------------------------------------------------------

LENGTHS = (1, 6, 15)
CONFIGS = {
    "llama": shapes.llama(vocab_size=300),
    "gpt2": shapes.gpt2(vocab_size=300),
    "qwen3": shapes.llama(vocab_size=300, model_type="qwen3"),
}
SAMPLINGS = {
    "greedy": [SamplingParams(temperature=0, seed=0)] * 3,
    "temperature": [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=2)],
    "filtered": [
        SamplingParams(seed=3, top_k=40, temperature=2.0),
        SamplingParams(temperature=0, seed=4),
        SamplingParams(seed=5, top_p=0.9, min_p=0.01),
    ],
    "penalties": [
        SamplingParams(seed=6, presence_penalty=1.0, frequency_penalty=0.5, top_k=20),
        SamplingParams(
            seed=7, repetition_penalty=1.3, min_tokens=9, stop_token_ids=range(0, 300, 3)
        ),
        SamplingParams(seed=8),
    ],
}


def model_of(family: str, dtype: torch.dtype) -> Model:
    return random_model(CONFIGS[family], dtype=dtype)


def prompt_of(row: int, length: int) -> list[int]:
    return [(7 * row + 3 * p + p * p) % 300 for p in range(length)]


def decode_step(
    model: Model, params: list[SamplingParams], make: type[DecodeStep] = DecodeStep
) -> DecodeStep:
    """Rows of different lengths with their prompts stored, in a cache full of NaN elsewhere."""
    kv = StaticKV(model.config, len(LENGTHS), 64, model.dtype)
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    prompts = [prompt_of(row, length) for row, length in enumerate(LENGTHS)]
    for row, prompt in enumerate(prompts):
        model(torch.tensor(prompt), kv.prefill(row, 0, len(prompt)))
    prefixes = [Prefix(prompt) for prompt in prompts]
    sampling = SamplingRows.of(params, "cpu", None, prefixes, [1], model.config.vocab_size)
    sampling = dataclasses.replace(sampling, fixed_shapes=True)
    step = make(model, kv, torch.tensor(LENGTHS), sampling)
    step.tokens.copy_(torch.tensor([5, 6, 7]))
    return step


def state(step: DecodeStep) -> list[Tensor]:
    """All that a step changes."""
    counted = (step.sampling.penalties.counts,) if step.sampling.penalties else ()
    return [step.tokens, step.logits, step.seq_lens, *counted]


def cache(step: DecodeStep) -> Tensor:
    return step.view._kv.keys


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def first_wrong_step(eager: DecodeStep, replay: Step, recorded: DecodeStep, steps: int) -> int:
    """Counted from 1; 0: none of them."""
    for n in range(1, steps + 1):
        eager.run()
        replay()
        if not equal(state(eager), state(recorded)):
            return n
    return 0


FORMS = {  # what computes: the dtype, whether there is native code, and SPINDLE_NO_EXT
    "bfloat16 twins": (torch.bfloat16, False, "1"),
    "float32 twins": (torch.float32, False, "1"),
    "float32 oneDNN": (torch.float32, False, "0"),
    "float32 native": (torch.float32, True, "0"),
}


@pytest.fixture(params=FORMS)
def dtype(request, monkeypatch) -> torch.dtype:
    """A model's dtype, with one of the forms that compute in it on a CPU."""
    dtype, has_native, no_ext = FORMS[request.param]
    monkeypatch.setenv("SPINDLE_NO_EXT", no_ext)
    if not has_native:
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(f"{build.why_not('cpu')}")
    return dtype


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_decode_step_is_the_same_operations_every_time(family, sampling):
    step = decode_step(model_of(family, torch.float64), SAMPLINGS[sampling])
    kv = step.view._kv
    log = check_same(step.run, tokens=step.tokens, keys=kv.keys, seq_lens=step.seq_lens)
    assert {"tokens", "keys", "seq_lens"} <= log.writes & log.reads
    assert not any(name.startswith("temporary") for name in log.writes | log.reads)


def assert_replayed_as_run(family: str, dtype: torch.dtype, sampling: str) -> None:
    """B104: captured at a short length, replayed to the end of the context."""
    model = model_of(family, dtype)
    eager, recorded = (decode_step(model, SAMPLINGS[sampling]) for _ in range(2))
    replay = capture(recorded.run).replay
    assert first_wrong_step(eager, replay, recorded, 64 - max(LENGTHS)) == 0
    assert max(recorded.seq_lens) == 64
    assert torch.equal(cache(eager).nan_to_num(7.0), cache(recorded).nan_to_num(7.0))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_recorded_step_is_the_eager_one_bit_for_bit(family, sampling):
    assert_replayed_as_run(family, torch.float64, sampling)


@pytest.mark.parametrize("family", CONFIGS)
def test_whatever_computes_it_a_recorded_step_is_the_eager_one(family, dtype):
    assert_replayed_as_run(family, dtype, "penalties")


@pytest.mark.parametrize("count", [1, 4])
def test_a_recorded_chunk_is_the_eager_one_bit_for_bit(count):
    model, steps = model_of("llama", torch.float64), []
    for _ in range(2):
        one = decode_step(model, SAMPLINGS["greedy"])
        steps.append(ChunkStep(model, one.view._kv, one.seq_lens, count))
    eager, recorded = steps
    check_same(ChunkStep(model, one.view._kv, one.seq_lens.clone(), count).run)
    replay = capture(recorded.run).replay
    for n in range(48 // count):
        tokens = torch.arange(3 * count).view(3, count) + n
        eager.tokens.copy_(tokens)
        recorded.tokens.copy_(tokens)
        eager.run()
        replay()
        assert torch.equal(eager.logits, recorded.logits)


def test_to_capture_leaves_every_buffer_as_it_was():
    step = decode_step(model_of("llama", torch.float64), SAMPLINGS["penalties"])
    buffers = [*state(step), step.view._kv.keys, step.view._kv.values]
    buffers.append(step.sampling.min_tokens.owed)
    before = [buffer.clone() for buffer in buffers]
    capture(step.run)
    for buffer, was in zip(buffers, before, strict=True):
        assert torch.equal(buffer.nan_to_num(7), was.nan_to_num(7))
    step.run()
    assert not equal(state(step), before[: len(state(step))])


def test_a_capture_that_is_refused_leaves_every_buffer_as_it_was():
    toy = Item()
    with pytest.raises(CaptureError):
        capture(toy)
    assert torch.equal(toy.out, torch.zeros(2, 3)) and toy.count == 1


def test_two_recordings_share_their_buffers():
    """As graphs for several batch sizes do: one is replayed, then the other."""
    model = model_of("llama", torch.float64)
    eager, recorded = (decode_step(model, SAMPLINGS["filtered"]) for _ in range(2))
    replays = [capture(recorded.run).replay for _ in range(2)]
    for n in range(12):
        eager.run()
        replays[n % 2]()
        assert equal(state(eager), state(recorded))


# --- decode steps with a fault: right at first ---------------------------------------------------


class PositionBaked(DecodeStep):
    """Right as long as it is run."""

    def __init__(self, model: Model, kv: StaticKV, seq_lens: Tensor, sampling: SamplingRows):
        super().__init__(model, kv, seq_lens, sampling)
        self.view = BakedIn(kv, seq_lens, 1)


class BufferRebound(DecodeStep):
    """The next tokens are a new tensor, not what the next step reads."""

    def draw(self) -> None:
        self.tokens = sample(self.logits, self.sampling, self.seq_lens)


class NumberFrozen(DecodeStep):
    """The position of the first row is Python's, and its draw with it."""

    position = LENGTHS[0]

    def draw(self) -> None:
        self.position += 1
        ahead = self.seq_lens - self.seq_lens[:1]
        self.tokens.copy_(sample(self.logits, self.sampling, ahead + self.position))


WRONG = {
    PositionBaked: "run 1, .* in BakedIn.begin: a number was 0 and is 1",
    BufferRebound: r"run 1, .*aten.index.Tensor, in Llama.__call__: works on buffer",
    NumberFrozen: "run 1, .* in NumberFrozen.draw: a number was 2 and is 3",
}
HOT = [SamplingParams(temperature=4.0, seed=seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_goes_wrong_at_the_second_step_and_is_seen_beforehand(fault):
    """Run, it is as right as the true step; replayed, it is so once."""
    model = model_of("llama", torch.float64)
    true, eager, recorded, checked = (
        decode_step(model, HOT, make) for make in (DecodeStep, fault, fault, fault)
    )
    for _ in range(10):
        true.run()
        eager.run()
        assert equal(state(true), state(eager))
    true, replay = decode_step(model, HOT), capture(recorded.run).replay
    assert first_wrong_step(true, replay, recorded, 10) == 2
    with refused(WRONG[fault]):
        check_same(checked.run)


class SplitByLength(StaticView):
    """Python counts, and a longer context is read in another way."""

    tokens = max(LENGTHS)

    def begin(self) -> StaticView:
        self.tokens += 1
        return super().begin()

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        S = 20 if self.tokens <= 20 else 40
        keys, values = (cache[:, :S] for cache in self._kv.layers[layer])
        return attend_chunks(q, keys, values, self._hidden[:, :, :S], scale)


class ByLength(DecodeStep):
    def __init__(self, model: Model, kv: StaticKV, seq_lens: Tensor, sampling: SamplingRows):
        super().__init__(model, kv, seq_lens, sampling)
        self.view = SplitByLength(kv, seq_lens, 1)


def test_a_choice_that_depends_on_the_length_is_wrong_once_the_length_is_there():
    """B104: baked in at 16 tokens, it is another one from 21 on; no step before tells."""
    model, greedy = model_of("llama", torch.float64), SAMPLINGS["greedy"]
    true, recorded, checked = (
        decode_step(model, greedy, make) for make in (DecodeStep, ByLength, ByLength)
    )
    replay, apart = capture(recorded.run).replay, []
    for _ in range(6):
        true.run()
        replay()
        apart.append(float((true.logits - recorded.logits).abs().max()))
    assert max(apart[:5]) < 1e-9 and apart[5] > 1e-3
    with refused("run 5, .*attend.*: a number was 20 and is 40"):
        check_same(checked.run, times=8)


def test_a_buffer_that_is_allocated_anew_is_not_the_graphs_any_more():
    """B104: whoever allocates has to drop the graphs."""
    model, greedy = model_of("llama", torch.float64), SAMPLINGS["greedy"]
    eager, recorded, checked = (decode_step(model, greedy) for _ in range(3))
    replay = capture(recorded.run).replay
    recorded.logits = recorded.logits.clone()
    assert first_wrong_step(eager, replay, recorded, 1) == 1

    def renew(n: int) -> None:
        if n == 2:
            checked.logits = checked.logits.clone()

    with refused(r"run 2, .*copy_.*: works on buffer \d+, and did on lo"):
        check_same(checked.run, prepare=renew, logits=checked.logits)


class SeedFrozen(DecodeStep):
    """The seed is a number of Python's."""

    python_seed = 1

    def draw(self) -> None:
        seed = torch.full_like(self.seq_lens, self.python_seed)
        sampling = dataclasses.replace(self.sampling, seed=seed)
        self.tokens.copy_(sample(self.logits, sampling, self.seq_lens))


def seeded(step: DecodeStep, seed: int) -> None:
    step.sampling.seed.fill_(seed)
    step.python_seed = seed


def drawn(step: DecodeStep, replay: Step, seed: int) -> list[list[int]]:
    """Eight steps from the same start."""
    seeded(step, seed)
    step.seq_lens.copy_(torch.tensor(LENGTHS))
    step.tokens.copy_(torch.tensor([5, 6, 7]))
    found = []
    for _ in range(8):
        replay()
        found.append(step.tokens.tolist())
    return found


def test_a_seed_in_a_buffer_has_its_effect_after_the_capture():
    """B105: seeds 1, 2, 1 give a, b, a with a != b."""
    step = decode_step(model_of("llama", torch.float64), HOT)
    replay = capture(step.run).replay
    a, b, again = (drawn(step, replay, seed) for seed in (1, 2, 1))
    assert a == again and a != b
    assert a == drawn(step, step.run, 1) and b == drawn(step, step.run, 2)


def test_a_seed_that_is_frozen_is_seen():
    """B105: the same tokens for every seed after the capture."""
    step, checked = (
        decode_step(model_of("llama", torch.float64), HOT, SeedFrozen) for _ in range(2)
    )
    assert drawn(step, step.run, 1) != drawn(step, step.run, 2)
    seeded(step, 1)
    replay = capture(step.run).replay
    assert drawn(step, replay, 1) == drawn(step, replay, 2)
    with refused("run 1, .* in SeedFrozen.draw: a number was 0 and is 1"):
        check_same(checked.run, prepare=lambda n: seeded(checked, n))


# --- fixed shapes in sampling --------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["filtered", "penalties"])
def test_fixed_shapes_give_the_same_tokens(sampling):
    """On a CPU the likeliest tokens are tried first: faster, and not to be captured."""
    model = model_of("llama", torch.float64)
    fixed, free = (decode_step(model, SAMPLINGS[sampling]) for _ in range(2))
    free.sampling = dataclasses.replace(free.sampling, fixed_shapes=False)
    assert first_wrong_step(fixed, free.run, free, 48) == 0
    again = decode_step(model, SAMPLINGS[sampling])
    again.sampling = dataclasses.replace(again.sampling, fixed_shapes=False)
    with refused("aten.nonzero.default, in _drawn: the shape follows"):
        capture(again.run)


# --- a device that is not there ------------------------------------------------------------------


def moved(part, device: str):
    """A dataclass of tensors with as many of the same kind elsewhere, of no value."""
    new = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            new[field.name] = torch.zeros(value.shape, dtype=value.dtype, device=device)
        elif dataclasses.is_dataclass(value):
            new[field.name] = moved(value, device)
    return dataclasses.replace(part, **new)


def step_on(device: str, family: str, dtype: torch.dtype, sampling: SamplingRows) -> Step:
    model = random_model(CONFIGS[family], dtype=dtype, device=device)
    kv = StaticKV(model.config, len(LENGTHS), 64, dtype, device)
    seq_lens = torch.zeros(len(LENGTHS), dtype=torch.int64, device=device)
    return DecodeStep(model, kv, seq_lens, moved(sampling, device)).run


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_decode_step_never_leaves_a_device_that_is_not_there(family, sampling):
    """And sends it what it computes on a CPU, operation for operation."""
    here = decode_step(model_of(family, torch.float64), SAMPLINGS[sampling])
    log = check_on_fake_device(lambda d: step_on(d, family, torch.float64, here.sampling))
    assert [op.name for op in log.launches] == [op.name for op in check_same(here.run).launches]
    assert {x.device for op in log.launches for x in op.made} == {torch.device("cuda", 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_stay_there_too(dtype):
    sampling = decode_step(model_of("llama", torch.float64), SAMPLINGS["filtered"]).sampling
    assert check_on_fake_device(lambda d: step_on(d, "llama", dtype, sampling)).launches


class Copies(Toy):
    def extra(self) -> None:
        self.out.add_(self.x.cpu().sum().to(self.out.device))


class CopiesInto(Toy):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.host = torch.zeros(2, 3)

    def extra(self) -> None:
        self.host.copy_(self.out)


class Tolist(Toy):
    def extra(self) -> None:
        assert len(self.x.tolist()) == 2


class Numpy(Toy):
    def extra(self) -> None:
        assert self.x.numpy().shape == (2, 3)


class HostIndex(CopiesInto):
    def extra(self) -> None:
        self.out.add_(self.x[self.which])

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.which = torch.zeros(2, dtype=torch.int64)


class HostAdds(CopiesInto):
    def extra(self) -> None:
        self.out.add_(self.host)


class ListIndex(Toy):
    def extra(self) -> None:
        self.out.add_(self.x[[0, 1]])


class SetsANumber(Toy):
    """On a GPU a fill; on a CPU a tensor made of a number, like any other."""

    def extra(self) -> None:
        self.out[0] = 1.0
        self.out[:, self.count] = 2.0


class HostMask(HostIndex):
    def extra(self) -> None:
        self.out.add_(self.x[self.which == 0].sum())


LEAVES = {
    Copies: "aten._to_copy.default, in Copies.extra: brings values from .*: cpu, cuda",
    CopiesInto: "aten.copy_.default, in CopiesInto.extra: brings values from one device to another",
    HostIndex: "aten.index.Tensor, in HostIndex.extra: brings values from one device to another",
    HostAdds: "aten.add_.Tensor, in HostAdds.extra: brings values from one device to another",
    HostMask: "aten.index.Tensor, in HostMask.extra: .* an index by a mask",
    Tolist: "in Tolist.extra: Python reads a number from a tensor",
    ListIndex: "on cuda:0, which cannot be read: an index of .0, 1., which has to be",
    Numpy: "on cuda:0, which cannot be read: .*numpy",
}


@pytest.mark.parametrize("fault", LEAVES)
def test_a_step_that_leaves_its_device_is_seen(fault):
    if fault not in (HostMask, ListIndex):
        check_same(fault())  # where host and device are one, it leaves no trace
    with refused(LEAVES[fault]):
        check_on_fake_device(fault)


@pytest.mark.parametrize("fault", REFUSED | DIFFERENT)
def test_all_other_faults_are_seen_there_too(fault):
    with refused((REFUSED | DIFFERENT)[fault]):
        check_on_fake_device(fault)


def test_a_real_tensor_in_a_step_on_a_fake_device_is_seen():
    real = torch.ones(2, 3)

    class Closes(Toy):
        def extra(self) -> None:
            self.out.add_(real)

    with refused("in .*Closes.extra: brings values .*: cpu, cuda"):
        check_on_fake_device(Closes)


def test_a_number_that_is_set_is_no_copy_there():
    check_on_fake_device(SetsANumber)


def test_an_error_while_a_step_is_made_is_its_own():
    with pytest.raises(ZeroDivisionError):
        check_on_fake_device(lambda device: 1 // 0)


SHAPE = (3, 4, 2)
PARTS = st.one_of(
    st.integers(-2, 1),
    st.builds(slice, st.none() | st.integers(-4, 3), st.none() | st.integers(-4, 4)),
    st.builds(slice, st.none(), st.none(), st.integers(1, 3)),
    st.lists(st.integers(-2, 1), min_size=2, max_size=2).map(torch.tensor),
)


@st.composite
def indices(draw: st.DrawFn) -> object:
    """At most three parts, with new axes among them, and often an ellipsis."""
    parts: list = draw(st.lists(PARTS, max_size=len(SHAPE)))
    for extra in draw(st.sampled_from([(), (None,), (...,), (..., None), (None, ..., None)])):
        parts.insert(draw(st.integers(0, len(parts))), extra)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@given(indices())
def test_an_index_is_read_as_torch_reads_it(index):
    """The operations that stand for an index on a fake device, on a CPU beside the index itself."""
    x = torch.arange(24).view(SHAPE)
    expected = x[index]
    assert torch.equal(fake_device._get(x, index), expected)
    for value in (7, -torch.arange(1, 1 + expected.numel()).view(expected.shape)):
        ours, theirs = x.clone(), x.clone()
        fake_device._set(ours, index, value)
        theirs[index] = value
        assert torch.equal(ours, theirs)


# --- any step ------------------------------------------------------------------------------------

N = 4
UNARY = {
    "t": lambda x: x.t(),
    "flip": lambda x: x.flip(0),
    "double": lambda x: x * 2,
    "rows": lambda x: x[1:3].repeat(2, 1),
    "first": lambda x: x[:, 0].expand(N, N),
    "sorted": lambda x: x.sort(dim=-1).values,
    "split": lambda x: torch.cat(x.split(1)[::-1]),
    "empty": lambda x: torch.empty_like(x).fill_(3),
}
BINARY = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y) if not overlaps(x) else x,
    "copy_": lambda x, y: x.copy_(y.clone()) if not overlaps(x) else x,
    "max": torch.maximum,
    "index_put": lambda x, y: x.index_put_((y[:, 0] % N,), y[0].clone()) if not overlaps(x) else x,
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9)), max_size=12
)


def overlaps(x: Tensor) -> bool:
    return 0 in x.stride()


class Program:
    """A random step on three buffers of whole numbers, so that all is exact."""

    def __init__(self, lines: list[tuple[str, int, int]]) -> None:
        self.lines = lines
        self.buffers = list(torch.arange(3 * N * N).view(3, N, N).clone().unbind())

    def __call__(self) -> None:
        pool = list(self.buffers)
        for name, i, j in self.lines:
            x, y = pool[i % len(pool)], pool[j % len(pool)]
            pool.append(UNARY[name](x) if name in UNARY else BINARY[name](x, y))
        for buffer, last in zip(self.buffers, pool[::-1], strict=False):
            buffer.copy_(last.clone())


@given(PROGRAMS)
def test_any_recorded_step_is_the_eager_one(lines):
    eager, recorded = Program(lines), Program(lines)
    check_same(Program(lines), times=2)
    replay = capture(recorded).replay
    for _ in range(4):
        eager()
        replay()
        assert equal(eager.buffers, recorded.buffers)
