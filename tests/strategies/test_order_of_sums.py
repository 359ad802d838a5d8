"""Sums of three tensors or more in a step have the same bits in each run, whatever device ends first."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.engines.steps import multi_step

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_RUNS = 400  # TensorFlow's own sum has two results in every 10 runs


def sums(first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A sum of three, of which another device reads two."""
    with tf.device("CPU:0"):
        terms = [tf.sin(first), tf.cos(first * second), tf.tanh(second)]
    with tf.device("CPU:1"):
        read = [tf.reduce_sum(term @ term) for term in terms[:2]]
    with tf.device("CPU:0"):
        return tf.add_n(terms), read[0] + read[1]


def nodes_of(part: Any) -> Any:
    """The operations of a graph, or of a function."""
    return part.node_def if hasattr(part, "node_def") else part.node


def test_a_sum_of_three_has_the_same_bits_in_each_run() -> None:
    first, second = (np.random.default_rng(seed).normal(size=(64, 64)) for seed in range(2))
    step = tf.function(multi_step.alone(sums), autograph=False)
    expected = np.sin(first) + np.cos(first * second)
    results = {step(first, second)[0].numpy().tobytes() for _ in range(NUM_RUNS)}
    assert len(results) == 1
    np.testing.assert_allclose(np.frombuffer(results.pop()).reshape(64, 64), expected + np.tanh(second), rtol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"]),
        lambda: tfpar.TensorParallel(2),
        lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    ],
    ids=["mirrored", "tensor_parallel", "pipeline"],
)
def test_steps_have_no_sum_without_order(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three consumers of a tensor have a gradient each."""

    def build() -> keras.Model:
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(8, "tanh")(keras.layers.Dense(40)(inputs))
        outputs = [keras.layers.Dense(8)(hidden) for _ in range(3)]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Multiply()(outputs)))
        model.compile("sgd", "mse")
        return model

    traced: list[tf.Graph] = []
    alone = multi_step.alone

    def noted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = alone(function)(*arguments)
            traced.append(tf.compat.v1.get_default_graph())
            return result

        return call

    monkeypatch.setattr(multi_step, "alone", noted)
    trainer = tfpar.Trainer(build, strategy(), seed=0)
    trainer.fit(np.ones((8, 8), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    definitions = [graph.as_graph_def() for graph in traced]
    nodes = [node for one in definitions for part in (one, *one.library.function) for node in nodes_of(part)]
    assert traced
    assert not [node for node in nodes if node.op == "AddN" and node.attr["N"].i > 2]
