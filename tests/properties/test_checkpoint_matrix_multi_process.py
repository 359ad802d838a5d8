"""A checkpoint has no layout: a run that begins under any strategy ends under any other with one device's weights."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfpar
from tests.support import checkpoint_matrix as matrix
from tests.support import small, workers

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        metafunc.parametrize(("first", "second"), matrix.pairs(), ids=lambda layout: layout.replace(" ", "_"))


@functools.cache
def strategy(layout: str) -> tfpar.Strategy:
    return matrix.strategy(layout)


def begin(layout: str, folder: Path) -> None:
    matrix.begin(strategy(layout), folder)


def end(layout: str, folder: Path) -> matrix.Ended:
    return matrix.end(strategy(layout), folder)


class Runs:
    """Runs under all layouts, in this process or in the job that a layout needs.

    Args:
        root: An empty folder.
        jobs: The jobs of workers that all train.
        stack: Ends a job of which the first process uses the devices of the other.
    """

    def __init__(self, root: Path, jobs: workers.Pool, stack: contextlib.ExitStack) -> None:
        self._root, self._jobs, self._stack = root, jobs, stack

    def ended(self, first: str, second: str) -> list[matrix.Ended]:
        """Begin a run under a layout; end it under another one; return the results of every process of the second."""
        folder = self._root / f"{first} {second}"
        shutil.copytree(self._begun(first), folder)
        return self._call(end, second, folder)

    def _begun(self, layout: str) -> Path:
        folder = self._root / layout
        if not folder.exists():
            self._call(begin, layout, folder)
        return folder

    @functools.cached_property
    def _lending(self) -> workers.Job:
        return self._stack.enter_context(workers.started())

    def _call(self, function: Callable[..., Any], layout: str, folder: Path) -> list[Any]:
        if layout in matrix.IN_ONE_PROCESS:
            return [function(layout, folder)]
        if layout in matrix.DRIVEN_BY_THE_FIRST:
            return [self._lending.run_on_chief(function, layout, folder)]
        return self._jobs.job().run(function, layout, folder)


@pytest.fixture(scope="module")
def runs(logical_cpus: list[str], jobs: workers.Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with contextlib.ExitStack() as stack:
        yield Runs(tmp_path_factory.mktemp("matrix"), jobs, stack)


@pytest.fixture(scope="module")
def uninterrupted(logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> matrix.Ended:
    return end("one device", tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.few(2)
def test_a_run_ends_with_one_devices_weights(runs: Runs, uninterrupted: matrix.Ended, first: str, second: str) -> None:
    results = runs.ended(first, second)
    for history, state in results:
        small.assert_same_history(history, uninterrupted[0])
        small.assert_same_state(state, uninterrupted[1][: len(state)], 1e-5)  # with shards the chief alone has all
    assert len(results[0][1]) == len(uninterrupted[1])
