"""The learning rates of a run: equal on all workers, and as in an uninterrupted run where an epoch begins twice.

An epoch that is resumed begins a second time, with all hooks of callbacks:

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
    """The hooks at the begin of an epoch, which a resumed run calls a second time.

    A hook that lowers the rate by a factor would lower it twice. Such a hook gives the same rate as in the interrupted
    run, and the run trains on with the rate of its checkpoint. A hook that gives another rate has been changed, and its
    rate holds. Weights that a hook changes, such as by reinitializing a layer, are restored from the checkpoint.

    Args:
        model: A built and compiled model.
        strategy: Its strategy.

    Attributes:
        rates: The rates before and after the hooks of the current epoch, by the names of their variables.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self.rates: dict[str, Rates] = {}

    def call(self, hooks: Callable[[], None]) -> None:
        """Call the hooks of an epoch that begins.

        Args:
            hooks: Calls them.
        """
        before = read(self._model)
        hooks()
        self.rates = {"before": before, "after": read(self._model)}

    def call_again(self, hooks: Callable[[], None], rates: Mapping[str, Rates]) -> None:
        """Call the hooks of an epoch that is resumed.

        Args:
            hooks: Calls them.
            rates: Those of the interrupted run; empty in checkpoints of older versions.
        """
        of_checkpoint = read(self._model)
        weights = dict(model_state.read_weights(self._model))
        self._assign(rates.get("before", {}))
        self.call(hooks)
        if rates and self.rates["after"] == rates["after"]:
            self._assign(of_checkpoint)
        variables = model_state.state_variables(self._model)
        for name, array in model_state.read_weights(self._model):
            if not np.array_equal(array, weights[name]):
                self._strategy.engine.assign(variables[name], weights[name])

    def _assign(self, rates: Rates) -> None:
        variables = _variables(self._model)
        for name in variables.keys() & rates.keys():
            self._strategy.engine.assign(variables[name], rates[name])


def read(model: keras.Model) -> Rates:
    """Return the learning rates of a model's optimizers by the names of their variables.

    Args:
        model: A compiled model.
    """
    return {name: float(rate.numpy()) for name, rate in _variables(model).items()}


def check_equal(model: keras.Model, job: Job) -> None:
    """Refuse workers whose learning rates differ; all workers must call this.

    With sharded optimizer state each worker updates its part by its own rate, and the weights stay equal.

    Args:
        model: A built and compiled model.
        job: The workers.

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
            f"All workers must train with one learning rate, and it is {own[number]:g} on worker {job.rank} and "
            f"{means[number]:g} in the mean of all. Change it in a callback of every worker, by a value that all of "
            "them have."
        )


def _variables(model: keras.Model) -> dict[str, Any]:
    state = model_state.state_variables(model)
    of_optimizers = {name: one for name, one in state.items() if name.startswith("optimizer/") and one.shape == ()}
    return {name: one for name, one in of_optimizers.items() if name.split("#")[0].endswith("/learning_rate")}
