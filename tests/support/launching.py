"""The launch command as a process under test, with small scripts in place of training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

TIMEOUT_SECONDS = 30.0
# The first lines of every script. With `sign`, a worker creates a file that shows how far it has run.
PRELUDE = """
import json, os, resource, signal, subprocess, sys, time
from pathlib import Path
place = json.loads(os.environ["TF_CONFIG"])
rank = place["task"]["index"]
def sign(name, text=""):
    unfinished = Path(f".{name}-{rank}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.rename(f"{name}-{rank}")
def wait(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)
"""


class Ended(NamedTuple):
    """Exit code and output of a launcher."""

    code: int
    out: str
    err: str


class Launcher:
    """A running launcher.

    Args:
        process: Its process.
        folder: Its current folder, where its workers create files with `sign`.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def wait_for(self, *names: str) -> None:
        """Wait until workers have created these files, such as `ready-0`."""
        wait_until(lambda: all((self._folder / name).exists() for name in names), f"{names} exist in {self._folder}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def finish(self) -> Ended:
        """Wait for the end of the launcher."""
        out, err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return Ended(self.process.returncode, (out or b"").decode(), (err or b"").decode())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline_seconds, f"timed out while waiting until {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def started(
    folder: Path,
    script: str,
    *options: str,
    num_workers: int = 2,
    variables: Mapping[str, str] | None = None,
    gpus_of: str | None = None,
    out: int = subprocess.PIPE,
    err: int = subprocess.PIPE,
) -> Iterator[Launcher]:
    """Start the launcher in a folder, and end it with the context.

    Args:
        folder: Its current folder; the script is written there.
        script: The script of every worker, after the prelude.
        options: Further flags of the launcher.
        num_workers: Number of workers.
        variables: Further environment variables.
        gpus_of: The folder of a program `nvidia-smi`; without it the launcher sees no GPU.
        out: File descriptor of its standard output.
        err: File descriptor of its standard error.
    """
    (folder / "script.py").write_text(PRELUDE + script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "OMP_", "CUDA_"))}
    if gpus_of is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment["PATH"] = f"{gpus_of}:{environment['PATH']}"
    arguments = ["--num_workers", str(num_workers), *options, "--", "script.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tfpar.launch", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        yield Launcher(process, folder)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def run(
    folder: Path,
    script: str,
    *options: str,
    num_workers: int = 2,
    variables: Mapping[str, str] | None = None,
    gpus_of: str | None = None,
) -> Ended:
    """Run the launcher and wait for its end."""
    with started(folder, script, *options, num_workers=num_workers, variables=variables, gpus_of=gpus_of) as launcher:
        return launcher.finish()


def ranked(lines: str, rank: int) -> Sequence[str]:
    """Return the lines of one worker, without the prefix."""
    return [line.removeprefix(f"[{rank}] ") for line in lines.splitlines() if line.startswith(f"[{rank}] ")]
