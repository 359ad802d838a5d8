"""Planning in a job: the chief tells the workers which layout to measure next.

chief      configuration ──> all       measures with them <── "done" of each       configuration ──> ... ""
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

from tfpar.cluster import rendezvous, tf_config
from tfpar.runs.planning.layout_process import LayoutProcesses

_DONE = "done"


class OtherWorkers:
    """The chief's connections to the other workers.

    Args:
        job: The job whose chief this process is.
        form_seconds: Seconds to wait for all workers.

    Raises:
        TimeoutError: If a worker is missing.
        ValueError: If a worker does not run the plan command.
    """

    def __init__(self, job: tf_config.JobConfig, form_seconds: float) -> None:
        self._lines = {rank: _Lines(connection) for rank, connection in _connections(job, form_seconds).items()}
        self._addresses = job.addresses

    @contextlib.contextmanager
    def measuring(self, text: str) -> Iterator[None]:
        """Have the others measure a layout during this context, and wait for them.

        Args:
            text: The configuration of the run, with the layout.

        Raises:
            ConnectionError: If a worker is lost.
        """
        for lines in self._lines.values():
            lines.write(text)
        yield
        for rank, lines in self._lines.items():
            if lines.read() != _DONE:
                raise ConnectionError(
                    f"All workers must measure a layout, and worker {rank} ({self._addresses[rank]}) is lost. See its "
                    "output, and start the job again."
                )

    def end(self) -> None:
        """Tell the others that the plan is complete."""
        for lines in self._lines.values():
            with contextlib.suppress(OSError):
                lines.write("")


def follow(job: tf_config.JobConfig, form_seconds: float) -> None:
    """Measure the layouts that the chief sends until its plan is complete.

    Args:
        job: The job of this process.
        form_seconds: Seconds to wait for all workers.

    Raises:
        TimeoutError: If a worker is missing.
        ConnectionError: If the chief is lost.
    """
    lines = _Lines(_connections(job, form_seconds)[0])
    while (text := lines.read()) != "":
        if text is None:
            raise ConnectionError(f"The chief, {job.addresses[0]}, is lost. See its output, and start the job again.")
        with LayoutProcesses() as processes:
            processes.measure(text)
        lines.write(_DONE)


def _connections(job: tf_config.JobConfig, form_seconds: float) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    rendezvous.connect_workers(job, form_seconds, connections.__setitem__, "plan")
    return connections


class _Lines:
    """Texts over a connection, each as a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._file = connection.makefile("rw", encoding="utf-8")

    def write(self, text: str) -> None:
        self._file.write(f"{json.dumps(text)}\n")
        self._file.flush()

    def read(self) -> str | None:
        """Return the next text; None if the peer is gone."""
        try:
            line = self._file.readline()
            return None if not line else str(json.loads(line))
        except OSError:
            return None
