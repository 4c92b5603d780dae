"""safetensors -> our models, every tensor accounted for; and seeded random weights.

A model is built by asking a `Source` for each weight by name and shape. Built once on the `Wishes`
source, which has nothing and writes down what is asked for, it says what a checkpoint must hold;
that is compared with the headers of the files before a byte of them is converted. So a file that
does not fit is refused whole, with every name that is missing, left over, or of the wrong shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle.config import ModelConfig, read_json
from spindle.errors import CheckpointError, ConfigError, RequestError, brief, shown
from spindle.kernels import Weight, native_sampling, pack
from spindle.model.gpt2 import GPT2
from spindle.model.layers import Model, Source, Table
from spindle.model.llama import Llama
from spindle.model.split import SplitTable, cuts, part_of
from spindle.parallel import ALONE, Ranks, current
from spindle.paths import why_no_file

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"gpt2": GPT2, "llama": Llama}
FAMILIES |= dict.fromkeys(("mistral", "qwen2", "qwen3"), Llama)

DTYPES = {"float64": torch.float64, "float32": torch.float32}
DTYPES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = ("F64", "F32", "F16", "BF16")  # safetensors' names of what we convert from
TABLE_BYTES = 2**29  # of RoPE's table: a model with smaller weights than that may have this much


def load_hf(
    model: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    whole: bool = False,
) -> Model:
    """Load a Hugging Face checkpoint: a bundled or cached name, a directory, or a hub id.

    device "auto" is a CUDA GPU if there is one, else the CPU. dtype "auto" is float32 on a CPU and
    the checkpoint's own on a GPU. quantize "int8": the weights of linear layers, the head's among
    them, become integers with a scale for each output; all else stays in `dtype`. In a process that
    is one of several ranks (`parallel`) this is its part of the model, or with whole=True all of
    it. Raises RequestError, ModelNotFound, ConfigError, CheckpointError.

    Examples:

        >>> from spindle import load_hf
        >>> model = load_hf("tiny", device="cpu", dtype="float64")
        >>> model.dtype, model.config.num_layers, model.config.vocab_size
        (torch.float64, 6, 4096)
    """
    from spindle import hub

    check_quantize(quantize)
    directory = hub.resolve(model)
    config = ModelConfig.from_directory(directory)
    place = pick_device(device)
    ranks = ALONE if whole else current()
    return load(directory, config, pick_dtype(dtype, place, config), place, quantize, ranks)


def load(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None = None,
    ranks: Ranks = ALONE,
) -> Model:
    """Build the model of `config`, or a rank's part, from the safetensors files of `directory`."""
    part = part_of(config, ranks.count, directory.name)
    if quantize is not None and ranks.count > 1:
        right = "whose scales are of whole rows; expected None, or one process"
        raise RequestError(f"quantize={quantize!r}: not done for the part of a rank, {right}")
    family = FAMILIES[config.model_type]
    checkpoint = Checkpoint(directory, config, family.prefix, family.buffers)
    checkpoint.check(wishes(config, checkpoint))
    checkpoint.check_positions()
    if device.type == "cpu" and dtype == torch.float32:
        native_sampling.available()  # compiled now, if it must be, and not at the first token
    source = checkpoint.reader(dtype, device, quantize)
    if ranks.count > 1:
        source = PartReader(checkpoint, dtype, device, quantize, ranks, family.stacked)
    model = family(part, source)
    model.directory = directory
    return model


def check_quantize(quantize: str | None) -> None:
    """RequestError in words for what weights cannot be turned into."""
    if quantize is not None and not (isinstance(quantize, str) and quantize == "int8"):
        raise RequestError(f"quantize={shown(quantize)}: expected None or 'int8'")


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The device asked for, or the best one here; a RequestError in words if it cannot be had."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise RequestError(f"device {shown(device)}: expected 'auto', 'cpu' or 'cuda'") from None
    seen = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= seen:
        raise RequestError(f"device {str(device)!r}: torch sees {seen or 'no'} CUDA GPU here")
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
    if isinstance(dtype, str) and dtype == "auto":
        stored = DTYPES.get(str(config.dtype), torch.float32)
        return torch.float32 if device.type == "cpu" else stored
    found = DTYPES.get(shown(dtype).strip("'").removeprefix("torch."))
    if found is None:
        raise RequestError(f"dtype {shown(dtype)}: expected 'auto' or one of {', '.join(DTYPES)}")
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
                where = f"{path}: {brief(stored)} is"
                if name in self.files:
                    raise CheckpointError(
                        f"{where} in {self.files[name][0].name} too; expected once"
                    )
                if kind not in STORED:
                    known = ", ".join(STORED)
                    raise CheckpointError(f"{where} stored as {kind}; expected one of {known}")
                self.files[name], self.shapes[name] = (path, stored), shape

    def check(self, wanted: Wishes) -> None:
        """Compare names and shapes with what the model asks for; all that differs, in one error."""
        shapes = dict(wanted.shapes)
        if self.config.tie_embeddings:  # either of the two may be left out (transformers, too)
            given = [name for name in wanted.pair if name in self.shapes] or wanted.pair[:1]
            for name in set(wanted.pair) - set(given):
                shapes.pop(name)
        faults = [
            f"missing: {name} {list(shape)}"
            for name, shape in shapes.items()
            if name not in self.shapes
        ]
        for name, shape in self.shapes.items():
            path, stored = self.files[name]
            there, found = brief(stored), f"{brief(list(shape))} in {path.name}"
            if name not in shapes:
                faults.append(f"unexpected: {there} {found}")
            elif shape != shapes[name]:
                faults.append(f"misshapen: {there} is {found}, expected {list(shapes[name])}")
        if faults:
            more = [f"and {len(faults) - 20} more"] * (len(faults) > 20)
            raise self.misfit("\n  ".join([":", *faults[:20], *more]))

    def misfit(self, words: str) -> CheckpointError:
        """The error for weights of another model than that of config.json."""
        return CheckpointError(
            f"{self.directory}: the weights are not those of its config.json "
            f"({self.config.model_type}){words}"
        )

    def check_positions(self) -> None:
        """No file holds RoPE's table: a length out of all proportion to the weights is refused."""
        rope, positions = self.config.rope, self.config.max_positions
        table_bytes = positions * self.config.head_dim * 4  # cos and sin of D/2 angles in float32
        weights_bytes = 4 * sum(map(math.prod, self.shapes.values()))
        if rope is not None and table_bytes > max(TABLE_BYTES, weights_bytes):
            raise ConfigError(
                f"{self.directory / 'config.json'}: max_position_embeddings is {positions}; "
                f"its table of RoPE takes {table_bytes / 1e9:,.1f} GB, for "
                f"{weights_bytes / 1e9:,.1f} GB of weights; expected is no more than those, or "
                f"{TABLE_BYTES / 1e9:.1f} GB"
            )

    def reader(
        self, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> Reader:
        """The source that reads this checkpoint, once `check` has found nothing."""
        return Reader(self, dtype, device, quantize)


class Reader(Source):
    """The Source of a checked checkpoint: it converts straight from the mapped file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantize: str | None = None,
    ) -> None:
        super().__init__(dtype, device, quantize)
        self.tied, self.spare = checkpoint.config.tie_embeddings, spare_head(checkpoint.config)
        self._files = checkpoint.files
        self._open: dict[Path, Any] = {}

    def fill(self, out: Tensor, name: str) -> None:
        file, stored = self._file_of(name)
        out.copy_(file.get_tensor(stored))

    def _file_of(self, name: str) -> tuple[Any, str]:
        """The file that has a tensor, and what it is called there."""
        path, stored = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")  # memory-mapped, not read
        return self._open[path], stored

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Table, Weight]:
        """Of a tied pair either may stand for both; two that differ are not tied after all.

        That is how transformers has it.
        """
        given = [name for name in (embed, head) if name in self._files]
        table = self(given[0], rows, width)
        if len(given) == 1:
            return table, self.tied_head(table)
        other = self(given[1], rows, width)
        same = self.tied and torch.equal(table, other)
        return table, self.tied_head(table) if same else pack(other, None, self.quantize)


class PartReader(Reader):
    """The Source of one rank's part, asked for the shapes that this has (`model.split.part_of`).

    Of a tensor that is cut, the part is all that is read. stacked: ends of names of tensors that
    are several matrices, and how many.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantize: str | None,
        ranks: Ranks,
        stacked: dict[str, int],
    ) -> None:
        super().__init__(checkpoint, dtype, device, quantize)
        self._shapes, self._ranks, self._stacked = checkpoint.shapes, ranks, stacked

    def fill(self, out: Tensor, name: str) -> None:
        file, stored = self._file_of(name)
        held = file.get_slice(stored)  # nothing is read yet
        ends = (n for end, n in self._stacked.items() if name.rpartition(".")[0].endswith(end))
        for here, there in cuts(out.shape, self._shapes[name], self._ranks.rank, next(ends, 1)):
            out[here].copy_(held[there])

    def linear(
        self, parts: dict[str, int], inputs: int, biased: bool, transposed: bool = False
    ) -> Weight:
        """Of a weight with fewer inputs than the whole: one term of a sum, the bias in rank 0's."""
        weight = super().linear(parts, inputs, biased, transposed)
        whole = self._shapes[f"{next(iter(parts))}.weight"]
        if inputs < whole[0 if transposed else 1]:
            weight.join = self._ranks.sum
            if weight.bias is not None and self._ranks.rank > 0:
                weight.bias.zero_()  # there all the same: every rank's part has as many bytes
        return weight

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Table, Weight]:
        """A part of the vocabulary, in both."""
        table, weight = super().embeddings(embed, head, rows // self._ranks.count, width)
        assert isinstance(table, Tensor)
        weight.join = self._ranks.gather
        return SplitTable(table, self._ranks), weight


class Wishes(Source):
    """A Source that has nothing: it writes down what a model asks for.

    Asked for many more tensors than the `held` checkpoint has, or for one larger than any
    file, it raises that checkpoint's CheckpointError: config.json may ask for anything.
    """

    def __init__(self, held: Checkpoint | None = None) -> None:
        self.held = held
        super().__init__(torch.float32, torch.device("meta"))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.pair: tuple[str, ...] = ()  # the two names that may stand for one tensor

    def fill(self, out: Tensor, name: str) -> None:
        self.shapes[name] = tuple(out.shape)
        if self.held and len(self.shapes) > 2 * len(self.held.shapes) + 1000:
            asked, held = len(self.shapes), len(self.held.shapes)
            raise self.held.misfit(f": it has at least {asked} tensors, and the files hold {held}")

    def _empty(self, *shape: int) -> Tensor:
        if self.held and math.prod(shape) >= 2**60:  # bytes and strides are counted in 64 bits
            raise self.held.misfit(f": it has a tensor of {' x '.join(map(str, shape))} numbers")
        return super()._empty(*shape)

    def embeddings(self, embed: str, head: str, rows: int, width: int) -> tuple[Table, Weight]:
        self.pair = (embed, head)
        return super().embeddings(embed, head, rows, width)


def wishes(config: ModelConfig, held: Checkpoint | None = None) -> Wishes:
    """Names and shapes of the weights that a model of this config has, embedding and head both."""
    source = Wishes(held)
    if config.rope is not None:  # no weight depends on it, and its table takes memory
        config = replace(config, max_positions=1)
    FAMILIES[config.model_type](config, source)
    return source


def spare_head(config: ModelConfig) -> bool:
    """Whether a tied embedding may be packed once more for the head.

    Loading is to hold no more than 1.25 times the weights; where the embedding is more than a fifth
    of them, as in GPT-2's smallest, the head reads the plain one. (2.5% are
    left for what the allocator cannot use again; a few megabytes are always to be had.)
    """
    total = sum(math.prod(shape) for shape in wishes(config).shapes.values())
    head = config.vocab_size * config.width
    passing = max(2 * config.mlp_width, 3 * config.width) * config.width  # the largest to pack
    return head < 4e6 or head + passing <= 0.225 * (total - head)


class RandomSource(Source):
    """A Source of seeded normal weights: the same for a name and seed, whatever else is drawn.

    Matrices are scaled by gain / sqrt(inputs), so that activations neither fade nor blow up and
    logits have a standard deviation of about `gain`: far enough apart for argmax to mean something.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        gain: float,
        quantize: str | None = None,
    ) -> None:
        super().__init__(dtype, device, quantize)
        self.tied, self.spare = config.tie_embeddings, spare_head(config)
        self._seed, self._scale = seed, gain / config.width**0.5

    def fill(self, out: Tensor, name: str) -> None:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        noise = torch.randn(out.shape, generator=generator)
        centre = 0.0 if name.endswith("bias") else 1.0
        out.copy_(noise * self._scale if noise.ndim > 1 else centre + 0.1 * noise)


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gain: float = 2.0,
    quantize: str | None = None,
) -> Model:
    """A model of this shape with random weights, for tests and for measuring where speed goes."""
    check_quantize(quantize)
    source = RandomSource(config, seed, dtype, torch.device(device), gain, quantize)
    return FAMILIES[config.model_type](config, source)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors file of a directory, or the shards that its index names."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if os.path.lexists(single):
        return [single]
    if os.path.lexists(index):
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
    shards = sorted({shown(name) if not isinstance(name, str) else name for name in names.values()})
    for shard in shards:
        if Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{index}: shard {shown(shard)} is a path; expected a file beside it"
            )
        if not shard.endswith(".safetensors"):  # a pickle, for one
            raise CheckpointError(f"{index}: shard {shown(shard)}; expected a *.safetensors file")
        if why := why_no_file(index.parent / shard):
            path = brief(index.parent / shard)
            raise CheckpointError(f"{path}: not found, but {index.name} names it ({why})")
    held = {name for shard in shards for name in _header(index.parent / shard)}
    absent = sorted(set(names) - held)
    if absent:
        some = ", ".join(map(brief, absent[:10])) + f", and {len(absent) - 10} more" * (
            len(absent) > 10
        )
        raise CheckpointError(f"{index}: names tensors that no shard holds: {some}")
    return [index.parent / shard for shard in shards]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of a safetensors file; opening it shows that it is whole."""
    try:
        if why := why_no_file(path):
            raise OSError(why)
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length), object_pairs_hook=_no_name_twice)
    except (SafetensorError, OSError, ValueError, struct.error) as cause:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, but it is cut off or damaged "
            f"({brief(cause)}); bring it again"
        ) from None
    entries.pop("__metadata__", None)
    return {name: (tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The format allows a name once; of two, readers take different ones."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return entries
