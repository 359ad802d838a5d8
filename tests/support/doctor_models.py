"""Model functions for the doctor, which imports them in other processes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar
from tfpar import config


def classifier() -> keras.Model:
    model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(11, 4), layers.Flatten()])
    model.add(layers.Dense(3))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Sampling(layers.Layer):
    """Draws with a seed generator of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=self.seed_generator)


def random_and_normalized() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.Dropout(0.5, name="drops")])
    for layer in (Sampling(name="samples"), layers.BatchNormalization(name="normalizes"), layers.Dense(2)):
        model.add(layer)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def augmented() -> keras.Model:
    model = keras.Sequential([keras.Input((4, 4, 1)), layers.RandomRotation(0.1, name="turns"), layers.Flatten()])
    model.add(layers.Dense(2))
    model.compile("sgd", "mse")
    return model


class Unique(layers.Layer):
    """Uses an operation without a kernel for GPUs."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        found = tf.raw_ops.UniqueV2(x=tf.reshape(inputs, [-1]), axis=[0])[0]
        return inputs + 0.0 * tf.reduce_sum(tf.stop_gradient(found))


def on_the_host() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Unique(name="users"), layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


class Shuffled(tfpar.Trainer):
    """Trains on a dataset that is shuffled with a seed, with weights of no seed."""

    reads = ("seed",)

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        rows = tf.data.Dataset.from_tensor_slices((np.eye(40, 6, dtype="float32"), np.arange(40.0)[:, None]))
        self.train_data, self.validation_data = rows.shuffle(40, seed=run.seed).batch(8), None
        self.num_train_examples = 40
        super().__init__(self.build_model, strategy)

    def build_model(self) -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("adam", "mse")
        return model


def raising() -> keras.Model:
    return {}["width"]  # the line that the doctor names


class Raising(layers.Layer):
    """Fails in its call, which Keras reports in bold."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        raise ValueError("no width")  # the line that the doctor names


def raising_layer() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Raising()])


def exiting() -> keras.Model:
    raise SystemExit(2)  # the line that the doctor names


def not_compiled() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def without_shapes() -> keras.Model:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.dense(inputs)

    model = Subclassed()
    model.compile("sgd", "mse")
    return model


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((np.ones((4, 3), "float32"), np.ones((4, 2), "float32")))


def line_of(text: str) -> int:
    """Return the number of the line of this file that contains a text."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)
