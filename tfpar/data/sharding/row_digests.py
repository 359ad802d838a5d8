"""Digests of the rows of a batch, to compare examples, and rows as text."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.data.batching.batches import num_rows

DIGEST_BYTES = 16
MAX_SHOWN_CHARACTERS = 100


def row_digests(batch: Any) -> Iterator[bytes]:
    """Yield a digest of each row, over all tensors of the batch."""
    for contents in zip(*_leaf_contents(batch), strict=True):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for content in contents:
            digest.update(len(content).to_bytes(8, "little") + content)
        yield digest.digest()


def _leaf_contents(batch: Any) -> list[list[bytes]]:
    rows = int(num_rows(batch))
    return [_contents(leaf, rows) for leaf in tf.nest.flatten(batch) if leaf is not None]


def _contents(leaf: Any, rows: int) -> list[bytes]:
    """Return each row of a tensor as bytes that are equal if the rows are equal."""
    if isinstance(leaf, tf.SparseTensor):
        ordered = tf.sparse.reorder(leaf)
        indices, values = ordered.indices.numpy(), ordered.values.numpy()
        ends = np.searchsorted(indices[:, 0], np.arange(rows + 1))
        return [
            repr((indices[start:stop, 1:].tolist(), values[start:stop].tolist())).encode()
            for start, stop in itertools.pairwise(ends)
        ]
    if isinstance(leaf, tf.RaggedTensor) or leaf.dtype == tf.string:
        values = leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()
        return [repr(value).encode() for value in values]
    array = np.ascontiguousarray(leaf.numpy())
    return [row.tobytes() for row in array]


def in_words(batch: Any, row: int) -> str:
    """Format one row of a batch as text, with the first few values of each tensor.

    >>> in_words((tf.range(10)[tf.newaxis], tf.constant([3])), 0)
    'int32 [10] 0 1 2 3 ..., 3'
    """
    words = []
    for leaf in tf.nest.flatten(batch):
        if leaf is None:
            continue
        dense = tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf
        value = dense[row]
        array = np.asarray(value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy())
        shape = "" if array.ndim == 0 else f"{array.dtype.name} {list(array.shape)} "
        words.append(shape + " ".join(str(number) for number in array.ravel()[:4]) + " ..." * (array.size > 4))
    text = ", ".join(words)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 4] + " ..."
