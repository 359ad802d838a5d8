"""Pipeline parallelism: consecutive layers on different devices, which process every batch in micro-batches."""

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
    """Return a constructor that proposes a number; it is no default, as BatchNormalization depends on it."""

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
    """Train a model in stages on several devices of this machine, equal to one device.

        device 0   F0 F1 F2    B0 F3 B1 …        F: a micro-batch forward through the layers of this stage
        device 1      F0 B0 F1 B1 F2 B2 …        B: its gradient back through them

    The model function is the one for a single device. Its layers are divided into `num_stages` stages; each device
    holds the weights and the optimizer's state of its own stage only. Every global batch is cut into
    `num_microbatches`, so that the devices work at the same time; the losses are divided by the whole batch and the
    gradients of all micro-batches summed before the one update, so that the weights are those of one device. Two layers
    differ: BatchNormalization takes its statistics from each micro-batch, and Dropout draws other masks.

    Args:
        num_stages: Number of stages.
        num_microbatches: Number of micro-batches of a global batch; four for each stage is a good start. With one, the
            devices work in turn.
        schedule: "gpipe", "1f1b", "interleaved" (several stages a device) or "zero_bubble".
        balance: The measure to minimize for the slowest stage: "time" (measured), "flops", "parameters" or
            "memory"; or the number of layers of each stage; or the names of the layers to cut before.
        devices: Device names such as `["GPU:0", "GPU:1"]`, with `across_workers` after the rank of their worker, such
            as `"1/GPU:0"`; None takes as many as the schedule needs.
        recompute: Save only the inputs of a stage, and repeat its forward pass in the backward pass: less memory for
            about a third more time.
        num_shards: Number of devices of each stage, which divide its layers as `TensorParallel` does.
        layout: With `num_shards`, rules for the weights to divide, as for `TensorParallel`; None divides all large
            layers.
        memory_limit_bytes: The limit for weights, gradients, optimizer state and activations on each device. With
            None, stages on GPUs are cut for their free memory, with a warning if it does not suffice by estimate.
        allow_batch_dependent_layers: Also train layers that mix the examples of a batch, although micro-batches change
            their outputs.

        across_workers: In a job of several workers (TF_CONFIG or Slurm), divide the stages over all of them: the first
            process runs the steps, and the others lend their devices until it ends.
        form_seconds: With `across_workers`, the time limit for all workers to connect.
        silence_seconds: With `across_workers`, the time without a heartbeat after which a worker counts as failed.

    Raises:
        TypeError: If there is no number of micro-batches.
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
        self.lent: grid_devices.LentDevices | None = None
        self.watch: WorkerWatch | None = None
        if across_workers:
            check_seconds(form_seconds, silence_seconds)
            engine = self._across_workers(grid, devices, form_seconds, silence_seconds)
        else:
            engine = self._in_this_process(grid, devices)
        stages_per_device = num_stages // self.schedule.num_devices
        super().__init__(dataclasses.replace(grid, stages_per_device=stages_per_device), engine)

    def _in_this_process(self, grid: Layout, devices: Sequence[str] | None) -> StageEngine:
        # The workers of a job connect before TensorFlow starts, in Hybrid, which takes this pipeline.
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
        self.lent, self.watch = _lent_devices(form_seconds, silence_seconds)
        misfit = None
        try:
            (used,) = grid_devices.across_workers(1, self.schedule.num_devices, self.lent, devices)
        except ValueError as error:
            if devices is not None:
                raise
            misfit = error  # replicas of it may fit
            used = [device for of_worker in self.lent.of_workers for device in of_worker][: self.schedule.num_devices]
        job = Job(reported=self.watch.reported)
        return StageEngine(self.settings, self.schedule, used, job=job, misfit=misfit)


def _lent_devices(form_seconds: float, silence_seconds: float) -> tuple[grid_devices.LentDevices, WorkerWatch]:
    """Return the devices of all workers of a job, and the watch over the workers.

    In other processes than the chief it does not return.
    """
    job = tf_config.from_environment(os.environ)
    refuse_evaluator(job, "Pipeline(across_workers=True)")
    if job is None or job.num_workers == 1:
        raise ValueError(
            "across_workers=True is for a job of several workers, and TF_CONFIG describes none. Start the script with "
            "python -m tfpar.launch --num_workers 2, or leave it out."
        )
    connected = remote_devices.connect(job, form_seconds, silence_seconds, "Pipeline(across_workers=True)")
    return grid_devices.LentDevices(job.addresses, connected.of_workers), connected.watch


def _check_shards(
    num_shards: int, layout: Rules | None, memory_limit_bytes: int | None, *, across_workers: bool
) -> None:
    """Refuse arguments that do not fit stages of several devices, or those that need them."""
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
    """Return the number of stages at a time, each on a group of devices."""
    if len(devices) % num_shards:
        raise ValueError(
            f"Each stage needs num_shards={num_shards} devices, received {len(devices)} devices: {list(devices)}. Name "
            f"a multiple of {num_shards}."
        )
    return len(devices) // num_shards


def _devices(schedule: schedules.Schedule, existing: list[str], num_shards: int) -> list[str]:
    """Return the first devices of this machine, as many as a schedule needs."""
    number = schedule.num_devices * num_shards
    if len(existing) < number:
        shards = f" of {num_shards} shards" * (num_shards > 1)
        raise ValueError(
            f"{schedule.num_stages} stages{shards} under {schedule.name!r} need {number} devices, and there are "
            f"{len(existing)}: {existing}. Use fewer stages.{cluster.more_devices(number, existing)}"
        )
    return existing[:number]
