"""The process of one measurement: `python -m benchmarks.worker '{"setting": {…}, …}'` prints seconds as JSON.

The clock stops at `on_train_end`, not when `fit` returns. Before it returns, `fit` destroys the iterator of its data.
With tf.data's autotuning on (the default) TensorFlow 2.21 then often sleeps until 10 ms x (2^k - 1) after the start:
1.27, 2.55, 5.11, 10.23 seconds, with every trainer, which makes different trainers look equal. Up to three quarters of
the time around `fit` was such sleep; with autotuning off there was none. It is reported separately from the training.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import commits, peers, process, torch_peer
from benchmarks.harness import Output
from benchmarks.measurement import Measurement, Timing


def measure(measurement: Measurement) -> Output:
    """Return the time of the timed call of `fit` and its speed, in fresh processes; the slowest worker counts.

    Args:
        measurement: What to train.

    Raises:
        WorkerError: If a process fails.
    """
    if measurement.trainer in peers.REQUIREMENTS:
        peers.install(measurement.trainer)
    library = commits.folder(measurement.commit) if measurement.commit is not None else None
    workers = measurement.num_workers
    outputs = process.ask_workers("benchmarks.worker", measurement, workers, measurement.rate, library)
    timing = max(Timing(**output) for output in outputs)
    steps_per_second = measurement.num_steps / timing.training_seconds
    return {
        "steps_per_second": steps_per_second,
        "examples_per_second": steps_per_second * measurement.batch_size,
        **timing._asdict(),
    }


def run_here(measurement: Measurement, rank: int = 0, addresses: list[str] | None = None) -> Timing:
    """Set up this process, train the warm-up, then time a whole further call of `fit`.

    Args:
        measurement: What to train; the process must not have started TensorFlow yet.
        rank: Which worker this is.
        addresses: The addresses of all workers; None or empty for a single process.

    Returns:
        Seconds of the timed call, until the end of training and from there until the return.

    Raises:
        ValueError: If the machine has too few cores.
    """
    _use_cores(measurement, rank)
    if measurement.trainer == "torch":
        return torch_peer.train(measurement, rank, addresses or [])
    if addresses:
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        )
    _start_tensorflow(measurement)
    from benchmarks import workloads

    ends: list[tuple[float, float]] = []
    library, fit = _fit_of(measurement)
    at_end = library.callbacks.LambdaCallback(
        on_train_end=lambda logs: ends.append((time.perf_counter(), time.process_time()))
    )
    data = workloads.dataset(measurement.workload, measurement.batch_size, measurement.num_steps)
    with _checkpoints(measurement) as options:
        fit(data.take(measurement.num_warm_up_steps), verbose=0)
        began, processor_began = time.perf_counter(), time.process_time()
        fit(data, verbose=0, callbacks=[at_end], **options)
    ended, processor_ended = ends[0]
    return Timing(ended - began, time.perf_counter() - ended, processor_ended - processor_began)


def _use_cores(measurement: Measurement, rank: int) -> None:
    """Pin the process before TensorFlow counts the cores; each of several workers gets another core."""
    available = sorted(os.sched_getaffinity(0))
    needed = measurement.num_workers if measurement.num_workers > 1 else measurement.cores or 1
    if needed > len(available):
        raise ValueError(f"This measurement needs {needed} cores, and the process may use {len(available)}.")
    own = available[rank : rank + 1] if measurement.num_workers > 1 else available[: measurement.cores]
    os.sched_setaffinity(0, own)


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


def _fit_of(measurement: Measurement) -> tuple[Any, Callable[..., Any]]:
    """Build the model for the trainer asked for and return its library and its `fit`."""
    import keras
    import tensorflow as tf

    import tfpar
    from benchmarks import workloads

    build_model = functools.partial(workloads.build_model, measurement.workload)
    devices = [f"CPU:{number}" for number in range(measurement.num_replicas)]
    strategy: Any
    if measurement.trainer == "tfpar":
        strategy = tfpar.SingleDevice() if len(devices) == 1 else tfpar.Mirrored(devices)
        if measurement.num_workers > 1:
            strategy = tfpar.MultiWorker(compression=measurement.compression)
        # Other commits may not know the argument, which is True by default.
        options = {} if measurement.fused else {"fused": False}
        return keras, tfpar.Trainer(build_model, strategy, seed=0, **options).fit
    library = peers.load("tf_keras") if measurement.trainer == "tf_keras" else keras
    if measurement.num_workers > 1:
        scope = tf.distribute.MultiWorkerMirroredStrategy().scope()
    else:
        scope = contextlib.nullcontext() if len(devices) == 1 else tf.distribute.MirroredStrategy(devices).scope()
    library.utils.set_random_seed(0)
    with scope:
        return library, build_model(measurement.steps_per_execution, library).fit


@contextlib.contextmanager
def _checkpoints(measurement: Measurement) -> Any:
    """Give what `fit` needs to write a checkpoint every second, and remove them in the end."""
    if measurement.checkpoints is None:
        yield {}
        return
    import tfpar

    with tempfile.TemporaryDirectory() as folder:
        is_asynchronous = measurement.checkpoints == "asynchronous"
        yield {"checkpoints": tfpar.Checkpoints(folder, every_seconds=1.0, asynchronous=is_asynchronous)}


def _output(received: dict[str, Any]) -> Timing:
    return run_here(Measurement(**received["setting"]), received["rank"], received["addresses"])


if __name__ == "__main__":
    process.reply(_output(process.request())._asdict())
    # PyTorch 2.13 sometimes aborts a process of DDP on its way out ("terminate called without an active exception").
    os._exit(0)
