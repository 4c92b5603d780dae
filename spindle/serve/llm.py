"""LLM: many prompts at once, from text to text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from spindle import hub
from spindle.decode.detokenize import AnswerText
from spindle.decode.logprobs import TokenLogprobs
from spindle.decode.params import SamplingParams, check_count, check_prompt
from spindle.errors import RequestError
from spindle.kvcache.blocks import BlockTable
from spindle.kvcache.paged import PagedKV
from spindle.model.layers import Model
from spindle.model.weights import load_hf
from spindle.serve.request import Request, Sequence
from spindle.serve.runner import Output, Runner
from spindle.serve.scheduler import Gain, Plan, Scheduler
from spindle.tokenizer import Tokenizer

Prompt = str | Many[int]


@dataclass(frozen=True)
class Completion:
    """One of a request's n answers, as far as it is; `finish_reason` is None until it has ended.

    It is "stop", "length", "abort" or "error" then; `stop_reason` is the stop string or the stop
    id, None for an EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None  # the sum of the tokens' logprobs, if they were asked for
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Metrics:
    """When things happened to a request, in seconds of the engine's clock; None: not yet."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float | None
    preemptions: int
    cached_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """A request as a whole, as far as it is."""

    request_id: str
    prompt_ids: list[int]
    outputs: list[Completion]
    finished: bool
    seed: int
    metrics: Metrics


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None


class LLM:
    """Serves many requests at once from one model and one pool of KV blocks.

    model: a bundled or cached name, a directory, a hub id, or a loaded model (then `tokenizer` is
    needed for text). num_blocks: by default room for max_seqs sequences of max_model_len tokens,
    within a quarter of the free memory. max_seqs sequences run at once, max_batch_tokens rows go
    through the model in a step. preemption "swap": `host_blocks` of host memory, by default as
    many as num_blocks. trace: keep the last N plans. Raises RequestError for what cannot be.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        tokenizer: Tokenizer | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_seqs: int = 32,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        preemption: str = "recompute",
        policy: str = "continuous",
        host_blocks: int | None = None,
        trace: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check_choice("preemption", preemption, ("recompute", "swap"))
        _check_choice("policy", policy, ("continuous", "static"))
        for name, value in (("block_size", block_size), ("max_seqs", max_seqs)):
            check_count(name, value)
        check_count("max_batch_tokens", max_batch_tokens, max_seqs, f"max_seqs={max_seqs}")
        if isinstance(model, str | Path):
            directory = hub.resolve(model)
            tokenizer = tokenizer or Tokenizer(directory)
            model = load_hf(directory, device, dtype)
        self.model, self.tokenizer = model, tokenizer
        limit = model.config.max_positions
        self.max_model_len = limit if max_model_len is None else max_model_len
        check_count("max_model_len", self.max_model_len)
        if self.max_model_len > limit:
            words = model.config.positions_in_words()
            raise RequestError(f"max_model_len={max_model_len}: the model has {words}")
        if num_blocks is None:
            num_blocks = _default_blocks(model, block_size, max_seqs, self.max_model_len)
        check_count("num_blocks", num_blocks)
        if host_blocks is not None:
            check_count("host_blocks", host_blocks, 0)
        check_count("trace", trace, 0)
        host = (num_blocks if host_blocks is None else host_blocks) * (preemption == "swap")
        self._kv = PagedKV(
            model.config, num_blocks, block_size, model.dtype, model.device, host, prefix_cache
        )
        self.scheduler = Scheduler(
            self._kv.pool,
            self._kv.host,
            max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=self.max_model_len,
            preemption=preemption,
            policy=policy,
        )
        self._runner = Runner(model, self._kv)
        self._clock, self._orders = clock, count()
        self._requests: dict[str, Request] = {}
        self._ended: list[Request] = []  # without having been run
        self._texts: dict[Sequence, AnswerText] = {}
        self._watched: dict[str, RequestOutput | None] = {}  # streams: what they have yet to read
        self._held: list[RequestOutput] = []  # ended in somebody else's step, for the next `step`
        self.trace: deque[Plan] = deque(maxlen=trace)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._ended or self._held) or self.scheduler.has_unfinished

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request; returns its id. Nothing runs before the next `step`.

        Raises RequestError, before anything changes, for a prompt or parameters that cannot be
        honoured, and for the id of a request that is unfinished.
        """
        arrival = self._clock()
        params = (params or SamplingParams()).seeded()
        ids = self._prompt_ids(prompt)
        self._check_params(params)
        order = next(self._orders)
        name = self._free_name(order) if request_id is None else request_id
        if name in self._requests:
            raise RequestError(f"request_id {name!r}: in use by a request that is unfinished")
        request = Request(name, ids, params, order, arrival)
        self.scheduler.add(request)
        self._requests[name] = request
        if self.scheduler.longest(request) == len(ids):  # nothing to run for
            self._end_all(request, "length")
            self._ended.append(request)
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is, with reason "abort", and give back what it holds.

        Returns it as it is then; None for an id that is not, or no longer, there.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end_all(request, "abort")
        output = self._close(request)
        if request_id in self._watched:
            self._watched[request_id] = output
        return output

    def step(self) -> list[RequestOutput]:
        """Run the model once; returns the requests that gained tokens or ended, each as a whole.

        Requests that have ended since, while `generate` or a stream ran the model, come first.
        """
        held, self._held = self._held, []
        return held + self._step()

    def _step(self) -> list[RequestOutput]:
        outputs = self._run_once()
        for output in outputs:
            if output.request_id in self._watched:
                self._watched[output.request_id] = output
        return outputs

    def _advance(self) -> list[RequestOutput]:
        """A step for one caller; what ended in it and is nobody's so far is held for `step`."""
        outputs = self._step()
        self._held += [o for o in outputs if o.finished and o.request_id not in self._watched]
        return outputs

    def _run_once(self) -> list[RequestOutput]:
        ended = [self._close(request) for request in self._ended if request.finished is None]
        self._ended.clear()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return ended
        now = self._clock()
        for chunk in plan.chunks:
            if chunk.sequence.request.scheduled is None:
                chunk.sequence.request.scheduled = now
        if self.trace.maxlen:
            self.trace.append(plan)
        outputs = self._runner.run(plan)
        gained = self.scheduler.commit(plan, [output.ids for output in outputs])
        return ended + self._take(gained, outputs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """The answer to one prompt as it comes, beside whatever else is unfinished here.

        Closing it aborts the request. With n > 1 the deltas of the answers alternate; the last one
        of an answer says why it ended.
        """
        name = self.add(prompt, params)
        self._watched[name] = None
        return DeltaStream(self, name)

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (one, or a list), in their order; progress: a bar at a terminal.

        `params` for all, or a list of one each. Raises RequestError, and queues none of them, if
        one of them is refused. Requests that were added before go on meanwhile.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each: list[Any] = [params] * len(many)
        if isinstance(params, list | tuple):
            each = list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} params for {len(many)} prompts: expected one each")
        names = self._add_all(many, each)
        done, mine = dict[str, RequestOutput](), set(names)
        self._watched |= dict.fromkeys(names)
        try:
            with tqdm(total=len(names), disable=None if progress else True, unit="req") as bar:
                while len(done) < len(names):
                    for output in self._advance():
                        if output.finished and output.request_id in mine:
                            done[output.request_id] = output
                            bar.update()
        finally:
            for name in names:  # after an interrupt; else they have ended
                self.abort(name)
                self._watched.pop(name, None)
        return [done[name] for name in names]

    def chat(
        self,
        messages: Many[Mapping[str, Any]] | Many[Many[Mapping[str, Any]]],
        params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, written by the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("chat: the model was given without a tokenizer")
        one = bool(messages) and isinstance(messages[0], Mapping)
        talks: Any = [messages] if one else messages
        return self.generate([self.tokenizer.encode_chat(talk) for talk in talks], params)

    @property
    def stats(self) -> dict[str, int]:
        """How things stand: sequences waiting and running, and the blocks of the pool."""
        pool = self._kv.pool
        return {
            "waiting": sum(one.finish_reason is None for one in self.scheduler.waiting),
            "running": sum(one.finish_reason is None for one in self.scheduler.running),
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free - pool.cached,
            "blocks_cached": pool.cached,
            "blocks_held": pool.num_blocks - pool.free,
            "blocks_named": sum(len(one.table.blocks) for one in self.scheduler.running),
        }

    # --- the parts of the above -----------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the prompt is text, and there is no tokenizer: give ids")
            prompt = self.tokenizer.encode(prompt)
        return check_prompt(prompt, self.model.config.vocab_size, self.max_model_len)

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: text to stop at, and there is no tokenizer")
        params.check_ids(self.model.config.vocab_size)

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams | None]) -> list[str]:
        names: list[str] = []
        try:
            for prompt, its in zip(prompts, params, strict=True):
                names.append(self.add(prompt, its))
        except BaseException as error:
            for name in names:
                self.abort(name)
            if isinstance(error, RequestError) and len(prompts) > 1:
                raise RequestError(f"prompt {len(names)}: {error}") from None
            raise
        return names

    def _free_name(self, order: int) -> str:
        name = f"request-{order}"
        while name in self._requests:
            name += "'"
        return name

    def _end_all(self, request: Request, reason: str) -> None:
        """End all of a request's answers, those too that were not forked off yet."""
        for sample in range(len(request.sequences), request.params.n):
            table = BlockTable(self._kv.pool)
            request.sequences.append(Sequence(request, sample, request.prompt.copy(), table))
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason)

    def _take(self, gained: list[Gain], outputs: list[Output]) -> list[RequestOutput]:
        """Note what each sequence gained, and end those that have had enough."""
        now = self._clock()
        for sequence, chunk, n in gained:
            request, record = sequence.request, outputs[chunk].logprobs[n]
            if sequence.finish_reason == "error":
                continue
            request.last_token = now
            if request.first_token is None:
                request.first_token = now
            if record is not None:
                sequence.logprobs.append(record)
            self._read(sequence)
        touched = dict.fromkeys(one.sequence.request for one in gained)
        return [self._close(r) if r.is_finished else self._output_of(r) for r in touched]

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
        output = self._output_of(request)
        for sequence in request.sequences:
            self._texts.pop(sequence, None)
        del self._requests[request.id]
        return output

    def _output_of(self, request: Request) -> RequestOutput:
        metrics = Metrics(
            request.arrival,
            request.scheduled,
            request.first_token,
            request.last_token,
            request.finished,
            request.preemptions,
            request.cached_tokens,
        )
        outputs = [self._completion(sequence) for sequence in request.sequences]
        seed = request.params.seed
        assert seed is not None
        return RequestOutput(
            request.id, request.prompt.copy(), outputs, request.is_finished, seed, metrics
        )

    def _completion(self, sequence: Sequence) -> Completion:
        wanted = sequence.request.params.logprobs is not None
        text = self._texts.get(sequence)
        return Completion(
            sequence.sample,
            text.text if text is not None else "",
            sequence.output,
            sequence.logprobs.copy() if wanted else None,
            sum(record.sampled.logprob for record in sequence.logprobs) if wanted else None,
            sequence.finish_reason,
            sequence.stop_reason,
        )


class DeltaStream(Iterator[Delta]):
    """What each step adds to one request; whoever steps the engine meanwhile, nothing is lost."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._name = llm, name
        self._ready: deque[Delta] = deque()
        self._seen: dict[int, tuple[int, int, bool]] = {}

    def __next__(self) -> Delta:
        watched = self._llm._watched
        while not self._ready:
            if self._name not in watched:
                raise StopIteration
            output = watched[self._name]
            if output is None:
                self._llm._advance()
                continue
            self._ready.extend(_new_in(output, self._seen))
            watched[self._name] = None
            if output.finished:
                del watched[self._name]
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        self._llm._watched.pop(self._name, None)
        self._llm.abort(self._name)
        self._ready.clear()


def _new_in(output: RequestOutput, seen: dict[int, tuple[int, int, bool]]) -> Iterator[Delta]:
    """What an output has beyond the characters, tokens and ends in `seen`, which are moved on."""
    for one in output.outputs:
        before = seen.get(one.index, (0, 0, False))
        now = len(one.text), len(one.token_ids), one.finish_reason is not None
        if now != before:
            seen[one.index] = now
            text, ids = one.text[before[0] :], one.token_ids[before[1] :]
            yield Delta(text, ids, one.index, one.finish_reason)


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt: a string, or a list of ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _default_blocks(model: Model, block_size: int, max_seqs: int, max_model_len: int) -> int:
    """Room for all sequences at their longest, within a quarter of the free memory."""
    c = model.config
    element = torch.empty(0, dtype=model.dtype).element_size()
    block_bytes = 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * element
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
        return max(1, int(0.9 * free) // block_bytes)
    most = max_seqs * -(-max_model_len // block_size)
    return max(1, min(most, psutil.virtual_memory().available // 4 // block_bytes))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestError(f"{name}={value!r}: expected {' or '.join(map(repr, choices))}")
