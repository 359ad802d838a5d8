"""Restriction of a server to the loopback interface, although it listens on all addresses.

The address of a socket that listens on `[::]` cannot be changed to 127.0.0.1 afterwards. But the socket can be bound to
the loopback interface (SO_BINDTODEVICE), which needs no privilege since Linux 5.7: then the kernel refuses connections
through other interfaces, as if the port were closed.
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
        problem: The error because of which other machines can still reach the server; None without an error.
    """

    def __init__(self) -> None:
        self.problem: OSError | None = None


@contextlib.contextmanager
def confined(port: int) -> Iterator[Confined]:
    """Bind each new socket of this process with a given local port to the loopback interface.

    A thread looks for them while the caller starts its server, and so binds them some milliseconds after they listen.
    Connections accepted before that are bound too, which disconnects those from other machines.

    Args:
        port: The port on which the caller's server will listen.

    Returns:
        The result, complete after the context.

    Example:
        >>> with confined(2222) as found:
        ...     server = socket.create_server(("", 2222))
        >>> found.problem is None
        True
    """
    found, is_over = Confined(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):  # the last pass reports it
                _bind_all(port)

    thread = threading.Thread(target=watch, name="tfpar-loopback", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        try:
            _bind_all(port)
        except OSError as error:
            found.problem = error


@contextlib.contextmanager
def server_confined(address: str) -> Iterator[None]:
    """Restrict TensorFlow's server, which starts inside this context, to the loopback; warn where that fails.

    By default the server listens on all addresses and runs operations for every client, as the user of this process.

    Args:
        address: The `host:port` of the server.
    """
    with confined(split_address(address)[1]) as found:
        yield
    if found.problem is not None:
        print(
            f"warning: TensorFlow's server at {address} can be reached from other machines, as it could not be bound "
            f"to the loopback ({found.problem.strerror}), and any program that connects can act as you. Use a "
            "firewall.",
            file=sys.stderr,
        )


def _bind_all(port: int) -> None:
    """Bind all sockets of this process with a local port to the loopback; raise OSError if one cannot be bound."""
    for one in tcp_sockets():
        if local_port(one) == port and not one.getsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, 16).strip(b"\0"):
            one.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, _INTERFACE)
