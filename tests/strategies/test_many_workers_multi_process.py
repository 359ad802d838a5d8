"""Eleven workers, which TensorFlow sorts by the names of their tasks: 0, 1, 10, 2."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest

import tfpar
from tests.support import small, worker_program_many, workers
from tests.support.shard_cases import classifier
from tests.support.workers import results_of

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]

NUM_WORKERS = 11


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    with workers.started("worker_program_many", tmp_path_factory.mktemp("workers"), NUM_WORKERS) as job:
        yield job


@pytest.mark.extended
def test_eleven_workers_train_as_one_device_and_with_divided_state_to_the_same_bits(job: workers.Workers) -> None:
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), tfpar.SingleDevice("CPU:0"), seed=0)
    history = trainer.fit(worker_program_many.data(), epochs=2, verbose=0).history
    for (found, weights), of_shards in results_of(job, "divided_state"):
        small.assert_same_history(found, history)
        small.assert_same_state(weights, trainer.model.get_weights(), 1e-5)
        assert of_shards[0] == found
        small.assert_same_state(of_shards[1], weights)


@pytest.mark.extended
def test_stages_of_eleven_workers_predict_in_the_order_of_the_examples(job: workers.Workers) -> None:
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), tfpar.SingleDevice("CPU:0"), seed=0)
    expected = trainer.predict(worker_program_many.data())
    for found in results_of(job, "predictions_of_stages"):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
