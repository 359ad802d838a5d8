"""Operations on batches: weight classes, split global batches into per-replica batches, and join them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_data_adapters
from tfpar.messages.received import quoted


def class_weights(dataset: Any, class_weight: Mapping[int, float], dtype: str | None = None) -> Any:
    """Weight each example by the class of its label, as `keras.Model.fit(class_weight=...)` does.

    Labels of rank 2 or more are one-hot over the last axis, unless it has size 1. Classes without an entry have weight
    1. Existing sample weights are multiplied by the class weights (Keras refuses both together).

    Args:
        dataset: A `tf.data.Dataset` or `Sharded` of batches `(x, y)` or `(x, y, sample_weight)`; `y` is one tensor:
            classes `[batch]` or `[batch, 1]`, or one-hot `[batch, classes]`.
        class_weight: Weight of each class.
        dtype: The dtype of the weights without sample weights; None for that of Keras with a `tf.data.Dataset`, which
            is float32 for Python floats even if Keras computes in float64. With sample weights: Keras' float type.

    Returns:
        Batches `(x, y, sample_weight)` with weights `[batch]`.

    Raises:
        ValueError: If no class is named, a class or weight is negative, or batches have no labels or several outputs.

    >>> dataset = tf.data.Dataset.from_tensors((tf.zeros([3, 2]), tf.constant([0, 1, 1])))
    >>> [weights.numpy().tolist() for _, _, weights in class_weights(dataset, {1: 2.5})]
    [[1.0, 2.5, 2.5]]
    """
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(f"class_weight needs batches (x, y) or (x, y, sample_weight), but a batch is {spec}.")
    if isinstance(spec[1], (dict, list, tuple)):
        raise ValueError("class_weight needs a model with one output, but y is a structure: pass sample_weight.")
    table = _weight_table(class_weight, keras.config.floatx() if len(spec) == 3 else dtype)

    @tf.autograph.experimental.do_not_convert
    def weigh(x: Any, y: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tuple[Any, tf.Tensor, tf.Tensor]:
        weights = _look_up(table, _classes(y))
        if sample_weight is not None:
            weights = _multiply(weights, tf.cast(sample_weight, weights.dtype))
        return x, y, weights

    return dataset.map(weigh)


def _weight_table(class_weight: Mapping[int, float], dtype: str | None) -> Any:
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            f"class_weight maps classes to weights, such as {{0: 1.0, 1: 2.5}}, received {quoted(class_weight)}. For "
            "balanced weights, see compute_class_weight of sklearn.utils.class_weight."
        )
    if not class_weight:
        raise ValueError("class_weight must name at least one class, but is empty.")
    for label, weight in class_weight.items():
        if int(label) != label or label < 0 or not 0 <= weight < np.inf:
            raise ValueError(
                f"class_weight maps classes (0, 1, 2, ...) to weights of at least 0, but has {label!r}: {weight!r}."
            )
    weights = {int(label): weight for label, weight in class_weight.items()}
    table = [weights.get(label, 1.0) for label in range(max(weights) + 1)]
    tf_dtype = tf.convert_to_tensor(table).dtype if dtype is None else tf.as_dtype(dtype)
    return np.array(table, tf_dtype.as_numpy_dtype if tf_dtype.is_floating else "float32")


def _classes(y: tf.Tensor) -> tf.Tensor:
    if y.shape.rank is not None and y.shape.rank >= 2:
        if y.shape[-1] != 1:
            return tf.argmax(y, axis=-1, output_type=tf.int32)
        y = tf.squeeze(y, axis=-1)
    return tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int32)


def _look_up(table: Any, classes: tf.Tensor) -> tf.Tensor:
    listed = (classes >= 0) & (classes < len(table))
    weights = tf.gather(tf.constant(table), tf.where(listed, classes, 0))
    return tf.where(listed, weights, tf.ones_like(weights))


def _multiply(weights: tf.Tensor, sample_weight: tf.Tensor) -> tf.Tensor:
    """Multiply weights `[batch]` by weights `[batch, ...]` along the first axis."""
    missing_axes = sample_weight.shape.rank - weights.shape.rank
    if missing_axes > 0:
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), tf.ones([missing_axes], tf.int32)], axis=0))
    return weights * sample_weight


def split_batch(batch: Any, num_parts: int, shares: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Split every tensor of a batch along its first axis into consecutive parts, one for each replica.

    Part i starts at row `ceil(i * rows / num_parts)`. So sizes differ by at most one, the first part is never smaller
    than another, and some parts are empty if there are fewer rows than parts. Splits nest: a split into workers and
    then into replicas gives the same parts as one split into all replicas.

        7 rows, 2 parts:  0 1 2 3 | 4 5 6          6 rows, 4 parts:  0 1 | 2 | 3 4 | 5
        7 rows, shares 3 and 1:  0 1 2 3 4 5 | 6

    It can be used in `dataset.map`. The parts have static shapes if the number of rows is static.

    Args:
        batch: A structure of `tf.Tensor`, `tf.RaggedTensor`, `tf.SparseTensor` or None, `[rows, ...]` each.
        num_parts: Number of parts.
        shares: Relative size of each part; None for equal parts.

    Returns:
        `num_parts` structures like `batch`. None stays None in each.

    Raises:
        ValueError: If `num_parts` is below 1, a tensor is a scalar, or numbers of rows differ.

    >>> [part["a"].numpy().tolist() for part in split_batch({"a": tf.range(5)}, 3)]
    [[0, 1], [2, 3], [4]]
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, but is {num_parts}.")
    leaves = tf.nest.flatten(batch)
    _check_rows(leaves)
    parts = [_split_leaf(leaf, shares or (1,) * num_parts) for leaf in leaves]
    return tuple(tf.nest.pack_sequence_as(batch, [part[i] for part in parts]) for i in range(num_parts))


def first_rows(num_rows: Any, shares: Sequence[int]) -> list[Any]:
    """Return the first row of each part of a batch, and the number of rows.

    No part is empty if there are at least as many rows as parts.

    Args:
        num_rows: Number of rows, an integer or a scalar tensor.
        shares: Relative size of each part.

    >>> first_rows(8, (3, 1)), first_rows(2, (3, 1)), first_rows(7, (1, 1))
    ([0, 6, 8], [0, 1, 2], [0, 4, 7])
    """
    total, num_parts = sum(shares), len(shares)
    rows = [(before * num_rows + total - 1) // total for before in itertools.accumulate(shares, initial=0)]
    if len(set(shares)) == 1:  # each part has its row
        return rows
    largest, least = (tf.maximum, tf.minimum) if isinstance(num_rows, tf.Tensor) else (max, min)
    for part in range(1, num_parts):
        rows[part] = largest(rows[part], rows[part - 1] + 1)
    return [largest(rows[0], least(row, num_rows - num_parts + part)) for part, row in enumerate(rows)]


def take_rows(batch: Any, start: Any, stop: Any) -> Any:
    """Return consecutive rows of every tensor of a batch.

    Args:
        batch: A structure of `tf.Tensor`, `tf.RaggedTensor`, `tf.SparseTensor` or None, `[rows, ...]` each.
        start: The first row.
        stop: The row after the last, at most the number of rows.

    >>> take_rows({"a": tf.range(5)}, 1, 3)["a"].numpy().tolist()
    [1, 2]
    """
    return tf.nest.map_structure(lambda leaf: None if leaf is None else _rows_between(leaf, start, stop), batch)


def join_batches(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several batches of the same structure; the inverse of `split_batch`.

    >>> join_batches([tf.range(2), tf.range(1)]).numpy().tolist()
    [0, 1, 0]
    """

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(leaves), expand_nonconcat_dims=True)
        return None if leaves[0] is None else tf.concat(leaves, 0)

    return tf.nest.map_structure(join, *parts)


def to_numpy(tensor: Any) -> Any:
    """Return a tensor as a NumPy array; a ragged or sparse one unchanged, as `keras.Model.predict` does."""
    return tensor if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) else np.asarray(tensor)


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of several batches as `keras.Model.predict` does.

    Args:
        outputs: Structures of NumPy arrays, ragged or sparse tensors, `[rows, ...]` each.

    Returns:
        A structure of arrays; of a ragged tensor if the batches differ in an axis other than the first.

    >>> join_outputs([np.zeros([2, 1]), np.ones([1, 1])]).tolist()
    [[0.0], [0.0], [1.0]]
    """

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], np.ndarray) and len({leaf.shape[1:] for leaf in leaves}) == 1:
            return np.concatenate(leaves)
        return keras_data_adapters.join_unequal(leaves)

    return tf.nest.map_structure(join, *outputs)


def present_inputs(batch: Any) -> list[bool]:
    """Return for each input of a batch, in flat order, whether it is not None.

    Example:
        >>> present_inputs(([tf.zeros([2, 1]), None], tf.zeros([2])))
        [True, False]
    """
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return [leaf is not None for leaf in keras.tree.flatten(inputs)]


def has_unknown_size(dataset: tf.data.Dataset) -> bool:
    """Return whether TensorFlow does not know the number of elements of a dataset, as for a generator.

    Example:
        >>> digits = tf.data.Dataset.range(10)
        >>> has_unknown_size(digits), has_unknown_size(digits.filter(lambda digit: digit > 4))
        (False, True)
    """
    return int(dataset.cardinality()) == int(tf.data.UNKNOWN_CARDINALITY)


def num_rows(batch: Any) -> tf.Tensor:
    """Return the number of rows of a batch's first tensor, an int64 scalar.

    Args:
        batch: A structure of `tf.Tensor`, `tf.RaggedTensor`, `tf.SparseTensor` or None, `[rows, ...]` each.

    Raises:
        ValueError: If there is no tensor.

    >>> int(num_rows({"a": None, "b": tf.zeros([3, 2])}))
    3
    """
    leaf = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    if leaf is None:
        raise ValueError(f"A batch must hold at least one tensor, but is {batch!r}: leave out what is None.")
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _check_rows(leaves: Sequence[Any]) -> None:
    shapes = [leaf.shape for leaf in leaves if leaf is not None]
    if any(shape.rank == 0 for shape in shapes):
        raise ValueError("Every tensor of a batch must have a first axis over its examples, but one is a scalar.")
    static_rows = {shape[0] for shape in shapes if shape.rank is not None and shape[0] is not None}
    if len(static_rows) > 1:
        raise ValueError(f"All tensors of a batch must have the same number of rows, but have {sorted(static_rows)}.")


def _split_leaf(leaf: Any, shares: Sequence[int]) -> list[Any]:
    if leaf is None:
        return [None] * len(shares)
    rows: Any = leaf.shape[0]
    if rows is None:
        rows = num_rows(leaf)
    return [_rows_between(leaf, start, stop) for start, stop in itertools.pairwise(first_rows(rows, shares))]


def _rows_between(leaf: Any, start: Any, stop: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    first = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], axis=0)
    size = tf.concat([[tf.cast(stop - start, tf.int64)], leaf.dense_shape[1:]], axis=0)
    return tf.sparse.slice(leaf, first, size)


def copied(batch: Any) -> Any:
    """Return identities of the tensors of a batch, which wait for the active control dependencies; None stays None.

    Example:
        >>> copied({"a": tf.constant([1, 2]), "b": None})["a"].numpy().tolist()
        [1, 2]
    """
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.identity(leaf), batch, expand_composites=True
    )


def map_batches(
    dataset: tf.data.Dataset, function: Callable[[Any], Any], num_parallel_calls: int | None = 1
) -> tf.data.Dataset:
    """Map a function of one argument over the batches of a dataset, even if a batch is a tuple.

    Args:
        dataset: The batches.
        function: Function from a batch to an element.
        num_parallel_calls: As for `tf.data.Dataset.map`.

    Example:
        >>> dataset = tf.data.Dataset.from_tensors((1, 2))
        >>> [int(total) for total in map_batches(dataset, lambda batch: batch[0] + batch[1])]
        [3]
    """
    in_tuples = type(dataset.element_spec) is tuple  # `map` unpacks tuples, but not named tuples

    @tf.autograph.experimental.do_not_convert  # conversion takes half a second in every process
    def call(*elements: Any) -> Any:
        return function(elements if in_tuples else elements[0])

    return dataset.map(call, num_parallel_calls=num_parallel_calls)
