"""Files that are no part of a package, as modules: the book's extensions and scripts."""

import importlib.util
from pathlib import Path
from types import ModuleType


def module_of(path: Path) -> ModuleType:
    """Run a file, and give what it defines."""
    spec = importlib.util.spec_from_file_location(f"book_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
