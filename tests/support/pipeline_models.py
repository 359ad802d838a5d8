"""Models with many kinds of graphs, their data, and the settings of their pipelines."""

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
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES, classifier, inputs, labels
from tests.support.small import assert_same_history, assert_same_state, state

Build = Callable[[], keras.Model]
NUM_EXAMPLES, BATCH_SIZE = 19, 8  # the last batch of 3 has fewer examples than there are micro-batches
TOLERANCE = 1e-9


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(NUM_EXAMPLES, *shape)).astype(keras.config.floatx())


def tokens(length: int) -> np.ndarray:
    return np.random.default_rng(9).integers(1, 11, size=(NUM_EXAMPLES, length))


def batched(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


def labelled() -> tf.data.Dataset:
    return batched(inputs(NUM_EXAMPLES), labels(NUM_EXAMPLES))


def sequential(*hidden: Any, optimizer: Any = "sgd", **compiled: Any) -> Build:
    """Return a model function of a Dense(8), the given layers, created at each call, and a Dense(3)."""
    return classifier(
        lambda: keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer(),
        layers=lambda: [make() for make in hidden],
        **compiled,
    )


deep = sequential(lambda: layers.Dense(8, "tanh"), lambda: layers.Dense(8, "tanh"), optimizer="adam")


def assert_pipeline_equals_one_device(
    build: Build, data: Callable[[], tf.data.Dataset], settings: dict[str, Any], near_zero: float = 0.0
) -> None:
    """Train, evaluate and predict in four micro-batches and with Keras itself, in float64, and compare everything.

    Args:
        build: A model function.
        data: Makes the dataset.
        settings: Those of the pipeline.
        near_zero: By how much outputs may differ besides, absolutely.
    """
    pipeline = tfpar.Pipeline(**{"num_microbatches": 4, "balance": "parameters", **settings})
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        expected = model.fit(data(), epochs=2, verbose=0).history
        trainer = tfpar.Trainer(build, pipeline, seed=0)
        assert_same_history(trainer.fit(data(), epochs=2, verbose=0).history, expected, TOLERANCE)
        assert_same_state(state(trainer.model), state(model), TOLERANCE)
        logs = trainer.evaluate(data(), verbose=0, return_dict=True)
        assert logs == pytest.approx(model.evaluate(data(), verbose=0, return_dict=True), rel=TOLERANCE)
        outputs = [keras.tree.flatten(one.predict(data(), verbose=0)) for one in (trainer, model)]
        for actual, wanted in zip(*outputs, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=TOLERANCE, atol=near_zero)


class CountsAndAddsLoss(layers.Layer):
    """Holds a metric and adds losses, one of them in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, features: Any, training: bool = False) -> Any:
        self.size.update_state(features)
        self.add_loss(0.1 * ops.mean(ops.square(features)))
        if training:
            self.add_loss(0.01 * ops.sum(ops.abs(features)))
        return features


def graph_of_layers() -> keras.Model:
    """Inputs and outputs in dicts, skips with several consumers, a mask over cuts, a layer used twice far apart."""
    image, text = keras.Input((NUM_FEATURES,), name="image"), keras.Input((6,), dtype="int32", name="text")
    again = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l1")
    words = layers.LSTM(8, return_sequences=True)(layers.Embedding(11, 4, mask_zero=True)(text))
    first = layers.Dense(8, "tanh")(image)
    hidden = again(first) + layers.GlobalAveragePooling1D()(words)
    early = layers.Dense(2, name="early")(hidden)
    hidden = again(layers.Dense(8)(hidden * first) + first)
    late = layers.Dense(NUM_CLASSES, name="late")(layers.concatenate([hidden, image]))
    model = keras.Model({"image": image, "text": text}, {"late": late, "early": early})
    model.compile(
        keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
        {"late": crossentropy(), "early": "mse"},
        loss_weights={"late": 1.0, "early": 0.3},
        metrics={"late": ["accuracy"]},
    )
    return model


def graph_data() -> tf.data.Dataset:
    features = {"text": tokens(6) * (np.arange(6) < 4), "image": inputs(NUM_EXAMPLES)}
    return batched(features, {"early": random(2), "late": labels(NUM_EXAMPLES)})


def tied_weights() -> keras.Model:
    """One embedding in three stages: as a layer, backwards, and read by a layer that does not own it."""
    text = keras.Input((6,), dtype="int32")
    embedding, other = layers.ReversibleEmbedding(11, 4), layers.Embedding(11, 4)
    hidden = layers.Dense(4, "tanh")(embedding(text) + other(text))
    hidden = layers.Lambda(lambda h: ops.matmul(h, ops.transpose(other.embeddings)))(layers.Dense(4)(hidden))
    model = keras.Model(text, embedding(layers.Dense(4)(hidden), reverse=True))
    model.compile(keras.optimizers.Adam(0.01), crossentropy())
    return model


class OwnCall(keras.Model):
    """Uses its weights and those of a layer in operations, and adds a loss between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = layers.Embedding(11, 4), layers.Embedding(6, 4)
        inner = keras.Sequential([layers.Dense(8, "tanh"), keras.Sequential([layers.Dense(4)])])
        self.inner = inner
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, text: Any) -> Any:
        hidden = self.embedding(text) + self.position(ops.arange(ops.shape(text)[1]))
        hidden = self.inner(hidden) * self.scale
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))


def own_call() -> keras.Model:
    model = OwnCall()
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return model


def only_added_losses() -> keras.Model:
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), layers.Dense(4), CountsAndAddsLoss(), layers.Dense(3)])
    model.add(CountsAndAddsLoss())
    model.compile("sgd")
    return model


def weights_without_gradient() -> keras.Model:
    """An output without a loss, and layers before a stopped gradient: as in Keras, without weight decay."""
    features = keras.Input((NUM_FEATURES,))
    stopped = layers.Lambda(ops.stop_gradient)(layers.Dense(8)(features))
    model = keras.Model(features, [layers.Dense(NUM_CLASSES)(stopped), layers.Dense(2)(layers.Dense(4)(stopped))])
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), [crossentropy(), None])
    return model


def loops_and_lookups() -> keras.Model:
    word = keras.Input((1,), dtype="string")
    hidden = layers.Flatten()(layers.Embedding(5, 4)(layers.StringLookup(vocabulary=["a", "b"])(word)))
    hidden = layers.Lambda(lambda x: ops.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, ops.tanh(y)), (0, x))[1])(
        layers.Dense(4)(hidden)
    )
    hidden = layers.Lambda(lambda x: ops.cond(ops.sum(ops.ones(2)) > 1, lambda: 2 * x, lambda: x))(hidden)
    model = keras.Model(word, layers.Dense(NUM_CLASSES)(hidden))
    model.compile("sgd", crossentropy())
    return model


def layers_behind_a_loop() -> keras.Model:
    """The gradient of a loop creates its saved tensors after the gradients of the later layers exist."""
    later = [layers.Dense(4, "tanh"), layers.Dense(4, "tanh"), layers.Dense(NUM_CLASSES)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(11, 4), layers.LSTM(4), *later])
    model.compile("sgd", crossentropy())
    return model


class AddsLossOfEach(layers.Layer):
    """Adds a loss of each example, as CTC's endpoint layers do, which Keras sums."""

    def call(self, features: Any) -> Any:
        self.add_loss(ops.mean(ops.square(features), axis=(1, 2))[:, 0:1])
        return features


def grouped_convolutions() -> keras.Model:
    """On CPUs Keras compiles them with XLA, and what XLA compiles cannot read the weights of another device."""
    grouped = [layers.Conv2D(4, 2, groups=2, padding="same") for _ in range(3)]
    checked = [layers.Lambda(lambda x: 2 * x), AddsLossOfEach()]
    hidden = [grouped[0], checked[0], grouped[1], checked[1], grouped[2]]
    model = keras.Sequential([keras.Input((3, 3, 4)), *hidden, layers.Flatten(), layers.Dense(NUM_CLASSES)])
    model.compile("sgd", crossentropy())
    return model


class FeaturesOfNodes(keras.Model):
    """Looks up rows of a table that layers compute without the batch; it has no argument `training`, so they infer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = np.random.default_rng(3).normal(size=(11, NUM_FEATURES))
        self.before = keras.Sequential([layers.Dense(8, "tanh"), layers.BatchNormalization()])
        self.after, self.head = layers.Dense(8, "tanh"), layers.Dense(NUM_CLASSES)

    def call(self, nodes: Any) -> Any:
        rows = self.before(ops.convert_to_tensor(self.features, keras.config.floatx()))
        return self.head(self.after(ops.take(rows, nodes, axis=0)))


def features_of_nodes() -> keras.Model:
    model = FeaturesOfNodes()
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return model


class Distiller(keras.Model):
    """Its loss calls a teacher, frozen or not, and reads a weight of a stage and one that no stage has."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.student = keras.Sequential([layers.Embedding(11, 4), layers.Flatten(), layers.Dense(8), layers.Dense(3)])
        self.teacher = keras.Sequential(
            [layers.Embedding(11, 4), layers.Flatten(), layers.BatchNormalization(), layers.Dense(3)]
        )
        self.teacher.build((None, 6))
        self.teacher.trainable = not frozen
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, text: Any) -> Any:
        return self.student(text)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        wanted = self.teacher(x, training=False)
        first = ops.take(self.student.layers[0].embeddings, x[:, 0], axis=0)
        away = ops.mean(ops.square(y_pred / self.temperature - wanted))
        penalty = ops.sum(ops.square(self.student.layers[-1].kernel))
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return own + away + ops.mean(first) + 0.1 * penalty


def distiller(*, frozen: bool) -> Build:
    def build() -> keras.Model:
        model = Distiller(frozen=frozen)
        model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
        return model

    return build


class MeanOfRow(layers.Layer):
    """The mean of each row, however long."""

    def call(self, rows: Any) -> Any:
        return tf.reduce_mean(rows, axis=1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[-1])


def ragged_rows() -> keras.Model:
    """Words of a ragged batch, embedded in one stage, turned in the next, and averaged in a third."""
    words, numbers = keras.Input((None,), dtype="int32", ragged=True), keras.Input((None, 4), ragged=True)
    turned = layers.Lambda(lambda x: 2 * x)(layers.Embedding(11, 4)(words))
    means = [MeanOfRow()(turned), layers.Dense(4, "tanh")(MeanOfRow()(numbers))]
    model = keras.Model([words, numbers], layers.Dense(NUM_CLASSES)(layers.Dense(8, "tanh")(layers.Add()(means))))
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return model


def ragged_data() -> tf.data.Dataset:
    lengths = np.random.default_rng(4).integers(1, 7, size=NUM_EXAMPLES)
    rows = tf.RaggedTensor.from_tensor(tokens(6), lengths), tf.RaggedTensor.from_tensor(random(6, 4), lengths[::-1])
    return batched(rows, labels(NUM_EXAMPLES))


MODELS: dict[str, tuple[Build, Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "a graph of layers": (graph_of_layers, graph_data, {"num_stages": 4, "schedule": "interleaved"}),
    "a graph of layers in loops": (
        graph_of_layers,
        graph_data,
        {"num_stages": 3, "num_microbatches": 6, "schedule": "gpipe"},
    ),
    "tied weights": (tied_weights, lambda: batched(tokens(6), tokens(6)), {"num_stages": 4, "schedule": "zero_bubble"}),
    "a custom call": (own_call, lambda: batched(tokens(6), tokens(6)), {"num_stages": 3, "recompute": True}),
    "only added losses": (only_added_losses, lambda: batched(inputs(NUM_EXAMPLES)), {"num_stages": 3}),
    "weights without gradient": (
        weights_without_gradient,
        lambda: batched(inputs(NUM_EXAMPLES), (labels(NUM_EXAMPLES), random(2))),
        {"num_stages": 4, "schedule": "zero_bubble"},
    ),
    "grouped convolutions": (
        grouped_convolutions,
        lambda: batched(random(3, 3, 4), labels(NUM_EXAMPLES)),
        {"num_stages": 4},
    ),
    "a frozen teacher": (
        distiller(frozen=True),
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 3, "schedule": "zero_bubble"},
    ),
    "a teacher that learns": (
        distiller(frozen=False),
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 2, "schedule": "gpipe"},
    ),
    "features of nodes": (
        features_of_nodes,
        lambda: batched(tokens(1)[:, 0], labels(NUM_EXAMPLES)),
        {"num_stages": 3, "balance": [1, 1, 3]},
    ),
    "ragged rows": (ragged_rows, ragged_data, {"num_stages": 4, "schedule": "zero_bubble"}),
    "loops and lookups": (
        loops_and_lookups,
        lambda: batched(np.array(["a", "b", "c"])[labels(NUM_EXAMPLES)][:, None], labels(NUM_EXAMPLES)),
        {"num_stages": 3, "recompute": True},
    ),
    "layers after a loop": (
        layers_behind_a_loop,
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 1, "recompute": True},
    ),
}
