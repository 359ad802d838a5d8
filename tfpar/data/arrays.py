"""Arrays in memory as a data set: shuffled by index, gathered by batch, never copied element by element."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.data import blocks
from tfpar.data.shards import Sharded

BLOCK_BYTES = 1 << 20  # what one gather brings: large enough to hide a call's cost, small enough for the cache
MAX_BATCHES_PER_BLOCK = 200


def from_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset:
    """Arrays as a `tf.data.Dataset` of global batches, as `keras.Model.fit` takes arrays.

    Each epoch is a full permutation of the rows, drawn from `seed` and another in every epoch. As always in tf.data,
    the global seed (`tf.random.set_seed`, `keras.utils.set_random_seed`) counts as well: set it before, or not at all.
    Types are kept: float64 stays float64.

    Args:
        x: An array `[examples, ...]`, or a dict, list or tuple of arrays (nested at will) for several inputs.
        y: Labels, structured likewise, or None.
        sample_weight: Weights `[examples]`, structured likewise, or None.
        batch_size: Rows in a global batch; the last batch of an epoch may be smaller.
        shuffle: Whether each epoch has an order of its own.
        seed: Fixes the orders.

    Returns:
        A data set of `(x,)`, `(x, y)` or `(x, y, sample_weight)`. Lists come out as tuples.

    Raises:
        ValueError: Unequal or zero lengths, `batch_size` below 1, weights without labels.
        TypeError: Something that is no array.

    >>> dataset = from_arrays(np.arange(5.0), np.arange(5), batch_size=2, shuffle=False, seed=0)
    >>> [labels.numpy().tolist() for inputs, labels in dataset]
    [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight weighs the loss of labels, but y is None: pass y as well.")
    named = {"x": x, "y": y, "sample_weight": sample_weight}
    with tf.device("CPU:0"):
        arrays = tuple(_tensors(name, value) for name, value in named.items() if value is not None)
    num_rows = _common_length(arrays)
    batches_per_block = _batches_per_block(arrays, num_rows, batch_size)

    def in_order() -> tf.data.Dataset:
        def read(first_row: tf.Tensor, n: int) -> Any:
            return tf.nest.map_structure(lambda array: tf.slice(array, *_window(array, first_row, n)), arrays)

        return blocks.batches(read, num_rows, batch_size, batches_per_block=batches_per_block)

    def permuted(epoch_seed: tf.Tensor) -> tf.data.Dataset:
        rows = tf.random.experimental.stateless_shuffle(tf.range(num_rows), tf.stack([epoch_seed, seed]))

        def read(first_row: tf.Tensor, n: int) -> Any:
            taken = tf.slice(rows, *_window(rows, first_row, n))
            return tf.nest.map_structure(lambda array: tf.gather(array, taken), arrays)

        return blocks.batches(read, num_rows, batch_size, batches_per_block=batches_per_block)

    if not shuffle:
        return blocks.as_built(in_order())
    epoch_seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    num_batches = -(-num_rows // batch_size)
    dataset = epoch_seeds.flat_map(permuted).apply(tf.data.experimental.assert_cardinality(num_batches))
    return blocks.as_built(dataset)


def hold_out(arrays: Any, share: float) -> tuple[Any, Any]:
    """Splits the last rows off for validation, as `keras.Model.fit(validation_split=...)` does.

    Args:
        arrays: `(x, y, sample_weight)` as for `from_arrays`, None where there is none.
        share: Part of the rows to split off, above 0 and below 1.

    Returns:
        The same structure twice: the rows to train on, and the rows held out.

    Raises:
        ValueError: A share that leaves one side empty, or a data set instead of arrays.

    >>> (x, _, _), (held_out, _, _) = hold_out((np.arange(5), None, None), 0.4)
    >>> x.tolist(), held_out.tolist()
    ([0, 1, 2], [3, 4])
    """
    if isinstance(arrays[0], tf.data.Dataset):
        raise ValueError("validation_split takes rows off arrays, but x is a data set: use take and skip on it.")
    num_rows = len(keras.tree.flatten(arrays)[0])
    first = int(num_rows * (1 - share)) if 0 < share < 1 else 0
    if not 0 < first < num_rows:
        raise ValueError(
            f"validation_split must leave rows on both sides, but is {share} of {num_rows}: use one above 0, below 1."
        )
    taken = keras.tree.map_structure(lambda array: None if array is None else array[:first], arrays)
    held_out = keras.tree.map_structure(lambda array: None if array is None else array[first:], arrays)
    return taken, held_out


def _window(array: tf.Tensor, first_row: tf.Tensor, num_rows: int) -> tuple[Any, list[int]]:
    rank = array.shape.rank
    return [first_row] + [0] * (rank - 1), [num_rows, *array.shape[1:]]


def _tensors(name: str, value: Any) -> Any:
    """The same structure with tensors for arrays; the path of a bad leaf stands in the error."""
    if isinstance(value, Mapping):
        return {key: _tensors(f"{name}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_tensors(f"{name}[{index}]", item) for index, item in enumerate(value))
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or not hasattr(value, "__array__") or np.isscalar(value):
        raise TypeError(
            f"{name} must be an array such as numpy.ndarray or tf.Tensor, but is {value!r:.60} of type "
            f"{type(value).__name__}. Convert it with numpy.asarray, or pass a tf.data.Dataset."
        )
    if getattr(value, "dtype", None) == np.dtype(object):
        raise TypeError(f"{name} must hold numbers or strings of one type, but its dtype is object.")
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank == 0:
        raise ValueError(f"{name} must have a first axis over the examples, but is the single value {value!r:.60}.")
    return tensor


def _common_length(arrays: Any) -> int:
    lengths = [int(array.shape[0]) for array in tf.nest.flatten(arrays)]
    if not lengths or min(lengths) == 0:
        raise ValueError("The arrays hold no examples: the first axis must be at least 1 long.")
    if len(set(lengths)) > 1:
        raise ValueError(f"All arrays must have the same number of examples, but their first axes are {lengths} long.")
    return lengths[0]


def _batches_per_block(arrays: Any, num_rows: int, batch_size: int) -> int:
    total_bytes = sum(array.dtype.size * array.shape.num_elements() for array in tf.nest.flatten(arrays))
    batch_bytes = max(1, total_bytes * batch_size // num_rows)
    return int(max(1, min(BLOCK_BYTES // batch_bytes, MAX_BATCHES_PER_BLOCK)))


def as_dataset(
    x: Any, y: Any, sample_weight: Any, *, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset | Sharded:
    """What `keras.Model.fit` takes, as global batches: a data set as it is, arrays cut into batches.

    Args:
        x: A data set, or arrays `[examples, ...]`.
        y: Targets where `x` is arrays, else None.
        sample_weight: Weights where `x` is arrays, else None.
        batch_size: Global batch of arrays.
        shuffle: Whether arrays are shuffled, anew every epoch.
        seed: Fixes that order.

    Raises:
        ValueError: Targets or weights beside a data set, which brings its own.

    >>> len(as_dataset(tf.zeros([5, 2]), tf.zeros([5]), None, batch_size=2, shuffle=False, seed=0))
    3
    """
    if not isinstance(x, tf.data.Dataset | Sharded):
        return from_arrays(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=seed)
    if y is not None or sample_weight is not None:
        raise ValueError(
            "A dataset brings its own targets and weights, received y or sample_weight beside it. "
            "Let the dataset yield (inputs, targets, sample_weight)."
        )
    return x
