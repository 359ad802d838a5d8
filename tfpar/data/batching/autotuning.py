"""Turn off TensorFlow's autotuning, so that iterators end without delay."""

from __future__ import annotations

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turn off the autotuning of a dataset, before it is iterated over.

    Freeing an autotuned iterator can take up to a minute, whenever Python does it, such as in a garbage collection
    during a later step. In TensorFlow 2.21 it waits for the autotuning thread, which sleeps for up to 60 seconds:
    `Model::OptimizeLoop` is woken before `CancellationManager::IsCancelled` is true, and sleeps again
    (tensorflow/core/framework/model.cc, xla/tsl/framework/cancellation.cc).

    Without autotuning, AUTOTUNE means as many calls as there are cores, up to 16.

    Example:
        >>> dataset = without_autotuning(tf.data.Dataset.range(3))
        >>> dataset.options().autotune.enabled
        False
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
