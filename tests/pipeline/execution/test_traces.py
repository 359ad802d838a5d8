"""A pipeline's step is traced once for each kind of batch, and a later kind is another trace."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_FEATURES = 3


class CountingSGD(keras.optimizers.SGD):
    """Counts how often Python calls it: once for each trace of a step."""

    num_traces = 0

    def apply(self, *args: Any, **kwargs: Any) -> None:
        self.num_traces += 1
        super().apply(*args, **kwargs)


def means_of_sequences() -> keras.Model:
    """A model for sequences of any length, on whose layers nothing draws at random."""
    model = keras.Sequential(
        [
            keras.Input((None, NUM_FEATURES)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(CountingSGD(0.1), "mse")
    return model


def sequences(length: int) -> tf.data.Dataset:
    generator = np.random.default_rng(length)
    features = generator.normal(size=(8, length, NUM_FEATURES)).astype(keras.config.floatx())
    targets = generator.normal(size=(8, 1)).astype(keras.config.floatx())
    return tf.data.Dataset.from_tensor_slices((features, targets)).batch(4, drop_remainder=True)


def test_a_step_is_traced_once_for_each_length_of_sequences() -> None:
    """The first trace of a step compiles the stages; no variable may be created in it, or TensorFlow traces again."""
    keras.utils.clear_session()  # other tests may have drawn from Keras' global generator, which then exists
    histories = []
    for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(2, 2)):
        keras.utils.set_random_seed(0)
        trainer = tfpar.Trainer(means_of_sequences, strategy)
        losses = []
        for num_traces, length in enumerate((5, 7), 1):
            losses += trainer.fit(sequences(length), epochs=2, verbose=0).history["loss"]
            assert trainer.model.optimizer.num_traces == num_traces
        histories.append(losses)
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)
