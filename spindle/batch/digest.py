"""A digest of what decides an answer beside its line: the same wherever the checkpoint lies."""

from __future__ import annotations

import hashlib
import json

from spindle import hub
from spindle.batch.work import EngineOptions

CHANGES_TOKENS = ("dtype", "quantize", "max_model_len", "batch_invariant")
FILES = ("*.json", "*.jinja", "*.safetensors")  # what is read of a checkpoint
WHOLE_BYTES = 32 * 2**20  # a larger file is known by its size and its two ends
END_BYTES = 2**20


def digest_of(options: EngineOptions) -> str:
    """A SHA-256, in hexadecimal, of the model's files and of the options that change tokens."""
    changes = {name: getattr(options, name) for name in CHANGES_TOKENS}
    digest = hashlib.sha256(json.dumps(changes).encode())
    directory = hub.resolve(options.model)
    for path in sorted(path for pattern in FILES for path in directory.glob(pattern)):
        size_bytes = path.stat().st_size
        digest.update(f"\n{path.name} {size_bytes}\n".encode())
        with path.open("rb") as file:
            if size_bytes <= WHOLE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(END_BYTES))
                file.seek(size_bytes - END_BYTES)
                digest.update(file.read())
    return digest.hexdigest()
