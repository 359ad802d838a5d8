"""The plan of a job over several hosts: which workers this host starts, and what is refused."""

from __future__ import annotations

import socket

import pytest

from tfpar.launcher import hosts
from tfpar.launcher.worker import worker_environment


def test_every_host_starts_an_equal_part_in_the_order_of_the_hosts() -> None:
    plans = [hosts.plan("10.0.0.1, node-2,[fd00::3]", host, 6, 4000) for host in range(3)]
    assert [(one.first_rank, one.num_local) for one in plans] == [(0, 2), (2, 2), (4, 2)]
    [addresses] = {one.addresses for one in plans}
    assert addresses == tuple(f"{host}:{port}" for host in ("10.0.0.1", "node-2", "[fd00::3]") for port in (4000, 4001))


def test_this_host_is_found_by_its_address() -> None:
    plan = hosts.plan("198.51.100.1,127.0.0.1,198.51.100.2", None, 3, 4000)  # RFC 5737: addresses of nobody
    assert plan.first_rank == 1
    assert plan.line() == "This host starts worker 1 of 3, from 127.0.0.1:4000."


@pytest.mark.parametrize(
    ("names", "host", "num_workers", "port", "words"),
    [
        ("a,,b", 0, 2, 4000, "--hosts must name at most 1024 different hosts, separated by commas, received 'a,,b'"),
        ("a,a", 0, 2, 4000, "different hosts"),
        ("", 0, 2, 4000, "received ''"),
        ("a,b", 0, 3, 4000, r"--num_workers 3 is no multiple of the 2 hosts. Use --num_workers 4\."),
        ("a,b", 2, 2, 4000, "--host must be from 0 to 1 for 2 hosts, received 2"),
        ("a,b", -1, 2, 4000, "--host must be from 0 to 1"),
        ("a,b", 0, 4, 65535, "--port must be from 1024 to 65534, received 65535"),
        ("a,b", 0, 2, 80, "--port must be from 1024"),
        (
            "198.51.100.1,198.51.100.2",
            None,
            2,
            4000,
            rf"{socket.gethostname()}, and none of .* Set --host to",
        ),
        ("127.0.0.1,127.0.0.2", None, 2, 4000, "and 127.0.0.1 and 127.0.0.2 of"),
        ("no such host.invalid,b", None, 2, 4000, "and none of"),
    ],
)
def test_hosts_that_cannot_share_the_workers_are_refused(
    names: str, host: int | None, num_workers: int, port: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        hosts.plan(names, host, num_workers, port)


def test_no_secret_is_created_for_several_hosts_and_that_of_the_user_is_kept() -> None:
    addresses = ["10.0.0.1:1", "10.0.0.2:1"]
    assert "TFPAR_JOB_SECRET" not in worker_environment(1, addresses, 1, "", {}, None, 1)
    given = {"TFPAR_JOB_SECRET": "0123456789abcdef"}
    assert worker_environment(1, addresses, 1, "", given, None, 1)["TFPAR_JOB_SECRET"] == "0123456789abcdef"
