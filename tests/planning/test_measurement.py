"""The costs of a small model, measured on two logical CPUs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.planning import given_data, measurement, stage_measurement, step_timing
from tfpar.planning.contention import may_share_model
from tfpar.planning.costs import Curve, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, candidates
from tfpar.planning.measurement import measure, measure_layout, sizes_of, with_split_factor
from tfpar.planning.step_prediction import predict
from tfpar.strategies import Strategy

DEVICES = ["CPU:0", "CPU:1"]


def build() -> keras.Model:
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(8)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def data(num_examples: int = 16) -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    arrays = generator.normal(size=(num_examples, 32)), generator.normal(size=(num_examples, 8))
    return tf.data.Dataset.from_tensor_slices(tuple(one.astype("float32") for one in arrays)).batch(16)


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Measure for a moment only: no test here depends on how exact the seconds are."""
    with mock.patch.object(step_timing, "SECONDS_OF_REPEAT", 0.002), mock.patch.object(step_timing, "ROUNDS", 1):
        yield


@pytest.fixture(scope="module")
def costs(logical_cpus: list[str]) -> tuple[ModelCosts, MachineCosts]:
    return measure(lambda strategy: (tfpar.Trainer(build, strategy), data()), DEVICES)


def test_the_bytes_are_those_of_weights_and_optimizer(costs: tuple[ModelCosts, MachineCosts]) -> None:
    model, _ = costs
    number = 32 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 8 + 8
    assert model.num_parameters == number
    assert model.weight_bytes == model.trainable_bytes == sum(model.variable_bytes) == 4 * number
    assert 8 * number <= model.slot_bytes < 8 * number + 64  # two moments, the step and the learning rate
    assert model.batch == 16


def test_every_size_and_every_block_is_measured(costs: tuple[ModelCosts, MachineCosts]) -> None:
    model, machine = costs
    assert model.compute.sizes == tuple(sizes_of(16, 2))
    assert model.staged is not None
    assert [block.weight_bytes for block in model.blocks] == [8448, 16640, 16640, 2080]
    assert all(block.is_divided for block in model.blocks[:2])
    assert model.split_factor is None
    assert set(machine.slowdown) == set(machine.slowdown_of_stages) == {1, 2}
    assert set(machine.reduce) == {2}
    assert machine.action_seconds > 0


@pytest.mark.parametrize("noisy", range(5), ids=["steps", "replica", "stages", "machine", "drift"])
def test_the_spread_is_the_largest_of_all_measurements(
    costs: tuple[ModelCosts, MachineCosts], logical_cpus: list[str], noisy: int
) -> None:
    spreads = [0.01] * 5
    spreads[noisy] = 0.4
    model, machine = dataclasses.replace(costs[0], spread=spreads[0]), costs[1]
    made = given_data.Prepared(mock.Mock(), mock.Mock(), None, given_data.GivenData(mock.Mock(), 0.0))
    with mock.patch.multiple(
        measurement,
        prepared=mock.Mock(return_value=made),
        _measure_model=mock.Mock(return_value=(model, model.compute)),
        _replica_seconds=mock.Mock(return_value=(0.0, spreads[1])),
        measure_stages=mock.Mock(return_value=stage_measurement.Stages(spread=spreads[2])),
        _measure_machine=mock.Mock(return_value=(machine, spreads[3])),
        measure_drift=mock.Mock(return_value=spreads[4]),
    ):
        assert measure(mock.Mock(), DEVICES)[0].spread == 0.4


def test_every_layout_has_a_predicted_step(costs: tuple[ModelCosts, MachineCosts]) -> None:
    model, machine = dataclasses.replace(costs[0], split_factor=1.0), costs[1]
    layouts = [one for one in candidates(2, 1, 16, len(model.blocks), divides_layers=True) if isinstance(one, Layout)]
    assert all(0 < predict(layout, model, machine).seconds < 10 for layout in layouts)


def compiled(layer: keras.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((32,)), layer, keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    return model


def measured(layer: keras.Layer) -> ModelCosts:
    return measure(lambda strategy: (tfpar.Trainer(lambda: compiled(layer), strategy), data()), DEVICES[:1])[0]


def words(loss: object) -> keras.Model:
    """Return a model whose last layer tensor parallelism divides, with its scores: `[batch, 4]` -> `[batch, 4, 50]`."""
    hidden = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(16)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(50, 16), *hidden, keras.layers.Dense(50)])
    model.compile("adam", loss)
    return model


@pytest.mark.parametrize(
    ("loss", "shape", "is_of_pieces"),
    [
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), (16, 4), True),
        (keras.losses.MeanSquaredError(), (16, 4, 50), False),
    ],
    ids=["cross-entropy reads pieces", "squared error gathers them"],
)
def test_the_loss_of_pieces_is_measured_where_a_loss_reads_them(
    logical_cpus: list[str], loss: keras.losses.Loss, shape: tuple[int, ...], is_of_pieces: bool
) -> None:
    dataset = tf.data.Dataset.from_tensors((np.zeros((16, 4), "int32"), np.zeros(shape, "int32")))
    model, machine = measure(
        lambda strategy: (tfpar.Trainer(lambda: words(loss), strategy), dataset), DEVICES[:1], num_planned=8
    )
    assert (model.loss_of_pieces_seconds is not None) == is_of_pieces
    assert machine.num_devices == 8
    assert not machine.slowdown_of_stages


@pytest.mark.extended
def test_layers_before_the_first_weights_are_no_stage_of_a_split_pass(logical_cpus: list[str]) -> None:
    def flat() -> keras.Model:
        hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((32,)), keras.layers.Rescaling(0.5), *hidden, keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        return model

    cuts: list[list[int]] = []
    original = stage_measurement.PipelineWithoutUpdate

    def pipeline(*args: Any, balance: list[int], **kwargs: Any) -> Any:
        cuts.append(balance)
        return original(*args, balance=balance, **kwargs)

    def make(strategy: Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(flat, strategy), data()

    with mock.patch.object(stage_measurement, "PipelineWithoutUpdate", pipeline):
        model = with_split_factor(make, DEVICES, measure(make, DEVICES)[0])
    assert cuts == [[4], [2, 2], [2, 2]]
    assert model.split_factor is not None
    assert model.split_factor >= 1


@pytest.mark.parametrize("error", [ValueError("no cut"), tf.errors.ResourceExhaustedError(None, None, "")])
def test_a_split_pass_that_cannot_be_measured_has_no_price(
    costs: tuple[ModelCosts, MachineCosts], error: Exception
) -> None:
    def make(strategy: Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(build, strategy), data()

    with mock.patch.object(stage_measurement, "prepared", side_effect=error):
        assert with_split_factor(make, DEVICES, costs[0]).split_factor is None


def test_no_split_pass_is_measured_with_one_device(logical_cpus: list[str]) -> None:
    def make(strategy: Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(build, strategy), data()

    model, _ = measure(make, DEVICES[:1])
    assert with_split_factor(make, DEVICES[:1], model).split_factor == 1


def test_a_model_that_mixes_examples_has_no_blocks_and_names_the_layer(logical_cpus: list[str]) -> None:
    model = measured(keras.layers.UnitNormalization(axis=0, name="mixer"))
    assert not model.blocks
    assert "'mixer'" in model.uncut
    assert model.mixing == ("mixer",)


def test_layers_with_the_statistics_of_a_share_are_named(logical_cpus: list[str]) -> None:
    model = measured(keras.layers.BatchNormalization(name="normal"))
    assert (model.normalizing, model.mixing) == (("normal",), ())


def test_the_random_state_of_the_process_does_not_change(logical_cpus: list[str]) -> None:
    def made(strategy: Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(build, strategy), data()

    keras.utils.set_random_seed(7)
    expected = keras.random.normal([3]).numpy(), np.random.rand(), float(tf.random.normal([]))
    keras.utils.set_random_seed(7)
    measure(made, DEVICES[:1])
    found = keras.random.normal([3]).numpy(), np.random.rand(), float(tf.random.normal([]))
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        Layout(2, shard="weights"),
        Layout(1, 2, 2, "zero_bubble", recompute=True),
        Layout(2, 2, 2),
        Layout(2, num_shards=2),
    ],
    ids=str,
)
def test_a_layout_is_measured_with_a_model_of_its_own(layout: Layout, logical_cpus: list[str]) -> None:
    made: list[int] = []

    def make(strategy: Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        made.append(len(strategy.device_names))
        return tfpar.Trainer(build, strategy), data()

    before = tf.random.get_global_generator().state.numpy().tolist()
    seconds, spread = measure_layout(make, layout, logical_cpus)
    assert 0 < seconds < 10
    assert spread >= 0
    assert made == [layout.num_devices]
    assert tf.random.get_global_generator().state.numpy().tolist() == before


def test_a_measured_layout_does_not_warn_of_what_the_user_has_not_chosen(logical_cpus: list[str]) -> None:
    def build_model() -> keras.Model:
        layers = [keras.layers.LSTM(8), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6, 3)), *layers])
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensors((np.ones((8, 6, 3), "float32"), np.ones((8, 4), "float32"))).repeat()

    def make(strategy: tfpar.Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(build_model, strategy), data

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        measure_layout(make, Layout(num_shards=2), logical_cpus[:2])
    assert not [one for one in noted if "stay whole" in str(one.message)]


@pytest.mark.parametrize(
    ("devices", "changes", "num_examples", "expected"),
    [
        (["CPU:0", "CPU:1"], {}, 64, True),
        (["GPU:0", "GPU:1"], {}, 64, False),
        (["CPU:0", "CPU:1"], {"weight_bytes": 10**9}, 64, False),
        (["CPU:0", "CPU:1"], {"update_seconds": 0.5}, 64, False),
        (["CPU:0", "CPU:1"], {"update_seconds": 0.5}, None, True),
    ],
    ids=["logical CPUs", "GPUs", "weights beyond caches", "a long update", "steps without update"],
)
def test_threads_with_one_model_stand_for_devices_where_they_take_as_long(
    devices: list[str], changes: dict[str, Any], num_examples: int | None, expected: bool
) -> None:
    model = ModelCosts("mlp", 100, 400, 400, 800, (400,), 64, Curve((64,), (0.8,)), 0.01)
    assert may_share_model(devices, dataclasses.replace(model, **changes), num_examples) == expected
