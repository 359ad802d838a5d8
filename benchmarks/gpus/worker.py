"""The process of a turn of Keras or tfpar on GPUs: `python -m benchmarks.gpus.worker '{…}'` prints figures.

Every trainer gets its batch from the memory of the host at each step.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpus.setting import GpuSetting
from benchmarks.gpus.turn import figures, received, serve
from benchmarks.harness import Output


def start(settings: Sequence[GpuSetting]) -> None:
    """Start TensorFlow with the devices and the layout optimizer of some settings, and load its libraries.

    Args:
        settings: All of the process.
    """
    import tensorflow as tf

    import tfpar
    from tfpar.engines.steps import launched_steps

    if not settings[0].launches_steps:
        launched_steps.suits = lambda devices: False
    if not settings[0].pins_memory:
        _leave_host_memory()
    kind, number = settings[0].devices[0].partition(":")[0], max(len(setting.devices) for setting in settings)
    if kind == "CPU":  # in place of GPUs, for tests
        if number > 1:
            tfpar.use_logical_cpus(number)
        return
    cards = tf.config.list_physical_devices("GPU")
    if len(cards) < number:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=_free_mib() // number)
        tf.config.set_logical_device_configuration(cards[0], [limit] * number)
    else:
        for card in cards:
            tf.config.experimental.set_memory_growth(card, True)
    if settings[0].layout_optimizer is not None:
        tf.config.optimizer.set_experimental_options({"layout_optimizer": settings[0].layout_optimizer})
    # The first product and the first convolution load libraries for seconds, which are no part of a first step.
    tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8])).numpy()
    tf.nn.conv2d(tf.ones([1, 8, 8, 8]), tf.ones([3, 3, 8, 8]), 1, "SAME").numpy()


def _leave_host_memory() -> None:
    """Let TensorFlow start without pinned memory of the host."""
    from tensorflow.python.eager import context

    compute = context.Context._compute_gpu_options

    def compute_unpinned(self: Any) -> Any:
        options = compute(self)
        options.force_gpu_compatible = False
        return options

    context.Context._compute_gpu_options = compute_unpinned


def _free_mib() -> int:
    """Return nine tenths of the memory of the first GPU that no process uses."""
    from tfpar.cluster.gpu import gpus

    card = gpus.find(os.environ).gpus[0]
    assert card.total_mib is not None
    assert card.used_mib is not None
    return (card.total_mib - card.used_mib) * 9 // 10


def run_here(setting: GpuSetting) -> Output:
    """Measure the quantity of a setting in this process, which has started TensorFlow for it.

    Args:
        setting: What to measure.
    """
    import keras

    keras.config.set_dtype_policy(setting.precision)
    try:
        return _parity(setting) if setting.quantity == "parity" else _speed(setting)
    finally:
        keras.utils.clear_session()
        gc.collect()


def _parity(setting: GpuSetting) -> Output:
    import tfpar
    from benchmarks.gpus.models import build_model

    report = tfpar.check_parity(
        functools.partial(build_model, setting.workload, setting.jit_compile),
        _data(setting).take(5),
        _strategy(setting),
        dtype="float32",
        verbose=0,
    )
    differences = [entry.after_last_step for entry in (*report.weights, *report.logs)]
    return {"largest_difference": max(differences), "tolerance": report.tolerance}


def _speed(setting: GpuSetting) -> Output:
    import keras

    memory, data, moments = _Memory(setting.devices[0]), _data(setting), list[float]()
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: moments.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs: moments.append(time.perf_counter()),
    )
    began = time.perf_counter()
    fit = _fit_of(setting)
    fit(data, steps_per_epoch=1, callbacks=[note], verbose=0)
    first_step_seconds = moments[-1] - began
    moments.clear()
    laps = {"epochs": 1 + setting.num_laps, "steps_per_epoch": setting.steps_per_lap}
    history = fit(data, **laps, callbacks=[note], verbose=0).history
    loss = {"loss": history["loss"][-1]}
    return figures(setting, first_step_seconds, moments) | memory.peak() | loss


class _Memory:
    """The memory that a device comes to use from now on; a CPU does not count it."""

    def __init__(self, device: str) -> None:
        self._device = device if device.startswith("GPU") else None
        if self._device is not None:
            import tensorflow as tf

            tf.config.experimental.reset_memory_stats(self._device)
            self._before = tf.config.experimental.get_memory_info(self._device)["current"]

    def peak(self) -> dict[str, float]:
        if self._device is None:
            return {}
        import tensorflow as tf

        return {"peak_bytes": tf.config.experimental.get_memory_info(self._device)["peak"] - self._before}


def _data(setting: GpuSetting) -> Any:
    import tensorflow as tf

    from benchmarks.gpus.examples import arrays

    batch = tf.data.Dataset.from_tensor_slices(arrays(setting.workload, setting.batch_size)).batch(setting.batch_size)
    return batch.cache().repeat()


def _strategy(setting: GpuSetting) -> Any:
    import tfpar

    devices = list(setting.devices)
    if setting.trainer == "pipeline":
        return tfpar.Pipeline(len(devices), setting.num_microbatches, devices=devices)
    return tfpar.SingleDevice(devices[0]) if len(devices) == 1 else tfpar.Mirrored(devices)


def _fit_of(setting: GpuSetting) -> Any:
    import keras
    import tensorflow as tf

    import tfpar
    from benchmarks.gpus.models import build_model

    devices, build = list(setting.devices), functools.partial(build_model, setting.workload, setting.jit_compile)
    if setting.trainer != "keras":
        return tfpar.Trainer(build, _strategy(setting), seed=0, fused=setting.fused).fit
    several = len(devices) > 1
    scope = tf.distribute.MirroredStrategy(devices).scope() if several else tf.device(devices[0])
    keras.utils.set_random_seed(0)
    with scope:
        return build().fit


if __name__ == "__main__":
    given, *_ = received()
    start(given)
    serve(given, run_here)
    os._exit(0)  # as benchmarks.worker
