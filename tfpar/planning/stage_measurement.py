"""The measured micro-batches of pipelines: alone, on two devices at once, and with a split backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.planning.contention import Slowdown, may_share_model, measure_slowdown
from tfpar.planning.costs import Curve, ModelCosts
from tfpar.planning.given_data import ReadOnce, prepared
from tfpar.planning.layouts import smallest_microbatch
from tfpar.planning.step_timing import TimedLoop, alternate_seconds, measure_steps
from tfpar.planning.steps_without_update import PipelineWithoutUpdate

_MICROBATCHES = 4
_MOST_SIZES = 4
_DEVICES_AT_ONCE = 2


class Stages(NamedTuple):
    """The measured micro-batches of a model in a pipeline.

    Args:
        seconds: Of a micro-batch in a pipeline of one stage, by its number of examples; None where none can be.
        slowdown: Seconds of such a micro-batch with two devices at once, relative to one.
        spread: The spread of these measurements.
    """

    seconds: Curve | None = None
    slowdown: float | None = None
    spread: float = 0.0

    def slowdown_like(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Return the slow-down of micro-batches, for as many devices as that of whole steps was measured with.

        Args:
            measured: The slow-down of whole steps by the number of devices at once, those of two among them.

        Example:
            >>> Stages(slowdown=1.25).slowdown_like({1: 1.0, 2: 1.25, 4: 2.5})
            {1: 1.0, 2: 1.25, 4: 2.5}
        """
        if self.slowdown is None or _DEVICES_AT_ONCE not in measured:
            return {}
        ratio = self.slowdown / measured[_DEVICES_AT_ONCE]
        return {number: min(max(1.0, one * ratio), number) for number, one in measured.items()}


def measure_stages(
    make_trainer: ReadOnce, devices: Sequence[str], costs: ModelCosts, num_planned: int | None = None
) -> Stages:
    """Measure micro-batches in pipelines of one stage, whose steps add up gradients as those of more do.

    Args:
        make_trainer: The trainers of the plan.
        devices: The devices of this machine.
        costs: The costs of the model, with its blocks.
        num_planned: Devices of a host to plan for; None for those that are there.

    Returns:
        What was measured: nothing for a model that cannot be cut, or whose batch is too small.
    """
    if not costs.blocks or costs.batch < _MICROBATCHES:
        return Stages()
    smallest = smallest_microbatch(costs.batch, num_planned or len(devices))
    halves = (costs.batch // (_MICROBATCHES << power) for power in range(_MOST_SIZES))
    sizes = sorted({max(smallest, half) for half in halves})
    loop = _loop(make_trainer, devices[:1], [len(costs.blocks)])
    steps, spread = measure_steps(loop, [_MICROBATCHES * size for size in sizes])
    each = [one / _MICROBATCHES for one in steps.seconds]
    found = Stages(Curve(tuple(sizes[: len(each)]), tuple(each)), spread=spread)
    if len(devices) == 1:
        return found
    size = steps.sizes[-1] // _MICROBATCHES
    slowdown = _slowdown(make_trainer, loop, devices[1], costs, size)
    if slowdown is None:
        return found
    return found._replace(slowdown=slowdown.of_number[_DEVICES_AT_ONCE], spread=max(spread, slowdown.spread))


def _slowdown(make_trainer: ReadOnce, loop: TimedLoop, other: str, costs: ModelCosts, size: int) -> Slowdown | None:
    try:
        is_shared = may_share_model([other], costs)
        loops = [loop, loop.twin() if is_shared else _loop(make_trainer, [other], [len(costs.blocks)])]
        for one in loops:
            one.resize(_MICROBATCHES * size)
        return measure_slowdown(loops)
    except tf.errors.ResourceExhaustedError:  # the other device has another model from the measurement before
        return None


def measure_split_factor(make_trainer: ReadOnce, devices: Sequence[str], costs: ModelCosts) -> float | None:
    """Measure how much longer a micro-batch of a stage takes if its backward pass is split.

    A pass is split where a stage has weights, and needs the gradients of its inputs: from the second layer with weights
    on. The first stage here has the layers up to the first with weights, and the second one all others.

    Args:
        make_trainer: The trainers of the plan.
        devices: The devices of this machine.
        costs: The costs of the model, with its blocks and those of micro-batches.

    Returns:
        The seconds with a split pass relative to those with a whole one: 1 where there is one device, or nothing to
        split, and None where the model cannot be cut, or the memory does not suffice.
    """
    trained = [number for number, block in enumerate(costs.blocks) if block.trainable_bytes]
    if costs.staged is None or min(len(devices), len(trained)) < _DEVICES_AT_ONCE:
        return 1.0
    size = costs.staged.sizes[-1]
    layers = [trained[0] + 1, len(costs.blocks) - trained[0] - 1]
    try:
        loops = [_loop(make_trainer, devices[:2], layers, schedule) for schedule in ("1f1b", "zero_bubble")]
        for one in loops:
            one.resize(_MICROBATCHES * size)
        of_whole, of_split = alternate_seconds(loops)
    except (ValueError, tf.errors.ResourceExhaustedError):  # a model that cannot be cut there, or too large a one
        return None
    return split_factor(costs, layers[0], of_split - of_whole, _MICROBATCHES, size)


def split_factor(costs: ModelCosts, first: int, more_seconds: float, num_microbatches: int, size: int) -> float:
    """Return the price of a split backward pass from the steps of a pipeline of two stages.

    Its bubble is filled meanwhile: the last backward pass of the first stage ends with the last weight gradients of the
    second one, which a step of whole passes does one after the other.

    Args:
        costs: The costs of the model, with those of micro-batches.
        first: The layer calls of the first stage.
        more_seconds: The seconds of a step with split passes beyond those of one with whole passes.
        num_microbatches: The micro-batches of the step.
        size: The examples of a micro-batch.

    Returns:
        The seconds of a micro-batch on the second stage, relative to those with a whole pass; at least 1.

    Example:
        >>> from tfpar.planning.costs import BlockCost, Line
        >>> blocks = tuple(BlockCost(name, Line(0, 1), Line(0, 2), 8, 8) for name in "abc")
        >>> costs = ModelCosts("mlp", 6, 24, 24, 0, (8,) * 3, 8, Curve((8,), (72.0,)), 0.0, blocks=blocks)
        >>> split_factor(costs, 1, more_seconds=8.0, num_microbatches=4, size=2)
        1.25
    """
    apart = sum(block.seconds(size) for block in costs.blocks)
    whole = costs.staged_seconds(size) - costs.loss_seconds * size
    before, after = costs.blocks[:first], costs.blocks[first:]
    of_second = sum(block.seconds(size) for block in after)
    if whole <= 0 or of_second <= 0:
        return 1.0
    scale = whole / apart
    of_first_backward, of_second_backward = (
        sum(block.backward.seconds(size) for block in stage) for stage in (before, after)
    )
    filled_seconds = scale * min(of_first_backward, of_second_backward / 2)
    price = (more_seconds + filled_seconds) / num_microbatches
    return 1.0 + max(0.0, price) / (scale * of_second)


def _loop(make_trainer: ReadOnce, devices: Sequence[str], layers: Sequence[int], schedule: Any = "1f1b") -> TimedLoop:
    """Return the steps of a pipeline whose stages have some layers each."""
    number = len(devices)
    pipeline = PipelineWithoutUpdate(number, _MICROBATCHES, schedule, balance=list(layers), devices=list(devices))
    return prepared(make_trainer, pipeline).loop
