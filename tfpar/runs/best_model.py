"""The model of the best epoch, in a file of the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tfpar.files import atomic_file


class BestModel(keras.callbacks.ModelCheckpoint):
    """Save the model after each epoch that improves a log; the file is replaced whole.

    Args:
        path: A `.keras` file in an existing folder.
        monitor: The name of the log. An epoch without it, such as one that is not validated, saves nothing.
        mode: "min", "max", or "auto" for the direction that Keras infers.

    Example:
        >>> trainer.fit(dataset, validation_data=validation, callbacks=[BestModel("best.keras", "val_accuracy")])
    """

    single_batches = False  # Keras' class has hooks for batches, without an effect at the end of epochs

    def __init__(self, path: str | Path, monitor: str, mode: str = "auto") -> None:
        self._path = Path(path)
        self._unfinished = self._path.with_name(f".unfinished.{self._path.name}")
        literal = str(self._unfinished).replace("{", "{{").replace("}", "}}")  # Keras formats the path
        super().__init__(literal, monitor, save_best_only=True, mode=mode)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the model if the epoch is the best."""
        if self.monitor not in (logs or {}) or not self._path.parent.is_dir():
            return
        self._unfinished.unlink(missing_ok=True)  # of a process that was killed
        super().on_epoch_end(epoch, logs)
        if self._unfinished.exists():
            with atomic_file.new_by_path(self._path) as whole:
                self._unfinished.rename(whole)
