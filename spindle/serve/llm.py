"""LLM: many prompts at once, from text to text."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial
from itertools import count, islice
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spindle import hub
from spindle.decode.beam import Beam
from spindle.decode.detokenize import AnswerText
from spindle.decode.drafters import Drafter, ModelDrafter
from spindle.decode.graphs import Recorder, recorder_for, why_none
from spindle.decode.pace import check_k
from spindle.decode.params import (
    SamplingParams,
    check_bool,
    check_count,
    check_params,
    check_prompt,
    check_real,
)
from spindle.decode.speculative import drafter_for
from spindle.decode.stats import Speculation
from spindle.errors import RequestError, brief, shown
from spindle.interrupts import Hold, held_back
from spindle.kvcache.blocks import BlockTable
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.model.weights import check_quantize, load_hf
from spindle.serve.deltas import DeltaStream
from spindle.serve.drafting import Drafting, ModelDrafting
from spindle.serve.outputs import RequestOutput, output_of
from spindle.serve.passes import has_own_bits
from spindle.serve.recorded import LARGEST, RecordedDecodes
from spindle.serve.request import Request, Sequence
from spindle.serve.room import check_memory, default_blocks
from spindle.serve.runner import Output, Runner
from spindle.serve.scheduler import Gain, Plan, Scheduler
from spindle.threads import NoCopies, OneCall, OneThread, one_at_a_time
from spindle.tokenizer import Tokenizer

Prompt = str | Many[int]
MOST_PROMPTS = 2**16  # of an iterator: there may be no end to it


class LLM(NoCopies):
    """Serves many requests at once from one model and one pool of KV blocks.

    model: a bundled or cached name, a directory, a hub id, or a loaded model.
    tokenizer: needed for text if the model is given loaded; else it comes with it.
    device, dtype, quantize: as `load_hf` takes them.
    num_blocks: by default room for max_seqs sequences of max_model_len tokens, within a quarter of
        the free memory.
    max_seqs: sequences that run at once.
    max_batch_tokens: rows that go through the model in a step.
    preemption: "recompute", or "swap" to `host_blocks` of host memory, by default as many as
        num_blocks.
    policy: "continuous", or "static" batches.
    graphs: replay steps without prompts, instead of running them; by default where there is what
        does it.
    speculate: what drafts tokens, for a pass to look at k of them at most: "ngram", a draft model's
        name, "int8" for the model's own weights in 8 bits, or a Drafter.
    adaptive_k: fewer drafts where they are not accepted.
    batch_invariant: a request gets the same bits whatever runs beside it, in float32 too; without
        native code each token then has a pass of its own, which is slow.
    trace: keep the last N plans.

    Raises RequestError for what cannot be. An LLM is for one thread at a time, and refuses a
    second: whoever shares it among several holds a lock. It also refuses to be called from within
    its own calls (by a signal handler, a drafter), but for `abort`; to be copied or pickled; and to
    be used in a child of fork, where torch's threads are gone.

    Examples:

        >>> from spindle import LLM, SamplingParams
        >>> llm = LLM("tiny")
        >>> greedy = SamplingParams(max_tokens=4, temperature=0)
        >>> for output in llm.generate(["The capital of France is", "A list is"], greedy):
        ...     print(repr(output.outputs[0].text), output.outputs[0].finish_reason)
        ' the same as the' length
        ' a list of strings' length
        >>> [delta.text for delta in llm.stream("The capital of France is", greedy)]
        [' the', ' same', ' as', ' the']
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        tokenizer: Tokenizer | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        quantize: str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_seqs: int = 32,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        preemption: str = "recompute",
        policy: str = "continuous",
        host_blocks: int | None = None,
        graphs: bool | Recorder | None = None,
        speculate: str | Path | Drafter | None = None,
        k: int = 5,
        adaptive_k: bool = True,
        batch_invariant: bool = False,
        trace: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.one_thread = OneThread("LLM")
        self.one_call = OneCall(
            self.one_thread, "it between two calls; `abort` may come at any time"
        )
        _check_choice("preemption", preemption, ("recompute", "swap"))
        _check_choice("policy", policy, ("continuous", "static"))
        block_size = check_count("block_size", block_size)  # a plain integer, whatever it was
        max_seqs = check_count("max_seqs", max_seqs)
        words = f"max_seqs={shown(max_seqs)}"
        max_batch_tokens = check_count("max_batch_tokens", max_batch_tokens, max_seqs, words)
        check_quantize(quantize)
        if isinstance(model, str | Path):
            directory = hub.resolve(model)
            tokenizer = tokenizer or Tokenizer(directory)
            model = load_hf(directory, device, dtype, quantize)
        elif quantize is not None:
            right = f"expected load_hf(..., quantize={quantize!r}) to have done it"
            raise RequestError(f"quantize={quantize!r}: the model is loaded already; {right}")
        if not hasattr(model, "config"):
            right = "expected a name, a directory, or a loaded model"
            raise RequestError(f"model={shown(model)}: {right}")
        self.model, self.tokenizer = model, tokenizer
        limit = model.config.max_positions
        wanted = limit if max_model_len is None else max_model_len
        self.max_model_len = check_count("max_model_len", wanted)
        if self.max_model_len > limit:
            words = model.config.positions_in_words()
            raise RequestError(f"max_model_len={shown(max_model_len)}: the model has {words}")
        k = check_k(k)
        check_bool("adaptive_k", adaptive_k)
        check_bool("batch_invariant", batch_invariant)
        drafter = drafter_for(speculate, model)
        if drafter is not None:
            _check_choice("policy", policy, ("continuous",), " where there are drafts")
            least = max_seqs * (1 + k)
            words = f"{shown(least)}: max_seqs={shown(max_seqs)} times a token and k={k} drafts,"
            check_count("max_batch_tokens", max_batch_tokens, least, words)
        models = [model, *([drafter.engine.model] if isinstance(drafter, ModelDrafter) else [])]
        if num_blocks is None:
            num_blocks = default_blocks(models, block_size, max_seqs, self.max_model_len)
        num_blocks = check_count("num_blocks", num_blocks)
        if host_blocks is not None:
            host_blocks = check_count("host_blocks", host_blocks, 0)
        trace = check_count("trace", trace, 0, most=sys.maxsize)
        check_bool("prefix_cache", prefix_cache)
        host = (num_blocks if host_blocks is None else host_blocks) * (preemption == "swap")
        check_memory(models, num_blocks, host, block_size)
        self._kv = PagedKV(
            *(model.config, num_blocks, block_size, model.dtype, model.device, host, prefix_cache),
            apart=batch_invariant,
        )

        def recorded(its: Model, kv: PagedKV) -> RecordedDecodes | None:
            if batch_invariant and not has_own_bits(its):  # a step has many rows, a pass one
                if graphs is True:
                    right = "expected graphs=None: with batch_invariant each token has its own pass"
                    raise RequestError(f"graphs=True: {right} where there is no native code")
                return None
            rows = seqs = min(max_seqs, num_blocks)  # each of them writes into a block of its own
            if drafter is not None:
                rows = max(seqs, min(seqs * (1 + k), LARGEST))
            return self._recorded(graphs, its, kv, rows)

        self._drafting: Drafting | None = None
        if isinstance(drafter, ModelDrafter):
            options = (k, adaptive_k, self._kv, recorded, self.max_model_len, batch_invariant)
            self._drafting = ModelDrafting(drafter, model, *options)
        elif drafter is not None:
            self._drafting = Drafting(drafter, model, k, adaptive_k)
        self.scheduler = Scheduler(
            self._kv.pool,
            self._kv.host,
            max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=self.max_model_len,
            preemption=preemption,
            policy=policy,
            drafts=None if self._drafting is None else self._drafting.wanted,
        )
        self._runner = Runner(
            model, self._kv, recorded(model, self._kv), self._drafting, batch_invariant
        )
        self._clock, self._orders, self._drafts = clock, count(), Speculation()
        self._requests: dict[str, Request] = {}
        self._ended: list[Request] = []  # without having been run
        self._texts: dict[Sequence, AnswerText] = {}
        self._watched: dict[str, RequestOutput | None] = {}  # streams: what they have yet to read
        self._held: list[RequestOutput] = []  # ended in somebody else's step, for the next `step`
        self._news: list[RequestOutput] = []  # of the last step, until they are told
        self._abandoned: list[str] = []  # streams that were let go of, until the next step
        self._noted: list[Request] = []  # to abort, as somebody said in the middle of a call
        self.trace: deque[Plan] = deque(maxlen=trace)

    @property
    @one_at_a_time
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running."""
        self._drop_abandoned()
        return bool(self._ended or self._held or self._news) or self.scheduler.has_unfinished

    @one_at_a_time
    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request; returns its id. Nothing runs before the next `step`.

        Raises RequestError, before anything changes, for a prompt or parameters that cannot be
        honoured, and for the id of a request that is unfinished.
        """
        return self._add(prompt, params, request_id)

    @one_at_a_time
    def add_all(
        self, prompts: Many[Prompt], params: Many[SamplingParams | None], request_ids: Many[str]
    ) -> None:
        """Queue several requests, each as `add` does, or none. Raises what `add` raises."""
        names = list[str]()
        try:
            self._add_all(prompts, params, names, request_ids)
        except BaseException:
            with held_back():
                self._forget(names)
            raise

    def _add(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None
    ) -> str:
        arrival = self._clock()
        params = self._checked_params(params)
        ids = self._prompt_ids(prompt)
        self._check_name(request_id)
        order = next(self._orders)
        name = self._free_name(order) if request_id is None else request_id
        return self._queue(Request(name, ids, params, order, arrival))

    def _queue(self, request: Request) -> str:
        with held_back():
            self.scheduler.add(request)
            if self._drafting is not None and self._drafting.caches:
                request.sequences[0].draft_stored = 0
            self._requests[request.id] = request
            if self.scheduler.longest(request) == len(request.prompt):  # nothing to run for
                self._end_all(request, "length")
                self._ended.append(request)
            return request.id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is, with reason "abort", and give back what it holds.

        Returns it as it is then; None for an id that is not, or no longer, there. From within
        another call, such as by a signal handler in mid-step, it is noted: None, and the request
        ends before the next step, which returns it.
        """
        if self.one_call.is_within():
            request = self._requests.get(request_id) if isinstance(request_id, str) else None
            self._noted += [] if request is None else [request]
            return None
        return self._abort_now(request_id)

    @one_at_a_time
    def _abort_now(self, request_id: str) -> RequestOutput | None:
        self._drop_abandoned()
        return self._abort(request_id)

    def _abort(self, request_id: str) -> RequestOutput | None:
        request = self._requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            return None
        with held_back():
            self._end_all(request, "abort")
            return self._close(request)

    def step(self) -> list[RequestOutput]:
        """Run the model once; returns the requests that gained tokens or ended, each as a whole.

        Requests that have ended since, while `generate` or a stream ran the model, come first. If
        it is interrupted, nothing is lost: the step is done again, or its outputs come with the
        next.
        """
        told: list[RequestOutput] = []
        try:
            with held_back() as hold, self.one_call:
                self._run_once(hold)
                told, self._held, self._news = self._held + self._news, [], []
            return told
        except BaseException:
            if told:  # nobody has been told
                self._news = told + self._news
            raise

    def _advance(self) -> list[RequestOutput]:
        """A step for one caller; what ended in it and is nobody's so far is held for `step`."""
        with held_back() as hold:
            self._run_once(hold)
            news, self._news = self._news, []
            self._held += [o for o in news if o.finished and o.request_id not in self._watched]
            return news

    def _run_once(self, hold: Hold) -> None:
        """Schedule, run, commit; who gained or ended is then among the news.

        An interrupt waits for its end, but for one that comes in the pass: the step is then planned
        anew.
        """
        self._drop_abandoned()
        self._news += [self._close(one) for one in self._ended if one.finished is None]
        self._ended.clear()
        plan = self.scheduler.schedule()
        self._runner.move(plan)
        if not plan.chunks:
            return
        now = self._clock()
        for chunk in plan.chunks:
            if chunk.sequence.request.scheduled is None:
                chunk.sequence.request.scheduled = now
        if self.trace.maxlen:
            self.trace.append(plan)
        with hold.let_through():
            outputs = self._runner.run(plan)
        now = self._clock()
        self._note_rounds(plan, outputs)
        take = partial(self._take, plan, outputs, now)
        gained = self.scheduler.commit(plan, [output.ids for output in outputs], take)
        self._tell(list(dict.fromkeys(one.sequence.request for one in gained)))
        self._tell(self._advance_beams(plan, outputs, now))

    def _tell(self, requests: list[Request]) -> None:
        self._news += [self._close(r) if r.is_finished else self._output(r) for r in requests]

    def _drop_abandoned(self) -> None:
        """Abort what streams that nobody holds any more were for, and what was noted."""
        with held_back():
            while self._abandoned:
                name = self._abandoned.pop()
                self._abort(name)
                self._watched.pop(name, None)
            while self._noted:
                request = self._noted.pop()
                if self._requests.get(request.id) is request:  # it has not ended since
                    self._end_all(request, "abort")
                    self._ended.append(request)

    @one_at_a_time
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """The answer to one prompt as it comes, beside whatever else is unfinished here.

        Closing it, or letting go of it, aborts the request. With n > 1 the deltas of the answers
        alternate; the last one of an answer says why it ended. Raises RequestError as `add` does,
        and for best_of > 1.
        """
        params = self._checked_params(params)
        params.check_stream("generate")
        stream: DeltaStream | None = None
        try:
            with held_back():
                name = self._add(prompt, params)
                self._watched[name] = None
                stream = DeltaStream(self, name)
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()  # at the next step, as this is a call
            raise
        return stream

    @one_at_a_time
    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (one, or a list), in their order; progress: a bar at a terminal.

        `params` for all, or a list of one each. Raises RequestError, and queues none of them, if
        one of them is refused, or an iterator has more than 65,536 (a list may). Requests that were
        added before go on meanwhile.
        """
        return self._generate(prompts, params, progress)

    def _generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        check_bool("progress", progress)
        many: list[Any] = [prompts] if _is_one(prompts) else _as_list(prompts)
        each: list[Any] = [params] * len(many)
        if isinstance(params, list | tuple):
            each = list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} params for {len(many)} prompts: expected one each")
        return self._run_to_the_end(lambda names: self._add_all(many, each, names), progress)

    @one_at_a_time
    def chat(
        self,
        messages: Many[Mapping[str, Any]] | Many[Many[Mapping[str, Any]]],
        params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, written by the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("chat: the model was given without a tokenizer")
        if not isinstance(messages, Many) or isinstance(messages, str | bytes):
            got = type(messages).__name__
            raise RequestError(f"messages: expected a list of them, or of such lists, got {got}")
        one = bool(messages) and isinstance(messages[0], Mapping)
        talks: Any = [messages] if one else messages
        texts = [self.tokenizer.render_chat(talk) for talk in talks]
        return self._generate([self._encoded(text, False) for text in texts], params)

    @one_at_a_time
    def beam_search(
        self,
        prompt: Prompt,
        width: int = 4,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> RequestOutput:
        """The `width` answers that beam search finds best, the best first (`decode.beam`).

        Runs like any other request, beside whatever else is unfinished here; the beams share
        blocks as long as their tokens are the same. length_penalty: above 0 favours long answers.
        Raises RequestError as `add` does.
        """
        arrival = self._clock()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos, seed=0)
        width = check_count("width", width)
        right = "a number from -10 to 10"
        penalty = check_real("length_penalty", length_penalty, -10, 10, right)
        order, ids = next(self._orders), self._prompt_ids(prompt)
        request = Request(self._free_name(order), ids, params, order, arrival)
        limit, ends = self.scheduler.longest(request) - len(ids), self.model.config.eos_ids
        request.beam = Beam(width, limit, penalty, params.end_ids(ends))

        def queue(names: list[str]) -> None:
            with held_back():
                names.append(self._queue(request))

        return self._run_to_the_end(queue)[0]

    @property
    @one_at_a_time
    def stats(self) -> dict[str, int]:
        """How things stand: sequences waiting and running, and the blocks of the pool.

        `blocks_named` counts a block once for every sequence that has it (the logical blocks),
        `blocks_held` once (the physical ones). `steps` so far, and those of them that were
        `replayed`; drafts that were `proposed` in them, and `accepted`.
        """
        pool = self._kv.pool
        return {
            "waiting": sum(one.finish_reason is None for one in self.scheduler.waiting),
            "running": sum(one.finish_reason is None for one in self.scheduler.running),
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free - pool.cached,
            "blocks_cached": pool.cached,
            "blocks_held": pool.num_blocks - pool.free,
            "blocks_named": sum(len(one.table.blocks) for one in self.scheduler.running),
            "steps": self._runner.steps,
            "replayed": self._runner.replayed,
            "proposed": self._drafts.proposed,
            "accepted": self._drafts.accepted,
        }

    # --- the parts of the above -----------------------------------------------------------------

    def _recorded(
        self, wanted: bool | Recorder | None, model: Model, kv: PagedKV, max_rows: int
    ) -> RecordedDecodes | None:
        """What replays steps; None where they are run. A recorder may be given: for tests."""
        if wanted is not None and not isinstance(wanted, bool) and not callable(wanted):
            raise RequestError(f"graphs={shown(wanted)}: expected True, False or None")
        record = wanted if callable(wanted) else recorder_for(model)
        if wanted is True and record is None:
            raise RequestError(f"graphs=True: {why_none(model)}; expected graphs=None")
        if wanted is False or record is None:
            return None
        return RecordedDecodes(model, kv, record, max_rows, self.max_model_len)

    def _run_to_the_end(
        self, queue: Callable[[list[str]], None], progress: bool = False
    ) -> list[RequestOutput]:
        """Queue requests, and step until they have ended; if that is broken off, abort them.

        queue: adds them, and their names to the list that it is given, one by one.
        """
        names, done = list[str](), dict[str, RequestOutput]()
        try:
            queue(names)
            mine = set(names)
            self._watched |= dict.fromkeys(names)
            with tqdm(total=len(names), disable=None if progress else True, unit="req") as bar:
                while len(done) < len(names):
                    for output in self._advance():
                        if output.finished and output.request_id in mine:
                            done[output.request_id] = output
                            bar.update()
        finally:
            with held_back():
                self._forget(names)
        return [done[name] for name in names]

    def _forget(self, names: list[str]) -> None:
        """After an interrupt, or a refusal: abort them, and tell nobody. Else they have ended."""
        for name in names:
            self._abort(name)
            self._watched.pop(name, None)
        mine = set(names)
        self._news = [output for output in self._news if output.request_id not in mine]
        self._held = [output for output in self._held if output.request_id not in mine]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._encoded(prompt)
        return check_prompt(prompt, self.model.config.vocab_size, self.max_model_len)

    def _encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the prompt is text, and there is no tokenizer: give ids")
        return self.tokenizer.encode_within(text, self.max_model_len, add_special_tokens)

    def _checked_params(self, params: SamplingParams | None) -> SamplingParams:
        """The parameters with a seed. RequestError: what cannot be honoured here."""
        params = SamplingParams() if params is None else check_params(params)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: text to stop at, and there is no tokenizer")
        params.check_ids(self.model.config.vocab_size)
        return params.seeded()

    def _check_name(self, name: str | None) -> None:
        if name is not None and not isinstance(name, str):
            raise RequestError(f"request_id={shown(name)}: expected a string, or None")
        if name in self._requests:
            words = "a request that is unfinished"
            raise RequestError(f"request_id {brief(repr(name))}: in use by {words}")
        if name in self._watched:
            raise RequestError(f"request_id {brief(repr(name))}: in use by a stream that is unread")

    def _add_all(
        self,
        prompts: Many[Prompt],
        params: Many[SamplingParams | None],
        names: list[str],
        request_ids: Many[str] | None = None,
    ) -> None:
        """Queue them; `names` grows by one each."""
        ids = [None] * len(prompts) if request_ids is None else request_ids
        for prompt, its, own in zip(prompts, params, ids, strict=True):
            try:
                with held_back():
                    names.append(self._add(prompt, its, own))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {len(names)}: {error}") from None

    def _free_name(self, order: int) -> str:
        name = f"request-{order}"
        while name in self._requests or name in self._watched:
            name += "'"
        return name

    def _end_all(self, request: Request, reason: str) -> None:
        """End all of a request's answers, those too that were not forked off yet."""
        if request.sequences[0].new_tokens == 0:
            for sample in range(len(request.sequences), request.width):
                table = BlockTable(self._kv.pool)
                request.sequences.append(Sequence(request, sample, request.prompt.copy(), table))
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason)

    def _note_rounds(self, plan: Plan, outputs: list[Output]) -> None:
        """Let each sequence know what became of its drafts, or that it had none."""
        if self._drafting is None:
            return
        for chunk, output in zip(plan.chunks, outputs, strict=True):
            one = chunk.sequence
            if output.ids and one.new_tokens > 0 and one.finish_reason is None:
                accepted = len(output.ids) - 1
                self._drafting.note(one, chunk.drafts, accepted, self._runner.seconds)
                self._drafts.proposed += chunk.drafts

    def _take(self, plan: Plan, outputs: list[Output], now: float, gain: Gain) -> None:
        """Note what a sequence gained, and end it if it has had enough.

        A beam search gains nothing here, but if one of its sequences is broken, all of it is.
        """
        sequence, at, n = gain
        request, record, chunk = sequence.request, outputs[at].logprobs[n], plan.chunks[at]
        if sequence.finish_reason == "error":
            if request.beam is not None:
                self._end_all(request, "error")
            return
        _note_time(request, now)
        if sequence.speculation is not None:
            for counts in (sequence.speculation, self._drafts):
                counts.note(n < chunk.drafts, n < len(outputs[at].ids) - 1)
        if record is not None:
            sequence.cumulative += record.sampled.logprob
            if request.params.logprobs is not None:
                sequence.logprobs.append(record)
        self._read(sequence)

    def _advance_beams(self, plan: Plan, outputs: list[Output], now: float) -> list[Request]:
        """Let the beam searches that ran go on from their candidates, or end; returns them."""
        ran: dict[Request, list[list[tuple[int, float]]]] = {}
        for chunk, output in zip(plan.chunks, outputs, strict=True):
            if output.candidates and not chunk.sequence.request.is_finished:
                ran.setdefault(chunk.sequence.request, []).append(output.candidates)
        for request, candidates in ran.items():
            assert request.beam is not None
            _note_time(request, now)
            beams = [(one.output, one.cumulative) for one in request.sequences]
            picks = request.beam.advance(beams, candidates)
            if picks:
                self.scheduler.branch(request, picks)
            else:
                self._end_search(request, request.beam)
        return list(ran)

    def _end_search(self, request: Request, beam: Beam) -> None:
        """Give the blocks back; the answers are what the search found, not what it ended with."""
        self._end_all(request, "stop")
        request.sequences = []
        for rank, found in enumerate(beam.hypotheses):
            ids = [*request.prompt, *found.ids]
            answer = Sequence(request, rank, ids, BlockTable(self._kv.pool))
            answer.cumulative, answer.finish_reason = found.cumulative, found.finish_reason
            request.sequences.append(answer)
            text = self._text_of(answer)
            for at, token in enumerate(found.ids, 1):
                if text is not None:
                    text.push(token, found.finish_reason == "stop" and at == len(found.ids))

    def _read(self, sequence: Sequence) -> None:
        """Turn the newest token to text; end the sequence if it is the last one."""
        params, token = sequence.request.params, sequence.ids[-1]
        ends, reason = params.end(token, self.model.config.eos_ids)
        text = self._text_of(sequence)
        if text is not None:
            text.push(token, ends)
        if ends:
            self.scheduler.finish(sequence, "stop", reason)
        elif text is not None and text.stop is not None:
            self.scheduler.finish(sequence, "stop", text.stop)
        elif len(sequence.ids) == self.scheduler.longest(sequence.request):
            self.scheduler.finish(sequence, "length")
        if sequence.finish_reason and text is not None:
            text.flush()

    def _text_of(self, sequence: Sequence) -> AnswerText | None:
        if self.tokenizer is None:
            return None
        if sequence not in self._texts:
            request = sequence.request
            self._texts[sequence] = AnswerText.of(self.tokenizer, request.prompt, request.params)
        return self._texts[sequence]

    def _close(self, request: Request) -> RequestOutput:
        """A request has ended: give it as it is, and forget it."""
        request.finished = self._clock()
        for sequence in request.sequences:
            if sequence in self._texts:
                self._texts[sequence].flush()
        output = self._output(request)
        for sequence in request.sequences:
            self._texts.pop(sequence, None)
        del self._requests[request.id]
        return output

    def _output(self, request: Request) -> RequestOutput:
        """The request as it is now; a stream that watches it will read the same."""

        def words(sequence: Sequence) -> str:
            text = self._texts.get(sequence)
            return "" if text is None else text.text

        output = output_of(request, words)
        if request.id in self._watched:
            self._watched[request.id] = output
        return output


def _note_time(request: Request, now: float) -> None:
    """A token has just come."""
    request.last_token = now
    if request.first_token is None:
        request.first_token = now


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt: a string, or ids in a list, an array or a tensor."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1:
        return True
    row = isinstance(prompts, list | tuple | range)
    return row and bool(prompts) and isinstance(prompts[0], Integral)


def _as_list(prompts: Any) -> list[Any]:
    got = type(prompts).__name__
    if isinstance(prompts, Mapping | set | frozenset):
        raise RequestError(f"prompts: expected a list of them, got {got}")
    most = MOST_PROMPTS if isinstance(prompts, Iterator) else None
    try:
        listed = list(islice(prompts, most and most + 1))
    except Exception as cause:  # no iterable, or one that cannot be read
        raise RequestError(f"prompts: expected a list of them, got {got} ({cause})") from cause
    if most and len(listed) > most:
        raise RequestError(f"prompts: more than {most} from an iterator; expected a list")
    return listed


def _check_choice(name: str, value: str, choices: tuple[str, ...], when: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        right = f"expected {' or '.join(map(repr, choices))}{when}"
        raise RequestError(f"{name}={shown(value)}: {right}")
