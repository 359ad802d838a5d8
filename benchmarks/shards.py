"""The experiment `shards`: time of a step and memory of a device, with and without sharded optimizer state.

    python -m benchmarks shards

Memory is that of the process, divided by its logical CPUs. These share the memory of equal weights until one of them
changes, so a replica on a GPU takes up to 3 bytes a parameter more.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Target

Workload = Literal["updates", "transformer"]


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one process trains with Adam.

    Args:
        workload: "updates": 24 Dense(2048) without biases, 100,663,296 parameters, 2 examples a replica.
            "transformer": that of the pipeline experiments, batch 32.
        shard: The argument of `tfpar.Mirrored`.
        num_replicas: Logical CPUs.
        num_steps: Steps of the timed call of `fit`.
    """

    workload: Workload
    shard: Literal["optimizer"] | None
    num_replicas: int
    num_steps: int


def measure(setting: Shards) -> Output:
    """Return the steps per second, and the bytes of a device for each parameter at the peak of a step.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.shards_worker", {"setting": vars(setting)})


_WITHOUT, _WITH = "Mirrored", 'Mirrored(shard="optimizer")'


def _settings(workload: Workload, num_replicas: int, num_steps: int) -> dict[str, Shards]:
    return {
        f"{_WITHOUT}, {workload}": Shards(workload, None, num_replicas, num_steps),
        f"{_WITH}, {workload}": Shards(workload, "optimizer", num_replicas, num_steps),
    }


# Weights, gradients and two slots in float32; the slots on one of four devices. Weights that replicas share, and
# gradients that are summed during the backward pass, take less.
_MOST_BYTES = 1.1 * (4 + 4 + 8 / 4)

SHARDS = Experiment(
    name="shards",
    summary="Adam's state on one of 4 (100 million parameters) and of 2 logical CPUs (transformer), against Mirrored",
    figure="steps_per_second",
    settings=_settings("updates", 4, 4) | _settings("transformer", 2, 6),
    measure=measure,
    findings=(
        Target((f"{_WITH}, updates",), (f"{_WITHOUT}, updates",), 1.0),
        Target((f"{_WITH}, transformer",), (f"{_WITHOUT}, transformer",), 1.0),
        Finding(
            "bytes of a device for each parameter, sharded, updates",
            lambda outputs: outputs[f"{_WITH}, updates"]["bytes_per_parameter"],
            at_most=_MOST_BYTES,
        ),
        Finding(
            "bytes of a device for each parameter, Mirrored, updates",
            lambda outputs: outputs[f"{_WITHOUT}, updates"]["bytes_per_parameter"],
        ),
    ),
)
