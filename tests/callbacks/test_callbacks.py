"""Every stock Keras callback works as under Keras' own `fit`; and the callbacks of tfpar."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tfpar.callbacks import read_metrics
from tfpar.loops.callback_list import wants_single_batches

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


ANY = {
    "mirrored": small.STRATEGIES["mirrored"],
    "sharded weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


class Pair:
    """One model under a strategy and its twin under Keras' own `fit`, both set back for every test."""

    def __init__(self, strategy: str) -> None:
        def build() -> keras.Model:
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8)
            return small.parity_cases.classifier(lambda: optimizer)()

        self.trainer = tfpar.Trainer(build, ANY[strategy](), seed=0)
        keras.utils.set_random_seed(0)
        self.keras = build()
        self._again = [small.Again(self.trainer.model), small.Again(self.keras)]

    def reset(self) -> Pair:
        for again in self._again:
            again.reset()
        for model in (self.trainer.model, self.keras):
            model._initial_epoch = None  # where BackupAndRestore leaves its word
        return self

    def both(self, callback: Callable[[str], Any], **arguments: Any) -> list[tuple[Any, dict[str, list[float]]]]:
        """Train under Keras and under tfpar with a callback each; return the callbacks and histories."""
        results = []
        for name, fit in (("keras", self.keras.fit), ("tfpar", self.trainer.fit)):
            made = callback(name)
            callbacks = made if isinstance(made, list) else [made]
            settings = {"epochs": 4, "validation_data": small.data(), **arguments}
            results.append((made, fit(small.data(), verbose=0, callbacks=callbacks, **settings).history))
        return results

    def assert_equal(self, tolerance: float = 1e-5) -> None:
        small.assert_same_state(small.state(self.trainer.model), small.state(self.keras), tolerance)


@pytest.fixture(scope="module")
def pairs(logical_cpus: list[str]) -> Callable[[str], Pair]:
    """Return the pair of a strategy, which all tests of this file share."""
    return functools.cache(Pair)


@pytest.fixture
def pair(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("mirrored").reset()


@pytest.fixture(params=ANY)
def any_pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    """Return a pair of which replicas may have a part of the weights and of the state."""
    return pairs(request.param).reset()


@pytest.mark.few(1)
def test_early_stopping_stops_at_the_same_epoch_with_the_same_weights(any_pair: Pair) -> None:
    (expected, expected_history), (actual, history) = any_pair.both(
        lambda name: keras.callbacks.EarlyStopping("accuracy", patience=1, restore_best_weights=True), epochs=12
    )
    assert 0 < expected.stopped_epoch < 11, f"the case must stop early, stopped at {expected.stopped_epoch}"
    assert actual.stopped_epoch == expected.stopped_epoch
    assert actual.best_epoch == expected.best_epoch
    small.assert_same_history(history, expected_history)
    any_pair.assert_equal()


@pytest.mark.few(1)
def test_reduce_lr_on_plateau_gives_the_same_rates(any_pair: Pair) -> None:
    (_, expected), (_, history) = any_pair.both(
        lambda name: keras.callbacks.ReduceLROnPlateau("val_accuracy", factor=0.5, patience=1), epochs=8
    )
    assert len(set(expected["learning_rate"])) > 1, "the case must reduce the rate"
    small.assert_same_history(history, expected)
    any_pair.assert_equal()


def test_csv_logger_writes_the_same_rows(pair: Pair, tmp_path: Path) -> None:
    pair.both(lambda name: keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"))
    expected, actual = (list(csv.DictReader((tmp_path / f"{name}.csv").open())) for name in ("keras", "tfpar"))
    assert len(actual) == 4, f"one row an epoch, got {len(actual)}"
    assert actual[0].keys() == expected[0].keys()
    for row, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            [float(value) for value in row.values()], [float(value) for value in wanted.values()], rtol=1e-5
        )


@pytest.mark.few(1)
def test_model_checkpoint_saves_after_the_same_epochs_and_batches(any_pair: Pair, tmp_path: Path) -> None:
    any_pair.both(
        lambda name: [
            keras.callbacks.ModelCheckpoint(str(tmp_path / name / "epoch-{epoch}.weights.h5"), save_weights_only=True),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / name / "batch-{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=3
            ),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / name / "best-{epoch}.keras"), monitor="val_loss", save_best_only=True
            ),
        ],
        epochs=3,
    )
    expected, actual = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("keras", "tfpar"))
    assert len([name for name in expected if name.startswith("batch")]) == 10
    assert actual == expected
    for name in actual:
        if name.endswith(".weights.h5"):
            weights = []
            for side in ("keras", "tfpar"):
                any_pair.keras.load_weights(tmp_path / side / name)
                weights.append(any_pair.keras.get_weights())
            small.assert_same_state(weights[1], weights[0], 1e-5)
    best = next(name for name in reversed(actual) if name.startswith("best"))
    models = [keras.models.load_model(tmp_path / side / best) for side in ("tfpar", "keras")]
    small.assert_same_state(*map(small.state, models), 1e-5)


def test_tensorboard_writes_the_metrics_of_every_epoch(pair: Pair, tmp_path: Path) -> None:
    (_, expected), _ = pair.both(
        lambda name: keras.callbacks.TensorBoard(str(tmp_path / name), histogram_freq=1, write_graph=False), epochs=2
    )
    for run, prefix in (("train", ""), ("validation", "val_")):
        written = _scalars(tmp_path / "tfpar" / run)
        for name in ("loss", "accuracy"):
            values = written[f"epoch_{name}"]
            np.testing.assert_allclose(values, expected[prefix + name], rtol=1e-5, err_msg=f"{run} {name}")


def _scalars(directory: Path) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for path in sorted(directory.glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                if array.ndim == 0 and array.dtype.kind == "f":
                    values.setdefault(value.tag, []).append(float(array))
    return values


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights_gives_the_same_logs_and_weights(any_pair: Pair, swap_on_epoch: bool) -> None:
    (_, expected), (_, history) = any_pair.both(lambda name: keras.callbacks.SwapEMAWeights(swap_on_epoch), epochs=2)
    small.assert_same_history(history, expected)
    any_pair.assert_equal()


@pytest.mark.few(1)
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_backup_and_restore_resumes_at_the_same_epoch(any_pair: Pair, tmp_path: Path, save_freq: Any) -> None:
    epochs: list[list[int]] = []
    for fit, name in ((any_pair.keras.fit, "keras"), (any_pair.trainer.fit, "tfpar")):
        seen: list[int] = []

        def fail_in_third_epoch(epoch: int, logs: Any, seen: list[int] = seen) -> None:
            seen.append(epoch)
            if len(seen) == 3:
                raise InterruptedError

        for attempt in range(2):
            backup = keras.callbacks.BackupAndRestore(tmp_path / name, save_freq=save_freq)
            crash = keras.callbacks.LambdaCallback(on_epoch_begin=fail_in_third_epoch)
            if attempt == 0:
                with pytest.raises(InterruptedError):
                    fit(small.data(), epochs=4, verbose=0, callbacks=[backup, crash])
            else:
                fit(small.data(), epochs=4, verbose=0, callbacks=[backup, crash])
        epochs.append(seen)
    assert epochs[0][3] > 0, "Keras itself does not start over"
    assert epochs[1] == epochs[0], f"tfpar trained the epochs {epochs[1]}"
    any_pair.assert_equal()


# --- which callbacks ask for single batches ---------------------------------------------------------------------------


class _EpochsOnly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


class _Batches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class _OldBatches(keras.callbacks.Callback):
    def on_batch_end(self, batch: int, logs: Any = None) -> None: ...


class _InAModuleOfKeras(keras.callbacks.Callback):
    __module__ = "keras.src.trainers.trainer_test"

    def on_batch_end(self, batch: int, logs: Any = None) -> None: ...


class _BearsMany(_Batches):
    single_batches = False


class _BoardWithBatches(keras.callbacks.TensorBoard):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


WANTS_SINGLE = {
    "EarlyStopping": (lambda: keras.callbacks.EarlyStopping(), False),
    "ModelCheckpoint, epochs": (lambda: keras.callbacks.ModelCheckpoint("m.keras"), False),
    "ModelCheckpoint, batches": (lambda: keras.callbacks.ModelCheckpoint("m.keras", save_freq=5), True),
    "BackupAndRestore, epochs": (lambda: keras.callbacks.BackupAndRestore("backup"), False),
    "BackupAndRestore, batches": (lambda: keras.callbacks.BackupAndRestore("backup", save_freq=5), True),
    "TensorBoard": (lambda: keras.callbacks.TensorBoard("logs"), False),
    "TensorBoard, batches": (lambda: keras.callbacks.TensorBoard("logs", update_freq=5), True),
    "TensorBoard, profile": (lambda: keras.callbacks.TensorBoard("logs", profile_batch=3), True),
    "TensorBoard with a hook of its own": (lambda: _BoardWithBatches("logs"), True),
    "LambdaCallback, epochs": (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), False),
    "LambdaCallback, batches": (lambda: keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
    "own, epochs": (lambda: _EpochsOnly(), False),
    "own, batches": (lambda: _Batches(), True),
    "own, by the old name": (lambda: _OldBatches(), True),
    "own, in a module below keras": (lambda: _InAModuleOfKeras(), True),
    "own, bears many": (lambda: _BearsMany(), False),
    "Throughput": (lambda: tfpar.Throughput(), False),
    "ReplicaCheck": (lambda: tfpar.ReplicaCheck(every_steps=5), False),
    "LearningRateWarmup": (lambda: tfpar.LearningRateWarmup(5, 8), True),
}


@pytest.mark.parametrize("name", WANTS_SINGLE)
def test_a_callback_is_given_single_batches_only_if_it_looks_at_them(name: str) -> None:
    make, expected = WANTS_SINGLE[name]
    assert wants_single_batches(make()) is expected


class CountCalls(keras.callbacks.Callback):
    """Counts calls of the inner loop without asking for any number of steps."""

    single_batches = False

    def __init__(self) -> None:
        super().__init__()
        self.steps_per_call: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps_per_call.append(batch + 1 - self._begin)


def test_only_a_callback_that_looks_at_batches_makes_calls_of_single_steps(pair: Pair) -> None:
    counts = {}
    for name, callback in (("epochs", _EpochsOnly()), ("batches", _Batches())):
        counter = CountCalls()
        pair.trainer.fit(small.data(), epochs=3, verbose=0, callbacks=[counter, callback])
        counts[name] = counter.steps_per_call
        assert sum(counter.steps_per_call) == 3 * small.STEPS_PER_EPOCH
    assert set(counts["batches"]) == {1}
    assert counts["epochs"][0] == 1, "the first call compiles, with one step"
    assert max(counts["epochs"]) == small.STEPS_PER_EPOCH, f"the calls grow to an epoch, had {counts['epochs']}"


# --- our own callbacks ------------------------------------------------------------------------------------------------


def test_throughput_adds_its_figures_to_the_logs_of_every_epoch(pair: Pair) -> None:
    throughput = tfpar.Throughput()
    history = pair.trainer.fit(small.data(), epochs=3, verbose=0, callbacks=[throughput]).history
    for name in ("examples_per_second", "step_milliseconds", "data_wait_share"):
        assert len(history[name]) == 3, f"{name} misses an epoch: {history}"
        assert throughput.summary[name] >= 0
    assert history["step_milliseconds"][-1] > 0
    assert history["data_wait_share"][-1] <= 1
    # In a full epoch 73 examples go in 10 steps.
    examples_per_step = history["examples_per_second"][-1] * history["step_milliseconds"][-1] / 1e3
    np.testing.assert_allclose(examples_per_step, 7.3, rtol=0.01)


def rates(trainer: tfpar.Trainer, callbacks: list[Any], **arguments: Any) -> list[float]:
    """The learning rate of every step."""
    seen: list[float] = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(self.model.optimizer.learning_rate.numpy()))

    trainer.fit(small.data(), verbose=0, callbacks=[*callbacks, Reads()], **arguments)
    return seen


def test_warmup_rises_to_the_scaled_rate_and_stays(pair: Pair) -> None:
    seen = rates(pair.trainer, [tfpar.LearningRateWarmup(4, global_batch_size=8, base_batch_size=4)], epochs=2)
    np.testing.assert_allclose(seen, [0.05, 0.1, 0.15] + [0.2] * 17, rtol=1e-6)


def test_warmup_leaves_the_rate_to_others_afterwards(pair: Pair) -> None:
    others = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.03 if epoch else rate)
    seen = rates(pair.trainer, [tfpar.LearningRateWarmup(4, 8), others], epochs=2)
    np.testing.assert_allclose(seen, [0.025, 0.05, 0.075] + [0.1] * 7 + [0.03] * 10, rtol=1e-6)


@pytest.mark.parametrize("arguments", [(-1, 8), (1, 0), (1, 8, 0)])
def test_warmup_refuses_numbers_out_of_range(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="warmup_steps must be at least 0 and batch sizes at least 1, received"):
        tfpar.LearningRateWarmup(*arguments)


class WithoutConfig(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


@pytest.mark.parametrize("schedule", [keras.optimizers.schedules.CosineDecay(0.1, 10), WithoutConfig()])
def test_warmup_refuses_a_schedule(schedule: Any) -> None:
    trainer = tfpar.Trainer(small.parity_cases.classifier(lambda: keras.optimizers.SGD(schedule)))
    with pytest.raises(ValueError, match="this optimizer's rate is a schedule"):
        trainer.fit(small.data(), verbose=0, callbacks=[tfpar.LearningRateWarmup(5, 8)])


def test_replica_check_passes_equal_replicas(pair: Pair) -> None:
    pair.trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[tfpar.ReplicaCheck(), tfpar.ReplicaCheck(5)])


def _part_the_replicas(model: keras.Model) -> None:
    copies = model.distribute_strategy.experimental_local_results(model.weights[1].value)
    copies[1].assign_add(tf.fill(copies[1].shape, 0.25))


@pytest.mark.few(1)
@pytest.mark.parametrize(("every_steps", "expected_step"), [(None, 10), (3, 3)])
def test_replica_check_names_the_weight_that_differs(
    logical_cpus: list[str], every_steps: int | None, expected_step: int
) -> None:
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES["mirrored"]())
    part = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: _part_the_replicas(trainer.model) if batch == 0 else None
    )
    message = r"All replicas must hold equal weights, and '.*dense.*/bias' differs by 0\.25 between replicas 0 and 1"
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(small.data(), verbose=0, callbacks=[part, tfpar.ReplicaCheck(every_steps)])
    assert int(trainer.model.optimizer.iterations.numpy()) == expected_step


def test_replica_check_refuses_a_frequency_below_one() -> None:
    with pytest.raises(ValueError, match="every_steps must be at least 1, received 0"):
        tfpar.ReplicaCheck(0)


def test_metrics_file_holds_a_line_an_epoch(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = pair.trainer.fit(
        small.data(), epochs=2, verbose=0, validation_data=small.data(), callbacks=[tfpar.MetricsFile(path)]
    ).history
    lines = read_metrics(path)
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 10), (2, 20)]
    for name, values in history.items():
        assert [line[name] for line in lines] == values, f"{name} differs"


def test_metrics_file_drops_the_lines_that_a_resumed_training_repeats(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"epoch": epoch, "step": 10 * epoch, "loss": 9.0} for epoch in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 4, "st')  # the last is cut
    pair.trainer.fit(small.data(), epochs=2, initial_epoch=1, verbose=0, callbacks=[tfpar.MetricsFile(path)])
    kept = read_metrics(path)
    assert [line["epoch"] for line in kept] == [1, 2]
    assert kept[0] == lines[0]
    assert kept[1]["loss"] != 9.0
    assert path.read_text().count("\n") == 2, "no cut line is left"
