"""Local devices: logical CPUs, device names, and redirection of TensorFlow's native log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tfpar.cluster.gpu import gpu_cards, gpus
from tfpar.messages import tensorflow_log
from tfpar.messages.received import excerpt


def use_logical_cpus(num_devices: int, threads_per_device: int | None = None) -> None:
    """Split the CPU into several logical devices, `CPU:0`, `CPU:1` and so on.

    Use it to test and debug multi-device strategies on a machine without GPUs. Call it before TensorFlow runs its first
    operation. All devices share one thread pool; with `threads_per_device=1` and as many cores as devices, each device
    behaves like one core.

    Args:
        num_devices: Number of devices, at least 1.
        threads_per_device: Number of threads within an operation. Defaults to TensorFlow's choice, all cores.

    Raises:
        ValueError: If `num_devices` is below 1.
        RuntimeError: If TensorFlow has already started with another number of CPU devices.

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
    """Return the short names of the devices to use, such as `"GPU:0"`.

    Args:
        devices: Names such as `"GPU:0"` or `"/device:CPU:1"`. None means all GPUs, or all logical CPUs if there are no
            GPUs.

    Raises:
        ValueError: If a device does not exist or is listed twice, or the list is empty.

    Example:
        >>> resolve_devices(["/device:CPU:0"])
        ['CPU:0']
    """
    import tensorflow as tf

    logical = [device for device in tf.config.list_logical_devices() if device.device_type in ("GPU", "CPU")]
    return _select(devices, [str(device.name).removeprefix("/device:") for device in logical])


def _select(devices: Sequence[str] | None, existing: Sequence[str]) -> list[str]:
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
    visible, existing_gpus = os.environ.get(gpus.VARIABLE), any(device.startswith("GPU") for device in existing)
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
    """Return a hint for error messages: how to get more devices. Empty on a machine with GPUs.

    Args:
        number: The number of devices needed, such as 4 or "n".
        existing: Names of the existing devices.

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
    """Return the short name of a device, with the rank of its worker if it has one.

    Args:
        device: A full or partial device name.

    Example:
        >>> short_name("/job:worker/replica:0/task:1/device:GPU:0"), short_name("/device:GPU:0")
        ('1/GPU:0', 'GPU:0')
    """
    name = device.rpartition("device:")[2]
    _, has_task, task = device.partition("/task:")
    return f"{task.partition('/')[0]}/{name}" if has_task else name


def check_one_kind(strategy: str, devices: Sequence[str]) -> None:
    """Refuse to mix GPUs and CPUs as devices of replicas.

    Args:
        strategy: The name of the strategy, for the message.
        devices: Short device names.

    Raises:
        ValueError: If both kinds are listed.

    Example:
        >>> check_one_kind("Mirrored", ["CPU:0", "CPU:1"])
    """
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise ValueError(
            f"{strategy} needs devices of one kind, as its replicas compute equal parts of a batch, received "
            f"{list(devices)}. Name GPUs only, or CPUs only."
        )


def configured_devices(devices: Sequence[str] | None) -> list[str]:
    """Do the same as `resolve_devices` without starting TensorFlow.

    A cluster must be formed before TensorFlow starts, and listing logical devices starts it. In a Slurm job step with
    several tasks per node, the GPUs of the other tasks become invisible.

    Args:
        devices: As in `resolve_devices`.

    Raises:
        ValueError: As in `resolve_devices`.
    """
    import tensorflow as tf

    from tfpar._compat import tf_distribute

    if devices is None and not tf_distribute.has_started():
        gpu_cards.take_share_of_slurm_task()
    cpu = tf.config.list_physical_devices("CPU")[0]
    num_cpus = len(tf.config.get_logical_device_configuration(cpu) or [None])
    num_gpus = len(gpu_cards.cards_of_gpus())
    existing = [f"CPU:{index}" for index in range(num_cpus)] + [f"GPU:{index}" for index in range(num_gpus)]
    return _select(devices, existing)


@contextlib.contextmanager
def native_messages_to(path: Path) -> Iterator[None]:
    """Append the standard error of native code to a file; Python's standard error stays on the terminal.

    TensorFlow 2.21 prints messages before it reads TF_CPP_MIN_LOG_LEVEL, so only redirecting the file descriptor keeps
    them off the terminal.

    Args:
        path: A file in an existing folder.

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
