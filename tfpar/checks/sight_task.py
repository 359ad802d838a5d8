"""What TensorFlow sees, in a process of its own: it starts every GPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def see() -> dict[str, Any]:
    """Return the devices of TensorFlow, and what it was built with."""
    build = tf.sysconfig.get_build_info()
    gpus = tf.config.list_physical_devices("GPU")
    return {
        "num_cpus": len(tf.config.list_logical_devices("CPU")),
        "gpus": [_name(gpu) for gpu in gpus],
        "built_with_cuda": bool(tf.test.is_built_with_cuda()),
        "cuda": str(build.get("cuda_version", "")),
        "cudnn": str(build.get("cudnn_version", "")),
        "started": [device.name for device in tf.config.list_logical_devices("GPU")],
    }


def _name(gpu: Any) -> str:
    return str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
