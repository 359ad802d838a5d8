"""Find out which metrics take the whole batch, from their states after a few rows.

On replicas each part updates a state of its own, and the states are added up. In stages the parts update one state in
turn. A metric takes the whole batch if neither gives the state of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.models import keras_losses_in_call, keras_metrics
from tfpar.reduction.metric_logs import all_metrics, not_updated, other_metrics
from tfpar.study.synthetic_rows import Rows

_ROUNDING = 1e-6


def whole_metrics(model: keras.Model, samples: Sequence[Rows], adds_states: bool) -> tuple[int, ...]:
    """Return the indices of the metrics of `compile` that take the whole batch.

    Args:
        model: A built and compiled model.
        samples: Rows to update the metrics with; real ones first.
        adds_states: Whether each part updates a state of its own; otherwise the parts update one state in turn.
    """
    return tuple(
        number
        for number, metric in enumerate(keras_metrics.compiled_metrics(model))
        if not keras_metrics.is_by_row(metric)
        and not all(_agrees(model, [metric], rows, adds_states) for rows in samples)
    )


def takes_whole_batch(model: keras.Model, samples: Sequence[Rows], adds_states: bool) -> bool:
    """Return whether an overridden `compute_metrics` takes the whole batch; arguments as for `whole_metrics`."""
    metrics = all_metrics(model)
    return not all(_agrees(model, metrics, rows, adds_states) for rows in samples)


def _agrees(model: keras.Model, metrics: Sequence[keras.Metric], rows: Rows, adds_states: bool) -> bool:
    """Return whether the states after parts of some rows give those after all of them."""
    whole = _states(model, metrics, [rows])
    if whole is None:  # synthetic targets may be invalid for the metric
        return True
    variables, parts = [variable for metric in metrics for variable in metric.variables], rows.parts()
    if not adds_states:
        in_turn = _states(model, metrics, parts)
        return in_turn is not None and all(map(_close, in_turn, whole))
    alone = [_states(model, metrics, [part]) for part in parts]
    if any(states is None for states in alone):
        return False
    columns = zip(variables, whole, *(states or [] for states in alone), strict=True)
    return all(_is_reduced(variable.aggregation, *states) for variable, *states in columns)


def _is_reduced(aggregation: str, whole: np.ndarray, *parts: np.ndarray) -> bool:
    """Return whether TensorFlow's aggregation of the states of replicas gives that of the whole batch."""
    totals = {"sum": np.sum(parts, axis=0), "mean": np.mean(parts, axis=0)}
    reduced = totals.get(aggregation, parts[0])
    largest = np.max(np.abs(parts), axis=0, initial=1.0, where=np.isfinite(parts))  # parts may cancel
    return _close(reduced, whole, _ROUNDING * largest)


def _close(values: np.ndarray, whole: np.ndarray, rounding: Any = _ROUNDING) -> bool:
    """Return whether each element is that of the whole batch: a count may be beside a large sum."""
    return not np.isfinite(whole).all() or bool(np.allclose(values, whole, rtol=1e-4, atol=rounding))


def _states(model: keras.Model, metrics: Sequence[keras.Metric], updates: Sequence[Rows]) -> list[np.ndarray] | None:
    """Return the states of metrics after some updates; None if an update fails."""
    with contextlib.suppress(Exception), keras.StatelessScope(), not_updated(other_metrics(model, metrics)):
        for metric in metrics:
            metric.reset_state()
        for rows in updates:
            with keras_losses_in_call.scalars_weighted(functools.partial(_weight, rows.share)):
                update(model, rows)
        return [np.asarray(variable.value, np.float64) for metric in metrics for variable in metric.variables]
    return None


def update(model: keras.Model, rows: Rows) -> None:
    """Update the metrics of a model with rows."""
    model.compute_metrics(rows.inputs, rows.targets, rows.outputs, sample_weight=rows.weights)


def _weight(share: float, value: tf.Tensor) -> tf.Tensor:
    return tf.cast(share, value.dtype if value.dtype.is_floating else keras.config.floatx())
