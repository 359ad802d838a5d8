"""The learning rates of a run: equal on all workers, and after a resumption as in an uninterrupted run.

A resumed epoch calls the `on_epoch_begin` hooks a second time:

uninterrupted   rate 1.0 ─ on_epoch_begin ─ 0.7 ─ step ─ step ─ step
interrupted     rate 1.0 ─ on_epoch_begin ─ 0.7 ─ step ─ checkpoint (0.7, and 1.0 before the hook)
resumed         rate 1.0 ─ on_epoch_begin ─ 0.7 ──────────────── step ─ step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfpar.checkpoint import model_state
from tfpar.job import Job
from tfpar.loops.agreement import equal_workers
from tfpar.strategies import Strategy

Rates = dict[str, float]


class EpochBegin:
    """The `on_epoch_begin` hooks, which a resumed run calls a second time in the same epoch.

    They are called with the rates from before their first call. If they set the same rates as then, training goes on
    with the rates of the checkpoint; if not, they were changed, and the new rates hold. Weights that a hook changes are
    restored.

    Args:
        model: A built and compiled model.
        strategy: Its strategy.

    Attributes:
        rates: The rates "before" and "after" the hooks of the current epoch, by the names of their variables.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self.rates: dict[str, Rates] = {}

    def call(self, hooks: Callable[[], None]) -> None:
        """Begin an epoch; `hooks` calls its hooks."""
        before = read(self._model)
        hooks()
        self.rates = {"before": before, "after": read(self._model)}

    def call_again(self, hooks: Callable[[], None], rates: Mapping[str, Rates]) -> None:
        """Resume an epoch.

        Args:
            hooks: Calls its hooks.
            rates: The attribute `rates` in the interrupted run; empty if unknown.
        """
        restored_rates = read(self._model)
        weights = dict(model_state.read_weights(self._model))
        self._assign(rates.get("before", {}))
        self.call(hooks)
        if rates and self.rates["after"] == rates["after"]:
            self._assign(restored_rates)
        variables = model_state.state_variables(self._model)
        for name, array in model_state.read_weights(self._model):
            if not np.array_equal(array, weights[name]):
                self._strategy.engine.assign(variables[name], weights[name])

    def _assign(self, rates: Rates) -> None:
        variables = _variables(self._model)
        for name in variables.keys() & rates.keys():
            self._strategy.engine.assign(variables[name], rates[name])


def read(model: keras.Model) -> Rates:
    """Return the learning rates of a compiled model's optimizers, by the names of their variables."""
    return {name: float(rate.numpy()) for name, rate in _variables(model).items()}


def check_equal(model: keras.Model, job: Job) -> None:
    """Raise an error if the learning rates of workers differ; all workers must call this.

    `check_weights` would not notice: with sharded optimizer state, the weights stay equal even so.

    Raises:
        RuntimeError: If they differ; on every worker.
    """
    if job.num_workers == 1:
        return
    own = np.array([float(rate.numpy()) for rate in _variables(model).values()])
    means, differ = equal_workers.compare_numbers(job, own, own)
    if differ:
        number = np.argmax(np.abs(own - means))
        raise RuntimeError(
            f"All workers must train with the same learning rate, and it is {own[number]:g} on worker {job.rank} and "
            f"{means[number]:g} in the mean of all. Change it on every worker, by values that are equal on all of them."
        )


def _variables(model: keras.Model) -> dict[str, Any]:
    state = model_state.state_variables(model).items()
    scalars = {name: variable for name, variable in state if name.startswith("optimizer/") and variable.shape == ()}
    return {name: scalar for name, scalar in scalars.items() if name.split("#")[0].endswith("/learning_rate")}
