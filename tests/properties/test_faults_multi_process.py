"""Workers that are killed, suspended or preempted, at every moment: the results of the job do not change."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import faults
from tests.support.command import Outcome, settings
from tests.support.extent import is_whole, sampled
from tests.support.faults import DROPOUT, FLAGS, OF_A_JOB, SILENCE_SECONDS, STRIKING, TRAIN, launch, launcher_lines
from tests.support.leaks import nothing_left_behind

pytestmark = pytest.mark.multi_process

# In this order; the very first kill comes from outside, before the worker has even started TensorFlow.
ALL_STRUCK = ["1-begin-KILL-0", "2-step-KILL-1", "3-checkpoint-KILL-0", "4-checkpoint-STOP-0", "5-checkpoint-KILL-1"]
ALL_STRUCK += ["6-step-STOP-1", "7-step-KILL-0"]
STRUCK = [*sampled(ALL_STRUCK, of_ci=["4-checkpoint-STOP-0"])]  # half of a checkpoint is written
RESTART_SECONDS = 40.0  # measured: 6 on two idle cores, nearly all to start TensorFlow


@pytest.fixture(autouse=True, scope="module")
def clean() -> Iterator[None]:
    with nothing_left_behind():
        yield


class Struck(NamedTuple):
    """A job that was struck again and again, and how long each restart took."""

    outcome: Outcome
    noticed_seconds: list[float]
    resumed_seconds: list[float]
    folder: Path
    undisturbed: Path


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Struck:
    undisturbed = faults.prepare(tmp_path_factory.mktemp("undisturbed"))
    folder = faults.prepare(tmp_path_factory.mktemp("struck"), *STRUCK)
    # Without random numbers, which differ between workers, one process has the weights of a job.
    randomly, alone = (DROPOUT, launch(2)) if is_whole() else ([], TRAIN)
    words = [*FLAGS, *randomly, *STRIKING, *OF_A_JOB]
    whole = faults.run([*alone, *words], undisturbed)
    assert whole.code == 0, whole
    words += settings("strategy.kind=multi_worker", "strategy.shard=optimizer")  # with the bits of whole state
    noticed, resumed = [], []
    with faults.started([*launch(2, "--max_restarts", "9"), *words], folder) as job:
        job.wait_until(lambda: job.child(1))
        child = job.child(1)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        for restart, fault in enumerate(STRUCK, start=2):
            path, num_steps = folder / "struck" / fault, len(faults.first_steps(folder))
            job.wait_until(path.exists)
            job.wait_until(lambda restart=restart: f"Restart {restart} of" in job.written()[1])
            noticed.append(time.time() - path.stat().st_mtime)
            job.wait_until(lambda n=num_steps: len(faults.first_steps(folder)) > n)
            resumed.append(faults.first_steps(folder)[-1] - path.stat().st_mtime)
        outcome = job.finish()
    return Struck(outcome, noticed, resumed, folder, undisturbed / "run")


def test_a_job_ends_without_error_after_faults_at_every_moment(struck: Struck) -> None:
    assert struck.outcome.code == 0, struck.outcome
    assert sorted(path.name for path in (struck.folder / "struck").iterdir()) == STRUCK


def test_its_weights_and_metrics_are_those_of_an_undisturbed_run_with_whole_state(struck: Struck) -> None:
    """Each example was used once an epoch, with the same random numbers."""
    faults.assert_same_run(struck.folder / "run", struck.undisturbed)


def test_each_restart_names_the_worker_that_was_killed_or_stopped(struck: Struck) -> None:
    said = [line for line in launcher_lines(struck.outcome) if line.startswith("Restart")]
    assert said[0] == "Restart 1 of 9, because worker 1 was killed by SIGKILL."
    for line, fault in zip(said[1:], STRUCK, strict=True):
        _, _, name, victim = fault.split("-")
        what = f"worker {victim} was killed by SIGKILL" if name == "KILL" else f"while worker {victim} was suspended"
        assert what in line, (fault, said)


def test_a_suspended_worker_is_noticed_in_time(struck: Struck) -> None:
    for fault, seconds in zip(STRUCK, struck.noticed_seconds, strict=True):
        assert seconds < (SILENCE_SECONDS + 15 if "STOP" in fault else 15), (fault, struck.noticed_seconds)


def test_a_restarted_job_soon_trains_again(struck: Struck) -> None:
    assert max(struck.resumed_seconds) < RESTART_SECONDS, struck.resumed_seconds


def test_the_other_workers_report_a_lost_worker_and_the_way_out(struck: Struck) -> None:
    assert "A worker of the job is lost" in struck.outcome.err
    assert "Traceback" not in struck.outcome.err


def test_nothing_half_written_stays(struck: Struck) -> None:
    assert not [path for path in struck.folder.rglob("*") if "unfinished" in path.name]
    assert len(list((struck.folder / "run" / "checkpoints").iterdir())) == 3


class Preempted(NamedTuple):
    """A job of two workers, one of which was preempted; resumed by three, stopped, and ended by one process."""

    two: Outcome
    three: Outcome
    one: Outcome
    saved: list[int]  # the step of the newest checkpoint after each of the first two
    directory: Path
    alone: Path  # the same run in one process, uninterrupted


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Preempted:
    folder = faults.prepare(tmp_path_factory.mktemp("preempted"), "1-step-TERM-1")
    alone = faults.prepare(tmp_path_factory.mktemp("alone"))
    words = [*FLAGS, *STRIKING, *OF_A_JOB]
    two = faults.run([*launch(2), *words], folder)
    saved = [newest_step(folder)]
    with faults.started([*launch(3), *words], folder) as job:
        job.wait_until(lambda: len(faults.first_steps(folder)) > 1)
        job.send(signal.SIGTERM)
        three = job.finish()
    saved.append(newest_step(folder))
    one = faults.run([*TRAIN, *words], folder)
    outcome = faults.run([*TRAIN, *words], alone)
    assert outcome.code == 0, outcome
    return Preempted(two, three, one, saved, folder / "run", alone / "run")


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.stem.removeprefix("step-")) for path in folder.glob("run/checkpoints/step-*.npz"))


@pytest.mark.extended
def test_after_a_preemption_all_workers_save_at_the_same_step(preempted: Preempted) -> None:
    assert preempted.two.code == 130, preempted.two
    assert f"[0] Stopped after step {preempted.saved[0]}; a checkpoint is written." in preempted.two.out
    assert "[1] Stopping after this step" in preempted.two.err
    assert "[0] Stopping" not in preempted.two.err, "only the preempted worker was asked"
    assert "all workers stopped with a checkpoint (exit code 130)" in launcher_lines(preempted.two)[0]
    assert "lost" not in preempted.two.err


@pytest.mark.extended
def test_a_request_to_stop_the_launcher_stops_all_with_a_checkpoint(preempted: Preempted) -> None:
    assert preempted.three.code == 143, preempted.three
    assert f"[0] Stopped after step {preempted.saved[1]}; a checkpoint is written." in preempted.three.out
    assert launcher_lines(preempted.three)[-1] == "Stopped by SIGTERM. All workers exited normally."
    assert 0 < preempted.saved[0] < preempted.saved[1]


@pytest.mark.extended
def test_another_number_of_workers_resumes_to_the_same_weights(preempted: Preempted) -> None:
    assert f"Resuming after epoch 0 and {preempted.saved[0]} steps" in preempted.three.out
    assert preempted.one.code == 0, preempted.one
    faults.assert_same_run(preempted.directory, preempted.alone)


@pytest.mark.extended
def test_a_job_that_is_stopped_before_its_first_step_ends_at_once(tmp_path: Path) -> None:
    """TensorFlow has taken over SIGTERM by then."""
    outcome = faults.run([*launch(2), *FLAGS, *STRIKING, *OF_A_JOB], faults.prepare(tmp_path, "1-import-TERM-1"))
    assert outcome.code == 143, outcome
    assert launcher_lines(outcome)[0] == "The job failed: worker 1 was killed by SIGTERM. It was the first to fail."
