"""Calls of a compiled loop: how many steps each runs, and its logs for callbacks."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np

from tfpar._compat.models import keras_metrics
from tfpar._compat.optimizers import keras_optimizer
from tfpar.callbacks import Throughput
from tfpar.engines.steps.multi_step import StepLoop, StepsPerCall
from tfpar.loops.agreement.deferred_errors import DeferringCallbacks
from tfpar.loops.callback_list import wants_single_batches
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.messages.whole_numbers import check_whole_number
from tfpar.strategies import Strategy


class NonfiniteStep(NamedTuple):
    """The first step of a call whose loss is not finite.

    Args:
        step: Its number in the epoch, from 1.
        update: The number of optimizer updates after it.
    """

    step: int
    update: int


@dataclasses.dataclass
class StepCalls:
    """Calls of a compiled loop, each of as many steps as callbacks and the measured time allow.

    Args:
        run_steps: The compiled loop.
        model: The model.
        strategy: The strategy.
        epoch_iterator: The iterator over batches.
        callbacks: The callbacks. If one needs every batch, each call runs a single step.
        steps_per_call: Steps per call. None: the model's `steps_per_execution` if above 1, else chosen by time.
        testing: Whether the loop evaluates.

    Raises:
        ValueError: If `steps_per_call` is below 1.
    """

    run_steps: StepLoop
    model: keras.Model
    strategy: Strategy
    epoch_iterator: EpochIterator
    callbacks: DeferringCallbacks
    steps_per_call: int | None = None
    testing: bool = False

    def __post_init__(self) -> None:
        """Check `steps_per_call`."""
        if self.steps_per_call is not None:
            check_whole_number("steps_per_call", self.steps_per_call)
            if self.steps_per_call < 1:
                raise ValueError(
                    f"steps_per_call must be at least 1, received {self.steps_per_call}. Leave it out for auto."
                )
        self._per_execution = 1 if self.steps_per_call else self.model.steps_per_execution
        compiled = self._per_execution if self._per_execution > 1 else None
        self._fixed = self.steps_per_call or compiled or (1 if self.model.run_eagerly else None)
        self._steps = StepsPerCall(self._fixed, self.strategy.engine.seconds_per_call)

    @property
    def num_steps(self) -> int | None:
        """Steps per epoch; None if the epoch ends with the data."""
        steps = self.epoch_iterator.steps_per_epoch
        return None if steps is None else whole_executions(steps, self._per_execution)

    def next_steps(self) -> int:
        """Return the number of steps of the next call; 0 on workers other than the chief, for a sum."""
        if not self.strategy.is_chief:
            return 0
        single = self._fixed is None and any(
            wants_single_batches(callback, self.testing) for callback in self.callbacks.callbacks
        )
        return self.min_steps if single else whole_executions(self._steps.next(), self.strategy.engine.steps_multiple)

    @property
    def min_steps(self) -> int:
        """Steps of the shortest call; as in Keras, it is the last one once `on_epoch_begin` asks to stop."""
        return whole_executions(self._fixed or 1, self.strategy.engine.steps_multiple)

    @property
    def ends_at_nonfinite(self) -> bool:
        """Whether a call ends after a step whose loss is not finite, for a `TerminateOnNaN` callback.

        Otherwise no step waits for the loss of the previous one.
        """
        handlers = (isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in self.callbacks.callbacks)
        return self._per_execution == 1 and any(handlers)

    def call(
        self, first: int, num_steps: int, end_at_nonfinite: bool
    ) -> tuple[int, int, NonfiniteStep | None, dict[str, Any]]:
        """Run the next steps of an epoch.

        Args:
            first: The index of the first step in the epoch.
            num_steps: The number of steps, equal on all workers; fewer run at the end of the epoch.
            end_at_nonfinite: Whether the call ends after a step whose loss is not finite.

        Returns:
            The number of steps run, the index of the last one as Keras counts, the first step whose loss is not finite,
            if any, and the logs.
        """
        limit = self.num_steps
        max_steps = num_steps if limit is None else min(num_steps, limit - first)
        optimizer = None if self.testing else self.model.optimizer
        num_updates = keras_optimizer.num_applied(optimizer)
        start = time.perf_counter()
        with self.strategy.engine.step_context():
            result = self.run_steps(
                self.epoch_iterator.iterator, self.epoch_iterator.upcoming, max_steps, end_at_nonfinite
            )
        done, num_finite = int(result.num_steps), int(result.num_finite)
        self._steps.record(done, time.perf_counter() - start)
        self.epoch_iterator.advance(result.upcoming, done)
        self.callbacks.errors.read_order.note(first, result.digests)
        for callback in self.callbacks.callbacks:
            if isinstance(callback, Throughput):
                callback.measure_call(done, int(result.num_examples), float(result.data_wait_seconds))
        logs = keras.tree.map_structure(np.asarray, result.logs)
        if self.strategy.num_workers > 1:
            keras_metrics.note_results(self.model, logs)
        # Keras counts whole executions, even if the data end within one.
        last = first + (num_steps if self._per_execution > 1 else done) - 1
        nonfinite = None
        if num_finite < done or not np.all(np.isfinite(logs.get("loss", 0.0))):
            in_call = min(num_finite + 1, done)
            update = keras_optimizer.updates_of(optimizer, num_updates + in_call)
            nonfinite = NonfiniteStep(first + in_call, update)
        return done, last, nonfinite, logs


def limited_epochs(epochs: int) -> int:
    """Return the number of epochs, at most `keras.config.max_epochs()`."""
    check_whole_number("epochs", epochs)
    limit = keras.config.max_epochs()
    if not limit or limit >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
    return int(limit)


def limited_steps(num_steps: int | None, name: str = "steps") -> int | None:
    """Return the number of steps, at most `keras.config.max_steps_per_epoch()`.

    Args:
        num_steps: The user's number of steps; None, or 0 as in Keras, for no limit.
        name: The name of the user's argument.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is negative.
    """
    if num_steps is not None:
        check_whole_number(name, num_steps)
        if num_steps < 0:
            raise ValueError(f"{name} must not be negative, received {num_steps}. Leave it out for all data.")
    limit = keras.config.max_steps_per_epoch()
    if not limit or (num_steps and num_steps <= limit):
        return num_steps
    warnings.warn(f"Limiting steps_per_epoch to {limit}", stacklevel=3)
    return int(limit)


def whole_executions(num_steps: int, per_execution: int) -> int:
    """Return `num_steps` rounded up to whole executions, which Keras 3.15 runs while there are data."""
    return -(-num_steps // per_execution) * per_execution


def to_python(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs as Keras 3.15's `pythonify_logs` does: sorted, flat, and as floats where possible.

    A metric with several values stays an array; since NumPy 2.4, so does a vector with one value.

    Example:
        >>> to_python({"loss": tf.constant(0.5), "f1_score": tf.constant([1.0])})
        {'f1_score': array([1.], dtype=float32), 'loss': 0.5}
    """
    values: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            values.update(to_python(value))
            continue
        value = np.asarray(value) if keras.ops.is_tensor(value) else value
        try:
            values[name] = float(value)
        except (TypeError, ValueError):
            values[name] = value
    return values
