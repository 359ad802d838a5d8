"""The predicted step of a layout, from measured costs, by the simulator of pipelines. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.partition.blocks import num_blocks
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.links import Link
from tfpar.pipeline.schedule.simulator import Durations, Timeline, microbatch_scale, simulate
from tfpar.planning.costs import BlockCost, MachineCosts, ModelCosts, nearest
from tfpar.planning.host_traffic import sent_factor
from tfpar.planning.layouts import Layout
from tfpar.planning.rows import PredictedStep
from tfpar.planning.stage_costs import stages_of

_MOST_OF_STAGE = 0.25


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
    step = _Step(layout, model, machine, batch or model.batch)
    return step.predicted()


class _Step:
    """The step of one layout.

    Args:
        layout: The layout.
        model: The costs of the model.
        machine: The costs of the devices.
        batch: Examples of the global batch.
    """

    def __init__(self, layout: Layout, model: ModelCosts, machine: MachineCosts, batch: int) -> None:
        self.layout, self.model, self.machine, self.batch = layout, model, machine, batch
        self.share = -(-batch // layout.num_replicas)
        self.size = -(-self.share // layout.num_microbatches)

    def predicted(self) -> PredictedStep:
        speed = self.machine.speed
        durations, planned = max(self._simulated(), key=lambda one: one[1].step_seconds)
        seconds = planned.step_seconds / speed
        waits = {name: one / speed for name, one in self._waits(durations, planned).items()}
        reading_seconds = self._reading_seconds(seconds, waits["bubble"])
        seconds += reading_seconds
        data_seconds = max(0.0, self.model.data_seconds - seconds)
        waits |= {"reading data": reading_seconds, "data": data_seconds}
        forward_seconds = planned.spans[0].end_seconds / speed if self.layout.num_stages == 1 else None
        waits = {name: one for name, one in waits.items() if one > 0}
        return PredictedStep(self.layout, seconds + data_seconds, waits, forward_seconds=forward_seconds)

    def _reading_seconds(self, step_seconds: float, bubble_seconds: float) -> float:
        """Return what reading the next batch adds to a step, where it takes cores from logical CPUs."""
        machine, layout = self.machine, self.layout
        if not machine.num_cores:
            return 0.0
        devices_per_host = layout.num_devices // layout.num_hosts
        busy_cores = min(machine.num_cores, devices_per_host * machine.cores_of_device)
        free_core_seconds = machine.num_cores * step_seconds - busy_cores * (step_seconds - bubble_seconds)
        return max(0.0, self.model.data_core_seconds / machine.speed - free_core_seconds) / machine.num_cores

    def _simulated(self) -> Iterator[tuple[Durations, Timeline]]:
        """Yield the durations and the simulated step of each replica of a host; one of those with equal micro-batches.

        The batch of a host is cut into the micro-batches of all its replicas, so that 53 examples are 7 7 6 7 for the
        first of two, and 7 6 7 6 for the other.
        """
        layout, scale = self.layout, tuple[float, ...]()
        if layout.num_stages > 1:
            num_microbatches = layout.replicas_per_host * layout.num_microbatches
            scale = microbatch_scale(-(-self.batch // layout.num_hosts), num_microbatches)
        starts = range(0, len(scale) or 1, layout.num_microbatches)
        durations = self._durations()
        for of_one in dict.fromkeys(scale[start : start + layout.num_microbatches] for start in starts):
            of_replica = dataclasses.replace(durations, microbatch_scale=of_one)
            yield of_replica, simulate(self._schedule, of_replica)

    @functools.cached_property
    def _schedule(self) -> Schedule:
        """The schedule of one replica: the others do the same at the same time."""
        layout = self.layout
        if layout.num_stages == 1:
            return schedules.make("gpipe", 1, 1)
        return schedules.make(layout.schedule, layout.num_stages, layout.num_microbatches)

    def _slowdown(self, measured: Mapping[int, float]) -> tuple[float, ...]:
        """Return the slow-down with 1, 2 and more devices of a replica at once, and as many of the others."""
        copies = self.layout.replicas_per_host * self.layout.num_shards
        numbers = range(1, self.layout.num_stages + 1)
        return tuple(nearest(measured, copies * number) or 1.0 for number in numbers)

    def _together(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the seconds of updates of the stages that start together on all replicas, alone as given."""
        slowdown = self._slowdown(self.machine.slowdown)
        ends, now, done = [0.0] * len(seconds), 0.0, 0.0
        order = sorted(range(len(seconds)), key=seconds.__getitem__)
        for position, stage in enumerate(order):
            now += (seconds[stage] - done) * slowdown[len(order) - position - 1]
            ends[stage], done = now, seconds[stage]
        return tuple(ends)

    def _durations(self) -> Durations:
        stages, is_below = [], False
        for blocks in self._stages():
            stages.append(_Stage(blocks, self, needs_input_gradients=is_below))
            is_below = is_below or any(block.trainable_bytes for block in blocks)
        of_stages = self.machine.slowdown_of_stages or self.machine.slowdown
        weights = [stage.weight_gradient_seconds if self.splits_backward else 0.0 for stage in stages]
        backward = [stage.backward_seconds - weight for stage, weight in zip(stages, weights, strict=True)]
        return Durations(
            forward_seconds=tuple(stage.forward_seconds for stage in stages),
            backward_seconds=tuple(backward),
            input_gradient_seconds=tuple(backward),
            weight_gradient_seconds=tuple(weights),
            transfer_seconds=tuple(stage.transfer_seconds for stage in stages[:-1]),
            update_seconds=self._together([stage.update_seconds for stage in stages]),
            reduction_seconds=tuple(stage.reduction_seconds for stage in stages),
            all_reduce_seconds=tuple(stage.network_seconds for stage in stages),
            slowdown=self._slowdown(of_stages if self.divides_model else self.machine.slowdown),
        )

    def _stages(self) -> Sequence[Sequence[BlockCost]]:
        if self.layout.num_stages > 1:
            return stages_of(self.model, self.layout, self.batch)
        return [self.model.blocks]

    @functools.cached_property
    def runs_stages(self) -> bool:
        """Whether a replica runs compiled stages: those of a pipeline, or the one of shards in a job of several hosts.

        Blocks with sharded weights are compiled like stages.
        """
        layout = self.layout
        is_stage_of_shards = layout.num_shards > 1 and layout.num_hosts > 1
        return layout.num_stages > 1 or layout.shard == "weights" or is_stage_of_shards

    @property
    def divides_model(self) -> bool:
        """Whether each device of a replica has a part of the model."""
        return self.runs_stages or self.layout.num_shards > 1

    @functools.cached_property
    def compute_scale(self) -> float:
        """The seconds of the whole model, relative to the sum of its blocks, each measured by itself."""
        model, size = self.model, self.size
        apart = sum(block.seconds(size) for block in model.blocks)
        if not self.runs_stages or model.staged is None:
            whole = model.compute.at(size)
        else:
            overhead_seconds = 2 * self.machine.action_seconds + self.sum_of_gradients_seconds
            whole = max(0.0, model.staged_seconds(size) - overhead_seconds)
        return max(0.0, whole - model.loss_seconds * size) / apart if apart else 1.0

    @functools.cached_property
    def least_start_seconds(self) -> dict[str, float]:
        """The least seconds, by pass, in which a layer with trained weights starts its operations."""
        trained = [block for block in self.model.blocks if block.trainable_bytes]
        starts = {name: [getattr(block, name).start_seconds for block in trained] for name in ("forward", "backward")}
        return {name: min(seconds, default=0.0) for name, seconds in starts.items()}

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the inputs and of the weights are computed in passes of their own."""
        return self.layout.num_stages > 1 and self.layout.schedule == "zero_bubble"

    @functools.cached_property
    def sum_of_gradients_seconds(self) -> float:
        """The seconds in which the gradients of a micro-batch are added to those before, for all weights."""
        model = self.model
        seconds = self.machine.add.seconds(model.trainable_bytes, len(model.variable_bytes))
        if model.staged is not None:  # small sums overlap with other operations
            seconds = min(seconds, _MOST_OF_STAGE * model.staged_seconds(self.size))
        return seconds

    def _waits(self, durations: Durations, planned: Timeline) -> dict[str, float]:
        """Return the seconds of a step in which a device does not compute, by reason."""
        busy = sum(span.end_seconds - span.begin_seconds for span in planned.spans) / planned.num_devices
        end_seconds = max(span.end_seconds for span in planned.spans)
        name = "sums of activations" if self.layout.num_shards > 1 else "all-reduce"
        alone = dataclasses.replace(durations, all_reduce_seconds=())
        without_network = simulate(self._schedule, alone) if self.layout.num_hosts > 1 else planned
        return {
            "bubble": end_seconds - busy if self.layout.num_stages > 1 else 0.0,
            name: min(sum(durations.reduction_seconds), planned.step_seconds),
            "update": max(durations.update_seconds),
            "network": planned.step_seconds - without_network.step_seconds,
        }


class _Stage:
    """One stage of a replica: all blocks where there is no pipeline.

    Args:
        blocks: Its blocks.
        step: The step.
        needs_input_gradients: Whether a stage before it has trained weights.
    """

    def __init__(self, blocks: Sequence[BlockCost], step: _Step, needs_input_gradients: bool) -> None:
        self._blocks, self._step, self._needs_input_gradients = blocks, step, needs_input_gradients
        self._trained = [block for block in blocks if block.trainable_bytes]
        self._is_only = step.layout.num_stages == 1

    @property
    def _trainable_bytes(self) -> int:
        return self._step.model.trainable_bytes if self._is_only else sum(one.trainable_bytes for one in self._blocks)

    @property
    def _num_weights(self) -> int:
        model = self._step.model
        if self._is_only:
            return len(model.variable_bytes)
        return max(1, round(len(model.variable_bytes) * self._trainable_bytes / max(1, model.trainable_bytes)))

    @property
    def forward_seconds(self) -> float:
        step = self._step
        if self._is_only and not self._blocks:
            return step.model.compute.at(step.size) / 3
        return self._sum_of("forward") + self._action_seconds

    @property
    def backward_seconds(self) -> float:
        step, model = self._step, self._step.model
        if self._is_only and not self._blocks:
            return model.compute.at(step.size) * 2 / 3
        seconds = self._sum_of("backward") + self._split_seconds + self._action_seconds
        if self._is_only or self._blocks[-1] is model.blocks[-1]:
            seconds += step.size * self._loss_seconds
        if step.layout.recompute:  # no gradient needs the outputs of the last block
            seconds += self._sum_of("forward", self._blocks[:-1])
        return seconds + self._accumulation_seconds

    @property
    def _loss_seconds(self) -> float:
        """The seconds of the loss of an example, which shards compute from pieces of the outputs."""
        model, shards = self._step.model, self._step.layout.num_shards
        if shards == 1 or model.loss_of_pieces_seconds is None:
            return model.loss_seconds
        return model.loss_of_pieces_seconds / shards

    @property
    def weight_gradient_seconds(self) -> float:
        """The part of the backward pass that only the gradients of weights need: half of it where there are weights."""
        own = self._sum_of("backward", self._trained) + self._split_seconds
        return own / 2 + self._accumulation_seconds

    @property
    def _split_seconds(self) -> float:
        """The seconds of a split backward pass beyond those of a whole one."""
        step = self._step
        if not (step.splits_backward and self._needs_input_gradients and self._trained):
            return 0.0
        assert step.model.split_factor is not None, "no layout with an unknown price is a candidate"
        return (step.model.split_factor - 1) * (self._sum_of("forward") + self._sum_of("backward"))

    @property
    def _action_seconds(self) -> float:
        return 0.0 if self._is_only else self._step.machine.action_seconds

    @property
    def _accumulation_seconds(self) -> float:
        if self._step.layout.num_microbatches == 1:
            return 0.0
        part = self._trainable_bytes / max(1, self._step.model.trainable_bytes)
        return self._step.sum_of_gradients_seconds * part

    def _sum_of(self, name: str, blocks: Sequence[BlockCost] | None = None) -> float:
        step, total = self._step, 0.0
        for block in self._blocks if blocks is None else blocks:
            line = getattr(block, name)
            seconds = line.seconds(step.size)
            if block.is_divided:  # each shard starts as many operations as the whole layer
                start_seconds = min(line.start_seconds, step.least_start_seconds[name])
                seconds = start_seconds + (seconds - start_seconds) / step.layout.num_shards
            total += seconds
        return total * step.compute_scale

    @property
    def transfer_seconds(self) -> float:
        return self._step.machine.copy.seconds(self._blocks[-1].cut.of(self._step.size))

    @property
    def update_seconds(self) -> float:
        layout, model = self._step.layout, self._step.model
        seconds = model.update_seconds * self._trainable_bytes / max(1, model.trainable_bytes)
        if layout.shard is not None:
            seconds /= layout.num_replicas
        if layout.num_shards > 1:
            divided = sum(block.divided_bytes for block in self._blocks) / max(1, model.weight_bytes)
            seconds *= 1 - divided + divided / layout.num_shards
        if layout.num_stages == layout.num_shards == 1 < layout.num_replicas and layout.shard is None:
            seconds += model.replica_seconds
        return seconds

    @property
    def reduction_seconds(self) -> float:
        layout, machine = self._step.layout, self._step.machine
        seconds = 0.0
        if layout.num_shards > 1:
            summed = [block.summed.of(self._step.size) for block in self._blocks]
            seconds += _link(machine, machine.exchange, layout.num_shards).seconds(sum(summed), sum(map(bool, summed)))
        replicas = layout.replicas_per_host
        if replicas > 1:
            gradients = _link(machine, machine.reduce, replicas).seconds(self._trainable_bytes, self._num_weights)
            seconds += gradients / replicas if layout.shard is not None else gradients
        if replicas > 1 and layout.shard is not None:  # the new weights, from their owners
            seconds += machine.add.seconds(self._trainable_bytes, self._num_weights)
        if replicas > 1 and layout.shard == "weights":  # once for each pass
            seconds += machine.copy.seconds(self._step.model.weight_bytes, self._num_weights)
            blocks = num_blocks([block.weight_bytes for block in self._blocks]) if self._blocks else 1
            seconds += 2 * blocks * machine.action_seconds
        return seconds

    @property
    def network_seconds(self) -> float:
        """The seconds of the all-reduce of the gradients between hosts, which faster devices do not shorten."""
        step = self._step
        if step.layout.num_hosts == 1:
            return 0.0
        factor = sent_factor(step.layout, divides_model=step.divides_model, on_gpus=not step.machine.num_cores)
        return step.machine.speed * step.machine.network.seconds(factor * self._trainable_bytes)


def _link(machine: MachineCosts, links: Mapping[int, Link], number: int) -> Link:
    return nearest(links, number) or machine.copy
