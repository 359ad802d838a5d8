"""Which workers of a job accept connections, and why the others do not."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tfpar.cluster.tf_config import JobConfig, split_address


def unreachable(job: JobConfig, seconds: float) -> tuple[str, ...]:
    """Return the addresses of the other workers that accept no connection.

    A suspended worker still counts as reachable, because the kernel accepts the connection.

    Args:
        job: The job of this process.
        seconds: Time limit; all workers are tried at once.

    Example:
        >>> unreachable(JobConfig(("localhost:2222",), rank=0, role="chief"), seconds=1)
        ()
    """
    return tuple(problems(job.peers, seconds))


def problems(addresses: Sequence[str], seconds: float) -> dict[str, str]:
    """Return, for each address that accepts no connection, the reason, such as "No route to host".

    Args:
        addresses: The addresses to try, each as `host:port`.
        seconds: Time limit; all addresses are tried at once.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        reasons = pool.map(lambda address: _problem(address, seconds), addresses)
    return {address: problem for address, problem in zip(addresses, reasons, strict=True) if problem is not None}


def _problem(address: str, seconds: float) -> str | None:
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """Return why a connection failed, such as "No route to host"."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
