"""Datasets without TensorFlow's autotuning, whose iterators end at once."""

from __future__ import annotations

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turn off the autotuning of a dataset, before it is iterated over.

    The end of an autotuned iterator can take up to a minute, wherever Python frees it, such as in a garbage collection
    of a later step. In TensorFlow 2.21 it waits for the autotuning thread, which sleeps for up to 60 seconds, twice as
    long each time. `Model::OptimizeLoop` is woken before `CancellationManager::IsCancelled` is true, and sleeps again
    (tensorflow/core/framework/model.cc, xla/tsl/framework/cancellation.cc).

    Without it, AUTOTUNE means as many calls as there are cores, up to 16.

    Args:
        dataset: Any dataset.

    Returns:
        A dataset with the same elements.

    Example:
        >>> dataset = without_autotuning(tf.data.Dataset.range(3))
        >>> dataset.options().autotune.enabled
        False
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
