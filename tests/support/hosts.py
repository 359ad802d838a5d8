"""Hosts with addresses of their own on this machine: network namespaces, joined by a bridge.

    host 0 10.77.0.1 ──┐
    host 1 10.77.0.2 ──┼── bridge
    host 2 10.77.0.3 ──┘

It needs root. A host sees no other network, and its link can be taken down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests import ROOT

NETWORK = "10.77.0"
NEEDS_ROOT = "needs root and the command ip: it makes network namespaces"


class Host:
    """A network namespace with one address.

    Args:
        number: From 0.
        bridge: The bridge that it is attached to.
    """

    def __init__(self, number: int, bridge: str) -> None:
        self.address = f"{NETWORK}.{number + 1}"
        self._name, self._link = f"{bridge}h{number}", f"{bridge}v{number}"
        _ip("netns", "add", self._name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _ip("link", "set", self._link, "master", bridge, "up")
        _ip("-n", self._name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self._name, "link", "set", device, "up")

    def start(
        self, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], out: Path
    ) -> subprocess.Popen[bytes]:
        """Start Python on this host.

        Args:
            arguments: The arguments of Python.
            folder: The current folder of the process.
            variables: More environment variables.
            out: The file that gets its output.
        """
        with out.open("wb") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._name, sys.executable, *arguments],
                cwd=folder,
                env={**environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def set_link(self, state: str) -> None:
        """Set the link to the other hosts `"up"` or `"down"`."""
        _ip("link", "set", self._link, state)

    def limit_sending(self, megabits_per_second: int) -> None:
        """Limit the rate at which this host sends."""
        rate = ["rate", f"{megabits_per_second}mbit", "burst", "64kb", "latency", "50ms"]
        command = ["tc", "-n", self._name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate]
        if shutil.which("tc") is None or subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("needs the command tc and its queue tbf")

    def remove(self) -> None:
        """Remove the namespace and its link."""
        _ip("netns", "delete", self._name)


def environment() -> dict[str, str]:
    """Return the environment variables of a process on a host."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    return {**kept, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


@contextlib.contextmanager
def connected(num_hosts: int) -> Iterator[list[Host]]:
    """Connect hosts; whatever happens, they are removed in the end.

    Args:
        num_hosts: The number of hosts, at most 254.
    """
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip(NEEDS_ROOT)
    bridge = f"tf{os.getpid() % 100_000}"
    with contextlib.ExitStack() as stack:
        if _ip("link", "add", bridge, "type", "bridge", check=False).returncode != 0:
            pytest.skip(NEEDS_ROOT)
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        for number in range(num_hosts):
            hosts.append(Host(number, bridge))
            stack.callback(hosts[-1].remove)
        yield hosts


@contextlib.contextmanager
def ended_in_the_end(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End processes, with all that they started, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True)
