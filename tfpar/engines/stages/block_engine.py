"""Sharded weights: each weight is on one device, and the others copy the weights of a block while they use them.

    device 0   w0 of device 1 ─► F0   w1 ─► F1   …   w1 ─► B1   w0 ─► B0      F, B: a block forward and backward
    device 1   w0             ─► F0   w1 of device 0 ─► F1  …                 on the per-replica batch

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. The blocks of a model are its stages, and each
replica runs all of them on its device. The gradients of a block are summed on the devices of its weights, which hold
the optimizer state and compute the update.
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
from tfpar.recomputation.choice import Recompute
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
    """The engine of `tfpar.Mirrored` and `tfpar.MultiWorker` with `shard="weights"`.

    Args:
        devices: Devices of the replicas; full names for several workers.
        watch: Detects the loss of a worker; None for devices of this machine.
        recompute: The layers to recompute.
    """

    def __init__(self, devices: Sequence[str], watch: WorkerWatch | None = None, recompute: Recompute = False) -> None:
        settings = Settings(strategy='shard="weights"', words=_WORDS, has_schedule=False, recompute=recompute)
        schedule = schedules.on_one_device(1).replicated(len(devices))
        job = Job(reported=None if watch is None else watch.reported)
        super().__init__(settings, schedule, devices, job=job, shards_weights=True)

    @property
    def batch_parts(self) -> tuple[int, str]:
        """Number of replicas, and their noun."""
        return self.num_replicas, "replica"

    def preview(self, model: keras.Model, batch: Any, title: str) -> Preview:
        """Return a preview of a step, with a row per device: its own weights and copies of two blocks."""
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

        def local(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
            return [variable for variable in variables if keras_variables.is_on(variable, full_name)]

        gradient_bytes = sum(map(num_bytes, local(model.trainable_variables)))
        variables = [*local(model.variables), *local(model.optimizer.variables)]
        return ReplicaRow(
            device=remote_devices.label(device),
            num_examples=-(-int(data.num_rows(batch)) // self.num_replicas),
            num_parameters=sum(int(weight.value.shape.num_elements()) for weight in local(model.variables)),
            state_bytes=sum(map(num_bytes, variables)) + gradient_bytes + block_bytes,
            gradient_bytes=sum(map(num_bytes, model.trainable_variables)),
        )


class DevicesOfWorkers(NamedTuple):
    """The devices of all workers of a job, which the first process uses.

    Args:
        names: Device names; full names for several workers.
        num_workers: Number of workers.
        watch: Detects the loss of a worker; None for a single worker.
    """

    names: list[str]
    num_workers: int = 1
    watch: WorkerWatch | None = None


def devices_of_workers(devices: Sequence[str] | None, form_seconds: float, silence_seconds: float) -> DevicesOfWorkers:
    """Connect to the workers of a job and return their devices; without a job, those of this machine.

    In a job, it returns in the first process only.

    Args:
        devices: Devices of each worker, such as `["GPU:0"]`; None for all.
        form_seconds: Time limit for all workers to connect.
        silence_seconds: Time without a heartbeat after which a worker counts as failed.

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
        for worker_devices in connected.of_workers
        for device in worker_devices
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
    """Raise ValueError if an argument that has no effect with `shard="weights"` is not its default.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        default: Default of the argument.
    """
    if value != default:
        raise ValueError(
            f"{name} is for replicas with whole weights, received {name}={value!r} with shard='weights'. Leave it out, "
            "or use shard='optimizer'."
        )
