"""Two workers with two stages each give the losses, metrics and weights of Keras' own `fit` on one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in, differences
from tests.strategies.test_hybrid import wide
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases, pipeline_cases, small, workers
from tests.support.extent import sampled
from tests.support.pipeline_cases import Row

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
ROWS = pipeline_cases.on_replicas()
# Where workers differ from replicas in one process: sums and rows from elsewhere, empty parts, divisors, metrics.
IN_CI = (
    "last batch of 1",
    "sample weights, mean by weight",
    "outputs as list",
    "loss object in a layer",
    "rows looked up in several ways",
)
TRAINED = sampled(ROWS, of_ci=[row for row in ROWS if row.case in IN_CI])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    folder, checkpoints = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("checkpoints")
    names = [str(row) for row in TRAINED]
    with workers.started("worker_program_hybrid", folder, 2, str(checkpoints), *names) as started:
        started.checkpoints = checkpoints  # type: ignore[attr-defined]
        yield started


def test_each_worker_names_itself_and_its_grid(job: workers.Workers) -> None:
    grid = "1 replica of 2 stages on (CPU:0 CPU:1), 2 micro-batches, 1f1b"
    expected = [f"Hybrid over 2 workers; this is worker {rank}, {grid}" for rank in (0, 1)]
    assert job.results("description") == expected


def test_the_rows_of_ci_are_rows_of_the_table() -> None:
    assert {*IN_CI} <= {row.case for row in ROWS}


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: str(row).replace(" ", "_"))
def test_equals_one_device_after_20_steps(job: workers.Workers, row: Row) -> None:
    with computing_in(row.dtype):
        expected = pipeline_cases.expected(row.case, row.dtype)
    for rank, result in enumerate(job.results(str(row))):
        assert not isinstance(result, workers.Raised), f"worker {rank}: {result.trace}"
        assert not list(differences(result, expected, row.dtype)), f"worker {rank}"


@pytest.mark.parametrize("kind", cases.SHARDED)
def test_shards_equal_one_device(job: workers.Workers, kind: str) -> None:
    trainer = tfpar.Trainer(cases.sharded_model(kind), tfpar.SingleDevice(), seed=0)
    expected = cases.with_shards(kind, trainer)
    for result in job.results(f"sharded {kind}"):
        assert not isinstance(result, workers.Raised), result.trace
        cases.assert_same(result, expected, 1e-5)


def test_one_process_finishes_a_run_of_two_workers(job: workers.Workers) -> None:
    for _, state in job.results("checkpoints"):
        assert int(state[4]) == 13, "interrupted in the second epoch"
    folder: Path = job.checkpoints  # type: ignore[attr-defined]
    ended, whole = (
        tfpar.Trainer(small.build_model, strategy, seed=0)
        for strategy in (tfpar.Pipeline(2, 3, balance="parameters"), tfpar.SingleDevice())
    )
    history = ended.fit(small.shuffled(), epochs=3, verbose=0, checkpoints=tfpar.Checkpoints(folder)).history
    small.assert_same_history(history, whole.fit(small.shuffled(), epochs=3, verbose=0).history)
    small.assert_same_state(small.state(ended.model), small.state(whole.model), 1e-5)


def test_all_workers_have_the_stages_that_the_chief_measured(job: workers.Workers) -> None:
    (sizes, weights, *_), *others = job.results("measured")
    for other_sizes, other_weights, *_ in others:
        assert other_sizes == sizes
        assert all(np.array_equal(one, other) for one, other in zip(other_weights, weights, strict=True))


def test_the_predicted_step_includes_the_measured_all_reduce_over_the_workers(job: workers.Workers) -> None:
    for _, _, table, seconds in job.results("measured"):
        assert len(seconds) == 2
        assert all(0 < one < 1 for one in seconds)
        text = " ".join(table.split())
        assert re.search(r"the optimizer and the all-reduce over 2 workers \([\d.]+ ms\) included$", text), table


def test_the_rows_of_lookups_which_are_not_measured_are_named(job: workers.Workers) -> None:
    for table in job.results("lookups"):
        assert not isinstance(table, workers.Raised), table.trace
        assert "included; the exchange of looked-up rows over workers not measured" in " ".join(table.split())


def test_every_worker_has_all_predictions_and_the_logs_of_all_examples(job: workers.Workers) -> None:
    trainer = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0)
    expected = trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)
    for predicted, evaluated in job.results("predict"):
        np.testing.assert_allclose(predicted, expected[0], rtol=1e-5, atol=1e-6)
        cases.assert_same(evaluated, expected[1], 1e-5)


def test_a_model_of_the_scope_begins_with_a_prediction(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    reference = wide()
    expected = reference.predict_on_batch(parity_cases.inputs(7)), reference.fit(small.data(), verbose=0).history
    for result in job.results("methods in a scope"):
        assert not isinstance(result, workers.Raised), result.trace
        np.testing.assert_allclose(result[0], expected[0], rtol=1e-5, atol=1e-6)
        small.assert_same_history(result[1], expected[1])


def test_a_trace_has_the_actions_of_all_workers(job: workers.Workers) -> None:
    actions = [["F0.0", "B0.0"], ["F1.0", "B1.0"], ["F0.1", "B0.1"], ["F1.1", "B1.1"]]
    title = "1f1b: 2 stages on 2 devices, 1 micro-batch, on each of 2 workers"
    assert job.results("trace") == [(actions, title)] * 2


def test_workers_with_other_grids_are_refused(job: workers.Workers) -> None:
    for raised in job.results("differing grids"):
        assert "worker 1" in raised.message
        assert "grid ('2 x 1 stages on 2 devices' instead of '1 x 2 stages on 2 devices')" in raised.message


def test_the_workers_end_without_error(job: workers.Workers) -> None:
    assert job.finish() == [0, 0]
