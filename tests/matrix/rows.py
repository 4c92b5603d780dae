"""The rows: how the engine is made for each feature, and by what one sees that it happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from matrix.models import Subject
from matrix.streams import serve_one_by_one
from matrix.traffic import Asked, Served, serve
from spindle import LLM, Engine
from spindle.decode import graphs
from spindle.decode.drafters import ModelDrafter, NgramDrafter
from spindle.kernels import emulate, native
from spindle.model.layers import layer_weights

Options = dict[str, Any]
Touched = Callable[[Served], set[int]]
Calls = list[str]  # names of kernels that were called

# --- what happened, and to which requests --------------------------------------------------------


def all_of(served: Served) -> set[int]:
    return set(range(len(served.asked)))


def hit(served: Served) -> set[int]:
    """Requests that found a part of their prompt in the cache."""
    return {n for n, one in enumerate(served.outputs) if one.metrics.cached_tokens > 0}


def chunked(served: Served) -> set[int]:
    """Requests whose prompt took more than one step."""
    chunks = [chunk for plan in served.plans for chunk in plan.chunks]
    return served.of([c for c in chunks if c.stop < len(c.sequence.request.prompt)])


def mixed(served: Served) -> set[int]:
    """Requests that were in a step with a prompt and somebody's next token."""
    found = set[int]()
    for plan in served.plans:
        begins = [chunk.start < len(chunk.sequence.request.prompt) for chunk in plan.chunks]
        if any(begins) and not all(begins):
            found |= served.of(plan.chunks)
    return found


def preempted(served: Served) -> set[int]:
    return {n for n, one in enumerate(served.outputs) if one.metrics.preemptions > 0}


def recomputed(served: Served) -> set[int]:
    """Requests that were preempted, where nothing was swapped."""
    return set() if any(plan.swap_out for plan in served.plans) else preempted(served)


def swapped(served: Served) -> set[int]:
    """Requests that were preempted, where blocks went out and came in."""
    both = any(p.swap_out for p in served.plans) and any(p.swap_in for p in served.plans)
    return preempted(served) if both else set()


def forked(served: Served) -> set[int]:
    """Requests with several answers, where blocks that they share were copied for a write."""
    copied = any(plan.copies for plan in served.plans)
    return {n for n, one in enumerate(served.asked) if one.params.n > 1 and copied}


def searched(served: Served) -> set[int]:
    """Beam searches; of several beams, those that were in a step together."""
    together = {
        chunk.sequence.request.id
        for plan in served.plans
        for chunk in plan.chunks
        if sum(c.sequence.request is chunk.sequence.request for c in plan.chunks) > 1
    }
    pairs = enumerate(zip(served.asked, served.outputs, strict=True))
    return {n for n, (a, o) in pairs if a.width == 1 or (a.width > 1 and o.request_id in together)}


def drafted(served: Served) -> set[int]:
    """Requests that took over drafts, where other drafts were rejected."""
    counts = {n: one.metrics.speculation for n, one in enumerate(served.outputs)}
    some = any(one.accepted < one.judged for one in counts.values() if one)
    return {n for n, one in counts.items() if one and one.accepted} if some else set()


def replayed(served: Served) -> set[int]:
    """All of them, where a recorded step was replayed."""
    return all_of(served) if served.stats["replayed"] > 0 else set()


def called(*names: str) -> Touched:
    """All of them, where each of these kernels was called."""
    return lambda served: all_of(served) if set(names) <= set(served.calls) else set()


def streamed(served: Served) -> set[int]:
    """Requests whose answers are an Engine's, and longer than what follows from the prompt."""
    longer = {n for n, one in enumerate(served.outputs) if len(one.outputs[0].token_ids) > 1}
    return longer if "stream" in served.calls else set()


def beyond(least: int, *names: str) -> Touched:
    """Requests with so many ids in their prompts, where each of these kernels was called."""
    return lambda served: {n for n in called(*names)(served) if len(served.asked[n].prompt) > least}


def kept_waiting(served: Served) -> set[int]:
    """Requests that began after a step in which there was a seat for them, and no new batch."""
    begun, seats, free = set[str](), served.options.get("max_seqs", 0), False
    late = set[int]()
    for plan in served.plans:
        new = [c for c in plan.chunks if c.sequence.request.id not in begun]
        late |= served.of(new) if free else set()
        begun |= {chunk.sequence.request.id for chunk in new}
        free = sum(not chunk.filler for chunk in plan.chunks) < seats
    return late if served.options.get("policy") == "static" else set()


def in_company(served: Served) -> set[int]:
    """Requests that shared a step with another one, where that may not change their bits."""
    if not served.options.get("batch_invariant"):
        return set()
    steps = [plan.chunks for plan in served.plans]
    shared = [s for s in steps if len({chunk.sequence.request.id for chunk in s}) > 1]
    return set().union(*map(served.of, shared))


FEATURES = (hit, chunked, mixed, preempted, forked, drafted, replayed)


def combined(served: Served, least: int) -> set[int]:
    """Requests to which so many of the features happened, or more."""
    happened = [feature(served) for feature in FEATURES]
    return {n for n in all_of(served) if sum(n in its for its in happened) >= least}


# --- the environment -----------------------------------------------------------------------------


@contextmanager
def emulated(calls: Calls) -> Iterator[None]:
    """The CUDA sources on the CPU, threads in a random order; `calls` hears of each launch."""
    call = emulate.call

    def heard(library: Any, launcher: str, *arguments: Any) -> None:
        calls.append(launcher.removeprefix("spindle_"))
        call(library, launcher, *arguments)

    emulate.call = heard
    try:
        with emulate.ops_emulated(), emulate.thread_order("random", 1):
            yield
    finally:
        emulate.call = call


@contextmanager
def natively(calls: Calls) -> Iterator[None]:
    """The native forms; `calls` hears of each call that Python makes."""
    with native.noting() as noted:
        yield
    calls += [call.name for call in noted]


# --- the engine ----------------------------------------------------------------------------------


def serve_together(subject: Subject, options: Options, asked: Sequence[Asked]) -> Served:
    """In an LLM; options: beside the usual."""
    options = usual(subject, asked) | options
    return replace(serve(LLM(subject.ours, **options), asked), options=options)


def usual(subject: Subject, asked: Sequence[Asked]) -> Options:
    """Room for all, a prompt whole, and none of the features."""
    return dict(
        max_model_len=min(320, subject.ours.config.max_positions),
        max_seqs=6,
        max_batch_tokens=512,
        block_size=4,
        num_blocks=blocks(asked, 4) * 6,
        prefix_cache=False,
        graphs=False,
        trace=100_000,
    )


def blocks(asked: Sequence[Asked], size: int) -> int:
    """The fewest blocks with which each of the requests can run by itself."""
    return max(sequences * -(-length // size) for sequences, length in (a.blocks for a in asked))


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A feature. options(rng, subject, asked): what the engine is made with, beside the usual."""

    name: str
    says: str  # what happens, for the page
    seen_by: str  # what has to be seen of it, for the page
    options: Callable[[random.Random, Subject, Sequence[Asked]], Options]
    touched: Touched
    dtype: torch.dtype = torch.float64
    int8: bool = False
    answers: tuple[int, ...] = (1,)
    beams: bool = False
    around: Callable[[Calls], AbstractContextManager[None]] = lambda calls: nullcontext()
    most: int = 12  # tokens of an answer
    count: int = 6  # requests of a schedule
    apart: int = 3  # steps between those that come, at most
    least: int = 0  # ids that all prompts begin with
    size: str = "large"  # of the models
    law_count: int = 48  # answers of a schedule that are drawn for the law alone
    serves: Callable[[Subject, Options, Sequence[Asked]], Served] = serve_together

    def serve(self, rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Served:
        """The requests in an engine with the feature."""
        calls = ["integers"] * is_int8(subject)
        with self.around(calls):
            served = self.serves(subject, self.options(rng, subject, asked), asked)
        return replace(served, calls=[*calls, *served.calls])


def prefix_hit(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    return dict(prefix_cache=True, block_size=rng.choice([1, 2]), num_blocks=200)


def chunked_prefill(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    seats = max(4, *(one.params.n for one in asked))
    return dict(max_seqs=seats, max_batch_tokens=seats)


def mixed_steps(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    return dict(max_seqs=6, block_size=rng.choice([1, 4, 16]), num_blocks=400)


def small_pool(
    rng: random.Random, subject: Subject, asked: Sequence[Asked], preemption: str
) -> Options:
    """Room for the longest request; and to begin a second one beside the first, not to end it."""
    size, (first, second) = rng.choice([1, 2]), asked[:2]
    begin = sum(-(-(len(one.prompt) + 1) // size) for one in (first, second)) + 1
    end = sum(-(-(one.blocks[1] - 1) // size) for one in (first, second)) - 1
    least = max(blocks(asked, size), begin)
    pool = rng.randint(least, max(least, end))
    return dict(block_size=size, num_blocks=pool, preemption=preemption)


def forks(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    return dict(block_size=rng.choice([2, 3, 4, 16]), num_blocks=400)


def ngram(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    drafter = NgramDrafter(rng.choice([2, 4]), shortest=1)
    return dict(speculate=drafter, k=rng.randint(1, 5), adaptive_k=False)


def draft_model(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    drafter = ModelDrafter(Engine(subject.draft))
    return dict(speculate=drafter, k=rng.randint(1, 4), adaptive_k=False)


def recorded(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """As a CUDA graph records, but on a CPU."""
    return dict(graphs=graphs.recording, max_seqs=rng.choice([4, 6]))


def plainly(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    return {}


def native_graph(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    return dict(graphs=True)


def everything(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """Any of the above at once: hits, chunks and a small pool always, the rest by lot."""
    ways = [ngram, ngram, plainly, *[draft_model] * (subject.draft is not None)]
    drafts = rng.choice(ways)(rng, subject, asked)
    if drafts:
        drafts |= dict(k=rng.choice([1, 1, 2, 4]), adaptive_k=rng.random() < 0.5)
    k, seats = drafts.get("k", 0), rng.randint(4, 6)
    size = rng.choice([1, 2, 4, 16])
    pool = blocks(asked, size) + rng.randint(0, 12 // size)
    own = dict(
        prefix_cache=True,
        block_size=size,
        num_blocks=pool,
        max_seqs=seats,
        max_batch_tokens=seats * (1 + k) + rng.randint(0, 4),
        preemption=rng.choice(["recompute", "swap"]),
        graphs=rng.choice([graphs.recording, False]) if subject.is_exact else True,
    )
    return own | drafts


def long_contexts(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """Hits, prompts in pieces or whole, n-gram drafts or none."""
    drafts = rng.choice([plainly, ngram])(rng, subject, asked)
    size = rng.choice([4, 16])
    room = dict(block_size=size, num_blocks=2 * blocks(asked, size), prefix_cache=True)
    return room | dict(max_batch_tokens=rng.choice([48, 512]), graphs=True) | drafts


def static(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """Batches of which none is joined: with hits, or prompts in pieces."""
    seats = max(3, *(one.params.n for one in asked))
    size = rng.choice([2, 4, 16])
    cache = dict(prefix_cache=rng.random() < 0.5, block_size=size, num_blocks=400)
    return cache | dict(policy="static", max_seqs=seats, max_batch_tokens=rng.choice([seats, 64]))


def one_stream(
    rng: random.Random, subject: Subject, asked: Sequence[Asked], record: bool
) -> Options:
    """An engine; record: its steps are recorded."""
    recorder = graphs.recording if subject.is_exact else graphs.cpu_graph
    return dict(prefill_chunk=rng.choice([3, 512]), record=recorder if record else None)


def drafted_stream(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """An engine that is drafted for, by n-grams or by a model; recorded or not."""
    drafts = rng.choice([ngram, draft_model])(rng, subject, asked)
    drafts |= dict(adaptive_k=rng.random() < 0.5)
    return one_stream(rng, subject, asked, rng.random() < 0.5) | drafts


def own_bits(rng: random.Random, subject: Subject, asked: Sequence[Asked]) -> Options:
    """All at once, but for drafts by a model; recorded where a step is one pass."""
    crowded = everything(rng, replace(subject, draft=None), asked)
    return crowded | dict(batch_invariant=True, graphs=not subject.is_exact)


F32 = torch.float32
OF_CUDA = ("paged_attend", "write_kv")  # what both families call of the CUDA sources
OF_NATIVE = ("linear", "paged_attend", "write_kv")
OF_LONG = ("paged_attend",)
PART, SPLIT = 128, 256  # keys that are one piece, in native attention and in the CUDA source
CROWDED: dict[str, Any] = dict(most=16, count=8, apart=0)
ROWS = (
    Row(
        "prefix hit",
        "A prompt begins like an earlier one: its first blocks are found, and not computed again.",
        "the request found tokens of its prompt in the cache",
        prefix_hit,
        hit,
    ),
    Row(
        "chunked prefill",
        "A step takes so few tokens that prompts are read a piece at a time.",
        "a step of the request ended before its prompt did",
        chunked_prefill,
        chunked,
    ),
    Row(
        "mixed steps",
        "Requests come while others answer: prompts and next tokens share a pass.",
        "a step of the request had both in it",
        mixed_steps,
        mixed,
    ),
    Row(
        "recompute",
        "The pool is too small: a request loses its blocks and is computed again later.",
        "the request was preempted",
        partial(small_pool, preemption="recompute"),
        recomputed,
        **CROWDED,
    ),
    Row(
        "swap",
        "The pool is too small: a request's blocks go to the host's memory and come back.",
        "the request was preempted, and blocks went out and came in",
        partial(small_pool, preemption="swap"),
        swapped,
        **CROWDED,
    ),
    Row(
        "fork, n > 1",
        "Several answers to one prompt share its blocks until one of them writes.",
        "the request had several answers, and shared blocks were copied",
        forks,
        forked,
        answers=(2, 3, 4),
    ),
    Row(
        "beam",
        "A beam search beside other requests: its beams share blocks, split and are dropped.",
        "the beams of the request were in a step together",
        forks,
        searched,
        beams=True,
    ),
    Row(
        "n-gram drafts",
        "What followed the last time is guessed to follow again; a pass looks at several guesses.",
        "the request took over drafts, and others were rejected",
        ngram,
        drafted,
    ),
    Row(
        "draft model",
        "A second model with a cache of its own drafts for all requests at once.",
        "the request took over drafts, and others were rejected",
        draft_model,
        drafted,
        law_count=160,
    ),
    Row(
        "recorded step",
        "A step is recorded once and replayed, with what changes in one tensor, as a CUDA graph "
        "needs it; the recorder is the one that checks this on a CPU.",
        "recorded steps were replayed",
        recorded,
        replayed,
    ),
    Row(
        "emulated kernels",
        "The CUDA sources, executed on the CPU, their threads in a random order.",
        "the CUDA sources of attention and of the cache were run",
        plainly,
        called(*OF_CUDA),
        dtype=F32,
        around=emulated,
        most=6,
        count=4,
    ),
    Row(
        "native CPU ops",
        "The C++ forms of the ops, which are for float32.",
        "native products, attention and writes to the cache were called",
        plainly,
        called(*OF_NATIVE),
        dtype=F32,
        around=natively,
    ),
    Row(
        "native recorded step",
        "The native calls of a step are noted once, and done again by a loop in C++.",
        "recorded steps were replayed",
        native_graph,
        replayed,
        dtype=F32,
    ),
    Row(
        "int8",
        "Weights in 8 bits, by the plain form of the op; transformers holds what they stand for.",
        "every matrix of the layers is integers",
        plainly,
        called("integers"),
        int8=True,
    ),
    Row(
        "int8, native",
        "Weights in 8 bits, by the native loop over integers.",
        "the native product of integers was called",
        plainly,
        called("int8_linear"),
        dtype=F32,
        int8=True,
        around=natively,
    ),
    Row(
        "batch_invariant",
        "Each token has a pass of its own, as where nothing is known of the order of sums; with "
        "hits, chunks, a small pool, n-gram drafts.",
        "the request shared a step with another one",
        own_bits,
        in_company,
    ),
    Row(
        "batch_invariant, native",
        "Sums in an order that the row alone decides; with hits, chunks, a small pool, n-gram "
        "drafts, recorded steps.",
        "the request shared a step with another one",
        own_bits,
        in_company,
        dtype=F32,
    ),
    Row(
        "all at once",
        "Prefix hits, chunks, a small pool with either preemption, several answers, beam searches, "
        "either kind of drafts or none, recorded or not: by lot, together.",
        "three or more of these happened to the request",
        everything,
        partial(combined, least=3),
        answers=(1, 1, 2),
        beams=True,
        law_count=80,
    ),
    Row(
        "all at once, native",
        "The same in float32, as it is on a CPU by default: native ops, recorded steps; without "
        "beam searches.",
        "three or more of these happened to the request",
        everything,
        partial(combined, least=3),
        dtype=F32,
        answers=(1, 1, 2),
        law_count=80,
    ),
    Row(
        "long contexts, native",
        "Prompts of more than 128 tokens, the keys of which native attention takes in pieces; with "
        "hits, chunks, recorded steps, n-gram drafts or none.",
        "the prompt was as long, and native attention was called",
        long_contexts,
        beyond(PART, *OF_LONG),
        dtype=F32,
        around=natively,
        size="long",
        least=PART,
        most=6,
        count=4,
        law_count=0,
    ),
    Row(
        "long contexts, emulated",
        "Prompts of more than 256 tokens, the keys of which the CUDA source takes in pieces.",
        "the prompt was as long, and the CUDA source of attention was run",
        plainly,
        beyond(SPLIT, *OF_LONG),
        dtype=F32,
        around=emulated,
        size="long",
        least=SPLIT,
        most=4,
        count=2,
        law_count=0,
    ),
    Row(
        "static policy",
        "Batches that nobody joins before all of them have ended; with hits, chunks.",
        "the request waited while a seat was free",
        static,
        kept_waiting,
        apart=0,
    ),
    Row(
        "one stream",
        "An `Engine`, one request after another, its prompt whole or in pieces; several answers "
        "are rows of one cache.",
        "an engine gave more than the first token",
        partial(one_stream, record=False),
        streamed,
        answers=(1, 1, 3),
        serves=serve_one_by_one,
    ),
    Row(
        "one stream, recorded",
        "The same, its steps recorded under the rules of a CUDA graph.",
        "recorded steps were replayed",
        partial(one_stream, record=True),
        replayed,
        answers=(1, 1, 3),
        serves=serve_one_by_one,
    ),
    Row(
        "one stream, native",
        "The same in float32, with native ops, its steps replayed by a loop in C++.",
        "recorded steps were replayed",
        partial(one_stream, record=True),
        replayed,
        dtype=F32,
        answers=(1, 1, 3),
        serves=serve_one_by_one,
    ),
    Row(
        "one stream, drafts",
        "`speculative.generate`, with n-grams or a draft model; recorded or not.",
        "the request took over drafts, and others were rejected",
        drafted_stream,
        drafted,
        answers=(1, 1, 2),
        serves=serve_one_by_one,
        law_count=160,
    ),
)
OF_SMOLLM2 = Row(
    "smollm2",
    "SmolLM2-135M in float32, on sentences: all at once, but for a draft model and beams.",
    "two or more of these happened to the request",
    everything,
    partial(combined, least=2),
    dtype=F32,
    answers=(1, 1, 2),
    most=8,
    count=4,
    law_count=0,
)
ALL_ROWS = (*ROWS, OF_SMOLLM2)
BY_NAME = {row.name: row for row in ALL_ROWS}


def is_int8(subject: Subject) -> bool:
    """Whether every matrix of its layers is integers."""
    return all(weight.int8 is not None for weight in layer_weights(subject.ours))
