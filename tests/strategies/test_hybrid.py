"""Replicas of a pipeline: the grid, the owner of each weight, metrics, masks of Dropout, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support import parity_cases, small
from tests.support.pipeline_models import batched, inputs, tied_weights, tokens

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def hybrid(num_replicas: int = 2, num_stages: int = 2, num_microbatches: int = 2, **settings: Any) -> tfpar.Hybrid:
    pipeline = tfpar.Pipeline(num_stages, num_microbatches, balance="parameters", **settings)
    return tfpar.Hybrid(pipeline, num_replicas)


def wide() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((parity_cases.NUM_FEATURES,)), *(layers.Dense(24, "tanh") for _ in range(3)), layers.Dense(3)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def test_it_is_described_in_one_line() -> None:
    grid = "(CPU:0 CPU:1), (CPU:2 CPU:3)"
    assert hybrid().describe() == f"Hybrid of 2 replicas of 2 stages on {grid}, 2 micro-batches, 1f1b"
    in_turn = hybrid(num_replicas=4, num_stages=1).describe()
    assert in_turn == "Hybrid of 4 replicas of 1 stage on CPU:0, CPU:1, CPU:2, CPU:3, 2 micro-batches, 1f1b"


def test_the_word_for_what_one_process_does_anyway_is_taken_and_described() -> None:
    pipeline = tfpar.Pipeline(1, 2, devices=["CPU:0"])
    described = "Hybrid of 1 replica of 1 stage on CPU:0, 2 micro-batches, 1f1b, optimizer state sharded"
    assert tfpar.Hybrid(pipeline, shard="optimizer").describe() == described
    with pytest.raises(ValueError, match="shard must be 'optimizer' or None, received 'gradients'"):
        tfpar.Hybrid(pipeline, shard="gradients")  # type: ignore[arg-type]


def test_the_devices_of_all_replicas_can_be_named() -> None:
    strategy = tfpar.Hybrid(tfpar.Pipeline(2, 2), 2, devices=["CPU:3", "CPU:2", "CPU:1", "CPU:0"])
    assert strategy.devices == ["CPU:3", "CPU:2", "CPU:1", "CPU:0"]


@pytest.mark.parametrize(
    ("num_replicas", "arguments", "devices", "part"),
    [
        (
            4,
            (2, 2),
            None,
            "8 in all, received 4: ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']. Grids that fit are 4 x 1, 2 x 2",
        ),
        (3, (2, 2), None, "3 replicas x 2 devices of the pipeline, 6 in all, received 4"),
        (2, (2, 2), ["CPU:0", "CPU:1"], "4 in all, received 2: ['CPU:0', 'CPU:1']"),
        (1, (2, 2), ["CPU:0", "CPU:1", "CPU:2"], "2 in all, received 3"),
        (0, (2, 2), None, "num_replicas must be a whole number of at least 1, received 0"),
        (True, (2, 2), None, "num_replicas must be a whole number of at least 1, received True"),
        (2, (2, 2, "1f1b", "time", ["CPU:0", "CPU:1"]), None, "Leave them out there, and give devices to Hybrid"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(
    num_replicas: int, arguments: tuple[Any, ...], devices: list[str] | None, part: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        tfpar.Hybrid(tfpar.Pipeline(*arguments), num_replicas, devices)


def test_another_strategy_has_no_replicas() -> None:
    with pytest.raises(
        TypeError, match=r"pipeline must be a tfpar.Pipeline or tfpar.TensorParallel, received .*Mirrored"
    ):
        tfpar.Hybrid(tfpar.Mirrored(["CPU:0"]), 2)  # type: ignore[arg-type]


def test_each_weight_and_its_optimizer_state_are_on_one_device_of_its_stage() -> None:
    trainer = tfpar.Trainer(wide, hybrid(), seed=0)
    trainer.fit(small.data(), verbose=0)
    optimizer = trainer.model.optimizer
    num_bytes = dict.fromkeys(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), 0)
    for variable, first, second in zip(
        trainer.model.trainable_variables, optimizer._momentums, optimizer._velocities, strict=True
    ):
        home = variable.value.device[-5:]
        assert {first.value.device[-5:], second.value.device[-5:]} == {home}
        num_bytes[home] += variable.numpy().nbytes
    largest = max(variable.numpy().nbytes for variable in trainer.model.trainable_variables)
    for stage in range(2):
        of_replicas = num_bytes[f"CPU:{stage}"], num_bytes[f"CPU:{2 + stage}"]
        assert min(of_replicas) > 0, num_bytes
        assert max(of_replicas) - min(of_replicas) <= largest, num_bytes


def test_every_device_runs_its_actions() -> None:
    strategy = hybrid(num_microbatches=3)
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    timeline = strategy.trace(trainer.model, trainer.build(small.data()))
    ran = [[str(span.action) for span in timeline.spans if span.device == device] for device in range(4)]
    assert ran == [[str(action) for action in order] for order in strategy.schedule.actions]


def test_a_preview_has_the_devices_of_all_replicas_and_a_picture(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(wide, hybrid(), seed=0)
    preview = trainer.preview(small.data())
    assert "1f1b: 2 replicas of 2 stages on 4 devices, 4 micro-batches" in str(preview)
    assert [row.device for row in preview.rows] == ["CPU:0 CPU:2", "CPU:1 CPU:3"]
    assert preview.planned is not None
    assert len(preview.planned.peak_bytes) == 4
    assert preview.durations is not None
    assert all(seconds > 0 for seconds in preview.durations.reduction_seconds)
    preview.save(tmp_path / "grid.png")


def test_weights_of_several_stages_equal_one_device() -> None:
    small.assert_trains_as_one_device(tied_weights, lambda: batched(tokens(6), tokens(6)), hybrid)


@pytest.mark.few(3)
@pytest.mark.parametrize("num_examples", [1, 2, 3, 5])
def test_fewer_examples_than_micro_batches_equal_one_device(num_examples: int) -> None:
    data = lambda: parity_cases.batches(num_examples, num_examples)  # noqa: E731
    small.assert_trains_as_one_device(small.build_model, data, hybrid)


def test_predictions_come_in_the_order_of_the_examples() -> None:
    trainer = tfpar.Trainer(wide, hybrid(num_microbatches=3), seed=0)
    examples = inputs(23)[:, : parity_cases.NUM_FEATURES]
    trainer.fit(examples, parity_cases.labels(23), batch_size=10, verbose=0)
    expected = trainer.model.predict(examples, verbose=0)
    np.testing.assert_allclose(trainer.predict(examples, batch_size=10, verbose=0), expected, rtol=1e-5, atol=1e-6)


def test_replicas_draw_different_masks() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=1), layers.Identity()])
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build, hybrid(num_stages=1, num_microbatches=1), seed=0)
    targets = np.repeat([[0.0], [2.0]], 64, 1).astype("float32")
    # The mean of 4 m and 4 (1 - n) for masks m and n: 2 if both replicas have the same.
    losses = trainer.fit(np.ones_like(targets), targets, batch_size=2, epochs=4, shuffle=False, verbose=0)
    assert all(loss != 2.0 for loss in losses.history["loss"])
    assert trainer.model.layers[0].seed_generator.state.numpy()[1] == 4


class NotAdded(keras.metrics.Metric):
    """Notes that there were examples, the same on each replica."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.seen = self.add_variable((), "zeros", aggregation="none", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(1.0)

    def result(self) -> Any:
        return self.seen.value


class OwnVariable(NotAdded):
    """Keeps it in a variable that is not Keras'."""

    def __init__(self) -> None:
        super().__init__()
        self._variables.clear()
        self.own = tf.Variable(0.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.own.assign(tf.reduce_max(tf.cast(y_true, "float32")))


@pytest.mark.parametrize(
    ("metric", "part"),
    [
        (NotAdded, "'seen/seen' has aggregation='none'. Create it with aggregation='sum'"),
        (
            OwnVariable,
            "a metric of 'sequential' assigns one that is no keras.Variable. Use add_variable, or train with",
        ),
    ],
)
def test_a_metric_that_replicas_cannot_add_is_refused(metric: type[keras.Metric], part: str) -> None:
    def build() -> keras.Model:
        model = wide()
        model.name = "sequential"
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[metric()])
        return model

    trainer = tfpar.Trainer(build, hybrid(), seed=0)
    with pytest.raises(ValueError, match=re.escape(part)):
        trainer.fit(small.data(), verbose=0)


def test_a_model_of_fewer_layers_has_fewer_stages_on_every_replica() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with pytest.warns(UserWarning, match=r"has 1 layer call for 2 stages: it runs in 1"):
        small.assert_trains_as_one_device(build, small.data, hybrid)


class InterruptAt(keras.callbacks.Callback):
    """Interrupts a trainer after a batch."""

    def __init__(self, trainer: tfpar.Trainer, batch: int) -> None:
        super().__init__()
        self._trainer, self._batch, self._seen = trainer, batch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen += 1
        if self._seen == self._batch:
            self._trainer.interrupt()


def test_a_checkpoint_resumes_on_replicas_and_back(tmp_path: Path) -> None:
    def fit(strategy: tfpar.Strategy, interrupt_at: int | None, folder: Path) -> list[np.ndarray]:
        trainer = tfpar.Trainer(wide, strategy, seed=0)
        callbacks = [] if interrupt_at is None else [InterruptAt(trainer, interrupt_at)]
        checkpoints = tfpar.Checkpoints(folder, every_seconds=0)
        trainer.fit(small.shuffled(), epochs=3, verbose=0, checkpoints=checkpoints, callbacks=callbacks)
        return small.state(trainer.model)

    expected = fit(tfpar.SingleDevice(), None, tmp_path / "whole")
    fit(tfpar.Pipeline(2, 3, balance="parameters"), 4, tmp_path / "parts")
    fit(hybrid(), 13, tmp_path / "parts")
    small.assert_same_state(fit(tfpar.SingleDevice(), None, tmp_path / "parts"), expected, 1e-5)
