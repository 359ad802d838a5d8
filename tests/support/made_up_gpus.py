"""A machine with GPUs that do not exist, as TensorFlow would list it: enough for checks before the first operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf


def install(monkeypatch: pytest.MonkeyPatch, num_logical: Sequence[int]) -> list[tf.config.PhysicalDevice]:
    """Let TensorFlow list made-up GPUs beside the CPUs.

    Args:
        monkeypatch: Of the test.
        num_logical: The number of logical devices of each GPU.

    Returns:
        The physical GPUs.
    """
    cpus = tf.config.list_physical_devices("CPU")
    logical = tf.config.list_logical_devices("CPU")
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(len(num_logical))]
    logical += [tf.config.LogicalDevice(f"/device:GPU:{index}", "GPU") for index in range(sum(num_logical))]
    visible = {"CPU": cpus, "GPU": gpus}
    configured = tf.config.get_logical_device_configuration

    def configuration(device: Any) -> list[Any] | None:
        number = num_logical[gpus.index(device)] if device in gpus else 0
        return [object()] * number if number > 1 else None if number == 1 else configured(device)

    def of_kind(devices: Sequence[Any], kind: str | None) -> list[Any]:
        return [device for device in devices if kind in (None, device.device_type)]

    replace = monkeypatch.setattr
    replace(tf.config, "list_physical_devices", lambda kind=None: of_kind([*cpus, *gpus], kind))
    replace(tf.config, "list_logical_devices", lambda kind=None: of_kind(logical, kind))
    replace(tf.config, "get_visible_devices", lambda kind=None: of_kind([*visible["CPU"], *visible["GPU"]], kind))
    replace(tf.config, "set_visible_devices", lambda devices, kind: visible.update({kind: list(devices)}))
    replace(tf.config, "get_logical_device_configuration", configuration)
    return gpus
