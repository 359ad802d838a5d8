"""What objectives touch of Keras' private side: the metrics that a model itself holds. Written for Keras 3.15."""

from __future__ import annotations

import keras


def held_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that are attributes of the model itself; `model.metrics` may be overridden (Keras 3.15)."""
    return list(model._metrics)


def add_metric(model: keras.Model, metric: keras.Metric) -> None:
    """Let a model hold a metric: reset, logged and saved as its own, also once the model is built.

    Keras 3.15 locks the attributes of a built layer (keras/src/layers/layer.py, `_lock_state`), not this list.
    """
    model._metrics.append(metric)
