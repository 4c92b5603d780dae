"""Spindle as a peer among peers: one request by Engine, several by LLM, from the same weights."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

import spindle
from spindle import graphs
from spindle.bench.load import Request, serve
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.serve.llm import LLM

BLOCK_SIZE = 16


def can_quantize() -> bool:
    """Whether LLM takes `quantize`."""
    return "quantize" in inspect.signature(LLM).parameters


class Spindle:
    """Both engines over one model. No prefix is kept: what a turn stored is of no use to the next.

    settings: `directory`, `device`, `threads`, `seats` (requests at once), `max_len` (tokens of
    the longest), `max_prompt`.
    """

    version = f"spindle {spindle.__version__}"
    options: dict[str, Any] = {}  # noqa: RUF012 - of LLM

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        seats, max_len = settings["seats"], settings["max_len"]
        self.llm = LLM(
            settings["directory"],
            device=settings["device"],
            max_seqs=seats,
            max_batch_tokens=seats * (settings["max_prompt"] + 1),
            max_model_len=max_len,
            block_size=BLOCK_SIZE,
            num_blocks=seats * (-(-max_len // BLOCK_SIZE) + 1),
            prefix_cache=False,
            trace=1,
            **self.options,
        )
        self.engine = graphs.enable(Engine(self.llm.model, max_len))

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """The answers, when each one's first token came, and the seconds of it all."""
        reply = self._one(*requests[0]) if len(requests) == 1 else self._several(requests)
        if self.llm.model.device.type == "cuda":
            reply["peak_bytes"] = torch.cuda.max_memory_allocated()
        return reply

    def _one(self, prompt: list[int], new: int) -> dict[str, Any]:
        start = time.perf_counter()
        stream = self.engine.stream(prompt, new, temperature=0.0, ignore_eos=True)
        ids, first_s = [next(stream)], time.perf_counter() - start
        ids += stream
        return {"ids": [ids], "first_s": [first_s], "seconds": time.perf_counter() - start}

    def _several(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        load = [Request(n, tuple(ids), new) for n, (ids, new) in enumerate(requests)]
        run = serve(self.llm, load)
        ids, first_s = (
            [one.token_ids for one in run.records],
            [one.first_s for one in run.records],
        )
        return {"ids": ids, "first_s": first_s, "seconds": run.seconds}

    def top2_gap(self, ids: list[int]) -> float:
        """How far apart the log-probabilities of the two likeliest tokens after `ids` are."""
        params = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True, logprobs=2)
        records = self.llm.generate(ids, params)[0].outputs[0].logprobs
        assert records is not None
        first, second = records[0].top[:2]
        return first.logprob - second.logprob


class SpindleInt8(Spindle):
    """The same with weights in 8 bits."""

    options = {"quantize": "int8"}  # noqa: RUF012
