"""The models of the experiment `plan_memory`: those of `plan`, larger, and a narrow one of each for comparison."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks.plan_models import compiled, feed_forward

_TOKENS, _SIDE, _CLASSES = 128, 56, 10


def wide_mlp(narrower: int) -> keras.Model:
    """Return 6 x Dense(2048): `[batch, 2048]` -> `[batch, 10]`."""
    width = 2048 // narrower
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
    return compiled(keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(_CLASSES)]))


def cnn(narrower: int) -> keras.Model:
    """Return an image classifier: `[batch, 56, 56, 32]` -> `[batch, 10]`."""
    layers = keras.layers
    hidden = [
        layers.Conv2D(32 // narrower, 3, activation="relu"),
        layers.Conv2D(64 // narrower, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64 // narrower, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(256 // narrower, activation="relu"),
    ]
    return compiled(keras.Sequential([keras.Input((_SIDE, _SIDE, 32 // narrower)), *hidden, layers.Dense(_CLASSES)]))


def transformer(narrower: int) -> keras.Model:
    """Return 4 blocks of width 512 with 8 heads: `[batch, 128]` tokens -> `[batch, 128, 4096]`."""
    layers = keras.layers
    tokens, width = keras.Input((_TOKENS,), dtype="int32"), 512 // narrower
    values = layers.Embedding(4096 // narrower, width)(tokens)
    for _ in range(4):
        normalized = layers.LayerNormalization()(values)
        attention = layers.MultiHeadAttention(8, width // 8)
        values = layers.Add()([values, attention(normalized, normalized)])
        values = feed_forward(values, width)
    return compiled(keras.Model(tokens, layers.Dense(4096 // narrower)(values)))


def tied_embeddings(narrower: int) -> keras.Model:
    """Return 3 blocks between an embedding and its transpose: `[batch, 128]` tokens -> `[batch, 128, 16384]`."""
    tokens, width = keras.Input((_TOKENS,), dtype="int32"), 512 // narrower
    embedding = keras.layers.ReversibleEmbedding(16384 // narrower, width)
    values = embedding(tokens)
    for _ in range(3):
        values = feed_forward(values, width)
    return compiled(keras.Model(tokens, embedding(values, reverse=True)))


def dominant_layer(narrower: int) -> keras.Model:
    """Return a model whose third layer has most of the weights and work: `[batch, 1024]` -> `[batch, 10]`."""
    widths = (512 // narrower, 8192 // narrower, 4096 // narrower, 128 // narrower)
    hidden = [keras.layers.Dense(width, activation="relu") for width in widths]
    return compiled(keras.Sequential([keras.Input((1024 // narrower,)), *hidden, keras.layers.Dense(_CLASSES)]))


def many_tiny_layers(narrower: int) -> keras.Model:
    """Return 40 x Dense(128): `[batch, 128]` -> `[batch, 10]`."""
    width = 128 // narrower
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(40)]
    return compiled(keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(_CLASSES)]))


BUILD_MODEL: dict[str, Callable[[int], keras.Model]] = {
    "wide MLP": wide_mlp,
    "CNN": cnn,
    "transformer": transformer,
    "tied embeddings": tied_embeddings,
    "one dominant layer": dominant_layer,
    "many tiny layers": many_tiny_layers,
}


def endless(model: keras.Model, num_examples: int) -> tf.data.Dataset:
    """Return a dataset that makes the same batch again and again, in memory of its own each time.

    Args:
        model: A model of this module.
        num_examples: Examples of the batch.
    """
    has_tokens = model.inputs[0].dtype == "int32"
    inputs = (num_examples, *model.input_shape[1:])
    targets = inputs if has_tokens else (num_examples,)

    def batch(zero: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.fill(inputs, tf.cast(zero, model.inputs[0].dtype)), tf.fill(targets, tf.cast(zero, "int32"))

    return tf.data.Dataset.range(1).repeat().map(batch)
