"""Simulation of a step on several hosts, from the durations of the actions and the links between devices. Pure Python.

    host 0   stage 0 ─► stage 1   stage 0 ─► stage 1      a transfer inside a host uses its inner link
                │          │         │          │
                └──────────┼─ sum ───┘          │         gradients are summed over the replicas of a host,
                           └───────── sum ──────┘
                │          │
    host 1   stage 0 ─► stage 1   …                       then over the hosts: their link carries one stage at a time,
                                                          while latencies overlap

Data parallelism has one stage, a pipeline one replica, a single device one of each. Replicas with equal micro-batches
and the same cuts between hosts take the same time, and are simulated once.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.links import Algorithm, Link, all_reduce_seconds
from tfpar.pipeline.schedule.simulator import Durations, end_times, last_ends, simulate

Crossings = tuple[bool, ...]  # whether each cut lies between two hosts


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts with the same number of devices, numbered host by host.

    Args:
        devices_per_host: Number of devices of a host.
        inside: The link between two devices of a host.
        between: The link between hosts.
        all_reduce: Algorithm of the all-reduce over hosts; see `links.all_reduce_seconds`.
        all_reduce_inside: Algorithm of the all-reduce over the replicas of a host, which comes first.

    Raises:
        ValueError: If a host has no device.

    Example:
        >>> network = Network(8, inside=Link(1e-5, 1e11), between=Link(1e-4, 1e9))
        >>> network.host_of(7), network.host_of(8)
        (0, 1)
    """

    devices_per_host: int
    inside: Link
    between: Link
    all_reduce: Algorithm = "ring"
    all_reduce_inside: Algorithm = "owners"

    def __post_init__(self) -> None:
        if self.devices_per_host < 1:
            raise ValueError(f"A host has at least 1 device, received devices_per_host={self.devices_per_host}.")

    def host_of(self, device: int) -> int:
        """Return the index of the host of a device."""
        return device // self.devices_per_host


class LayoutStep(NamedTuple):
    """The predicted duration of a step, and its parts, which add up to it.

    Attributes:
        step_seconds: Duration of the step.
        compute_seconds: Time in which a device runs actions, averaged over devices.
        bubble_seconds: Idle time caused by the order of the actions and uneven stages.
        transfer_seconds: Idle time caused by transfers.
        all_reduce_seconds: Time from the last action to the end of the last sum of gradients.
        update_seconds: Duration of the optimizer's update.
    """

    step_seconds: float
    compute_seconds: float
    bubble_seconds: float
    transfer_seconds: float
    all_reduce_seconds: float
    update_seconds: float


def simulate_layout(
    schedule: Schedule,
    durations: Durations,
    cut_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
    network: Network,
) -> LayoutStep:
    """Simulate a step of a schedule on the devices of a network.

    The simulation assumes that transfers do not delay each other, and that communication does not slow down actions.

    Args:
        schedule: The order of the actions, with any number of replicas.
        durations: Durations of the actions and of the update of each stage. Durations of transfers and reductions are
            ignored: they follow from the bytes and the links.
        cut_bytes: Bytes of a full micro-batch across each cut, `num_stages - 1` entries.
        gradient_bytes: Bytes of the gradients of each stage, `num_stages` entries. Zeros mean that no gradients are
            summed.
        network: The hosts and links.

    Raises:
        ValueError: If an argument lacks entries that the schedule needs, or the schedule deadlocks.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> hosts = Network(2, inside=Link(0.0, 1e9), between=Link(0.0, 1e8))
        >>> two_hosts = schedule.make("1f1b", num_stages=2, num_microbatches=4).replicated(2)
        >>> step = simulate_layout(two_hosts, Durations((1.0, 1.0), (2.0, 2.0), (), (), ()), [0], [1e8, 1e8], hosts)
        >>> step.step_seconds, step.bubble_seconds, step.all_reduce_seconds
        (16.0, 3.0, 1.0)
    """
    _check(schedule, cut_bytes, gradient_bytes)
    replica = schedule.first_replica
    last, no_transfer_seconds, busy_seconds = [0.0] * schedule.num_stages, 0.0, 0.0
    for (scale, crosses), num_replicas in _distinct_replicas(schedule, durations, network).items():
        links = [network.between if is_between else network.inside for is_between in crosses]
        transfer_seconds = tuple(link.seconds(size) for link, size in zip(links, cut_bytes, strict=True))
        alone = dataclasses.replace(
            durations, microbatch_scale=scale, update_seconds=(), reduction_seconds=(), all_reduce_seconds=()
        )
        spans = simulate(replica, dataclasses.replace(alone, transfer_seconds=transfer_seconds)).spans
        without = simulate(replica, dataclasses.replace(alone, transfer_seconds=(0.0,) * len(links)))
        last = list(map(max, last, last_ends(replica, spans)))
        no_transfer_seconds = max(no_transfer_seconds, without.step_seconds)
        busy_seconds += num_replicas * sum(span.end_seconds - span.begin_seconds for span in spans)
    compute_seconds, end_seconds = busy_seconds / len(schedule.actions), max(last)
    summed_seconds = max(end_seconds, *_sum_ends(schedule, last, gradient_bytes, network))
    updates = durations.update_seconds or (0.0,) * schedule.num_stages
    update_seconds = max(sum(updates[device :: replica.num_devices]) for device in range(replica.num_devices))
    return LayoutStep(
        step_seconds=summed_seconds + update_seconds,
        compute_seconds=compute_seconds,
        bubble_seconds=no_transfer_seconds - compute_seconds,
        transfer_seconds=end_seconds - no_transfer_seconds,
        all_reduce_seconds=summed_seconds - end_seconds,
        update_seconds=update_seconds,
    )


def _distinct_replicas(
    schedule: Schedule, durations: Durations, network: Network
) -> collections.Counter[tuple[tuple[float, ...], Crossings]]:
    """Count the replicas with the same micro-batch sizes and the same cuts between hosts."""
    count, scale = schedule.microbatches_per_replica, durations.microbatch_scale
    if scale and len(scale) != schedule.num_microbatches:
        raise ValueError(
            f"Durations.microbatch_scale must have one entry for each of {schedule.num_microbatches} micro-batches, "
            f"received {len(scale)}: {scale}."
        )
    return collections.Counter(
        (scale[first : first + count], _crossings(schedule, first, network))
        for first in range(0, schedule.num_microbatches, count)
    )


def _crossings(schedule: Schedule, microbatch: int, network: Network) -> Crossings:
    hosts = [network.host_of(schedule.device_of(stage, microbatch)) for stage in range(schedule.num_stages)]
    return tuple(host != next_host for host, next_host in itertools.pairwise(hosts))


def _sum_ends(
    schedule: Schedule, last: Sequence[float], gradient_bytes: Sequence[float], network: Network
) -> list[float]:
    """Return when the gradients of each stage are summed over the replicas of each host, and over the hosts."""
    inside, between, latencies = list[float](), list[float](), list[float]()
    devices = [schedule.device_of(stage) for stage in range(schedule.num_stages)]
    hosts = list(map(network.host_of, devices))
    bytes_only = dataclasses.replace(network.between, latency_seconds=0.0)
    latency_only = dataclasses.replace(network.between, bytes_per_second=math.inf)
    for device, num_bytes in zip(devices, gradient_bytes, strict=True):
        members = range(device, len(schedule.actions), schedule.num_devices)
        per_host = collections.Counter(map(network.host_of, members))
        most, count = max(per_host.values()), len(per_host)
        inside.append(all_reduce_seconds(network.all_reduce_inside, num_bytes, most, network.inside))
        between.append(all_reduce_seconds(network.all_reduce, num_bytes, count, bytes_only))
        latencies.append(all_reduce_seconds(network.all_reduce, num_bytes, count, latency_only))
    sent = end_times(end_times(last, inside, devices), between, hosts)
    return [end + latency for end, latency in zip(sent, latencies, strict=True)]


def _check(schedule: Schedule, cut_bytes: Sequence[float], gradient_bytes: Sequence[float]) -> None:
    for name, entries, number in (
        ("cut_bytes", cut_bytes, schedule.num_stages - 1),
        ("gradient_bytes", gradient_bytes, schedule.num_stages),
    ):
        if len(entries) != number or any(size < 0 for size in entries):
            raise ValueError(
                f"{name} must have {number} entries of at least 0 for {schedule.num_stages} stages, received "
                f"{list(entries)}."
            )
