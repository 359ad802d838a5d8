"""Batch-dependent layers with replicas: refused, or computed exactly on the gathered batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO, THREE = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]
REFUSED = (
    r"received .*{name}.*, where an example depends on the others of its batch; set batch_dependent_layers='gather'"
)


class Centred(layers.Layer):
    """A layer that subtracts the mean of the batch, and adds a loss that is not a mean over its parts."""

    def call(self, inputs: Any) -> Any:
        mean = ops.mean(inputs, axis=0)
        self.add_loss(0.1 * ops.sqrt(ops.sum(ops.square(mean))))
        return inputs - mean


class Similar(layers.Layer):
    """A layer with attention over the examples of a batch, and a weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs: Any) -> Any:
        return ops.tensordot(ops.softmax(ops.matmul(inputs, ops.transpose(inputs))), inputs, axes=1) @ self.kernel


class Gathers(layers.Layer):
    """A layer that calls `tfpar.gather`."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(tfpar.gather(inputs), axis=0)


def with_layer(apply: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        features = keras.Input((parity_cases.NUM_FEATURES,))
        hidden = apply(layers.Dense(4, "tanh")(features))
        model = keras.Model(features, layers.Dense(3)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        return model

    return build


def sum_of_halves(stacked: Any) -> Any:
    """Return the sum of two tensors that are concatenated along the batch."""
    size = tf.shape(stacked)[0] // 2
    return stacked[:size] + stacked[size:]


class OwnCall(keras.Model):
    """A model with a batch-dependent `call`."""

    def __init__(self, reads_values: bool, first: Any) -> None:
        super().__init__(name="own")
        self.hidden, self.head, self.reads_values = layers.Dense(4, "tanh"), layers.Dense(3), reads_values
        self.first = first

    def call(self, inputs: Any) -> Any:
        hidden = self.first(self.hidden(inputs))
        if self.reads_values and not isinstance(hidden, keras.KerasTensor) and tf.executing_eagerly():
            assert np.isfinite(hidden.numpy()).all()
        return self.head(hidden - ops.mean(hidden, axis=0))


def own_call(reads_values: bool = False, first: Any = lambda hidden: hidden) -> keras.Model:
    model = OwnCall(reads_values, first)
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


BATCH_DEPENDENT: dict[str, Callable[[], keras.Model]] = {
    "centred": with_layer(lambda x: Centred(name="centred")(x)),
    "similar": with_layer(lambda x: Similar(name="similar")(x)),
    "mean": with_layer(lambda x: x - ops.mean(x, axis=0)),
    "softmax": with_layer(lambda x: layers.Softmax(axis=0, name="softmax")(x)),
    "own": lambda: own_call(reads_values=True),
    "several rows of an example": with_layer(lambda x: ops.reshape(Centred()(ops.reshape(x, (-1, 2))), (-1, 4))),
    "concatenated batches": with_layer(lambda x: layers.Lambda(sum_of_halves)(ops.concatenate([x, 2 * x], axis=0))),
    "after a layer that gathers": with_layer(lambda x: layers.Softmax(axis=0)(Gathers()(x))),
    "own after a layer that gathers": lambda: own_call(first=Gathers()),
}


def gathering(devices: Any = TWO) -> tfpar.Strategy:
    return tfpar.Mirrored(devices, batch_dependent_layers="gather")


@pytest.mark.parametrize(("model", "name"), [("centred", "centred"), ("mean", "mean"), ("own", "mean")])
def test_batch_dependent_layers_are_refused_before_the_first_step(model: str, name: str) -> None:
    trainer = tfpar.Trainer(BATCH_DEPENDENT[model], tfpar.Mirrored(TWO))
    with pytest.raises(ValueError, match=REFUSED.format(name=name)):
        trainer.fit(small.data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0
    with pytest.raises(ValueError, match=REFUSED.format(name=name)):
        trainer.predict(parity_cases.inputs(9), verbose=0)


@pytest.mark.parametrize("strategy", [lambda: tfpar.Mirrored(TWO), lambda: tfpar.Pipeline(2, 2)])
@pytest.mark.parametrize("layer", [layers.MixUp, layers.CutMix, layers.AugMix, layers.RandAugment])
@pytest.mark.parametrize("is_own", [False, True])
def test_layers_that_augment_images_belong_into_the_dataset(
    layer: type[keras.Layer], strategy: Callable[[], tfpar.Strategy], is_own: bool
) -> None:
    def build() -> keras.Model:
        stack = [layer(name="augment"), layers.Flatten(), layers.Dense(4), layers.Dense(3)]
        model = OfLayers(stack) if is_own else keras.Sequential([keras.Input((8, 8, 3)), *stack])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    images = np.random.default_rng(0).uniform(0, 255, (8, 8, 8, 3)).astype("float32")
    with pytest.raises(ValueError, match=r"call 'augment' in dataset\.map, "):
        tfpar.Trainer(build, strategy()).fit(images, np.arange(8) % 3, batch_size=8, verbose=0)


class OfLayers(keras.Model):
    """A model that reads values in its call, so that no graph describes it on replicas."""

    def __init__(self, stack: list[keras.Layer]) -> None:
        super().__init__(name="own")
        self.stack = stack

    def call(self, inputs: Any) -> Any:
        for layer in self.stack:
            inputs = layer(inputs)
        return inputs


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BATCH_DEPENDENT)
def test_batch_dependent_layers_are_gathered_and_equal_one_device(name: str) -> None:
    small.assert_trains_as_one_device(BATCH_DEPENDENT[name], small.data, gathering)


def test_gathering_equals_one_device_with_padding_batches() -> None:
    def batches() -> tf.data.Dataset:
        return parity_cases.batches(11, 2)

    small.assert_trains_as_one_device(BATCH_DEPENDENT["centred"], batches, lambda: gathering(THREE), epochs=1)


def test_predictions_of_gathered_layers_are_those_of_one_device() -> None:
    keras.utils.set_random_seed(0)
    expected = BATCH_DEPENDENT["similar"]().predict(parity_cases.inputs(19), batch_size=9, verbose=0)
    found = tfpar.Trainer(BATCH_DEPENDENT["similar"], gathering(), seed=0).predict(
        parity_cases.inputs(19), 9, verbose=0
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_layer_that_calls_gather_needs_no_argument() -> None:
    small.assert_trains_as_one_device(with_layer(lambda x: Gathers()(x)), small.data)


def test_gather_of_several_rows_of_an_example_is_refused() -> None:
    """Replicas had taken the first of these rows alone."""

    class GathersTokens(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs - ops.mean(tfpar.gather(ops.reshape(inputs, (-1, 2))))

    trainer = tfpar.Trainer(with_layer(lambda x: GathersTokens()(x)), tfpar.Mirrored(TWO))
    with pytest.raises(ValueError, match=r"one row for each example of a batch, received .* \(8, 2\) for 4 examples"):
        trainer.fit(small.data(), verbose=0)


def test_masks_random_layers_and_batch_normalization_are_accepted() -> None:
    def build() -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        hidden = layers.Embedding(11, 4, mask_zero=True)(tokens)
        hidden = layers.Dropout(0.5)(layers.LSTM(4, return_sequences=True)(hidden))
        hidden = layers.MultiHeadAttention(2, 2, dropout=0.3)(hidden, hidden)
        hidden = layers.BatchNormalization()(layers.GaussianNoise(0.1)(hidden))
        model = keras.Model(tokens, layers.Dense(2)(hidden))
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO))
    assert np.isfinite(trainer.fit(parity_cases.sequence_data(), verbose=0).history["loss"]).all()


def test_the_check_changes_no_variable_and_no_random_state() -> None:
    trainer = tfpar.Trainer(with_layer(lambda x: layers.Dropout(0.5)(layers.ReLU()(x))), tfpar.Mirrored(TWO))
    before = [variable.numpy() for variable in trainer.model.variables]
    drawn = np.random.get_state()[1].copy()
    trainer.build(small.data())
    small.assert_same_state([variable.numpy() for variable in trainer.model.variables], before)
    np.testing.assert_array_equal(np.random.get_state()[1], drawn)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Mirrored(TWO),
        lambda: tfpar.Mirrored(TWO, shard="weights"),
        lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
        lambda: tfpar.Pipeline(2, 4),
        lambda: tfpar.Pipeline(2, 1),  # its stages would drop the state
    ],
    ids=["replicas", "shards", "replicas of shards", "pipeline", "one micro-batch"],
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_stateful_layer_is_refused(strategy: Callable[[], tfpar.Strategy], bidirectional: bool) -> None:
    def build() -> keras.Model:
        features = keras.Input(batch_shape=(8, 3, 2))
        layer = layers.LSTM(2, stateful=True, name="remembers")
        if bidirectional:
            layer = layers.Bidirectional(layer, name="remembers")
        model = keras.Model(features, layers.Dense(1)(layer(features)))
        model.compile("sgd", "mse")
        return model

    def train() -> None:
        trainer = tfpar.Trainer(build, strategy())
        trainer.fit(np.zeros((16, 3, 2), "float32"), np.zeros((16, 1), "float32"), batch_size=8, verbose=0)

    with pytest.raises(ValueError, match=r"keeps a state .* 'remembers' with stateful=True.* SingleDevice\(\)"):
        train()


@pytest.mark.parametrize(
    "strategy",
    [gathering, lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2), lambda: tfpar.Pipeline(2, 1)],
    ids=["replicas", "replicas of shards", "one micro-batch"],
)
def test_a_layer_that_replaces_images_of_unknown_batches_is_refused_in_training(
    strategy: Callable[[], tfpar.Strategy],
) -> None:
    """Keras 3.15 copies the first image to all others where a step does not know how many there are."""

    def build() -> keras.Model:
        images = keras.Input((4, 4, 1))
        distorted = layers.RandomElasticTransform(1.0, (1e-9, 1e-9), value_range=(0, 1), name="distorts")(images)
        model = keras.Model(images, layers.Dense(1)(layers.Flatten()(distorted)))
        model.compile("sgd", "mse")
        return model

    images, trainer = np.random.default_rng(0).random((8, 4, 4, 1), "float32"), tfpar.Trainer(build, strategy())
    assert trainer.predict(images, verbose=0).shape == (8, 1)
    with pytest.raises(ValueError, match=r"received 'distorts'.* the distorted first one.* SingleDevice\(\)"):
        trainer.fit(images, np.zeros((8, 1)), batch_size=8, verbose=0)


def test_a_layer_with_a_fixed_batch_size_is_refused() -> None:
    def build() -> keras.Model:
        features = keras.Input(batch_shape=(8, 3, 2))
        rows = layers.Lambda(lambda x: ops.reshape(x, (8, 6)), name="of_8")(features)
        model = keras.Model(features, layers.Dense(1)(rows))
        model.compile("sgd", "mse")
        return model

    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO))
    with pytest.raises(ValueError, match=r"must run on any number of examples, and 'of_8' .* SingleDevice\(\)"):
        trainer.fit(np.zeros((16, 3, 2), "float32"), np.zeros((16, 1), "float32"), batch_size=8, verbose=0)


def test_random_numbers_by_position_in_the_batch_are_refused() -> None:
    noise = layers.Lambda(lambda x: x * keras.random.uniform(ops.shape(x), seed=3), name="noise")
    trainer = tfpar.Trainer(with_layer(noise), tfpar.Mirrored(TWO))
    with pytest.raises(ValueError, match=REFUSED.format(name="noise")):
        trainer.fit(small.data(), verbose=0)


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_dependent_layers must be 'refuse' or 'gather', received 'allow'"):
        tfpar.Mirrored(TWO, batch_dependent_layers="allow")  # type: ignore[arg-type]


def test_ragged_outputs_of_different_lengths_are_batch_independent() -> None:
    """Padded to the longest example, outputs for a part are narrower than those for the whole batch."""
    tokens = keras.Input((None,), ragged=True)
    model = keras.Model(tokens, layers.Activation(lambda values: values * 2)(tokens))
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])
    outputs = tfpar.Trainer(lambda: model, tfpar.Mirrored(TWO)).predict(ragged, verbose=0)
    assert outputs.to_list() == [[2.0], [4.0, 6.0], [8.0]]


@pytest.mark.parametrize(
    "make", [lambda: tfpar.Mirrored(TWO), lambda: tfpar.Pipeline(2, 2, devices=TWO)], ids=["m", "p"]
)
def test_tokens_as_floats_stay_within_the_vocabulary_in_trials(make: Callable[[], Any]) -> None:
    """Inputs of Keras are float32 by default; an Embedding truncates them."""

    def build() -> keras.Model:
        dense = layers.TimeDistributed(layers.Dense(2))  # of no known class, and so in a trial
        model = keras.Sequential([keras.Input((6,)), layers.Embedding(10, 3), dense])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    tokens, targets = np.full((8, 6), 9.0, "float32"), np.ones((8, 6, 2))
    expected = tfpar.Trainer(build).fit(tokens, targets, verbose=0).history
    small.assert_same_history(tfpar.Trainer(build, make()).fit(tokens, targets, verbose=0).history, expected)


class MeanOfPadded(layers.Layer):
    """A mean over the positions of the longest example, which divides a sum by the length of its part of a batch."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def call(self, tokens: Any) -> Any:
        padded = tokens.to_tensor()
        tf.debugging.assert_less_equal(tf.shape(padded)[1], self.longest, message="too long")
        return tf.reduce_mean(padded, 1, keepdims=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape[0], 1


@pytest.mark.parametrize(
    ("longest", "sentence"), [(99, "where an example depends on the others"), (3, "fails on lengths other than")]
)
def test_equal_lengths_in_the_first_batch_do_not_hide_padding(longest: int, sentence: str) -> None:
    def build() -> keras.Model:
        tokens = keras.Input((None,), ragged=True)
        model = keras.Model(tokens, layers.Dense(1)(MeanOfPadded(longest)(tokens)))
        model.compile("sgd", "mse")
        return model

    rows = tf.ragged.constant([[1.0, 2.0, 3.0]] * 8 + [[1.0], [2.0, 3.0]] * 4)
    data = tf.data.Dataset.from_tensor_slices((rows, np.ones((16, 1), "float32"))).batch(8)
    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO), seed=0)
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(data, verbose=0)


def test_texts_are_gathered() -> None:
    def build() -> keras.Model:
        text = keras.Input((), dtype="string")
        vectors = layers.TextVectorization(vocabulary=["a", "b", "c"])(text)  # as long as the longest text of a batch
        words = layers.Embedding(5, 4)(vectors)
        model = keras.Model(text, layers.Dense(3)(layers.GlobalAveragePooling1D()(words)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def texts() -> tf.data.Dataset:
        text = tf.constant(["a b", "c", "", "\u00e9 a b c", "b", "a c b", "c c"])
        return tf.data.Dataset.from_tensor_slices((text, [0, 1, 2, 0, 1, 2, 0])).batch(3)

    small.assert_trains_as_one_device(build, texts, gathering)
