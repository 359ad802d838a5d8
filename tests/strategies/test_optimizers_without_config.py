"""Optimizers and schedules without a configuration train under every strategy, as in Keras' own `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support.pipeline_models import crossentropy, deep, labelled
from tests.support.small import assert_same_state, state

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DEVICES = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "pipeline": lambda: tfpar.Pipeline(2, 2),
    "replicas of pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="memory"), num_replicas=2),
    "fully sharded": lambda: tfpar.Mirrored(DEVICES, shard="weights"),
    "shards": lambda: tfpar.TensorParallel(2),
}


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 * keras.ops.minimum(1.0, (keras.ops.cast(step, "float32") + 1) / 5)


class Silent(keras.optimizers.Adam):
    """An optimizer that reads an argument of its own, and has lists that `build` fills."""

    def __init__(self, rate: float, factor: float) -> None:
        super().__init__(rate)
        self.factor, self.counts = factor, []

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.counts += [self.add_variable_from_reference(one, "count") for one in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.counts[self._get_variable_index(variable)], keras.ops.ones_like(variable))
        super().update_step(self.factor * gradient, variable, learning_rate)

    def get_config(self) -> Any:
        raise NotImplementedError


OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "schedule": lambda: keras.optimizers.Adam(WarmUp(), weight_decay=0.01),
    "scaled losses": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(WarmUp(), momentum=0.9)),
    "optimizer": lambda: Silent(0.01, 2.0),
}


def build(optimizer: str) -> keras.Model:
    model = deep()
    model.compile(OPTIMIZERS[optimizer](), crossentropy())
    return model


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_without_a_configuration_trains(strategy: str, optimizer: str) -> None:
    if strategy == "shards" and optimizer == "optimizer":
        pytest.skip("shards train with Keras' own optimizers only")
    keras.utils.set_random_seed(0)
    alone = build(optimizer)
    alone.fit(labelled(), verbose=0, shuffle=False)
    trainer = tfpar.Trainer(lambda: build(optimizer), STRATEGIES[strategy](), seed=0)
    trainer.fit(labelled(), verbose=0, shuffle=False)
    assert_same_state(state(trainer.model), state(alone), 1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_preview_measures_the_update_of_a_copy(optimizer: str) -> None:
    trainer = tfpar.Trainer(lambda: build(optimizer), tfpar.Pipeline(2, 2), seed=0)
    before = trainer.model.get_weights()
    assert "stage" in str(trainer.preview(labelled()))
    for one, other in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    optimizers = [trainer.model.optimizer, getattr(trainer.model.optimizer, "inner_optimizer", None)]
    variables = [one for optimizer in optimizers if optimizer for one in optimizer.variables if "count" in one.path]
    assert not any(np.any(one.numpy()) for one in variables), "the update of a preview is not one of the optimizer"
