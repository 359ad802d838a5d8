"""How much of the tests a run of pytest takes: a sample, as CI does, or everything with `--whole-tables`.

The programs of workers take as much as the tests that start them, by an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

VARIABLE = "TFPAR_WHOLE_TABLES"
Row = TypeVar("Row")


def is_whole() -> bool:
    """Return whether this run takes everything."""
    return VARIABLE in os.environ


def sampled(rows: Iterable[Row], of_ci: Iterable[Row]) -> tuple[Row, ...]:
    """Return all rows, or of them those of CI.

    Args:
        rows: All rows.
        of_ci: Rows that CI takes; each must be one of all.
    """
    every, taken = tuple(rows), tuple(of_ci)
    assert {*taken} <= {*every}, f"{taken} is no part of {every}"
    return every if is_whole() else taken
