"""The open TCP sockets of this process, those of libraries included."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

from tfpar.cluster.tf_config import split_address

_SYN_SENT, _LISTEN = b"\x02", b"\x0a"  # of Linux' include/net/tcp_states.h


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process; it is closed before the next one.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     server.getsockname() in [one.getsockname() for one in tcp_sockets()]
        True
    """
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(FileNotFoundError):
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
        try:
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed since the listing
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy


def local_port(one: socket.socket) -> int | None:
    """Return the port of this side of a TCP socket."""
    try:
        return int(one.getsockname()[1])
    except OSError:
        return None


def endpoints(addresses: Collection[str]) -> set[tuple[str, int]]:
    """Return IP address and port of each `host:port`, as far as the names can be resolved."""
    found = set()
    for host, port in map(split_address, addresses):
        with contextlib.suppress(OSError, UnicodeError):
            found |= {(str(one[4][0]), port) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return found


def shut_down(own_port: int, others: Collection[tuple[str, int]]) -> None:
    """Shut down the connections through a port of this process, and those to other servers.

    What waits for an answer of the other side then fails at once. Attempts to connect end too, also those to addresses
    outside of the job, which the kernel does not tell apart.

    Args:
        own_port: The port of the server of this process; it continues to listen.
        others: `endpoints` of the other servers.
    """
    for one in tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            is_of_job = state != _LISTEN and local_port(one) == own_port
            if state == _SYN_SENT or is_of_job or _peer(one) in others:
                one.shutdown(socket.SHUT_RDWR)


def _peer(one: socket.socket) -> tuple[str, int]:
    host, port = one.getpeername()[:2]
    return host.removeprefix("::ffff:"), port
