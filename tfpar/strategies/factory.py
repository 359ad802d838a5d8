"""From the settings of a run to its strategy."""

from __future__ import annotations

import os

import tensorflow as tf

from tfpar import cluster, config
from tfpar.cluster import cores, tf_config
from tfpar.strategies.base import Strategy
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker.strategy import MultiWorker
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.single_device import SingleDevice


def from_settings(settings: config.Strategy) -> Strategy:
    """Build the strategy that a run asks for; splits the CPU into logical devices first, if it asks for that.

    Args:
        settings: The `strategy` section of a run.

    Raises:
        ValueError: If a device does not exist.
        RuntimeError: If TensorFlow runs already with another number of CPU devices.

    Example:
        >>> from_settings(config.Strategy(kind="single_device")).describe()
        'SingleDevice on CPU:0'
    """
    if settings.num_logical_cpus > 1:
        # Stages work side by side on different layers: each device gets its share of the cores.
        share = max(1, cores.num_allowed_cores() // settings.num_logical_cpus) if settings.kind == "pipeline" else None
        cluster.use_logical_cpus(settings.num_logical_cpus, share)
    job = tf_config.from_environment(os.environ)
    num_workers = 1 if job is None else job.num_workers
    if settings.kind == "multi_worker" or (settings.kind == "auto" and num_workers > 1):
        return _multi_worker(settings)
    if num_workers > 1:
        raise ValueError(
            f'The environment describes a job of {num_workers} workers, and strategy.kind = "{settings.kind}" would '
            'let each train by itself. Set "multi_worker" or "auto", or start one process without TF_CONFIG.'
        )
    if settings.kind == "pipeline":
        return _pipeline(settings)
    num_gpus = len(tf.config.list_logical_devices("GPU"))
    num_devices = num_gpus if settings.devices is None else len(settings.devices)
    if settings.kind == "mirrored" or (settings.kind == "auto" and num_devices > 1):
        assert settings.all_reduce != "ring", "refused by the configuration's checks"
        return Mirrored(settings.devices, settings.all_reduce, settings.pack_bytes, settings.batch_dependent_layers)
    return SingleDevice(None if settings.devices is None else settings.devices[0])


def _pipeline(settings: config.Strategy) -> Pipeline:
    assert settings.num_stages is not None, "refused by the configuration's checks"
    assert settings.num_microbatches is not None, "refused by the configuration's checks"
    return Pipeline(
        settings.num_stages,
        settings.num_microbatches,
        settings.schedule,
        settings.balance,
        settings.devices,
        settings.recompute,
        memory_limit_bytes=settings.memory_limit_bytes,
        allow_batch_dependent_layers=settings.allow_batch_dependent_layers,
    )


def _multi_worker(settings: config.Strategy) -> MultiWorker:
    if settings.all_reduce not in ("auto", "ring", "nccl"):
        raise ValueError(
            f'strategy.all_reduce = "{settings.all_reduce}" stays within one worker: set "ring", "nccl" or "auto".'
        )
    return MultiWorker(
        settings.devices,
        settings.all_reduce,
        settings.pack_bytes,
        compression=settings.compression,
        sync=settings.sync,
        every=settings.average_every,
        average_optimizer=settings.average_optimizer,
        batch_dependent_layers=settings.batch_dependent_layers,
        form_seconds=settings.form_seconds,
        silence_seconds=settings.silence_seconds,
    )
