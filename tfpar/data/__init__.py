"""Data: settings or arrays in, plain `tf.data.Dataset`s of global batches out, with a position that can be replayed."""

from tfpar.data.arrays import from_arrays, hold_out
from tfpar.data.batches import class_weights, join_batches, split_batch, take_rows
from tfpar.data.explain import explain
from tfpar.data.load import Loaded, load
from tfpar.data.position import seek

__all__ = [
    "Loaded",
    "class_weights",
    "explain",
    "from_arrays",
    "hold_out",
    "join_batches",
    "load",
    "seek",
    "split_batch",
    "take_rows",
]
