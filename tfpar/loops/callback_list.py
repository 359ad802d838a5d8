"""The callbacks of one call on each worker, and the batches after which they run."""

from __future__ import annotations

import copy
from typing import Any

import keras

from tfpar._compat import keras_callbacks

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
    """Return whether a callback must be called after every single batch.

    An attribute `single_batches` of the callback decides. Without it, a callback of Keras needs single batches if its
    frequency is in batches, and any other callback if it overrides a hook for batches.

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
    # LambdaCallback sets its hooks on the object; Keras' other callbacks allow several batches a call.
    if any(name in vars(callback) for name in hooks):
        return True
    if getattr(keras.callbacks, type(callback).__name__, None) is type(callback):
        return False
    return any(getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in hooks)


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback runs on the chief only, because all workers would write the same files.

    An attribute `chief_only` of the callback decides. Without it, Keras' callbacks that write files do. Callbacks
    that control training, such as `EarlyStopping`, run on every worker.

    Args:
        callback: Any Keras callback.

    Example:
        >>> writes_files(keras.callbacks.CSVLogger("log.csv"))
        True
    """
    return bool(getattr(callback, "chief_only", isinstance(callback, _WRITERS)))


def saves_models(callbacks: Any, divides_state: bool) -> bool:
    """Return whether a callback of the chief saves models, and needs the optimizer's state that others hold for it.

    Args:
        callbacks: As for `callback_list`.
        divides_state: Whether each worker holds only a part of the optimizer's state.

    Raises:
        ValueError: If one would need that state after each batch, or restores it on the chief alone.
    """
    if not divides_state or callbacks is None:
        return False
    listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    flat = keras.tree.flatten(listed)
    for callback in flat:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore restores on the chief, and with shard='optimizer' each worker holds a part of the "
                "optimizer's state. Use tfpar.Checkpoints."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise ValueError(
                "With shard='optimizer' the chief collects the optimizer's state of all workers at the end of epochs, "
                f"received ModelCheckpoint(save_freq={callback.save_freq}). Use save_freq='epoch', or "
                "tfpar.Checkpoints."
            )
    saves = any(isinstance(callback, keras.callbacks.ModelCheckpoint) for callback in flat)
    if saves and any(isinstance(one, keras.callbacks.SwapEMAWeights) and one.swap_on_epoch for one in flat):
        raise ValueError(
            "With shard='optimizer' the chief collects the optimizer's state before the callbacks of an epoch's end, "
            "received ModelCheckpoint with SwapEMAWeights(swap_on_epoch=True). Save with trainer.save after the "
            "training, or leave shard out."
        )
    return saves


def decides_at_nonfinite(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback handles a loss that is not finite."""
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def callback_list(
    callbacks: Any,
    model: keras.Model,
    is_chief: bool,
    verbose: int | str,
    epochs: int,
    steps: int | None,
    add_history: bool,
) -> keras.callbacks.CallbackList:
    """Return the list of callbacks of one call, as Keras' `fit` does; the chief alone writes and shows progress.

    Args:
        callbacks: One callback, a list of them, or a `keras.callbacks.CallbackList`, which gets no progress bar; None
            for none.
        model: The model.
        is_chief: Whether this process writes files and shows progress.
        verbose: 0 silent, 1 or "auto" a progress bar, 2 a line an epoch.
        epochs: Epochs in all, for the progress bar.
        steps: Steps an epoch, for the progress bar; None where unknown.
        add_history: Whether to add a `History` where there is none.

    Raises:
        TypeError: If one is no callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return _for_this_worker(callbacks, model, is_chief, add_history)
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


def _for_this_worker(
    given: keras.callbacks.CallbackList, model: keras.Model, is_chief: bool, add_history: bool
) -> keras.callbacks.CallbackList:
    """Return a copy of the user's list; on other workers than the chief, without callbacks for the chief only."""
    worker_callbacks = copy.copy(given)
    worker_callbacks.callbacks = [
        callback
        for callback in given.callbacks
        if is_chief or not (writes_files(callback) or isinstance(callback, keras.callbacks.ProgbarLogger))
    ]
    if add_history and not any(
        isinstance(callback, keras.callbacks.History) for callback in worker_callbacks.callbacks
    ):
        model.history = keras.callbacks.History()  # Keras 3.15 returns that of an earlier fit, or raises
        worker_callbacks.callbacks.append(model.history)
        model.history.set_params(given.params)
    for callback in worker_callbacks.callbacks:
        if callback.model is None:
            callback.set_model(model)
    return worker_callbacks


def _counts_batches(callback: keras.callbacks.Callback) -> bool:
    frequencies = [getattr(callback, name, "epoch") for name in ("save_freq", "update_freq")]
    if any(frequency not in ("epoch", None) for frequency in frequencies):
        return True
    return keras_callbacks.traces_batches(callback)
