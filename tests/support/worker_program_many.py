"""The program of a worker for test_many_workers_multi_process.py: more workers than one digit can count."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfpar
from tests.support import parity_cases, workers
from tests.support.extent import sampled
from tests.support.shard_cases import classifier


def data() -> Any:
    """Four batches, the last of one example."""
    return parity_cases.batches(73, 24)


def divided_state() -> Any:
    """Train with the whole state on each worker, and with the state of each weight on one of them."""
    found = []
    for shard in (None, "optimizer"):
        strategy = tfpar.MultiWorker(["CPU:0"], shard=shard)
        trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), strategy, seed=0)
        found.append((trainer.fit(data(), epochs=2, verbose=0).history, trainer.model.get_weights()))
    return found


def predictions_of_stages() -> Any:
    """Predict with a pipeline on each worker."""
    trainer = tfpar.Trainer(classifier(keras.optimizers.Adam), tfpar.Hybrid(tfpar.Pipeline(2, 1)), seed=0)
    return np.asarray(trainer.predict(data()))


if __name__ == "__main__":
    tfpar.use_logical_cpus(2)
    functions = {"divided_state": divided_state, "predictions_of_stages": predictions_of_stages}
    workers.run_all({name: functions[name] for name in sampled(functions, of_ci=["predictions_of_stages"])})
