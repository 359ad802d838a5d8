"""The layout of a run: which strategy, with which sizes, on how many devices. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

Shard = Literal["optimizer", "weights"] | None
_KINDS = ("single_device", "mirrored", "multi_worker", "pipeline", "tensor_parallel", "hybrid")
_SHARDS = (None, "optimizer", "weights")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to divide the training of a model over devices.

    The batch is divided over `num_replicas`. Each replica is one device, a pipeline of `num_stages` devices, or
    `num_shards` devices that divide each layer.

    Args:
        num_replicas: Replicas of the model, on all workers together.
        num_stages: Stages of a replica; 1 for no pipeline.
        num_microbatches: Micro-batches of the share of a replica.
        schedule: Order of the actions of a pipeline.
        recompute: Whether a pipeline recomputes activations in the backward pass.
        shard: What is divided over the replicas; None for nothing.
        num_shards: Devices that divide each layer of a replica; 1 for no tensor parallelism.
        num_workers: Workers, each with the same number of devices.
        across_workers: Whether the workers have consecutive stages of one pipeline, and not replicas.

    Example:
        >>> str(Layout(num_replicas=2, num_stages=2, num_microbatches=8))
        'Hybrid(2 x Pipeline(2, 8))'
        >>> Layout(num_replicas=4, shard="optimizer").num_devices
        4
    """

    num_replicas: int = 1
    num_stages: int = 1
    num_microbatches: int = 1
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    recompute: bool = False
    shard: Shard = None
    num_shards: int = 1
    num_workers: int = 1
    across_workers: bool = False

    @property
    def num_devices(self) -> int:
        """The devices of all workers."""
        return self.num_replicas * self.num_stages * self.num_shards

    @property
    def devices_per_worker(self) -> int:
        """The devices of one worker."""
        return self.num_devices // self.num_workers

    @property
    def replicas_per_worker(self) -> int:
        """The replicas of one worker; all of them where one pipeline is on all workers."""
        return self.num_replicas if self.across_workers else self.num_replicas // self.num_workers

    @property
    def kind(self) -> str:
        """The `strategy.kind` of the train command."""
        if self.num_stages > 1:
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
        return self.kind, self.num_stages > 1, self.shard == "weights"

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
        if self.num_stages > 1:
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

    def __str__(self) -> str:
        """Return the name of the layout in a table."""
        shard = [f'shard="{self.shard}"'] if self.shard else []
        workers = [f"workers={self.num_workers}"] if self.num_workers > 1 else []
        if self.num_stages > 1:
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
