"""Holders: other processes that hold variables of the model, and write them to files and read them from files.

In a pipeline over workers, the first process runs all steps; the others run TensorFlow's server, without Python. So
holders copy, write and read by TensorFlow operations on their CPUs, and send only checksums to the first process.

    first process   ── save ─┬─ its own file                step-00000240.npz
    holder, task 1           └─ copies, checksums, SaveV2   step-00000240.3f9c21ab.1-of-1.part
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpar._compat import tf_distribute

_FOLDER_ERRORS = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError,
                  tf.errors.UnimplementedError, tf.errors.UnknownError)  # fmt: skip


def remote_hosts(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the CPU of the process that holds a variable, for each variable of another process.

    Example:
        >>> remote_hosts({"weights/kernel": keras.Variable([1.0])})
        {}
    """
    memories = {name: tf_distribute.local_memory(variable) for name, variable in variables.items()}
    own = tf_distribute.own_task()
    hosts = {
        name: tf_distribute.host_of(memory.device)
        for name, memory in memories.items()
        if memory is not None and _is_number(memory.dtype) and math.prod(memory.shape)
    }
    return {name: host for name, host in hosts.items() if not host.startswith(f"{own}/")}


def _is_number(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def label(host: str) -> str:
    """Return a short name for a process.

    >>> label("/job:worker/replica:0/task:1/device:CPU:0")
    'worker 1'
    """
    return f"worker {tf.DeviceSpec.from_string(host).task}"


def check_folder(folder: Path, hosts: Sequence[str]) -> None:
    """Raise an error unless other processes can read and write the files of a folder.

    Args:
        folder: An existing folder.
        hosts: The CPUs of the processes.

    Raises:
        ValueError: If a process cannot; the message names it.
    """
    for host in hosts:
        token = secrets.token_hex(4)
        own_file, other_file = (folder / f".probe-{number}.{token}.unfinished" for number in (0, 1))
        try:
            own_file.write_text(token, encoding="utf-8")
            with tf.device(host):
                tf.io.write_file(str(other_file.absolute()), tf.io.read_file(str(own_file.absolute())))
                written = tf.io.read_file(str(other_file.absolute())).numpy().decode()
            is_shared = written == token and other_file.read_text(encoding="utf-8") == token
        except (*_FOLDER_ERRORS, FileNotFoundError):
            is_shared = False
        finally:
            for path in (own_file, other_file):
                path.unlink(missing_ok=True)
        if not is_shared:
            raise ValueError(
                f"All workers must read and write the folder of the checkpoints, and {label(host)} does not in "
                f"{folder.absolute()}. Mount a shared folder under the same path on every machine, and keep the "
                "checkpoints there."
            )
