"""Softmax cross-entropy over logits that are sharded by class.

    device 0   logits [n, v0] ─► maximum [n] ─┐            ┌─► exp, sum [n] ─┐
                                              ├─ maximum ──┤                 ├─► log of the sum - logit of the label
    device 1   logits [n, v1] ─► maximum [n] ─┘            └─► exp, sum [n] ─┘

Devices only exchange tensors `[n]`, with one value per position. This is the vocabulary-parallel loss of Megatron-LM
(Shoeybi et al., 2019, arXiv:1909.08053, section 3).

In memory, exponentials replace the logits, and gradients replace the exponentials, so that a device stores its shard
only once, provided that nothing else reads the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

MOST_INDICES = 2**31  # of `InplaceSub`


class ClassShards(NamedTuple):
    """Values for all classes, such as logits, sharded along the last axis.

    Args:
        tensors: The shards `[..., size]`, in the order of the classes. Sizes are static, and may differ.
        devices: The device of each shard. The first computes sums over shards.
    """

    tensors: Sequence[tf.Tensor]
    devices: Sequence[str]

    @property
    def sizes(self) -> list[int]:
        """The number of columns of each shard."""
        return [int(tensor.shape[-1]) for tensor in self.tensors]

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ClassShards:
        """Apply a function to each shard on its device.

        Args:
            function: A function of a shard.
        """
        return self._replace(tensors=[self.at(index, function) for index in range(len(self.tensors))])

    def at(self, index: int, function: Callable[[tf.Tensor], Any]) -> Any:
        """Apply a function to a single shard on its device.

        Args:
            index: The index of the shard.
            function: A function of the shard.
        """
        with tf.device(self.devices[index]):
            return function(self.tensors[index])

    def rows(self) -> ClassShards:
        """Return the shards as matrices `[positions, size]`."""
        return self.map(lambda shard: tf.reshape(shard, [-1, shard.shape[-1]]))


def sparse_losses(labels: tf.Tensor, logits: ClassShards, valid: tf.Tensor | None = None) -> tf.Tensor:
    """Return the cross-entropy of each position, as `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    Args:
        labels: The class of each position, an integer tensor `[...]`.
        logits: ClassShards `[..., size]`.
        valid: Which positions have a gradient, bool `[...]`. Defaults to all.

    Returns:
        `[...]`, on the first device. A label outside of the vocabulary is an error on CPUs, and gives NaN on GPUs.
    """
    rows, classes = logits.rows(), tf.reshape(tf.cast(labels, tf.int64), [-1])

    def picked(index: int, exponents: tf.Tensor) -> tf.Tensor:
        return at_columns(exponents, *columns_in(rows, index, classes))

    def less_labels(index: int, gradient: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        columns, is_inside = columns_in(rows, index, classes)
        entries = tf.where(is_inside, upstream, tf.zeros_like(upstream))
        return _subtract_in_place(gradient, columns, entries)

    def subtract(index: int, exponentials: tf.Tensor, upstream: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        product = tf.multiply if valid is None else tf.math.multiply_no_nan
        return less_labels(index, product(exponentials, scale[:, None]), upstream)

    is_valid = None if valid is None else tf.reshape(valid, [-1])
    with tf.device(logits.devices[0]):
        weights = _in_vocabulary(classes, sum(logits.sizes), logits.tensors[0].dtype, logits.devices[0])
    return tf.reshape(_losses(rows, picked, weights, subtract, is_valid), tf.shape(labels))


def dense_losses(labels: ClassShards, logits: ClassShards) -> tf.Tensor:
    """Return the cross-entropy of each position, as `tf.nn.softmax_cross_entropy_with_logits`. Labels get no gradient.

    Args:
        labels: The distribution over classes at each position, sharded like the logits.
        logits: ClassShards `[..., size]`.

    Returns:
        `[...]`, on the first device.
    """
    rows, targets = logits.rows(), labels.rows().map(tf.stop_gradient)
    sums = [targets.at(index, lambda shard: tf.reduce_sum(shard, -1)) for index in range(len(targets.tensors))]

    def picked(index: int, exponents: tf.Tensor) -> tf.Tensor:
        # A matrix product needs no intermediate result of the size of the logits.
        return tf.squeeze(tf.matmul(exponents[:, None, :], targets.tensors[index][:, :, None]), [1, 2])

    def subtract(index: int, exponentials: tf.Tensor, upstream: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        return exponentials * scale[:, None] - targets.tensors[index] * upstream[:, None]

    with tf.device(logits.devices[0]):
        weights = tf.add_n(sums)
    return tf.reshape(_losses(rows, picked, weights, subtract), tf.shape(logits.tensors[0])[:-1])


def softmax(logits: ClassShards) -> ClassShards:
    """Return the sharded softmax over all classes.

    Args:
        logits: ClassShards `[..., size]`.
    """
    maximum = _over_shards(logits, lambda shard: tf.reduce_max(shard, -1, keepdims=True), _maximum)
    powers = logits.map(lambda shard: tf.exp(shard - maximum))
    total = _over_shards(powers, lambda shard: tf.reduce_sum(shard, -1, keepdims=True), tf.add_n)
    return powers.map(lambda shard: shard / total)


def _losses(
    rows: ClassShards,
    picked: Callable[[int, tf.Tensor], tf.Tensor],
    weights: tf.Tensor,
    subtract: Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor],
    valid: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the losses, `[positions]`, with a gradient for each shard.

    Args:
        rows: Logits `[positions, size]`.
        picked: Returns the sum over a shard of labels times exponents, `[positions]`.
        weights: The sum of the labels of each position.
        subtract: Returns the gradient of a shard from its exponentials, the gradient of the losses, and that gradient
            divided by the sum of exponentials.
        valid: Which positions have a gradient. None for all.
    """
    exponentials: dict[int, tf.Tensor] = {}
    totals: list[tf.Tensor] = []

    def backward(index: int, upstream: tf.Tensor) -> tf.Tensor:
        with tf.device(rows.devices[0]):
            scale = upstream / totals[0]
            if valid is not None:
                scale = tf.where(valid, scale, tf.zeros_like(scale))
                upstream = tf.where(valid, upstream, tf.zeros_like(upstream))
        with tf.device(rows.devices[index]):
            return subtract(index, exponentials[index], upstream, scale)

    indices = range(len(rows.tensors))
    pairs = [rows.at(index, functools.partial(_maximum_of, backward, index)) for index in indices]
    with tf.device(rows.devices[0]):
        maximum = tf.stop_gradient(_maximum([largest for largest, _ in pairs]))
    targets, sums = [], []
    for index in indices:
        with tf.device(rows.devices[index]):
            exponents = tf.stop_gradient(rows.tensors[index]) - maximum[:, None]
            targets.append(picked(index, exponents))
            with tf.control_dependencies([targets[-1]]):  # so that exponentials can replace exponents in memory
                exponentials[index] = tf.exp(exponents)
            sums.append(tf.reduce_sum(exponentials[index], -1))
    with tf.device(rows.devices[0]):
        totals.append(tf.add_n(sums))
        losses = weights * tf.math.log(totals[0]) - tf.add_n(targets)
        return tf.add_n([tf.stop_gradient(losses), *(zeros for _, zeros in pairs)])


def _maximum_of(
    backward: Callable[[int, tf.Tensor], tf.Tensor], index: int, shard: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the maximum of each row, and zeros that carry the gradient of the losses to the shard.

    TensorFlow keeps the arguments of a custom gradient until its results are computed. These results come first, so
    that the memory of the shard can be reused afterwards.
    """

    @tf.custom_gradient
    def function(shard: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
        maximum = tf.reduce_max(shard, -1)
        return (maximum, tf.zeros_like(maximum)), lambda _, upstream: backward(index, upstream)

    maximum_and_zeros: tuple[tf.Tensor, tf.Tensor] = function(shard)
    return maximum_and_zeros


def _maximum(maxima: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_max(tf.stack(maxima), 0)


def _over_shards(
    shards: ClassShards, function: Callable[[tf.Tensor], tf.Tensor], join: Callable[[Sequence[tf.Tensor]], tf.Tensor]
) -> tf.Tensor:
    results = shards.map(function).tensors
    with tf.device(shards.devices[0]):
        return join(results)


def columns_in(shards: ClassShards, index: int, classes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the column of each class in a shard, 0 for classes of other shards, and whether the shard has the class.

    Args:
        shards: Values for all classes.
        index: The index of the shard.
        classes: Classes, `[positions]`.
    """
    columns = classes - sum(shards.sizes[:index])
    is_inside = (columns >= 0) & (columns < shards.sizes[index])
    return tf.where(is_inside, columns, tf.zeros_like(columns)), is_inside


def _entries(columns: tf.Tensor) -> tf.Tensor:
    """Return the indices `[positions, 2]` of a column in each row."""
    return tf.stack([tf.range(tf.shape(columns, tf.int64)[0]), columns], -1)


def _subtract_in_place(product: tf.Tensor, columns: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Subtract a value from a column of each row of a matrix that nothing else reads.

    TensorFlow 2.21's `tf.tensor_scatter_nd_sub` copies the matrix on CPUs, and `InplaceSub` takes 32-bit indices.

    Args:
        product: `[positions, size]`.
        columns: The column of each row, `[positions]`.
        values: The values to subtract, `[positions]`.
    """
    size, width = tf.size(product, tf.int64), product.shape[-1]

    def in_place() -> tf.Tensor:
        indices = tf.cast(tf.range(tf.shape(columns, tf.int64)[0]) * width + columns, tf.int32)
        return tf.raw_ops.InplaceSub(x=tf.reshape(product, [-1]), i=indices, v=values)

    def copied() -> tf.Tensor:
        return tf.reshape(tf.tensor_scatter_nd_sub(product, _entries(columns), values), [-1])

    return tf.reshape(tf.cond(size <= MOST_INDICES, in_place, copied), tf.shape(product))


def at_columns(shard: tf.Tensor, columns: tf.Tensor, is_inside: tf.Tensor) -> tf.Tensor:
    """Return the value of each row in a column, or zero.

    Args:
        shard: `[positions, size]`.
        columns: The column of each row, `[positions]`.
        is_inside: Whether the row has a column, bool `[positions]`.
    """
    values = tf.gather_nd(shard, _entries(columns))
    return tf.where(is_inside, values, tf.zeros_like(values))


def _in_vocabulary(classes: tf.Tensor, num_classes: int, dtype: Any, device: str) -> tf.Tensor:
    """Return ones, and NaN for classes outside of the vocabulary, which are an error on CPUs, as in TensorFlow 2.21.

    Args:
        classes: Classes, `[positions]`.
        num_classes: The size of the vocabulary.
        dtype: The type of the result.
        device: The device that computes it.
    """
    if "GPU" not in device.upper():
        return tf.gather(tf.ones([num_classes], dtype), classes)
    is_class = (classes >= 0) & (classes < num_classes)
    return tf.where(is_class, tf.ones([], dtype), tf.constant(float("nan"), dtype))
