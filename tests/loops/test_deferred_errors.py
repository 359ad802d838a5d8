"""Errors of one worker are held until the workers vote, and are raised at once with one worker."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tfpar.job import Job
from tfpar.loops.agreement.deferred_errors import DeferringCallbacks

pytestmark = pytest.mark.usefixtures("logical_cpus")


class TwoWorkers(Job):
    """Votes as if the other worker had no error, or can no longer be reached."""

    def __init__(self, is_reachable: bool) -> None:
        super().__init__(["localhost:1", "localhost:2"], all_reduce=self._sum)
        self._is_reachable = is_reachable

    def _sum(self, values: np.ndarray) -> np.ndarray:
        if not self._is_reachable:
            raise tf.errors.InternalError(None, None, "Shape mismatch in the collective instance")
        return values


class Fails(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.hooks.append("epoch begin")
        raise KeyError("width")

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.hooks.append("batch begin")


@pytest.mark.parametrize("is_reachable", [True, False])
def test_an_error_is_held_until_the_vote_and_ends_the_hooks(is_reachable: bool) -> None:
    failing, strategy = Fails(), tfpar.SingleDevice("CPU:0")
    strategy.engine.job = TwoWorkers(is_reachable)
    callbacks = DeferringCallbacks(keras.callbacks.CallbackList([failing]), strategy)
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_begin(0)
    assert failing.hooks == ["epoch begin"]
    with pytest.raises(KeyError, match="width"):
        callbacks.errors.vote([1.0])


def test_with_one_worker_an_error_ends_the_training_before_the_next_step() -> None:
    failing = Fails()
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice("CPU:0"), seed=0)
    with pytest.raises(KeyError, match="width"):
        trainer.fit(small.data(), verbose=0, callbacks=[failing])
    assert failing.hooks == ["epoch begin"]
    assert int(trainer.model.optimizer.iterations) == 0
