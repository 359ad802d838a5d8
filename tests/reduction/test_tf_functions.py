"""Functions that users decorate with `tf.function`, inside of models."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.eager import context

from tests.support import parity_cases, small
from tfpar._compat import tf_function

pytestmark = pytest.mark.usefixtures("logical_cpus")


class InFunction(layers.Layer):
    """Its `call` is a `tf.function`, which TensorFlow traces once for a device."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    @tf.function
    def call(self, inputs: Any) -> Any:
        return ops.tanh(inputs @ self.kernel)


@pytest.mark.few(1)
@small.each_splitting_strategy
def test_a_layer_in_a_tf_function_trains_as_on_one_device(strategy: str) -> None:
    """Traced in a trial, its weights were constants in every later step of a pipeline."""
    build = parity_cases.classifier(lambda: keras.optimizers.SGD(0.1), layers=lambda: [InFunction()])
    small.assert_trains_as_one_device(build, small.data, small.SPLITTING_STRATEGIES[strategy], epochs=1)


def test_an_error_of_some_kinds_is_raised_without_a_look_at_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of a worker that look may end the process."""
    looked: list[str] = []
    monkeypatch.setattr(context.Context, "get_graph_debug_info", lambda self, name: looked.append(name))

    @tf.function
    def fails(number: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_equal(number, 1)
        return number

    kinds = (tf.errors.InvalidArgumentError,)
    with tf_function.unexplained_errors(kinds), pytest.raises(kinds, match="assertion failed"):
        fails(tf.constant(2))
    assert not looked
    with pytest.raises(Exception, match=r"."):
        fails(tf.constant(2))
    assert looked
