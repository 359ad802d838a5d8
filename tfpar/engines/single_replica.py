"""The base class of engines whose steps take whole global batches."""

from __future__ import annotations

import tensorflow as tf

from tfpar import data
from tfpar.engines.distributed import Distributed
from tfpar.engines.engine import Engine


class SingleReplica(Engine):
    """Base class of engines with one copy of each weight, whose steps take whole global batches."""

    num_replicas = 1

    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return a dataset of whole global batches."""
        if isinstance(dataset, data.Sharded):
            return Distributed(dataset.global_batches())
        cuts_batch = self.cuts_model or self.batch_parts[0] > 1  # a stage cuts even a single micro-batch by rows
        return Distributed(data.map_batches(dataset, data.with_equal_rows) if cuts_batch else dataset)
