"""Weights that a user excludes from weight decay stay so where their memory is allocated later, or again."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance=[1, 1]),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
}


def build() -> keras.Model:
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *layers])
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[layers[0].kernel, layers[1].bias])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_excluded_weight_does_not_decay(strategy: str) -> None:
    report = tfpar.check_parity(build, small.data(), STRATEGIES[strategy](), verbose=False)
    assert report.equal, report.first_difference


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_excluded_weight_of_a_model_that_was_built_elsewhere_does_not_decay(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    expected = build()
    expected.fit(small.data(), verbose=0)
    keras.utils.set_random_seed(0)
    model = build()
    tfpar.Trainer(model, STRATEGIES[strategy]()).fit(small.data(), verbose=0)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
