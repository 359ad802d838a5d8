"""Checkpoints: everything that a run needs to resume, in one file that is either complete or absent.

    checkpoints/step-00000240.npz     weights, optimizer, metrics and random state by name;
    checkpoints/step-00000480.npz     position, and the state of callbacks, as JSON

A checkpoint has no layout: a run can resume under another strategy or another number of workers. Instead of a damaged
file the previous one is used; a file of another run is refused.

    training  ── snapshot ── steps ── steps ── steps ── snapshot ──      the state is copied from the model,
                    └── a thread: write, flush, rename ──────────┘       and no step waits for the disk
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import numpy as np

from tfpar.checkpoint import file_format, metadata, model_state
from tfpar.checkpoint.background_writer import Background
from tfpar.checkpoint.metadata import Checkpoint, Position
from tfpar.messages import keyword_arguments
from tfpar.reduction import objective

__all__ = ["Checkpoints", "Position", "Snapshot"]


Parts = Sequence[tuple[keras.Variable, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A checkpoint in memory, copied from the model and the callbacks.

    Args:
        step: Updates of the optimizer.
        arrays: All arrays by their names in the file.
    """

    step: int
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """Write and read the checkpoints of one run in a directory.

    As a context around a training it waits at the end until the last checkpoint is on the disk.

    Args:
        directory: The folder; created if absent.
        every_seconds: The minimum time between two checkpoints; 0 saves one after every call.
        keep: Number of the newest checkpoints to keep.
        asynchronous: Whether `save` returns once the state is copied, and a thread writes the file; otherwise `save`
            returns once the file is written. There is at most one write at a time.
        run: The identity of the run, stored in its files; None for that of the files in the folder, or a new one.

    Raises:
        ValueError: If `keep` is below 1 or `every_seconds` negative.

    Example:
        >>> trainer.fit(dataset, epochs=5, checkpoints=tfpar.Checkpoints("runs/digits/checkpoints"))
    """

    @keyword_arguments.named
    def __init__(
        self,
        directory: str | Path,
        every_seconds: float = 60.0,
        keep: int = 3,
        asynchronous: bool = True,
        run: str | None = None,
    ) -> None:
        if keep < 1 or every_seconds < 0:
            raise ValueError(
                f"keep must be at least 1 and every_seconds at least 0, received keep={keep} and "
                f"every_seconds={every_seconds}."
            )
        self.directory = Path(directory)
        self._every_seconds = every_seconds
        self._keep = keep
        self._asynchronous = asynchronous
        self._run = run
        self._is_made = False
        self._background = Background("tfpar checkpoint")
        self._saved_at = time.monotonic()
        self._damaged: set[Path] = set()

    def __enter__(self) -> Checkpoints:
        """Return the object itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the last write, and raise its error, or print it if the context ends with another error."""
        try:
            self.wait()
        except OSError as not_written:
            if error is None:
                raise
            print(f"warning: the last checkpoint is not written: {not_written}.", file=sys.stderr)

    def due(self) -> bool:
        """Return whether the next checkpoint is due; False while one is being written.

        Raises:
            OSError: If the last checkpoint could not be written.
        """
        if self._every_seconds > 0 and self._background.busy():
            return False
        self.wait()
        return time.monotonic() - self._saved_at >= self._every_seconds

    def save(self, model: keras.Model, position: Position, callbacks: dict[str, Any], parts: Parts = ()) -> Path | None:
        """Save a checkpoint and remove the oldest beyond `keep`; wait for the previous write first.

        Args:
            model: The model, with its optimizer and metrics.
            position: The position of the run.
            callbacks: JSON values and arrays, as `callback_state.remembered` returns them.
            parts: Metric variables of each replica, as `Strategy.metric_parts` returns them.

        Returns:
            The file, complete after `wait`; None if a weight is not finite, so that a good checkpoint is not replaced.

        Raises:
            OSError: If the disk is full or the folder cannot be written; earlier checkpoints are kept. For an
                asynchronous write it is raised by the next call of `save`, `due` or `wait`.
        """
        self.wait()
        self._make()
        snapshot = self.snapshot(model, position, callbacks, parts)
        self._saved_at = time.monotonic()
        if snapshot is None:
            return None
        path = self._path(snapshot.step)
        write_file = functools.partial(file_format.write, path, snapshot.arrays.items(), self._keep)
        if self._asynchronous:
            self._background.start(write_file)
        else:
            write_file()
        return path

    def snapshot(
        self, model: keras.Model, position: Position, callbacks: dict[str, Any], parts: Parts = ()
    ) -> Snapshot | None:
        """Copy the state of a checkpoint.

        Args:
            model: The model, with its optimizer and metrics.
            position: The position of the run.
            callbacks: JSON values and arrays, as `callback_state.remembered` returns them.
            parts: Metric variables of each replica, as `Strategy.metric_parts` returns them.

        Returns:
            The copy; None if a weight is not finite.
        """
        arrays, finite = model_state.read_at_once(model)
        if not finite:
            return None
        names = model_state.names(model)
        named = {names[id(variable)]: values for variable, values in parts if id(variable) in names}
        arrays |= {name: model_state.storable(values.sum(axis=0, dtype=values.dtype)) for name, values in named.items()}
        step = int(model.optimizer.iterations.numpy())
        return Snapshot(step, metadata.pack(arrays, named, step, position, callbacks, self._identity()))

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            OSError: If it could not be written.
        """
        self._background.wait()

    def redirect(self, directory: Path) -> None:
        """Save the next checkpoints in another folder, and ignore the error of the last write.

        Args:
            directory: The folder; created if absent.
        """
        with contextlib.suppress(OSError):
            self.wait()
        self.directory, self._is_made = directory, False

    def restore(
        self,
        model: keras.Model,
        assign: model_state.Assign = keras.Variable.assign,
        assign_parts: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]] | None:
        """Restore the newest readable checkpoint.

        Args:
            model: The model, with its optimizer and metrics.
            assign: Sets a variable.
            assign_parts: Sets the metric variable of each replica; None if only their sum is needed.

        Returns:
            The position and the state of the callbacks; None if there is no checkpoint.

        Raises:
            ValueError: If the checkpoint is of another model or another run, or every checkpoint is damaged.
            OSError: If the folder cannot be written, which would fail at the first checkpoint.
        """
        self._check_writable()
        found = self._newest()
        return None if found is None else self._assign(model, found[1], assign, assign_parts)

    def read(self) -> bytes | None:
        """Return the newest readable checkpoint as bytes, to `load` it on a worker without that disk.

        Returns:
            The bytes; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
            OSError: If the folder cannot be written.
        """
        self._check_writable()
        while (found := self._newest()) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed since by the training process
                return found[0].read_bytes()
        return None

    def load(
        self,
        model: keras.Model,
        blob: bytes,
        assign: model_state.Assign = keras.Variable.assign,
        assign_parts: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]]:
        """Restore the bytes that `read` returned, here or on another worker.

        Args:
            model: The model, with its optimizer and metrics.
            blob: The bytes of a checkpoint.
            assign: Sets a variable.
            assign_parts: Sets the metric variable of each replica; None if only their sum is needed.

        Returns:
            The position and the state of the callbacks.

        Raises:
            ValueError: If the checkpoint is of another model, or damaged.
        """
        return self._assign(model, metadata.unpack(blob), assign, assign_parts)

    def position(self) -> Position | None:
        """Return the position of the newest readable checkpoint; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
        """
        found = self._newest()
        return None if found is None else found[1].position

    def _make(self) -> None:
        """Create the folder, but only once: a folder that is removed during a run must cause an error."""
        if not self._is_made:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._is_made = True

    def _check_writable(self) -> None:
        self._make()
        with tempfile.TemporaryFile(dir=self.directory):
            pass

    def _identity(self) -> str:
        """Return the identity of the run: the given one, that of the files in the folder, or a new one."""
        if self._run is None:
            found = (file_format.run_of(path) for path in reversed(file_format.paths(self.directory)))
            self._run = next((run for run in found if run is not None), uuid.uuid4().hex)
        return self._run

    def _newest(self) -> tuple[Path, Checkpoint] | None:
        """Read the newest checkpoint that is not damaged."""
        self.wait()
        paths = file_format.paths(self.directory)
        for path in reversed(paths):
            try:
                found = metadata.unpack(path)
                if found.step not in (None, file_format.step_of(path)):
                    raise file_format.DamagedError(f"it is of step {found.step}")
            except FileNotFoundError:  # removed since by the training process: there is a newer one
                return self._newest()
            except file_format.DamagedError as error:
                self._warn_once(path, error)
            else:
                self._refuse_others(paths)
                return path, found
        if paths:
            raise ValueError(
                f"Every checkpoint in {self.directory} is damaged, the newest is {paths[-1].name}. "
                "Restore the files, or delete the folder to start from the beginning."
            )
        return None

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        """Refuse a folder with checkpoints of another run: they would be resumed, or removed as the oldest."""
        runs = {path: file_format.run_of(path) for path in paths}
        others = [path for path, run in runs.items() if run not in (None, self._identity())]
        if others:
            raise ValueError(
                f"{others[-1]} is a checkpoint of another run. Move it away to resume this run from its own, or resume "
                "that run where it was trained."
            )

    def _warn_once(self, path: Path, error: Exception) -> None:
        if path not in self._damaged:
            self._damaged.add(path)
            print(f"warning: {path} is damaged ({error}); using the checkpoint before it.", file=sys.stderr)

    def _assign(
        self, model: keras.Model, found: Checkpoint, assign: model_state.Assign, assign_parts: model_state.Assign | None
    ) -> tuple[Position, dict[str, Any]]:
        # Older files do not contain their step.
        origin = f"The newest file in {self.directory}" if found.step is None else str(self._path(found.step))
        if model.built:  # a model that was only evaluated has an optimizer without variables
            for optimizer, weights in objective.updates_of(model):
                if optimizer is not None and not optimizer.built:
                    with model.distribute_strategy.scope():
                        optimizer.build(weights)
        model_state.assign_arrays(model_state.state_variables(model), found.arrays, origin, assign)
        if assign_parts is not None:
            model_state.assign_parts(model, found.parts, assign_parts)
        return found.position, found.callbacks

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.npz"
