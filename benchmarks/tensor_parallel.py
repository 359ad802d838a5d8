"""The experiment `tensor_parallel`: layers divided over two logical CPUs, one core each, against one core.

python -m benchmarks tensor_parallel
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from benchmarks import process
from benchmarks.harness import Experiment, Output, Target

Workload = Literal["dense pair", "attention block"]


@dataclasses.dataclass(frozen=True)
class Layers:
    """What one process trains with SGD.

    Args:
        workload: "dense pair": Dense(4096, gelu) and Dense(4096) on 4096 features, batch 256. "attention block": an
            attention of 16 heads and a perceptron of 4 x 1024, pre-normalized, on 1024 features, context 128, batch 8.
        num_shards: Logical CPUs and cores; with 1 `tfpar.SingleDevice`, else `tfpar.TensorParallel`.
        num_steps: Steps of the timed call of `fit`.
    """

    workload: Workload
    num_shards: int
    num_steps: int


def measure(setting: Layers) -> Output:
    """Return the steps per second.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.tensor_parallel_worker", {"setting": vars(setting)})


def _contender(num_shards: int, workload: Workload) -> str:
    name = "SingleDevice, one core" if num_shards == 1 else f"TensorParallel({num_shards})"
    return f"{name}, {workload}"


_WORKLOADS: dict[Workload, float] = {"dense pair": 1.6, "attention block": 1.4}

TENSOR_PARALLEL = Experiment(
    name="tensor_parallel",
    summary="a pair of Dense(4096), and an attention block, divided over two logical CPUs, against one core",
    figure="steps_per_second",
    settings={_contender(shards, one): Layers(one, shards, 10) for one in _WORKLOADS for shards in (1, 2)},
    measure=measure,
    findings=tuple(
        Target((_contender(2, one),), (_contender(1, one),), at_least) for one, at_least in _WORKLOADS.items()
    ),
)
