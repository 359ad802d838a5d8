"""Pipeline parallelism: stages of consecutive layers on different devices, fed with micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import ParamSpec

from tfpar import cluster
from tfpar.cluster import tf_config
from tfpar.engines.stages.stage_engine import Settings, StageEngine
from tfpar.job import Job
from tfpar.layout import Layout, ScheduleName, check_count
from tfpar.messages import keyword_arguments
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.partition.partitioner import Balance, check_balance
from tfpar.sharding.rules import Rules, check_rules
from tfpar.strategies import grid_devices
from tfpar.strategies.base import Strategy
from tfpar.workers import remote_devices
from tfpar.workers.job_roles import refuse_evaluator
from tfpar.workers.lost_workers import check_seconds
from tfpar.workers.worker_watch import WorkerWatch

Parameters = ParamSpec("Parameters")


def _proposing_microbatches(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Make a missing `num_microbatches` an error that proposes a value; BatchNormalization forbids a default."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        received = {**dict(zip(("self", "num_stages", "num_microbatches"), args, strict=False)), **kwargs}
        if "num_microbatches" not in received:
            num_stages = received.get("num_stages", 2)
            number = 4 * num_stages if isinstance(num_stages, int) and num_stages > 0 else 8
            raise TypeError(
                "Pipeline needs num_microbatches, into which it cuts each batch so that the stages work at the same "
                f"time. Write Pipeline({num_stages}, num_microbatches={number}): with four for each stage the devices "
                "wait for less than a fifth of a step."
            )
        function(*args, **kwargs)

    return call


class Pipeline(Strategy):
    """Pipeline parallelism: a model divided into stages on several devices, with the results of one device.

        device 0   F0 F1 F2    B0 F3 B1 …        F: forward pass of a micro-batch through the layers of the stage
        device 1      F0 B0 F1 B1 F2 B2 …        B: its backward pass

    The model function is that of a single device. Its layers are divided into `num_stages` stages, and each device
    holds the weights and optimizer state of its own stages. Every global batch is split into `num_microbatches`
    micro-batches, so that the devices work at the same time. One update follows with the gradients of all of them.
    Two layers differ from one device: BatchNormalization normalizes each micro-batch by its own statistics, and Dropout
    uses other random masks.

    Args:
        num_stages: Number of stages.
        num_microbatches: Micro-batches per global batch; start with four per stage. With one, only one device works at
            a time.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"` (several stages per device) or `"zero_bubble"`.
        balance: What is balanced over the stages: `"time"` (measured), `"flops"`, `"parameters"` or `"memory"`.
            Alternatively, the number of layers of each stage, or the name of the first layer of each stage but the
            first.
        devices: Device names such as `["GPU:0", "GPU:1"]`; with `across_workers`, each after the rank of its worker,
            such as `"1/GPU:0"`. None uses as many devices as the schedule needs.
        recompute: Save only the inputs of a stage and repeat its forward pass in the backward pass, which saves memory
            and takes about a third more time.
        num_shards: Devices per stage, over which its layers are divided as in `TensorParallel`.
        layout: With `num_shards`, sharding rules as for `TensorParallel`; None divides all large layers.
        memory_limit_bytes: Limit for weights, gradients, optimizer state and activations on each device. None fits
            stages on GPUs to the free memory, with a warning if the estimate exceeds it.
        allow_batch_dependent_layers: Accept layers whose output for an example depends on the other examples, although
            micro-batches change their results.
        across_workers: In a job of several workers (TF_CONFIG or Slurm), divide the stages over all workers. The first
            process runs the steps on the devices of all; the other processes only wait until it ends.
        form_seconds: Time limit for all workers to connect, with `across_workers`.
        silence_seconds: Time without a heartbeat after which a worker counts as failed, with `across_workers`.

    Raises:
        TypeError: If `num_microbatches` is missing.
        ValueError: If the schedule does not fit, or a device does not exist.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> trainer = tfpar.Trainer(build_model, tfpar.Pipeline(num_stages=2, num_microbatches=8))
    """

    @keyword_arguments.named
    @_proposing_microbatches
    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        schedule: ScheduleName = "1f1b",
        balance: Balance | Sequence[int] | Sequence[str] = "time",
        devices: Sequence[str] | None = None,
        recompute: bool = False,
        *,
        num_shards: int = 1,
        layout: Rules | None = None,
        memory_limit_bytes: int | None = None,
        allow_batch_dependent_layers: bool = False,
        across_workers: bool = False,
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        grid = Layout(1, num_stages, num_microbatches, schedule, recompute, None, num_shards, 1, across_workers)
        if memory_limit_bytes is not None:
            check_count("memory_limit_bytes", memory_limit_bytes)
        check_balance(balance, num_stages)
        _check_shards(num_shards, layout, memory_limit_bytes, across_workers=across_workers)
        self.settings = Settings(
            balance, recompute, memory_limit_bytes, allow_batch_dependent_layers, num_shards, check_rules(layout)
        )
        self.workers: grid_devices.WorkerDevices | None = None
        self.watch: WorkerWatch | None = None
        if across_workers:
            check_seconds(form_seconds, silence_seconds)
            engine = self._across_workers(grid, devices, form_seconds, silence_seconds)
        else:
            engine = self._in_this_process(grid, devices)
        stages_per_device = num_stages // self.schedule.num_devices
        super().__init__(dataclasses.replace(grid, stages_per_device=stages_per_device), engine)

    def _in_this_process(self, grid: Layout, devices: Sequence[str] | None) -> StageEngine:
        # In a job, Hybrid takes this pipeline and connects the workers, before TensorFlow may start.
        has_others = tf_config.has_other_workers(os.environ)
        resolve = cluster.configured_devices if has_others else cluster.resolve_devices
        names = self.given_devices = None if devices is None else resolve(devices)
        groups = None if names is None else _num_groups(names, grid.num_shards)
        self.schedule = schedules.make(grid.schedule, grid.num_stages, grid.num_microbatches, groups)
        used = _devices(self.schedule, resolve(None), grid.num_shards) if names is None else names
        return StageEngine(self.settings, self.schedule, used)

    def _across_workers(
        self, grid: Layout, devices: Sequence[str] | None, form_seconds: float, silence_seconds: float
    ) -> StageEngine:
        self.given_devices = None if devices is None else grid_devices.listed(devices)
        number = None if devices is None else len(devices)
        self.schedule = schedules.make(grid.schedule, grid.num_stages, grid.num_microbatches, number)
        self.workers, self.watch = _connected_workers(form_seconds, silence_seconds)
        misfit = None
        try:
            (used,) = grid_devices.across_workers(1, self.schedule.num_devices, self.workers, devices)
        except ValueError as error:
            if devices is not None:
                raise
            misfit = error  # Hybrid may fit replicas of this pipeline
            used = [device for names in self.workers.by_worker for device in names][: self.schedule.num_devices]
        job = Job(reported=self.watch.reported)
        return StageEngine(self.settings, self.schedule, used, job=job, misfit=misfit)


def _connected_workers(form_seconds: float, silence_seconds: float) -> tuple[grid_devices.WorkerDevices, WorkerWatch]:
    """Connect to the workers of a job and return their devices; returns on the chief only."""
    job = tf_config.from_environment(os.environ)
    refuse_evaluator(job, "Pipeline(across_workers=True)")
    if job is None or job.num_workers == 1:
        raise ValueError(
            "across_workers=True is for a job of several workers, and TF_CONFIG describes none. Start the script with "
            "python -m tfpar.launch --num_workers 2, or leave it out."
        )
    connected = remote_devices.connect(job, form_seconds, silence_seconds, "Pipeline(across_workers=True)")
    return grid_devices.WorkerDevices(job.addresses, connected.of_workers), connected.watch


def _check_shards(
    num_shards: int, layout: Rules | None, memory_limit_bytes: int | None, *, across_workers: bool
) -> None:
    if layout is not None and num_shards == 1:
        raise ValueError(
            "layout divides the weights of a stage over its devices, received rules and num_shards=1. Set num_shards, "
            "or leave layout out."
        )
    if num_shards > 1 and (across_workers or memory_limit_bytes is not None):
        name = "across_workers" if across_workers else "memory_limit_bytes"
        raise ValueError(
            f"{name} is for stages on one device each, received num_shards={num_shards}. Leave out one of the two."
        )


def _num_groups(devices: Sequence[str], num_shards: int) -> int:
    """Return the number of groups of `num_shards` devices."""
    if len(devices) % num_shards:
        raise ValueError(
            f"Each stage needs num_shards={num_shards} devices, received {len(devices)} devices: {list(devices)}. Name "
            f"a multiple of {num_shards}."
        )
    return len(devices) // num_shards


def _devices(schedule: schedules.Schedule, existing: list[str], num_shards: int) -> list[str]:
    number = schedule.num_devices * num_shards
    if len(existing) < number:
        shards = f" of {num_shards} shards" * (num_shards > 1)
        raise ValueError(
            f"{schedule.num_stages} stages{shards} under {schedule.name!r} need {number} devices, and there are "
            f"{len(existing)}: {existing}. Use fewer stages.{cluster.more_devices(number, existing)}"
        )
    return existing[:number]
