"""One pipeline over two processes gives one device's results; the others lend devices, and end with the first."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in, differences
from tests.strategies.test_hybrid import wide
from tests.support import checkpoint_matrix as matrix
from tests.support import pipeline_cases, small, workers

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
ROWS = (
    ("float64", "last batch of 1"),
    ("float64", "masked sequence"),
    ("float64", "L1, L2 and activity"),
    ("float64", "AUC, precision, recall"),
    ("float32", "embedding, sparse gradients"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[workers.Workers]:
    rows = [f"{dtype} {case}" for dtype, case in ROWS]
    folder = tmp_path_factory.mktemp("across")
    with workers.started("worker_program_across", folder, 2, str(root), *rows) as started:
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


def test_one_device_finishes_its_run(job: workers.Workers, root: Path, tmp_path: Path) -> None:
    (raised,) = job.results("begin", num_workers=1)
    assert raised is None, raised.trace
    history, state = matrix.end(tfpar.SingleDevice(), root)
    expected = matrix.end(tfpar.SingleDevice(), tmp_path)
    small.assert_same_history(history, expected[0])
    small.assert_same_state(state, expected[1], 1e-5)


def test_the_other_worker_ends_with_the_first(job: workers.Workers) -> None:
    assert job.finish() == [0, 0]
    assert "worker 1 lends CPU:0 to the pipeline of" in (job.folder / "1.out").read_text()


def test_a_killed_worker_is_named_and_the_first_one_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    root, folder = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("killed")
    with workers.started("worker_program_across", folder, 2, str(root), "killed") as job:
        deadline = time.monotonic() + 100
        while not (root / "trains").exists():
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(0.1)
        os.kill(job.pid(1), signal.SIGKILL)
        (raised,) = job.results("killed", num_workers=1)
    assert raised.kind == "WorkerLostError"
    assert re.match(r"A worker of the job is lost: (localhost|127\.0\.0\.1):\d+ no longer responds", raised.message)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "across_workers=True is for a job of several workers, and TF_CONFIG describes none"),
        ({"devices": ["CPU:0", "CPU:1"]}, "takes devices of each in turn, received devices=['CPU:0', 'CPU:1']"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    arguments: dict[str, list[str]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=re.escape(part)):
        tfpar.Pipeline(2, 2, across_workers=True, **arguments)


def test_stages_that_workers_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}')
    part = "Each of 2 workers must run the same number of stages, received a pipeline on 3 devices"
    with pytest.raises(ValueError, match=part):
        tfpar.Pipeline(3, 2, across_workers=True)
