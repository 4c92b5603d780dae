"""A GGUF file, read without trust: each count, length, size and offset is held against its end.

    magic, version, counts | keys, values | name, shape, type, offset of each tensor | the tensors

The library's own reader believes what it reads: an array that claims 2^60 elements keeps it busy
until memory ends. Here nothing is made that the file does not hold, the tensors stay mapped, and
their places must be those of the format: aligned, in order, one after the other ("GGUF", in the
documentation of ggml; its loader asks for the same).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from spindle.errors import CheckpointError, brief
from spindle.paths import why_no_file

Metadata = dict[str, Any]

VERSIONS = (2, 3)
MOST_AXES = 4
SCALARS = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "<u1",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}
PLAIN = {gguf.GGMLQuantizationType.F32: "<f4", gguf.GGMLQuantizationType.F16: "<f2"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file has it; `data` is mapped, and what `gguf.dequantize` takes."""

    name: str
    shape: tuple[int, ...]  # slowest axis first, as everywhere but in ggml
    tensor_type: gguf.GGMLQuantizationType
    data: np.ndarray


def read(file: Path) -> tuple[Metadata, list[StoredTensor]]:
    """The metadata and the tensors of a GGUF file. CheckpointError: names file and fault."""
    try:
        if why := why_no_file(file):
            raise ValueError(why)
        reader = _Reader(np.memmap(file, dtype=np.uint8, mode="r"))
        num_tensors, num_keys = reader.opening()
        metadata = dict(_no_key_twice([reader.key_and_value() for _ in range(num_keys)]))
        infos = _no_key_twice([reader.tensor_info() for _ in range(num_tensors)])
        return metadata, reader.tensors(infos, _alignment(metadata))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a GGUF file that can be read: {brief(error)}"
        ) from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands in it twice")
    return pairs


def _alignment(metadata: Metadata) -> int:
    """Where tensors begin: at multiples of this power of two."""
    stated = metadata.get("general.alignment", 32)
    if isinstance(stated, bool) or not isinstance(stated, int) or stated.bit_count() != 1:
        raise ValueError(f"general.alignment is {stated!r:.40}; expected a power of two")
    return stated


class _Reader:
    """A place in a mapped file that moves on with what is read; ValueError: the file ends."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def opening(self) -> tuple[int, int]:
        """The numbers of tensors and of keys, after the magic and the version."""
        if bytes(self.take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self.number("I")) not in VERSIONS:
            raise ValueError(f"its version is {version}; expected {VERSIONS[0]} or {VERSIONS[1]}")
        return self.number("Q"), self.number("Q")

    def take(self, size_bytes: int) -> np.ndarray:
        """The next bytes, still mapped."""
        start, self.at = self.at, self.at + size_bytes
        if self.at > len(self.data):
            raise ValueError(
                f"it ends at byte {len(self.data)}, and {size_bytes} are expected from {start} on"
            )
        return self.data[start : self.at]

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(f"<{layout}", self.take(struct.calcsize(layout)).tobytes())
        return int(value)

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8")

    def key_and_value(self) -> tuple[str, Any]:
        return self.text(), self.value(self.number("I"))

    def value(self, kind: int) -> Any:
        if kind != gguf.GGUFValueType.ARRAY:
            return self.values(kind, 1)[0]
        return self.values(self.number("I"), self.number("Q"))

    def values(self, kind: int, count: int) -> list[Any]:
        """So many values of one type: strings, or numbers; an array in an array is refused."""
        if kind == gguf.GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a value is of type {kind}, or an array in an array: not known")
        dtype = np.dtype(SCALARS[gguf.GGUFValueType(kind)])
        numbers: list[Any] = self.take(count * dtype.itemsize).view(dtype).tolist()
        if kind != gguf.GGUFValueType.BOOL:
            return numbers
        if not set(numbers) <= {0, 1}:
            raise ValueError(f"a boolean is {max(numbers)}; expected 0 or 1")
        return [number == 1 for number in numbers]

    def tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Name -> shape, type, offset."""
        name, axes = self.text(), self.number("I")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"{name} has {axes} axes; expected 1 to {MOST_AXES}")
        shape = tuple(self.number("Q") for _ in range(axes))
        return name, (shape[::-1], self.number("I"), self.number("Q"))

    def tensors(self, infos: list[tuple[str, Any]], alignment: int) -> list[StoredTensor]:
        """The tensors, from here to the end of the file."""
        self.take(-self.at % alignment)
        base, found = self.at, []
        for name, (shape, kind, offset) in infos:
            self.take(-self.at % alignment)
            if self.at - base != offset:
                raise ValueError(f"{name} is at {offset}; expected {self.at - base}, in order")
            found.append(self.tensor(name, shape, kind))
        return found

    def tensor(self, name: str, shape: tuple[int, ...], kind: int) -> StoredTensor:
        try:
            known = gguf.GGMLQuantizationType(kind)
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[known]
        except (ValueError, KeyError):
            raise ValueError(f"{name} is of type {kind}: not known") from None
        if 0 in shape or shape[-1] % per_block:
            raise ValueError(f"{name} is {list(shape)}; expected rows of blocks of {per_block}")
        row_bytes = shape[-1] // per_block * block_bytes
        data = self.take(math.prod(shape[:-1]) * row_bytes)
        if known in PLAIN:
            return StoredTensor(name, shape, known, data.view(PLAIN[known]).reshape(shape))
        return StoredTensor(name, shape, known, data.reshape(*shape[:-1], row_bytes))
