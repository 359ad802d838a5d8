"""Sharded weights: each weight on one device, and copies of a block's weights on every device while they are in use.

    device 0   w0 of device 1 ─► F0   w1 ─► F1   …   w1 ─► B1   w0 ─► B0      F, B: a block forward and backward
    device 1   w0             ─► F0   w1 of device 0 ─► F1  …                 on the examples of this replica

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. The blocks of a model are its stages, all on
the device of a replica. The gradients of a block are summed on the devices of its weights, which hold the optimizer's
state and compute the update.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfpar import cluster, data
from tfpar._compat.variables import keras_variables
from tfpar.cluster import tf_config
from tfpar.engines.preview import Preview, ReplicaRow, replicas_table
from tfpar.engines.stages.stage_engine import Settings, StageEngine
from tfpar.job import Job
from tfpar.messages.number_format import three_digits
from tfpar.pipeline import schedule as schedules
from tfpar.placement.owners import num_bytes
from tfpar.study.outputs import Words
from tfpar.workers import remote_devices
from tfpar.workers.job_roles import refuse_evaluator, warn_of_other_launcher
from tfpar.workers.lost_workers import check_seconds
from tfpar.workers.worker_watch import WorkerWatch

_WORDS = Words(
    alone="train on SingleDevice()",
    mixing='train with shard="optimizer" and batch_dependent_layers="gather", or on SingleDevice()',
)


class BlockEngine(StageEngine):
    """Data parallelism with `shard="weights"`; see `tfpar.Mirrored` and `tfpar.MultiWorker`.

    Args:
        devices: The devices of the replicas; those of several workers with full names.
        watch: Notices the loss of a worker; None for devices of this machine.
    """

    def __init__(self, devices: Sequence[str], watch: WorkerWatch | None = None) -> None:
        settings = Settings(strategy='shard="weights"', words=_WORDS, has_schedule=False)
        schedule = schedules.on_one_device(1).replicated(len(devices))
        job = Job(reported=None if watch is None else watch.reported)
        super().__init__(settings, schedule, devices, job=job, shards_weights=True)

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of replicas, and their noun."""
        return self.num_replicas, "replica"

    def preview(self, model: keras.Model, batch: Any, title: str) -> Preview:
        """Return a preview of a step: a row for each device, with the weights that it holds and those of two blocks."""
        self._prepared(model)
        blocks = [sum(cost.weight_bytes for cost in costs) for costs in self._planner.partition_of(model).stage_costs]
        rows = tuple(self._row(model, device, batch, sum(sorted(blocks)[-2:])) for device in self.devices)
        copied_bytes = 2 * sum(map(num_bytes, model.variables)) * (self.num_replicas - 1) // self.num_replicas
        blocks_title = f"{title}, in {len(blocks)} block{'s' * (len(blocks) > 1)}"
        table = replicas_table(blocks_title, rows, self.num_replicas)
        weights = f"{three_digits(copied_bytes / 1e6)} MB of weights are copied to each device in every step"
        return Preview(f"{table}\n{weights}" if self.num_replicas > 1 else table, rows)

    def _row(self, model: keras.Model, device: str, batch: Any, block_bytes: int) -> ReplicaRow:
        full_name = device if device.startswith("/") else f"/device:{device}"

        def held(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
            return [variable for variable in variables if keras_variables.is_on(variable, full_name)]

        gradient_bytes = sum(map(num_bytes, held(model.trainable_variables)))
        variables = [*held(model.variables), *held(model.optimizer.variables)]
        return ReplicaRow(
            device=remote_devices.label(device),
            num_examples=-(-int(data.num_rows(batch)) // self.num_replicas),
            num_parameters=sum(int(weight.value.shape.num_elements()) for weight in held(model.variables)),
            state_bytes=sum(map(num_bytes, variables)) + gradient_bytes + block_bytes,
            gradient_bytes=sum(map(num_bytes, model.trainable_variables)),
        )


class DevicesOfWorkers(NamedTuple):
    """The devices of all workers of a job, of which the first process uses all.

    Args:
        names: Their names, full ones with several workers.
        num_workers: The number of workers.
        watch: Notices the loss of a worker; None for one.
    """

    names: list[str]
    num_workers: int = 1
    watch: WorkerWatch | None = None


def devices_of_workers(devices: Sequence[str] | None, form_seconds: float, silence_seconds: float) -> DevicesOfWorkers:
    """Connect to the workers of a job, and return their devices; without a job those of this machine.

    In other processes than the first it does not return.

    Args:
        devices: The devices of each worker, such as `["GPU:0"]`; None for all.
        form_seconds: The time limit for all workers to connect.
        silence_seconds: The time without a heartbeat after which a worker counts as failed.

    Raises:
        ValueError: If the workers have different kinds of devices, or this process is an evaluator.
    """
    job = tf_config.from_environment(os.environ)
    refuse_evaluator(job, "MultiWorker")
    if job is None:
        warn_of_other_launcher(os.environ)
    check_seconds(form_seconds, silence_seconds)
    if job is None or job.num_workers == 1:
        return DevicesOfWorkers(cluster.resolve_devices(devices))
    connected = remote_devices.connect(job, form_seconds, silence_seconds, "MultiWorker(shard='weights')")
    names = None if devices is None else [name.upper() for name in devices]
    used = [
        device
        for of_worker in connected.of_workers
        for device in of_worker
        if names is None or _name_in_worker(device) in names
    ]
    if names is not None and len(used) < len(names) * job.num_workers:
        raise ValueError(
            f"Each worker must have the devices {list(names)}, received {list(map(remote_devices.label, used))}. Name "
            "devices that every worker has."
        )
    cluster.check_one_kind("MultiWorker", list(map(_name_in_worker, used)))
    return DevicesOfWorkers(used, job.num_workers, connected.watch)


def _name_in_worker(device: str) -> str:
    return remote_devices.label(device).rpartition(" ")[2]


def check_without_effect(name: str, value: Any, default: Any) -> None:
    """Refuse a setting of replicas with whole weights.

    Args:
        name: Its name.
        value: Its value.
        default: Its default.

    Raises:
        ValueError: If the value is not the default.
    """
    if value != default:
        raise ValueError(
            f"{name} is for replicas with whole weights, received {name}={value!r} with shard='weights'. Leave it out, "
            "or use shard='optimizer'."
        )
