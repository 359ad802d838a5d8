"""Addresses of this machine for jobs that tests start."""

from tfpar.launcher.reserved_ports import ReservedPorts

_reserved: list[ReservedPorts] = []  # until this process ends: a test cannot be disturbed by another one's connection


def free_addresses(num_workers: int) -> list[str]:
    """Return `127.0.0.1:port` of each worker; servers can listen there, and no other socket gets the port."""
    _reserved.append(ReservedPorts(num_workers))
    return _reserved[-1].addresses
