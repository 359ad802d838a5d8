"""The process of one turn on GPUs: `python -m benchmarks.gpus.worker '{…}'` prints figures.

Every trainer gets its batch from the memory of the host at each step.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import peers, process
from benchmarks.gpus.setting import PEERS, GpuSetting
from benchmarks.harness import Output


def measure(setting: GpuSetting) -> Output:
    """Return the figures of one setting, measured in fresh processes; the slowest process counts.

    Args:
        setting: What to measure.

    Raises:
        WorkerError: If a process fails.
    """
    module = PEERS.get(setting.trainer, "benchmarks.gpus.worker")
    outputs = process.ask_workers(module, setting, setting.num_processes)
    step_seconds = max(output["step_seconds"] for output in outputs)
    return {
        "examples_per_second": setting.batch_size / step_seconds,
        "step_seconds": step_seconds,
        "first_lap_seconds": max(output["first_lap_seconds"] for output in outputs),
    }


def has_torch() -> bool:
    """Return whether PyTorch is installed and sees a GPU, in this environment or among the peers."""
    if importlib.util.find_spec("torch") is None and not peers.folder("torch").exists():
        return False
    check = "from benchmarks import peers; raise SystemExit(not peers.load('torch').cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], cwd=process.ROOT, capture_output=True).returncode == 0


def run_here(setting: GpuSetting) -> dict[str, float]:
    """Train in laps in this process, which must not have started TensorFlow yet.

    Args:
        setting: What to train.

    Returns:
        `step_seconds`, the median of the laps, and `first_lap_seconds`, the lap that compiles.
    """
    import keras
    import tensorflow as tf

    import tfpar
    from benchmarks.gpus.examples import arrays

    on_cpus = setting.devices[0].startswith("CPU")  # in place of GPUs, for tests
    if on_cpus and len(setting.devices) > 1:
        tfpar.use_logical_cpus(len(setting.devices))
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    data = tf.data.Dataset.from_tensor_slices(arrays(setting.workload, setting.batch_size)).batch(setting.batch_size)
    moments: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: moments.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs: moments.append(time.perf_counter()),
    )
    _fit_of(setting)(
        data.cache().repeat(),
        epochs=1 + setting.num_laps,
        steps_per_epoch=setting.steps_per_lap,
        callbacks=[note],
        verbose=0,
    )
    return figures(moments, setting.steps_per_lap)


def figures(moments: list[float], steps_per_lap: int) -> dict[str, float]:
    """Return the output of a process.

    Args:
        moments: The begin and the end of each lap, in seconds.
        steps_per_lap: Steps of a lap.

    Example:
        >>> figures([0.0, 9.0, 9.0, 11.0, 11.0, 13.0], steps_per_lap=2)
        {'step_seconds': 1.0, 'first_lap_seconds': 9.0}
    """
    first, *others = (end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True))
    return {"step_seconds": statistics.median(others) / steps_per_lap, "first_lap_seconds": first}


def _fit_of(setting: GpuSetting) -> Any:
    import keras
    import tensorflow as tf

    import tfpar
    from benchmarks.gpus.models import build_model

    devices = list(setting.devices)
    if setting.trainer == "keras":
        several = len(devices) > 1
        scope = tf.distribute.MirroredStrategy(devices).scope() if several else tf.device(devices[0])
        keras.utils.set_random_seed(0)
        with scope:
            return build_model(setting.workload, setting.jit_compile).fit
    strategy: tfpar.Strategy = tfpar.SingleDevice(devices[0]) if len(devices) == 1 else tfpar.Mirrored(devices)
    if setting.trainer == "pipeline":
        strategy = tfpar.Pipeline(len(devices), setting.num_microbatches, devices=devices)
    return tfpar.Trainer(lambda: build_model(setting.workload, setting.jit_compile), strategy, seed=0).fit


if __name__ == "__main__":
    received = process.request()["setting"]
    process.reply(run_here(GpuSetting(**received | {"devices": tuple(received["devices"])})))
    os._exit(0)  # as benchmarks.worker
