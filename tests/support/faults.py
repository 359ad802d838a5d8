"""Jobs of the public commands in separate processes, and a trainer that causes faults at chosen steps.

A file in the folder `faults` beside the job is one fault: `2-begin-KILL-0`, the second, is SIGKILL for worker 0 at the
beginning of the training. Each start of the job takes the first that is left, and moves it to `struck` on the way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.support.command import ROOT, Outcome, assert_same_weights, metrics, settings
from tests.support.ports import free_addresses
from tfpar.cluster import tf_config

TIMEOUT_SECONDS = 90.0
SILENCE_SECONDS = 3
TRAIN = ("-m", "tfpar.train")
# Adam's moments and the shuffle must be resumed too; 64 steps per epoch, the last one smaller.
FLAGS = [
    *("--config", str(ROOT / "configs" / "regression_small.toml"), "--directory", "run"),
    *settings("data.num_examples=2030", "data.shuffle_buffer=500", "training.global_batch_size=32"),
    *settings("optimizer.name=adam", "training.checkpoint_seconds=0"),
    *settings("training.epochs=3", "callbacks.tensorboard=false"),
]
# Under any number of workers, also one alone.
DROPOUT = settings("model.dropout=0.25")  # with random numbers that differ between replicas
STRIKING = settings("trainer=own.Striking", "training.steps_per_call=2")
OF_A_JOB = settings(f"strategy.silence_seconds={SILENCE_SECONDS}")
OWN = """
import json, os, resource, signal, tempfile, threading, time
from pathlib import Path
import keras
from tfpar.trainers.regression import Regression

rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
fault = next(iter(sorted(Path("faults").glob("*"))), None)
Path(f"pid-{rank}").write_text(str(os.getpid()))

if rank == 1 and Path("no_disk").exists():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    tempfile.tempdir = "/proc"
    os.chdir("/proc")

def strike(moment):
    if fault is None or not fault.exists():
        return
    _, when, name, victim = fault.name.split("-")
    if when == moment and (rank == int(victim) or moment in ("checkpoint", "save")):
        fault.rename(Path("struck") / fault.name).touch()
        os.kill(int(Path(f"pid-{victim}").read_text()), signal.Signals[f"SIG{name}"])
        time.sleep(0.5 if name == "KILL" else 0)

calls = []  # of this process; attributes of a callback would be resumed

class Strikes(keras.callbacks.Callback):

    def on_train_begin(self, logs=None):
        strike("begin")

    def on_test_begin(self, logs=None):
        strike("test")

    def on_train_batch_begin(self, batch, logs=None):
        calls.append(batch)
        if len(calls) == 12:  # a step takes about 2 ms
            threading.Timer(0.003, strike, ["step"]).start()

    def on_train_batch_end(self, batch, logs=None):
        if len(calls) == 1 and rank == 0:
            Path("steps").open("a").write(f"{time.time()}\\n")
            if Path("full_disk").exists():  # after the files that TensorFlow writes at its start
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

written, really_fsync = [], os.fsync

def fsync(descriptor):
    is_checkpoint = "/.step-" in os.readlink(f"/proc/self/fd/{descriptor}")
    written.extend([descriptor] if is_checkpoint else [])
    if is_checkpoint and len(written) == 6:  # with half of the file written
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        strike("checkpoint")
    really_fsync(descriptor)

os.fsync = fsync

class Striking(Regression):
    def fit(self, *arguments, callbacks, **more):
        return super().fit(*arguments, callbacks=[*callbacks, Strikes()], **more)

    def save(self, path):
        strike("save")
        super().save(path)

    def report(self, results):
        mean = self.predict(keras.ops.ones((8, 10)), verbose=0).mean()
        return f"mean {mean:.3f} after {results['steps']} steps"

strike("import")
"""


class Process:
    """A running command.

    Args:
        process: Its process.
        out: Where its standard output goes.
        err: Where its standard error goes.
    """

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.began_seconds = time.monotonic()
        self._process, self._out, self._err = process, out, err

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, while the command runs."""
        deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert self._process.poll() is None, f"it ended too early: {self.finish()}"
            assert time.monotonic() < deadline_seconds, f"it did not come so far: {self.written()}"
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def code(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def finish(self) -> Outcome:
        """Wait for the end of the command."""
        return Outcome(self._process.wait(TIMEOUT_SECONDS), *self.written())

    def written(self) -> tuple[str, str]:
        """The output so far."""
        out, err = (os.pread(file.fileno(), 1 << 20, 0).decode() for file in (self._out, self._err))
        return out, err

    def child(self, rank: int) -> int | None:
        """Return the process of a worker, after its start."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                is_worker = f'"index": {rank}}}'.encode() in (folder / "environ").read_bytes()
                if int(parent) == self._process.pid and is_worker:
                    return int(folder.name)
        return None


@contextlib.contextmanager
def started(arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Start Python in a folder, and end it with the context.

    Args:
        arguments: Of Python.
        folder: The current one of the process.
        variables: More environment variables.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "OMP_"))}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "120", **(variables or {})}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            yield Process(process, out, err)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> Outcome:
    """Run Python and wait for its end."""
    with started(arguments, folder, variables) as process:
        return process.finish()


def launch(num_workers: int, *options: str) -> list[str]:
    """Return the command that starts a job, up to the flags of the train command."""
    return ["-m", "tfpar.launch", "--num_workers", str(num_workers), *options, "--"]


def places(num_workers: int) -> list[dict[str, str]]:
    """Return the environment variables of each worker of a job on this machine."""
    addresses = free_addresses(num_workers)
    return [{"TF_CONFIG": tf_config.to_tf_config(addresses, rank)} for rank in range(num_workers)]


def prepare(folder: Path, *faults: str) -> Path:
    """Create the folder of a job with these faults."""
    for name in ("faults", "struck"):
        (folder / name).mkdir(parents=True)
    (folder / "own.py").write_text(OWN)
    for fault in faults:
        (folder / "faults" / fault).touch()
    return folder


def assert_same_run(directory: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Assert that two runs have saved the same model and the same metrics: each example was used once per epoch."""
    assert_same_weights(directory, expected, tolerance)
    actual, wanted = metrics(directory), metrics(expected)
    assert [line["epoch"] for line in actual] == [line["epoch"] for line in wanted]
    for line, other in zip(actual, wanted, strict=True):
        assert line == pytest.approx(other, rel=tolerance)


def launcher_lines(outcome: Outcome) -> list[str]:
    """Return the lines of the launcher itself."""
    return [line.removeprefix("[launch] ") for line in outcome.err.splitlines() if line.startswith("[launch] ")]


def first_steps(folder: Path) -> list[float]:
    """Return the times of the chief's first step after each start of the job, in seconds since 1970."""
    path = folder / "steps"
    return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
