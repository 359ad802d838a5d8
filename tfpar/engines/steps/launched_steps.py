"""The inner loop on GPUs: Python launches each step while the GPU still computes the step before.

    host    launch k, fetch k+2 │ launch k+1, fetch k+3 │ …            │ read the logs
    GPU        step k-1 ████████████  step k ████████████  step k+1 ██████

The loop of `multi_step` launches a step after the previous one has ended, which is fast if the host computes the steps,
but leaves a GPU idle meanwhile. Here the host reads no result of a device between two steps. The device counts the
steps with finite losses, and the host reads the count with the metrics at the end of a call.

A step is traced for the sizes of the first batch, and once more for all other sizes. With unknown sizes, TensorFlow
computes shapes in the step and copies them to the GPU, and each copy waits for all operations before it: 52 times in a
step of a transformer of 12 blocks.

A step is a function without results. TensorFlow 2.21 gives each result a control dependency on all operations with side
effects (`auto_control_deps.py`, `__exit__`). A call with a result on the host, or on another GPU than the last update,
would return only after all devices have finished (`gpu_util.cc`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar import host_sizes, process_lock, xla_choice
from tfpar._compat.graphs import tf_custom_gradient, tf_function, tf_graph, tf_layout
from tfpar._compat.variables import tf_variables
from tfpar.engines.steps.batches_ahead import HOST, BatchesAhead
from tfpar.engines.steps.hidden_errors import revealed
from tfpar.engines.steps.multi_step import CallResult, LoopParts, alone, alone_on_devices


def suits(devices: Sequence[str]) -> bool:
    """Return True if steps on the devices are launched one by one, as all devices are GPUs."""
    return all(map(host_sizes.is_gpu, devices))


class LaunchedSteps:
    """A loop of steps that are launched one by one, with the upcoming batch on the devices of the step.

    It is called like `multi_step.CompiledLoop` and gives the same results. Its data wait is that of the host, while
    devices may still compute earlier steps.

    Args:
        parts: The functions of the loop; operations that request no device run on `parts.device`, or on the host.
        fixes_sizes: Whether a step is traced for the sizes of the first batch too, not only for unknown sizes.
        fallback: Returns the way back from XLA if it was chosen automatically for the model; None otherwise.
    """

    def __init__(
        self,
        parts: LoopParts,
        *,
        fixes_sizes: bool = True,
        fallback: Callable[[], xla_choice.Fallback | None] = lambda: None,
    ) -> None:
        self._parts, self._fallback = parts, fallback
        self._ahead, self._finite = BatchesAhead(parts.step_batch), _FiniteSteps()
        self._upcoming: tf.experimental.Optional = None
        self._way_back: xla_choice.Fallback | None = None  # until the first step has run
        self._has_run = False
        self._error: Exception | None = None  # the reason to leave XLA
        self._jit_compile = parts.jit_compile
        self._usual_sizes: Any = None if fixes_sizes else ()
        self._functions: dict[bool, Any] = {}

        def fill(upcoming: Any) -> None:
            with tf.device(HOST):
                self._ahead.fill(upcoming)

        def on_host(upcoming: Any, following: Any) -> tuple[Any, ...]:
            with tf.device(HOST):
                element = upcoming.get_value()
                return parts.num_examples(element), parts.digest(element), parts.has_more(following)

        tf_custom_gradient.release_with_graphs()
        self._fill, self._on_host, self._has_more, self._logs = (
            tf.function(alone(function), autograph=False, reduce_retracing=True)
            for function in (fill, on_host, parts.has_more, parts.logs)
        )

    def launch(self, upcoming: tf.experimental.Optional) -> Any:
        """Return the traced function `(upcoming, following)` that launches the step of an element."""
        sizes = [tensor.shape for tensor in _tensors(upcoming.get_value())]
        self._usual_sizes = sizes if self._usual_sizes is None else self._usual_sizes
        is_usual = sizes == self._usual_sizes
        if is_usual not in self._functions:
            function = self._compiled(sizes if is_usual else None)
            with process_lock.ProcessLock(), tf_function.repeatable_names():
                function.get_concrete_function(upcoming, upcoming)
            self._functions[is_usual] = function
        return self._functions[is_usual]

    def _compiled(self, sizes: Sequence[Any] | None) -> Any:
        step = alone_on_devices(self._parts.step, self._jit_compile)
        if self._jit_compile:
            step = tf.function(step, autograph=False, reduce_retracing=True, jit_compile=True)

        def launch(upcoming: Any, following: Any) -> None:
            with tf.device(HOST):
                element = upcoming.get_value()
                for tensor, shape in zip(_tensors(element), sizes or (), strict=sizes is not None):
                    tensor.set_shape(shape)
                batch = self._ahead.receive(element)
                with tf.device(self._parts.device):
                    self._finite.note(step(batch))
                self._ahead.refill(following)
            tf_graph.leave_checks_unordered()

        return tf.function(alone(launch), autograph=False, reduce_retracing=True)

    def __call__(
        self, iterator: Any, upcoming: tf.experimental.Optional, num_steps: int, stop_at_nonfinite: bool = False
    ) -> CallResult:
        """Run steps.

        Args:
            iterator: Iterator over elements.
            upcoming: The next element, an optional.
            num_steps: Most steps to run.
            stop_at_nonfinite: Whether to stop after a step whose loss is not finite, which waits for each step.
        """
        with tf.device(HOST), tf_layout.best_for_gpus():
            self._prepare(upcoming)
            with process_lock.paused():
                result = self._run(iterator, upcoming, num_steps, stop_at_nonfinite)
        self._upcoming = result.upcoming
        return result

    def _prepare(self, upcoming: tf.experimental.Optional) -> None:
        last, self._upcoming = self._upcoming, None  # stays None if the steps raise an error
        if upcoming is not last and upcoming.has_value():
            self._fill(upcoming)
        if not self._has_run:
            self._way_back = self._fallback()
        self._trace(upcoming)
        self._finite.reset()

    def _run(
        self, iterator: Any, upcoming: tf.experimental.Optional, num_steps: int, stop_at_nonfinite: bool
    ) -> CallResult:
        waited_seconds, records = 0.0, list[Any]()
        continues = num_steps > 0 and bool(self._has_more(upcoming))
        while continues:
            begin = time.perf_counter()
            following = iterator.get_next_as_optional()
            waited_seconds += time.perf_counter() - begin
            self._launch(upcoming, following)
            records.append(self._on_host(upcoming, following))
            upcoming = following
            continues = len(records) < num_steps and bool(records[-1][2])
            continues = continues and not (stop_at_nonfinite and self._finite.count() < len(records))
        num_finite, logs = self._finite.count(), self._logs()
        num_examples = sum(int(number) for number, _, _ in records)
        digests = np.stack([digest for _, digest, _ in records]) if records and records[0][1] is not None else None
        return CallResult(upcoming, len(records), num_finite, num_examples, waited_seconds, digests, logs)

    def _trace(self, upcoming: tf.experimental.Optional) -> None:
        """Trace the functions of a call, while this thread has the process lock."""
        try:
            self.launch(upcoming)
        except xla_choice.NotCompiledError as error:
            self._leave_xla(upcoming, error)
        self._on_host.get_concrete_function(upcoming, upcoming)
        self._has_more.get_concrete_function(upcoming)
        self._logs.get_concrete_function()  # after a step is traced, which may create some of them

    def _launch(self, upcoming: tf.experimental.Optional, following: tf.experimental.Optional) -> None:
        try:
            with self._revealed(upcoming):
                self.launch(upcoming)(upcoming, following)
        except tf.errors.OpError as error:
            if self._error is not None:  # without XLA
                raise
            self._leave_xla(upcoming, error)
            self._fill(upcoming)
            self._finite.reset()
            with self._revealed(upcoming):
                self.launch(upcoming)(upcoming, following)
        if self._way_back is not None and self._error is not None:
            self._way_back.explain(self._error)
        self._has_run, self._way_back = True, None

    def _leave_xla(self, upcoming: tf.experimental.Optional, error: Exception) -> None:
        """Trace steps without XLA from now on; raise the error if a step has run or XLA was the user's choice."""
        if self._way_back is None:
            raise error
        self._way_back.leave_xla()
        self._error, self._jit_compile = error, False
        self._functions.clear()
        self.launch(upcoming)

    def _revealed(self, upcoming: tf.experimental.Optional) -> contextlib.AbstractContextManager[None]:
        run_again = self._parts.run_again
        return contextlib.nullcontext() if run_again is None else revealed(lambda: run_again(upcoming.get_value()))


def _tensors(element: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(element) if isinstance(leaf, tf.Tensor)]


class _FiniteSteps:
    """Counts the steps of a call before the first whose loss is not finite, on the device of the loss."""

    _state: tf.Tensor = None  # handle of a variable: 1 while all losses are finite, then 0; and the count

    def reset(self) -> None:
        """Start a call, after a step was traced."""
        with tf.device(self._state.device):
            self._assign(tf.constant([1.0, 0.0], tf.float64))

    def note(self, loss: tf.Tensor) -> None:
        """Count a step; traced."""
        if self._state is None:
            with tf.init_scope(), tf.device(loss.device):
                self._state = tf_variables.anonymous_handle(tf.float64, [2])
        with tf.device(self._state.device):
            still, number = tf.unstack(self._read(), 2)
            still *= tf.cast(tf.math.is_finite(loss), tf.float64)
            self._assign(tf.stack([still, number + still]))

    def count(self) -> int:
        """Wait for the steps, and return their count."""
        return int(self._read().numpy()[1])

    def _read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._state, dtype=tf.float64)

    def _assign(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._state, value=value)
