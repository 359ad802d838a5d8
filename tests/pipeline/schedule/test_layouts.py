"""Steps of layouts on hosts: links, all-reduces, and equality with the simulation of every replica."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tfpar.pipeline import schedule
from tfpar.pipeline.schedule.layouts import LayoutStep, Network, simulate_layout
from tfpar.pipeline.schedule.links import Algorithm, Link, all_reduce_seconds, fit_link, link_of_all_reduce
from tfpar.pipeline.schedule.simulator import Durations, simulate

FREE = Link(0.0, float("inf"))


def durations(num_stages: int, **changes: tuple[float, ...]) -> Durations:
    """Return F of 1 second and B of 2 seconds for each stage."""
    return dataclasses.replace(Durations((1.0,) * num_stages, (2.0,) * num_stages, (), (), ()), **changes)  # type: ignore[arg-type]


def a_grid(num_stages: int, num_replicas: int, num_microbatches: int = 4) -> schedule.Schedule:
    return schedule.make("1f1b", num_stages, num_microbatches).replicated(num_replicas)


# Links


def test_a_link_is_found_again_from_the_durations_of_its_messages() -> None:
    link, sizes = Link(0.002, 5e8), [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    found = fit_link(sizes, [link.seconds(size) for size in sizes])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(link))
    for algorithm, members in itertools.product(("ring", "tree", "owner", "owners"), (2, 5)):
        seconds = [all_reduce_seconds(algorithm, size, members, link) for size in sizes]  # type: ignore[arg-type]
        found = link_of_all_reduce(sizes, seconds, members, algorithm)  # type: ignore[arg-type]
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(link))


@pytest.mark.parametrize(
    ("sizes", "seconds", "expected"),
    [
        ([1, 2, 4], [1.0, 2.5, 5.0], (0.0, 2.28 / 2.6)),  # steeper than a line through the origin
        ([1, 2, 4], [2.0, 2.0, 2.0], (0.0, 2.0)),  # no dearer with more bytes: noise, or too small messages
    ],
)
def test_a_fitted_link_has_no_negative_latency_and_no_free_bytes(
    sizes: list[int], seconds: list[float], expected: tuple[float, float]
) -> None:
    assert dataclasses.astuple(fit_link(sizes, seconds)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "members", "expected"),
    # Latency 1 and 1 byte a second, 60 bytes.
    [
        ("ring", 1, 0.0),
        ("ring", 2, 2 + 60),
        ("ring", 4, 6 + 90),
        ("tree", 4, 4 + 120),
        ("tree", 1000, 20 + 120),
        ("owner", 4, 2 + 360),
        ("owners", 4, 2 + 90),
    ],
)
def test_the_duration_of_an_all_reduce(algorithm: Algorithm, members: int, expected: float) -> None:
    assert all_reduce_seconds(algorithm, 60, members, Link(1.0, 1.0)) == pytest.approx(expected)
    assert all_reduce_seconds(algorithm, 0, members, Link(1.0, 1.0)) == 0.0


# Layouts


def test_one_device_waits_for_nothing() -> None:
    one = a_grid(1, 1)
    step = simulate_layout(one, durations(1, update_seconds=(0.5,)), [], [100], Network(1, FREE, FREE))
    assert step == LayoutStep(12.5, 12.0, 0.0, 0.0, 0.0, 0.5)


def test_a_cut_between_two_hosts_takes_their_link() -> None:
    inside, between = Link(0.0, 100.0), Link(1.0, 10.0)
    gpipe = schedule.make("gpipe", 3, 1)
    steps = [simulate_layout(gpipe, durations(3), [50, 50], [0] * 3, Network(size, inside, between)) for size in (3, 2)]
    # Each cut is crossed forward and backward: 0.5 s inside a host, 6 s between two.
    assert [step.transfer_seconds for step in steps] == pytest.approx([2.0, 13.0])
    assert [step.step_seconds for step in steps] == pytest.approx([11.0, 22.0])


def test_gradients_are_summed_inside_each_host_and_then_over_the_hosts() -> None:
    network = Network(4, inside=Link(0.0, 100.0), between=Link(0.25, 50.0))
    one = simulate_layout(a_grid(1, 4), durations(1), [], [100], network)
    assert one.all_reduce_seconds == pytest.approx(2 * 3 / 4)  # four owners on one host
    # Three hosts: 4 messages and 4/3 of the bytes over the link of each.
    three = simulate_layout(a_grid(1, 12), durations(1), [], [100], network)
    assert three.all_reduce_seconds == pytest.approx(1.5 + 4 * 0.25 + 4 / 3 * 2)
    tree = simulate_layout(a_grid(1, 12), durations(1), [], [100], dataclasses.replace(network, all_reduce="tree"))
    assert tree.all_reduce_seconds == pytest.approx(1.5 + 4 * 0.25 + 2 * 2)


def test_the_link_of_a_host_carries_one_stage_at_a_time() -> None:
    """Stage 1 ends at 13, stage 0 at 15: the sums of stage 1 take the link first."""
    network = Network(2, FREE, Link(0.0, 25.0))
    step = simulate_layout(a_grid(2, 2), durations(2), [0], [25, 100], network)
    assert step.step_seconds == 13 + 4 + 1
    # Two messages of 4 seconds each, for both stages at the same time.
    late = dataclasses.replace(network, between=Link(4.0, 25.0))
    assert simulate_layout(a_grid(2, 2), durations(2), [0], [25, 100], late).step_seconds == 13 + 4 + 1 + 8
    # With a host for each device, both stages have a link of their own.
    apart = simulate_layout(
        a_grid(2, 2), durations(2), [0], [25, 100], dataclasses.replace(network, devices_per_host=1)
    )
    assert apart.step_seconds == 13 + 4


def test_only_gradients_that_end_late_are_waited_for() -> None:
    network = Network(2, FREE, Link(0.0, 100.0))
    step = simulate_layout(a_grid(2, 2), durations(2), [0], [0, 150], network)
    assert step.all_reduce_seconds == 0.0
    assert step.step_seconds == 15.0


@pytest.mark.parametrize("name", schedule.NAMES)
def test_equal_replicas_need_not_be_simulated_one_by_one(name: str) -> None:
    """The step is that of the simulation of all replicas, with the sums of the hosts as durations."""
    draw = random.Random(0)
    for replicas, per_host in ((1, 2), (2, 2), (3, 2), (4, 4), (4, 8)):
        stages, devices, count = (4 if name == "interleaved" else 2), 2, 4
        full = schedule.make(name, stages, count, devices).replicated(replicas)
        seconds = [tuple(draw.random() for _ in range(stages)) for _ in range(5)]
        ragged = tuple(draw.choice([0.5, 1.0]) for _ in range(count)) * replicas  # the replicas are equal
        ragged = (*ragged[:-1], 0.25)  # but for the last
        given = Durations(*seconds[:4], (), update_seconds=seconds[4], microbatch_scale=ragged)
        cut_bytes, gradient_bytes = [draw.random() for _ in range(stages - 1)], [draw.random() for _ in range(stages)]
        network = Network(per_host, Link(0.01, 10.0), Link(0.0, 1.0))
        most, hosts = min(replicas, per_host // devices), -(-replicas * devices // per_host)
        whole = dataclasses.replace(
            given,
            transfer_seconds=tuple(network.inside.seconds(size) for size in cut_bytes),
            reduction_seconds=tuple(all_reduce_seconds("owners", s, most, network.inside) for s in gradient_bytes),
            all_reduce_seconds=tuple(all_reduce_seconds("ring", s, hosts, network.between) for s in gradient_bytes),
        )
        step, expected = simulate_layout(full, given, cut_bytes, gradient_bytes, network), simulate(full, whole)
        assert step.step_seconds == pytest.approx(expected.step_seconds)
        assert step.compute_seconds / step.step_seconds == pytest.approx(1 - expected.bubble)
        assert sum(step[1:]) == pytest.approx(step.step_seconds)
        assert all(part >= -1e-12 for part in step)


def test_a_replica_over_two_hosts_is_slower_than_one_inside_a_host() -> None:
    """Hosts of 3 devices hold replicas of 2 stages: the second has its stages on two hosts."""
    network = Network(3, FREE, Link(1.0, float("inf")))
    whole, split = (
        simulate_layout(schedule.make("gpipe", 2, 1).replicated(replicas), durations(2), [8], [0, 0], network)
        for replicas in (1, 2)
    )
    assert (whole.step_seconds, split.step_seconds) == (6.0, 8.0)


def test_a_thousand_devices_take_seconds() -> None:
    begin = time.process_time()
    step = simulate_layout(a_grid(8, 128, 64), durations(8), [1] * 7, [1] * 8, Network(4, FREE, Link(0.001, 1e3)))
    assert step.step_seconds > 71 * 3
    assert time.process_time() - begin < 10


def laid_out(cut_bytes: list[int], gradient_bytes: list[int]) -> LayoutStep:
    return simulate_layout(a_grid(2, 2), durations(2), cut_bytes, gradient_bytes, Network(2, FREE, FREE))


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: fit_link([8, 8], [1.0, 2.0]), "at least two sizes with a finite duration above 0"),
        (lambda: fit_link([8, 16], [1.0, 0.0]), "at least two sizes with a finite duration above 0"),
        (lambda: link_of_all_reduce([1, 2], [1.0, 2.0], 1), "at least 2 members, received 1"),
        (lambda: Link(-1.0, 1.0), "a bandwidth above 0"),
        (lambda: Link(0.0, float("nan")), "a bandwidth above 0"),
        (lambda: all_reduce_seconds("star", 1, 2, FREE), "ring, tree, owner or owners, received 'star'"),  # type: ignore[arg-type]
        (lambda: Network(0, FREE, FREE), "at least 1 device, received devices_per_host=0"),
        (lambda: laid_out([], [1, 1]), r"cut_bytes must have 1 entries of at least 0 for 2 stages, received \[\]"),
        (lambda: laid_out([1], [1]), r"gradient_bytes must have 2 entries of at least 0 for 2 stages, received \[1\]"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(create: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create()
