"""Tensor parallelism of masks with an axis of heads, and of biases along several axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tfpar._compat import tf_divided_memory

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

HEADS, POSITIONS, FEATURES = 4, 6, 8
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "even": lambda: tfpar.TensorParallel(2),
    "uneven": lambda: tfpar.TensorParallel(3),
    "stages": lambda: tfpar.Pipeline(1, 2, num_shards=2),
    "replicas": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def features() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(16, POSITIONS, FEATURES))


def masks(heads: int) -> np.ndarray:
    found = np.random.default_rng(2).uniform(size=(16, heads, POSITIONS, POSITIONS)) < 0.7
    found[..., 0] = True
    return found


def masked(layer: Callable[[], Any], heads: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((POSITIONS, FEATURES), name="x")
        mask = keras.Input((heads, POSITIONS, POSITIONS), dtype="bool", name="mask")
        hidden = layer()(inputs, inputs, attention_mask=mask)
        return compiled(keras.Model({"x": inputs, "mask": mask}, keras.layers.Dense(1)(hidden)))

    return build


def constant() -> keras.Model:
    inputs = keras.Input((POSITIONS, FEATURES))
    mask = keras.ops.convert_to_tensor(masks(HEADS)[:1])
    hidden = keras.layers.MultiHeadAttention(HEADS, 8)(inputs, inputs, attention_mask=mask)
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(hidden)))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def assert_parity(build: Callable[[], keras.Model], inputs: Any, strategy: tfpar.Strategy) -> keras.Model:
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    targets = np.random.default_rng(3).normal(size=(16, POSITIONS, 1))
    keras.utils.set_random_seed(0)
    expected = build()
    expected.fit(inputs, targets, **fit)
    trainer = tfpar.Trainer(build, strategy, seed=0)
    trainer.fit(inputs, targets, **fit)
    for one, other in zip(trainer.model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)
    return trainer.model


LAYERS: dict[str, tuple[Callable[[], Any], int]] = {
    "heads": (lambda: keras.layers.MultiHeadAttention(HEADS, 8), HEADS),
    "one for all heads": (lambda: keras.layers.MultiHeadAttention(HEADS, 8), 1),
    "grouped": (lambda: keras.layers.GroupQueryAttention(8, 6, 3), 6),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_of_heads_is_cut_as_the_heads(kind: str, strategy: str) -> None:
    layer, heads = LAYERS[kind]
    model = assert_parity(masked(layer, heads), {"x": features(), "mask": masks(heads)}, STRATEGIES[strategy]())
    assert any(map(tf_divided_memory.is_divided, model.layers[-2].weights))


def test_attention_with_a_constant_mask_of_heads_stays_whole() -> None:
    model = assert_parity(constant, features(), tfpar.TensorParallel(2))
    assert not any(map(tf_divided_memory.is_divided, model.layers[-2].weights))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("equation", "shape", "axes"),
    [
        ("atc,cd->atd", (POSITIONS, 10), "dt"),
        ("atc,cd->atd", (POSITIONS, 10), "td"),
        ("atc,cde->atde", (POSITIONS, 10, 3), "te"),
        ("atc,cde->atde", (POSITIONS, 10, 3), "et"),
        ("atc,cde->atde", (POSITIONS, 3, 10), "ed"),
        ("...tc,cde->...tde", (POSITIONS, 10, 3), "et"),
    ],
)
def test_a_bias_has_the_axes_of_the_output(equation: str, shape: tuple[int, ...], axes: str) -> None:
    def build() -> keras.Model:
        inputs = keras.Input((POSITIONS, FEATURES))
        hidden = keras.layers.EinsumDense(equation, shape, bias_axes=axes, bias_initializer="normal")(inputs)
        hidden = keras.ops.reshape(hidden, (-1, POSITIONS, int(np.prod(shape[1:]))))
        return compiled(keras.Model(inputs, keras.layers.Dense(1)(hidden)))

    model = assert_parity(build, features(), tfpar.TensorParallel(3))
    assert any(map(tf_divided_memory.is_divided, model.layers[1].weights))
