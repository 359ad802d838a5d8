"""Check that all tensors of a batch have the same number of rows, before a strategy splits the batch."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfpar.data.batching.batches import copied, num_rows

_RULE = "Every tensor of a batch must have a row for each example, as the strategy divides batches by rows."
_PARTS = ("inputs", "targets", "sample_weight")


def with_equal_rows(batch: Any) -> Any:
    """Return a batch, or fail if its tensors have different numbers of rows; for use in `dataset.map`.

    A strategy splits every tensor by rows. With 2 labelled and 4 other examples in a batch, the parts would mix them in
    different ratios and have different losses.

    Args:
        batch: `(inputs, targets, sample_weight)` as far as given: structures of `tf.Tensor`, `tf.RaggedTensor`,
            `tf.SparseTensor` or None, `[rows, ...]` each.

    Returns:
        The batch. If the rows differ, reading it raises `tf.errors.InvalidArgumentError`, which `differing_rows`
        explains.

    Raises:
        ValueError: If the static shapes differ.

    Example:
        >>> with_equal_rows((tf.zeros([2, 3]), tf.zeros([2])))[1].shape
        TensorShape([2])
    """
    leaves = [(path, leaf) for path, leaf in keras.tree.flatten_with_path(batch) if leaf is not None]
    static = {leaf.shape[0] if leaf.shape.rank else None for _, leaf in leaves}
    names = ", ".join(_name_in_batch(path) for path, _ in leaves)
    if None not in static and len(static) > 1:
        raise ValueError(_sentence(", ".join(str(leaf.shape[0]) for _, leaf in leaves), names))
    if None not in static or len(leaves) < 2:
        return batch
    rows = tf.stack([num_rows(leaf) for _, leaf in leaves])
    are_equal = tf.reduce_all(tf.equal(rows, rows[0]))
    check = tf.raw_ops.Assert(condition=are_equal, data=[f"{_RULE} Received in {names}:", rows], summarize=len(leaves))
    with tf.control_dependencies([check]):
        return copied(batch)


def check_ranks(spec: Any) -> None:
    """Refuse tensors of unknown rank, which may have no rows to split.

    Args:
        spec: The `element_spec` of a `tf.data.Dataset`.

    Raises:
        ValueError: If a tensor has an unknown rank.

    Example:
        >>> check_ranks(tf.TensorSpec([None, 3]))
    """
    for path, leaf in keras.tree.flatten_with_path(spec):
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is None:
            raise ValueError(
                f"The tensors of a dataset must have a known number of axes, received {_name_in_batch(path)} of "
                "unknown shape, as from tf.numpy_function and tf.py_function. Set it in the dataset: value = "
                "tf.ensure_shape(value, [None, 28, 28])."
            )


def differing_rows(message: str) -> str | None:
    """Explain TensorFlow's message of a failed `with_equal_rows`; return None for another message.

    Example:
        >>> differing_rows("out of memory") is None
        True
    """
    _, rule, rest = message.partition(_RULE)
    match = re.match(r" Received in (.*?):\] \[([\d ]+)\]", rest, re.DOTALL)
    return _sentence(match[2].replace(" ", ", "), match[1].replace("\\", "")) if rule and match else None


def _sentence(rows: str, names: str) -> str:
    return f"{_RULE} Received {rows} rows in {names}. Yield as many in each, or train on SingleDevice()."


def _name_in_batch(path: tuple[Any, ...]) -> str:
    """Return the name of a tensor in a batch, from its path of `keras.tree.flatten_with_path`.

    Example:
        >>> _name_in_batch((0, "image"))
        "inputs['image']"
    """
    if not path:
        return _PARTS[0]
    first, *others = path
    is_part = isinstance(first, int) and first < len(_PARTS)
    keys = others if is_part else path
    return (_PARTS[first] if is_part else _PARTS[0]) + "".join(f"[{key!r}]" for key in keys)
