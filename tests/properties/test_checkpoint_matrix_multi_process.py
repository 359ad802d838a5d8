"""A checkpoint has no layout: a run that begins under any strategy ends under any other with one device's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkpoint_matrix as matrix
from tests.support import small, workers

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        metafunc.parametrize(("first", "second"), matrix.pairs(), ids=lambda layout: layout.replace(" ", "_"))


class Runs:
    """The begun runs, and the jobs that end them.

    Args:
        root: An empty folder.
        jobs: The jobs by their layout.
    """

    def __init__(self, root: Path, jobs: dict[str, workers.Workers]) -> None:
        self.root, self.jobs = root, jobs

    def ended(self, first: str, second: str) -> list[matrix.Ended]:
        """Return the history and the state of every process of the second layout."""
        if second in self.jobs:
            num_workers = 1 if second in matrix.DRIVEN_BY_THE_FIRST else None
            return self.jobs[second].results(f"from {first}", num_workers)
        strategy = matrix.IN_ONE_PROCESS[second]()
        return [matrix.end(strategy, matrix.copied(first, second, self.root))]


@pytest.fixture(scope="module")
def runs(logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    root = tmp_path_factory.mktemp("matrix")
    with contextlib.ExitStack() as stack:
        jobs = {}
        for layout in matrix.OVER_WORKERS:
            arguments = [layout, str(root), *(first for first, second in matrix.pairs() if second == layout)]
            job = workers.started("worker_program_checkpoints", tmp_path_factory.mktemp("job"), 2, *arguments)
            jobs[layout] = stack.enter_context(job)
        for layout, strategy in matrix.IN_ONE_PROCESS.items():
            matrix.begin(strategy(), matrix.begun(layout, root))
            (root / f"{layout}.ready").touch()
        yield Runs(root, jobs)


@pytest.fixture(scope="module")
def uninterrupted(logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> matrix.Ended:
    return matrix.end(matrix.IN_ONE_PROCESS["one device"](), tmp_path_factory.mktemp("uninterrupted"))


def test_a_run_ends_with_one_devices_weights(runs: Runs, uninterrupted: matrix.Ended, first: str, second: str) -> None:
    results = runs.ended(first, second)
    for result in results:
        assert not isinstance(result, workers.Raised), result.trace
        history, state = result
        small.assert_same_history(history, uninterrupted[0])
        small.assert_same_state(state, uninterrupted[1][: len(state)], 1e-5)  # with shards the chief alone has all
    assert len(results[0][1]) == len(uninterrupted[1])


def test_the_workers_end_without_error(runs: Runs) -> None:
    assert [job.finish() for job in runs.jobs.values()] == [[0, 0]] * len(matrix.OVER_WORKERS)
