"""The workers of a job on one machine are unreachable from other machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import ranked, run
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)
from tfpar.cluster import loopback
from tfpar.cluster.tf_config import JobConfig

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]

_CLONE_NEWNET = 0x40000000
INSIDE, OUTSIDE = "10.203.0.1", "10.203.0.2"


LISTENING = """
import socket
import tfpar
strategy = tfpar.MultiWorker()
found = []
for name in os.listdir("/proc/self/fd"):
    try:
        one = socket.socket(fileno=os.dup(int(name)))
    except OSError:
        continue
    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.append([*one.getsockname()[:2], one.getsockopt(socket.SOL_SOCKET, 25, 16).decode().strip(chr(0))])
print(json.dumps([found, strategy.job.sum([rank + 1.0])[0]]))
"""


@pytest.mark.extended
@pytest.mark.slow_start
def test_tensorflows_server_is_bound_to_the_loopback(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, LISTENING, variables={"PYTHONWARNINGS": "ignore"})
    assert code == 0, err
    assert "warning" not in err
    for rank in range(2):
        listening, total = json.loads(ranked(out, rank)[-1])
        assert [interface for _, _, interface in listening] == ["lo"], listening
        assert total == 3.0, "the workers reach each other"


@pytest.fixture
def outside() -> Iterator[int]:
    """A substitute for another machine: a process in another network namespace, connected by a virtual cable."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip to make another network")
    program = (
        f"import ctypes, sys\nassert ctypes.CDLL(None).unshare({_CLONE_NEWNET}) == 0\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name = f"tfpar{process.pid % 100000}"
    try:
        assert process.stdout is not None
        process.stdout.readline()
        cable = ["ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(process.pid)]
        if subprocess.run(cable, capture_output=True, check=False).returncode != 0:
            pytest.skip("this kernel has no virtual cables")
        subprocess.run(["ip", "addr", "add", f"{INSIDE}/24", "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        there = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "ip"]
        subprocess.run([*there, "addr", "add", f"{OUTSIDE}/24", "dev", "cable"], check=True)
        subprocess.run([*there, "link", "set", "cable", "up"], check=True)
        yield process.pid
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
        process.communicate()


def reaches(outside: int, port: int) -> bool:
    """Whether another machine can connect to a port of this one."""
    program = f"import socket\nsocket.create_connection(('{INSIDE}', {port}), timeout=2)"
    command = ["nsenter", f"--net=/proc/{outside}/ns/net", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_confined_server_refuses_other_machines(outside: int) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        assert reaches(outside, port)
        made_before = server.accept()[0]
        with loopback.confined(port) as found:
            pass
        assert found.problem is None
        assert not reaches(outside, port)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=2).close()
        made_before.close()


def test_a_server_that_cannot_be_confined_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tfpar.strategies.multi_worker import preflight  # with TensorFlow

    monkeypatch.setattr(loopback, "_INTERFACE", b"nothing\0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        preflight._begin_confined(lambda: None, JobConfig((address, "127.0.0.1:1"), 0, "chief"))
    said = capfd.readouterr().err
    assert said.startswith(
        f"warning: TensorFlow's server at {address} can be reached from other machines, as it could "
    )
    assert "(No such device)" in said
    assert said.count("\n") == 1


def test_tensorflows_server_starts_by_a_function_that_releases_pythons_lock_and_raises_its_errors(
    logical_cpus: list[str],
) -> None:
    import tensorflow as tf
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import context

    from tfpar._compat import tf_server

    context.ensure_initialized()
    with tf_server.starting_without_lock():
        start = pywrap_tfe.TFE_EnableCollectiveOps
        assert start.__module__ == "tfpar._compat.tf_server", "TensorFlow offers it still"
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"Invalid tensorflow\.ServerDef"):
            start(context.context()._context_handle, b"no ServerDef")
    assert pywrap_tfe.TFE_EnableCollectiveOps is not start
