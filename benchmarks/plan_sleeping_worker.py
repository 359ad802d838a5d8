"""One process of `benchmarks.plan_sleeping`: the planner's measurement, and the steps of eight logical CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import tfpar
from benchmarks.pipelines.sleeping_worker import sleeping_layer
from benchmarks.plan_worker import compared
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import measure

# A device occupies a thread while it sleeps, and TensorFlow needs others to start the next operation.
_THREADS_PER_DEVICE = 4
_DEVICES = [f"CPU:{number}" for number in range(8)]
_WIDTH = 8
LAYOUTS = [
    Layout(8),
    Layout(1, 8, 8),
    Layout(1, 8, 16),
    Layout(2, 4, 8),
    Layout(2, 4, 4),
    Layout(2, 4, 8, recompute=True),
    Layout(4, 2, 4),
]


def run(seconds_per_row: Sequence[float], batch: int) -> Output:
    """Return the predicted and the measured step of each layout.

    Args:
        seconds_per_row: The sleep of each layer in the forward pass, for each row.
        batch: Rows of the global batch.
    """
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS_PER_DEVICE * len(_DEVICES))
    tfpar.use_logical_cpus(len(_DEVICES), 1)
    rows = np.ones((batch, _WIDTH), "float32")
    data = tf.data.Dataset.from_tensors((rows, rows)).cache().repeat()

    def build_model() -> keras.Model:
        # The gradient of each weight needs the sleeps of the layers after it.
        layers = [layer for one in seconds_per_row for layer in (keras.layers.Dense(_WIDTH), sleeping_layer(one))]
        model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    def make(strategy: tfpar.Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(build_model, strategy), data

    costs, machine = measure(make, _DEVICES)
    return compared(costs, machine, LAYOUTS, make, data, _DEVICES)


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker
