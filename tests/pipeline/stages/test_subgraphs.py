"""The subgraphs of a traced graph: their operations and their order."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.pipeline.stages.bundles import bundled, unbundle
from tfpar.pipeline.stages.subgraphs import extract_subgraphs

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

NUM_LAYERS = 6


@pytest.fixture
def chain() -> tuple[Any, dict[str, Any]]:
    """x ─► h1 = tanh(x w1) ─► h2 = tanh(h1 w2) ─► …, and dw += h dz on the way back."""
    named: dict[str, Any] = {}

    def body(x: tf.Tensor, *weights: tf.Tensor) -> Any:
        made = x
        for weight in weights:
            made = tf.tanh(made @ weight)
        upstream = tf.compat.v1.placeholder(made.dtype, made.shape)
        dx, *gradients = tf.gradients(made, [x, *weights], upstream)
        totals = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in gradients]
        sums = [total + one for total, one in zip(totals, gradients, strict=True)]
        named.update(inputs=[x, *weights, upstream, *totals], made=made, dx=dx, sums=sums)
        return [made, dx, *sums]

    specs = [tf.TensorSpec([None, 4], "float64")] + [tf.TensorSpec([4, 4], "float64")] * NUM_LAYERS
    return tf.function(body, autograph=False).get_concrete_function(*specs).graph, named


def values(named: dict[str, Any]) -> dict[Any, tf.Tensor]:
    generator = tf.random.Generator.from_seed(0)
    shapes = [[2 if size is None else size for size in tensor.shape] for tensor in named["inputs"]]
    return {
        tensor.ref(): generator.normal(shape, dtype="float64")
        for tensor, shape in zip(named["inputs"], shapes, strict=True)
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_subgraphs_together_equal_the_graph(chain: tuple[Any, dict[str, Any]], recompute: bool) -> None:
    graph, named = chain
    wanted = [named["made"], named["dx"], *named["sums"]]
    known = values(named)
    given = dict(known)
    (whole,) = extract_subgraphs(graph, named["inputs"], [wanted], ["CPU:0"])
    whole(known)
    results = [wanted[:1], wanted[1:2], wanted[2:]]
    for subgraph in extract_subgraphs(graph, named["inputs"], results, ["CPU:0"], repeated=None if recompute else ()):
        subgraph(given)
    for tensor in wanted:
        tf.debugging.assert_near(given[tensor.ref()], known[tensor.ref()], rtol=1e-14)


# The tensors of bundles in the operations that read them


def convolutions() -> keras.Model:
    """Convolutions in a row, each with a bias."""
    hidden = images = keras.Input((8, 8, 4))
    for layer in [keras.layers.Conv2D, keras.layers.Conv2DTranspose] * 3:
        hidden = layer(8, 3, padding="same", activation="relu")(hidden)
    model = keras.Model(images, keras.layers.Dense(2)(keras.layers.Flatten()(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_each_bias_of_convolutions_has_its_own_gradient_in_float32() -> None:
    """oneDNN took the gradient of another layer: biases differed by 10, or the step failed."""
    random = np.random.default_rng(0)
    examples = random.random([8, 8, 8, 4], "float32"), random.random([8, 2], "float32")
    weights = []
    pipeline = tfpar.Pipeline(2, 4, "zero_bubble", devices=["CPU:0", "CPU:1"], balance="parameters")
    for strategy in (tfpar.SingleDevice(), pipeline):
        trainer = tfpar.Trainer(convolutions, strategy, seed=0)
        trainer.fit(*examples, batch_size=8, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for expected, found in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 17, 600])
def test_a_bundle_of_any_size_returns_its_tensors(count: int) -> None:
    tensors = [tf.constant([number], "float32") for number in range(count)] + [tf.constant([1], "int32")]
    devices = [f"CPU:{int(number % 300 == 299)}" for number in range(count)] + ["CPU:0"]

    @tf.function
    def joined_and_taken_apart() -> list[tf.Tensor]:
        return unbundle(bundled(tensors, devices), tensors, devices)

    found = joined_and_taken_apart()
    assert [one.numpy().tolist() for one in found] == [one.numpy().tolist() for one in tensors]
    operations = joined_and_taken_apart.get_concrete_function().graph.get_operations()
    assert max((len(op.inputs) for op in operations if op.type == "OptionalFromValue"), default=0) <= 16
