"""The base of engines with one copy of the model, whose steps take whole global batches."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfpar import data
from tfpar.engines.distributed import Distributed
from tfpar.engines.engine import Engine


class SingleReplica(Engine):
    """An engine with one copy of each weight; a step takes a whole global batch."""

    num_replicas = 1

    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return the dataset of whole global batches."""
        if isinstance(dataset, data.Sharded):
            return Distributed(dataset.global_batches())
        cuts_batch = self.cuts_model or self.batch_parts[0] > 1  # a single micro-batch is cut by rows too
        return Distributed(data.map_batches(dataset, data.with_equal_rows) if cuts_batch else dataset)

    def end_call(self, model: keras.Model) -> None:
        """Do nothing: every step is complete."""
