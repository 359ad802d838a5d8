"""Call layers with the whole batch on each replica.

replica 0   a b ─┐                          ┌─ layer(a b c d) ─► rows a b
                 ├─ all-gather ─ a b c d ───┤
replica 1   c d ─┘                          └─ layer(a b c d) ─► rows c d
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar.reduction import whole_batch
from tfpar.study.mixing_layers import MixingLayer


@contextlib.contextmanager
def with_whole_batch(layers: Sequence[MixingLayer]) -> Iterator[None]:
    """Call layers with the whole batch in this context; each call returns the rows of its replica.

    Args:
        layers: The layers; if a layer occurs twice, the first entry counts.
    """
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):
            if all(layer.operation is not earlier.operation for earlier in layers[:number]):
                call = _with_all_rows(layer, layer.operation.call)
                stack.enter_context(mock.patch.object(layer.operation, "call", call))
        yield


def _with_all_rows(layer: MixingLayer, call: Callable[..., Any]) -> Callable[..., Any]:
    def with_all_rows(*args: Any, **kwargs: Any) -> Any:
        rows = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _has_rows(leaf)]
        args = _map(whole_batch.gather, args, layer.args)
        kwargs = {name: _map(whole_batch.gather, value, layer.kwargs.get(name)) for name, value in kwargs.items()}
        with whole_batch.holding_all_rows():
            outputs = call(*args, **kwargs)
        num_rows = tf.shape(rows[0])[0] if rows else None
        return _map(lambda leaf: whole_batch.own_rows(leaf, num_rows), outputs, layer.outputs)

    return with_all_rows


def _map(function: Callable[[Any], Any], structure: Any, have_rows: list[bool] | None) -> Any:
    """Apply a function to the leaves that have rows, or to all tensors if these are unknown."""
    leaves = keras.tree.flatten(structure)
    flags = have_rows if have_rows is not None and len(have_rows) == len(leaves) else [True] * len(leaves)
    mapped = [function(leaf) if flag and _has_rows(leaf) else leaf for leaf, flag in zip(leaves, flags, strict=True)]
    return keras.tree.pack_sequence_as(structure, mapped)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0
