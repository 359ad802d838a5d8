"""New Python processes for each measurement, without state of the last one, and with other thread settings."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import network
from tfpar.launcher.reserved_ports import ReservedPorts

ROOT = Path(__file__).parent.parent


class WorkerError(RuntimeError):
    """A worker process ended without an output; the message holds the last lines that it wrote."""


def ask(module: str, request: Mapping[str, Any], timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Run `python -m module` on a request and return its output.

    Args:
        module: Name of a module whose `__main__` calls `reply`.
        request: Anything that JSON holds.
        timeout_seconds: After that the process is killed.

    Returns:
        What the module's function returned.

    Raises:
        WorkerError: If the process failed, gave no output or took too long.
    """
    return ask_all(module, [request], timeout_seconds)[0]


def ask_all(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    timeout_seconds: float = 600.0,
    prefixes: Sequence[Sequence[str]] = (),
    library: Path | None = None,
) -> list[dict[str, Any]]:
    """Run `python -m module` on several requests at the same time and return the outputs in their order.

    What the processes write to standard error, TensorFlow's start-up messages among it, stays away from the terminal.
    None of them is left when this returns.

    Args:
        module: Name of a module whose `__main__` calls `reply`.
        requests: One a process.
        timeout_seconds: After that the processes are killed.
        prefixes: Words before the command of each process; none if empty.
        library: A folder with the tfpar of the processes; None for that of this folder.

    Returns:
        What the module's function returned in each process.

    Raises:
        WorkerError: If a process failed, gave no output or took too long.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for request, prefix in zip(requests, prefixes or [()] * len(requests), strict=True):
            # Without -P the working directory comes before PYTHONPATH.
            command = [*prefix, sys.executable, *(["-P"] if library else []), "-m", module, json.dumps(request)]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | ({"PYTHONPATH": f"{library}{os.pathsep}{ROOT}"} if library else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        # All pipes are read at once: a process whose pipe is full would wait, and its peers for it.
        with ThreadPoolExecutor(len(processes)) as pool:
            try:
                ended = list(pool.map(lambda process: process.communicate(timeout=timeout_seconds), processes))
            except subprocess.TimeoutExpired:
                raise WorkerError(f"no output within {timeout_seconds:g} seconds") from None
    failed = [
        f"exit status {process.returncode}: " + "\n".join(err.strip().splitlines()[-5:])
        for process, (out, err) in zip(processes, ended, strict=True)
        if process.returncode != 0 or not out.strip()
    ]
    if failed:
        raise WorkerError("; ".join(failed))
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def stream(module: str, requests: Sequence[Mapping[str, Any]], timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """Run `python -m module` on several requests at the same time, and yield the outputs of the first as they come.

    Args:
        module: Name of a module that calls `reply` once for each output.
        requests: One a process.
        timeout_seconds: After that the processes are killed.

    Raises:
        WorkerError: If the first process failed or took too long, after its last output.
    """
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes: list[subprocess.Popen[str]] = []
        for request in requests:
            command = [sys.executable, "-m", module, json.dumps(request)]
            out = subprocess.DEVNULL if processes else subprocess.PIPE
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, text=True))
            stack.callback(_end, processes[-1])
        timer = threading.Timer(timeout_seconds, processes[0].kill)
        stack.callback(timer.cancel)
        timer.start()
        assert processes[0].stdout is not None
        yield from (json.loads(line) for line in processes[0].stdout if line.startswith("{"))
        if processes[0].wait() != 0:
            errors.seek(0)
            lines = errors.read().splitlines()
            late = [line for line in lines if line.startswith("Timeout (")]  # by faulthandler, before its tracebacks
            raise WorkerError(f"exit status {processes[0].returncode}: " + "\n".join(late or lines[-5:]))


def ask_workers(
    module: str, setting: Any, num_workers: int, rate: str | None = None, library: Path | None = None
) -> list[dict[str, Any]]:
    """Run `python -m module` once a worker, all at the same time, and return the outputs by rank.

    Each gets a request of the `setting`, its `rank` and the `addresses` of all workers, none for a single one.

    Args:
        module: Name of a module whose `__main__` calls `reply`.
        setting: A dataclass: what to measure.
        num_workers: Processes.
        rate: The rate of the network between the workers, such as "1gbit", each on a host of its own (see
            `benchmarks.network`); None for the loopback.
        library: As for `ask_all`.

    Raises:
        WorkerError: As `ask_all`.
        OSError: If this process may not make hosts.
    """
    with contextlib.ExitStack() as stack:
        prefixes: list[list[str]] = []
        addresses = stack.enter_context(ReservedPorts(num_workers if num_workers > 1 else 0)).addresses
        if rate is not None and num_workers > 1:
            hosts = stack.enter_context(network.connected(num_workers, rate))
            prefixes = [host.command for host in hosts]
            addresses = [f"{host.address}:{network.PORT}" for host in hosts]
        requests = [{"setting": vars(setting), "rank": rank, "addresses": addresses} for rank in range(num_workers)]
        return ask_all(module, requests, prefixes=prefixes, library=library)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def request() -> dict[str, Any]:
    """Return the request of this worker process."""
    received: dict[str, Any] = json.loads(sys.argv[1])
    return received


def reply(values: Mapping[str, Any]) -> None:
    """Print the output of this worker process, as the last line of its standard output."""
    print(json.dumps(values), flush=True)
