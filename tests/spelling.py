"""codespell over what people read: pages, the notebooks' Markdown, and the package's source.

    python tests/spelling.py

Settings and the words that are no mistakes are in pyproject.toml, [tool.codespell]. A notebook's
outputs and code are not prose, so its Markdown cells are laid out as files of their own first.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROSE = ("README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "pyproject.toml")
SOURCES = ("spindle/**/*.py", "book/*.md", "book/*.py", "book/_ext/*.py", "book/references.bib")
SOURCES += ("notebooks/*.py", "spindle/kernels/csrc/*")
NOTEBOOKS = "notebooks/**/*.ipynb"


def files(root: Path) -> Iterator[Path]:
    """Everything that is read as it is."""
    yield from (root / name for name in PROSE if (root / name).is_file())
    yield from (path for pattern in SOURCES for path in sorted(root.glob(pattern)))


def lay_out(root: Path, folder: Path) -> Iterator[Path]:
    """Write the Markdown of each notebook into `folder`, under its own name."""
    for path in sorted(root.glob(NOTEBOOKS)):
        if ".ipynb_checkpoints" in path.parts:
            continue
        cells = json.loads(path.read_text("utf-8"))["cells"]
        text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        page = folder / path.relative_to(root).with_suffix(".md")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join(text), "utf-8")
        yield page


def check(root: Path) -> int:
    """0 if no word is misspelt, else codespell's number of them."""
    with tempfile.TemporaryDirectory() as folder:
        names = [str(path) for path in (*files(root), *lay_out(root, Path(folder)))]
        settings = ["--toml", str(ROOT / "pyproject.toml")]
        return subprocess.run([sys.executable, "-m", "codespell_lib", *settings, *names]).returncode


if __name__ == "__main__":
    sys.exit(check(ROOT))
