"""Steps whose sizes are computed on the host, as those on GPUs, train as one device; logical CPUs stand for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support import placement_cases, small
from tests.support.extent import sampled
from tfpar import host_sizes
from tfpar.pipeline.stages.shards import replace_devices, requested_device

pytestmark = pytest.mark.usefixtures("logical_cpus")

PAIR = ["CPU:1", "CPU:2"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice("CPU:1"),
    "replicas": lambda: tfpar.Mirrored(PAIR),
    "state": lambda: tfpar.Mirrored(PAIR, shard="optimizer"),
    "weights": lambda: tfpar.Mirrored(PAIR, shard="weights"),
    "layers": lambda: tfpar.TensorParallel(2, devices=PAIR),
    "stages": lambda: tfpar.Pipeline(2, 2, balance="parameters", devices=PAIR),
    "recomputed stages": lambda: tfpar.Pipeline(2, 2, balance="parameters", devices=PAIR, recompute=True),
    "stages of shards": lambda: tfpar.Pipeline(1, 2, balance="parameters", devices=PAIR, num_shards=2),
    "replicas of stages": lambda: tfpar.Hybrid(tfpar.Pipeline(1, 2, balance="parameters"), 2, PAIR),
}


def sequences(jit_compile: bool = False) -> keras.Model:
    """Shapes of a product, of moments and of a loop over time steps, of which XLA compiles no part."""
    inputs = keras.Input((6, 5))
    hidden = layers.LayerNormalization()(layers.Dense(8, "tanh")(inputs))
    hidden = hidden if jit_compile else layers.LSTM(4, return_sequences=True)(hidden)
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def data() -> tf.data.Dataset:
    """Batches of 8, the last of 5."""
    generator = np.random.default_rng(0)
    arrays = generator.normal(size=(21, 6, 5)).astype("float32"), generator.integers(0, 3, size=(21, 6))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", sampled(STRATEGIES, of_ci=("replicas", "stages")))
def test_equals_one_device(strategy: str) -> None:
    with placement_cases.as_gpus():
        small.assert_trains_as_one_device(sequences, data, STRATEGIES[strategy])


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["single device", "replicas", "weights", "layers", "stages"])
def test_predictions_equal_those_of_keras(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    expected = sequences().predict(data(), verbose=0)
    with placement_cases.as_gpus():
        found = tfpar.Trainer(sequences, STRATEGIES[strategy](), seed=0).predict(data(), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", sampled(("single device", "replicas", "stages"), of_ci=["stages"]))
def test_equals_one_device_with_xla(strategy: str) -> None:
    with placement_cases.as_gpus():
        small.assert_trains_as_one_device(lambda: sequences(jit_compile=True), data, STRATEGIES[strategy])


def computing(function: Callable[[tf.Tensor], tf.Tensor], *shape: int | None) -> list[tuple[str, str]]:
    """The operations of a function with their devices, as if the CPU 1 were a GPU."""

    @tf.function
    def traced(given: tf.Tensor) -> tf.Tensor:
        with host_sizes.sizes_on_host(), tf.device("CPU:1"):
            return function(given)

    with placement_cases.as_gpus():
        graph = traced.get_concrete_function(tf.TensorSpec(shape)).graph
    return [(one.type, one.device) for one in graph.get_operations()]


def test_integers_of_the_host_are_computed_there() -> None:
    found = computing(lambda given: tf.reshape(given, [tf.reduce_prod(tf.gather(tf.shape(given), [0, 1]))]), None, 4)
    on_host = [kind for kind, device in found if device == "/device:CPU:0"]
    assert on_host == ["GatherV2", "Prod"]
    assert {"Shape", "Reshape"} <= {kind for kind, device in found if device == "/device:CPU:1"}


def after_given(given: tf.Tensor) -> tf.Tensor:
    sizes, first, axis = tf.shape(given), tf.constant([0]), tf.constant(0)
    with tf.control_dependencies([tf.nn.relu(given)]):
        return tf.raw_ops.GatherV2(params=sizes, indices=first, axis=axis)


@pytest.mark.parametrize(
    "function",
    [
        lambda given: tf.gather(tf.cast(given, tf.int32), [0, 1]),
        lambda given: tf.reduce_prod(tf.cast(tf.reduce_sum(given), tf.int64)),
        lambda given: tf.gather(tf.range(tf.shape(given)[0]), [0, 1]),
        lambda given: tf.cond(tf.shape(given)[0] > 2, lambda: tf.shape(given)[0] * 2, lambda: tf.shape(given)[0]),
        after_given,
        lambda given: tf.random.uniform([], maxval=5, dtype=tf.int32),
    ],
    ids=["of a GPU", "computed on a GPU", "as many as examples", "condition", "after an operation of a GPU", "draw"],
)
def test_other_integers_stay_on_the_gpu(function: Callable[[tf.Tensor], tf.Tensor]) -> None:
    assert "/device:CPU:0" not in [device for _, device in computing(function, None)]


def test_the_host_is_that_of_the_process_of_the_gpu() -> None:
    of_second = "/job:worker/replica:0/task:1/device:"
    assert requested_device(f"{of_second}CPU:0", [f"{of_second}GPU:0"]) == f"{of_second}CPU:0"
    assert requested_device(f"{of_second}CPU:0", [f"{of_second}GPU:0"], jit_compile=True) == ""
    operations = tf.compat.v1.GraphDef()
    operations.node.add(name="sizes", device=f"{of_second}CPU:0")
    of_first = of_second.replace("task:1", "task:0")
    moved = replace_devices(operations, [f"{of_second}GPU:0"], [f"{of_first}GPU:0"])
    assert moved.node[0].device == f"{of_first}CPU:0"
