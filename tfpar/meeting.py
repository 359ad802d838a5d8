"""The workers of a job meet before TensorFlow starts, so that a missing one is named in time.

    worker 1   connect ── rank ──┐               ┌── "" ── all start TensorFlow
    worker 2   connect ── rank ──┤ chief listens ┤
                                 └ form_seconds ─┴── missing addresses ── all raise the same error

TensorFlow 2.21 cannot do this: its chief waits for ever for a worker that never appears, deaf to Ctrl-C and SIGTERM,
and holds Python's lock meanwhile; its workers give up about 20 seconds late. The chief listens on the port that
TensorFlow takes afterwards, so no other port need be open.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

from tfpar.tf_config import Job, split_address

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 5.0  # the chief's answer may come this long after the worker's own time is over


def meet(job: Job, seconds: float) -> None:
    """Wait until all workers of a job are there; all must call it.

    Args:
        job: The job and the place of this process in it.
        seconds: How long to wait.

    Raises:
        TimeoutError: If a worker does not appear; on every worker, with the addresses that are missing.
        OSError: If the chief's port is taken.

    Example:
        >>> meet(Job(("localhost:2222",), rank=0, role="chief"), seconds=300)
    """
    if job.num_workers == 1:
        return
    missing = _gather(job, seconds) if job.rank == 0 else _report(job, seconds)
    if missing:
        raise TimeoutError(
            f"All {job.num_workers} workers must appear within {seconds:g} s, and {', '.join(missing)} did not. Look "
            "at the output there, and whether that address in TF_CONFIG is right and can be reached from the others; "
            "if it only starts slowly, set a longer strategy.form_seconds."
        )


def _gather(job: Job, seconds: float) -> list[str]:
    """Wait as the chief for everyone; tell all who came which addresses are missing, and return these."""
    ends_seconds = time.monotonic() + seconds
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        # As TensorFlow does it: on all addresses of this machine, and connections that have just ended do not count.
        server = stack.enter_context(socket.create_server(("", split_address(job.addresses[0])[1])))
        while len(came) < job.num_workers - 1 and (left := ends_seconds - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # a stranger, such as a probe of the port
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(1.0)
                rank = int(_read_line(connection))
                if 0 < rank < job.num_workers:
                    came[rank] = connection  # a worker that was started again comes once more
            came = {rank: connection for rank, connection in came.items() if _is_there(connection)}
        missing = [job.addresses[rank] for rank in range(1, job.num_workers) if rank not in came]
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(missing).encode() + b"\n")
    return missing


def _report(job: Job, seconds: float) -> list[str]:
    """Tell the chief that this worker is there; return the addresses that are missing, as the chief says."""
    ends_seconds = time.monotonic() + seconds
    while (left := ends_seconds - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(split_address(job.addresses[0]), timeout=min(left, 5.0)) as connection,
        ):
            connection.sendall(b"%d\n" % job.rank)
            connection.settimeout(max(0.1, ends_seconds - time.monotonic()) + _ANSWER_SECONDS)
            missing: list[str] = json.loads(_read_line(connection))
            return missing
        time.sleep(_RETRY_SECONDS)
    return [job.addresses[0]]


def _is_there(connection: socket.socket) -> bool:
    """Whether the other end still waits: it writes nothing more, so only its end can be read."""
    try:
        connection.setblocking(False)
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _read_line(connection: socket.socket) -> bytes:
    """Read one line; empty if the other end is gone or sends too much, which no caller can parse."""
    with connection.makefile("rb") as file:
        line = file.readline(1 << 20)
    return line if line.endswith(b"\n") else b""
