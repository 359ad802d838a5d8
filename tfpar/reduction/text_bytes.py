"""Strings as integer codes, which replicas can sum."""

from __future__ import annotations

import tensorflow as tf

_BYTES = [b"", *(bytes([byte]) for byte in range(256))]  # by code: 0 is no byte


def longest(texts: tf.Tensor) -> tf.Tensor:
    """Return the number of bytes of the longest text, at least 1."""
    with tf.device("CPU:0"):
        return tf.reduce_max(tf.concat([[1], tf.reshape(tf.strings.length(texts), [-1])], 0))


def encode(texts: tf.Tensor, num_bytes: tf.Tensor) -> tf.Tensor:
    """Encode texts `[...]` of at most `num_bytes` bytes as codes `[..., num_bytes]`: byte + 1, then zeros.

    Example:
        >>> encode(tf.constant(["a", ""]), tf.constant(2)).numpy().tolist()
        [[98, 0], [0, 0]]
    """
    with tf.device("CPU:0"):
        codes = tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=num_bytes), tf.int32) + 1
        return tf.where(tf.sequence_mask(tf.strings.length(texts), num_bytes), codes, 0)


def decode(codes: tf.Tensor) -> tf.Tensor:
    """Decode codes `[..., bytes]` from `encode` to texts `[...]`.

    Example:
        >>> decode(encode(tf.constant(["a", ""]), tf.constant(2))).numpy().tolist()
        [b'a', b'']
    """
    with tf.device("CPU:0"):
        return tf.strings.reduce_join(tf.gather(tf.constant(_BYTES), codes), axis=-1)
