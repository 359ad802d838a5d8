"""Hosts with addresses of their own on this machine, see `benchmarks.network`; tests skip where there are none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import network
from benchmarks.network import Host
from tests import ROOT

NEEDS_ROOT = "needs root and the command ip: it makes network namespaces"


def start(
    host: Host, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], out: Path
) -> subprocess.Popen[bytes]:
    """Start Python on a host.

    Args:
        host: The host.
        arguments: The arguments of Python.
        folder: The current folder of the process.
        variables: More environment variables.
        out: The file that gets its output.
    """
    with out.open("wb") as stream:
        return subprocess.Popen(
            [*host.command, sys.executable, *arguments],
            cwd=folder,
            env={**environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )


def limit_sending(host: Host, rate: str) -> None:
    """Limit the rate at which a host sends, such as "200mbit"."""
    try:
        host.limit_sending(rate)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the command tc and its queue tbf")


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
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(network.connected(num_hosts))
        except OSError:
            pytest.skip(NEEDS_ROOT)
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
