"""Detection of a run directory that is removed or renamed during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfpar.callbacks import MetricsFile
from tfpar.checkpoint import Checkpoints
from tfpar.runs.directory import RunDirectory


class FolderWatch(keras.callbacks.Callback):
    """Interrupt training when its folder is gone, and redirect its last checkpoint and metrics.

    Place it before the callbacks that write into the folder.

    Args:
        directory: The claimed run directory.
        checkpoints: The checkpoints of the training.
        metrics_file: The metrics file of the training.
        interrupt: Ends the training after the current step, with a checkpoint.

    Attributes:
        kept_in: The folder of the redirected files; None while the run directory exists.

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
        """Check the folder, which takes microseconds."""
        self._check_folder()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check the folder before the epoch's line is written."""
        self._check_folder()

    def _check_folder(self) -> None:
        if self.kept_in is None and not self._directory.is_there():
            self.kept_in = self._directory.rescue()
            self._checkpoints.redirect(self.kept_in / self._directory.checkpoints.name)
            self._metrics_file.path = self.kept_in / self._directory.metrics.name
            self._interrupt()
