"""The train command under test, in a separate process or inside the tests' process, and the files of its run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from tests import ROOT
from tfpar import train
from tfpar.commands import command_line

TIMEOUT_SECONDS = 120.0
FIGURES = {"examples_per_second", "step_milliseconds", "data_wait_share"}  # of a run's speed, never the same twice


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def settings(*overrides: str) -> list[str]:
    """Return flags with `--set` before each override."""
    return [part for override in overrides for part in ("--set", override)]


def trained(words: Sequence[str], folder: Path) -> Path:
    """Train in a folder with flags of the train command, in the tests' process; return the run's directory."""
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.chdir(folder)
        assert train.main(flags.FLAGS(["tfpar.train", *words])) == 0
    return folder / "run"


class Running:
    """A running command in a separate process."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[str], err: IO[str]) -> None:
        self._process, self._out, self._err = process, out, err

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, while the command runs."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert self._process.poll() is None, f"it ended too early: {self.finish()}"
            assert time.monotonic() < deadline, f"it did not come so far: {self._written()}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def finish(self) -> Outcome:
        """Wait for the end of the command."""
        code = self._process.wait(TIMEOUT_SECONDS)
        return Outcome(code, *self._written())

    def _written(self) -> tuple[str, str]:
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), self._err.read()


@contextlib.contextmanager
def started(
    arguments: Sequence[str], folder: Path, data: Path, terminal: int | None = None, code: Sequence[str] = ()
) -> Iterator[Running]:
    """Start the command in a folder, and end its processes with the context.

    Args:
        arguments: Of `python -m tfpar.train`.
        folder: The current one of the process.
        data: Where TensorFlow Datasets keeps data, instead of the user's own folder.
        terminal: A file descriptor to write to instead.
        code: What Python runs instead of the command.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    environment |= {"PYTHONPATH": str(ROOT), "TFDS_DATA_DIR": str(data), "COLUMNS": "80", "TERM": "xterm"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *(code or ("-m", "tfpar.train")), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out if terminal is None else terminal,
            stderr=err if terminal is None else terminal,
            start_new_session=True,
        )
        try:
            yield Running(process, out, err)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(arguments: Sequence[str], folder: Path, data: Path, code: Sequence[str] = ()) -> Outcome:
    """Run the command and wait for its end."""
    with started(arguments, folder, data, code=code) as running:
        return running.finish()


def metrics(directory: Path) -> list[dict[str, float]]:
    """Return the lines of a run's `metrics.jsonl` without speeds; without the last line if it is incomplete."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in FIGURES} for line in lines]


def weights(directory: Path) -> dict[str, np.ndarray]:
    """Return the weights and the optimizer state of a run's `model.keras` by name."""
    import h5py

    found: dict[str, np.ndarray] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item)

    with zipfile.ZipFile(directory / "model.keras") as archive, archive.open("model.weights.h5") as file:
        h5py.File(file).visititems(visit)
    return found


def assert_same_weights(directory: Path, expected: Path, tolerance: float = 0.0) -> None:
    """Assert that two runs have saved the same model."""
    actual, wanted = weights(directory), weights(expected)
    assert actual.keys() == wanted.keys()
    assert actual, "the models hold no weights"
    for name, array in wanted.items():
        np.testing.assert_allclose(actual[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def contents(directory: Path, without: Sequence[str] = ()) -> dict[str, tuple[bytes, int]]:
    """Return every file below a folder with its bytes and the time of its last change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in without
    }


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of all files of this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class InProcess:
    """The command called inside this process, in a separate folder; it restores Keras' settings.

    Args:
        capfd: What catches standard output and error.
        monkeypatch: What undoes the changes afterwards.
        folder: The current folder of the command.
    """

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capfd = capfd
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
        monkeypatch.setenv("TF_XLA_FLAGS", "")  # and the folder of its compilations

    def __call__(self, *arguments: str) -> Outcome:
        self._capfd.readouterr()
        with flagsaver.flagsaver():
            code = command_line.interruptible(lambda: train.main(flags.FLAGS(["tfpar.train", *arguments])))
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        return Outcome(code, *self._capfd.readouterr())
