"""The predicted step of a layout, from measured costs, by the simulator of pipelines. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.contention import ends_together
from tfpar.pipeline.schedule.links import Link
from tfpar.pipeline.schedule.simulator import Durations, Timeline, microbatch_scale, simulate
from tfpar.pipeline.schedule.transfer_hiding import with_more_in_flight
from tfpar.planning.costs import BlockCost, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.rows import PredictedStep
from tfpar.planning.stage_costs import stages_of
from tfpar.planning.stage_prediction import Stage
from tfpar.planning.step_costs import StepCosts


def predict(layout: Layout, model: ModelCosts, machine: MachineCosts, batch: int | None = None) -> PredictedStep:
    """Predict the step of a layout.

    Args:
        layout: The layout.
        model: The costs of the model.
        machine: The costs of the devices.
        batch: Examples of the global batch; None for the measured one.

    Returns:
        The step, without its memory.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), batch=8, compute=Curve((8,), (0.8,)), update_seconds=0.1)
        >>> machine = MachineCosts("CPU", num_devices=2, num_measured=2)
        >>> round(predict(Layout(), model, machine).seconds, 3), round(predict(Layout(2), model, machine).seconds, 3)
        (0.9, 0.5)
    """
    return _Step(StepCosts(layout, model, machine, batch or model.batch)).predicted()


class _Step:
    """The step of one layout.

    Args:
        costs: Its costs.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs, self._layout, self._model, self._machine = costs, costs.layout, costs.model, costs.machine

    def predicted(self) -> PredictedStep:
        speed = self._machine.speed
        durations, planned = max(self._simulated(), key=lambda one: one[1].step_seconds)
        seconds = planned.step_seconds / speed
        waits = {name: one / speed for name, one in self._waits(durations, planned).items()}
        reading_seconds = self._reading_seconds(seconds, waits["bubble"])
        seconds += reading_seconds
        data_seconds = max(0.0, self._model.data_seconds - seconds)
        waits |= {"reading data": reading_seconds, "data": data_seconds}
        forward_seconds = planned.spans[0].end_seconds / speed if self._layout.num_stages == 1 else None
        waits = {name: one for name, one in waits.items() if one > 0}
        return PredictedStep(self._layout, seconds + data_seconds, waits, forward_seconds=forward_seconds)

    def _reading_seconds(self, step_seconds: float, bubble_seconds: float) -> float:
        """Return what reading the next batch adds to a step, where it takes cores from logical CPUs."""
        machine, layout = self._machine, self._layout
        if not machine.num_cores:
            return 0.0
        busy_cores = min(machine.num_cores, layout.devices_per_host * machine.cores_of_device)
        free_core_seconds = machine.num_cores * step_seconds - busy_cores * (step_seconds - bubble_seconds)
        return max(0.0, self._model.data_core_seconds / machine.speed - free_core_seconds) / machine.num_cores

    def _simulated(self) -> Iterator[tuple[Durations, Timeline]]:
        """Yield the durations and the simulated step of each replica of a host; one of those with equal micro-batches.

        The batch of a host is cut into the micro-batches of all its replicas, so that 53 examples are 7 7 6 7 for the
        first of two, and 7 6 7 6 for the other.
        """
        layout, scale = self._layout, tuple[float, ...]()
        if layout.num_stages > 1:
            num_microbatches = layout.replicas_per_host * layout.num_microbatches
            scale = microbatch_scale(-(-self._costs.batch // layout.num_parts), num_microbatches)
        starts = range(0, len(scale) or 1, layout.num_microbatches)
        durations = self._durations()
        for of_one in dict.fromkeys(scale[start : start + layout.num_microbatches] for start in starts):
            of_replica = dataclasses.replace(durations, microbatch_scale=of_one)
            timelines = [simulate(schedule, of_replica) for schedule in self._schedules]
            yield of_replica, min(timelines, key=lambda one: one.step_seconds)

    @functools.cached_property
    def _schedules(self) -> list[Schedule]:
        """The schedules of one replica, of which training takes the fastest: the others do the same at the same time.

        More micro-batches in flight hide transfers between hosts. Training decides for each cut; here all hosts have
        the same link, and large pipelines would take minutes to compare.
        """
        layout = self._layout
        if layout.num_stages == 1:
            return [schedules.make("gpipe", 1, 1)]
        order = schedules.make(layout.schedule, layout.num_stages, layout.num_microbatches)
        if not (layout.across_hosts and layout.schedule == "1f1b"):
            return [order]
        return [order, with_more_in_flight(order, layout.cuts_between_hosts)]

    def _link(self, cut: int) -> Link:
        return self._costs.network if cut in self._layout.cuts_between_hosts else self._machine.copy

    def _durations(self) -> Durations:
        stages, is_below = [], False
        for blocks in self._stages():
            stages.append(Stage(blocks, self._costs, needs_input_gradients=is_below))
            is_below = is_below or any(block.trainable_bytes for block in blocks)
        weights = [stage.weight_gradient_seconds if self._costs.splits_backward else 0.0 for stage in stages]
        slowdown = self._costs.slowdown_of(self._machine.slowdown)
        backward = [stage.backward_seconds - weight for stage, weight in zip(stages, weights, strict=True)]
        return Durations(
            forward_seconds=tuple(stage.forward_seconds for stage in stages),
            backward_seconds=tuple(backward),
            input_gradient_seconds=tuple(backward),
            weight_gradient_seconds=tuple(weights),
            transfer_seconds=tuple(stage.transfer_seconds(self._link(cut)) for cut, stage in enumerate(stages[:-1])),
            update_seconds=ends_together([stage.update_seconds for stage in stages], slowdown),
            reduction_seconds=tuple(stage.reduction_seconds for stage in stages),
            all_reduce_seconds=tuple(stage.network_seconds for stage in stages),
            slowdown=self._costs.slowdown,
        )

    def _stages(self) -> Sequence[Sequence[BlockCost]]:
        if self._layout.num_stages > 1:
            return stages_of(self._model, self._layout, self._costs.batch)
        return [self._model.blocks]

    def _waits(self, durations: Durations, planned: Timeline) -> dict[str, float]:
        """Return the seconds of a step in which a device does not compute, by reason."""
        busy = sum(span.end_seconds - span.begin_seconds for span in planned.spans) / planned.num_devices
        end_seconds = max(span.end_seconds for span in planned.spans)
        name = "sums of activations" if self._layout.num_shards > 1 else "all-reduce"
        alone = dataclasses.replace(durations, all_reduce_seconds=())
        without_network = simulate(self._schedules[0], alone) if self._layout.num_parts > 1 else planned
        return {
            "bubble": end_seconds - busy if self._layout.num_stages > 1 else 0.0,
            name: min(sum(durations.reduction_seconds), planned.step_seconds),
            "update": max(durations.update_seconds),
            "network": planned.step_seconds - without_network.step_seconds,
        }
