"""The predicted and the measured step of a run, in `prediction.json`: the history that the planner quotes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfpar import config
from tfpar.cluster import cores, process_memory
from tfpar.files import atomic_file
from tfpar.planning.history import NAME, has_equal_devices, machine_name
from tfpar.planning.layouts import Layout
from tfpar.runs import stored_plans
from tfpar.runs.directory import RunDirectory
from tfpar.strategies import Strategy


class PredictionRecorder:
    """The recorder of a run's prediction, made once its devices are known and before its trainer is built.

    The memory of GPUs is as TensorFlow counts it, that of CPUs is that of the process without what it had before, which
    is TensorFlow's own. Logical CPUs share it, so that it is divided among replicas, and unknown for stages and shards,
    which differ.

    Args:
        directory: The folder of the run.
        settings: The section of its strategy.
        strategy: The strategy that was made of it.
    """

    def __init__(self, directory: RunDirectory, settings: config.Strategy, strategy: Strategy) -> None:
        self._directory, self._strategy = directory, strategy
        self._layout = layout_of(settings, strategy)
        self._before_bytes = process_memory.resident_bytes()
        self._previewed_seconds: float | None = None

    def begin(self, pipeline: Any) -> None:
        """Set the peaks of memory to the present memory, before the first step.

        Args:
            pipeline: The predicted step of a pipeline, with `planned`; None for other strategies.
        """
        self._previewed_seconds = None if pipeline is None else pipeline.planned.step_seconds
        with contextlib.suppress(OSError):  # then the peak includes the first trials of the model
            process_memory.reset_peak()
        for name in _gpus(self._strategy):
            tf.config.experimental.reset_memory_stats(name)

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
            "planned_step_seconds": _planned_seconds(plan, row, self._layout) or self._previewed_seconds,
            "planned_memory_bytes": None if plan is None or row is None else _planned_bytes(plan, row, is_gpu),
            "measured_step_seconds": None if milliseconds is None else milliseconds / 1e3,
            "measured_memory_bytes": self._peak_bytes(self._layout),
            "machine": machine_name("GPU" if is_gpu else "CPU"),
        }
        atomic_file.write(self._directory.path / NAME, json.dumps(record, indent=2) + "\n")

    def _peak_bytes(self, layout: Layout) -> int | None:
        """Return the peak of the fullest device; None where it is unknown."""
        if names := _gpus(self._strategy):
            return max(int(tf.config.experimental.get_memory_info(name)["peak"]) for name in names)
        if layout.num_stages > 1 or layout.num_shards > 1:
            return None
        return max(0, process_memory.peak_bytes() - self._before_bytes) // layout.replicas_per_host


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
        if settings.schedule == "interleaved" or settings.across_workers or settings.num_shards > 1:
            return None
        shard = settings.shard if isinstance(settings, config.Hybrid) else None
        return Layout(
            replicas * hosts, settings.num_stages, settings.num_microbatches, settings.schedule, settings.recompute,
            shard, num_hosts=hosts,
        )  # fmt: skip
    if isinstance(settings, config.TensorParallel):
        if hosts > 1:
            return None
        return Layout(settings.num_replicas, num_shards=settings.num_shards, shard=settings.shard)
    if isinstance(settings, config.MultiWorker) and (settings.sync != "step" or settings.compression):
        return None
    return Layout(strategy.num_replicas, shard=getattr(settings, "shard", None), num_hosts=hosts)


def _planned_seconds(plan: Mapping[str, Any] | None, row: Mapping[str, Any] | None, layout: Layout) -> float | None:
    """Return the predicted step of a plan; None where its devices have other cores than those of the run."""
    if plan is None or row is None:
        return None
    measured = plan["measured"]
    num_planned = measured.get("num_measured") or measured["num_devices"]
    num_used = layout.num_devices // layout.num_hosts
    is_equal = has_equal_devices(measured["device"], num_planned, num_used, cores.num_allowed_cores())
    return row["step_seconds"] if is_equal else None


def _planned_bytes(plan: Mapping[str, Any], row: Mapping[str, Any], is_gpu: bool) -> int:
    """Return the predicted memory of a device, as it is measured: on CPUs without TensorFlow's own."""
    runtime_bytes = 0 if is_gpu else plan["measured"].get("runtime_bytes") or 0
    return max(0, int(row["memory_bytes"] - runtime_bytes))
