"""The rendezvous of a job's workers: who is missing, the job's secret, IPv6, and strangers on the chief's port."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)
from tests.support.ports import free_addresses
from tfpar.cluster import job_secret, rendezvous, tf_config
from tfpar.cluster.rendezvous import chief, messages, worker
from tfpar.cluster.tf_config import JobConfig

SECRET = job_secret.new().encode()
REFUSED = " {} connection(s) without this job's TFPAR_JOB_SECRET were refused, the last from 127.0.0.1."
SECONDS = 20.0  # enough for all that meet; nothing waits so long unless it must


def places(num_workers: int, host: str = "127.0.0.1") -> list[JobConfig]:
    """The place of each worker of a job on this machine."""
    addresses = tuple(address.replace("127.0.0.1", host) for address in free_addresses(num_workers))
    return [JobConfig(addresses, rank, "worker" if rank else "chief") for rank in range(num_workers)]


def side(job: JobConfig, seconds: float = SECONDS, secret: bytes = SECRET) -> tuple[list[str], str]:
    """What one worker learns at the rendezvous."""
    found = (worker.report if job.rank else chief.gather)(job, seconds, secret)
    return found.missing, found.remark


def together(jobs: Sequence[JobConfig], seconds: float = SECONDS) -> list[tuple[list[str], str]]:
    """What each of several workers learns that meet at the same time."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: side(job, seconds), jobs))


def connect(job: JobConfig) -> socket.socket:
    """Connect to the chief as soon as it listens."""
    deadline_seconds = time.monotonic() + SECONDS
    while True:
        try:
            connection = socket.create_connection(tf_config.split_address(job.addresses[0]), timeout=SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_seconds
            time.sleep(0.01)
        else:
            connection.settimeout(SECONDS)
            return connection


def started(call: Callable[[], object]) -> Future[object]:
    """Call something in a thread."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_all_workers_meet(host: str) -> None:
    assert together(places(3, host)) == [([], "")] * 3


def test_a_job_with_other_hosts_listens_on_both_families() -> None:
    jobs = places(2)
    (here, _), port = jobs[0].addresses, int(jobs[0].addresses[0].rpartition(":")[2])
    future = started(lambda: chief.gather(JobConfig((here, "192.0.2.1:1"), 0, "chief"), SECONDS, SECRET))
    for host in ("127.0.0.1", "::1"):
        with connect(JobConfig((f"{host}:{port}" if host != "::1" else f"[::1]:{port}",), 1, "worker")) as connection:
            assert messages.read_greeting(connection.recv(100))
    assert worker.report(jobs[1], SECONDS, SECRET) == messages.Outcome([])
    assert future.result(SECONDS) == messages.Outcome([])


def test_a_job_of_this_machine_listens_on_the_loopback_alone() -> None:
    (first, *_) = places(2)
    listeners = chief.listening(first)
    try:
        assert [one.getsockname()[0] for one in listeners] == ["127.0.0.1"]
    finally:
        for one in listeners:
            one.close()


def test_missing_workers_are_named_to_all_that_came() -> None:
    jobs = places(3)
    assert together(jobs[:2], seconds=0.5) == [([jobs[0].addresses[2]], "")] * 2


def test_a_chief_that_never_appears_is_named() -> None:
    _, second = places(2)
    assert side(second, seconds=0.3) == ([second.addresses[0]], "")


def test_a_worker_names_the_reason_of_its_own_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_GREETING_SECONDS", 0.5)
    _, second = places(2)
    chief_address = second.addresses[0]
    assert worker.report(second, 0.3, SECRET).reasons == {chief_address: "Connection refused"}
    with socket.create_server(tf_config.split_address(chief_address)):  # accepts, and sends nothing
        assert worker.report(second, 0.3, SECRET) == messages.Outcome([chief_address])


def test_a_worker_that_is_started_again_takes_its_own_place() -> None:
    first, second, third = places(3)
    future = started(lambda: side(first))
    with connect(second) as left:
        challenge = messages.read_greeting(left.recv(100))
        assert challenge is not None
        left.sendall(messages.hello(1, messages.Challenges(challenge, messages.new_challenge()), SECRET))
        again = started(lambda: side(second))
        assert left.recv(100) == b"", "the chief closes the connection that is replaced"
        assert side(third) == ([], "")
    assert again.result(SECONDS) == future.result(SECONDS) == ([], "")


def test_meeting_raises_with_the_rule_and_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_secret.VARIABLE, "short")
    first, _ = places(2)
    with pytest.raises(ValueError, match="TFPAR_JOB_SECRET must have at least 16 characters, received 5"):
        rendezvous.connect_workers(first, 1)
    monkeypatch.setenv(job_secret.VARIABLE, f"  {SECRET.decode()}\n")
    absent = rf"{first.addresses[1]} \(Connection refused\)"
    message = rf"All 2 workers must connect within 0.1 s, and {absent} did not\. .*form_seconds\.$"
    with pytest.raises(TimeoutError, match=message):
        rendezvous.connect_workers(first, 0.1)


def test_a_job_over_hosts_without_a_secret_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)
    first, second = places(2)
    for job in (first, second, JobConfig((first.addresses[0], "192.0.2.1:1"), 0, "chief")):
        with pytest.raises(TimeoutError):
            rendezvous.connect_workers(job, 0.1)
    assert capfd.readouterr().err == (
        f"warning: TFPAR_JOB_SECRET is not set: any program that reaches {first.addresses[0]} can take a worker's "
        "place. Set the same random text on all workers.\n"
    )


def test_a_taken_port_is_named_before_anybody_waits() -> None:
    first, _ = places(2)
    with (
        socket.create_server(("::", tf_config.split_address(first.addresses[0])[1]), family=socket.AF_INET6),
        pytest.raises(OSError, match=rf"{first.addresses[0]} \(rank 0\) is taken: Address already in use"),
    ):
        rendezvous.connect_workers(first, SECONDS)


# The job's secret


def test_a_worker_with_another_secret_is_refused_on_both_sides() -> None:
    first, second = places(2)
    future = started(lambda: side(first, seconds=2))
    chief = first.addresses[0]
    message = rf"^TFPAR_JOB_SECRET must be the same for all workers, and the chief at {chief} refused worker 1\."
    with pytest.raises(ValueError, match=message) as refused:
        side(second, secret=b"another secret of somebody")
    missing, remark = future.result(SECONDS)  # type: ignore[misc]
    assert missing == [second.addresses[1]]
    assert remark == REFUSED.format(1)
    assert not re.search(rf"{SECRET.decode()}|another secret", str(refused.value) + remark)


def test_an_impostor_takes_no_workers_place() -> None:
    jobs = places(2)
    future = started(lambda: side(jobs[0]))
    for hello in (b"1\n", f"1 {'0' * 32} {'0' * 64}\n".encode()):
        with connect(jobs[1]) as impostor:
            assert impostor.recv(100).startswith(b"tfpar ")
            impostor.sendall(hello)
            assert impostor.recv(100) == messages.REFUSED
    assert not future.done()
    assert side(jobs[1]) == ([], "")
    assert future.result(SECONDS) == ([], REFUSED.format(2))


@pytest.mark.parametrize(
    ("answer", "remark"),
    [
        (b'["all is lost\\u001b[2J"]\n', " The program at the chief's address does not have this job's"),
        (b"0" * 64 + b' ["all is lost"]\n', " The program at the chief's address does not have this job's"),
        (b"x" * 3_000_000, ""),
    ],
    ids=["no proof", "wrong proof", "no end"],
)
def test_an_impostor_chiefs_answer_is_neither_believed_nor_printed(answer: bytes, remark: str) -> None:
    _, second = places(2)
    with socket.create_server(tf_config.split_address(second.addresses[0])) as impostor:
        future = started(lambda: side(second, seconds=1))
        connection, _ = impostor.accept()
        impostor.close()
        with connection:
            connection.sendall(messages.greeting(messages.new_challenge()))
            assert connection.recv(200).startswith(b"1 ")
            started(lambda: connection.sendall(answer))
            missing, said = future.result(SECONDS)  # type: ignore[misc]
    assert missing == [second.addresses[0]]
    assert said.startswith(remark)
    assert "lost" not in said


def test_without_a_secret_an_impostor_chief_can_only_name_addresses_of_the_job() -> None:
    _, second = places(2)
    challenges = messages.Challenges(messages.new_challenge(), messages.new_challenge())
    for missing in (["all is lost"], [second.addresses[0], 3], "text", {"a": 1}):
        line = messages.answer(missing, challenges, b"")  # type: ignore[arg-type]
        assert messages.read_answer(line, challenges, second, b"") is None
    for difference in ((1, "all is lost!", "Hybrid"), (1, "Hybrid"), (2, "Hybrid", "Hybrid"), ("1", "a", "b"), "text"):
        line = messages.answer([], challenges, b"", difference)  # type: ignore[arg-type]
        assert messages.read_answer(line, challenges, second, b"") is None
    line = messages.answer([second.addresses[1]], challenges, b"")
    assert messages.read_answer(line, challenges, second, b"") == messages.Outcome([second.addresses[1]])


def test_workers_with_different_strategies_all_learn_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)
    jobs = places(4)
    names = ["MultiWorker(shard='weights')", "MultiWorker(shard='weights')", "Hybrid", "MultiWorker"]
    kept: list[int] = []

    def meet(job: JobConfig) -> None:
        rendezvous.connect_workers(job, SECONDS, lambda rank, connection: kept.append(rank), names[job.rank])

    futures = [started(lambda job=job: meet(job)) for job in jobs]  # type: ignore[misc]
    for future in futures:
        with pytest.raises(ValueError, match=r"must create the same strategy, and worker 2 \(127.0.0.1:\d+\) creates "
                           r"Hybrid, the chief MultiWorker\(shard='weights'\). Start all of them"):  # fmt: skip
            future.result(SECONDS)
    assert kept == []


def test_the_secret_is_no_argument_and_no_message_of_the_launched_workers(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib\n"
        "secret = os.environ['TFPAR_JOB_SECRET']\n"
        "assert len(secret) == 64 and secret not in ' '.join(sys.argv)\n"
        "pathlib.Path(os.environ['TF_CONFIG'][-4:-2].strip()).write_text(secret)\n"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "tfpar.launch", "--num_workers", "2", "--", "script.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    secrets = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert len(secrets) == 1, "both have the same"
    assert not re.search("|".join(secrets), completed.stdout + completed.stderr)


# Strangers
