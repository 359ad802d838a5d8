"""Tensor parallelism over sparse and ragged inputs, which are sent to the other shards in their parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import tfpar
from tests.support.input_cases import CASES
from tfpar.strategies import Strategy

pytestmark = pytest.mark.usefixtures("logical_cpus")
COLUMNS = {".*embeddings": (None, "model")}


def weights_under(strategy: Strategy, name: str) -> list[np.ndarray]:
    trainer = tfpar.Trainer(CASES[name].model, strategy, seed=0)
    trainer.fit(**CASES[name].arguments(), verbose=0)
    weights: list[np.ndarray] = trainer.model.get_weights()
    return weights


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "rules"), [("sparse", None), ("scipy, split", None), ("ragged", None), ("ragged", COLUMNS)]
)
def test_shards_of_sparse_and_ragged_inputs_have_one_devices_weights(
    name: str, rules: Mapping[str, tuple[None, str]] | None
) -> None:
    actual = weights_under(tfpar.TensorParallel(2, rules, devices=["CPU:0", "CPU:1"]), name)
    for one, expected in zip(actual, weights_under(tfpar.SingleDevice(), name), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-6)
