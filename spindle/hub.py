"""A name, a directory or a hub id -> the local directory that holds the checkpoint.

    resolve("tiny")            bundled with the package
    resolve("smollm2")         in spindle's cache, once `spindle fetch smollm2` has brought it
    resolve("./my/model")      a directory: config.json, *.safetensors, tokenizer.json
    resolve("gpt2")            downloaded by huggingface_hub into its own cache, or found there

They are tried in this order, and two of them may claim one string. A bundled name or a recipe's
name always means that model: a directory called `tiny` is reached as `./tiny` (or as a Path). A
directory that exists wins over a hub id of the same spelling, as in `org/name`.

HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN are read by huggingface_hub, and mean here what
they mean there. Our own cache is `cache_dir()`.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle import recipes
from spindle.errors import CheckpointError, ModelNotFound, brief, shown
from spindle.paths import cache_dir, why_no_file
from spindle.recipes import RECIPES

__all__ = [
    "KnownModel",
    "cache_dir",
    "cached_models",
    "fetch",
    "is_cached",
    "known_models",
    "resolve",
]

BUNDLED = {
    "tiny": "GPT-2 architecture, trained on Python's own documentation",
    "tiny-draft": "one small layer with the tokenizer of tiny: its draft model",
}
BUNDLED_IN = Path(__file__).parent / "checkpoints"
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
# Only what is read here. Pickles (*.bin, *.pt) can run code and are never fetched.
HUB_FILES = ["config.json", "generation_config.json", "tokenizer*.json", "*.jinja"]
HUB_FILES += ["special_tokens_map.json", "chat_template.json"]  # as older files have it
HUB_FILES += ["*.safetensors", "*.safetensors.index.json"]
HUB_FILES_NOT = ["*/*", "consolidated*"]  # copies of the same weights in other layouts
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class KnownModel:
    """A model that has a name here, for `spindle doctor` to list."""

    name: str
    about: str
    directory: Path  # where it lies, or would
    size_bytes: int  # on the disk; what it will take when it is not present
    present: bool
    command: str | None = None  # what brings it when it is not present


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The checkpoint directory of a bundled name, a fetched name, a directory, or a hub id.

    Only a hub id may cause a download. ModelNotFound when there is none of that name, with what
    there is and what would bring it; CheckpointError when a path exists and is no checkpoint.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        given = shown(name_or_path)
        raise ModelNotFound(f"model {given}: expected a name, a directory or a hub id")
    text = os.fspath(name_or_path)
    is_name = isinstance(name_or_path, str)
    if is_name and text in BUNDLED:
        return checked(BUNDLED_IN / text)
    if is_name and text in RECIPES:
        return fetched(text)
    if os.path.exists(path := os.path.expanduser(text)):
        return checked(Path(path))
    if is_name and HUB_ID.fullmatch(text):
        return checked(download(text))
    raise not_found(text, "there is no such directory")


def fetch(name: str, *, progress: bool | None = None) -> Path:
    """Bring a model to this machine and return its directory; at once if it is there and sound.

    `progress` says whether to report on stderr; None: only at a terminal. Errors as in `resolve`,
    and SpindleError when the cache cannot be written. A damaged cache is repaired.
    """
    if not isinstance(name, str) or name not in RECIPES:
        return resolve(name)
    show = sys.stderr.isatty() if progress is None else progress
    return recipes.fetch(RECIPES[name], show)


def is_cached(name: str) -> bool:
    """Whether `spindle fetch NAME` has brought this model, whole; reads no weights."""
    return name in RECIPES and recipes.flaw(recipes.place(RECIPES[name])) is None


def known_models() -> list[KnownModel]:
    """Bundled models, those that `fetch` can bring, and those in the hub's cache."""
    return [*bundled_models(), *recipe_models(), *hub_models()]


def cached_models() -> list[KnownModel]:
    """Those of the known models that were brought to this machine, whole."""
    return [model for model in (*recipe_models(), *hub_models()) if model.present]


def bundled_models() -> Iterator[KnownModel]:
    for name, about in BUNDLED.items():
        directory = BUNDLED_IN / name
        present = why_no_checkpoint(directory) is None
        yield KnownModel(name, about, directory, size_of(directory), present)


def recipe_models() -> Iterator[KnownModel]:
    for name, recipe in RECIPES.items():
        directory, present = recipes.place(recipe), is_cached(name)
        size_bytes = size_of(directory) if present else recipe.size_bytes
        command = f"spindle fetch {name}"
        yield KnownModel(name, recipe.about, directory, size_bytes, present, command)


def hub_models() -> Iterator[KnownModel]:
    """Checkpoints in huggingface_hub's cache: models--ORG--NAME/snapshots/COMMIT and refs/main."""
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        try:
            main = folder / "refs" / "main"
            commit = "" if why_no_file(main) else main.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = ""
        if not re.fullmatch(r"[\w-]+", commit, re.ASCII):  # a download that hardly began, or damage
            continue
        snapshot = folder / "snapshots" / commit
        if why_no_checkpoint(snapshot) is None:
            name = folder.name.removeprefix("models--").replace("--", "/")
            yield KnownModel(name, "in the hub's cache", snapshot, size_of(snapshot), present=True)


def size_of(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())


def fetched(name: str) -> Path:
    """The cached directory of a recipe, if it is whole by the sizes of its files."""
    directory = recipes.place(RECIPES[name])
    if reason := recipes.flaw(directory):
        state = "damaged" if directory.exists() else "not in the cache"
        raise ModelNotFound(
            f"{name} is {state} ({directory}: {reason}); `spindle fetch {name}` brings it"
        )
    return directory


def checked(path: Path) -> Path:
    if reason := why_no_checkpoint(path):
        raise CheckpointError(
            f"{path} is no checkpoint: {reason}; expected is a directory with config.json, "
            f"*.safetensors and tokenizer.json"
        )
    return path


def why_no_checkpoint(path: Path) -> str | None:
    """What a directory lacks to be a checkpoint, in words; None when it lacks nothing."""
    if not os.path.isdir(path):
        gguf = ", and GGUF files are not read" if path.suffix == ".gguf" else ""
        return f"it is a file{gguf}" if os.path.exists(path) else "it does not exist"
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError as error:
        return f"it cannot be listed ({error.strerror})"
    if "config.json" not in names:
        return f"it has no config.json (it holds {', '.join(names[:4]) or 'nothing'})"
    if any(name.endswith(".safetensors") for name in names):
        return None
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return f"its weights are pickles ({pickles[0]}), which can run code and are not read"
    return "it has no *.safetensors file"


def download(hub_id: str) -> Path:
    """The snapshot of a hub id: brought by huggingface_hub, or as its cache has it when offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class TerminalBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": None})  # None: unless at a terminal

    try:
        snapshot = snapshot_download(
            hub_id,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_NOT,
            tqdm_class=TerminalBar,
        )
    except Exception as error:  # HTTP, sockets, disk, refusals: many classes, one answer
        raise not_found(hub_id, f"no such directory here, and {cause_in_words(error)}") from error
    return Path(snapshot)


def cause_in_words(error: Exception) -> str:
    """Why the hub gave nothing, in less than a line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to those who accepted its terms and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no model of that name, or none that you may see"
    root = error.__cause__ or error
    if isinstance(root, errors.OfflineModeIsEnabled):
        part = "only a part of it is" if is_partial(error) else "it is not"
        return f"HF_HUB_OFFLINE is set while {part} in the hub's cache"
    first_line = str(root).partition("\n")[0]
    return f"the hub could not be asked ({type(root).__name__}: {brief(first_line)})"


def is_partial(error: Exception) -> bool:
    return (
        type(error).__name__ == "IncompleteSnapshotError"
    )  # newer than our oldest huggingface_hub


def not_found(text: str, reason: str) -> ModelNotFound:
    """The error for a name that cannot be had: the cause, a near miss, and what can be had."""
    near = difflib.get_close_matches(text, [*BUNDLED, *RECIPES], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    brought = [name if is_cached(name) else f"{name} (`spindle fetch {name}`)" for name in RECIPES]
    names = [*BUNDLED, *brought, *(model.name for model in hub_models())]
    return ModelNotFound(
        f"no model {shown(text)}{hint}: {reason}; there are {', '.join(names)}, "
        f"any directory with a checkpoint, and with a network the ids of the hub"
    )
