"""Strategies from arguments of users: a tfpar or `tf.distribute` strategy, a name, or a model."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import keras
import tensorflow as tf

from tfpar import cluster
from tfpar._compat.variables import keras_variables
from tfpar.cluster import tf_config
from tfpar.messages.suggestions import closest
from tfpar.strategies import model_scopes
from tfpar.strategies.base import Strategy
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker import MultiWorker
from tfpar.strategies.single_device import SingleDevice

# The code for each strategy in messages.
_WRITTEN = {
    "SingleDevice": "tfpar.SingleDevice()",
    "Mirrored": "tfpar.Mirrored()",
    "MultiWorker": "tfpar.MultiWorker()",
    "Pipeline": "tfpar.Pipeline(num_stages=2, num_microbatches=8)",
}


def strategy_of(model: keras.Model) -> Strategy:
    """Return the strategy in whose scope a model or its layers were built; `SingleDevice()` without a scope.

    Args:
        model: A model built under a tfpar strategy, `tf.distribute.MirroredStrategy`,
            `tf.distribute.MultiWorkerMirroredStrategy` or no strategy.

    Raises:
        TypeError: If it was built under another `tf.distribute` strategy.
    """
    noted: Strategy | None = model_scopes.noted_strategy(model)
    if noted is not None:
        return noted
    home = keras_variables.belongs_to(model)
    if home is None:
        return SingleDevice()
    strategy = _wrapping(home)
    if strategy is None:
        raise TypeError(
            f"tfpar.fit takes a model built under tf.distribute.MirroredStrategy, MultiWorkerMirroredStrategy or no "
            f"strategy, received one built under {type(home).__name__}. Build it with "
            "tfpar.Trainer(build_model, strategy)."
        )
    return strategy


def _wrapping(strategy: tf.distribute.Strategy) -> Strategy | None:
    """Return the tfpar strategy that created or can wrap a `tf.distribute` strategy; None if there is none."""
    known: Strategy | None = getattr(strategy, "tfpar_strategy", None)
    if known is not None:
        return known
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return MultiWorker.of(strategy)
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return Mirrored.of(strategy)
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return SingleDevice()
    return None


def resolve(strategy: Any) -> Strategy:
    """Convert the argument `strategy` of a user to a tfpar strategy.

    Args:
        strategy: A tfpar strategy, a `tf.distribute.MirroredStrategy` or `MultiWorkerMirroredStrategy`, or `"auto"` for
            the strategy that fits this process. None means `SingleDevice()`, with a notice about unused devices.

    Raises:
        TypeError: If it is anything else, such as a name or a class.

    Example:
        >>> resolve(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])).describe()
        'Mirrored over 2 replicas on CPU:0, CPU:1'
    """
    if strategy is None:
        print_unused_devices("tfpar.Trainer", "as it was given no strategy", "strategy=tfpar.Mirrored()")
        return SingleDevice()
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str) and strategy == "auto":
        return _automatic()
    if isinstance(strategy, tf.distribute.Strategy):
        wrapper = _wrapping(strategy)
        if wrapper is not None:
            return wrapper
        received, way_out = f"a {type(strategy).__name__} of tf.distribute", "tfpar.Mirrored() or tfpar.SingleDevice()"
    elif isinstance(strategy, type):
        received, way_out = f"the class {strategy.__name__}", _written(strategy.__name__)
    elif isinstance(strategy, str):
        received, way_out = repr(strategy), _written(strategy)
    elif callable(strategy):
        received, way_out = "a function", "the strategy itself, such as tfpar.Mirrored()"
    else:
        received, way_out = repr(strategy), _written("")
    raise TypeError(
        "strategy must be a strategy object, of tfpar or a mirrored one of tf.distribute, or 'auto', received "
        f"{received}. Write {way_out}."
    )


def _automatic() -> Strategy:
    """Choose as `strategy.kind = "auto"` of a run does without a plan."""
    job = tf_config.from_environment(os.environ)
    if job is not None and job.num_workers > 1:
        return MultiWorker()
    return Mirrored() if len(cluster.resolve_devices(None)) > 1 else SingleDevice()


@functools.cache
def print_unused_devices(who: str, reason: str, way_out: str) -> None:
    """Print a notice, once per process, if training could use more devices.

    Args:
        who: Subject of the notice, such as `"tfpar.fit"`.
        reason: Why it uses one device, as a clause.
        way_out: Code that uses all devices.
    """
    devices = cluster.resolve_devices(None)
    if len(devices) > 1:
        print(
            f"{who} trains on 1 of {len(devices)} devices, {reason}. Train on all of them with {way_out}.",
            file=sys.stderr,
        )


def _written(name: str) -> str:
    return _WRITTEN[closest(name, _WRITTEN) or "Mirrored"] if name else "tfpar.Mirrored()"
