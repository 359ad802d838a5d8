"""Checksums that TensorFlow computes on any process of a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def fingerprint(tensor: Any) -> tf.Tensor:
    """Return the 64-bit FarmHash fingerprint of a tensor's bytes, `[1, 8]`, on the current device."""
    return tf.raw_ops.Fingerprint(data=tf.reshape(tensor, [1, -1]), method="farmhash64")


def to_hex(fingerprints: tf.Tensor) -> list[str]:
    """Return each of the fingerprints `[fingerprints, 8]` as 16 hexadecimal digits.

    >>> to_hex(tf.constant([[0, 1, 2, 3, 4, 5, 6, 255]], tf.uint8))
    ['00010203040506ff']
    """
    return [row.tobytes().hex() for row in fingerprints.numpy()]


def checksum(array: np.ndarray) -> str:
    """Return the checksum of an array, computed in this process, as 16 hexadecimal digits.

    Example:
        >>> len(checksum(np.zeros(3)))
        16
    """
    with tf.device("CPU:0"):
        return to_hex(fingerprint(np.ascontiguousarray(array).reshape(-1).view("uint8")))[0]
