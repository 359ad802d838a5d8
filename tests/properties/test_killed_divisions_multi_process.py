"""Workers with a part of the weights each that are killed: the job resumes, and ends with the weights of one device."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import faults
from tests.support.command import settings
from tests.support.faults import FLAGS, OF_A_JOB, TRAIN, launch
from tests.support.leaks import nothing_left_behind

pytestmark = pytest.mark.multi_process

DIVISIONS = {
    "weights": settings("strategy.kind=multi_worker", "strategy.shard=weights"),
    "layers": settings("strategy.kind=tensor_parallel", "strategy.num_shards=2", "strategy.num_logical_cpus=2"),
}
STEPS_BETWEEN_KILLS = 20


@pytest.fixture(autouse=True, scope="module")
def clean() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    outcome = faults.run([*TRAIN, *FLAGS, *settings("strategy.kind=single_device")], folder)
    assert outcome.code == 0, outcome
    return folder / "run"


def newest_step(folder: Path) -> int:
    steps = (int(path.stem.removeprefix("step-")) for path in folder.glob("run/checkpoints/step-*.npz"))
    return max(steps, default=0)


@pytest.mark.extended
@pytest.mark.parametrize("division", DIVISIONS)
def test_a_job_with_divided_weights_ends_as_one_device_after_kills(
    division: str, one_device: Path, tmp_path: Path
) -> None:
    words = [*launch(2, "--max_restarts", "2"), *FLAGS, *settings("training.steps_per_call=2"), *DIVISIONS[division]]
    with faults.started([*words, *OF_A_JOB], tmp_path) as job:
        for restart, victim in enumerate((1, 0), start=1):
            begun = newest_step(tmp_path)
            job.wait_until(lambda begun=begun: newest_step(tmp_path) >= begun + STEPS_BETWEEN_KILLS)
            child = job.child(victim)
            assert child is not None
            os.kill(child, signal.SIGKILL)
            job.wait_until(lambda restart=restart: f"Restart {restart} of 2" in job.written()[1])
        outcome = job.finish()
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.err, outcome
    assert outcome.out.count("Resuming after epoch") == 2, "each restart from a checkpoint"
    faults.assert_same_run(tmp_path / "run", one_device)
