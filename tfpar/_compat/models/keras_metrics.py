"""The metrics of a model (Keras 3.15)."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from tfpar._compat.models.keras_model import is_of_keras, overridden, reduces_last_axis


def inner_metrics(metric: keras.Metric) -> list[keras.Metric]:
    """Return the metrics that are attributes of a metric, or that it combines."""
    return list(metric.metrics if isinstance(metric, CompileMetrics) else metric._metrics)


def own_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that a model and its layers update in their calls."""
    compiled = [
        model._loss_tracker,
        model._compile_metrics,
        *(model._compile_loss.metrics if model._compile_loss else ()),
    ]
    tracked = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    return [metric for metric in tracked if not any(metric is other for other in compiled)]


def counts_metrics(model: keras.Model) -> bool:
    """Return whether a model was compiled with metrics, or overrides `compute_metrics`."""
    return model._compile_metrics is not None or overridden(model, "compute_metrics")


def metric_arguments(model: keras.Model) -> Any:
    """Return the arguments `metrics` and `weighted_metrics` of `compile`.

    Keras 3.15's `get_compile_config` fails for classes and callable objects.
    """
    compiled = model._compile_metrics
    return [] if compiled is None else [compiled._user_metrics or [], compiled._user_weighted_metrics or []]


def tracked_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics in a model's logs, except those given to `compile`."""
    return [metric for metric in model.metrics if metric is not model._compile_metrics]


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric of the log `loss`, which has no fixed position in `model.metrics`."""
    return model._loss_tracker


def reset(model: keras.Model) -> None:
    """Reset the metrics of a model, including the loss, which an overridden `metrics` may omit."""
    model.reset_metrics()
    loss_tracker(model).reset_state()


def compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the built metrics of `compile`."""
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


def is_by_row(metric: keras.Metric) -> bool:
    """Return whether a metric is one of Keras' own that adds a value per row."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        return is_of_keras(metric._fn) and reduces_last_axis(metric._fn_kwargs)
    return is_of_keras(type(metric))


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return logs as `evaluate` does: a list, or the loss alone."""
    return model._flatten_metrics_in_order(logs)


def trackers_of_losses(model: keras.Model) -> list[keras.metrics.Mean]:
    """Return the metrics that track each output's loss."""
    return list(model._compile_loss.metrics) if model._compile_loss else []


def metric_states(layer: keras.Layer) -> list[Any]:
    """Return the variables of a layer's metrics, which its `variables` omit."""
    return [state for inner in layer._flatten_layers() for metric in inner._metrics for state in metric.variables]


def held_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that are attributes of the model itself; `model.metrics` may be overridden."""
    return list(model._metrics)


def add_metric(model: keras.Model, metric: keras.Metric) -> None:
    """Add a metric to a model, even a built one, whose attributes Keras locks (`_lock_state`)."""
    model._metrics.append(metric)


def own_results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics from its class, even if the instance overrides the method."""
    results: dict[str, Any] = type(model).get_metrics_result(model)
    return results


def note_results(model: keras.Model, logs: dict[str, Any]) -> None:
    """Cache the logs of a call of steps, with the state of the metrics.

    `object.__setattr__` keeps Keras from tracking the dictionary.
    """
    object.__setattr__(model, "_tfpar_results", (logs, _state(model)))


def noted_results(model: keras.Model) -> dict[str, Any]:
    """Return the cached logs, or the results of the metrics if their state has changed since.

    In a job, the metrics only hold the state of the local examples.
    """
    if not tf.executing_eagerly():  # `compute_metrics` calls it while a step is traced
        return own_results(model)
    logs, state = getattr(model, "_tfpar_results", ({}, None))
    return dict(logs) if state == _state(model) else own_results(model)


def _state(model: keras.Model) -> list[Any]:
    """Return the state of the first metric, usually the loss."""
    return [variable.numpy().tolist() for metric in model.metrics[:1] for variable in metric.variables]
