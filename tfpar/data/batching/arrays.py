"""Convert arrays in memory to a dataset that shuffles indices and gathers whole batches."""

from collections.abc import Mapping
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfpar.data.batching import blocks
from tfpar.data.batching.columns import Column, Dense, column
from tfpar.messages.received import quoted

BLOCK_BYTES = 1 << 20  # of one gather: large enough to amortize the call, small enough for the cache
MAX_BATCHES_PER_BLOCK = 200


Shuffle = bool | Literal["batch"]


def from_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int, shuffle: Shuffle, seed: int
) -> tf.data.Dataset:
    """Convert arrays to a `tf.data.Dataset` of global batches, as `keras.Model.fit` does.

    With `shuffle`, each epoch is a new permutation of the rows, drawn from `seed` and, as always in `tf.data`, from the
    global seed (`tf.random.set_seed`, `keras.utils.set_random_seed`), if that is set before. As in Keras, floats become
    Keras' float type, and other dtypes are kept.

    Args:
        x: An array `[examples, ...]` (see `tfpar.data.batching.columns` for the kinds), or a nested structure of arrays
            and None for several inputs.
        y: Labels, an array or a structure, or None.
        sample_weight: Weights `[examples]` or a structure of them, or None. A single array applies to all outputs.
        batch_size: Rows in a global batch; the last batch of an epoch may be smaller.
        shuffle: Whether to shuffle all rows in each epoch; "batch" shuffles within each batch only.
        seed: Seed of the order.

    Returns:
        A dataset of `x`, `(x, y)` or `(x, y, sample_weight)`, or of `(x,)` for a list or a tuple. Lists become tuples.

    Raises:
        ValueError: If lengths are zero or unequal, `batch_size` is below 1, or there are weights without labels.
        TypeError: If something is not an array.

    >>> dataset = from_arrays(np.arange(5.0), np.arange(5), batch_size=2, shuffle=False, seed=0)
    >>> [labels.numpy().tolist() for inputs, labels in dataset]
    [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight needs targets, but y is None: pass y as well.")
    if keras.tree.is_nested(y) and sample_weight is not None and not keras.tree.is_nested(sample_weight):
        sample_weight = keras.tree.map_structure(lambda _: sample_weight, y)
    _check_weights(y, sample_weight)
    named = {"x": x, "y": y, "sample_weight": sample_weight}
    with tf.device("CPU:0"):
        columns: Any = tuple(_columns(name, value) for name, value in named.items() if value is not None)
    if len(columns) == 1 and not isinstance(x, list | tuple):
        (columns,) = columns
    num_rows = _common_length(columns)
    batches_per_block = _batches_per_block(columns, num_rows, batch_size)

    def in_order() -> tf.data.Dataset:
        def read(first_row: tf.Tensor, n: int) -> Any:
            return _map(lambda column: column.between(first_row, n), columns)

        return blocks.batches(read, num_rows, batch_size, batches_per_block=batches_per_block)

    @tf.autograph.experimental.do_not_convert
    def permuted(epoch_seed: tf.Tensor) -> tf.data.Dataset:
        rows = _permutation(num_rows, tf.stack([epoch_seed, seed]), batch_size if shuffle == "batch" else num_rows)

        def read(first_row: tf.Tensor, n: int) -> Any:
            chosen = tf.slice(rows, [first_row], [n])
            return _map(lambda column: column.at(chosen, n), columns)

        return blocks.batches(read, num_rows, batch_size, batches_per_block=batches_per_block)

    if not shuffle:
        return blocks.as_built(in_order())
    epoch_seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    num_batches = -(-num_rows // batch_size)
    dataset = epoch_seeds.flat_map(permuted).apply(tf.data.experimental.assert_cardinality(num_batches))
    return blocks.as_built(dataset)


def _permutation(num_rows: int, seed: tf.Tensor, within: int) -> tf.Tensor:
    """Return the row numbers in random order, shuffled within groups of `within` consecutive rows."""
    if within >= num_rows:
        return tf.random.experimental.stateless_shuffle(tf.range(num_rows), seed)
    groups = tf.cast(tf.range(num_rows) // within, tf.float64)
    return tf.argsort(groups + tf.random.stateless_uniform([num_rows], seed, dtype=tf.float64))


def _check_weights(y: Any, sample_weight: Any) -> None:
    """Refuse weights for outputs other than those with targets."""
    if isinstance(y, Mapping) and isinstance(sample_weight, Mapping) and set(y) != set(sample_weight):
        raise ValueError(
            f"sample_weight must have the outputs of y, received {sorted(sample_weight)} for {sorted(y)}. Give an "
            "output without weights np.ones(examples)."
        )


def hold_out(arrays: Any, share: float) -> tuple[Any, Any]:
    """Hold out the last rows for validation, as `keras.Model.fit(validation_split=...)` does.

    Args:
        arrays: `(x, y, sample_weight)` as for `from_arrays`, with None for what is missing.
        share: Fraction of the rows to hold out, above 0 and below 1.

    Returns:
        The rows to train on and the rows held out, in the same structure, as tensors.

    Raises:
        ValueError: If one side would be empty, or arrays have unequal lengths.
        TypeError: If something is not an array.

    >>> (x, _, _), (held_out, _, _) = hold_out((np.arange(5), None, None), 0.4)
    >>> x.numpy().tolist(), held_out.numpy().tolist()
    ([0, 1, 2], [3, 4])
    """
    if not isinstance(share, int | float | np.number):
        raise TypeError(f"validation_split must be a fraction above 0 and below 1, received {quoted(share)}.")
    columns = _columns("the arrays", arrays)
    num_rows = _common_length(columns)
    first = int(num_rows * (1 - share)) if 0 < share < 1 else 0
    if not 0 < first < num_rows:
        raise ValueError(
            f"validation_split must leave rows to train on and to validate on, but is {share} of {num_rows} rows: use "
            "a fraction above 0 and below 1."
        )
    with tf.device("CPU:0"):
        kept = _map(lambda column: column.between(0, first), columns)
        held_out = _map(lambda column: column.between(first, num_rows - first), columns)
    return kept, held_out


def num_rows(arrays: Any) -> int:
    """Return the number of examples in arrays as for `from_arrays`.

    >>> num_rows({"a": np.zeros([3, 2]), "b": None})
    3
    """
    return _common_length(_columns("the arrays", arrays))


def _columns(name: str, value: Any) -> Any:
    """Convert each array of a structure to a column; errors name the path of the array."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _columns(f"{name}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_columns(f"{name}[{index}]", item) for index, item in enumerate(value))
    return column(name, value)


def _map(function: Any, columns: Any) -> Any:
    return tf.nest.map_structure(lambda column: None if column is None else function(column), columns)


def _present(columns: Any) -> list[Column]:
    return [column for column in tf.nest.flatten(columns) if column is not None]


def _common_length(columns: Any) -> int:
    lengths = [column.num_rows for column in _present(columns)]
    if not lengths:
        raise ValueError("The data hold no examples: received no array. Pass a dataset, or arrays [examples, ...].")
    if min(lengths) == 0:
        raise ValueError("The arrays hold no examples: the first axis must be at least 1 long.")
    if len(set(lengths)) > 1:
        raise ValueError(f"All arrays must have the same number of examples, but their first axes are {lengths} long.")
    return lengths[0]


def _batches_per_block(columns: Any, num_rows: int, batch_size: int) -> int:
    dense = [column for column in _present(columns) if isinstance(column, Dense)]
    if len(dense) < len(tf.nest.flatten(columns)):
        return 1  # only dense tensors can be split into batches of equal shape afterwards
    total_bytes = sum(column.values.dtype.size * column.values.shape.num_elements() for column in dense)
    batch_bytes = max(1, total_bytes * batch_size // num_rows)
    return int(np.clip(BLOCK_BYTES // batch_bytes, 1, MAX_BATCHES_PER_BLOCK))
