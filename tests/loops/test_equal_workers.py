"""Workers that differ in arguments, data or settings are refused, and the settings of one program are equal texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import small
from tfpar.loops import equal_workers

pytestmark = pytest.mark.usefixtures("logical_cpus")


class TwoWorkers(tfpar.SingleDevice):
    """A strategy whose other worker sends some facts and sums."""

    num_workers = 2

    def __init__(self, facts: dict[str, str] | None = None, sums: list[list[float]] | None = None) -> None:
        super().__init__()
        self.theirs, self.sums, self.facts = facts, sums or [], {}

    def require_equal(self, facts: dict[str, str]) -> None:
        self.facts = facts
        if self.theirs is not None and facts != self.theirs:
            raise ValueError("All workers must be equal")

    def all_reduce_sum(self, values: Any) -> Any:
        return np.asarray(values) + np.asarray(self.sums.pop(0))


def facts_of(**arguments: Any) -> dict[str, str]:
    strategy = TwoWorkers()
    equal_workers.check_fit(strategy, arguments.pop("examples", None), **arguments)
    return strategy.facts


def test_other_arguments_are_refused() -> None:
    equal_workers.check_fit(TwoWorkers(facts_of(epochs=2)), None, epochs=2)
    with pytest.raises(ValueError, match="All workers must be equal"):
        equal_workers.check_fit(TwoWorkers(facts_of(epochs=2)), None, epochs=3)


def test_arrays_are_compared_by_their_sizes_and_rows() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    assert facts_of(examples=(rows, None)) == facts_of(examples=(rows.copy(), None))
    for other in (rows[::-1], rows + 1, rows[:5]):
        assert facts_of(examples=(rows, None)) != facts_of(examples=(other, None))


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


def _settings(activation: str = "tanh", **compilation: Any) -> str:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation)])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse", **compilation})
    return equal_workers.settings_of(model)


def test_other_weights_after_training_are_refused() -> None:
    model = small.initial_model()
    own = [float(np.abs(one.numpy()).sum()) for one in model.trainable_variables]
    equal_workers.check_weights(TwoWorkers(sums=[own, [0.0]]), model)
    with pytest.raises(RuntimeError, match="All workers must end with equal weights"):
        equal_workers.check_weights(TwoWorkers(sums=[[1.1 * one for one in own], [1.0]]), model)
