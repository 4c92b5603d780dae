"""Where spindle keeps what it fetches and what it builds."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Our own cache: $SPINDLE_CACHE, else $XDG_CACHE_HOME/spindle, else ~/.cache/spindle."""
    if own := os.environ.get("SPINDLE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"  # as XDG demands
    return root / "spindle"
