"""The models that are timed, the same for every library that speaks Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.examples import ARRAYS, IMAGE_SHAPE, NUM_CLASSES, NUM_FEATURES, WIDTH


def host_bound_model(steps_per_execution: int = 1, library: Any = keras) -> Any:
    """Return a model so small that a step is all overhead: `[batch, 20]` -> 32 -> `[batch, 1]`.

    Args:
        steps_per_execution: For `compile`.
        library: Keras 3, or legacy tf_keras.
    """
    layers = library.layers
    model = library.Sequential([library.Input((NUM_FEATURES,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
    model.compile(library.optimizers.SGD(0.01), "mse", steps_per_execution=steps_per_execution)
    return model


def cnn_model(steps_per_execution: int = 1, library: Any = keras) -> Any:
    """Return a small image classifier that spends its time in convolutions: `[batch, 28, 28, 1]` -> `[batch, 10]`.

    Args:
        steps_per_execution: For `compile`.
        library: Keras 3, or legacy tf_keras.
    """
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
    model.compile(
        library.optimizers.SGD(0.01),
        library.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def dense_model(steps_per_execution: int = 1, library: Any = keras) -> Any:
    """Return a model with far more weights than work: five layers `[batch, 2048]` -> `[batch, 2048]`, 21 million.

    Args:
        steps_per_execution: For `compile`.
        library: Keras 3, or legacy tf_keras.
    """
    layers = library.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    model = library.Sequential([library.Input((WIDTH,)), *hidden, layers.Dense(WIDTH)])
    model.compile(library.optimizers.SGD(0.01), "mse", steps_per_execution=steps_per_execution)
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


BUILD_MODEL = {"host_bound": host_bound_model, "cnn": cnn_model, "dense": dense_model}
