"""Weights that are overwritten by their gradients, as the scales of float8 training: equal to Keras, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

CPUS = ["CPU:0", "CPU:1"]
IN_PARTS: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(CPUS),
    "optimizer sharded": lambda: tfpar.Mirrored(CPUS, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(CPUS, shard="weights"),
    "replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), 2),
    "stages": lambda: tfpar.Pipeline(2, 1, balance=[1, 1]),
    "micro-batches": lambda: tfpar.Pipeline(1, 2),
    "stages of shards": lambda: tfpar.Pipeline(2, 2, num_shards=2, balance=[1, 1]),
}


def float8() -> keras.Model:
    model = parity_cases.classifier(lambda: keras.optimizers.SGD(0.1))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the input layer has no quantization
        model.quantize("float8")
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_gradients_in_parts_are_refused_before_the_first_step(strategy: str) -> None:
    trainer = tfpar.Trainer(float8, IN_PARTS[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"inputs_scale' is its new value .* Train on SingleDevice\(\) or Tensor"):
        trainer.fit(parity_cases.batches(16, 8), verbose=0)


@pytest.mark.parametrize("strategy", ["mirrored", "optimizer sharded", "weights sharded", "replicas of shards"])
def test_replicas_evaluate_float8(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    expected = float8().evaluate(parity_cases.batches(16, 8), verbose=0)
    found = tfpar.Trainer(float8, IN_PARTS[strategy](), seed=0).evaluate(parity_cases.batches(16, 8), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["stages", "micro-batches", "stages of shards"])
def test_pipelines_refuse_float8_in_evaluation_and_prediction_too(strategy: str) -> None:
    trainer = tfpar.Trainer(float8, IN_PARTS[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"inputs_scale' is its new value"):
        trainer.evaluate(parity_cases.batches(16, 8), verbose=0)
    with pytest.raises(ValueError, match=r"inputs_scale' is its new value"):
        trainer.predict(parity_cases.inputs(8), verbose=0)


@pytest.mark.parametrize("strategy", [tfpar.SingleDevice, lambda: tfpar.TensorParallel(2)], ids=["one", "shards"])
def test_gradients_of_the_whole_batch_train_float8(strategy: Callable[[], tfpar.Strategy]) -> None:
    keras.utils.set_random_seed(0)
    expected = float8().fit(parity_cases.batches(32, 8), epochs=2, verbose=0).history["loss"]
    found = tfpar.Trainer(float8, strategy(), seed=0).fit(parity_cases.batches(32, 8), epochs=2, verbose=0)
    np.testing.assert_allclose(found.history["loss"], expected, rtol=1e-5)
