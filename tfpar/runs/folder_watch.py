"""A run whose folder is removed or renamed while it trains: it stops with a checkpoint where that can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfpar.callbacks import MetricsFile
from tfpar.checkpoint import Checkpoints
from tfpar.runs.directory import RunDirectory


class FolderWatch(keras.callbacks.Callback):
    """Interrupt a training whose folder is gone, and let its last checkpoint be written elsewhere.

    It comes before the callbacks that write into the folder.

    Args:
        directory: The folder, claimed.
        checkpoints: Those of the training.
        metrics_file: That of the training.
        interrupt: Ends the training after its step, with a checkpoint.

    Example:
        >>> watch = FolderWatch(directory, checkpoints, metrics_file, trainer.interrupt)
        >>> trainer.fit(dataset, callbacks=[watch, metrics_file], checkpoints=checkpoints)
    """

    chief_only = True
    single_batches = False
    forgets = True

    def __init__(
        self,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        metrics_file: MetricsFile,
        interrupt: Callable[[], None],
    ) -> None:
        super().__init__()
        self.kept_in: Path | None = None
        self._directory, self._checkpoints, self._metrics_file = directory, checkpoints, metrics_file
        self._interrupt = interrupt

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Look after every call of the inner loop, which takes microseconds."""
        self._look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Look before the epoch's line is written."""
        self._look()

    def _look(self) -> None:
        if self.kept_in is None and not self._directory.is_there():
            self.kept_in = self._directory.rescue()
            self._checkpoints.redirect(self.kept_in / self._directory.checkpoints.name)
            self._metrics_file.path = self.kept_in / self._directory.metrics.name
            self._interrupt()
