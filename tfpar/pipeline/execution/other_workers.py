"""Communication of a step with the other workers of a job, which run replicas of the same pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf


class BatchSizes(NamedTuple):
    """The sizes of the local batch and the global batch.

    Args:
        num_counted: The number of local examples that count, an int64 scalar. If there are none, the worker computes
            one example of weight 0.
        num_examples: The size of the global batch, an int64 scalar.
    """

    num_counted: tf.Tensor
    num_examples: tf.Tensor


class Peers(Protocol):
    """Collectives over the workers of a job inside a step. All workers call the same methods in the same order."""

    num_workers: int
    rank: int

    def add(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum small tensors over all workers."""

    def add_gradients(self, gradients: Sequence[Any], weights: Sequence[keras.Variable]) -> list[Any]:
        """Sum the gradient of each weight over all workers, on the device of the weight.

        If a single worker updates a weight, only that worker may receive the sum.

        Args:
            gradients: The gradient of each weight, a tensor or None.
            weights: The weights.
        """

    def all_gather(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Gather the rows of tensors from all workers, in the order of their ranks.

        Args:
            tensors: `[rows, ...]` each, all with the same number of rows.
            device: The device of the tensors, the same on all workers.
        """
