"""Layers that shards divide in ways of their own: masks, heads, biases of several axes, sparse and ragged inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import input_cases, small
from tests.support.extent import sampled
from tfpar._compat.variables import sharded_memory

pytestmark = pytest.mark.usefixtures("logical_cpus")

HEADS, POSITIONS, FEATURES = 4, 6, 8
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "shards": lambda: tfpar.TensorParallel(2),
    "uneven shards": lambda: tfpar.TensorParallel(3),
    "stage of shards": lambda: tfpar.Pipeline(1, 2, num_shards=2),
    "replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
    "stages": lambda: tfpar.Pipeline(3, 2, balance="parameters"),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def features() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(13, POSITIONS, FEATURES))


def masks(heads: int) -> np.ndarray:
    allowed = np.random.default_rng(2).uniform(size=(13, heads, POSITIONS, POSITIONS)) < 0.7
    allowed[..., 0] = True
    return allowed


def tokens() -> np.ndarray:
    """Numbers that end in padding."""
    numbers = np.random.default_rng(3).integers(1, 20, (13, POSITIONS))
    numbers[:, 4:] = 0
    return numbers


def batches(inputs: Any) -> tf.data.Dataset:
    """Batches of five examples, the last of three."""
    targets = np.random.default_rng(4).normal(size=(13, POSITIONS, 1))
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(5)


def compiled(inputs: Any, hidden: Any) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def embedded(mask_zero: bool) -> tuple[Any, Any]:
    numbers = keras.Input((POSITIONS,), dtype="int32")
    return numbers, layers.Embedding(20, FEATURES, mask_zero=mask_zero)(numbers)


def masked_attention() -> keras.Model:
    """Attention removes the masks of its inputs, and the layers after it compute without them."""
    numbers, hidden = embedded(mask_zero=True)
    return compiled(numbers, layers.Add()([hidden, layers.MultiHeadAttention(2, 4)(hidden, hidden)]))


def two_masks() -> keras.Model:
    """Two values with masks, whose sum has the mask of either."""
    numbers, first = embedded(mask_zero=True)
    second = layers.Embedding(20, FEATURES, mask_zero=True)(keras.ops.roll(numbers, 1, 1))
    return compiled(numbers, layers.Add()([layers.Dense(8)(first), layers.Dense(8)(second)]))


def gate() -> keras.Model:
    """A softmax, which needs all of its input, before an operation on shards."""
    numbers, hidden = embedded(mask_zero=False)
    return compiled(numbers, layers.Dense(8, "softmax")(hidden) * layers.Dense(8)(hidden) + 1.0)


def gate_of_filters() -> keras.Model:
    numbers, hidden = embedded(mask_zero=False)
    weights = layers.Conv1D(8, 3, padding="same", activation="softmax")(hidden)
    return compiled(numbers, weights * layers.Conv1D(8, 3, padding="same")(hidden) + 1.0)


def grouped_convolution() -> keras.Model:
    """XLA compiles it on a CPU, and reads weights of its own device only."""
    inputs = keras.Input((POSITIONS, FEATURES))
    return compiled(inputs, layers.Conv1D(8, 3, groups=2, padding="same")(layers.Dense(4)(inputs)))


def with_masks(layer: Callable[[], Any], heads: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((POSITIONS, FEATURES), name="x")
        mask = keras.Input((heads, POSITIONS, POSITIONS), dtype="bool", name="mask")
        return compiled({"x": inputs, "mask": mask}, layer()(inputs, inputs, attention_mask=mask))

    return build


def constant_mask() -> keras.Model:
    inputs = keras.Input((POSITIONS, FEATURES))
    mask = keras.ops.convert_to_tensor(masks(HEADS)[:1])
    return compiled(inputs, layers.MultiHeadAttention(HEADS, 8)(inputs, inputs, attention_mask=mask))


def biased(equation: str, shape: tuple[int, ...], axes: str) -> Callable[[], keras.Model]:
    """Return a model function: a contraction with a bias along some of its axes."""

    def build() -> keras.Model:
        inputs = keras.Input((POSITIONS, FEATURES))
        hidden = layers.EinsumDense(equation, shape, bias_axes=axes, bias_initializer="normal")(inputs)
        return compiled(inputs, keras.ops.reshape(hidden, (-1, POSITIONS, int(np.prod(shape[1:])))))

    return build


def of_heads(heads: int) -> Callable[[], Any]:
    return lambda: {"x": features(), "mask": masks(heads)}


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any]]] = {
    "masks before attention": (masked_attention, tokens),
    "two masks": (two_masks, tokens),
    "gate": (gate, tokens),
    "gate of filters": (gate_of_filters, tokens),
    "grouped convolution": (grouped_convolution, features),
    "mask of heads": (with_masks(lambda: layers.MultiHeadAttention(HEADS, 8), HEADS), of_heads(HEADS)),
    "one mask for all heads": (with_masks(lambda: layers.MultiHeadAttention(HEADS, 8), 1), of_heads(1)),
    "mask of grouped heads": (with_masks(lambda: layers.GroupQueryAttention(8, 6, 3), 6), of_heads(6)),
    "constant mask": (constant_mask, features),
    "bias of columns and positions": (biased("atc,cd->atd", (POSITIONS, 10), "dt"), features),
    "bias of heads and positions": (biased("atc,cde->atde", (POSITIONS, 10, 3), "et"), features),
    "bias of heads and columns": (biased("atc,cde->atde", (POSITIONS, 3, 10), "ed"), features),
    "bias after an ellipsis": (biased("...tc,cde->...tde", (POSITIONS, 10, 3), "et"), features),
}
ROWS = [
    *(("masks before attention", name) for name in ("shards", "replicas of shards", "stages", "weights sharded")),
    *(("mask of heads", name) for name in ("shards", "uneven shards", "stage of shards", "replicas of shards")),
    *((name, "shards") for name in ("two masks", "gate", "gate of filters", "constant mask", "mask of grouped heads")),
    *((name, "uneven shards") for name in CASES if name.startswith("bias")),
    ("one mask for all heads", "uneven shards"),
    ("grouped convolution", "replicas of shards"),
]
OF_CI = [
    *(("masks before attention", "stages"), ("mask of heads", "uneven shards"), ("two masks", "shards")),
    *(("bias of heads and positions", "uneven shards"), ("grouped convolution", "replicas of shards")),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "strategy"), sampled(ROWS, OF_CI))
def test_equals_one_device(name: str, strategy: str) -> None:
    build, inputs = CASES[name]
    small.assert_trains_as_one_device(build, lambda: batches(inputs()), STRATEGIES[strategy], 1e-9)


@pytest.mark.parametrize("name", ["mask of heads", "bias of heads and positions", "constant mask"])
def test_a_layer_is_sharded_unless_its_mask_is_a_constant(name: str) -> None:
    model = tfpar.Trainer(CASES[name][0], tfpar.TensorParallel(2), seed=0).model
    sharded = [sharded_memory.is_sharded(weight) for layer in model.layers[:-1] for weight in layer.weights]
    assert any(sharded) == (name != "constant mask")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rules"),
    [("sparse", None), ("scipy, split", None), ("ragged", None), ("ragged", {".*embeddings": (None, "model")})],
)
def test_shards_of_sparse_and_ragged_inputs_have_one_devices_weights(
    name: str, rules: Mapping[str, tuple[None, str]] | None
) -> None:
    case, weights = input_cases.CASES[name], []
    for strategy in (tfpar.SingleDevice(), tfpar.TensorParallel(2, rules)):
        trainer = tfpar.Trainer(case.model, strategy, seed=0)
        trainer.fit(**case.arguments(), verbose=0)
        weights.append(trainer.model.get_weights())
    small.assert_same_state(*weights, 1e-6)
