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
from tests.properties.test_parity import computing_in
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

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


# Losses with a value for each output.
def means(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(targets - outputs), 0)


def roots_of_means(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(means(targets, outputs))


def sums(targets: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(targets - outputs), 0)


def positive(targets: Any, outputs: Any) -> Any:
    return tf.boolean_mask(tf.square(targets - outputs), targets > 0)


# Losses that return a scalar.
def masked(targets: Any, outputs: Any) -> Any:
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    mask = ops.cast(ops.not_equal(targets, 0), losses.dtype)
    return ops.sum(losses * mask) / ops.sum(mask)


def ignoring(targets: Any, outputs: Any) -> Any:
    mask = ops.cast(ops.not_equal(targets, -100), outputs.dtype)
    classes = ops.where(targets == -100, 0, targets)
    losses = keras.losses.sparse_categorical_crossentropy(classes, outputs, from_logits=True)
    return ops.sum(losses * mask) / ops.sum(mask)


def without_missing(targets: Any, outputs: Any) -> Any:
    is_there = ops.isfinite(targets)
    squares = ops.square(ops.where(is_there, targets, 0.0) - outputs)
    return ops.sum(ops.where(is_there, squares, 0.0)) / ops.sum(ops.cast(is_there, outputs.dtype))


def hardest(targets: Any, outputs: Any) -> Any:
    losses = ops.mean(ops.square(targets - outputs), -1)
    return ops.mean(ops.top_k(losses, ops.minimum(8, ops.shape(losses)[0]))[0])


def two_hardest(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.top_k(ops.mean(ops.square(targets - outputs), -1), 2)[0])


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
    "ignored labels": (
        lambda: build(ignoring, shape=(LENGTH, TOKENS)),
        tokens_of_equal_lengths,
        "'ignoring' returned",
    ),
    "missing numbers": (lambda: build(without_missing), values, "'without_missing' returned"),
    "eight hardest examples": (lambda: build(hardest), values, "must be a sum or a mean"),
    "two hardest examples": (lambda: build(two_hardest), values, "and this one fails on 1 of the first batch: input"),
    "root": (lambda: build(root_mean_square, "sigmoid"), bits, "must be a sum or a mean over the batch"),
    "ratio": (lambda: build(unexplained), values, "must be a sum or a mean over the batch"),
    "balanced": (lambda: build(balanced, "sigmoid"), bits, "must be a sum or a mean over the batch"),
    "Dice over the batch": (
        lambda: build(keras.losses.Dice(), "sigmoid"),
        bits,
        "must be a sum or a mean over the batch",
    ),
    "similarity over the batch": (
        lambda: build(keras.losses.CosineSimilarity(axis=0)),
        values,
        r"'cosine_similarity' returned values of shape \(4,\) that are neither",
    ),
    "shares over the batch": (
        lambda: build(keras.losses.CategoricalCrossentropy(axis=0), "sigmoid"),
        bits,
        "or means over the batch, and 'categorical_crossentropy' returned",
    ),
    "roots of means": (lambda: build(roots_of_means), values, "'roots_of_means' returned values of shape"),
    "sums over the batch": (lambda: build(sums), values, "'sums' returned values of shape"),
    "some values only": (lambda: build(positive), values, "must not depend on the others of its batch"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_losses_that_parts_of_a_batch_cannot_compute_are_refused(name: str, strategy: Any) -> None:
    make, targets, message = REFUSED_LOSSES[name]
    assert_refused_before_the_first_step(make, (INPUTS, targets()), message, strategy)


def assert_refused_before_the_first_step(
    make: Callable[[], keras.Model], arrays: tuple[Any, ...], message: str, strategy: Callable[[], tfpar.Strategy]
) -> None:
    trainer = tfpar.Trainer(make, strategy(), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(*arrays, batch_size=16, shuffle=False, verbose=0)
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


class Mean(layers.Layer):
    """Adds a mean that is positive for some examples and negative for others."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(FEATURES, FEATURES), initializer="glorot_uniform")
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.factor * ops.mean(inputs @ self.kernel))
        return inputs


@BOTH
@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_an_added_mean_of_examples_that_cancel_trains_as_on_one_device(factor: float, strategy: Any) -> None:
    """The difference of the mean and of that of its parts is their rounding, larger than the mean."""

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((FEATURES,)), Mean(factor), layers.Dense(4)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        return model

    cancelling = INPUTS.copy()
    cancelling[0] = -cancelling[1:4].sum(0)
    data = tf.data.Dataset.from_tensor_slices((cancelling, values())).batch(10)
    small.assert_trains_as_one_device(make, lambda: data, strategy)


def flat(targets: Any, outputs: Any) -> Any:
    return ops.reshape(ops.square(targets - outputs), [-1])


DIVISIBLE: dict[str, Callable[[], keras.Model]] = {
    "of each example": lambda: build(absolute, metrics=[absolute]),
    "of each output": lambda: build(means),
    "of each value": lambda: build(flat, metrics=[flat]),
    "of each group": lambda: build(keras.losses.Dice(axis=1), "sigmoid"),
    "means by Keras": lambda: build(keras.losses.BinaryCrossentropy(axis=0), "sigmoid"),
    "some values counted": lambda: build("mse", metrics=[positive]),
}


@pytest.mark.few(3)
@BOTH
@pytest.mark.parametrize("name", DIVISIBLE)
def test_losses_of_each_example_train_as_on_one_device(name: str, strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, np.clip(values(), -1, 1))).batch(10)
    small.assert_trains_as_one_device(DIVISIBLE[name], lambda: data, strategy)


@BOTH
def test_sample_weights_for_means_over_the_batch_are_refused(strategy: Any) -> None:
    trainer = tfpar.Trainer(lambda: build(means), strategy())
    with pytest.raises(ValueError, match=r"where there are sample weights or masks, received values of shape \(4,\)"):
        trainer.fit(INPUTS, values(), sample_weight=np.ones(24), batch_size=4, verbose=0)


class Near(layers.Layer):
    """Adds a loss of Keras between its inputs and these in reverse order."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        super().__init__()
        self.loss = loss

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.loss(inputs[:, ::-1], inputs))
        return inputs


def near(loss: keras.losses.Loss) -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "sigmoid"), Near(loss), layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


@BOTH
def test_an_added_loss_of_values_over_the_batch_is_refused_if_it_is_no_mean(strategy: Any) -> None:
    trainer = tfpar.Trainer(lambda: near(keras.losses.CosineSimilarity(axis=0)), strategy(), seed=0)
    with pytest.raises(ValueError, match="must be a sum or a mean over the batch"):
        trainer.fit(INPUTS, values(), batch_size=8, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(lambda: near(keras.losses.BinaryCrossentropy(axis=0)), lambda: data, strategy)


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
        (lambda: keras.metrics.PearsonCorrelation(axis=0), values, "'pearson_correlation' returned for parts"),
        (lambda: keras.metrics.CosineSimilarity(axis=0), values, "'cosine_similarity' returned for parts"),
        (means, values, "'means' returned for parts"),
    ],
    ids=["precision", "retrieved", "last mean", "Pearson over the batch", "cosine over the batch", "means"],
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


class TwoNumbers(State):
    """A metric with two numbers, in place of one."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        keras.Metric.__init__(self, name="state")
        self.change, self.number = change, self.add_weight(shape=(2,), initializer="zeros", name="number")

    def result(self) -> Any:
        return self.number[-1]


@BOTH
def test_a_number_of_batches_beside_a_large_sum_is_refused(strategy: Any) -> None:
    def counted(before: Any, errors: Any) -> Any:
        return before + ops.stack([1e8 * ops.sum(errors), ops.ones((), errors.dtype)])

    trainer = tfpar.Trainer(lambda: build("mse", metrics=[TwoNumbers(counted)]), strategy())
    with pytest.raises(ValueError, match="that of 'state' for a batch is not"):
        trainer.fit(INPUTS, values(), batch_size=8, verbose=0)


@BOTH
def test_own_metrics_that_add_up_count_as_on_one_device(strategy: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, values())).batch(10)
    small.assert_trains_as_one_device(lambda: build("mse", metrics=[State(total)]), lambda: data, strategy)


def alignment(targets: Any, outputs: Any) -> Any:
    lengths = ops.full((ops.shape(outputs)[0],), LENGTH, dtype="int32")
    return ops.ctc_loss(ops.cast(targets, "int32"), outputs, ops.full_like(lengths, 2), lengths, mask_index=0)


@BOTH
def test_values_of_float64_that_a_kernel_computes_in_float32_depend_on_no_other_example(strategy: Any) -> None:
    with computing_in("float64"):
        trainer = tfpar.Trainer(lambda: build(alignment, shape=(LENGTH, TOKENS)), strategy(), seed=0)
        history = trainer.fit(INPUTS, tokens_of_equal_lengths()[:, :2], batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"]).all()


class Confusion(keras.metrics.Metric):
    """Counts pairs of classes; labels that are no class are an error."""

    def __init__(self) -> None:
        super().__init__(name="confusion")
        self.counts = self.add_weight(shape=(4, 4), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels, classes = ops.reshape(y_true, [-1]), ops.argmax(y_pred, -1)
        self.counts.assign_add(tf.math.confusion_matrix(labels, classes, 4, dtype=self.counts.dtype))

    def result(self) -> Any:
        return tf.linalg.trace(tf.convert_to_tensor(self.counts))


@BOTH
def test_a_metric_that_fails_on_made_up_labels_trains_as_on_one_device(strategy: Any) -> None:
    labels = np.random.default_rng(4).integers(0, 4, 24)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, labels)).batch(10)
    small.assert_trains_as_one_device(lambda: build(loss, metrics=[Confusion()]), lambda: data, strategy)
