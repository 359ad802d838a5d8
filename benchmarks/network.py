"""Hosts with addresses of their own on this machine: network namespaces, joined by a bridge.

    host 0 10.77.0.1 ──┐
    host 1 10.77.0.2 ──┼── bridge
    host 2 10.77.0.3 ──┘

It needs root. A host sees no other network. Its link can have a limited rate, and can be taken down.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator

NETWORK = "10.77.0"
INTERFACE = "eth0"
PORT = 9999
_NUMBERS = itertools.count()


class Host:
    """A network namespace with one address.

    Args:
        number: From 0.
        bridge: The bridge that it is attached to.
        rate: The rate at which it sends, such as "1gbit"; None for no limit.
    """

    def __init__(self, number: int, bridge: str, rate: str | None = None) -> None:
        self.address = f"{NETWORK}.{number + 1}"
        self._name, self._link = f"{bridge}h{number}", f"{bridge}v{number}"
        _run("ip", "netns", "add", self._name)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", INTERFACE, "netns", self._name)
        _run("ip", "link", "set", self._link, "master", bridge, "up")
        _run("ip", "-n", self._name, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run("ip", "-n", self._name, "link", "set", device, "up")
        if rate is not None:
            self.limit_sending(rate)

    @property
    def command(self) -> list[str]:
        """The words before a command that is to run on this host."""
        return ["ip", "netns", "exec", self._name]

    def limit_sending(self, rate: str) -> None:
        """Limit the rate at which this host sends, such as "1gbit"."""
        limit = ("rate", rate, "burst", "256kb", "latency", "50ms")  # the kernel sends packets of up to 64 KB
        _run("tc", "-n", self._name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)

    def set_link(self, state: str) -> None:
        """Set the link to the other hosts `"up"` or `"down"`."""
        _run("ip", "link", "set", self._link, state)

    def remove(self) -> None:
        """Remove the namespace and its link."""
        _run("ip", "link", "delete", self._link)  # with the namespace, Linux would remove it some time later
        _run("ip", "netns", "delete", self._name)


@contextlib.contextmanager
def connected(num_hosts: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Connect hosts; whatever happens, they are removed in the end.

    Args:
        num_hosts: The number of hosts, at most 254.
        rate: The rate at which each sends, such as "1gbit"; None for no limit.

    Raises:
        OSError: If this process may not make network namespaces.
    """
    bridge = f"tf{os.getpid() % 100_000}n{next(_NUMBERS)}"
    with contextlib.ExitStack() as stack:
        try:
            _run("ip", "link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            raise OSError("Hosts are network namespaces: they need root and the commands ip and tc") from error
        stack.callback(_run, "ip", "link", "delete", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = []
        for number in range(num_hosts):
            hosts.append(Host(number, bridge, rate))
            stack.callback(hosts[-1].remove)
        yield hosts


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
