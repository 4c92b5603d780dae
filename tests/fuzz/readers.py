"""Second opinions: each format read again by other code, strictly, as its document has it.

safetensors: 8 bytes of length, a JSON header, then the tensors without holes or overlaps; no name
twice. GGUF: header, keys, tensor infos, alignment, the tensors in order without overlaps.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Refused(Exception):
    """The strict reading finds a fault."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise Refused("a key stands twice")
    return dict(pairs)


WIDTHS = {"F64": (8, torch.float64), "F32": (4, torch.float32)}
WIDTHS |= {"F16": (2, torch.float16), "BF16": (2, torch.bfloat16)}


def safetensors(path: Path) -> dict[str, Tensor]:
    """name -> tensor of a safetensors file, from its bytes alone."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length], object_pairs_hook=unique)
    body, end, found = data[8 + length :], 0, {}
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        size, dtype = WIDTHS[entry["dtype"]]
        count = int(np.prod(entry["shape"], dtype=object)) if entry["shape"] else 1
        if start != end or stop - start != count * size:
            raise Refused(f"{name}: bytes {start} to {stop}, after {end}, for {count} numbers")
        flat = torch.frombuffer(bytearray(body[start:stop] or b"\0"), dtype=torch.uint8)
        found[name] = flat[: stop - start].view(dtype).reshape(entry["shape"])
        end = stop
    if end != len(body):
        raise Refused(f"{len(body) - end} bytes belong to no tensor")
    return found


class Bytes:
    """Little-endian numbers from bytes, none of them beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise Refused(f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, layout: str) -> Any:
        return struct.unpack("<" + layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()


SCALARS = dict(
    zip(range(13), ["B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"], strict=True)
)


def gguf_value(file: Bytes, kind: int) -> Any:
    if kind == 8:
        return file.text()
    if kind == 9:
        inner, count = file.number("I"), file.number("Q")
        return [gguf_value(file, inner) for _ in range(count)]
    if not SCALARS.get(kind):
        raise Refused(f"a value of type {kind}")
    return file.number(SCALARS[kind])


def gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors (float32, slowest axis first) of a GGUF file of F32 and Q8_0."""
    file = Bytes(path.read_bytes())
    if file.take(4) != b"GGUF" or file.number("I") not in (2, 3):
        raise Refused("no GGUF file")
    tensors, keys = file.number("Q"), file.number("Q")
    metadata = unique([(file.text(), gguf_value(file, file.number("I"))) for _ in range(keys)])
    infos = []
    for _ in range(tensors):
        name, axes = file.text(), file.number("I")
        shape = [file.number("Q") for _ in range(axes)][::-1]
        infos.append((name, (shape, file.number("I"), file.number("Q"))))
    unique(infos)
    alignment = metadata.get("general.alignment", 32)
    file.take(-file.at % alignment)
    base, end, found = file.at, 0, {}
    for name, (shape, kind, offset) in infos:
        if offset != end:
            raise Refused(f"{name} at {offset}, expected {end}")
        count = int(np.prod(shape, dtype=object))
        size = {0: 4 * count, 8: count // 32 * 34}[kind]
        file.at = base + offset
        raw = file.take(size)
        if kind == 0:
            values = np.frombuffer(raw, "<f4")
        else:
            blocks = np.frombuffer(raw, [("scale", "<f2"), ("q", "i1", 32)])
            values = blocks["scale"].astype("f4")[:, None] * blocks["q"].astype("f4")
        found[name] = values.reshape(shape)
        end = offset + size + -size % alignment
    return metadata, found
