"""Comparison of the outputs for a batch with the outputs for parts of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfpar._compat import keras_model

# Relative to the largest element, by the bytes of the type: about the square root of its precision. Layers of double
# precision may compute in single precision inside, as rotary embeddings and normalizations of KerasHub do.
_TOLERANCES = {1: 0.5, 2: 0.1, 4: 3e-4, 8: 1e-5}


def example_axis(whole: Any, one: Any, other: Any) -> int | None:
    """Return the axis of the examples, in which the size of a half differs from the whole; None if there is none.

    Args:
        whole: The output for a batch.
        one: The output for its first half.
        other: The output for its second half.

    Example:
        >>> example_axis(tf.zeros([3, 4]), tf.zeros([3, 2]), tf.zeros([3, 2]))
        1
    """
    if whole is None:  # of a layer that describes a tensor and returns none, as in KerasHub's XLNet
        return None
    sizes = zip(whole.shape, one.shape, other.shape, strict=True)
    return next((axis for axis, (all_, first, _) in enumerate(sizes) if all_ != first), None)


def agree(whole: Any, one: Any, other: Any, axis: int | None) -> bool:
    """Return whether the concatenation of two halves equals the whole; without an axis, whether each half does.

    Args:
        whole: The output for a batch.
        one: The output for its first half.
        other: The output for its second half.
        axis: The axis of the examples, from `example_axis`.

    Example:
        >>> agree(tf.constant([1.0, 2.0]), tf.constant([1.0]), tf.constant([2.5]), axis=0)
        False
    """
    if axis is None:
        return close(whole, one) and close(whole, other)
    rest = [tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :]) for tensor in (whole, one, other)]
    return rest[0] == rest[1] == rest[2] and close(whole, joined(one, other, axis))


def joined(one: Any, other: Any, axis: int) -> Any:
    """Concatenate two tensors, which may be sparse or ragged, along an axis.

    Args:
        one: The first tensor.
        other: The second tensor.
        axis: The axis.

    Example:
        >>> joined(tf.constant([1, 2]), tf.constant([3]), axis=0).numpy()
        array([1, 2, 3], dtype=int32)
    """
    return tf.sparse.concat(axis, [one, other]) if isinstance(one, tf.SparseTensor) else tf.concat([one, other], axis)


def close(one: Any, other: Any) -> bool:
    """Return whether two tensors are equal within rounding, which depends on the size of the batch.

    Args:
        one: A tensor, which may be sparse or ragged.
        other: A tensor.

    Example:
        >>> close(tf.constant([1.0]), tf.constant([1.00001])), close(tf.constant([1.0]), tf.constant([1.1]))
        (True, False)
    """
    if one is None or other is None:
        return one is other
    composites = (tf.RaggedTensor, tf.SparseTensor)
    if isinstance(one, composites) or isinstance(other, composites):
        one, other = (tf.sparse.reorder(x) if isinstance(x, tf.SparseTensor) else x for x in (one, other))
        parts = [tf.nest.flatten(tensor, expand_composites=True) for tensor in (one, other)]
        return len(parts[0]) == len(parts[1]) and all(map(close, *parts))
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or not tf.as_dtype(one.dtype).is_floating:
        return bool(np.array_equal(one, other))
    tolerance = _TOLERANCES[one.dtype.itemsize]
    one, other = one.astype("float64"), other.astype("float64")
    largest = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def part_of(tensor: Any, start: int, stop: int, axis: int) -> Any:
    """Slice a tensor and its mask along an axis.

    Args:
        tensor: A tensor, which may be sparse or ragged.
        start: The first index.
        stop: The index after the last.
        axis: The axis.

    Example:
        >>> part_of(tf.constant([[1, 2, 3]]), 1, 3, axis=1).numpy()
        array([[2, 3]], dtype=int32)
    """
    if isinstance(tensor, tf.SparseTensor):
        begin, size = [0] * len(tensor.shape), list(tensor.shape)
        begin[axis], size[axis] = start, stop - start
        return tf.sparse.slice(tensor, begin, size)
    where = (*[slice(None)] * axis, slice(start, stop))
    mask = keras_model.mask_of(tensor)
    cut = mask is not None and axis < len(mask.shape)
    return keras_model.with_mask(tensor[where], mask[where] if cut else mask)
