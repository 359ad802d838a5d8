"""Losses and metrics over scores of classes in shards: Keras' values, without the whole tensor."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar.reduction.vocabulary import gathered_classes, vocabulary_losses
from tfpar.reduction.vocabulary.vocabulary_losses import ClassShards

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

SIZES = [3, 1, 5]
DEVICES = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
CLASSES = sum(SIZES)
LOGITS = 5 * np.random.default_rng(0).normal(size=(4, 6, CLASSES))
LOGITS[0, 0] = [1, 2, 2, 2, 0, 2, 1, 0, 0]  # equal largest values, in all shards
LABELS = np.random.default_rng(1).integers(0, CLASSES, (4, 6))
PARTS = np.random.default_rng(2).dirichlet(np.ones(CLASSES), (4, 6))

LOSSES: dict[str, Any] = {
    "sparse": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sparse, ignore_class": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
    "sparse, of probabilities": keras.losses.SparseCategoricalCrossentropy(),
    "dense": keras.losses.CategoricalCrossentropy(from_logits=True),
    "dense, label_smoothing": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    "dense, of probabilities": keras.losses.CategoricalCrossentropy(),
    "focal": keras.losses.CategoricalFocalCrossentropy(from_logits=True),
    "own": lambda labels, outputs: keras.ops.mean(keras.ops.square(labels - outputs), -1),
}
# These read the whole tensor.
GATHER = ("focal", "own")
METRICS: dict[str, Any] = {
    "sparse_categorical_accuracy": keras.metrics.SparseCategoricalAccuracy,
    "sparse_top_k_categorical_accuracy": lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=3),
    "sparse_categorical_crossentropy": lambda: keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
    "categorical_accuracy": keras.metrics.CategoricalAccuracy,
    "top_k_categorical_accuracy": lambda: keras.metrics.TopKCategoricalAccuracy(k=3),
}


@pytest.fixture
def float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def in_shards(logits: tf.Tensor, whole: tf.Tensor | None = None) -> tf.Tensor:
    """A tensor noted in shards; `whole` in place of their concatenation shows whether something reads it."""
    shards = tf.split(logits, SIZES, -1)
    concatenated = tf.concat(shards, -1) if whole is None else tf.identity(whole)
    return gathered_classes.note_shards(concatenated, ClassShards(shards, DEVICES))


def targets_of(name: str) -> np.ndarray:
    return LABELS if "sparse" in name else PARTS


def values_and_gradients(name: str, loss: Any, noted: bool) -> list[np.ndarray]:
    activation = keras.activations.softmax if "probabilities" in name else tf.identity
    dtype = keras.config.floatx()

    @tf.function(input_signature=[tf.TensorSpec([None, 6, CLASSES], dtype)])
    def compute(logits: tf.Tensor) -> Any:
        wrong = None if name in GATHER else tf.zeros_like(logits)
        with gathered_classes.reading_shards():
            outputs = activation(in_shards(logits, wrong) if noted else logits)
            value = loss(tf.constant(targets_of(name)), keras_model.with_mask(outputs, None) if noted else outputs)
        return value, tf.gradients(value, logits)[0]

    return [one.numpy() for one in compute(tf.constant(LOGITS, dtype))]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_keras(name: str) -> None:
    loss = LOSSES[name]
    if isinstance(loss, keras.losses.Loss):
        loss = type(loss).from_config(loss.get_config() | {"reduction": "none"})
    expected, found = (values_and_gradients(name, loss, noted) for noted in (False, True))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_keras(name: str) -> None:
    metrics = [METRICS[name]() for _ in range(2)]
    logits, targets = tf.constant(LOGITS, tf.float32), tf.constant(targets_of(name))
    weights = tf.constant(np.random.default_rng(3).uniform(size=LABELS.shape))

    @tf.function
    def update() -> None:
        with gathered_classes.reading_shards():
            metrics[0].update_state(targets, in_shards(logits, tf.zeros_like(logits)), weights)
        metrics[1].update_state(targets, logits, weights)

    update()
    np.testing.assert_allclose(*(metric.result() for metric in metrics), rtol=1e-6)


def test_logits_in_half_precision_are_read_in_the_precision_of_the_loss() -> None:
    loss, half = LOSSES["sparse"], tf.constant(LOGITS, tf.float16)

    @tf.function
    def compute() -> Any:
        with gathered_classes.reading_shards():
            return [loss(tf.constant(LABELS), one) for one in (in_shards(half, tf.zeros_like(half)), half)]

    np.testing.assert_allclose(*compute(), rtol=1e-6)


def test_a_label_outside_of_the_vocabulary_is_an_error_as_in_keras() -> None:
    @tf.function
    def compute(labels: tf.Tensor) -> tf.Tensor:
        with gathered_classes.reading_shards():
            return LOSSES["sparse"](labels, in_shards(tf.constant(LOGITS, tf.float32)))

    for label in (-1, CLASSES):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{label} is not in"):
            compute(tf.fill([4, 6], label))


def test_ignored_positions_pass_no_gradient_of_logits_that_are_not_finite() -> None:
    logits = tf.constant(np.where((LABELS == 2)[..., None], np.nan, LOGITS), tf.float32)

    @tf.function
    def compute() -> Any:
        with gathered_classes.reading_shards():
            value = LOSSES["sparse, ignore_class"](tf.constant(LABELS), in_shards(logits))
        return value, tf.gradients(value, logits)[0]

    assert (LABELS == 2).any()
    assert all(np.isfinite(one.numpy()).all() for one in compute())


def test_large_logits_lose_no_precision() -> None:
    logits = tf.constant(1e4 + np.round(LOGITS, 1), tf.float32)
    shards = ClassShards(tf.split(logits, SIZES, -1), DEVICES)
    found = vocabulary_losses.sparse_losses(tf.constant(LABELS), shards)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(LABELS), logits)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    labels = ClassShards(tf.split(tf.constant(PARTS, tf.float32), SIZES, -1), DEVICES)
    expected = tf.nn.softmax_cross_entropy_with_logits(tf.constant(PARTS, tf.float32), logits)
    np.testing.assert_allclose(vocabulary_losses.dense_losses(labels, shards), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("float64")
def test_gradients_of_shards_of_more_elements_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected = values_and_gradients("sparse", loss, noted=False)
    monkeypatch.setattr(vocabulary_losses, "MOST_INDICES", 1)
    for one, other in zip(expected, values_and_gradients("sparse", loss, noted=True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
