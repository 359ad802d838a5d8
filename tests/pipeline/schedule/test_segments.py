"""The loops of schedules."""

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.segments import Segment, needs_queues, segments

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
def test_every_pass_of_a_loop_runs_equally_often_in_a_repetition_and_has_run_before(
    name: str, num_stages: int, num_microbatches: int, num_devices: int | None
) -> None:
    order = schedule.make(name, num_stages, num_microbatches, num_devices).in_order()
    before: list[Action] = []
    for segment in segments(order):
        if segment.repeats > 1:
            kinds = {action.kind for action in segment.actions}
            passes = {(kind, stage) for kind in kinds for stage in range(num_stages)}
            assert {(action.kind, action.stage) for action in before} >= passes
            counts = [sum(one[:2] == each for one in segment.actions) for each in passes]
            assert counts == [segment.shift] * len(passes)
            assert name == "gpipe" or kinds == {action.kind for action in order}
        before += segment.unrolled()


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches", "num_devices"), ALL)
def test_only_gpipe_needs_queues(name: str, num_stages: int, num_microbatches: int, num_devices: int | None) -> None:
    split = segments(schedule.make(name, num_stages, num_microbatches, num_devices).in_order())
    assert needs_queues(split) is (name == "gpipe" and len(split) > 1)


@pytest.mark.parametrize("name", schedule.NAMES)
def test_more_microbatches_are_more_repetitions(name: str) -> None:
    few, many = (
        segments(schedule.make(name, 4, count, 2 if name == "interleaved" else None).in_order()) for count in (16, 64)
    )
    assert [len(segment.actions) for segment in many] == [len(segment.actions) for segment in few]
    assert sum(segment.repeats for segment in many) > sum(segment.repeats for segment in few)


def test_forward_passes_repeat_after_the_first_micro_batch() -> None:
    order = [Action("F", stage, number) for number in range(5) for stage in range(3)]
    assert segments(order) == [Segment(tuple(order[:3])), Segment(tuple(order[3:6]), repeats=4, shift=1)]


def text_of(split: list[Segment]) -> list[str]:
    return [f"{' '.join(map(str, one.actions))} x{one.repeats}" for one in split]


def test_the_forward_and_the_backward_passes_of_gpipe_are_two_loops() -> None:
    assert text_of(segments(schedule.make("gpipe", 2, 8).in_order())) == [
        "F0.0 F0.1 F1.0 x1",
        "F0.2 F1.1 x6",
        "F1.7 B1.0 B0.0 x1",
        "B1.1 B0.1 x7",
    ]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 W0.0 W0.1 W0.2", "F0.0x1 F0.1x2 B0.0x1 B0.1x2 W0.0x1 W0.1x2"),
        ("F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 B0.3 B0.4", "F0.0x1 F0.1x2 B0.0x1 F0.3+B0.1x2 B0.3x2"),
        ("F0.0 F0.1 F0.2 B0.2 B0.1 B0.0", "F0.0+F0.1+F0.2+B0.2+B0.1+B0.0x1"),
    ],
)
def test_loops_of_other_orders(order: str, expected: str) -> None:
    split = segments(schedule.parse(f"mine\n0: {order}").in_order())
    assert " ".join(text.replace(" x", "x").replace(" ", "+") for text in text_of(split)) == expected
    assert needs_queues(split) is (len(split) > 1)
