"""A lower bound of the memory of a layout, to drop those that cannot fit.

weights, gradients, state     exact, from the owners of the weights
saved tensors                 from the measured peak of a step on one device, sharded as far as the layout can
"""

from __future__ import annotations

from tfpar.layout import Layout
from tfpar.placement.largest_first import largest_first
from tfpar.planning.model_facts import ModelFacts


def least_bytes(layout: Layout, facts: ModelFacts, peak_bytes: int | None) -> int:
    """Return the bytes that the fullest device of a layout needs, without temporaries and copies.

    Args:
        layout: The layout.
        facts: The model.
        peak_bytes: The measured peak of a step on one device; None if unknown, or if the step did not fit.

    Example:
        >>> facts = ModelFacts("mlp", 100, batch=8, weight_bytes=400, variable_bytes=(200, 200), slot_bytes=800)
        >>> [least_bytes(Layout(2, shard=shard), facts, 2600) for shard in (None, "optimizer", "weights")]
        [2100, 1700, 1300]
    """
    weight_bytes, slot_bytes = _sharded_bytes(layout, facts)
    persistent_bytes = facts.weight_bytes + facts.trainable_bytes + facts.slot_bytes
    saved_bytes = 0 if peak_bytes is None else max(0, peak_bytes - persistent_bytes)
    return round(weight_bytes + slot_bytes + saved_bytes * _least_saved_share(layout))


def _sharded_bytes(layout: Layout, facts: ModelFacts) -> tuple[float, float]:
    """Return the bytes of weights with gradients, and of the optimizer's state, on the fullest device."""
    weight_bytes = facts.weight_bytes + facts.trainable_bytes
    # In one process the replicas of a pipeline always shard the state.
    is_sharded = layout.shard is not None or (layout.num_stages > 1 and layout.replicas_per_worker > 1)
    owners, parts = layout.num_replicas if is_sharded else 1, layout.num_stages * layout.num_shards
    if parts == 1:
        share = _largest_share(facts.variable_bytes, owners)
        return weight_bytes * (share if layout.shard == "weights" else 1), facts.slot_bytes * share
    largest = max(facts.variable_bytes, default=0) / max(1, facts.trainable_bytes) if layout.num_shards == 1 else 0.0
    return weight_bytes * max(1 / parts, largest), facts.slot_bytes / parts / owners


def _largest_share(variable_bytes: tuple[int, ...], num_owners: int) -> float:
    """Return the share of the weights that the owner with the most bytes has."""
    loads = [0] * num_owners
    for size, owner in zip(variable_bytes, largest_first(variable_bytes, num_owners), strict=True):
        loads[owner] += size
    return max(loads) / sum(variable_bytes) if sum(variable_bytes) else 1 / num_owners


def _least_saved_share(layout: Layout) -> float:
    """Return the smallest possible share of one device's saved tensors on the fullest device.

    Stage s of p holds p - s micro-batches at once. The bound is reached if all stages are equally full.
    """
    share = 1 / (layout.num_replicas * layout.num_shards)
    if layout.num_stages == 1:
        return share
    depths = [1 if layout.recompute else min(layout.num_microbatches, 1 + stage) for stage in range(layout.num_stages)]
    return share / layout.num_microbatches / sum(1 / depth for depth in depths)
