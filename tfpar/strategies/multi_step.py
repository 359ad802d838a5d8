"""The inner loop: many steps in one call of one compiled function, and how many.

    outer loop (Python)   │ call, 240 steps          │ callbacks │ call, 251 steps          │ callbacks │ …
    inner loop (compiled) │ step, step, step, … step │           │ step, step, step, … step │           │

Python costs a fraction of a millisecond a call, TensorFlow's own loop a few microseconds a step. So the outer loop
asks for as many steps as fit into about a tenth of a second, which keeps progress bars and Ctrl-C prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat import tf_custom_gradient

SECONDS_PER_CALL = 0.1


class CallResult(NamedTuple):
    """What one call of a compiled loop gives back."""

    upcoming: tf.experimental.Optional
    num_steps: tf.Tensor
    finite: tf.Tensor
    num_examples: tf.Tensor
    data_wait_seconds: tf.Tensor
    logs: dict[str, tf.Tensor]


def compile_loop(
    step: Callable[[Any], tf.Tensor],
    logs: Callable[[], dict[str, tf.Tensor]],
    num_examples: Callable[[Any], tf.Tensor],
    has_more: Callable[[tf.experimental.Optional], tf.Tensor],
    *,
    jit_compile: bool = False,
    run_eagerly: bool = False,
) -> Callable[..., CallResult]:
    """Compile a loop of steps over an iterator.

    The next batch travels through the loop as an optional value, so the end of the data is a plain loop condition:
    no exception leaves the loop, no step runs under a conditional, and the caller sees whether anything is left.
    Unless told otherwise, the loop also stops after a step whose loss is not finite, so that the step can be named.

    Args:
        step: Runs on one batch and returns the loss, a scalar.
        logs: Reads the metrics; called once, after the last step.
        num_examples: Returns the number of examples of a batch.
        has_more: Says whether there is an upcoming batch to train on.
        jit_compile: Compile the step with XLA.
        run_eagerly: Run Python step by step, for debugging.

    Returns:
        A function of the iterator, the upcoming batch (an optional), the largest number of steps to run, and whether
        to stop at a loss that is not finite (True if left out).
    """

    def loop(iterator: tf.data.Iterator, upcoming: Any, num_steps: tf.Tensor, stops: tf.Tensor) -> CallResult:
        def more(going: Any, done: Any, *others: Any) -> tf.Tensor:
            return going & (done < num_steps)

        def one(going: Any, done: Any, finite: Any, examples: Any, waited: Any, upcoming: Any) -> tuple[Any, ...]:
            # The next batch is fetched while the step runs; what is left to wait for after it is the data's share.
            batch = upcoming.get_value()
            loss = step(batch)
            following = iterator.get_next_as_optional()
            with tf.control_dependencies([loss]):
                step_ended = tf.timestamp()
            with tf.control_dependencies([following.has_value()]):
                data_arrived = tf.timestamp()
            waited += tf.maximum(data_arrived - step_ended, 0.0)
            finite = tf.math.is_finite(loss)
            goes_on = finite | ~stops
            return has_more(following) & goes_on, done + 1, finite, examples + num_examples(batch), waited, following

        zero = tf.constant(0, tf.int64)
        begin = (has_more(upcoming), tf.constant(0), tf.constant(True), zero, tf.constant(0.0, tf.float64), upcoming)
        _, done, finite, examples, waited, upcoming = tf.while_loop(more, one, begin)
        return CallResult(upcoming, done, finite, examples, waited, logs())

    tf_custom_gradient.release_with_graphs()
    # The step is a function of its own, so that its end is the end of every update in it.
    if not run_eagerly:
        step = tf.function(alone(step), autograph=False, reduce_retracing=True, jit_compile=jit_compile or None)
    run = loop if run_eagerly else tf.function(alone(loop), autograph=False, reduce_retracing=True)

    def call(iterator: Any, upcoming: Any, num_steps: int, stop_at_nonfinite: bool = True) -> CallResult:
        result: CallResult = run(iterator, upcoming, tf.constant(num_steps), tf.constant(stop_at_nonfinite))
        return result

    return call


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that TensorFlow counts by itself.

    TensorFlow 2.21 warns of a function that is traced often, and takes all functions with the same code for one: those
    of every model that is trained in a process (`_get_key_for_call_stats` in `polymorphic_function.py`).
    """
    return functools.partial(function)


class StepsPerCall:
    """Choose how many steps the next call runs, so that a call takes about a given time.

    The first call compiles and is not counted. The number grows at most tenfold from call to call, since a first
    short measurement can be far off. It changes how often Python looks up, never the result; only moving statistics,
    which replicas average after every call, may differ in their last bits.

    Args:
        fixed: A number of steps to keep to; None to choose by time.
        seconds: How long a call should take.

    Example:
        >>> steps = StepsPerCall()
        >>> steps.next()
        1
        >>> steps.record(num_steps=1, seconds=2.0)  # compilation
        >>> steps.record(num_steps=1, seconds=0.001)
        >>> steps.next()
        10
    """

    def __init__(self, fixed: int | None = None, seconds: float = SECONDS_PER_CALL) -> None:
        self._fixed = fixed
        self._seconds = seconds
        self._num_steps = 1
        self._compiled = False

    def next(self) -> int:
        """Return the number of steps for the next call."""
        return self._fixed or self._num_steps

    def record(self, num_steps: int, seconds: float) -> None:
        """Take in how long a call of `num_steps` steps took."""
        if not self._compiled:
            self._compiled = True
            return
        wanted = int(self._seconds * num_steps / max(seconds, 1e-9))
        self._num_steps = max(1, min(wanted, 10 * self._num_steps))
