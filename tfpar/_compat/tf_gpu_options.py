"""Defaults for GPUs: memory growth and pinned host memory (TensorFlow 2.21).

By default, TensorFlow allocates nearly all memory of each GPU at startup, so that a second process on the GPU fails.
`tf.config.experimental.set_memory_growth` must precede the first operation and would override a later choice of the
user.

Batches from `tf.data` lie in pageable memory, from which a copy to a GPU goes through a buffer of the driver: 50 MB
took 8 ms. `GPUOptions.force_gpu_compatible` (tensorflow/core/protobuf/config.proto) allocates all host tensors in
pinned memory, up to TF_GPU_HOST_MEM_LIMIT_IN_MB, 64 GB. `tf.config` does not expose it.

The context computes its GPU options at startup (`Context._compute_gpu_options` in tensorflow/python/eager/context.py),
when the choice of the user is known.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorflow.python.eager import context

from tfpar._compat import versions


def install() -> None:
    """Enable both options. It has no effect once TensorFlow has started.

    Memory growth is left alone if the user has called `set_memory_growth` for any GPU, or configured logical devices
    with memory limits. TF_FORCE_GPU_ALLOW_GROWTH takes precedence, in TensorFlow itself.
    """
    versions.require(context.Context, "_compute_gpu_options")
    compute = context.Context._compute_gpu_options

    @functools.wraps(compute)
    def compute_with_defaults(self: Any) -> Any:
        options = compute(self)
        if options.visible_device_list:
            options.force_gpu_compatible = True
            has_limits = any(devices.memory_limit_mb for devices in options.experimental.virtual_devices)
            is_chosen = any(growth is not None for growth in versions.private(self, "_memory_growth_map").values())
            options.allow_growth = options.allow_growth or not (has_limits or is_chosen)
        return options

    versions.replace(context.Context, "_compute_gpu_options", compute_with_defaults)
