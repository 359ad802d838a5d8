"""The other workers of a job, each with replicas of the same pipeline, as a step needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf


class LocalPart(NamedTuple):
    """The part of a global batch on this worker.

    Args:
        num_counted: The number of its examples that count, an int64 scalar. It is 0 where other workers have all
            examples; this worker then computes one of weight 0.
        num_examples: The size of the global batch, an int64 scalar.
    """

    num_counted: tf.Tensor
    num_examples: tf.Tensor


class Peers(Protocol):
    """Sums over the workers of a job, inside of a step; all workers call the same methods in the same order.

    Attributes:
        num_workers: The number of workers.
        rank: The rank of this worker.
    """

    num_workers: int
    rank: int

    def add(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of small tensors over all workers."""

    def add_gradients(self, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
        """Return the sum of the gradient of each weight over all workers, on the device of the weight.

        Where one worker alone updates a weight, the sum may be right only there.

        Args:
            gradients: A tensor, or None for none.
            weights: The weights.
        """

    def all_gather(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Return the rows of tensors of all workers, in the order of their ranks.

        Args:
            tensors: `[rows, ...]` each, with equal numbers of rows.
            device: The device that holds them, the same on all workers.
        """
