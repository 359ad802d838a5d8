"""Jobs over several hosts, each with its own launcher.

    python -m tfpar.launch --num_workers 4 --hosts 10.0.0.1,10.0.0.2 -- --config run.toml     the same on both hosts

    10.0.0.1   launcher ─┬─ worker 0, 10.0.0.1:20200          10.0.0.2   launcher ─┬─ worker 2, 10.0.0.2:20200
                         └─ worker 1, 10.0.0.1:20201                               └─ worker 3, 10.0.0.2:20201

After a failure, every launcher restarts its workers, which wait for those of the other hosts in the rendezvous.
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
        addresses: `host:port` of each worker of the job, in rank order.
        first_rank: The rank of this host's first worker.
        num_local: Number of workers on this host.
    """

    addresses: tuple[str, ...]
    first_rank: int
    num_local: int

    def line(self) -> str:
        """Return the plan as a sentence."""
        last = self.first_rank + self.num_local - 1
        these = f"worker {last}" if self.num_local == 1 else f"workers {self.first_rank} to {last}"
        return f"This host starts {these} of {len(self.addresses)}, from {self.addresses[self.first_rank]}."


def plan(hosts: str, host: int | None, num_workers: int, port: int) -> HostPlan:
    """Plan the workers of this host.

    Args:
        hosts: Names or addresses of all hosts, separated by commas, in the same order on every host.
        host: The index of this host. None finds the host whose address is local.
        num_workers: Number of workers in the job, a multiple of the number of hosts.
        port: The port of the first worker of each host; its other workers use the following ports.

    Raises:
        ValueError: If the workers cannot be divided equally, or not exactly one host is this machine.

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
    number = _local_host(names) if host is None else host
    if not 0 <= number < len(names):
        raise ValueError(f"--host must be from 0 to {len(names) - 1} for {len(names)} hosts, received {number}.")
    addresses = tuple(f"{name}:{port + local}" for name in names for local in range(num_local))
    return HostPlan(addresses, number * num_local, num_local)


def _local_host(names: Sequence[str]) -> int:
    local = [number for number, name in enumerate(names) if _is_local(name)]
    if len(local) == 1:
        return local[0]
    those = "none" if not local else " and ".join(names[number] for number in local[:3])
    raise ValueError(
        f"One of --hosts must be this machine, {socket.gethostname()}, and {excerpt(those, 100)} of "
        f"{excerpt(', '.join(names), 100)} has a local address. Set --host to the index of this host, from 0."
    )


def _is_local(name: str) -> bool:
    """Return whether a host is this machine: a socket can be bound only to a local address."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False
