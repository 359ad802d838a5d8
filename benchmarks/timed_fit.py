"""The speed of a call of `fit`, in the process of an experiment."""

from __future__ import annotations

import time

import tensorflow as tf

import tfpar


def steps_per_second(trainer: tfpar.Trainer, dataset: tf.data.Dataset, num_steps: int) -> float:
    """Train, and return the steps per second.

    Args:
        trainer: A trainer whose step is compiled.
        dataset: Endless batches.
        num_steps: The number of steps.
    """
    began_seconds = time.perf_counter()
    trainer.fit(dataset, steps_per_epoch=num_steps, verbose=0)
    return num_steps / (time.perf_counter() - began_seconds)
