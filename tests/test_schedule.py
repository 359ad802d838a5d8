"""Schedules of a pipeline: the known orders as drawn, their bounds, and every mistake that a schedule can have."""

import itertools
import subprocess
import sys

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule import Action, Schedule

ALL = [
    (name, num_stages, num_microbatches, None)
    for name in ("gpipe", "1f1b", "zero_bubble")
    for num_stages in range(1, 7)
    for num_microbatches in range(1, 11)
] + [
    ("interleaved", num_devices * stages_per_device, num_devices * groups, num_devices)
    for num_devices in range(1, 7)
    for stages_per_device in (2, 3)
    for groups in (1, 2, 3)
]


def drawn(made: Schedule) -> list[str]:
    """Each device's order; a stage beyond the first of its device in small letters."""
    return [
        " ".join(
            f"{kind if stage < made.num_devices else kind.lower()}{microbatch}" for kind, stage, microbatch in order
        )
        for order in made.actions
    ]


def text(*devices: str) -> Schedule:
    """A schedule by the orders of its devices."""
    return schedule.parse("\n".join(["drawn", *(f"{device}: {order}" for device, order in enumerate(devices))]))


# The known schedules


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert drawn(schedule.make("gpipe", 2, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B0 B1 B2",
    ]


def test_1f1b_warms_up_by_the_number_of_stages_behind() -> None:
    assert drawn(schedule.make("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_sends_groups_of_microbatches_through_all_stages_of_a_device() -> None:
    assert drawn(schedule.make("interleaved", 4, 4)) == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
        "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    ]


def test_zero_bubble_keeps_the_order_of_1f1b_and_holds_weight_gradients_back() -> None:
    assert drawn(schedule.make("zero_bubble", 3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert drawn(schedule.make("1f1b", 3, 1)) == ["F0 B0"] * 3
    assert drawn(schedule.make("zero_bubble", 3, 1)) == ["F0 B0 W0"] * 3


@pytest.mark.parametrize("name", schedule.NAMES)
def test_one_device_runs_everything(name: str) -> None:
    num_stages = 2 if name == "interleaved" else 1
    made = schedule.make(name, num_stages, 1)
    assert made.num_devices == 1
    assert len(made.in_order()) == num_stages * (3 if name == "zero_bubble" else 2)


# Properties of all of them


def test_every_schedule_can_run_within_its_memory_and_reads_back() -> None:
    for name, num_stages, num_microbatches, num_devices in ALL:
        made = schedule.make(name, num_stages, num_microbatches, num_devices)
        # How many micro-batches a stage keeps at most: the promise of each schedule.
        bound = {
            "gpipe": [num_microbatches] * num_stages,
            "1f1b": [min(num_stages - stage, num_microbatches) for stage in range(num_stages)],
            "zero_bubble": [min(num_stages, num_microbatches)] * num_stages,
            "interleaved": [min(2 * made.num_devices, num_microbatches)] * num_stages,
        }[name]
        schedule.check(made, max_activations=bound)
        assert schedule.parse(made.to_text()) == made
        if name != "interleaved":
            assert schedule.peak_activations(made) == bound, made


def test_the_memory_of_1f1b_does_not_grow_with_the_microbatches() -> None:
    assert schedule.peak_activations(schedule.make("gpipe", 3, 64)) == [64, 64, 64]
    for num_microbatches in (8, 64):
        assert schedule.peak_activations(schedule.make("1f1b", 3, num_microbatches)) == [3, 2, 1]
        assert schedule.peak_activations(schedule.make("zero_bubble", 3, num_microbatches)) == [3, 3, 3]


def test_microbatches_of_a_stage_are_added_up_in_one_order() -> None:
    for arguments in ALL:
        made = schedule.make(*arguments)
        last = "W" if made.splits_backward else "B"
        for stage in range(made.num_stages):
            order = [action.microbatch for action in made.in_order() if action[:2] == (last, stage)]
            assert order == list(range(made.num_microbatches)), arguments


def test_one_order_of_all_actions_respects_devices_and_needs() -> None:
    for arguments in ALL:
        made = schedule.make(*arguments)
        ordered = made.in_order()
        position = {action: index for index, action in enumerate(ordered)}
        assert sorted(ordered) == sorted(itertools.chain(*made.actions))
        assert all(position[needed] < position[action] for action in ordered for needed in made.needs(action))
        assert all(list(order) == sorted(order, key=position.__getitem__) for order in made.actions)


def test_devices_take_turns_in_the_one_order() -> None:
    ordered = schedule.make("1f1b", 2, 3).in_order()
    assert " ".join(map(str, ordered)) == "F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 F0.2 B1.1 B0.1 F1.2 B1.2 B0.2"


def test_what_an_action_needs() -> None:
    made = schedule.make("zero_bubble", 3, 2)

    def needs(*action: object) -> str:
        return " ".join(map(str, made.needs(Action(*action))))  # type: ignore[arg-type]

    assert needs("F", 0, 1) == ""
    assert needs("F", 2, 1) == "F1.1"
    assert needs("B", 1, 0) == "F1.0 B2.0"
    assert needs("B", 2, 0) == "F2.0"
    assert needs("W", 1, 0) == "B1.0"


def test_a_stage_sits_on_the_device_with_its_number_in_turn() -> None:
    made = schedule.make("interleaved", 6, 4, num_devices=2)
    assert [made.device_of(stage) for stage in range(6)] == [0, 1, 0, 1, 0, 1]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipedream", 2, 4), "one of gpipe, 1f1b, interleaved, zero_bubble, and this one is 'pipedream'"),
        (("1f1b", 0, 4), "num_stages of at least 1, and it is 0. Set a larger one"),
        (("1f1b", 2, -1), "num_microbatches of at least 1, and it is -1. Set a larger one"),
        (("gpipe", 4, 4, 2), "'gpipe' needs a device for each stage, and there are 4 stages and 2 devices. Set num_st"),
        (("interleaved", 5, 4), "there are 5 stages and 2 devices. Set num_stages to 4 or another multiple of 2"),
        (("interleaved", 1, 4), "at least 2, and there are 1 stages and 0 devices. Set num_stages to 2"),
        (("interleaved", 4, 4, 4), "there are 4 stages and 4 devices. Set num_stages to 8 or another multiple of 4"),
        (("interleaved", 4, 5, 2), "there are 5 micro-batches and 2 devices. Set num_microbatches to 6 or another"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.make(*arguments)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("", "must be its name, then a line for each device like '0: F0.0 B0.0', and it is ''"),
        ("mine\n0:", "must be its name, then a line for each device"),
        ("mine\n1: F0.0 B0.0", "The line of device 0 must begin with '0:', and it is '1: F0.0 B0.0'"),
        ("mine\n0: F0.0 C0.0", "like F0.3, and device 0 has 'C0.0'"),
        ("mine\n0: F0.0\n1: F1,0", "like F0.3, and device 1 has 'F1,0'"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(described: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.parse(described)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        # on the device of another stage
        (text("F0.0 F1.0 B0.0", "B1.0"), "Device 0 must run F/B of stages 0 on 1 micro-batches, and it has F1.0"),
        # twice
        (text("F0.0 F0.0 B0.0", "F1.0 B1.0"), "Device 0 must run F0.0 once, and it does 2 times. Remove the others"),
        # not at all
        (text("F0.0 B0.0", "F1.0"), "Device 1 must run B1.0 once, and it does 0 times. Add it"),
        # a weight gradient here, none there
        (text("F0.0 B0.0 W0.0", "F1.0 B1.0"), "Device 1 must run W1.0 once, and it does 0 times. Add it"),
        # before what it needs, on the same device
        (text("F0.0 B0.0", "B1.0 F1.0"), "device 1 has B1.0 before F1.0"),
        (text("F0.0 W0.0 B0.0"), "device 0 has W0.0 before B0.0"),
        # stages 0 and 2 sit together, and stage 1 between them waits for the first
        (
            text("F2.0 F0.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0"),
            "No device .* may wait for ever, and here device 0 waits before F2.0 for F1.0, device 1 waits before F1.0",
        ),
        # each device waits for the other: B0.0 needs B1.0, F1.1 needs F0.1
        (text("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"), "device 0 waits before B0.0 for B1.0, device 1 waits be"),
        # three stages on two devices
        (text("F0.0 F2.0 B2.0 B0.0", "F1.0 B1.0"), "has 2 orders, 2 devices and 3 stages"),
        # more devices than stages
        (text("F0.0 B0.0", ""), "has 2 orders, 2 devices and 1 stages"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(broken: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.check(broken)


def test_a_microbatch_beyond_the_last_is_refused() -> None:
    broken = Schedule("mine", 1, 1, 1, text("F0.0 F0.1 B0.0 B0.1").actions)
    with pytest.raises(ValueError, match=r"on 1 micro-batches, and it has F0\.1\. Move or remove it"):
        schedule.check(broken)


def test_a_schedule_of_ones_own_that_can_run_is_accepted() -> None:
    schedule.check(text("F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.1 B1.0"), max_activations=[2, 2])


def test_more_activations_than_allowed_are_refused() -> None:
    made = schedule.make("gpipe", 2, 3)
    with pytest.raises(ValueError, match=r"Stage 1 may keep activations of at most 2 micro-batches, and F1\.2 on"):
        schedule.check(made, max_activations=[3, 2])
    with pytest.raises(ValueError, match=r"one entry for each of 2 stages, and it has 1: \[3\]"):
        schedule.check(made, max_activations=[3])


def test_planning_needs_no_tensorflow() -> None:
    program = (
        "import sys, tfpar.pipeline.schedule, tfpar.pipeline.schedule.simulator\n"
        "print({'tensorflow', 'keras', 'numpy'} & sys.modules.keys() or 'none')"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout == "none\n"
