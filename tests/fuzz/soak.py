"""Thousands of requests of every kind through small engines: what is held, grows, and is said.

    python tests/fuzz/soak.py --count 20000              all engines, so many requests together
    python tests/fuzz/soak.py --seed 3 --only swap       one engine again, with that seed

An engine has a pool that is too small for its load, and gets answers of one and of several, beam
searches, streams that are read, closed or let go of, aborts, calls that are refused, requests that
end with an error, and a Ctrl-C now and then. It is left to become idle again and again, and then
nothing may be held. A share of the answers is compared with what they are alone.

What grows is counted, not timed: Python's allocated memory blocks between two idle moments, and the
function calls of the same requests at the beginning and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil
import torch
from tqdm import tqdm

from fuzz import weird
from fuzz.calls import TEXTS, World, good_prompt, good_sampling, idle, state
from spindle import LLM, Engine, SamplingParams
from spindle.decode.drafters import ModelDrafter
from spindle.errors import SpindleError
from spindle.model.weights import random_model

WARM = 20  # requests of each engine before anything is counted
BURST = 60  # requests between two idle moments
UNFINISHED = 12  # requests that are on their way at once, about
SHARE = 0.4  # of the answers that are compared with what they are alone
CTRL_C = 0.01  # of the parts of a step that begin with one
# A request that left one object behind would show as one block; half of that is a finding. The rest
# is what tables that grow in jumps, and caches that fill up once, may take.
BLOCKS_A_REQUEST, BLOCKS = 0.5, 150
RSS_BYTES = 32 * 2**20  # the allocator's own reserves; the pools of all engines are smaller

ENGINES: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": dict(preemption="swap"),
    "little host": dict(preemption="swap", host_blocks=5),
    "no prefixes": dict(prefix_cache=False),
    "static": dict(policy="static"),
    "ngram": dict(speculate="ngram", k=3),
    "ngram swap": dict(speculate="ngram", k=3, preemption="swap"),
    "draft": dict(speculate="draft", k=3, adaptive_k=False),
    "draft swap": dict(speculate="draft", k=2, preemption="swap"),
}


class Cheap(ModelDrafter):
    """A draft model that is said to cost little, so that it pays, whatever its size."""

    def cost(self, target: Any) -> float:
        return 0.05


@dataclass
class Asked:
    """A request that is on its way, and whether it is to be compared."""

    prompt: Any
    params: SamplingParams
    checked: bool
    aborted: bool = False


@dataclass
class Result:
    """What a soak of one engine came to."""

    name: str
    seed: int
    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    blocks: list[int] = field(default_factory=list)  # allocated, at each idle moment
    calls: tuple[int, int] = (0, 0)  # of the same requests: at first, at the end
    seconds: list[float] = field(default_factory=list)  # of each burst
    rss_bytes: tuple[int, int] = (0, 0)


class Soak:
    """One engine, and the requests that it is given."""

    def __init__(self, world: World, name: str, seed: int) -> None:
        self.world, self.rng = world, Random(f"{name} {seed}")
        self.options = dict(ENGINES[name])
        self.llm = self.make(num_blocks=18)
        self.asked: dict[str, Asked] = {}
        self.streams: list[tuple[Any, Asked, list[int]]] = []
        self.streamed: set[str] = set()  # their names, of which `step` tells too
        self.result = Result(name, seed)
        self.armed = False
        for part in ("schedule", "commit"):
            self.break_off(self.llm.scheduler, part)
        for part in ("move", "run"):
            self.break_off(self.llm._runner, part)

    def make(self, **options: Any) -> LLM:
        """An engine of the kind."""
        usual = dict(max_model_len=40, max_seqs=8, max_batch_tokens=32, block_size=4)
        given = usual | self.options | options
        if given.get("speculate") == "draft":
            given["speculate"] = Cheap(Engine(draft_model(self.world)))
        return LLM(self.world.model, tokenizer=self.world.tokenizer, **given)

    def break_off(self, owner: Any, name: str) -> None:
        """Let a method begin with a Ctrl-C now and then."""
        method = getattr(owner, name)

        def interrupted(*args: Any) -> Any:
            if self.armed and self.rng.random() < CTRL_C:
                self.result.kinds["Ctrl-C"] += 1
                signal.raise_signal(signal.SIGINT)
            return method(*args)

        setattr(owner, name, interrupted)

    # One thing after another.

    def run(self, count: int, progress: Callable[[int], object]) -> Result:
        """So many requests; AssertionError: a finding."""
        result = self.result
        self.probe()
        first = self.probe()
        while result.requests < count:
            begun, before = time.monotonic(), result.requests
            self.burst(min(count, result.requests + BURST))
            result.seconds.append(time.monotonic() - begun)
            result.blocks.append(self.allocated())
            progress(result.requests - before)
        result.calls = first, self.probe()
        result.kinds["draft accepted"] = self.llm.stats["accepted"]
        check_growth(result)
        return result

    def burst(self, until: int) -> None:
        """Requests up to this number, and then the way to an idle engine."""
        self.armed = True
        while self.result.requests < until:
            action = self.rng.choice(ACTIONS)
            self.result.kinds[action.__name__] += 1
            with contextlib.suppress(KeyboardInterrupt):
                action(self)
            while len(self.asked) + len(self.streams) > self.rng.randint(1, UNFINISHED):
                self.step()
                self.read_streams()
        self.armed = False
        while self.streams:
            self.read_streams()
        for _ in range(3000):
            if not self.llm.has_unfinished:
                break
            self.step()
        assert not self.asked, f"without an end: {list(self.asked)}"
        self.streamed.clear()
        self.check_idle()

    def step(self) -> None:
        try:
            outputs = self.llm.step()
        except KeyboardInterrupt:
            return
        finally:
            self.llm.scheduler.check()
        for output in outputs:
            if output.finished and output.request_id not in self.streamed:
                self.ended(output)

    def check_idle(self) -> None:
        """Nothing is held: no block of the pool or of the host's, no name, no text."""
        llm = self.llm
        idle(llm)
        assert not llm.scheduler.waiting and not llm.scheduler.running
        for pool in (llm._kv.pool, llm._kv.host):
            if pool is not None:
                pool.check([])
                pool.clear()
                assert pool.free == pool.num_blocks, "blocks that nobody has are not free"

    def allocated(self) -> int:
        """Memory blocks that Python has given out, with nothing that could still be freed."""
        gc.collect()
        return sys.getallocatedblocks()

    def probe(self) -> int:
        """Function calls that the same few requests take, in an idle engine."""
        params = [
            SamplingParams(max_tokens=6, temperature=n % 2, seed=n, stop="\0", n=1 + n % 2)
            for n in range(5)
        ]
        self.llm._kv.pool.clear()
        with counted_calls() as calls:
            self.llm.generate([[n + 3] * 7 for n in range(5)], params)
        self.check_idle()
        return calls[0]

    # What an answer has to be.

    def ended(self, output: Any) -> None:
        """A request that has ended: once, with all its answers, and as it is alone."""
        self.result.kinds["preemption"] += output.metrics.preemptions
        self.result.kinds["found in the cache"] += output.metrics.cached_tokens > 0
        self.result.kinds["ended in error"] += output.outputs[0].finish_reason == "error"
        asked = self.asked.pop(output.request_id)
        self.compare(asked, output.outputs, complete=not asked.aborted)

    def compare(self, asked: Asked, answers: list[Any], complete: bool) -> None:
        params = asked.params
        assert all(one.finish_reason for one in answers)
        if complete:
            assert len(answers) == params.n
        most = params.max_tokens
        assert all(len(one.token_ids) <= most for one in answers)
        if not asked.checked or (params.selects and not complete):
            return
        self.result.compared += 1
        alone = {one.index: one for one in self.alone(asked.prompt, params)}
        for one in answers:
            right = alone[one.index]
            if one.finish_reason == "abort":
                ids = right.token_ids[: len(one.token_ids)]
                assert one.token_ids == ids, "an aborted answer is no beginning of what it is alone"
                continue
            said = (one.token_ids, one.text, one.finish_reason, one.stop_reason)
            expected = (right.token_ids, right.text, right.finish_reason, right.stop_reason)
            assert said == expected, f"{said} alone is {expected}: {asked}"
            assert (one.logprobs is None) == (params.logprobs is None)

    def alone(self, prompt: Any, params: SamplingParams) -> list[Any]:
        """The answers from an engine of the kind that has nothing else to do."""
        if params.selects or self.options.get("speculate") == "draft":
            return self.make(num_blocks=60).generate([prompt], params)[0].outputs
        llm = LLM(
            self.world.model,
            tokenizer=self.world.tokenizer,
            max_model_len=40,
            max_seqs=4,
            num_blocks=60,
        )
        return llm.generate([prompt], params)[0].outputs

    # Streams.

    def read_streams(self) -> None:
        """A delta or two of each; some are closed, or let go of, before they end."""
        for entry in self.streams[:]:
            stream, asked, ids = entry
            left = self.armed and self.rng.random() < 0.08
            with contextlib.suppress(KeyboardInterrupt):
                if left and self.rng.random() < 0.5:
                    stream.close()
                delta = None if left else next(stream, None)
                if delta is not None:
                    ids += delta.token_ids
                    continue
                self.streams.remove(entry)
                if not left and asked.checked:
                    self.result.compared += 1
                    (right,) = self.alone(asked.prompt, asked.params)
                    assert ids == right.token_ids, "a stream is not what it is alone"


# What a user does.


def add(soak: Soak) -> None:
    """A request of one answer or of several, of the likeliest of several, of every parameter."""
    prompt, params = a_prompt(soak), some_params(soak.rng)
    soak.result.requests += 1
    name = soak.llm.add(prompt, params)
    soak.asked[name] = Asked(prompt, params, soak.rng.random() < SHARE)


def a_prompt(soak: Soak) -> Any:
    """Texts, and ids that often begin alike, so that something is found in the cache."""
    if soak.rng.random() < 0.4:
        return good_prompt(soak.rng)
    return [*range(20, 20 + soak.rng.randrange(14)), soak.rng.randrange(262)]


def some_params(rng: Random, several: bool = True) -> SamplingParams:
    given = good_sampling(rng) | dict(max_tokens=rng.randint(1, 16))
    if several and given["temperature"] and rng.random() < 0.4:
        given["n"] = rng.randint(1, 3)
        if rng.random() < 0.4:
            given["best_of"] = rng.randint(given["n"], 4)
    return SamplingParams(**given)


def add_to_end_in_error(soak: Soak) -> None:
    """Every token would end the answer, and min_tokens forbids it: nothing can be sampled."""
    every = list(range(soak.world.model.config.vocab_size))
    params = SamplingParams(max_tokens=8, min_tokens=8, stop_token_ids=every, seed=0)
    soak.result.requests += 1
    soak.asked[soak.llm.add([5, 6, 7], params)] = Asked([5, 6, 7], params, True)


def stream(soak: Soak) -> None:
    prompt, params = a_prompt(soak), some_params(soak.rng, several=False)
    soak.result.requests += 1
    opened = soak.llm.stream(prompt, params)
    soak.streamed.add(opened._name)
    soak.streams.append((opened, Asked(prompt, params, soak.rng.random() < SHARE), []))


def abort(soak: Soak) -> None:
    """A request on its way; what it has is the beginning of what it is alone."""
    if not soak.asked:
        return
    name = soak.rng.choice(list(soak.asked))
    soak.asked[name].aborted = True
    output = soak.llm.abort(name)
    if output is None:  # it has ended, and the next step will say so
        soak.asked[name].aborted = False
    else:
        soak.ended(output)


def generate(soak: Soak) -> None:
    prompts = [a_prompt(soak) for _ in range(soak.rng.randint(1, 3))]
    params = [some_params(soak.rng) for _ in prompts]
    soak.result.requests += len(prompts)
    outputs = soak.llm.generate(prompts, params)
    for prompt, its, output in zip(prompts, params, outputs, strict=True):
        soak.compare(Asked(prompt, its, soak.rng.random() < SHARE), output.outputs, True)


def beam_search(soak: Soak) -> None:
    prompt, width, most = a_prompt(soak), soak.rng.randint(1, 2), soak.rng.randint(0, 6)
    soak.result.requests += 1
    found = soak.llm.beam_search(prompt, width, most).outputs
    if soak.rng.random() < SHARE:
        soak.result.compared += 1
        right = soak.make(num_blocks=60).beam_search(prompt, width, most).outputs
        assert [one.token_ids for one in found] == [one.token_ids for one in right]


def chat(soak: Soak) -> None:
    soak.result.requests += 1
    talk = [{"role": "user", "content": soak.rng.choice(TEXTS[:3])}]
    soak.llm.chat(talk, some_params(soak.rng))


def be_refused(soak: Soak) -> None:
    """A call with something odd in it: refused, and nothing changes, or it works."""
    value, before = weird.value(soak.rng), state(soak.llm)
    soak.result.requests += 1
    try:
        if soak.rng.random() < 0.5:
            name = soak.llm.add(value, SamplingParams(max_tokens=2))
        else:
            params = replace(SamplingParams(), **{soak.rng.choice(["stop", "n", "seed"]): value})
            name = soak.llm.add([1, 2], params)
    except SpindleError:
        assert state(soak.llm) == before, "refused, and changed"
    else:
        soak.llm.abort(name)


def several_steps(soak: Soak) -> None:
    for _ in range(soak.rng.randint(1, 12)):
        soak.step()


ACTIONS: list[Callable[[Soak], None]] = [
    *(add,) * 9,
    *(stream,) * 3,
    *(abort,) * 2,
    *(generate, beam_search, chat, be_refused, add_to_end_in_error, several_steps),
]


# What grows.


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Function calls of the block, Python's and C's: a list of their number.

    Without those of the garbage collection, for which others may have left callbacks.
    """
    calls, before, collects = [0], sys.getprofile(), gc.isenabled()

    def count(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def check_growth(result: Result) -> None:
    """Neither memory nor work grows from the middle to the end."""
    half = len(result.blocks) // 2
    grown, requests = result.blocks[-1] - result.blocks[half - 1], result.requests / 2
    if half:
        bound = BLOCKS_A_REQUEST * requests + BLOCKS
        assert grown <= bound, f"{grown} blocks of memory more after {requests:.0f} requests"
    first, last = result.calls
    most = first + first // 100  # a few are those of others in the process
    assert last <= most, f"{last} function calls for what took {first} at first"


def draft_model(world: World) -> Any:
    """A smaller model of the same tokens, which says something else."""
    from dataclasses import replace as changed

    return random_model(changed(world.model.config, num_layers=1), seed=5, dtype=torch.float64)


# All of them.


def soak_all(
    count: int, seed: int, only: str | None, progress: Callable[[int], object]
) -> Iterator[Result | str]:
    """The engines one after another, each with its share: a result, or a finding in words."""
    names = [only] if only else list(ENGINES)
    with tempfile.TemporaryDirectory(prefix="fuzz-soak-") as folder:
        world = World(Path(folder))
        warm(world)
        for at, name in enumerate(names):
            share = count // len(names) + (at < count % len(names))
            rss = rss_bytes()
            soak = Soak(world, name, seed)
            try:
                result = soak.run(share, progress)
            except Exception as error:
                done = soak.result.requests
                yield f"{name}, after {done} requests: {type(error).__name__}: {error}"
                raise
            result.rss_bytes = rss, rss_bytes()
            yield result


def warm(world: World) -> None:
    """Have imports, first calls and what Python keeps of every type behind us."""
    for name in ENGINES:
        soak = Soak(world, name, 0)
        soak.burst(WARM)
    odd = [*weird.NUMBERS, *weird.TEXTS, *(make() for make in weird.ALL)]
    for value in odd:
        for refused in (lambda v=value: soak.llm.add(v), lambda v=value: SamplingParams(stop=v)):
            with contextlib.suppress(SpindleError):
                refused()
    soak.make()


def rss_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def in_words(result: Result) -> str:
    half, end = result.blocks[max(0, len(result.blocks) // 2 - 1)], result.blocks[-1]
    quarter = max(1, len(result.seconds) // 4)
    early, late = sum(result.seconds[:quarter]), sum(result.seconds[-quarter:])
    mega = [number / 1e6 for number in result.rss_bytes]
    return (
        f"{result.name:12} {result.requests:6} requests, {result.compared:5} compared; memory "
        f"blocks {half} -> {end}, rss {mega[0]:.0f} -> {mega[1]:.0f} MB, calls {result.calls[0]} "
        f"-> {result.calls[1]}, seconds of the first and last quarter {early:.1f}, {late:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="many requests through small engines")
    parser.add_argument("--seed", type=int, default=0, help="what comes when")
    parser.add_argument("--count", type=int, default=1000, help="requests (default: 1000)")
    parser.add_argument("--only", choices=list(ENGINES), help="one engine")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"seed {args.seed}, {args.count} requests")
    kinds, rss = Counter[str](), list[int]()
    begun = time.monotonic()
    try:
        with tqdm(total=args.count, disable=None, unit="req") as bar:
            for result in soak_all(args.count, args.seed, args.only, bar.update):
                if isinstance(result, str):
                    again = f"python tests/fuzz/soak.py --count {args.count} --seed {args.seed}"
                    bar.write(f"finding: {result}\n  {again}")
                    continue
                bar.write(in_words(result))
                kinds += result.kinds
                rss += result.rss_bytes
    except Exception:
        import traceback

        traceback.print_exc()
        return 1
    told = [f"{number} {kind.replace('_', ' ')}" for kind, number in kinds.most_common()]
    print(", ".join(told))
    print(f"{time.monotonic() - begun:.0f} s, rss {rss[1] / 1e6:.0f} -> {rss[-1] / 1e6:.0f} MB")
    if rss[-1] - rss[1] > RSS_BYTES:  # the first engine brings what all have
        print(f"finding: {(rss[-1] - rss[1]) / 1e6:.0f} MB more from the first engine to the last")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
