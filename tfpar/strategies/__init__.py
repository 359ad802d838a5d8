"""One file a strategy; each supplies only how a step runs."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from tfpar import _compat_variables, cluster, config, tf_config
from tfpar.strategies.base import Distributed, Strategy
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker import MultiWorker
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.preflight import lost_worker
from tfpar.strategies.single_device import SingleDevice

__all__ = [
    "Distributed",
    "Mirrored",
    "MultiWorker",
    "Pipeline",
    "SingleDevice",
    "Strategy",
    "around",
    "from_settings",
    "lost_worker",
    "of",
]


def of(model: keras.Model) -> Strategy:
    """Return the strategy under whose scope a model was built, or else its layers.

    Args:
        model: A model built under the scope of a `tf.distribute.MirroredStrategy`, of a
            `tf.distribute.MultiWorkerMirroredStrategy`, of a tfpar strategy, or of none.

    Raises:
        TypeError: If it was built under another kind of `tf.distribute` strategy.
    """
    home = _compat_variables.belongs_to(model)
    if home is None:
        return SingleDevice()
    strategy = around(home)
    if strategy is None:
        raise TypeError(
            f"tfpar.fit takes a model built under tf.distribute.MirroredStrategy, MultiWorkerMirroredStrategy or no "
            f"strategy, received one built under {type(home).__name__}. Build it with "
            "tfpar.Trainer(build_model, strategy)."
        )
    return strategy


def around(strategy: tf.distribute.Strategy) -> Strategy | None:
    """Return the tfpar strategy for a strategy of `tf.distribute`, the one that created it if one did; else None."""
    known: Strategy | None = getattr(strategy, "tfpar_strategy", None)
    if known is not None:
        return known
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return MultiWorker.of(strategy)
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return Mirrored.of(strategy)
    return None


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
        share = max(1, (os.cpu_count() or 1) // settings.num_logical_cpus) if settings.kind == "pipeline" else None
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
        return Mirrored(settings.devices, settings.all_reduce, settings.pack_bytes, settings.mixing)
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
        allow_mixing=settings.allow_mixing,
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
        mixing=settings.mixing,
        form_seconds=settings.form_seconds,
        silence_seconds=settings.silence_seconds,
    )
