"""The experiments of grids of devices whose layers sleep, and the step of the simulator. No TensorFlow here.

Devices that sleep do not share cores, so that eight of them run on two. The first prediction takes the seconds of each
sleep and the rate that the network is set to, and no measurement. The second is what tfpar prints, from measured
actions and messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output
from benchmarks.pipelines.figures import ratio
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.schedule.layouts import Network, simulate_layout
from tfpar.pipeline.schedule.links import Link
from tfpar.pipeline.schedule.simulator import Durations, microbatch_scale

BACKWARD_PER_FORWARD = 2
PAYLOAD = 0.94  # of the bits on an Ethernet, without the headers of TCP
_NO_COST = Link(0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class Sleeping:
    """A grid of replicas and stages that sleep.

    Args:
        num_replicas: Number of replicas.
        forward_seconds: The sleep of each stage in the forward pass of a full micro-batch; that of the backward pass
            is twice as long. A smaller micro-batch sleeps less, by its rows.
        num_examples: Rows of a global batch.
        num_microbatches: Micro-batches of a replica.
        schedule: Name of the schedule.
        num_devices: Logical CPUs, of all workers together.
        num_workers: Workers that share the replicas, each on a host of its own.
        megabits_per_second: The rate at which the hosts send; 0 for one worker.
        width: Each stage has a weight of this many rows and columns.
        num_steps: Timed steps, after one that compiles.
    """

    num_replicas: int
    forward_seconds: tuple[float, ...]
    num_examples: int
    num_microbatches: int
    schedule: str = "1f1b"
    num_devices: int = 8
    num_workers: int = 1
    megabits_per_second: int = 0
    width: int = 8
    num_steps: int = 3

    @property
    def order(self) -> schedules.Schedule:
        """The order of the actions on all devices."""
        stages, devices = len(self.forward_seconds), self.num_devices // self.num_replicas
        return schedules.make(self.schedule, stages, self.num_microbatches, devices).replicated(self.num_replicas)

    @property
    def rows(self) -> int:
        """Rows of a full micro-batch."""
        return -(-self.num_examples // self.order.num_microbatches)


def predicted_seconds(setting: Sleeping) -> float:
    """Return the step of a grid, computed from its sleeps.

    Args:
        setting: The grid.

    Example:
        >>> grid = Sleeping(1, (0.01,) * 8, num_examples=4, num_microbatches=1)  # 8 x (10 + 20) ms
        >>> round(predicted_seconds(grid), 9)
        0.24
    """
    forward, num_stages = setting.forward_seconds, len(setting.forward_seconds)
    durations = Durations(
        forward_seconds=forward,
        backward_seconds=tuple(BACKWARD_PER_FORWARD * seconds for seconds in forward),
        input_gradient_seconds=(),
        weight_gradient_seconds=(),
        transfer_seconds=(),
        microbatch_scale=microbatch_scale(setting.num_examples, setting.order.num_microbatches),
    )
    rate = PAYLOAD * 1e6 / 8 * setting.megabits_per_second or math.inf
    network = Network(setting.num_devices // setting.num_workers, _NO_COST, Link(0.0, rate))
    gradient_bytes = [4 * (setting.width + 1) * setting.width] * num_stages
    return simulate_layout(setting.order, durations, [0] * (num_stages - 1), gradient_bytes, network).step_seconds


def measure(setting: Sleeping) -> Output:
    """Return the step of a grid, measured in fresh processes, and both predictions.

    Args:
        setting: The grid.

    Raises:
        WorkerError: If a process fails.
        OSError: If there are several workers, and this process may not make hosts.
    """
    rate = f"{setting.megabits_per_second}mbit"
    measured, *_ = process.ask_workers("benchmarks.pipelines.sleeping_worker", setting, setting.num_workers, rate)
    return {**measured, "predicted_seconds": predicted_seconds(setting)}


_EVEN, _UNEVEN = (0.05,) * 4, (0.04, 0.07, 0.05, 0.03)
_GRID = Sleeping(2, _EVEN, num_examples=64, num_microbatches=8)
_SETTINGS = {
    "2 x 4": _GRID,
    "4 x 2": dataclasses.replace(_GRID, num_replicas=4, forward_seconds=_EVEN[:2], num_examples=128),
    "1 x 8": dataclasses.replace(_GRID, num_replicas=1, forward_seconds=_EVEN + _EVEN, num_examples=32),
    "2 x 4, GPipe": dataclasses.replace(_GRID, schedule="gpipe"),
    "2 x 4, interleaved, 8 stages": dataclasses.replace(_GRID, schedule="interleaved", forward_seconds=_EVEN + _EVEN),
    "2 x 4, uneven stages": dataclasses.replace(_GRID, forward_seconds=_UNEVEN),
    "2 x 4, micro-batches of 4 and 3": dataclasses.replace(_GRID, num_examples=53),
    "4 x 2, uneven stages, micro-batches of 2 and 1": dataclasses.replace(
        _GRID, num_replicas=4, forward_seconds=_UNEVEN[:2], num_examples=43
    ),
}

# 4.2 MB of gradients a stage take 170 ms, longer than the 100 ms after which the stage before ends.
_WORKERS = dataclasses.replace(_GRID, num_workers=2, megabits_per_second=200, width=1024)
_SETTINGS_OF_WORKERS = {
    "2 workers x 4 stages": _WORKERS,
    "2 workers x 2 replicas x 2 stages": dataclasses.replace(
        _WORKERS, num_replicas=4, forward_seconds=_EVEN[:2], num_examples=128
    ),
}


def _experiment(name: str, summary: str, settings: Mapping[str, Sleeping]) -> Experiment:
    findings = [
        Finding(f"{setting}: {text} / measured", ratio(setting, setting, figure, "step_seconds"), 0.95, 1.05)
        for text, figure in (("predicted", "predicted_seconds"), ("printed by tfpar", "printed_seconds"))
        for setting in settings
    ]
    return Experiment(name, summary, "step_seconds", settings, measure, tuple(findings))


HYBRID_SLEEPING = _experiment(
    "hybrid_sleeping", "Grids of 8 logical CPUs whose layers sleep: predicted and measured step", _SETTINGS
)
WORKERS_SLEEPING = _experiment(
    "workers_sleeping",
    "The same in two workers with a link of 200 Mbit/s, over which they sum 4.2 MB of gradients a stage",
    _SETTINGS_OF_WORKERS,
)
