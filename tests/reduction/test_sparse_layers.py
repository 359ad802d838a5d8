"""Layers of Keras with sparse outputs multiply rows of the next weight: replicas add the rows of their parts."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LAYERS: dict[str, Callable[[], keras.layers.Layer]] = {
    "category encoding": lambda: keras.layers.CategoryEncoding(12, "multi_hot", sparse=True, dtype="int64"),
    "lookup": lambda: keras.layers.IntegerLookup(
        vocabulary=list(range(11)), output_mode="multi_hot", sparse=True, num_oov_indices=1
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("shard", [None, "optimizer"])
@pytest.mark.parametrize("name", LAYERS)
def test_replicas_train_as_one_device(name: str, shard: str | None) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((3,), dtype="int64"), LAYERS[name](), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    random = np.random.default_rng(0)
    arrays = random.integers(0, 11, (23, 3)), random.integers(0, 3, 23)
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(*arrays, batch_size=7, shuffle=False, verbose=0).history
    trainer = tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"], shard=shard), seed=0)
    history = trainer.fit(*arrays, batch_size=7, shuffle=False, verbose=0).history
    small.assert_same_history(history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-6)
