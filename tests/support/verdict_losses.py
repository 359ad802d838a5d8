"""Losses of `compile`, of an overridden `compute_loss` and of `add_loss`: which of them do parts of a batch give?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import parity_cases
from tests.support.verdicts import (
    BITS,
    CLASSIFICATION,
    EQUAL,
    INPUTS,
    LABELS,
    NUM_EXAMPLES,
    NUM_FEATURES,
    RUNS,
    VALUES,
    WEIGHTS,
    Applies,
    Build,
    Case,
    Refused,
    batches,
    both,
    crossentropy,
    refused,
    with_layers,
)

NUM_WORDS, LENGTH = 9, 5
random = np.random.default_rng(3)
SENTENCES = random.integers(1, NUM_WORDS, (NUM_EXAMPLES, LENGTH))  # of one length: nothing is padding
TAGGED = batches(INPUTS, SENTENCES)


def alike(loss: Any, activation: str | None = None, shape: tuple[int, ...] = (4,), **compiled: Any) -> Build:
    """A model whose outputs are almost the same for every example, as those of new models often are."""

    def build() -> keras.Model:
        small = keras.initializers.RandomNormal(stddev=1e-3)
        outputs = layers.Dense(int(np.prod(shape)), activation, kernel_initializer=small)
        model = keras.Sequential(
            [keras.Input((NUM_FEATURES,)), layers.Dense(8, "relu"), outputs, layers.Reshape(shape)]
        )
        model.compile("sgd", loss, **compiled)
        return model

    return build


def of_words(loss: Any) -> Build:
    return alike(loss, shape=(LENGTH, NUM_WORDS))


# --- a loss that compares examples ------------------------------------------------------------------------------------


def in_batch_contrast(targets: Any, outputs: Any) -> Any:
    scores = ops.matmul(outputs, ops.transpose(outputs))
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(outputs)[0]), scores, from_logits=True)


def centred(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square((targets - ops.mean(targets, 0)) - (outputs - ops.mean(outputs, 0))), -1)


def gathered(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(targets - outputs - 0.5 * ops.mean(tfpar.gather(outputs), 0)), -1)


def positive(targets: Any, outputs: Any) -> Any:
    """Values of some outputs alone."""
    return tf.boolean_mask(tf.square(targets - outputs), targets > 0)


def cross_entropies(targets: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def mean(targets: Any, outputs: Any) -> Any:
    return ops.mean(cross_entropies(targets, outputs))


def contrast(targets: Any, outputs: Any) -> Any:
    """A scalar that compares with the whole batch, which it gathers."""
    return mean(targets, outputs) + 0.1 * ops.std(tfpar.gather(outputs))


class OwnReduction(keras.losses.Loss):
    """Compares all examples of the batch, in place of Keras' own reduction."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return mean(y_true, y_pred) + 0.1 * ops.mean(ops.abs(ops.matmul(y_pred, ops.transpose(y_pred))))


ALONE = {"one micro-batch": EQUAL}
COMPARING = {
    "contrast": Case(alike(in_batch_contrast), both(EQUAL) | ALONE),
    "gathered": Case(alike(gathered), both(EQUAL)),
    "gathered scalar": Case(with_layers(loss=contrast), {"mirrored": EQUAL}, CLASSIFICATION),
    "statistics of the batch": Case(alike(centred), both(EQUAL) | ALONE),
    "some values": Case(alike(positive), both(EQUAL)),
    "products": Case(alike(lambda y, p: p @ ops.transpose(p)), both(EQUAL)),
    "own reduction": Case(with_layers(loss=OwnReduction()), both(EQUAL) | ALONE, CLASSIFICATION),
    "Circle": Case(
        with_layers(loss=keras.losses.Circle(), optimizer=lambda: keras.optimizers.SGD(1e-4)),
        both(EQUAL) | ALONE,
        CLASSIFICATION,
    ),
}


# --- a loss that divides by a mask, or by what the targets say --------------------------------------------------------


def masked(targets: Any, outputs: Any) -> Any:
    losses = cross_entropies(targets, outputs)
    mask = ops.cast(ops.not_equal(targets, 0), losses.dtype)
    return ops.sum(losses * mask) / ops.sum(mask)


def ignoring(targets: Any, outputs: Any) -> Any:
    mask = ops.cast(ops.not_equal(targets, -100), outputs.dtype)
    return ops.sum(cross_entropies(ops.where(targets == -100, 0, targets), outputs) * mask) / ops.sum(mask)


def without_missing(targets: Any, outputs: Any) -> Any:
    is_there = ops.isfinite(targets)
    squares = ops.square(ops.where(is_there, targets, 0.0) - outputs)
    return ops.sum(ops.where(is_there, squares, 0.0)) / ops.sum(ops.cast(is_there, outputs.dtype))


def balanced(targets: Any, outputs: Any) -> Any:
    share = ops.mean(1 - targets)
    losses = keras.losses.binary_crossentropy(targets[..., None], outputs[..., None])
    return ops.mean(losses * ops.where(targets > 0.5, share, 1 - share))


def unexplained(targets: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(targets - outputs)) / ops.sum(ops.square(targets - ops.mean(targets)))


def inner(targets: Any, outputs: Any, reduction: str | None, sample_weight: Any = None) -> Any:
    return crossentropy(reduction=reduction)(targets, outputs, sample_weight=sample_weight)


def is_counted(targets: Any) -> Any:
    return ops.cast(targets > 0, keras.config.floatx())


def of_loss_over_mask(targets: Any, outputs: Any) -> Any:
    return ops.sum(inner(targets, outputs, None) * is_counted(targets)) / ops.sum(is_counted(targets))


class OwnLoss(keras.Model):
    """Overrides `compute_loss`."""

    function: Callable[[Any, Any], Any]

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return self.function(y, y_pred)


def overriding(function: Callable[[Any, Any], Any], build: Build, **compiled: Any) -> Build:
    """Return a model function whose model computes its loss with a function."""

    def built() -> keras.Model:
        model = build()
        model = OwnLoss(model.inputs, model.outputs)
        model.function = function
        model.compile("sgd", **compiled)
        return model

    return built


SCALAR = both(EQUAL)
IN_STAGES = ("weights sharded", "stages of shards", "pipelines", "pipelines of shards")
DIVIDING = {
    "mask": Case(of_words(masked), SCALAR | ALONE | dict.fromkeys(IN_STAGES, EQUAL), TAGGED),
    "mask in compute_loss": Case(overriding(masked, of_words("mse")), both(EQUAL) | ALONE, TAGGED),
    "ignored labels": Case(of_words(ignoring), both(EQUAL), TAGGED),
    "missing numbers": Case(alike(without_missing), both(EQUAL)),
    "Dice": Case(alike(keras.losses.Dice(), "sigmoid"), SCALAR, batches(INPUTS, BITS)),
    "balanced": Case(alike(balanced, "sigmoid"), SCALAR, batches(INPUTS, BITS)),
    "ratio": Case(alike(unexplained), SCALAR),
    "loss object over a mask": Case(with_layers(loss=of_loss_over_mask), SCALAR, CLASSIFICATION),
    "weights of a loss object": Case(
        with_layers(loss=lambda y, p: inner(y, p, "mean_with_sample_weight", is_counted(y))), SCALAR, CLASSIFICATION
    ),
}


# --- a loss that is neither a sum nor a mean --------------------------------------------------------------------------


def hardest(number: int) -> Callable[[Any, Any], Any]:
    def loss(targets: Any, outputs: Any) -> Any:
        losses = ops.mean(ops.square(targets - outputs), -1)
        # The mean of eight is one of all in a part of eight examples; that of two fails on a part of one.
        return ops.mean(ops.top_k(losses, ops.minimum(8, ops.shape(losses)[0]) if number == 8 else number)[0])

    return loss


def root(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(targets - outputs)))


def of_all(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(ops.sum(ops.square(targets - outputs)))


def means(targets: Any, outputs: Any) -> Any:
    """A mean over the batch for each output."""
    return ops.mean(ops.square(targets - outputs), 0)


def largest(targets: Any, outputs: Any) -> Any:
    return ops.max(ops.square(targets - outputs))


NEITHER = {
    "root": Case(alike(root, "sigmoid"), SCALAR | ALONE, batches(INPUTS, BITS)),
    "eight hardest examples": Case(alike(hardest(8)), SCALAR),
    "two hardest examples": Case(
        alike(hardest(2)),
        both(EQUAL),
        batches(INPUTS, VALUES, batch=9),
    ),
    "cosine over the batch": Case(
        alike(keras.losses.CosineSimilarity(axis=0)),
        both(EQUAL),
    ),
    "shares over the batch": Case(
        alike(keras.losses.CategoricalCrossentropy(axis=0), "sigmoid"),
        both(EQUAL),
        batches(INPUTS, BITS),
    ),
    "roots of means": Case(alike(lambda y, p: ops.sqrt(means(y, p))), both(EQUAL)),
    "sums for each output": Case(alike(lambda y, p: ops.sum(ops.square(y - p), 0)), both(EQUAL)),
    "root in a loss object": Case(with_layers(loss=lambda y, p: ops.sqrt(inner(y, p, "mean"))), SCALAR, CLASSIFICATION),
    "root in compute_loss": Case(overriding(of_all, with_layers()), both(EQUAL) | ALONE),
    "largest in compute_loss": Case(overriding(largest, with_layers(), loss=["mse"]), both(EQUAL) | ALONE),
    "no reduction": Case(
        with_layers(loss=keras.losses.MeanSquaredError(reduction=None)),
        refused("a loss needs a reduction, received reduction=None"),
    ),
    "mean beside values": Case(
        with_layers(loss=lambda y, p: cross_entropies(y, p) + inner(y, p, "mean")),
        both(EQUAL),
        CLASSIFICATION,
    ),
}
WEIGHTED = batches(INPUTS, LABELS, WEIGHTS)


def masked_sequence() -> keras.Model:
    model = parity_cases.sequence_model()
    model.compile("sgd", lambda targets, outputs: ops.mean(ops.square(targets - outputs)))
    return model


OF_WEIGHTS = SCALAR | ALONE
SCALARS_WITH_WEIGHTS = {
    "sample weights": Case(with_layers(loss=mean), OF_WEIGHTS, WEIGHTED),
    "mask": Case(masked_sequence, OF_WEIGHTS, lambda: parity_cases.sequence_data().take(2)),
    "means with weights": Case(
        alike(means),
        both(EQUAL),
        batches(INPUTS[:16], VALUES[:16], WEIGHTS[:16], batch=4),
    ),
}


# --- sums and means ---------------------------------------------------------------------------------------------------


def mean_accuracy(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.cast(ops.argmax(outputs, -1) == ops.cast(targets, "int32"), outputs.dtype))


def total(targets: Any, outputs: Any) -> Any:
    return 0.1 * ops.sum(cross_entropies(targets, outputs))


class FromFunction(keras.losses.Loss):
    """The class of a loss function."""

    def __init__(self, function: Callable[[Any, Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.function = function

    def call(self, targets: Any, outputs: Any) -> Any:
        return self.function(targets, outputs)


def two_outputs(*losses: Any) -> Build:
    """Return a model function with a loss for the classes and one for the sizes."""

    def build() -> keras.Model:
        model = parity_cases.two_outputs(as_dict=False)()
        model.compile(keras.optimizers.Adam(0.01), [*losses], loss_weights=[0.3, 2.0])
        return model

    return build


def two_scalars() -> keras.Model:
    return two_outputs(mean, lambda targets, outputs: ops.sum(ops.abs(targets - outputs)))()


def two_targets() -> tf.data.Dataset:
    return parity_cases.two_outputs_data(as_dict=False)().take(2)


def absolute(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.abs(targets - outputs), -1)


def flat(targets: Any, outputs: Any) -> Any:
    return ops.reshape(ops.square(targets - outputs), [-1])


CLIPPED = batches(INPUTS, np.clip(VALUES, -1, 1))
DIVISIBLE = {
    "scalar mean": Case(with_layers(loss=mean, metrics=[mean_accuracy]), both(EQUAL), CLASSIFICATION),
    "scalar sum": Case(with_layers(loss=total), both(EQUAL), CLASSIFICATION),
    "of each value": Case(alike(flat, metrics=[flat]), both(EQUAL), CLIPPED),
    "of each example": Case(alike(absolute, metrics=[absolute]), both(EQUAL), CLIPPED),
    "of each output": Case(alike(means), both(EQUAL), CLIPPED),
    "of each group": Case(alike(keras.losses.Dice(axis=1), "sigmoid"), both(EQUAL), CLIPPED),
    "means of Keras over the batch": Case(
        alike(keras.losses.BinaryCrossentropy(axis=0), "sigmoid"), both(EQUAL), batches(INPUTS, BITS)
    ),
    "scalar of a class without reduction": Case(
        with_layers(loss=FromFunction(mean, reduction=None)), both(EQUAL), CLASSIFICATION
    ),
    "scalars of two outputs": Case(two_scalars, both(EQUAL), two_targets),
    "a scalar of two outputs": Case(
        two_outputs(cross_entropies, lambda y, p: ops.mean(ops.square(y - p))), both(EQUAL), two_targets
    ),
    "eager scalar": Case(with_layers(loss=mean, run_eagerly=True), {"mirrored": EQUAL}, CLASSIFICATION),
    "scalar beside a loss in a layer": Case(
        with_layers(parity_cases.CallsLoss, loss=mean), both(EQUAL), CLASSIFICATION
    ),
    "float64 values of a float32 kernel": Case(
        of_words(lambda y, p: alignment(y, p)), both(RUNS), batches(INPUTS, SENTENCES[:, :2]), dtype="float64"
    ),
}


def alignment(targets: Any, outputs: Any) -> Any:
    lengths = ops.full((ops.shape(outputs)[0],), LENGTH, dtype="int32")
    return ops.ctc_loss(ops.cast(targets, "int32"), outputs, ops.full_like(lengths, 2), lengths, mask_index=0)


def values_of_inner(targets: Any, outputs: Any) -> Any:
    return inner(targets, outputs, None) * is_counted(targets)


LOSSES_IN_LOSSES = {
    "no reduction": Case(
        with_layers(loss=values_of_inner, metrics=[lambda y, p: inner(y, p, "none")]), both(EQUAL), CLASSIFICATION
    ),
    "mean": Case(
        with_layers(loss=lambda y, p: inner(y, p, "sum_over_batch_size") + 0.1 * inner(y, p, "mean")),
        both(EQUAL),
        CLASSIFICATION,
    ),
    "sum": Case(with_layers(loss=FromFunction(lambda y, p: 0.1 * inner(y, p, "sum"))), both(EQUAL), CLASSIFICATION),
    "in a loss in a loss": Case(
        with_layers(
            loss=FromFunction(FromFunction(values_of_inner, reduction=None), reduction="mean_with_sample_weight")
        ),
        both(EQUAL),
        CLASSIFICATION,
    ),
    "mean by weight without weights": Case(
        with_layers(loss=FromFunction(lambda y, p: inner(y, p, "mean_with_sample_weight"))), both(EQUAL), CLASSIFICATION
    ),
    "weights": Case(
        with_layers(loss=lambda y, p: inner(y, p, "mean", sample_weight=is_counted(y))), both(EQUAL), CLASSIFICATION
    ),
    "sample weights": Case(with_layers(loss=FromFunction(values_of_inner)), both(EQUAL), WEIGHTED),
}


# --- values that weights repeat, and ragged values --------------------------------------------------------------------

LENGTHS = random.integers(1, LENGTH + 1, NUM_EXAMPLES)
SEQUENCES = random.normal(size=(NUM_EXAMPLES, LENGTH, 3)) * (np.arange(LENGTH) < LENGTHS[:, None])[..., None]
STEPS = random.normal(size=(NUM_EXAMPLES, LENGTH, 1))
STEP_WEIGHTS = random.uniform(0.5, 2.0, (NUM_EXAMPLES, LENGTH))


def over_time(targets: Any, outputs: Any) -> Any:
    """One value for each example, `[batch, 1]`."""
    return ops.mean(ops.square(targets - outputs), axis=1)


def sequential(loss: Any, *, is_masked: bool) -> Build:
    def build() -> keras.Model:
        first = [layers.Masking()] if is_masked else []
        hidden = [*first, layers.Dense(4, "tanh"), layers.Dense(1)]
        model = keras.Sequential([keras.Input((LENGTH, 3)), *hidden])
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    return build


def one_step() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Reshape((1, 2))])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


BY_WEIGHT = FromFunction(over_time, reduction="mean_with_sample_weight")
EVERYWHERE = both(EQUAL) | {"weights sharded": EQUAL}
REPEATED = {
    "divided by mask and weights": Case(
        sequential(BY_WEIGHT, is_masked=True), EVERYWHERE, batches(SEQUENCES, STEPS, STEP_WEIGHTS)
    ),
    "mask": Case(sequential(over_time, is_masked=True), EVERYWHERE, batches(SEQUENCES, STEPS)),
    "weights": Case(sequential(over_time, is_masked=False), EVERYWHERE, batches(SEQUENCES, STEPS, STEP_WEIGHTS)),
    "mask and weights": Case(
        sequential(over_time, is_masked=True), EVERYWHERE, batches(SEQUENCES, STEPS, STEP_WEIGHTS)
    ),
    "divided by a mask": Case(sequential(BY_WEIGHT, is_masked=True), EVERYWHERE, batches(SEQUENCES, STEPS)),
    "loss of Keras": Case(
        one_step, EVERYWHERE, batches(SEQUENCES[:, 0], STEPS[:, :1].repeat(2, 2), STEP_WEIGHTS[:, :4])
    ),
}


def equal_rows(targets: Any, outputs: Any) -> Any:
    return tf.RaggedTensor.from_tensor(ops.square(targets - outputs))


def positive_rows(targets: Any, outputs: Any) -> Any:
    """Rows of different lengths, which Keras sums and cannot average."""
    return tf.ragged.boolean_mask(ops.square(targets - outputs), targets > 0)


RAGGED = {
    "sum": Case(with_layers(loss=FromFunction(positive_rows, reduction="sum")), both(EQUAL), CLIPPED),
    "mean of rows of different lengths": Case(
        with_layers(loss=positive_rows),
        refused(r"rows of different lengths needs reduction='sum', .* 'sum_over_batch_size'"),
    ),
    "mean of equal rows": Case(with_layers(loss=equal_rows), both(EQUAL), CLIPPED),
}


# --- losses that layers add -------------------------------------------------------------------------------------------


class Router(layers.Layer):
    """One of four experts for each example, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(stddev=1e-3))
        self.experts = layers.Dense(4 * NUM_FEATURES)

    def call(self, inputs: Any) -> Any:
        shares = ops.softmax(self.router(inputs))
        chosen = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
        self.add_loss(ops.sum(ops.mean(shares, 0) * ops.mean(chosen, 0)))
        return ops.sum(ops.reshape(self.experts(inputs), (-1, 4, NUM_FEATURES)) * (shares * chosen)[..., None], 1)


def adds(function: Callable[[Any], Any], in_inference: Callable[[Any], Any] | None = None) -> Callable[[], Applies]:
    """Return a function that makes a layer with an added loss, or with one in training and another one in inference."""

    def call(inputs: Any, training: Any, layer: Applies) -> Any:
        layer.add_loss(0.1 * (function if training or in_inference is None else in_inference)(inputs))
        return inputs

    return lambda: Applies(call)


def norm(inputs: Any) -> Any:
    return ops.sqrt(ops.sum(ops.square(inputs)))


def between(loss: keras.losses.Loss) -> Callable[[], Applies]:
    """Return a function that makes a layer with a loss between its inputs and these in reverse order."""
    return adds(lambda inputs: loss(ops.sigmoid(inputs[:, ::-1]), ops.sigmoid(inputs)))


class CancellingMean(layers.Layer):
    """Adds a mean that is positive for some examples and negative for others."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(NUM_FEATURES, NUM_FEATURES), initializer="glorot_uniform")
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.factor * ops.mean(inputs @ self.kernel))
        return inputs


def cancelling(factor: float) -> Case:
    """The difference of the mean and of that of its parts is their rounding, larger than the mean."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), CancellingMean(factor), layers.Dense(NUM_FEATURES)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        return model

    inputs = INPUTS.copy()
    inputs[0] = -inputs[1:4].sum(0)
    return Case(build, both(EQUAL), batches(inputs, VALUES, batch=10))


class MaskedMean(layers.Layer):
    """Adds the loss of the next word, without padding."""

    def call(self, scores: Any, tokens: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(tokens, scores, from_logits=True)
        mask = ops.cast(tokens != 0, losses.dtype)
        self.add_loss(ops.sum(losses * mask) / ops.sum(mask))
        return scores


# The first nine of these sentences have no padding.
SORTED = np.where(np.arange(LENGTH) < np.clip(np.arange(NUM_EXAMPLES, 0, -1) // 2, 1, LENGTH)[:, None], SENTENCES, 0)


def language_model() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dense(5)(layers.Embedding(NUM_WORDS, 4)(tokens))
    model = keras.Model(tokens, MaskedMean()(layers.Dense(NUM_WORDS)(hidden), tokens))
    model.compile("sgd")
    return model


def noisy(from_tensorflow: bool) -> Callable[[], Applies]:
    """Return a function that makes a layer with noise, as in a variational autoencoder, and a loss of what it makes."""

    def call(inputs: Any, training: Any, layer: Applies) -> Any:
        shape = ops.shape(inputs)
        noise = tf.random.normal(shape) if from_tensorflow else keras.random.normal(shape, seed=layer.seed)
        layer.add_loss(0.1 * ops.mean(ops.square(inputs + noise)))
        return inputs + noise

    return lambda: Applies(call, seed=keras.random.SeedGenerator(1))


def mean_square(targets: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(targets - outputs))


class ScalesLoss(keras.Model):
    """Transforms the sum of all losses, penalties included."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def scaled_penalty() -> keras.Model:
    features = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(4, kernel_regularizer="l2")(features)
    model = ScalesLoss(features, layers.Dense(NUM_FEATURES)(hidden))
    model.compile("sgd", "mse")
    return model


ADDED = refused(r"A loss added with add_loss to .* must be a sum or a mean")
ADDED_LOSSES = {
    "balance of experts": Case(with_layers(Router), ADDED),
    "norm": Case(with_layers(adds(norm)), ADDED | ALONE),
    "sum, and a mean in inference": Case(with_layers(adds(ops.sum, ops.mean)), both(EQUAL)),
    "norm in inference": Case(with_layers(adds(ops.mean, norm)), refused("A loss added with add_loss", "evaluate")),
    "norm in training": Case(
        with_layers(adds(norm, ops.mean)), refused("A loss added with add_loss"), calls=("evaluate", "fit")
    ),
    "mask, first examples without padding": Case(language_model, ADDED, batches(SORTED)),
    "cosine over the batch": Case(
        with_layers(between(keras.losses.CosineSimilarity(axis=0))), refused("must be a sum or a mean over the batch")
    ),
    "means of Keras over the batch": Case(with_layers(between(keras.losses.BinaryCrossentropy(axis=0))), both(EQUAL)),
    "mean of examples that cancel": cancelling(1e4),
    "small mean of examples that cancel": cancelling(1.0),
    "loss times two, with a penalty": Case(
        scaled_penalty, {"mirrored": EQUAL, "pipeline": Refused("ScalesLoss with a penalty on .* SingleDevice")}
    ),
}
LOSSES_OF_NOISE = {
    name: Case(with_layers(noisy(name == "of TensorFlow"), loss=mean_square, metrics=[mean_square]), both(RUNS))
    for name in ("of Keras", "of TensorFlow")
}

FAMILIES: dict[str, dict[str, Case]] = {
    "a loss that compares examples": COMPARING,
    "a loss that divides by targets": DIVIDING,
    "a loss that is neither a sum nor a mean": NEITHER,
    "a scalar loss where there are weights": SCALARS_WITH_WEIGHTS,
    "a loss of parts": DIVISIBLE,
    "a loss in a loss": LOSSES_IN_LOSSES,
    "values that weights repeat": REPEATED,
    "ragged values of a loss": RAGGED,
    "an added loss": ADDED_LOSSES,
    "losses of noise": LOSSES_OF_NOISE,
}
