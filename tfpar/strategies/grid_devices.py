"""The devices of a grid of replicas and stages, on one machine or on the workers of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfpar import cluster


class LentDevices(NamedTuple):
    """The devices of the workers of a job, which its first process uses.

    Args:
        addresses: The address of each worker, by rank.
        of_workers: The devices of each worker, full names.
    """

    addresses: Sequence[str]
    of_workers: Sequence[Sequence[str]]


def on_this_machine(
    num_replicas: int, per_replica: int, devices: Sequence[str] | None, *, starts: bool = True
) -> list[str]:
    """Return the devices of a grid, those of the first replica first: the given ones, or the first of this machine.

    Args:
        num_replicas: Number of replicas.
        per_replica: Number of devices of each.
        devices: The given ones.
        starts: Whether TensorFlow may start: several workers must connect before.

    Raises:
        ValueError: If the grid does not fit the devices.
    """
    existing = cluster.resolve_devices(devices) if starts else cluster.configured_devices(devices)
    number = num_replicas * per_replica
    if len(existing) < number or (devices is not None and len(existing) != number):
        raise ValueError(
            f"Hybrid needs {_each_device(num_replicas, per_replica)}, received {len(existing)}: {existing}. "
            f"Grids that fit are {_grids(len(existing))}.{cluster.more_devices(number, existing)}"
        )
    cluster.check_one_kind("Hybrid", existing[:number])
    return existing[:number]


def across_workers(
    num_replicas: int, per_replica: int, lent: LentDevices, devices: Sequence[str] | None
) -> list[list[str]]:
    """Return the possible orders of the devices of a grid on several workers, those of the first replica first.

                          worker 0             worker 1
        stages together   0.0 0.1 0.2 0.3      1.0 1.1 1.2 1.3     replica.stage: activations stay on a machine
        replicas together 0.0 1.0 0.1 1.1      0.2 1.2 0.3 1.3     gradients stay on a machine

    Args:
        num_replicas: Number of replicas.
        per_replica: Number of devices of each.
        lent: The devices of the workers.
        devices: Names in the only order to return, such as `"1/GPU:0"` of worker 1; None for as many of each worker.

    Raises:
        ValueError: If the grid does not fit the devices, or a name is wrong.
    """
    if devices is not None:
        return [_named(num_replicas, per_replica, lent, devices)]
    number, num_workers = num_replicas * per_replica, len(lent.addresses)
    each = number // num_workers
    if number % num_workers or min(map(len, lent.of_workers)) < each:
        raise ValueError(_misfit(num_replicas, per_replica, lent))
    found = [device for of_one in lent.of_workers for device in of_one[:each]]
    if num_replicas > 1:
        cluster.check_one_kind("A grid over workers", [_without_rank(cluster.short_name(device)) for device in found])
    by_stage = [
        found[stage * num_replicas + replica] for replica in range(num_replicas) for stage in range(per_replica)
    ]
    return [found] if each == 1 or found == by_stage else [found, by_stage]


def listed(devices: Sequence[str]) -> list[str]:
    """Return names of devices as a list; refuse what is no list of texts.

    Raises:
        TypeError: If it is something else.
    """
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not is_list or not all(isinstance(name, str) for name in devices):
        raise TypeError(f'devices must be a list of names such as ["0/GPU:0", "1/GPU:0"], received {devices!r}.')
    return list(devices)


def _without_rank(name: str) -> str:
    return name.rpartition("/")[2]


def _named(num_replicas: int, per_replica: int, lent: LentDevices, devices: Sequence[str]) -> list[str]:
    names = [name.upper() for name in listed(devices)]
    existing = {cluster.short_name(device): device for of_one in lent.of_workers for device in of_one}
    if any(name not in existing or names.count(name) > 1 for name in names):
        raise ValueError(
            f"devices must name different devices of the workers, each after the rank of its worker, received "
            f"{list(devices)}. There are: {list(existing)}."
        )
    if len(names) != num_replicas * per_replica:
        raise ValueError(
            f"devices must name {_each_device(num_replicas, per_replica)}, received {len(names)}: {list(devices)}. "
            f"There are: {list(existing)}."
        )
    if num_replicas > 1:
        cluster.check_one_kind("A grid over workers", list(map(_without_rank, names)))
    return [existing[name] for name in names]


def _misfit(num_replicas: int, per_replica: int, lent: LentDevices) -> str:
    sizes, num_workers = list(map(len, lent.of_workers)), len(lent.addresses)
    if len(set(sizes)) == 1:
        received = f"{num_workers} workers x {sizes[0]} device{'s' * (sizes[0] > 1)}"
    else:
        numbered = enumerate(zip(sizes, lent.addresses, strict=True))
        received = ", ".join(f"{size} of worker {rank} ({address})" for rank, (size, address) in numbered)
    grids = _grids(num_workers * min(sizes))
    if num_replicas == 1:
        return (
            f"A pipeline across workers needs {per_replica} device{'s' * (per_replica > 1)}, as many of each worker, "
            f"received {received}. Set num_stages to a multiple of {num_workers} up to {num_workers * min(sizes)}, or "
            f"train replicas of it with tfpar.Hybrid: grids that fit are {grids} (replicas x devices)."
        )
    return (
        f"Hybrid across workers needs {_each_device(num_replicas, per_replica)}, as many of each worker, received "
        f"{received}. Grids that fit are {grids}."
    )


def _each_device(num_replicas: int, per_replica: int) -> str:
    return (
        f"a device for each of {num_replicas} replica{'s' * (num_replicas > 1)} x {per_replica} devices of the "
        f"pipeline, {num_replicas * per_replica} in all"
    )


def _grids(number: int) -> str:
    """Return the grids of all of some number of devices, replicas first."""
    return ", ".join(f"{number // size} x {size}" for size in range(1, number + 1) if not number % size)
