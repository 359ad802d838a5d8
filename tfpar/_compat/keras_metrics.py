"""What tfpar touches of Keras' metrics that is private. Written for Keras 3.15."""

from __future__ import annotations

import keras


def inner_metrics(metric: keras.Metric) -> list[keras.Metric]:
    """Return the metrics that a metric holds: Keras 3.15 tracks those set as its attributes in `_metrics`."""
    return list(metric._metrics)
