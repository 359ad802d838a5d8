"""One file a strategy; each supplies only how a step runs."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfpar.strategies.base import Strategy
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.single_device import SingleDevice

__all__ = ["Mirrored", "SingleDevice", "Strategy", "of"]


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
