"""Gradients of lookups on replicas: the rows of one device, for every kind of lookup."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


class Rows(layers.Layer):
    """Makes something of the rows of a table."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(20, 5), name="table")

    def call(self, tokens: Any) -> Any:
        return self.function(tf.convert_to_tensor(self.table), tokens)


def with_rows(
    function: Callable[[Any, Any], Any], optimizer: Callable[[], Any] = lambda: optimizers.Adam(0.05), **compiled: Any
) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,), dtype="int32"), Rows(function), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, **compiled)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_one_device(way: str) -> None:
    small.assert_trains_as_one_device(with_rows(WAYS[way]), tokens, epochs=1)


@pytest.mark.extended
def test_rows_of_replicas_that_communicate_in_a_layer_are_those_of_one_device() -> None:
    def normalized(table: Any, tokens: Any) -> Any:
        rows = tf.reduce_mean(tf.gather(table, tokens), 1)
        replica = tf.distribute.get_replica_context()
        if replica is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return rows
        return rows + 0.0 * replica.all_reduce("SUM", rows[:1])

    small.assert_trains_as_one_device(with_rows(normalized), tokens, epochs=1)


def _relative(table: layers.Embedding, places: Any, tokens: Any) -> Any:
    """Looks up a row for each pair of positions by their distance."""
    return ops.mean(table(ops.clip(places[:, None] - places[None, :], -4, 4) + 4), 1)


def _up_to_largest(table: layers.Embedding, places: Any, tokens: Any) -> Any:
    """Rows for as many numbers as the batch has, each twice, of which an example takes its own."""
    numbers = ops.arange(ops.max(tokens) + 1) // 2
    return ops.take(table(numbers % 9), tokens, axis=0)


# What is looked up for the places 0, 1, 2 ... of a batch's sequences, and its tokens.
PLACES: dict[str, Callable[[layers.Embedding, Any, Any], Any]] = {
    "range": lambda table, places, tokens: table(places),
    "offset": lambda table, places, tokens: table(places + 1),
    "reversed": lambda table, places, tokens: table(ops.flip(places)),
    "halves": lambda table, places, tokens: table(places // 2),
    "relative": _relative,
    "of each example": lambda table, places, tokens: table(ops.broadcast_to(places, ops.shape(tokens))),
    "up to the largest": _up_to_largest,
}


class Positions(layers.Layer):
    """Adds a row of each of some tables for each place of a batch, whose sequences are as long as the longest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [layers.Embedding(9, 5, name=name.replace(" ", "_")) for name in PLACES]

    def call(self, tokens: Any) -> Any:
        places = ops.arange(ops.shape(tokens)[-1])
        rows = [look_up(table, places, tokens) for look_up, table in zip(PLACES.values(), self.tables, strict=True)]
        return functools.reduce(operator.add, rows, ops.one_hot(tokens, 5))


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


def of_positions(layer: Callable[[], layers.Layer] = Positions) -> keras.Model:
    hidden = [layer(), layers.GlobalAveragePooling1D(), layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *hidden])
    model.compile(optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
def test_positions_of_batches_of_any_length_are_those_of_one_device(strategy: Callable[[], tfpar.Strategy]) -> None:
    def train(strategy: tfpar.Strategy) -> dict[str, np.ndarray]:
        trainer = tfpar.Trainer(of_positions, strategy, seed=0)
        trainer.fit(sequences(), verbose=0)
        return {"/".join(weight.path.split("/")[-2:]): weight.numpy() for weight in trainer.model.weights}

    # Not Keras' compiled step: TensorFlow's graph optimizer lets it read a weight after its update here.
    found, expected = train(strategy()), train(tfpar.SingleDevice())
    different = [name for name in expected if not np.allclose(found[name], expected[name], rtol=1e-5, atol=1e-5)]
    assert not different


def _centred(table: Any, tokens: Any) -> Any:
    rows = ops.mean(ops.take(table, tokens, axis=0), 1)
    return rows - ops.mean(rows, 0)


def test_rows_of_a_layer_on_the_whole_batch_are_those_of_one_device() -> None:
    gathering = functools.partial(tfpar.Mirrored, ["CPU:0", "CPU:1"], batch_dependent_layers="gather")
    small.assert_trains_as_one_device(with_rows(_centred), tokens, gathering, epochs=1)


def _in_order(table: Any, tokens: Any) -> Any:
    """Looks up the rows of all examples in the order of their numbers, in which parts of a batch differ from it."""
    numbers = tf.reshape(tokens, [-1])
    places = tf.argsort(numbers, stable=True)
    rows = tf.gather(table, tf.sort(numbers))
    return tf.reduce_mean(tf.reshape(tf.gather(rows, tf.argsort(places)), [-1, 4, 5]), 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
def test_rows_of_neither_an_example_nor_the_batch_are_added_as_a_dense_gradient(
    strategy: Callable[[], tfpar.Strategy],
) -> None:
    with pytest.warns(UserWarning, match=r"gradient of '.*table' is summed as a dense tensor"):
        small.assert_trains_as_one_device(
            with_rows(_in_order, lambda: optimizers.SGD(0.1, 0.9)), tokens, strategy, epochs=1
        )


class EveryOtherOfAll(layers.Layer):
    """Reads rows by what all examples have together, without an influence on the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(9, 5)

    def call(self, tokens: Any) -> Any:
        return ops.one_hot(tokens, 5) + 0 * ops.sum(self.table(ops.sort(ops.reshape(tokens % 9, [-1]))[::3]))


def reading(read: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    """A model whose loss looks up rows of a weight of its first layer."""

    def build() -> keras.Model:
        table = layers.Embedding(20, 5)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), table, layers.Flatten(), layers.Dense(3)])

        def loss(labels: Any, outputs: Any) -> Any:
            crossentropy = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
            rows = read(table.embeddings, ops.cast(ops.reshape(labels, [-1]), "int32"))
            return crossentropy * (1 + ops.mean(ops.square(rows), -1))

        model.compile(optimizers.Adam(0.05), loss)
        return model

    return build


# Which rows of a weight a loss reads, given the labels of some examples.
OF_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "constant rows": lambda table, labels: ops.mean(ops.take(table, [2, 5, 2], axis=0), 0),
    "up to the largest": lambda table, labels: ops.take(
        ops.take(table, ops.arange(ops.max(labels) + 1), axis=0), labels, axis=0
    ),
    "of each example": lambda table, labels: ops.take(table, labels + 1, axis=0),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
@pytest.mark.parametrize("read", OF_LOSSES)
def test_rows_that_a_loss_reads_are_those_of_one_device(read: str, strategy: Callable[[], tfpar.Strategy]) -> None:
    small.assert_trains_as_one_device(reading(OF_LOSSES[read]), tokens, strategy, epochs=1)


@pytest.mark.extended
def test_a_loss_that_reads_rows_trains_in_a_pipeline_with_and_then_without_weights() -> None:
    trainer = tfpar.Trainer(reading(OF_LOSSES["of each example"]), pipeline(), seed=0)
    weighted = tokens().take(1).map(lambda tokens, labels: (tokens, labels, tf.ones_like(labels, tf.float32)))
    losses = [trainer.fit(dataset, verbose=0).history["loss"] for dataset in (weighted, tokens().take(1))]
    assert np.isfinite(losses).all()


class PenaltyOfRows(keras.Regularizer):
    def __call__(self, table: Any) -> Any:
        return 0.1 * ops.sum(ops.square(ops.take(table, [1, 3], axis=0)))


PENALTIES: dict[str, tuple[Any, Any]] = {"on a kernel": (None, "l2"), "on some rows": (PenaltyOfRows(), None)}


@pytest.mark.extended
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_rows_of_a_model_with_a_penalty_are_those_of_one_device(
    penalty: str, strategy: Callable[[], tfpar.Strategy]
) -> None:
    on_table, on_kernel = PENALTIES[penalty]

    def build() -> keras.Model:
        hidden = [layers.Embedding(20, 5, embeddings_regularizer=on_table), layers.Flatten()]
        head = layers.Dense(3, kernel_regularizer=on_kernel)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *hidden, head])
        model.compile(optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    small.assert_trains_as_one_device(build, tokens, strategy, epochs=1)


class RowsOfOptional(layers.Layer):
    """Adds rows of places, or of an input that need not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(20, 5)

    def call(self, tokens: Any, others: Any = None) -> Any:
        return ops.one_hot(tokens, 5) + self.table(ops.arange(4) if others is None else others)


@pytest.mark.extended
def test_rows_are_those_of_one_device_also_where_an_optional_input_comes_later() -> None:
    def build() -> keras.Model:
        given = {
            name: keras.Input((4,), dtype="int32", name=name, optional=name == "others")
            for name in ("tokens", "others")
        }
        rows = layers.Flatten()(RowsOfOptional()(given["tokens"], given["others"]))
        model = keras.Model(given, layers.Dense(3)(rows))
        model.compile(optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def train(strategy: tfpar.Strategy) -> list[np.ndarray]:
        trainer, (features, labels) = tfpar.Trainer(build, strategy, seed=0), next(iter(tokens()))
        for others in (None, features[::-1]):
            trainer.fit({"tokens": features, "others": others}, labels, batch_size=11, epochs=2, verbose=0)
        return trainer.model.get_weights()

    small.assert_same_state(train(small.STRATEGIES["mirrored"]()), train(tfpar.SingleDevice()), 1e-5)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adagrad, clipped": lambda: optimizers.Adagrad(0.1, clipnorm=0.1),
    "RMSprop, clipped globally": lambda: optimizers.RMSprop(0.01, global_clipnorm=0.1),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "accumulated": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, of_ci=("RMSprop, clipped globally", "accumulated")))
def test_optimizers_see_the_rows_of_one_device(name: str) -> None:
    small.assert_trains_as_one_device(lambda: parity_cases.lookups(OPTIMIZERS[name]), tokens, epochs=1)


@pytest.mark.extended
def test_rows_count_once_where_replicas_have_the_same_examples() -> None:
    three = ["CPU:0", "CPU:1", "CPU:2"]
    small.assert_trains_as_one_device(parity_cases.lookups, few_tokens, lambda: tfpar.Mirrored(three), epochs=1)


def sparse_features() -> tf.data.Dataset:
    one_hot = parity_cases._tokens(11).map(lambda tokens, labels: (tf.one_hot(tokens[:, 0] % 7, 9), labels))
    return one_hot.map(lambda features, labels: (tf.sparse.from_dense(features), labels))


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["compiled", "eager"])
def test_a_dense_layer_on_sparse_features_equals_one_device(eager: bool) -> None:
    def build() -> keras.Model:
        features = keras.Input((9,), sparse=True)
        model = keras.Model(features, layers.Dense(3)(layers.Dense(4, "tanh")(features)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.Adam(0.05), loss, run_eagerly=eager)
        return model

    small.assert_trains_as_one_device(build, sparse_features, epochs=1)


@pytest.mark.extended
def test_an_embedding_equals_one_device_eagerly() -> None:
    small.assert_trains_as_one_device(
        with_rows(lambda table, tokens: ops.mean(ops.take(table, tokens, axis=0), 1), run_eagerly=True),
        tokens,
        epochs=1,
    )


@pytest.mark.extended
def test_rows_of_several_lookups_are_added_as_a_dense_gradient_eagerly() -> None:
    def build() -> keras.Model:
        return parity_cases.lookups(lambda: optimizers.SGD(0.1), run_eagerly=True)

    with pytest.warns(UserWarning, match=r"gradient of '.*table' is summed as a dense tensor"):
        small.assert_trains_as_one_device(build, tokens, epochs=1)


def embedding(policy: str) -> Callable[[], keras.Model]:
    """A model with an embedding of another dtype; in "mixed_float16" with Keras' scaled loss."""

    def build() -> keras.Model:
        hidden = [layers.Embedding(20, 5, dtype=policy), layers.GlobalAveragePooling1D(dtype="float32")]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *hidden, layers.Dense(3, dtype="float32")])
        adam = optimizers.Adam(0.05, clipnorm=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers.LossScaleOptimizer(adam) if policy == "mixed_float16" else adam, loss)
        return model

    return build


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
def test_rows_of_few_bits_are_those_of_one_device(strategy: Callable[[], tfpar.Strategy], policy: str) -> None:
    small.assert_trains_as_one_device(embedding(policy), tokens, strategy, epochs=1)
