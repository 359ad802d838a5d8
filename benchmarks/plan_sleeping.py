"""The experiment `plan_sleeping`: predicted and measured steps of eight devices whose layers sleep.

    python -m benchmarks plan_sleeping

Devices that sleep do not share cores, so that eight of them run on two, and no shared memory disturbs the prediction.
The planner measures the model on one device, as it does with models that compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Round
from benchmarks.plan import errors

MOST_ERROR = 0.03


@dataclasses.dataclass(frozen=True)
class SleepingModel:
    """A model whose layers sleep.

    Args:
        seconds_per_row: The sleep of each layer in the forward pass, for each row; that of the backward pass is twice
            as long.
        batch: Rows of the global batch.
    """

    seconds_per_row: tuple[float, ...]
    batch: int


_EVEN = (0.0025,) * 8
_UNEVEN = (0.002, 0.004, 0.0025, 0.001, 0.003, 0.0035, 0.0015, 0.0025)
_SETTINGS = {
    "equal layers": SleepingModel(_EVEN, 64),
    "uneven layers": SleepingModel(_UNEVEN, 64),
    "micro-batches of 4 and 3": SleepingModel(_EVEN, 53),
    "uneven layers, micro-batches of 4 and 3": SleepingModel(_UNEVEN, 53),
}


def measure(setting: SleepingModel) -> Output:
    """Return the predicted and measured steps of all layouts of a model.

    Args:
        setting: The model.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.plan_sleeping_worker", vars(setting))


def _largest_error(name: str) -> Callable[[Round], float]:
    return lambda outputs: max(errors({name: outputs[name]}))


PLAN_SLEEPING = Experiment(
    name="plan_sleeping",
    summary="Eight logical CPUs whose layers sleep: predicted and measured step of replicas, pipelines and grids",
    figure="regret",
    settings=_SETTINGS,
    measure=measure,
    findings=tuple(
        Finding(f"largest error of the predicted step, {name}", _largest_error(name), at_most=MOST_ERROR)
        for name in _SETTINGS
    ),
)
