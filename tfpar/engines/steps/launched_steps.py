"""The inner loop on GPUs: Python launches each step while the GPU still computes the step before.

    host    launch k, fetch k+2 │ launch k+1, fetch k+3 │ …            │ read the logs
    GPU        step k-1 ████████████  step k ████████████  step k+1 ██████

The loop of `multi_step` launches a step when the one before has ended: fast where the host computes the steps itself,
but a GPU is idle meanwhile. Here nothing that a device computes is read between two steps. Whether losses are finite is
counted on the device, and read with the metrics at the end of a call.

A step is traced for the sizes of the first batch, and once more for any other. With a size that is not known,
TensorFlow computes shapes in the step and copies them to the GPU, and such a copy waits for all operations before it:
52 times in a step of a transformer of 12 blocks.

A step is a function without results. TensorFlow 2.21 gives each result a control dependency on all operations with side
effects (`auto_control_deps.py`, `__exit__`), so that the call of a function with a result on the host, or on another
GPU than the last update, returns when all devices have computed (`gpu_util.cc`).
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
    """Return whether steps on some devices are launched one by one, because the host does not compute them.

    Args:
        devices: The devices of a strategy in this process.
    """
    return all(map(host_sizes.is_gpu, devices))


class LaunchedSteps:
    """Steps over an iterator, launched one by one, with the upcoming batch on the devices of the step.

    It is called as `multi_step.CompiledLoop` is, with the same results. The waiting for data that it counts is that of
    the host, during which devices may still compute earlier steps.

    Args:
        parts: What the steps run; operations of a step that request no device are on `parts.device`, or on the host.
        fixes_sizes: Whether a step is traced for the sizes of the first batch, and not for any size alone.
        fallback: Returns the way back from XLA where it was chosen for the model; None where it was not, or not yet.
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
        self._error: Exception | None = None  # for which XLA was left out
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
            tf.function(alone(one), autograph=False, reduce_retracing=True)
            for one in (fill, on_host, parts.has_more, parts.logs)
        )

    def launch(self, upcoming: tf.experimental.Optional) -> Any:
        """Return the function that launches the step of an element, traced, for it and the element after it."""
        sizes = _sizes(upcoming.get_value())
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
            iterator: The iterator over elements.
            upcoming: The next element.
            num_steps: The largest number of steps.
            stop_at_nonfinite: Whether to stop after a step with a loss that is not finite, which waits for each step.
        """
        with tf.device(HOST), tf_layout.best_for_gpus():
            self._prepare(upcoming)
            with process_lock.paused():
                result = self._run(iterator, upcoming, num_steps, stop_at_nonfinite)
        self._upcoming = result.upcoming
        return result

    def _prepare(self, upcoming: tf.experimental.Optional) -> None:
        last, self._upcoming = self._upcoming, None  # for good if the steps raise an error
        if upcoming is not last and upcoming.has_value():
            self._fill(upcoming)
        if not self._has_run:
            self._way_back = self._fallback()
        self._trace(upcoming)
        self._finite.reset()

    def _run(
        self, iterator: Any, upcoming: tf.experimental.Optional, num_steps: int, stop_at_nonfinite: bool
    ) -> CallResult:
        waited_seconds, facts = 0.0, list[Any]()
        continues = num_steps > 0 and bool(self._has_more(upcoming))
        while continues:
            begin = time.perf_counter()
            following = iterator.get_next_as_optional()
            waited_seconds += time.perf_counter() - begin
            self._launch(upcoming, following)
            facts.append(self._on_host(upcoming, following))
            upcoming = following
            continues = len(facts) < num_steps and bool(facts[-1][2])
            continues = continues and not (stop_at_nonfinite and self._finite.count() < len(facts))
        num_finite, logs = self._finite.count(), self._logs()
        num_examples = sum(int(number) for number, _, _ in facts)
        digests = np.stack([digest for _, digest, _ in facts]) if facts and facts[0][1] is not None else None
        return CallResult(upcoming, len(facts), num_finite, num_examples, waited_seconds, digests, logs)

    def _trace(self, upcoming: tf.experimental.Optional) -> None:
        """Trace the functions of a call, in the turn of this thread."""
        try:
            self.launch(upcoming)
        except xla_choice.NotCompiledError as error:
            self._leave_xla(upcoming, error)
        self._on_host.get_concrete_function(upcoming, upcoming)
        self._has_more.get_concrete_function(upcoming)
        self._logs.get_concrete_function()  # some of them are known once a step is traced

    def _launch(self, upcoming: tf.experimental.Optional, following: tf.experimental.Optional) -> None:
        try:
            with self._revealed(upcoming):
                self.launch(upcoming)(upcoming, following)
        except tf.errors.OpError as error:
            if self._error is not None:  # XLA is left out already
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
        """Trace steps without XLA from now on; raise the error where XLA was not chosen, or has compiled a step."""
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


def _sizes(element: Any) -> list[tf.TensorShape]:
    return [tensor.shape for tensor in _tensors(element)]


class _FiniteSteps:
    """Counts on the device of the loss the steps of a call before the first one whose loss is not finite."""

    _state: tf.Tensor = None  # handle of a variable: 1 while all losses were finite, then 0; the number of steps

    def reset(self) -> None:
        """Begin a call, once a step is traced."""
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
        """Return the number, which waits for the steps."""
        return int(self._read().numpy()[1])

    def _read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._state, dtype=tf.float64)

    def _assign(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._state, value=value)
