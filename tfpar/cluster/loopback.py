"""Restrict a server that listens on all addresses to the loopback interface.

The address of a listening socket cannot change from `[::]` to 127.0.0.1. But SO_BINDTODEVICE, unprivileged since Linux
5.7, binds the socket to the loopback interface: the kernel then refuses connections through other interfaces, as if the
port were closed.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator

from tfpar.cluster.open_sockets import local_port, tcp_sockets
from tfpar.cluster.tf_config import split_address

_INTERFACE = b"lo\0"
_POLL_SECONDS = 0.001
_SO_BINDTODEVICE = getattr(socket, "SO_BINDTODEVICE", 25)


class Confined:
    """The result of `confined`.

    Attributes:
        problem: Why other machines can still reach the server; None if they cannot.
    """

    def __init__(self) -> None:
        self.problem: OSError | None = None


@contextlib.contextmanager
def confined(port: int) -> Iterator[Confined]:
    """Bind the sockets of a local port to the loopback interface while the caller starts a server.

    A background thread binds each socket within milliseconds of its creation. Connections accepted before that are
    bound too, which disconnects those from other machines.

    Args:
        port: The port of the server.

    Returns:
        The result, which is complete when the context exits.

    Example:
        >>> with confined(2222) as result:
        ...     server = socket.create_server(("", 2222))
        >>> result.problem is None
        True
    """
    result, is_over = Confined(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):  # the final pass reports it
                _bind_all(port)

    thread = threading.Thread(target=watch, name="tfpar-loopback", daemon=True)
    thread.start()
    try:
        yield result
    finally:
        is_over.set()
        thread.join()
        try:
            _bind_all(port)
        except OSError as error:
            result.problem = error


@contextlib.contextmanager
def server_confined(address: str) -> Iterator[None]:
    """Restrict the TensorFlow server started in this context to the loopback interface; warn if that fails.

    By default the server listens on all addresses and runs operations for any client, as the user of this process.

    Args:
        address: The `host:port` of the server.
    """
    with confined(split_address(address)[1]) as result:
        yield
    if result.problem is not None:
        print(
            f"warning: TensorFlow's server at {address} can be reached from other machines, as it could not be bound "
            f"to the loopback ({result.problem.strerror}), and any program that connects can act as you. Use a "
            "firewall.",
            file=sys.stderr,
        )


def _bind_all(port: int) -> None:
    """Bind all sockets of a local port; raise OSError if one cannot be bound."""
    for tcp_socket in tcp_sockets():
        bound_to = tcp_socket.getsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, 16).strip(b"\0")
        if local_port(tcp_socket) == port and not bound_to:
            tcp_socket.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, _INTERFACE)
