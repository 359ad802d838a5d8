"""Scalars that a layer, a metric function or a `compute_loss` counts in a metric: as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers, ops

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def pipeline() -> tfpar.Strategy:
    """Micro-batches of 3, 3 and 2 examples, and of 1, 0 and 0."""
    return tfpar.Pipeline(2, 3, balance="parameters")


by_strategy = pytest.mark.parametrize(
    "strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"]
)


class Counts(layers.Layer):
    """Counts what a function makes of features."""

    def __init__(self, metric: keras.Metric, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.metric, self.function = metric, function

    def call(self, features: Any) -> Any:
        self.metric.update_state(self.function(features))
        return features


def counting(metric: type[keras.Metric], function: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    return parity_cases.classifier(layers=lambda: [Counts(metric(name="seen"), function)])


def mean_of_squares(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(outputs))


class CountsLoss(keras.Model):
    """Counts a scalar in one of its metrics in `compute_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = keras.metrics.Mean(name="seen")
        self.calls = keras.metrics.Sum(name="calls")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore
        loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        self.seen.update_state(2 * loss)
        self.calls.update_state(1)
        return loss


def counts_loss() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,))
    model = CountsLoss(features, layers.Dense(parity_cases.NUM_CLASSES)(layers.Dense(4, "tanh")(features)))
    model.compile("sgd")
    return model


COUNTED: dict[str, Callable[[], keras.Model]] = {
    "a mean in a layer": counting(keras.metrics.Mean, lambda features: ops.mean(ops.square(features))),
    "a sum in a layer": counting(keras.metrics.Sum, lambda features: ops.sum(ops.abs(features))),
    "a constant in a layer": counting(keras.metrics.Mean, lambda features: 0.25),
    "the number of calls of a layer": counting(keras.metrics.Sum, lambda features: 1.0),
    "a metric function": parity_cases.classifier(metrics=[mean_of_squares]),
    "a loss of its own": counts_loss,
}


@pytest.mark.few(2)
@by_strategy
@pytest.mark.parametrize("name", COUNTED)
def test_a_scalar_counts_as_on_one_device(name: str, strategy: Callable[[], tfpar.Strategy]) -> None:
    small.assert_trains_as_one_device(COUNTED[name], lambda: parity_cases.batches(17, 8), strategy)


@by_strategy
@pytest.mark.parametrize(
    ("metric", "function", "message"),
    [
        (keras.metrics.Mean, lambda features: ops.sum(features), r"keras\.metrics\.Mean.*'seen' counts a sum"),
        (keras.metrics.Sum, lambda features: ops.mean(features), r"keras\.metrics\.Sum.*'seen' counts a mean"),
        (keras.metrics.Mean, lambda features: ops.std(features), "A scalar that a layer counts .* sum or a mean"),
    ],
    ids=["sum in a Mean", "mean in a Sum", "neither"],
)
def test_a_scalar_that_parts_of_a_batch_would_count_differently_is_refused(
    metric: type[keras.Metric], function: Any, message: str, strategy: Callable[[], tfpar.Strategy]
) -> None:
    trainer = tfpar.Trainer(counting(metric, function), strategy(), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(parity_cases.batches(17, 8), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0
