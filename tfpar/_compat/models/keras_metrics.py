"""Metrics of a model, and their order in its logs; all private. Written for Keras 3.15."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from tfpar._compat.models.keras_model import is_of_keras, overridden, reduces_last_axis


def inner_metrics(metric: keras.Metric) -> list[keras.Metric]:
    """Return the metrics that a metric holds: Keras 3.15 tracks those set as its attributes in `_metrics`."""
    return list(metric.metrics if isinstance(metric, CompileMetrics) else metric._metrics)


def own_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that the model and its layers hold and update in their calls (Keras 3.15)."""
    compiled = [
        model._loss_tracker,
        model._compile_metrics,
        *(model._compile_loss.metrics if model._compile_loss else ()),
    ]
    held = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    return [metric for metric in held if not any(metric is other for other in compiled)]


def counts_metrics(model: keras.Model) -> bool:
    """Return whether a model was compiled with metrics, or updates metrics of its layers (Keras 3.15)."""
    return model._compile_metrics is not None or overridden(model, "compute_metrics")


def given_metrics(model: keras.Model) -> Any:
    """Return `metrics` and `weighted_metrics` as `compile` received them.

    `get_compile_config` of Keras 3.15 raises for classes and callable objects.
    """
    compiled = model._compile_metrics
    return [] if compiled is None else [compiled._user_metrics or [], compiled._user_weighted_metrics or []]


def tracked_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics of a model's logs, without those given to `compile` (Keras 3.15 holds them in one metric)."""
    return [metric for metric in model.metrics if metric is not model._compile_metrics]


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric of the log entry `loss`; `model.metrics` holds it only at no fixed place (Keras 3.15)."""
    return model._loss_tracker


def reset(model: keras.Model) -> None:
    """Reset the metrics of a model, and that of the log entry `loss`, which an overridden `metrics` may leave out."""
    model.reset_metrics()
    loss_tracker(model).reset_state()


def compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that a model was compiled with, once they are built (Keras 3.15)."""
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


def is_by_row(metric: keras.Metric) -> bool:
    """Return whether a metric is one of Keras' own that adds a value for each row (Keras 3.15 keeps it in `_fn`)."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        return is_of_keras(metric._fn) and reduces_last_axis(metric._fn_kwargs)
    return is_of_keras(type(metric))


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return logs as Keras 3.15's `evaluate` does: a list in its order, or the loss alone."""
    return model._flatten_metrics_in_order(logs)


def trackers_of_losses(model: keras.Model) -> list[keras.metrics.Mean]:
    """Return the metrics of the log entries of single outputs' losses (Keras 3.15)."""
    return list(model._compile_loss.metrics) if model._compile_loss else []


def metric_states(layer: keras.Layer) -> list[Any]:
    """Return the variables of the metrics that a layer holds, which its `variables` leave out (Keras 3.15)."""
    return [state for one in layer._flatten_layers() for metric in one._metrics for state in metric.variables]


def held_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that are attributes of the model itself; `model.metrics` may be overridden (Keras 3.15)."""
    return list(model._metrics)


def add_metric(model: keras.Model, metric: keras.Metric) -> None:
    """Add a metric to a model, which resets, logs and saves it, even after the model is built.

    Keras 3.15 locks the attributes of a built layer (keras/src/layers/layer.py, `_lock_state`), not this list.
    """
    model._metrics.append(metric)


def own_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics by its class's method, also where the model has one of its own."""
    results: dict[str, Any] = type(model).get_metrics_result(model)
    return results


def note_results(model: keras.Model, logs: dict[str, Any]) -> None:
    """Note the logs of a call of steps on a model, with the state of its metrics.

    Keras would track a dict that is set as an attribute.
    """
    object.__setattr__(model, "_tfpar_results", (logs, _state(model)))


def noted_results(model: keras.Model) -> dict[str, Any]:
    """Return the logs that were noted last, or the results of the metrics where these have another state since.

    In a job of several workers the metrics hold the state of the examples of this worker alone.
    """
    if not tf.executing_eagerly():  # `compute_metrics` calls it in the trace of a step
        return own_results(model)
    logs, state = getattr(model, "_tfpar_results", ({}, None))
    return dict(logs) if state == _state(model) else own_results(model)


def _state(model: keras.Model) -> list[Any]:
    """Return the state of the first metric, that of the loss."""
    return [variable.numpy().tolist() for metric in model.metrics[:1] for variable in metric.variables]
