"""A process of one turn of `hybrid_sleeping`: a grid of logical CPUs whose layers sleep instead of computing."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import process
from benchmarks.harness import Output
from benchmarks.pipelines.sleeping import BACKWARD_PER_FORWARD, Sleeping

# Each device occupies a thread while it sleeps, and TensorFlow needs others to start the next action.
_THREADS_PER_DEVICE = 4


def run_here(setting: Sleeping, rank: int = 0, addresses: Sequence[str] = ()) -> Output:
    """Return the median step of a grid, and the step that tfpar predicts from measured actions.

    Args:
        setting: The grid; TensorFlow must not have started yet.
        rank: Which worker this is.
        addresses: The addresses of all workers; empty for one.
    """
    describe_job(rank, addresses)
    use_sleeping_cpus(setting.num_devices // setting.num_workers)
    return measure_grid(setting)


def describe_job(rank: int, addresses: Sequence[str]) -> None:
    """Set TF_CONFIG for a worker of a job; nothing for one without addresses.

    Args:
        rank: Which worker this is.
        addresses: The addresses of all workers; empty for one.
    """
    if addresses:
        job = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(job)


def use_sleeping_cpus(num_devices: int) -> None:
    """Split the CPU into devices that sleep at the same time.

    Args:
        num_devices: Number of logical CPUs; TensorFlow must not have started yet.
    """
    import tensorflow as tf

    import tfpar

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS_PER_DEVICE * num_devices)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tfpar.use_logical_cpus(num_devices)


def measure_grid(setting: Sleeping) -> Output:
    """Return the figures of a grid on the logical CPUs of this process."""
    import numpy as np
    import tensorflow as tf

    import tfpar

    num_stages = len(setting.forward_seconds)
    pipeline = tfpar.Pipeline(
        num_stages,
        setting.num_microbatches,
        setting.schedule,
        balance=[1] * num_stages,
        devices=[f"CPU:{number}" for number in range(setting.num_devices)] if setting.num_replicas == 1 else None,
    )
    num_replicas = setting.num_replicas // setting.num_workers
    strategy = pipeline if setting.num_replicas == 1 else tfpar.Hybrid(pipeline, num_replicas)
    seconds_per_row = [seconds / setting.rows for seconds in setting.forward_seconds]
    trainer = tfpar.Trainer(lambda: sleeping_model(setting.width, seconds_per_row), strategy, seed=0)
    rows = np.ones((setting.num_examples, setting.width), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(setting.num_examples).cache().repeat()
    printed = trainer.preview(data).planned
    assert printed is not None, "the strategy has a schedule"
    step_seconds = median_step_seconds(trainer, data, setting.num_steps)
    return {"step_seconds": step_seconds, "printed_seconds": printed.step_seconds}


def median_step_seconds(trainer: Any, data: Any, num_steps: int) -> float:
    """Return the median seconds of a step, each an epoch of its own, after one that compiles.

    Args:
        trainer: A trainer.
        data: Endless batches.
        num_steps: Number of timed steps.
    """
    import keras

    moments: list[float] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: moments.append(time.perf_counter()))
    trainer.fit(data, epochs=2 + num_steps, steps_per_epoch=1, callbacks=[note], verbose=0)
    return statistics.median(end - begin for begin, end in itertools.pairwise(moments[1:]))


def sleeping_model(width: int, seconds_per_row: Sequence[float]) -> Any:
    """Return dense layers that sleep.

    Args:
        width: Each weight has this many rows and columns.
        seconds_per_row: The sleep of each layer in the forward pass, for each row.
    """
    import keras

    sleeping = sleeping_dense()
    model = keras.Sequential([keras.Input((width,)), *(sleeping(width, seconds) for seconds in seconds_per_row)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


def sleeping_dense() -> Any:
    """Return a class of dense layers that sleep before they return their outputs, and longer before the gradients.

    The sleep of the backward pass waits for the layer's inputs, which a device that computes needs there: else it would
    be over before their recomputation, as no computation is.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    def sleep(tensor: tf.Tensor, seconds: float, awaited: tf.Tensor) -> tf.Tensor:
        def body(rows: np.ndarray, _: np.ndarray) -> np.ndarray:
            time.sleep(seconds * len(rows))
            return rows

        # As a stateful operation, it would run after those of all other devices.
        slept = tf.numpy_function(body, [tensor, awaited], tensor.dtype, stateful=False)
        slept.set_shape(tensor.shape)
        return slept

    def passed_on(outputs: tf.Tensor, inputs: tf.Tensor, seconds: float) -> tf.Tensor:
        @tf.custom_gradient
        def pass_on(outputs: tf.Tensor, inputs: tf.Tensor) -> Any:
            def gradients(gradient: tf.Tensor) -> Any:
                return sleep(gradient, BACKWARD_PER_FORWARD * seconds, inputs), None

            return sleep(outputs, seconds, outputs), gradients

        return pass_on(outputs, inputs)

    class SleepingDense(keras.layers.Dense):  # type: ignore[misc]
        def __init__(self, width: int, seconds_per_row: float) -> None:
            super().__init__(width)
            self._seconds_per_row = seconds_per_row

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return passed_on(super().call(inputs), inputs, self._seconds_per_row)

    return SleepingDense


if __name__ == "__main__":
    received = process.request()
    given = received["setting"] | {"forward_seconds": tuple(received["setting"]["forward_seconds"])}
    process.reply(run_here(Sleeping(**given), received["rank"], received["addresses"]))
    os._exit(0)  # as benchmarks.worker
