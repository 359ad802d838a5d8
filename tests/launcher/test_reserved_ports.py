"""Reserved ports: servers may listen on them, and the system gives them to nobody else."""

import contextlib
import re
import socket

import pytest

from tfpar.cluster import tf_config
from tfpar.launcher.reserved_ports import ReservedPorts

NUM_CONNECTIONS = 3000


def test_the_addresses_differ_and_are_on_the_loopback() -> None:
    with ReservedPorts(20) as ports:
        assert len(set(ports.addresses)) == 20
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in ports.addresses)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_connection_and_no_server_gets_a_reserved_port(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(ReservedPorts(500))
        reserved = {int(address.rpartition(":")[2]) for address in ports.addresses}
        server = stack.enter_context(socket.create_server((host, 0), family=family))
        given = {server.getsockname()[1]}
        for _ in range(NUM_CONNECTIONS):
            with socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0]:
                given.add(client.getsockname()[1])
            with socket.create_server((host, 0), family=family) as other:
                given.add(other.getsockname()[1])
    assert not reserved & given
    assert len(given) > NUM_CONNECTIONS // 10


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_worker_listens_on_a_reserved_port_and_is_reached(family: socket.AddressFamily) -> None:
    with ReservedPorts(1) as ports:
        job = tf_config.JobConfig((*ports.addresses, "127.0.0.1:1"), 0, "chief")
        tf_config.check_port_free(job)
        host, port = tf_config.split_address(ports.addresses[0])
        with (
            socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6) as server,
            socket.create_connection((host, port), timeout=5),
            server.accept()[0],
            pytest.raises(OSError, match="is taken"),
        ):
            tf_config.check_port_free(job)


def test_a_port_is_free_for_all_after_the_reservation() -> None:
    with ReservedPorts(1) as ports:
        port = int(ports.addresses[0].rpartition(":")[2])
        with socket.socket() as one, pytest.raises(OSError, match="in use"):
            one.bind(("127.0.0.1", port))
    with socket.socket() as one:
        one.bind(("127.0.0.1", port))
