"""Scalars that an overridden `compute_loss` or `compute_metrics` counts in a metric: one device's value, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import metrics, ops

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

INPUTS = np.random.default_rng(0).normal(size=(37, 8)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": small.STRATEGIES["mirrored"],
    "pipeline": lambda: tfpar.Pipeline(1, 2),  # micro-batches split the batch; a model of one layer is one stage
}
SCALARS: dict[str, Callable[[Any], Any]] = {"mean": ops.mean, "sum": ops.sum, "largest": ops.max}


class Counts(keras.Model):
    """Counts a scalar of the squared errors in a metric of its own."""

    def __init__(self, metric: type[keras.Metric], scalar: str) -> None:
        super().__init__()
        self.dense, self.counter, self.scalar = keras.layers.Dense(1), metric(name="counted"), SCALARS[scalar]

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class InLoss(Counts):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        self.counter.update_state(self.scalar(ops.square(y - y_pred)))
        return ops.mean(ops.square(y - y_pred))


class InMetrics(Counts):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.counter.update_state(self.scalar(ops.square(y - y_pred)))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def counted(kind: type[Counts], metric: type[keras.Metric], scalar: str, strategy: tfpar.Strategy) -> list[float]:
    def build_model() -> keras.Model:
        model = kind(metric, scalar)
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build_model, strategy, seed=0)
    history: list[float] = trainer.fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0).history[
        "counted"
    ]
    return history


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("metric", "scalar"), [(metrics.Sum, "sum"), (metrics.Mean, "mean")])
@pytest.mark.parametrize("kind", [InLoss, InMetrics])
def test_a_scalar_of_the_kind_of_its_metric_equals_one_device(
    kind: type[Counts], metric: type[keras.Metric], scalar: str, strategy: str
) -> None:
    expected = counted(kind, metric, scalar, tfpar.SingleDevice())
    assert counted(kind, metric, scalar, STRATEGIES[strategy]()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "metric", "scalar", "message"),
    [
        (
            InLoss,
            metrics.Sum,
            "mean",
            r"InLoss.compute_loss must count a sum .* in a keras.metrics.Sum, .* counts a mean",
        ),
        (
            InLoss,
            metrics.Mean,
            "sum",
            r"InLoss.compute_loss must count a mean .* in a keras.metrics.Mean, .* counts a sum",
        ),
        (
            InLoss,
            metrics.Sum,
            "largest",
            "A scalar that InLoss.compute_loss counts in a metric must be a sum or a mean",
        ),
        (InMetrics, metrics.Sum, "mean", r"InMetrics.compute_metrics must count a sum .* counts a mean"),
        (InMetrics, metrics.Mean, "sum", "must average over the batch"),
        (InMetrics, metrics.Sum, "largest", "A scalar that InMetrics.compute_metrics counts in a metric must be a sum"),
    ],
)
def test_a_scalar_of_another_kind_is_refused_before_the_first_step(
    kind: type[Counts], metric: type[keras.Metric], scalar: str, message: str, strategy: str
) -> None:
    with pytest.raises(ValueError, match=message):
        counted(kind, metric, scalar, STRATEGIES[strategy]())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overridden_loss_runs_as_often_in_trials_with_a_metric_of_its_own_as_without(strategy: str) -> None:
    assert num_calls(with_metric=True, strategy=strategy) == num_calls(with_metric=False, strategy=strategy)


def num_calls(with_metric: bool, strategy: str) -> int:
    calls = []

    class Noted(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.counter = metrics.Mean(name="counted") if with_metric else None

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            calls.append(1)
            loss = ops.mean(ops.square(y - y_pred))
            if self.counter is not None:
                self.counter.update_state(loss)
            return loss

    def build_model() -> keras.Model:
        model = Noted()
        model.compile("sgd", "mse")
        return model

    tfpar.Trainer(build_model, STRATEGIES[strategy](), seed=0).fit(INPUTS, TARGETS, batch_size=8, epochs=1, verbose=0)
    return len(calls)


class MeanByWeight(keras.layers.Layer):
    """Counts a loss of the whole batch, which is neither a sum nor a mean of its values for parts."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        self.counter = metrics.Mean(name="counted")

    def call(self, inputs: Any) -> Any:
        self.counter.update_state(self.loss(ops.zeros_like(inputs[:, :1]), inputs[:, :1], ops.abs(inputs[:, 1])))
        return inputs


class OverridesMetrics(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_a_scalar_of_a_layer_is_not_taken_for_one_of_compute_metrics() -> None:
    def build_model() -> keras.Model:
        model = OverridesMetrics([keras.Input((8,)), MeanByWeight(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    histories = [
        tfpar.Trainer(build_model, strategy, seed=0)
        .fit(INPUTS, TARGETS, batch_size=8, shuffle=False, verbose=0)
        .history["counted"]
        for strategy in (tfpar.SingleDevice(), STRATEGIES["mirrored"]())
    ]
    assert histories[1] == pytest.approx(histories[0], rel=1e-5)
