"""The devices of this process: logical CPUs, device names, and a file for TensorFlow's start-up messages."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfpar.cluster.gpu import gpu_cards, gpus
from tfpar.messages import tensorflow_log
from tfpar.messages.received import excerpt

if TYPE_CHECKING:
    import tensorflow as tf


def use_logical_cpus(num_devices: int, threads_per_device: int | None = None) -> None:
    """Split the CPU of this machine into several logical devices, before TensorFlow starts.

    Use it to try, test and debug a strategy for several devices on a machine without GPUs. The devices share one pool
    of threads: with one intra-op thread and as many cores as devices, each behaves like one core.

    Args:
        num_devices: Number of devices, at least 1: `CPU:0`, `CPU:1` and so on.
        threads_per_device: Threads inside one operation; None for TensorFlow's default, all cores.

    Raises:
        ValueError: If `num_devices` is below 1.
        RuntimeError: If TensorFlow has started with another number of CPUs, which cannot be changed afterwards.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> len(tf.config.list_logical_devices("CPU"))
        2
    """
    import tensorflow as tf

    if not isinstance(num_devices, int):
        raise TypeError(f"num_devices must be a whole number, received {num_devices!r}.")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, received {num_devices}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
        if threads_per_device is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads_per_device)
    except RuntimeError:
        running = len(tf.config.list_logical_devices("CPU"))
        if running != num_devices:
            raise RuntimeError(
                f"use_logical_cpus({num_devices}) must come before TensorFlow's first operation, and TensorFlow "
                f"already runs with {running} CPU device(s). Call it right after the imports."
            ) from None


def resolve_devices(devices: Sequence[str] | None) -> list[str]:
    """Return the short names of the given devices, or of all GPUs, or else of all logical CPUs.

    Args:
        devices: Names such as `"GPU:0"` or `"/device:CPU:1"`; None for all GPUs, or else all logical CPUs.

    Raises:
        ValueError: If a device does not exist or is named twice, or none is named.

    Example:
        >>> resolve_devices(["/device:CPU:0"])
        ['CPU:0']
    """
    return _chosen(devices, [_short_name(device) for device in _logical_devices()])


def _chosen(devices: Sequence[str] | None, existing: Sequence[str]) -> list[str]:
    if devices is None:
        gpus = [name for name in existing if name.startswith("GPU")]
        return gpus or [name for name in existing if name.startswith("CPU")]
    if isinstance(devices, str):
        raise ValueError(f'devices must be a list of names, received {devices!r}. Write ["{devices}"].')
    if not isinstance(devices, Iterable) or not all(isinstance(name, str) for name in devices):
        raise TypeError(
            f"devices must be a list of names such as {list(existing[-2:])}, received {devices!r}. There are: "
            f"{list(existing)}."
        )
    names = [name.removeprefix("/").removeprefix("device:").upper() for name in devices]
    for name in names:
        if name not in existing or names.count(name) > 1:
            raise ValueError(
                f"devices must name different devices of this machine, received {list(devices)}. "
                f"There are: {list(existing)}. {_hint(name, existing)}"
            )
    if not names:
        raise ValueError(f"devices must name at least one device, received []. There are: {list(existing)}.")
    return names


def _hint(name: str, existing: Sequence[str]) -> str:
    visible, existing_gpus = os.environ.get(gpus.VARIABLE), any(one.startswith("GPU") for one in existing)
    if name.startswith("GPU") and name not in existing and visible is not None:
        return f"{gpus.VARIABLE}={excerpt(visible)} is set: this process sees these GPUs only, and numbers them from 0."
    if name in existing:
        return "Name each device once."
    if name.startswith("GPU") and existing_gpus:
        return "Name one that exists, or leave the argument out."
    if existing_gpus:
        return "tfpar.use_logical_cpus(n) makes n CPU devices."
    return more_devices("n", existing).strip()


def more_devices(number: int | str, existing: Sequence[str]) -> str:
    """Return the end of a message that names the way to more devices; an empty text where there are GPUs.

    Args:
        number: The number of devices that are needed, such as 4 or "n".
        existing: The names of those that exist.

    Example:
        >>> more_devices(4, ["CPU:0"])
        ' Without GPUs, tfpar.use_logical_cpus(4) makes 4 devices; a configuration sets strategy.num_logical_cpus.'
        >>> more_devices(4, ["GPU:0", "GPU:1"])
        ''
    """
    if any(name.startswith("GPU") for name in existing):
        return ""
    return (
        f" Without GPUs, tfpar.use_logical_cpus({number}) makes {number} devices; a configuration sets "
        "strategy.num_logical_cpus."
    )


def short_name(device: str) -> str:
    """Return the short name of a device; that of another process begins with the process's rank.

    Args:
        device: A full or a partial name.

    Example:
        >>> short_name("/job:worker/replica:0/task:1/device:GPU:0"), short_name("/device:GPU:0")
        ('1/GPU:0', 'GPU:0')
    """
    name = device.rpartition("device:")[2]
    _, is_of_worker, task = device.partition("/task:")
    return f"{task.partition('/')[0]}/{name}" if is_of_worker else name


def check_one_kind(strategy: str, devices: Sequence[str]) -> None:
    """Refuse GPUs and CPUs together as the devices of replicas.

    Args:
        strategy: Its name, for the message.
        devices: Short names.

    Raises:
        ValueError: If the devices are of two kinds.

    Example:
        >>> check_one_kind("Mirrored", ["CPU:0", "CPU:1"])
    """
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise ValueError(
            f"{strategy} needs devices of one kind, as its replicas compute equal parts of a batch, received "
            f"{list(devices)}. Name GPUs only, or CPUs only."
        )


def configured_devices(devices: Sequence[str] | None) -> list[str]:
    """Return the short names of the given devices, as `resolve_devices` does, without starting TensorFlow.

    A cluster must be formed before TensorFlow starts, and listing its logical devices starts it. In a Slurm job step of
    several tasks, the GPUs of the other tasks on this node are no longer visible afterwards.

    Args:
        devices: Names such as `"GPU:0"` or `"/device:CPU:1"`; None for all GPUs, or else all logical CPUs.

    Raises:
        ValueError: If a device does not exist or is named twice, or none is named.
    """
    import tensorflow as tf

    from tfpar._compat import tf_distribute

    if devices is None and not tf_distribute.has_started():
        gpu_cards.take_share_of_slurm_task()
    cpu = tf.config.list_physical_devices("CPU")[0]
    num_cpus = len(tf.config.get_logical_device_configuration(cpu) or [None])
    num_gpus = len(gpu_cards.cards_of_gpus())
    existing = [f"CPU:{index}" for index in range(num_cpus)] + [f"GPU:{index}" for index in range(num_gpus)]
    return _chosen(devices, existing)


def _logical_devices() -> list[tf.config.LogicalDevice]:
    import tensorflow as tf

    return [device for device in tf.config.list_logical_devices() if device.device_type in ("GPU", "CPU")]


def _short_name(device: tf.config.LogicalDevice) -> str:
    return str(device.name).removeprefix("/device:")


@contextlib.contextmanager
def native_messages_to(path: Path) -> Iterator[None]:
    """Redirect the standard error of TensorFlow's C++ code into a file; Python's own stays on the terminal.

    TensorFlow 2.21 prints its start-up messages before it reads TF_CPP_MIN_LOG_LEVEL, so only a redirection of the file
    descriptor keeps them off the terminal.

    Args:
        path: The file to append to; its folder must exist.

    Raises:
        OSError: If the file cannot be written.
    """
    tensorflow_log.uninstall()
    sys.stderr.flush()
    terminal = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    python_stderr = sys.stderr
    sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1, errors="backslashreplace")
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = python_stderr
        os.dup2(terminal, 2)
        os.close(terminal)
