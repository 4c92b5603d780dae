"""`python -m spindle` is the `spindle` command."""

import sys

from spindle.cli import main

if __name__ == "__main__":
    sys.exit(main())
