"""Gradients of all replicas added up, dense ones and rows of lookups, as one device adds them up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import _compat, reduction, slices
from tfpar.strategies.single_device import forward_backward


def add_up(
    gradients: Sequence[Any],
    kinds: Sequence[Sequence[slices.Kind]] | None,
    share: tf.Tensor,
    counted: tf.Tensor,
    pack_bytes: int | None,
    compression: str | None,
) -> list[Any]:
    """Sum gradients over all replicas; called in replica context.

    Args:
        gradients: This replica's: tensors, `tf.IndexedSlices` or None.
        kinds: Those of the lookups behind each, as `kinds_of_lookups` found them; None where their graph tells.
        share: What each of the replica's examples counts, a scalar.
        counted: How many of its examples it counts, an int scalar.
        pack_bytes: As for `reduction.all_reduce_gradients`.
        compression: As for `reduction.all_reduce_gradients`.
    """
    lookups = [
        slices.pieces(gradient, None if kinds is None else kinds[index])
        if isinstance(gradient, tf.IndexedSlices)
        else []
        for index, gradient in enumerate(gradients)
    ]
    sent: list[Any] = []
    for gradient, pieces in zip(gradients, lookups, strict=True):
        sent += [slices.to_send(piece, share, counted) for piece in pieces] or [gradient]
    sums = iter(reduction.all_reduce_gradients(sent, pack_bytes, compression))
    return [
        slices.join([slices.summed(piece, next(sums)) for piece in pieces], gradient.dense_shape)
        if pieces
        else next(sums)
        for gradient, pieces in zip(gradients, lookups, strict=True)
    ]


def kinds_of_lookups(model: keras.Model, batch: Any) -> list[list[slices.Kind]]:
    """Return the kinds of the lookups behind the gradient of each weight of a model that runs eagerly.

    Args:
        model: A built and compiled model.
        batch: A global batch.

    Raises:
        ValueError: If rows of a weight are looked up in several ways, which a gradient without a graph does not tell
            apart.
    """
    found: list[list[slices.Kind]] = []

    def trace(batch: Any) -> None:
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with _compat.local_losses():
            found.extend(slices.kinds(forward_backward(model, inputs, targets, weights)[2]))

    with contextlib.suppress(Exception):  # a call that needs values has no graph: its rows are taken as listed
        tf.function(trace, autograph=False).get_concrete_function(batch)
    found = found or [["listed"]] * len(model.trainable_variables)
    for variable, kinds in zip(model.trainable_variables, found, strict=True):
        if kinds and not slices.are_one(kinds):
            raise ValueError(
                "Under several replicas a weight whose rows are looked up in several ways cannot be trained with "
                f"run_eagerly=True, received {variable.path!r}. Leave run_eagerly out, or train on SingleDevice()."
            )
    return [kinds or ["listed"] for kinds in found]
