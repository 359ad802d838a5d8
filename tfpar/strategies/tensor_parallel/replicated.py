"""Replicas of a `TensorParallel`: what `Hybrid` makes of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tfpar.cluster import tf_config
from tfpar.strategies.tensor_parallel.strategy import TensorParallel, devices_of


class TensorParallelReplicas(TensorParallel):
    """Replicas of the devices of a `TensorParallel`, each with a part of every global batch; made by `Hybrid`.

    Args:
        strategy: The shards of each replica.
        num_replicas: Number of replicas.
        devices: Device names, those of the first replica first; None takes the first ones of this machine.

    Raises:
        ValueError: If the devices do not fit.
    """

    def __init__(self, strategy: TensorParallel, num_replicas: int, devices: Sequence[str] | None) -> None:
        super().__init__(strategy.num_shards, strategy.layout)
        self._take(devices_of(strategy.num_shards, num_replicas, devices))

    def describe(self) -> str:
        """Return one line with the devices of each replica."""
        grid = ", ".join(f"({' '.join(one.removeprefix('/device:') for one in devices)})" for devices in self._replicas)
        return f"Hybrid of {self.num_replicas} replicas of TensorParallel of {self.num_shards} shards on {grid}"


def replicas_of(
    pipeline: TensorParallel, num_replicas: int = 1, devices: Sequence[str] | None = None, **others: Any
) -> TensorParallelReplicas:
    """Return the replicas of a `TensorParallel`; the arguments are those of `Hybrid`.

    Raises:
        ValueError: If the devices do not fit, or an argument is one for pipelines.
    """
    if others:
        raise ValueError(
            f"{next(iter(others))} is an argument of Hybrid for pipelines over several workers, received with a "
            "TensorParallel, whose replicas are on one machine. Leave it out."
        )
    job = tf_config.from_environment(os.environ)
    if job is not None and job.num_workers > 1:
        raise ValueError(
            f"Replicas of a TensorParallel are on one machine, received a job of {job.num_workers} workers. Use "
            "MultiWorker, or Hybrid of a Pipeline."
        )
    check_num_replicas(pipeline, num_replicas)
    return TensorParallelReplicas(pipeline, num_replicas, devices)


def check_num_replicas(pipeline: Any, num_replicas: int) -> None:
    """Raise ValueError unless the number of replicas is one, and their devices are not given twice."""
    if not isinstance(num_replicas, int) or isinstance(num_replicas, bool) or num_replicas < 1:
        raise ValueError(f"num_replicas must be a whole number of at least 1, received {num_replicas!r}.")
    if pipeline.given_devices is not None and num_replicas > 1:
        raise ValueError(
            f"The devices of all replicas are an argument of Hybrid, received devices={pipeline.given_devices} of its "
            "first argument. Leave them out there, and give devices to Hybrid."
        )
