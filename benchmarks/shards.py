"""The experiment `shards`: time of a step and memory of a device, with and without sharded optimizer state or weights.

    python -m benchmarks shards

Memory is that of the process, without that of one with a tiny model, divided by its logical CPUs. These share the
memory of equal weights until one of them changes, so a replica on a GPU takes up to 3 bytes a parameter more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Target

Workload = Literal["updates", "tiny", "transformer"]


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one process, or each of several workers, trains with Adam.

    Args:
        workload: "updates": 24 Dense(2048) without biases, 100,663,296 parameters, 2 examples a replica. "tiny": the
            same with Dense(8). "transformer": that of the pipeline experiments, batch 32.
        shard: The argument of `tfpar.Mirrored` and `tfpar.MultiWorker`.
        num_replicas: Logical CPUs of each process.
        num_steps: Steps of the timed call of `fit`.
        num_workers: Processes.
        recompute: The argument of `tfpar.Mirrored` and `tfpar.MultiWorker`.
    """

    workload: Workload
    shard: Literal["optimizer", "weights"] | None
    num_replicas: int
    num_steps: int
    num_workers: int = 1
    recompute: bool = False


def measure(setting: Shards) -> Output:
    """Return steps per second, the bytes of a process at its peak, of optimizer state and of `preview`, and parameters.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If a process fails.
    """
    outputs = process.ask_workers("benchmarks.shards_worker", setting, setting.num_workers)
    return {name: max(output[name] for output in outputs) for name in outputs[0]}


_WITHOUT, _STATE, _WEIGHTS = "Mirrored", 'Mirrored(shard="optimizer")', 'Mirrored(shard="weights")'
_NUM_DEVICES = 4


_WORKERS, _SHARDED_WORKERS = "MultiWorker over 2", 'MultiWorker(shard="optimizer") over 2'


# The gradients of "updates" with few examples are products of small factors, which the workers exchange instead.
_OVER_WORKERS: dict[Workload, int] = {"updates": 4, "transformer": 6}


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


def _bytes_per_parameter(outputs: Mapping[str, Output], name: str) -> float:
    model_bytes = outputs[f"{name}, updates"]["process_bytes"] - outputs[f"{name}, tiny"]["process_bytes"]
    return model_bytes / outputs[f"{name}, updates"]["num_parameters"] / _NUM_DEVICES


def _memory(name: str, at_most: float | None = None) -> Finding:
    text = f"bytes of a device for each parameter, {name}, updates"
    return Finding(text, lambda outputs: _bytes_per_parameter(outputs, name), at_most=at_most)


def _prediction(name: str, num_shared: int) -> Finding:
    """Compare the memory of `preview` with the measured one, without copies of weights that logical CPUs share."""

    def ratio(outputs: Mapping[str, Output]) -> float:
        updates = outputs[f"{name}, updates"]
        predicted = updates["predicted_bytes"] / updates["num_parameters"] - 4 * num_shared
        return predicted / _NUM_DEVICES / _bytes_per_parameter(outputs, name)

    return Finding(f"predicted / measured memory, {name}, updates", ratio, at_least=0.9, at_most=1.1)


def _state_of_worker(outputs: Mapping[str, Output]) -> float:
    sharded = outputs[f"{_SHARDED_WORKERS}, updates"]
    return sharded["state_bytes"] / sharded["num_parameters"]


def _speed_over_workers(workload: Workload) -> Finding:
    def ratio(outputs: Mapping[str, Output]) -> float:
        sharded, without = (outputs[f"{name}, {workload}"] for name in (_SHARDED_WORKERS, _WORKERS))
        return sharded["steps_per_second"] / without["steps_per_second"]

    return Finding(f"steps per second, sharded over 2 workers against unsharded, {workload}", ratio)


SHARDS = Experiment(
    name="shards",
    summary="Adam's state, or weights too, on one of 4 (100 million parameters) and 2 logical CPUs, and of 2 workers",
    figure="steps_per_second",
    settings=_settings("updates", _NUM_DEVICES, 4)
    | _settings("tiny", _NUM_DEVICES, 4)
    | _settings("transformer", 2, 6)
    | {
        f"{name}, {workload}": Shards(workload, shard, 1, num_steps, num_workers=2)
        for workload, num_steps in _OVER_WORKERS.items()
        for name, shard in ((_WORKERS, None), (_SHARDED_WORKERS, "optimizer"))
    },
    measure=measure,
    findings=(
        Target((f"{_STATE}, updates",), (f"{_WITHOUT}, updates",), 1.0),
        Target((f"{_STATE}, transformer",), (f"{_WITHOUT}, transformer",), 1.0),
        Target((f"{_WEIGHTS}, transformer",), (f"{_WITHOUT}, transformer",), 1 / 1.25),
        _memory(_WITHOUT),
        _memory(_STATE, _MOST_BYTES),
        _memory(_WEIGHTS, _MOST_BYTES_OF_WEIGHTS),
        _prediction(_STATE, _NUM_DEVICES - 1),
        _prediction(_WEIGHTS, 0),
        Finding(
            "bytes of optimizer state of a worker for each parameter, sharded over 2",
            _state_of_worker,
            at_most=1.1 * 8 / 2,
        ),
        *map(_speed_over_workers, _OVER_WORKERS),
    ),
)
