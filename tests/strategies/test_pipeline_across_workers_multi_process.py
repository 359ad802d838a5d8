"""One pipeline over two processes gives one device's results; the others lend devices, and end with the first."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in, differences
from tests.strategies.test_hybrid import wide
from tests.support import pipeline_cases, small, workers
from tests.support.ports import free_addresses
from tests.support.worker_program_across import SILENCE_SECONDS
from tfpar.cluster import rendezvous, tf_config
from tfpar.cluster.tf_config import Job

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
ROWS = (
    ("float64", "last batch of 1"),
    ("float64", "masked sequence"),
    ("float64", "L1, L2 and activity"),
    ("float64", "AUC, precision, recall"),
    ("float32", "embedding, sparse gradients"),
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    rows = [f"{dtype} {case}" for dtype, case in ROWS]
    folder = tmp_path_factory.mktemp("across")
    with workers.started("worker_program_across", folder, 2, str(folder), *rows) as started:
        yield started


@pytest.mark.parametrize(("dtype", "case"), ROWS)
def test_equals_one_device_after_20_steps(job: workers.Workers, dtype: str, case: str) -> None:
    with computing_in(dtype):
        expected = pipeline_cases.expected(case, dtype)
    (result,) = job.results(f"{dtype} {case}", num_workers=1)
    assert not isinstance(result, workers.Raised), result.trace
    assert not list(differences(result, expected, dtype))


def test_the_pipeline_names_the_devices_of_each_worker(job: workers.Workers) -> None:
    described = "Pipeline of 2 stages on worker 0 CPU:0, worker 1 CPU:0, 3 micro-batches, 1f1b"
    assert job.results("description", num_workers=1) == [described]


def test_weights_and_optimizer_state_are_on_the_worker_of_their_stage(job: workers.Workers) -> None:
    ((predicted, homes, table),) = job.results("homes", num_workers=1)
    expected = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0).predict(small.data(), verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    assert all(one == other for one, other in homes)
    assert {re.search(r"/task:(\d)/", home)[1] for home, _ in homes} == {"0", "1"}  # type: ignore[index]
    assert re.search(r"0 +0/CPU:0", table)
    assert re.search(r"1 +1/CPU:0", table)


def test_weights_that_the_model_function_sets_are_on_the_worker_of_their_stage(job: workers.Workers) -> None:
    (homes,) = job.results("homes of set weights", num_workers=1)
    assert [re.search(r"/task:(\d)/", home)[1] for home in homes] == ["0"] * 4 + ["1"] * 4  # type: ignore[index]


def test_functions_of_python_run_on_the_chief_alone(job: workers.Workers) -> None:
    (loss,) = job.results("Python on the chief", num_workers=1)
    assert isinstance(loss, float)
    (refused,) = job.results("Python on the other worker", num_workers=1)
    assert isinstance(refused, workers.Raised)
    assert "calls a Python function" in refused.trace
    assert "is on worker 1: only the process that runs the steps has the function" in refused.trace


def test_a_signal_to_the_other_worker_stops_the_first(job: workers.Workers) -> None:
    wait_for_training(job.folder)
    os.kill(job.pid(1), signal.SIGTERM)
    assert job.results("stopped", num_workers=1) == [True]


def test_the_other_worker_ends_with_the_first(job: workers.Workers) -> None:
    assert job.finish() == [0, 0]
    assert "worker 1 lends CPU:0 to" in (job.folder / "1.out").read_text()


def wait_for_training(root: Path) -> None:
    deadline = time.monotonic() + 100
    while not (root / "trains").exists():
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.1)


@contextlib.contextmanager
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    """Start two workers that train until one is lost."""
    root, folder = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("lost")
    with workers.started("worker_program_across", folder, 2, str(root), "lost") as job:
        wait_for_training(root)
        yield job


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "connection closed"), (signal.SIGSTOP, "no heartbeat")],
    ids=["killed", "suspended"],
)
def test_a_lost_worker_is_named_and_all_end(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, reason: str
) -> None:
    with training(tmp_path_factory) as job:
        os.kill(job.pid(1), number)
        began = time.monotonic()
        (raised,) = job.results("lost", num_workers=1)
        assert time.monotonic() - began < SILENCE_SECONDS + 10
        os.kill(job.pid(1), signal.SIGCONT)
        assert job.finish() == [0, -number if number == signal.SIGKILL else 1]
    assert raised.kind == "WorkerLostError"
    named = rf"A worker of the job is lost: (localhost|127\.0\.0\.1):\d+ no longer responds \({reason}\)"
    assert re.match(named, raised.message)


@pytest.mark.extended
def test_a_worker_ends_when_the_first_one_hangs(tmp_path_factory: pytest.TempPathFactory) -> None:
    with training(tmp_path_factory) as job:
        os.kill(job.pid(0), signal.SIGSTOP)
        began = time.monotonic()
        assert job.end_of(1) == 1
        assert time.monotonic() - began < SILENCE_SECONDS + 10
        os.kill(job.pid(0), signal.SIGCONT)
        (raised,) = job.results("lost", num_workers=1)
    assert raised.kind == "WorkerLostError"
    assert re.search(r"The chief, \S+, is lost \(no heartbeat\)", (job.folder / "1.out").read_text())


@pytest.mark.extended
def test_a_worker_whose_server_cannot_be_reached_is_named() -> None:
    addresses = free_addresses(2)
    script = "import tfpar; tfpar.Pipeline(2, 2, across_workers=True, form_seconds=5)"
    environment = {**os.environ, "TF_CONFIG": tf_config.to_tf_config(addresses, 0)}
    kept: dict[int, socket.socket] = {}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True) as chief:
        rendezvous.connect_workers(Job(tuple(addresses), 1, "worker"), 60, kept.__setitem__)
        _, error = chief.communicate()
    sentence = (
        "TimeoutError: All 2 workers were connected, and TensorFlow did not answer within 5 s at "
        f"{addresses[1]} (Connection refused). Let the machines of the job connect to each other"
    )
    assert chief.returncode == 1
    assert sentence in error


def test_a_process_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    part = "across_workers=True is for a job of several workers, and TF_CONFIG describes none"
    with pytest.raises(ValueError, match=part):
        tfpar.Pipeline(2, 2, across_workers=True)
