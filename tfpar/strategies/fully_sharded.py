"""Sharded weights: each weight on one device, and copies of a block's weights on every device while they are in use.

    device 0   w0 of device 1 ─► F0   w1 ─► F1   …   w1 ─► B1   w0 ─► B0      F, B: a block forward and backward
    device 1   w0             ─► F0   w1 of device 0 ─► F1  …                 on the examples of this replica

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. The blocks of a model are its stages, all on
the device of a replica. The gradients of a block are summed on the devices of its weights, which hold the optimizer's
state and compute the update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfpar import cluster, data
from tfpar._compat import keras_variables
from tfpar.cluster import tf_config
from tfpar.job import Job
from tfpar.layout import Layout
from tfpar.messages.number_format import three_digits
from tfpar.messages.reasons import message_of
from tfpar.pipeline import schedule as schedules
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies import remote_devices
from tfpar.strategies.job_roles import refuse_evaluator, warn_of_other_launcher
from tfpar.strategies.lost_workers import check_seconds
from tfpar.strategies.preview import Preview, ReplicaRow, replicas_table
from tfpar.strategies.staged import ADVICE_OF_PIPELINES, Settings, Staged
from tfpar.strategies.worker_watch import WorkerWatch

_EXPLANATION = 'shard="weights" runs a model in blocks, as a pipeline with one micro-batch for each replica. {error}'
_WAY_OUT = ' Or train with shard="optimizer".'
# In place of the settings that a pipeline has and replicas have not.
_WAYS_OUT_OF_REPLICAS = {
    "; ": '; train with shard="optimizer" and batch_dependent_layers="gather", or on SingleDevice()',
    ", ": ", or train on SingleDevice()",
}


class FullySharded(Staged):
    """Data parallelism with `shard="weights"`; see `tfpar.Mirrored` and `tfpar.MultiWorker`.

    Args:
        devices: The devices of the replicas; those of several workers with full names.
        title: The beginning of the description.
        watch: Notices the loss of a worker; None for devices of this machine.

    Example:
        >>> tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights").describe()
        'Mirrored over 2 replicas on CPU:0, CPU:1, weights sharded'
    """

    has_schedule = False

    def __init__(self, devices: Sequence[str], title: str = "Mirrored over", watch: WorkerWatch | None = None) -> None:
        self._title, self.layout = title, Layout(len(devices), shard="weights")
        self.job = _ExplainingJob(reported=None if watch is None else watch.reported)
        schedule = schedules.on_one_device(1).replicated(len(devices))
        super().__init__(Settings(), schedule, devices, shards_weights=True)

    def describe(self) -> str:
        """Return one line with the devices of the replicas."""
        return f"{self._title} {self.layout.describe(self.device_names)}"

    @property
    def device_names(self) -> list[str]:
        """The devices of the replicas; those of several workers with their rank."""
        return list(map(remote_devices.label, self.devices))

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of replicas, and their noun."""
        return self.num_replicas, "replica"

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return a preview of a step: a row for each device, with the weights that it holds and those of two blocks."""
        self._prepared(model)
        blocks = [sum(cost.weight_bytes for cost in costs) for costs in self._planner.partition_of(model).stage_costs]
        rows = tuple(self._row(model, device, batch, sum(sorted(blocks)[-2:])) for device in self.devices)
        copied_bytes = 2 * sum(map(num_bytes, model.variables)) * (self.num_replicas - 1) // self.num_replicas
        title = f"{self.describe()}, in {len(blocks)} block{'s' * (len(blocks) > 1)}"
        table = replicas_table(title, rows, self.num_replicas)
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


class _ExplainingJob(Job):
    """The job of a process that uses all devices, whose errors about stages say what they are here."""

    def vote(self, what: str | None = None) -> contextlib.AbstractContextManager[None]:
        return _explained()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        with _explained(), super().reported():
            yield


def over_workers(devices: Sequence[str] | None, form_seconds: float, silence_seconds: float) -> FullySharded:
    """Return the strategy on the devices of all workers of a job: the first process runs the steps on all of them.

    In other processes it does not return. Without a job it is on the devices of this machine.

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
        return FullySharded(cluster.resolve_devices(devices), "MultiWorker over 1 worker,")
    connected = remote_devices.connect(job, form_seconds, silence_seconds, "MultiWorker(shard='weights')")
    names = None if devices is None else [name.upper() for name in devices]
    found = [
        device
        for of_one in connected.of_workers
        for device in of_one
        if names is None or remote_devices.label(device).rpartition(" ")[2] in names
    ]
    if names is not None and len(found) < len(names) * job.num_workers:
        raise ValueError(
            f"Each worker must have the devices {list(names)}, received {list(map(remote_devices.label, found))}. Name "
            "devices that every worker has."
        )
    kinds = [remote_devices.label(device).rpartition(" ")[2] for device in found]
    cluster.check_one_kind("MultiWorker", kinds)
    return FullySharded(found, f"MultiWorker over {job.num_workers} workers,", connected.watch)


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


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        message = message_of(error)
        text = ADVICE_OF_PIPELINES.sub(lambda found: _WAYS_OUT_OF_REPLICAS[found[1]], message)
        if 'shard="weights"' not in text and any(word in text for word in ("pipeline", "micro-batch", "stages")):
            text = _EXPLANATION.format(error=text) + ("" if "shard=" in text or "stateful" in text else _WAY_OUT)
        if text == message:
            raise
        raise ValueError(text) from error
