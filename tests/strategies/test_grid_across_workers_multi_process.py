"""Replicas of a pipeline, with devices of several processes, give the results of one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in, differences, reference
from tests.strategies.test_hybrid import wide
from tests.support import checkpoint_matrix, pipeline_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.extent import sampled
from tests.support.pipeline_cases import Row
from tests.support.worker_program_grid import SHARDED

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
ROWS = pipeline_cases.on_replicas()
# Tensors whose sums, shapes or copies pass from one process to another.
IN_CI = (
    "last batch of 1",
    "masked sequence",
    "accumulation 4, ragged end, clipped",
    "embedding, sparse gradients",
)
TRAINED = sampled(ROWS, of_ci=[row for row in ROWS if row.case in IN_CI])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    names = [str(row) for row in TRAINED]
    with workers.started("worker_program_grid", tmp_path_factory.mktemp("grid"), 2, *names) as started:
        yield started


def result_of(job: workers.Workers, name: str) -> Any:
    (result,) = job.results(name, num_workers=1)
    assert not isinstance(result, workers.Raised), result.trace
    return result


def test_the_grid_names_the_devices_of_each_worker(job: workers.Workers) -> None:
    devices = "worker 0 CPU:0 CPU:1, worker 1 CPU:0 CPU:1"
    assert result_of(job, "description") == f"Hybrid of 2 replicas of 2 stages on {devices}, 2 micro-batches, 1f1b"


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: str(row).replace(" ", "_"))
def test_equals_one_device_after_20_steps(job: workers.Workers, row: Row) -> None:
    with computing_in(row.dtype):
        expected = pipeline_cases.expected(row.case, row.dtype)
    assert not list(differences(result_of(job, str(row)), expected, row.dtype))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("few weights", [{"0/CPU:0", "1/CPU:0"}, {"0/CPU:1", "1/CPU:1"}]),
        ("many weights", [{"0/CPU:0", "0/CPU:1"}, {"1/CPU:0", "1/CPU:1"}]),
        ("named devices", [{"1/CPU:1", "1/CPU:0"}, {"0/CPU:1", "0/CPU:0"}]),
    ],
)
def test_weights_and_optimizer_state_are_on_the_devices_of_their_stage_in_the_order_of_less_traffic(
    job: workers.Workers, name: str, stages: list[set[str]]
) -> None:
    homes, table = result_of(job, name)
    assert all(len(of_one) == 1 for of_one in homes)
    assert set().union(*homes[:2]) <= stages[0]
    assert set().union(*homes[-2:]) <= stages[1]
    for stage, devices in enumerate(stages):
        (listed,) = re.findall(rf"^ +{stage}  (\S+ \S+)", table, re.MULTILINE)
        assert set(listed.split()) == devices
    assert "MB a step between workers" in table
    assert ("MB with the devices in another order" in " ".join(table.split())) == (name != "named devices")


def test_predictions_and_logs_are_those_of_one_device(job: workers.Workers) -> None:
    trainer = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0)
    predicted, evaluated = result_of(job, "predict")
    np.testing.assert_allclose(predicted, trainer.predict(small.data(), verbose=0), rtol=1e-5, atol=1e-6)
    cases.assert_same(evaluated, trainer.evaluate(small.data(), verbose=0, return_dict=True), 1e-5)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_weights_over_workers_equal_one_device(job: workers.Workers, name: str) -> None:
    found = result_of(job, f"{name}, weights sharded")
    with computing_in("float64"):
        assert not list(differences(found, reference(name, "float64"), "float64"))


def test_each_worker_holds_weights_and_a_checkpoint_of_them_continues_on_one_device(job: workers.Workers) -> None:
    description, preview, homes = result_of(job, "homes of shards")
    assert description == "MultiWorker over 2 workers, 2 replicas on worker 0 CPU:0, worker 1 CPU:0, weights sharded"
    assert {*homes} == {"0/CPU:0", "1/CPU:0"}
    assert re.search(r"^worker 1 CPU:0 +\d+", preview, re.MULTILINE)
    folder = job.folder / "shards"
    _, arrays = checkpoint_matrix.end(tfpar.SingleDevice(), folder)
    _, expected = checkpoint_matrix.end(tfpar.SingleDevice(), folder.with_name("whole"))
    for one, other in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_other_worker_ends_with_the_first(job: workers.Workers) -> None:
    assert job.finish() == [0, 0]
