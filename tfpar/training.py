"""One training and one evaluation: calls of the inner loop, callbacks, validation and checkpoints in order.

epoch ─┬─ call of the inner loop ─ callbacks ─ checkpoint if due ─┐  until the epoch's steps are done
       │      ▲                                                   │
       │      └───────────────────────────────────────────────────┘
       └─ validation ─ callbacks ─ next epoch
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfpar import _compat, callback_state
from tfpar.alike import begin_alike
from tfpar.callbacks import wants_single_batches
from tfpar.checkpoint import Checkpoints, Position
from tfpar.loop import CallResult, StepsPerCall
from tfpar.strategies import Strategy
from tfpar.stream import Stream

RunSteps = Callable[[Any, Any, int], CallResult]


@dataclasses.dataclass
class Caller:
    """Call an inner loop on a stream, as many steps at a time as is right.

    Args:
        run_steps: The compiled loop.
        model: The model, whose metrics are the logs.
        strategy: Its workers run the same number of steps.
        stream: Where the batches come from.
        callbacks: They may ask for single batches, and are told how many examples a call took.
        steps_per_call: A number of steps to keep to; None to choose by time.
        testing: Whether the loop evaluates.
    """

    run_steps: RunSteps
    model: keras.Model
    strategy: Strategy
    stream: Stream
    callbacks: keras.callbacks.CallbackList
    steps_per_call: int | None = None
    testing: bool = False

    def __post_init__(self) -> None:
        """Begin with a single step: the first call compiles."""
        self._steps = StepsPerCall(self.steps_per_call, self.strategy.seconds_per_call)

    def wanted_steps(self) -> int:
        """Return how many steps this worker would run in the next call; the chief's wish counts."""
        if not self.strategy.is_chief:
            return 0
        single = self.steps_per_call is None and any(
            wants_single_batches(callback, self.testing) for callback in self.callbacks.callbacks
        )
        multiple = self.strategy.steps_multiple
        return -(-(1 if single else self._steps.next()) // multiple) * multiple

    def call(self, num_steps: int, num_steps_left: int | None) -> tuple[int, bool, dict[str, float]]:
        """Run the next steps.

        Args:
            num_steps: How many steps; the same on all workers.
            num_steps_left: The most steps to run; None for no limit but the data's.

        Returns:
            The steps done, whether their losses were finite, and the logs.
        """
        num_steps = num_steps if num_steps_left is None else min(num_steps, num_steps_left)
        began = time.perf_counter()
        with self.strategy.around_steps():
            result = self.run_steps(self.stream.iterator, self.stream.upcoming, num_steps)
        done = int(result.num_steps)
        self._steps.record(done, time.perf_counter() - began)
        self.stream.advance(result.upcoming, done)
        figures = {
            "num_examples": float(result.num_examples),
            "data_wait_seconds": float(result.data_wait_seconds),
        }
        for callback in self.callbacks.callbacks:
            if callback.params is not None:  # Keras' ProgbarLogger keeps none
                callback.params.update(figures)
        logs = to_python(result.logs)
        return done, bool(result.finite) and bool(np.isfinite(logs.get("loss", 0.0))), logs


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all workers do next, decided once.

    Args:
        num_steps: Steps of the next call, as the chief wishes.
        stop: Whether the training ends: a callback of some worker stops it.
        interrupted: Whether it is interrupted: some worker was asked to stop.
        save: Whether a checkpoint is written now, as the chief wishes.
    """

    num_steps: int
    stop: bool
    interrupted: bool
    save: bool


class Training:
    """One call of `fit`, from its position to its end.

    Args:
        caller: Calls the train loop.
        validate: Evaluates after an epoch and returns its logs; none where no validation is due.
        checkpoints: Where to write checkpoints; None for nowhere.
        interrupted: Says whether this worker was asked to stop after the current call.
    """

    def __init__(
        self,
        caller: Caller,
        validate: Callable[[int], dict[str, float]],
        checkpoints: Checkpoints | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self._caller = caller
        self._model = caller.model
        self._strategy = caller.strategy
        self._stream = caller.stream
        self._callbacks = caller.callbacks
        self._validate = validate
        self._checkpoints = checkpoints
        self._interrupted = interrupted
        self.was_interrupted = False
        self._position = Position()
        self._initial_callbacks: dict[str, Any] = {}

    def run(self, initial_epoch: int, epochs: int) -> dict[str, float]:
        """Train until `epochs`, a callback's stop or an interruption.

        Returns:
            The logs of the last epoch.
        """
        self._callbacks.on_train_begin()
        self._resume(initial_epoch)
        logs: dict[str, float] = {}
        while self._position.epoch < epochs and not self._position.stopped and not self.was_interrupted:
            epoch = self._position.epoch
            logs = self._epoch(epoch)
            if self.was_interrupted:
                self._save()
                break
            validation = self._validate(epoch)
            if not np.isfinite(validation.get("val_loss", 0.0)) and not self._model.stop_training:
                raise _validation_not_finite(epoch, validation["val_loss"])
            logs.update(validation)
            self._callbacks.on_epoch_end(epoch, logs)
            self._end_epoch(last=epoch + 1 == epochs)
        return logs

    def _resume(self, initial_epoch: int) -> None:
        self._initial_callbacks = callback_state.remembered(self._callbacks.callbacks)
        fresh = Position(epoch=_compat.restored_epoch(self._model) or initial_epoch)
        self._position, callbacks = begin_alike(self._model, self._strategy, self._checkpoints, fresh)
        callback_state.restore(self._callbacks.callbacks, callbacks)
        self._stream.seek(self._position.passes, self._position.batches)

    def _decide(self, may_save: bool) -> Decision:
        """Let all workers agree on what comes next."""
        saves = may_save and self._strategy.is_chief and self._checkpoints is not None and self._checkpoints.due()
        votes = (self._caller.wanted_steps(), self._model.stop_training, self._interrupted(), saves)
        num_steps, stop, interrupted, save = self._strategy.add_up([float(vote) for vote in votes])
        return Decision(int(num_steps), bool(stop > 0), bool(interrupted > 0), bool(save > 0))

    def _epoch(self, epoch: int) -> dict[str, float]:
        """Run the steps of an epoch that are left; return the logs at its end."""
        step = self._position.step
        if step == 0:
            self._model.reset_metrics()
            self._stream.begin_epoch()
        self._callbacks.on_epoch_begin(epoch)
        logs: dict[str, float] = {}
        num_steps = self._stream.steps_per_epoch
        decision = self._decide(may_save=False)
        while self._stream.has_more() and (num_steps is None or step < num_steps):
            self._callbacks.on_train_batch_begin(step)
            done, finite, logs = self._caller.call(decision.num_steps, None if num_steps is None else num_steps - step)
            step += done
            self._callbacks.on_train_batch_end(step - 1, logs)
            self._position = Position(epoch, step, self._stream.passes, self._stream.batches)
            decision = self._decide(may_save=finite)
            if not finite and not decision.stop:
                raise _not_finite(self._model, epoch, step)
            if decision.stop or decision.interrupted:
                break
            if decision.save:
                self._save()
        self._model.stop_training, self.was_interrupted = decision.stop, decision.interrupted
        return logs or to_python(self._strategy.metric_results(self._model))

    def _end_epoch(self, last: bool) -> None:
        decision = self._decide(may_save=True)
        self._model.stop_training, self.was_interrupted = decision.stop, decision.interrupted
        self._position = Position(self._position.epoch + 1, 0, *self._stream.next_epoch(), decision.stop)
        if last or decision.stop or decision.interrupted or decision.save:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint at the chief; all workers take part."""
        if self._checkpoints is None:
            return
        self._strategy.gather_metrics(self._model)
        if self._strategy.is_chief:
            state = callback_state.changed(
                callback_state.remembered(self._callbacks.callbacks), self._initial_callbacks
            )
            self._checkpoints.save(self._model, self._position, state)


def evaluate(caller: Caller) -> dict[str, float]:
    """Run one evaluation over a fresh stream and return its logs."""
    callbacks, stream, model = caller.callbacks, caller.stream, caller.model
    callbacks.on_test_begin()
    model.reset_metrics()
    stream.begin_epoch()
    logs: dict[str, float] = {}
    step, num_steps = 0, stream.steps_per_epoch
    while stream.has_more() and (num_steps is None or step < num_steps):
        callbacks.on_test_batch_begin(step)
        (wanted,) = caller.strategy.add_up([caller.wanted_steps()])
        done, _, logs = caller.call(int(wanted), None if num_steps is None else num_steps - step)
        step += done
        callbacks.on_test_batch_end(step - 1, logs)
    callbacks.on_test_end(logs)
    return logs


def to_python(logs: dict[str, Any]) -> dict[str, Any]:
    """Turn metric results into Python numbers; one of several values stays an array."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(array) if array.size == 1 else array for name, array in arrays.items()}


def _validation_not_finite(epoch: int, loss: float) -> FloatingPointError:
    return FloatingPointError(
        f"The validation's loss must stay finite, and val_loss is {loss} after epoch {epoch + 1}. Lower the learning "
        "rate, clip the gradients (global_clipnorm) or look at the data; the model is not saved."
    )


def _not_finite(model: keras.Model, epoch: int, step: int) -> FloatingPointError:
    update = int(model.optimizer.iterations.numpy())
    return FloatingPointError(
        f"The loss must stay finite, and it did not at step {update} (step {step} of epoch {epoch + 1}). "
        "Lower the learning rate, clip the gradients (global_clipnorm) or look at that batch; checkpoints written "
        "before this step are good."
    )
