"""What strategies with one copy of the model have in common: their steps take whole global batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model
from tfpar.reduction import objective
from tfpar.strategies.base import Distributed, Strategy


class SingleReplica(Strategy):
    """A strategy under which each weight exists once, and whose steps take every global batch whole."""

    num_replicas = 1

    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return the global batches as they are."""
        return Distributed(dataset.whole() if isinstance(dataset, data.Sharded) else dataset)

    def local_batch(self, element: Any) -> Any:
        """Return the element: it is the global batch."""
        return element

    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the number of examples of the batch, an int64 scalar."""
        return data.num_rows(element)

    def end_call(self, model: keras.Model) -> None:
        """Do nothing: every step is complete by itself."""

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average where the optimizer keeps one."""
        with keras_model.one_device_optimizer():
            for optimizer, variables in objective.updates_of(model):
                optimizer.finalize_variable_values(variables)
