"""CTranslate2 as a peer, converted from the checkpoint. Nothing here imports torch to run it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def convert(directory: Path, target: Path, quantization: str) -> None:
    """Write the checkpoint of `directory` into `target`, which is made, as CTranslate2 reads it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the checkpoint is a directory: nothing to ask for
    import transformers
    from ctranslate2.converters import TransformersConverter

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    TransformersConverter(str(directory)).convert(str(target), quantization=quantization)


class CTranslate2:
    """A Generator, its batches sorted by the length of the prompt, as it does it by itself.

    A row that has its tokens leaves its batch, as it does where an end token comes; nobody takes
    its seat. settings: those of `Spindle`, and `compute_type`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import ctranslate2

        self.version, self.seats = f"ctranslate2 {ctranslate2.__version__}", settings["seats"]
        self.max_len, model = settings["max_len"], Path(settings["model"])
        self.tokens = json.loads((model / "vocabulary.json").read_text(encoding="utf-8"))
        self.generator = ctranslate2.Generator(
            str(model),
            device="cpu",
            compute_type=settings["compute_type"],
            inter_threads=1,
            intra_threads=settings["threads"],
        )

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """The answers, when each one's first token came, and the seconds of it all."""
        ids: list[list[int]] = [[] for _ in requests]
        first_s = [0.0] * len(requests)

        def note(step: Any) -> bool:  # True: this row has had enough
            row, new = ids[step.batch_id], requests[step.batch_id][1]
            if not row:
                first_s[step.batch_id] = time.perf_counter() - start
            row.append(step.token_id)
            return len(row) >= new

        start = time.perf_counter()
        self.generator.generate_batch(
            [[self.tokens[n] for n in prompt] for prompt, _ in requests],
            max_batch_size=self.seats,
            max_length=self.max_len,  # above what any row asks for: `note` ends them
            end_token=[],
            include_prompt_in_result=False,
            callback=note,
        )
        return {"ids": ids, "first_s": first_s, "seconds": time.perf_counter() - start}
