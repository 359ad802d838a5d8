"""What pipelines promise beyond the parity table: any graph of layers, states, precision, Keras' verbs, refusals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.eager import context

import tfpar
from tests.parity_cases import NUM_CLASSES, NUM_FEATURES, classifier, inputs, labels
from tests.small import assert_same_history, assert_same_state, shuffled, state
from tests.test_parity import computing_in

pytestmark = pytest.mark.usefixtures("logical_cpus")

Build = Callable[[], keras.Model]
NUM_EXAMPLES, BATCH_SIZE = 19, 8  # the last batch of 3 has fewer examples than there are micro-batches
TOLERANCE = 1e-9


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(NUM_EXAMPLES, *shape)).astype(keras.config.floatx())


def tokens(length: int) -> np.ndarray:
    return np.random.default_rng(9).integers(1, 11, size=(NUM_EXAMPLES, length))


def batched(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


def labelled() -> tf.data.Dataset:
    return batched(inputs(NUM_EXAMPLES), labels(NUM_EXAMPLES))


def sequential(*hidden: Any, optimizer: Any = "sgd", **compiled: Any) -> Build:
    """Return a model function of a Dense(8), the given layers, made anew each time, and a Dense(3)."""
    return classifier(
        lambda: keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer(),
        layers=lambda: [make() for make in hidden],
        **compiled,
    )


deep = sequential(lambda: layers.Dense(8, "tanh"), lambda: layers.Dense(8, "tanh"), optimizer="adam")


# --- any graph of layers ----------------------------------------------------------------------------------------------


class CountsAndAddsLoss(layers.Layer):
    """Holds a metric and adds losses, one of them in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, features: Any, training: bool = False) -> Any:
        self.size.update_state(features)
        self.add_loss(0.1 * ops.mean(ops.square(features)))
        if training:
            self.add_loss(0.01 * ops.sum(ops.abs(features)))
        return features


def graph_of_layers() -> keras.Model:
    """Inputs and outputs in dicts, skips with several consumers, a mask over cuts, a layer used twice far apart."""
    image, text = keras.Input((NUM_FEATURES,), name="image"), keras.Input((6,), dtype="int32", name="text")
    again = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l1")
    words = layers.LSTM(8, return_sequences=True)(layers.Embedding(11, 4, mask_zero=True)(text))
    first = layers.Dense(8, "tanh")(image)
    hidden = again(first) + layers.GlobalAveragePooling1D()(words)
    early = layers.Dense(2, name="early")(hidden)
    hidden = again(layers.Dense(8)(hidden * first) + first)
    late = layers.Dense(NUM_CLASSES, name="late")(layers.concatenate([hidden, image]))
    model = keras.Model({"image": image, "text": text}, {"late": late, "early": early})
    model.compile(
        keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
        {"late": crossentropy(), "early": "mse"},
        loss_weights={"late": 1.0, "early": 0.3},
        metrics={"late": ["accuracy"]},
    )
    return model


def graph_data() -> tf.data.Dataset:
    features = {"text": tokens(6) * (np.arange(6) < 4), "image": inputs(NUM_EXAMPLES)}
    return batched(features, {"early": random(2), "late": labels(NUM_EXAMPLES)})


def tied_weights() -> keras.Model:
    """One embedding in three stages: as a layer, backwards, and read by a layer that does not own it."""
    text = keras.Input((6,), dtype="int32")
    embedding, other = layers.ReversibleEmbedding(11, 4), layers.Embedding(11, 4)
    hidden = layers.Dense(4, "tanh")(embedding(text) + other(text))
    hidden = layers.Lambda(lambda h: ops.matmul(h, ops.transpose(other.embeddings)))(layers.Dense(4)(hidden))
    model = keras.Model(text, embedding(layers.Dense(4)(hidden), reverse=True))
    model.compile(keras.optimizers.Adam(0.01), crossentropy())
    return model


class OwnCall(keras.Model):
    """Gives weights, its own and a layer's, to operations, and adds a loss between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = layers.Embedding(11, 4), layers.Embedding(6, 4)
        inner = keras.Sequential([layers.Dense(8, "tanh"), keras.Sequential([layers.Dense(4)])])
        self.inner = inner
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, text: Any) -> Any:
        hidden = self.embedding(text) + self.position(ops.arange(ops.shape(text)[1]))
        hidden = self.inner(hidden) * self.scale
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))


def own_call() -> keras.Model:
    model = OwnCall()
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return model


def only_added_losses() -> keras.Model:
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), layers.Dense(4), CountsAndAddsLoss(), layers.Dense(3)])
    model.add(CountsAndAddsLoss())
    model.compile("sgd")
    return model


def weights_without_gradient() -> keras.Model:
    """An output without a loss, and layers behind a stop: weight decay must leave them alone, as in Keras."""
    features = keras.Input((NUM_FEATURES,))
    stopped = layers.Lambda(ops.stop_gradient)(layers.Dense(8)(features))
    model = keras.Model(features, [layers.Dense(NUM_CLASSES)(stopped), layers.Dense(2)(layers.Dense(4)(stopped))])
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), [crossentropy(), None])
    return model


def loops_and_lookups() -> keras.Model:
    word = keras.Input((1,), dtype="string")
    hidden = layers.Flatten()(layers.Embedding(5, 4)(layers.StringLookup(vocabulary=["a", "b"])(word)))
    hidden = layers.Lambda(lambda x: ops.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, ops.tanh(y)), (0, x))[1])(
        layers.Dense(4)(hidden)
    )
    hidden = layers.Lambda(lambda x: ops.cond(ops.sum(ops.ones(2)) > 1, lambda: 2 * x, lambda: x))(hidden)
    model = keras.Model(word, layers.Dense(NUM_CLASSES)(hidden))
    model.compile("sgd", crossentropy())
    return model


def layers_behind_a_loop() -> keras.Model:
    """What keeps the steps of a loop is made when TensorFlow differentiates it, after the gradients of what follows."""
    behind = [layers.Dense(4, "tanh"), layers.Dense(4, "tanh"), layers.Dense(NUM_CLASSES)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(11, 4), layers.LSTM(4), *behind])
    model.compile("sgd", crossentropy())
    return model


class AddsLossOfEach(layers.Layer):
    """Adds a loss of each example, as CTC's endpoint layers do, which Keras sums."""

    def call(self, features: Any) -> Any:
        self.add_loss(ops.mean(ops.square(features), axis=(1, 2))[:, 0:1])
        return features


def grouped_convolutions() -> keras.Model:
    """On CPUs Keras compiles them with XLA, and what XLA compiles cannot read the weights of another device."""
    grouped = [layers.Conv2D(4, 2, groups=2, padding="same") for _ in range(3)]
    checked = [layers.Lambda(lambda x: 2 * x), AddsLossOfEach()]
    hidden = [grouped[0], checked[0], grouped[1], checked[1], grouped[2]]
    model = keras.Sequential([keras.Input((3, 3, 4)), *hidden, layers.Flatten(), layers.Dense(NUM_CLASSES)])
    model.compile("sgd", crossentropy())
    return model


class Distiller(keras.Model):
    """Its loss calls a teacher, frozen or not, and reads a weight of a stage and one that no stage has."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.student = keras.Sequential([layers.Embedding(11, 4), layers.Flatten(), layers.Dense(8), layers.Dense(3)])
        self.teacher = keras.Sequential(
            [layers.Embedding(11, 4), layers.Flatten(), layers.BatchNormalization(), layers.Dense(3)]
        )
        self.teacher.build((None, 6))
        self.teacher.trainable = not frozen
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, text: Any) -> Any:
        return self.student(text)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        wanted = self.teacher(x, training=False)
        first = ops.take(self.student.layers[0].embeddings, x[:, 0], axis=0)
        away = ops.mean(ops.square(y_pred / self.temperature - wanted))
        penalty = ops.sum(ops.square(self.student.layers[-1].kernel))
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return own + away + ops.mean(first) + 0.1 * penalty


def distiller(*, frozen: bool) -> Build:
    def build() -> keras.Model:
        model = Distiller(frozen=frozen)
        model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
        return model

    return build


class MeanOfRow(layers.Layer):
    """The mean of each row, however long."""

    def call(self, rows: Any) -> Any:
        return tf.reduce_mean(rows, axis=1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[-1])


def ragged_rows() -> keras.Model:
    """Words of a ragged batch, embedded in one stage, turned in the next, and averaged in a third."""
    words, numbers = keras.Input((None,), dtype="int32", ragged=True), keras.Input((None, 4), ragged=True)
    turned = layers.Lambda(lambda x: 2 * x)(layers.Embedding(11, 4)(words))
    means = [MeanOfRow()(turned), layers.Dense(4, "tanh")(MeanOfRow()(numbers))]
    model = keras.Model([words, numbers], layers.Dense(NUM_CLASSES)(layers.Dense(8, "tanh")(layers.Add()(means))))
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return model


def ragged_data() -> tf.data.Dataset:
    lengths = np.random.default_rng(4).integers(1, 7, size=NUM_EXAMPLES)
    rows = tf.RaggedTensor.from_tensor(tokens(6), lengths), tf.RaggedTensor.from_tensor(random(6, 4), lengths[::-1])
    return batched(rows, labels(NUM_EXAMPLES))


MODELS: dict[str, tuple[Build, Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "a graph of layers": (graph_of_layers, graph_data, {"num_stages": 4, "schedule": "interleaved"}),
    "tied weights": (tied_weights, lambda: batched(tokens(6), tokens(6)), {"num_stages": 4, "schedule": "zero_bubble"}),
    "a call of its own": (own_call, lambda: batched(tokens(6), tokens(6)), {"num_stages": 3, "recompute": True}),
    "only added losses": (only_added_losses, lambda: batched(inputs(NUM_EXAMPLES)), {"num_stages": 3}),
    "weights without gradient": (
        weights_without_gradient,
        lambda: batched(inputs(NUM_EXAMPLES), (labels(NUM_EXAMPLES), random(2))),
        {"num_stages": 4, "schedule": "zero_bubble"},
    ),
    "grouped convolutions": (
        grouped_convolutions,
        lambda: batched(random(3, 3, 4), labels(NUM_EXAMPLES)),
        {"num_stages": 4},
    ),
    "a frozen teacher": (
        distiller(frozen=True),
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 3, "schedule": "zero_bubble"},
    ),
    "a teacher that learns": (
        distiller(frozen=False),
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 2, "schedule": "gpipe"},
    ),
    "ragged rows": (ragged_rows, ragged_data, {"num_stages": 4, "schedule": "zero_bubble"}),
    "loops and lookups": (
        loops_and_lookups,
        lambda: batched(np.array(["a", "b", "c"])[labels(NUM_EXAMPLES)][:, None], labels(NUM_EXAMPLES)),
        {"num_stages": 3, "recompute": True},
    ),
    "layers behind a loop": (
        layers_behind_a_loop,
        lambda: batched(tokens(6), labels(NUM_EXAMPLES)),
        {"num_stages": 1, "recompute": True},
    ),
}


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name.replace(" ", "_"))
def test_a_model_trains_and_evaluates_as_on_one_device(name: str) -> None:
    build, data, settings = MODELS[name]
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        expected = model.fit(data(), epochs=2, verbose=0).history
        trainer = tfpar.Trainer(build, tfpar.Pipeline(num_microbatches=4, balance="parameters", **settings), seed=0)
        history = trainer.fit(data(), epochs=2, verbose=0).history
        assert_same_history(history, expected, TOLERANCE)
        assert_same_state(state(trainer.model), state(model), TOLERANCE)
        logs = trainer.evaluate(data(), verbose=0, return_dict=True)
        assert logs == pytest.approx(model.evaluate(data(), verbose=0, return_dict=True), rel=TOLERANCE)
        for actual, wanted in zip(
            keras.tree.flatten(trainer.predict(data(), verbose=0)),
            keras.tree.flatten(model.predict(data(), verbose=0)),
            strict=True,
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_first_batch_may_have_fewer_examples_than_there_are_micro_batches(schedule: str) -> None:
    def sizes(*sizes: int) -> tf.data.Dataset:
        parts = [labelled().unbatch().skip(sum(sizes[:number])).take(size) for number, size in enumerate(sizes)]
        weights = [tf.data.Dataset.from_tensors(1.0 + tf.range(size, dtype="float64")) for size in sizes]
        batches = [tf.data.Dataset.zip(part.batch(8), weight) for part, weight in zip(parts, weights, strict=True)]
        batches = [batch.map(lambda one, weight: (*one, weight)) for batch in batches]
        return functools.reduce(tf.data.Dataset.concatenate, batches)

    build = sequential(CountsAndAddsLoss, lambda: layers.Dense(8, kernel_regularizer="l2"), optimizer="adam")
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        model.run_eagerly = True  # compiled, Keras' own step is 4e-4 off: it can read a weight after its update
        expected = model.fit(sizes(1, 5, 3, 2), epochs=2, verbose=0).history
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, schedule, "parameters"), seed=0)
        assert_same_history(trainer.fit(sizes(1, 5, 3, 2), epochs=2, verbose=0).history, expected, TOLERANCE)
        assert_same_state(state(trainer.model), state(model), TOLERANCE)
        np.testing.assert_allclose(
            trainer.predict(inputs(1), verbose=0), model.predict(inputs(1), verbose=0), rtol=TOLERANCE
        )


@pytest.mark.parametrize(
    ("schedule", "num_hidden", "num_stages"),
    [("1f1b", 0, 1), ("zero_bubble", 1, 2), ("interleaved", 0, 1), ("interleaved", 2, 3)],
)
def test_a_model_of_fewer_calls_than_stages_trains_in_fewer_stages_with_a_warning(
    schedule: str, num_hidden: int, num_stages: int
) -> None:
    def build() -> keras.Model:
        hidden = [layers.Dense(8, "tanh") for _ in range(num_hidden)]
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), *hidden, layers.Dense(NUM_CLASSES)])
        model.compile("sgd", crossentropy(), metrics=["accuracy"])
        return model

    devices = ["CPU:0"] if num_hidden == 2 else None
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        expected = build().fit(labelled(), epochs=2, verbose=0).history
        with pytest.warns(UserWarning, match=f"for 4 stages: it runs in {num_stages} on CPU:0"):
            trainer = tfpar.Trainer(build, tfpar.Pipeline(4, 2, schedule, devices=devices), seed=0)
        found = trainer.fit(labelled(), epochs=2, verbose=0).history
    assert_same_history(found, expected, TOLERANCE)
    assert len(trainer.strategy.look_ahead(trainer.model, next(iter(labelled()))).rows) == num_stages


def test_layers_may_be_frozen_and_unfrozen_between_two_fits() -> None:
    def freeze(model: keras.Model, frozen: int, optimizer: Any) -> keras.Model:
        for index, layer in enumerate(model.layers):
            layer.trainable = index != frozen
        model.compile(optimizer, crossentropy())
        return model

    def build() -> keras.Model:
        return freeze(deep(), 0, keras.optimizers.AdamW(0.01))

    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        trainer = tfpar.Trainer(build, tfpar.Pipeline(3, 3, "zero_bubble", "parameters"), seed=0)
        for one, fit in ((model, model.fit), (trainer.model, trainer.fit)):
            fit(labelled(), verbose=0)
            freeze(one, 1, keras.optimizers.SGD(0.1))
            fit(labelled(), verbose=0)
        assert_same_state(state(trainer.model), state(model), TOLERANCE)


# --- weights where they belong ----------------------------------------------------------------------------------------


def test_weights_and_optimizer_state_live_on_the_device_of_their_stage(tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = deep()
        model.compile(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), crossentropy())
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(3, 2, balance=[1, 2, 1]), seed=0)
    homes = dict(zip((layer.name for layer in trainer.model.layers), (0, 1, 1, 2), strict=True))
    assert _homes(trainer.model, homes) == 8
    trainer.fit(labelled(), verbose=0)
    assert _homes(trainer.model, homes) == 8 * 5
    trainer.save(tmp_path / "model.keras")
    # A model with optimizer state moves as a whole, to where another pipeline wants it.
    again = tfpar.Trainer(
        lambda: keras.models.load_model(tmp_path / "model.keras"), tfpar.Pipeline(2, 2, balance=[1, 3]), seed=0
    )
    homes = dict(zip(homes, (0, 1, 1, 1), strict=True))
    assert _homes(again.model, homes) == 8 * 5
    assert_same_state(state(again.model), state(trainer.model))


def _homes(model: keras.Model, homes: dict[str, int]) -> int:
    """Check on which device each variable of a layer is, and return how many there are."""
    count = 0
    for variable, (layer, home) in itertools.product([*model.variables, *model.optimizer.variables], homes.items()):
        if f"{layer}/" in variable.path or f"{layer}_kernel" in variable.path or f"{layer}_bias" in variable.path:
            assert variable.value.device.endswith(f"CPU:{home}"), variable.path
            count += 1
    return count


def test_initial_weights_are_those_of_one_device_whatever_draws_them() -> None:
    def build() -> keras.Model:
        generator = keras.random.SeedGenerator(5)
        draws = [
            keras.initializers.RandomNormal(seed=generator),
            lambda shape, dtype=None: np.random.normal(size=shape),
            keras.initializers.RandomNormal(seed=generator),
            lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype),
        ]
        parts = [layers.Dense(8, kernel_initializer=draw) for draw in draws]
        for part in reversed(parts):  # in another order than that of the model
            part.build((None, 8))
        parts[0].set_weights(parts[1].get_weights())
        model = keras.Sequential([keras.Input((8,)), *parts])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    keras.utils.set_random_seed(0)
    expected = build().get_weights()
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
    assert_same_state(trainer.model.get_weights(), expected)


def test_one_strategy_serves_several_models() -> None:
    strategy = tfpar.Pipeline(2, 2, balance="parameters")
    first, second = (tfpar.Trainer(build, strategy, seed=0) for build in (deep, sequential()))
    histories = [trainer.fit(labelled(), verbose=0).history["loss"] for trainer in (first, second, first)]
    assert histories[2] < histories[0] != histories[1]


# --- states and chance ------------------------------------------------------------------------------------------------


def test_batch_normalization_takes_statistics_of_each_micro_batch_and_moves_averages_once_a_step() -> None:
    build = sequential(
        lambda: layers.Dense(8, use_bias=False),
        lambda: layers.BatchNormalization(momentum=0.9),
        lambda: layers.Activation("tanh"),
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        for features, targets in labelled():
            _step_by_hand(model, features, targets, num_microbatches=3)
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 3, "zero_bubble", "parameters", recompute=True), seed=0)
        trainer.fit(labelled(), verbose=0)
    assert_same_state(trainer.model.get_weights(), model.get_weights(), TOLERANCE)


def _step_by_hand(model: keras.Model, features: Any, targets: Any, num_microbatches: int) -> None:
    size, averages = len(features), model.non_trainable_variables
    before = [variable.numpy() for variable in averages]
    after, gradients = [0.0 * value for value in before], [0.0 for _ in model.trainable_variables]
    ends = [-(-number * size // num_microbatches) for number in range(num_microbatches + 1)]
    for begin, end in itertools.pairwise(ends):
        with tf.GradientTape() as tape:
            outputs = model(features[begin:end], training=True)
            loss = crossentropy()(targets[begin:end], outputs) * (end - begin) / size
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        gradients = [total + gradient for total, gradient in zip(gradients, found, strict=True)]
        for index, variable in enumerate(averages):
            after[index] += variable.numpy() * (end - begin) / size
            variable.assign(before[index])
    for variable, value in zip(averages, after, strict=True):
        variable.assign(value)
    model.optimizer.apply(gradients, model.trainable_variables)


class UniformNoise(layers.Layer):
    """Draws from Keras' generator of no layer, in training."""

    def call(self, features: Any, training: bool = False) -> Any:
        return features * keras.random.uniform(ops.shape(features)) if training else features


RANDOM = sequential(lambda: layers.Dropout(0.5), lambda: layers.Dense(8), UniformNoise)


def test_with_one_micro_batch_chance_is_that_of_one_device() -> None:
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = RANDOM()
        model.fit(labelled(), epochs=2, verbose=0)
        trainer = tfpar.Trainer(RANDOM, tfpar.Pipeline(3, 1, balance="parameters", recompute=True), seed=0)
        trainer.fit(labelled(), epochs=2, verbose=0)
    assert_same_state(state(trainer.model), state(model), TOLERANCE)


def test_with_several_micro_batches_neither_recomputation_nor_the_schedule_changes_chance() -> None:
    states = []
    for schedule, recompute in (("1f1b", False), ("1f1b", True), ("zero_bubble", True)):
        trainer = tfpar.Trainer(RANDOM, tfpar.Pipeline(2, 4, schedule, [2, 3], recompute=recompute), seed=0)
        trainer.fit(labelled(), verbose=0)
        states.append(state(trainer.model))
    assert_same_state(states[1], states[0], 1e-6)
    assert_same_state(states[2], states[0], 1e-6)


def test_micro_batches_draw_masks_of_their_own() -> None:
    def build() -> keras.Model:
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((64,)), layers.Identity(), layers.Dropout(0.5), dense])
        model.compile(keras.optimizers.SGD(1.0), "mae")
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, balance=[1, 2]), seed=0)
    trainer.fit(np.ones((4, 64)), np.ones((4, 1)), batch_size=4, verbose=0)
    # Each weight grew by 2/4 for every micro-batch that kept its input; with one mask they would be 0 or 2.
    assert set(np.ravel(trainer.model.get_weights()[0])) == {0.0, 0.5, 1.0, 1.5, 2.0}


def test_random_operations_of_tensorflow_itself_are_not_drawn_again() -> None:
    def build() -> keras.Model:
        noise = layers.Lambda(lambda x: x * tf.random.uniform(tf.shape(x)))
        first = layers.EinsumDense("bi,i->bi", output_shape=64, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((64,)), first, noise, layers.Identity()])
        model.compile(keras.optimizers.SGD(1.0), "mae")
        return model

    tf.random.set_seed(None)
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance=[2, 1], recompute=True), seed=None)
    loss = trainer.fit(np.ones((4, 64)), np.zeros((4, 64)), batch_size=4, verbose=0).history["loss"]
    # The loss is the mean of the noise, and so is the gradient, summed over the weights.
    assert 1 - np.mean(trainer.model.get_weights()[0]) == pytest.approx(loss[0] / 64, rel=1e-4)


# --- precision and modes ----------------------------------------------------------------------------------------------


def test_mixed_float16_scales_the_loss_and_skips_a_step_that_overflows() -> None:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = deep()
        finally:
            keras.config.set_dtype_policy("float32")
        inner = keras.optimizers.SGD(0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**30), crossentropy())
        return model

    one, other = (
        tfpar.Trainer(build, strategy, seed=0)
        for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(3, 1, balance="parameters", recompute=True))
    )
    before = one.model.get_weights()
    batch = labelled().take(1)
    for trainer in (one, other):
        trainer.fit(batch, verbose=0)
        assert_same_state(trainer.model.get_weights(), before)
        assert float(trainer.model.optimizer.dynamic_scale) == 2.0**29
        trainer.fit(batch, epochs=20, verbose=0)
    assert_same_state(state(other.model), state(one.model), 1e-5)
    assert np.max(np.abs(one.model.get_weights()[0] - before[0])) > 0


def test_run_eagerly_and_several_steps_a_call_change_nothing() -> None:
    def eager() -> keras.Model:
        model = deep()
        model.compile("adam", crossentropy(), run_eagerly=True)
        return model

    states = []
    for build, more in ((deep, {"steps_per_call": 3}), (eager, {})):
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
        trainer.fit(labelled(), verbose=0, **more)
        states.append(state(trainer.model))
    assert_same_state(states[1], states[0], 1e-6)


# --- Keras' verbs -----------------------------------------------------------------------------------------------------


def test_the_arguments_and_callbacks_of_fit_do_what_they_do_in_keras(tmp_path: Path) -> None:
    histories, models = [], []
    with computing_in("float64"):
        for folder in ("keras", "pipeline"):
            if folder == "keras":
                keras.utils.set_random_seed(0)
                model = deep()
                fit = model.fit
            else:
                trainer = tfpar.Trainer(deep, tfpar.Pipeline(2, 3, balance="parameters"), seed=0)
                model, fit = trainer.model, trainer.fit
            callbacks = [
                keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best_weights=True),
                keras.callbacks.ModelCheckpoint(tmp_path / folder / "{epoch}.keras"),
                keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
                keras.callbacks.TensorBoard(tmp_path / folder / "logs", histogram_freq=1),
            ]
            more = {"validation_split": 0.2, "sample_weight": np.linspace(0, 2, NUM_EXAMPLES), "callbacks": callbacks}
            features, targets = inputs(NUM_EXAMPLES), labels(NUM_EXAMPLES)
            found = fit(features, targets, batch_size=7, epochs=6, shuffle=False, verbose=0, **more)
            histories.append(found.history)
            models.append(model)
        assert_same_history(histories[1], histories[0], TOLERANCE)
        assert_same_state(models[1].get_weights(), models[0].get_weights(), TOLERANCE)
        saved = [keras.models.load_model(tmp_path / name / "2.keras").get_weights() for name in ("keras", "pipeline")]
        assert_same_state(saved[1], saved[0], TOLERANCE)
    assert len(histories[0]["loss"]) < 6


def test_a_run_is_resumed_by_one_device_and_by_pipelines_of_other_stages(tmp_path: Path) -> None:
    strategies = [
        tfpar.Pipeline(3, 4, "zero_bubble", [1, 1, 2]),
        tfpar.SingleDevice(),
        tfpar.Pipeline(2, 3, balance=[3, 1], recompute=True),
    ]
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = deep()
        model.fit(labelled(), epochs=len(strategies), verbose=0)
        for number, strategy in enumerate(strategies):
            trainer = tfpar.Trainer(deep, strategy, seed=0)
            stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, trainer=trainer: trainer.interrupt())
            last = number == len(strategies) - 1
            checkpoints = tfpar.Checkpoints(tmp_path)
            history = trainer.fit(
                labelled(), epochs=3, verbose=0, checkpoints=checkpoints, callbacks=None if last else [stop]
            )
            assert history.epoch[-1] == number
    assert_same_state(state(trainer.model), state(model), TOLERANCE)


# --- refusals, each before the first step -----------------------------------------------------------------------------


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, features: Any) -> Any:
        return features - ops.mean(features, axis=0, keepdims=True)


class DependsOnTraining(keras.Model):
    """Applies other operations in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.last = layers.Dense(4), layers.Dense(NUM_CLASSES)

    def call(self, features: Any, training: bool = False) -> Any:
        return self.last(2 * self.dense(features) if training else self.dense(features))


class ScalesLoss(keras.Model):
    """Makes something of its own out of all losses, penalties included."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def own_loss(kind: type[keras.Model], **dense: Any) -> Build:
    def build() -> keras.Model:
        features = keras.Input((NUM_FEATURES,))
        model = kind(features, layers.Dense(NUM_CLASSES)(layers.Dense(4, **dense)(features)))
        model.compile("sgd", crossentropy())
        return model

    return build


def depends_on_training() -> keras.Model:
    model = DependsOnTraining()
    model.compile("sgd", crossentropy())
    return model


def named() -> keras.Model:
    names = [layers.Dense(3, name=name) for name in ("a", "b", "c")]
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), *names])
    model.compile("sgd", crossentropy())
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 0}, "num_stages must be a whole number of at least 1, received 0"),
        ({"num_microbatches": 2.5}, r"num_microbatches must be a whole number of at least 1, received 2\.5"),
        ({"schedule": "1F1B"}, "must be one of gpipe, 1f1b, interleaved, zero_bubble, and this one is '1F1B'"),
        ({"num_stages": 4, "num_microbatches": 3, "schedule": "interleaved"}, "Set num_microbatches to 4"),
        ({"num_stages": 4, "schedule": "interleaved", "devices": ["CPU:0", "CPU:1", "CPU:2"]}, "Set num_stages to 6"),
        ({"num_stages": 5}, r"5 stages under '1f1b' need 5 devices, and there are 4.* Use fewer stages"),
        ({"devices": ["GPU:0", "GPU:1"]}, r"different devices of this machine, received \['GPU:0', 'GPU:1'\]"),
        ({"devices": ["CPU:0", "CPU:0"]}, "must name different devices"),
        ({"num_stages": 3, "devices": ["CPU:0", "CPU:1"]}, "needs a device for each stage.* Set num_stages to 2"),
        ({"balance": "speed"}, "must be one of time, flops, parameters, memory, received 'speed'"),
        ({"balance": [0, 3]}, r"2 numbers above 0, received \[0, 3\]"),
        ({"balance": ["a", "b"]}, r"1 for 2 stages, received 2: \['a', 'b'\]"),
    ],
)
def test_settings_that_cannot_be_are_refused_when_the_strategy_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfpar.Pipeline(**{"num_stages": 2, "num_microbatches": 2, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": [1, 1]}, r"add up to the 3 layer calls of the model, received \[1, 1\], which adds up to 2"),
        ({"balance": ["nope"]}, "received 'nope'; the model has 'a', 'b', 'c'"),
        ({"balance": ["a"]}, "must leave a layer before it, received 'a'.* such as 'b'"),
        ({"num_stages": 3, "balance": ["c", "b"]}, r"received 'c' before 'b', which comes first; write \['b', 'c'\]"),
        ({"memory_limit_bytes": 100}, "memory_limit_bytes=100, and 'a' alone needs .* raise the limit to"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_when_the_trainer_is_made(
    settings: dict[str, Any], message: str
) -> None:
    strategy = tfpar.Pipeline(**{"num_stages": 2, "num_microbatches": 2, "balance": "parameters", **settings})
    with pytest.raises(ValueError, match=message):
        tfpar.Trainer(named, strategy)


@pytest.mark.parametrize(
    ("build", "num_microbatches", "message"),
    [
        (
            sequential(lambda: Centred(name="centred")),
            2,
            "received 'centred', .*num_microbatches=1, or allow_mixing=True",
        ),
        (depends_on_training, 2, "received DependsOnTraining, where they differ at 'multiply"),
        (own_loss(ScalesLoss, kernel_regularizer="l2"), 2, "ScalesLoss has a penalty on .* train on SingleDevice"),
        (sequential(lambda: layers.SpectralNormalization(layers.Dense(4))), 2, "as SpectralNormalization does"),
    ],
    ids=["mixing", "training", "own loss of penalties", "assigned weight"],
)
def test_a_model_that_micro_batches_would_change_is_refused_before_the_first_step(
    build: Build, num_microbatches: int, message: str
) -> None:
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, num_microbatches, balance="parameters"), seed=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(labelled(), verbose=0)
    assert int(trainer.model.optimizer.iterations) == 0


def test_sparse_batches_are_refused() -> None:
    rows = tf.sparse.from_dense(np.eye(2, 5))
    trainer = tfpar.Trainer(deep, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
    with pytest.raises(ValueError, match="takes dense and ragged batches, received a sparse tensor"):
        trainer.fit(tf.data.Dataset.from_tensors((rows, [0, 1])), verbose=0)


def test_a_layer_that_pads_ragged_rows_to_the_longest_is_refused() -> None:
    def build() -> keras.Model:
        rows = keras.Input((None,), ragged=True)
        mean = layers.Lambda(lambda x: ops.mean(x.to_tensor(), axis=1, keepdims=True), output_shape=(1,), name="padded")
        padded = mean(rows)
        model = keras.Model(rows, layers.Dense(1)(padded))
        model.compile("sgd", "mse")
        return model

    rows = tf.ragged.constant([[1.0], [2.0], [3.0], [4.0]])  # of one length, which pads nothing
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
    with pytest.raises(ValueError, match="received 'padded', where an example depends on the others"):
        trainer.fit(tf.data.Dataset.from_tensors((rows, tf.zeros([4, 1]))), verbose=0)


def test_a_layer_that_mixes_examples_is_refused_in_evaluation_and_prediction_too() -> None:
    build = sequential(lambda: Centred(name="centred"))
    for verb in ("evaluate", "predict"):
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
        with pytest.raises(ValueError, match="received 'centred'"):
            getattr(trainer, verb)(labelled(), verbose=0)
    insisted = tfpar.Trainer(build, tfpar.Pipeline(2, 2, balance="parameters", allow_mixing=True), seed=0)
    assert insisted.predict(labelled(), verbose=0).shape == (NUM_EXAMPLES, NUM_CLASSES)


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
def test_looking_ahead_leaves_the_order_of_a_shuffled_dataset_as_it_is(steps_per_epoch: int | None) -> None:
    def fitted(*, looks: bool) -> dict[str, list[float]]:
        trainer, dataset = tfpar.Trainer(classifier(), tfpar.Pipeline(2, 2, balance="parameters"), seed=0), shuffled()
        if looks:
            trainer.strategy.look_ahead(trainer.model, trainer.build(dataset))
        return trainer.fit(dataset, epochs=2, steps_per_epoch=steps_per_epoch, verbose=0).history

    assert fitted(looks=True) == fitted(looks=False)


def test_recomputation_lowers_what_a_device_must_hold_where_nothing_waits_for_weight_gradients() -> None:
    def most_bytes(schedule: str, recompute: bool) -> int:
        strategy = tfpar.Pipeline(2, 4, schedule, [2, 2], recompute=recompute, memory_limit_bytes=1)
        with pytest.raises(ValueError, match="with these cuts the devices need") as error:
            tfpar.Trainer(deep, strategy, seed=0).fit(inputs(8), labels(8), batch_size=8, verbose=0)
        _, _, needs = str(error.value).partition("the devices need ")
        return max(int(need.replace(",", "")) for need in needs.partition(" bytes")[0].split(", "))

    assert most_bytes("1f1b", recompute=True) < most_bytes("1f1b", recompute=False)
    # A W runs after the next micro-batch's B, and what that made again is there until its own W.
    assert most_bytes("zero_bubble", recompute=True) == most_bytes("zero_bubble", recompute=False)


@pytest.mark.parametrize(
    ("schedule", "recompute", "expected"),
    [
        ("1f1b", False, [(160 + 640, 0, 0, 0), (320, 0, 0, 0)]),
        ("1f1b", True, [(160, 640, 0, 0), (320, 0, 0, 0)]),
        # Nothing comes before stage 0 that needs a gradient: all that its B has to do is left to W.
        ("zero_bubble", False, [(160 + 640, 0, 0, 320), (320, 0, 0, 80)]),
        ("zero_bubble", True, [(160, 0, 640, 320), (320, 0, 0, 80)]),
    ],
)
def test_what_a_micro_batch_keeps_is_known(schedule: str, recompute: bool, expected: list[tuple[int, ...]]) -> None:
    """Of 5 examples in float32: 160 bytes into stage 0, 320 from each of its two layers, 80 out of stage 1."""

    def build() -> keras.Model:
        hidden = [layers.Dense(16, "relu"), layers.Dense(16, "relu")]
        model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4)])
        model.compile("adam", "mse")
        return model

    pipeline = tfpar.Pipeline(2, 4, schedule, [2, 1], recompute=recompute)
    trainer = tfpar.Trainer(build, pipeline, seed=0)
    arrays = np.ones((20, 8), "float32"), np.ones((20, 4), "float32")
    batch = trainer.build(tf.data.Dataset.from_tensor_slices(arrays).batch(20))
    outlook = pipeline.look_ahead(trainer.model, batch)
    sizes = outlook.durations
    kept = (sizes.activation_bytes, sizes.backward_bytes, sizes.weight_gradient_bytes, sizes.waiting_bytes)
    assert list(zip(*kept, strict=True)) == expected
    assert tuple(row.memory_bytes for row in outlook.rows) == outlook.planned.peak_bytes


class AddsDrawnRow(layers.Layer):
    """Adds one row of a table to all examples that it sees together, drawn at random."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.table = layers.Embedding(1000, NUM_FEATURES, embeddings_initializer="zeros")
        self.generator = keras.random.SeedGenerator(0)

    def build(self, shape: Any) -> None:
        self.table.build(None)

    def call(self, features: Any) -> Any:
        return features + self.table(self.draw(self.generator))


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: keras.random.randint((1,), 0, 1000, seed=generator),
        lambda generator: tf.random.uniform((1,), maxval=1000, dtype="int32", seed=0),
    ],
    ids=["Keras", "TensorFlow"],
)
def test_each_micro_batch_trains_the_row_that_it_drew(draw: Callable[[Any], Any]) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), AddsDrawnRow(draw), layers.Dense(NUM_CLASSES)])
        model.compile("sgd", crossentropy())
        return model

    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, balance=[1, 1]), seed=0)
    trainer.fit(inputs(8), labels(8), batch_size=8, verbose=0)
    table = trainer.model.layers[0].table.embeddings.numpy()
    assert np.count_nonzero(np.any(table != 0, axis=1)) == 4


def test_a_traced_step_shows_devices_that_work_at_the_same_time() -> None:
    """stage 0  F0 F1 F2 F3 …
    stage 1     F0 F1 F2 …      in TensorFlow's own order, all clocks were read one after the other, and so ran this."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((256,)), layers.Dense(2048, "gelu"), layers.Dense(2048, "gelu")])
        model.compile("sgd", "mse")
        return model

    pipeline = tfpar.Pipeline(2, 4, "gpipe", balance=[1, 1])
    trainer = tfpar.Trainer(build, pipeline, seed=0)
    arrays = np.ones((256, 256), "float32"), np.ones((256, 2048), "float32")
    batch = trainer.build(tf.data.Dataset.from_tensor_slices(arrays).batch(256))
    spans = pipeline.trace(trainer.model, batch).spans
    stages = [[span for span in spans if span.device == device] for device in range(2)]
    together = [
        (one.action, other.action)
        for one in stages[0]
        for other in stages[1]
        if one.begin_seconds < other.end_seconds and other.begin_seconds < one.end_seconds
    ]
    assert together, f"no two actions of different devices overlap in {spans}"


@pytest.fixture
def graph_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What TensorFlow shall do to graphs: set what a user would, and read what a function called now would get."""
    here = context.context()

    def read(**chosen: bool) -> Any:
        monkeypatch.setattr(here, "_optimizer_experimental_options", chosen)
        here.function_call_options = None  # read anew, as after tf.config.optimizer.set_experimental_options
        with tfpar.Pipeline(1, 1).around_steps():
            serialized = here.function_call_options.config_proto_serialized
        return tf.compat.v1.ConfigProto.FromString(serialized).graph_options.rewrite_options

    yield read
    monkeypatch.undo()
    here.function_call_options = None


def test_steps_leave_out_most_passes_of_the_graph_optimizer_and_what_comes_after_them_does_not(
    graph_options: Callable[..., Any],
) -> None:
    assert "constfold" in graph_options().optimizers
    after = context.context().function_call_options.config_proto_serialized
    assert not tf.compat.v1.ConfigProto.FromString(after).graph_options.rewrite_options.ByteSize()


def test_what_a_user_chose_of_the_graph_optimizer_stands(graph_options: Callable[..., Any]) -> None:
    chosen = graph_options(constant_folding=False)
    assert chosen.constant_folding == chosen.OFF
    assert not chosen.optimizers
