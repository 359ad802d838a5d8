"""The predicted and the measured step of a run, in `prediction.json`: the history that the planner quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpar import config
from tfpar.cluster import cores
from tfpar.files import atomic_file
from tfpar.planning import memory_measurement
from tfpar.planning.history import NAME, has_equal_devices, machine_name, num_divided
from tfpar.planning.layouts import Layout
from tfpar.reduction.weight_owners import num_bytes
from tfpar.runs import stored_plans
from tfpar.runs.directory import RunDirectory
from tfpar.strategies import Strategy

_CPU = "CPU:0"  # its allocator is that of all logical CPUs


class PredictionRecorder:
    """The recorder of a run's prediction, made once its devices are known and before its trainer is built.

    The memory is as TensorFlow counts it. Logical CPUs share it with the data, of which only what is there before the
    first step is left out: it is divided among replicas, and unknown for stages and shards, which differ.

    Args:
        directory: The folder of the run.
        settings: The section of its strategy.
        strategy: The strategy that was made of it.
    """

    def __init__(self, directory: RunDirectory, settings: config.Strategy, strategy: Strategy) -> None:
        self._directory, self._strategy = directory, strategy
        self._layout = layout_of(settings, strategy)
        self._data_bytes, self._is_counted = 0, False
        self._previewed_seconds: float | None = None

    def begin(self, model: keras.Model, pipeline: Any) -> None:
        """Set the peaks of memory to the present memory, before the first step.

        Args:
            model: The model, perhaps not built yet.
            pipeline: The predicted step of a pipeline, with `planned`; None for other strategies.
        """
        self._previewed_seconds = None if pipeline is None else pipeline.planned.step_seconds
        names = _gpus(self._strategy) or [_CPU]
        self._is_counted = all(map(memory_measurement.counts_bytes, names))
        if self._is_counted and self._layout is not None and names == [_CPU]:
            weight_bytes = sum(map(num_bytes, model.variables)) * self._layout.replicas_per_host
            self._data_bytes = max(0, tf.config.experimental.get_memory_info(_CPU)["current"] - weight_bytes)

    def write(self, figures: Mapping[str, float]) -> None:
        """Write `prediction.json` at the end of the run.

        Args:
            figures: Its speed, as `callbacks.Throughput` has it.

        Raises:
            OSError: If it cannot be written.
        """
        if self._layout is None:
            return
        plan = stored_plans.read(self._directory.path / stored_plans.NAME)
        row = stored_plans.row_of(plan, str(self._layout)) if plan is not None else None
        is_gpu = bool(_gpus(self._strategy))
        milliseconds = figures.get("step_milliseconds")
        record = {
            "layout": str(self._layout),
            "planned_step_seconds": _planned_seconds(plan, row, self._layout),
            # Another predictor, of the actions alone: the history of the planner does not count it.
            "previewed_step_seconds": self._previewed_seconds,
            "planned_memory_bytes": None if plan is None or row is None else _planned_bytes(plan, row, is_gpu),
            "measured_step_seconds": None if milliseconds is None else milliseconds / 1e3,
            "measured_memory_bytes": self._peak_bytes(self._layout),
            "machine": machine_name("GPU" if is_gpu else "CPU"),
        }
        atomic_file.write(self._directory.path / NAME, json.dumps(record, indent=2) + "\n")

    def _peak_bytes(self, layout: Layout) -> int | None:
        """Return the peak of the fullest device; None where it is unknown, or less than TensorFlow counts."""
        if not self._is_counted:
            return None
        if names := _gpus(self._strategy):
            return max(int(tf.config.experimental.get_memory_info(name)["peak"]) for name in names)
        if layout.num_stages > 1 or layout.num_shards > 1:
            return None
        peak_bytes = int(tf.config.experimental.get_memory_info(_CPU)["peak"])
        return max(0, peak_bytes - self._data_bytes) // layout.replicas_per_host or None


def _gpus(strategy: Strategy) -> list[str]:
    return [name for name in strategy.device_names if name.startswith("GPU")]


def layout_of(settings: config.Strategy, strategy: Strategy) -> Layout | None:
    """Return the layout of a run; None for one that is not predicted, such as those with other results.

    Args:
        settings: The section of the strategy.
        strategy: The strategy that was made of it.

    Example:
        >>> from tfpar import strategies
        >>> str(layout_of(config.SingleDevice(), strategies.from_settings(config.SingleDevice())))
        'SingleDevice'
    """
    hosts = strategy.num_workers
    if isinstance(settings, config.Pipeline):  # or a grid of them
        replicas = settings.num_replicas if isinstance(settings, config.Hybrid) else 1
        if settings.schedule == "interleaved" or settings.balance != "time":
            return None
        if settings.across_workers or settings.num_shards > 1:
            return None
        # In one process the replicas of a pipeline divide the state of its optimizer anyway.
        shard = settings.shard if isinstance(settings, config.Hybrid) and hosts > 1 else None
        return Layout(
            replicas * hosts, settings.num_stages, settings.num_microbatches, settings.schedule, settings.recompute,
            shard, num_hosts=hosts,
        )  # fmt: skip
    if isinstance(settings, config.TensorParallel):
        if settings.layout is not None:
            return None
        replicas = settings.num_replicas * hosts
        return Layout(replicas, num_shards=settings.num_shards, shard=settings.shard, num_hosts=hosts)
    if isinstance(settings, config.MultiWorker) and (settings.sync != "step" or settings.compression):
        return None
    return Layout(strategy.num_replicas, shard=getattr(settings, "shard", None), num_hosts=hosts)


def _planned_seconds(plan: Mapping[str, Any] | None, row: Mapping[str, Any] | None, layout: Layout) -> float | None:
    """Return the predicted step of a plan; None where its devices have other cores than those of the run."""
    if plan is None or row is None:
        return None
    measured = plan["measured"]
    there = cores.num_allowed_cores()
    is_equal = has_equal_devices(measured["device"], num_divided(measured), layout.devices_per_host, there)
    return row["step_seconds"] if is_equal else None


def _planned_bytes(plan: Mapping[str, Any], row: Mapping[str, Any], is_gpu: bool) -> int:
    """Return the predicted memory of a device, as it is measured: on CPUs without TensorFlow's own."""
    runtime_bytes = 0 if is_gpu else plan["measured"].get("runtime_bytes") or 0
    return max(0, int(row["memory_bytes"] - runtime_bytes))
