"""One file a strategy; each supplies only how a step runs."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfpar import cluster, config
from tfpar.strategies.base import Strategy
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.single_device import SingleDevice

__all__ = ["Mirrored", "SingleDevice", "Strategy", "from_settings", "of"]


def of(model: keras.Model) -> Strategy:
    """Return the strategy under whose scope a model was built.

    Args:
        model: A model built under `tf.distribute.MirroredStrategy().scope()`, `tfpar.Mirrored().scope()` or none.

    Raises:
        TypeError: If it was built under another kind of `tf.distribute` strategy.
    """
    strategy = model.distribute_strategy
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return Mirrored.of(strategy)
    if strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy():
        return SingleDevice()
    raise TypeError(
        f"tfpar.fit takes a model built under tf.distribute.MirroredStrategy or under no strategy, received one "
        f"built under {type(strategy).__name__}. Build it with tfpar.Trainer(build_model, strategy)."
    )


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
        cluster.use_logical_cpus(settings.num_logical_cpus)
    num_gpus = len(tf.config.list_logical_devices("GPU"))
    num_devices = num_gpus if settings.devices is None else len(settings.devices)
    if settings.kind == "mirrored" or (settings.kind == "auto" and num_devices > 1):
        return Mirrored(settings.devices, settings.all_reduce, settings.pack_bytes)
    return SingleDevice(None if settings.devices is None else settings.devices[0])
