"""Checkpoints: everything a run needs to go on, in one file that is either whole or absent.

    checkpoints/step-00000240.npz     weights, optimizer, metrics and random state by name;
    checkpoints/step-00000480.npz     position in epochs and data, and what callbacks remember, as JSON

State has no layout: a run resumes under another strategy or another number of workers. A damaged file is passed over
for the one before; one of another run is refused.

    training  ── snapshot ── steps ── steps ── steps ── snapshot ──      the state is copied out of the model,
                    └── a thread: write, flush, rename ──────────┘       and a step never waits for the disk
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
    """A checkpoint in memory, apart from the model and the callbacks, which may go on.

    Args:
        step: Updates of the optimizer.
        arrays: Everything by its name in the file.
    """

    step: int
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """Write and read the checkpoints of one run in a directory.

    Use it as a context around a training: at its end the last checkpoint is on the disk.

    Args:
        directory: The folder; made if absent.
        every_seconds: The least time between two checkpoints; 0 writes one after every call of the inner loop, at the
            disk's speed.
        keep: How many to keep, the newest.
        asynchronous: Whether `save` returns when the state is copied and a thread writes it; otherwise when it is
            written. At most one write is under way.
        run: The identity of the run, which its files carry; None for that of the files in the folder, or a new one.

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
        """Begin a training."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the last write. Its error is raised, or told on standard error where another one leaves already."""
        try:
            self.wait()
        except OSError as not_written:
            if error is None:
                raise
            print(f"warning: the last checkpoint is not written: {not_written}.", file=sys.stderr)

    def due(self) -> bool:
        """Say whether the time for the next checkpoint has come; not while one is being written.

        Raises:
            OSError: If the last one could not be written.
        """
        if self._every_seconds > 0 and self._background.busy():
            return False
        self.wait()
        return time.monotonic() - self._saved_at >= self._every_seconds

    def save(self, model: keras.Model, position: Position, callbacks: dict[str, Any], parts: Parts = ()) -> Path | None:
        """Write a checkpoint and remove the oldest beyond `keep`; first wait for a write under way.

        Args:
            model: The model, with its optimizer and metrics.
            position: The position of the run.
            callbacks: JSON values and arrays, as `callback_state.remembered` returns them.
            parts: What each replica has counted, as `Strategy.metric_parts` returns it.

        Returns:
            The file, whole after `wait`; None if a weight is not finite, since such a checkpoint would replace a good
            one.

        Raises:
            OSError: If the disk is full or the folder cannot be written; earlier checkpoints stay. Of an asynchronous
                write it comes from the next call of `save`, `due` or `wait`.
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
        """Copy all that a checkpoint holds.

        Args:
            model: The model, with its optimizer and metrics.
            position: The position of the run.
            callbacks: JSON values and arrays, as `callback_state.remembered` returns them.
            parts: What each replica has counted, as `Strategy.metric_parts` returns it.

        Returns:
            The copy; None if a weight is not finite.
        """
        arrays = dict(model_state.read_arrays(model))
        names = model_state.names(model)
        named = {names[id(variable)]: values for variable, values in parts if id(variable) in names}
        arrays |= {name: model_state.storable(values.sum(axis=0, dtype=values.dtype)) for name, values in named.items()}
        if not all(np.isfinite(array).all() for name, array in arrays.items() if name.startswith("weights/")):
            return None
        step = int(model.optimizer.iterations.numpy())
        return Snapshot(step, metadata.pack(arrays, named, step, position, callbacks, self._identity()))

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            OSError: If it could not be written.
        """
        self._background.wait()

    def redirect(self, directory: Path) -> None:
        """Write the next checkpoints into another folder, and give up one that could not be written.

        Args:
            directory: The folder; made if absent.
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
        """Load the newest readable checkpoint into the model.

        Args:
            model: The model, with its optimizer and metrics.
            assign: Sets a variable.
            assign_parts: Gives each replica the part that it has counted; None where the sum is enough.

        Returns:
            The position and the state of the callbacks; None if there is no checkpoint.

        Raises:
            ValueError: If the checkpoint is of another model or another run, or every checkpoint is damaged.
            OSError: If the folder cannot be written: better now than at the first checkpoint.
        """
        self._check_writable()
        found = self._newest()
        return None if found is None else self._assign(model, found[1], assign, assign_parts)

    def read(self) -> bytes | None:
        """Return the newest readable checkpoint in one piece, to `load` it where there is no disk.

        Returns:
            The bytes; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
            OSError: If the folder cannot be written.
        """
        self._check_writable()
        while (found := self._newest()) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed since by the process that trains
                return found[0].read_bytes()
        return None

    def load(
        self,
        model: keras.Model,
        blob: bytes,
        assign: model_state.Assign = keras.Variable.assign,
        assign_parts: model_state.Assign | None = None,
    ) -> tuple[Position, dict[str, Any]]:
        """Load into the model what `read` returned, here or on another worker.

        Args:
            model: The model, with its optimizer and metrics.
            blob: A checkpoint in one piece.
            assign: Sets a variable.
            assign_parts: Gives each replica the part that it has counted; None where the sum is enough.

        Returns:
            The position and the state of the callbacks.

        Raises:
            ValueError: If the checkpoint is of another model, or damaged.
        """
        return self._assign(model, metadata.unpack(blob), assign, assign_parts)

    def position(self) -> Position | None:
        """Return where the newest readable checkpoint stands; None if there is no checkpoint.

        Raises:
            ValueError: If every checkpoint is damaged.
        """
        found = self._newest()
        return None if found is None else found[1].position

    def _make(self) -> None:
        """Make the folder; only once, since what is taken away from a run that trains must be noticed."""
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
        """Read the newest checkpoint that is whole."""
        self.wait()
        paths = file_format.paths(self.directory)
        for path in reversed(paths):
            try:
                found = metadata.unpack(path)
                if found.step not in (None, file_format.step_of(path)):
                    raise file_format.DamagedError(f"it is of step {found.step}")
            except FileNotFoundError:  # removed since by the process that trains: there is a newer one
                return self._newest()
            except file_format.DamagedError as error:
                self._warn_once(path, error)
            else:
                self._refuse_others(paths)
                return path, found
        if paths:
            raise ValueError(
                f"Every checkpoint in {self.directory} is damaged, the newest is {paths[-1].name}. "
                "Restore the files, or delete the folder to begin anew."
            )
        return None

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        """Refuse a folder that holds checkpoints of another run: they would be resumed, or removed as the oldest."""
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
        # Older files do not know their step.
        origin = f"The newest file in {self.directory}" if found.step is None else str(self._path(found.step))
        if model.built:  # and perhaps only evaluated so far
            for optimizer, weights in objective.updates_of(model):
                if optimizer is not None and not optimizer.built:
                    with model.distribute_strategy.scope():
                        optimizer.build(weights)
        model_state.assign_arrays(model, found.arrays, origin, assign)
        if assign_parts is not None:
            model_state.assign_parts(model, found.parts, assign_parts)
        return found.position, found.callbacks

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.npz"
