"""Jobs over hosts with their own addresses: parity with one device, a lost link, a host that cannot be reached."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import faults, hosts
from tests.support.command import settings
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)
from tfpar.cluster import tf_config

pytestmark = [pytest.mark.multi_process, pytest.mark.slow_start, pytest.mark.usefixtures("leaves_nothing_behind")]

PORT, SILENCE_SECONDS, TIMEOUT_SECONDS = 20_321, 4.0, 120.0
# Every host trains an epoch and says the loss, then trains until the network fails.
SCRIPT = f"""
import os, sys
from pathlib import Path
import keras, numpy as np, tfpar
if "--across" in sys.argv:
    strategy = tfpar.Pipeline(2, 2, across_workers=True, silence_seconds={SILENCE_SECONDS})
elif "TF_CONFIG" in os.environ:
    strategy = tfpar.MultiWorker(silence_seconds={SILENCE_SECONDS})
else:
    strategy = tfpar.SingleDevice()
rng = np.random.default_rng(0)
inputs = rng.normal(size=(64, 8)).astype("float32")
labels = (inputs.sum(1) > 0).astype("int32")

def build_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

class Sign(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        Path("trains").touch()

trainer = tfpar.Trainer(build_model, strategy, seed=0)
losses = trainer.fit(inputs, labels, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
print("losses", losses, flush=True)
if "--on" in sys.argv:
    try:
        trainer.fit(inputs, labels, batch_size=16, epochs=1_000_000, verbose=0, callbacks=[Sign()])
    except tfpar.WorkerLostError as error:
        print("lost", str(error), flush=True)
"""


class Ended(NamedTuple):
    """A process that has ended, with its output."""

    code: int
    text: str

    def said(self, word: str) -> list[str]:
        """Return the rest of the lines that begin with a word."""
        return [line.removeprefix(f"{word} ") for line in self.text.splitlines() if line.startswith(f"{word} ")]


class Job:
    """Workers on hosts, one on each.

    Args:
        machines: The hosts.
        folder: An empty folder.
        arguments: The arguments of Python.
    """

    def __init__(self, machines: list[hosts.Host], folder: Path, *arguments: str) -> None:
        addresses = [f"{host.address}:{PORT}" for host in machines]
        self.folders = [folder / str(rank) for rank in range(len(machines))]
        self.processes = []
        for rank, host in enumerate(machines):
            self.folders[rank].mkdir()
            variables = {"TF_CONFIG": tf_config.to_tf_config(addresses, rank)}
            self.processes.append(hosts.start(host, arguments, self.folders[rank], variables, folder / f"{rank}.out"))

    def wait_for_training(self, num_workers: int | None = None) -> None:
        """Wait until the workers, or those of the lowest ranks, train in the last `fit`."""
        deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
        while not all((folder / "trains").exists() for folder in self.folders[:num_workers]):
            ended = [one for one in self.processes if one.poll() is not None]
            assert not ended, [one.text for one in self.finish()]
            assert time.monotonic() < deadline_seconds, "the workers do not train"
            time.sleep(0.05)

    def finish(self) -> list[Ended]:
        """Wait for the end of all workers."""
        codes = [process.wait(TIMEOUT_SECONDS) for process in self.processes]
        return [
            Ended(code, path.with_suffix(".out").read_text()) for code, path in zip(codes, self.folders, strict=True)
        ]


@pytest.fixture(scope="module")
def machines() -> Iterator[list[hosts.Host]]:
    """Three hosts that can reach each other."""
    with hosts.connected(3) as connected:
        yield connected


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that every worker runs."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


class Cut(NamedTuple):
    """A job of three hosts, and how it ended after the link of host 2 went down."""

    ended: list[Ended]
    noticed_seconds: float


@pytest.fixture(scope="module")
def cut(machines: list[hosts.Host], script: Path, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """Three hosts that train, until the link of host 2 goes down in the middle of a step."""
    job = Job(machines, tmp_path_factory.mktemp("cut"), str(script), "--on")
    with hosts.ended_in_the_end(job.processes):
        job.wait_for_training()
        machines[2].set_link("down")
        began = time.monotonic()
        try:
            ended = job.finish()
        finally:
            machines[2].set_link("up")
        return Cut(ended, time.monotonic() - began)


@pytest.mark.extended
def test_three_hosts_train_as_one_device(cut: Cut, script: Path, tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=hosts.environment(), capture_output=True, text=True, check=True
    )
    [expected] = Ended(0, alone.stdout).said("losses")
    for one in cut.ended:
        [losses] = one.said("losses")
        assert json.loads(losses) == pytest.approx(json.loads(expected), rel=1e-5)


@pytest.mark.extended
def test_a_link_that_goes_down_is_noticed_in_time(cut: Cut) -> None:
    assert cut.noticed_seconds < 2 * SILENCE_SECONDS + 15


@pytest.mark.extended
def test_every_script_gets_one_error_that_names_the_silent_host(cut: Cut, machines: list[hosts.Host]) -> None:
    for rank, one in enumerate(cut.ended):
        [sentence] = one.said("lost")
        assert "Traceback" not in one.text
        assert "resumes from the last checkpoint" in sentence
        silent = [machines[2]] if rank < 2 else machines[:2]
        named = ", ".join(f"{host.address}:{PORT}" for host in silent)
        assert f"{named} no longer respond{'s' * (rank < 2)} (no heartbeat)." in sentence


@pytest.mark.extended
def test_all_workers_of_a_pipeline_end_when_a_link_goes_down(
    machines: list[hosts.Host], script: Path, tmp_path: Path
) -> None:
    job = Job(machines[:2], tmp_path, str(script), "--on", "--across")
    with hosts.ended_in_the_end(job.processes):
        job.wait_for_training(1)
        machines[1].set_link("down")
        began = time.monotonic()
        try:
            chief, other = job.finish()
        finally:
            machines[1].set_link("up")
    assert time.monotonic() - began < SILENCE_SECONDS + 15
    [sentence] = chief.said("lost")
    assert f"{machines[1].address}:{PORT} no longer responds (no heartbeat)." in sentence
    assert f"The chief, {machines[0].address}:{PORT}, is lost (no heartbeat)." in other.text
    assert (chief.code, other.code) == (0, 1)


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy",
    [
        "MultiWorker(form_seconds=3)",
        pytest.param("Pipeline(2, 2, across_workers=True, form_seconds=3)", marks=pytest.mark.extended),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_reason(
    machines: list[hosts.Host], strategy: str, tmp_path: Path
) -> None:
    machines[1].set_link("down")
    try:
        short = tmp_path / "short.py"
        short.write_text(f"import tfpar\ntfpar.{strategy}\n")
        job = Job(machines[:2], tmp_path, str(short))
        with hosts.ended_in_the_end(job.processes):
            ended = job.finish()
    finally:
        machines[1].set_link("up")
    for rank, one in enumerate(ended):
        assert one.code == 1
        found = re.search(rf"{machines[1 - rank].address}:{PORT} \(([^)]*)\) did not", one.text)
        assert found, one.text
        assert found[1] in ("No route to host", "Network is unreachable", "timed out")


# A trainer that is slow while there is a file of this name.
SLOW = """
class Slowness(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.2 * Path("slow").exists())

class Slow(Striking):
    def fit(self, *arguments, callbacks, **more):
        return super().fit(*arguments, callbacks=[*callbacks, Slowness()], **more)
"""
FLAGS = [*faults.FLAGS, *settings("trainer=own.Slow", "training.steps_per_call=2"), *faults.OF_A_JOB]


class Restarted(NamedTuple):
    """Launchers on two hosts, whose workers restarted after a link went down for a while."""

    ended: list[Ended]
    folder: Path
    alone: Path


@pytest.fixture(scope="module")
def restarted(machines: list[hosts.Host], tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    """The same launcher command on two hosts; the link of host 1 is down in the middle of the training."""
    folder, alone = (faults.prepare(tmp_path_factory.mktemp(name)) for name in ("restarted", "alone"))
    for one in (folder, alone):
        (one / "own.py").write_text(faults.OWN + SLOW)
    outcome = faults.run([*faults.TRAIN, *FLAGS], alone)
    assert outcome.code == 0, outcome
    names = ",".join(host.address for host in machines[:2])
    command = ["-m", "tfpar.launch", "--num_workers", "2", "--hosts", names, "--max_restarts", "3", "--", *FLAGS]
    (folder / "slow").touch()
    processes = [
        hosts.start(host, command, folder, {}, folder / f"{rank}.out") for rank, host in enumerate(machines[:2])
    ]
    with hosts.ended_in_the_end(processes):
        deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
        while len(faults.first_steps(folder)) < 1:
            assert time.monotonic() < deadline_seconds, (folder / "0.out").read_text()
            time.sleep(0.05)
        machines[1].set_link("down")
        try:
            while any("Restart 1 of 3" not in (folder / f"{rank}.out").read_text() for rank in range(2)):
                assert time.monotonic() < deadline_seconds, [(folder / f"{rank}.out").read_text() for rank in range(2)]
                time.sleep(0.05)
        finally:
            machines[1].set_link("up")
        (folder / "slow").unlink()
        codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
    texts = [(folder / f"{rank}.out").read_text() for rank in range(2)]
    return Restarted([Ended(*pair) for pair in zip(codes, texts, strict=True)], folder / "run", alone / "run")


@pytest.mark.extended
def test_launchers_on_all_hosts_restart_their_workers_and_resume_from_the_checkpoint(restarted: Restarted) -> None:
    for one in restarted.ended:
        assert one.code == 0, one.text
    faults.assert_same_run(restarted.folder, restarted.alone)
