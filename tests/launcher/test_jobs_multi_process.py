"""Jobs of several workers through the public commands: the result of one process, and one sentence for each mistake."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import command, faults
from tests.support.command import Outcome, metrics, settings
from tests.support.faults import FLAGS, OF_A_JOB, STRIKING, TRAIN, launch, launcher_lines
from tests.support.leaks import nothing_left_behind
from tfpar.cluster import tf_config

pytestmark = pytest.mark.multi_process

WORDS = [*FLAGS, *STRIKING, *OF_A_JOB, *settings("callbacks.save_best=loss")]
LATE_SECONDS = 3.0


@pytest.fixture(autouse=True, scope="module")
def clean() -> Iterator[None]:
    with nothing_left_behind():
        yield


class Watched(NamedTuple):
    """A run of one process, and the evaluator beside it."""

    evaluator: Outcome
    directory: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = faults.prepare(tmp_path_factory.mktemp("alone"))
    place = json.loads(faults.places(1)[0]["TF_CONFIG"]) | {"task": {"type": "evaluator", "index": 0}}
    with (
        faults.started([*TRAIN, *WORDS], folder, {"TF_CONFIG": json.dumps(place)}) as evaluator,
        faults.started([*TRAIN, *WORDS], folder) as training,
    ):
        outcome = training.finish()
        assert outcome.code == 0, outcome
        return Watched(evaluator.finish(), folder / "run")


@pytest.fixture(scope="module")
def alone(watched: Watched) -> Path:
    """The folder of the run that one process did alone."""
    return watched.directory


def test_an_evaluator_evaluates_the_checkpoints_and_ends_with_the_run(watched: Watched) -> None:
    assert watched.evaluator.code == 0, watched.evaluator
    written = (watched.directory / "evaluations.jsonl").read_text()
    evaluations = [json.loads(line) for line in written.splitlines()]
    last = metrics(watched.directory)[-1]
    assert evaluations[-1]["step"] == last["step"]
    assert evaluations[-1]["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)


# A job from its start to its end


class Job(NamedTuple):
    """A job whose second worker had no disk that it could write on."""

    outcome: Outcome
    folder: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = faults.prepare(tmp_path_factory.mktemp("job"))
    (folder / "no_disk").touch()
    return Job(faults.run([*launch(2), *WORDS], folder), folder)


def test_two_workers_end_with_the_model_and_the_metrics_of_one_process(job: Job, alone: Path) -> None:
    assert job.outcome.code == 0, job.outcome
    faults.assert_same_run(job.folder / "run", alone)


def test_every_line_names_its_worker_and_the_chief_alone_reports(job: Job) -> None:
    lines = job.outcome.out.splitlines()
    assert all(line.startswith("[0] ") for line in lines), lines
    assert sum(" 1/3 " in line for line in lines) == 1
    assert job.outcome.err == ""


def test_the_report_of_a_trainer_predicts_on_all_workers_and_is_printed_once(job: Job) -> None:
    reports = [line for line in job.outcome.out.splitlines() if re.search(r"mean -?\d+\.\d+ after 192 steps", line)]
    assert len(reports) == 1, job.outcome


def test_the_folder_has_the_files_of_one_process_and_no_others(job: Job, alone: Path) -> None:
    written = {path.name for path in (job.folder / "run").rglob("*")}
    of_evaluator = {"evaluations.jsonl", *(path.name for path in (alone / "tensorboard").rglob("*")), "tensorboard"}
    assert written == {path.name for path in alone.rglob("*")} - of_evaluator
    assert "best.keras" in written
    assert {path.name for path in job.folder.iterdir()} >= {"run", "pid-1"}


# Workers that start late, two jobs at once


class Together(NamedTuple):
    """A job of processes started by hand, one of them late."""

    chief: Outcome
    late: Outcome
    folder: Path


class Launched(NamedTuple):
    """Two launchers that ran at the same time on this machine."""

    averaging: Outcome
    compressing: Outcome
    folder: Path


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    folder = faults.prepare(tmp_path_factory.mktemp("together"))
    chief, late = faults.places(2)
    train = [*TRAIN, *WORDS]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(faults.started(train, folder, chief))
        time.sleep(LATE_SECONDS)
        second = stack.enter_context(faults.started(train, folder, late))
        return Together(*(process.finish() for process in (first, second)), folder)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("launched")
    averages = settings("strategy.kind=multi_worker", 'strategy.sync="average"', "strategy.every=4")
    compression = settings("strategy.kind=multi_worker", 'strategy.compression="bfloat16"')
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(faults.started([*launch(2), *WORDS, *own], faults.prepare(folder / name)))
            for name, own in (("average", averages), ("compress", compression))
        ]
        return Launched(*(job.finish() for job in jobs), folder)


@pytest.mark.extended
def test_a_worker_may_start_late(together: Together, alone: Path) -> None:
    assert together.chief.code == 0, together.chief
    assert together.late.code == 0, together.late
    assert together.late.out == ""
    assert re.search(r"^ *sharding +by batch, because", together.chief.out, re.MULTILINE), together.chief.out
    faults.assert_same_run(together.folder / "run", alone)


@pytest.mark.extended
def test_jobs_side_by_side_do_not_disturb_each_other(launched: Launched) -> None:
    for outcome in (launched.averaging, launched.compressing):
        assert outcome.code == 0, outcome
        assert outcome.err == ""


@pytest.mark.extended
def test_rounded_gradients_lead_nearly_to_the_same_weights_and_averaged_weights_learn(
    launched: Launched, alone: Path
) -> None:
    compressed = launched.folder / "compress" / "run"
    command.assert_same_weights(compressed, alone, tolerance=0.02)
    with pytest.raises(AssertionError):
        command.assert_same_weights(compressed, alone, tolerance=1e-6)
    losses = [line["loss"] for line in metrics(launched.folder / "average" / "run")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


# What stops a job


def assert_one_sentence(outcome: Outcome, *parts: str, code: int = 2) -> None:
    """The command must fail with one sentence that has these parts, and no traceback; code 2 would come again."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("error: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err


def chiefs_errors(outcome: Outcome) -> list[str]:
    """What the chief wrote to standard error."""
    return [line for line in outcome.err.splitlines() if line.startswith("[0] error: ")]


@pytest.mark.extended
def test_a_full_disk_at_the_chief_stops_the_job_with_one_sentence(tmp_path: Path) -> None:
    folder = faults.prepare(tmp_path)
    (folder / "full_disk").touch()
    outcome = faults.run([*launch(2), *WORDS], folder)
    assert outcome.code == 1, outcome
    (said,) = chiefs_errors(outcome)
    assert "The disk must have room for the run, and run/" in said
    assert "Traceback" not in outcome.err
    assert launcher_lines(outcome)[0] == "The job failed: worker 0 failed with exit code 1. It was the first to fail."


@pytest.mark.extended
def test_a_loss_that_explodes_stops_the_job_with_one_sentence(tmp_path: Path) -> None:
    explosion = settings("optimizer.name=sgd", "optimizer.learning_rate=3.0")
    outcome = faults.run([*launch(2), *WORDS, *explosion], faults.prepare(tmp_path))
    assert outcome.code == 1, outcome
    (said,) = chiefs_errors(outcome)
    assert "The loss must stay finite" in said
    assert "lost" not in outcome.err, "nobody blames a worker"
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run" / "model.keras").exists()


@pytest.mark.extended
def test_workers_of_different_configurations_are_refused_by_all(tmp_path: Path) -> None:
    folder, rate = faults.prepare(tmp_path), settings("optimizer.learning_rate=0.5")
    chief, other = faults.places(2)
    with (
        faults.started([*TRAIN, *WORDS], folder, chief) as first,
        faults.started([*TRAIN, *WORDS, *rate], folder, other) as second,
    ):
        outcomes = [first.finish(), second.finish()]
    for outcome in outcomes:
        assert_one_sentence(outcome, "worker 1", "learning_rate = 0.5", "learning_rate = 0.1", "the same command")


def test_a_worker_that_never_appears_is_named_in_time(tmp_path: Path) -> None:
    variables = faults.places(2)[0]
    missing = json.loads(variables["TF_CONFIG"])["cluster"]["worker"][1]
    limit = settings("strategy.form_seconds=1")
    with faults.started([*TRAIN, *WORDS, *limit], faults.prepare(tmp_path), variables) as process:
        outcome = process.finish()
        assert time.monotonic() - process.began_seconds < 30, "nearly all to import TensorFlow"
    assert_one_sentence(outcome, "All 2 workers must connect within 1 s", missing, code=1)


# Mistakes in TF_CONFIG, reported before TensorFlow starts

TWO = ["127.0.0.1:21001", "127.0.0.1:21002"]


def place(cluster: dict[str, list[str]], kind: str = "worker", index: int = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("variable", "parts"),
    [
        ('{"cluster": ', ["must be JSON", "line 1, column"]),
        (place({"worker": TWO}, index=2), ["from 0 to 1", "received 2"]),
    ],
    ids=["not JSON", "index out of range"],
)
def test_a_mistake_in_tf_config_is_one_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, parts: list[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", variable)
    assert_one_sentence(command.InProcess(capfd, monkeypatch, tmp_path)(*FLAGS), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("TF_CONFIG", tf_config.to_tf_config([address, TWO[1]], 0))
        outcome = command.InProcess(capfd, monkeypatch, tmp_path)(*FLAGS)
    assert_one_sentence(outcome, "must be free", address, code=1)


def test_a_mistake_is_reported_without_waiting_for_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom absl import flags\nfrom tfpar import train\n"
        "code = train.main(flags.FLAGS(['tfpar.train', *sys.argv[1:]]))\n"
        "assert 'tensorflow' not in sys.modules\nsys.exit(code)\n"
    )
    outcome = faults.run(["-c", program, *FLAGS], tmp_path, {"TF_CONFIG": place({"worker": TWO}, index=7)})
    assert_one_sentence(outcome, "received 7")


def test_another_strategy_than_multi_worker_is_refused_in_a_job(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TF_CONFIG", place({"worker": TWO}))
    outcome = command.InProcess(capfd, monkeypatch, tmp_path)(*FLAGS, *settings("strategy.kind=mirrored"))
    assert_one_sentence(outcome, "mirrored", "2")
