"""Eleven workers, which TensorFlow sorts by the names of their tasks: 0, 1, 10, 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small, workers
from tests.support.shard_cases import classifier

pytestmark = [pytest.mark.extended, pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]

build = classifier(keras.optimizers.Adam)


@pytest.fixture(scope="module")
def eleven() -> Iterator[workers.Job]:
    with workers.started(num_workers=11) as job:
        yield job


def data() -> Any:
    """Four batches, the last of one example."""
    return parity_cases.batches(73, 24)


def train(shard: Any) -> Any:
    trainer = tfpar.Trainer(build, tfpar.MultiWorker(["CPU:0"], shard=shard), seed=0)
    return trainer.fit(data(), epochs=2, verbose=0).history, trainer.model.get_weights()


def test_eleven_workers_train_as_one_device_and_with_divided_state_to_the_same_bits(eleven: workers.Job) -> None:
    trainer = tfpar.Trainer(build, tfpar.SingleDevice("CPU:0"), seed=0)
    expected = trainer.fit(data(), epochs=2, verbose=0).history
    of_whole, of_shards = (eleven.run(train, shard) for shard in (None, "optimizer"))
    for (history, weights), (same_history, same_weights) in zip(of_whole, of_shards, strict=True):
        small.assert_same_history(history, expected)
        small.assert_same_state(weights, trainer.model.get_weights(), 1e-5)
        assert same_history == history
        small.assert_same_state(same_weights, weights)


def predict_in_stages() -> np.ndarray:
    """Predict with a pipeline on each worker."""
    return np.asarray(tfpar.Trainer(build, tfpar.Hybrid(tfpar.Pipeline(2, 1)), seed=0).predict(data(), verbose=0))


def test_stages_of_eleven_workers_predict_in_the_order_of_the_examples(eleven: workers.Job) -> None:
    expected = tfpar.Trainer(build, tfpar.SingleDevice("CPU:0"), seed=0).predict(data(), verbose=0)
    for predicted in eleven.run(predict_in_stages):
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
