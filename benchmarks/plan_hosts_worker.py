"""One process of `benchmarks.plan_hosts`: the plan of all layouts on one host, or one worker of a layout."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import tfpar
from benchmarks.pipelines.sleeping import PAYLOAD
from benchmarks.pipelines.sleeping_worker import (
    describe_job,
    sleeping_model,
    use_sleeping_cpus,
)
from benchmarks.plan_worker import seconds_of_steps
from tfpar.pipeline.schedule.links import Link
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import measure, strategy_of
from tfpar.planning.step_prediction import predict

DEVICES = [f"CPU:{number}" for number in range(4)]
LAYOUTS = [
    Layout(8, num_hosts=2),
    Layout(8, shard="optimizer", num_hosts=2),
    Layout(2, 4, 8, num_hosts=2),
    Layout(4, 2, 4, num_hosts=2),
]
_SECONDS_OF_BATCH = (0.128, 0.256, 0.16, 0.064, 0.192, 0.224, 0.096, 0.16)
_STEPS, _REPEATS, _LATENCY_SECONDS = 10, 3, 1e-3


def run(setting: Mapping[str, object], rank: int, addresses: Sequence[str]) -> Output:
    """Return the predicted step of each layout; or the measured step of one, as a worker of its job.

    Args:
        setting: The fields of `OneLayout`.
        rank: Which worker this is.
        addresses: The addresses of all workers; empty for one.
    """
    describe_job(rank, addresses)
    use_sleeping_cpus(len(DEVICES))
    hosts, number = setting["hosts"], setting["number"]
    assert isinstance(hosts, dict)
    if number is None:
        return _planned(**hosts)
    assert isinstance(number, int)
    return {"step_seconds": _measured(LAYOUTS[number], hosts["width"], hosts["batch"])}


def _planned(megabits_per_second: int, width: int, batch: int, num_hosts: int) -> Output:
    def make(strategy: tfpar.Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(lambda: _model(width, batch), strategy), _data(width, batch)

    costs, machine = measure(make, DEVICES, num_hosts=num_hosts)
    rate = PAYLOAD * 1e6 / 8 * megabits_per_second
    machine = dataclasses.replace(machine, num_hosts=num_hosts, network=Link(_LATENCY_SECONDS, rate))
    return {str(layout): predict(layout, costs, machine).seconds for layout in LAYOUTS}


def _measured(layout: Layout, width: int, batch: int) -> float:
    strategy = strategy_of(layout, DEVICES)
    trainer = tfpar.Trainer(lambda: _model(width, batch), strategy, seed=0)
    data = _data(width, batch)
    trainer.fit(data, steps_per_epoch=2, verbose=0)
    return statistics.median(seconds_of_steps(trainer, data, _STEPS) for _ in range(_REPEATS)) / _STEPS


def _model(width: int, batch: int) -> keras.Model:
    return sleeping_model(width, [seconds / batch for seconds in _SECONDS_OF_BATCH])


def _data(width: int, batch: int) -> tf.data.Dataset:
    rows = np.ones((batch, width), "float32")
    return tf.data.Dataset.from_tensors((rows, rows)).cache().repeat()


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker
