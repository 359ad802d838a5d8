"""The logs of each epoch in a JSON lines file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpar.files import json_lines


class MetricsFile(keras.callbacks.Callback):
    """Append the logs of each epoch to a file, one JSON object per line.

    A resumed run replaces the lines of the epochs that it repeats. Checkpoints contain the lines too, so that a lost or
    damaged file is restored.

    Args:
        path: The file, by convention `metrics.jsonl`, in an existing folder.

    Example:
        >>> trainer.fit(dataset, callbacks=[tfpar.MetricsFile("metrics.jsonl")])
    """

    chief_only = True

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.entries: list[dict[str, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the lines of an earlier `fit`; a checkpoint or the file restores those of this one."""
        self.entries = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Append the line of the epoch."""
        step = int(self.model.optimizer.iterations.numpy())
        line = {
            "epoch": epoch + 1,
            "step": step,
            **{name: np.asarray(value).tolist() for name, value in (logs or {}).items()},
        }
        entries = self.entries or self._read()
        self.entries = [*(entry for entry in entries if entry["epoch"] <= epoch), line]
        json_lines.write(self.path, self.entries)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the file if it was lost or changed."""
        if not self.entries:
            self.entries = self._read()
        if self.entries and json_lines.read(self.path) != (self.entries, []):
            json_lines.write(self.path, self.entries)

    def _read(self) -> list[dict[str, Any]]:
        """Return the entries of the file, for runs without checkpoints."""
        entries = {entry["epoch"]: entry for entry in json_lines.read_or_warn(self.path)}
        return [entries[epoch] for epoch in sorted(entries)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a `metrics.jsonl`; warn on standard error about damaged lines."""
    return json_lines.read_or_warn(path)
