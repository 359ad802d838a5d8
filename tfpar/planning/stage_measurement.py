"""The micro-batches of pipelines: their seconds, the price of a split backward pass, and several devices at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.planning.contention import measure_slowdown
from tfpar.planning.costs import Curve, ModelCosts
from tfpar.planning.given_data import ReadOnce, prepared
from tfpar.planning.step_timing import TimedLoop, alternate_seconds, measure_steps
from tfpar.strategies import Pipeline

_MICROBATCHES = 4
_SIZES = 4
_DEVICES_AT_ONCE = 2


class Stages(NamedTuple):
    """The measured micro-batches of a model in a pipeline.

    Args:
        seconds: Of a micro-batch in a pipeline of one stage, by its number of examples; None where none can be.
        split_factor: Seconds of a micro-batch with a split backward pass, relative to a whole one.
        slowdown: Seconds of such a micro-batch with two devices at once, relative to one.
    """

    seconds: Curve | None = None
    split_factor: float = 1.0
    slowdown: float | None = None

    def slowdown_like(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Return the slow-down of micro-batches, for as many devices as that of whole steps was measured with.

        Args:
            measured: The slow-down of whole steps by the number of devices at once, those of two among them.

        Example:
            >>> Stages(slowdown=1.2).slowdown_like({1: 1.0, 2: 1.5, 4: 3.0})
            {1: 1.0, 2: 1.2, 4: 2.4}
        """
        if self.slowdown is None or _DEVICES_AT_ONCE not in measured:
            return {}
        ratio = self.slowdown / measured[_DEVICES_AT_ONCE]
        return {number: max(1.0, round(one * ratio, 6)) if number > 1 else 1.0 for number, one in measured.items()}


def measure_stages(make_trainer: ReadOnce, devices: Sequence[str], costs: ModelCosts) -> Stages:
    """Measure micro-batches in pipelines of one stage, whose steps add up gradients as those of more do.

    Args:
        make_trainer: The trainers of the plan.
        devices: The devices of this machine.
        costs: The costs of the model, with its blocks.

    Returns:
        What was measured: nothing for a model that cannot be cut, or whose batch is too small.
    """
    if not costs.blocks or costs.batch < _MICROBATCHES:
        return Stages()
    sizes = sorted({max(1, costs.batch // (_MICROBATCHES << power)) for power in range(_SIZES)})
    loop = _loop(make_trainer, devices[:1], [len(costs.blocks)])
    steps, _ = measure_steps(loop, [_MICROBATCHES * size for size in sizes])
    each = [max(0.0, one - costs.update_seconds) / _MICROBATCHES for one in steps.seconds]
    found = Stages(Curve(tuple(sizes[: len(each)]), tuple(each)))
    if len(devices) == 1:
        return found
    try:
        found = found._replace(slowdown=_slowdown(make_trainer, loop, devices[1], costs, steps.sizes[-1]))
        return found._replace(split_factor=_split_factor(make_trainer, devices, costs, steps.sizes[-1]))
    except (tf.errors.ResourceExhaustedError, ValueError):  # no memory for both, or no cut after the first layer
        return found


def _slowdown(make_trainer: ReadOnce, loop: TimedLoop, other: str, costs: ModelCosts, num_examples: int) -> float:
    loops = [loop, _loop(make_trainer, [other], [len(costs.blocks)])]
    for one in loops:
        one.resize(num_examples)
    return measure_slowdown(loops)[_DEVICES_AT_ONCE]


def _split_factor(make_trainer: ReadOnce, devices: Sequence[str], costs: ModelCosts, num_examples: int) -> float:
    """Return the seconds of a micro-batch with a split backward pass, relative to those with a whole one.

    The first of two stages has one layer: it needs no gradients of its inputs, and so no second pass.
    """
    if len(costs.blocks) == 1:
        return 1.0
    layers = [1, len(costs.blocks) - 1]
    loops = [_loop(make_trainer, devices[:2], layers, schedule) for schedule in ("1f1b", "zero_bubble")]
    for one in loops:
        one.resize(num_examples)
    of_whole, of_split = (max(0.0, one - costs.update_seconds) for one in alternate_seconds(loops))
    return max(1.0, of_split / of_whole) if of_whole else 1.0


def _loop(make_trainer: ReadOnce, devices: Sequence[str], layers: Sequence[int], schedule: Any = "1f1b") -> TimedLoop:
    """Return the steps of a pipeline whose stages have some layers each."""
    pipeline = Pipeline(len(devices), _MICROBATCHES, schedule=schedule, balance=list(layers), devices=list(devices))
    return prepared(make_trainer, pipeline).loop
