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
from tests.support.pipeline_models import batched, tied_weights, tokens

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
    described = "Hybrid of 1 stage on CPU:0, 2 micro-batches, 1f1b, optimizer state sharded"
    assert tfpar.Hybrid(pipeline, shard="optimizer").describe() == described


def test_the_devices_of_all_replicas_can_be_named() -> None:
    strategy = tfpar.Hybrid(tfpar.Pipeline(2, 2), 2, devices=["CPU:3", "CPU:2", "CPU:1", "CPU:0"])
    assert strategy.devices == ["CPU:3", "CPU:2", "CPU:1", "CPU:0"]


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


@pytest.mark.extended
def test_weights_of_several_stages_equal_one_device() -> None:
    small.assert_trains_as_one_device(tied_weights, lambda: batched(tokens(6), tokens(6)), hybrid)


@pytest.mark.extended
@pytest.mark.parametrize("num_examples", [1, 2, 3, 5])
def test_fewer_examples_than_micro_batches_equal_one_device(num_examples: int) -> None:
    data = lambda: parity_cases.batches(num_examples, num_examples)  # noqa: E731
    small.assert_trains_as_one_device(small.build_model, data, hybrid)


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
            "a metric of 'sequential' assigns one that is not a keras.Variable. Use add_variable, or train with",
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
