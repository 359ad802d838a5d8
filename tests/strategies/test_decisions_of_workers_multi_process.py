"""What one worker decides, meets or writes counts for all: stops, errors, signals, checkpoints, files."""

from __future__ import annotations

import contextlib
import csv
import functools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops import test_hooks as hooks
from tests.loops.test_experiment_loggers import autolog
from tests.properties.test_parity import computing_in
from tests.support import command, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.multi_worker_cases import EXACT, Trained, assert_same, keras_fit, plain_fit, trained

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def on_chiefs_disk(folder: Path) -> Path:
    """Return the folder on the chief; on worker 1, a path that cannot be created because its parent is a file."""
    if workers.rank() == 0:
        return folder
    no_disk = folder.with_name("no disk")
    no_disk.touch()
    return no_disk / folder.name


# --- stops and errors


def decide() -> Trained:
    trainer = tfpar.Trainer(cases.plain_sgd, cases.one_device_each(), seed=0)
    return trained(trainer, small.data(), epochs=12, validation_data=small.data(), callbacks=cases.deciding())


def test_early_stopping_and_the_rates_plateau_are_decided_alike(job: workers.Job) -> None:
    call = job.start(decide)
    expected = keras_fit(
        small.data(), cases.plain_sgd, epochs=12, validation_data=small.data(), callbacks=cases.deciding()
    )
    assert 4 <= len(expected.history["loss"]) < 12, "the training was stopped"
    assert expected.history["learning_rate"][0] > expected.history["learning_rate"][-1], "the rate was lowered"
    for result in call.results():
        assert_same(result, expected)


def decide_by_logs_of_chief(way: str) -> Trained:
    """Train with callbacks that monitor an entry which the chief alone adds to the logs."""
    is_chief = workers.rank() == 0
    adding: dict[str, list[keras.callbacks.Callback]] = {
        "by its rank": [cases.AddsDistance(is_chief)],
        "by chief_only": [cases.AddsDistanceOnChief()],
        "by a list of its own": [cases.AddsDistance()] if is_chief else [],
    }
    callbacks = [*adding[way], *cases.deciding("distance")]
    trainer = tfpar.Trainer(cases.plain_sgd, cases.one_device_each(), seed=0)
    return trained(trainer, small.data(), epochs=12, validation_data=small.data(), callbacks=callbacks)


@pytest.mark.parametrize("way", ["by its rank", "by chief_only", "by a list of its own"])
def test_all_workers_decide_by_an_entry_that_the_chief_adds_to_the_logs(job: workers.Job, way: str) -> None:
    call = job.start(decide_by_logs_of_chief, way)
    callbacks = [cases.AddsDistance(), *cases.deciding("distance")]
    expected = keras_fit(small.data(), cases.plain_sgd, epochs=12, validation_data=small.data(), callbacks=callbacks)
    assert expected.history["distance"] == [3, 2, 1, 2, 3, 4], "the training was stopped"
    assert expected.history["learning_rate"][0] > expected.history["learning_rate"][-1], "the rate was lowered"
    for result in call.results():
        assert_same(result, expected)


def stop_on_worker_1(epochs: int, at_step: int | None, at_epoch: int | None) -> Trained:
    callback = cases.Stop(workers.rank() == 1, at_step, at_epoch)
    return trained(cases.initial(), small.data(), epochs=epochs, callbacks=[callback])


def test_a_stop_on_one_worker_stops_all_at_the_same_step(job: workers.Job) -> None:
    expected = keras_fit(small.data(), callbacks=[cases.Stop(True, at_step=4)], epochs=1, steps_per_epoch=4)
    for result in job.run(stop_on_worker_1, 2, 4, None):
        assert_same(result, expected)
    for result in job.run(stop_on_worker_1, 5, None, 1):
        assert_same(result, plain_fit())


def end_on_worker_1() -> Any:
    trainer = tfpar.Trainer(hooks.build(3), cases.one_device_each(), seed=0)
    return hooks.of_endless_data(trainer, workers.rank() == 1)


@pytest.mark.extended
def test_a_callback_of_one_worker_ends_evaluation_and_prediction_of_all(job: workers.Job) -> None:
    expected = hooks.of_endless_data(tfpar.Trainer(hooks.build(3), tfpar.SingleDevice(), seed=0), decides=True)
    for result in job.run(end_on_worker_1):
        assert_same(result, expected)


def fail_on_worker_1() -> dict[str, str]:
    """Return the error of each worker after a hook of a callback has raised on worker 1."""
    trainer = cases.initial()
    run: dict[str, Callable[..., Any]] = {
        "train": functools.partial(trainer.fit, small.data(), epochs=1, validation_data=small.data()),
        "test": functools.partial(trainer.evaluate, small.data()),
        "predict": functools.partial(trainer.predict, small.data()),
    }
    errors = {}
    for verb, hook in cases.FAILING_HOOKS:
        with pytest.raises(Exception, match=r".") as raised:
            run[verb](verbose=0, callbacks=[cases.Fails(hook if workers.rank() == 1 else "")])
        errors[hook] = f"{type(raised.value).__name__}: {raised.value}"
    return errors


def test_an_error_in_a_callback_of_one_worker_ends_all_with_its_reason(job: workers.Job) -> None:
    first, second = job.run(fail_on_worker_1)
    assert list(first) == list(second) == [hook for _, hook in cases.FAILING_HOOKS]
    assert set(second.values()) == {"KeyError: 'width'"}
    for hook, message in first.items():
        reason = r"ValueError: A callback failed on worker 1 \(127\.0\.0\.1:\d+\) with KeyError: 'width'"
        assert re.fullmatch(reason, message), (hook, message)


def build_model_that_fails_on_worker_1(num_layers: int) -> None:
    tfpar.Trainer(cases.failing_after(num_layers, workers.rank() == 1), cases.one_device_each(), seed=0)


def train_small() -> Trained:
    return trained(cases.initial(), small.data())


@pytest.mark.few(1)
@pytest.mark.parametrize("num_layers", [0, 1], ids=["before_its_first_variable", "between_two"])
def test_a_model_function_that_fails_on_one_worker_is_an_error_on_all_who_train_on(
    job: workers.Job, num_layers: int
) -> None:
    chiefs, own = job.outcomes(build_model_that_fails_on_worker_1, num_layers)
    assert (own.kind, own.message) == ("KeyError", "'vocabulary'")
    assert chiefs.message.startswith("The model function failed on worker 1 (127.0.0.1:")
    assert chiefs.message.endswith(") with KeyError: 'vocabulary'")
    for result in job.run(train_small):
        assert_same(result, plain_fit())


def train_to_a_loss_that_is_not_finite() -> None:
    cases.initial().fit(cases.not_finite(), verbose=0, steps_per_call=1)


def test_a_loss_that_is_not_finite_is_an_error_on_all(job: workers.Job) -> None:
    for result in job.outcomes(train_to_a_loss_that_is_not_finite):
        assert result.kind == "FloatingPointError"
        assert "at step 3 (step 3 of epoch 1)" in result.message


def continue_after_a_loss_that_is_not_finite() -> Trained:
    settings = {"epochs": 1, "nonfinite_loss": "continue", "steps_per_call": 5}
    return trained(cases.initial(), cases.not_finite(), **settings)


def test_all_continue_after_a_loss_that_is_not_finite(job: workers.Job) -> None:
    for history, state in job.run(continue_after_a_loss_that_is_not_finite):
        assert np.isnan(history["loss"]).all()
        assert int(state[4]) == 5, "the iterations of the optimizer"


# --- checkpoints and signals


def train_without_checkpoint_on_the_chief(folder: Path) -> list[str]:
    """Return the error of each worker where the chief cannot read checkpoints, and where its disk is full."""
    trainer, errors = cases.initial(), []
    (folder / "no folder").touch()
    for name, num_bytes in (("no folder/checkpoints", None), ("full", 1000)):
        is_full = num_bytes is not None and workers.rank() == 0
        limited = command.file_size_limit(num_bytes) if is_full else contextlib.nullcontext()
        with limited, pytest.raises(OSError, match=r".") as raised:
            trainer.fit(small.data(), verbose=0, checkpoints=tfpar.Checkpoints(folder / name, every_seconds=0))
        errors.append(str(raised.value))
    return errors


def test_a_checkpoint_that_the_chief_cannot_read_or_write_ends_all_workers_with_its_reason(
    job: workers.Job, tmp_path: Path
) -> None:
    own, others = job.run(train_without_checkpoint_on_the_chief, tmp_path)
    for what, reason, message in zip(("Reading", "Writing"), own, others, strict=True):
        start = rf"{what} a checkpoint failed on worker 0 \(127\.0\.0\.1:\d+\) with \w+: "
        assert re.fullmatch(start + re.escape(reason), message), (message, reason)


def interrupt_on_worker_1(folder: Path) -> tuple[Trained, bool]:
    trainer = cases.initial()
    callback = cases.Interrupt(trainer if workers.rank() == 1 else None, at_step=13)
    checkpoints = tfpar.Checkpoints(on_chiefs_disk(folder), every_seconds=1000)
    result = trained(trainer, small.shuffled(), epochs=3, callbacks=[callback], checkpoints=checkpoints)
    return result, trainer.interrupted


def test_an_interruption_of_one_worker_stops_all_with_a_checkpoint_from_which_one_device_resumes(
    job: workers.Job, tmp_path: Path
) -> None:
    folder = tmp_path / "interrupted"
    results = job.run(interrupt_on_worker_1, folder)
    assert [int(state[4]) for (_, state), _ in results] == [13, 13]
    assert [is_interrupted for _, is_interrupted in results] == [True, True]
    assert_same(results[1][0].state, results[0][0].state, 0.0)
    assert [path.name for path in folder.iterdir()] == ["step-00000013.npz"]
    resumed, undisturbed = (tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0) for _ in range(2))
    fit = {"epochs": 3, "verbose": 0}
    history = resumed.fit(small.shuffled(), **fit, checkpoints=tfpar.Checkpoints(folder)).history
    assert_same(history, undisturbed.fit(small.shuffled(), **fit).history)
    assert_same(cases.state(resumed.model), cases.state(undisturbed.model))


def signal_on_worker_1(folder: Path) -> Any:
    """Return the code with which each worker ends after SIGTERM to worker 1, and its steps."""
    trainer = cases.initial()

    def send(batch: int, logs: Any) -> None:
        if workers.rank() == 1 and batch == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoints = tfpar.Checkpoints(on_chiefs_disk(folder), every_seconds=1000)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=send)
    with pytest.raises(SystemExit) as raised:
        trainer.fit(small.data(), verbose=0, callbacks=[callback], checkpoints=checkpoints)
    return raised.value.code, int(trainer.model.optimizer.iterations.numpy())


def test_a_signal_to_one_worker_ends_all_at_the_same_step_with_a_checkpoint(job: workers.Job, tmp_path: Path) -> None:
    assert job.run(signal_on_worker_1, tmp_path / "signalled") == [(130, 4), (130, 4)]
    assert [path.name for path in (tmp_path / "signalled").iterdir()] == ["step-00000004.npz"]


def train_with_few_and_many_checkpoints(root: Path) -> list[Any]:
    """Train uninterrupted, with a checkpoint after each call, and interrupted and resumed."""
    trainers = cases.initial, cases.Reused(cases.one_device_each()).initial
    histories = []
    for name, every_seconds, stops in (("few", 1000.0, ()), ("many", 0.0, ()), ("resumed", 1000.0, (20, 33))):
        for index, step in enumerate((*stops, 0)):
            trainer = trainers[index % 2]()  # a new trainer, or one with gradient sums of another step
            history = trainer.fit(
                parity_cases.batches(400, 7),
                verbose=0,
                callbacks=[cases.Interrupt(trainer if step else None, at_step=step)],
                checkpoints=tfpar.Checkpoints(on_chiefs_disk(root / name), every_seconds),
            ).history
        histories.append(history)
    return histories


@pytest.mark.extended
def test_metrics_do_not_depend_on_when_checkpoints_are_written(job: workers.Job, tmp_path: Path) -> None:
    """Equal to the last digit: a resumed run restores the metric sum of each replica."""
    for few, many, resumed in job.run(train_with_few_and_many_checkpoints, tmp_path):
        assert few == many
        assert few == resumed


# --- files


def write_by_callbacks(folder: Path) -> tuple[Trained, set[str]]:
    """Train with callbacks that write; return the files that they left in the current folder."""
    before = {*os.listdir()}
    folder = on_chiefs_disk(folder)
    trainer = tfpar.Trainer(small.build_model, cases.one_device_each(), seed=0)
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(folder / "step.weights.h5", save_weights_only=True, save_freq=3),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, update_freq=2),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        tfpar.MetricsFile(folder / "metrics.jsonl"),
        tfpar.ReplicaCheck(),
    ]
    result = trained(trainer, small.data(), validation_data=small.data(), callbacks=callbacks)
    return result, {*os.listdir()} - before


def resume_from_backup(folder: Path) -> Trained:
    """Resume at the end of epoch 2 of 4."""
    backup = keras.callbacks.BackupAndRestore(on_chiefs_disk(folder) / "backup", delete_checkpoint=False)
    trainer = tfpar.Trainer(small.build_model, cases.one_device_each(), seed=1)
    return trained(trainer, small.data(), epochs=4, callbacks=[backup])


def test_stock_callbacks_write_on_the_chief_alone_and_resume_at_its_epoch(job: workers.Job, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    call = job.start(write_by_callbacks, folder)
    expected = keras_fit(small.data(), validation_data=small.data())
    for result, left in call.results():
        assert_same(result, expected)
        assert not left
    assert {path.name for path in folder.iterdir()} == {
        *("epoch-1.keras", "epoch-2.keras", "step.weights.h5", "log.csv", "board", "backup", "metrics.jsonl")
    }
    loaded = keras.models.load_model(folder / "epoch-2.keras")
    assert_same(loaded.get_weights(), expected.state[:4])
    rows = list(csv.DictReader((folder / "log.csv").open()))
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(expected.history["val_loss"], rel=EXACT)
    assert {path.name for path in (folder / "board").iterdir()} == {"train", "validation"}
    call = job.start(resume_from_backup, folder)
    expected = keras_fit(small.data(), epochs=4)
    for result in call.results():
        assert_same(result.state, expected.state)
        assert_same(result.history, {name: values[2:] for name, values in expected.history.items()})


def save(folder: Path) -> list[np.ndarray]:
    trainer = cases.initial()
    trainer.fit(small.data(), verbose=0)
    trainer.save(on_chiefs_disk(folder) / "model.keras")
    trainer.export(on_chiefs_disk(folder) / "exported", verbose=False)
    with pytest.raises(ValueError, match="Unrecognized format=of the chief"):
        trainer.export(folder / "other", format="of the chief" if workers.rank() == 0 else "of worker 1")
    return trainer.model.get_weights()


def test_the_chief_alone_saves_and_exports_the_model(job: workers.Job, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    results = job.run(save, folder)
    loaded = keras.models.load_model(folder / "model.keras")
    for weights in results:
        assert_same(weights, loaded.get_weights(), 0.0)
    exported, inputs = tf.saved_model.load(folder / "exported"), parity_cases.inputs(5)
    assert_same(exported.serve(inputs), loaded.predict(inputs, verbose=0))
    assert {*os.listdir(folder)} == {"model.keras", "exported"}


def fit_logged() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        logged = autolog(patch)
        strategy = tfpar.MultiWorker(["CPU:0"], shard="optimizer")
        trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
        history = trainer.fit(small.data(), verbose=0).history
        return history, [state for *_, state in logged.fits], logged.epochs


def test_a_replaced_fit_logs_on_the_chief_alone_with_the_state_of_all_workers(job: workers.Job) -> None:
    expected = keras_fit(small.data(), epochs=1)
    (history, (state,), epochs), (_, *of_others) = job.run(fit_logged)
    assert_same(history, expected.history)
    assert_same(state, expected.state[4:])
    assert epochs == history["loss"]
    assert of_others == [[], []]


def save_the_same_files(folder: Path) -> list[str]:
    """Save the same files on both workers, several times, and read them each time."""
    model = cases.initial().model
    for _ in range(5):
        model.save(folder / "model.keras")
        model.save_weights(str(folder / "model.weights.h5"))
        loaded = keras.models.load_model(folder / "model.keras")
        loaded.load_weights(folder / "model.weights.h5")
        for actual, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(actual, expected)
    return sorted(path.name for path in folder.iterdir() if "unfinished" not in path.name)


def test_every_worker_may_save_the_same_files(job: workers.Job, tmp_path: Path) -> None:
    assert job.run(save_the_same_files, tmp_path) == [["model.keras", "model.weights.h5"]] * 2
