"""Checkpoints: all that a run needs to resume, in files that are written atomically by a thread.

    checkpoints/step-00000240.npz     weights, optimizer, metrics and random state by name;
    checkpoints/step-00000480.npz     position, and the state of callbacks, as JSON

In a pipeline over workers, each other process writes its arrays to a part file that this file names (`part_files`). A
checkpoint has no layout: a run can resume under another strategy or with another number of workers.

    training  ── snapshot ── steps ── steps ── steps ── snapshot ──
                    └── thread: write, flush, rename ────────────┘
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

from tfpar.checkpoint import file_format, holders, metadata, model_state, part_files, remote_copies
from tfpar.checkpoint.background_writer import Background
from tfpar.checkpoint.folder import Folder
from tfpar.checkpoint.metadata import Checkpoint, Position
from tfpar.messages import keyword_arguments
from tfpar.reduction import objective

__all__ = ["Checkpoints", "Position", "Snapshot"]


ReplicaMetrics = Sequence[tuple[keras.Variable, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of the training state, to be written as a checkpoint.

    Args:
        step: Number of optimizer updates.
        arrays: The arrays of this process, by name.
        state: The JSON of the checkpoint.
        copies: The arrays of other processes, in their memory.
    """

    step: int
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    copies: Sequence[remote_copies.Copies]


class Checkpoints:
    """Write and restore the checkpoints of one run.

    A damaged checkpoint is skipped with a warning; a checkpoint of another run is refused. As a context manager, it
    waits at its end until the last checkpoint is on disk.

    Args:
        directory: The folder; created if absent. In a pipeline over workers, all machines must share it.
        every_seconds: Minimum time between checkpoints; 0 writes one after every call of the compiled loop.
        keep: Number of checkpoints to keep; the oldest are removed.
        asynchronous: Whether a background thread writes the file while training continues.
        run: The identity of the run, stored in its checkpoints. None: that of the checkpoints in the folder, or a new
            one.

    Raises:
        ValueError: If `keep` is below 1 or `every_seconds` is negative.

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
        """The folder of the checkpoints."""
        return self._folder.path

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the last write; print its error, in place of raising it, if the block has raised another one."""
        try:
            self.wait()
        except (OSError, tf.errors.OpError) as write_error:  # the latter if a worker is lost
            if error is None:
                raise
            print(f"warning: the last checkpoint is not written: {write_error}.", file=sys.stderr)

    def due(self) -> bool:
        """Return whether it is time for a checkpoint; False while one is being written.

        Raises:
            OSError: If the last checkpoint could not be written.
        """
        if self._every_seconds > 0 and self._background.busy():
            return False
        self.wait()
        return time.monotonic() - self._saved_at >= self._every_seconds

    def save(
        self, model: keras.Model, position: Position, callbacks: dict[str, Any], replica_metrics: ReplicaMetrics = ()
    ) -> Path | None:
        """Write a checkpoint, after the previous write, and remove those beyond `keep`.

        Args:
            model: The model, with its optimizer and metrics.
            position: The position of the run.
            callbacks: The state of callbacks, from `callback_state.read`.
            replica_metrics: Metric variables and their values on each replica, from `Engine.replica_metrics`.

        Returns:
            The file, complete after `wait`; None if a weight is not finite, in which case nothing is written.

        Raises:
            OSError: If the file cannot be written. An asynchronous write raises it in the next `save`, `due` or `wait`.
        """
        self.wait()
        self._make_folder()
        snapshot = self.snapshot(model, position, callbacks, replica_metrics)
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
        self, model: keras.Model, position: Position, callbacks: dict[str, Any], replica_metrics: ReplicaMetrics = ()
    ) -> Snapshot | None:
        """Return a copy of the training state, from the arguments of `save`; None if a weight is not finite."""
        variables = model_state.state_variables(model)
        copies, finite = remote_copies.copy(model, variables)
        if not finite:
            return None
        arrays, finite = model_state.read_at_once(model, without=holders.remote_hosts(variables))
        if not finite:
            return None
        names = model_state.names(model)
        named = {names[id(variable)]: values for variable, values in replica_metrics if id(variable) in names}
        arrays |= {name: model_state.storable(values.sum(axis=0, dtype=values.dtype)) for name, values in named.items()}
        step = int(model.optimizer.iterations.numpy())
        return Snapshot(step, *metadata.pack(arrays, named, step, position, callbacks, self._folder.identity()), copies)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            OSError: If it could not be written.
        """
        self._background.wait()

    def redirect(self, directory: Path) -> None:
        """Write the next checkpoints to another folder, and ignore an error of the last write."""
        with contextlib.suppress(OSError, tf.errors.OpError):
            self.wait()
        self._folder.path, self._is_made = directory, False

    def restore(
        self,
        model: keras.Model,
        assign: model_state.Assign = keras.Variable.assign,
        assign_replicas: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]] | None:
        """Restore the newest undamaged checkpoint; other processes read their own variables.

        Args:
            model: The model, with its optimizer and metrics.
            assign: Sets a variable.
            assign_replicas: Sets a metric variable on each replica. None: only the sum over replicas is restored.

        Returns:
            The position and the state of callbacks; None if there is no checkpoint.

        Raises:
            ValueError: If the checkpoint is of another model or run, every checkpoint is damaged, or another process
                with variables of the model cannot access the folder.
            OSError: If the folder cannot be written, as the first checkpoint would need.
        """
        self._check_writable()
        if file_format.paths(self.directory):
            _build_optimizers(model)
        hosts = holders.remote_hosts(model_state.state_variables(model))
        holders.check_folder(self.directory, sorted(set(hosts.values())))
        newest = self._newest(hosts)
        return None if newest is None else self._assign(model, newest[1], assign, assign_replicas)

    def read(self) -> bytes | None:
        """Return the newest undamaged checkpoint as bytes for `load` on other workers; None if there is none.

        Raises:
            ValueError: If every checkpoint is damaged.
            OSError: If the folder cannot be written.
        """
        self._check_writable()
        while (newest := self._newest({})) is not None:
            path, checkpoint = newest
            if checkpoint.has_part_files:
                return metadata.to_bytes(checkpoint)
            with contextlib.suppress(FileNotFoundError):  # the training process has removed it
                return path.read_bytes()
        return None

    def load(
        self,
        model: keras.Model,
        blob: bytes,
        assign: model_state.Assign = keras.Variable.assign,
        assign_replicas: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]]:
        """Restore the bytes that `read` returned on any worker.

        Args:
            model: The model, with its optimizer and metrics.
            blob: The bytes of a checkpoint.
            assign: Sets a variable.
            assign_replicas: Sets a metric variable on each replica. None: only the sum over replicas is restored.

        Returns:
            The position and the state of callbacks.

        Raises:
            ValueError: If the checkpoint is of another model or damaged.
        """
        _build_optimizers(model)
        return self._assign(model, metadata.unpack(blob), assign, assign_replicas)

    def position(self) -> Position | None:
        """Return the position of the newest undamaged checkpoint; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
        """
        newest = self._newest(None)  # which compares the sizes of part files, not their checksums
        return None if newest is None else newest[1].position

    def _make_folder(self) -> None:
        """Create the folder, but only once: removing it during a run must cause an error."""
        if not self._is_made:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._is_made = True

    def _check_writable(self) -> None:
        self._make_folder()
        with tempfile.TemporaryFile(dir=self.directory):
            pass

    def _newest(self, hosts: Mapping[str, str] | None) -> tuple[Path, Checkpoint] | None:
        self.wait()
        return self._folder.newest(hosts)

    def _assign(
        self,
        model: keras.Model,
        checkpoint: Checkpoint,
        assign: model_state.Assign,
        assign_replicas: model_state.Assign | None,
    ) -> tuple[Position, dict[str, Any]]:
        origin = str(self._path(checkpoint.step))
        model_state.assign_arrays(model_state.state_variables(model), checkpoint.arrays, origin, assign)
        if assign_replicas is not None:
            model_state.assign_replica_metrics(model, checkpoint.replica_metrics, assign_replicas)
        return checkpoint.position, checkpoint.callbacks

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.npz"


def _build_optimizers(model: keras.Model) -> None:
    """Create the variables of optimizers, which a model has not if it was only evaluated."""
    if model.built:
        for optimizer, weights in objective.updates_of(model):
            if optimizer is not None and not optimizer.built:
                with model.distribute_strategy.scope():
                    optimizer.build(weights)
