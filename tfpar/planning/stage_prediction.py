"""The predicted seconds of one stage: its passes, its update, and its sums of gradients. Pure Python, no TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tfpar.pipeline.partition.blocks import num_blocks
from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import BlockCost, MachineCosts, nearest, variable_bytes_of
from tfpar.planning.host_traffic import exposed_seconds, num_hops, sent_by_replicas, sent_factor, sent_with_weights
from tfpar.planning.owners import shares
from tfpar.planning.step_costs import StepCosts


class Stage:
    """One stage of a replica: all blocks where there is no pipeline.

    Args:
        blocks: Its blocks.
        step: The costs of the step.
        needs_input_gradients: Whether a stage before it has trained weights.
    """

    def __init__(self, blocks: Sequence[BlockCost], step: StepCosts, needs_input_gradients: bool) -> None:
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

    def _owned_part(self, num_owners: int) -> float:
        """Return the part of the weights of the owner with the most bytes."""
        known = self._step.model.variable_bytes if self._is_only else variable_bytes_of(self._blocks)
        return max(shares(known, num_owners))

    @property
    def forward_seconds(self) -> float:
        """The seconds of the forward pass of a micro-batch."""
        step = self._step
        if self._is_only and not self._blocks:
            return step.model.compute.at(step.size) / 3
        return self._sum_of("forward") + self._action_seconds

    @property
    def backward_seconds(self) -> float:
        """The seconds of the whole backward pass of a micro-batch, with the loss on the last stage."""
        step, model = self._step, self._step.model
        if self._is_only and not self._blocks:
            return model.compute.at(step.size) * 2 / 3
        seconds = self._sum_of("backward") + self._split_seconds + self._action_seconds
        if self._is_only or self._blocks[-1] is model.blocks[-1]:
            seconds += step.size * self._loss_seconds
        if step.layout.recompute:  # no gradient needs the outputs of the last block
            seconds += self._sum_of("forward", self._blocks[:-1])
        seconds += step.product_part * sum(block.factored.product_seconds for block in self._blocks)
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

    def transfer_seconds(self, link: Link) -> float:
        """Return the seconds of a copy of a micro-batch to the next stage.

        Args:
            link: The link between the devices of both.
        """
        return link.seconds(self._blocks[-1].cut.of(self._step.size))

    @property
    def update_seconds(self) -> float:
        """The seconds of the update of its weights on one device."""
        layout, model = self._step.layout, self._step.model
        seconds = model.update_seconds * self._trainable_bytes / max(1, model.trainable_bytes)
        divided = 0.0
        if layout.num_shards > 1:
            divided = sum(block.divided_bytes for block in self._blocks) / max(1, model.weight_bytes)
        of_shard = divided / layout.num_shards * self._owned_part(layout.num_owners)
        seconds *= of_shard + (1 - divided) * self._owned_part(layout.num_owners_of_whole_weights)
        if layout.num_stages == layout.num_shards == 1 < layout.num_replicas and layout.shard is None:
            seconds += model.replica_seconds
        return seconds

    @property
    def reduction_seconds(self) -> float:
        """The seconds of sums over the devices of a host, where they are not those of a ring through all hosts."""
        layout, machine = self._step.layout, self._step.machine
        seconds = 0.0
        if layout.num_shards > 1:
            summed = [block.summed.of(self._step.size) for block in self._blocks]
            seconds += _link(machine, machine.exchange, layout.num_shards).seconds(sum(summed), sum(map(bool, summed)))
        replicas = 1 if self._step.has_one_ring else layout.replicas_per_host
        if replicas > 1:
            gradients = _link(machine, machine.reduce, replicas).seconds(self._trainable_bytes, self._num_weights)
            seconds += gradients / replicas if layout.num_owners > 1 else gradients
        if replicas > 1 and layout.num_owners > 1:  # the new weights, from their owners
            is_grid = layout.num_stages > 1 or layout.num_shards > 1
            new = machine.copy if is_grid else machine.add
            seconds += new.seconds(self._trainable_bytes, self._num_weights)
        if replicas > 1 and layout.shard == "weights":  # once for each pass
            seconds += machine.copy.seconds(self._step.model.weight_bytes, self._num_weights)
            blocks = num_blocks([block.weight_bytes for block in self._blocks]) if self._blocks else 1
            seconds += 2 * blocks * machine.action_seconds
        return seconds

    @property
    def network_seconds(self) -> float:
        """The seconds of the all-reduce of the gradients between hosts, beyond the backward pass."""
        step = self._step
        layout, link = step.layout, step.network
        if layout.num_parts == 1:
            return 0.0
        if not step.has_one_ring:
            sent_bytes = sent_factor(layout) * self._trainable_bytes
            return link.seconds(sent_bytes, num_hops(layout.num_hosts, layout.num_hosts))
        end_seconds = step.slowdown[0] * (self.forward_seconds + self.backward_seconds)
        sent = sent_by_replicas(layout, step.model, self._ready_seconds(end_seconds))
        hops = functools.partial(num_hops, layout.num_replicas, layout.num_hosts)
        weights_bytes = sent_with_weights(layout, step.model.variable_bytes)
        weights_seconds = link.seconds(weights_bytes, hops(rounds=1)) if weights_bytes else 0.0
        return exposed_seconds(sent, end_seconds, link, hops()) + weights_seconds

    def _ready_seconds(self, end_seconds: float) -> list[float]:
        """Return when the gradients of each block are there: those of the last block first."""
        step = self._step
        backward = [step.slowdown[0] * step.compute_scale * one.backward.seconds(step.size) for one in self._blocks]
        return [end_seconds - sum(backward[:number]) for number in range(len(backward))]


def _link(machine: MachineCosts, links: Mapping[int, Link], number: int) -> Link:
    return nearest(links, number) or machine.copy
