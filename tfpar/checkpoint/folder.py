"""The checkpoints of one run in a folder: the newest readable one, and the identity of the run."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpar.checkpoint import file_format, held_arrays, metadata
from tfpar.checkpoint.metadata import Checkpoint


class Folder:
    """The checkpoints of one run in a folder.

    Args:
        path: The folder.
        run: The identity of the run; None for that of the files in the folder, or a new one.
    """

    def __init__(self, path: Path, run: str | None) -> None:
        self.path = path
        self._run = run
        self._damaged: set[Path] = set()

    def identity(self) -> str:
        """Return the identity of the run: the given one, that of the files in the folder, or a new one."""
        if self._run is None:
            found = (file_format.run_of(path) for path in reversed(file_format.paths(self.path)))
            self._run = next((run for run in found if run is not None), uuid.uuid4().hex)
        return self._run

    def newest(self, hosts: Mapping[str, str] | None = None) -> tuple[Path, Checkpoint] | None:
        """Read the newest checkpoint that is not damaged.

        Args:
            hosts: The CPU of the process that reads an array, by the names of arrays of other processes; None for a
                look at the rest of the checkpoint alone.

        Returns:
            Its file and the checkpoint; None if there is none.

        Raises:
            ValueError: If every checkpoint is damaged, or one is of another run.
        """
        paths = file_format.paths(self.path)
        for path in reversed(paths):
            try:
                found = _read(path, hosts)
            except FileNotFoundError:  # removed since by the training process: there is a newer one
                return self.newest(hosts)
            except file_format.DamagedError as error:
                self._warn_once(path, error)
            else:
                self._refuse_others(paths)
                return path, found
        if paths:
            raise ValueError(
                f"Every checkpoint in {self.path} is damaged, the newest is {paths[-1].name}. "
                "Restore the files, or delete the folder to start from the beginning."
            )
        return None

    def _refuse_others(self, paths: Sequence[Path]) -> None:
        """Refuse a folder with checkpoints of another run: they would be resumed, or removed as the oldest."""
        runs = {path: file_format.run_of(path) for path in paths}
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
    found = metadata.unpack(path, lambda name: hosts is None or name in hosts)
    if found.step not in (None, file_format.step_of(path)):
        raise file_format.DamagedError(f"it is of step {found.step}")
    if not hosts:
        return found
    try:
        held = held_arrays.read(found.stored, hosts)
    except FileNotFoundError as error:
        if not path.exists():
            raise
        raise file_format.DamagedError(f"its holders do not find {Path(error.filename).name}") from error
    return dataclasses.replace(found, arrays={**found.arrays, **held}, stored={})
