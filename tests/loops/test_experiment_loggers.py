"""Libraries that log experiments: their callbacks, and a `keras.Model.fit` that they have replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import tfpar
from tests import ROOT
from tests.support import small
from tfpar.loops.callback_list import wants_single_batches, writes_files

pytestmark = pytest.mark.usefixtures("logical_cpus")

# As MLflow's autolog: appends a callback to a list, calls Keras' fit, which it has kept, and saves the model.
REPLACE = """
def replaced(original, logged, callback):
    def fit(model, *args, **kwargs):
        kwargs.setdefault("callbacks", []).append(callback)
        history = original(model, *args, **kwargs)
        logged.append((args, kwargs, [slot.numpy() for slot in model.optimizer.variables]))
        return history
    return fit
"""


class Logged(NamedTuple):
    """What a replaced `fit` has logged.

    Args:
        fits: Arguments and optimizer state of each call.
        epochs: The losses that its callback received.
    """

    fits: list[Any]
    epochs: list[float]


def autolog(patch: pytest.MonkeyPatch) -> Logged:
    """Replace `keras.Model.fit` as MLflow does, by a function of a module of that package."""
    logged, namespace = Logged([], []), {"__name__": "mlflow.stand_in"}
    exec(REPLACE, namespace)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logged.epochs.append(logs["loss"]))
    patch.setattr(keras.Model, "fit", namespace["replaced"](keras.Model.fit, logged.fits, callback))
    return logged


@pytest.mark.few(1)
@pytest.mark.parametrize("callbacks", [None, (keras.callbacks.History(),), keras.callbacks.History()])
def test_a_fit_that_mlflow_has_replaced_logs_the_training_of_a_strategy(
    callbacks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = small.STRATEGIES["mirrored"]
    expected = tfpar.Trainer(small.build_model, make(), seed=0).fit(small.data(), epochs=2, verbose=0).history
    logged = autolog(monkeypatch)
    trainer = tfpar.Trainer(small.build_model, make(), seed=0)
    checkpoints = tfpar.Checkpoints(tmp_path / "checkpoints")
    history = trainer.fit(small.data(), epochs=2, verbose=0, callbacks=callbacks, checkpoints=checkpoints)
    assert history.history == expected
    assert logged.epochs == expected["loss"]
    ((arguments, settings, _),) = logged.fits
    assert len(arguments) == 1
    assert {*settings} == {"epochs", "verbose", "callbacks"}, "arguments of Keras' fit only"


def test_errors_of_a_replaced_fit_are_those_of_the_trainer_and_leave_keras_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = keras.Model.fit
    logged = autolog(monkeypatch)
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    with pytest.raises(ValueError, match="validation_freq must be a number of epochs"):
        trainer.fit(small.data(), validation_data=small.data(), validation_freq=0, verbose=0)
    plain = small.initial_model()
    plain.fit(small.data(), verbose=0)
    assert len(logged.fits) == 1, "Keras' own fit of another model"
    monkeypatch.undo()
    assert keras.Model.fit is kept
    expected = small.initial_model().fit(small.data(), verbose=0).history
    assert logged.epochs == expected["loss"]


def test_models_inside_a_logged_training_train_with_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, losses = autolog(monkeypatch), []

    class TrainsAnother(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            losses.extend(small.initial_model().fit(small.data(), verbose=0).history["loss"])

    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    (loss,) = trainer.fit(small.data(), verbose=0, callbacks=TrainsAnother()).history["loss"]
    np.testing.assert_allclose(losses, loss, rtol=1e-6)
    assert len(logged.fits) == 2


class _OfWandb(keras.callbacks.Callback):
    __module__ = "wandb.integration.keras.callbacks.metrics_logger"

    def __init__(self, log_freq: int | None = None) -> None:
        super().__init__()
        self.logging_batch_wise = log_freq is not None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class _Derived(_OfWandb):
    __module__ = "users_module"


class _OnEveryWorker(_OfWandb):
    __module__ = _OfWandb.__module__
    chief_only = False


@pytest.mark.parametrize(
    ("callback", "on_chief_alone", "single_batches"),
    [
        (_OfWandb(), True, False),
        (_OfWandb(log_freq=5), True, True),
        (_Derived(), True, True),
        (_OnEveryWorker(), False, False),
    ],
    ids=["of epochs", "of batches", "a class of the user", "with chief_only=False"],
)
def test_loggers_run_on_the_chief_alone_and_after_single_batches_only_if_they_log_them(
    callback: keras.callbacks.Callback, on_chief_alone: bool, single_batches: bool
) -> None:
    assert writes_files(callback) is on_chief_alone
    assert wants_single_batches(callback) is single_batches


def test_the_callbacks_of_the_installed_packages_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
    from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

    monkeypatch.chdir(tmp_path)
    with wandb.init(mode="disabled"):
        of_epochs = [WandbMetricsLogger(), WandbModelCheckpoint("model.keras"), mlflow.keras.MlflowCallback()]
        of_batches = [
            WandbMetricsLogger(log_freq=5),
            mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=5),
        ]
    assert all(map(writes_files, [*of_epochs, *of_batches]))
    assert [wants_single_batches(callback) for callback in [*of_epochs, *of_batches]] == [False] * 3 + [True] * 2


JOB = """
import tfpar
strategy = tfpar.MultiWorker()
import keras, mlflow, numpy as np, wandb
from wandb.integration.keras import WandbMetricsLogger

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

wandb.init(project="job")
mlflow.autolog()
trainer = tfpar.Trainer(build, strategy, seed=0)
trainer.fit(np.ones((32, 4)), np.ones((32, 1)), epochs=2, verbose=0, callbacks=[WandbMetricsLogger()])
if strategy.is_chief:
    (run,) = mlflow.search_runs(output_format="list")
    (model,) = mlflow.search_logged_models(output_format="list")
    print(run.info.status, sorted(run.data.metrics), model.source_run_id == run.info.run_id)
wandb.finish()
"""


@pytest.mark.multi_process
@pytest.mark.slow_start
def test_a_script_of_a_job_makes_one_run_of_each_tracker(tmp_path: Path) -> None:
    for package in ("wandb", "mlflow"):
        pytest.importorskip(package)
    (tmp_path / "job.py").write_text(JOB)
    trackers = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    command = [sys.executable, "-m", "tfpar.launch", "--num_workers", "2", "--", "job.py"]
    environment = {**os.environ, **trackers, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "[0] FINISHED ['loss'] True" in completed.stdout
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
