"""transformers as a peer: `generate` on padded batches, and its continuous batching."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spindle.bench.load import Request
from spindle.config import ModelConfig
from spindle.errors import SpindleError
from spindle.model.weights import pick_device, pick_dtype

PAGE = 256  # slots of a page of its cache: its own default
PATIENCE_S = 600  # without any answer


class Times:
    """A streamer of transformers that notes when each piece came; the first is the prompt."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by transformers with the prompt, then with each new token of all rows."""
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        """Called by transformers when all have come."""


def transformers_model(directory: Path, device: str = "auto") -> Any:
    """The checkpoint as transformers runs it: greedy, to the last token asked for, same dtype."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the checkpoint is a directory: nothing to ask for
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config, place = ModelConfig.from_directory(directory), pick_device(device)
    dtype = pick_dtype("auto", place, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(place)  # type: ignore[arg-type]  # its decorator hides the argument
    # Greedy and nothing else: whatever the checkpoint's generation_config.json asks for is dropped,
    # its end tokens too, so that all engines make the same number of tokens.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


class Padded:
    """`generate` on batches in the order of the requests, padded on the left, to their longest."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.model = transformers_model(Path(settings["directory"]), settings["device"])
        self.seats, self.version = settings["seats"], _version()

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """The answers, when each one's first token came, and the seconds of it all."""
        from spindle.bench.traffic import generate_in_batches  # it imports this module

        load = [Request(n, tuple(ids), new) for n, (ids, new) in enumerate(requests)]
        run = generate_in_batches(self.model, load, self.seats)
        ids, first_s = (
            [one.token_ids for one in run.records],
            [one.first_s for one in run.records],
        )
        return _with_peak(self.model, {"ids": ids, "first_s": first_s, "seconds": run.seconds})


class Continuous:
    """The manager that `generate_batch` starts and stops, kept from turn to turn.

    `generate_batch` itself has one length for all requests of a call. Its pool holds what the seats
    need at most: left to itself, it takes the memory there is.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.model = transformers_model(Path(settings["directory"]), settings["device"])
        self.version = _version()
        import transformers

        seats, max_len = settings["seats"], settings["max_len"]
        options = transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=seats * (-(-max_len // PAGE) + 1),
            max_batch_tokens=seats * (settings["max_prompt"] + 1),
            max_requests_per_batch=seats,
            allow_block_sharing=False,  # what a turn stored is of no use to the next
            auto_switch_to_flash=False,
        )
        self.manager = self.model.init_continuous_batching(continuous_batching_config=options)
        self.manager.start()

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """The answers, when each one's first token came, and the seconds of it all."""
        start, names = time.perf_counter(), []
        for ids, new in requests:
            names.append(self.manager.add_request(ids, max_new_tokens=new, record_timestamps=True))
        done: dict[str, Any] = {}
        while len(done) < len(names):
            result = self.manager.get_result(timeout=PATIENCE_S)
            if result is None or result.error is not None:
                words = "no answer came" if result is None else result.error
                raise SpindleError(f"continuous batching: {words}")
            done[result.request_id] = result
        end = time.perf_counter()
        answers = [done[name] for name in names]
        return _with_peak(
            self.model,
            {
                "ids": [one.generated_tokens for one in answers],
                "first_s": [one.timestamps[0] - start for one in answers],
                "seconds": end - start,
            },
        )


def _with_peak(model: Any, reply: dict[str, Any]) -> dict[str, Any]:
    """The peak of the GPU's memory is torch's to say; that of the host's is not."""
    if model.device.type == "cuda":
        reply["peak_bytes"] = torch.cuda.max_memory_allocated()
    return reply


def _version() -> str:
    import transformers

    return f"transformers {transformers.__version__}"
