"""Workers that differ in arguments, data or settings are refused, and the settings of one program are equal texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.support import small
from tfpar.job import Job
from tfpar.loops.agreement import equal_workers
from tfpar.loops.resuming import read_order

pytestmark = pytest.mark.usefixtures("logical_cpus")


class TwoWorkers(Job):
    """A job whose other worker sends some facts and sums."""

    def __init__(
        self, facts: dict[str, str] | None = None, sums: list[list[float]] | None = None, rank: int = 0
    ) -> None:
        super().__init__(["localhost:1", "localhost:2"], rank)
        self.theirs, self.sums, self.facts = facts, sums or [], {}

    def require_equal(self, facts: dict[str, str]) -> None:
        self.facts = facts
        if self.theirs is not None and facts != self.theirs:
            raise ValueError("All workers must be equal")

    def sum(self, values: Any) -> Any:
        return np.asarray(values) + np.asarray(self.sums.pop(0))


def facts_of(**arguments: Any) -> dict[str, str]:
    job = TwoWorkers()
    equal_workers.check_fit(job, **arguments)
    return job.facts


def test_other_arguments_are_refused() -> None:
    equal_workers.check_fit(TwoWorkers(facts_of(epochs=2)), epochs=2)
    with pytest.raises(ValueError, match="All workers must be equal"):
        equal_workers.check_fit(TwoWorkers(facts_of(epochs=2)), epochs=3)


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "clipping": lambda: {"optimizer": keras.optimizers.Adam(0.1, clipnorm=1.0)},
    "schedule": lambda: {"optimizer": keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))},
    "loss": lambda: {"loss": "mae"},
    "loss_weights": lambda: {"loss_weights": [2.0]},
    "run_eagerly": lambda: {"run_eagerly": True},
    "steps_per_execution": lambda: {"steps_per_execution": 3},
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_of_compile_differ(change: str) -> None:
    assert _settings(**CHANGES[change]()) != _settings()


def test_settings_of_layers_differ() -> None:
    assert _settings(activation="relu") != _settings()


def test_automatic_names_and_the_learning_rate_do_not_count() -> None:
    """The chief's learning rate is broadcast with its weights."""
    assert _settings() == _settings()
    assert _settings(optimizer=keras.optimizers.Adam(0.5)) == _settings(optimizer=keras.optimizers.Adam(0.1))


def _settings(activation: str = "tanh", dtype: str | None = None, **compilation: Any) -> str:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation, dtype=dtype)])
    return _compiled(model, **compilation)


def _compiled(model: keras.Model, **compilation: Any) -> str:
    model.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse", **compilation})
    return equal_workers.describe_settings(model)


class Chief(TwoWorkers):
    """The other worker of a job whose chief has read batches with some digests."""

    def __init__(self, own: Any, chiefs: Any) -> None:
        super().__init__(rank=1)
        self._chiefs = np.asarray(chiefs, "float64").tobytes()
        self.order = read_order.ReadOrder(self)
        self.order.note(5, own)

    def compare(self) -> None:
        others = read_order.ReadOrder(TwoWorkers())
        others.note(5, np.frombuffer(self._chiefs).reshape(-1, 3))
        self.order.compare(np.add(self.order.summaries(), others.summaries()))

    def broadcast(self, message: bytes | None, sender: int = 0) -> bytes:
        return self._chiefs

    def sum(self, values: Any) -> Any:
        return np.asarray(values)


DIGESTS = [[0.0, 8.0, 1.0e6], [0.0, 8.0, 2.0e6], [0.0, 8.0, 3.0e6]]


def test_the_first_step_that_read_another_batch_is_named() -> None:
    Chief(DIGESTS, DIGESTS).compare()
    Chief(np.multiply(DIGESTS, 1 + 1e-8), DIGESTS).compare()  # rounded by another processor
    for own in (DIGESTS[:1] + DIGESTS[:0:-1], DIGESTS[:1]):
        with pytest.raises(ValueError, match="worker 1 has read another batch than the chief in step 7 of the epoch"):
            Chief(own, DIGESTS).compare()


def test_other_weights_after_training_are_refused() -> None:
    model = small.initial_model()
    weights = model.get_weights()
    own = [*(float(one.sum()) for one in weights), *(float(np.abs(one).sum()) for one in weights)]
    equal_workers.check_weights(TwoWorkers(sums=[own, [0.0]]), model)
    with pytest.raises(RuntimeError, match="All workers must end with equal weights"):
        equal_workers.check_weights(TwoWorkers(sums=[[1.1 * one for one in own], [1.0]]), model)
