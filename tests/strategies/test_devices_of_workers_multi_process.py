"""The first process uses the devices of all workers: homes of weights, functions of Python, checkpoints, lost workers.

The others lend their devices, and end with the first. tests/properties/test_parity_over_workers_multi_process.py
trains the parity table so.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.strategies.test_hybrid import wide
from tests.support import checkpoint_matrix, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.ports import free_addresses
from tfpar.cluster import rendezvous, tf_config
from tfpar.cluster.process_memory import peak_bytes, reset_peak
from tfpar.cluster.tf_config import JobConfig

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
SILENCE_SECONDS = 2.0  # where a worker is lost


def pipeline(**settings: Any) -> tfpar.Pipeline:
    """Return two stages, each on a device of another worker."""
    settings = {"balance": "parameters", **settings}
    return tfpar.Pipeline(2, 3, across_workers=True, **settings)


def grid(devices: list[str] | None = None, **settings: Any) -> tfpar.Hybrid:
    """Return two replicas of two stages on two devices of each worker."""
    settings = {"balance": "parameters", **settings}
    return tfpar.Hybrid(tfpar.Pipeline(2, 2, across_workers=True, **settings), 2, devices)


@pytest.fixture(scope="module")
def job(logical_cpus: list[str]) -> Iterator[workers.Job]:
    with workers.started() as job:
        yield job
        assert job.finish() == [0, 0], "the other worker ends with the first"
        assert "worker 1 lends CPU:0, CPU:1 to" in job.output(1)


def describe() -> list[str]:
    return [pipeline().describe(), grid().describe(), tfpar.MultiWorker(["CPU:0"], shard="weights").describe()]


def test_strategies_name_the_devices_of_each_worker(job: workers.Job) -> None:
    assert job.run_on_chief(describe) == [
        "Pipeline of 2 stages on worker 0 CPU:0, worker 1 CPU:0, 3 micro-batches, 1f1b",
        "Hybrid of 2 replicas of 2 stages on worker 0 CPU:0 CPU:1, worker 1 CPU:0 CPU:1, 2 micro-batches, 1f1b",
        "MultiWorker over 2 workers, 2 replicas on worker 0 CPU:0, worker 1 CPU:0, weights sharded",
    ]


# --- homes


def short_home(variable: keras.Variable) -> str:
    return str(tfpar.cluster.short_name(variable.value.device))


def homes_in_a_pipeline() -> Any:
    """Predict and train; return predictions, the homes of weights and of the optimizer's moments, and the preview."""
    trainer = tfpar.Trainer(wide, pipeline(), seed=0)
    predicted = trainer.predict(small.data(), verbose=0)
    trainer.fit(small.data(), verbose=0)
    variables = zip(trainer.model.trainable_variables, trainer.model.optimizer._momentums, strict=True)
    return predicted, [tuple(map(short_home, pair)) for pair in variables], str(trainer.preview(small.data()))


def test_weights_and_optimizer_state_are_on_the_worker_of_their_stage(job: workers.Job) -> None:
    predicted, homes, table = job.run_on_chief(homes_in_a_pipeline)
    expected = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0).predict(small.data(), verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    assert {*homes} == {("0/CPU:0", "0/CPU:0"), ("1/CPU:0", "1/CPU:0")}
    assert re.search(r"0 +0/CPU:0", table)
    assert re.search(r"1 +1/CPU:0", table)


def homes_of_set_weights() -> list[str]:
    """Return the homes of weights that the model function sets, which allocates them before the stages are known."""

    def build() -> keras.Model:
        model = wide()
        model.set_weights(model.get_weights())
        return model

    trainer = tfpar.Trainer(build, pipeline(), seed=0)
    trainer.fit(small.data(), verbose=0)
    return [short_home(variable) for variable in trainer.model.trainable_variables]


@pytest.mark.extended
def test_weights_that_the_model_function_sets_are_on_the_worker_of_their_stage(job: workers.Job) -> None:
    assert job.run_on_chief(homes_of_set_weights) == ["0/CPU:0"] * 4 + ["1/CPU:0"] * 4


def homes_in_a_grid(units: int, length: int, devices: list[str] | None) -> Any:
    """Return the homes of each weight and of its optimizer state, and the preview of a step.

    Args:
        units: The units of the layers, which decide the bytes of weights.
        length: The length of the sequence between the stages, which decides the bytes of activations.
        devices: Those of the grid.
    """

    def build() -> keras.Model:
        first = [keras.layers.Dense(units, "tanh"), keras.layers.RepeatVector(length)]
        second = [keras.layers.Dense(units, "tanh"), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *first, *second])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    trainer = tfpar.Trainer(build, grid(devices, balance=[2, 3]), seed=0)
    trainer.fit(small.data(), verbose=0)
    optimizer = trainer.model.optimizer
    slots = zip(trainer.model.trainable_variables, optimizer._momentums, optimizer._velocities, strict=True)
    return [{*map(short_home, of_weight)} for of_weight in slots], str(trainer.preview(small.data()))


NAMED = ["1/CPU:1", "0/CPU:1", "1/CPU:0", "0/CPU:0"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("units", "length", "devices", "stages"),
    [
        pytest.param(2, 100, None, [{"0/CPU:0", "1/CPU:0"}, {"0/CPU:1", "1/CPU:1"}], id="few_weights"),
        pytest.param(64, 1, None, [{"0/CPU:0", "0/CPU:1"}, {"1/CPU:0", "1/CPU:1"}], id="many_weights"),
        pytest.param(64, 1, NAMED, [{"1/CPU:1", "1/CPU:0"}, {"0/CPU:1", "0/CPU:0"}], id="named_devices"),
    ],
)
def test_weights_and_optimizer_state_are_on_the_devices_of_their_stage_in_the_order_of_less_traffic(
    job: workers.Job, units: int, length: int, devices: list[str] | None, stages: list[set[str]]
) -> None:
    homes, table = job.run_on_chief(homes_in_a_grid, units, length, devices)
    assert all(len(of_weight) == 1 for of_weight in homes)
    assert set().union(*homes[:2]) <= stages[0]
    assert set().union(*homes[-2:]) <= stages[1]
    for stage, names in enumerate(stages):
        (listed,) = re.findall(rf"^ +{stage}  (\S+ \S+)", table, re.MULTILINE)
        assert set(listed.split()) == names
    assert "MB a step between workers" in table
    assert ("MB with the devices in another order" in " ".join(table.split())) == (devices is None)


def predict_and_evaluate() -> Any:
    trainer = tfpar.Trainer(wide, grid(memory_limit_bytes=1 << 20), seed=0)
    return trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)


def test_predictions_and_logs_of_a_grid_are_those_of_one_device(job: workers.Job) -> None:
    trainer = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0)
    predicted, evaluated = job.run_on_chief(predict_and_evaluate)
    np.testing.assert_allclose(predicted, trainer.predict(small.data(), verbose=0), rtol=1e-5, atol=1e-6)
    cases.assert_same(evaluated, trainer.evaluate(small.data(), verbose=0, return_dict=True), 1e-5)


def homes_of_sharded_weights(folder: Path) -> Any:
    trainer = tfpar.Trainer(wide, tfpar.MultiWorker(["CPU:0"], shard="weights"), seed=0)
    preview = str(trainer.preview(small.data()))
    trainer.export(folder / "exported", verbose=False)
    outputs = trainer.predict(parity_cases.inputs(5), verbose=0)
    return preview, [short_home(variable) for variable in trainer.model.trainable_variables], outputs


def test_each_worker_holds_some_of_sharded_weights_and_the_export_has_all(job: workers.Job, tmp_path: Path) -> None:
    preview, homes, outputs = job.run_on_chief(homes_of_sharded_weights, tmp_path)
    assert {*homes} == {"0/CPU:0", "1/CPU:0"}
    assert re.search(r"^worker 1 CPU:0 +\d+", preview, re.MULTILINE)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(parity_cases.inputs(5)), outputs, rtol=1e-4, atol=1e-6)


def begin_with_sharded_weights(folder: Path) -> None:
    checkpoint_matrix.begin(tfpar.MultiWorker(["CPU:0"], shard="weights"), folder)


@pytest.mark.extended
def test_a_checkpoint_of_sharded_weights_continues_on_one_device(job: workers.Job, tmp_path: Path) -> None:
    job.run_on_chief(begin_with_sharded_weights, tmp_path / "shards")
    history, state = checkpoint_matrix.end(tfpar.SingleDevice(), tmp_path / "shards")
    expected_history, expected_state = checkpoint_matrix.end(tfpar.SingleDevice(), tmp_path / "whole")
    small.assert_same_history(history, expected_history)
    small.assert_same_state(state, expected_state, 1e-5)


# --- functions of Python


class Doubled(keras.layers.Layer):
    """Doubles its inputs in Python."""

    def call(self, inputs: Any) -> Any:
        outputs = tf.numpy_function(lambda rows: 2 * rows, [inputs], inputs.dtype)
        outputs.set_shape(inputs.shape)
        return tf.stop_gradient(outputs)


def train_with_python(*, first: bool) -> float:
    """Train a model with a function of Python in its first or its last layer; return the loss."""

    def build() -> keras.Model:
        dense = [keras.layers.Dense(4) for _ in range(4)]
        layers = [Doubled(), *dense] if first else [*dense, Doubled(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensors((tf.ones([6, 8]), tf.zeros([6, 4 if first else 1])))
    return float(tfpar.Trainer(build, pipeline(), seed=0).fit(data, verbose=0).history["loss"][0])


def train_with_python_on_the_chief() -> float:
    return train_with_python(first=True)


def train_with_python_on_the_other_worker() -> float:
    return train_with_python(first=False)


def test_functions_of_python_run_on_the_chief_alone(job: workers.Job) -> None:
    assert isinstance(job.run_on_chief(train_with_python_on_the_chief), float)
    (refused,) = job.start(train_with_python_on_the_other_worker).outcomes(num_workers=1)
    assert isinstance(refused, workers.Raised)
    assert "calls a Python function" in refused.trace
    assert "is on worker 1: only the process that runs the steps has the function" in refused.trace


# --- checkpoints of parts

WIDTH = 5000  # a weight of 100 MB on worker 1, with its momentum and its moving average
PART_BYTES = 3 * 4 * WIDTH**2  # of the weight, its momentum and its moving average; the rest is less than 1 %
MOST_MEGABYTES = 40  # of the 300 MB that the second process holds, and the first held before
NOT_SHARED = Path("/proc/self/cwd/checkpoints")  # another folder in every process


def parts() -> tfpar.Pipeline:
    return tfpar.Pipeline(2, 2, balance=[1, 3], across_workers=True)


def of_width(width: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(units) for units in (8, width, width, 1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(1e-9, momentum=0.9, use_ema=True), "mse")
        return model

    return build


def ones() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.ones((12, 4)), np.ones((12, 1)))).batch(6)


def growth_of(phase: Callable[[], Any]) -> float:
    """Return by how many MB the peak of this process's memory exceeds its memory at the beginning."""
    reset_peak()
    before = peak_bytes()
    phase()
    return (peak_bytes() - before) / 2**20


def growth_of_the_chief(root: Path) -> list[float]:
    """Return the growth while a model is built, trained and restored; before, a small one takes what does not grow."""
    tfpar.Trainer(of_width(16), parts(), seed=0).fit(ones(), verbose=0, checkpoints=tfpar.Checkpoints(root / "small"))
    trainers: list[tfpar.Trainer] = []

    def build() -> None:
        trainers.append(tfpar.Trainer(of_width(WIDTH), parts(), seed=0))
        trainers[0].build(ones())

    def fit(every_seconds: float) -> None:
        trainers[0].fit(ones(), verbose=0, checkpoints=tfpar.Checkpoints(root / "large", every_seconds))

    return [growth_of(build), growth_of(lambda: fit(0.0)), growth_of(lambda: fit(1000.0))]


@pytest.mark.extended
def test_memory_of_the_first_process_does_not_grow_with_the_model(tmp_path: Path) -> None:
    with workers.started(num_cpus=1) as job:
        growth = job.run_on_chief(growth_of_the_chief, tmp_path)
    assert max(growth) < MOST_MEGABYTES, growth
    sizes = {path.suffix: path.stat().st_size for path in (tmp_path / "large").iterdir()}
    assert sizes[".part"] == pytest.approx(PART_BYTES, rel=0.01)
    assert sizes[".npz"] < 50_000


def fit_with_unshared_checkpoints() -> Any:
    """Return the error of a folder that worker 1 does not see, and the steps of the same trainer after it."""
    trainer = tfpar.Trainer(of_width(16), parts(), seed=0)
    with pytest.raises(ValueError, match=r".") as raised:
        trainer.fit(ones(), verbose=0, checkpoints=tfpar.Checkpoints(NOT_SHARED))
    before = int(trainer.model.optimizer.iterations.numpy())
    trainer.fit(ones(), verbose=0)
    return str(raised.value), before, int(trainer.model.optimizer.iterations.numpy())


def test_a_folder_that_another_worker_does_not_see_is_refused_before_the_first_step(job: workers.Job) -> None:
    message, *steps = job.run_on_chief(fit_with_unshared_checkpoints)
    assert steps == [0, 2]
    assert message == (
        f"All workers must read and write the folder of the checkpoints, and worker 1 does not in {NOT_SHARED}. Mount "
        "a shared folder under the same path on every machine, and keep the checkpoints there."
    )
    assert not list((job.folder_of(0) / "checkpoints").iterdir())
    assert not (job.folder_of(1) / "checkpoints").exists()


# --- the end of a worker


class NotesEnds(keras.callbacks.Callback):
    """Writes a file after the first epoch."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._file.touch()


def train_until_stopped(folder: Path) -> bool:
    """Train until a worker gets SIGTERM; return whether training was interrupted."""
    trainer = tfpar.Trainer(wide, pipeline(), seed=0)
    checkpoints = tfpar.Checkpoints(folder / "stopped", every_seconds=1000)
    callbacks = [NotesEnds(folder / "trains")]
    try:
        trainer.fit(small.data(), epochs=10_000, verbose=0, callbacks=callbacks, checkpoints=checkpoints)
    except SystemExit as ending:
        return ending.code == 130 and trainer.interrupted
    return False


def wait_for_training(folder: Path) -> None:
    deadline_seconds = time.monotonic() + workers.CALL_SECONDS
    while not (folder / "trains").exists():
        assert time.monotonic() < deadline_seconds, "training did not begin"
        time.sleep(0.1)


def test_a_signal_to_the_other_worker_stops_the_first(job: workers.Job, tmp_path: Path) -> None:
    call = job.start(train_until_stopped, tmp_path)
    wait_for_training(tmp_path)
    os.kill(job.pid(1), signal.SIGTERM)
    assert call.results(num_workers=1) == [True]


def train_until_lost(folder: Path) -> None:
    trainer = tfpar.Trainer(wide, pipeline(silence_seconds=SILENCE_SECONDS), seed=0)
    trainer.fit(small.data(), epochs=10_000, verbose=0, callbacks=[NotesEnds(folder / "trains")])


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[workers.Job, workers.Started]]:
    """Start two workers that train until one is lost."""
    with workers.started() as job:
        call = job.start(train_until_lost, folder)
        wait_for_training(folder)
        yield job, call


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(signal.SIGKILL, "connection closed", id="killed"),
        pytest.param(signal.SIGSTOP, "no heartbeat", id="suspended", marks=pytest.mark.extended),
    ],
)
def test_a_lost_worker_is_named_and_all_end(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    with training(tmp_path) as (job, call):
        os.kill(job.pid(1), number)
        began = time.monotonic()
        (raised,) = call.outcomes(num_workers=1)
        assert time.monotonic() - began < SILENCE_SECONDS + 10
        os.kill(job.pid(1), signal.SIGCONT)
        assert job.finish() == [0, -number if number == signal.SIGKILL else 1]
    assert raised.kind == "WorkerLostError"
    named = rf"A worker of the job is lost: (localhost|127\.0\.0\.1):\d+ no longer responds \({reason}\)"
    assert re.match(named, raised.message)


@pytest.mark.extended
def test_a_worker_ends_when_the_first_one_hangs(tmp_path: Path) -> None:
    with training(tmp_path) as (job, call):
        os.kill(job.pid(0), signal.SIGSTOP)
        began = time.monotonic()
        assert job.end_of(1) == 1
        assert time.monotonic() - began < SILENCE_SECONDS + 10
        os.kill(job.pid(0), signal.SIGCONT)
        (raised,) = call.outcomes(num_workers=1)
        assert re.search(r"The chief, \S+, is lost \(no heartbeat\)", job.output(1))
    assert raised.kind == "WorkerLostError"


@pytest.mark.extended
def test_a_worker_whose_server_cannot_be_reached_is_named() -> None:
    addresses = free_addresses(2)
    script = "import tfpar; tfpar.Pipeline(2, 2, across_workers=True, form_seconds=5)"
    environment = {**os.environ, "TF_CONFIG": tf_config.to_tf_config(addresses, 0)}
    kept: dict[int, socket.socket] = {}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True) as chief:
        rendezvous.connect_workers(JobConfig(tuple(addresses), 1, "worker"), 60, kept.__setitem__)
        _, error = chief.communicate()
    sentence = (
        "TimeoutError: All 2 workers were connected, and TensorFlow did not answer within 5 s at "
        f"{addresses[1]} (Connection refused). Let the machines of the job connect to each other"
    )
    assert chief.returncode == 1
    assert sentence in error


def test_a_process_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    part = "across_workers=True is for a job of several workers, and TF_CONFIG describes none"
    with pytest.raises(ValueError, match=part):
        tfpar.Pipeline(2, 2, across_workers=True)
