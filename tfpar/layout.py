"""The grid of a strategy, replicas x stages x shards, as pure data.

                     shard 0   shard 1
replica 0  stage 0   GPU:0     GPU:1        Layout(num_replicas=2, num_stages=2, num_shards=2, num_microbatches=8)
           stage 1   GPU:2     GPU:3
replica 1  stage 0   GPU:4     GPU:5
           stage 1   GPU:6     GPU:7
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

Shard = Literal["optimizer", "weights"] | None
OwnSteps = Literal["exact", "average"]  # how replicas run a model's own steps
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
_KINDS = ("single_device", "mirrored", "multi_worker", "pipeline", "tensor_parallel", "hybrid")
_SHARDS = (None, "optimizer", "weights")
MAX_SHARE = 1_000_000
_COUNTS = ("num_replicas", "num_stages", "num_microbatches", "num_shards", "num_workers", "stages_per_device")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A grid of devices that trains a model.

    A replica is one device, a pipeline of `num_stages` stages, or stages whose layers are each divided over
    `num_shards` devices.

    Args:
        num_replicas: Number of replicas, on all workers together.
        num_stages: Stages per replica; 1 for no pipeline.
        num_microbatches: Micro-batches per per-replica batch.
        schedule: Order of the actions of a pipeline.
        recompute: Whether activations are recomputed in the backward pass.
        shard: What is sharded over the replicas: `"optimizer"` for the optimizer state, `"weights"` for weights and
            gradients too; None for nothing.
        num_shards: Devices per stage; 1 for no tensor parallelism.
        num_workers: Number of workers, each with the same number of devices if a replica has several.
        across_workers: Whether a single grid spans the devices of all workers, rather than one grid per worker.
        stages_per_device: Stages per device, more than one in an interleaved schedule.

    Raises:
        ValueError: If a number is not an integer of at least 1, a name is unknown, or the numbers do not fit together.

    Example:
        >>> str(Layout(num_replicas=2, num_stages=2, num_microbatches=8))
        'Hybrid(2 x Pipeline(2, 8))'
        >>> Layout(num_replicas=4, shard="optimizer").num_devices
        4
    """

    num_replicas: int = 1
    num_stages: int = 1
    num_microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    recompute: bool = False
    shard: Shard = None
    num_shards: int = 1
    num_workers: int = 1
    across_workers: bool = False
    stages_per_device: int = 1

    def __post_init__(self) -> None:
        """Check the numbers and names."""
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        if self.schedule not in get_args(ScheduleName):
            names = ", ".join(get_args(ScheduleName))
            raise ValueError(f"schedule must be one of {names}, received {self.schedule!r}.")
        check_shard(self.shard)
        if self.num_stages % self.stages_per_device:
            raise ValueError(
                f"Each device must have the same number of stages, received {self.num_stages} stages with "
                f"{self.stages_per_device} for a device. Set num_stages to a multiple of it."
            )
        divides_replicas = self._has_stages or self.num_shards > 1
        if self.num_devices % self.num_workers and divides_replicas and not self.across_workers:
            raise ValueError(
                f"Each worker must have the same number of devices, received {self.num_devices} devices for "
                f"{self.num_workers} workers. Use a multiple of {self.num_workers}."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices, on all workers together."""
        return self.num_replicas * self.devices_per_replica

    @property
    def devices_per_replica(self) -> int:
        """Number of devices per replica."""
        return self.num_stages // self.stages_per_device * self.num_shards

    @property
    def devices_per_worker(self) -> int:
        """Number of devices per worker."""
        return self.num_devices // self.num_workers

    @property
    def replicas_per_worker(self) -> int:
        """Number of replicas per worker; all of them if one grid spans the workers."""
        return self.num_replicas if self.across_workers else self.num_replicas // self.num_workers

    @property
    def _has_stages(self) -> bool:
        """Whether a replica is a pipeline, possibly of one stage."""
        return self.num_stages * self.num_microbatches > 1

    @property
    def kind(self) -> str:
        """The `strategy.kind` of this layout in a configuration."""
        if self._has_stages:
            return "hybrid" if self.num_replicas > 1 else "pipeline"
        if self.num_shards > 1:
            return "tensor_parallel"
        if self.num_workers > 1:
            return "multi_worker"
        return "mirrored" if self.num_replicas > 1 else "single_device"

    @property
    def family(self) -> tuple[str, bool, bool]:
        """A key shared by layouts that run in the same way: they refuse the same models, at similar speeds.

        Example:
            >>> Layout(4).family == Layout(2, shard="optimizer").family, Layout(2).family == Layout(1, 2, 4).family
            (True, False)
        """
        return self.kind, self._has_stages, self.shard == "weights"

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """A sort key that puts simpler layouts first."""
        kind, shard = _KINDS.index(self.kind), _SHARDS.index(self.shard)
        variant = (self.recompute, self.schedule != "1f1b", self.num_microbatches)
        return (self.num_workers, kind, shard, self.num_devices, *variant)

    @property
    def settings(self) -> dict[str, Any]:
        """The `[strategy]` section of a configuration, without devices.

        Example:
            >>> Layout(num_stages=2, num_microbatches=8).settings
            {'kind': 'pipeline', 'num_stages': 2, 'num_microbatches': 8}
        """
        settings: dict[str, Any] = {"kind": self.kind}
        if self._has_stages:
            settings |= {"num_stages": self.num_stages, "num_microbatches": self.num_microbatches}
            settings |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
            settings |= {"across_workers": True} if self.across_workers else {}
        if self.num_shards > 1:
            settings |= {"num_shards": self.num_shards}
        if self.kind in ("hybrid", "tensor_parallel") and self.replicas_per_worker > 1:
            settings |= {"num_replicas": self.replicas_per_worker}
        settings |= {"recompute": True} if self.recompute else {}
        return settings | ({"shard": self.shard} if self.shard is not None else {})

    def settings_on(self, devices: Sequence[str]) -> dict[str, Any]:
        """Return the `[strategy]` section with the devices that the layout uses.

        Args:
            devices: Device names of a worker, of which the layout uses the first.

        Example:
            >>> Layout().settings_on(["GPU:0", "GPU:1"])
            {'kind': 'single_device', 'device': 'GPU:0'}
        """
        if self.kind == "single_device":
            return {**self.settings, "device": devices[0]}
        used = list(devices[: self.devices_per_worker])
        if self.across_workers:
            used = [f"{rank}/{name}" for rank in range(self.num_workers) for name in used]
        return {**self.settings, "devices": used}

    def grid(self, devices: Sequence[str]) -> list[list[list[str]]]:
        """Return device names as `[replica][stage][shard]`.

        Args:
            devices: Device names in the order of the grid, by replica, stage and shard.

        Example:
            >>> Layout(num_replicas=2, num_stages=2).grid(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
            [[['GPU:0'], ['GPU:1']], [['GPU:2'], ['GPU:3']]]
        """
        groups = [list(devices[first : first + self.num_shards]) for first in range(0, len(devices), self.num_shards)]
        size = self.devices_per_replica // self.num_shards
        return [groups[first : first + size] for first in range(0, len(groups), size)]

    def describe(self, labels: Sequence[str]) -> str:
        """Describe the replicas, their devices and what is sharded.

        Args:
            labels: The devices, as `labels` returns them.

        Example:
            >>> Layout(num_replicas=2, shard="optimizer").describe(["GPU:0", "GPU:1"])
            '2 replicas on GPU:0, GPU:1, optimizer state sharded'
            >>> Layout(num_stages=2, num_microbatches=8).describe(["GPU:0", "GPU:1"])
            '2 stages on GPU:0, GPU:1, 8 micro-batches, 1f1b'
        """
        is_whole = not self._has_stages and self.num_shards == 1
        parts = [_count(self.num_replicas, "replica")] * (self.num_replicas > 1 or is_whole)
        parts += [_count(self.num_stages, "stage")] * self._has_stages
        parts += [_count(self.num_shards, "shard")] * (self.num_shards > 1)
        text = f"{' of '.join(parts)} on {', '.join(labels)}"
        if self._has_stages:
            text += f", {_count(self.num_microbatches, 'micro-batch', 'es')}, {self.schedule}"
        text += ", recomputing" * self.recompute
        sharded = {None: "", "optimizer": ", optimizer state sharded", "weights": ", weights sharded"}
        return text + sharded[self.shard]

    def labels(self, devices: Sequence[str]) -> list[str]:
        """Return device names, with the devices of each replica in parentheses where it has several.

        Args:
            devices: As for `grid`.

        Example:
            >>> Layout(num_replicas=2, num_stages=2).labels(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
            ['(GPU:0 GPU:1)', '(GPU:2 GPU:3)']
        """
        if self.devices_per_replica == 1 or len(devices) == self.devices_per_replica:
            return list(devices)
        replicas = [[name for group in replica for name in group] for replica in self.grid(devices)]
        return [f"({' '.join(names)})" for names in replicas]

    def __str__(self) -> str:
        """Return the layout as a constructor call, for tables."""
        recompute = ["recompute"] * self.recompute
        shard = [f'shard="{self.shard}"'] if self.shard else []
        workers = [f"workers={self.num_workers}"] if self.num_workers > 1 else []
        if self._has_stages:
            options = [f'"{self.schedule}"'] if self.schedule != "1f1b" else []
            options += recompute
            options += ["across_workers", *workers] if self.across_workers else []
            replica = f"Pipeline({', '.join([str(self.num_stages), str(self.num_microbatches), *options])})"
        elif self.num_shards > 1:
            replica = f"TensorParallel({self.num_shards})"
        elif self.num_workers > 1:
            return f"MultiWorker({', '.join([str(self.num_replicas), *recompute, *shard])})"
        elif self.num_replicas > 1:
            return f"Mirrored({', '.join([str(self.num_replicas), *recompute, *shard])})"
        else:
            return f"SingleDevice{'(recompute)' * self.recompute}"
        if self.num_replicas == 1:
            return replica
        rest = shard if self.across_workers else [*shard, *workers]
        return f"Hybrid({', '.join([f'{self.num_replicas} x {replica}', *rest])})"


def check_count(name: str, number: Any) -> None:
    """Raise ValueError unless an argument is an integer of at least 1.

    Args:
        name: Name of the argument.
        number: Value of the argument.

    Example:
        >>> check_count("num_stages", 2)
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, received {number!r}.")


def check_shard(shard: str | None, known: Sequence[str] = ("optimizer", "weights")) -> None:
    """Raise ValueError unless the argument `shard` is None or a known value.

    Args:
        shard: Value of the argument.
        known: Values that the strategy supports.

    Example:
        >>> check_shard("optimizer")
    """
    if shard is not None and shard not in known:
        raise ValueError(f"shard must be {', '.join(map(repr, known))} or None, received {shard!r}.")


def check_own_steps(own_steps: str, batch_shares: Sequence[int] | None = None) -> None:
    """Refuse another value than those of `OwnSteps`, and an average over replicas with unequal shares.

    Raises:
        ValueError: If it is none of them, or excludes the shares.
    """
    if own_steps not in ("exact", "average"):
        raise ValueError(f'own_steps must be "exact" or "average", received {own_steps!r}. Leave it out for "exact".')
    if own_steps == "average" and batch_shares is not None:
        raise ValueError(
            'own_steps="average" gives every replica the same weight, whatever the size of its per-replica batch, '
            f"received batch_shares={list(batch_shares)}. Leave one of them out."
        )


def check_batch_shares(shares: Any) -> None:
    """Raise ValueError unless the argument `batch_shares` is None or a sequence of integers of at least 1.

    Args:
        shares: Value of the argument.

    Example:
        >>> check_batch_shares([3, 1])
    """
    if shares is None:
        return
    is_list = isinstance(shares, Sequence) and not isinstance(shares, str) and len(shares) > 0
    if not is_list or any(type(share) is not int or not 1 <= share <= MAX_SHARE for share in shares):
        raise ValueError(
            f"batch_shares must be whole numbers from 1 to {MAX_SHARE:,}, received {shares!r}. Write [3, 2] where a "
            "device takes 1.5 times the examples of another in the same time."
        )


def shares_of_replicas(batch_shares: Sequence[int] | None, num_devices: Sequence[int]) -> tuple[int, ...]:
    """Return the share of each replica in a global batch, without a common factor.

    Args:
        batch_shares: Relative share of each device, or of each worker, whose devices share it equally; None for equal
            shares of all devices.
        num_devices: Number of devices of each worker.

    Raises:
        ValueError: If there is neither a share for each worker nor one for each device.

    Example:
        >>> shares_of_replicas([3, 1], [2, 1]), shares_of_replicas([2, 2, 1], [2, 1]), shares_of_replicas(None, [2, 1])
        ((3, 3, 2), (2, 2, 1), (1, 1, 1))
    """
    shares = list(batch_shares or (1,) * sum(num_devices))
    if len(shares) == len(num_devices):
        whole = math.lcm(*num_devices)
        shares = [
            share * whole // count for share, count in zip(shares, num_devices, strict=True) for _ in range(count)
        ]
    if len(shares) != sum(num_devices):
        workers = f" or of {len(num_devices)} workers" if 1 < len(num_devices) < sum(num_devices) else ""
        raise ValueError(
            f"batch_shares must have a number for each of {_count(sum(num_devices), 'device')}{workers}, received "
            f"{list(batch_shares or ())}. Leave it out for equal shares."
        )
    return tuple(share // math.gcd(*shares) for share in shares)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number > 1)}"
