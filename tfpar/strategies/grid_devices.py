"""Devices for a grid of replicas and stages, on this machine or across the workers of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfpar import cluster


class WorkerDevices(NamedTuple):
    """The devices of all workers of a job, which the first process uses.

    Args:
        addresses: Address of each worker, by rank.
        by_worker: Full names of the devices of each worker, by rank.
    """

    addresses: Sequence[str]
    by_worker: Sequence[Sequence[str]]


def on_this_machine(
    num_replicas: int, per_replica: int, devices: Sequence[str] | None, *, starts: bool = True
) -> list[str]:
    """Return the devices of a grid on this machine, by replica.

    Args:
        num_replicas: Number of replicas.
        per_replica: Devices per replica.
        devices: Device names; None for the first devices of this machine.
        starts: Whether TensorFlow may start; several workers must connect first.

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
    num_replicas: int, per_replica: int, workers: WorkerDevices, devices: Sequence[str] | None
) -> list[list[str]]:
    """Return the possible orders of the devices of a grid across workers, each by replica.

                          worker 0             worker 1
        stages together   0.0 0.1 0.2 0.3      1.0 1.1 1.2 1.3     replica.stage: activations stay on a machine
        replicas together 0.0 1.0 0.1 1.1      0.2 1.2 0.3 1.3     gradients stay on a machine

    Args:
        num_replicas: Number of replicas.
        per_replica: Devices per replica.
        workers: Devices of all workers.
        devices: Names of devices in the order to use, such as `"1/GPU:0"` for a device of worker 1; None to use the
            same number of devices of each worker.

    Raises:
        ValueError: If the grid does not fit the devices, or a name is wrong.
    """
    if devices is not None:
        return [_named(num_replicas, per_replica, workers, devices)]
    number, num_workers = num_replicas * per_replica, len(workers.addresses)
    per_worker = number // num_workers
    if number % num_workers or min(map(len, workers.by_worker)) < per_worker:
        raise ValueError(_misfit(num_replicas, per_replica, workers))
    by_replica = [device for names in workers.by_worker for device in names[:per_worker]]
    if num_replicas > 1:
        kinds = [_without_rank(cluster.short_name(device)) for device in by_replica]
        cluster.check_one_kind("A grid over workers", kinds)
    by_stage = [
        by_replica[stage * num_replicas + replica] for replica in range(num_replicas) for stage in range(per_replica)
    ]
    return [by_replica] if per_worker == 1 or by_replica == by_stage else [by_replica, by_stage]


def listed(devices: Sequence[str]) -> list[str]:
    """Return device names as a list.

    Raises:
        TypeError: If `devices` is not a list of strings.
    """
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not is_list or not all(isinstance(name, str) for name in devices):
        raise TypeError(f'devices must be a list of names such as ["0/GPU:0", "1/GPU:0"], received {devices!r}.')
    return list(devices)


def _without_rank(name: str) -> str:
    return name.rpartition("/")[2]


def _named(num_replicas: int, per_replica: int, workers: WorkerDevices, devices: Sequence[str]) -> list[str]:
    names = [name.upper() for name in listed(devices)]
    existing = {cluster.short_name(device): device for devices in workers.by_worker for device in devices}
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


def _misfit(num_replicas: int, per_replica: int, workers: WorkerDevices) -> str:
    sizes, num_workers = list(map(len, workers.by_worker)), len(workers.addresses)
    if len(set(sizes)) == 1:
        received = f"{num_workers} workers x {sizes[0]} device{'s' * (sizes[0] > 1)}"
    else:
        numbered = enumerate(zip(sizes, workers.addresses, strict=True))
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
    """List the grids with this number of devices, as `replicas x devices`."""
    return ", ".join(f"{number // size} x {size}" for size in range(1, number + 1) if not number % size)
