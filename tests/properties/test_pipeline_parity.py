"""Pipelines, and two replicas of two stages, give the losses, metrics and weights of Keras' own `fit`, row by row.

The whole table has thousands of rows; here parts in which every case comes once under pipelines of two to four stages,
and once under replicas, since each takes seconds to trace. CI takes a third of one part, and of the other half of the
cases that are left.
`python -m tests.support.pipeline_cases` trains any part of the whole.
"""

from __future__ import annotations

import collections
import itertools

import pytest

from tests.support import pipeline_cases
from tests.support.extent import sampled
from tests.support.parity_cases import CASES
from tests.support.pipeline_cases import NUM_STAGES, ONE_MICROBATCH_ONLY, SCHEDULES, Row

pytestmark = pytest.mark.usefixtures("logical_cpus")


def rotation() -> list[Row]:
    """Return a row of every case, such that schedules, stages, micro-batches and recomputation take turns."""
    kinds = itertools.cycle(itertools.product((False, True), NUM_STAGES, SCHEDULES))
    sizes = itertools.cycle((2, 3, 1, 4, 2, 5, 1, 3, 2, 7, 1, 2, 6, 3, 2, 8))  # few cost less to trace
    rows: list[Row] = []
    for case, wanted in zip(CASES, sizes, strict=False):
        nearest = sorted(range(1, 9), key=lambda number, wanted=wanted: abs(number - wanted))
        dtype = "float32" if len(rows) % 16 == 15 else "float64"
        tried = (
            Row(case, schedule, num_stages, number, recompute, dtype)
            for recompute, num_stages, schedule in kinds
            for number in nearest
        )
        rows.append(next(row for row in tried if row.is_possible))
    return rows


ROWS = rotation()
OF_CI = ROWS[::3]
ON_REPLICAS = pipeline_cases.on_replicas()
OF_CI_ON_REPLICAS = [row for row in ON_REPLICAS if row.case not in {one.case for one in OF_CI}][::2]


def test_the_rows_cover_the_table() -> None:
    assert collections.Counter(row.case for row in ROWS) == dict.fromkeys(CASES, 1)
    assert {(row.schedule, row.recompute) for row in ROWS} == {*itertools.product(SCHEDULES, (False, True))}
    assert {(row.num_stages, row.schedule) for row in ROWS} == {*itertools.product(NUM_STAGES, SCHEDULES)}
    assert {row.num_microbatches for row in ROWS} == {*range(1, 9)}


def test_the_rows_on_replicas_are_all_that_a_pipeline_trains_exactly_in_two_micro_batches() -> None:
    assert [row.case for row in ON_REPLICAS] == [case for case in CASES if case not in ONE_MICROBATCH_ONLY]
    assert {row.dtype for row in ON_REPLICAS} == {"float32", "float64"}
    assert {row.schedule for row in ON_REPLICAS} == {"1f1b", "gpipe", "zero_bubble"}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "row",
    sampled([*ROWS, *ON_REPLICAS], of_ci=[*OF_CI, *OF_CI_ON_REPLICAS]),
    ids=lambda row: str(row).replace(" ", "_"),
)
def test_equals_one_device_after_20_steps(row: Row) -> None:
    assert pipeline_cases.differences_of(row) == []
