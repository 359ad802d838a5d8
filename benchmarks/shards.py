"""The experiment `shards`: time of a step and memory of a device, with and without sharded optimizer state or weights.

    python -m benchmarks shards

Memory is that of the process, without that of one with a tiny model, divided by its logical CPUs. These share the
memory of equal weights until one of them changes, so a replica on a GPU takes up to 3 bytes a parameter more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Target

Workload = Literal["updates", "tiny", "transformer"]


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one process trains with Adam.

    Args:
        workload: "updates": 24 Dense(2048) without biases, 100,663,296 parameters, 2 examples a replica. "tiny": the
            same with Dense(8). "transformer": that of the pipeline experiments, batch 32.
        shard: The argument of `tfpar.Mirrored`.
        num_replicas: Logical CPUs.
        num_steps: Steps of the timed call of `fit`.
    """

    workload: Workload
    shard: Literal["optimizer", "weights"] | None
    num_replicas: int
    num_steps: int


def measure(setting: Shards) -> Output:
    """Return the steps per second, and the bytes of the process and the number of parameters at the peak of a step.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.shards_worker", {"setting": vars(setting)})


_WITHOUT, _STATE, _WEIGHTS = "Mirrored", 'Mirrored(shard="optimizer")', 'Mirrored(shard="weights")'
_NUM_DEVICES = 4


def _settings(workload: Workload, num_replicas: int, num_steps: int) -> dict[str, Shards]:
    return {
        f"{_WITHOUT}, {workload}": Shards(workload, None, num_replicas, num_steps),
        f"{_STATE}, {workload}": Shards(workload, "optimizer", num_replicas, num_steps),
        f"{_WEIGHTS}, {workload}": Shards(workload, "weights", num_replicas, num_steps),
    }


# Weights, gradients and two slots in float32; the slots on one of four devices. Weights that replicas share, and
# gradients that are summed during the backward pass, take less.
_MOST_BYTES = 1.1 * (4 + 4 + 8 / _NUM_DEVICES)
# All of it on one of four devices, and the weights of two of 24 blocks.
_MOST_BYTES_OF_WEIGHTS = 1.1 * (16 / _NUM_DEVICES + 4 * 2 / 24)


def _bytes_per_parameter(name: str, tiny: str) -> Callable[[Mapping[str, Output]], float]:
    def found(outputs: Mapping[str, Output]) -> float:
        model_bytes = outputs[name]["process_bytes"] - outputs[tiny]["process_bytes"]
        return model_bytes / outputs[name]["num_parameters"] / _NUM_DEVICES

    return found


def _memory(name: str, at_most: float | None = None) -> Finding:
    found = _bytes_per_parameter(f"{name}, updates", f"{name}, tiny")
    return Finding(f"bytes of a device for each parameter, {name}, updates", found, at_most=at_most)


SHARDS = Experiment(
    name="shards",
    summary="Adam's state, or weights too, on one of 4 (100 million parameters) and 2 logical CPUs (transformer)",
    figure="steps_per_second",
    settings=_settings("updates", _NUM_DEVICES, 4)
    | _settings("tiny", _NUM_DEVICES, 4)
    | _settings("transformer", 2, 6),
    measure=measure,
    findings=(
        Target((f"{_STATE}, updates",), (f"{_WITHOUT}, updates",), 1.0),
        Target((f"{_STATE}, transformer",), (f"{_WITHOUT}, transformer",), 1.0),
        Target((f"{_WEIGHTS}, transformer",), (f"{_WITHOUT}, transformer",), 1 / 1.25),
        _memory(_WITHOUT),
        _memory(_STATE, _MOST_BYTES),
        _memory(_WEIGHTS, _MOST_BYTES_OF_WEIGHTS),
    ),
)
