"""The names of a model's logs, if known before the first step."""

from __future__ import annotations

import types
from typing import Any

import keras

from tfpar._compat.models import keras_metrics, keras_model

_MAKES_LOGS = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


def log_names(model: keras.Model) -> list[str] | None:
    """Return the names of a compiled model's logs, without `val_`; None if they are not known before the first step.

    They are unknown for unbuilt models, models with several outputs or custom steps, and metrics whose names or results
    do not follow from their class.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=[keras.metrics.MeanSquaredError()])
        >>> log_names(model)
        ['loss', 'mae', 'mean_squared_error']
    """
    if not _has_one_output(model) or any(keras_model.overridden(model, name) for name in _MAKES_LOGS):
        return None
    compiled = [_name(metric) for metric in keras.tree.flatten(keras_metrics.metric_arguments(model))]
    candidates = ["loss", *compiled, *map(_name, keras_metrics.tracked_metrics(model))]
    names = [name for name in candidates if name is not None]
    is_known = len(names) == len(candidates) and len(set(compiled)) == len(compiled)  # Keras numbers equal names
    return list(dict.fromkeys(names)) if is_known else None


def may_have_direction(model: keras.Model, monitor: str) -> bool:
    """Return whether Keras may know if lower or higher values of a log are better, as for its own losses and metrics.

    Args:
        model: A compiled model.
        monitor: The name of the log, with or without `val_`.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", metrics=["mae", lambda targets, outputs: targets - outputs])
        >>> may_have_direction(model, "val_mae"), may_have_direction(model, "val_lambda")
        (True, False)
    """
    name = monitor.removeprefix("val_")
    metrics = keras.tree.flatten(keras_metrics.metric_arguments(model))
    return name == "loss" or any(_may_compare(metric, name) for metric in metrics)


def _may_compare(metric: Any, name: str) -> bool:
    """Return whether Keras 3.15 may compare values of a metric, if it has this name."""
    if isinstance(metric, str):
        return metric == name
    if isinstance(metric, keras.Metric):
        return str(metric.name) == name and hasattr(metric, "_direction")
    return isinstance(metric, type)


def _has_one_output(model: keras.Model) -> bool:
    return model.built and len(getattr(model, "outputs", None) or ()) == 1


def _name(metric: Any) -> str | None:
    """Return the name of a metric in the logs; None if it is uncertain."""
    if isinstance(metric, str):
        return metric
    if isinstance(metric, keras.Metric):  # the result of a user's class may be a dictionary
        return str(metric.name) if keras_model.is_of_keras(type(metric).result) else None
    is_plain = isinstance(metric, types.FunctionType) and not hasattr(metric, "name")
    name = metric.__name__ if is_plain else ""
    return name if name.isidentifier() and name.islower() else None  # Keras changes other names
