"""Replicas of a pipeline: a grid of replicas and stages on the devices of this machine, or of every worker of a job."""

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
    """Train a model in stages on several replicas of a pipeline, equal to one device.

                   stage 0     stage 1
        replica 0  device 0 ─► device 1     the first half of every global batch
        replica 1  device 2 ─► device 3     the second half

    Every global batch is divided over the replicas, and each runs the schedule of the pipeline on the micro-batches of
    its share. The gradients of a stage are summed over the replicas as soon as its last backward pass has run on each,
    and one update follows. Each weight belongs to one device of the process, which holds its optimizer state and
    updates it; the other replicas copy the weight at the beginning of a step.

    In a job of several workers (TF_CONFIG or Slurm, as for `MultiWorker`) every worker has such a grid on its own
    devices. The gradients of each stage are all-reduced over the workers.

    Of a pipeline with `across_workers=True`, one grid is on the devices of all workers, as many of each: the first
    process runs the steps. Each worker has the stages of a replica, or the replicas of a stage, whichever lets fewer
    bytes cross between workers; `preview` says which.

    Of a pipeline with `num_shards`, the grid has replicas x stages x shards; the devices of a stage are consecutive.

    Of a `TensorParallel`, each replica has the shards of every layer on its own devices, and a part of every global
    batch as its one micro-batch.

    Args:
        pipeline: The pipeline of each replica; `num_microbatches` are those of one replica. Or a `TensorParallel`.
        num_replicas: Number of replicas in each process; with `across_workers`, in all processes together.
        devices: Device names, those of the first replica first, with `across_workers` after the rank of their worker,
            such as `"1/GPU:0"`; None takes as many as the grid needs.
        all_reduce: How gradients are summed over workers: `"ring"`, on GPUs `"nccl"`, or `"auto"`.
        form_seconds: The time limit for all workers to connect.
        shard: `"optimizer"` divides the optimizer's state of each stage over the workers too; None divides it over the
            replicas of a process only, which has no cost.
        silence_seconds: The time without a heartbeat after which a worker counts as failed. A pipeline with
            `across_workers` has both time limits of its own.

    Raises:
        TypeError: If `pipeline` is neither a `Pipeline` nor a `TensorParallel`.
        ValueError: If the grid does not fit the devices, or TF_CONFIG is malformed.
        RuntimeError: If there are several workers, and TensorFlow has started already.
        TimeoutError: If a worker does not connect in time; the message names its address.

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
        self._lent = pipeline.lent if isinstance(pipeline, Pipeline) else None
        if isinstance(pipeline, Pipeline) and self._lent is not None:
            _check_all_reduce(all_reduce)
            orders = grid_devices.across_workers(num_replicas, pipeline.schedule.num_devices, self._lent, names)
            assert pipeline.watch is not None
            job = Job(self._lent.addresses[:1], reported=pipeline.watch.reported)
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
        """Say in one line which devices run what."""
        if self._lent is not None:
            return f"Hybrid of {self.layout.describe(self._lent_devices(self._lent))}"
        of_worker = dataclasses.replace(self.layout, num_replicas=self.num_replicas, num_workers=1)
        grid = of_worker.describe(of_worker.labels(self.device_names))
        if self.num_workers == 1:
            return f"Hybrid of {grid}"
        return f"Hybrid over {self.num_workers} workers; this is worker {self.rank}, {grid}"

    def _lent_devices(self, lent: grid_devices.LentDevices) -> list[str]:
        """Return the devices of each worker: their order in the grid depends on the model."""
        used = [[device for device in devices if device in self.devices] for devices in lent.of_workers]
        names = [
            [remote_devices.label(device).rpartition(" ")[::2] for device in devices] for devices in used if devices
        ]
        return [f"{of_worker[0][0]} {' '.join(device for _, device in of_worker)}" for of_worker in names]


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
