"""Pipeline parallelism: consecutive layers on different devices, which process every batch in micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from tfpar import cluster
from tfpar.cluster import tf_config
from tfpar.job import Job
from tfpar.layout import Layout, ScheduleName, check_count
from tfpar.messages import keyword_arguments
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.partition.partitioner import Balance, check_balance
from tfpar.sharding.rules import Rules, check_rules
from tfpar.strategies import grid_devices, remote_devices
from tfpar.strategies.job_roles import refuse_evaluator
from tfpar.strategies.lost_workers import check_seconds
from tfpar.strategies.staged import Settings, Staged
from tfpar.strategies.worker_watch import WorkerWatch

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


class Pipeline(Staged):
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
        self.layout = Layout(
            1, num_stages, num_microbatches, schedule, recompute, None, num_shards, across_workers=across_workers
        )
        if memory_limit_bytes is not None:
            check_count("memory_limit_bytes", memory_limit_bytes)
        check_balance(balance, num_stages)
        _check_shards(num_shards, layout, memory_limit_bytes, across_workers=across_workers)
        job = tf_config.from_environment(os.environ)
        rules = check_rules(layout)
        settings = Settings(balance, recompute, memory_limit_bytes, allow_batch_dependent_layers, num_shards, rules)
        self.given_devices: list[str] | None = None
        self.lent: grid_devices.LentDevices | None = None
        self.watch: WorkerWatch | None = None
        self._misfit: ValueError | None = None
        if across_workers:
            self.given_devices = None if devices is None else grid_devices.listed(devices)
            number = None if devices is None else len(devices)
            order = schedules.make(schedule, num_stages, num_microbatches, number)
            self.layout = dataclasses.replace(self.layout, stages_per_device=num_stages // order.num_devices)
            check_seconds(form_seconds, silence_seconds)
            self.lent, self.watch = _lent_devices(job, form_seconds, silence_seconds)
            self.job = Job(reported=self.watch.reported)
            super().__init__(settings, order, self._devices_across(order.num_devices, devices))
            return
        # The workers of a job connect before TensorFlow starts, in Hybrid, which takes this pipeline.
        resolve = cluster.configured_devices if job and job.num_workers > 1 else cluster.resolve_devices
        self.given_devices = chosen = None if devices is None else resolve(devices)
        groups = None if chosen is None else _num_groups(chosen, num_shards)
        order = schedules.make(schedule, num_stages, num_microbatches, groups)
        self.layout = dataclasses.replace(self.layout, stages_per_device=num_stages // order.num_devices)
        super().__init__(settings, order, _devices(order, resolve(None), num_shards) if chosen is None else chosen)

    def describe(self) -> str:
        """Say in one line which devices run what."""
        return f"Pipeline of {self.layout.describe(self.device_names)}"

    def _devices_across(self, number: int, devices: Sequence[str] | None) -> list[str]:
        assert self.lent is not None
        try:
            (found,) = grid_devices.across_workers(1, number, self.lent, devices)
        except ValueError as error:
            if devices is not None:
                raise
            self._misfit = error  # replicas of it may fit
            found = [device for of_one in self.lent.of_workers for device in of_one][:number]
        return found

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model is created.

        Raises:
            ValueError: If the workers cannot share the stages.
        """
        if self._misfit is not None:
            raise self._misfit
        return super().creation_scope()

    @property
    def device_names(self) -> list[str]:
        """The devices of the pipeline; those of other workers with their rank."""
        return list(map(remote_devices.label, self.devices))


def _lent_devices(
    job: tf_config.JobConfig | None, form_seconds: float, silence_seconds: float
) -> tuple[grid_devices.LentDevices, WorkerWatch]:
    """Return the devices of all workers of a job, and the watch over the workers.

    In other processes than the chief it does not return.
    """
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
