"""One process of `benchmarks.plan_sleeping`: the planner's measurement, and the steps of eight logical CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import tfpar
from benchmarks.pipelines.sleeping_worker import sleeping_model, use_sleeping_cpus
from benchmarks.plan_worker import compared
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import measure, with_split_factor

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
    use_sleeping_cpus(len(_DEVICES))
    rows = np.ones((batch, _WIDTH), "float32")
    data = tf.data.Dataset.from_tensors((rows, rows)).cache().repeat()

    def make(strategy: tfpar.Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(lambda: sleeping_model(_WIDTH, seconds_per_row), strategy), data

    costs, machine = measure(make, _DEVICES)
    return compared(with_split_factor(make, _DEVICES, costs), machine, LAYOUTS, make, data, _DEVICES)


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker
