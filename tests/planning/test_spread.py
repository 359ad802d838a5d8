"""The spread of measurements under a clock that is disturbed on purpose: no test here depends on real times."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tfpar.pipeline.schedule.links import Link
from tfpar.planning import contention, link_measurement, measurement, step_timing
from tfpar.planning.costs import Curve, ModelCosts
from tfpar.planning.ranking import MOST_SPREAD
from tfpar.planning.step_timing import measure_drift, measure_steps

SIZES = [1, 2, 4, 8, 16]
SECONDS_OF_EXAMPLE = 0.002
# Relative to an undisturbed step, one after another.
_JITTER = (1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.01)


class Machine:
    """A clock, and steps that take a time of it.

    Args:
        slowness: Of a call of the loop at a moment, relative to an undisturbed one.
    """

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.slowness = 0.0, slowness
        self.size, self.counts = 1, list[int]()

    def resize(self, num_examples: int) -> None:
        self.size = num_examples

    def run(self, num_steps: int) -> None:
        self.counts.append(num_steps)
        self.now += num_steps * self.size * SECONDS_OF_EXAMPLE * self.slowness(self.now)


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(slowness: Callable[[float], float]) -> Machine:
        machine = Machine(slowness)
        monkeypatch.setattr(step_timing, "time", types.SimpleNamespace(perf_counter=lambda: machine.now))
        return machine

    return make


def in_turn(*values: float) -> Callable[[float], float]:
    turns = itertools.cycle(values)
    return lambda now: next(turns)


def quiet() -> Callable[[float], float]:
    return in_turn(*_JITTER)


def test_a_quiet_machine_has_a_spread_of_a_few_percent(machine_of: Callable[..., Any]) -> None:
    machine = machine_of(quiet())
    steps, spread = measure_steps(machine, SIZES)
    assert steps.seconds == pytest.approx([SECONDS_OF_EXAMPLE * size for size in SIZES], rel=0.03)
    assert 0 < spread < 0.03
    assert measure_drift(machine, steps) < 0.04


def test_a_machine_of_two_speeds_is_too_noisy(machine_of: Callable[..., Any]) -> None:
    _, spread = measure_steps(machine_of(in_turn(1, 3)), SIZES)
    assert spread > MOST_SPREAD


def test_a_machine_that_slows_down_between_two_rounds_is_too_noisy(machine_of: Callable[..., Any]) -> None:
    round_seconds = 4.0  # of five sizes with four repeats of 0.15 s, and their first steps
    _, spread = measure_steps(machine_of(lambda now: 1.0 if now < round_seconds else 3.0), SIZES)
    assert spread > MOST_SPREAD


def test_a_program_that_disturbs_one_size_for_a_moment_is_no_noise(machine_of: Callable[..., Any]) -> None:
    _, spread = measure_steps(machine_of(lambda now: 3.0 if 1.0 < now < 1.5 else 1.0), SIZES)
    assert spread < 0.01


def test_sizes_that_are_disturbed_are_measured_in_one_round_more(machine_of: Callable[..., Any]) -> None:
    calls = []
    for slowness in (lambda now: 1.0, in_turn(1.0, 1.5)):
        machine = machine_of(slowness)
        measure_steps(machine, SIZES)
        calls.append(len(machine.counts))
    of_quiet, of_noisy = calls
    assert of_noisy == of_quiet * (step_timing.ROUNDS + 1) / step_timing.ROUNDS


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.5), (1.5, 1.0)], ids=["slower", "faster"])
def test_the_drift_is_seen_in_both_directions(machine_of: Callable[..., Any], before: float, after: float) -> None:
    machine = machine_of(lambda now: before)
    steps, spread = measure_steps(machine, SIZES)
    assert spread < 1e-6
    machine.slowness = lambda now: after
    assert measure_drift(machine, steps) == pytest.approx(0.5)


def test_a_moment_of_disturbance_at_the_end_is_no_drift(machine_of: Callable[..., Any]) -> None:
    machine = machine_of(lambda now: 1.0)
    steps, _ = measure_steps(machine, SIZES)
    disturbed_seconds = machine.now + 0.5
    machine.slowness = lambda now: 2.0 if now < disturbed_seconds else 1.0
    assert measure_drift(machine, steps) < 1e-6


@pytest.mark.parametrize(("size", "num_steps"), [(1000, 2), (100, 3)], ids=["of 2 s", "of 200 ms"])
def test_few_long_steps_are_measured_again(machine_of: Callable[..., Any], size: int, num_steps: int) -> None:
    machine = machine_of(lambda now: 1.1)
    drift = measure_drift(machine, Curve((size,), (size * SECONDS_OF_EXAMPLE,)))
    assert drift == pytest.approx(0.1)
    assert machine.counts == [1] * num_steps


def test_a_step_that_no_longer_fits_has_no_drift(machine_of: Callable[..., Any]) -> None:
    machine = machine_of(lambda now: 1.0)

    def run(num_steps: int) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "other models are there")

    machine.run = run
    assert measure_drift(machine, Curve((8,), (0.01,))) == 0


@pytest.mark.parametrize(
    ("ratios", "least", "most"),
    [([1.5, 1.51, 1.49, 1.5, 1.52], 0.0, 0.02), ([1.2, 1.9, 1.2, 1.9, 1.9], 0.15, 0.3)],
    ids=["quiet", "disturbed"],
)
def test_the_slow_down_has_the_spread_of_its_rounds(
    monkeypatch: pytest.MonkeyPatch, ratios: list[float], least: float, most: float
) -> None:
    rounds: Iterator[float] = iter(ratios)

    def seconds_together(loops: list[Any], count: int) -> float:
        return 0.1 if len(loops) == 1 else 0.1 * next(rounds)

    monkeypatch.setattr(contention, "_seconds_together", seconds_together)
    machines: list[Any] = [Machine(lambda now: 1.0) for _ in range(2)]
    slowdown = contention.measure_slowdown(machines)
    assert slowdown.of_number == {1: 1.0, 2: pytest.approx(sorted(ratios)[2])}
    assert least <= slowdown.spread <= most


def test_sums_have_the_spread_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(body: Any, devices: Any, num_bytes: int, count: int) -> tuple[list[float], int]:
        return ([1.0, 3.0] * 4, 2) if num_bytes > 4 else ([0.1] * 8, 2)

    monkeypatch.setattr(link_measurement, "_seconds", seconds)
    _, spread = link_measurement.measure_reduction(["CPU:0", "CPU:1"])
    assert spread == pytest.approx(1.0)


def test_the_spread_of_sums_counts_by_their_part_of_a_step() -> None:
    model = ModelCosts("mlp", 100, 400, 1000, 800, (500, 500), 64, Curve((64,), (0.8,)), 0.01)
    part = measurement._part_of_sums(model, Link(0.5, 1e3), spread=0.4, step_seconds=2.0)
    assert part == pytest.approx(0.4 * 2.0 / 4.0)
