"""Strategies from the settings of a run or from a layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar import cluster, config
from tfpar.cluster import cores, tf_config
from tfpar.layout import Layout
from tfpar.strategies.base import Strategy
from tfpar.strategies.hybrid import Hybrid
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker import MultiWorker
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.single_device import SingleDevice
from tfpar.strategies.tensor_parallel import TensorParallel

_CLASSES: dict[str, type[Strategy]] = {
    "single_device": SingleDevice,
    "mirrored": Mirrored,
    "multi_worker": MultiWorker,
    "pipeline": Pipeline,
    "tensor_parallel": TensorParallel,
}
_NOT_ARGUMENTS = ("kind", "num_logical_cpus")


def from_settings(settings: config.Strategy) -> Strategy:
    """Create the strategy of a run; first split the CPU into logical CPUs if the settings ask for it.

    Args:
        settings: The `[strategy]` section of a configuration.

    Raises:
        ValueError: If a device does not exist, or the strategy refuses a setting.
        RuntimeError: If TensorFlow has already started with another number of CPU devices.

    Example:
        >>> from_settings(config.SingleDevice()).describe()
        'SingleDevice on CPU:0'
    """
    _split_cpu(settings)
    job = tf_config.from_environment(os.environ)
    num_workers = 1 if job is None else job.num_workers
    if isinstance(settings, config.Auto):
        settings = _automatic(settings, num_workers)
    across = isinstance(settings, config.Pipeline) and settings.across_workers
    trains_together = isinstance(settings, config.MultiWorker | config.Hybrid | config.TensorParallel)
    if num_workers > 1 and not (trains_together or across):
        raise ValueError(
            f'The environment describes a job of {num_workers} workers, and strategy.kind = "{settings.kind}" would '
            'train a separate model in each. Set "multi_worker", "hybrid", "tensor_parallel" or "auto", or start one '
            "process without TF_CONFIG."
        )
    names = [name for name in type(settings).model_fields if name not in _NOT_ARGUMENTS]
    arguments = {name: getattr(settings, name) for name in names}
    if isinstance(settings, config.Hybrid):
        grid = {name: arguments.pop(name) for name in config.Hybrid.OF_GRID}
        # A pipeline across workers connects them before the grid does.
        seconds = {name: grid[name] for name in ("form_seconds", "silence_seconds")}
        return Hybrid(Pipeline(**arguments, **seconds), **grid)
    if isinstance(settings, config.TensorParallel):
        grid = {name: arguments.pop(name) for name in ("num_replicas", "shard")}
        seconds = {name: arguments.pop(name) for name in ("form_seconds", "silence_seconds")}
        if settings.num_replicas > 1 or num_workers > 1:
            grid |= seconds if num_workers > 1 else {}
            return Hybrid(TensorParallel(settings.num_shards, settings.layout), devices=settings.devices, **grid)
    return _CLASSES[settings.kind](**arguments)


def of_layout(layout: Layout, devices: Sequence[str] | None = None, **settings: Any) -> Strategy:
    """Create the strategy of a layout.

    Args:
        layout: The layout.
        devices: Device names of a worker, of which the layout uses the first; None for all devices.
        **settings: Further arguments of the strategy's constructor.

    Raises:
        ValueError: If a device does not exist, or the strategy does not take an argument.

    Example:
        >>> of_layout(Layout(num_stages=2, num_microbatches=8), balance="parameters").describe()
        'Pipeline of 2 stages on CPU:0, CPU:1, 8 micro-batches, 1f1b'
    """
    section = layout.settings if devices is None else layout.settings_on(devices)
    return from_settings(config.with_layout(config.SingleDevice(), {**section, **settings}))


def _split_cpu(settings: config.Strategy) -> None:
    if isinstance(settings, config.SingleDevice) or settings.num_logical_cpus == 1:
        return
    # The devices compute at the same time, so they share the cores equally.
    named = {name.rpartition("/")[2] for name in settings.devices or ()}
    num_cores = cores.num_allowed_cores() // (len(named) or settings.num_logical_cpus)
    cluster.use_logical_cpus(settings.num_logical_cpus, max(1, num_cores))


def _automatic(settings: config.Auto, num_workers: int) -> config.Strategy:
    """Resolve `kind = "auto"` to the kind that fits this process."""
    if num_workers > 1:
        return config.MultiWorker(**settings.model_dump(exclude={"kind"}))
    devices = settings.devices or tf.config.list_logical_devices("GPU")
    if len(devices) > 1 or settings.num_logical_cpus > 1:
        return config.with_layout(settings, {"kind": "mirrored", "devices": settings.devices})
    return config.SingleDevice(device=settings.devices[0] if settings.devices else None)
