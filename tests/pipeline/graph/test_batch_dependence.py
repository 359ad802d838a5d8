"""Detection of batch-dependent layers, whose outputs change with micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfpar.pipeline.graph.batch_dependence import BatchDependence, check_batch_independence, find_batch_dependence
from tfpar.pipeline.graph.tracing import trace

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


class Custom(layers.Layer):
    """A layer with the `call` of a test."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__(name="tested")
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.function(self, inputs, training)


def found(layer: Any, *shape: int, batch: int = 4, after: Any = None) -> BatchDependence:
    """Return the batch-dependent parts of a model with a layer, and an optional second one after it."""
    entry = keras.Input(shape or (6,))
    outputs = layer(layers.Dense(4, name="before")(entry))
    model = keras.Model(entry, outputs if after is None else after(outputs))
    return find_batch_dependence(trace(model), [np.random.default_rng(0).normal(size=(batch, *(shape or (6,))))])


def attention(**settings: Any) -> Callable[[Any], Any]:
    return lambda inputs: layers.MultiHeadAttention(2, 2, **settings)(inputs, inputs)


def minus_mean(layer: Custom, inputs: Any, training: Any) -> Any:
    return inputs - ops.mean(inputs, axis=0)


def normalized(layer: Custom, inputs: Any, training: Any) -> Any:
    return layer.inner(inputs, training=training)


def swapped_in_training(layer: Custom, inputs: Any, training: Any) -> Any:
    noisy = keras.random.dropout(inputs, 0.3, seed=layer.seeds)
    return noisy + inputs[::-1] if training else inputs


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Custom(minus_mean), ()),
        (
            lambda: Custom(lambda layer, inputs, training: minus_mean(layer, inputs, training) if training else inputs),
            (),
        ),
        (lambda: Custom(lambda layer, inputs, training: inputs / ops.cast(ops.shape(inputs)[0], inputs.dtype)), ()),
        (lambda: Custom(lambda layer, inputs, training: ops.matmul(inputs, ops.transpose(inputs))), ()),
        (lambda: Custom(lambda layer, inputs, training: ops.mean(inputs)), ()),
        (lambda: Custom(swapped_in_training, seeds=keras.random.SeedGenerator(1)), ()),
        (lambda: Custom(lambda layer, inputs, training: keras.random.dropout(inputs, 0.3) + inputs[::-1]), ()),
        (lambda: layers.UnitNormalization(axis=0, name="tested"), ()),
        (lambda: layers.Softmax(axis=0, name="tested"), ()),
        (lambda: attention(attention_axes=-4, name="tested"), (3, 5, 6)),
        (lambda: layers.MixUp(name="tested"), (4, 4, 3)),
    ],
    ids=[
        *("mean", "mean in training", "size of the batch", "products", "scalar", "draws and swaps", "global draw"),
        *("unit normalization", "softmax", "attention over examples", "mix-up"),
    ],
)
def test_only_the_batch_dependent_layer_is_named(make: Any, shape: tuple[int, ...]) -> None:
    assert found(make(), *shape).calls == ("tested",)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: layers.Dropout(0.5), ()),
        (lambda: layers.Softmax(), ()),
        (lambda: layers.LSTM(3), (3, 6)),
        (lambda: layers.GroupNormalization(2), ()),
        (lambda: layers.RandomFlip(), (4, 4, 3)),
        (lambda: attention(dropout=0.3), (3, 6)),
        (lambda: Custom(normalized, inner=layers.Dropout(0.5)), ()),
        (lambda: Custom(lambda layer, inputs, training: keras.random.normal(ops.shape(inputs)) + inputs), ()),
        (lambda: Custom(lambda layer, inputs, training: tf.random.normal(tf.shape(inputs)) + inputs), ()),
        (
            lambda: Custom(lambda layer, inputs, training: ops.reshape(ops.reshape(inputs, (-1, 4)) * 2, (-1, 3, 4))),
            (3, 6),
        ),
        (lambda: Custom(lambda layer, inputs, training: inputs + ops.log(inputs)), ()),
    ],
    ids=[
        *(
            "dropout",
            "softmax",
            "recurrent",
            "group normalization",
            "random flip",
            "attention with dropout",
            "dropout inside",
        ),
        *("global draw", "draw of TensorFlow", "merged axes", "no numbers"),
    ],
)
def test_a_batch_independent_layer_is_not_named(make: Any, shape: tuple[int, ...]) -> None:
    assert found(make(), *shape) == BatchDependence()


@pytest.mark.parametrize(
    "layer", [layers.MultiHeadAttention(2, 2), layers.GroupQueryAttention(3, 2, 1)], ids=["multi-head", "grouped"]
)
def test_attention_is_recognized_without_a_trial(layer: layers.Layer) -> None:
    entry = keras.Input((3, 6))
    graph = trace(keras.Model(entry, layer(layers.Dense(6)(entry), entry)))
    with mock.patch.object(layer, "call", side_effect=AssertionError("the layer runs")):
        assert find_batch_dependence(graph, [np.ones((4, 3, 6))]) == BatchDependence()


def reversed_where(condition: Callable[[], Any]) -> Callable[[], layers.Layer]:
    """Return a layer that reverses the batch if a condition on random numbers holds."""
    return lambda: Custom(lambda layer, inputs, training: tf.where(condition(), inputs[::-1], inputs))


def sometimes_swapped(layer: Custom, inputs: Any, training: Any) -> Any:
    return ops.take(inputs, ops.argsort(keras.random.uniform((ops.shape(inputs)[0],), seed=layer.seeds)), axis=0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: layers.RandomFlip("vertical", name="tested"), (4, 3)),  # the layer treats the batch as one image
        (lambda: layers.RandomFlip("horizontal_and_vertical", name="tested"), (4, 3)),
        (lambda: Custom(sometimes_swapped, seeds=keras.random.SeedGenerator()), ()),
        (reversed_where(lambda: keras.random.uniform(()) < 0.05), ()),
        (reversed_where(lambda: keras.random.uniform(()) > 0.95), ()),
        (reversed_where(lambda: keras.random.normal(()) < -1.7), ()),
        (reversed_where(lambda: tf.random.get_global_generator().uniform(()) < 0.05), ()),
        (lambda: Custom(lambda layer, inputs, training: tf.image.random_flip_up_down(inputs)), (4, 3)),
    ],
    ids=[
        *("flip", "flip both ways", "permutation", "small", "large", "small normal", "generator of TensorFlow"),
        "image of TensorFlow",
    ],
)
def test_dependence_for_some_random_numbers_is_found_with_every_seed(make: Any, shape: tuple[int, ...]) -> None:
    """A single number in place of random ones would make the result depend on the seeds of the process."""
    for seed in range(4):
        keras.utils.set_random_seed(seed)
        assert found(make(), *shape).calls == ("tested",)


def test_random_changes_of_single_examples_are_accepted_with_every_seed() -> None:
    def augmented(layer: Custom, inputs: Any, training: Any) -> Any:
        flipped = layer.inner(inputs, training=True)
        return ops.where(keras.random.uniform((ops.shape(inputs)[0], 1, 1, 1)) < 0.05, inputs, 2.0 * flipped)

    for seed in range(3):
        keras.utils.set_random_seed(seed)
        assert found(Custom(augmented, inner=layers.RandomFlip()), 4, 4, 3) == BatchDependence()


def test_equalization_is_batch_dependent_although_these_examples_have_one_bin() -> None:
    class Net(keras.Model):  # a Functional model cannot hold the layer, in Keras 3.15
        def __init__(self) -> None:
            super().__init__()
            self.equalize = layers.Equalization(name="tested")

        def call(self, images: Any) -> Any:
            return self.equalize(images)

    images = np.random.default_rng(0).uniform(0.0, 0.9, (4, 2, 2, 3)).astype("float32")
    assert find_batch_dependence(trace(Net(), images), [images]).calls == ("tested",)


def test_operations_between_layers_are_tested_one_by_one() -> None:
    entry = keras.Input((3, 4))
    centred = entry - ops.mean(entry, axis=0, keepdims=True)
    transposed = ops.transpose(layers.Dense(2)(ops.transpose(centred, (1, 0, 2))), (1, 0, 2))
    merged = ops.reshape(transposed, (-1, 2))
    graph = trace(keras.Model(entry, ops.reshape(ops.exp(merged), (-1, 6))))
    [mean] = [call.name for call in graph.calls if call.name.startswith("mean")]
    inputs = np.random.default_rng(0).normal(size=(5, 3, 4)).astype("float32")
    assert find_batch_dependence(graph, [inputs]) == BatchDependence(calls=(mean,))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_single_example_suffices(dtype: str) -> None:
    entry = keras.Input((6,), dtype=dtype)
    hidden = layers.Embedding(9, 4)(entry) if dtype == "int32" else entry
    graph = trace(keras.Model(entry, Custom(minus_mean)(hidden)))
    assert find_batch_dependence(graph, [np.arange(6).astype(dtype)[None]]).calls == ("tested",)
    same = trace(keras.Model(entry, Custom(lambda layer, inputs, training: 2 * inputs)(hidden)))
    assert find_batch_dependence(same, [np.arange(6).astype(dtype)[None]]).calls == ()


def test_a_loss_over_the_batch_does_not_count() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            outputs = self.dense(inputs)
            self.add_loss(ops.mean(outputs))
            return ops.relu(outputs)

    inputs = np.ones((4, 3), "float32")
    assert find_batch_dependence(trace(Net(), inputs), [inputs]) == BatchDependence()


def test_equal_examples_suffice() -> None:
    entry = keras.Input((3,))
    graph = trace(keras.Model(entry, Custom(minus_mean)(entry)))
    assert find_batch_dependence(graph, [np.ones((4, 3), "float32")]).calls == ("tested",)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: layers.BatchNormalization(name="tested"), ("tested",)),
        (lambda: layers.BatchNormalization(trainable=False), ()),
        (lambda: Custom(normalized, inner=layers.BatchNormalization()), ("tested",)),
        (lambda: Custom(normalized, inner=layers.BatchNormalization(trainable=False)), ()),
    ],
    ids=["alone", "frozen", "inside", "frozen inside"],
)
def test_batch_normalization_is_reported_separately(make: Any, names: tuple[str, ...]) -> None:
    assert found(make()) == BatchDependence(batch_normalizations=names)
    assert found(make(), after=lambda tensor: ops.relu(tensor)) == BatchDependence(batch_normalizations=names)


def test_an_output_with_another_axis_of_examples_is_named() -> None:
    class Transposed(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return ops.transpose(inputs)

    assert found(Transposed(name="transposed")) == BatchDependence(outputs=("transposed",))
    assert found(Transposed(name="transposed"), after=lambda tensor: ops.transpose(tensor)) == BatchDependence()


def test_masks_and_several_inputs_are_split_too() -> None:
    words, other = keras.Input((5,), dtype="int32"), keras.Input((5, 4))
    hidden = layers.Embedding(9, 4, mask_zero=True)(words)
    model = keras.Model([words, other], Custom(lambda layer, inputs, training: inputs)(layers.LSTM(3)(hidden + other)))
    inputs = [np.array([[1, 2, 0, 0, 0]] * 3 + [[1, 2, 3, 4, 5]]), np.random.default_rng(0).normal(size=(4, 5, 4))]
    assert find_batch_dependence(trace(model), inputs) == BatchDependence()


def test_the_trials_change_no_variable() -> None:
    entry = keras.Input((6,))
    noisy = Custom(normalized, inner=layers.Dropout(0.5))(layers.BatchNormalization()(entry))
    model = keras.Model(entry, noisy)
    before = [variable.numpy() for variable in model.variables]
    find_batch_dependence(trace(model), [np.random.default_rng(0).normal(size=(4, 6))])
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("batch", [2, 3, 9])
def test_any_batch_of_two_or_more_suffices(batch: int) -> None:
    assert found(Custom(minus_mean), batch=batch).calls == ("tested",)


def test_batch_dependence_is_refused_with_the_names_and_the_way_out() -> None:
    inputs = np.random.default_rng(0).normal(size=(4, 3))
    entry = keras.Input((3,))
    with pytest.raises(
        ValueError, match=r"received 'tested', where an example depends .* or allow_batch_dependent_layers=True"
    ):
        check_batch_independence(trace(keras.Model(entry, Custom(minus_mean)(entry))), [inputs])
    transposed = Custom(lambda layer, inputs, training: ops.transpose(inputs))(entry)
    with pytest.raises(ValueError, match=r"examples as its first axis, .* received 'tested'; move the axis"):
        check_batch_independence(trace(keras.Model(entry, transposed)), [inputs])
    check_batch_independence(trace(keras.Model(entry, layers.BatchNormalization()(entry))), [inputs])
