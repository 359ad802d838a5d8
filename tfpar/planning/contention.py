"""The slow-down of training steps on a device while other devices compute too."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfpar.planning import spread
from tfpar.planning.costs import ModelCosts
from tfpar.planning.step_timing import TimedLoop

_MOST_SHARED_BYTES = 16 << 20
_MOST_OF_UPDATE = 0.1
_ROUNDS = 5
_SECONDS_OF_ROUND = 0.25


class Slowdown(NamedTuple):
    """How much longer steps take with several devices at once.

    Args:
        of_number: The seconds relative to those of one device, at least 1, by the number of devices.
        spread: The spread of the rounds.
    """

    of_number: dict[int, float]
    spread: float = 0.0


def are_alike(devices: Sequence[str]) -> bool:
    """Return whether devices have the same cores and memory, as logical CPUs do.

    Two threads on one such device take as long as one thread on each of two.

    Args:
        devices: Names of devices.

    Example:
        >>> are_alike(["CPU:0", "CPU:1"]), are_alike(["GPU:0", "GPU:1"])
        (True, False)
    """
    return all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)


def may_share_model(devices: Sequence[str], costs: ModelCosts, num_examples: int | None = None) -> bool:
    """Return whether steps on several devices can be measured with one model, as long as they take with one on each.

    Threads with one model share in the caches of the processor what devices read twice, which counts for large weights;
    and where both change the weights, they wait for each other.

    Args:
        devices: Names of devices.
        costs: The costs of the model.
        num_examples: The examples of a step; None for steps without update.
    """
    if not are_alike(devices) or costs.weight_bytes > _MOST_SHARED_BYTES:
        return False
    if num_examples is None:
        return True
    step_seconds = costs.compute.at(num_examples) + costs.update_seconds
    return costs.update_seconds < _MOST_OF_UPDATE * step_seconds


def measure_slowdown(loops: Sequence[TimedLoop]) -> Slowdown:
    """Measure how much longer a training step takes with several devices at once, each with a copy of the model.

    Logical CPUs share cores and memory; GPUs share the threads of the host.

    Args:
        loops: The steps on each device of one process, with batches of one size.

    Returns:
        The slow-down with 1, 2, 4 and so on devices, and with all.
    """
    for loop in loops:
        loop.run(2)  # compiles
    alone_seconds = _seconds_together(loops[:1], 1)
    count = max(1, round(_SECONDS_OF_ROUND / alone_seconds))
    num_rounds = _ROUNDS if alone_seconds < _SECONDS_OF_ROUND else 1
    numbers = sorted({*(1 << power for power in range(len(loops).bit_length())), len(loops)})
    rounds = [{number: _seconds_together(loops[:number], count) for number in numbers} for _ in range(num_rounds)]
    ratios = {number: [one[number] / one[1] for one in rounds] for number in numbers}
    return Slowdown(
        {number: max(1.0, statistics.median(each)) for number, each in ratios.items()},
        max(spread.of_repeats(each) for each in ratios.values()) if num_rounds > 1 else 0.0,
    )


def _seconds_together(loops: Sequence[TimedLoop], count: int) -> float:
    """Return the seconds of a step while each device runs some, one after another, in a thread of its own."""
    start = threading.Barrier(len(loops) + 1)
    ends: list[float] = []
    errors: list[BaseException] = []

    def repeat(loop: TimedLoop) -> None:
        start.wait()
        try:
            loop.run(count)
        except BaseException as error:
            errors.append(error)
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=repeat, args=(loop,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    start.wait()
    began_seconds = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return (statistics.mean(ends) - began_seconds) / count
