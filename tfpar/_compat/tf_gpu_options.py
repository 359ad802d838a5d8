"""Options with which GPUs start: memory growth and pinned host memory (TensorFlow 2.21).

TensorFlow takes nearly all memory of each GPU when it starts, so that a second process on a GPU fails.
`tf.config.experimental.set_memory_growth` must come before the start, which a script may cause with any operation, and
excludes a later choice of the user.

Batches that `tf.data` makes lie in memory that the system may move, from which a copy to a GPU goes through a buffer of
the driver: 50 MB took 8 ms. `GPUOptions.force_gpu_compatible` allocates all tensors of the host in pinned memory
(tensorflow/core/protobuf/config.proto), up to the 64 GB of TF_GPU_HOST_MEM_LIMIT_IN_MB. `tf.config` does not set it.

TensorFlow's context computes the options of its GPUs when it starts (`tensorflow/python/eager/context.py`,
`Context._compute_gpu_options`): by then the user has chosen, or has not.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorflow.python.eager import context

from tfpar._compat import versions


def install() -> None:
    """Let GPUs start with both options; without effect once TensorFlow has started.

    Memory does not grow where the user has chosen: with `set_memory_growth`, true or false, for any GPU, or with
    logical devices with memory limits. The variable TF_FORCE_GPU_ALLOW_GROWTH has precedence in TensorFlow itself.
    """
    versions.require(context.Context, "_compute_gpu_options")
    compute = context.Context._compute_gpu_options

    @functools.wraps(compute)
    def compute_with_defaults(self: Any) -> Any:
        options = compute(self)
        if options.visible_device_list:
            options.force_gpu_compatible = True
            has_limits = any(one.memory_limit_mb for one in options.experimental.virtual_devices)
            is_chosen = any(growth is not None for growth in versions.private(self, "_memory_growth_map").values())
            options.allow_growth = options.allow_growth or not (has_limits or is_chosen)
        return options

    versions.replace(context.Context, "_compute_gpu_options", compute_with_defaults)
