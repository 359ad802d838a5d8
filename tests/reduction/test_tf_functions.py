"""Functions that users decorate with `tf.function`, inside of models."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")


class InFunction(layers.Layer):
    """Its `call` is a `tf.function`, which TensorFlow traces once for a device."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    @tf.function
    def call(self, inputs: Any) -> Any:
        return ops.tanh(inputs @ self.kernel)


@small.each_splitting_strategy
def test_a_layer_in_a_tf_function_trains_as_on_one_device(strategy: str) -> None:
    """Traced in a trial, its weights were constants in every later step of a pipeline."""
    build = parity_cases.classifier(lambda: keras.optimizers.SGD(0.1), layers=lambda: [InFunction()])
    small.assert_trains_as_one_device(build, small.data, small.SPLITTING_STRATEGIES[strategy], epochs=1)
