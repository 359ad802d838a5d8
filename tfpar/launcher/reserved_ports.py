"""Local ports reserved until the workers listen on them."""

from __future__ import annotations

import socket


class ReservedPorts:
    """Free ports, reserved until `close`.

    A free port can be taken while a worker imports TensorFlow, since any outgoing connection takes one. So this process
    keeps a non-listening socket bound to each port:

        bind to port 0           no other IPv4 or IPv6 socket has the port
        then SO_REUSEADDR        servers that set it too may listen on the port; other sockets do not get it

    Args:
        num_ports: Number of ports.

    Attributes:
        addresses: `127.0.0.1:port` of each port.

    Example:
        >>> with ReservedPorts(2) as ports:
        ...     len(set(ports.addresses))
        2
    """

    def __init__(self, num_ports: int) -> None:
        self._sockets = [_bound_socket() for _ in range(num_ports)]
        self.addresses = [f"127.0.0.1:{reserved.getsockname()[1]}" for reserved in self._sockets]

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reservation."""
        for reserved in self._sockets:
            reserved.close()


def _bound_socket() -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
    if is_dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved
