"""Whether the workers of a job accept connections, and why not."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tfpar.cluster.tf_config import JobConfig, split_address


def unreachable(job: JobConfig, seconds: float) -> tuple[str, ...]:
    """Return the addresses of the other workers that accept no connection: those that never started.

    It is called at TensorFlow's time limit for forming the cluster, to name the missing workers. A worker stopped by a
    signal still counts as reachable: the kernel accepts the connection.

    Args:
        job: The job and the rank of this process in it.
        seconds: The time limit; all workers are tried at the same time.

    Example:
        >>> unreachable(JobConfig(("localhost:2222",), rank=0, role="chief"), seconds=1)
        ()
    """
    return tuple(problems(job.peers, seconds))


def problems(addresses: Sequence[str], seconds: float) -> dict[str, str]:
    """Return the reason for each address that accepts no connection, such as "No route to host".

    Args:
        addresses: Addresses of workers.
        seconds: The time limit; all addresses are tried at the same time.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        found = pool.map(lambda address: _problem(address, seconds), addresses)
    return {address: problem for address, problem in zip(addresses, found, strict=True) if problem is not None}


def _problem(address: str, seconds: float) -> str | None:
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """Return why a connection failed, such as "No route to host".

    Args:
        error: The error of the connection.
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
