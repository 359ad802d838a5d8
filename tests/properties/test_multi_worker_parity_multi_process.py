"""Parity over processes: two and three workers give the losses, metrics and weights of Keras' own `fit`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import CASES, computing_in, differences, reference
from tests.support import extent, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.multi_worker_cases import Trained
from tests.support.worker_program_parity import SHARDED
from tfpar.comparable import TOLERANCES
from tfpar.parity import relative_difference

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]

PACK_BYTES = {2: 4 << 20, 3: 256}  # everything in one pack, and the gradients of one model in several
JOBS = tuple(PACK_BYTES)
# Cases that divide unevenly over workers, or exchange more than sums of gradients.
WHERE_WORKERS_COUNT = (
    "global batch odd",
    "last batch of 1",
    "fewer examples than replicas",
    "masked sequence",
    "accumulation 4, ragged end, clipped",
    "BatchNormalization, synchronized",
    "embedding, sparse gradients",
    "GAN, clipped and accumulated",
)
Job = Callable[[int], workers.Workers]
Row = tuple[int, str, str]  # workers, dtype, case


def table(whole: bool) -> list[Row]:
    """Every sixth case, and those where workers count; two and three workers, types and sharded state take turns.

    How a batch divides by two and by three is a matter of one process too: test_parity.py trains every case so.
    """
    every = list(itertools.product(JOBS, [*TOLERANCES, SHARDED], CASES))
    if whole:
        return every
    turns = itertools.cycle(itertools.product(["float64", SHARDED, "float64", "float32"], JOBS))
    taken = [case for number, case in enumerate(CASES) if case in WHERE_WORKERS_COUNT or number % 6 == 0]
    return sorted((num_workers, dtype, case) for case, (dtype, num_workers) in zip(taken, turns, strict=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_equals_one_device_after_20_steps:
        rows = table(extent.is_whole())
        metafunc.parametrize(("num_workers", "dtype", "name"), rows, ids=lambda value: str(value).replace(" ", "_"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two workers begin, and that others end."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Iterator[Job]:
    """A job of some number of workers, started once, that trains its cases while the tests compute what they expect."""
    rows = table(extent.is_whole())
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(num_workers: int) -> workers.Workers:
            if num_workers > 2:
                start(2).results("checkpoints")
                shutil.copytree(checkpoints, checkpoints / "copy")
            folder = tmp_path_factory.mktemp(f"workers-{num_workers}")
            of_this_job = [f"{dtype} {name}" for number, dtype, name in rows if number == num_workers]
            arguments = (str(checkpoints), str(PACK_BYTES[num_workers]), *of_this_job)
            return stack.enter_context(workers.started("worker_program_parity", folder, num_workers, *arguments))

        yield start


def test_the_rows_hold_both_types_and_sharded_state_in_every_job() -> None:
    rows = table(whole=False)
    assert {*rows} < {*table(whole=True)}
    assert {(number, dtype) for number, dtype, _ in rows} == {*itertools.product(JOBS, [*TOLERANCES, SHARDED])}
    assert {*WHERE_WORKERS_COUNT} <= {name for *_, name in rows}


def test_equals_one_device_after_20_steps(job: Job, num_workers: int, dtype: str, name: str) -> None:
    results_of = job(num_workers).results
    exact = "float64" if dtype == SHARDED else dtype
    with computing_in(exact):
        logs, state = reference(name, exact)
    for rank, result in enumerate(results_of(f"{dtype} {name}")):
        assert not isinstance(result, workers.Raised), f"worker {rank}: {result.trace}"
        assert dtype != SHARDED or rank > 0 or len(result[1]) == len(state)
        expected = logs, state[: len(result[1])]  # with shards only the chief has all of the optimizer's state
        assert not list(differences(result, expected, exact)), f"worker {rank}"


@pytest.fixture(scope="module")
def undisturbed(logical_cpus: list[str]) -> Trained:
    """The run of the checkpoints on one device, to its end at once."""
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    history = trainer.fit(small.shuffled(), epochs=3, verbose=0).history
    return Trained(history, cases.state(trainer.model))


def assert_ended_as(undisturbed: Trained, history: dict[str, list[float]], state: list[np.ndarray]) -> None:
    small.assert_same_history(history, undisturbed.history)
    for actual, expected in zip(state, undisturbed.state, strict=True):
        assert relative_difference(actual, expected) <= 1e-5


def test_three_workers_finish_a_run_of_two(job: Job, undisturbed: Trained) -> None:
    for _, state in job(2).results("checkpoints"):
        assert int(state[4]) == 13, "interrupted in the second epoch"
    for history, state in job(3).results("checkpoints"):
        assert_ended_as(undisturbed, history, state)


@pytest.mark.parametrize(
    "strategy", [tfpar.SingleDevice, lambda: tfpar.MultiWorker(["CPU:0"])], ids=["device", "worker"]
)
def test_one_process_finishes_a_run_of_two_workers(
    strategy: Callable[[], tfpar.Strategy],
    job: Job,
    checkpoints: Path,
    tmp_path: Path,
    undisturbed: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    job(3)  # a copy was made before it began
    shutil.copytree(checkpoints / "copy", tmp_path / "checkpoints")
    trainer = tfpar.Trainer(small.build_model, strategy(), seed=0)
    resume = tfpar.Checkpoints(tmp_path / "checkpoints")
    assert resume.position() is not None
    history = trainer.fit(small.shuffled(), epochs=3, verbose=0, checkpoints=resume).history
    assert_ended_as(undisturbed, history, cases.state(trainer.model))


@pytest.mark.parametrize("num_workers", JOBS)
def test_the_workers_end_without_error(job: Job, num_workers: int) -> None:
    assert job(num_workers).finish() == [0] * num_workers
