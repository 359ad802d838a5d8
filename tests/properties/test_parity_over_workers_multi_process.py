"""Parity over processes: under every layout, workers give the losses, metrics and weights of Keras' own `fit`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import tfpar
from tests.properties import test_parity as parity
from tests.properties.test_parity import CASES, Result, computing_in, differences, reference
from tests.support import extent, pipeline_cases, workers
from tests.support import multi_worker_cases as cases
from tests.support.pipeline_cases import Row, deepened
from tfpar.comparable import TOLERANCES
from tfpar.layout import Layout
from tfpar.strategies import of_layout

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


class Setup(NamedTuple):
    """A layout over workers, and its rows.

    Args:
        layout: The layout; of stages, as a row cuts and schedules them.
        in_ci: The cases that CI trains: where this layout exchanges more than others, or parts are uneven.
        num_cpus: Number of logical CPUs of each worker.
        pack_bytes: As for `MultiWorker`.
    """

    layout: Layout
    in_ci: tuple[str, ...] = ()
    num_cpus: int = 2
    pack_bytes: int | None = None

    @property
    def has_stages(self) -> bool:
        return self.layout.num_stages > 1

    @property
    def is_driven_by_the_chief(self) -> bool:
        """Whether the other processes lend their devices and run no step."""
        return self.layout.across_workers or self.layout.shard == "weights"

    def strategy(self, row: Row) -> tfpar.Strategy:
        """Return the strategy of a row, with the cuts of every run; one for all rows without stages."""
        if not self.has_stages:
            return replicas(self.layout, self.pack_bytes)
        layout = dataclasses.replace(
            self.layout, num_microbatches=row.num_microbatches, schedule=row.schedule, recompute=row.recompute
        )
        return of_layout(layout, balance="parameters")


@functools.cache
def replicas(layout: Layout, pack_bytes: int | None) -> tfpar.Strategy:
    return of_layout(layout, ["CPU:0", "CPU:1"], pack_bytes=pack_bytes)


SETUPS = {
    "2 workers": Setup(
        Layout(2, num_workers=2),
        (
            "last batch of 1",
            "embedding, sparse gradients",
            "GAN, clipped and accumulated",
            "loss over a mask as a scalar",
            "loss and metric that compare examples",
        ),
    ),
    "3 workers, small packs": Setup(Layout(3, num_workers=3), ("global batch odd",), pack_bytes=256),
    "2 workers of 2 devices": Setup(
        Layout(4, num_workers=2), ("fewer examples than replicas", "BatchNormalization, synchronized")
    ),
    "2 workers, state sharded": Setup(Layout(2, num_workers=2, shard="optimizer")),
    "3 workers, small packs, state sharded": Setup(
        Layout(3, num_workers=3, shard="optimizer"), ("accumulation 4, ragged end, clipped",), pack_bytes=256
    ),
    "stages on each worker": Setup(
        Layout(2, 2, num_workers=2),
        (
            "last batch of 1",
            "sample weights, mean by weight",
            "embedding, sparse gradients",
            "loss and metric that compare examples",
        ),
    ),
    "stages of shards on each worker": Setup(Layout(2, 2, num_shards=2, num_workers=2), num_cpus=4),
    "stages of shards on each worker, state sharded": Setup(
        Layout(2, 2, num_shards=2, num_workers=2, shard="optimizer"), num_cpus=4
    ),
    "stages over the workers": Setup(
        Layout(1, 2, num_workers=2, across_workers=True),
        ("masked sequence", "L1, L2 and activity", "loss over a mask as a scalar"),
    ),
    "replicas of stages over the workers": Setup(
        Layout(2, 2, num_workers=2, across_workers=True),
        ("accumulation 4, ragged end, clipped", "rows looked up in several ways"),
    ),
    "weights sharded over the workers": Setup(
        Layout(4, num_workers=2, shard="weights"), ("accumulation 4, ragged end, clipped",)
    ),
}


def rows(name: str) -> list[Row]:
    """Return a row of every case under a layout; types, schedules, micro-batches and recomputation take turns."""
    if SETUPS[name].has_stages:
        return pipeline_cases.on_replicas()
    refused = parity.OF_WHOLE_BATCH if name.startswith("weights sharded") else ()
    dtypes = itertools.cycle(["float64", "float64", "float32"])
    return [
        Row(case, "", 1, 1, False, dtype) for case, dtype in zip(CASES, dtypes, strict=False) if case not in refused
    ]


def table(whole: bool) -> list[tuple[str, Row]]:
    """Return the layouts and their rows."""
    return [(name, row) for name, setup in SETUPS.items() for row in rows(name) if whole or row.case in setup.in_ci]


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
    case = deepened(CASES[row.case]) if SETUPS[name].has_stages else CASES[row.case]
    trainer = tfpar.Trainer(case.build, SETUPS[name].strategy(row), seed=0)
    data = case.data()
    validation = {"validation_data": data} if case.validates else {}
    settings = {"epochs": case.epochs, "verbose": 0, "steps_per_call": case.steps_per_call, **case.fit, **validation}
    history = trainer.fit(data, **settings).history
    with trainer.strategy.engine.whole_state(trainer.model):
        has_all = trainer.strategy.is_chief or not trainer.strategy.engine.divides_state
        return history, cases.state(trainer.model) if has_all else trainer.model.get_weights()


def test_the_rows_hold_their_cases_and_both_types() -> None:
    taken = table(whole=False)
    assert {(name, row.case) for name, row in taken} == {
        (name, case) for name, setup in SETUPS.items() for case in setup.in_ci
    }
    assert {row.dtype for _, row in taken} == {*TOLERANCES}


@pytest.mark.few(5)
def test_equals_one_device_after_20_steps(request: pytest.FixtureRequest, name: str, row: Row) -> None:
    setup = SETUPS[name]
    num_answers = 1 if setup.is_driven_by_the_chief else setup.layout.num_workers
    if setup.is_driven_by_the_chief:
        job = request.getfixturevalue("lending")
    else:
        job = request.getfixturevalue("jobs").job(setup.layout.num_workers, setup.num_cpus)
    with computing_in(row.dtype):
        call = job.start(train, name, row)
        history, state = (pipeline_cases.expected if setup.has_stages else reference)(row.case, row.dtype)
    results = call.results(num_answers)
    assert len(results[0][1]) == len(state)
    for rank, (found_history, found_state) in enumerate(results):
        expected = history, state[: len(found_state)]  # with sharded state only the chief has all of the optimizer's
        assert not list(differences((found_history, found_state), expected, row.dtype)), f"worker {rank}"
