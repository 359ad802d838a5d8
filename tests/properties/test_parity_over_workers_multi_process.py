"""Parity over processes: under every layout, workers give the losses, metrics and weights of Keras' own `fit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import tfpar
from tests.properties import test_parity as parity
from tests.properties.test_parity import CASES, Result, computing_in, differences, reference
from tests.support import extent, pipeline_cases, workers
from tests.support import multi_worker_cases as cases
from tests.support.pipeline_cases import Row, deepened
from tfpar.comparable import TOLERANCES

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


class Layout(NamedTuple):
    """A division of the work over workers.

    Args:
        strategy: The strategy of a row.
        in_ci: The cases that CI trains: where this layout exchanges more than others, or parts are uneven.
        num_workers: Number of workers.
        num_cpus: Number of logical CPUs of each worker.
        has_stages: Whether the model is divided into stages.
        is_driven_by_the_chief: Whether the other processes lend their devices and run no step.
    """

    strategy: Callable[[Row], tfpar.Strategy]
    in_ci: tuple[str, ...] = ()
    num_workers: int = 2
    num_cpus: int = 2
    has_stages: bool = False
    is_driven_by_the_chief: bool = False


def stages(row: Row, num_shards: int = 1, *, across_workers: bool = False) -> tfpar.Pipeline:
    """Return two stages as a row cuts and schedules them."""
    return tfpar.Pipeline(
        2, row.num_microbatches, row.schedule, "parameters", recompute=row.recompute, num_shards=num_shards,
        across_workers=across_workers,
    )  # fmt: skip


@functools.cache
def replicas(num_devices: int = 1, pack_bytes: int | None = None, shard: str | None = None) -> tfpar.Strategy:
    """Return replicas on devices of each worker; one strategy for all cases."""
    return tfpar.MultiWorker(["CPU:0", "CPU:1"][:num_devices], pack_bytes=pack_bytes, shard=shard)


LAYOUTS = {
    "2 workers": Layout(
        lambda row: replicas(),
        (
            "last batch of 1",
            "embedding, sparse gradients",
            "GAN, clipped and accumulated",
            "loss over a mask as a scalar",
            "loss and metric that compare examples",
        ),
    ),
    "3 workers, small packs": Layout(lambda row: replicas(pack_bytes=256), ("global batch odd",), num_workers=3),
    "2 workers of 2 devices": Layout(
        lambda row: replicas(2), ("fewer examples than replicas", "BatchNormalization, synchronized")
    ),
    "2 workers, state sharded": Layout(lambda row: replicas(shard="optimizer")),
    "3 workers, small packs, state sharded": Layout(
        lambda row: replicas(pack_bytes=256, shard="optimizer"),
        ("accumulation 4, ragged end, clipped",),
        num_workers=3,
    ),
    "stages on each worker": Layout(
        lambda row: tfpar.Hybrid(stages(row)),
        (
            "last batch of 1",
            "sample weights, mean by weight",
            "embedding, sparse gradients",
            "loss and metric that compare examples",
        ),
        has_stages=True,
    ),
    "stages of shards on each worker": Layout(
        lambda row: tfpar.Hybrid(stages(row, num_shards=2)), num_cpus=4, has_stages=True
    ),
    "stages of shards on each worker, state sharded": Layout(
        lambda row: tfpar.Hybrid(stages(row, num_shards=2), shard="optimizer"), num_cpus=4, has_stages=True
    ),
    "stages over the workers": Layout(
        lambda row: stages(row, across_workers=True),
        ("masked sequence", "L1, L2 and activity", "loss over a mask as a scalar"),
        has_stages=True,
        is_driven_by_the_chief=True,
    ),
    "replicas of stages over the workers": Layout(
        lambda row: tfpar.Hybrid(stages(row, across_workers=True), 2),
        ("accumulation 4, ragged end, clipped", "rows looked up in several ways"),
        has_stages=True,
        is_driven_by_the_chief=True,
    ),
    "weights sharded over the workers": Layout(
        lambda row: tfpar.MultiWorker(shard="weights"),
        ("accumulation 4, ragged end, clipped",),
        is_driven_by_the_chief=True,
    ),
}


def rows(name: str) -> list[Row]:
    """Return a row of every case under a layout; types, schedules, micro-batches and recomputation take turns."""
    if LAYOUTS[name].has_stages:
        return pipeline_cases.on_replicas()
    refused = parity.OF_WHOLE_BATCH if name.startswith("weights sharded") else ()
    dtypes = itertools.cycle(["float64", "float64", "float32"])
    return [
        Row(case, "", 1, 1, False, dtype) for case, dtype in zip(CASES, dtypes, strict=False) if case not in refused
    ]


def table(whole: bool) -> list[tuple[str, Row]]:
    """Return the layouts and their rows."""
    return [(name, row) for name, layout in LAYOUTS.items() for row in rows(name) if whole or row.case in layout.in_ci]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_equals_one_device_after_20_steps:
        metafunc.parametrize(("name", "row"), table(extent.is_whole()), ids=lambda value: str(value).replace(" ", "_"))


@pytest.fixture(scope="module")
def lending(logical_cpus: list[str]) -> Iterator[workers.Job]:
    """A job of which the first process uses the devices of the other."""
    with workers.started() as job:
        yield job
        assert job.finish() == [0, 0]


def train(name: str, row: Row) -> Result:
    """Train a row, in a worker; with sharded state the chief alone returns the optimizer's, that of all workers."""
    case = deepened(CASES[row.case]) if LAYOUTS[name].has_stages else CASES[row.case]
    trainer = tfpar.Trainer(case.build, LAYOUTS[name].strategy(row), seed=0)
    data = case.data()
    validation = {"validation_data": data} if case.validates else {}
    settings = {"epochs": case.epochs, "verbose": 0, "steps_per_call": case.steps_per_call, **case.fit, **validation}
    history = trainer.fit(data, **settings).history
    with trainer.strategy.whole_state(trainer.model):
        has_all = trainer.strategy.is_chief or not trainer.strategy.divides_state
        return history, cases.state(trainer.model) if has_all else trainer.model.get_weights()


def test_the_rows_hold_their_cases_and_both_types() -> None:
    taken = table(whole=False)
    assert {(name, row.case) for name, row in taken} == {
        (name, case) for name, layout in LAYOUTS.items() for case in layout.in_ci
    }
    assert {row.dtype for _, row in taken} == {*TOLERANCES}


@pytest.mark.few(5)
def test_equals_one_device_after_20_steps(request: pytest.FixtureRequest, name: str, row: Row) -> None:
    layout = LAYOUTS[name]
    num_answers = 1 if layout.is_driven_by_the_chief else layout.num_workers
    if layout.is_driven_by_the_chief:
        job = request.getfixturevalue("lending")
    else:
        job = request.getfixturevalue("jobs").job(layout.num_workers, layout.num_cpus)
    with computing_in(row.dtype):
        call = job.start(train, name, row)
        history, state = (pipeline_cases.expected if layout.has_stages else reference)(row.case, row.dtype)
    results = call.results(num_answers)
    assert len(results[0][1]) == len(state)
    for rank, (found_history, found_state) in enumerate(results):
        expected = history, state[: len(found_state)]  # with sharded state only the chief has all of the optimizer's
        assert not list(differences((found_history, found_state), expected, row.dtype)), f"worker {rank}"
