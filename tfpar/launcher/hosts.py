"""The workers of a job over several hosts, each with a launcher of its own.

    python -m tfpar.launch --num_workers 4 --hosts 10.0.0.1,10.0.0.2 -- --config run.toml     the same on both hosts

    10.0.0.1   launcher ─┬─ worker 0, 10.0.0.1:20200          10.0.0.2   launcher ─┬─ worker 2, 10.0.0.2:20200
                         └─ worker 1, 10.0.0.1:20201                               └─ worker 3, 10.0.0.2:20201

After a failure every launcher restarts its workers, and they wait for those of the other hosts in the rendezvous.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Sequence

from tfpar.messages.received import excerpt, quoted

FIRST_PORT = 20_200
MAX_HOSTS = 1024
_LAST_PORT = 65_535


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """The workers of one host in a job over several hosts.

    Args:
        addresses: `host:port` of every worker of the job, in the order of ranks.
        first_rank: The rank of the first worker of this host.
        num_local: The number of workers of this host.
    """

    addresses: tuple[str, ...]
    first_rank: int
    num_local: int

    def line(self) -> str:
        """Return the plan in one line."""
        last = self.first_rank + self.num_local - 1
        these = f"worker {last}" if self.num_local == 1 else f"workers {self.first_rank} to {last}"
        return f"This host starts {these} of {len(self.addresses)}, from {self.addresses[self.first_rank]}."


def plan(hosts: str, host: int | None, num_workers: int, port: int) -> HostPlan:
    """Return the workers of this host.

    Args:
        hosts: Names or addresses of all hosts, separated by commas, in the same order on every host.
        host: The number of this host, from 0; None to find the one with an address of this machine.
        num_workers: Number of workers of the job; every host starts an equal part.
        port: The port of the first worker of each host; the others have the next ones.

    Raises:
        ValueError: If the hosts cannot share the workers, or this machine is none or several of them.

    Example:
        >>> plan("a,b", 1, 4, 20200)
        HostPlan(addresses=('a:20200', 'a:20201', 'b:20200', 'b:20201'), first_rank=2, num_local=2)
    """
    names = [name.strip() for name in hosts.split(",")]
    if not all(names) or len(set(names)) < len(names) or len(names) > MAX_HOSTS:
        raise ValueError(
            f"--hosts must name at most {MAX_HOSTS} different hosts, separated by commas, received {quoted(hosts)}."
        )
    if num_workers % len(names):
        raise ValueError(
            f"Every host starts the same number of workers, and --num_workers {num_workers} is no multiple of the "
            f"{len(names)} hosts. Use --num_workers {-(-num_workers // len(names)) * len(names)}."
        )
    num_local = num_workers // len(names)
    if not 1024 <= port <= _LAST_PORT - num_local + 1:
        raise ValueError(f"--port must be from 1024 to {_LAST_PORT - num_local + 1}, received {port}.")
    number = _number_of_this(names) if host is None else host
    if not 0 <= number < len(names):
        raise ValueError(f"--host must be from 0 to {len(names) - 1} for {len(names)} hosts, received {number}.")
    addresses = tuple(f"{name}:{port + local}" for name in names for local in range(num_local))
    return HostPlan(addresses, number * num_local, num_local)


def _number_of_this(names: Sequence[str]) -> int:
    here = [number for number, name in enumerate(names) if _is_here(name)]
    if len(here) == 1:
        return here[0]
    those = "none" if not here else " and ".join(names[number] for number in here[:3])
    raise ValueError(
        f"One of --hosts must be this machine, {socket.gethostname()}, and {excerpt(those, 100)} of "
        f"{excerpt(', '.join(names), 100)} has an address of it. Say the number of this host, from 0, with --host."
    )


def _is_here(name: str) -> bool:
    """Return whether a host has an address of this machine: the system binds no other."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                one.bind(address)
                return True
    return False
