"""A check that all tensors of a batch have one number of rows, before a strategy divides the batch by rows."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfpar.data.batching.batches import copied, num_rows

_RULE = "Every tensor of a batch must have a row for each example, as the strategy divides batches by rows."
_PARTS = ("inputs", "targets", "sample_weight")


def with_equal_rows(batch: Any) -> Any:
    """Return a batch, and fail if its tensors differ in their number of rows.

    A strategy divides every tensor by its own rows. With 2 labelled and 4 other examples in a batch, each part would
    have another ratio of the two, and another loss. For use inside `dataset.map`.

    Args:
        batch: `(inputs, targets, sample_weight)` as far as given: structures of `tf.Tensor`, `tf.RaggedTensor`,
            `tf.SparseTensor` or None, `[rows, ...]` each.

    Returns:
        The batch. Reading one whose rows differ raises `tf.errors.InvalidArgumentError` with the sentence that
        `differing_rows` finds.

    Raises:
        ValueError: If the shapes alone say that they differ.

    Example:
        >>> with_equal_rows((tf.zeros([2, 3]), tf.zeros([2])))[1].shape
        TensorShape([2])
    """
    found = [(path, leaf) for path, leaf in keras.tree.flatten_with_path(batch) if leaf is not None]
    static = {leaf.shape[0] if leaf.shape.rank else None for _, leaf in found}
    names = ", ".join(_name_in_batch(path) for path, _ in found)
    if None not in static and len(static) > 1:
        raise ValueError(_sentence(", ".join(str(leaf.shape[0]) for _, leaf in found), names))
    if None not in static or len(found) < 2:
        return batch
    rows = tf.stack([num_rows(leaf) for _, leaf in found])
    are_equal = tf.reduce_all(tf.equal(rows, rows[0]))
    check = tf.raw_ops.Assert(condition=are_equal, data=[f"{_RULE} Received in {names}:", rows], summarize=len(found))
    with tf.control_dependencies([check]):
        return copied(batch)


def check_ranks(spec: Any) -> None:
    """Refuse a dataset whose tensors may have any number of axes, and so no rows to divide.

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
    """Return the sentence of `with_equal_rows` in the message of an error; None if there is none.

    Args:
        message: The message of an error of TensorFlow.

    Example:
        >>> differing_rows("out of memory") is None
        True
    """
    _, rule, rest = message.partition(_RULE)
    found = re.match(r" Received in (.*?):\] \[([\d ]+)\]", rest, re.DOTALL)
    return _sentence(found[2].replace(" ", ", "), found[1].replace("\\", "")) if rule and found else None


def _sentence(rows: str, names: str) -> str:
    return f"{_RULE} Received {rows} rows in {names}. Yield as many in each, or train on SingleDevice()."


def _name_in_batch(path: tuple[Any, ...]) -> str:
    """Return the name of a tensor of a batch for a message.

    Args:
        path: The keys that lead to it, as `keras.tree.flatten_with_path` gives them.

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
