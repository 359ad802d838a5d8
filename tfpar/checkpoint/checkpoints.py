"""Checkpoints: everything that a run needs to resume, in a file that is either complete or absent.

    checkpoints/step-00000240.npz     weights, optimizer, metrics and random state by name;
    checkpoints/step-00000480.npz     position, and the state of callbacks, as JSON

In a pipeline across workers each other process writes the arrays that it holds to a part file, which the file names
(`part_files`). A checkpoint has no layout: a run can resume under another strategy or another number of workers. In
place of a damaged file the previous one is used; a file of another run is refused.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.checkpoint import file_format, held_copies, holders, metadata, model_state, part_files
from tfpar.checkpoint.background_writer import Background
from tfpar.checkpoint.folder import Folder
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
        arrays: The arrays of this process by their names in the file.
        state: The JSON of the file.
        copies: The arrays of other processes, in their memory.
    """

    step: int
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    copies: Sequence[held_copies.Copies]


class Checkpoints:
    """Write and read the checkpoints of one run in a directory.

    As a context around a training it waits at the end until the last checkpoint is on the disk.

    Args:
        directory: The folder; created if absent. In a pipeline across workers all machines must share it.
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
        self._folder = Folder(Path(directory), run)
        self._every_seconds = every_seconds
        self._keep = keep
        self._asynchronous = asynchronous
        self._is_made = False
        self._background = Background("tfpar checkpoint")
        self._saved_at = time.monotonic()

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._folder.path

    def __enter__(self) -> Checkpoints:
        """Return the object itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the last write, and raise its error, or print it if the context ends with another error."""
        try:
            self.wait()
        except (OSError, tf.errors.OpError) as not_written:  # the latter of a worker that is lost
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
        arrays = part_files.with_parts(path, snapshot.arrays, snapshot.state, snapshot.copies)
        write_file = functools.partial(file_format.write, path, arrays, self._keep)
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
        variables = model_state.state_variables(model)
        copies, finite = held_copies.copy(model, variables)
        if not finite:
            return None
        arrays, finite = model_state.read_at_once(model, without=holders.hosts_of(variables))
        if not finite:
            return None
        names = model_state.names(model)
        named = {names[id(variable)]: values for variable, values in parts if id(variable) in names}
        arrays |= {name: model_state.storable(values.sum(axis=0, dtype=values.dtype)) for name, values in named.items()}
        step = int(model.optimizer.iterations.numpy())
        return Snapshot(step, *metadata.pack(arrays, named, step, position, callbacks, self._folder.identity()), copies)

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
        with contextlib.suppress(OSError, tf.errors.OpError):
            self.wait()
        self._folder.path, self._is_made = directory, False

    def restore(
        self,
        model: keras.Model,
        assign: model_state.Assign = keras.Variable.assign,
        assign_parts: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]] | None:
        """Restore the newest readable checkpoint; variables of other processes are read there.

        Args:
            model: The model, with its optimizer and metrics.
            assign: Sets a variable.
            assign_parts: Sets the metric variable of each replica; None if only their sum is needed.

        Returns:
            The position and the state of the callbacks; None if there is no checkpoint.

        Raises:
            ValueError: If the checkpoint is of another model or another run, every checkpoint is damaged, or a process
                that holds variables does not see the folder.
            OSError: If the folder cannot be written, which would fail at the first checkpoint.
        """
        self._check_writable()
        if file_format.paths(self.directory):
            _build_optimizers(model)
        hosts = holders.hosts_of(model_state.state_variables(model))
        holders.check_folder(self.directory, sorted(set(hosts.values())))
        found = self._newest(hosts)
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
        while (found := self._newest({})) is not None:
            if found[1].has_part_files:
                return metadata.to_bytes(found[1])
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
        _build_optimizers(model)
        return self._assign(model, metadata.unpack(blob), assign, assign_parts)

    def position(self) -> Position | None:
        """Return the position of the newest readable checkpoint; None if there is no checkpoint.

        Of part files the sizes are compared, and the checksums only in `restore`.

        Raises:
            ValueError: If every checkpoint is damaged.
        """
        found = self._newest(None)
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

    def _newest(self, hosts: Mapping[str, str] | None) -> tuple[Path, Checkpoint] | None:
        self.wait()
        return self._folder.newest(hosts)

    def _assign(
        self, model: keras.Model, found: Checkpoint, assign: model_state.Assign, assign_parts: model_state.Assign | None
    ) -> tuple[Position, dict[str, Any]]:
        # Older files do not contain their step.
        origin = f"The newest file in {self.directory}" if found.step is None else str(self._path(found.step))
        model_state.assign_arrays(model_state.state_variables(model), found.arrays, origin, assign)
        if assign_parts is not None:
            model_state.assign_parts(model, found.parts, assign_parts)
        return found.position, found.callbacks

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.npz"


def _build_optimizers(model: keras.Model) -> None:
    """Create the variables of optimizers: a model that was only evaluated has one without."""
    if model.built:
        for optimizer, weights in objective.updates_of(model):
            if optimizer is not None and not optimizer.built:
                with model.distribute_strategy.scope():
                    optimizer.build(weights)
