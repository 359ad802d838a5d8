"""The seconds of a pipeline's action beyond its operations, from a pipeline of two layers with next to no work."""

from __future__ import annotations

import functools
import statistics
import time

import keras
import tensorflow as tf

from tfpar.strategies import Pipeline
from tfpar.trainer import Trainer

_MICROBATCHES = 8
_STEPS = 20
_REPEATS = 3


@functools.cache
def action_seconds(devices: tuple[str, ...]) -> float:
    """Measure a pipeline with next to no work; the result is kept for the process.

    Args:
        devices: Two devices.

    Returns:
        Seconds of an action: a step of 2 stages and m micro-batches has 2 (m + 1) of them one after another.
    """

    def build() -> keras.Model:
        layers = [keras.layers.Dense(4, use_bias=False) for _ in devices]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    trainer = Trainer(build, Pipeline(len(devices), _MICROBATCHES, balance=[1] * len(devices), devices=list(devices)))
    examples = tf.zeros([_MICROBATCHES, 4])
    dataset = tf.data.Dataset.from_tensors((examples, examples)).repeat()
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    seconds = []
    for _ in range(_REPEATS):
        began_seconds = time.perf_counter()
        trainer.fit(dataset, steps_per_epoch=1 + _STEPS, steps_per_call=1 + _STEPS, verbose=0)
        middle_seconds = time.perf_counter()
        trainer.fit(dataset, steps_per_epoch=1, steps_per_call=1, verbose=0)
        seconds.append(2 * middle_seconds - began_seconds - time.perf_counter())
    return max(0.0, statistics.median(seconds)) / _STEPS / (len(devices) * (_MICROBATCHES + len(devices) - 1))
