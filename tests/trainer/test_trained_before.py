"""A model function may train its model, or a part of it, with Keras' own `fit` before it returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice(),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def trained() -> keras.Model:
    """The optimizer keeps its state."""
    model = small.build_model()
    model.fit(small.data(), verbose=0)
    return model


def trained_in_part() -> keras.Model:
    """A base that its first batch creates, with another optimizer and by single batches, under a new head."""
    base = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    base.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    for features, labels in small.data().take(3):
        base.train_on_batch(features, labels)
    features = keras.Input((parity_cases.NUM_FEATURES,))
    model = keras.Model(features, keras.layers.Dense(3)(base(features)))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("build", [trained, trained_in_part], ids=lambda build: build.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_continues_as_in_keras(build: Callable[[], keras.Model], strategy: str) -> None:
    keras.utils.set_random_seed(0)
    expected: Any = build()
    expected.fit(small.data(), verbose=0)
    trainer = tfpar.Trainer(build, STRATEGIES[strategy](), seed=0)
    trainer.fit(small.data(), verbose=0)
    for one, other in zip(trainer.model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_replicas_train_a_model_in_its_function_with_tfpar_fit(shard: Any) -> None:
    def with_tfpar() -> keras.Model:
        model = small.build_model()
        tfpar.fit(model, small.data(), verbose=0)
        return model

    keras.utils.set_random_seed(0)
    expected = trained()
    expected.fit(small.data(), verbose=0)
    trainer = tfpar.Trainer(with_tfpar, tfpar.Mirrored(["CPU:0", "CPU:1"], shard=shard), seed=0)
    trainer.fit(small.data(), verbose=0)
    for one, other in zip(trainer.model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch"])
def test_keras_own_methods_in_the_scope_of_replicas_are_refused(name: str) -> None:
    """They give other weights, where the optimizer clips for one, and fail for odd batches."""

    def build() -> keras.Model:
        model = small.build_model()
        data = (parity_cases.inputs(7), parity_cases.labels(7))
        getattr(model, name)(*data[: 1 if name == "predict" else 2])
        return model

    with pytest.raises(ValueError, match=rf"A model function cannot call {name}: .* Call tfpar\.fit, tfpar\.evaluate"):
        tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"]))
