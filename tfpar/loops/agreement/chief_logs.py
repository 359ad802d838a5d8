"""Numbers that a callback of the chief adds to the logs of an epoch, broadcast before the next callback reads them.

    worker 0   logs["val_bleu"] = 0.31 ─┐             ┌─ EarlyStopping("val_bleu")
                                        ├─ broadcast ─┤
    worker 1                           ─┘             └─ EarlyStopping("val_bleu"), with the same decision

Without this, a callback of another worker would not see the entry, and the workers would stop at different epochs.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from tfpar.job import Job
from tfpar.loops.agreement.barriers import VOTE, barrier

_EQUAL_ON_ALL_WORKERS = ("keras", "tfpar")  # packages whose callbacks add the same numbers on all workers


class _LogsSoFar(keras.callbacks.Callback):
    """Holds the logs that all workers have; runs before the other callbacks."""

    forgets = True

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


class _ChiefLogs(keras.callbacks.Callback):
    """Sends the numbers that the callback before it has added or changed on the chief to all workers.

    A callback that failed on another worker raises its error here, on all of them.
    """

    forgets = True

    def __init__(self, job: Job, so_far: _LogsSoFar) -> None:
        super().__init__()
        self._job, self._so_far = job, so_far

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        changes = self._changes(logs) if self._job.is_chief else {}
        message = json.dumps(changes).encode() if changes else b""
        (size,) = barrier(self._job, VOTE, [len(message)])
        if size:
            logs.update(json.loads(self._job.broadcast(message)))
        self._so_far.logs = dict(logs)

    def _changes(self, logs: dict[str, Any]) -> dict[str, float]:
        so_far, arrays = self._so_far.logs, {name: np.asarray(value) for name, value in logs.items()}
        return {
            name: float(array)
            for name, array in arrays.items()
            if not array.ndim and array.dtype.kind in "fiub" and (name not in so_far or so_far[name] != array)
        }


def share_logs(callback_list: keras.callbacks.CallbackList, job: Job) -> None:
    """Broadcast the logs of the chief after each of its callbacks that may add to them; all workers must call this.

    The callbacks of the other workers may lack some of the chief's, such as those with `chief_only = True`.

    Args:
        callback_list: The callbacks of this worker, to which those that broadcast are added.
        job: The workers.
    """
    if job.num_workers == 1:
        return
    chiefs = job.agree([(type(callback).__name__, _may_add(callback)) for callback in callback_list.callbacks])
    if not any(may_add for _, may_add in chiefs):
        return
    so_far, remaining = _LogsSoFar(), list(callback_list.callbacks)
    callbacks: list[keras.callbacks.Callback] = [so_far]
    for name, may_add in chiefs:
        names = [type(callback).__name__ for callback in remaining]
        end = names.index(name) + 1 if name in names else 0
        callbacks += remaining[:end]
        callbacks += [_ChiefLogs(job, so_far)] if may_add else []
        remaining = remaining[end:]
    callback_list.callbacks = callbacks + remaining


def _may_add(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback has a hook for the end of epochs that is neither Keras' nor tfpar's."""
    package = str(getattr(callback.on_epoch_end, "__module__", "")).partition(".")[0]
    return package not in _EQUAL_ON_ALL_WORKERS
