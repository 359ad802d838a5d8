"""The simulator: closed forms for equal times, drawn timelines for other times, transfers, memory."""

import dataclasses
import itertools

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.simulator import Durations, Timeline, simulate


def equal(
    num_stages: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    transfer: float = 0.0,
) -> Durations:
    """Return equal durations for all stages; a complete backward pass takes as long as its two parts."""
    return Durations(
        forward_seconds=(forward,) * num_stages,
        backward_seconds=(input_gradient + weight_gradient,) * num_stages,
        input_gradient_seconds=(input_gradient,) * num_stages,
        weight_gradient_seconds=(weight_gradient,) * num_stages,
        transfer_seconds=(transfer,) * (num_stages - 1),
    )


def drawn(timeline: Timeline) -> list[str]:
    """Draw a device as a row of two characters for each second: kind and micro-batch, then dashes."""
    rows = [[".."] * round(timeline.step_seconds) for _ in range(timeline.num_devices)]
    for (kind, stage, microbatch), device, begin_seconds, end_seconds in timeline.spans:
        letter = kind if stage < timeline.num_devices else kind.lower()
        rows[device][round(begin_seconds)] = f"{letter}{microbatch}"
        for second in range(round(begin_seconds) + 1, round(end_seconds)):
            rows[device][second] = "--"
    return [" ".join(row) for row in rows]


def run(name: str, num_stages: int, num_microbatches: int, **changes: tuple[float, ...]) -> Timeline:
    made = schedule.make(name, num_stages, num_microbatches)
    return simulate(made, dataclasses.replace(equal(num_stages), **changes))  # type: ignore[arg-type]


# Closed forms for equal times

SIZES = list(itertools.product(range(1, 7), range(1, 11)))
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.5), (0.5, 2.0, 1.0)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
def test_gpipe_and_1f1b(name: str, forward: float, input_gradient: float, weight_gradient: float) -> None:
    for p, m in SIZES:  # p stages, m micro-batches, as in the papers
        timeline = simulate(schedule.make(name, p, m), equal(p, forward, input_gradient, weight_gradient))
        backward = input_gradient + weight_gradient
        assert timeline.step_seconds == pytest.approx((m + p - 1) * (forward + backward))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
def test_interleaved(forward: float, input_gradient: float, weight_gradient: float) -> None:
    for p, v, groups in itertools.product(range(1, 6), (2, 3), (1, 2, 3)):  # p devices, v stages on each
        m = p * groups
        made = schedule.make("interleaved", p * v, m, num_devices=p)
        timeline = simulate(made, equal(p * v, forward, input_gradient, weight_gradient))
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), [*TIMES, (2.0, 1.0, 3.0)])
def test_zero_bubble(forward: float, input_gradient: float, weight_gradient: float) -> None:
    for p, m in SIZES:
        if m >= p:
            timeline = simulate(schedule.make("zero_bubble", p, m), equal(p, forward, input_gradient, weight_gradient))
            # Table 1 of arXiv 2401.10241 has (p - 1)(F + B - W), where W is the shortest; otherwise less can be filled.
            filled_seconds = min(forward, input_gradient, weight_gradient)
            idle_seconds = (p - 1) * (forward + input_gradient - filled_seconds)
            busy_seconds = m * (forward + input_gradient + weight_gradient)
            assert timeline.step_seconds == pytest.approx(busy_seconds + idle_seconds)
            assert timeline.bubble == pytest.approx(idle_seconds / timeline.step_seconds)


def test_zero_bubble_is_as_short_as_any_order_can_be() -> None:
    for p, m in SIZES:
        # The last stage begins after p - 1 forwards. The first gets its first gradient after p forwards and p - 1
        # gradients, and then has all of its own gradients before it.
        last_stage_seconds, first_stage_seconds = (p - 1) + 3 * m, p + (p - 1) + 2 * m
        assert run("zero_bubble", p, m).step_seconds == max(last_stage_seconds, first_stage_seconds if p > 1 else 0)


# Drawn timelines


def test_a_complete_backward_pass_of_two_seconds() -> None:
    assert drawn(run("1f1b", 2, 3)) == [
        "F0 F1 .. .. B0 -- F2 B1 -- .. B2 --",
        ".. F0 B0 -- F1 B1 -- F2 B2 -- .. ..",
    ]


def test_weight_gradients_fill_the_bubble() -> None:
    assert drawn(run("zero_bubble", 3, 4)) == [
        "F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3",
        ".. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        ".. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_interleaved_devices_begin_their_second_stage_before_the_pipeline_is_full() -> None:
    assert drawn(run("interleaved", 4, 4, backward_seconds=(1.0,) * 4)) == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3",
        ".. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..",
    ]


def test_a_slow_stage_leaves_the_others_idle() -> None:
    assert drawn(run("gpipe", 2, 2, forward_seconds=(1.0, 3.0), backward_seconds=(1.0, 1.0))) == [
        "F0 F1 .. .. .. .. .. .. B0 B1",
        ".. F0 -- -- F1 -- -- B0 B1 ..",
    ]


def test_transfers_delay_and_overlap_with_actions() -> None:
    # A transfer takes two seconds and overlaps with the actions of other micro-batches.
    assert drawn(run("gpipe", 2, 3, transfer_seconds=(2.0,), backward_seconds=(1.0, 1.0))) == [
        "F0 F1 F2 .. .. .. .. .. .. B0 B1 B2",
        ".. .. .. F0 F1 F2 B0 B1 B2 .. .. ..",
    ]


def test_each_cut_has_its_own_transfer_time() -> None:
    assert drawn(run("1f1b", 3, 1, transfer_seconds=(1.0, 2.0))) == [
        "F0 .. .. .. .. .. .. .. .. .. .. .. .. B0 --",
        ".. .. F0 .. .. .. .. .. .. .. B0 -- .. .. ..",
        ".. .. .. .. .. F0 B0 -- .. .. .. .. .. .. ..",
    ]


def test_a_smaller_last_microbatch_takes_less_time() -> None:
    times = {"forward_seconds": (2.0, 2.0), "backward_seconds": (2.0, 2.0), "transfer_seconds": (2.0,)}
    assert drawn(run("gpipe", 2, 2, **times, microbatch_scale=(1.0, 0.5))) == [
        "F0 -- F1 .. .. .. .. .. .. .. .. B0 -- B1",
        ".. .. .. .. F0 -- F1 B0 -- B1 .. .. .. ..",
    ]


def test_the_optimizer_begins_when_all_actions_have_ended() -> None:
    timeline = run("gpipe", 2, 1, update_seconds=(2.0, 5.0))
    assert max(span.end_seconds for span in timeline.spans) == 6.0
    assert timeline.step_seconds == 11.0
    assert timeline.bubble == pytest.approx(1 - 6 / 22)


# Memory


def peak_bytes(made: Schedule, **changes: tuple[float, ...]) -> tuple[int, ...]:
    return simulate(made, dataclasses.replace(equal(made.num_stages), **changes)).peak_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    # 100 and 10 bytes for each micro-batch in flight, 8, or 2 and 1, or 2 and 2; weights of 7 and 3 bytes.
    [("gpipe", (807, 83)), ("1f1b", (207, 13)), ("zero_bubble", (207, 23))],
)
def test_memory_depends_on_the_order(name: str, expected: tuple[int, ...]) -> None:
    assert peak_bytes(schedule.make(name, 2, 8), activation_bytes=(100, 10), fixed_bytes=(7, 3)) == expected


def test_the_memory_of_a_device_is_that_of_all_its_stages() -> None:
    # Device 0 runs F0 F1 f0 f1 b0 b1 B0 B1: two micro-batches of 1 byte and two of 100.
    # Device 1 runs F0 F1 f0 b0 f1 b1 B0 B1: two of 10 and one of 1000.
    made = schedule.make("interleaved", 4, 2)
    assert peak_bytes(made, activation_bytes=(1, 10, 100, 1000), fixed_bytes=(0, 3, 5, 4)) == (202 + 5, 1020 + 7)


def test_a_smaller_microbatch_saves_less() -> None:
    made = schedule.make("gpipe", 1, 2)
    assert peak_bytes(made, activation_bytes=(101,), microbatch_scale=(1.0, 0.5)) == (152,)


@pytest.mark.parametrize(
    ("name", "expected"),
    # 8 micro-batches are in flight, or 2 and 1, and one of them is recomputed at a time. With "zero_bubble" device 1
    # runs F0 B0 F1 B1 W0 ...: during B1 the 5 bytes that B0 saved for W0 are in memory too.
    [("gpipe", (8 + 50, 8 + 60)), ("1f1b", (2 + 50, 1 + 60)), ("zero_bubble", (2 + 50, 2 + 60 + 5))],
)
def test_recomputation_saves_little_and_recomputes_one_microbatch_at_a_time(
    name: str, expected: tuple[int, ...]
) -> None:
    sizes = {"activation_bytes": (1, 1), "backward_temporary_bytes": (50, 60), "until_weight_gradient_bytes": (5, 5)}
    assert peak_bytes(schedule.make(name, 2, 8), **sizes) == expected


def test_bytes_saved_for_the_weight_gradient_are_freed_after_it() -> None:
    made = schedule.parse("delayed\n0: F0.0 B0.0 F0.1 B0.1 W0.0 W0.1")
    sizes = {"activation_bytes": (100,), "until_weight_gradient_bytes": (10,)}
    assert peak_bytes(made, **sizes) == (220,)
    assert peak_bytes(made, **sizes, backward_temporary_bytes=(1000,)) == (1210,)
    assert peak_bytes(made, **sizes, weight_gradient_temporary_bytes=(1000,)) == (1220,)


# Invalid durations


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("1f1b", {"forward_seconds": (1.0,)}, r"forward_seconds must have one entry for each of 2 stages, received 1"),
        ("zero_bubble", {"weight_gradient_seconds": ()}, r"weight_gradient_seconds must have .* 2 stages, received 0"),
        (
            "1f1b",
            {"transfer_seconds": (0.0, 0.0)},
            r"transfer_seconds must have one entry for each of 1 cuts, received 2",
        ),
        ("1f1b", {"microbatch_scale": (1.0,)}, r"microbatch_scale must have .* 4 micro-batches, received 1"),
        ("1f1b", {"forward_seconds": (1.0, -1.0)}, r"must be finite and not negative, received \(1\.0, -1\.0\)"),
        ("1f1b", {"transfer_seconds": (float("nan"),)}, r"must be finite and not negative, received \(nan,\)"),
    ],
)
def test_durations_that_do_not_fit_are_refused(name: str, changes: dict[str, tuple[float, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(name, 2, 4, **changes)


def test_replicas_run_at_the_same_time_and_sum_gradients_once_each_has_its_own() -> None:
    one = schedule.make("1f1b", 2, 4)
    durations = Durations((1.0, 1.0), (2.0, 2.0), (), (), (0.0,), update_seconds=(0.5, 0.5))
    alone, grid = simulate(one, durations), simulate(one.replicated(3), durations)
    assert (grid.num_devices, len(grid.spans)) == (6, 3 * len(alone.spans))
    assert (grid.step_seconds, grid.peak_bytes) == (alone.step_seconds, alone.peak_bytes * 3)
    # Stage 1 ends at 13, stage 0 at 15: the sums of stage 1 are hidden behind the last backward pass of stage 0.
    summed = dataclasses.replace(durations, reduction_seconds=(0.25, 2.0))
    assert simulate(one.replicated(3), summed).step_seconds == alone.step_seconds + 0.25
    late = dataclasses.replace(durations, reduction_seconds=(0.25, 4.0))
    assert simulate(one.replicated(3), late).step_seconds == alone.step_seconds + 2.0
    # Over workers, one stage at a time: from 13 for 6 seconds, then stage 0.
    over_workers = dataclasses.replace(durations, all_reduce_seconds=(1.0, 6.0))
    assert simulate(one, over_workers).step_seconds == 13 + 6 + 1 + 0.5
    both = dataclasses.replace(over_workers, reduction_seconds=(0.0, 1.0))
    assert simulate(one.replicated(3), both).step_seconds == 14 + 6 + 1 + 0.5


def test_a_replica_with_smaller_micro_batches_ends_earlier() -> None:
    grid = schedule.make("gpipe", 1, 2).replicated(2)
    durations = Durations((1.0,), (2.0,), (), (), (), microbatch_scale=(1, 1, 1, 0.5))
    ends = [max(span.end_seconds for span in simulate(grid, durations).spans if span.device == one) for one in (0, 1)]
    assert ends == [6.0, 4.5]
