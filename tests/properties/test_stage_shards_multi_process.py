"""Two workers with stages of shards, or replicas of shards, train as one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in, differences
from tests.strategies import test_stages_of_shards as models
from tests.strategies.test_tensor_parallel import assert_equal, of_features, of_tokens, trained
from tests.support import checkpoint_matrix, pipeline_cases, shard_cases, small, workers
from tests.support.extent import sampled
from tests.support.pipeline_cases import Row
from tests.support.workers import results_of

pytestmark = [pytest.mark.extended, pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
ROWS = pipeline_cases.on_replicas()
# Where pieces of gradients differ from whole ones between workers: empty parts, rows from elsewhere, clipping by norm.
IN_CI = ("last batch of 1", "rows looked up in several ways")
TRAINED = sampled(ROWS, of_ci=[row for row in ROWS if row.case in IN_CI])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    names = [str(row) for row in TRAINED]
    with workers.started("worker_program_stage_shards", tmp_path_factory.mktemp("workers"), 2, *names) as started:
        yield started


def test_each_worker_names_its_grid(job: workers.Workers) -> None:
    stages = "1 replica of 2 stages of 2 shards on (CPU:0 CPU:1 CPU:2 CPU:3), 2 micro-batches, 1f1b"
    shards = "2 replicas of 1 stage of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3), 1 micro-batch, 1f1b"
    sharded = f"{shards}, optimizer state sharded"
    for rank, found in enumerate(results_of(job, "description")):
        assert found == [f"Hybrid over 2 workers; this is worker {rank}, {grid}" for grid in (stages, shards, sharded)]


@pytest.mark.parametrize(
    ("name", "build", "data", "expected"),
    [
        ("pairs", models.pairs, of_features, {"up/kernel": (5, 5), "down/kernel": (5, 5), "classes/kernel": (2, 1)}),
        ("attention", models.attention, of_tokens, {"table/embeddings": (6, 5), "query/kernel": (4, 2)}),
        ("rules", models.pairs, of_features, {"up/kernel": (5, 5), "classes/kernel": (4, 3)}),
    ],
)
def test_replicas_and_stages_of_shards_train_evaluate_and_predict_as_one_device(
    job: workers.Workers, name: str, build: Any, data: Any, expected: dict[str, Any]
) -> None:
    with computing_in("float64"):
        _, *alone = trained(build, data(), tfpar.SingleDevice())
    for found, pieces in results_of(job, name):
        assert_equal(found, tuple(alone))
        assert {name: pieces[name] for name in expected} == expected


def test_the_rows_of_ci_are_rows_of_the_table() -> None:
    assert {*IN_CI} <= {row.case for row in ROWS}


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: str(row).replace(" ", "_"))
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_equals_one_device_after_20_steps(job: workers.Workers, row: Row, shard: str | None) -> None:
    with computing_in(row.dtype):
        expected = pipeline_cases.expected(row.case, row.dtype)
    for rank, (history, arrays) in enumerate(results_of(job, f"{row} {shard}")):
        whole = (expected[0], expected[1][: len(arrays)]) if shard and rank else expected
        assert not list(differences((history, arrays), whole, row.dtype)), f"worker {rank}"


@pytest.mark.parametrize("of", shard_cases.STAGES_OF_SHARDS)
def test_state_over_the_workers_has_the_bits_of_whole_state_and_half_of_its_bytes(
    job: workers.Workers, of: str
) -> None:
    parts = parts_with_the_same_bits(job, of)
    assert of == "one weight a stage" or all(0.3 < part < 0.7 for part in parts)


@pytest.mark.extended
def test_state_over_three_workers_has_the_bits_of_whole_state(tmp_path: Path) -> None:
    of = "stages, swapped averages"
    with workers.started("worker_program_stage_shards", tmp_path, 3, of) as three:
        assert all(0.1 < part < 0.6 for part in parts_with_the_same_bits(three, of))
        assert three.finish() == [0, 0, 0]


def parts_with_the_same_bits(job: workers.Workers, of: str) -> list[float]:
    """Return each worker's part of divided state, which trains with the bits of whole state."""
    whole, sharded = (results_of(job, f"bits of {of} {shard}") for shard in (None, "optimizer"))
    for (history, arrays, all_of_it), (same_history, same_arrays, _) in zip(whole, sharded, strict=True):
        assert history == same_history
        assert len(arrays) == len(same_arrays)
        assert all(map(np.array_equal, arrays, same_arrays))
        assert all_of_it == 1
    parts = [part for *_, part in sharded]
    assert sum(parts) == pytest.approx(1)
    return parts


def test_the_table_of_stages_has_shards_and_the_all_reduce_over_the_workers(job: workers.Workers) -> None:
    for table in results_of(job, "preview"):
        text = " ".join(table.split())
        assert "2 stages of 2 shards on 4 devices, 2 micro-batches, on each of 2 workers" in text
        assert "all-reduce over 2 workers" in text


@pytest.mark.parametrize(("before", "after"), shard_cases.RESUMED)
def test_a_run_begins_in_stages_and_ends_on_replicas(
    job: workers.Workers, before: str | None, after: str | None
) -> None:
    folder = job.folder / f"alone {before} {after}"
    history, expected = checkpoint_matrix.end(tfpar.SingleDevice(), folder)
    for rank, (found, state) in enumerate(results_of(job, f"resumed {before} {after}")):
        small.assert_same_history(found, history)
        whole = expected[: len(state)] if after == "optimizer" and rank else expected
        small.assert_same_state(state, whole, 1e-5)


def test_workers_with_other_rules_are_refused(job: workers.Workers) -> None:
    for raised in job.results("other rules"):
        assert raised.message.startswith("All workers must be equal, and worker 1 (")
        assert "in layout (\"{'layer_1': (None, 'model')}\" instead of \"{'layer_0': (None, 'model')}" in raised.message


def test_the_workers_end_without_error(job: workers.Workers) -> None:
    assert job.finish() == [0, 0]
