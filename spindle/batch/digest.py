"""What decides an answer beside its line: the checkpoint's bytes, and how an engine computes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from spindle.batch.work import EngineOptions, is_invariant
from spindle.serve.llm import LLM
from spindle.serve.passes import kernels_of

FILES = ("*.json", "*.jinja", "*.safetensors")  # what is read of a checkpoint


def settings_of(llm: LLM, options: EngineOptions) -> str:
    """All that has to be the same for results to be the same, as it has turned out: a=b, c=d.

    Not in it, since no token depends on them where `batch_invariant` is on: how many sequences,
    blocks, threads and engines there are, and where the checkpoint lies. Nor is it known what other
    versions of spindle and torch would give.
    """
    model = llm.model
    assert model.directory is not None, "it was loaded from one"
    settings = {
        "checkpoint": checkpoint_digest(model.directory)[:16],
        "device": _device(model.device),
        "kernels": kernels_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": options.quantize,
        "max_model_len": llm.max_model_len,
        "batch_invariant": is_invariant(model, options),
    }
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def checkpoint_digest(directory: Path) -> str:
    """A SHA-256, in hexadecimal, of a model's files, the same wherever they lie.

    Every byte is read, about a second for each GB: a model that was trained on differs anywhere.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in directory.glob(pattern)):
        with path.open("rb") as file:
            its = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {its}\n".encode())
    return digest.hexdigest()


def _device(device: torch.device) -> str:
    """A CPU, or a kind of GPU: libraries take their sums in another order on another one."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
