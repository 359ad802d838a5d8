"""Model functions for the doctor, which imports them in other processes."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def classifier() -> keras.Model:
    model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(11, 4), layers.Flatten()])
    model.add(layers.Dense(3))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
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
