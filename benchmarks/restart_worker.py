"""A worker of `benchmarks.restart`, `python -m benchmarks.restart_worker FOLDER`: it keeps everything in the folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import keras

import tfpar
from benchmarks import workloads
from benchmarks.restart import CHECKPOINT_SECONDS, Step, as_lines


class Record(keras.callbacks.Callback):
    """Write a line after each step.

    Args:
        path: The file that grows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write the process, the step and the time."""
        self._file.write(as_lines([Step(os.getpid(), batch, time.time())]))


def main(folder: Path) -> None:
    """Train until the process is ended.

    Args:
        folder: The folder of checkpoints and records.
    """
    strategy = tfpar.MultiWorker()
    trainer = tfpar.Trainer(workloads.cnn_model, strategy, seed=0)
    data = workloads.dataset("cnn", 128, 20).repeat()
    checkpoints = tfpar.Checkpoints(folder / "checkpoints", every_seconds=CHECKPOINT_SECONDS)
    record = Record(folder / f"steps-{strategy.rank}")
    trainer.fit(data, epochs=1, steps_per_epoch=100_000, verbose=0, callbacks=[record], checkpoints=checkpoints)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
