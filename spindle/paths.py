"""Where spindle keeps what it fetches and what it builds; and what stands at a path."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spindle.errors import SpindleError, brief

LEFTOVER_S = 3600  # what nothing was written to for so long is nobody's
STAGING = ".staging-"


def cache_dir() -> Path:
    """Our own cache: $SPINDLE_CACHE, else $XDG_CACHE_HOME/spindle, else ~/.cache/spindle.

    SpindleError: nobody here has the home directory that is meant.
    """
    shared = os.environ.get("XDG_CACHE_HOME", "")
    root = shared if os.path.isabs(shared) else "~/.cache"  # as XDG demands
    return expanded(os.environ.get("SPINDLE_CACHE") or f"{root}/spindle", "SPINDLE_CACHE")


def expanded(path: str, name: str) -> Path:
    """A path with the home directory that its ~ stands for. SpindleError: there is none; `name`."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SpindleError(
            f"{name}: {brief(path)}: no user here has that home directory; expected a directory"
        ) from None


def why_no_file(path: Path) -> str | None:
    """What stands at a path instead of an ordinary file, in words; None if it is one.

    A pipe would be waited for and a device never ends, so neither is opened. A link is followed,
    wherever it leads: the hub's cache consists of them.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such file"
    except (OSError, ValueError) as error:  # a loop of links, a name that no file can have
        return f"it cannot be looked at: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is no file, but a pipe or a device"


@contextmanager
def staging_beside(target: Path) -> Iterator[Path]:
    """A new folder on the same disk, named after the target; gone afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}{STAGING}", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def sweep(directory: Path, pattern: str, older_s: float = LEFTOVER_S) -> None:
    """Remove the files and folders of that name that a killed process may have left.

    A younger one may be that of a process that is at work.
    """
    for leftover in directory.glob(pattern):
        with suppress(OSError):  # somebody else sees to it
            if time.time() - leftover.stat().st_mtime >= older_s:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
