"""The callbacks of a call: which of them run on a worker, and which need every batch."""

from __future__ import annotations

import copy
from typing import Any

import keras

from tfpar._compat import keras_callbacks
from tfpar.loops import experiment_loggers

_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_TRAIN_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def wants_single_batches(callback: keras.callbacks.Callback, testing: bool = False) -> bool:
    """Return whether a callback must be called after every batch, so that each call runs a single step.

    The attribute `single_batches` of a callback decides. Without it, the callbacks of Keras, Weights & Biases and
    MLflow need every batch if their frequency is in batches, and others if they override a batch hook.

    Args:
        callback: Any Keras callback.
        testing: Whether the batches are those of an evaluation.

    Example:
        >>> wants_single_batches(keras.callbacks.EarlyStopping())
        False
        >>> wants_single_batches(keras.callbacks.ModelCheckpoint("best.keras", save_freq=10))
        True
    """
    single_batches = getattr(callback, "single_batches", None)
    if single_batches is not None:
        return bool(single_batches)
    if not testing and _counts_batches(callback):
        return True
    hooks = _TEST_HOOKS if testing else _TRAIN_HOOKS
    # LambdaCallback sets hooks on the instance; Keras' other callbacks allow several steps per call.
    if any(name in vars(callback) for name in hooks):
        return True
    if getattr(keras.callbacks, type(callback).__name__, None) is type(callback):
        return False
    if experiment_loggers.logs_epochs_only(callback):
        return False
    return any(getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in hooks)


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback writes files or logs an experiment, and so runs on the chief only.

    The attribute `chief_only` of a callback decides; without it, Keras' callbacks that write files do, and those of
    Weights & Biases and MLflow. Callbacks that control training, such as `EarlyStopping`, run on every worker.

    Example:
        >>> writes_files(keras.callbacks.CSVLogger("log.csv"))
        True
    """
    writes = isinstance(callback, _WRITERS) or experiment_loggers.is_logger(callback)
    return bool(getattr(callback, "chief_only", writes))


def saves_models(callbacks: Any, divides_state: bool) -> bool:
    """Return whether a callback saves models, for which the chief must collect sharded optimizer state.

    Args:
        callbacks: As for `callback_list`.
        divides_state: Whether the optimizer state is sharded over workers.

    Raises:
        ValueError: If a callback needs that state during an epoch, or restores it on the chief only.
    """
    if not divides_state or callbacks is None:
        return False
    flat = keras.tree.flatten(callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks)
    for callback in flat:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore restores on the chief, and with shard='optimizer' each worker holds a shard of the "
                "optimizer state. Use tfpar.Checkpoints."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise ValueError(
                "With shard='optimizer' the chief collects the optimizer state of all workers at the end of epochs, "
                f"received ModelCheckpoint(save_freq={callback.save_freq}). Use save_freq='epoch', or "
                "tfpar.Checkpoints."
            )
    saves = any(isinstance(callback, keras.callbacks.ModelCheckpoint) for callback in flat)
    swaps = (callback for callback in flat if isinstance(callback, keras.callbacks.SwapEMAWeights))
    if saves and any(callback.swap_on_epoch for callback in swaps):
        raise ValueError(
            "With shard='optimizer' the chief collects the optimizer state before the callbacks of an epoch's end run, "
            "received ModelCheckpoint with SwapEMAWeights(swap_on_epoch=True). Save with trainer.save after the "
            "training, or leave shard out."
        )
    return saves


def callback_list(
    callbacks: Any,
    model: keras.Model,
    is_chief: bool,
    verbose: int | str,
    epochs: int,
    steps: int | None,
    add_history: bool,
) -> keras.callbacks.CallbackList:
    """Return the callbacks that a call runs on this worker, as a list like that of Keras' `fit`.

    Args:
        callbacks: A callback, a list of callbacks or None; or a `keras.callbacks.CallbackList`, which gets no progress
            bar.
        model: The model.
        is_chief: Whether this process writes files and shows progress.
        verbose: 0: silent. 1 or "auto": progress bar. 2: one line per epoch.
        epochs: Number of epochs, for the progress bar.
        steps: Steps per epoch, for the progress bar; None if unknown.
        add_history: Whether to add a `History` if there is none.

    Raises:
        TypeError: If an element is not a callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return _copy_list(callbacks, model, is_chief, add_history)
    flat = [] if callbacks is None else keras.tree.flatten(callbacks)
    for callback in flat:
        _check(callback)
    return keras.callbacks.CallbackList(
        [callback for callback in flat if is_chief or not writes_files(callback)],
        add_history=add_history,
        add_progbar=verbose != 0 and is_chief,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def _check(callback: Any) -> None:
    if isinstance(callback, keras.callbacks.Callback):
        return
    received = f"the class {callback.__name__}" if isinstance(callback, type) else f"{callback!r:.80}"
    way_out = f"Write {callback.__name__}(...)." if isinstance(callback, type) else "Subclass that class."
    raise TypeError(f"callbacks must be keras.callbacks.Callback objects, received {received}. {way_out}")


def _copy_list(
    callbacks: keras.callbacks.CallbackList, model: keras.Model, is_chief: bool, add_history: bool
) -> keras.callbacks.CallbackList:
    """Return a copy of the user's list, without the callbacks that only the chief runs unless this is the chief."""
    worker_callbacks = copy.copy(callbacks)
    worker_callbacks.callbacks = [
        callback
        for callback in callbacks.callbacks
        if is_chief or not (writes_files(callback) or isinstance(callback, keras.callbacks.ProgbarLogger))
    ]
    if add_history and not any(
        isinstance(callback, keras.callbacks.History) for callback in worker_callbacks.callbacks
    ):
        model.history = keras.callbacks.History()  # without one, Keras 3.15 returns that of an earlier fit, or raises
        worker_callbacks.callbacks.append(model.history)
        model.history.set_params(callbacks.params)
    for callback in worker_callbacks.callbacks:
        if callback.model is None:
            callback.set_model(model)
    return worker_callbacks


def _counts_batches(callback: keras.callbacks.Callback) -> bool:
    frequencies = [getattr(callback, name, "epoch") for name in ("save_freq", "update_freq")]
    if any(frequency not in ("epoch", None) for frequency in frequencies):
        return True
    return keras_callbacks.traces_batches(callback)
