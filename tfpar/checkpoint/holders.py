"""Holders: other processes with variables of the model, which write these to files and read them from files.

The first process of a pipeline across workers runs all steps, and the others run TensorFlow's server, without Python.
So a holder copies, writes and reads by TensorFlow operations on its CPU; the first process receives checksums only.

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

_OF_FOLDER = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError,
              tf.errors.UnimplementedError, tf.errors.UnknownError)  # fmt: skip


def hosts_of(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the CPU of the process that holds a variable, for each variable of another process, by name.

    Args:
        variables: State variables by name.

    Example:
        >>> hosts_of({"weights/kernel": keras.Variable([1.0])})
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
    """Return a short name of a process.

    >>> label("/job:worker/replica:0/task:1/device:CPU:0")
    'worker 1'
    """
    return f"worker {tf.DeviceSpec.from_string(host).task}"


def check_folder(folder: Path, hosts: Sequence[str]) -> None:
    """Check that other processes read and write the files of a folder of this process.

    Args:
        folder: An existing folder.
        hosts: The CPU of each of them.

    Raises:
        ValueError: If one does not; it names the process.
    """
    for host in hosts:
        token = secrets.token_hex(4)
        mine, its = (folder / f".probe-{number}.{token}.unfinished" for number in (0, 1))
        try:
            mine.write_text(token, encoding="utf-8")
            with tf.device(host):
                tf.io.write_file(str(its.absolute()), tf.io.read_file(str(mine.absolute())))
                found = tf.io.read_file(str(its.absolute())).numpy().decode()
            sees = found == token and its.read_text(encoding="utf-8") == token
        except (*_OF_FOLDER, FileNotFoundError):
            sees = False
        finally:
            for path in (mine, its):
                path.unlink(missing_ok=True)
        if not sees:
            raise ValueError(
                f"All workers must read and write the folder of the checkpoints, and {label(host)} does not in "
                f"{folder.absolute()}. Mount a shared folder under the same path on every machine, and keep the "
                "checkpoints there."
            )
