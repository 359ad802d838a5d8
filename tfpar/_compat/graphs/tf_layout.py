"""The layout of convolutions on GPUs (TensorFlow 2.21).

The layout optimizer turns convolutions in NHWC, Keras' default, into NCHW on every GPU, unless half of them compute in
float16 (tensorflow/core/grappler/optimizers/generic_layout_optimizer.cc). NCHW is the faster one before Hopper; from
Hopper on it is NHWC, in all types. `tf.config.optimizer.set_experimental_options` would choose for the whole process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context

_HOPPER = (9, 0)  # compute capability


def best_for_gpus() -> contextlib.AbstractContextManager[None]:
    """Return a context in which functions are called first that run on the GPUs of this process."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    capabilities = [one.get("compute_capability", (0, 0)) for one in details]
    return as_written() if capabilities and min(capabilities) >= _HOPPER else contextlib.nullcontext()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Leave the layout of functions that are called first inside this context; a choice of the user is kept."""
    here = context.context()
    before = here.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    options = config.graph_options.rewrite_options
    if options.layout_optimizer == options.DEFAULT:
        options.layout_optimizer = options.OFF
        options.optimizers[:] = [name for name in options.optimizers if name != "layout"]
    here.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        here.function_call_options = before
