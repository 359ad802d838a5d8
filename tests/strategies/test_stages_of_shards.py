"""Pipelines whose stages are divided over shards train, evaluate, predict, save and resume as on one device."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.strategies.test_tensor_parallel import assert_equal, divided, fitted, of_features, of_tokens, state, trained
from tfpar._compat import tf_divided_memory

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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("build", "data", "strategy", "expected"),
    [
        (
            pairs, of_features, lambda: tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2),
            {"up/kernel": (5, 5), "up/bias": (5, 5), "down/kernel": (5, 5), "classes/kernel": (2, 1)},
        ),
        (
            attention, of_tokens,
            lambda: tfpar.Pipeline(2, 6, "gpipe", "parameters", recompute=True, num_shards=2),
            {"table/embeddings": (6, 5), "query/kernel": (4, 2), "up/kernel": (8, 8), "down/kernel": (8, 8)},
        ),
        (
            shared, of_tokens, lambda: tfpar.Pipeline(2, 3, "zero_bubble", ["twice"], devices=DEVICES, num_shards=2),
            {"up/kernel": (6, 6), "up/bias": (6, 6), "down/kernel": (6, 6)},
        ),
        (
            pairs, of_features,
            lambda: tfpar.Hybrid(tfpar.Pipeline(1, 3, num_shards=2), num_replicas=2),
            {"up/kernel": (5, 5), "classes/kernel": (2, 1)},
        ),
    ],
    ids=["1f1b", "gpipe, recompute", "zero bubble", "hybrid"],
)  # fmt: skip
def test_equals_one_device(build: Any, data: Any, strategy: Any, expected: dict[str, Any]) -> None:
    found, alone = (trained(build, data(), one) for one in (strategy(), tfpar.SingleDevice()))
    assert_equal(found[1:], alone[1:])
    pieces = divided(found[0].model)
    assert {name: pieces[name] for name in expected} == expected
    assert not {"whole/kernel", "penalized/kernel"} & set(pieces)
    assert build is not shared or "table/embeddings" not in pieces, "two stages read it"


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
    assert divided(found[0].model) == {"up/kernel": (5, 5), "up/bias": (5, 5), "classes/kernel": (4, 3)}


def test_each_shard_computes_its_part_and_no_weight_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(size, "gelu", kernel_regularizer="l2") for size in (64, FEATURES, 64, FEATURES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile("adam", "mse")
        return model

    strategy = tfpar.Pipeline(2, 2, balance=[2, 2], devices=["CPU:3", "CPU:1", "CPU:2", "CPU:0"], num_shards=2)
    trainer, (inputs, _) = tfpar.Trainer(build, strategy, seed=0), of_features(8)
    trainer.fit(inputs, inputs, verbose=0)
    for variable in (*trainer.model.weights, *trainer.model.optimizer.variables):
        if tf_divided_memory.is_divided(variable):
            devices = {piece.device[-5:] for piece in variable.value.pieces}
            assert devices in ({"CPU:3", "CPU:1"}, {"CPU:2", "CPU:0"})

    def gather(memory: Any) -> tf.Tensor:
        raise AssertionError(f"{memory.name} is gathered")

    monkeypatch.setattr(tf_divided_memory.DividedMemory, "read_value", gather)
    spec = tf.TensorSpec([None, FEATURES], "float64")
    step = tf.function(lambda *batch: strategy.train_step(trainer.model, batch), autograph=False)
    graph = step.get_concrete_function(spec, spec).graph
    products = collections.Counter(one.device[-5:] for one in graph.get_operations() if one.type == "MatMul")
    assert products == {"CPU:0": 12, "CPU:2": 12, "CPU:3": 10, "CPU:1": 10}, "the inputs of the model need no gradient"


@pytest.mark.extended
def test_checkpoints_and_files_have_whole_weights(tmp_path: Path) -> None:
    data = of_features(16)
    strategies = [tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2), tfpar.TensorParallel(3), tfpar.SingleDevice()]

    def results(strategies: list[tfpar.Strategy], folder: Path) -> Any:
        for epochs, strategy in enumerate([*strategies, strategies[0]], 1):
            trainer, _, _ = fitted(pairs, data, strategy, epochs=epochs, checkpoints=tfpar.Checkpoints(folder))
        trainer.save(folder / "model.keras")
        plain = keras.models.load_model(folder / "model.keras", {"Largest": Largest})
        return state(trainer.model), plain.predict(data[0], verbose=0), trainer.predict(data[0], verbose=0)

    found, alone = results(strategies, tmp_path / "found"), results([strategies[2]] * 3, tmp_path / "alone")
    assert_equal(found, alone)
    assert_equal(*found[1:])


@pytest.mark.extended
def test_a_model_moves_between_strategies() -> None:
    strategies = [tfpar.Pipeline(2, 1, num_shards=2), tfpar.TensorParallel(2), tfpar.Pipeline(2, 2, num_shards=2)]
    strategies += [tfpar.Pipeline(2, 1, devices=["CPU:0", "CPU:1"]), tfpar.Pipeline(1, 2, num_shards=3)]

    def build() -> keras.Model:
        layers = [keras.layers.Dense(size, "tanh") for size in (8, 6, CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
        return model

    def results(strategies: list[tfpar.Strategy]) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = build()
        for strategy in strategies:
            trainer = tfpar.Trainer(model, strategy)
            trainer.fit(*of_features(16), batch_size=8, shuffle=False, verbose=0)
        return state(model)

    assert_equal(results(strategies), results([tfpar.SingleDevice()] * len(strategies)))


@pytest.mark.extended
def test_frozen_layers_and_lora_after_another_compilation() -> None:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(size, "tanh", name=f"wide_{size}") for size in (16, 8, 12, 6)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    def run(strategy: tfpar.Strategy, rank: int = 0) -> tuple[list[np.ndarray], set[str]]:
        trainer = tfpar.Trainer(build, strategy, seed=0)
        trainer.fit(*of_features(16), batch_size=8, shuffle=False, verbose=0)
        keras.utils.set_random_seed(1)
        trainer.model.get_layer("wide_16").trainable = False
        if rank:
            trainer.model.get_layer("wide_12").enable_lora(rank)
        trainer.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        trainer.fit(*of_features(16), batch_size=8, shuffle=False, verbose=0)
        return state(trainer.model), {name for name in divided(trainer.model) if name.startswith("wide_1")}

    def stages(num_shards: int) -> tfpar.Pipeline:
        return tfpar.Pipeline(2, 2, balance="parameters", devices=DEVICES[: 2 * num_shards], num_shards=num_shards)

    assert_equal(run(stages(2))[0], run(tfpar.SingleDevice())[0])
    found, pieces = run(stages(2), rank=2)
    assert_equal(found, run(stages(1), rank=2)[0])
    assert pieces == {"wide_16/kernel", "wide_16/bias"}


def test_preview_names_the_devices_of_a_stage() -> None:
    trainer = tfpar.Trainer(pairs, tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2), seed=0)
    preview = trainer.preview(tf.data.Dataset.from_tensor_slices(of_features()).batch(8))
    assert [row.device for row in preview.rows] == ["CPU:0 CPU:1", "CPU:2 CPU:3"]
    for line in ("2 stages of 2 shards on 4 devices", "up is divided by columns", "down is divided by rows"):
        assert str(preview).index(line) < str(preview).index("predicted"), "the figures of the step are the last lines"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards must be a whole number of at least 1, received 0"),
        ({"num_shards": 3}, "2 stages of 3 shards under '1f1b' need 6 devices, and there are 4"),
        ({"num_shards": 2, "devices": DEVICES[:3]}, "Each stage needs num_shards=2 devices, received 3 devices"),
        ({"num_shards": 2, "memory_limit_bytes": 1}, "memory_limit_bytes is for stages on one device each"),
        ({"num_shards": 2, "across_workers": True}, "across_workers is for stages on one device each"),
        ({"layout": {"kernel": (None, "model")}}, "layout divides the weights of a stage over its devices, received"),
        ({"num_shards": 2, "layout": {"kernel": (1, "model")}}, 'A rule of layout names at most one axis "model"'),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfpar.Pipeline(2, 2, **arguments)


def test_a_grid_of_too_many_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="a device for each of 2 replicas x 4 devices of the pipeline"):
        tfpar.Hybrid(tfpar.Pipeline(2, 2, num_shards=2), num_replicas=2)


def reading_elsewhere() -> keras.Model:
    """A model where another layer reads the weight of a divided one."""
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
        (pairs, of_features, {"penalized/kernel": (None, "model")}, "its regularizer is no sum over its elements"),
        (shared, of_tokens, {"table": ("model", None)}, "'table/embeddings' stays whole: several stages read it"),
        (unread, of_features, {"own/unread": ("model", None)}, "class WithUnreadWeight are not divided"),
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
    model = pairs()
    model = ReadsInLoss(model.inputs, model.outputs)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (reading_elsewhere, "only its own layer can read a divided weight, received .* another layer reads '.*first"),
        (with_lamb, "A pipeline with num_shards updates each piece of a weight on its own device.*received Lamb"),
        (reading_in_loss, "only its own layer can read a divided weight"),
    ],
)
def test_what_needs_whole_weights_is_refused_before_the_first_step(
    build: Callable[[], keras.Model], message: str
) -> None:
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters", num_shards=2), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(*of_features(8), verbose=0)


def test_an_optimizer_that_needs_whole_weights_is_refused_after_an_evaluation() -> None:
    trainer = tfpar.Trainer(with_lamb, tfpar.Pipeline(2, 2, balance=[2, 3], num_shards=2), seed=0)
    trainer.evaluate(*of_features(8), verbose=0)
    with pytest.raises(ValueError, match="received Lamb"):
        trainer.fit(*of_features(8), verbose=0)


@pytest.mark.parametrize("strategy", [lambda: tfpar.Pipeline(2, 2, num_shards=2), lambda: tfpar.TensorParallel(2)])
def test_an_optimizer_that_was_built_by_hand_has_its_state_in_pieces(strategy: Callable[[], tfpar.Strategy]) -> None:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(size, "tanh") for size in (8, 6, CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
        return model

    def run(strategy: tfpar.Strategy) -> list[np.ndarray]:
        trainer = tfpar.Trainer(build, strategy, seed=0)
        trainer.evaluate(*of_features(8), verbose=0)
        trainer.model.optimizer.build(trainer.model.trainable_variables)
        trainer.fit(*of_features(8), batch_size=8, verbose=0)
        return state(trainer.model)

    assert_equal(run(strategy()), run(tfpar.SingleDevice()))
