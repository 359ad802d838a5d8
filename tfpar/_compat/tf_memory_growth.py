"""Memory growth on GPUs, on by default (TensorFlow 2.21).

TensorFlow takes nearly all memory of each GPU when it starts, so that a second process on a GPU fails.
`tf.config.experimental.set_memory_growth` must come before the start, which a script may cause with any operation, and
excludes a later choice of the user. TensorFlow's context computes the options of its GPUs when it starts
(`tensorflow/python/eager/context.py`, `Context._compute_gpu_options`): by then the user has chosen, or has not.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorflow.python.eager import context

from tfpar._compat import versions


def install() -> None:
    """Let GPUs start with memory growth where the user has chosen nothing; without effect once TensorFlow has started.

    Choices are `set_memory_growth`, true or false, for any GPU, and logical devices with memory limits. The variable
    TF_FORCE_GPU_ALLOW_GROWTH has precedence in TensorFlow itself.
    """
    versions.require(context.Context, "_compute_gpu_options")
    compute = context.Context._compute_gpu_options

    @functools.wraps(compute)
    def compute_with_growth(self: Any) -> Any:
        options = compute(self)
        has_limits = any(one.memory_limit_mb for one in options.experimental.virtual_devices)
        is_chosen = any(growth is not None for growth in versions.private(self, "_memory_growth_map").values())
        if options.visible_device_list and not has_limits and not is_chosen:
            options.allow_growth = True
        return options

    versions.replace(context.Context, "_compute_gpu_options", compute_with_growth)
