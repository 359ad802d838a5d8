"""In a pipeline over two processes the weights of the second never pass through the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import worker_program_parts as program
from tests.support import workers

pytestmark = pytest.mark.multi_process
PART_BYTES = 3 * 4 * program.WIDTH**2  # of one weight, its momentum and its moving average; the rest is less than 1 %
MOST_MEGABYTES = 40  # of the 300 MB that the second process holds, and the first held before


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[workers.Workers]:
    with workers.started("worker_program_parts", tmp_path_factory.mktemp("parts"), 2, str(root)) as started:
        yield started


@pytest.mark.extended
def test_memory_of_the_first_process_does_not_grow_with_the_model(job: workers.Workers, root: Path) -> None:
    (growth,) = job.results("growth", num_workers=1)
    assert growth.keys() == {"building", "training", "restoring"}, growth
    assert max(growth.values()) < MOST_MEGABYTES, growth
    sizes = {path.suffix: path.stat().st_size for path in (root / "large").iterdir()}
    assert sizes[".part"] == pytest.approx(PART_BYTES, rel=0.01)
    assert sizes[".npz"] < 50_000


@pytest.mark.extended
def test_a_folder_that_another_worker_does_not_see_is_refused_before_the_first_step(job: workers.Workers) -> None:
    ((message, *steps),) = job.results("not shared", num_workers=1)
    assert steps == [0, 2]
    assert message == (
        "All workers must read and write the folder of the checkpoints, and worker 1 does not in "
        f"{program.NOT_SHARED}. Mount a shared folder under the same path on every machine, and keep the checkpoints "
        "there."
    )
    assert not list((job.folder / "0" / "checkpoints").iterdir())
    assert not (job.folder / "1" / "checkpoints").exists()
