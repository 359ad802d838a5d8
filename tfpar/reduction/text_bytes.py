"""Texts as numbers, which replicas can sum."""

from __future__ import annotations

import tensorflow as tf

_OF_CODES = [b"", *(bytes([byte]) for byte in range(256))]  # 0 is no byte


def longest(texts: tf.Tensor) -> tf.Tensor:
    """Return the number of bytes of the longest text, at least 1.

    Args:
        texts: Texts in any shape.
    """
    with tf.device("CPU:0"):
        return tf.reduce_max(tf.concat([[1], tf.reshape(tf.strings.length(texts), [-1])], 0))


def codes_of(texts: tf.Tensor, num_bytes: tf.Tensor) -> tf.Tensor:
    """Return the bytes of texts plus 1, and 0 after their ends.

    Args:
        texts: `[...]`
        num_bytes: As many as the longest text has, or more.

    Returns:
        `[..., num_bytes]`

    Example:
        >>> codes_of(tf.constant(["a", ""]), tf.constant(2)).numpy().tolist()
        [[98, 0], [0, 0]]
    """
    with tf.device("CPU:0"):
        codes = tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=num_bytes), tf.int32) + 1
        return tf.where(tf.sequence_mask(tf.strings.length(texts), num_bytes), codes, 0)


def texts_of(codes: tf.Tensor) -> tf.Tensor:
    """Return the texts of codes.

    Args:
        codes: `[..., bytes]`, as `codes_of` returns.

    Example:
        >>> texts_of(codes_of(tf.constant(["a", ""]), tf.constant(2))).numpy().tolist()
        [b'a', b'']
    """
    with tf.device("CPU:0"):
        return tf.strings.reduce_join(tf.gather(tf.constant(_OF_CODES), codes), axis=-1)
