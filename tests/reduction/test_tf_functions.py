"""Errors of operations inside of a `tf.function`."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfpar._compat.graphs import tf_function

pytestmark = pytest.mark.usefixtures("logical_cpus")


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
