"""Gradients of rows that replicas look up: the rows that one device would have, for every way to look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers

import tfpar
from tests import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")


class Rows(layers.Layer):
    """Makes something of the rows of a table."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(20, 5), name="table")

    def call(self, tokens: Any) -> Any:
        return self.function(tf.convert_to_tensor(self.table), tokens)


def with_rows(function: Callable[[Any, Any], Any], **compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,), dtype="int32"), Rows(function), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.Adam(0.05), loss, **compiled)
        return model

    return build


def pipeline() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 3, balance="parameters")


def tokens() -> tf.data.Dataset:
    return parity_cases._tokens(11)


def few_tokens() -> tf.data.Dataset:
    """Batches of two, the last of one: fewer than three replicas."""
    return parity_cases._tokens(2).take(9).concatenate(parity_cases._tokens(1).take(1))


def _tied(table: Any, tokens: Any) -> Any:
    return tf.matmul(tf.reduce_mean(tf.gather(table, tokens), 1), table, transpose_b=True)


def _masked(table: Any, tokens: Any) -> Any:
    kept = tf.boolean_mask(table, [row % 3 > 0 for row in range(20)])
    return tf.reduce_mean(tf.gather(kept, tokens // 2), 1)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "gather_nd": lambda table, tokens: tf.reduce_mean(tf.gather_nd(table, tokens[..., None]), 1),
    "single rows": lambda table, tokens: table[2] * tf.cast(tokens[:, :1], table.dtype) + tf.gather(table, 3),
    "table on both ends": _tied,
    "rows under a mask": _masked,
    "segments": lambda table, tokens: tf.reduce_mean(
        tf.gather(tf.math.unsorted_segment_sum(table, list(range(10)) * 2, 10), tokens // 2), 1
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_one_device(way: str) -> None:
    small.assert_trains_as_one_device(with_rows(WAYS[way]), tokens, epochs=1)


class Positions(layers.Layer):
    """Adds a row for each position of a batch, whose sequences are as long as the longest of it."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.rows, self.first = layers.Embedding(9, 5), first

    def call(self, tokens: Any) -> Any:
        return ops.one_hot(tokens, 5) + self.rows(ops.arange(ops.shape(tokens)[-1]) + self.first)


def sequences() -> tf.data.Dataset:
    """Batches of seven sequences, each batch of another length."""
    batches = iter(parity_cases._tokens(7))
    of_a_length = [next(batches) for _ in range(3)]
    tokens = [
        tf.concat([tokens, tokens], 1)[:, :length] for (tokens, _), length in zip(of_a_length, (3, 8, 5), strict=True)
    ]
    pairs = list(zip(tokens, [labels for _, labels in of_a_length], strict=True))
    specs = (tf.TensorSpec([None, None], tokens[0].dtype), tf.TensorSpec([None], pairs[0][1].dtype))
    return tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=specs)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_positions_of_batches_of_any_length_are_those_of_one_device(strategy: str, first: int) -> None:
    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((None,), dtype="int32"), Positions(first), layers.GlobalAveragePooling1D(), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.Adam(0.05), loss)
        return model

    def train(strategy: tfpar.Strategy) -> tfpar.Trainer:
        trainer = tfpar.Trainer(build, strategy, seed=0)
        trainer.fit(sequences(), verbose=0)
        return trainer

    strategies = small.STRATEGIES | {"pipeline": pipeline}
    # Not Keras' compiled step: TensorFlow's graph optimizer lets it read a weight after its update here.
    found, expected = train(strategies[strategy]()).model, train(tfpar.SingleDevice()).model
    small.assert_same_state(found.get_weights(), expected.get_weights(), 1e-5)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adagrad, clipped": lambda: optimizers.Adagrad(0.1, clipnorm=0.1),
    "RMSprop, clipped globally": lambda: optimizers.RMSprop(0.01, global_clipnorm=0.1),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "accumulated": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_the_rows_of_one_device(name: str) -> None:
    small.assert_trains_as_one_device(lambda: parity_cases.lookups(OPTIMIZERS[name]), tokens, epochs=1)


def test_rows_count_once_where_replicas_have_the_same_examples() -> None:
    three = ["CPU:0", "CPU:1", "CPU:2"]
    small.assert_trains_as_one_device(parity_cases.lookups, few_tokens, lambda: tfpar.Mirrored(three), epochs=1)


def sparse_features() -> tf.data.Dataset:
    one_hot = parity_cases._tokens(11).map(lambda tokens, labels: (tf.one_hot(tokens[:, 0] % 7, 9), labels))
    return one_hot.map(lambda features, labels: (tf.sparse.from_dense(features), labels))


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_dense_layer_on_sparse_features_equals_one_device(eager: bool) -> None:
    def build() -> keras.Model:
        features = keras.Input((9,), sparse=True)
        model = keras.Model(features, layers.Dense(3)(layers.Dense(4, "tanh")(features)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.Adam(0.05), loss, run_eagerly=eager)
        return model

    small.assert_trains_as_one_device(build, sparse_features, epochs=1)


def test_an_embedding_equals_one_device_eagerly() -> None:
    small.assert_trains_as_one_device(
        with_rows(lambda table, tokens: ops.mean(ops.take(table, tokens, axis=0), 1), run_eagerly=True),
        tokens,
        epochs=1,
    )


def test_rows_that_cannot_be_told_apart_eagerly_are_refused() -> None:
    trainer = tfpar.Trainer(lambda: parity_cases.lookups(run_eagerly=True), small.STRATEGIES["mirrored"]())
    with pytest.raises(ValueError, match=r"looked up in several ways cannot .* run_eagerly=True, received '.*table'"):
        trainer.fit(tokens(), verbose=0)


def embedding(policy: str) -> Callable[[], keras.Model]:
    """A model with rows of a type of their own; in "mixed_float16" with a scaled loss, as Keras' compile makes it."""

    def build() -> keras.Model:
        hidden = [layers.Embedding(20, 5, dtype=policy), layers.GlobalAveragePooling1D(dtype="float32")]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *hidden, layers.Dense(3, dtype="float32")])
        adam = optimizers.Adam(0.05, clipnorm=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.LossScaleOptimizer(adam) if policy == "mixed_float16" else adam, loss)
        return model

    return build


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
def test_rows_of_few_bits_are_those_of_one_device(strategy: Callable[[], tfpar.Strategy], policy: str) -> None:
    small.assert_trains_as_one_device(embedding(policy), tokens, strategy, epochs=1)
