"""The bytes that hosts send each other for an all-reduce of gradients. Pure Python."""

from __future__ import annotations

from tfpar.planning.layouts import Layout


def sent_factor(layout: Layout, *, divides_model: bool, on_gpus: bool) -> float:
    """Return the bytes that a host sends of each byte of a gradient.

    Args:
        layout: A layout of several hosts.
        divides_model: Whether each device of a replica has a part of the model.
        on_gpus: Whether its devices are GPUs.

    Example:
        >>> sent_factor(Layout(4, num_hosts=4), divides_model=False, on_gpus=False)
        1.5
        >>> sent_factor(Layout(4, num_hosts=4, shard="weights"), divides_model=True, on_gpus=False)
        2.25
    """
    hosts = layout.num_hosts
    factor = 2 * (hosts - 1) / hosts  # once and again
    sums_on_owners = divides_model or layout.replicas_per_host == 1
    sums_on_owners &= hosts == 2 or not on_gpus  # more GPUs have the sums everywhere
    if layout.shard == "weights" or (layout.shard == "optimizer" and not sums_on_owners):
        factor *= 1.5  # at most: two replicas of a host send 1.2 times as much between two hosts
    return factor
