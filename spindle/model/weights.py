"""safetensors -> our models, every tensor accounted for; and seeded random weights.

A model is built by asking a `Source` for each weight by name and shape. Built once on the `Wishes`
source, which has nothing and writes down what is asked for, it says what a checkpoint must hold;
that is compared with the headers of the files before a byte of them is converted. So a file that
does not fit is refused whole, with every name that is missing, left over, or of the wrong shape.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle.config import ModelConfig, read_json
from spindle.errors import CheckpointError, RequestError
from spindle.model.gpt2 import GPT2
from spindle.model.layers import Model
from spindle.model.llama import Llama

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"gpt2": GPT2, "llama": Llama}

DTYPES = {"float64": torch.float64, "float32": torch.float32}
DTYPES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = ("F64", "F32", "F16", "BF16")  # safetensors' names of what we convert from


def load_hf(
    model: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> Model:
    """Load a Hugging Face checkpoint: a bundled or cached name, a directory, or a hub id.

    device "auto" is a CUDA GPU if there is one, else the CPU. dtype "auto" is float32 on a CPU and
    the checkpoint's own on a GPU. Raises ModelNotFound, ConfigError, CheckpointError.
    """
    from spindle import hub

    directory = hub.resolve(model)
    config = ModelConfig.from_directory(directory)
    place = pick_device(device)
    return load(directory, config, pick_dtype(dtype, place, config), place)


def load(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Build the model of `config` from the safetensors files of `directory`."""
    family = FAMILIES[config.model_type]
    checkpoint = Checkpoint(directory, config, family.prefix, family.buffers)
    checkpoint.check(wishes(config))
    return family(config, checkpoint.reader(dtype, device))


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The device asked for, or the best one here; a RequestError in words if it cannot be had."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise RequestError(f"device {device!r}: expected 'auto', 'cpu' or 'cuda'") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device {str(device)!r}: torch sees no CUDA GPU here; use 'cpu'")
    if place.type == "mps":
        raise RequestError(
            "device 'mps': not supported, since sampling is done in 64 bits, which Apple's GPUs "
            "do not have; use device='cpu'"
        )
    if place.type not in ("cpu", "cuda"):
        raise RequestError(f"device {str(device)!r}: expected 'auto', 'cpu' or 'cuda'")
    return place


def pick_dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """The dtype asked for; "auto" is float32 on a CPU, the checkpoint's on a GPU."""
    if dtype == "auto":
        stored = DTYPES.get(str(config.dtype), torch.float32)
        return torch.float32 if device.type == "cpu" else stored
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise RequestError(f"dtype {dtype!r}: expected 'auto' or one of {', '.join(DTYPES)}")
    return found


class Checkpoint:
    """The safetensors files of a directory: which tensors, of what shape, in which file."""

    def __init__(
        self, directory: Path, config: ModelConfig, prefix: str, buffers: tuple[str, ...] = ()
    ) -> None:
        self.directory, self.config = directory, config
        self.files: dict[str, tuple[Path, str]] = {}  # our name -> file, its name there
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(directory):
            for stored, (shape, kind) in _header(path).items():
                name = stored.removeprefix(prefix)
                if name.endswith(buffers):
                    continue
                if name in self.files:
                    raise CheckpointError(
                        f"{path}: {stored} is in {self.files[name][0].name} too; expected once"
                    )
                if kind not in STORED:
                    raise CheckpointError(
                        f"{path}: {stored} is stored as {kind}; expected one of {', '.join(STORED)}"
                    )
                self.files[name], self.shapes[name] = (path, stored), shape

    def check(self, wanted: Wishes) -> None:
        """Compare names and shapes with what the model asks for; all that differs, in one error."""
        shapes = dict(wanted.shapes)
        if self.config.tie_embeddings:  # either of the two may be left out (transformers, too)
            given = [name for name in wanted.tied if name in self.shapes] or wanted.tied[:1]
            for name in set(wanted.tied) - set(given):
                shapes.pop(name)
        faults = [
            f"missing: {name} {list(shape)}"
            for name, shape in shapes.items()
            if name not in self.shapes
        ]
        for name, shape in self.shapes.items():
            path, stored = self.files[name]
            if name not in shapes:
                faults.append(f"unexpected: {stored} {list(shape)} in {path.name}")
            elif shape != shapes[name]:
                faults.append(
                    f"misshapen: {stored} is {list(shape)} in {path.name}, "
                    f"expected {list(shapes[name])}"
                )
        if faults:
            listed = "\n  ".join(
                faults[:20] + [f"and {len(faults) - 20} more"] * (len(faults) > 20)
            )
            raise CheckpointError(
                f"{self.directory}: the weights are not those of its config.json "
                f"({self.config.model_type}):\n  {listed}"
            )

    def reader(self, dtype: torch.dtype, device: torch.device) -> Reader:
        """The source that reads this checkpoint, once `check` has found nothing."""
        return Reader(self, dtype, device)


class Reader:
    """The Source of a checked checkpoint: tensors of our own, converted one at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        path, stored = self._checkpoint.files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")  # memory-mapped, not read
        mapped = self._open[path].get_tensor(stored)
        # Always a copy: a weight must not change with the file that it came from.
        return mapped.to(self._device, self._dtype, copy=True)

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Tied weights are one tensor. As in transformers, two that differ are not tied after all,
        and of a tied pair either may stand for both."""
        given = [name for name in (embed, head) if name in self._checkpoint.files]
        first = self(given[0], rows, width)
        if len(given) == 1:
            return first, first
        second = self(given[1], rows, width)
        if self._checkpoint.config.tie_embeddings and torch.equal(first, second):
            return first, first
        return first, second


class Wishes:
    """A Source that has nothing: it writes down what a model asks for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tied: tuple[str, ...] = ()

    def __call__(self, name: str, *shape: int) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
        self.tied = (embed, head)
        return self(embed, rows, width), self(head, rows, width)


def wishes(config: ModelConfig) -> Wishes:
    """Names and shapes of the weights that a model of this config has."""
    source = Wishes()
    FAMILIES[config.model_type](config, source)
    return source


class RandomSource:
    """A Source of seeded normal weights: the same for a name and seed, whatever else is drawn.

    Matrices are scaled by gain / sqrt(inputs), so that activations neither fade nor blow up and
    logits have a standard deviation of about `gain`: far enough apart for argmax to mean something.
    """

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device, gain: float
    ) -> None:
        self._config, self._seed, self._gain = config, seed, gain
        self._like: dict[str, Any] = {"dtype": dtype, "device": device}

    def __call__(self, name: str, *shape: int) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:  # norms near 1, biases near 0
            centre = 0.0 if name.endswith("bias") else 1.0
            return (centre + 0.1 * noise).to(**self._like)
        return (noise * self._gain / self._config.width**0.5).to(**self._like)

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
        first = self(embed, rows, width)
        return first, first if self._config.tie_embeddings else self(head, rows, width)


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gain: float = 2.0,
) -> Model:
    """A model of this shape with random weights, for tests and for measuring where speed goes."""
    source = RandomSource(config, seed, dtype, torch.device(device), gain)
    return FAMILIES[config.model_type](config, source)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors file of a directory, or the shards that its index names."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return _shards(index)
    pickles = sorted(p.name for p in directory.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, which can run code: not loaded" if pickles else ""
    raise CheckpointError(
        f"{directory}: no weights; expected {single.name}, or {index.name} and its shards{hint}"
    )


def _shards(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: no weight_map; expected tensor name -> file name")
    shards = sorted({str(name) for name in names.values()})
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: shard {shard!r} is a path; expected a file beside it")
        if not (index.parent / shard).exists():
            raise CheckpointError(f"{index.parent / shard}: not found, but {index.name} names it")
    held = {name for shard in shards for name in _header(index.parent / shard)}
    absent = sorted(set(names) - held)
    if absent:
        raise CheckpointError(f"{index}: names tensors that no shard holds: {', '.join(absent)}")
    return [index.parent / shard for shard in shards]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of a safetensors file; opening it shows that it is whole."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError, struct.error) as cause:
        raise CheckpointError(
            f"{path}: damaged or not a safetensors file ({cause}); fetch it again"
        ) from None
    entries.pop("__metadata__", None)
    return {name: (tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}
