"""The data format of convolutions on GPUs (TensorFlow 2.21).

The layout optimizer converts convolutions from NHWC, Keras' default, to NCHW on every GPU, unless half of them compute
in float16 (tensorflow/core/grappler/optimizers/generic_layout_optimizer.cc). NCHW is faster before Hopper, NHWC since
Hopper, in all dtypes. `tf.config.optimizer.set_experimental_options` would apply to the whole process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context

_HOPPER = (9, 0)  # compute capability


def best_for_gpus() -> contextlib.AbstractContextManager[None]:
    """Return a context for the first call of a function, in which it gets the best layout for the local GPUs."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    capabilities = [gpu.get("compute_capability", (0, 0)) for gpu in details]
    return as_written() if capabilities and min(capabilities) >= _HOPPER else contextlib.nullcontext()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Disable the layout optimizer for functions first called in this context, unless the user has configured it."""
    thread_context = context.context()
    before = thread_context.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    options = config.graph_options.rewrite_options
    if options.layout_optimizer == options.DEFAULT:
        options.layout_optimizer = options.OFF
        options.optimizers[:] = [name for name in options.optimizers if name != "layout"]
    thread_context.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        thread_context.function_call_options = before
