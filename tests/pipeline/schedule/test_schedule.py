"""Schedules: the orders of the built-in schedules, their bounds, and the validation of invalid schedules."""

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
    """Return the order of each device; stages after the first of a device are in small letters."""
    return [
        " ".join(
            f"{kind if stage < made.num_devices else kind.lower()}{microbatch}" for kind, stage, microbatch in order
        )
        for order in made.actions
    ]


def text(*devices: str) -> Schedule:
    """Return the schedule with these orders of its devices."""
    return schedule.parse("\n".join(["drawn", *(f"{device}: {order}" for device, order in enumerate(devices))]))


# The built-in schedules


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert drawn(schedule.make("gpipe", 2, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B0 B1 B2",
    ]


def test_1f1b_warms_up_by_the_number_of_later_stages() -> None:
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


def test_zero_bubble_has_the_order_of_1f1b_and_delays_weight_gradients() -> None:
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


# Properties of all schedules


def test_every_schedule_is_valid_within_its_memory_and_parses_from_its_text() -> None:
    for name, num_stages, num_microbatches, num_devices in ALL:
        made = schedule.make(name, num_stages, num_microbatches, num_devices)
        # The largest number of micro-batches in flight on each stage.
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


def test_gradients_of_a_stage_are_summed_in_the_order_of_microbatches() -> None:
    for arguments in ALL:
        made = schedule.make(*arguments)
        last = "W" if made.splits_backward else "B"
        for stage in range(made.num_stages):
            order = [action.microbatch for action in made.in_order() if action[:2] == (last, stage)]
            assert order == list(range(made.num_microbatches)), arguments


def test_the_order_of_all_actions_respects_devices_and_dependencies() -> None:
    for arguments in ALL:
        made = schedule.make(*arguments)
        ordered = made.in_order()
        position = {action: index for index, action in enumerate(ordered)}
        assert sorted(ordered) == sorted(itertools.chain(*made.actions))
        assert all(position[one] < position[action] for action in ordered for one in made.dependencies(action))
        assert all(list(order) == sorted(order, key=position.__getitem__) for order in made.actions)


def test_devices_alternate_in_the_order_of_all_actions() -> None:
    ordered = schedule.make("1f1b", 2, 3).in_order()
    assert " ".join(map(str, ordered)) == "F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 F0.2 B1.1 B0.1 F1.2 B1.2 B0.2"


def test_dependencies_of_an_action() -> None:
    made = schedule.make("zero_bubble", 3, 2)

    def dependencies(*action: object) -> str:
        return " ".join(map(str, made.dependencies(Action(*action))))  # type: ignore[arg-type]

    assert dependencies("F", 0, 1) == ""
    assert dependencies("F", 2, 1) == "F1.1"
    assert dependencies("B", 1, 0) == "F1.0 B2.0"
    assert dependencies("B", 2, 0) == "F2.0"
    assert dependencies("W", 1, 0) == "B1.0"


def test_stages_are_assigned_to_devices_round_robin() -> None:
    made = schedule.make("interleaved", 6, 4, num_devices=2)
    assert [made.device_of(stage) for stage in range(6)] == [0, 1, 0, 1, 0, 1]


# Invalid schedules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipedream", 2, 4), "schedule must be one of gpipe, 1f1b, interleaved, zero_bubble, received 'pipedream'"),
        (("1f1b", 0, 4), "num_stages must be at least 1, received 0"),
        (("1f1b", 2, -1), "num_microbatches must be at least 1, received -1"),
        (
            ("gpipe", 4, 4, 2),
            "'gpipe' needs one device for each stage, received 4 stages and 2 devices; set num_stages",
        ),
        (("interleaved", 5, 4), "received 5 stages and 2 devices; set num_stages to 4 or a larger multiple of 2"),
        (("interleaved", 1, 4), "at least 2, received 1 stages and 0 devices; set num_stages to 2"),
        (("interleaved", 4, 4, 4), "received 4 stages and 4 devices; set num_stages to 8 or a larger multiple of 4"),
        (("interleaved", 4, 5, 2), "received 5 micro-batches and 2 devices; set num_microbatches to 6 or another"),
    ],
)
def test_numbers_without_a_schedule_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.make(*arguments)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("", "must be its name, then one line for each device like '0: F0.0 B0.0', received ''"),
        ("mine\n0:", "must be its name, then one line for each device"),
        ("mine\n1: F0.0 B0.0", "The line of device 0 must begin with '0:', received '1: F0.0 B0.0'"),
        ("mine\n0: F0.0 C0.0", "like F0.3, received 'C0.0' on device 0; correct it"),
        ("mine\n0: F0.0\n1: F1,0", "like F0.3, received 'F1,0' on device 1; correct it"),
    ],
)
def test_a_text_of_another_format_is_refused(described: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.parse(described)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        # on the device of another stage
        (text("F0.0 F1.0 B0.0", "B1.0"), "Device 0 must run F/B of stages 0 on 1 micro-batches, received F1.0"),
        # twice
        (text("F0.0 F0.0 B0.0", "F1.0 B1.0"), "Device 0 must run F0.0 once, received it 2 times; remove the others"),
        # not at all
        (text("F0.0 B0.0", "F1.0"), "Device 1 must run B1.0 once, received it 0 times; add it"),
        # a weight gradient on one device alone
        (text("F0.0 B0.0 W0.0", "F1.0 B1.0"), "Device 1 must run W1.0 once, received it 0 times; add it"),
        # before its dependency, on the same device
        (text("F0.0 B0.0", "B1.0 F1.0"), "received B1.0 before F1.0 on device 1"),
        (text("F0.0 W0.0 B0.0"), "received W0.0 before B0.0 on device 0"),
        # stages 0 and 2 are on one device, and stage 1 between them waits for stage 0
        (
            text("F2.0 F0.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0"),
            "deadlock, received 'drawn', where device 0 waits before F2.0 for F1.0, device 1 waits before F1.0",
        ),
        # each device waits for the other: B0.0 needs B1.0, F1.1 needs F0.1
        (text("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"), "device 0 waits before B0.0 for B1.0, device 1 waits be"),
        # three stages on two devices
        (text("F0.0 F2.0 B2.0 B0.0", "F1.0 B1.0"), "received 2 lines, 2 devices and 3 stages"),
        # more devices than stages
        (text("F0.0 B0.0", ""), "received 2 lines, 2 devices and 1 stages"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(broken: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule.check(broken)


def test_a_microbatch_beyond_the_last_is_refused() -> None:
    broken = Schedule("mine", 1, 1, 1, text("F0.0 F0.1 B0.0 B0.1").actions)
    with pytest.raises(ValueError, match=r"on 1 micro-batches, received F0\.1; move or remove it"):
        schedule.check(broken)


def test_a_valid_custom_schedule_is_accepted() -> None:
    schedule.check(text("F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.1 B1.0"), max_activations=[2, 2])


def test_more_activations_than_allowed_are_refused() -> None:
    made = schedule.make("gpipe", 2, 3)
    with pytest.raises(
        ValueError, match=r"Stage 1 must have at most 2 micro-batches in flight, received 3 at F1\.2 on"
    ):
        schedule.check(made, max_activations=[3, 2])
    with pytest.raises(ValueError, match=r"one entry for each of 2 stages, received 1: \[3\]"):
        schedule.check(made, max_activations=[3])


def test_schedules_and_the_simulator_import_no_tensorflow() -> None:
    program = (
        "import sys, tfpar.pipeline.schedule, tfpar.pipeline.schedule.simulator\n"
        "print({'tensorflow', 'keras', 'numpy'} & sys.modules.keys() or 'none')"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout == "none\n"


@pytest.mark.parametrize("name", schedule.NAMES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_run_the_same_order_on_devices_and_micro_batches_of_their_own(name: str, num_replicas: int) -> None:
    one = schedule.make(name, 4, 4)
    grid = one.replicated(num_replicas)
    schedule.check(grid)
    assert schedule.parse(grid.to_text()) == grid
    assert grid.first_replica == one
    assert (grid.num_stages, grid.num_microbatches) == (4, 4 * num_replicas)
    assert schedule.peak_activations(grid) == schedule.peak_activations(one)
    for device, order in enumerate(grid.actions):
        assert {grid.device_of(action.stage, action.microbatch) for action in order} == {device}
    assert schedule.limit_stages(grid, 2) == schedule.limit_stages(one, 2).replicated(num_replicas)


def test_an_action_on_another_replica_is_refused() -> None:
    text = "mine, 2 replicas\n0: F0.0 B0.0 F0.1 B0.1\n1: F0.2 B0.2 F0.3 B0.3".replace("F0.1 B0.1", "F0.2 B0.2")
    with pytest.raises(ValueError, match=r"Device 0 must run F/B of stages 0 on micro-batches 0 to 1, received F0.2"):
        schedule.check(schedule.parse(text))


def test_lines_that_replicas_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="received 3 lines, 1 devices in 2 replicas and 1 stages"):
        schedule.check(schedule.parse("mine, 2 replicas\n0: F0.0 B0.0\n1: F0.1 B0.1\n2: F0.2 B0.2"))
