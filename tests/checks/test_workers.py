"""The doctor examines the network between workers, and names the one with a fault."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import doctor_faults, hosts
from tfpar.checks import workers
from tfpar.checks.report import Check
from tfpar.cluster import tf_config

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]
SECRET = b"0123456789abcdef"


def by_name(found: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_workers_on_one_machine_are_examined() -> None:
    found = by_name(workers.check_local(3))
    assert list(found) == ["versions of workers", "clocks", "ports", "bandwidth"]
    assert {name: check.status for name, check in found.items() if name != "bandwidth"} == {
        "versions of workers": "ok",
        "clocks": "ok",
        "ports": "ok",
    }
    assert "all 6 ordered pairs" in found["ports"].figure
    assert len(found["bandwidth"].values["gbit_per_second"]) == 6


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fault", "name", "status", "figure"),
    [
        ("version 1", "versions of workers", "WRONG", "worker 1 has keras 3.14.0 instead of"),
        ("closed 1", "worker 1", "WRONG", "does not answer within 3 s: Connection refused"),
        ("clock 2", "clocks", "slow", "worker 2 differs most from the chief, by +5.0"),
        ("blocked 1", "port of worker 2", "WRONG", "worker 1 cannot connect to 127.0.0.1:"),
    ],
)
def test_a_worker_with_a_fault_is_named(
    fault: str, name: str, status: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_faults.inject(monkeypatch, fault)
    monkeypatch.setattr(workers, "START_SECONDS", 3.0)
    found = by_name(workers.check_local(3))
    assert found[name].status == status
    assert figure in found[name].figure
    assert found[name].way_out
    others = {check.status for other, check in found.items() if other not in (name, "bandwidth")}
    assert others == {"ok"}


@pytest.fixture
def service() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    service = workers.Service(tf_config.JobConfig((address, "127.0.0.1:1"), 0, "chief"), SECRET)
    yield address
    service.has_ended.set()


def test_a_worker_answers_only_those_with_the_job_secret(service: str) -> None:
    assert workers.ask(service, SECRET, "reach") == {"127.0.0.1:1": "Connection refused"}
    with pytest.raises(ValueError, match="another TFPAR_JOB_SECRET"):
        workers.ask(service, b"another secret of 16", "facts")


@pytest.mark.parametrize(("do", "others"), [("", {}), ("send", {"rank": 7}), (3, {})])
def test_a_request_that_is_none_harms_nothing(service: str, do: Any, others: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ended"):
        workers.ask(service, SECRET, do, **others)
    assert workers.ask(service, SECRET, "facts")


def test_another_program_at_the_address_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match="another program answers there"):
            workers.ask(f"127.0.0.1:{server.getsockname()[1]}", SECRET, "facts")
        thread.join()


def test_the_slowest_link_between_hosts_is_named(tmp_path: Path) -> None:
    with hosts.connected(3) as connected:
        hosts.limit_sending(connected[2], "200mbit")
        addresses = [f"{host.address}:20331" for host in connected]
        started = []
        for rank, host in enumerate(connected):
            variables = {"TF_CONFIG": tf_config.to_tf_config(addresses, rank), "TFPAR_JOB_SECRET": SECRET.decode()}
            command = ["-m", "tfpar.doctor", "--json"]
            started.append(hosts.start(host, command, tmp_path, variables, tmp_path / f"out{rank}"))
        with hosts.ended_in_the_end(started):
            codes = [process.wait(120) for process in started]
        found = json.loads((tmp_path / "out0").read_text())
        assert codes == [found["exit_code"], 0, 0]
        checks = {check["name"]: check for check in found["checks"]}
        assert checks["bandwidth"]["status"] == "slow"
        assert "from worker 2 to worker" in checks["bandwidth"]["figure"]
        assert checks["ports"]["status"] == "ok"
