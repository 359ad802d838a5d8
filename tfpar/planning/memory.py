"""The peak memory of the fullest device of a layout, from measured costs. Pure Python, no TensorFlow.

weights, slots, gradients     divided as the layout divides them
saved tensors                 of the micro-batches in flight, by the schedule
temporaries                   the largest, once
copies                        of sums over replicas, of weights that other devices own, of batches ahead
host                          on CPUs, the batch that the input pipeline has ready
runtime                       what TensorFlow itself takes

Logical CPUs have one memory: a copy from one to another is the same tensor, until one of them changes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.partition.blocks import blocks_within, num_blocks
from tfpar.pipeline.schedule.simulator import Durations, peak_bytes
from tfpar.pipeline.schedule.transfer_hiding import with_more_in_flight
from tfpar.planning.costs import BlockCost, MachineCosts, ModelCosts, variable_bytes_of
from tfpar.planning.layouts import Layout
from tfpar.planning.owners import owned, shares
from tfpar.planning.stage_costs import stages_of

# The batch of a step, and the next one, which is copied to the device meanwhile.
_BATCHES_ON_DEVICE = 2
# tf.distribute's iterator, that of Mirrored, has one more in its buffer (MultiDeviceIterator, max_buffer_size=1).
_BATCHES_OF_REPLICA = 3
_MOST_BATCH = 1 << 40


def device_bytes(layout: Layout, model: ModelCosts, machine: MachineCosts, batch: int) -> int:
    """Return the peak memory of the fullest device.

    Args:
        layout: The layout.
        model: The costs of the model.
        machine: The costs of the devices.
        batch: Examples of the global batch.

    Returns:
        Bytes, with those of TensorFlow itself.

    Example:
        >>> from tfpar.planning.costs import Bytes, Curve
        >>> curve = Curve((8,), (1.0,))
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), 8, curve, 0.0, working=Bytes(40, 100))
        >>> device_bytes(Layout(), model, MachineCosts("CPU", 2, 2), batch=8)
        960
    """
    is_cpu = machine.device == "CPU"
    of_host = host_bytes(layout, model, batch) if is_cpu else 0
    return max(bytes_of_devices(layout, model, batch, shares_memory=is_cpu)) + of_host + machine.runtime_bytes


def host_bytes(layout: Layout, model: ModelCosts, batch: int) -> int:
    """Return the bytes of the batches that the input pipeline has in the memory of the host.

    Args:
        layout: The layout.
        model: The costs of the model.
        batch: Examples of the global batch.

    Returns:
        Bytes: of the next batch, and where it is divided over replicas or into micro-batches, of its parts too.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), 8, Curve((8,), (1.0,)), 0.0, input_bytes=100)
        >>> host_bytes(Layout(), model, 8), host_bytes(Layout(num_replicas=2), model, 8)
        (800, 1600)
    """
    is_divided = layout.num_replicas > 1 or layout.num_microbatches > 1
    return model.input_bytes * batch * (2 if is_divided else 1)


def bytes_of_devices(layout: Layout, model: ModelCosts, batch: int, *, shares_memory: bool = False) -> list[int]:
    """Return the peak memory of each device, without that of TensorFlow itself.

    Args:
        layout: The layout.
        model: The costs of the model.
        batch: Examples of the global batch.
        shares_memory: Whether the devices are logical CPUs. What replicas or shards of one host send to each other is
            then counted once, in equal parts.

    Returns:
        Bytes of each device: replica by replica, each with its stages or shards.

    Example:
        >>> from tfpar.planning.costs import Bytes, Curve
        >>> curve = Curve((8,), (1.0,))
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), 8, curve, 0.0, working=Bytes(40, 100))
        >>> bytes_of_devices(Layout(), model, batch=8)
        [960]
    """
    share = -(-batch // layout.num_replicas)
    shares_memory = shares_memory and layout.num_hosts == 1
    if layout.num_stages > 1:
        return _pipeline_bytes(layout, model, batch, shares_memory) * layout.num_replicas
    if layout.shard == "weights":
        used = _fully_sharded_bytes(layout, model, share, shares_memory)
    elif layout.num_shards > 1:
        used = _divided_bytes(layout, model, share, shares_memory)
    else:
        used = _replica_bytes(layout, model, share, shares_memory)
    batches = itertools.cycle(_batches_on_devices(layout, shares_memory))
    return [one + number * model.input_bytes * share for one, number in zip(used, batches, strict=False)]


def _batches_on_devices(layout: Layout, shares_memory: bool) -> list[int]:
    """Return the batches on each device of a replica; its other shards have a copy of that of the step."""
    by_distribute = layout.num_replicas > 1 and layout.num_shards == 1 and layout.shard != "weights"
    first = _BATCHES_OF_REPLICA if by_distribute else _BATCHES_ON_DEVICE
    return [first, *[0 if shares_memory else 1] * (layout.num_shards - 1)]


def largest_batch(layout: Layout, model: ModelCosts, machine: MachineCosts) -> int | None:
    """Return the largest global batch that fits in the memory of a device.

    Args:
        layout: The layout.
        model: The costs of the model.
        machine: The costs of the devices, with their memory.

    Returns:
        Examples; 0 if the smallest batch of the layout does not fit, None if the memory is not known, or if no batch is
        too large for it.

    Example:
        >>> from tfpar.planning.costs import Bytes, Curve
        >>> curve = Curve((8,), (1.0,))
        >>> model = ModelCosts("mlp", 10, 40, 40, 80, (40,), 8, curve, 0.0, working=Bytes(40, 100))
        >>> largest_batch(Layout(), model, MachineCosts("GPU", 1, 1, memory_bytes=1000))
        8
    """
    limit_bytes = machine.memory_bytes
    if limit_bytes is None:
        return None

    def fits(batch: int) -> bool:
        return device_bytes(layout, model, machine, batch) <= limit_bytes

    low, high = 0, max(1, layout.num_replicas * layout.num_microbatches)  # every micro-batch has an example
    if not fits(high):
        return 0
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _replica_bytes(layout: Layout, model: ModelCosts, share: int, shares_memory: bool) -> list[int]:
    """Return the bytes of one device, or of each replica, with or without sharded optimizer state.

    One device updates a weight as soon as it has the gradient. Replicas hold theirs until the others have computed
    them, and the sum of a gradient has memory of its own; that of logical CPUs is one for all.
    """
    number, weights, working = layout.num_replicas, float(model.weight_bytes), float(model.working.of(share))
    if number > 1:
        working = max(working, model.trainable_bytes * (1 + shares_memory / number))
    if layout.shard == "optimizer":
        slots, sums = shares(model.variable_bytes, number), _received_bytes(model, number, shares_memory)
        weights /= number if shares_memory else 1
    else:
        sum_bytes = 0 if shares_memory or number == 1 else max(model.variable_bytes, default=0)
        slots, sums = [1.0] * number, [sum_bytes] * number
    used = weights + working
    return [round(used + model.slot_bytes * one + of_sum) for one, of_sum in zip(slots, sums, strict=True)]


def _received_bytes(model: ModelCosts, num_owners: int, shares_memory: bool) -> list[int]:
    """Return the bytes of the largest gradient that each owner receives; logical CPUs receive no copy."""
    return [0 if shares_memory else max(one, default=0) for one in owned(model.variable_bytes, num_owners)]


def _fully_sharded_bytes(layout: Layout, model: ModelCosts, share: int, shares_memory: bool) -> list[int]:
    """Return the bytes of each replica: its part of the weights, and copies of those of two blocks."""
    held = [sum(block.weight_bytes for block in one) for one in _blocks_of_weights(model)]
    copies = 0 if shares_memory else sum(sorted(held)[-2:])
    received = _received_bytes(model, layout.num_replicas, shares_memory)
    used = copies + _saved_bytes(model.blocks, share) + _temporary_bytes(model, model.blocks, share)
    divided = model.weight_bytes + model.trainable_bytes + model.slot_bytes
    parts = shares(model.variable_bytes, layout.num_replicas)
    return [used + round(divided * one) + of_sum for one, of_sum in zip(parts, received, strict=True)]


def _blocks_of_weights(model: ModelCosts) -> list[Sequence[BlockCost]]:
    """Return the layer calls in blocks of about equal weights."""
    sizes = [block.weight_bytes for block in model.blocks]
    if not sizes:
        return []
    numbers = blocks_within(sizes, max(max(sizes), -(-sum(sizes) // num_blocks(sizes))))
    ends = itertools.accumulate(numbers)
    return [model.blocks[end - number : end] for number, end in zip(numbers, ends, strict=True)]


def _divided_bytes(layout: Layout, model: ModelCosts, share: int, shares_memory: bool) -> list[int]:
    """Return the bytes of each device: a part of each divided layer, and on the first one of a replica the others."""
    of_weights = sum(block.divided_bytes for block in model.blocks) / max(1, model.weight_bytes)
    saved = _saved_bytes(model.blocks, share)
    of_shards = sum(block.saved.of(share) for block in model.blocks if block.is_divided)
    of_tensors = of_shards / saved if saved else 0.0
    tensors = model.working.of(share) - model.working.of(0)
    used: list[int] = []
    of_divided, of_whole = (
        _owned_parts(layout, model, number) for number in (layout.num_owners, layout.num_owners_of_whole_weights)
    )
    for owned_divided, owned_whole in zip(of_divided, of_whole, strict=True):
        divided, whole = (
            model.weight_bytes * (part if shares_memory else 1) + model.slot_bytes * part + model.working.of(0)
            for part in (owned_divided, owned_whole)
        )
        shard = (divided * of_weights + tensors * of_tensors) / layout.num_shards
        others = whole * (1 - of_weights) + tensors * (1 - of_tensors)
        used += [round(shard + others), *[round(shard)] * (layout.num_shards - 1)]
    return used


def _owned_parts(layout: Layout, model: ModelCosts, num_owners: int) -> list[float]:
    """Return the part of the weights that each replica owns; of one owner, the first replica of a host owns all."""
    if num_owners > 1:
        parts = shares(model.variable_bytes, num_owners)
        return [parts[replica % num_owners] for replica in range(layout.num_replicas)]
    return [float(replica % layout.replicas_per_host == 0) for replica in range(layout.num_replicas)]


def _saved_bytes(blocks: Sequence[BlockCost], num_examples: int) -> int:
    first = blocks[0].shared.of(num_examples) if blocks else 0
    return first + sum(block.saved.of(num_examples) for block in blocks)


def _temporary_bytes(model: ModelCosts, blocks: Sequence[BlockCost], num_examples: int) -> int:
    return max((block.temporary.of(num_examples) for block in blocks), default=0) + model.scratch.of(num_examples)


def _pipeline_bytes(layout: Layout, model: ModelCosts, batch: int, shares_memory: bool) -> list[int]:
    """Return the bytes of each stage."""
    schedule = schedules.make(layout.schedule, layout.num_stages, layout.num_microbatches)
    if layout.across_hosts and layout.schedule == "1f1b":  # to hide transfers
        schedule = with_more_in_flight(schedule, layout.cuts_between_hosts)
    size = -(-batch // (layout.num_replicas * layout.num_microbatches))
    stages = stages_of(model, layout, batch)
    inputs = [(model.input_bytes - model.target_bytes) * size, *(stage[-1].cut.of(size) for stage in stages[:-1])]
    durations = Durations(
        *((),) * 5,
        activation_bytes=tuple(
            received if layout.recompute else _saved_bytes(stage, size)
            for stage, received in zip(stages, inputs, strict=True)
        ),
        backward_temporary_bytes=tuple(_backward_bytes(layout, model, stage, size) for stage in stages),
        weight_gradient_temporary_bytes=tuple(
            sum(block.trainable_bytes for block in stage) + model.scratch.of(size) for stage in stages
        ),
        until_weight_gradient_bytes=tuple(
            sum(block.output.of(size) for block in stage if block.trainable_bytes) for stage in stages
        ),
        fixed_bytes=tuple(_fixed_bytes(layout, model, stage, shares_memory) for stage in stages),
    )
    held = [
        max(
            peak_bytes(schedule, durations, [number]),
            durations.fixed_bytes[number] + _update_bytes(model, stage),
        )
        for number, stage in enumerate(stages)
    ]
    share = _BATCHES_ON_DEVICE * size * layout.num_microbatches
    held[0] += share * (model.input_bytes - model.target_bytes)
    held[-1] += share * model.target_bytes
    return held


def _update_bytes(model: ModelCosts, stage: Sequence[BlockCost]) -> int:
    """Return the temporaries of the update of the largest weight.

    Adam and its relatives compute it from two tensors of the size of the weight, `m * alpha` and `sqrt(v) + epsilon`.
    """
    largest = max((block.trainable_bytes for block in stage), default=0)
    return 2 * largest if model.slot_bytes > 0 else 0


def _backward_bytes(layout: Layout, model: ModelCosts, stage: Sequence[BlockCost], size: int) -> int:
    """Return the temporaries of a backward pass: recomputed tensors, gradients of activations, and the new sums.

    An action has the summed gradients as an argument, so the old sums live until the new ones are all computed.
    """
    recomputed = _saved_bytes(stage, size) if layout.recompute else 0
    own = 0 if layout.schedule == "zero_bubble" else sum(block.trainable_bytes for block in stage)
    return recomputed + _temporary_bytes(model, stage, size) + (own if layout.num_microbatches > 1 else 0)


def _fixed_bytes(layout: Layout, model: ModelCosts, stage: Sequence[BlockCost], shares_memory: bool) -> int:
    """Return the bytes of weights, summed gradients and optimizer state of a stage.

    Each replica owns some of the weights, with their state, and has copies of the others during a step. The one with
    the most bytes counts.
    """
    trained = sum(block.trainable_bytes for block in stage)
    owned_part = max(shares(variable_bytes_of(stage), layout.num_owners))
    slots = model.slot_bytes * trained / max(1, model.trainable_bytes) * owned_part
    weights = sum(block.weight_bytes for block in stage) / (layout.num_owners if shares_memory else 1)
    has_copies = layout.num_replicas > 1 and not shares_memory
    copies = max((block.trainable_bytes for block in stage), default=0) if has_copies else 0
    return round(weights + trained + slots + copies)
