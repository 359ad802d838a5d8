"""The models of the experiment `plan`: each is cut, divided and limited by something else."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

_WIDTH, _TOKENS, _VOCABULARY, _NARROW = 512, 64, 4000, 128
_IMAGE = (28, 28, 1)
_CLASSES = 10


def wide_mlp() -> keras.Model:
    """Return 6 x Dense(1024): `[batch, 512]` -> `[batch, 10]`."""
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(6)]
    return compiled(keras.Sequential([keras.Input((_WIDTH,)), *hidden, keras.layers.Dense(_CLASSES)]))


def cnn() -> keras.Model:
    """Return an image classifier: `[batch, 28, 28, 1]` -> `[batch, 10]`."""
    layers = keras.layers
    convolutions = [layers.Conv2D(filters, 3, activation="relu") for filters in (32, 64)]
    return compiled(
        keras.Sequential(
            [
                keras.Input(_IMAGE),
                *convolutions,
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(_CLASSES),
            ]
        )
    )


def transformer() -> keras.Model:
    """Return 4 blocks of width 128 with 4 heads: `[batch, 64]` tokens -> `[batch, 64, 1000]`."""
    layers = keras.layers
    tokens = keras.Input((_TOKENS,), dtype="int32")
    values = layers.Embedding(1000, _NARROW)(tokens)
    for _ in range(4):
        normalized = layers.LayerNormalization()(values)
        values = layers.Add()([values, layers.MultiHeadAttention(4, _NARROW // 4)(normalized, normalized)])
        values = feed_forward(values, _NARROW)
    return compiled(keras.Model(tokens, layers.Dense(1000)(values)))


def tied_embeddings() -> keras.Model:
    """Return 3 blocks between an embedding and its transpose: `[batch, 64]` tokens -> `[batch, 64, 4000]`."""
    tokens = keras.Input((_TOKENS,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(_VOCABULARY, _NARROW)
    values = embedding(tokens)
    for _ in range(3):
        values = feed_forward(values, _NARROW)
    return compiled(keras.Model(tokens, embedding(values, reverse=True)))


def dominant_layer() -> keras.Model:
    """Return a model whose third layer has most of the weights and work: `[batch, 512]` -> `[batch, 10]`."""
    widths = (256, 4096, 1024, 64)
    hidden = [keras.layers.Dense(width, activation="relu") for width in widths]
    return compiled(keras.Sequential([keras.Input((_WIDTH,)), *hidden, keras.layers.Dense(_CLASSES)]))


def many_tiny_layers() -> keras.Model:
    """Return 40 x Dense(64): `[batch, 512]` -> `[batch, 10]`."""
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(40)]
    return compiled(keras.Sequential([keras.Input((_WIDTH,)), *hidden, keras.layers.Dense(_CLASSES)]))


def feed_forward(values: keras.KerasTensor, width: int) -> keras.KerasTensor:
    """Return the values after the second half of a transformer block.

    Args:
        values: `[batch, tokens, width]`.
        width: Their width.
    """
    layers = keras.layers
    hidden = layers.Dense(4 * width, activation="relu")(layers.LayerNormalization()(values))
    return layers.Add()([values, layers.Dense(width)(hidden)])


def compiled(model: keras.Model) -> keras.Model:
    """Return a classifier of integers, compiled with Adam."""
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


BUILD_MODEL: dict[str, Callable[[], keras.Model]] = {
    "wide MLP": wide_mlp,
    "CNN": cnn,
    "transformer": transformer,
    "tied embeddings": tied_embeddings,
    "one dominant layer": dominant_layer,
    "many tiny layers": many_tiny_layers,
}


def dataset(model: str, batch: int) -> tf.data.Dataset:
    """Return endless batches for a model.

    Args:
        model: Its name.
        batch: Examples of a batch.
    """
    generator = np.random.default_rng(0)
    if model in ("transformer", "tied embeddings"):
        tokens = generator.integers(0, 1000, (batch, _TOKENS), "int32")
        return tf.data.Dataset.from_tensors((tokens, tokens)).repeat()
    shape = _IMAGE if model == "CNN" else (_WIDTH,)
    inputs = generator.normal(size=(batch, *shape)).astype("float32")
    return tf.data.Dataset.from_tensors((inputs, generator.integers(0, _CLASSES, batch))).repeat()
