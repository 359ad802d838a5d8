"""The process of one measurement: `python -m benchmarks.worker '{"workload": "cnn", ...}'` prints seconds as JSON.

The clock stops at `on_train_end`, not when `fit` returns. On its way out `fit` destroys the iterator of its data, and
with tf.data's autotuning on (the default) TensorFlow 2.21 then often sleeps until 10 ms x (2^k - 1) after the start:
1.27, 2.55, 5.11, 10.23 seconds, whoever trains, which makes different trainers look equal. Up to three quarters of the
time around `fit` was such sleep; with autotuning off there was none. It is reported beside the training, not within it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks import process
from benchmarks.harness import Measurement, Timing


def measure(measurement: Measurement) -> Timing:
    """Return what the timed call of `fit` took, in a fresh process."""
    return Timing(**process.ask("benchmarks.worker", vars(measurement)))


def run_here(measurement: Measurement) -> Timing:
    """Set up this process, train the warm-up, then time a whole further call of `fit`.

    Args:
        measurement: What to train; the process must not have started TensorFlow yet.

    Returns:
        Seconds of the timed call, until the end of training and from there until the return.

    Raises:
        ValueError: If the machine has too few cores.
    """
    _use_cores(measurement.cores)
    _start_tensorflow(measurement)
    import keras

    from benchmarks import workloads

    ends: list[float] = []
    at_end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ends.append(time.perf_counter()))
    data = workloads.BUILD_DATA[measurement.workload](measurement.batch_size, measurement.num_steps)
    fit = _fit_of(measurement)
    fit(data.take(measurement.num_warm_up_steps), verbose=0)
    began = time.perf_counter()
    fit(data, verbose=0, callbacks=[at_end])
    return Timing(ends[0] - began, time.perf_counter() - ends[0])


def _use_cores(cores: int | None) -> None:
    """Pin the process before TensorFlow counts the cores."""
    available = sorted(os.sched_getaffinity(0))
    if cores is not None and cores > len(available):
        raise ValueError(f"This measurement needs {cores} cores, and the process may use {len(available)}.")
    os.sched_setaffinity(0, available[:cores])


def _start_tensorflow(measurement: Measurement) -> None:
    import tensorflow as tf

    # The settings of the experiments are those of CPUs, whatever else the machine has.
    tf.config.set_visible_devices([], "GPU")
    if measurement.intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(measurement.intra_op_threads)
    if measurement.inter_op_threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(measurement.inter_op_threads)
    if measurement.num_replicas > 1:
        import tfpar

        tfpar.use_logical_cpus(measurement.num_replicas)


def _fit_of(measurement: Measurement) -> Callable[..., Any]:
    """Build the model for the trainer asked for and return its `fit`."""
    import keras
    import tensorflow as tf

    import tfpar
    from benchmarks import workloads

    build_model = workloads.BUILD_MODEL[measurement.workload]
    devices = [f"CPU:{number}" for number in range(measurement.num_replicas)]
    if measurement.trainer == "tfpar":
        strategy = tfpar.SingleDevice() if len(devices) == 1 else tfpar.Mirrored(devices)
        return tfpar.Trainer(build_model, strategy, seed=0).fit
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if len(devices) == 1 else tf.distribute.MirroredStrategy(devices).scope():
        model = build_model(measurement.steps_per_execution)
    fit: Callable[..., Any] = model.fit
    return fit


if __name__ == "__main__":
    process.answer(run_here(Measurement(**process.request()))._asdict())
