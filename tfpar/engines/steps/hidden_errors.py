"""The error of an operation, where TensorFlow reports only what it cancelled.

    device 0   F0 F1 ──► value for device 1          reported: RecvAsync is cancelled
    device 1      F0 with a label out of range       hidden: Received a label value of 77 …

A stage is a function that its step calls. In TensorFlow 2.21 an operation that fails inside of it cancels the step
before the function returns its error, and the step keeps the first error of each device
(`ExecutorState::NodeDone` in tensorflow/core/common_runtime/executor.cc). The failed step then runs once more, one
operation after another, without an update.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar._compat.variables import tf_variables
from tfpar.engines.steps.batches_ahead import HOST

# What an operation of a model raises; other errors come from the way in which it is run.
_CAUSES = (
    tf.errors.InvalidArgumentError, tf.errors.UnknownError, tf.errors.ResourceExhaustedError, tf.errors.OutOfRangeError,
    tf.errors.NotFoundError, tf.errors.InternalError, tf.errors.UnimplementedError,
)  # fmt: skip
_FUNCTIONS = re.compile(r"\{\{function_node [^}]*\}\} ?")  # names that TensorFlow makes


class CurrentElement:
    """The element of the dataset whose step runs, to read after a failure.

    It is an optional in a variable on the host, so that a step copies no tensor of it.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(HOST):
            self._handle = tf_variables.anonymous_handle(tf.variant)

    def put(self, upcoming: tf.experimental.Optional) -> tf.Operation:
        """Store the element of a step that begins.

        Args:
            upcoming: The element, on the host.

        Returns:
            The operation that stores it.
        """
        (optional,) = tf.nest.flatten(upcoming, expand_composites=True)
        with tf.device(HOST):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=optional)

    def clear(self) -> None:
        """Free the element."""
        with tf.device(HOST):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.raw_ops.OptionalNone())

    def get(self, like: tf.experimental.Optional) -> Any:
        """Return the element that was stored last.

        Args:
            like: An element of the same dataset.
        """
        with tf.device(HOST):
            stored = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            return tf.nest.pack_sequence_as(like, [stored], expand_composites=True).get_value()


@contextlib.contextmanager
def revealed(run_again: Callable[[], None]) -> Iterator[None]:
    """Replace an error about a cancelled operation by that of the operation that failed, if it fails again.

    Args:
        run_again: Runs the failed step again, one operation after another.
    """
    try:
        yield
    except tf.errors.CancelledError as error:
        cause = _error_of(run_again)
        raise (error if cause is None else cause) from None


def _error_of(run_again: Callable[[], None]) -> tf.errors.OpError | None:
    try:
        run_again()
    except _CAUSES as error:
        return type(error)(error.node_def, error.op, _FUNCTIONS.sub("", error.message))
    except Exception:  # an error of this run alone
        return None
    return None
