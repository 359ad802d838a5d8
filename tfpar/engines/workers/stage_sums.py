"""Sums over the workers of a job of what the stages of their pipelines compute.

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
    """The workers of a job as `tfpar.pipeline.execution.other_workers.Peers`.

    Args:
        devices: The devices of this worker, full names; those of all workers have the same order.
        rank: The rank of this worker.
        num_workers: The number of workers.
        hosts: One device of each worker.
        implementation: How the gradients are sent.
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
        """Return the group of one device of each worker, by the type and number of the device."""
        return self._groups[place]

    def add(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of small tensors over all workers."""
        with tf.device(HOST):
            return self._hosts.all_reduce_many(list(map(tf.identity, tensors)))

    def add_gradients(self, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
        """Return the sum of the gradient of each weight over all workers, on the device of the weight."""
        sums: list[Any] = [None] * len(gradients)
        homes = [place_of(weight.value.device) for weight in weights]
        for home in dict.fromkeys(homes):
            of_home = [index for index, other in enumerate(homes) if other == home]
            given = [gradients[index] for index in of_home]
            with tf.device(weights[of_home[0]].value.device):
                found = sum_in_packs(given, self._groups[home].all_reduce, PACK_BYTES)
            for index, total in zip(of_home, found, strict=True):
                sums[index] = total
        return sums

    def all_gather(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Return the rows of tensors of all workers, in the order of their ranks.

        Raises:
            TypeError: If one is ragged or sparse.
        """
        for tensor in tensors:
            if not isinstance(tensor, tf.Tensor):
                raise TypeError(
                    f"Outputs over several workers must be dense tensors, received a {type(tensor).__name__}. Return a "
                    "dense tensor, or predict in one process."
                )
        return self._groups[place_of(device)].all_gather(tensors)


def place_of(device: str) -> tuple[str, int]:
    """Return the type and number of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return str(spec.device_type), int(spec.device_index or 0)
