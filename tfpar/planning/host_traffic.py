"""The bytes that hosts send each other for the gradients of a step, and how long a step waits for them. Pure Python.

backward pass   │ block 3 │ block 2 │ block 1 │
link                      │ block 3     │ block 2     │ block 1     │      update, new weights
                                                  ├ exposed ────────┤
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import ModelCosts
from tfpar.planning.layouts import Layout

PACK_BYTES = 4 << 20  # gradients of smaller layers share a message


class Message(NamedTuple):
    """Gradients that a host sends at once.

    Args:
        ready_seconds: The moment when its last gradient is there.
        sent_bytes: The bytes that the host sends.
    """

    ready_seconds: float
    sent_bytes: float


def sent_factor(layout: Layout) -> float:
    """Return the bytes that a host sends of each byte of a gradient, where each device of a replica has a part of it.

    Args:
        layout: A layout of several hosts; its replicas sum on each host first.

    Example:
        >>> sent_factor(Layout(4, 2, 4, num_hosts=4))
        1.5
        >>> sent_factor(Layout(4, num_hosts=4, shard="weights"))
        2.25
    """
    hosts = layout.num_hosts
    factor = 2 * (hosts - 1) / hosts  # once and again
    return factor * 1.5 if layout.shard else factor


def sent_by_replicas(layout: Layout, model: ModelCosts, ready_seconds: Sequence[float]) -> list[Message]:
    """Return the messages with the gradients of replicas, in the order in which they are ready.

    Args:
        layout: A layout of several hosts with a whole model on each device.
        model: The costs of the model.
        ready_seconds: The moment when the gradients of each block are there.

    Returns:
        The messages; where the model has no blocks, one after the backward pass.

    Example:
        >>> from tfpar.planning.costs import BlockCost, Curve, Line
        >>> first, last = (BlockCost(name, Line(0, 1), Line(0, 2), size, size) for name, size in [("a", 9), ("b", 8)])
        >>> model = ModelCosts("mlp", 4, 17, 17, 0, (9, 8), 8, Curve((8,), (24.0,)), 0.0, blocks=(first, last))
        >>> sent_by_replicas(Layout(2, num_hosts=2), model, [2.0, 1.0])
        [Message(ready_seconds=2.0, sent_bytes=17.0)]
    """
    factor = 2 * (layout.num_replicas - 1) / layout.num_replicas  # a ring through all replicas
    if not model.blocks:
        return [Message(math.inf, factor * model.trainable_bytes)]
    rows_part = (layout.num_replicas - 1) / layout.num_replicas
    found: list[Message] = []
    packed_bytes, last_seconds = 0, 0.0
    for ready, block in sorted(zip(ready_seconds, model.blocks, strict=True), key=lambda pair: pair[0]):
        if block.factored.row_bytes:
            found.append(Message(ready, rows_part * block.factored.row_bytes))
        summed_bytes = block.trainable_bytes - block.factored.gradient_bytes
        if packed_bytes and packed_bytes + summed_bytes > PACK_BYTES:
            found.append(Message(last_seconds, factor * packed_bytes))
            packed_bytes = 0
        if summed_bytes:
            packed_bytes, last_seconds = packed_bytes + summed_bytes, ready
    if packed_bytes:
        found.append(Message(last_seconds, factor * packed_bytes))
    return sorted(found)


def sent_with_weights(layout: Layout, variable_bytes: Sequence[int]) -> float:
    """Return the bytes of new weights that a host sends after the update, in a ring through all replicas.

    Args:
        layout: As for `sent_by_replicas`.
        variable_bytes: Bytes of each trained weight.

    Example:
        >>> sent_with_weights(Layout(4, num_hosts=2, shard="optimizer"), [40, 40, 40, 40])
        120
    """
    if layout.shard != "optimizer":
        return 0
    number = layout.num_replicas
    largest_share = max((-(-sum(variable_bytes) // number), *variable_bytes))  # all send as much as the largest owner
    return (number - 1) * largest_share


def exposed_seconds(sent: Sequence[Message], end_seconds: float, link: Link, num_hops: int = 1) -> float:
    """Return how long messages keep a link busy after a moment, one after another.

    Args:
        sent: The messages in the order in which they are ready.
        end_seconds: The moment.
        link: The link.
        num_hops: How often the last message waits for the latency of the link.

    Example:
        >>> exposed_seconds([Message(1.0, 20.0), Message(2.0, 20.0)], 2.5, Link(0.5, 10.0), num_hops=2)
        3.5
    """
    now_seconds = 0.0
    for ready, sent_bytes in sent:
        now_seconds = max(now_seconds, min(ready, end_seconds)) + sent_bytes / link.bytes_per_second
    return max(0.0, now_seconds - end_seconds) + num_hops * link.latency_seconds


def num_hops(num_members: int, num_hosts: int, rounds: int = 2) -> int:
    """Return how often a sum over a ring waits for the latency of a link between hosts.

    In a round each part passes all members but one. Those of a host are neighbours, so that a part changes the host
    once for each host.

    Args:
        num_members: Members of the ring.
        num_hosts: Their hosts, each with as many.
        rounds: 2 for a sum, which goes around once and again; 1 for rows that all members gather.

    Example:
        >>> num_hops(4, num_hosts=4), num_hops(8, num_hosts=2)
        (6, 4)
    """
    return -(-rounds * (num_members - 1) * num_hosts // num_members)
