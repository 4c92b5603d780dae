"""Tasks through one engine: added as it has room, answered as they end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spindle import hub
from spindle.batch.lines import RESULT_ID, Refused, RunWith, Task, result
from spindle.decode.params import SamplingParams
from spindle.errors import NumericsError, SpindleError
from spindle.interrupts import held_back
from spindle.model.layers import Model
from spindle.model.weights import load_hf
from spindle.openai_form import check_numbers, response
from spindle.serve.llm import LLM
from spindle.serve.outputs import RequestOutput
from spindle.serve.passes import has_own_bits
from spindle.tokenizer import Tokenizer

WINDOW = 2  # prompts in the engine for each sequence that it runs: those that wait keep it busy
ROWS = 16  # of a step, for each sequence: prompts then wait for few steps


@dataclass(frozen=True)
class EngineOptions:
    """What `engine` is made of; names and meanings as LLM has them."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    max_seqs: int = 32
    max_model_len: int | None = None
    num_blocks: int | None = None
    batch_invariant: bool | None = None  # None: where it costs next to nothing

    @property
    def window(self) -> int:
        """Prompts that an engine has at once, and not many more."""
        return WINDOW * self.max_seqs


def engine(options: EngineOptions) -> LLM:
    """The engine of these options. SpindleError: there is no such model, or it cannot be."""
    directory = hub.resolve(options.model)
    model = load_hf(directory, options.device, options.dtype, options.quantize)
    return LLM(
        model,
        tokenizer=Tokenizer(directory),
        num_blocks=options.num_blocks,
        max_model_len=options.max_model_len,
        max_seqs=options.max_seqs,
        max_batch_tokens=max(512, ROWS * options.max_seqs),
        batch_invariant=is_invariant(model, options),
    )


def is_invariant(model: Model, options: EngineOptions) -> bool:
    """Whether answers depend on nothing that runs beside them: by default where it is cheap."""
    return has_own_bits(model) if options.batch_invariant is None else options.batch_invariant


@dataclass(frozen=True)
class Answer:
    """A task that is done, and its line of OUT."""

    number: int
    result: dict[str, Any]


Ended = Answer | Refused


class Desk:
    """The tasks that an engine has, and what became of their requests so far."""

    def __init__(self, llm: LLM, run_with: RunWith) -> None:
        self._llm, self._run_with = llm, run_with
        self._requests: dict[str, Task] = {}
        self._outputs: dict[int, dict[str, RequestOutput | None]] = {}  # of each task's requests

    def __len__(self) -> int:
        return len(self._requests)  # that have not ended: one for each prompt

    def add(self, task: Task) -> Refused | None:
        """Queue all prompts of a task, or none and say why."""
        try:
            prompts = task.asked.prompt_ids(self._llm)
            params = [_seeded(task, index) for index in range(len(prompts))]
            names = [f"line {task.number}, prompt {index}" for index in range(len(prompts))]
            self._llm.add_all(prompts, params, names)
        except SpindleError as error:
            return Refused(task.number, task.custom_id, error)
        self._requests |= dict.fromkeys(names, task)
        self._outputs[task.number] = dict.fromkeys(names)
        return None

    def step(self) -> list[Ended]:
        """Run the engine once; returns the tasks of which it was the last step."""
        ended: list[Ended] = []
        for output in self._llm.step():
            if output.finished:
                task = self._requests.pop(output.request_id)
                outputs = self._outputs[task.number]
                outputs[output.request_id] = output
                if None not in outputs.values():
                    del self._outputs[task.number]
                    ended.append(self._ended(task, [one for one in outputs.values() if one]))
        return ended

    def _ended(self, task: Task, outputs: list[RequestOutput]) -> Ended:
        try:
            check_numbers(outputs)
        except NumericsError as error:
            return Refused(task.number, task.custom_id, error, 500)
        result_id = self._run_with.result_id(task.raw)
        kind = "cmpl-" if task.asked.messages is None else "chatcmpl-"
        assert self._llm.tokenizer is not None
        body = response(
            *(task.asked, outputs, self._llm.tokenizer),
            response_id=kind + result_id.removeprefix(RESULT_ID),
            model=self._run_with.model,
            created_s=int(time.time()),
        )
        body["system_fingerprint"] = self._run_with.settings
        return Answer(task.number, result(result_id, task.custom_id, 200, body))


def _seeded(task: Task, index: int) -> SamplingParams:
    """The parameters of one of a task's prompts, with the seed that it has whenever it is run."""
    params = task.asked.params
    return (
        params if params.seed is not None else replace(params, seed=seed_of(task.custom_id, index))
    )


def seed_of(custom_id: str, index: int) -> int:
    """The seed of a task's prompt that has none: the same whenever it is run.

    The first 63 bits of a SHA-256, of the custom_id and of the prompt's place in the body.
    """
    digest = hashlib.sha256(f"{index} {custom_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def answer_here(
    llm: LLM,
    run_with: RunWith,
    tasks: Iterator[Task],
    take: Callable[[Ended], object],
    window: int,
) -> None:
    """Answer all tasks with one engine; each goes to `take` in the step that ends it.

    Ctrl-C waits until what a step has ended is taken.
    """
    desk, more = Desk(llm, run_with), True
    while more or len(desk):
        while more and len(desk) < window:
            task = next(tasks, None)
            more = task is not None
            if task is not None and (refused := desk.add(task)):
                take(refused)
        with held_back():
            for ended in desk.step():
                take(ended)
