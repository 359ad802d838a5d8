"""Fused kernels: which operations a step has, and that it computes what Keras' own operations do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpar
from tests.support import parity_cases, small
from tfpar import config, kernels
from tfpar.trainers.regression import Regression

pytestmark = pytest.mark.usefixtures("logical_cpus")

optimizers = keras.optimizers


TWO = ["CPU:0", "CPU:1"]


class Doubling(optimizers.SGD):
    """A user's own update, on top of that of Keras."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(2.0 * gradient, variable, learning_rate)


UPDATES: dict[str, tuple[str | None, Callable[[], keras.Optimizer]]] = {
    "SGD": ("ResourceApplyGradientDescent", lambda: optimizers.SGD(0.1)),
    "momentum": ("ResourceApplyKerasMomentum", lambda: optimizers.SGD(0.1, momentum=0.9)),
    "Nesterov": ("ResourceApplyKerasMomentum", lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
    "Adam": ("ResourceApplyAdam", lambda: optimizers.Adam(0.01)),
    "Adam, beta_2 exact": ("ResourceApplyAdam", lambda: optimizers.Adam(0.01, beta_2=0.99, epsilon=1e-3)),
    "AMSGrad": ("ResourceApplyAdamWithAmsgrad", lambda: optimizers.Adam(0.01, amsgrad=True)),
    "AdamW": ("ResourceApplyAdam", lambda: optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)),
    "RMSprop, momentum": ("ResourceApplyRMSProp", lambda: optimizers.RMSprop(0.01, momentum=0.9)),
    "centered": ("ResourceApplyCenteredRMSProp", lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True)),
    "RMSprop": ("ResourceApplyRMSProp", lambda: optimizers.RMSprop(0.01)),
    "centered, no momentum": ("ResourceApplyCenteredRMSProp", lambda: optimizers.RMSprop(0.01, centered=True)),
    "Adagrad": ("ResourceApplyAdagrad", lambda: optimizers.Adagrad(0.1)),
    "Adadelta": ("ResourceApplyAdadelta", lambda: optimizers.Adadelta(1.0)),
    "Ftrl": (
        "ResourceApplyFtrlV2",
        lambda: optimizers.Ftrl(
            0.1,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            l2_shrinkage_regularization_strength=0.03,
            beta=0.1,
        ),
    ),
    "Adamax": ("ResourceApplyAdaMax", lambda: optimizers.Adamax(0.01)),
    "averages": ("ResourceApplyAdam", lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)),
    "accumulation": ("ResourceApplyAdam", lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "scaled": ("ResourceApplyAdam", lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 8.0)),
    "Adagrad from near 0": (None, lambda: optimizers.Adagrad(0.1, initial_accumulator_value=1e-3)),
    "beta_2 not exact": (None, lambda: optimizers.Adam(0.01, beta_2=0.9999)),
    "other power": (None, lambda: optimizers.Ftrl(0.1, learning_rate_power=-0.3)),
    "a user's class": (None, lambda: Doubling(0.1)),
}
IN_FLOAT64 = {"Adagrad": None, "beta_2 not exact": "ResourceApplyAdam"}
BY_ROWS: dict[str, str | None] = {
    "momentum": "ResourceApplyKerasMomentum",
    "Nesterov": "ResourceApplyKerasMomentum",
    "Adam": "ResourceApplyAdam",
    "Adam, beta_2 exact": "ResourceApplyAdam",
    "AMSGrad": "ResourceApplyAdamWithAmsgrad",
    "AdamW": "ResourceApplyAdam",
    "averages": "ResourceApplyAdam",
    "scaled": "ResourceApplyAdam",
    "RMSprop": "ResourceGather",
    "Adagrad": "ResourceGather",
    "SGD": None,
    "RMSprop, momentum": None,
    "Adadelta": None,
    "Adagrad from near 0": None,
    "beta_2 not exact": None,
}


def updated(
    make_optimizer: Callable[[], keras.Optimizer], gradients: Any, fused: bool, dtype: str = "float32"
) -> tuple[set[str], list[np.ndarray]]:
    """Return the kinds of operations of updates with some gradients, and the weight and state after them."""
    with tf.device("CPU:0"):
        weight = keras.Variable(np.linspace(-1.0, 1.0, 21).reshape(3, 7), dtype=dtype)
    optimizer = make_optimizer()
    optimizer.build([weight])

    @tf.function(autograph=False)
    def update(gradient: Any) -> None:
        optimizer.apply([gradient], [weight])

    first, *others = map(tf.convert_to_tensor, gradients) if isinstance(gradients, np.ndarray) else gradients
    with kernels.fused() if fused else contextlib.nullcontext():
        update(first)
    for gradient in others:
        update(gradient)
    graph = update.get_concrete_function(first).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.op for node in nodes if "Apply" in node.op or node.op == "ResourceGather"}, [
        variable.numpy().astype("float64") for variable in (weight, *optimizer.variables)
    ]


def gradients(dtype: str = "float32", steps: int = 20) -> np.ndarray:
    return np.random.default_rng(0).normal(0.3, 1.0, size=(steps, 3, 7)).astype(dtype)


@pytest.mark.crossed
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-9)])
def test_an_update_is_one_operation_with_the_values_of_keras(name: str, dtype: str, tolerance: float) -> None:
    operation, make_optimizer = UPDATES[name]
    operations, state = updated(make_optimizer, gradients(dtype), fused=True, dtype=dtype)
    if dtype == "float64":
        operation = IN_FLOAT64.get(name, operation)
    assert operations == ({operation} if operation else set())
    _, expected = updated(make_optimizer, gradients(dtype), fused=False, dtype=dtype)
    for found, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * max(np.abs(wanted).max(), 1e-30))


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_of_a_sparse_gradient_update_what_they_do_in_keras(name: str) -> None:
    rows = gradients()
    numbers = np.random.default_rng(1).integers(0, 3, size=rows.shape[:2])  # some twice, some not at all
    numbers[5], rows[6, 0] = 1, 0.0
    shape = np.array([3, 7])
    sparse = [tf.IndexedSlices(*map(tf.constant, (*one, shape))) for one in zip(rows, numbers, strict=True)]
    operations, state = updated(UPDATES[name][1], sparse, fused=True)
    assert operations == ({BY_ROWS[name]} if BY_ROWS[name] else set())
    _, expected = updated(UPDATES[name][1], sparse, fused=False)
    for found, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(np.abs(wanted).max(), 1e-30))


def test_a_weight_without_a_gradient_stays_as_it_is() -> None:
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    optimizer = optimizers.RMSprop(0.1)
    optimizer.build(weights)
    with kernels.fused(), pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.constant([1.0, 1.0]), None], weights)
    assert [weights[1].numpy().tolist(), optimizer._velocities[1].numpy().tolist()] == [[3.0], [0.0]]
    assert (weights[0].numpy() < [1.0, 2.0]).all()


@pytest.mark.parametrize(
    ("dtype", "of_gradients", "operations"),
    [
        ("bfloat16", "float32", set()),
        ("float16", "float16", set()),
        ("float32", "float64", {"ResourceApplyAdam"}),
        ("float32", "float16", {"ResourceApplyAdam"}),
    ],
)
def test_gradients_of_another_type_and_half_weights(dtype: str, of_gradients: str, operations: set[str]) -> None:
    found, state = updated(optimizers.Adam, gradients(of_gradients), fused=True, dtype=dtype)
    assert found == operations
    _, expected = updated(optimizers.Adam, gradients(of_gradients), fused=False, dtype=dtype)
    for mine, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scaled_update_that_is_not_finite_changes_nothing(value: float) -> None:
    given = gradients(steps=2)
    given[1, 0, 0] = value
    _, state = updated(UPDATES["scaled"][1], given, fused=True)
    _, expected = updated(UPDATES["scaled"][1], given, fused=False)
    np.testing.assert_array_equal(state[0], updated(UPDATES["scaled"][1], given[:1], fused=True)[1][0])
    for mine, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-8)


def test_a_slot_that_the_user_replaced_has_keras_own_update() -> None:
    def make_optimizer() -> keras.Optimizer:
        optimizer = optimizers.SGD(0.1, momentum=0.9)
        build = optimizer.build

        def build_and_replace(weights: Any) -> None:
            build(weights)
            optimizer.momentums[0] = keras.Variable(np.ones((3, 7)), dtype="float64")

        optimizer.build = build_and_replace
        return optimizer

    operations, state = updated(make_optimizer, gradients(), fused=True)
    assert not operations
    np.testing.assert_array_equal(state[0], updated(make_optimizer, gradients(), fused=False)[1][0])


class OwnNormalization(keras.layers.BatchNormalization):
    """A class of a user's own, with Keras' method."""


NORMALIZATIONS: dict[str, tuple[bool, dict[str, Any], tuple[int, ...]]] = {  # is it fused, its settings, the inputs
    "plain": (True, {}, (6, 4, 5, 3)),
    "one position": (True, {}, (1, 1, 1, 3)),
    "two rows": (True, {"momentum": 0.5}, (2, 1, 1, 3)),
    "features": (True, {}, (7, 3)),
    "one row": (True, {}, (1, 3)),
    "sequences": (True, {}, (6, 4, 3)),
    "volumes": (True, {"dtype": "mixed_bfloat16"}, (2, 3, 4, 5, 3)),
    "no scale": (True, {"scale": False, "epsilon": 1e-2}, (6, 4, 5, 3)),
    "no center": (True, {"center": False}, (6, 4, 5, 3)),
    "frozen": (True, {"trainable": False}, (6, 4, 5, 3)),
    "mixed_bfloat16": (True, {"dtype": "mixed_bfloat16"}, (6, 4, 5, 3)),
    "mixed_float16": (True, {"dtype": "mixed_float16"}, (6, 4, 5, 3)),
    "float64": (False, {"dtype": "float64"}, (6, 4, 5, 3)),
    "small epsilon": (False, {"epsilon": 1e-6}, (6, 4, 5, 3)),
    "channels first": (False, {"axis": 1}, (6, 3, 4, 5)),
    "renormalized": (False, {"renorm": True}, (6, 4, 5, 3)),
    "synchronized": (True, {"synchronized": True}, (6, 4, 5, 3)),
    "a user's class": (False, {"make": OwnNormalization}, (6, 4, 5, 3)),
}


def normalized(
    settings: dict[str, Any], shape: tuple[int, ...], training: bool, fused: bool
) -> tuple[bool, list[np.ndarray]]:
    """Return whether a layer has the kernel, and what two calls of it give: outputs, gradients and its state."""
    settings = dict(settings)
    layer = settings.pop("make", keras.layers.BatchNormalization)(**settings)
    layer.build(shape)
    generator = np.random.default_rng(0)
    for number, weight in enumerate(layer.weights):
        weight.assign(generator.uniform(0.5, 1.5, size=weight.shape) + number)

    @tf.function(autograph=False)
    def call(inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=training)
            score = tf.reduce_sum(tf.cast(outputs, "float32") ** 3)
        return outputs, tape.gradient(score, [inputs, *(weight.value for weight in layer.trainable_weights)])

    batches = [tf.constant(generator.normal(1.0, 2.0, size=shape), layer.compute_dtype) for _ in range(2)]
    if fused:
        with kernels.fused():
            call.get_concrete_function(batches[0])
    found = [call(batch) for batch in batches]
    kinds = {op.type for op in call.get_concrete_function(batches[0]).graph.get_operations()}
    tensors = tf.nest.flatten([found, [weight.value for weight in layer.weights]])
    return "FusedBatchNormV3" in kinds, [tf.cast(tensor, "float64").numpy() for tensor in tensors]


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.extended)])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_batch_normalization_is_one_operation_with_the_values_of_keras(name: str, training: bool) -> None:
    is_fused, settings, shape = NORMALIZATIONS[name]
    has_kernel, found = normalized(settings, shape, training, fused=True)
    assert has_kernel == is_fused
    _, expected = normalized(settings, shape, training, fused=False)
    tolerance = {"mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}.get(settings.get("dtype"), 1e-5)
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=tolerance * max(np.abs(wanted).max(), 1.0))


def second_derivative(layer: keras.layers.Layer) -> tf.Tensor:
    inputs = tf.constant(np.random.default_rng(0).normal(size=(6, 2, 2, 3)), tf.float32)
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            score = tf.reduce_sum(layer(inputs, training=True) ** 3)
        penalty = tf.reduce_sum(inner.gradient(score, inputs) ** 2)
    return outer.gradient(penalty, inputs)


def test_batch_normalization_has_second_derivatives_or_says_that_it_has_none() -> None:
    layer = keras.layers.BatchNormalization()
    expected = second_derivative(layer)
    with kernels.fused():
        np.testing.assert_allclose(second_derivative(layer), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    replicas = tf.distribute.MirroredStrategy(TWO, tf.distribute.ReductionToOneDevice())
    with replicas.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 2, 2, 3))
    compute = tf.function(lambda: replicas.run(second_derivative, args=(layer,)), autograph=False)
    with kernels.fused(), pytest.raises(LookupError, match=r"no second derivatives.* pass fused=False"):
        compute()


def test_a_mask_has_keras_own_batch_normalization() -> None:
    layer = keras.layers.BatchNormalization()
    inputs = np.random.default_rng(0).normal(size=(3, 2, 2, 1)).astype("float32")
    mask = np.arange(12).reshape(3, 2, 2) % 3 > 0
    expected = layer(inputs, training=True, mask=mask)
    with kernels.fused():
        np.testing.assert_array_equal(layer(inputs, training=True, mask=mask), expected)


def operations_of_fit(
    build: Callable[[], keras.Model], strategy: tfpar.Strategy, data: Any = None, **settings: Any
) -> tuple[list[str], tfpar.Trainer]:
    """Return the kinds of the operations that ran in a training, and the trainer after it."""
    trainer = tfpar.Trainer(build, strategy, seed=0, **settings)
    return operations_of(lambda: trainer.fit(data or small.data(), epochs=1, verbose=0)), trainer


def operations_of(run: Callable[[], Any]) -> list[str]:
    context.context().enable_graph_collection()
    try:
        run()
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()
    found = [graph for graphs_of_one in graphs for graph in graphs_of_one.partition_graphs]
    nodes = [node for graph in found for node in graph.node]
    nodes += [node for graph in found for function in graph.library.function for node in function.node_def]
    return [node.op for node in nodes]


with_adam = parity_cases.classifier(lambda: optimizers.Adam(0.01))


STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice(),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "sharded state": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "sharded weights": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_updates_its_weights_with_one_operation(name: str) -> None:
    operations, _ = operations_of_fit(with_adam, STRATEGIES[name]())
    assert operations.count("ResourceApplyAdam") >= 4


def images(**settings: Any) -> keras.Model:
    layers, normalization = keras.layers, functools.partial(keras.layers.BatchNormalization, **settings)
    kinds = [layers.Conv2D(6, 3), normalization(), layers.Conv2D(4, 2), normalization(), layers.Flatten()]
    model = keras.Sequential([keras.Input((6, 6, 2)), *kinds, normalization(), layers.Dense(3)])
    model.compile(optimizers.SGD(0.02, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def of_images() -> tf.data.Dataset:
    generator = np.random.default_rng(1)
    arrays = generator.normal(size=(73, 6, 6, 2)).astype("float32"), generator.integers(0, 3, 73)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)  # ten batches, the last of 1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_normalizes_batches_with_one_operation(name: str) -> None:
    operations, trainer = operations_of_fit(images, STRATEGIES[name](), of_images())
    assert any("FusedBatchNormGrad" in operation for operation in operations)  # of oneDNN, it has another prefix
    of_keras, own = operations_of_fit(images, STRATEGIES[name](), of_images(), fused=False)
    assert not any("FusedBatchNorm" in operation for operation in of_keras)
    predictions = (one.predict(of_images(), verbose=0) for one in (trainer, own))
    small.assert_same_state(
        [*trainer.model.get_weights(), next(predictions)], [*own.model.get_weights(), next(predictions)], 1e-5
    )


@pytest.mark.parametrize(
    ("name", "synchronized"),
    [
        pytest.param("single device", False, marks=pytest.mark.extended),
        ("mirrored", True),
        pytest.param("sharded state", True, marks=pytest.mark.extended),
    ],
)
def test_batch_normalization_trains_as_under_keras_own_fit(name: str, synchronized: bool) -> None:
    build = functools.partial(images, synchronized=synchronized)
    small.assert_trains_as_one_device(build, of_images, STRATEGIES[name])


def test_replicas_normalize_with_fused_kernels_where_a_layer_is_synchronized() -> None:
    build = functools.partial(images, synchronized=True)
    operations, _ = operations_of_fit(build, STRATEGIES["mirrored"](), of_images())
    assert sum("FusedBatchNormGrad" in operation for operation in operations) >= 6, "three layers on two replicas"


@pytest.mark.parametrize("fused", [True, False])
def test_a_preview_measures_the_kernels_of_fit(fused: bool) -> None:
    trainer = tfpar.Trainer(images, STRATEGIES["pipeline"](), seed=0, fused=fused)
    operations = set(operations_of(lambda: trainer.preview(of_images())))
    assert ("ResourceApplyKerasMomentum" in operations) == fused
    assert any("FusedBatchNorm" in operation for operation in operations) == fused
    assert ("fused" in repr(trainer)) == (not fused)


def test_a_run_turns_fused_kernels_off() -> None:
    settings = ["model.name=linear", "data.source=generated", "data.num_examples=64"]
    fused = [
        Regression(config.load(None, [*settings, *more]), tfpar.SingleDevice()).fused
        for more in ([], ["training.fused=false"])
    ]
    assert fused == [True, False]


def test_a_step_has_keras_own_operations_where_the_user_or_xla_wants_them() -> None:
    for settings, compiled in (({"fused": False}, {}), ({}, {"jit_compile": True})):
        build = parity_cases.classifier(lambda: optimizers.Adam(0.01), **compiled)
        operations, _ = operations_of_fit(build, tfpar.SingleDevice(), **settings)
        assert "ResourceApplyAdam" not in operations
    with pytest.raises(TypeError, match="False for Keras' own operations alone, received 'no'"):
        tfpar.Trainer(with_adam, fused="no")  # type: ignore[arg-type]
