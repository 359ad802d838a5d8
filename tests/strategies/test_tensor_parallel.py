"""Tensor parallelism: layers sharded over devices train, evaluate, predict, save and resume as on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tfpar._compat.variables import sharded_memory
from tfpar.engines.stages.stage_engine import StageEngine

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

Data = tuple[np.ndarray, np.ndarray]
FEATURES, CLASSES, TOKENS = 12, 3, 11


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def perceptron(optimizer: Callable[[], Any] | None = None) -> keras.Model:
    """Pairs of layers with what a pair may contain, and layers that stay whole between them."""
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(10, "gelu", name="up")(inputs)
    hidden = keras.layers.Dropout(0.3, seed=3)(hidden)
    hidden = keras.layers.Dense(7, kernel_regularizer="l2", name="down")(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    gate = keras.layers.Dense(9, "silu", name="gate")(hidden)
    hidden = keras.layers.Dense(7, name="after")(gate * keras.layers.Dense(9, name="value")(hidden) * 0.5)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax", name="classes")(hidden))
    default = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.01)
    model.compile(optimizer() if optimizer else default, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def sequence() -> keras.Model:
    """A sharded table with masked numbers, contractions by equations, and a layer that is used twice."""
    tokens = keras.Input((6,), dtype="int32")
    table = keras.layers.Embedding(TOKENS, 4, mask_zero=True, name="table")
    hidden = keras.layers.GRU(5, return_sequences=True)(table(tokens) + table(tokens[:, ::-1]))
    hidden = keras.layers.Masking()(hidden)
    hidden = keras.layers.Dense(8, "relu", name="columns")(hidden)
    hidden = keras.layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d", name="rows")(hidden)
    hidden = keras.layers.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="e", name="heads")(hidden)
    hidden = keras.layers.EinsumDense("abde,dec->abc", (None, 4), name="joined")(hidden)
    model = keras.Model(tokens, keras.layers.Dense(2, name="outputs")(hidden))
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


def attention() -> keras.Model:
    """Attention by heads, also grouped, with masks, a causal mask, a gate and dropouts."""
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(TOKENS, 8, mask_zero=True, name="table")(tokens)
    hidden = hidden + keras.layers.MultiHeadAttention(5, 4, dropout=0.2, seed=1, name="heads")(
        hidden, hidden, use_causal_mask=True
    )
    hidden = keras.layers.LayerNormalization()(hidden)
    hidden = hidden + keras.layers.GroupQueryAttention(4, 6, 3, use_gate=True, name="groups")(hidden, hidden)
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0), "mse", metrics=["mae"])
    return model


def convolutions() -> keras.Model:
    """Convolutions by filters and by channels, with layers of separate channels between them."""
    images = keras.Input((6, 6, 3))
    hidden = keras.layers.Conv2D(7, 3, padding="same", use_bias=False, name="filters")(images)
    hidden = keras.layers.ReLU()(keras.layers.BatchNormalization(name="statistics")(hidden))
    hidden = keras.layers.MaxPooling2D()(hidden)
    hidden = keras.layers.Conv2D(6, 2, dilation_rate=2, padding="same", activation="tanh", name="channels")(hidden)
    hidden = keras.layers.Conv2D(8, 3, activation="relu")(hidden)
    hidden = keras.layers.DepthwiseConv2D(2, padding="same", depth_multiplier=2, activation="elu", name="each")(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(images, keras.layers.Dense(CLASSES, "softmax")(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def of_images() -> Data:
    random = np.random.default_rng(2)
    return random.normal(size=(21, 6, 6, 3)), random.integers(0, CLASSES, 21)


def of_features(num_examples: int = 37) -> Data:
    random = np.random.default_rng(0)
    return random.normal(size=(num_examples, FEATURES)), random.integers(0, CLASSES, num_examples)


def of_tokens() -> Data:
    random = np.random.default_rng(1)
    return random.integers(0, TOKENS, (37, 6)), random.normal(size=(37, 6, 2))


def fitted(build: Callable[[], keras.Model], data: Data, strategy: tfpar.Strategy, **fit: Any) -> tuple[Any, ...]:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    history = trainer.fit(*data, **fit).history
    return trainer, history, state(trainer.model)


def trained(build: Callable[[], keras.Model], data: Data, strategy: tfpar.Strategy) -> tuple[Any, ...]:
    trainer, history, _ = fitted(build, data, strategy)
    logs = trainer.evaluate(*data, batch_size=8, verbose=0, return_dict=True)
    outputs = trainer.predict(data[0], batch_size=8, verbose=0)
    return trainer, history, logs, outputs, state(trainer.model)


def state(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    def compare(one: Any, other: Any) -> None:
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)

    keras.tree.map_structure(compare, found, expected)


def shard_sizes(model: keras.Model) -> dict[str, tuple[int, ...]]:
    """The sizes of the shards of each sharded weight, by its layer and name, those of the last layer of that name."""
    return {
        "/".join(variable.path.split("/")[-2:]): variable.value.sizes
        for variable in model.weights
        if sharded_memory.is_sharded(variable)
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("build", "data", "expected"),
    [
        (perceptron, of_features, {"up/kernel": (4, 3, 3), "up/bias": (4, 3, 3), "down/kernel": (4, 3, 3)}),
        (sequence, of_tokens, {"table/embeddings": (4, 4, 3), "columns/kernel": (3, 3, 2), "rows/kernel": (3, 3, 2)}),
        (
            attention,
            of_tokens,
            {"query/kernel": (2, 2, 2), "key/kernel": (1, 1, 1), "attention_output/kernel": (2, 2, 2)},
        ),
        (
            convolutions,
            of_images,
            {
                "filters/kernel": (3, 2, 2),
                "statistics/gamma": (3, 2, 2),
                "channels/kernel": (3, 2, 2),
                "each/bias": (6, 6, 4),
            },
        ),
    ],
    ids=["perceptron", "sequence", "attention", "convolutions"],
)
def test_equals_one_device(build: Any, data: Any, expected: dict[str, Any]) -> None:
    _, *wanted = trained(build, data(), tfpar.SingleDevice())
    trainer, *found = trained(build, data(), tfpar.TensorParallel(3))
    assert_equal(found, wanted)
    assert shard_sizes(trainer.model).items() >= expected.items()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("build", "data", "rules", "expected"),
    [
        (convolutions, of_images, {"channels/kernel": (None, None, "model", None)}, "channels/kernel"),
        (convolutions, of_images, {"each/kernel": (None, None, "model", None)}, "each/bias"),
        (attention, of_tokens, {"heads/query/kernel": (None, "model", None)}, "heads/attention_output/kernel"),
        (sequence, of_tokens, {"^joined/kernel": ("model", None, None)}, "joined/kernel"),
    ],
)
def test_a_rule_divides_its_layer_alone(build: Any, data: Any, rules: Any, expected: str) -> None:
    _, *wanted = trained(build, data(), tfpar.SingleDevice())
    trainer, *found = trained(build, data(), tfpar.TensorParallel(3, layout=rules))
    assert_equal(found, wanted)
    paths = [one.path for one in trainer.model.weights if sharded_memory.is_sharded(one)]
    assert expected in paths
    assert {path.split("/")[0] for path in paths} == {expected.split("/")[0]}


def assert_holds_shards(model: keras.Model) -> None:
    """Assert that each device has its shards of weights and of the optimizer's state."""
    up = model.get_layer("up").kernel
    assert up.path in {weight.path for weight in model.weights}, "one variable, with its name"
    slots = [slot for slot in model.optimizer.variables if slot.shape == up.shape]
    assert len(slots) == 4, "momentum, velocity, average and accumulator"
    for variable in (up, *slots):
        assert [shard.device[-5:] for shard in variable.value.shards] == ["CPU:2", "CPU:1"]
        assert [tuple(shard.shape) for shard in variable.value.shards] == [(12, 5), (12, 5)]
    norm = next(layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))
    assert norm.gamma.value.device.endswith("CPU:2"), "a whole weight is on the first device"


def test_a_device_holds_only_its_shards_which_no_step_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tfpar.Trainer(perceptron, tfpar.TensorParallel(2, devices=["CPU:2", "CPU:1"]), seed=0)

    def gather(memory: Any) -> tf.Tensor:
        raise AssertionError(f"{memory.name} is gathered")

    def train_step(engine: StageEngine, *arguments: Any) -> tf.Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(sharded_memory.ShardedMemory, "read_value", gather)
            return step(engine, *arguments)

    step = StageEngine.train_step
    monkeypatch.setattr(StageEngine, "train_step", train_step)
    trainer.fit(*of_features(8), verbose=0)
    assert_holds_shards(trainer.model)


def test_what_needs_whole_memory_is_refused(tmp_path: Path) -> None:
    trainer = tfpar.Trainer(perceptron, tfpar.TensorParallel(2), seed=0)
    with pytest.raises(
        ValueError, match=r"export and a tf\.GradientTape of your own take it whole\. Train with tfpar\.fit"
    ):
        trainer.model.fit(*of_features(8), verbose=0)
    with pytest.raises(ValueError, match=r"export with trainer\.export"):
        trainer.model.export(tmp_path / "exported", verbose=False)
    trainer.export(tmp_path / "exported", verbose=False)
    inputs = of_features(8)[0]
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(inputs), trainer.model.predict(inputs, verbose=0), rtol=1e-4, atol=1e-6)


def test_preview_says_what_is_sharded() -> None:
    trainer = tfpar.Trainer(perceptron, tfpar.TensorParallel(2), seed=0)
    preview = trainer.preview(tf.data.Dataset.from_tensor_slices(of_features()).batch(8))
    assert [row.device for row in preview.rows] == ["CPU:0", "CPU:1"]
    assert preview.rows[1].state_bytes < preview.rows[0].state_bytes
    text = str(preview)
    for line in ("up is sharded by columns", "down is sharded by rows", "gate is sharded by columns"):
        assert line in text
    assert "is whole: its input is not sharded" in text


def recurrent() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6, 3)), keras.layers.LSTM(4, name="loop"), keras.layers.LayerNormalization()]
    )
    model.compile("sgd", "mse")
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [lambda: tfpar.TensorParallel(2), lambda: tfpar.Pipeline(1, 2, num_shards=2)])
def test_a_model_of_which_nothing_is_sharded_is_named_with_the_reason(strategy: Any) -> None:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        trainer = tfpar.Trainer(recurrent, strategy(), seed=0)
        trainer.fit(np.ones((4, 6, 3)), np.ones((4, 4)), verbose=0)
        trainer.fit(np.ones((4, 6, 3)), np.ones((4, 4)), verbose=0)
    (message,) = [str(one.message) for one in noted if "No layer of" in str(one.message)]
    reason = "'loop': layers of the class LSTM are not sharded"
    assert f"is sharded ({reason}), and the first device of its shards computes all of it." in message


def mostly_recurrent() -> keras.Model:
    layers = [keras.layers.LSTM(8, name="loop"), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((6, 3)), *layers])
    model.compile("sgd", "mse")
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [lambda: tfpar.TensorParallel(2), lambda: tfpar.Pipeline(1, 2, num_shards=2)])
def test_a_large_layer_that_stays_whole_beside_sharded_ones_is_named_with_its_part(strategy: Any) -> None:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        trainer = tfpar.Trainer(mostly_recurrent, strategy(), seed=0)
        for _ in range(2):
            trainer.fit(np.ones((4, 6, 3)), np.ones((4, 4)), verbose=0)
    (message,) = [str(one.message) for one in noted if "stay whole" in str(one.message)]
    assert "'loop' (78 %: layers of the class LSTM are not sharded)." in message


def test_rules_that_keep_all_weights_whole_are_named() -> None:
    with pytest.warns(UserWarning, match=r"is sharded \(its rules keep all weights whole\), and the first device"):
        tfpar.Trainer(perceptron, tfpar.TensorParallel(2, layout={"up/kernel": (None, None)}), seed=0)


def with_lora(layer: Any) -> Any:
    layer.build((None, 6, 6)) if isinstance(layer, keras.layers.Dense) else layer.build((None, 6, 6), (None, 6, 6))
    (layer if isinstance(layer, keras.layers.Dense) else layer.query_dense).enable_lora(2)
    return layer


def attended(values: Any) -> Any:
    return with_lora(keras.layers.MultiHeadAttention(2, 3, name="odd"))(values, values)


@pytest.mark.parametrize(
    ("apply", "reason"),
    [
        (lambda x: keras.layers.Dense(6, activity_regularizer="l2", name="odd")(x), "Dense layer with activity_regula"),
        (lambda x: with_lora(keras.layers.Dense(6, name="odd"))(x), "Dense layer with LoRA"),
        (attended, "MultiHeadAttention layer with LoRA or quantized"),
        (lambda x: keras.layers.Conv1D(6, 2, groups=2, name="odd")(x), "Conv1D layer with groups"),
        (lambda x: keras.layers.BatchNormalization(renorm=True, name="odd")(x), "BatchNormalization layer with renorm"),
        (lambda x: keras.layers.BatchNormalization(name="odd")(x), None),
        (
            lambda x: keras.layers.BatchNormalization(name="odd")(keras.layers.Masking()(x)),
            "BatchNormalization layer with a mask",
        ),
    ],
)
def test_preview_names_a_whole_layer_with_the_reason(apply: Any, reason: str | None) -> None:
    def build() -> keras.Model:
        inputs = keras.Input((6, 6))
        outputs = keras.layers.Dense(2, name="last")(apply(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build, tfpar.TensorParallel(2), seed=0)
    outputs = trainer.model.output_shape[1:]
    preview = trainer.preview(tf.data.Dataset.from_tensors((np.ones((4, 6, 6)), np.ones((4, *outputs)))))
    expected = f"a {reason}" if reason else "its input is not sharded"
    assert f"odd is whole: {expected}" in str(preview)


def test_saves_a_plain_file_that_trains_on_and_loads_weights(tmp_path: Path) -> None:
    trainer, _, _, outputs, _ = trained(perceptron, of_features(), tfpar.TensorParallel(2))
    trainer.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    for one, other in zip(plain.variables, trainer.model.variables, strict=True):
        if "seed_generator" in one.path:  # Keras saves no random state
            one.assign(other.numpy())
    assert_equal(state(plain), state(trainer.model), tolerance=0.0)
    assert_equal(plain.predict(of_features()[0], verbose=0), outputs)
    other = tfpar.Trainer(perceptron, tfpar.TensorParallel(3), seed=5)
    other.model.load_weights(tmp_path / "model.keras")
    assert_equal(other.predict(of_features()[0], verbose=0), outputs)
    other.model.set_weights(plain.get_weights())
    assert_equal(other.model(of_features()[0], training=False), outputs)
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
    histories = [one.fit(*of_features(), **settings).history for one in (plain, trainer)]
    assert_equal(*histories)
    assert_equal(state(plain), state(trainer.model))


@pytest.mark.extended
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01, clipvalue=0.01)),
        lambda: keras.optimizers.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=3),
        lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True, clipnorm=0.01),
        lambda: keras.optimizers.Ftrl(0.1),
    ],
    ids=["loss scaling, Nadam", "Adagrad, overwritten by averages", "RMSprop", "Ftrl"],
)
def test_optimizers_update_shards_as_whole_weights(optimizer: Callable[[], Any]) -> None:
    data = of_features(24)
    both = [
        fitted(lambda: perceptron(optimizer), data, strategy, epochs=1)[1:]
        for strategy in (tfpar.TensorParallel(3), tfpar.SingleDevice())
    ]
    assert_equal(*both, tolerance=1e-9)


def test_averages_are_swapped_shard_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> keras.Model:
        return perceptron(lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.5))

    def fit(strategy: tfpar.Strategy) -> tuple[Any, ...]:
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
        return fitted(build, data, strategy, callbacks=callbacks, validation_data=data)

    data = of_features(16)
    expected = fit(tfpar.SingleDevice())[1:]
    # Keras swaps with additions, here of whole values.
    monkeypatch.setattr(sharded_memory.ShardedMemory, "assign_add", lambda memory, _: pytest.fail(memory.name))
    assert_equal(fit(tfpar.TensorParallel(2))[1:], expected, tolerance=1e-9)


def test_layers_with_lora_become_whole() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((4, 8))
        hidden = keras.layers.MultiHeadAttention(2, 4, name="heads")(inputs, inputs)
        hidden = keras.layers.Dense(8, name="low")(keras.layers.Dense(16, "relu", name="plain")(hidden))
        model = keras.Model(inputs, hidden)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def run(strategy: tfpar.Strategy) -> tuple[list[np.ndarray], set[str]]:
        random = np.random.default_rng(3)
        data = random.normal(size=(8, 4, 8)), random.normal(size=(8, 4, 8))
        trainer = tfpar.Trainer(build, strategy, seed=0)
        trainer.fit(*data, batch_size=4, shuffle=False, verbose=0)
        keras.utils.set_random_seed(1)
        trainer.model.get_layer("low").enable_lora(2)
        trainer.model.get_layer("heads").query_dense.enable_lora(2)
        trainer.compile(keras.optimizers.SGD(0.1), "mse")
        trainer.fit(*data, batch_size=4, shuffle=False, verbose=0)
        return state(trainer.model), set(shard_sizes(trainer.model))

    found, shards = run(tfpar.TensorParallel(2))
    assert_equal(found, run(tfpar.SingleDevice())[0])
    assert shards == {"plain/kernel", "plain/bias"}


def test_rules_divide_what_they_name() -> None:
    rules = {"down/kernel": ("model", None), "gate/kernel": (None, "model"), "up": (None, None)}
    with pytest.raises(ValueError, match=r"'up' has 2 for '.*up/bias' of shape \(10,\)"):
        tfpar.Trainer(perceptron, tfpar.TensorParallel(2, layout=rules), seed=0)
    rules = {"down/kernel": ("model", None), "gate/kernel": (None, "model")}
    trainer, *found = fitted(perceptron, of_features(), tfpar.TensorParallel(2, layout=rules))
    assert set(shard_sizes(trainer.model)) == {"down/kernel", "gate/kernel", "gate/bias"}
    assert_equal(found, list(fitted(perceptron, of_features(), tfpar.SingleDevice())[1:]))


class Objectives(keras.Model):
    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective("loss", lambda batch, training: batch)]


def test_an_optimizer_that_needs_whole_weights_is_refused_before_the_first_step() -> None:
    for optimizer in (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon):
        trainer = tfpar.Trainer(lambda optimizer=optimizer: perceptron(optimizer), tfpar.TensorParallel(2), seed=0)
        before = trainer.model.get_weights()
        with pytest.raises(
            ValueError, match=rf"received {optimizer.__name__}\. Choose .* Mirrored\(shard='optimizer'\)"
        ):
            trainer.fit(*of_features(8), verbose=0)
        assert_equal(trainer.model.get_weights(), before)
    trainer.evaluate(*of_features(8), verbose=0)  # it has no update


def test_a_model_with_objectives_is_refused() -> None:
    model = Objectives()
    model.compile("sgd")
    with pytest.raises(ValueError, match="trains with the loss of compile, and Objectives has objectives"):
        tfpar.Trainer(model, tfpar.TensorParallel(2))


def transformer(optimizer: Callable[[], keras.optimizers.Optimizer]) -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(TOKENS, 8, mask_zero=True)(tokens)
    hidden = hidden + keras.layers.MultiHeadAttention(5, 4)(hidden, hidden)
    hidden = keras.layers.LayerNormalization()(hidden)
    hidden = keras.layers.Dense(8, kernel_regularizer="l2")(keras.layers.Dense(17, "gelu")(hidden))
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


@pytest.mark.extended
def test_replicas_of_shards_equal_one_device() -> None:
    def build() -> keras.Model:
        return transformer(lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1))

    tokens, targets = of_tokens()
    data = tokens[:33], targets[:33]  # the last batch has fewer examples than there are replicas
    strategy = tfpar.Hybrid(tfpar.TensorParallel(2), num_replicas=2)
    assert strategy.describe() == ("Hybrid of 2 replicas of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3)")
    _, *wanted = trained(build, data, tfpar.SingleDevice())
    trainer, *found = trained(build, data, strategy)
    assert_equal(found, wanted)
    preview = trainer.preview(tf.data.Dataset.from_tensor_slices(data).batch(8))
    assert [row.num_examples for row in preview.rows] == [4] * 4
    alone = tfpar.Trainer(build, tfpar.TensorParallel(2), seed=0)
    most = max(row.state_bytes for row in alone.preview(tf.data.Dataset.from_tensor_slices(data).batch(8)).rows)
    assert all(row.state_bytes < most for row in preview.rows), "each replica has a part of the optimizer's state"
