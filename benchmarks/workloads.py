"""The models and data that are timed, the same for every contender."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

NUM_FEATURES, NUM_CLASSES = 20, 10
IMAGE_SHAPE = (28, 28, 1)


def host_bound_model(steps_per_execution: int = 1) -> keras.Model:
    """Return a model so small that a step is all overhead: `[batch, 20]` -> 32 -> `[batch, 1]`.

    Args:
        steps_per_execution: For `compile`.
    """
    model = keras.Sequential(
        [keras.Input((NUM_FEATURES,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=steps_per_execution)
    return model


def host_bound_data(batch_size: int, num_steps: int) -> tf.data.Dataset:
    """Return batches `([batch, 20], [batch, 1])` of a linear problem, from arrays in memory.

    Args:
        batch_size: Rows in a batch.
        num_steps: Batches.
    """
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_steps * batch_size, NUM_FEATURES)).astype("float32")
    targets = inputs @ rng.normal(size=(NUM_FEATURES, 1)).astype("float32")
    return _batches(inputs, targets, batch_size)


def cnn_model(steps_per_execution: int = 1) -> keras.Model:
    """Return a small image classifier that spends its time in convolutions: `[batch, 28, 28, 1]` -> `[batch, 10]`.

    Args:
        steps_per_execution: For `compile`.
    """
    model = keras.Sequential(
        [
            keras.Input(IMAGE_SHAPE),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def cnn_data(batch_size: int, num_steps: int) -> tf.data.Dataset:
    """Return batches `([batch, 28, 28, 1], [batch])` of noise with random labels, from arrays in memory.

    Args:
        batch_size: Images in a batch.
        num_steps: Batches.
    """
    rng = np.random.default_rng(0)
    images = rng.random(size=(num_steps * batch_size, *IMAGE_SHAPE), dtype="float32")
    return _batches(images, rng.integers(0, NUM_CLASSES, size=len(images)), batch_size)


def _batches(inputs: np.ndarray, targets: np.ndarray, batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(batch_size).prefetch(tf.data.AUTOTUNE)


BUILD_MODEL = {"host_bound": host_bound_model, "cnn": cnn_model}
BUILD_DATA = {"host_bound": host_bound_data, "cnn": cnn_data}
