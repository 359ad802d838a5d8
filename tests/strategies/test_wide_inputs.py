"""First layers over many features: each device receives its columns, and the weights are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

FEATURES, OTHERS = 67, 3
DENSE = np.where(np.random.default_rng(0).uniform(size=(13, FEATURES)) < 0.1, 1.5, 0)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def wide(sparse: bool = False, others: bool = False) -> keras.Model:
    features = keras.Input((FEATURES,), sparse=sparse, name="features")
    hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2", name="first")(features)
    inputs: Any = features
    if others:
        inputs = {"features": features, "others": keras.Input((OTHERS,), name="others")}
        hidden = keras.layers.Concatenate()([hidden, inputs["others"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    optimizer = keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, clipnorm=0.05, use_ema=True, ema_momentum=0.9
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def batches(sparse: bool = False, others: bool = False) -> tf.data.Dataset:
    features: Any = tf.sparse.from_dense(DENSE) if sparse else DENSE
    inputs = {"features": features, "others": DENSE[:, :OTHERS]} if others else features
    return tf.data.Dataset.from_tensor_slices((inputs, DENSE.sum(1, keepdims=True))).batch(5)


def trained(build: Callable[[], keras.Model], dataset: tf.data.Dataset, strategy: tfpar.Strategy) -> Any:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    history = trainer.fit(dataset, epochs=2, verbose=0).history
    logs = trainer.evaluate(dataset, verbose=0, return_dict=True)
    outputs = trainer.predict(dataset, verbose=0)
    return trainer, history, logs, outputs, [weight.numpy() for weight in trainer.model.weights]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [{}, {"sparse": True}, {"others": True}], ids=["dense", "sparse", "two inputs"])
def test_equals_one_device(kind: dict[str, bool]) -> None:
    expected = trained(lambda: wide(**kind), batches(**kind), tfpar.SingleDevice())
    found = trained(lambda: wide(**kind), batches(**kind), tfpar.TensorParallel(3))
    assert found[0].model.get_layer("first").kernel.value.sizes == (23, 22, 22)
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), found[1:], expected[1:]
    )


@pytest.mark.parametrize("layout", [None, {"first/kernel": ("model", None)}], ids=["chosen", "by a rule"])
def test_a_device_receives_the_columns_that_it_reads(layout: Any) -> None:
    trainer = tfpar.Trainer(wide, tfpar.TensorParallel(2, layout=layout, devices=["CPU:2", "CPU:1"]), seed=0)
    batch = trainer.build(batches())
    cut, devices = trainer.strategy.step_batch(trainer.model, batch)
    received: dict[str, int] = {}
    for tensor, device in zip(tf.nest.flatten(cut), devices, strict=True):
        received[device] = received.get(device, 0) + tensor.shape.num_elements() * tensor.dtype.size
    of_inputs = {"CPU:2": 5 * 34 * 8, "CPU:1": 5 * 33 * 8}
    assert received["CPU:2"] == of_inputs["CPU:2"] + 5 * 8, "and the targets"
    assert received["CPU:1"] == of_inputs["CPU:1"]


def test_entries_of_sparse_inputs_are_cut_on_the_host() -> None:
    trainer = tfpar.Trainer(lambda: wide(sparse=True), tfpar.TensorParallel(2), seed=0)
    batch = trainer.build(batches(sparse=True))
    (inputs, _), _ = trainer.strategy.step_batch(trainer.model, batch)
    (pieces,) = inputs.values
    assert sum(len(piece.values) for piece in pieces) == np.count_nonzero(DENSE[:5])
    joined = tf.concat([tf.sparse.to_dense(tf.sparse.reorder(piece)) for piece in pieces], -1)
    np.testing.assert_array_equal(joined, DENSE[:5])


@pytest.mark.extended
def test_a_model_that_reads_its_inputs_in_compute_loss_receives_them_whole() -> None:
    class Own(keras.Model):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                         training: bool = True) -> Any:  # fmt: skip
            return keras.ops.mean(keras.ops.square(y - y_pred)) + keras.ops.mean(x)

    def build() -> keras.Model:
        plain = wide()
        model = Own(plain.inputs, plain.outputs)
        model.compile("sgd", "mse")
        return model

    found, expected = (trained(build, batches(), one) for one in (tfpar.TensorParallel(2), tfpar.SingleDevice()))
    np.testing.assert_allclose(found[1]["loss"], expected[1]["loss"], rtol=1e-9)
