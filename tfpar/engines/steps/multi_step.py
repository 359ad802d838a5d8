"""The inner loop: many steps per call of a compiled function.

    outer loop (Python)   │ call, 240 steps          │ callbacks │ call, 251 steps          │ callbacks │ …
    inner loop (compiled) │ step, step, step, … step │           │ step, step, step, … step │           │

A call from Python takes a fraction of a millisecond, an iteration of TensorFlow's loop a few microseconds. A call runs
as many steps as take about a tenth of a second, so that progress bars and Ctrl-C stay prompt.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfpar import host_sizes, process_lock
from tfpar._compat import tf_determinism
from tfpar._compat.graphs import tf_custom_gradient, tf_function, tf_sums
from tfpar.engines.steps.batches_ahead import HOST, BatchesAhead, StepBatch
from tfpar.engines.steps.hidden_errors import CurrentElement, revealed

SECONDS_PER_CALL = 0.1


class CallResult(NamedTuple):
    """The result of a call of the inner loop. Its numbers may be of Python, NumPy or TensorFlow.

    Args:
        upcoming: The next element, an optional.
        num_steps: Number of steps that ran.
        num_finite: Number of steps before the first whose loss is not finite; `num_steps` if there is none.
        num_examples: Number of examples in all steps.
        data_wait_seconds: Time that the steps waited for data; NaN with deterministic operations.
        digests: Digests of the global batches, `[num_steps, numbers]`; None without digests.
        logs: Metrics after the last step.
    """

    upcoming: tf.experimental.Optional
    num_steps: Any
    num_finite: Any
    num_examples: Any
    data_wait_seconds: Any
    digests: Any
    logs: dict[str, tf.Tensor]


class LoopParts(NamedTuple):
    """The functions of an inner loop.

    Args:
        step: `(batch) -> loss`, from the batch of a step to a scalar.
        logs: Returns the metrics; called once, after the last step.
        num_examples: `(element) -> size` of the global batch.
        has_more: `(optional) -> bool`, whether another step follows.
        step_batch: `(element) -> StepBatch`, with the devices that read the batch.
        digest: `(element) -> digest` of the global batch, or `(spec) -> spec` of the digest; None without digests.
        device: Device of the call of the step, for which XLA compiles it; None for TensorFlow's default.
        jit_compile: Whether XLA compiles the step.
        run_again: Repeats the step of an element, one operation after another and without an update, to find an error
            that TensorFlow hides; None if TensorFlow reports errors.
    """

    step: Callable[[Any], tf.Tensor]
    logs: Callable[[], dict[str, tf.Tensor]]
    num_examples: Callable[[Any], tf.Tensor]
    has_more: Callable[[tf.experimental.Optional], tf.Tensor]
    step_batch: Callable[[Any], StepBatch]
    digest: Callable[[Any], Any] = lambda element: None
    device: str | None = None
    jit_compile: bool = False
    run_again: Callable[[Any], None] | None = None


class StepLoop(Protocol):
    """An inner loop: `CompiledLoop` or `launched_steps.LaunchedSteps`."""

    def __call__(
        self, iterator: Any, upcoming: tf.experimental.Optional, num_steps: int, stop_at_nonfinite: bool = False
    ) -> CallResult:
        """Run at most `num_steps` steps, starting with the upcoming element."""


class CompiledLoop:
    """A compiled loop of steps, with the upcoming batch on the devices of the step.

    Args:
        run: Runs the steps, with the arguments of `__call__`; a `tf.function` unless `fill` is None.
        fill: Copies the tensors of the upcoming element to devices; None to leave them on the host.
        current: The element of the running step, if TensorFlow hides errors; else None.
        run_again: Repeats the step of an element to find a hidden error.
    """

    def __init__(
        self,
        run: Any,
        fill: Callable[[tf.experimental.Optional], None] | None,
        current: CurrentElement | None = None,
        run_again: Callable[[Any], None] | None = None,
    ) -> None:
        self.run, self._fill, self._current, self._run_again = run, fill, current, run_again
        self._upcoming: tf.experimental.Optional = None

    def __call__(
        self, iterator: Any, upcoming: tf.experimental.Optional, num_steps: int, stop_at_nonfinite: bool = False
    ) -> CallResult:
        """Run steps.

        The last call has already copied the element that it returned. Any other element, such as the first of an epoch,
        is copied now.

        Args:
            iterator: Iterator over elements.
            upcoming: The next element, an optional.
            num_steps: Most steps to run.
            stop_at_nonfinite: Whether to stop after a step whose loss is not finite. Each choice is compiled
                separately.
        """
        arguments = iterator, upcoming, tf.constant(num_steps), stop_at_nonfinite
        if self._fill is not None and upcoming is not self._upcoming and upcoming.has_value():
            self._fill(upcoming)
        self._upcoming = None  # stays None if the steps raise an error
        # Tensors that request no device, such as the upcoming element in the result, stay on the device of the call.
        on_host = contextlib.nullcontext() if self._fill is None else tf.device(HOST)
        with self._revealed(upcoming), on_host:
            if self._fill is not None:
                with tf_function.repeatable_names():
                    self.run.get_concrete_function(*arguments)  # traces while this thread has the process lock
            with contextlib.nullcontext() if self._fill is None else process_lock.paused():
                result: CallResult = self.run(*arguments)
        if self._current is not None:
            self._current.clear()
        self._upcoming = result.upcoming
        return result

    def _revealed(self, upcoming: tf.experimental.Optional) -> contextlib.AbstractContextManager[None]:
        current, run_again = self._current, self._run_again
        if current is None or run_again is None:
            return contextlib.nullcontext()
        return revealed(lambda: run_again(current.get(like=upcoming)))


def compile_loop(parts: LoopParts, *, run_eagerly: bool = False) -> CompiledLoop:
    """Compile an inner loop over an iterator.

    The next element is an optional in the loop state, so the end of the data is a plain loop condition: the loop raises
    no exception, no step is conditional, and the caller receives the next element. Its tensors are copied to the
    devices of the step while the previous step runs.

    The loop runs on the host, as TensorFlow would otherwise place its state on the first GPU and copy every batch there
    and back. The loop condition depends on no device, so that the host fetches no loss between two steps unless the
    loop must stop at a loss that is not finite.

    On GPUs, the host launches a step only after the previous one has ended: the values of the loop order the updates of
    a step before the reads of the next. TensorFlow 2.21 gives each value that the body returns a control dependency on
    all operations with side effects in it (`auto_control_deps.py`, `__exit__`). From a GPU to the host it is an empty
    message, which arrives after all operations launched on the GPU (`gpu_util.cc`).

    Args:
        parts: The functions of the loop.
        run_eagerly: Whether to run Python step by step for debugging; no batch is copied ahead.
    """
    step, logs, num_examples, has_more, step_batch, digest, device, jit_compile, run_again = parts

    def on(device: str | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if run_eagerly else tf.device(device)

    ahead = BatchesAhead(step_batch)
    current = None if run_again is None else CurrentElement()

    def loop(iterator: tf.data.Iterator, upcoming: Any, num_steps: tf.Tensor, stops: bool) -> CallResult:
        def more(left: Any, *others: Any) -> tf.Tensor:
            return left > 0

        def body(
            left: Any, done: Any, num_finite: Any, examples: Any, waited: Any, noted: Any, upcoming: Any
        ) -> tuple[Any, ...]:
            # The next batch is fetched while the step runs; only the time after the step counts as data wait.
            upcoming = _here(upcoming)
            with tf.control_dependencies([] if current is None else [current.put(upcoming)]):
                element = upcoming.get_value()
            batch = step_batch(element).batch if run_eagerly else ahead.receive(element)
            with on(device):
                loss = step(batch)
            following = _here(iterator.get_next_as_optional())
            if not run_eagerly:
                ahead.refill(following)
            waited += _seconds_of_waiting(loss, following)
            noted = [digests.write(done, digest(element)) for digests in noted]
            num_finite += tf.cast(tf.math.is_finite(loss) & (num_finite == done), tf.int32)
            done += 1
            continues = has_more(following) & (num_finite == done) if stops else has_more(following)
            left = tf.where(continues, num_steps - done, 0)
            return left, done, num_finite, examples + num_examples(element), waited, noted, following

        with on(HOST):
            # TensorFlow keeps each value of the loop on the device of its first one.
            upcoming, num_steps = _here(upcoming), tf.identity(num_steps)
            left = tf.where(has_more(upcoming), num_steps, 0)
            zeros = tf.constant(0), tf.constant(0), tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)
            noted = _arrays(digest(upcoming.element_spec), num_steps)
            state = tf.while_loop(more, body, (left, *zeros, noted, upcoming))
            _, done, num_finite, examples, waited, noted, upcoming = state
            digests = noted[0].stack()[:done] if noted else None
        return CallResult(upcoming, done, num_finite, examples, waited, digests, logs())

    def fill(upcoming: Any) -> None:
        with tf.device(HOST):
            ahead.fill(_here(upcoming))

    tf_custom_gradient.release_with_graphs()
    if run_eagerly:
        return CompiledLoop(loop, None)
    # As a separate function, the step ends with the last of its updates.
    step = tf.function(
        alone_on_devices(step, jit_compile),
        autograph=False,
        reduce_retracing=True,
        jit_compile=jit_compile or None,
    )
    run, first = (tf.function(alone(part), autograph=False, reduce_retracing=True) for part in (loop, fill))
    return CompiledLoop(run, first, current, run_again)


def _arrays(digest: tf.TypeSpec | None, num_steps: tf.Tensor) -> list[tf.TensorArray]:
    """Return an array for the digests of the steps; empty without digests."""
    if not isinstance(digest, tf.TensorSpec):
        return []
    return [tf.TensorArray(digest.dtype, num_steps, element_shape=digest.shape)]


def _seconds_of_waiting(loss: tf.Tensor, following: Any) -> tf.Tensor:
    """Return the time from the end of a step to the arrival of the next batch; NaN with deterministic operations."""
    if tf_determinism.is_enabled():
        return tf.constant(float("nan"), tf.float64)
    with tf.control_dependencies([loss]):
        step_ended = tf.timestamp()
    with tf.control_dependencies([following.has_value()]):
        data_arrived = tf.timestamp()
    return tf.maximum(data_arrived - step_ended, 0.0)


def _here(upcoming: Any) -> Any:
    """Return an optional on the device of the scope, as TensorFlow reads optionals where their tensors are."""
    return tf.nest.map_structure(tf.identity, upcoming, expand_composites=True)


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds tensors in the order of its code, and whose traces TensorFlow counts separately.

    TensorFlow 2.21 warns about functions that are traced often, and would count the functions of all models together,
    as they have the same code (`_get_key_for_call_stats` in `polymorphic_function.py`).
    """

    @functools.wraps(function)
    def in_order(*arguments: Any) -> Any:
        with tf_sums.in_order():
            return function(*arguments)

    return functools.partial(in_order)


def alone_on_devices(step: Callable[[Any], Any], jit_compile: bool) -> Callable[[Any], Any]:
    """Apply `alone` to a step, with sizes on the host unless XLA compiles it."""

    def run(batch: Any) -> Any:
        with host_sizes.sizes_on_host():
            return step(batch)

    return alone(step if jit_compile else run)


class StepsPerCall:
    """Chooses the number of steps of the next call for a target duration.

    The first call compiles and is not counted. The number grows at most tenfold per call, since a short measurement can
    be far off. It does not change the result, except for the last bits of moving statistics, which are averaged over
    the replicas after every call.

    Args:
        fixed: A fixed number of steps; None to choose by time.
        seconds: Target duration of a call.

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
        """Record the duration of a call of `num_steps` steps."""
        if not self._compiled:
            self._compiled = True
            return
        fitting = int(self._seconds * num_steps / max(seconds, 1e-9))
        self._num_steps = max(1, min(fitting, 10 * self._num_steps))
