"""What pipelines touch of Keras' private side: weights that are created later, or elsewhere, and states by name.

Written for Keras 3.15 and TensorFlow 2.21, as `tfpar._compat.keras_model`, which is at its full length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.core import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import attributes

from tfpar._compat import keras_variables, versions


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Let layers make weights without memory inside this context; `place` gives it to them.

    Keras 3.15 allocates a weight where its layer is built, and a model is built before anybody knows which layer runs
    where: one larger than its first device could not be built at all. A weight without memory reads as its initial
    value (Keras' own rule for variables of a stateless scope); one that is assigned or optimized gets memory on the
    host, and so does one whose initializer gives other values each time.
    """
    making = False
    versions.require_mentioned(Variable._deferred_initialize, "_value")

    def add_weight(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        nonlocal making
        making, before = True, making
        try:
            variable = original_add(layer, *args, **kwargs)
        finally:
            making = before
        variable._tfpar_deferred = True
        return variable

    def initialize(variable: Any, initializer: Any) -> None:
        if not making:
            original_initialize(variable, initializer)
        elif _is_pure(initializer):
            variable._value = None
            versions.replace(variable, "_initializer", initializer)
        else:
            with tf.device("CPU:0"):
                original_initialize(variable, initializer)

    def initialize_late(variable: Any) -> None:
        if not getattr(variable, "_tfpar_deferred", False):
            original_late(variable)

    def assign(variable: Any, value: Any) -> None:
        if variable._value is None:
            place(variable, "CPU:0")
        original_assign(variable, value)

    def build(optimizer: Any, variables: Sequence[Any]) -> None:
        for variable in variables:
            if variable._value is None:
                place(variable, "CPU:0")
        original_build(optimizer, variables)

    original_build = BaseOptimizer.build
    original_add, original_initialize = keras.Layer.add_weight, Variable._initialize_with_initializer
    original_late, original_assign = Variable._deferred_initialize, Variable._direct_assign
    with (
        mock.patch.object(keras.Layer, "add_weight", add_weight),
        mock.patch.object(Variable, "_initialize_with_initializer", initialize),
        mock.patch.object(Variable, "_deferred_initialize", initialize_late),
        mock.patch.object(Variable, "_direct_assign", assign),
        mock.patch.object(BaseOptimizer, "build", build),
    ):
        yield


def _is_pure(initializer: Any) -> bool:
    """Say whether an initializer gives the same values whenever it is called: those of Keras, unless they draw on."""
    known = isinstance(initializer, keras.initializers.Initializer) and type(initializer).__module__.startswith(
        "keras."
    )
    return known and not isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)


def place(variable: Any, device: str) -> bool:
    """Let a variable live on a device: allocate it there, or move it.

    Args:
        variable: A Keras variable.
        device: Such as `"GPU:1"`.

    Returns:
        Whether it was elsewhere, or nowhere, before.
    """
    if keras_variables.is_on(variable, device):
        return False
    current = variable._value
    with tf.init_scope(), tf.device(device):
        keras_variables.re_create(variable, None if current is None else tf.identity(current))
    return True


def noinline_function(body: Callable[..., Any], *specs: Any, jit_compile: bool = False) -> Any:
    """Trace a function that stays one: its calls are not inlined, and not compiled for each of their places anew.

    TensorFlow 2.21's graph optimizer makes a copy of a function for each call with a constant among its arguments or
    with a result that nobody takes, and optimizes every copy: 3 of 22 seconds until ResNet50's first step in 4 stages.
    It knows an attribute against that (tensorflow/core/grappler/optimizers/function_optimizer.cc), which
    `tf.function` does not let through.

    Args:
        body: What to trace.
        *specs: Of its arguments.
        jit_compile: Compile it with XLA.
    """
    wanted = {"_noinline", "_nospecialize"}
    lists = ("POLYMORPHIC_FUNCTION_ALLOWLIST", "TRACING_COMPILATION_ALLOWLIST", "MONOMORPHIC_FUNCTION_ALLOWLIST")
    with mock.patch.multiple(attributes, **{name: getattr(attributes, name) | wanted for name in lists}):
        return tf.function(
            body,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=dict.fromkeys(sorted(wanted), True),
        ).get_concrete_function(*specs)


def unordered_timestamp() -> tf.Tensor:
    """Return the time when it runs, seconds in float64; it waits for the control dependencies given and nothing else.

    TensorFlow 2.21 lets the operations of a function that read the clock run one after the other
    (tensorflow/python/framework/auto_control_deps.py), and with them everything that is timed.
    """
    moment = tf.timestamp()
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(moment.op)
    return moment


@contextlib.contextmanager
def short_graph_optimization() -> Iterator[None]:
    """Spare functions that are traced or called inside this context most of what TensorFlow 2.21 does to their graphs.

    Its graph optimizer has a dozen passes and goes twice over each function. One round of these five takes 2 to 3 of 25
    seconds less until ResNet50's first step in 4 stages; steps take as long as before, to a few percent. Without any of
    them roundings differ from those on one device, for which constants are folded. `tf.config.optimizer` chooses for
    the whole process, and what a user has chosen there stands; this is the calling thread's
    (tensorflow/python/eager/context.py, FunctionCallOptions).
    """
    here = context.context()
    before = here.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    options = config.graph_options.rewrite_options
    if not options.ByteSize():
        options.meta_optimizer_iterations = options.ONE
        options.optimizers[:] = ["constfold", "remap", "arithmetic", "layout", "dependency"]
    here.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        here.function_call_options = before


def trackers_of_losses(model: keras.Model) -> list[keras.metrics.Mean]:
    """Return the metrics behind the log entries of single outputs' losses (Keras 3.15)."""
    return list(model._compile_loss.metrics) if model._compile_loss else []


def metric_states(layer: keras.Layer) -> list[Any]:
    """Return the variables of the metrics that a layer holds, which its `variables` leave out (Keras 3.15)."""
    return [state for one in layer._flatten_layers() for metric in one._metrics for state in metric.variables]


def mask_of(tensor: Any) -> Any:
    """Return the Keras mask of a tensor, None for none (Keras 3.15); in a graph a constant one is an operation too."""
    mask = backend.get_keras_mask(tensor)
    if mask is None or tf.is_symbolic_tensor(mask) or tf.executing_eagerly():
        return mask
    return tf.identity(tf.constant(np.asarray(mask)))


def with_mask(tensor: tf.Tensor, mask: Any) -> tf.Tensor:
    """Return a tensor on which a Keras mask rides; what rode on it before is gone (Keras 3.15)."""
    tensor = tf.identity(tensor)
    if mask is not None:
        backend.set_keras_mask(tensor, mask)
    return tensor


@contextlib.contextmanager
def without_added_losses() -> Iterator[None]:
    """Let `Layer.losses` be empty inside this context, so that `compute_loss` adds nothing (Keras 3.15)."""
    with mock.patch.object(keras.Layer, "losses", property(lambda layer: [])):
        yield


def move_optimizer(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Let the slots of a built optimizer follow its weights, which have moved.

    Args:
        optimizer: A built optimizer.
        variables: The weights that it was built for, in their order.
    """
    inner = keras_variables.innermost(optimizer)
    keras_variables.find_slots(inner)
    for slot in inner.variables:
        of = [variable for variable in variables if slot.name.startswith(variable.path.replace("/", "_") + "_")]
        if of and slot.shape == of[0].shape:
            place(slot, of[0].value.device)


def slots_per_weight(optimizer: keras.Optimizer | None) -> int:
    """Return how many variables of its own size an optimizer keeps for each weight (Keras 3.15)."""
    if optimizer is None:
        return 0
    inner = keras_variables.innermost(optimizer)
    trial = type(inner).from_config(inner.get_config())
    trial.build([keras.Variable(tf.zeros([1]))])
    return sum(variable.shape == (1,) for variable in trial.variables)
