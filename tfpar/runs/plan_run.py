"""The plan of a run: the layouts of its configuration, measured with its own trainer and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar import cluster, config, data
from tfpar.cluster import cores
from tfpar.planning.history import has_equal_devices
from tfpar.planning.plan import Plan
from tfpar.planning.planner import planned
from tfpar.planning.stated import Stated
from tfpar.runs import run_data, stored_plans
from tfpar.runs.plan_files import with_strategy
from tfpar.runs.user_trainer import check_trainer, make_trainer
from tfpar.strategies import Strategy


def plan_of(run: config.Run, stated: Stated, num_logical_cpus: int, measured_layouts: int | None = None) -> Plan:
    """Measure the model and the data of a run, and rank the layouts in which it could train.

    Args:
        run: The run.
        stated: The devices and links to plan for.
        num_logical_cpus: Without GPUs: number of devices into which the CPU is split, before TensorFlow starts.
        measured_layouts: The largest number of layouts to measure, as for `planner.plan`.

    Returns:
        The plan.

    Raises:
        ValueError: If run, data and model do not fit together, or the data has no examples.
        MemoryError: If not even the smallest step fits in the memory of a device.
    """
    check_trainer(run)  # not before: a module of a user's own may start TensorFlow
    names = chosen_devices(run.strategy)
    num_logical_cpus = max(num_logical_cpus, *(_number_of_cpu(name) for name in names or ("CPU:0",)))
    if num_logical_cpus > 1 and not tf.config.list_physical_devices("GPU"):
        # Stages, and shards, run at the same time: each device uses an equal part of the cores.
        cluster.use_logical_cpus(num_logical_cpus, max(1, cores.num_allowed_cores() // num_logical_cpus))
    plain = with_strategy(run, {"kind": "single_device"})

    def make(strategy: Strategy) -> tuple[Any, Any]:
        trainer = make_trainer(plain, strategy)
        return trainer, run_data.training_batches(plain, trainer)

    plan = planned(make, names, stated, measured_layouts, lambda error: data.user_message(error, run.data))
    if _is_of_this_machine(stated, plan.machine.device, len(cluster.resolve_devices(names))):
        is_stated = stated != Stated() or measured_layouts is not None
        stored_plans.store(stored_plans.path_of(run, plan.machine.device, is_stated=is_stated), plan.to_json())
    return plan


def _is_of_this_machine(stated: Stated, device: str, num_there: int) -> bool:
    """Return whether runs of this machine have the stated devices, so that a plan predicts their steps.

    A stated memory changes what fits, and no step.
    """
    number = num_there if stated.num_devices is None else stated.num_devices
    if not stated.keeps_speed or stated.num_hosts > 1 or number > num_there:
        return False
    return has_equal_devices(device, num_there, number, cores.num_allowed_cores())


def _number_of_cpu(name: str) -> int:
    """Return the number of logical CPUs among which one of a name is."""
    return 1 + int(name.partition(":")[2]) if name.startswith("CPU:") else 1


def chosen_devices(strategy: config.Strategy) -> Sequence[str] | None:
    """Return the devices that a run names; None for all."""
    device = getattr(strategy, "device", None)
    return (device,) if device is not None else getattr(strategy, "devices", None)
