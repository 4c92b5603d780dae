"""Run the exactness matrix: see `matrix.table`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # tests/, for the package `matrix`

from matrix.table import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
