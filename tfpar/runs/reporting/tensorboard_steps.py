"""TensorBoard's curves by step: what Keras' own callback writes by epoch, after every call of the inner loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.callbacks import Throughput


class StepSummaries(keras.callbacks.Callback):
    """Write loss, metrics and speed by step for TensorBoard, about ten times a second, without single batches.

    As in Keras' progress bar, loss and metrics are means of the epoch so far; the speed is that of the last steps.

    Args:
        folder: Where the files go; a folder of its own, as TensorBoard follows one file in a folder.
        throughput: Measures the speed; it comes before this callback.

    Example:
        >>> throughput = tfpar.Throughput()
        >>> trainer.fit(dataset, callbacks=[throughput, StepSummaries("logs/steps", throughput)])
    """

    chief_only = True
    single_batches = False
    forgets = True

    def __init__(self, folder: str | Path, throughput: Throughput) -> None:
        super().__init__()
        self._folder = str(folder)
        self._throughput = throughput
        self._writer: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Open the file."""
        self._writer = tf.summary.create_file_writer(self._folder)
        self._epoch_began: int | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget where the last epoch began."""
        self._epoch_began = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the steps of the run where the epoch begins; an accumulated gradient takes several."""
        if self._epoch_began is None:
            optimizer = self.model.optimizer
            accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
            self._epoch_began = int(optimizer.iterations.numpy()) * accumulated - batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the points of a call."""
        with self._writer.as_default(step=(self._epoch_began or 0) + batch + 1):
            for name, value in (logs or {}).items():
                if np.ndim(value) == 0:
                    tf.summary.scalar(f"batch_{name}", value)
            for name, value in self._throughput.call.items():
                tf.summary.scalar(f"batch_{name}", value)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Flush the logs of the epoch to the file."""
        self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the file."""
        self._writer.close()
