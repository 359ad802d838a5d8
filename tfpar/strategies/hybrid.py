"""Replicas of a pipeline: a grid of replicas, stages and shards on this machine or across workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfpar.engines.stages.stage_engine import StageEngine
from tfpar.engines.workers.collectives import AllReduce
from tfpar.engines.workers.worker import config_of_job
from tfpar.engines.workers.worker_stages import WorkerStages
from tfpar.job import Job
from tfpar.layout import check_count, check_shard
from tfpar.messages import keyword_arguments
from tfpar.messages.received import excerpt
from tfpar.strategies import grid_devices
from tfpar.strategies.base import Strategy
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.tensor_parallel import TensorParallel
from tfpar.workers import preflight, remote_devices


class Hybrid(Strategy):
    """Data parallelism over replicas that are pipelines or tensor-parallel, with the results of one device.

                   stage 0     stage 1
        replica 0  device 0 ─► device 1     first half of every global batch
        replica 1  device 2 ─► device 3     second half

    Each replica runs the pipeline's schedule on the micro-batches of its per-replica batch. The gradients of a stage
    are summed over the replicas once all of them have finished its last backward pass, and one update follows. Each
    weight is owned by one device of the process, which holds its optimizer state and updates it; the other replicas
    copy the weight at the beginning of a step.

    In a job of several workers (TF_CONFIG or Slurm, as for `MultiWorker`), every worker has such a grid on its own
    devices, and the gradients of each stage are all-reduced over the workers.

    The grid depends on the first argument:

    - A pipeline with `across_workers=True`: a single grid spans the workers, with the same number of devices on each,
      and the first process runs the steps. A worker holds all stages of some replicas or all replicas of some stages,
      whichever sends fewer bytes between workers; `preview` shows the choice.
    - A pipeline with `num_shards`: replicas x stages x shards, with consecutive devices for the shards of a stage.
    - A `TensorParallel`: each replica divides every layer over its devices and computes its per-replica batch at once.

    Args:
        pipeline: The `Pipeline` or `TensorParallel` of each replica; `num_microbatches` counts per replica.
        num_replicas: Number of replicas per process; with `across_workers`, of all processes together.
        devices: Device names by replica; with `across_workers`, each after the rank of its worker, such as
            `"1/GPU:0"`. None uses as many devices as the grid needs.
        all_reduce: Algorithm that sums gradients over workers: `"ring"`, `"nccl"` (GPUs only), or `"auto"`.
        form_seconds: Time limit for all workers to connect.
        shard: `"optimizer"` shards the optimizer state of each stage over the workers too. None shards it over the
            replicas of each process only, at no cost.
        silence_seconds: Time without a heartbeat after which a worker counts as failed. Pipelines with
            `across_workers` set both time limits themselves.

    Raises:
        TypeError: If `pipeline` is neither a `Pipeline` nor a `TensorParallel`.
        ValueError: If the grid does not fit the devices, or TF_CONFIG is malformed.
        RuntimeError: If there are several workers and TensorFlow has already started.
        TimeoutError: If a worker does not connect in time; the message contains its address.

    Example:
        >>> tfpar.use_logical_cpus(4)
        >>> strategy = tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)
        >>> trainer = tfpar.Trainer(build_model, strategy)
    """

    @keyword_arguments.named
    def __init__(
        self,
        pipeline: Pipeline | TensorParallel,
        num_replicas: int = 1,
        devices: Sequence[str] | None = None,
        *,
        all_reduce: AllReduce = "auto",
        shard: Literal["optimizer"] | None = None,
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        _check(pipeline, num_replicas)
        check_shard(shard, ("optimizer",))
        preflight.check_options(all_reduce, None, None, form_seconds, silence_seconds)
        layout = dataclasses.replace(pipeline.layout, num_replicas=num_replicas, shard=shard)
        schedule = pipeline.schedule.replicated(num_replicas)
        names = pipeline.given_devices if devices is None else devices
        self._workers = pipeline.workers if isinstance(pipeline, Pipeline) else None
        if isinstance(pipeline, Pipeline) and self._workers is not None:
            _check_all_reduce(all_reduce)
            orders = grid_devices.across_workers(num_replicas, pipeline.schedule.num_devices, self._workers, names)
            assert pipeline.watch is not None
            job = Job(self._workers.addresses[:1], reported=pipeline.watch.reported)
            engine = StageEngine(pipeline.settings, schedule, orders[0], other_orders=orders[1:], job=job)
            super().__init__(layout, engine)
            return
        config = config_of_job("Hybrid")
        is_alone = config is None or config.num_workers == 1
        used = grid_devices.on_this_machine(num_replicas, layout.devices_per_replica, names, starts=is_alone)
        if config is None or is_alone:
            super().__init__(layout, StageEngine(pipeline.settings, schedule, used))
            return
        name = preflight.named("Hybrid", shard)
        formed = preflight.form_cluster(config, used, form_seconds, silence_seconds, name)
        engine = WorkerStages(pipeline.settings, schedule, used, config, formed, all_reduce, shard)
        num_workers = config.num_workers
        super().__init__(
            dataclasses.replace(layout, num_replicas=num_replicas * num_workers, num_workers=num_workers), engine
        )

    def describe(self) -> str:
        """Return a one-line description of the grid and its devices."""
        if self._workers is not None:
            return f"Hybrid of {self.layout.describe(self._labels_by_worker(self._workers))}"
        own_layout = dataclasses.replace(self.layout, num_replicas=self.num_replicas, num_workers=1)
        grid = own_layout.describe(own_layout.labels(self.device_names))
        if self.num_workers == 1:
            return f"Hybrid of {grid}"
        return f"Hybrid over {self.num_workers} workers; this is worker {self.rank}, {grid}"

    def _labels_by_worker(self, workers: grid_devices.WorkerDevices) -> list[str]:
        """Label the devices by worker; their order in the grid depends on the model."""
        used = [[device for device in devices if device in self.devices] for devices in workers.by_worker]
        pairs = [
            [remote_devices.label(device).rpartition(" ")[::2] for device in devices] for devices in used if devices
        ]
        return [f"{labels[0][0]} {' '.join(name for _, name in labels)}" for labels in pairs]


def _check_all_reduce(all_reduce: AllReduce) -> None:
    if all_reduce != "auto":
        raise ValueError(
            f"all_reduce is for workers with whole pipelines, received {all_reduce!r} with across_workers=True: the "
            "gradients of a weight are added on its device. Leave it out."
        )


def _check(pipeline: Pipeline | TensorParallel, num_replicas: int) -> None:
    if not isinstance(pipeline, Pipeline | TensorParallel):
        raise TypeError(
            f"pipeline must be a tfpar.Pipeline or tfpar.TensorParallel, received {excerpt(repr(pipeline))}. Write "
            "tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)."
        )
    check_count("num_replicas", num_replicas)
    if pipeline.given_devices is not None and num_replicas > 1:
        raise ValueError(
            f"The devices of all replicas are an argument of Hybrid, received devices={pipeline.given_devices} of its "
            "first argument. Leave them out there, and give devices to Hybrid."
        )
