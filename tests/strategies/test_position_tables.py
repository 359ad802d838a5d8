"""Replicas of sharded layers with tables whose rows belong to no single example, such as positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties import test_parity
from tests.properties.test_parity import computing_in
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

EXAMPLES, LENGTH, ROWS = 23, 4, 20


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def replicas() -> tfpar.Strategy:
    return tfpar.Hybrid(tfpar.TensorParallel(2), 2)


def tokens() -> tf.data.Dataset:
    """Batches of 7, the last of 2."""
    numbers = np.random.default_rng(0).integers(0, ROWS, (EXAMPLES, LENGTH))
    return tf.data.Dataset.from_tensor_slices((numbers, parity_cases.labels(EXAMPLES))).batch(7)


class Positions(keras.layers.Layer):
    """Adds what it looks up for row numbers that it computes from the shape, or from the values, of a batch."""

    def __init__(self, rows: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__()
        self.rows, self.table = rows, keras.layers.Embedding(ROWS, 6, **settings)

    def call(self, numbers: Any) -> Any:
        features = keras.ops.cast(keras.ops.one_hot(numbers, 6), self.compute_dtype)
        return features + self.table(self.rows(numbers))


def of_shape(numbers: Any) -> Any:
    return keras.ops.arange(keras.ops.shape(numbers)[-1])


def model_of(*hidden: Callable[[], keras.layers.Layer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [one() for one in hidden]
        ends = [keras.layers.Flatten(), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers, *ends])
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["embedding, sparse gradients", "rows looked up in several ways"])
def test_rows_of_every_kind_equal_those_of_one_device(name: str) -> None:
    case = test_parity.CASES[name]
    trainer = tfpar.Trainer(case.build, replicas(), seed=0)
    found = test_parity.train(case, trainer.fit, trainer.model)
    assert not list(test_parity.differences(found, test_parity.reference(name, "float64"), "float64"))


@pytest.mark.extended
def test_positions_have_one_row_of_the_gradient_as_on_one_device() -> None:
    small.assert_trains_as_one_device(model_of(lambda: Positions(of_shape)), tokens, replicas, 1e-9)


class Numbers(keras.layers.Layer):
    """The row numbers of positions, without the examples."""

    def call(self, numbers: Any) -> Any:
        return of_shape(numbers)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [4, 200], ids=["whole", "sharded"])
@pytest.mark.parametrize("shared", [False, True], ids=["a table of its own", "the table of the tokens"])
def test_positions_of_a_functional_model_have_one_row_of_the_gradient(rows: int, shared: bool) -> None:
    def build() -> keras.Model:
        numbers = keras.Input((LENGTH,), dtype="int32")
        of_tokens = keras.layers.Embedding(max(rows, ROWS), 6)
        of_positions = of_tokens if shared else keras.layers.Embedding(rows, 6)
        features = keras.layers.Flatten()(of_tokens(numbers) + of_positions(Numbers()(numbers)))
        model = keras.Model(numbers, keras.layers.Dense(3)(keras.layers.Dense(8, "tanh")(features)))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    small.assert_trains_as_one_device(build, tokens, replicas, 1e-9)


def test_a_penalty_on_positions_counts_once() -> None:
    build = model_of(lambda: Positions(of_shape, embeddings_regularizer="l2"))
    small.assert_trains_as_one_device(build, tokens, replicas, 1e-9)


def recomputed(build: Callable[[], keras.layers.Layer]) -> Callable[[], keras.layers.Layer]:
    def in_scope() -> keras.layers.Layer:
        with keras.RematScope(mode="full"):
            return build()

    return in_scope


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Pipeline(2, 2, balance="parameters"),
        lambda: tfpar.Mirrored(2, shard="weights"),
        lambda: tfpar.Hybrid(tfpar.Pipeline(1, 2), 2),
        lambda: tfpar.TensorParallel(2),
    ],
    ids=["stages", "sharded weights", "replicas of stages", "shards"],
)
def test_recomputed_layers_train_in_stages(strategy: Callable[[], tfpar.Strategy]) -> None:
    build = model_of(lambda: Positions(of_shape), recomputed(keras.layers.LayerNormalization))
    small.assert_trains_as_one_device(build, tokens, strategy, 1e-9)


def test_row_numbers_of_several_examples_are_refused() -> None:
    trainer = tfpar.Trainer(model_of(lambda: Positions(lambda numbers: keras.ops.max(numbers, 0))), replicas(), seed=0)
    with pytest.raises(ValueError, match=r"received 'positions(_\d+)?', where an example depends on the others"):
        trainer.fit(tokens(), verbose=0)
