"""The run directory: its identity, its files, and a lock against other processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import IO, Any

from tfpar import config
from tfpar.files import atomic_file, json_file
from tfpar.messages.received import excerpt
from tfpar.runs import result_files

_FILE_FACTS = ("run", "sha256")  # in results.json, next to the figures


class RunDirectory:
    """The folder of a run.

        run.json         the run's identity, which its checkpoints and results carry
        config.toml      the resolved configuration, usable with `--config`
        metrics.jsonl    one line per epoch
        tensorboard/     logs for `tensorboard --logdir`
        checkpoints/     the latest checkpoints
        model.keras      the trained model
        best.keras       the model of the best epoch, with callbacks.save_best
        results.json     at the end: metrics, speed, and the SHA-256 of model.keras and metrics.jsonl
        optimizer.json   the configuration of the optimizer
        plan.json        the ranked layouts, if the planner chose one
        pipeline.png     with --trace: a step of the pipeline, as planned and as run
        report.html      the report
        record.json      facts about the machine and the model, for the report
        events.jsonl     starts, interruptions and failures
        tensorflow.log   the output of TensorFlow's native code
        xla/             functions compiled by XLA, for the next start

    A folder with files but no `run.json` is refused, whatever their names. Older versions wrote no `run.json`: a folder
    with `.lock` and a readable `config.toml` is accepted and gets one.

    Args:
        path: The folder.

    Example:
        >>> directory = RunDirectory("runs/digits")
        >>> directory.model.name
        'model.keras'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.keras"
        self.best = self.path / "best.keras"
        self.results = self.path / "results.json"
        self.trace = self.path / "pipeline.png"
        self.native_log = self.path / "tensorflow.log"
        self.compilations = self.path / "xla"
        self.optimizer = self.path / "optimizer.json"
        self.report = self.path / "report.html"
        self.lacks_report = False  # True after a failure, whose error is printed first
        self.resumed: config.Run | None = None  # the run that the folder held when claimed
        self.identity: str | None = None  # set when the folder is claimed; "" if an older version began the run
        self._lock: IO[bytes] | None = None
        self._seen: tuple[int, ...] = ()  # the state of run.json when it was last read
        self._recorded = ""  # the content of config.toml
        self._before: list[str] | None = None  # the files in the folder before the run; None if it did not exist
        self._created_above: list[Path] = []

    def recorded(self) -> Path | None:
        """Return the path of the run's configuration; None if the folder holds no run.

        Raises:
            ValueError: If the configuration cannot be read.
        """
        if self._known_identity() is None or not self.config.is_file():
            return None
        self._load()
        return self.config

    def claim(self, run: config.Run) -> None:
        """Claim the folder for a run: create it, or resume its run if that trains the same weights.

        Args:
            run: The resolved run.

        Raises:
            ValueError: If the folder holds a run with another configuration or other files, or another process trains
                in it. The folder is then unchanged.
            OSError: If it cannot be written.
        """
        self._refuse_strangers()
        self._before = os.listdir(self.path) if self.path.exists() else None
        self._created_above = [folder for folder in self.path.parents if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._lock = os.fdopen(os.open(self.path / ".lock", flags, 0o666), "rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim(run)
        except BlockingIOError:
            self._unlock()
            raise ValueError(
                f"Only one process can train in {self.path}, and another process is training there. Wait for its end, "
                "or choose another --directory."
            ) from None
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def undo_claim(self) -> None:
        """Remove the files created since `claim`, if nothing was trained, after the run was refused.

        Files that were there before are kept.

        Example:
            >>> directory.claim(config.Run())
            >>> directory.undo_claim()
            >>> directory.path.exists()
            False
        """
        if self._lock is None or self.resumed is not None:
            return
        result_files.remove_claim(self.path, self._before)
        self._unlock()
        with contextlib.suppress(OSError):  # another run may already use them
            for folder in self._created_above:
                folder.rmdir()

    def _refuse_strangers(self) -> None:
        """Refuse a folder with files that no run has written."""
        if not self.path.exists():
            return
        names = os.listdir(self.path)
        result_files.require_kinds(self.path, names)
        if result_files.is_unused(names) or self._known_identity() is not None:
            return
        if ".lock" in names and self.config.name in names:  # written by an older version
            return
        raise ValueError(
            f"{self.path} must be empty or hold a run, and it holds files without a run.json: no run wrote them. "
            "Choose another --directory."
        )

    def _known_identity(self) -> str | None:
        identity = (json_file.read_table(self.path / "run.json") or {}).get("run")
        return identity if isinstance(identity, str) else None

    def _claim(self, run: config.Run) -> None:
        identity = self._known_identity()
        # Until something is trained, settings may change: a mistyped one must not block its correction.
        if self.metrics.exists() or self.model.exists() or any(self.checkpoints.glob("*.npz")):
            self.resumed = self._refuse_other(run)
            self.identity = self._identity_of_checkpoints() if identity is None else identity
        else:
            if self.config.exists() and identity is None:
                self._load()  # refuses a file that is not a configuration
            self.identity = identity or uuid.uuid4().hex
        if self.identity != identity:
            self._write_identity(self.path)
        for name in result_files.FILES:
            if name != "evaluations.jsonl":  # an evaluator may write it
                atomic_file.remove_unfinished(self.path, name)
        if self.resumed is None:
            self.record(config.dump(run))

    def _identity_of_checkpoints(self) -> str:
        """Return the identity recorded in the checkpoints; "" if an older version wrote them."""
        from tfpar.checkpoint import file_format  # imports NumPy, which a finished run does not need

        found = (file_format.read_run(path) for path in reversed(file_format.paths(self.checkpoints)))
        return next((run for run in found if run is not None), "")

    def record(self, text: str) -> None:
        """Write config.toml atomically, unless it already has this content.

        Args:
            text: The configuration in TOML.

        Raises:
            OSError: If it cannot be written.
        """
        self._recorded = text
        if not self.config.exists() or self.config.read_bytes() != text.encode():
            atomic_file.write(self.config, text)

    def is_there(self) -> bool:
        """Return whether the folder still belongs to the run: not removed, emptied, renamed or replaced.

        If only `run.json` is missing, it is written again.
        """
        try:
            status = (self.path / "run.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return self._repair_identity()
        except OSError:  # such as a network disk that does not respond
            return True
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if state != self._seen and self._known_identity() != self.identity:
            return self._repair_identity()
        self._seen = state
        return True

    def _repair_identity(self) -> bool:
        if not self._holds_lock(self.path) or not self.config.exists():
            return False
        self._write_identity(self.path)
        return True

    def _write_identity(self, folder: Path) -> None:
        atomic_file.write(folder / "run.json", json.dumps({"run": self.identity}) + "\n")

    def _holds_lock(self, folder: Path) -> bool:
        """Return whether a folder is the claimed one: it contains the file that this process has locked."""
        try:
            return self._lock is not None and os.path.samestat(os.fstat(self._lock.fileno()), os.stat(folder / ".lock"))
        except OSError:
            return False

    def rescue(self) -> Path:
        """Return a folder for the files of a run whose folder is gone: the renamed folder or a new one.

        A new folder gets the run's identity and configuration, so that the run can resume there.

        Raises:
            OSError: If no folder can be written.
        """
        with contextlib.suppress(OSError):
            if self._lock is not None:
                renamed = Path(os.readlink(f"/proc/self/fd/{self._lock.fileno()}")).parent
                if self._holds_lock(renamed) and (renamed / "run.json").exists():
                    return renamed
        folder = self._new_folder()
        self._write_identity(folder)
        atomic_file.write(folder / self.config.name, self._recorded)
        return folder

    def _new_folder(self) -> Path:
        for suffix in ("rescued", *(f"rescued-{number}" for number in range(2, 100))):
            folder = self.path.with_name(f"{self.path.name}.{suffix}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError:
                break
            return folder
        return Path(tempfile.mkdtemp(prefix="tfpar-"))

    def finished(self, run: config.Run) -> dict[str, Any] | None:
        """Return the results of a finished run; None if it is not finished or has more epochs to train.

        A run whose files are missing or changed is not finished: its model is written again.

        Args:
            run: The run for which the folder is claimed.
        """
        if self.resumed is None or self.resumed.training.epochs != run.training.epochs:
            return None
        results = self._results()
        if results is None or self.broken():
            return None
        return {name: value for name, value in results.items() if name not in _FILE_FACTS}

    def broken(self) -> list[str]:
        """Return the names of a finished run's files that are missing or changed."""
        results = self._results()
        if results is None:
            return [self.results.name] if self.results.exists() else []
        digests = results.get("sha256")
        files = [path for path in (self.model, self.metrics) if digests is None or path.name in digests]
        return [path.name for path in files if not result_files.is_unchanged(path, digests)]

    def _results(self) -> dict[str, Any] | None:
        results = json_file.read_table(self.results) or {}
        figures = {name: value for name, value in results.items() if name not in _FILE_FACTS}
        digests, owner = results.get("sha256"), results.get("run", "")
        is_whole = result_files.are_results(figures) and (digests is None or isinstance(digests, dict))
        return results if is_whole and owner == self.identity else None

    def reopen(self) -> None:
        """Remove the results, which mark the run as finished, before training more epochs.

        Raises:
            OSError: If they cannot be removed.
        """
        self.results.unlink(missing_ok=True)

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results with the digests of the run's files, atomically. They mark the run as finished.

        Args:
            results: JSON values by name.

        Raises:
            OSError: If they cannot be written.
        """
        if self._recorded:
            self.record(self._recorded)  # the file may have been removed since
        digests = {path.name: result_files.digest(path) for path in (self.model, self.metrics) if path.exists()}
        content = {**results, "run": self.identity, "sha256": digests}
        atomic_file.write(self.results, json.dumps(content, indent=2) + "\n")

    def _refuse_other(self, run: config.Run) -> config.Run:
        """Return the run in the folder; refuse `run` if it would train other weights."""
        existing = self._load()
        differing = [
            f"{excerpt(key, 40)} is {excerpt(str(old), 40)} there and {excerpt(str(new), 40)} now"
            for key, old, new in config.changes(existing, run)
            if config.changes_weights(key)
        ]
        if differing:
            raise ValueError(
                f"{self.path} holds another configuration's run ({excerpt('; '.join(differing[:3]), 140)}). Choose "
                f"another --directory, or resume that run with --directory {self.path} alone, or delete the folder."
            )
        return existing

    def _load(self) -> config.Run:
        if not self.config.exists():
            raise ValueError(
                f"{self.config} is missing, and the run cannot be identified without it. Restore it, or choose "
                "another --directory."
            )
        try:
            return config.load(self.config)
        except ValueError as error:
            raise ValueError(f"{self.config} cannot be read: {error} Choose another --directory.") from error
