"""The cases of the parity table: each a model, its data and its training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

NUM_FEATURES, NUM_CLASSES = 5, 3
# Statistics of a micro-batch are not those of the batch: tests/pipeline/test_randomness.py has their arithmetic.
ONE_MICROBATCH_ONLY = ("BatchNormalization, synchronized", "fewer examples than replicas")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table; trained for `epochs` passes over about 20 steps in all."""

    build: Callable[[], keras.Model]
    data: Callable[[], tf.data.Dataset]
    epochs: int = 2
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps_per_call: int | None = None
    validates: bool = False


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def inputs(num_examples: int) -> np.ndarray:
    return _rng(1).normal(size=(num_examples, NUM_FEATURES)).astype(keras.config.floatx())


def labels(num_examples: int) -> np.ndarray:
    return _rng(2).integers(0, NUM_CLASSES, size=num_examples)


def batches(num_examples: int, batch_size: int, *more: np.ndarray, drop_remainder: bool = False) -> tf.data.Dataset:
    arrays = (inputs(num_examples), labels(num_examples), *more)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=drop_remainder)


def classifier(
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    loss: Any = None,
    layers: Callable[[], list[Any]] = list,
    **compiled: Any,
) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((NUM_FEATURES,)), keras.layers.Dense(8, "tanh"), *layers(), keras.layers.Dense(NUM_CLASSES)]
        )
        default = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss() if loss else default, **{"metrics": ["accuracy"], **compiled})
        return model

    return build


def confident() -> keras.Model:
    """Probabilities below those that Keras clips where it does not know the logits."""
    large = keras.initializers.RandomNormal(stddev=10.0)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(NUM_CLASSES, "softmax", kernel_initializer=large)]
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def sequence_model() -> keras.Model:
    """A masked sequence: padded tokens count neither in the loss nor in its divisor."""
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(11, 4, mask_zero=True)(tokens)
    hidden = keras.layers.GRU(5, return_sequences=True)(hidden)
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return model


def sequence_data() -> tf.data.Dataset:
    lengths = _rng(3).integers(1, 7, size=40)
    tokens = np.where(np.arange(6) < lengths[:, None], _rng(4).integers(1, 11, size=(40, 6)), 0)
    targets = _rng(5).normal(size=(40, 6, 2)).astype(keras.config.floatx())
    return tf.data.Dataset.from_tensor_slices((tokens, targets)).batch(7)


def two_outputs(as_dict: bool) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        features = keras.Input((NUM_FEATURES,))
        hidden = keras.layers.Dense(8, "tanh")(features)
        kind = keras.layers.Dense(NUM_CLASSES, name="kind")(hidden)
        size = keras.layers.Dense(1, name="size")(hidden)
        outputs = {"kind": kind, "size": size} if as_dict else [kind, size]
        model = keras.Model(features, outputs)
        losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
        weights, metrics = [0.3, 2.0], [["accuracy"], ["mae"]]
        names = ("kind", "size")
        model.compile(
            keras.optimizers.Adam(0.01),
            dict(zip(names, losses, strict=True)) if as_dict else losses,
            loss_weights=dict(zip(names, weights, strict=True)) if as_dict else weights,
            metrics=dict(zip(names, metrics, strict=True)) if as_dict else metrics,
        )
        return model

    return build


def two_outputs_data(as_dict: bool) -> Callable[[], tf.data.Dataset]:
    def data() -> tf.data.Dataset:
        sizes = _rng(6).normal(size=(67, 1)).astype(keras.config.floatx())
        targets = {"kind": labels(67), "size": sizes} if as_dict else (labels(67), sizes)
        return tf.data.Dataset.from_tensor_slices((inputs(67), targets)).batch(7)

    return data


class AddsLoss(keras.layers.Layer):
    """Adds a mean and a sum over the batch to the loss."""

    def call(self, features: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(features)))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.abs(features)))
        return features


class CallsLoss(keras.layers.Layer):
    """Calls a loss object whose divisor depends on the examples, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = keras.losses.Huber(reduction="mean_with_sample_weight")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, features: Any) -> Any:
        loss = self.loss(keras.ops.zeros_like(features), features, sample_weight=features[:, 0] ** 2)
        self.add_loss(0.1 * loss)
        self.seen.update_state(loss)
        return features


def binary(**compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", **compiled)
        return model

    return build


def binary_data() -> tf.data.Dataset:
    targets = (labels(67) > 0).astype(keras.config.floatx())[:, None]
    return tf.data.Dataset.from_tensor_slices((inputs(67), targets)).batch(7)


def optimizer(name: str, **settings: Any) -> Callable[[], keras.Model]:
    return classifier(lambda: getattr(keras.optimizers, name)(**settings))


def weighted(num_examples: int, batch_size: int) -> tf.data.Dataset:
    return batches(num_examples, batch_size, _rng(7).uniform(0.1, 2.0, size=num_examples))


def _l1_l2() -> list[Any]:
    return [keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02), activity_regularizer="l2")]


def without_decay() -> keras.Model:
    """Weights that weight decay leaves out: by the name of their layer, and themselves."""
    model = classifier(layers=lambda: [keras.layers.LayerNormalization(name="layer_norm")])()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["layer_norm"], var_list=[model.layers[0].kernel])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def over_mask(targets: Any, outputs: Any) -> Any:
    """The loss of translation tutorials: a sum over a mask, divided by the sum of the mask."""
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    mask = ops.cast(targets != 0, losses.dtype)
    return ops.sum(losses * mask) / ops.maximum(ops.sum(mask), 1.0)


def compared(targets: Any, outputs: Any) -> Any:
    """A value for each example, which depends on all outputs."""
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    return losses + 0.1 * ops.mean(ops.square(outputs - ops.mean(outputs, axis=0)), axis=-1)


def spread(targets: Any, outputs: Any) -> Any:
    """A scalar that is no mean over the examples."""
    return ops.max(outputs) - ops.min(outputs)


FULL = lambda: batches(80, 8)  # noqa: E731
ODD = lambda: batches(70, 7)  # noqa: E731
RAGGED = lambda: batches(73, 8)  # noqa: E731 - ten batches, the last of 1
TINY = lambda: batches(20, 1)  # noqa: E731

CASES: dict[str, Case] = {
    "full batches": Case(classifier(), FULL),
    "global batch odd": Case(classifier(), ODD),
    "last batch of 1": Case(classifier(), RAGGED),
    "fewer examples than replicas": Case(classifier(), TINY, epochs=1),
    "static batch shape": Case(classifier(), lambda: batches(77, 7, drop_remainder=True)),
    "sample weights": Case(classifier(weighted_metrics=["accuracy"]), lambda: weighted(73, 8)),
    "sample weights, mean by weight": Case(
        classifier(
            loss=lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
        ),
        lambda: weighted(73, 8),
    ),
    "loss summed": Case(
        classifier(
            lambda: keras.optimizers.SGD(0.01),
            lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        ),
        RAGGED,
    ),
    "loss over a mask as a scalar": Case(
        classifier(lambda: keras.optimizers.SGD(0.1, clipnorm=0.5), lambda: over_mask), RAGGED
    ),
    "loss and metric that compare examples": Case(
        classifier(loss=lambda: compared, metrics=["accuracy", spread]), lambda: weighted(73, 8)
    ),
    "class weights": Case(classifier(), ODD, fit={"class_weight": {0: 0.3, 1: 1.0, 2: 2.7}}),
    "masked sequence": Case(sequence_model, sequence_data, epochs=4),
    "outputs as dict": Case(two_outputs(True), two_outputs_data(True)),
    "outputs as list": Case(two_outputs(False), two_outputs_data(False)),
    "L1, L2 and activity": Case(classifier(layers=_l1_l2), RAGGED),
    "add_loss": Case(classifier(layers=lambda: [AddsLoss()]), RAGGED),
    "loss object in a layer": Case(classifier(layers=lambda: [CallsLoss()]), RAGGED),
    "clipnorm": Case(optimizer("SGD", learning_rate=0.5, clipnorm=0.05), RAGGED),
    "global_clipnorm": Case(optimizer("SGD", learning_rate=0.5, global_clipnorm=0.05), RAGGED),
    "clipvalue": Case(optimizer("SGD", learning_rate=0.5, clipvalue=0.01), RAGGED),
    "accumulation 2": Case(optimizer("Adam", learning_rate=0.01, gradient_accumulation_steps=2), FULL),
    "accumulation 4, ragged end, clipped": Case(
        optimizer("SGD", learning_rate=0.1, momentum=0.9, gradient_accumulation_steps=4, global_clipnorm=0.1), RAGGED
    ),
    "EMA": Case(optimizer("Adam", learning_rate=0.01, use_ema=True, ema_momentum=0.8), RAGGED),
    "EMA with overwrite": Case(
        optimizer("SGD", learning_rate=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3), RAGGED
    ),
    "Adam": Case(optimizer("Adam", learning_rate=0.01), ODD),
    "AdamW": Case(optimizer("AdamW", learning_rate=0.01, weight_decay=0.1), ODD),
    "RMSprop, learning rate schedule": Case(
        classifier(lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.CosineDecay(0.01, 30))), ODD
    ),
    "loss scale": Case(classifier(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))), RAGGED),
    "BatchNormalization, synchronized": Case(
        classifier(layers=lambda: [keras.layers.BatchNormalization(synchronized=True)]), RAGGED
    ),
    "1 step a call": Case(classifier(), ODD, steps_per_call=1),
    "3 steps a call": Case(classifier(), ODD, steps_per_call=3),
    "more steps a call than the epoch holds": Case(classifier(), ODD, steps_per_call=1000),
    "validation data": Case(classifier(), RAGGED, validates=True),
    "AUC, precision, recall": Case(binary(metrics=["AUC", "Precision", "Recall"]), binary_data, validates=True),
    "embedding, sparse gradients": Case(lambda: _embedding(), lambda: _tokens(), epochs=2),
    "rows looked up in several ways": Case(lambda: lookups(), lambda: _tokens(11), epochs=2),
    "softmax of large logits": Case(confident, RAGGED),
    "AdamW, weights without decay": Case(without_decay, ODD),
    "AMSGrad": Case(optimizer("Adam", learning_rate=0.01, amsgrad=True), RAGGED),
    "Nesterov momentum": Case(optimizer("SGD", learning_rate=0.1, momentum=0.9, nesterov=True), ODD),
    "RMSprop, momentum, centered": Case(optimizer("RMSprop", learning_rate=0.01, momentum=0.9, centered=True), RAGGED),
    "Adadelta": Case(optimizer("Adadelta", learning_rate=1.0), RAGGED),
    "Ftrl": Case(optimizer("Ftrl", learning_rate=0.1, l2_regularization_strength=0.01, beta=0.1), ODD),
    "Adamax": Case(optimizer("Adamax", learning_rate=0.01), ODD),
}


class TokensAndPositions(keras.layers.Layer):
    """Looks up tokens for each example, and positions once for a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(20, 5)
        self.positions = keras.layers.Embedding(4, 5)

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions(keras.ops.arange(keras.ops.shape(tokens)[-1]))


def _embedding() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), TokensAndPositions(), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Lookups(keras.layers.Layer):
    """Looks up the same rows as an embedding, once each, as features of a sparse tensor, and as positions."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(20, 5), name="table")
        self.sparse = keras.layers.Dense(5)

    def call(self, tokens: Any) -> Any:
        numbers, places = tf.unique(tf.reshape(tokens, [-1]))
        once = tf.reshape(tf.gather(tf.gather(self.table, numbers), places), [-1, 4, 5])
        positions = tf.gather(self.table, tf.range(tf.shape(tokens)[1]))
        features = tf.sparse.reorder(tf.sparse.from_dense(tf.one_hot(tokens[:, 0], 20, dtype=self.compute_dtype)))
        found = tf.nn.safe_embedding_lookup_sparse(
            tf.convert_to_tensor(self.table), tf.sparse.from_dense(tf.cast(tokens, tf.int64)), combiner="mean"
        )
        looked_up = tf.gather(self.table, tokens) + 2.0 * once + positions
        return tf.reduce_mean(looked_up, 1) + self.sparse(features) + found


def lookups(optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01), **compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,), dtype="int32"), Lookups(), keras.layers.Dense(3)])
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    return model


def _tokens(batch_size: int = 7) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((_rng(8).integers(0, 20, size=(67, 4)), labels(67))).batch(batch_size)
