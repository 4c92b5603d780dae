"""A digest of what decides an answer beside its line: the same wherever the checkpoint lies."""

from __future__ import annotations

import hashlib
import json

from spindle import hub
from spindle.batch.work import EngineOptions

CHANGES_TOKENS = ("dtype", "quantize", "max_model_len", "batch_invariant")
FILES = ("*.json", "*.jinja", "*.safetensors")  # what is read of a checkpoint


def digest_of(options: EngineOptions) -> str:
    """A SHA-256, in hexadecimal, of the model's files and of the options that change tokens.

    Every byte is read, about a second for each GB: a model that was trained on differs anywhere.
    """
    changes = {name: getattr(options, name) for name in CHANGES_TOKENS}
    digest = hashlib.sha256(json.dumps(changes).encode())
    directory = hub.resolve(options.model)
    for path in sorted(path for pattern in FILES for path in directory.glob(pattern)):
        with path.open("rb") as file:
            its = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"\n{path.name} {its}\n".encode())
    return digest.hexdigest()
