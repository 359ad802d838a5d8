"""Two replicas of two stages give the losses, metrics and weights of Keras' own `fit`, for every row of the table."""

from __future__ import annotations

import pytest

from tests.properties import test_pipeline_parity
from tests.support import pipeline_cases
from tests.support.extent import sampled
from tests.support.parity_cases import CASES
from tests.support.pipeline_cases import ONE_MICROBATCH_ONLY, Row

pytestmark = pytest.mark.usefixtures("logical_cpus")
ROWS = pipeline_cases.on_replicas()
ON_ONE_PIPELINE = [row.case for row in test_pipeline_parity.OF_CI]
OF_CI = [row for row in ROWS if row.case not in ON_ONE_PIPELINE][::2]


def test_the_rows_are_all_that_a_pipeline_trains_exactly_in_two_micro_batches() -> None:
    assert [row.case for row in ROWS] == [case for case in CASES if case not in ONE_MICROBATCH_ONLY]
    assert {row.dtype for row in ROWS} == {"float32", "float64"}
    assert {row.schedule for row in ROWS} == {"1f1b", "gpipe", "zero_bubble"}


@pytest.mark.parametrize("row", sampled(ROWS, of_ci=OF_CI), ids=lambda row: str(row).replace(" ", "_"))
def test_equals_one_device_after_20_steps(row: Row) -> None:
    assert pipeline_cases.differences_of(row) == []
