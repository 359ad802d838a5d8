"""Digests of batches: other orders and other targets change them, and numbers that random operations reach do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_datasets

ROWS = 64


def arrays(order: Any) -> tuple[np.ndarray, ...]:
    features = np.random.default_rng(0).normal(size=(ROWS, 50)).astype("float32")
    features[:, 0] = np.nan
    return features[order], np.arange(ROWS)[order] % 2 * 2 - 1


def numbers(dataset: tf.data.Dataset) -> np.ndarray:
    digest = data.batch_digest(dataset)
    return np.stack([digest(batch).numpy() for batch in dataset])


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "inputs alone": lambda x, y: x,
    "targets alone": lambda x, y: (tf.zeros_like(x), y),
    "texts": lambda x, y: (None, tf.strings.as_string(y)),
    "ragged": lambda x, y: (tf.RaggedTensor.from_tensor(tf.cast(y[:, None], "float32"), padding=1.0), None, x),
    "sparse": lambda x, y: ({"a": tf.sparse.from_dense(x)}, y),
    "truths": lambda x, y: (None, y > 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_exchanged_rows_change_the_digest(kind: str) -> None:
    order = np.arange(ROWS)
    exchanged = order.copy()
    exchanged[[20, 33]] = exchanged[[33, 20]]
    batches = [tf.data.Dataset.from_tensor_slices(arrays(one)).batch(32).map(KINDS[kind]) for one in (order, exchanged)]
    first, second = map(numbers, batches)
    np.testing.assert_array_equal(first[:, :2], [[0, 32], [0, 32]])
    assert not np.isclose(first[:, 2], second[:, 2], rtol=1e-6).any()


def noisy(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x + tf.random.normal(tf.shape(x)), y


def sometimes(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x), tf.one_hot(y, 3)


def mixed(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x, tf.cast(y, "float32") * tf.random.uniform([])


PAIRS = tf.data.Dataset.from_tensor_slices(arrays(np.arange(ROWS)))
DRAWN: dict[str, tuple[Callable[[], tf.data.Dataset], list[bool]]] = {
    "nothing": (lambda: PAIRS.shuffle(9).map(lambda x, y: (x + 1, y)), [False, False]),
    "inputs": (lambda: PAIRS.map(noisy).batch(4).map(lambda x, y: {"a": y, "b": x}), [False, True]),
    "a condition": (lambda: PAIRS.map(sometimes).batch(4), [True, False]),
    "a function": (lambda: PAIRS.map(tf.function(noisy)).repeat(2), [True, False]),
    "targets": (lambda: PAIRS.map(mixed), [False, True]),
    "Python code": (lambda: PAIRS.map(lambda x, y: (tf.numpy_function(np.sin, [x], "float32"), y)), [True, False]),
    "an inner dataset": (lambda: tf.data.Dataset.range(2).interleave(lambda _: PAIRS.map(noisy)), [True, True]),
    "a random dataset": (
        lambda: tf.data.Dataset.zip((PAIRS, tf.data.Dataset.random())).map(lambda pair, seed: (pair[0], pair[1], seed)),
        [False, False, True],
    ),
    "a choice": (lambda: tf.data.Dataset.sample_from_datasets([PAIRS, PAIRS]), [False, False]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_followed_to_the_tensors_that_they_reach(name: str) -> None:
    dataset, expected = DRAWN[name]
    assert tf_datasets.random_components(dataset()) == expected


def test_random_inputs_and_inputs_of_python_code_do_not_count() -> None:
    def generate() -> Any:
        yield from zip(np.random.normal(size=(8, 3)), range(8), strict=True)

    spec = tf.TensorSpec([3], "float64"), tf.TensorSpec([], "int64")
    generated = tf.data.Dataset.from_generator(generate, output_signature=spec)
    for dataset in (PAIRS.map(noisy).batch(8), generated.batch(8)):
        np.testing.assert_array_equal(numbers(dataset), numbers(dataset))


def test_a_batch_that_is_drawn_in_full_says_so() -> None:
    batches = PAIRS.batch(8).map(lambda x, y: mixed(*noisy(x, y)))
    assert (numbers(batches)[:, 0] == 1).all()
