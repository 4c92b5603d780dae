"""Run the fault museum: see `museum.runner`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # tests/, for the package `museum`

from museum.runner import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
