"""A worker of `benchmarks.restart`, `python -m benchmarks.restart_worker FOLDER STRATEGY`, with its files there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
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


def hybrid() -> tfpar.Strategy:
    """Return two stages on each worker."""
    tfpar.use_logical_cpus(2)
    return tfpar.Hybrid(tfpar.Pipeline(2, 4))


STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "multi_worker": tfpar.MultiWorker,
    "hybrid": hybrid,
    "pipeline": lambda: tfpar.Pipeline(2, 4, across_workers=True),
}


def main(folder: Path, name: str) -> None:
    """Train until the process is ended.

    Args:
        folder: The folder of checkpoints and records.
        name: The strategy.
    """
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    strategy = STRATEGIES[name]()
    trainer = tfpar.Trainer(lambda: workloads.build_model("cnn"), strategy, seed=0)
    data = workloads.dataset("cnn", 128, 20).repeat()
    checkpoints = tfpar.Checkpoints(folder / "checkpoints", every_seconds=CHECKPOINT_SECONDS)
    records = [Record(folder / "steps")] if strategy.is_chief else []
    trainer.fit(data, epochs=1, steps_per_epoch=100_000, verbose=0, callbacks=records, checkpoints=checkpoints)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
