"""The folder with the checkpoints of a run: its newest undamaged checkpoint, and the identity of the run."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpar.checkpoint import file_format, metadata, remote_arrays
from tfpar.checkpoint.metadata import Checkpoint


class Folder:
    """The folder with the checkpoints of a run.

    Args:
        path: The folder.
        run: The identity of the run. None: that of the checkpoints in the folder, or a new one.
    """

    def __init__(self, path: Path, run: str | None) -> None:
        self.path = path
        self._run = run
        self._damaged: set[Path] = set()

    def identity(self) -> str:
        """Return the identity of the run."""
        if self._run is None:
            runs = (file_format.read_run(path) for path in reversed(file_format.paths(self.path)))
            self._run = next((run for run in runs if run is not None), uuid.uuid4().hex)
        return self._run

    def newest(self, hosts: Mapping[str, str] | None = None) -> tuple[Path, Checkpoint] | None:
        """Read the newest undamaged checkpoint.

        Args:
            hosts: For arrays that other processes read, the CPU of that process by array name. None: read no state
                variables, only the rest of the checkpoint.

        Returns:
            The file and the checkpoint; None if there is none.

        Raises:
            ValueError: If every checkpoint is damaged, or one is of another run.
        """
        paths = file_format.paths(self.path)
        for path in reversed(paths):
            try:
                checkpoint = _read(path, hosts)
            except FileNotFoundError:  # the training process has removed it, and so has written a newer one
                return self.newest(hosts)
            except file_format.DamagedError as error:
                self._warn_once(path, error)
            else:
                self._refuse_others(paths)
                return path, checkpoint
        if paths:
            raise ValueError(
                f"Every checkpoint in {self.path} is damaged, the newest is {paths[-1].name}. "
                "Restore the files, or delete the folder to start from the beginning."
            )
        return None

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        """Raise an error if there are checkpoints of another run: they would be resumed from, or removed."""
        runs = {path: file_format.read_run(path) for path in paths}
        others = [path for path, run in runs.items() if run not in (None, self.identity())]
        if others:
            raise ValueError(
                f"{others[-1]} is a checkpoint of another run. Move it away to resume this run from its own, or resume "
                "that run where it was trained."
            )

    def _warn_once(self, path: Path, error: Exception) -> None:
        if path not in self._damaged:
            self._damaged.add(path)
            print(f"warning: {path} is damaged ({error}); using the checkpoint before it.", file=sys.stderr)


def _read(path: Path, hosts: Mapping[str, str] | None) -> Checkpoint:
    checkpoint = metadata.unpack(path, lambda name: hosts is None or name in hosts)
    if checkpoint.step != file_format.parse_step(path):
        raise file_format.DamagedError(f"it is of step {checkpoint.step}")
    if not hosts:
        return checkpoint
    try:
        arrays = remote_arrays.read(checkpoint.stored, hosts)
    except FileNotFoundError as error:
        if not path.exists():
            raise
        raise file_format.DamagedError(f"its holders do not find {Path(error.filename).name}") from error
    return dataclasses.replace(checkpoint, arrays={**checkpoint.arrays, **arrays}, stored={})
