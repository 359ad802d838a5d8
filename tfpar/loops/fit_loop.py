"""The loop of `fit`: calls of the compiled loop, callbacks, validation and checkpoints.

epoch ─┬─ call of the compiled loop ─ callbacks ─ checkpoint if due ─┐  until the epoch ends
       │      ▲                                                      │
       │      └──────────────────────────────────────────────────────┘
       └─ validation ─ callbacks ─ next epoch
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from tfpar import data
from tfpar._compat.models import keras_metrics, keras_model
from tfpar.checkpoint import Checkpoints, Position, callback_state
from tfpar.loops import learning_rates
from tfpar.loops.resuming import resumption
from tfpar.loops.resuming.initial_state import broadcast_initial_state
from tfpar.loops.step_calls import NonfiniteStep, StepCalls
from tfpar.messages import user_warnings
from tfpar.messages.received import quoted
from tfpar.messages.whole_numbers import check_whole_number

NonfiniteLoss = Literal["stop", "continue"]
_CHECKPOINT = "Writing a checkpoint"
_EPOCH_BEGIN = "epoch_begin"  # in a checkpoint, next to the state of callbacks
_BEGAN = "began"  # in a checkpoint: the seed and the learning rates with which the run began
_CONTINUE = 'nonfinite_loss="continue" trains on, as Keras does.'


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all workers have agreed on for the next call.

    Args:
        num_steps: Steps of the next call, decided by the chief.
        stop: Whether a callback of any worker stops the training.
        interrupted: Whether any worker was interrupted.
        save: Whether to write a checkpoint now, decided by the chief.
        end_at_nonfinite: Whether the next call ends after a step whose loss is not finite.
    """

    num_steps: int
    stop: bool
    interrupted: bool
    save: bool
    end_at_nonfinite: bool


class FitLoop:
    """One call of `fit`.

    Args:
        caller: Calls the compiled train loop.
        validate: Takes an epoch; returns the logs of its validation, empty if none is due.
        checkpoints: Where to write checkpoints, if anywhere.
        interrupted: Returns whether this worker was interrupted.
        nonfinite_loss: As for `Trainer.fit`.
        seed: The seed of the program, to compare with that of a resumed run.
        verbose: Whether to print where the run resumes.

    Raises:
        ValueError, TypeError: If `nonfinite_loss` or `checkpoints` is invalid.
    """

    def __init__(
        self,
        caller: StepCalls,
        validate: Callable[[int], dict[str, float]],
        checkpoints: Checkpoints | None,
        interrupted: Callable[[], bool],
        nonfinite_loss: NonfiniteLoss = "stop",
        seed: int | None = None,
        verbose: bool = False,
    ) -> None:
        if nonfinite_loss not in ("stop", "continue"):
            raise ValueError(f"nonfinite_loss must be 'stop' or 'continue', received {nonfinite_loss!r}.")
        if not isinstance(checkpoints, Checkpoints | None):
            raise TypeError(
                f"checkpoints must be tfpar.Checkpoints, received {quoted(checkpoints)}. Write "
                "checkpoints=tfpar.Checkpoints(folder)."
            )
        self._caller = caller
        self._stops = nonfinite_loss == "stop"
        self._model = caller.model
        self._strategy = caller.strategy
        self._epoch_iterator = caller.epoch_iterator
        self._callbacks = caller.callbacks
        self._validate = validate
        self._checkpoints = checkpoints
        self._interrupted = interrupted
        self.was_interrupted = False
        self._position = Position()
        self._initial_callbacks: dict[str, Any] = {}
        self._resumed_rates: dict[str, learning_rates.Rates] = {}
        self._epoch_begin = learning_rates.EpochBegin(self._model, self._strategy)
        self._began = {"seed": seed, "rates": learning_rates.read(self._model)}
        self._verbose = verbose

    def run(self, initial_epoch: int, epochs: int) -> dict[str, float]:
        """Train until `epochs`, a callback or an interruption ends the training; return the logs of the last epoch."""
        check_whole_number("initial_epoch", initial_epoch)
        self._callbacks.on_train_begin()
        self._resume(initial_epoch, epochs)
        logs: dict[str, float] = {}
        while self._position.epoch < epochs and not self._position.stopped and not self.was_interrupted:
            epoch = self._position.epoch
            logs = self._epoch(epoch)
            if self.was_interrupted:
                self._save()
                break
            validation = self._validate(epoch)
            finite = np.isfinite(validation.get("val_loss", 0.0))
            if self._stops and not finite and not self._model.stop_training:
                raise _validation_not_finite(epoch, validation["val_loss"])
            logs.update(validation)
            self._callbacks.on_epoch_end(epoch, logs)
            self._end_epoch(last=epoch + 1 == epochs)
        if self._checkpoints is not None and self._strategy.is_chief:
            with self._callbacks.errors.deferring(_CHECKPOINT):
                self._checkpoints.wait()
        return logs

    def _resume(self, initial_epoch: int, epochs: int) -> None:
        self._initial_callbacks = callback_state.read(self._callbacks.callbacks)
        fresh = Position(epoch=keras_model.restored_epoch(self._model) or initial_epoch)
        self._position, callbacks = broadcast_initial_state(self._model, self._strategy, self._checkpoints, fresh)
        callback_state.restore(self._callbacks.callbacks, callbacks)
        self._resumed_rates = callbacks.get(_EPOCH_BEGIN, {})
        if self._checkpoints is not None and self._position != fresh:
            self._note_resumption(callbacks.get(_BEGAN, {}), epochs, self._checkpoints)
        resumption.check_position(self._position, self._epoch_iterator)
        self._epoch_iterator.seek(self._position.passes, self._position.batches)

    def _note_resumption(self, began: dict[str, Any], epochs: int, checkpoints: Checkpoints) -> None:
        if self._strategy.is_chief:
            resumption.warn_about_ignored(began, self._began, learning_rates.read(self._model))
            if self._verbose:
                print(resumption.describe(self._position, epochs, checkpoints.directory), flush=True)
        self._began |= began

    def _decide(self, may_save: bool) -> Decision:
        saves, ends = False, self._caller.ends_at_nonfinite
        if may_save and self._strategy.is_chief and self._checkpoints is not None:
            with self._callbacks.errors.deferring(_CHECKPOINT):
                saves = self._checkpoints.due()
        votes = (self._caller.next_steps(), self._model.stop_training, self._interrupted(), saves, ends)
        num_steps, *counts = self._callbacks.errors.vote([float(vote) for vote in votes])
        return Decision(int(num_steps), *(bool(count > 0) for count in counts))

    def _epoch(self, epoch: int) -> dict[str, float]:
        """Run the remaining steps of an epoch, and return its logs."""
        step = self._position.step
        if step == 0:
            keras_metrics.reset(self._model)
        hooks = functools.partial(self._callbacks.on_epoch_begin, epoch)
        if step == 0:
            self._epoch_begin.call(hooks)
            self._epoch_iterator.begin_epoch()
        else:
            self._epoch_begin.call_again(hooks, self._resumed_rates)
        logs: dict[str, float] = {}
        num_steps = self._caller.num_steps
        decision = self._decide(may_save=False)
        while self._epoch_iterator.has_more() and (num_steps is None or step < num_steps):
            self._callbacks.on_train_batch_begin(step)
            next_steps = self._caller.min_steps if decision.stop else decision.num_steps
            done, last, nonfinite, logs = self._caller.call(step, next_steps, decision.end_at_nonfinite)
            step += done
            self._callbacks.on_train_batch_end(last, logs)
            self._position = Position(epoch, step, self._epoch_iterator.passes, self._epoch_iterator.batches)
            decision = self._decide(may_save=nonfinite is None or not self._stops)
            if self._stops and nonfinite is not None and not decision.stop:
                raise _not_finite(epoch, nonfinite)
            if decision.stop or decision.interrupted:
                break
            if decision.save:
                self._save()
        if self._epoch_iterator.end_epoch(step) and not decision.stop and self._strategy.is_chief:
            user_warnings.warn(data.RAN_OUT)
        self._model.stop_training, self.was_interrupted = decision.stop, decision.interrupted
        return dict(logs or self._strategy.engine.logs(self._model, "train"))

    def _end_epoch(self, last: bool) -> None:
        decision = self._decide(may_save=True)
        learning_rates.check_equal(self._model, self._strategy.job)
        self._model.stop_training, self.was_interrupted = decision.stop, decision.interrupted
        self._position = Position(self._position.epoch + 1, 0, *self._epoch_iterator.next_epoch(), decision.stop)
        if last or decision.stop or decision.interrupted or decision.save:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint on the chief; all workers must call this."""
        if self._checkpoints is None:
            return
        replica_metrics = self._strategy.engine.replica_metrics(self._model)
        with self._strategy.engine.whole_state(self._model, self._checkpoints.directory):
            if not self._strategy.is_chief:
                return
            with self._callbacks.errors.deferring(_CHECKPOINT):
                state = callback_state.changed(callback_state.read(self._callbacks.callbacks), self._initial_callbacks)
                state |= {_EPOCH_BEGIN: self._epoch_begin.rates, _BEGAN: self._began}
                position = resumption.with_data(self._position, self._epoch_iterator)
                self._checkpoints.save(self._model, position, state, replica_metrics)


def _validation_not_finite(epoch: int, loss: float) -> FloatingPointError:
    return FloatingPointError(
        f"The validation loss must stay finite, and val_loss is {loss} after epoch {epoch + 1}. Lower the learning "
        "rate, clip the gradients (global_clipnorm) or check the data; the model is not saved. "
        f"{_CONTINUE}"
    )


def _not_finite(epoch: int, at: NonfiniteStep) -> FloatingPointError:
    return FloatingPointError(
        f"The loss must stay finite, and is not at step {at.update} (step {at.step} of epoch {epoch + 1}). "
        "Lower the learning rate, clip the gradients (global_clipnorm) or check that batch; checkpoints written "
        f"before this step are valid. {_CONTINUE}"
    )
