"""Where spindle keeps what it fetches and what it builds; and what stands at a path."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_dir() -> Path:
    """Our own cache: $SPINDLE_CACHE, else $XDG_CACHE_HOME/spindle, else ~/.cache/spindle."""
    if own := os.environ.get("SPINDLE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"  # as XDG demands
    return root / "spindle"


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
