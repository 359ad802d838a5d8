"""Collectives between the workers of a job whose pipelines have the same stages.

worker 0   stage 0 on GPU:0   stage 1 on GPU:1
                │                  │            a group for each device: its messages wait for no other stage
worker 1   stage 0 on GPU:0   stage 1 on GPU:1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar.engines.steps.batches_ahead import HOST
from tfpar.engines.workers.collectives import PACK_BYTES, Group
from tfpar.reduction.gradients.all_reduce import sum_in_packs


class StageSums:
    """Implements `tfpar.pipeline.execution.other_workers.Peers` for the workers of a job.

    Args:
        devices: Full names of this worker's devices, in the same order on all workers.
        rank: Rank of this worker.
        num_workers: Number of workers.
        hosts: A device of each worker.
        implementation: Implementation of the collectives between the devices.
    """

    def __init__(
        self,
        devices: Sequence[str],
        rank: int,
        num_workers: int,
        hosts: Group,
        implementation: Literal["ring", "nccl"],
    ) -> None:
        self.rank, self.num_workers, self._hosts = rank, num_workers, hosts
        self._groups = {
            place_of(device): Group([device], num_workers, implementation, order=hosts.order) for device in devices
        }

    def group(self, place: tuple[str, int]) -> Group:
        """Return the group of a device of each worker, by the type and index of the device."""
        return self._groups[place]

    def add(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of small tensors over all workers."""
        with tf.device(HOST):
            return self._hosts.all_reduce_many(list(map(tf.identity, tensors)))

    def add_gradients(self, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
        """Return the sum of the gradient of each weight over all workers, on the device of the weight."""
        sums: list[Any] = [None] * len(gradients)
        places = [place_of(weight.value.device) for weight in weights]
        for place in dict.fromkeys(places):
            indices = [index for index, other in enumerate(places) if other == place]
            local = [gradients[index] for index in indices]
            with tf.device(weights[indices[0]].value.device):
                totals = sum_in_packs(local, self._groups[place].all_reduce, PACK_BYTES)
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
        return sums

    def all_gather(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Return the rows of tensors of all workers, in the order of their ranks.

        Raises:
            TypeError: If a tensor is ragged or sparse.
        """
        for tensor in tensors:
            if not isinstance(tensor, tf.Tensor):
                raise TypeError(
                    f"Outputs over several workers must be dense tensors, received a {type(tensor).__name__}. Return a "
                    "dense tensor, or predict in one process."
                )
        return self._groups[place_of(device)].all_gather(tensors)


def place_of(device: str) -> tuple[str, int]:
    """Return the type and index of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return str(spec.device_type), int(spec.device_index or 0)
