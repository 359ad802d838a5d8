"""The least memory of a layout, by which those that cannot fit are dropped.

weights, gradients, state     exact, by the owners of each layout
saved tensors                 the measured peak of a step on one device, divided as far as the layout can divide it
"""

from __future__ import annotations

from tfpar.layout import Layout
from tfpar.placement.largest_first import largest_first
from tfpar.planning.model_facts import ModelFacts


def least_bytes(layout: Layout, facts: ModelFacts, peak_bytes: int | None) -> int:
    """Return bytes that the fullest device of a layout needs at least: temporaries and copies come on top.

    Args:
        layout: The layout.
        facts: The model.
        peak_bytes: The measured peak of a step on one device; None where it is unknown, or did not fit.

    Example:
        >>> facts = ModelFacts("mlp", 100, batch=8, weight_bytes=400, variable_bytes=(200, 200), slot_bytes=800)
        >>> [least_bytes(Layout(2, shard=shard), facts, 2600) for shard in (None, "optimizer", "weights")]
        [2100, 1700, 1300]
    """
    weights, state = _divided_bytes(layout, facts)
    held_bytes = facts.weight_bytes + facts.trainable_bytes + facts.slot_bytes
    saved_bytes = 0 if peak_bytes is None else max(0, peak_bytes - held_bytes)
    return round(weights + state + saved_bytes * _least_saved_part(layout))


def _divided_bytes(layout: Layout, facts: ModelFacts) -> tuple[float, float]:
    """Return the bytes of weights with gradients, and of the optimizer's state, of the device with the most."""
    weights = facts.weight_bytes + facts.trainable_bytes
    # In one process the replicas of a pipeline divide the state anyway.
    is_sharded = layout.shard is not None or (layout.num_stages > 1 and layout.replicas_per_worker > 1)
    owners, parts = layout.num_replicas if is_sharded else 1, layout.num_stages * layout.num_shards
    if parts == 1:
        owned_part = _largest_share(facts.variable_bytes, owners)
        return weights * (owned_part if layout.shard == "weights" else 1), facts.slot_bytes * owned_part
    largest = max(facts.variable_bytes, default=0) / max(1, facts.trainable_bytes) if layout.num_shards == 1 else 0.0
    return weights * max(1 / parts, largest), facts.slot_bytes / parts / owners


def _largest_share(variable_bytes: tuple[int, ...], num_owners: int) -> float:
    """Return the part of the weights of the owner with the most."""
    loads = [0] * num_owners
    for size, owner in zip(variable_bytes, largest_first(variable_bytes, num_owners), strict=True):
        loads[owner] += size
    return max(loads) / sum(variable_bytes) if sum(variable_bytes) else 1 / num_owners


def _least_saved_part(layout: Layout) -> float:
    """Return the part of one device's saved tensors that the fullest device holds at least.

    Stage s of p holds p - s micro-batches at once. The fullest stage is the least full where all are equally full.
    """
    part = 1 / (layout.num_replicas * layout.num_shards)
    if layout.num_stages == 1:
        return part
    depths = [1 if layout.recompute else min(layout.num_microbatches, 1 + stage) for stage in range(layout.num_stages)]
    return part / layout.num_microbatches / sum(1 / depth for depth in depths)
