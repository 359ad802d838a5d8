"""Checkpoints: everything a run needs to go on, in one file that is either whole or absent.

    checkpoints/step-00000240.npz     weights, optimizer, metrics and random state by name;
    checkpoints/step-00000480.npz     position in epochs and data, and what callbacks remember, as JSON

State has no layout: it is kept by the names of layers, never by device or replica, so a run resumes under another
strategy. A file is written beside its place, flushed and renamed, so a crash never leaves half of one under a good
name; a damaged one is passed over for the one before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpar.callback_state import extract_arrays, insert_arrays


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands, in its epochs and in its data.

    Args:
        epoch: Completed epochs.
        step: Completed steps of the epoch that has begun.
        passes: Passes over the dataset that have begun before the current one.
        batches: Batches taken from the current pass.
        stopped: Whether a callback has ended the training.
    """

    epoch: int = 0
    step: int = 0
    passes: int = 0
    batches: int = 0
    stopped: bool = False


class Checkpoints:
    """Write and read the checkpoints of one run in a directory.

    Args:
        directory: The folder; made if absent.
        every_seconds: The least time between two checkpoints; 0 writes one after every call of the inner loop.
        keep: How many to keep, the newest.

    Raises:
        ValueError: If `keep` is below 1 or `every_seconds` negative.

    Example:
        >>> trainer.fit(dataset, epochs=5, checkpoints=tfpar.Checkpoints("runs/digits/checkpoints"))
    """

    def __init__(self, directory: str | Path, every_seconds: float = 60.0, keep: int = 3) -> None:
        if keep < 1 or every_seconds < 0:
            raise ValueError(
                f"keep must be at least 1 and every_seconds at least 0, received keep={keep} and "
                f"every_seconds={every_seconds}."
            )
        self.directory = Path(directory)
        self._every_seconds = every_seconds
        self._keep = keep
        self._saved_at = time.monotonic()
        self._damaged: set[Path] = set()

    def due(self) -> bool:
        """Say whether the time for the next checkpoint has come."""
        return time.monotonic() - self._saved_at >= self._every_seconds

    def save(self, model: keras.Model, position: Position, callbacks: dict[str, Any]) -> Path | None:
        """Write a checkpoint and remove the oldest beyond `keep`.

        Args:
            model: The model, with its optimizer and metrics.
            position: Where the run stands.
            callbacks: JSON values and arrays, as `callback_state.remembered` returns them.

        Returns:
            The file; None if a weight is not finite, since such a checkpoint would replace a good one.

        Raises:
            OSError: If the disk is full or the folder cannot be written; earlier checkpoints stay.
        """
        arrays = {name: _to_array(variable) for name, variable in state_variables(model).items()}
        if not all(np.isfinite(array).all() for name, array in arrays.items() if name.startswith("weights/")):
            return None
        step = int(model.optimizer.iterations.numpy())
        path = self.directory / f"step-{step:08d}.npz"
        extracted: dict[str, np.ndarray] = {}
        text = json.dumps({"position": dataclasses.asdict(position), "callbacks": extract_arrays(callbacks, extracted)})
        self._write(path, {**arrays, **extracted, "state.json": np.array(text)})
        for old in self._paths()[: -self._keep]:
            old.unlink()
        self._saved_at = time.monotonic()
        return path

    def _write(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_by_a_crash in self.directory.glob("*.unfinished"):
            left_by_a_crash.unlink()
        unfinished = path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def restore(self, model: keras.Model) -> tuple[Position, dict[str, Any]] | None:
        """Load the newest readable checkpoint into the model.

        Returns:
            The position and the state of the callbacks; None if there is no checkpoint.

        Raises:
            ValueError: If the checkpoint is of another model, or every checkpoint is damaged.
            OSError: If the folder cannot be written: better now than at the first checkpoint.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.directory):
            pass
        found = self._newest()
        if found is None:
            return None
        path, arrays, state = found
        _assign(model, arrays, path)
        return Position(**state["position"]), insert_arrays(state["callbacks"], arrays)

    def position(self) -> Position | None:
        """Return where the newest readable checkpoint stands; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
        """
        found = self._newest()
        return None if found is None else Position(**found[2]["position"])

    def _newest(self) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]] | None:
        """Read the newest checkpoint that is whole: its file, its arrays, its JSON."""
        paths = self._paths()
        for path in reversed(paths):
            try:
                with np.load(path, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
                return path, arrays, json.loads(str(arrays.pop("state.json")))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                self._warn_once(path, error)
        if paths:
            raise ValueError(
                f"Every checkpoint in {self.directory} is damaged, the newest is {paths[-1].name}. "
                "Restore the files, or delete the folder to begin anew."
            )
        return None

    def _warn_once(self, path: Path, error: Exception) -> None:
        if path not in self._damaged:
            self._damaged.add(path)
            print(f"warning: {path} is damaged ({error}); using the checkpoint before it.", file=sys.stderr)

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob("step-*.npz"))


def state_variables(model: keras.Model) -> dict[str, Any]:
    """Return every variable of a training run by name: weights and random state, optimizer, metrics.

    The names are those of layers and slots, without the numbers that Keras gives to a name's second use in one
    process, so that the same model function gives the same names. The order tells apart what is left equal.

    Args:
        model: A built and compiled model.
    """
    groups = {
        "weights": model.variables,
        "optimizer": model.optimizer.variables,
        "metrics": [variable for metric in model.metrics for variable in metric.variables],
    }
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for group, variables in groups.items():
        for variable in variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            path = re.sub(r"_\d+(?=[_/]|$)", "", variable.path)
            name, count = f"{group}/{path}", 1
            while name in named:
                count += 1
                name = f"{group}/{path}#{count}"
            named[name] = variable
    return named


def _to_array(variable: Any) -> np.ndarray:
    array = np.asarray(variable.numpy())
    # NumPy stores no bfloat16; every bfloat16 is exactly a float32.
    return array.astype("float32") if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def _assign(model: keras.Model, arrays: dict[str, np.ndarray], path: Path) -> None:
    variables = state_variables(model)
    saved = {name: array.shape for name, array in arrays.items() if not name.startswith("callbacks/")}
    wanted = {name: tuple(variable.shape) for name, variable in variables.items()}
    if saved != wanted:
        name = next(name for name in [*wanted, *saved] if saved.get(name) != wanted.get(name))
        raise ValueError(
            f"{path} is a checkpoint of another model: {name!r} has shape {saved.get(name, 'none')} there and "
            f"{wanted.get(name, 'none')} in this model. Resume with the model that wrote it, or use another directory."
        )
    for name, variable in variables.items():
        variable.assign(arrays[name])
