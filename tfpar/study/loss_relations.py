"""How the losses of parts of a batch relate to those of the whole batch, from their values on a few rows.

A loss of `compile` is a function of targets, outputs and sample weights, and no model runs here: its values for some
rows are compared with those for parts of them, on the outputs of a first run and on made-up ones. What does not agree
everywhere is computed on the whole batch.
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
from tfpar.study.made_up import Rows


class Value(NamedTuple):
    """What a loss of `compile` returned.

    Args:
        values: Its values, `[rows, ...]`, or a scalar.
        is_weighted: Whether it has sample weights or a mask.
        reduction: Its reduction; "none" for one that reduces its values itself.
    """

    values: np.ndarray
    is_weighted: bool
    reduction: str


def loss_kinds(model: keras.Model, many: Sequence[Rows]) -> tuple[Kind, ...]:
    """Return the kind of each loss of `compile`, in the order in which Keras computes them.

    Args:
        model: A built and compiled model.
        many: Rows; those of the batch first.

    Raises:
        ValueError: If a loss fails on the rows of the batch.
    """
    runs = _of_rows(lambda rows: _values(model, rows), many)
    number = max((len(whole) for _, whole, _ in runs), default=0)
    return tuple(
        _kind([(sizes, whole[index], [part[index] for part in parts]) for sizes, whole, parts in runs])
        for index in range(number)
    )


def own_kind(model: keras.Model, many: Sequence[Rows], training: bool) -> Kind:
    """Return the kind of an overridden `compute_loss`.

    Args:
        model: A built and compiled model.
        many: Rows; those of the batch first.
        training: The argument `training` of `compute_loss`.

    Raises:
        ValueError: If it fails on the rows of the batch, or returns no scalar.
    """
    if _divides_by_weights(model, many[0], training):
        return "whole"
    runs = _of_rows(lambda rows: _with_counted(model, rows, training), many)
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
    return _scalar_kind(relation.in_all(kinds))


def _with_counted(model: keras.Model, rows: Rows, training: bool) -> list[tuple[keras.Metric | None, np.ndarray]]:
    """Return the value of an overridden `compute_loss`, and the scalars that it counts, each with its metric."""
    counted: list[tuple[keras.Metric | None, np.ndarray]] = []
    with keras_losses_in_call.scalars_noted(lambda metric, value: counted.append((metric, np.asarray(value)))):
        value = own_loss(model, rows, training)
    return [(None, np.asarray(value)), *counted]


def own_loss(model: keras.Model, rows: Rows, training: bool) -> tf.Tensor:
    """Return the value of an overridden `compute_loss`, and refuse one that is no scalar.

    Args:
        model: A built and compiled model.
        rows: Rows with outputs.
        training: The argument `training` of `compute_loss`.

    Raises:
        ValueError: If it has a value for each row.
    """
    loss = keras_model.compute_loss(model, rows.inputs, rows.targets, rows.outputs, rows.weights, training)
    value = tf.convert_to_tensor(loss)
    if value.shape.rank:
        raise ValueError(
            f"On replicas and in micro-batches {type(model).__name__}.compute_loss must return a scalar, and returned "
            f"values of shape {tuple(value.shape)}. Average them over the batch, with a `reduction` of the loss or "
            "with keras.ops.mean."
        )
    return value


def _of_rows(values_of: Callable[[Rows], Any], many: Sequence[Rows]) -> list[tuple[Sequence[int], Any, list[Any]]]:
    """Return the sizes of parts, the values of rows and those of the parts; none of made-up rows on which they fail.

    Where the rows are those of the batch and parts of them fail, the values of the parts are none.
    """
    runs: list[tuple[Sequence[int], Any, list[Any]]] = []
    for rows in many:
        try:
            whole = values_of(rows)
        except Exception as error:
            if rows.is_given:
                raise _failure(error) from error
            continue
        divided = _of_parts(values_of, rows)
        if divided is not None or rows.is_given:
            runs.append((rows.sizes, *(divided or (whole, []))))
    return runs


def _of_parts(values_of: Callable[[Rows], Any], rows: Rows) -> tuple[Any, list[Any]] | None:
    """Return the values of rows and of their parts, in the first order in which none of them fails; None for none.

    An image without boxes may have no loss alone, but has one beside others, which pad its targets.
    """
    for number in range(sum(rows.sizes)):
        with contextlib.suppress(Exception):
            rolled = rows.rolled(number)
            return values_of(rolled), [values_of(part) for part in rolled.parts()]
    return None


def _failure(error: Exception) -> Exception:
    if isinstance(error, tf.errors.OpError) and (sentence := data.label_out_of_range(error.message)):
        return ValueError(sentence)
    return error


def _values(model: keras.Model, rows: Rows) -> list[Value]:
    """Return what each loss of `compile` returned for some rows."""
    of_losses: list[Value] = []
    reduced: list[Value] = []

    def note(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        dense = dense_losses(values, reduction)
        # Ragged values are summed, and the longest row of a part may be shorter than that of the batch.
        if isinstance(values, tf.RaggedTensor):
            dense = tf.reduce_sum(dense, list(range(1, dense.shape.rank)))
        is_weighted = sample_weight is not None or mask is not None
        reduced.append(Value(np.asarray(dense), is_weighted, str(reduction)))
        return tf.reduce_sum(tf.cast(dense, keras.config.floatx()))

    def call(original: Callable[..., Any], targets: Any, outputs: Any, weights: Any) -> Any:
        reduced.clear()
        value = original(targets, outputs, weights)
        of_losses.append(reduced[0] if len(reduced) == 1 else Value(np.asarray(value), False, "none"))
        return tf.zeros((), keras.config.floatx())

    def nothing(model: keras.Model, loss: Any) -> tf.Tensor:
        return tf.zeros((), tf.convert_to_tensor(loss).dtype)

    with keras_losses.loss_reduction(model, note, nothing, call):
        keras_model.compute_loss(model, rows.inputs, rows.targets, rows.outputs, rows.weights, training=False)
    return of_losses


def _kind(column: Sequence[tuple[Sequence[int], Value, list[Value]]]) -> Kind:
    """Return the kind of a loss from its values for several rows and for their parts."""
    relations, first = [], column[0][1]
    for sizes, whole, parts in column:
        if not parts:  # it fails on them
            return "whole"
        relations.append(relation.relations(whole.values, [part.values for part in parts], sizes))
    common = relation.in_all(relations)
    if first.values.ndim and "joined" in common:
        return "rows"
    if any(whole.is_weighted for _, whole, _ in column):
        return "whole"  # Keras multiplies such values by weights of other rows
    if first.values.ndim:
        return "rows" if "mean" in common and first.reduction != "sum" else "whole"
    return _scalar_kind(common)


def _scalar_kind(common: relation.Relations) -> Kind:
    return "mean" if "mean" in common else "sum" if "sum" in common else "whole"


def _divides_by_weights(model: keras.Model, rows: Rows, training: bool) -> bool:
    """Return whether losses in an overridden `compute_loss` are divided by masks or sample weights.

    The arguments of the losses say so, and not their values: the first batch may have nothing to mask.
    """
    divides: list[bool] = []

    def note(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
        by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
        divides.append(reduction not in (None, "none", "sum") and (by_weight or mask is not None))
        return keras_losses.reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

    with keras_losses.every_loss_reduction(note, keras_losses.aggregate_added_loss), contextlib.suppress(Exception):
        own_loss(model, rows, training)
    return any(divides)
