"""Ports of this machine that the system gives to no other program until the workers listen on them."""

from __future__ import annotations

import socket


class ReservedPorts:
    """Free ports, reserved until `close`.

    A port that was only free a moment ago can be taken while a worker imports TensorFlow: each outgoing connection of
    any program takes one. So this process keeps a socket bound to each port, which does not listen:

        bind to port 0           no other socket has the port, of IPv4 or IPv6
        then SO_REUSEADDR        servers, which set it too, may listen on the port; other sockets do not get it

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
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self._sockets]

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reservation."""
        for one in self._sockets:
            one.close()


def _bound_socket() -> socket.socket:
    """Return a socket on a port of its own; it does not listen."""
    has_both = socket.has_dualstack_ipv6()
    one = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET, socket.SOCK_STREAM)
    if has_both:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    one.bind(("", 0))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return one
