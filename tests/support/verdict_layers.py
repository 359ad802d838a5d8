"""Layers that mix examples, draw random numbers or keep a state: which of them compute a part as in the whole batch?"""

from __future__ import annotations

import random as python_random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support.verdict_losses import SENTENCES, SORTED
from tests.support.verdicts import (
    EQUAL,
    INPUTS,
    LABELS,
    NUM_EXAMPLES,
    NUM_FEATURES,
    RUNS,
    VALUES,
    Applies,
    Build,
    Case,
    Refused,
    Verdict,
    batches,
    both,
    crossentropy,
    refused,
    with_layers,
)

random = np.random.default_rng(4)


def applying(function: Callable[..., Any], **attributes: Any) -> Build:
    """Return a model function with a layer that applies a function of its inputs, of `training` and of the layer."""
    return with_layers(lambda: Applies(function, **attributes))


def functional(apply: Callable[[Any], Any], shape: tuple[int, ...] = (NUM_FEATURES,)) -> Build:
    """Return a model function that applies a function to the outputs of a Dense layer."""

    def build() -> keras.Model:
        features = keras.Input(shape)
        model = keras.Model(features, layers.Dense(NUM_FEATURES)(apply(layers.Dense(4, "tanh")(features))))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    return build


def stack(make: Callable[[], list[Any]], *shape: int, dtype: str = "float32", **settings: Any) -> Build:
    """Return a model function of some layers, which begin with the input, and of a Dense layer."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input(shape, dtype=dtype, **settings), *make(), layers.Dense(3)])
        model.compile("sgd", crossentropy())
        return model

    return build


class OwnCall(keras.Model):
    """A model without a graph: its `call` applies layers and a function, and reads values where it can."""

    def __init__(self, function: Callable[..., Any], stacked: list[Any]) -> None:
        super().__init__(name="own")
        self.function, self.stacked, self.last = function, stacked, layers.Dense(NUM_FEATURES)

    def call(self, inputs: Any, training: bool = False) -> Any:
        for layer in self.stacked:
            inputs = layer(inputs)
        if not isinstance(inputs, keras.KerasTensor) and tf.executing_eagerly():
            assert np.isfinite(inputs.numpy()).all()
        return self.last(self.function(inputs, training))


def own(
    function: Callable[..., Any] = lambda inputs, training: inputs, make: Callable[[], list[Any]] = list, **loss: Any
) -> Build:
    def build() -> keras.Model:
        model = OwnCall(function, make())
        model.compile(keras.optimizers.Adam(0.05), **{"loss": "mse", **loss})
        return model

    return build


# --- layers that mix examples -----------------------------------------------------------------------------------------


def minus_mean(inputs: Any, *_: Any) -> Any:
    return inputs - ops.mean(inputs, axis=0)


class Centred(layers.Layer):
    """Subtracts the mean of the batch, and adds a loss that is not a mean over its parts."""

    def call(self, inputs: Any) -> Any:
        mean = ops.mean(inputs, axis=0)
        self.add_loss(0.1 * ops.sqrt(ops.sum(ops.square(mean))))
        return inputs - mean


class Similar(layers.Layer):
    """Attention over the examples of a batch, with a weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs: Any) -> Any:
        return ops.tensordot(ops.softmax(ops.matmul(inputs, ops.transpose(inputs))), inputs, axes=1) @ self.kernel


class Gathers(layers.Layer):
    """Calls `tfpar.gather`."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(tfpar.gather(inputs), axis=0)


class GathersHalves(layers.Layer):
    """Gathers two rows of each example."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(tfpar.gather(ops.reshape(inputs, (-1, 2))))


def texts() -> keras.Model:
    text = keras.Input((), dtype="string")
    vectors = layers.TextVectorization(vocabulary=["a", "b", "c"])(text)  # as long as the longest text of a batch
    model = keras.Model(text, layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.Embedding(5, 4)(vectors))))
    model.compile("sgd", crossentropy())
    return model


def transposed() -> keras.Model:
    hidden = [layers.Dense(4), Applies(lambda x, *_: ops.transpose(x))]
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), *hidden])
    model.compile("sgd", "mse")
    return model


def mixing(name: str, call: str = "fit") -> dict[str, Verdict]:
    """Return the refusals of a layer that mixes examples, with the ways out."""
    begin = rf"received .*'{name}.*, where an example depends on the others of its batch; "
    return {
        "mirrored": Refused(begin + "set batch_dependent_layers='gather'", call),
        "pipeline": Refused(begin + ".*Pipeline with num_microbatches=1, or allow_batch_dependent_layers=True", call),
    }


GATHERED: dict[str, Verdict] = {"gathering": EQUAL, "one micro-batch": EQUAL}
PREDICTS = ("fit", "predict")
TEXTS = np.array(["a b", "c", "", "\u00e9 a b c", "b", "a c b", "c c"])
MIXING = {
    "mean of the batch": Case(applying(minus_mean), mixing("tested") | GATHERED | {"allowing": RUNS}, calls=PREDICTS),
    "mean, in prediction": Case(applying(minus_mean), mixing("tested", "predict"), calls=("predict",)),
    "mean, in evaluation": Case(applying(minus_mean), mixing("tested", "evaluate"), calls=("evaluate",)),
    "operation between layers": Case(functional(minus_mean), mixing("mean") | GATHERED),
    "in a model's own call": Case(own(minus_mean), {"mirrored": mixing("own")["mirrored"], "gathering": EQUAL}),
    "gathers": Case(with_layers(Gathers), mixing("gathers") | {"mirrored": EQUAL}),
    "mean with a loss of it": Case(functional(lambda x: Centred()(x)), GATHERED),
    "attention over examples": Case(functional(lambda x: Similar()(x)), GATHERED, calls=PREDICTS),
    "softmax": Case(functional(lambda x: layers.Softmax(axis=0)(x)), mixing("softmax") | GATHERED),
    "unit normalization": Case(with_layers(lambda: layers.UnitNormalization(axis=0)), mixing("unit")),
    "size of the batch": Case(applying(lambda x, *_: x / ops.cast(ops.shape(x)[0], x.dtype)), mixing("tested")),
    "batches of one example": Case(applying(minus_mean), mixing("tested"), batches(INPUTS[:2], VALUES[:2], batch=1)),
    "batches of equal examples": Case(applying(minus_mean), mixing("tested"), batches(np.ones_like(INPUTS), VALUES)),
    "several rows of an example": Case(
        functional(lambda x: ops.reshape(Centred()(ops.reshape(x, (-1, 2))), (-1, 4))), GATHERED
    ),
    "after a layer that gathers": Case(
        functional(lambda x: layers.Softmax(axis=0)(Gathers()(x))), {"gathering": EQUAL}
    ),
    "own call after a layer that gathers": Case(
        own(minus_mean, lambda: [layers.Dense(4, "tanh"), Gathers()]), {"gathering": EQUAL}
    ),
    "gathers several rows of an example": Case(
        functional(lambda x: GathersHalves()(x)),
        {"mirrored": Refused(r"one row for each example of a batch, received .* \(10, 2\) for 5 examples")},
    ),
    "texts": Case(texts, {"gathering": EQUAL}, batches(TEXTS, LABELS[:7], batch=3)),
    "examples in another axis": Case(
        transposed,
        {"pipeline": Refused("examples as its first axis, .* 'tested'. Move the axis", "predict")},
        calls=("predict",),
    ),
}


class Normalizes(layers.Layer):
    """Normalizes with statistics of the batch also in inference, as in generators of images."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(name="tested")
        self.inner = layers.BatchNormalization(**settings)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs, training=True)


def in_mode(mixes_in_training: bool) -> Callable[..., Any]:
    return lambda inputs, training, *_: minus_mean(inputs) if bool(training) == mixes_in_training else inputs


in_inference = applying(in_mode(False))


def mixing_in_inference(call: str, name: str = "tested") -> dict[str, Verdict]:
    return refused(f"received '{name}.*' in inference, where an example depends on the others", call)


IN_ONE_MODE = {
    "in inference": Case(in_inference, mixing_in_inference("evaluate") | {"gathering": EQUAL}),
    "in inference, predicted": Case(
        in_inference, mixing_in_inference("predict") | {"one micro-batch": EQUAL, "allowing": RUNS}, calls=PREDICTS
    ),
    "in inference, validated": Case(
        in_inference, mixing_in_inference("validated fit") | {"gathering": EQUAL}, calls=("validated fit",)
    ),
    "in training": Case(
        applying(in_mode(True)), mixing("tested") | {"gathering": EQUAL}, calls=("evaluate", "predict", "fit")
    ),
    "own call in inference": Case(
        own(in_mode(False)), {"mirrored": mixing_in_inference("evaluate", "own")["mirrored"], "gathering": EQUAL}
    ),
    "statistics in inference": Case(
        with_layers(Normalizes), mixing_in_inference("predict") | {"gathering": EQUAL}, calls=("predict",)
    ),
    "synchronized statistics in inference": Case(
        with_layers(lambda: Normalizes(synchronized=True)), {"mirrored": EQUAL}, calls=("predict",)
    ),
}
BATCH_NORMALIZATION = {
    "synchronized": Case(
        with_layers(lambda: layers.BatchNormalization(synchronized=True)),
        {
            "mirrored": EQUAL,
            "pipeline": Refused(r"BatchNormalization\(synchronized=True\) uses .* Remove synchronized"),
        },
    ),
    "of parts": Case(with_layers(layers.BatchNormalization), both(RUNS)),
    "frozen": Case(with_layers(lambda: layers.BatchNormalization(trainable=False)), both(EQUAL)),
}


# --- random layers ----------------------------------------------------------------------------------------------------

IMAGES = batches(random.uniform(0, 255, (8, 8, 8, 3)), LABELS[:8], batch=8)


def augmenting(make: Callable[..., Any]) -> Build:
    return stack(lambda: [make(name="tested"), layers.Flatten(), layers.Dense(4)], 8, 8, 3)


def in_own_call(make: Callable[..., Any]) -> Build:
    return own(make=lambda: [make(name="tested"), layers.Flatten()], loss=crossentropy())


IN_DATASET = refused(r"call 'tested' in dataset\.map, ")
AUGMENTATIONS = {
    "MixUp": Case(augmenting(layers.MixUp), IN_DATASET, IMAGES),
    "in an own call": Case(in_own_call(layers.CutMix), IN_DATASET, IMAGES),
    "equal images": Case(
        in_own_call(layers.Equalization),
        {"mirrored": Refused("where an example depends on the others")},
        batches(random.uniform(0, 0.9, (8, 2, 2, 3)), LABELS[:8], batch=8),
    ),
    "CutMix": Case(augmenting(layers.CutMix), IN_DATASET, IMAGES),
    "AugMix": Case(augmenting(layers.AugMix), IN_DATASET, IMAGES),
    "RandAugment": Case(augmenting(layers.RandAugment), IN_DATASET, IMAGES),
}


@tf.function
def drawn_in_a_function(shape: Any) -> tf.Tensor:
    return tf.random.normal(shape)


def seeded(function: Callable[[Any, Any], Any]) -> Build:
    """Return a model function with a layer that draws with a seed, in training and in inference."""
    return with_layers(
        lambda: Applies(lambda x, training, layer: function(x, layer.seed), seed=keras.random.SeedGenerator(1))
    )


def chosen(inputs: Any, seed: Any) -> Any:
    """One of two results for each example, as layers that augment images do."""
    probability = keras.random.uniform((ops.shape(inputs)[0], 1), seed=seed)
    return ops.where(probability > 0.5, 2.0 * inputs, inputs)


def noisy_mean(inputs: Any, seed: Any) -> Any:
    return inputs - ops.mean(inputs, axis=0) * keras.random.normal(ops.shape(inputs), seed=seed)


def noise_by_size(inputs: Any, seed: Any) -> Any:
    """Neighbours do not matter, but how many there are does."""
    return inputs + keras.random.normal(ops.shape(inputs), seed=seed) / ops.cast(ops.shape(inputs)[0], inputs.dtype)


def permuted(inputs: Any, seed: Any) -> Any:
    return ops.take(inputs, ops.argsort(keras.random.uniform((ops.shape(inputs)[0],), seed=seed)), axis=0)


def random_sequence() -> keras.Model:
    tokens = keras.Input((SENTENCES.shape[1],), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    hidden = layers.Dropout(0.5)(layers.Dense(4)(hidden))
    hidden = layers.MultiHeadAttention(2, 2, dropout=0.3)(hidden, hidden)
    hidden = layers.BatchNormalization()(layers.GaussianNoise(0.1)(hidden))
    model = keras.Model(tokens, layers.Dense(NUM_FEATURES)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile("sgd", "mse")
    return model


RANDOM = {
    "one of two results": Case(seeded(chosen), both(RUNS)),
    "random factor of the mean": Case(seeded(noisy_mean), mixing("tested")),
    "dropout": Case(seeded(lambda x, seed: keras.random.dropout(x, 0.5, seed=seed)), both(RUNS)),
    "sequences": Case(random_sequence, both(RUNS), batches(SORTED, VALUES)),
    "flipped images": Case(augmenting(layers.RandomFlip), both(RUNS), IMAGES),
    "whole numbers": Case(
        seeded(lambda x, seed: x + ops.cast(keras.random.randint(ops.shape(x), -3, 0, seed=seed), x.dtype)), both(RUNS)
    ),
    "in a tf.function": Case(seeded(lambda x, seed: x + drawn_in_a_function(tf.shape(x))), both(RUNS)),
    "own call": Case(
        own(lambda x, training: chosen(x, None), lambda: [layers.Dense(4)]), {"mirrored": RUNS}, calls=("predict",)
    ),
    "size of the batch": Case(seeded(noise_by_size), mixing("tested")),
    "permutation": Case(seeded(permuted), mixing("tested")),
    "neighbours and TensorFlow's numbers": Case(
        seeded(lambda x, seed: x[::-1] + tf.random.gamma(tf.shape(x), 1.0)), mixing("tested")
    ),
    "dropout of neighbours in training": Case(
        applying(lambda x, training, _: keras.random.dropout(x, 0.3) + x[::-1] if training else x), mixing("tested")
    ),
    "images of the batch flipped as one": Case(
        stack(lambda: [layers.RandomFlip("vertical", name="tested"), layers.Flatten(), layers.Dense(4)], 4, 3),
        mixing("tested"),
        batches(random.normal(size=(8, 4, 3)), LABELS[:8], batch=8),
    ),
    "own call that mixes": Case(
        own(lambda x, training: noisy_mean(x, None), lambda: [layers.Dense(4)]),
        {"mirrored": Refused("where an example depends on the others", "predict")},
        calls=("predict",),
    ),
    "by position in the batch": Case(
        functional(layers.Lambda(lambda x: x * keras.random.uniform(ops.shape(x), seed=3), name="noise")),
        {"mirrored": mixing("noise")["mirrored"]},
    ),
}


def by_coin(inputs: Any, *_: Any) -> Any:
    return inputs * int(np.random.default_rng().integers(2))


def same_numbers(inputs: Any, *_: Any) -> Any:
    return inputs * ops.cast(np.random.default_rng(3).uniform(size=4), inputs.dtype)


DRAWS = refused(r"random numbers with keras\.random or tf\.random, received 'tested', which draws")
IN_PYTHON = {
    "NumPy's generator": Case(applying(lambda x, *_: x + float(np.random.normal())), DRAWS),
    "the same numbers each time": Case(applying(same_numbers), both(EQUAL)),
    "a coin": Case(applying(by_coin), DRAWS),
    "Python's generator": Case(applying(lambda x, *_: x + python_random.random()), DRAWS),
    "generator of the layer": Case(
        with_layers(lambda: Applies(lambda x, _, layer: x + float(layer.held.normal()), held=np.random.default_rng(0))),
        DRAWS,
    ),
    "in a loss": Case(
        with_layers(loss=lambda y, p: ops.square(y - p) * np.random.rand()),
        {"mirrored": Refused("which draws from NumPy or Python")},
    ),
    "in a layer of an own call": Case(
        own(make=lambda: [layers.Dense(4), Applies(by_coin)]),
        {"mirrored": Refused("which draws from NumPy or Python", "predict")},
        calls=("predict",),
    ),
}


# --- layers that compute each example alone ---------------------------------------------------------------------------


def known_layers() -> keras.Model:
    """A mask, two inputs, layers of Keras that look at one example, and axes that are merged with the batch."""
    tokens, other = keras.Input((5,), dtype="int32"), keras.Input((5, 4))
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens) + other
    hidden = layers.GroupNormalization(2)(layers.LSTM(4, return_sequences=True)(hidden))
    hidden = layers.MultiHeadAttention(2, 2)(hidden, hidden)
    hidden = ops.reshape(2.0 * ops.reshape(layers.Softmax()(hidden), (-1, 4)), (-1, 20))
    model = keras.Model([tokens, other], layers.Dense(NUM_FEATURES)(hidden))
    model.compile("sgd", "mse")
    return model


OTHER = random.normal(size=(NUM_EXAMPLES, 5, 4))


def two_inputs() -> tf.data.Dataset:
    tensors = batches(SORTED, OTHER, VALUES)()
    return tensors.map(lambda tokens, other, values: ((tokens, other), values))


def float_tokens() -> keras.Model:
    """Inputs of Keras are float32 by default; an Embedding truncates them."""
    dense = layers.TimeDistributed(layers.Dense(2))  # of no known class, and so in a trial
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(10, 3), dense])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def ragged_outputs() -> keras.Model:
    tokens = keras.Input((None,), ragged=True)
    model = keras.Model(tokens, layers.Activation(lambda values: values * 2)(tokens))
    model.compile("sgd", "mse")
    return model


class InFunction(layers.Layer):
    """Its `call` is a `tf.function`; traced in a trial, its weights were constants in every later step."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    @tf.function
    def call(self, inputs: Any) -> Any:
        return ops.tanh(inputs @ self.kernel)


def in_training_only() -> keras.Model:
    """RandomCrop gives images of another size in inference, as in Keras, and Dense takes one size."""
    hidden = [Applies(lambda x, training, layer: layer.add_loss(0.1 * ops.mean(x)) or x), layers.RandomCrop(6, 6)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, layers.Flatten(), layers.Dense(4), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), crossentropy())
    return model


ALONE = {
    "in a tf.function": Case(with_layers(InFunction), both(EQUAL)),
    "layers of Keras": Case(known_layers, both(EQUAL), two_inputs),
    "tokens as floats": Case(float_tokens, both(EQUAL), batches(np.full((8, 6), 9.0), np.ones((8, 6, 2)), batch=8)),
    "in training only": Case(in_training_only, both(EQUAL), batches(np.ones((18, 8, 8, 1)), LABELS), ("fit",)),
    "no numbers": Case(applying(lambda x, *_: x + ops.log(x)), both(EQUAL), calls=("predict",)),
    "ragged outputs": Case(
        ragged_outputs,
        {"mirrored": EQUAL},
        lambda: tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])),
        ("predict",),
    ),
}


class OfPadded(layers.Layer):
    """Averages over the positions of the longest example.

    Args:
        longest: The length from which on it fails.
    """

    def __init__(self, longest: int) -> None:
        super().__init__(name="tested")
        self.longest = longest

    def call(self, rows: Any) -> Any:
        padded = rows.to_tensor()
        tf.debugging.assert_less_equal(tf.shape(padded)[1], self.longest, message="too long")
        return tf.reduce_mean(padded, 1, keepdims=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape[0], 1


def padding(longest: int) -> Build:
    return stack(lambda: [OfPadded(longest)], None, ragged=True)


def equal_lengths_first() -> tf.data.Dataset:
    rows = tf.ragged.constant([[1.0, 2.0, 3.0]] * 8 + [[1.0], [2.0, 3.0]] * 4)
    return tf.data.Dataset.from_tensor_slices((rows, LABELS[:16])).batch(8)


class OverLongest(layers.Layer):
    """Divides by the longest length of the batch."""

    def call(self, hidden: Any, tokens: Any) -> Any:
        mask = ops.cast(tokens != 0, hidden.dtype)
        return ops.sum(hidden * mask[..., None], 1) / ops.max(ops.sum(mask, -1))


def over_longest() -> keras.Model:
    tokens = keras.Input((SORTED.shape[1],), dtype="int32")
    hidden = layers.Dense(5)(layers.Embedding(9, 4)(tokens))
    model = keras.Model(tokens, layers.Dense(NUM_FEATURES)(OverLongest(name="tested")(hidden, tokens)))
    model.compile("sgd", "mse")
    return model


LENGTHS = {
    "the longest example": Case(
        over_longest, refused("must compute each example alone, .*'tested'"), batches(SORTED, VALUES)
    ),
    "padded to the longest": Case(padding(99), refused("where an example depends on the others"), equal_lengths_first),
    "fails on other lengths": Case(
        padding(3), {"mirrored": Refused("fails on lengths other than .* to_tensor")}, equal_lengths_first
    ),
}


# --- positions in the batch, and rows ---------------------------------------------------------------------------------


def remembering(make: Callable[..., Any]) -> Build:
    def build() -> keras.Model:
        features = keras.Input(batch_shape=(8, 3, 2))
        model = keras.Model(features, layers.Dense(1)(make(features)))
        model.compile("sgd", "mse")
        return model

    return build


def stateful(inputs: Any) -> Any:
    return layers.LSTM(2, stateful=True, name="tested")(inputs)


def bidirectional(inputs: Any) -> Any:
    return layers.Bidirectional(layers.LSTM(2, stateful=True), name="tested")(inputs)


def of_eight(inputs: Any) -> Any:
    return layers.Lambda(lambda x: ops.reshape(x, (8, 6)), name="tested")(inputs)


def distorting() -> keras.Model:
    """Keras 3.15 copies the first image to all others where a step does not know how many there are."""
    images = keras.Input((4, 4, 1))
    distorted = layers.RandomElasticTransform(1.0, (1e-9, 1e-9), value_range=(0, 1), name="tested")(images)
    model = keras.Model(images, layers.Dense(1)(layers.Flatten()(distorted)))
    model.compile("sgd", "mse")
    return model


def rows_of(labelled: int, others: int) -> Callable[[], tf.data.Dataset]:
    """Return a function that makes batches of labelled and of other examples, in one element."""

    def data() -> tf.data.Dataset:
        tensors = {
            "labelled": batches(INPUTS[:6], LABELS[:6], batch=labelled)(),
            "others": batches(VALUES[:12], VALUES[:12], batch=others)(),
        }
        zipped = tf.data.Dataset.zip(tensors)
        return zipped.map(lambda batch: tuple({key: value[part] for key, value in batch.items()} for part in (0, 1)))

    return data


def two_kinds() -> keras.Model:
    entries = {name: keras.Input((NUM_FEATURES,), name=name) for name in ("labelled", "others")}
    heads = {"labelled": layers.Dense(3), "others": layers.Dense(NUM_FEATURES)}
    model = keras.Model(entries, {name: heads[name](entry) for name, entry in entries.items()})
    model.compile("sgd", {"labelled": crossentropy(), "others": "mse"})
    return model


def of_unknown_rank() -> tf.data.Dataset:
    def copied(inputs: Any, targets: Any) -> tuple[Any, Any]:
        return inputs, targets | {"others": tf.numpy_function(np.copy, [targets["others"]], tf.float32)}

    return rows_of(2, 2)().map(copied)


PARTS = ("mirrored", "weights sharded", "shards", "pipeline", "one micro-batch")
STEPS_OF_TIME = batches(np.zeros((16, 3, 2)), np.zeros((16, 1)), batch=8)
KEEPS = Refused(r"keeps a state .* 'tested' with stateful=True.* SingleDevice\(\)")
DISTORTS = Refused(r"received 'tested'.* the distorted first one.* SingleDevice\(\)")
POSITIONS = {
    "stateful": Case(remembering(stateful), dict.fromkeys(PARTS, KEEPS), STEPS_OF_TIME),
    "stateful in both directions": Case(remembering(bidirectional), dict.fromkeys(PARTS, KEEPS), STEPS_OF_TIME),
}
SIZES = {
    "fixed batch size": Case(
        remembering(of_eight),
        {"mirrored": Refused(r"must run on any number of examples, and 'tested' .* SingleDevice\(\)")},
        STEPS_OF_TIME,
    ),
    "distorted images": Case(
        distorting,
        dict.fromkeys(("gathering", "one micro-batch"), DISTORTS),
        batches(random.uniform(size=(8, 4, 4, 1)), np.zeros((8, 1)), batch=8),
        ("fit",),
    ),
}
ROWS = (
    r"Every tensor of a batch must have a row for each example.*"
    r"Received 2, 4, 2, 4 rows in inputs\['labelled'\], inputs\['others'\], targets\['labelled'\]"
)
NUMBERS_OF_ROWS = {
    "two labelled and four others": Case(two_kinds, refused(ROWS) | {"single device": EQUAL}, rows_of(2, 4)),
    "in a later batch": Case(
        two_kinds,
        refused(ROWS, "evaluate"),
        lambda: rows_of(3, 3)().take(1).concatenate(rows_of(2, 4)()),
        ("evaluate",),
    ),
    "in prediction": Case(two_kinds, refused(ROWS, "predict"), rows_of(2, 4), ("predict",)),
    "of unknown rank": Case(
        two_kinds, refused(r"axes, received targets\['others'\] of unknown shape.*ensure_shape"), of_unknown_rank
    ),
}


# --- state of layers --------------------------------------------------------------------------------------------------


def every_second(state: Any, x: Any) -> Any:
    """Update all but the first number, which counts steps, in every second step."""
    count = state[:1] + 1.0
    updated = ops.where(count % 2.0 == 0.0, 0.9 * state + 0.1 * ops.mean(x, 0), state)
    return ops.concatenate([count, updated[1:]], 0)


class Remembers(layers.Layer):
    """Subtracts a state in inference, and updates it in training, or in both."""

    def __init__(
        self, update: Callable[[Any, Any], Any], always: bool = False, dtype: Any = None, **weight: Any
    ) -> None:
        super().__init__(dtype=dtype)
        self.update, self.always, self.weight = update, always, weight

    def build(self, shape: Any) -> None:
        settings = {"initializer": "zeros", "trainable": False, "name": "state", **self.weight}
        self.state = self.add_weight(shape=(shape[-1],), **settings)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs if training and not self.always else inputs - self.state
        if training or self.always:
            self.state.assign(self.update(self.state, inputs))
        return outputs


def moving_mean(state: Any, x: Any) -> Any:
    return 0.9 * state + 0.1 * ops.mean(x, 0)


def remembers(update: Callable[[Any, Any], Any], verdicts: dict[str, Verdict], *calls: str, **settings: Any) -> Case:
    build = with_layers(lambda: Remembers(update, **settings))
    return Case(build, verdicts, batches(INPUTS, VALUES, batch=7), calls or ("fit", "evaluate"), "float64")


STATES = ("mirrored", "pipeline", "weights sharded", "pipelines")
IN_INFERENCE = refused(r"after a batch in inference '.*/state' is not the mean of its values for the parts", "evaluate")
NO_MEAN = Refused(r"must update its state as on one device, but after a batch '.*/state'")
AGGREGATION = {"mirrored": Refused("leave out the weight's aggregation")}
STATE = {
    "moving mean": remembers(moving_mean, dict.fromkeys(STATES, EQUAL)),
    "maximum": remembers(lambda state, x: ops.maximum(state, ops.max(x, 0)), dict.fromkeys(STATES, NO_MEAN)),
    "steps": remembers(lambda state, x: state + 1.0, dict.fromkeys(STATES, EQUAL)),
    "sum": remembers(lambda state, x: state + ops.sum(x, 0), dict.fromkeys(STATES, NO_MEAN)),
    "last example": remembers(lambda state, x: x[-1], dict.fromkeys(STATES, NO_MEAN)),
    "every second step": remembers(every_second, {"mirrored": EQUAL}),
    "mean of gathered": remembers(
        lambda state, x: 0.9 * state + 0.1 * ops.mean(tfpar.gather(x), 0), {"mirrored": EQUAL}
    ),
    "sum of gathered": remembers(
        lambda state, x: state + ops.sum(tfpar.gather(x), 0),
        {**dict.fromkeys(STATES, NO_MEAN), "mirrored": EQUAL},
    ),
    "mean with an aggregation": remembers(moving_mean, AGGREGATION, aggregation="mean"),
    "steps with an aggregation": remembers(lambda state, x: state + 1.0, AGGREGATION, aggregation="sum"),
    "mean in bfloat16": remembers(moving_mean, {"mirrored": RUNS}, dtype="mixed_bfloat16"),
    "mean in float16": remembers(moving_mean, {"mirrored": RUNS}, dtype="mixed_float16"),
}
STATE_IN_INFERENCE = {
    "moving mean": remembers(
        moving_mean, dict.fromkeys(STATES, EQUAL), "fit", "evaluate", "predict", "predict", always=True
    ),
    "maximum": remembers(lambda state, x: ops.maximum(state, ops.max(x, 0)), IN_INFERENCE, "evaluate", always=True),
}


def counting(make_count: Callable[[], Any], add: Callable[[Any], Any] = lambda add: add) -> Build:
    """Return a model function with a layer that multiplies by the number of its calls, in a variable of a closure.

    Args:
        make_count: Makes the variable.
        add: Wraps the function that adds one.
    """

    def make() -> Applies:
        count = make_count()
        add_one = add(lambda: count.assign(count + 1.0))
        return Applies(lambda x, *_: (add_one(), x * tf.convert_to_tensor(count))[1])

    return with_layers(make)


def variable_of_keras() -> keras.Variable:
    return keras.Variable(0.0, trainable=False, name="count")


def variable_of_tensorflow() -> tf.Variable:
    return tf.Variable(0.0, trainable=False, name="count")


class CountingLoss(keras.losses.Loss):
    """A squared error that counts its calls."""

    def __init__(self) -> None:
        super().__init__(name="tested")
        self.count = variable_of_keras()

    def call(self, targets: Any, outputs: Any) -> Any:
        self.count.assign(self.count + 1.0)
        return ops.mean(ops.square(targets - outputs), axis=-1)


def of_generator() -> Any:
    """Noise from a generator in the closure of a Lambda."""
    generator = keras.random.SeedGenerator(1)
    return layers.Lambda(lambda x: x + keras.random.normal(ops.shape(x), seed=generator), name="tested")


CHANGED = Refused(
    r"keep its state in weights that Keras tracks.*received 'tested', which changes the untracked variable 'count.*"
    r"add_weight\(trainable=False\).*SingleDevice"
)
UNTRACKED_PARTS = ("mirrored", "weights sharded", "shards", "one micro-batch", "pipeline")
WHOLE: dict[str, Verdict] = {"single device": EQUAL}
KEPT = Refused("received 'tested', .* Keep the generator in an attribute of a layer")
UNTRACKED = {
    "variable of Keras": Case(counting(variable_of_keras), dict.fromkeys(UNTRACKED_PARTS, CHANGED) | WHOLE),
    "generator": Case(with_layers(of_generator), {"mirrored": RUNS, "one micro-batch": KEPT, "weights sharded": KEPT}),
    "loss": Case(
        lambda: with_layers(loss=CountingLoss())(),
        dict.fromkeys(UNTRACKED_PARTS, Refused("received 'tested', which changes the untracked variable 'count'")),
    ),
    "tf.Variable": Case(counting(variable_of_tensorflow), dict.fromkeys(UNTRACKED_PARTS, CHANGED) | WHOLE),
    "tf.function": Case(
        counting(variable_of_tensorflow, tf.function),
        # TensorFlow names neither the layer nor the variable.
        dict.fromkeys(UNTRACKED_PARTS, Refused("keep its state in weights that Keras tracks")),
    ),
}


# --- weights and models that parts change -----------------------------------------------------------------------------


def float8() -> keras.Model:
    model = with_layers()()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the input layer has no quantization
        model.quantize("float8")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def differing(inputs: Any, training: Any) -> Any:
    return 2 * inputs if training else inputs


REPLICAS = ("mirrored", "optimizer sharded", "weights sharded")
PIPELINES = ("one micro-batch", "pipeline", "stages of shards")
OVERWRITES = r"inputs_scale' is its new value .* Train on SingleDevice\(\) or Tensor"
OVERWRITTEN = {
    "float8": Case(
        float8, dict.fromkeys((*REPLICAS, *PIPELINES), Refused(OVERWRITES)) | WHOLE | {"shards": EQUAL}, calls=("fit",)
    ),
    "float8, evaluated": Case(
        float8,
        dict.fromkeys(REPLICAS, EQUAL) | dict.fromkeys(PIPELINES, Refused(OVERWRITES, "evaluate")),
        calls=("evaluate",),
    ),
    "float8, predicted": Case(float8, dict.fromkeys(PIPELINES, Refused(OVERWRITES, "predict")), calls=("predict",)),
    "spectral normalization": Case(
        with_layers(lambda: layers.SpectralNormalization(layers.Dense(4))),
        {"mirrored": EQUAL, "pipeline": Refused("as SpectralNormalization does")},
    ),
    "call that depends on training": Case(
        own(differing, lambda: [layers.Dense(4)]),
        {"mirrored": EQUAL, "pipeline": Refused("received OwnCall, where they differ at 'multiply")},
    ),
}

FAMILIES: dict[str, dict[str, Case]] = {
    "a layer that mixes examples": MIXING,
    "a layer that mixes in one mode": IN_ONE_MODE,
    "batch normalization": BATCH_NORMALIZATION,
    "augmentation": AUGMENTATIONS,
    "a random layer": RANDOM,
    "random numbers of Python": IN_PYTHON,
    "a layer of single examples": ALONE,
    "lengths": LENGTHS,
    "state by position": POSITIONS,
    "size of the batch": SIZES,
    "numbers of rows": NUMBERS_OF_ROWS,
    "state": STATE,
    "state in inference": STATE_IN_INFERENCE,
    "untracked state": UNTRACKED,
    "overwritten weights": OVERWRITTEN,
}
