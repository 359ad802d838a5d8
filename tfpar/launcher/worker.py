"""One worker: a process with its own cores and its TF_CONFIG, which ends with the launcher."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tfpar.cluster import job_secret, tf_config
from tfpar.cluster.other_worker_error import LOST
from tfpar.commands.command_line import OTHER_FAILED
from tfpar.launcher.gpu_division import GpuDivision
from tfpar.launcher.line_splitter import Lines

TAIL_LINES = 20
# Read by TensorFlow and its libraries. As many threads as cores in each pool: with two inter-op threads on one core,
# Keras' fit took 1.7 times as long as with one.
THREAD_SETTINGS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 1 << 16


def environment_of(
    rank: int,
    addresses: Sequence[str],
    cores_per_worker: int,
    secret: str,
    given: Mapping[str, str],
    gpus: GpuDivision | None = None,
    first_rank: int = 0,
) -> dict[str, str]:
    """Return the environment of a worker: TF_CONFIG, the job secret, its GPUs, and thread settings for its cores.

    Args:
        rank: The rank of the worker, from 0, the chief.
        addresses: `host:port` of every worker, in the order of ranks.
        cores_per_worker: Number of cores of each worker.
        secret: The job secret, the same for all workers; empty to set none.
        given: The environment of the launcher. Its thread settings and job secret take precedence.
        gpus: The GPUs of each worker of this host; None leaves their variables as they are.
        first_rank: The rank of the first worker of this host.

    Example:
        >>> environment_of(0, ["127.0.0.1:4000"], 2, job_secret.new(), {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"]
        '1'
    """
    threads = dict.fromkeys(THREAD_SETTINGS, str(cores_per_worker))
    own = {
        "TF_CONFIG": tf_config.to_tf_config(addresses, rank),
        **({job_secret.VARIABLE: secret} if secret and not given.get(job_secret.VARIABLE) else {}),
        "PYTHONUNBUFFERED": "1",
        **({} if gpus is None else gpus.variables(rank - first_rank)),
    }
    return {**threads, **given, **own}


def cores_of(rank: int, num_workers: int, cores_per_worker: int, available: Sequence[int]) -> list[int]:
    """Return the cores of a worker: its own, or all if there are too few for all workers.

    Args:
        rank: The rank of the worker, from 0.
        num_workers: Number of workers.
        cores_per_worker: Number of cores of each worker.
        available: The cores that the launcher may use.

    Example:
        >>> cores_of(1, 2, 2, [0, 1, 2, 3])
        [2, 3]
    """
    if num_workers * cores_per_worker > len(available):
        return list(available)  # pinned to shared cores, some workers would be slower than others
    return list(available[rank * cores_per_worker : (rank + 1) * cores_per_worker])


class OutputStream:
    """One of the two output streams of a worker, read by the launcher."""

    def __init__(self, source: IO[bytes], is_error: bool) -> None:
        self.is_error = is_error
        self.is_open = True
        self.descriptor = source.fileno()
        self._source = source
        self._lines = Lines()

    def read(self) -> list[bytes]:
        """Return the lines that have arrived; call it when the descriptor is readable."""
        data = os.read(self.descriptor, _READ_BYTES)
        return self._lines.feed(data) if data else self._close()

    def read_rest(self) -> list[bytes]:
        """Close the pipe of an ended worker and return its last lines; never wait, as others may hold it open."""
        if not self.is_open:
            return []
        os.set_blocking(self.descriptor, False)
        with contextlib.suppress(BlockingIOError):
            left = self.read()  # a pipe holds at most this much
            return left + (self._close() if self.is_open else [])
        return self._close()

    def _close(self) -> list[bytes]:
        self.is_open = False
        self._source.close()
        return self._lines.rest()


class Worker:
    """A worker process from its start to its end.

    It leads a new session and process group: a Ctrl-C on the terminal reaches the launcher alone, and the child
    processes of a worker can be killed together with it. After a kill -9 of the launcher the kernel ends the worker,
    but not what the worker itself has started.

    Args:
        rank: The rank of the worker, from 0.
        command: The command.
        environment: Its whole environment.
        cores: The cores on which it may run.
        keeps_terminal: Whether it inherits the launcher's standard output, a terminal, for its progress bar.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int],
        keeps_terminal: bool = False,
    ) -> None:
        self.rank, self.keeps_terminal = rank, keeps_terminal
        self.is_running = True  # until it is reaped
        self.code = 0  # the exit code as Python reports it, -n for signal n; meaningless before the end
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if keeps_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_before_command(cores),
        )
        # Readable once the process has ended, so that the order of ends is known.
        self.end = os.pidfd_open(self._process.pid)
        sources = ((self._process.stdout, False), (self._process.stderr, True))
        self.streams = [OutputStream(source, is_error) for source, is_error in sources if source is not None]

    @property
    def misses_another(self) -> bool:
        """Whether it failed because another worker did, as far as its exit code or its last lines say so."""
        return self.code == OTHER_FAILED or any(LOST.encode() in line for line in self.tail)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP, or a debugger, has stopped it."""
        with open(f"/proc/{self._process.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")

    def request_stop(self) -> None:
        """Send SIGTERM, and SIGCONT, because a stopped process does not handle signals."""
        os.kill(self._process.pid, signal.SIGTERM)
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the end of the worker, record its exit code, and kill its child processes."""
        os.waitid(os.P_PIDFD, self.end, os.WEXITED | os.WNOWAIT)
        self.kill()  # before its process id can be reused
        self.code, self.is_running = self._process.wait(), False
        os.close(self.end)


def _before_command(cores: Sequence[int]) -> Callable[[], None]:
    """Return the function that a new worker calls between fork and exec, in a process with one thread."""
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher was killed before the line above
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return prepare
