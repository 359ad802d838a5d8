"""The speed of training: examples per second, time per step, share of time spent waiting for data."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

FIGURES = ("examples_per_second", "step_milliseconds", "data_wait_share")


class Throughput(keras.callbacks.Callback):
    """Measure examples per second, milliseconds per step and the share of time spent waiting for data.

    The first call of each `fit` is excluded because it compiles. The figures of an epoch are added to its logs, so
    History, CSVLogger and TensorBoard record them too.

    Attributes:
        summary: `examples_per_second`, `step_milliseconds` and `data_wait_share` of the whole `fit`.
        call: The same figures of the last call of the compiled loop.

    Example:
        >>> throughput = tfpar.Throughput()
        >>> trainer.fit(dataset, epochs=2, callbacks=[throughput])
        >>> sorted(throughput.summary)
        ['data_wait_share', 'examples_per_second', 'step_milliseconds']
    """

    single_batches = False
    forgets = True  # not restored from a checkpoint: a resumed run may use another machine

    def __init__(self) -> None:
        super().__init__()
        self.summary: dict[str, float] = {}
        self.call: dict[str, float] = {}
        self._total = np.zeros(4)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Reset all sums; the first call compiles and is excluded."""
        self._warm = False
        self.call = {}
        self._total = np.zeros(4)
        self._call: tuple[int, float, float] | None = None

    def measure_call(self, num_steps: int, num_examples: int, data_wait_seconds: float) -> None:
        """Record what a call of the compiled loop has done.

        Keras' own `fit` does not call this method, and then only `step_milliseconds` is known.

        Args:
            num_steps: Steps that the call ran.
            num_examples: Examples of these steps over all replicas.
            data_wait_seconds: Time spent waiting for batches.
        """
        self._call = (num_steps, num_examples, data_wait_seconds)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reset the sums of the epoch: seconds, steps, examples, seconds of waiting."""
        self._epoch = np.zeros(4)
        self._next_step: int | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._next_step = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add a call to the sums."""
        seconds = time.perf_counter() - self._began
        if self._warm and self._next_step is not None:
            unknown = (batch + 1 - self._next_step, float("nan"), float("nan"))
            sums = np.array((seconds, *(self._call or unknown)))
            self.call = _figures(sums)
            self._epoch += sums
        self._warm = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the epoch's figures to its logs."""
        self._total += self._epoch
        self.summary = _figures(self._total)
        if logs is not None:
            logs.update(_figures(self._epoch))


def _figures(sums: np.ndarray) -> dict[str, float]:
    seconds, steps, examples, wait_seconds = (float(value) for value in sums)
    if steps == 0:
        return {}
    values = (round(examples / seconds, 1), round(1e3 * seconds / steps, 4), round(wait_seconds / seconds, 4))
    return {name: value for name, value in zip(FIGURES, values, strict=True) if np.isfinite(value)}
