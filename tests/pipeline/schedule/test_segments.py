"""The loops of schedules."""

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule.segments import segments

ALL = [
    (name, num_stages, num_microbatches, num_devices)
    for name, num_devices in (("gpipe", None), ("1f1b", None), ("zero_bubble", None), ("interleaved", 2))
    for num_stages in ((4, 6) if name == "interleaved" else (1, 2, 3, 5))
    for num_microbatches in (2, 4, 6, 14, 40)
]


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches", "num_devices"), ALL)
def test_segments_have_the_actions_of_the_schedule_in_their_order(
    name: str, num_stages: int, num_microbatches: int, num_devices: int | None
) -> None:
    order = schedule.make(name, num_stages, num_microbatches, num_devices).in_order()
    assert [action for segment in segments(order) for action in segment.unrolled()] == order


@pytest.mark.parametrize("name", schedule.NAMES)
def test_more_microbatches_are_more_repetitions(name: str) -> None:
    few, many = (
        segments(schedule.make(name, 4, count, 2 if name == "interleaved" else None).in_order()) for count in (16, 64)
    )
    assert [len(segment.actions) for segment in many] == [len(segment.actions) for segment in few]
    assert sum(segment.repeats for segment in many) > sum(segment.repeats for segment in few)
