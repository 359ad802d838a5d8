"""A worker process: its environment, cores and output streams. It ends with the launcher."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tfpar.cluster import job_secret, tf_config
from tfpar.cluster.other_worker_error import LOST
from tfpar.commands.command_line import OTHER_FAILED
from tfpar.launcher.gpu_division import GpuDivision

TAIL_LINES = 20
# Each thread pool of TensorFlow gets as many threads as the worker has cores: with two inter-op threads on one core,
# Keras' fit took 1.7 times as long as with one.
THREAD_SETTINGS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16  # longer lines are split, so that memory stays bounded
_END = re.compile(rb"(\r\n|\r|\n)")


def worker_environment(
    rank: int,
    addresses: Sequence[str],
    cores_per_worker: int,
    secret: str,
    environment: Mapping[str, str],
    gpus: GpuDivision | None = None,
    first_rank: int = 0,
) -> dict[str, str]:
    """Return the environment of a worker: TF_CONFIG, job secret, GPUs, thread settings, no W&B run but the chief's.

    Args:
        rank: The rank of the worker.
        addresses: `host:port` of each worker, in rank order.
        cores_per_worker: Number of cores per worker.
        secret: The job secret; empty to set none.
        environment: The environment of the launcher, whose thread settings and job secret take precedence.
        gpus: The GPUs of this host's workers; None leaves their variables unchanged.
        first_rank: The rank of this host's first worker.

    Example:
        >>> worker_environment(0, ["127.0.0.1:4000"], 2, job_secret.new(), {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"]
        '1'
    """
    threads = dict.fromkeys(THREAD_SETTINGS, str(cores_per_worker))
    own = {
        "TF_CONFIG": tf_config.to_tf_config(addresses, rank),
        **({job_secret.VARIABLE: secret} if secret and not environment.get(job_secret.VARIABLE) else {}),
        "PYTHONUNBUFFERED": "1",
        **({"WANDB_MODE": "disabled"} if rank else {}),  # wandb.init(mode=...) takes precedence
        **({} if gpus is None else gpus.variables(rank - first_rank)),
    }
    return {**threads, **environment, **own}


def worker_cores(rank: int, num_workers: int, cores_per_worker: int, available: Sequence[int]) -> list[int]:
    """Return the cores of a worker: its own, or all cores if there are too few for all workers.

    Args:
        rank: The rank of the worker on this host.
        num_workers: Number of workers on this host.
        cores_per_worker: Number of cores per worker.
        available: The cores available to the launcher.

    Example:
        >>> worker_cores(1, 2, 2, [0, 1, 2, 3])
        [2, 3]
    """
    if num_workers * cores_per_worker > len(available):
        return list(available)  # pinning would make workers on shared cores slower than the others
    return list(available[rank * cores_per_worker : (rank + 1) * cores_per_worker])


class Lines:
    r"""Split a stream of bytes into lines.

    A carriage return also ends a line: progress bars use it to redraw their line, which does not work when lines of
    several workers mix.

    Example:
        >>> lines = Lines()
        >>> lines.feed(b"10%\r20%\rdone\nnext")
        [b'10%', b'20%', b'done']
        >>> lines.rest()
        [b'next']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the complete lines. An empty line counts only if a newline ends it.

        Args:
            data: At least one byte.
        """
        if self._returned:
            data = data.removeprefix(b"\n")  # the second half of "\r\n"
        self._returned = data.endswith(b"\r")
        # Alternating: text, end, text, end, text.
        *parts, self._rest = _END.split(self._rest + data)
        lines = [text for text, end in zip(parts[::2], parts[1::2], strict=True) if text or end != b"\r"]
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines += self.rest()
        return lines

    def rest(self) -> list[bytes]:
        """Return the incomplete last line at the end of the stream, if any."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class OutputStream:
    """Standard output or error of a worker, read by the launcher."""

    def __init__(self, source: IO[bytes], is_error: bool) -> None:
        self.is_error = is_error
        self.is_open = True
        self.descriptor = source.fileno()
        self._source = source
        self._lines = Lines()

    def read(self) -> list[bytes]:
        """Return the lines that have arrived. Call it when the descriptor is readable."""
        data = os.read(self.descriptor, _READ_BYTES)
        return self._lines.feed(data) if data else self._close()

    def read_rest(self) -> list[bytes]:
        """Return the last lines of an ended worker and close the pipe, which other processes may hold open."""
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
    """A worker process, from start to end.

    It leads its own session and process group, so that Ctrl-C on the terminal reaches the launcher only, and its child
    processes can be killed with it. If the launcher is killed (SIGKILL), the kernel kills the worker, but not its child
    processes.

    Args:
        rank: The rank of the worker.
        command: The command.
        environment: All environment variables.
        cores: The cores to run on.
        keeps_terminal: Whether it inherits the launcher's standard output, a terminal, for a progress bar.

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
        # Becomes readable when the process ends, so that the order in which workers end is known.
        self.end = os.pidfd_open(self._process.pid)
        sources = ((self._process.stdout, False), (self._process.stderr, True))
        self.streams = [OutputStream(source, is_error) for source, is_error in sources if source is not None]

    @property
    def misses_another(self) -> bool:
        """Whether its exit code or last lines say that it failed because another worker did."""
        return self.code == OTHER_FAILED or any(LOST.encode() in line for line in self.tail)

    @property
    def is_stopped(self) -> bool:
        """Whether it is suspended, by SIGSTOP or a debugger."""
        with open(f"/proc/{self._process.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")

    def request_stop(self) -> None:
        """Send SIGTERM, then SIGCONT, because a suspended process does not handle signals."""
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
    """Return the function that a new worker runs between fork and exec."""
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher was killed before the line above
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return prepare
