"""Fixtures of the tests of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from tfpar.planning import step_measurement


@pytest.fixture(scope="module")
def short_laps() -> Iterator[None]:
    """Measure for a moment only: no test depends on how exact the seconds are."""
    with (
        mock.patch.object(step_measurement, "LAP_SECONDS", 0.005),
        mock.patch.object(step_measurement, "ALL_LAPS_SECONDS", 0.02),
    ):
        yield
