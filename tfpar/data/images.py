"""Augmentation of training images, and normalization."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

MAX_SHIFT = 0.1  # of height and width
MAX_BRIGHTNESS = 0.2  # of the full range
STATISTICS_BATCH_SIZE = 256


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel over all examples and pixels, `[channels]`."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]


def augment(images: tf.Tensor, seed: tf.Tensor, changes: Sequence[str]) -> tf.Tensor:
    """Change each image of a batch at random.

    Args:
        images: `[batch, height, width, channels]`, floats in [0, 1] or integers that use their full range.
        seed: Two integers `[2]`; the same seed gives the same changes.
        changes: The changes to apply, in order: "flip" (left and right, half of the images), "shift" (up to a tenth of
            height and width, at least one pixel, filled with 0), "brightness" (up to a fifth of the range, clipped).

    Returns:
        Images of the same shape and dtype.

    >>> augment(tf.zeros([2, 8, 8, 1], tf.uint8), tf.constant([0, 1]), ["flip"]).shape
    TensorShape([2, 8, 8, 1])
    """
    for index, change in enumerate(changes):
        images = _CHANGES[change](images, seed + index)
    return images


def _flip(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    coins = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], seed) < 0.5
    return tf.where(coins, tf.reverse(images, axis=[2]), images)


def _shift(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Gather each row and column from its source; those from outside the image are 0."""
    _, height, width, _ = images.shape
    offsets = tf.random.stateless_uniform([tf.shape(images)[0], 2], seed, -1.0, 1.0)
    reach = tf.constant([max(1.0, MAX_SHIFT * size) for size in (height, width)])
    offsets = tf.cast(tf.round(offsets * reach), tf.int32)
    for axis, size in ((1, height), (2, width)):
        source = tf.range(size) - offsets[:, axis - 1 : axis]
        moved = tf.gather(images, tf.clip_by_value(source, 0, size - 1), axis=axis, batch_dims=1)
        inside = (source >= 0) & (source < size)
        inside = inside[:, :, tf.newaxis, tf.newaxis] if axis == 1 else inside[:, tf.newaxis, :, tf.newaxis]
        images = tf.where(inside, moved, tf.zeros([], images.dtype))
    return images


def _brightness(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    largest = float(images.dtype.max) if images.dtype.is_integer else 1.0
    limit = MAX_BRIGHTNESS * largest
    change = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], seed, -limit, limit)
    brighter = tf.clip_by_value(tf.cast(images, tf.float32) + change, 0.0, largest)
    return tf.cast(tf.round(brighter) if images.dtype.is_integer else brighter, images.dtype)


_CHANGES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "flip": _flip,
    "shift": _shift,
    "brightness": _brightness,
}


def unit(inputs: tf.Tensor) -> tf.Tensor:
    """Scale integers to [0, 1] by the largest value of their dtype; return floats unchanged.

    >>> float(unit(tf.constant(255, tf.uint8)))
    1.0
    """
    if inputs.dtype.is_floating:
        return inputs
    return tf.cast(inputs, tf.float32) / float(inputs.dtype.max)


def standard(inputs: tf.Tensor, statistics: Statistics) -> tf.Tensor:
    """Scale inputs `[batch, ..., channels]` to mean 0 and standard deviation 1.

    >>> standard(tf.constant([[3.0]]), Statistics(np.float32([1]), np.float32([2]))).numpy().tolist()
    [[1.0]]
    """
    return (tf.cast(inputs, tf.float32) - statistics.mean) / statistics.deviation


def measure(inputs: tf.data.Dataset) -> Statistics:
    """Read the dataset once and return the mean and standard deviation of each channel, computed in float64.

    Args:
        inputs: Single inputs `[..., channels]` of one static shape.

    Returns:
        Float32 statistics; a constant channel has deviation 1, so that `standard` maps it to 0.

    >>> measure(tf.data.Dataset.from_tensor_slices([[1.0], [3.0]])).deviation.tolist()
    [1.0]
    """
    channels = inputs.element_spec.shape[-1]

    def add(totals: tuple[tf.Tensor, ...], batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows = tf.reshape(tf.cast(batch, tf.float64), [-1, channels])
        count, total, squares = totals
        count += tf.cast(tf.shape(rows)[0], tf.float64)
        return count, total + tf.reduce_sum(rows, axis=0), squares + tf.reduce_sum(rows * rows, axis=0)

    zeros = tf.zeros([channels], tf.float64)
    totals = inputs.batch(STATISTICS_BATCH_SIZE).reduce((tf.zeros([], tf.float64), zeros, zeros), add)
    count, total, squares = (value.numpy() for value in totals)
    mean = total / count
    variance = np.maximum(squares / count - mean * mean, 0.0)
    deviation = np.where(variance > 0, np.sqrt(variance), 1.0)
    return Statistics(mean.astype(np.float32), deviation.astype(np.float32))
