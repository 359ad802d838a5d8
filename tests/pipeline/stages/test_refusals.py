"""Functions with gradients of their own that read weights: found in graphs, refused in stages, trained elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tfpar.pipeline.stages.refusals import hidden_reads

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def hides(inputs: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
    """The product of all, of which only the first is an argument."""

    @tf.custom_gradient
    def product(first: tf.Tensor) -> Any:
        return tf.math.multiply(first, tf.math.add_n([tf.square(one) for one in weights])), lambda upstream: upstream

    return product(inputs)


@tf.custom_gradient
def takes(inputs: tf.Tensor, weight: tf.Tensor) -> Any:
    return inputs * weight, lambda upstream: (upstream * weight, tf.reduce_sum(upstream * inputs, axis=0))


GRAPHS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "neither": (lambda inputs, first, second: takes(takes(inputs, first), second), []),
    "activations": (lambda inputs, first, second: tf.nn.silu(inputs * first) * tf.math.log_sigmoid(second), []),
    "one": (lambda inputs, first, second: hides(inputs, second) * first, [2]),
    "both": (hides, [1, 2]),
    "what is computed from it": (lambda inputs, first, second: hides(inputs, tf.exp(second) + 1.0), [2]),
    "after another": (lambda inputs, first, second: takes(hides(inputs, first), second), [1]),
    "within another": (lambda inputs, first, second: tf.recompute_grad(lambda x: takes(x, second))(inputs), [2]),
    "an argument that hides": (lambda inputs, first, second: takes(inputs * hides(first, second), first), [2]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_read_and_no_argument_is_found(name: str) -> None:
    function, expected = GRAPHS[name]
    graph = tf.function(function).get_concrete_function(*[tf.TensorSpec([3])] * 3).graph
    assert hidden_reads(graph, graph.inputs) == expected


class Scale(keras.layers.Layer):
    """A layer that multiplies by a weight in a function with a custom gradient.

    Args:
        way: How it reads the weight.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight((shape[-1],), "ones", name="factor")

    def call(self, inputs: Any) -> Any:
        if self.way == "takes":
            return takes(inputs, tf.convert_to_tensor(self.factor))
        if self.way == "recompute_grad":
            return tf.recompute_grad(lambda given: given * self.factor)(inputs)

        @tf.custom_gradient
        def scaled(given: tf.Tensor) -> Any:
            factor = tf.convert_to_tensor(self.factor)

            def gradient(upstream: tf.Tensor, variables: Any = ()) -> Any:
                own = [tf.reduce_sum(upstream * given, axis=0) for _ in variables]
                return (upstream * factor, own) if variables else upstream * factor

            return given * factor, gradient

        return scaled(inputs)


def build(way: str) -> Callable[[], keras.Model]:
    def build_model() -> keras.Model:
        inputs = keras.Input((small.parity_cases.NUM_FEATURES,))
        hidden = Scale(way)(keras.layers.Dense(6, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(5, "tanh")(hidden)))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build_model


STAGED: dict[str, Callable[[], tfpar.Strategy]] = {
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["reads", "recompute_grad"])
@pytest.mark.parametrize("strategy", STAGED)
def test_a_weight_that_is_no_argument_is_refused_in_stages(strategy: str, way: str) -> None:
    trainer = tfpar.Trainer(build(way), STAGED[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"must take the weights and .* as arguments, received one that reads 'scale"):
        trainer.fit(small.data(), verbose=0)
    assert trainer.predict(small.data(), verbose=0).shape == (73, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STAGED)
def test_a_weight_that_is_an_argument_trains_in_stages_as_on_one_device(strategy: str) -> None:
    small.assert_trains_as_one_device(build("takes"), small.data, STAGED[strategy])


@pytest.mark.extended
@pytest.mark.parametrize("way", ["reads", "recompute_grad"])
def test_replicas_train_a_weight_that_is_no_argument_as_one_device(way: str) -> None:
    small.assert_trains_as_one_device(build(way), small.data)


def test_the_output_of_an_earlier_stage_that_is_no_argument_is_refused() -> None:
    class Gate(keras.layers.Layer):
        def call(self, inputs: Any, gate: Any) -> Any:
            return hides(inputs, gate)

    def build_model() -> keras.Model:
        inputs = keras.Input((small.parity_cases.NUM_FEATURES,))
        hidden, gate = (keras.layers.Dense(6, name=name)(inputs) for name in ("hidden", "gated_by"))
        model = keras.Model(inputs, keras.layers.Dense(3)(Gate()(hidden, gate)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    trainer = tfpar.Trainer(build_model, tfpar.Pipeline(2, 2, balance=[2, 2]), seed=0)
    with pytest.raises(ValueError, match="received one that reads the output of an earlier layer"):
        trainer.fit(small.data(), verbose=0)
