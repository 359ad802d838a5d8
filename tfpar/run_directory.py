"""The folder of one run: whose it is, what lies where, and that nobody else writes into it; no TensorFlow."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

from tfpar import config

_NOT_SET = object()


class RunDirectory:
    """A folder that holds one configuration's run.

        config.toml      the resolved run, for `--config` again
        metrics.jsonl    one line an epoch
        tensorboard/     logs for `tensorboard --logdir`
        checkpoints/     the newest few
        model.keras      the trained model
        results.json     its metrics and the speed of its training
        pipeline.png     with --trace: a step of the pipeline as planned and as run
        tensorflow.log   what TensorFlow's native code wrote

    Args:
        path: The folder.

    Example:
        >>> directory = RunDirectory("runs/digits")
        >>> directory.model.name
        'model.keras'
    """

    # What an earlier claim, cut short, can have left.
    _OWN = frozenset({".lock", "config.unfinished", "tensorflow.log"})

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.keras"
        self.results = self.path / "results.json"
        self.trace = self.path / "pipeline.png"
        self.native_log = self.path / "tensorflow.log"
        self._lock: IO[str] | None = None

    def claim(self, run: config.Run) -> None:
        """Take the folder for a run: make it, or go on with it if it holds the same run.

        Args:
            run: The resolved run.

        Raises:
            ValueError: If the folder holds another configuration's run, or files that are no run, or another process
                trains in it. Nothing in it is changed then.
            OSError: If it cannot be written.
        """
        if not self.config.exists() and self.path.exists() and not self._OWN.issuperset(os.listdir(self.path)):
            raise ValueError(
                f"{self.path} must be empty or hold a run, and it holds files without a config.toml. "
                "Choose another --directory."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Only one process can train in {self.path}, and another one does. "
                "Wait for it, or choose another --directory."
            ) from None
        # Until something is trained there is nothing to lose: a mistyped setting must not block its own correction.
        begun = self.metrics.exists() or self.model.exists() or any(self.checkpoints.glob("*.npz"))
        if self.config.exists() and begun:
            self._refuse_other(run)
        else:
            try:
                self.record(config.dump(run))
            except OSError:
                self._lock.close()
                raise

    def record(self, text: str) -> None:
        """Write config.toml, whole or not at all; it stays untouched where it says the same already.

        Args:
            text: The run as TOML.

        Raises:
            OSError: If it cannot be written.
        """
        if self.config.exists() and self.config.read_text() == text:
            return
        unfinished = self.config.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.replace(self.config)

    def _refuse_other(self, run: config.Run) -> None:
        try:
            there = config.load(self.config)
        except ValueError as error:
            raise ValueError(f"{self.config} cannot be read: {error} Choose another --directory.") from error
        old, new = dict(_flat(there.model_dump())), dict(_flat(run.model_dump()))
        differing = [
            f"{key} is {old.get(key, 'not set')} there and {new.get(key, 'not set')} now"
            for key in {**old, **new}
            if old.get(key, _NOT_SET) != new.get(key, _NOT_SET)
        ]
        if there != run:
            raise ValueError(
                f"{self.path} holds another configuration's run ({'; '.join(differing[:3])}). Choose another "
                f"--directory, or repeat that run with --config {self.config}, or delete the folder."
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in tree.items()
        for pair in (_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)])
    ]
