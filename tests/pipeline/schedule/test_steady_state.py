"""The steady state of schedules, which a step runs as a loop."""

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.steady_state import Segment, segments

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


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches", "num_devices"), ALL)
def test_every_pass_runs_equally_often_in_a_repetition_and_has_run_before(
    name: str, num_stages: int, num_microbatches: int, num_devices: int | None
) -> None:
    order = schedule.make(name, num_stages, num_microbatches, num_devices).in_order()
    passes = {(action.kind, action.stage) for action in order}
    before: list[Action] = []
    for segment in segments(order):
        if segment.repeats > 1:
            assert {(action.kind, action.stage) for action in before} == passes
            counts = [sum(one[:2] == each for one in segment.actions) for each in passes]
            assert counts == [segment.shift] * len(passes)
        before += segment.unrolled()


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved"])
def test_more_microbatches_are_more_repetitions(name: str) -> None:
    few, many = (
        segments(schedule.make(name, 4, count, 2 if name == "interleaved" else None).in_order()) for count in (16, 64)
    )
    assert [len(segment.actions) for segment in many] == [len(segment.actions) for segment in few]
    assert sum(segment.repeats for segment in many) > sum(segment.repeats for segment in few)


def test_forward_passes_repeat_after_the_first_micro_batch() -> None:
    order = [Action("F", stage, number) for number in range(5) for stage in range(3)]
    assert segments(order) == [Segment(tuple(order[:3])), Segment(tuple(order[3:6]), repeats=4, shift=1)]


def test_a_schedule_without_steady_state_is_one_segment() -> None:
    order = schedule.make("gpipe", 2, 8).in_order()
    assert segments(order) == [Segment(tuple(order))]
    backwards = schedule.parse("mine\n0: F0.0 F0.1 F0.2 B0.2 B0.1 B0.0").in_order()
    assert segments(backwards) == [Segment(tuple(backwards))]
