"""TensorBoard curves by step, which complement those by epoch from Keras' own callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.callbacks import Throughput


class StepSummaries(keras.callbacks.Callback):
    """Write loss, metrics and speed to TensorBoard after each call of the inner loop, about ten times a second.

    As in Keras' progress bar, loss and metrics are means over the epoch so far.

    Args:
        folder: A separate folder, since TensorBoard follows one file per folder.
        throughput: The speed measurement, which must precede this callback.

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
        """Reset the step count of the epoch."""
        self._epoch_began = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compute the first step of the epoch; with gradient accumulation, an update takes several steps."""
        if self._epoch_began is None:
            optimizer = self.model.optimizer
            accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
            self._epoch_began = int(optimizer.iterations.numpy()) * accumulated - batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write a point per log."""
        with self._writer.as_default(step=(self._epoch_began or 0) + batch + 1):
            for name, value in (logs or {}).items():
                if np.ndim(value) == 0:
                    tf.summary.scalar(f"batch_{name}", value)
            for name, value in self._throughput.call.items():
                tf.summary.scalar(f"batch_{name}", value)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Flush the file."""
        self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the file."""
        self._writer.close()
