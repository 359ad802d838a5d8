"""Interrupted and resumed equals uninterrupted, exactly; a damaged, foreign or unwritable checkpoint loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

EPOCHS = 3
# Steps of the run: its first, one amid an epoch, the last of an epoch, one in the second epoch, the last of all.
INTERRUPTIONS = sampled((1, 4, 10, 16, 30), of_ci=(4, 10))
with_dropout = parity_cases.classifier(
    lambda: keras.optimizers.Adam(0.01), layers=lambda: [keras.layers.Dropout(0.3, seed=5)]
)


class InterruptAt(keras.callbacks.Callback):
    """Interrupts the trainer after a step of the run."""

    single_batches = True

    def __init__(self, trainer: tfpar.Trainer, step: int | None) -> None:
        super().__init__()
        self._trainer = trainer
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        if step == self._step:
            self._trainer.interrupt()


def watchers(directory: Path) -> list[keras.callbacks.Callback]:
    """Callbacks with a memory: what they remember must survive, or the run goes another way."""
    return [
        tfpar.MetricsFile(directory / "metrics.jsonl"),
        keras.callbacks.CSVLogger(directory / "metrics.csv", append=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.1, restore_best_weights=True),
    ]


def run(
    strategy: str,
    directory: Path,
    interrupt_at: int | None = None,
    build: Callable[[], keras.Model] = with_dropout,
    dataset: Callable[[], tf.data.Dataset] = small.shuffled,
    **arguments: Any,
) -> tuple[tfpar.Trainer, dict[str, list[float]]]:
    """Train in a new trainer, as a new process would, from the newest checkpoint if there is one."""
    directory.mkdir(exist_ok=True)
    trainer = tfpar.Trainer(build, small.STRATEGIES[strategy](), seed=0)
    callbacks = watchers(directory)
    if interrupt_at is not None:
        callbacks.append(InterruptAt(trainer, interrupt_at))
    settings = {"epochs": EPOCHS, "validation_data": parity_cases.batches(20, 8), "verbose": 0, **arguments}
    checkpoints = tfpar.Checkpoints(directory / "checkpoints", every_seconds=0)
    history = trainer.fit(dataset(), callbacks=callbacks, checkpoints=checkpoints, **settings).history
    return trainer, history


class Uninterrupted:
    """The same run without an interruption, once for each strategy."""

    def __init__(self, strategy: str, directory: Path) -> None:
        self.strategy = strategy
        self.directory = directory
        self.trainer, self.history = run(strategy, directory)
        self.state = small.state(self.trainer.model)
        assert len(set(self.history["learning_rate"])) > 1, "ReduceLROnPlateau acts, or the case is trivial"
        (line, *_) = (directory / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == small.STEPS_PER_EPOCH

    def assert_equals(self, trainer: tfpar.Trainer, history: dict[str, list[float]], directory: Path) -> None:
        small.assert_same_state(small.state(trainer.model), self.state)
        small.assert_same_history(history, self.history, 0.0)
        for name in ("metrics.jsonl", "metrics.csv"):
            assert (directory / name).read_text() == (self.directory / name).read_text(), f"{name} differs"


@pytest.fixture(scope="module", params=small.STRATEGIES)
def uninterrupted(
    request: pytest.FixtureRequest, logical_cpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Uninterrupted:
    return Uninterrupted(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.few(1)
def test_interrupted_again_and_again_equals_uninterrupted(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """Each part runs in a new trainer; the uninterrupted run has many steps per call."""
    for step in INTERRUPTIONS:
        trainer, _ = run(uninterrupted.strategy, tmp_path, step)
        assert trainer.interrupted
        assert int(trainer.model.optimizer.iterations.numpy()) == step, "it stops after that very step"
    trainer, history = run(uninterrupted.strategy, tmp_path)
    uninterrupted.assert_equals(trainer, history, tmp_path)


def test_resume_within_a_pass_that_spans_epochs(tmp_path: Path) -> None:
    """With steps_per_epoch, epochs follow one another within a pass."""
    arguments = {"steps_per_epoch": 4, "epochs": 4, "dataset": lambda: small.shuffled().repeat()}
    expected, expected_history = run("single_device", tmp_path / "whole", **arguments)
    run("single_device", tmp_path / "parts", 6, **arguments)
    trainer, history = run("single_device", tmp_path / "parts", **arguments)
    small.assert_same_state(small.state(trainer.model), small.state(expected.model))
    small.assert_same_history(history, expected_history, 0.0)


def test_early_stopping_resumes_its_count(tmp_path: Path) -> None:
    """Without its state, the patience would start again and the training would be longer."""
    small_steps = parity_cases.classifier(lambda: keras.optimizers.SGD(1e-6))
    arguments = {"build": small_steps, "epochs": 9}
    expected, expected_history = run("single_device", tmp_path / "whole", **arguments)
    assert len(expected_history["loss"]) == 3, "the case stops after a patience of 2"
    run("single_device", tmp_path / "parts", 25, **arguments)
    trainer, history = run("single_device", tmp_path / "parts", **arguments)
    small.assert_same_history(history, expected_history, 0.0)
    small.assert_same_state(small.state(trainer.model), small.state(expected.model))


def test_callbacks_keep_their_memory_when_another_one_joins(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(small.build_model)
    stopping = keras.callbacks.EarlyStopping("loss", patience=5)
    trainer.fit(
        small.data(),
        epochs=2,
        verbose=2,
        callbacks=[stopping, InterruptAt(trainer, 15)],
        checkpoints=tfpar.Checkpoints(tmp_path, 0),
    )
    resumed = keras.callbacks.EarlyStopping("loss", patience=5)
    history = (
        tfpar.Trainer(small.build_model)
        .fit(
            small.data(),
            epochs=2,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN(), resumed],
            checkpoints=tfpar.Checkpoints(tmp_path, 0),
        )
        .history
    )
    assert len(history["loss"]) == 2, f"the history of the first epoch is lost: {history}"
    assert resumed.best <= stopping.best, f"EarlyStopping has forgotten its best, {stopping.best}"


def test_resume_in_the_same_trainer(tmp_path: Path) -> None:
    """In a notebook, Ctrl-C and the same cell again."""
    expected = tfpar.Trainer(with_dropout)
    expected.fit(small.data(), epochs=2, verbose=0, callbacks=[_warmup()])
    trainer = tfpar.Trainer(with_dropout)
    for callbacks in ([_warmup(), InterruptAt(trainer, 7)], [_warmup()]):
        trainer.fit(small.data(), epochs=2, verbose=0, callbacks=callbacks, checkpoints=tfpar.Checkpoints(tmp_path, 0))
    small.assert_same_state(small.state(trainer.model), small.state(expected.model), 1e-6)


def _warmup() -> tfpar.LearningRateWarmup:
    return tfpar.LearningRateWarmup(warmup_steps=9, global_batch_size=8, base_batch_size=4)


def test_a_finished_run_is_not_trained_again(uninterrupted: Uninterrupted) -> None:
    trainer, history = run(uninterrupted.strategy, uninterrupted.directory)
    uninterrupted.assert_equals(trainer, history, uninterrupted.directory)
    assert trainer.model.optimizer.iterations.numpy() == uninterrupted.trainer.model.optimizer.iterations.numpy()


def test_a_run_that_a_callback_stopped_stays_stopped(tmp_path: Path) -> None:
    def fit() -> int:
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)
        trainer = tfpar.Trainer(small.build_model)
        trainer.fit(small.data(), epochs=9, verbose=0, callbacks=[stop], checkpoints=tfpar.Checkpoints(tmp_path, 60.0))
        return int(trainer.model.optimizer.iterations.numpy())

    assert fit() == 2 * small.STEPS_PER_EPOCH
    assert fit() == 2 * small.STEPS_PER_EPOCH, "resuming trains no further"


def test_moving_average_is_taken_once(tmp_path: Path) -> None:
    """The end of training overwrites the weights with their average; a resumed run must not begin from there."""
    build = parity_cases.classifier(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))
    expected, _ = run("single_device", tmp_path / "whole", build=build)
    run("single_device", tmp_path / "parts", 30, build=build)
    trainer, _ = run("single_device", tmp_path / "parts", build=build)
    small.assert_same_state(small.state(trainer.model), small.state(expected.model))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(logical_cpus: list[str]) -> tfpar.Trainer:
    trainer = tfpar.Trainer(small.build_model)
    trainer.fit(small.data(), verbose=0)
    return trainer


def save(trainer: tfpar.Trainer, checkpoints: tfpar.Checkpoints, step: int) -> Path:
    trainer.model.optimizer.iterations.assign(step)
    path = checkpoints.save(trainer.model, tfpar.checkpoint.Position(epoch=step), {})
    checkpoints.wait()
    assert path is not None
    return path


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(
    trained: tfpar.Trainer, tmp_path: Path, share: float
) -> None:
    checkpoints = tfpar.Checkpoints(tmp_path)
    before = trained.model.get_weights()
    save(trained, checkpoints, 1)
    truncate(save(trained, checkpoints, 2), share)
    restored = checkpoints.restore(trained.model)
    assert restored is not None
    assert restored[0].epoch == 1, f"restored the position {restored[0]}"
    assert int(trained.model.optimizer.iterations.numpy()) == 1
    small.assert_same_state(trained.model.get_weights(), before)


def test_a_damaged_checkpoint_does_not_push_out_the_good_one(trained: tfpar.Trainer, tmp_path: Path) -> None:
    """After a resume from before it, new checkpoints have smaller numbers for a while."""
    truncate(save(trained, tfpar.Checkpoints(tmp_path), 9), 0.5)
    checkpoints = tfpar.Checkpoints(tmp_path, keep=1)
    save(trained, checkpoints, 5)
    save(trained, checkpoints, 6)
    position = checkpoints.position()
    assert position is not None
    assert position.epoch == 6
    save(trained, checkpoints, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010.npz"], "in the end it is removed as the oldest"


def test_all_damaged_is_an_error_that_says_so(trained: tfpar.Trainer, tmp_path: Path) -> None:
    checkpoints = tfpar.Checkpoints(tmp_path)
    for step in (1, 2):
        truncate(save(trained, checkpoints, step), 0.5)
    with pytest.raises(ValueError, match=r"Every checkpoint in .* is damaged, the newest is step-00000002\.npz\."):
        checkpoints.restore(trained.model)


def test_no_checkpoint_restores_nothing(trained: tfpar.Trainer, tmp_path: Path) -> None:
    before = small.state(trained.model)
    assert tfpar.Checkpoints(tmp_path / "absent").restore(trained.model) is None
    small.assert_same_state(small.state(trained.model), before)


def _wider() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(9, "tanh"), keras.layers.Dense(3)], name="sequential"
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("build", "difference"),
    [
        (_wider, r"dense/kernel' has shape \(5, 8\) there and \(5, 9\) in this model"),
        (
            parity_cases.classifier(lambda: keras.optimizers.Adam(0.1), metrics=[]),
            r"adam/.*' is in this model only, .* in this model only, and \d+ more variables differ\. Resume",
        ),
        (
            parity_cases.classifier(metrics=[]),
            r"metrics/accuracy/total' is there only, 'metrics/accuracy/count' is there only\. Resume",
        ),
    ],
    ids=["wider layer", "other optimizer and metrics", "metric missing"],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_first_differences(
    trained: tfpar.Trainer, tmp_path: Path, build: Callable[[], keras.Model], difference: str
) -> None:
    path = save(trained, tfpar.Checkpoints(tmp_path), 1)
    trainer = tfpar.Trainer(build)
    with pytest.raises(ValueError, match=rf"{path.name} is of another model: .*{difference}"):
        trainer.fit(small.data(), verbose=0, checkpoints=tfpar.Checkpoints(tmp_path))
    assert path.exists(), "the foreign checkpoint stays"


def test_only_the_newest_checkpoints_stay(trained: tfpar.Trainer, tmp_path: Path) -> None:
    checkpoints = tfpar.Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 11):
        save(trained, checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003.npz", "step-00000011.npz"]


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"every_seconds": -1.0}])
def test_settings_out_of_range_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1 and every_seconds at least 0, received"):
        tfpar.Checkpoints(tmp_path, **arguments)


def test_incomplete_files_of_a_crash_are_removed(trained: tfpar.Trainer, tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.npz.0123abcd.unfinished").write_bytes(b"half")
    save(trained, tfpar.Checkpoints(tmp_path), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]


def test_nothing_is_written_where_weights_are_not_finite(trained: tfpar.Trainer, tmp_path: Path) -> None:
    checkpoints = tfpar.Checkpoints(tmp_path)
    save(trained, checkpoints, 1)
    weight = trained.model.weights[0]
    good = weight.numpy()
    weight.assign(np.full(weight.shape, np.nan))
    trained.model.optimizer.iterations.assign(2)
    assert checkpoints.save(trained.model, tfpar.checkpoint.Position(), {}) is None
    weight.assign(good)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.npz"]


def test_an_unwritable_folder_is_an_os_error_before_the_first_step(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    trainer = tfpar.Trainer(small.build_model)
    with pytest.raises(OSError, match="file"):
        trainer.fit(small.data(), verbose=0, checkpoints=tfpar.Checkpoints(blocked / "checkpoints", 0))
    assert int(trainer.model.optimizer.iterations.numpy()) == 0, "hours of training must not end in this error"


def test_bfloat16_weights_come_back(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("bfloat16")
    try:
        models = [small.build_model() for _ in range(2)]
    finally:
        keras.config.set_dtype_policy("float32")
    for model in models:
        model.optimizer.build(model.trainable_variables)
    checkpoints = tfpar.Checkpoints(tmp_path)
    assert checkpoints.save(models[0], tfpar.checkpoint.Position(epoch=1), {}) is not None
    checkpoints.wait()
    checkpoints.restore(models[1])
    assert models[1].weights[0].dtype == "bfloat16"
    for one, other in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
