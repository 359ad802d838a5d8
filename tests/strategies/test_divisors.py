"""Divisors of losses over replicas: their sums need no result of the forward pass, and begin before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.strategies.test_gradient_order import needs
from tfpar.data import Sharded

pytestmark = pytest.mark.usefixtures("logical_cpus")

MEAN = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WEIGHTED = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")


def build(loss: keras.losses.Loss, mask: bool, num_outputs: int) -> Callable[[], keras.Model]:
    """Return a model function: a tagger of sequences of any length, with or without a mask."""

    def build_tagger() -> keras.Model:
        inputs = keras.Input((None,), dtype="int32")
        hidden = keras.layers.Embedding(11, 8, mask_zero=mask)(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(3)(hidden) for _ in range(num_outputs)])
        model.compile(keras.optimizers.SGD(0.1), [loss] * num_outputs)
        return model

    return build_tagger


def examples(weighted: bool, num_outputs: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    tokens, labels, weights = rng.integers(0, 11, (14, 6)), rng.integers(0, 3, (14, 6)), rng.random((14, 6), "float32")
    targets = (labels.astype("int32"),) * num_outputs
    return (tokens.astype("int32"), targets, (weights,) * num_outputs)[: 3 if weighted else 2]


def whole_batches(arrays: tuple[Any, ...]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(7)


def shards(arrays: tuple[Any, ...]) -> Sharded:
    return Sharded(lambda _: tf.data.Dataset.from_tensor_slices(arrays), num_shards=1, global_batch_size=7)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("loss", "mask", "weighted", "num_outputs", "data"),
    [
        (MEAN, True, False, 1, whole_batches),
        (MEAN, True, False, 2, whole_batches),
        (WEIGHTED, True, True, 1, whole_batches),
        (MEAN, True, False, 1, shards),
        (MEAN, False, False, 1, shards),
    ],
    ids=["mask", "two outputs", "mask and weights", "mask, shards", "shards"],
)
def test_the_backward_pass_waits_for_no_sum_of_results_of_the_forward_pass(
    loss: keras.losses.Loss, mask: bool, weighted: bool, num_outputs: int, data: Callable[..., Any]
) -> None:
    """And the weights are those of one device."""
    arrays, build_tagger = examples(weighted, num_outputs), build(loss, mask, num_outputs)
    strategy = tfpar.MultiWorker(["CPU:0", "CPU:1"])
    trainer = tfpar.Trainer(build_tagger, strategy, seed=0)
    trainer.fit(data(arrays), verbose=0)
    spec = strategy.distribute(data(arrays)).dataset.element_spec[:-1]  # without the digest
    step = tf.function(lambda *batch: strategy.train_step(trainer.model, batch), autograph=False)
    operations = step.get_concrete_function(*spec).graph.get_operations()
    backward = set().union(*(needs(op) for op in operations if op.type == "MatMul" and "gradient_tape" in op.name))
    awaited = [op for op in backward if op.type.startswith("Collective")]
    assert {one.type for op in awaited for one in needs(op)}.isdisjoint({"ResourceGather", "MatMul", "BatchMatMulV2"})
    assert awaited

    keras.utils.set_random_seed(0)
    model = build_tagger()
    model.fit(whole_batches(arrays), verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
