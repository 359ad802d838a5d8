"""Weights & Biases and MLflow: their callbacks, and the `fit` by which MLflow's `autolog` replaces that of Keras."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import keras

from tfpar._compat.models import keras_fit
from tfpar.strategies import Strategy

_PACKAGES = ("mlflow", "wandb")
# Attributes of their callbacks, with one of these values if a callback does nothing after a batch.
_FREQUENCIES, _OF_EPOCHS = ("log_every_n_steps", "logging_batch_wise", "save_freq"), (None, False, "epoch")
_OF_TFPAR = ("steps_per_call", "checkpoints", "nonfinite_loss")  # arguments that Keras' fit does not have


def is_logger(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback, or a class that it derives from, is one of Weights & Biases or MLflow."""
    return any(_is_theirs(base) for base in type(callback).__mro__)


def logs_epochs_only(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback of these packages does nothing after a batch, although it has the hook."""
    frequencies = [getattr(callback, name) for name in _FREQUENCIES if hasattr(callback, name)]
    is_of_epochs = bool(frequencies) and all(frequency in _OF_EPOCHS for frequency in frequencies)
    return _is_theirs(type(callback)) and is_of_epochs


def _is_theirs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


class _Trainer(Protocol):
    model: keras.Model
    strategy: Strategy


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Self = TypeVar("Self", bound=_Trainer)


def logged(fit: Callable[Concatenate[Self, Parameters], Result]) -> Callable[Concatenate[Self, Parameters], Result]:
    """Wrap the `fit` of a trainer so that MLflow's replacement of `keras.Model.fit` logs it, on the chief alone.

    trainer.fit ──► MLflow's fit: parameters, a callback ──► Keras' fit, redirected ──► fit
                                                  the model ◄── history ◄────────────────┘
    """

    @functools.wraps(fit)
    def call(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        replacement = keras_fit.replacement(self.model, _PACKAGES) if self.strategy.is_chief else None
        if replacement is None and self.strategy.num_workers == 1:
            return fit(self, *args, **kwargs)
        settings: dict[str, Any] = dict(kwargs)
        own = {name: settings.pop(name) for name in _OF_TFPAR if name in settings}

        def run(*args: Any, **settings: Any) -> Result:
            history = fit(self, *args, **settings, **own)
            _wait_for_chief(self, replacement is not None, end)
            return history

        with contextlib.ExitStack() as end:
            if replacement is None:
                return run(*args, **settings)
            with keras_fit.redirected(self.model, run):
                history: Result = replacement(self.model, *args, **_with_list_of_callbacks(settings))
            return history

    return call


def _wait_for_chief(trainer: _Trainer, logs: bool, end: contextlib.ExitStack) -> None:
    """Let the workers wait at the end until the chief has logged the model, with the optimizer state of all.

    Args:
        trainer: The trainer, after its `fit`.
        logs: Whether this worker logs the model; all workers must call this.
        end: Ends when this worker has logged the model, or has nothing to log.
    """
    job, engine = trainer.strategy.job, trainer.strategy.engine
    if job.num_workers > 1 and job.first(logs) is not None:
        end.callback(job.first, False)
        end.enter_context(engine.whole_state(trainer.model))


def _with_list_of_callbacks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose callbacks, if there are any, are a new list, to which MLflow appends its own."""
    callbacks = settings.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return dict(settings)
    others = {name: value for name, value in settings.items() if name != "callbacks"}
    return others if callbacks is None else {**others, "callbacks": keras.tree.flatten(callbacks)}
