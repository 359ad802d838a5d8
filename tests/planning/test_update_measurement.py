"""The seconds of the optimizer's update, by itself or within a step."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import objective_cases
from tfpar.planning import steps_without_update, update_measurement
from tfpar.planning.costs import Curve
from tfpar.planning.given_data import Prepared, ReadOnce, prepared
from tfpar.planning.steps_without_update import DeviceWithoutUpdate, PipelineWithoutUpdate
from tfpar.planning.update_measurement import measure_update
from tfpar.strategies import Strategy

DEVICE = "CPU:0"


def build(accumulation: int | None = None) -> keras.Model:
    """Return a model whose update takes longer than the passes of a few examples."""
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(12))])
    model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=accumulation), "mse")
    return model


def trainers(build_model: Callable[[], keras.Model], dataset: tf.data.Dataset) -> ReadOnce:
    return ReadOnce(lambda strategy: (tfpar.Trainer(build_model, strategy), dataset))


@pytest.fixture
def make_trainer() -> ReadOnce:
    return trainers(build, tf.data.Dataset.from_tensors((tf.zeros([8, 64]), tf.zeros([8, 64]))).repeat())


@pytest.fixture
def on_one_device(make_trainer: ReadOnce, logical_cpus: list[str]) -> Prepared:
    return prepared(make_trainer, tfpar.SingleDevice(DEVICE))


def measured(make_trainer: ReadOnce, one: Prepared, step_seconds: float) -> float:
    return measure_update(make_trainer, one.trainer.model, one.loop, DEVICE, Curve((2, 8), (step_seconds, 2.0)))


def test_a_short_update_is_measured_by_itself(make_trainer: ReadOnce, on_one_device: Prepared) -> None:
    with mock.patch.object(update_measurement, "_apart_seconds", return_value=0.5):
        assert measured(make_trainer, on_one_device, 1.0) == 0.5


def test_a_long_update_is_what_a_step_takes_longer_than_one_without_it(
    make_trainer: ReadOnce, on_one_device: Prepared
) -> None:
    alternate_seconds = mock.Mock(return_value=[0.75, 0.5])
    with (
        mock.patch.object(update_measurement, "_apart_seconds", return_value=1.0),
        mock.patch.object(update_measurement, "alternate_seconds", alternate_seconds),
    ):
        assert measured(make_trainer, on_one_device, 0.75) == 0.25
    loop, without = alternate_seconds.call_args.args[0]
    assert loop is on_one_device.loop
    assert without is not loop


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize(
    "make_strategy",
    [lambda: DeviceWithoutUpdate(DEVICE), lambda: PipelineWithoutUpdate(1, 4, devices=[DEVICE])],
    ids=["device", "pipeline"],
)
def test_a_step_without_update_computes_the_gradients_and_keeps_the_weights(
    make_strategy: Callable[[], Strategy], accumulation: int | None, logical_cpus: list[str]
) -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([8, 64]), tf.zeros([8, 64]))).repeat()
    one = prepared(trainers(lambda: build(accumulation), dataset), make_strategy())
    before = one.trainer.model.get_weights()
    with mock.patch.object(steps_without_update.tf_graph, "computed", side_effect=lambda parts: parts) as computed:
        one.loop.run(3)
    (parts,) = computed.call_args.args
    assert len(parts) == len(one.trainer.model.trainable_variables)
    assert all(map(np.array_equal, before, one.trainer.model.get_weights()))


def test_the_update_of_several_objectives_is_most_of_a_short_step(logical_cpus: list[str]) -> None:
    case = next(iter(objective_cases.CASES.values()))
    make_trainer = trainers(case.build, case.data().repeat())
    one = prepared(make_trainer, tfpar.SingleDevice(DEVICE))
    with mock.patch.object(update_measurement, "_apart_seconds", return_value=1.0):
        assert measured(make_trainer, one, 0.5) == pytest.approx(0.7 * 0.5)
