"""How nbval is run over the notebooks: two faults of it, closed where they can be seen."""

from typing import Any

import pytest

WAIT_FOR_OUTPUT_S = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `--nbval` together with `--cov`, which stalls (nbval #116)."""
    if getattr(config.option, "nbval", False) and getattr(
        config.option, "cov_source", None
    ):
        raise pytest.UsageError(
            "run --nbval in a command of its own, without --cov"
        )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give a slow machine time to deliver outputs: nbval waits a fixed 5 s (nbval #231)."""
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = WAIT_FOR_OUTPUT_S
