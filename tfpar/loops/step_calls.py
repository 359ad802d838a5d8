"""Calls of a compiled loop over an epoch iterator: their numbers of steps, and the logs for callbacks."""

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
from tfpar.loops.callback_list import decides_at_nonfinite, wants_single_batches
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.messages.whole_numbers import check_whole_number
from tfpar.strategies import Strategy


class NonfiniteStep(NamedTuple):
    """The first step of a call whose loss is not finite.

    Args:
        step: Its number in the epoch, from 1.
        update: The number of the optimizer's updates after it.
    """

    step: int
    update: int


@dataclasses.dataclass
class StepCalls:
    """Calls of a compiled loop, each with a number of steps that callbacks and the measured time determine.

    Args:
        run_steps: The compiled loop.
        model: The model; its metrics are the logs.
        strategy: The strategy; all its workers run the same number of steps.
        epoch_iterator: The iterator over batches.
        callbacks: The callbacks. If one needs single batches, each call runs a single step.
        steps_per_call: A number of steps for every call; None for `steps_per_execution` of the compiled model, or
            else to choose by time.
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
        """Start with a single step, because the first call compiles."""
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
        """Steps of an epoch; None if the epoch ends with the data."""
        steps = self.epoch_iterator.steps_per_epoch
        return None if steps is None else whole_executions(steps, self._per_execution)

    def wanted_steps(self) -> int:
        """Return the number of steps of the next call on the chief, and 0 on other workers."""
        if not self.strategy.is_chief:
            return 0
        single = self._fixed is None and any(
            wants_single_batches(callback, self.testing) for callback in self.callbacks.callbacks
        )
        return self.least_steps if single else whole_executions(self._steps.next(), self.strategy.engine.steps_multiple)

    @property
    def least_steps(self) -> int:
        """Steps of the shortest call: Keras stops after one that follows a callback's request to stop."""
        return whole_executions(self._fixed or 1, self.strategy.engine.steps_multiple)

    @property
    def ends_at_nonfinite(self) -> bool:
        """Whether a call ends after a step with a loss that is not finite, because a callback handles it.

        Otherwise all steps of the call run, so that no step waits for the loss of the previous one.
        """
        return self._per_execution == 1 and any(map(decides_at_nonfinite, self.callbacks.callbacks))

    def call(
        self, first: int, num_steps: int, end_at_nonfinite: bool
    ) -> tuple[int, int, NonfiniteStep | None, dict[str, Any]]:
        """Run the next steps.

        Args:
            first: The index of the first step in its epoch.
            num_steps: The number of steps, equal on all workers; fewer run at the end of the epoch.
            end_at_nonfinite: Whether the call ends after a step with a loss that is not finite.

        Returns:
            The number of steps, the index of the last one in Keras' numbering, the first step whose loss is not finite,
            if any, and the logs of the model.
        """
        limit = self.num_steps
        wanted = num_steps if limit is None else min(num_steps, limit - first)
        optimizer = None if self.testing else self.model.optimizer
        num_updates = keras_optimizer.num_applied(optimizer)
        start = time.perf_counter()
        with self.strategy.engine.step_context():
            result = self.run_steps(
                self.epoch_iterator.iterator, self.epoch_iterator.upcoming, wanted, end_at_nonfinite
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
        # Keras counts whole executions, also if the data end inside of one.
        last = first + (num_steps if self._per_execution > 1 else done) - 1
        nonfinite = None
        if num_finite < done or not np.all(np.isfinite(logs.get("loss", 0.0))):
            in_call = min(num_finite + 1, done)
            update = keras_optimizer.updates_of(optimizer, num_updates + in_call)
            nonfinite = NonfiniteStep(first + in_call, update)
        return done, last, nonfinite, logs


def limited_epochs(epochs: int) -> int:
    """Return the number of epochs, limited by `keras.config.set_max_epochs` (or `KERAS_MAX_EPOCHS`)."""
    check_whole_number("epochs", epochs)
    limit = keras.config.max_epochs()
    if not limit or limit >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
    return int(limit)


def limited_steps(num_steps: int | None, name: str = "steps") -> int | None:
    """Return the steps, limited by `keras.config.set_max_steps_per_epoch` (or `KERAS_MAX_STEPS_PER_EPOCH`).

    Args:
        num_steps: The steps that the user has set; None for none.
        name: The argument of the user.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is negative; 0 is None, as in Keras.
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
    """Return `num_steps` rounded up to whole executions, as Keras 3.15 runs them while there are data."""
    return -(-num_steps // per_execution) * per_execution


def to_python(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs as Keras 3.15's `pythonify_logs` does: sorted, flat, floats where `float` takes the value.

    A metric with several values stays an array, and since NumPy 2.4 a vector with one value does too.

    Example:
        >>> to_python({"loss": tf.constant(0.5), "f1_score": tf.constant([1.0])})
        {'f1_score': array([1.], dtype=float32), 'loss': 0.5}
    """
    found: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            found.update(to_python(value))
            continue
        value = np.asarray(value) if keras.ops.is_tensor(value) else value
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            found[name] = value
    return found
