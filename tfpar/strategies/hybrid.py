"""Replicas of a pipeline: a grid of replicas and stages on the devices of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar import cluster
from tfpar.messages import keyword_arguments
from tfpar.messages.received import excerpt
from tfpar.strategies.pipeline import Pipeline, describe_stages
from tfpar.strategies.staged import Staged


class Hybrid(Staged):
    """Train a model in stages on several replicas of a pipeline, equal to one device.

                   stage 0     stage 1
        replica 0  device 0 ─► device 1     the first half of every global batch
        replica 1  device 2 ─► device 3     the second half

    Every global batch is divided over the replicas, and each runs the schedule of the pipeline on the micro-batches of
    its share. The gradients of a stage are summed over the replicas as soon as its last backward pass has run on each,
    and one update follows. Each weight belongs to one device, which holds its optimizer state and updates it; the other
    replicas copy the weight at the beginning of a step. So the optimizer's state is divided over all devices.

    Args:
        pipeline: The pipeline of each replica; `num_microbatches` are those of one replica.
        num_replicas: Number of replicas.
        devices: Device names, those of the first replica first; None takes as many as the grid needs.

    Raises:
        TypeError: If `pipeline` is no `Pipeline`.
        ValueError: If the grid does not fit the devices.

    Example:
        >>> tfpar.use_logical_cpus(4)
        >>> strategy = tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)
        >>> trainer = tfpar.Trainer(build_model, strategy)
    """

    @keyword_arguments.named
    def __init__(self, pipeline: Pipeline, num_replicas: int, devices: Sequence[str] | None = None) -> None:
        if not isinstance(pipeline, Pipeline):
            raise TypeError(
                f"pipeline must be a tfpar.Pipeline, received {excerpt(repr(pipeline))}. Write "
                "tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)."
            )
        if not isinstance(num_replicas, int) or isinstance(num_replicas, bool) or num_replicas < 1:
            raise ValueError(f"num_replicas must be a whole number of at least 1, received {num_replicas!r}.")
        if pipeline.names_devices and num_replicas > 1:
            raise ValueError(
                f"The devices of all replicas are an argument of Hybrid, received devices={pipeline.devices} of the "
                "pipeline. Leave them out there, and give devices to Hybrid."
            )
        schedule = pipeline.schedule.replicated(num_replicas)
        per_replica = pipeline.schedule.num_devices
        given = pipeline.devices if pipeline.names_devices and devices is None else devices
        super().__init__(pipeline.settings, schedule, _devices(num_replicas, per_replica, given))

    def describe(self) -> str:
        """Say in one line which devices run what."""
        size = self.schedule.num_devices
        replicas = [self.devices[first : first + size] for first in range(0, len(self.devices), size)]
        grid = [f"({' '.join(devices)})" if size > 1 else devices[0] for devices in replicas]
        return f"Hybrid of {self.num_replicas} replica{'s' * (self.num_replicas > 1)} of " + describe_stages(self, grid)


def _devices(num_replicas: int, per_replica: int, devices: Sequence[str] | None) -> list[str]:
    """Return the devices of a grid: the given ones, or the first ones of this machine."""
    existing, number = cluster.resolve_devices(devices), num_replicas * per_replica
    if len(existing) < number or (devices is not None and len(existing) != number):
        grids = [
            f"{len(existing) // size} x {size}" for size in range(1, len(existing) + 1) if not len(existing) % size
        ]
        raise ValueError(
            f"Hybrid needs a device for each of {num_replicas} replicas x {per_replica} devices of the pipeline, "
            f"{number} in all, received {len(existing)}: {existing}. Grids that fit are {', '.join(grids)}; without "
            "GPUs, tfpar.use_logical_cpus(n) makes n devices."
        )
    cluster.check_one_kind("Hybrid", existing[:number])
    return existing[:number]
