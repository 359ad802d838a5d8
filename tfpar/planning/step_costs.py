"""What all stages of a planned step share: its layout, the size of a micro-batch, slow-downs. Pure Python."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import MachineCosts, ModelCosts, nearest
from tfpar.planning.layouts import Layout

_MOST_OF_STAGE = 0.25


class StepCosts:
    """The costs of the step of one layout.

    Args:
        layout: The layout.
        model: The costs of the model.
        machine: The costs of the devices.
        batch: Examples of the global batch.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), batch=8, compute=Curve((8,), (0.8,)), update_seconds=0.1)
        >>> StepCosts(Layout(2, 2, 2), model, MachineCosts("CPU", 4, 4), batch=7).size
        2
    """

    def __init__(self, layout: Layout, model: ModelCosts, machine: MachineCosts, batch: int) -> None:
        self.layout, self.model, self.machine, self.batch = layout, model, machine, batch
        share = -(-batch // layout.num_replicas)
        self.size = -(-share // layout.num_microbatches)

    def slowdown_of(self, measured: Mapping[int, float]) -> tuple[float, ...]:
        """Return the slow-down with 1, 2 and more devices of a replica at once, and as many of the others."""
        layout = self.layout
        copies = layout.replicas_per_host * layout.num_shards
        of_host = layout.devices_per_host // copies
        numbers = (min(number, of_host) for number in range(1, layout.num_stages + 1))
        return tuple(nearest(measured, copies * number) or 1.0 for number in numbers)

    @functools.cached_property
    def slowdown(self) -> tuple[float, ...]:
        """The slow-down of actions with 1, 2 and more devices of a replica at once."""
        of_stages = self.machine.slowdown_of_stages or self.machine.slowdown
        return self.slowdown_of(of_stages if self.divides_model else self.machine.slowdown)

    @property
    def network(self) -> Link:
        """The link between hosts in seconds of measured devices, since others do not change it."""
        link, speed = self.machine.network, self.machine.speed
        return Link(link.latency_seconds * speed, link.bytes_per_second / speed)

    @property
    def has_one_ring(self) -> bool:
        """Whether gradients are summed in one ring through the replicas of all hosts, and not on each host first."""
        return self.layout.num_hosts > 1 and not self.divides_model

    @property
    def product_part(self) -> float:
        """The part of the products of factors that a replica computes for the others."""
        return (self.layout.num_replicas - 1) / self.layout.num_replicas if self.has_one_ring else 0.0

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
