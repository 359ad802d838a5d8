"""Local SGD with lookups: the average of one Keras training for each replica, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import optimizers

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases
from tests.support.multi_worker_cases import assert_same

pytestmark = pytest.mark.usefixtures("logical_cpus")

# Keras updates rows of a weight otherwise than the whole weight, unless the optimizer is linear in the gradient.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam, clipped": lambda: optimizers.Adam(0.05, global_clipnorm=0.5),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "Lamb": lambda: optimizers.Lamb(0.05),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replica_updates_looked_up_rows_as_keras_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    dataset = parity_cases._tokens(8).take(2)
    strategy = tfpar.MultiWorker(["CPU:0", "CPU:1"], sync="average")
    trainer = tfpar.Trainer(lambda: parity_cases.lookups(OPTIMIZERS[name]), strategy, seed=0)
    trainer.fit(dataset, verbose=0)
    assert_same(_averaged(trainer.model), _averaged_by_keras(OPTIMIZERS[name], list(dataset)))


def _averaged_by_keras(optimizer: Callable[[], Any], batches: list[Any]) -> list[np.ndarray]:
    """Train two models, each on its half of every batch, and average them after every step."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(parity_cases.lookups(optimizer))
        models[-1].optimizer.build(models[-1].trainable_variables)
    for tokens, labels in batches:
        for model, half in zip(models, (slice(0, 4), slice(4, 8)), strict=True):
            model.train_on_batch(tokens[half], labels[half])
        cases.average([[*model.trainable_variables, *_slots(model)] for model in models])
    return _averaged(models[0])


def _averaged(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in (*model.trainable_variables, *_slots(model))]


def _slots(model: keras.Model) -> list[keras.Variable]:
    """Return the optimizer's variables without its counts and its learning rate."""
    found = model.optimizer.variables
    return [one for one in found if one.dtype == "float64" and not one.path.endswith("learning_rate")]
