"""The open TCP sockets of this process, including those of libraries."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

from tfpar.cluster.tf_config import split_address

_SYN_SENT, _LISTEN = b"\x02", b"\x0a"  # of Linux' include/net/tcp_states.h


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process; each is closed before the next.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     server.getsockname() in [duplicate.getsockname() for duplicate in tcp_sockets()]
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


def local_port(tcp_socket: socket.socket) -> int | None:
    """Return the local port of a TCP socket; None if it has none."""
    try:
        return int(tcp_socket.getsockname()[1])
    except OSError:
        return None


def endpoints(addresses: Collection[str]) -> set[tuple[str, int]]:
    """Return the IP addresses and port of each `host:port` that can be resolved."""
    resolved = set()
    for host, port in map(split_address, addresses):
        with contextlib.suppress(OSError, UnicodeError):
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            resolved |= {(str(address[0]), port) for *_, address in rows}
    return resolved


def shut_down(own_port: int, others: Collection[tuple[str, int]]) -> None:
    """Shut down the connections of a job, so that calls waiting for a lost worker fail at once.

    Pending connection attempts end too, including those to addresses outside the job: the kernel does not tell them
    apart.

    Args:
        own_port: The port of this process's server, which keeps listening.
        others: `endpoints` of the other servers.
    """
    for tcp_socket in tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            state = tcp_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            is_served = state != _LISTEN and local_port(tcp_socket) == own_port
            if state == _SYN_SENT or is_served or _peer(tcp_socket) in others:
                tcp_socket.shutdown(socket.SHUT_RDWR)


def _peer(tcp_socket: socket.socket) -> tuple[str, int]:
    host, port = tcp_socket.getpeername()[:2]
    return host.removeprefix("::ffff:"), port
