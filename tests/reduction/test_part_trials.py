"""Losses and metrics that parts of a batch cannot compute are refused, also where a new model would hide it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import small

pytestmark = pytest.mark.usefixtures("logical_cpus")

FEATURES, TOKENS, LENGTH = 6, 9, 5
random = np.random.default_rng(0)
INPUTS = random.normal(size=(24, FEATURES)).astype("float32")


def pipeline() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 4, balance="parameters")


BOTH = pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])


def build(loss: Any, activation: str | None = None, shape: tuple[int, ...] = (4,), **compiled: Any) -> keras.Model:
    """A model whose outputs are almost the same for every example, as those of new models often are."""
    units = int(np.prod(shape))
    outputs = layers.Dense(units, activation, kernel_initializer=keras.initializers.RandomNormal(stddev=1e-3))
    hidden = [layers.Dense(8, "relu"), outputs, layers.Reshape(shape)]
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden])
    model.compile("sgd", loss, **compiled)
    return model


def values() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(24, 4)).astype("float32")


def bits() -> np.ndarray:
    return (np.random.default_rng(2).uniform(size=(24, 4)) < 0.5).astype("float32")


def tokens_of_equal_lengths() -> np.ndarray:
    """No example has padding."""
    return np.random.default_rng(3).integers(1, TOKENS, (24, LENGTH))


def first_four_negative() -> np.ndarray:
    return (np.arange(24) % 9 == 8).astype("float32")[:, None]


# Losses with a value for each example.
def normalized_temperature(targets: Any, outputs: Any) -> Any:
    positives = ops.arange(ops.shape(outputs)[0])
    return keras.losses.sparse_categorical_crossentropy(
        positives, ops.matmul(outputs, ops.transpose(outputs)), from_logits=True
    )


def centred(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square((targets - ops.mean(targets, 0)) - (outputs - ops.mean(outputs, 0))), -1)


def gathered(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(outputs - ops.mean(tfpar.gather(outputs), 0)), -1)


def absolute(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.abs(targets - outputs), -1)


# Losses that return a scalar.
def masked(targets: Any, outputs: Any) -> Any:
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    mask = ops.cast(ops.not_equal(targets, 0), losses.dtype)
    return ops.sum(losses * mask) / ops.sum(mask)


def root_mean_square(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(targets - outputs)))


def unexplained(targets: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(targets - outputs)) / ops.sum(ops.square(targets - ops.mean(targets)))


def balanced(targets: Any, outputs: Any) -> Any:
    share = ops.mean(1 - targets)
    losses = keras.losses.binary_crossentropy(targets[..., None], outputs[..., None])
    return ops.mean(losses * ops.where(targets > 0.5, share, 1 - share))


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return masked(y, y_pred)


def with_own_loss() -> keras.Model:
    model = build(None, shape=(LENGTH, TOKENS))
    model = OwnLoss(model.inputs, model.outputs)
    model.compile("sgd")
    return model


REFUSED_LOSSES: dict[str, tuple[Callable[[], keras.Model], Callable[[], np.ndarray], str]] = {
    "contrast": (lambda: build(normalized_temperature), values, "must not depend on .* 'normalized_temperature'"),
    "statistics of the batch": (lambda: build(centred), values, "must not depend on the others of its batch"),
    "mask": (lambda: build(masked, shape=(LENGTH, TOKENS)), tokens_of_equal_lengths, "must be a sum or a mean"),
    "mask in compute_loss": (with_own_loss, tokens_of_equal_lengths, "'OwnLoss.compute_loss' returned"),
    "root": (lambda: build(root_mean_square, "sigmoid"), bits, "must be a sum or a mean over the batch"),
    "ratio": (lambda: build(unexplained), values, "must be a sum or a mean over the batch"),
    "balanced": (lambda: build(balanced, "sigmoid"), bits, "must be a sum or a mean over the batch"),
    "Dice over the batch": (
        lambda: build(keras.losses.Dice(), "sigmoid"),
        bits,
        "must be a sum or a mean over the batch",
    ),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_losses_that_parts_of_a_batch_cannot_compute_are_refused(name: str, strategy: Any) -> None:
    make, targets, message = REFUSED_LOSSES[name]
    trainer = tfpar.Trainer(make, strategy(), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(INPUTS, targets(), batch_size=8, verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0


class Router(layers.Layer):
    """One of four experts for each example, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(stddev=1e-3))
        self.experts = layers.Dense(4 * FEATURES)

    def call(self, inputs: Any) -> Any:
        shares = ops.softmax(self.router(inputs))
        chosen = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
        self.add_loss(ops.sum(ops.mean(shares, 0) * ops.mean(chosen, 0)))
        return ops.sum(ops.reshape(self.experts(inputs), (-1, 4, FEATURES)) * (shares * chosen)[..., None], 1)


@BOTH
def test_an_added_loss_that_only_a_new_model_averages_is_refused(strategy: Any) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(FEATURES), Router(), layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(make, strategy(), seed=0)
    with pytest.raises(ValueError, match=r"A loss added with add_loss to .* must be a sum or a mean over the batch"):
        trainer.fit(INPUTS, values(), batch_size=8, verbose=0)


@BOTH
def test_losses_of_each_example_train_as_on_one_device(strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(lambda: build(absolute, metrics=[absolute]), lambda: data, strategy)


def test_a_loss_that_gathers_trains_on_replicas_and_is_refused_in_pipelines() -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(lambda: build(gathered), lambda: data, small.STRATEGIES["mirrored"])
    with pytest.raises(ValueError, match="must not depend on the others of its batch"):
        tfpar.Trainer(lambda: build(gathered), pipeline()).fit(data, verbose=0)


def test_one_micro_batch_may_compare_its_examples() -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(8)
    strategy = lambda: tfpar.Pipeline(2, 1, balance="parameters")  # noqa: E731
    small.assert_trains_as_one_device(lambda: build(normalized_temperature), lambda: data, strategy)


def precision(targets: Any, outputs: Any) -> Any:
    found = ops.round(ops.clip(outputs, 0, 1))
    return ops.sum(targets * found) / (ops.sum(found) + 1e-7)


def retrieved(targets: Any, outputs: Any) -> Any:
    scores = ops.matmul(outputs, ops.transpose(outputs))
    return ops.cast(ops.argmax(scores, -1) == ops.arange(ops.shape(outputs)[0]), "float32")


class State(keras.Metric):
    """A metric with one number, which `change` computes from the number before and the errors of a batch."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="state")
        self.change, self.number = change, self.add_weight(shape=(), initializer="zeros", name="number")

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.number.assign(self.change(self.number, ops.abs(targets - outputs)))

    def result(self) -> Any:
        return self.number


def total(before: Any, errors: Any) -> Any:
    return before + ops.sum(errors)


def largest(before: Any, errors: Any) -> Any:
    return ops.maximum(before, ops.max(errors))


def last_mean(before: Any, errors: Any) -> Any:
    return ops.mean(errors)


@BOTH
@pytest.mark.parametrize(
    ("metric", "targets", "message"),
    [
        (precision, first_four_negative, "'precision' returned for parts of a batch what does not average"),
        (retrieved, values, "'retrieved' returned for parts"),
        (lambda: State(last_mean), values, "that of 'state' for a batch is not"),
    ],
    ids=["precision", "retrieved", "last mean"],
)
def test_metrics_that_parts_of_a_batch_cannot_count_are_refused(
    metric: Any, targets: Any, message: str, strategy: Any
) -> None:
    def make() -> keras.Model:
        one = metric() if metric.__name__ == "<lambda>" else metric
        return build("mse", "sigmoid", targets().shape[1:], metrics=[one])

    with pytest.raises(ValueError, match=message):
        tfpar.Trainer(make, strategy()).fit(INPUTS, targets(), batch_size=8, verbose=0)


def test_a_largest_value_is_refused_on_replicas_and_counted_over_micro_batches() -> None:
    def make() -> keras.Model:
        return build(
            "mse",
            metrics=[
                State(largest),
            ],
        )

    replicas = tfpar.Hybrid(tfpar.Pipeline(2, 1, balance="parameters"), num_replicas=2)
    for strategy in (small.STRATEGIES["mirrored"](), replicas):
        with pytest.raises(ValueError, match="must add up over replicas, and that of 'state'"):
            tfpar.Trainer(make, strategy).fit(INPUTS, values(), verbose=0)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(make, lambda: data, pipeline)


def test_a_state_of_the_first_replica_is_that_of_one_device() -> None:
    class Batches(State):
        """Counts batches, which all replicas have."""

        def __init__(self) -> None:
            keras.Metric.__init__(self, name="state")
            self.number = self.add_variable((), "zeros", aggregation="only_first_replica", name="number")

        def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.number.assign_add(1.0)

    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(
        lambda: build("mse", metrics=[Batches()]), lambda: data, small.STRATEGIES["mirrored"]
    )


@BOTH
def test_own_metrics_that_add_up_count_as_on_one_device(strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(lambda: build("mse", metrics=[State(total)]), lambda: data, strategy)
