"""The folder of one run: whose it is, what lies where, and that nobody else writes into it; no TensorFlow."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from tfpar import config

_NOT_SET = "not set"


class RunDirectory:
    """A folder that holds one configuration's run.

        config.toml      the resolved run, for `--config` again
        metrics.jsonl    one line an epoch
        tensorboard/     logs for `tensorboard --logdir`
        checkpoints/     the newest few
        model.keras      the trained model
        results.json     its metrics and the speed of its training, once it is trained to its end
        optimizer.json   the optimizer as it was built
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
        self.optimizer = self.path / "optimizer.json"
        self.resumed: config.Run | None = None  # the run that the folder held when it was claimed
        self._lock: IO[str] | None = None

    def claim(self, run: config.Run) -> None:
        """Take the folder for a run: make it, or resume what it holds if that trains the same weights.

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
            self.resumed = self._refuse_other(run)
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
        _write(self.config, text)

    def finished(self, run: config.Run) -> dict[str, Any] | None:
        """Return the results of a run that is trained to its end; None if it is not, or is to train more epochs.

        Args:
            run: The run, for which the folder is claimed.
        """
        if self.resumed is None or self.resumed.training.epochs != run.training.epochs or not self.results.exists():
            return None
        results: dict[str, Any] = json.loads(self.results.read_text())
        return results

    def reopen(self) -> None:
        """Take the results away before more epochs are trained: whoever finds them takes the run for finished.

        Raises:
            OSError: If they cannot be removed.
        """
        self.results.unlink(missing_ok=True)

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results, whole or not at all: they say that the run is trained to its end.

        Args:
            results: JSON values by name.

        Raises:
            OSError: If they cannot be written.
        """
        _write(self.results, json.dumps(results, indent=2) + "\n")

    def _refuse_other(self, run: config.Run) -> config.Run:
        """Return the run that the folder holds; refuse one that trains other weights."""
        try:
            there = config.load(self.config)
        except ValueError as error:
            raise ValueError(f"{self.config} cannot be read: {error} Choose another --directory.") from error
        differing = [
            f"{key} is {old} there and {new} now"
            for key, old, new in changes(there, run)
            if config.changes_weights(key)
        ]
        if differing:
            raise ValueError(
                f"{self.path} holds another configuration's run ({'; '.join(differing[:3])}). Choose another "
                f"--directory, or repeat that run with --config {self.config}, or delete the folder."
            )
        return there


def changes(old: config.Run, new: config.Run) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two runs differ, each with both values; "not set" where a table lacks a key.

    Args:
        old: A run.
        new: Another run.

    Example:
        >>> changes(config.Run(), config.load(None, ["training.epochs=20"]))
        [('training.epochs', 10, 20)]
    """
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    pairs = [(key, before.get(key, _NOT_SET), after.get(key, _NOT_SET)) for key in {**before, **after}]
    return [(key, one, other) for key, one, other in pairs if one != other]


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in tree.items()
        for pair in (_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)])
    ]
