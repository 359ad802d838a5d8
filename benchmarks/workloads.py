"""The models that are timed, the same for every library that speaks Keras."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from benchmarks.examples import (
    ARRAYS,
    BLOCK_WIDTH,
    CONTEXT,
    EMBEDDING_WIDTH,
    IMAGE_SHAPE,
    NUM_BLOCKS,
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_HEADS,
    NUM_TOKENS,
    NUM_WORDS,
    PHOTO_SHAPE,
    SENTENCE,
    SMALL_PHOTO_SHAPE,
    VOCABULARY,
    WIDTH,
)


class Workload(NamedTuple):
    """A model, and what it is compiled with."""

    model: Any
    optimizer: Any
    loss: Any
    metrics: tuple[str, ...] = ()


def host_bound(library: Any) -> Workload:
    """Return a model so small that a step is all overhead: `[batch, 20]` -> 32 -> `[batch, 1]`."""
    layers = library.layers
    model = library.Sequential([library.Input((NUM_FEATURES,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
    return Workload(model, library.optimizers.SGD(0.01), "mse")


def cnn(library: Any) -> Workload:
    """Return a small image classifier that spends its time in convolutions: `[batch, 28, 28, 1]` -> `[batch, 10]`."""
    layers = library.layers
    model = library.Sequential(
        [
            library.Input(IMAGE_SHAPE),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )
    return Workload(model, library.optimizers.SGD(0.01), _labels(library), ("accuracy",))


def dense(library: Any) -> Workload:
    """Return a model with far more weights than work: 5 x Dense(2048), 21 million weights, SGD."""
    return Workload(_dense(library, 5), library.optimizers.SGD(0.01), "mse")


def dense_adam(library: Any) -> Workload:
    """Return a model whose update takes most of a step: 4 x Dense(2048), 17 million weights, Adam."""
    return Workload(_dense(library, 4), library.optimizers.Adam(1e-3), "mse")


def _dense(library: Any, num_layers: int) -> Any:
    hidden = [library.layers.Dense(WIDTH, activation="relu") for _ in range(num_layers - 1)]
    return library.Sequential([library.Input((WIDTH,)), *hidden, library.layers.Dense(WIDTH)])


def resnet20(library: Any) -> Workload:
    """Return ResNet20 for images of 32 x 32, SGD with momentum: `[batch, 32, 32, 3]` -> `[batch, 10]`."""
    layers = library.layers

    def normalized(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = library.Input(SMALL_PHOTO_SHAPE)
    x = layers.ReLU()(normalized(inputs, 16, 3))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if block == 0 and filters > 16 else 1
            inside = layers.ReLU()(normalized(x, filters, 3, stride))
            shortcut = normalized(x, filters, 1, stride) if stride > 1 else x
            x = layers.ReLU()(layers.Add()([normalized(inside, filters, 3), shortcut]))
    outputs = layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling2D()(x))
    optimizer = library.optimizers.SGD(0.01, momentum=0.9)
    return Workload(library.Model(inputs, outputs), optimizer, _labels(library))


def blocks(library: Any) -> Workload:
    """Return four transformer blocks of width 256, AdamW: `[batch, 128, 256]` -> `[batch, 128, 256]`."""
    layers = library.layers
    inputs = x = library.Input((CONTEXT, BLOCK_WIDTH))
    for _ in range(NUM_BLOCKS):
        normalized = layers.LayerNormalization(epsilon=1e-5)(x)
        attended = layers.MultiHeadAttention(NUM_HEADS, BLOCK_WIDTH // NUM_HEADS)(normalized, normalized)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * BLOCK_WIDTH, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x = layers.Add()([x, layers.Dense(BLOCK_WIDTH)(hidden)])
    return Workload(library.Model(inputs, x), library.optimizers.AdamW(1e-3), "mse")


def embedding(library: Any) -> Workload:
    """Return a large table of embeddings with Adam, whose gradient is sparse: `[batch, 32]` -> `[batch, 10]`."""
    layers = library.layers
    model = library.Sequential(
        [
            library.Input((NUM_TOKENS,), dtype="int32"),
            layers.Embedding(VOCABULARY, EMBEDDING_WIDTH),
            layers.GlobalAveragePooling1D(),
            layers.Dense(NUM_CLASSES),
        ]
    )
    return Workload(model, library.optimizers.Adam(1e-3), _labels(library))


def mobilenet(library: Any) -> Workload:
    """Return MobileNetV2 with alpha 0.35, RMSprop: `[batch, 96, 96, 3]` -> `[batch, 10]`."""
    model = library.applications.MobileNetV2(
        PHOTO_SHAPE, alpha=0.35, weights=None, classes=NUM_CLASSES, classifier_activation=None
    )
    return Workload(model, library.optimizers.RMSprop(1e-3), _labels(library))


def masked_mean(library: Any) -> Workload:
    """Return a model of the next word whose loss is a sum over a mask divided by the sum of the mask, as a scalar."""

    def loss(targets: Any, scores: Any) -> Any:
        losses = library.losses.sparse_categorical_crossentropy(targets, scores, from_logits=True)
        mask = library.ops.cast(targets != 0, losses.dtype)
        return library.ops.sum(losses * mask) / library.ops.sum(mask)

    return Workload(_next_word(library), library.optimizers.SGD(0.1), loss)


def weighted_mean(library: Any) -> Workload:
    """Return the same model and the same loss, with the mask as sample weights."""
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    return Workload(_next_word(library), library.optimizers.SGD(0.1), loss)


def _next_word(library: Any) -> Any:
    layers = library.layers
    return library.Sequential(
        [
            library.Input((SENTENCE,), dtype="int32"),
            layers.Embedding(NUM_WORDS, EMBEDDING_WIDTH),
            layers.Dense(NUM_WORDS),
        ]
    )


def _labels(library: Any) -> Any:
    return library.losses.SparseCategoricalCrossentropy(from_logits=True)


_WORKLOADS = {
    "host_bound": host_bound,
    "cnn": cnn,
    "dense": dense,
    "dense_adam": dense_adam,
    "resnet20": resnet20,
    "blocks": blocks,
    "embedding": embedding,
    "mobilenet": mobilenet,
    "masked_mean": masked_mean,
    "weighted_mean": weighted_mean,
}


def build_model(workload: str, steps_per_execution: int = 1, library: Any = keras) -> Any:
    """Return the compiled model of a workload.

    Args:
        workload: Its name.
        steps_per_execution: For `compile`.
        library: Keras 3, or legacy tf_keras.
    """
    model, optimizer, loss, metrics = _WORKLOADS[workload](library)
    model.compile(optimizer, loss, metrics=list(metrics), steps_per_execution=steps_per_execution)
    return model


def dataset(workload: str, batch_size: int, num_steps: int) -> tf.data.Dataset:
    """Return the batches of a workload, from arrays in memory.

    Args:
        workload: Its name.
        batch_size: Rows in a batch.
        num_steps: Batches.
    """
    arrays = ARRAYS[workload](num_steps * batch_size)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size).prefetch(tf.data.AUTOTUNE)
