"""Find out how the losses of parts of a batch relate to those of the whole batch.

A loss of `compile` is a function of targets, outputs and sample weights, so no model runs here. Its values for some
rows are compared with those for parts of these rows, on real and on synthetic outputs. A loss without a relation that
always holds is computed on the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_model
from tfpar.reduction.losses import dense_losses
from tfpar.reduction.verdict import Kind
from tfpar.study import relation
from tfpar.study.synthetic_rows import Rows


class Value(NamedTuple):
    """What a loss of `compile` returned.

    Args:
        values: Its values, `[rows, ...]`, or a scalar.
        is_weighted: Whether it has sample weights or a mask.
        reduction: Its reduction; "none" for a loss that reduces its values itself.
    """

    values: np.ndarray
    is_weighted: bool
    reduction: str


def loss_kinds(model: keras.Model, samples: Sequence[Rows]) -> tuple[Kind, ...]:
    """Return the kind of each loss of `compile`, in Keras' order.

    Args:
        model: A built and compiled model.
        samples: Rows to compute the losses for; real ones first.

    Raises:
        ValueError: If a loss fails on real rows.
    """
    runs = _runs(lambda rows: _values(model, rows), samples)
    number = max((len(whole) for _, whole, _ in runs), default=0)
    return tuple(
        _kind([(sizes, whole[index], [part[index] for part in parts]) for sizes, whole, parts in runs])
        for index in range(number)
    )


def compute_loss_kind(model: keras.Model, samples: Sequence[Rows], training: bool) -> Kind:
    """Return the kind of an overridden `compute_loss`.

    Args:
        model: A built and compiled model.
        samples: Rows to compute the loss for; real ones first.
        training: The argument `training` of `compute_loss`.

    Raises:
        ValueError: If it fails on real rows, or does not return a scalar.
    """
    if _divides_by_weights(model, samples[0], training):
        return "whole"
    runs = _runs(lambda rows: _with_counted(model, rows, training), samples)
    kinds = [relation.ANY]
    for sizes, whole, parts in runs:
        for number, (metric, value) in enumerate(whole):
            if any(len(part) <= number for part in parts) or not parts:
                return "whole"
            relations = relation.relations(value, [part[number][1] for part in parts], sizes)
            if metric is None:
                kinds.append(relations)
            elif ("sum" if isinstance(metric, keras.metrics.Sum) else "mean") not in relations:
                return "whole"
    return _scalar_kind(relation.common_relations(kinds))


def _with_counted(model: keras.Model, rows: Rows, training: bool) -> list[tuple[keras.Metric | None, np.ndarray]]:
    """Return the value of an overridden `compute_loss`, then each scalar that it counts, with its metric."""
    counted: list[tuple[keras.Metric | None, np.ndarray]] = []
    with keras_losses_in_call.scalars_noted(lambda metric, value: counted.append((metric, np.asarray(value)))):
        value = own_loss(model, rows, training)
    return [(None, np.asarray(value)), *counted]


def own_loss(model: keras.Model, rows: Rows, training: bool) -> tf.Tensor:
    """Return the value of an overridden `compute_loss`.

    Raises:
        ValueError: If it is not a scalar.
    """
    loss = keras_model.compute_loss(model, rows.inputs, rows.targets, rows.outputs, rows.weights, training)
    value = tf.convert_to_tensor(loss)
    if value.shape.rank:
        raise ValueError(
            f"On replicas and in micro-batches {type(model).__name__}.compute_loss must return a scalar, and returned "
            f"values of shape {tuple(value.shape)}. Average them over the batch, with the `reduction` of a loss or "
            "with keras.ops.mean."
        )
    return value


def _runs(compute: Callable[[Rows], Any], samples: Sequence[Rows]) -> list[tuple[Sequence[int], Any, list[Any]]]:
    """Compute values for rows and for parts of them; return the sizes of the parts with both.

    Synthetic rows on which `compute` fails are skipped. If it fails on parts of real rows, their list is empty.
    """
    runs: list[tuple[Sequence[int], Any, list[Any]]] = []
    for rows in samples:
        try:
            whole = compute(rows)
        except Exception as error:
            if rows.is_real:
                raise _failure(error) from error
            continue
        divided = _with_parts(compute, rows)
        if divided is not None or rows.is_real:
            runs.append((rows.sizes, *(divided or (whole, []))))
    return runs


def _with_parts(compute: Callable[[Rows], Any], rows: Rows) -> tuple[Any, list[Any]] | None:
    """Compute values for rows and their parts, in the first rotation that does not fail; None if all fail.

    An image without boxes may have a loss only beside others, which pad its targets.
    """
    for number in range(sum(rows.sizes)):
        with contextlib.suppress(Exception):
            rolled = rows.rolled(number)
            return compute(rolled), [compute(part) for part in rolled.parts()]
    return None


def _failure(error: Exception) -> Exception:
    if isinstance(error, tf.errors.OpError) and (sentence := data.label_out_of_range(error.message)):
        return ValueError(sentence)
    return error


def _values(model: keras.Model, rows: Rows) -> list[Value]:
    values_by_loss: list[Value] = []
    reduced: list[Value] = []

    def note(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        dense = dense_losses(values, reduction)
        # Summed, because the longest row of a part may be shorter than that of the batch.
        if isinstance(values, tf.RaggedTensor):
            dense = tf.reduce_sum(dense, list(range(1, dense.shape.rank)))
        is_weighted = sample_weight is not None or mask is not None
        reduced.append(Value(np.asarray(dense), is_weighted, str(reduction)))
        return tf.reduce_sum(tf.cast(dense, keras.config.floatx()))

    def call(original: Callable[..., Any], targets: Any, outputs: Any, weights: Any) -> Any:
        reduced.clear()
        value = original(targets, outputs, weights)
        values_by_loss.append(reduced[0] if len(reduced) == 1 else Value(np.asarray(value), False, "none"))
        return tf.zeros((), keras.config.floatx())

    def nothing(model: keras.Model, loss: Any) -> tf.Tensor:
        return tf.zeros((), tf.convert_to_tensor(loss).dtype)

    with keras_losses.loss_reduction(model, note, nothing, call):
        keras_model.compute_loss(model, rows.inputs, rows.targets, rows.outputs, rows.weights, training=False)
    return values_by_loss


def _kind(runs: Sequence[tuple[Sequence[int], Value, list[Value]]]) -> Kind:
    """Return the kind of a loss from its values in all runs."""
    relations, first = [], runs[0][1]
    for sizes, whole, parts in runs:
        if not parts:  # the loss fails on parts
            return "whole"
        relations.append(relation.relations(whole.values, [part.values for part in parts], sizes))
    common = relation.common_relations(relations)
    if first.values.ndim and "joined" in common:
        return "rows"
    if any(whole.is_weighted for _, whole, _ in runs):
        return "whole"  # Keras multiplies these values by weights of other rows
    if first.values.ndim:
        return "rows" if "mean" in common and first.reduction != "sum" else "whole"
    return _scalar_kind(common)


def _scalar_kind(common: relation.Relations) -> Kind:
    return "mean" if "mean" in common else "sum" if "sum" in common else "whole"


def _divides_by_weights(model: keras.Model, rows: Rows, training: bool) -> bool:
    """Return whether losses in an overridden `compute_loss` are divided by masks or sample weights.

    Judged by their arguments, not their values: the first batch may have nothing to mask.
    """
    divides: list[bool] = []

    def note(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
        by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
        divides.append(reduction not in (None, "none", "sum") and (by_weight or mask is not None))
        return keras_losses.reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

    with keras_losses.every_loss_reduction(note, keras_losses.aggregate_added_loss), contextlib.suppress(Exception):
        own_loss(model, rows, training)
    return any(divides)
