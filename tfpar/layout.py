"""The grid of a strategy: replicas x stages x shards on the devices of one worker or several. Pure data.

                     shard 0   shard 1
replica 0  stage 0   GPU:0     GPU:1        Layout(num_replicas=2, num_stages=2, num_shards=2, num_microbatches=8)
           stage 1   GPU:2     GPU:3
replica 1  stage 0   GPU:4     GPU:5
           stage 1   GPU:6     GPU:7
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

Shard = Literal["optimizer", "weights"] | None
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
_KINDS = ("single_device", "mirrored", "multi_worker", "pipeline", "tensor_parallel", "hybrid")
_SHARDS = (None, "optimizer", "weights")
_COUNTS = ("num_replicas", "num_stages", "num_microbatches", "num_shards", "num_workers", "stages_per_device")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to divide the training of a model over devices.

    The batch is divided over `num_replicas`. Each replica is one device, a pipeline of `num_stages` stages, or
    `num_shards` devices that divide each layer; or stages of shards.

    Args:
        num_replicas: Replicas of the model, on all workers together.
        num_stages: Stages of a replica; 1 for no pipeline.
        num_microbatches: Micro-batches of a replica's share of the batch.
        schedule: Order of the actions of a pipeline.
        recompute: Whether a pipeline recomputes activations in the backward pass.
        shard: What the replicas divide among themselves, `"optimizer"` for the optimizer's state or `"weights"` for the
            weights and gradients too; None for nothing.
        num_shards: Devices that divide each layer of a replica; 1 for no tensor parallelism.
        num_workers: Workers, each with the same number of devices.
        across_workers: Whether one grid is on the devices of all workers, and not one on those of each.
        stages_per_device: Stages of each device, more than one in an interleaved schedule.

    Raises:
        ValueError: If a number is no whole number of at least 1, a name is unknown, or the numbers do not fit together.

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
        if self.num_devices % self.num_workers and not self.across_workers:
            raise ValueError(
                f"Each worker must have the same number of devices, received {self.num_devices} devices for "
                f"{self.num_workers} workers. Use a multiple of {self.num_workers}."
            )

    @property
    def num_devices(self) -> int:
        """The devices of all workers."""
        return self.num_replicas * self.devices_per_replica

    @property
    def devices_per_replica(self) -> int:
        """The devices of a replica."""
        return self.num_stages // self.stages_per_device * self.num_shards

    @property
    def devices_per_worker(self) -> int:
        """The devices of one worker."""
        return self.num_devices // self.num_workers

    @property
    def replicas_per_worker(self) -> int:
        """The replicas of one worker; all of them where one pipeline is on all workers."""
        return self.num_replicas if self.across_workers else self.num_replicas // self.num_workers

    @property
    def _has_stages(self) -> bool:
        """Whether a replica is a pipeline, of one stage perhaps."""
        return self.num_stages * self.num_microbatches > 1

    @property
    def kind(self) -> str:
        """The `strategy.kind` of the train command."""
        if self._has_stages:
            return "hybrid" if self.num_replicas > 1 else "pipeline"
        if self.num_shards > 1:
            return "tensor_parallel"
        if self.num_workers > 1:
            return "multi_worker"
        return "mirrored" if self.num_replicas > 1 else "single_device"

    @property
    def family(self) -> tuple[str, bool, bool]:
        """The layouts that run in the same way: a refusal of one is that of all, and their speeds are alike.

        Example:
            >>> Layout(4).family == Layout(2, shard="optimizer").family, Layout(2).family == Layout(1, 2, 4).family
            (True, False)
        """
        return self.kind, self._has_stages, self.shard == "weights"

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """A key by which simpler layouts come first."""
        kind, shard = _KINDS.index(self.kind), _SHARDS.index(self.shard)
        variant = (self.recompute, self.schedule != "1f1b", self.num_microbatches)
        return (self.num_workers, kind, shard, self.num_devices, *variant)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of section `[strategy]`, with its kind, without devices.

        Example:
            >>> Layout(num_stages=2, num_microbatches=8).settings
            {'kind': 'pipeline', 'num_stages': 2, 'num_microbatches': 8}
        """
        settings: dict[str, Any] = {"kind": self.kind}
        if self._has_stages:
            settings |= {"num_stages": self.num_stages, "num_microbatches": self.num_microbatches}
            settings |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
            settings |= {"recompute": True} if self.recompute else {}
            settings |= {"across_workers": True} if self.across_workers else {}
        if self.num_shards > 1:
            settings |= {"num_shards": self.num_shards}
        if self.kind in ("hybrid", "tensor_parallel") and self.replicas_per_worker > 1:
            settings |= {"num_replicas": self.replicas_per_worker}
        return settings | ({"shard": self.shard} if self.shard is not None else {})

    def settings_on(self, devices: Sequence[str]) -> dict[str, Any]:
        """Return the settings with the names of the devices that the layout uses on a worker.

        Args:
            devices: Names of the devices of a worker.

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
        """Return the device of each shard, by replica and then by stage group.

        Args:
            devices: Names of the devices of one process, or of all workers, those of the first replica first, and of a
                replica those of the first stage.

        Example:
            >>> Layout(num_replicas=2, num_stages=2).grid(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
            [[['GPU:0'], ['GPU:1']], [['GPU:2'], ['GPU:3']]]
        """
        groups = [list(devices[first : first + self.num_shards]) for first in range(0, len(devices), self.num_shards)]
        size = self.devices_per_replica // self.num_shards
        return [groups[first : first + size] for first in range(0, len(groups), size)]

    def describe(self, labels: Sequence[str]) -> str:
        """Return in words what a replica is, where the replicas are, and what they shard.

        Args:
            labels: The devices, such as `labels` returns.

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
        """Return the devices in words, those of each replica of several devices in parentheses.

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
        """Return the name of the layout in a table."""
        shard = [f'shard="{self.shard}"'] if self.shard else []
        workers = [f"workers={self.num_workers}"] if self.num_workers > 1 else []
        if self._has_stages:
            options = [f'"{self.schedule}"'] if self.schedule != "1f1b" else []
            options += ["recompute"] if self.recompute else []
            options += ["across_workers", *workers] if self.across_workers else []
            replica = f"Pipeline({', '.join([str(self.num_stages), str(self.num_microbatches), *options])})"
        elif self.num_shards > 1:
            replica = f"TensorParallel({self.num_shards})"
        elif self.num_workers > 1:
            return f"MultiWorker({', '.join([str(self.num_replicas), *shard])})"
        elif self.num_replicas > 1:
            return f"Mirrored({', '.join([str(self.num_replicas), *shard])})"
        else:
            return "SingleDevice"
        if self.num_replicas == 1:
            return replica
        rest = shard if self.across_workers else [*shard, *workers]
        return f"Hybrid({', '.join([f'{self.num_replicas} x {replica}', *rest])})"


def check_count(name: str, number: Any) -> None:
    """Raise ValueError unless a number is a whole number of at least 1.

    Args:
        name: The name of the argument.
        number: Its value.

    Example:
        >>> check_count("num_stages", 2)
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, received {number!r}.")


def check_shard(shard: str | None, known: Sequence[str] = ("optimizer", "weights")) -> None:
    """Raise ValueError unless a value says what to shard, one of the known values or None.

    Args:
        shard: The value.
        known: The known values.

    Example:
        >>> check_shard("optimizer")
    """
    if shard is not None and shard not in known:
        raise ValueError(f"shard must be {', '.join(map(repr, known))} or None, received {shard!r}.")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number > 1)}"
