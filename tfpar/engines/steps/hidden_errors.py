"""The error of a failed operation where TensorFlow reports only the operations it cancelled.

    device 0   F0 F1 ──► value for device 1          reported: RecvAsync is cancelled
    device 1      F0 with a label out of range       hidden: Received a label value of 77 …

A stage is a function called by its step. In TensorFlow 2.21, an operation that fails inside the function cancels the
step before the function returns its error, and the step keeps the first error of each device
(`ExecutorState::NodeDone` in tensorflow/core/common_runtime/executor.cc). The failed step is therefore repeated, one
operation after another and without an update.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar._compat.variables import tf_variables
from tfpar.engines.steps.batches_ahead import HOST

# Errors of a model's operations; other errors are due to the way they run.
_CAUSES = (
    tf.errors.InvalidArgumentError, tf.errors.UnknownError, tf.errors.ResourceExhaustedError, tf.errors.OutOfRangeError,
    tf.errors.NotFoundError, tf.errors.InternalError, tf.errors.UnimplementedError,
)  # fmt: skip
_FUNCTIONS = re.compile(r"\{\{function_node [^}]*\}\} ?")  # added by TensorFlow


class CurrentElement:
    """The element of the dataset whose step is running, kept to repeat the step after a failure.

    It is an optional in a variable on the host, so no tensor is copied.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(HOST):
            self._handle = tf_variables.anonymous_handle(tf.variant)

    def put(self, upcoming: tf.experimental.Optional) -> tf.Operation:
        """Store the element of the next step, an optional on the host; return the operation that stores it."""
        (optional,) = tf.nest.flatten(upcoming, expand_composites=True)
        with tf.device(HOST):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=optional)

    def clear(self) -> None:
        """Free the element."""
        with tf.device(HOST):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.raw_ops.OptionalNone())

    def get(self, like: tf.experimental.Optional) -> Any:
        """Return the element stored last.

        Args:
            like: An optional of the same structure.
        """
        with tf.device(HOST):
            stored = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.variant)
            return tf.nest.pack_sequence_as(like, [stored], expand_composites=True).get_value()


@contextlib.contextmanager
def revealed(run_again: Callable[[], None]) -> Iterator[None]:
    """Replace an error about a cancelled operation by the error of the operation that failed.

    Args:
        run_again: Repeats the failed step, one operation after another, to meet the error again.
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
    except Exception:  # an error of the repetition alone
        return None
    return None
