"""Data: settings or arrays in, plain `tf.data.Dataset`s of global batches out, with a position that can be replayed."""

from tfpar.data.arrays import as_dataset, from_arrays, hold_out
from tfpar.data.audit import Audit, audit
from tfpar.data.batches import class_weights, join_batches, num_rows, split_batch, take_rows
from tfpar.data.divided import by_example, by_file
from tfpar.data.explain import explain
from tfpar.data.load import Loaded, describe, load
from tfpar.data.position import seek
from tfpar.data.shards import Sharded, first_batches

__all__ = [
    "Audit",
    "Loaded",
    "Sharded",
    "as_dataset",
    "audit",
    "by_example",
    "by_file",
    "class_weights",
    "describe",
    "explain",
    "first_batches",
    "from_arrays",
    "hold_out",
    "join_batches",
    "load",
    "num_rows",
    "seek",
    "split_batch",
    "take_rows",
]
