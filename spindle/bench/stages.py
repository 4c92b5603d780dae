"""What `spindle bench device` does on its machine: five stages, each a row at a time.

A row is what one measurement or check gave: its `table`, its figures, and under `wrong`, in words,
what is not as it should be. So what was found before a stage fails, or takes too long, is kept.
"""

from __future__ import annotations

import hashlib
import math
import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import spindle
from spindle.bench import latency
from spindle.bench.gpu import Gpu, Raw, Work
from spindle.bench.kernel_checks import (
    NORM_EPS,
    Row,
    check_kernels,
    exact_attention,
    relative,
    short,
    smallest,
)
from spindle.config import ModelConfig
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.stats import StepTimes, percentile
from spindle.kernels import cuda, twins
from spindle.model.layers import Model
from spindle.model.weights import FAMILIES, RandomSource, load_hf
from spindle.serve.llm import LLM

Figures = dict[str, Any]


def attempt(about: Row, work: Callable[[], Figures]) -> Row:
    """The row of a measurement; one that fails says so in its row, and the stage goes on."""
    try:
        return about | work()
    except Exception as error:
        return about | {"wrong": f"{type(error).__name__}: {error}"}


# --- build: what is here, and the compilation ----------------------------------------------------


def build_stage(gpu: Gpu, model: str | None) -> Iterator[Row]:
    """The machine, the versions, and how long the kernels take to compile."""
    here: Row = {"spindle": spindle.__version__, "torch": torch.__version__}
    here |= {"python": platform.python_version(), "machine": platform.machine()}
    about: Row = gpu.about() | here
    for name, found in about.items():
        yield {"table": "machine", "what": name, "found": found}
    for name, compile_it in gpu.build():
        yield attempt({"table": "build", "what": name}, partial(_built, gpu, compile_it))


def _built(gpu: Gpu, compile_it: Work) -> Figures:
    made: list[Any] = []
    seconds = gpu.seconds(lambda: made.append(compile_it()))
    return {"seconds": seconds, "megabytes": made[0].stat().st_size / 1e6}


# --- kernels -------------------------------------------------------------------------------------


def kernels_stage(gpu: Gpu, model: str | None) -> Iterator[Row]:
    """`kernel_checks.py` has it."""
    return check_kernels(gpu)


# --- capture: recorded steps against run ones ----------------------------------------------------

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "min_tokens": 4},
}
REPLAYS = "replays against eager steps, 3 rows"
CHUNKS, BATCH = "chunks of given tokens", "LLM: recorded against run"


def capture_stage(gpu: Gpu, model: str | None) -> Iterator[Row]:
    """Engines, chunks and the batch, recorded and not: the same tokens, and the time of a step."""
    config = ModelConfig.from_dict(gpu.sizes.captured)
    for dtype in gpu.sizes.captured_dtypes:
        random_weights = random_model(config, dtype, gpu.device)
        with gpu.kernels():
            for wish in WISHES:
                about: Row = {"table": REPLAYS, "dtype": short(dtype), "sampling": wish}
                yield attempt(about, partial(_replays, gpu, random_weights, WISHES[wish]))
            about = {"table": CHUNKS, "dtype": short(dtype)}
            yield attempt(about, partial(_chunks, gpu, random_weights))
            about = {"table": BATCH, "dtype": short(dtype), "requests": gpu.sizes.requests}
            yield attempt(about, partial(_batch, gpu, random_weights))
        gpu.settle()


def _prompts(config: ModelConfig, count: int, longest: int) -> list[list[int]]:
    """Of all lengths from 1 to `longest`, the same each time."""
    chance = random.Random(0)
    lengths = [1 + (7 * n + longest - 1) % longest for n in range(count)]
    return [[chance.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def _pair(gpu: Gpu, model: Model, tokens: int) -> tuple[Engine, Engine]:
    """An engine that runs its steps, and one that replays them, with as much room."""
    eager, graph = (Engine(model, tokens, rows=3) for _ in range(2))
    eager.reserve(tokens)
    return eager, graphs.enable(graph, gpu.record)


def _replays(gpu: Gpu, model: Model, wish: dict[str, Any]) -> Figures:
    """As many steps of each, from the same prompts; then what a step takes."""
    count, prompts = gpu.sizes.replays, _prompts(model.config, 3, 20)
    engines = _pair(gpu, model, 20 + count + 1)
    eager, graph = (_tokens_of(engine, prompts, wish, count) for engine in engines)
    pairs = zip(eager, graph, strict=True)
    first = next((n for n, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
    off = max(float((a[1] - b[1]).abs().max()) for a, b in zip(eager, graph, strict=True))
    found: Figures = {
        "replays": count,
        "same_tokens": first is None,
        "largest_logit_difference": off,
    }
    found |= {
        f"{name}_step_ms": gpu.told(_step_ms(engine, prompts, wish, gpu.sizes.repeats))
        for name, engine in zip(latency.STEPS, engines, strict=True)
    }
    if first is not None:
        return found | {"wrong": f"other tokens from step {first} on"}
    return found if math.isfinite(off) else found | {"wrong": "logits are broken"}


def _tokens_of(
    engine: Engine, prompts: list[list[int]], wish: dict[str, Any], count: int
) -> list[tuple[list[int], Tensor]]:
    """The tokens of each step, the prompts' first, and the logits [R, V] that they came from."""
    tokens = engine.begin(prompts, SamplingParams(ignore_eos=True, **wish))
    seen = [(tokens.tolist(), engine.logits.float().clone())]
    for _ in range(count):
        tokens = engine.step(tokens)
        seen.append((tokens.tolist(), engine.logits.float().clone()))
    return seen


def _step_ms(
    engine: Engine, prompts: list[list[int]], wish: dict[str, Any], count: int
) -> float | None:
    """The median step, nobody waiting for a token in between."""
    tokens = engine.begin(prompts, SamplingParams(ignore_eos=True, **wish))
    engine.times = times = StepTimes(engine.model.device)
    for _ in range(count):
        tokens = engine.step(tokens)
    engine.times = None
    return percentile(times.ms(), 50)


def _chunks(gpu: Gpu, model: Model) -> Figures:
    """At several lengths, and after a rewind, as the check of drafts does it."""
    engines, prompts = _pair(gpu, model, 64), _prompts(model.config, 3, 20)
    for engine in engines:
        for row, prompt in enumerate(prompts):
            engine.prefill(prompt, row)
    off, chance = 0.0, torch.Generator().manual_seed(0)
    for size, kept in ((3, 1), (5, 5), (3, 3), (5, 0), (1, 1)):
        drawn = torch.randint(model.config.vocab_size, (3, size), generator=chance)
        tokens = drawn.to(model.device)
        eager, graph = (engine.chunk(tokens).float() for engine in engines)
        off = max(off, float((eager - graph).abs().max()))
        for engine in engines:
            for row in range(3):
                engine.rewind(engine.lengths[row] - size + kept, row)
    found = {"chunks": 5, "largest_logit_difference": off}
    limit = 16 * torch.finfo(model.dtype).eps * float(eager.abs().max())
    return found if off <= limit else found | {"wrong": f"logits are {off:.3g} apart"}


def _batch(gpu: Gpu, model: Model) -> Figures:
    """A batch of all kinds, in a pool that is too small for all at once.

    The passes of the two are of other sizes, so that logits may differ by their rounding: a token
    may, too, where two are as near as that.
    """
    prompts = _prompts(model.config, gpu.sizes.requests, 40)
    kinds = [WISHES[name] | {"ignore_eos": True} for name in WISHES]
    params = [
        SamplingParams(max_tokens=8 + 5 * n % 24, **kinds[n % len(kinds)])
        for n in range(len(prompts))
    ]
    answers: dict[str, list[list[int]]] = {}
    found: Figures = {}
    for name, wanted in (("run", False), ("recorded", gpu.record or True)):
        llm = LLM(model, num_blocks=24, max_seqs=6, max_model_len=96, graphs=wanted)
        seconds = gpu.seconds(partial(_answer, llm, prompts, params, answers, name))
        tokens = sum(len(ids) for ids in answers[name])
        found[f"{name}_tok_s"] = tokens / seconds if seconds else None
    found |= {"steps": llm.stats["steps"], "replayed": llm.stats["replayed"]}
    pairs = enumerate(zip(answers["run"], answers["recorded"], strict=True))
    others = [n for n, (ours, its) in pairs if ours != its]
    if not llm.stats["replayed"]:
        return found | {"wrong": "no step was replayed"}
    if not others:
        return found | {"same_answers": True}
    gaps = [_gap(model, prompts[n], answers["run"][n], answers["recorded"][n]) for n in others]
    found |= {"same_answers": False, "other_answers": len(others), "largest_gap": max(gaps)}
    far = max(gaps) > 16 * torch.finfo(model.dtype).eps
    strict = model.dtype == torch.float32  # in 16 bits a draw is soon on the other side of a token
    return found | ({"wrong": "tokens differ that are not near"} if far and strict else {})


def _answer(
    llm: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    answers: dict[str, list[list[int]]],
    name: str,
) -> None:
    answers[name] = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]


def _gap(model: Model, prompt: list[int], ours: list[int], its: list[int]) -> float:
    """How far apart the logits of two answers' first different tokens are, of the largest."""
    at = next(n for n, (a, b) in enumerate(zip(ours, its, strict=True)) if a != b)
    logits = Engine(model, len(prompt) + at + 1).prefill([*prompt, *ours[:at]])[0].float()
    return float((logits[ours[at]] - logits[its[at]]).abs() / logits.abs().max())


# --- bandwidth -----------------------------------------------------------------------------------

BANDWIDTH = "bandwidth, against a device copy"
SAMPLE = 64  # rows whose results are compared with the twin's
GOALS = {"norm": 0.85, "contiguous": 0.75, "16": 0.65}  # of the copy rate
WITHIN = 0.9  # of contiguous attention: paged, in blocks of 64


@dataclass(frozen=True)
class Job:
    """What is timed: one call, or several on tensors of their own, which take turns."""

    what: str
    shape: str
    moved_bytes: int  # read and written by one call
    works: list[Work]
    check: Callable[[], float]  # the largest error as a share of its bound
    goal: float | None = None  # share of the copy rate


def bandwidth_stage(gpu: Gpu, model: str | None) -> Iterator[Row]:
    """How fast the kernels move bytes, in bfloat16, on tensors larger than any cache."""
    gpu.need_kernels()
    copy = copy_bytes_per_s(gpu)
    about = {"table": BANDWIDTH, "what": "copy", "shape": f"{gpu.sizes.elements}"}
    yield about | {"gb_s": copy and copy / 1e9}
    for name, make in {
        "rms_norm": norm_job,
        "add_rms_norm": added_job,
        "silu_mul": silu_job,
    }.items():
        about = {"table": BANDWIDTH, "what": name}
        yield attempt(about, partial(_made_and_measured, gpu, make, copy))
        gpu.settle()
    for rows, keys, heads in gpu.sizes.attention:
        try:
            yield from attention_rows(gpu, rows, keys, heads, copy)
        except Exception as error:
            shape = f"{rows} rows of {keys}, {heads}"
            about = {"table": BANDWIDTH, "what": "attention", "shape": shape}
            yield about | {"wrong": f"{type(error).__name__}: {error}"}
        gpu.settle()


def copy_bytes_per_s(gpu: Gpu) -> float | None:
    """Bytes a second, read and written, of a copy within the device; the bound of all kernels."""
    pairs = [[noise(gpu, gpu.sizes.elements) for _ in range(2)] for _ in range(2)]
    ms = gpu.median_ms([partial(b.copy_, a) for a, b in pairs], gpu.sizes.repeats)
    return 4 * gpu.sizes.elements / ms * 1e3 if ms else None


def measured(gpu: Gpu, job: Job, copy: float | None) -> Figures:
    """The row of a job: how fast it is, also beside a copy, and whether it is right."""
    of_bound = job.check()
    ms = gpu.median_ms(job.works, gpu.sizes.repeats)
    rate = job.moved_bytes / ms * 1e3 if ms else None
    found = {"what": job.what, "shape": job.shape, "megabytes": job.moved_bytes / 1e6, "ms": ms}
    found |= {"gb_s": rate and rate / 1e9, "of_copy": rate / copy if rate and copy else None}
    found |= {"goal": job.goal, "error_of_its_bound": of_bound}
    if rate and copy and job.goal:
        found["reached"] = rate / copy >= job.goal
    return found if of_bound <= 1 else found | {"wrong": f"{of_bound:.3g} times the bound"}


def _made_and_measured(gpu: Gpu, make: Callable[[Gpu], Job], copy: float | None) -> Figures:
    return measured(gpu, make(gpu), copy)


def noise(gpu: Gpu, *shape: int) -> Tensor:
    """Normal numbers in bfloat16, drawn on the device."""
    return torch.empty(shape, dtype=torch.bfloat16, device=gpu.device).normal_(generator=gpu.chance)


def _of_bound(ours: Tensor, exact: Tensor, off: float) -> float:
    """The largest error as a share of what it may be: `off` of the exact result, and rounding."""
    bound = exact.abs() * off + 4 * smallest(ours.dtype)
    share = ((ours.double() - exact).abs() / bound).max()
    return float(share.nan_to_num(nan=math.inf))


def _rows(gpu: Gpu, width: int) -> int:
    return max(gpu.sizes.elements // width, 1)


def norm_job(gpu: Gpu) -> Job:
    """rms_norm of rows as wide as an 8B model."""
    E, _ = gpu.sizes.wide
    x, weight = [noise(gpu, _rows(gpu, E), E) for _ in range(2)], noise(gpu, E)

    def check() -> float:
        ours = cuda.rms_norm(x[0], weight, NORM_EPS)[:SAMPLE]
        exact = twins.rms_norm(x[0][:SAMPLE].double(), weight.double(), NORM_EPS)
        return _of_bound(ours, exact, relative(ours.dtype, E / 2 + 8, 2))

    works: list[Work] = [partial(cuda.rms_norm, one, weight, NORM_EPS) for one in x]
    return Job("rms_norm", f"{_rows(gpu, E)}x{E}", 2 * x[0].nbytes, works, check, GOALS["norm"])


def added_job(gpu: Gpu) -> Job:
    """add_rms_norm: two tensors in, two out. The residual grows by x with each call."""
    E, _ = gpu.sizes.wide
    pairs = [[noise(gpu, _rows(gpu, E), E) for _ in range(2)] for _ in range(2)]
    weight = noise(gpu, E)

    def check() -> float:
        x, residual = pairs[0]
        total = (residual[:SAMPLE] + x[:SAMPLE]).double()
        ours = cuda.add_rms_norm(x, residual, weight, NORM_EPS)[0][:SAMPLE]
        exact = twins.rms_norm(total, weight.double(), NORM_EPS)
        return _of_bound(ours, exact, relative(ours.dtype, E / 2 + 8, 2))

    works: list[Work] = [
        partial(cuda.add_rms_norm, x, residual, weight, NORM_EPS) for x, residual in pairs
    ]
    size = pairs[0][0].nbytes
    return Job("add_rms_norm", f"{_rows(gpu, E)}x{E}", 4 * size, works, check, GOALS["norm"])


def silu_job(gpu: Gpu) -> Job:
    """silu_mul: two in, one out."""
    _, F = gpu.sizes.wide
    rows = _rows(gpu, 2 * F)
    given = [noise(gpu, rows, 2 * F) for _ in range(2)]

    def check() -> float:
        ours = cuda.silu_mul(given[0])[:SAMPLE]
        exact = twins.silu_mul(given[0][:SAMPLE].double())
        return _of_bound(ours, exact, relative(ours.dtype, 8, 2))

    works: list[Work] = [partial(cuda.silu_mul, one) for one in given]
    return Job("silu_mul", f"{rows}x{2 * F}", given[0].nbytes * 3 // 2, works, check, GOALS["norm"])


def attention_rows(
    gpu: Gpu, rows: int, keys: int, heads: tuple[int, int, int], copy: float | None
) -> Iterator[Row]:
    """One query a row over full rows: contiguous, then the same keys in shuffled blocks."""
    H, Hk, D = heads
    caches = [[noise(gpu, rows, keys, Hk, D) for _ in range(2)] for _ in range(2)]
    q, lengths = noise(gpu, rows, H, D), torch.full((rows,), keys, device=gpu.device)
    shape, scale = f"{rows} rows of {keys}, {H}/{Hk} heads of {D}", D**-0.5
    moved = 2 * caches[0][0].nbytes + 2 * q.nbytes
    tables = torch.arange(rows, device=gpu.device)[:, None]
    whole = cuda.paged_attend(q, caches[0][0], caches[0][1], tables, lengths, scale)
    speed: float | None = None
    for size in (None, 16, 64):
        found, order = caches, tables
        if size:
            found, order = _in_blocks(caches, rows, size)
        works: list[Work] = [
            partial(cuda.paged_attend, q, k, v, order, lengths, scale) for k, v in found
        ]
        check = partial(_attended, works[0], whole, q, caches[0], keys, scale)
        name = f"attention, blocks of {size}" if size else "attention, contiguous"
        goal = WITHIN * speed if size == 64 and speed else GOALS.get(str(size or "contiguous"))
        about = {"table": BANDWIDTH, "what": name, "shape": shape}
        row = attempt(
            about, partial(measured, gpu, Job(name, shape, moved, works, check, goal), copy)
        )
        speed = row.get("of_copy") if size is None else speed
        yield row


def _in_blocks(
    caches: list[list[Tensor]], rows: int, size: int
) -> tuple[list[list[Tensor]], Tensor]:
    """The same keys and values in shuffled blocks, and the tables [rows, B] that find them."""
    first = caches[0][0]
    count = rows * first.shape[1] // size
    order = torch.randperm(count, device=first.device)
    places = order.argsort()  # of block n of the new pool, which of the old it holds
    moved = [[x.view(count, size, *x.shape[2:])[places] for x in pair] for pair in caches]
    return moved, order.view(rows, -1)


def _attended(
    work: Work, whole: Tensor, q: Tensor, cache: list[Tensor], keys: int, scale: float
) -> float:
    """The first row's error; infinite if not all bits are those of the contiguous result."""
    ours = work()
    assert isinstance(ours, Tensor)
    if not torch.equal(ours, whole):
        return math.inf
    one = torch.zeros(1, 1, dtype=torch.int64, device=q.device)
    length = torch.full((1,), keys, device=q.device)
    exact, bound = exact_attention(q[:1], cache[0][:1], cache[1][:1], one, length, scale)
    return float(((ours[:1].double() - exact).abs() / bound).max().nan_to_num(nan=math.inf))


# --- latency -------------------------------------------------------------------------------------


class DeviceSource(RandomSource):
    """Random weights that are drawn where they are: 8 billion of them take no time on a GPU."""

    def fill(self, out: Tensor, name: str) -> None:
        """As in RandomSource, by another generator."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        chance = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
        if out.ndim > 1:
            out.normal_(0.0, self._scale, generator=chance)
        else:
            out.normal_(0.0 if name.endswith("bias") else 1.0, 0.1, generator=chance)


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """A model of this shape; its logits have a standard deviation of about 2."""
    source = DeviceSource(config, 0, dtype, device, 2.0)
    return FAMILIES[config.model_type](config, source)


def latency_stage(gpu: Gpu, model: str | None) -> Iterator[Row]:
    """One stream in four corners: random weights in the shapes of models, and a checkpoint."""
    copy = copy_bytes_per_s(gpu)
    gpu.settle()
    makers: list[tuple[str, Callable[[], Model]]] = [
        (f"{name}, {short(dtype)}", partial(_of_shape, raw, dtype, gpu.device))
        for name, raw, dtype in gpu.sizes.shapes
    ]
    if model is not None:
        makers.append((model, partial(load_hf, model, gpu.device)))
    for name, make in makers:
        try:
            yield from _stream_rows(gpu, name, make, copy)
        except Exception as error:
            yield {"table": f"latency, {name}", "wrong": f"{type(error).__name__}: {error}"}
        gpu.settle()


def _of_shape(raw: Raw, dtype: torch.dtype, device: torch.device) -> Model:
    return random_model(ModelConfig.from_dict(raw), dtype, device)


def _stream_rows(
    gpu: Gpu, name: str, make: Callable[[], Model], copy: float | None
) -> Iterator[Row]:
    """A row for each corner, and one for what a token reads."""
    sizes, chance = gpu.sizes, random.Random(1)
    prompt = [chance.randrange(90) for _ in range(sizes.prompt)]
    with gpu.kernels():
        found = []
        for corner in latency.corners(make, prompt, sizes.new, gpu.record):
            tried = attempt({}, partial(_warmed, corner, prompt))
            if tried:
                yield {"table": f"latency, {name}", "corner": corner.name} | tried
            else:
                found.append(corner)
        if not found:
            return
        result = latency.compare(found, prompt, sizes.new, sizes.turns, lambda: copy or math.inf)
        form = latency.fused_form(gpu.device)
    size, table = result["bytes"], f"latency, {name}"
    floor_ms = size["token"] / copy * 1e3 if copy else None
    for corner, its in result["corners"].items():
        where = result["tokens"][corner]
        figures = ("step_p50_ms", "step_p99_ms", "tok_s", "of_read_speed")
        row = {"table": table, "corner": corner, "operations": its["operations"]}
        row |= {figure: gpu.told(its[figure]) for figure in figures}
        row |= {"same_tokens": where is None, "gap": where["gap"] if where else None}
        yield row | {"floor_ms": floor_ms, "token_megabytes": size["token"] / 1e6, "fused": form}


def _warmed(corner: latency.Corner, prompt: list[int]) -> Figures:
    """Nothing to report: its first turn went well, in which all is built and captured."""
    corner.take_turn(prompt, latency.WARM_UP)
    return {}


Stage = Callable[[Gpu, str | None], Iterator[Row]]
STAGES: dict[str, Stage] = {
    "build": build_stage,
    "kernels": kernels_stage,
    "capture": capture_stage,
    "bandwidth": bandwidth_stage,
    "latency": latency_stage,
}
