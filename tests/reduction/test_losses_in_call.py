"""Losses that a layer or a model computes in its `call`: on replicas and in pipelines those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

MSE = keras.losses.MeanSquaredError


class Endpoint(layers.Layer):
    """Adds what a function makes of targets and predictions to the loss, and counts it."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function, self.seen = function, keras.metrics.Mean(name="seen")

    def call(self, targets: Any, predictions: Any, training: bool = False) -> Any:
        loss = self.function(targets, predictions, training)
        self.add_loss(loss)
        self.seen.update_state(loss)
        return predictions


def with_endpoint(function: Callable[..., Any], **compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        features, targets = keras.Input((parity_cases.NUM_FEATURES,)), keras.Input((1,))
        predictions = layers.Dense(1)(layers.Dense(4, "tanh")(features))
        model = keras.Model([features, targets], Endpoint(function)(targets, predictions))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), **compiled)
        return model

    return build


class OwnCall(keras.Model):
    """Computes its loss in the model's own `call`, in a nested model, and with a penalty on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
        self.loss_of_batch = keras.losses.Huber()

    def call(self, inputs: Any, training: bool = False) -> Any:
        features, targets = inputs
        predictions = self.nested(features)
        self.add_loss(self.loss_of_batch(targets, predictions))
        if training:
            self.add_loss(0.1 * MSE()(targets, 2.0 * predictions) + 0.01 * ops.mean(ops.abs(predictions)))
        self.add_loss(keras.regularizers.L2(0.01)(self.nested.layers[0].kernel))
        return predictions


def own_call() -> keras.Model:
    model = OwnCall()
    model.compile(keras.optimizers.SGD(0.05))
    return model


class AddsValue(layers.Layer):
    """Adds a value to the loss."""

    def call(self, loss: Any, predictions: Any) -> Any:
        self.add_loss(loss)
        return predictions


def in_the_graph() -> keras.Model:
    """A loss object called on symbolic tensors, so that its operations are the model's, with the batch size given."""
    features, targets = keras.Input((parity_cases.NUM_FEATURES,), 8), keras.Input((1,), 8)
    predictions = layers.Dense(1)(features)
    model = keras.Model([features, targets], AddsValue()(MSE()(targets, predictions), predictions))
    model.compile(keras.optimizers.SGD(0.05))
    return model


def pairs(batch_size: int = 8) -> tf.data.Dataset:
    """The last batch is smaller; the model takes the targets too."""
    features = parity_cases.inputs(37)
    targets = np.sin(features.sum(1, keepdims=True))
    return tf.data.Dataset.from_tensor_slices(((features, targets),)).batch(batch_size)


def some_targets() -> tf.data.Dataset:
    return pairs().map(lambda pair: (pair, pair[1]))


def weighted(**settings: Any) -> Callable[..., Any]:
    def loss(targets: Any, predictions: Any, training: bool) -> Any:
        weights = ops.cast(targets[:, 0] > 0.2, predictions.dtype)
        return MSE(**settings)(targets, predictions, sample_weight=weights)

    return loss


def masked(targets: Any, predictions: Any, training: bool) -> Any:
    some = ops.multiply(predictions, 1.0)
    some._keras_mask = targets[:, 0] > 0
    return MSE()(targets, some)


def by_trained_weights(targets: Any, predictions: Any, training: bool) -> Any:
    loss = keras.losses.Huber(reduction="mean_with_sample_weight")
    return loss(targets, predictions, sample_weight=0.1 + predictions[:, 0] ** 2)


def by_weights_trained_in_training(targets: Any, predictions: Any, training: bool) -> Any:
    return by_trained_weights(targets, predictions if training else ops.stop_gradient(predictions), training)


ENDPOINTS: dict[str, Callable[..., Any]] = {
    "mean": lambda y, p, training: MSE()(y, p),
    "sum": lambda y, p, training: 0.1 * MSE(reduction="sum")(y, p),
    "weighted": weighted(),
    "mean by weight": weighted(reduction="mean_with_sample_weight"),
    "not linear": lambda y, p, training: ops.sqrt(MSE()(y, p)) + ops.mean(ops.abs(p)),
    "times another mean": lambda y, p, training: MSE()(y, p) * ops.mean(ops.square(p)),
    "with a sum": lambda y, p, training: 0.1 * MSE(reduction="sum")(y, p) + 0.1 * ops.sum(ops.abs(p)),
    "only some values": lambda y, p, training: MSE()(y[y > 0][:, None], p[y > 0][:, None]),
    "sum in training": lambda y, p, training: 0.1 * ops.sum(ops.square(y - p)) if training else ops.sum(0.0 * p),
    "masked": masked,
    "trained weights": by_trained_weights,
    "trained weights in training": by_weights_trained_in_training,
    "no reduction": lambda y, p, training: ops.mean(MSE(reduction=None)(y, p)),
}
# A metric cannot know that a scalar is the sum over a part.
NOT_COUNTED = ("with a sum", "sum in training")
OF_STAGES = [name for name in ENDPOINTS if name != "times another mean"]


def endpoint(name: str) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = with_endpoint(ENDPOINTS[name])()
        if name in NOT_COUNTED:
            model.layers[-1]._metrics.clear()
        return model

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(ENDPOINTS, of_ci=[*ENDPOINTS][1::2]))
def test_a_loss_in_a_layer_equals_one_device(name: str) -> None:
    small.assert_trains_as_one_device(endpoint(name), pairs)


@pytest.mark.extended
@pytest.mark.parametrize("build", [own_call, in_the_graph], ids=["own call", "in the graph"])
def test_a_loss_in_a_models_call_equals_one_device(build: Callable[[], keras.Model]) -> None:
    small.assert_trains_as_one_device(build, pairs)


@pytest.mark.extended
def test_a_loss_in_a_layer_adds_to_that_of_compile() -> None:
    small.assert_trains_as_one_device(with_endpoint(weighted(), loss="mae", metrics=["mse"]), some_targets)


@pytest.mark.extended
def test_a_loss_in_a_layer_equals_one_device_eagerly() -> None:
    small.assert_trains_as_one_device(with_endpoint(ENDPOINTS["mean"], run_eagerly=True), pairs, epochs=1)


@pytest.mark.extended
def test_a_loss_in_a_layer_equals_one_device_where_replicas_have_the_same_examples() -> None:
    small.assert_trains_as_one_device(
        with_endpoint(weighted()), lambda: pairs(2), lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"])
    )


def rows_alone() -> keras.Model:
    """The loss of a layer is the only one that trains the rows of a table."""
    words, targets = keras.Input((), dtype="int64"), keras.Input((1,))
    predictions = layers.Dense(1)(layers.Embedding(9, 4)(words))
    model = keras.Model([words, targets], Endpoint(ENDPOINTS["mean"])(targets, predictions))
    model.compile(keras.optimizers.SGD(0.05))
    return model


@pytest.mark.extended
def test_a_loss_in_a_layer_trains_rows_as_one_device() -> None:
    words, targets = np.arange(37) % 9, np.sin(np.arange(37.0, dtype="float32"))[:, None]
    small.assert_trains_as_one_device(
        rows_alone, lambda: tf.data.Dataset.from_tensor_slices(((words, targets),)).batch(8)
    )


# --- micro-batches, which run one after the other ---------------------------------------------------------------------


def pipeline() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 3, balance="parameters")


def of_a_pipeline() -> tf.data.Dataset:
    """The last batch has fewer examples than there are micro-batches."""
    return pairs(7)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(OF_STAGES, of_ci=OF_STAGES[::4]))
def test_a_loss_in_a_layer_of_a_pipeline_equals_one_device(name: str) -> None:
    small.assert_trains_as_one_device(endpoint(name), of_a_pipeline, pipeline)


@pytest.mark.extended
def test_losses_in_several_stages_equal_one_device() -> None:
    def build() -> keras.Model:
        features, targets = keras.Input((parity_cases.NUM_FEATURES,)), keras.Input((1,))
        first = layers.Dense(1)(layers.Dense(4, "tanh")(features))
        ends = [Endpoint(ENDPOINTS[name]) for name in ("masked", "trained weights", "mean")]
        ends[1].seen.name = "seen_later"
        hidden = ends[2](targets, ends[0](targets, first))
        model = keras.Model([features, targets], ends[1](targets, layers.Dense(1)(layers.Dense(3)(hidden))))
        model.compile("adam", loss="mae")
        return model

    strategy = lambda: tfpar.Pipeline(3, 2, "zero_bubble", [3, 2, 2])  # noqa: E731
    small.assert_trains_as_one_device(build, lambda: of_a_pipeline().map(lambda pair: (pair, pair[1])), strategy)


class AddsInCall(keras.Model):
    """Adds, in a `call` that is cut into stages, losses with weights and one that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.end = layers.Dense(4, "tanh"), layers.Dense(1)
        self.huber = keras.losses.Huber(reduction="mean_with_sample_weight")

    def call(self, inputs: Any) -> Any:
        features, targets = inputs
        predictions = self.end(self.hidden(features))
        weights = ops.cast(targets[:, 0] > 0.2, predictions.dtype)
        self.add_loss(0.5 * self.huber(targets, predictions, sample_weight=weights))
        self.add_loss(ops.sqrt(MSE()(targets, predictions)))
        return predictions


def adds_in_call() -> keras.Model:
    model = AddsInCall()
    model.compile("adam")
    return model


@pytest.mark.extended
def test_losses_in_the_call_of_a_model_that_is_cut_equal_one_device() -> None:
    small.assert_trains_as_one_device(adds_in_call, of_a_pipeline, pipeline)


@pytest.mark.extended
def test_a_first_batch_without_anything_to_mask_tells_nothing_about_the_next() -> None:
    """In the first batch every example counts, so that the loss of a micro-batch looks like a mean over it."""

    def batches() -> tf.data.Dataset:
        first = pairs(7).take(1).map(lambda pair: ((pair[0], tf.abs(pair[1])),))
        return first.concatenate(pairs(7).skip(1))

    small.assert_trains_as_one_device(endpoint("masked"), batches, pipeline)
    small.assert_trains_as_one_device(endpoint("only some values"), batches, pipeline)


@pytest.mark.extended
def test_micro_batches_need_the_totals_of_the_whole_batch_where_masks_or_weights_divide() -> None:
    for name, way in [
        ("mean", "alone"),
        ("masked", "whole"),
        ("trained weights", "whole"),
        ("not linear", "whole"),
    ]:
        trainer = tfpar.Trainer(endpoint(name), pipeline(), seed=0)
        trainer.fit(of_a_pipeline().take(1), verbose=0)
        (steps,) = [trainer.strategy.engine._steps[trainer.model]]
        assert steps.compiler.losses.ways(training=True) == (way,), name


def test_a_nonlinear_function_of_a_loss_is_refused_if_a_cut_separates_it_from_the_loss() -> None:
    to_the_loss, from_the_root_on = 6, 17
    trainer = tfpar.Trainer(adds_in_call, tfpar.Pipeline(2, 3, balance=[to_the_loss, from_the_root_on]), seed=0)
    with pytest.raises(ValueError, match=r"must be used in the same stage .* but stage 0 sends it to a later stage"):
        trainer.fit(of_a_pipeline(), verbose=0)


def test_a_loss_times_a_value_of_examples_is_refused_in_a_pipeline() -> None:
    trainer = tfpar.Trainer(endpoint("times another mean"), pipeline(), seed=0)
    with pytest.raises(ValueError, match="but not its product with another value of the examples, as in stage 1"):
        trainer.fit(of_a_pipeline(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0
