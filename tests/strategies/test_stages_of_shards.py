"""Pipelines with sharded stages train, evaluate, predict, save and resume as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.strategies.test_tensor_parallel import assert_equal, of_features, of_tokens, shard_sizes, trained

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

FEATURES, CLASSES, TOKENS = 12, 3, 11
DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


class Largest(keras.regularizers.Regularizer):
    """A penalty that is no sum over elements."""

    def __call__(self, weight: Any) -> Any:
        return 0.1 * keras.ops.max(keras.ops.abs(weight))

    def get_config(self) -> dict[str, Any]:
        return {}


def pairs() -> keras.Model:
    """Two pairs of layers, with penalties, and scores of classes."""
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(10, "gelu", name="up")(inputs)
    hidden = keras.layers.Dense(7, kernel_regularizer="l2", name="down")(hidden)
    hidden = keras.layers.Dense(9, "silu", activity_regularizer="l2", name="whole")(hidden)
    hidden = keras.layers.Dense(7, kernel_regularizer=Largest(), name="penalized")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax", name="classes")(hidden))
    optimizer = keras.optimizers.AdamW(
        0.01, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.1
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def of_whole_batch() -> keras.Model:
    """The same with a loss of the whole batch, which gathers the scores of classes."""
    model = pairs()
    model.compile(model.optimizer, lambda y, p: keras.ops.max(keras.losses.sparse_categorical_crossentropy(y, p)))
    return model


def attention() -> keras.Model:
    """A table with masked numbers, attention by heads and key-value heads, and a pair."""
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(TOKENS, 8, mask_zero=True, name="table")(tokens)
    hidden = hidden + keras.layers.MultiHeadAttention(5, 4, name="heads")(hidden, hidden, use_causal_mask=True)
    hidden = keras.layers.LayerNormalization()(hidden)
    hidden = hidden + keras.layers.GroupQueryAttention(4, 6, 3, use_gate=True, name="groups")(hidden, hidden)
    hidden = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "relu", name="up")(hidden))
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0), "mse", metrics=["mae"])
    return model


def shared() -> keras.Model:
    """A table that the first and the last stage read, and a layer whose two calls would divide it differently."""
    tokens = keras.Input((6,), dtype="int32")
    table = keras.layers.Embedding(TOKENS, 8, name="table")
    twice = keras.layers.Dense(8, "tanh", name="twice")
    hidden = keras.layers.Dense(8, name="down")(keras.layers.Dense(12, "relu", name="up")(table(tokens)))
    model = keras.Model(tokens, keras.layers.Dense(2)(twice(twice(hidden)) * table(tokens)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    ("build", "data", "strategy", "expected"),
    [
        (
            pairs, of_features, lambda: tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2),
            {"up/kernel": (5, 5), "up/bias": (5, 5), "down/kernel": (5, 5), "classes/kernel": (2, 1)},
        ),
        pytest.param(
            attention, of_tokens,
            lambda: tfpar.Pipeline(2, 6, "gpipe", "parameters", recompute=True, num_shards=2),
            {"table/embeddings": (6, 5), "query/kernel": (4, 2), "up/kernel": (8, 8), "down/kernel": (8, 8)},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            shared, of_tokens, lambda: tfpar.Pipeline(2, 3, "zero_bubble", ["twice"], devices=DEVICES, num_shards=2),
            {"up/kernel": (6, 6), "up/bias": (6, 6), "down/kernel": (6, 6)},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            pairs, of_features,
            lambda: tfpar.Hybrid(tfpar.Pipeline(1, 3, num_shards=2), num_replicas=2),
            {"up/kernel": (5, 5), "classes/kernel": (2, 1)},
            marks=pytest.mark.extended,
        ),
        (
            of_whole_batch, of_features, lambda: tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2),
            {"up/kernel": (5, 5), "classes/kernel": (2, 1)},
        ),
    ],
    ids=["1f1b", "gpipe, recompute", "zero bubble", "hybrid", "gathered loss"],
)  # fmt: skip
def test_equals_one_device(build: Any, data: Any, strategy: Any, expected: dict[str, Any]) -> None:
    found, alone = (trained(build, data(), one) for one in (strategy(), tfpar.SingleDevice()))
    assert_equal(found[1:], alone[1:])
    shards = shard_sizes(found[0].model)
    assert {name: shards[name] for name in expected} == expected
    assert not {"whole/kernel", "penalized/kernel"} & set(shards)
    assert build is not shared or "table/embeddings" not in shards, "two stages read it"


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy",
    [
        lambda rules: tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2, layout=rules),
        lambda rules: tfpar.Hybrid(tfpar.Pipeline(1, 3, num_shards=2, layout=rules), num_replicas=2),
    ],
    ids=["pipeline", "hybrid"],
)
def test_rules_choose_the_weights_of_all_stages(strategy: Any) -> None:
    rules = {"up/kernel": (None, "model"), "down/(kernel|missing)": (None, None), "classes/kernel": ("model", None)}
    found, alone = (trained(pairs, of_features(), one) for one in (strategy(rules), tfpar.SingleDevice()))
    assert_equal(found[1:], alone[1:])
    assert shard_sizes(found[0].model) == {"up/kernel": (5, 5), "up/bias": (5, 5), "classes/kernel": (4, 3)}


def test_preview_names_the_devices_of_a_stage() -> None:
    trainer = tfpar.Trainer(pairs, tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2), seed=0)
    preview = trainer.preview(tf.data.Dataset.from_tensor_slices(of_features()).batch(8))
    assert [row.device for row in preview.rows] == ["CPU:0 CPU:1", "CPU:2 CPU:3"]
    for line in ("2 stages of 2 shards on 4 devices", "up is sharded by columns", "down is sharded by rows"):
        assert str(preview).index(line) < str(preview).index("predicted"), "the figures of the step are the last lines"


def reading_elsewhere() -> keras.Model:
    """A model where another layer reads the weight of a sharded one."""
    inputs = keras.Input((FEATURES,))
    first = keras.layers.Dense(8, name="first")
    hidden = keras.layers.Dense(8, name="second")(first(inputs))
    hidden = keras.layers.Lambda(lambda x: x * keras.ops.sum(first.kernel), name="reader")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


class WithUnreadWeight(keras.layers.Dense):
    """A layer with a weight that is no part of its call."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.unread = self.add_weight(shape=(4, 4), name="unread")


def unread() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="classes")(WithUnreadWeight(8, name="own")(inputs)))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("build", "data", "rules", "message"),
    [
        (pairs, of_features, {"none": (None, "model")}, "must name a weight, and 'none' is found in no path"),
        (pairs, of_features, {"up/k": (None, "model"), "kernel": (None, None)}, "'up/k' and 'kernel' both name"),
        (pairs, of_features, {"penalized/kernel": (None, "model")}, "its regularizer is not a sum over its elements"),
        (shared, of_tokens, {"table": ("model", None)}, "'table/embeddings' stays whole: several stages read it"),
        (unread, of_features, {"own/unread": ("model", None)}, "class WithUnreadWeight are not sharded"),
    ],
)
def test_rules_that_do_not_fit_are_refused(build: Any, data: Any, rules: Any, message: str) -> None:
    balance = ["twice"] if build is shared else "parameters"
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance=balance, num_shards=2, layout=rules), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(*data(), verbose=0)


def with_lamb() -> keras.Model:
    model = pairs()
    model.compile(keras.optimizers.Lamb(0.01), "sparse_categorical_crossentropy")
    return model


class ReadsInLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred)) + keras.ops.sum(keras.ops.square(self.layers[1].kernel))


def reading_in_loss() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, "tanh", name="first")(inputs)
    model = ReadsInLoss(inputs, keras.layers.Dense(CLASSES, "softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("build", [reading_elsewhere, reading_in_loss])
@pytest.mark.parametrize("strategy", [lambda: tfpar.TensorParallel(2), lambda: tfpar.Pipeline(2, 2, num_shards=2)])
def test_another_layer_and_a_loss_may_read_a_sharded_weight(build: Callable[[], keras.Model], strategy: Any) -> None:
    _, *expected = trained(build, of_features(), tfpar.SingleDevice())
    trainer, *found = trained(build, of_features(), strategy())
    assert_equal(found, expected, tolerance=1e-9)
    assert "first/kernel" in shard_sizes(trainer.model)


def test_an_optimizer_that_needs_whole_weights_is_refused_before_the_first_step() -> None:
    trainer = tfpar.Trainer(with_lamb, tfpar.Pipeline(2, 2, balance="parameters", num_shards=2), seed=0)
    message = "A pipeline with num_shards updates each shard of a weight on its own device.*received Lamb"
    with pytest.raises(ValueError, match=message):
        trainer.fit(*of_features(8), verbose=0)
