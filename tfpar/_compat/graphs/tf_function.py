"""Calls of users' `tf.function` objects while their weights and states are replaced by other tensors.

Written for TensorFlow 2.21. A `tf.function` is traced for a device and a signature, and its trace is used again. One
that was traced inside of a `keras.StatelessScope` holds the tensors of that scope for good, instead of the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import attributes, concrete_function
from tensorflow.python.eager.polymorphic_function.atomic_function import InterpolateRuntimeError
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfpar._compat import versions

_attribute = attr_value_pb2.AttrValue
_numbers = itertools.count()
_traced: list[dict[int, tuple[Function, Function]]] = []


@contextlib.contextmanager
def outside_of_functions() -> Iterator[None]:
    """Leave all functions that are being traced, as `tf.init_scope`, in which no `tf.GradientTape` records (2.21).

    Code of users that is traced here may have tapes: a loss with a gradient penalty, a layer that returns forces.
    """
    with tf.init_scope():
        is_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        if is_stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            if is_stopped:
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()


@contextlib.contextmanager
def own_traces(*, in_all_threads: bool = False) -> Iterator[None]:
    """Trace every `tf.function` that is called inside this context for this context only.

    A context inside of another shares its traces, but not those of one for all threads.

    Args:
        in_all_threads: Whether to do so in all threads, or in that of the caller only.
    """
    if _traced and not in_all_threads:
        yield
        return
    traces: dict[int, tuple[Function, Function]] = {}
    original, thread = Function.__call__, threading.get_ident()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread and not in_all_threads:
            return original(function, *args, **kwargs)
        if id(function) not in traces:
            traces[id(function)] = function, function._clone(None)
            versions.replace(traces[id(function)][1], "_omit_frequent_tracing_warning", True)
        return original(traces[id(function)][1], *args, **kwargs)

    if not in_all_threads:
        _traced.append(traces)
    try:
        with mock.patch.object(Function, "__call__", call):
            yield
    finally:
        if not in_all_threads:
            _traced.pop()


@contextlib.contextmanager
def eager_functions() -> Iterator[None]:
    """Run every eager call of a `tf.function` inside this context as Python code, except with XLA.

    `tf.vectorized_map` needs its graph, from which it makes another one, and stays as it is.
    `tf.config.run_functions_eagerly` takes those too, and on CPUs Keras' grouped convolutions run in no other way.
    """
    original, thread = Function.__call__, threading.get_ident()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_python = tf.executing_eagerly() and not function._jit_compile and not _is_vectorized(function)
        if threading.get_ident() == thread and is_python:
            return function._python_function(*args, **kwargs)
        return original(function, *args, **kwargs)

    with mock.patch.object(Function, "__call__", call):
        yield


def _is_vectorized(function: Any) -> bool:
    return str(function._python_function.__module__).startswith("tensorflow.python.ops.parallel_for")


def noinline_function(body: Callable[..., Any], *specs: Any, jit_compile: bool = False) -> Any:
    """Trace a function whose calls are neither inlined nor compiled again for each call site.

    TensorFlow 2.21's graph optimizer makes a copy of a function for each call with a constant among its arguments or
    with an unused result, and optimizes every copy: 3 of 22 seconds until ResNet50's first step in 4 stages.
    It knows an attribute against that (tensorflow/core/grappler/optimizers/function_optimizer.cc), which
    `tf.function` does not let through.

    Args:
        body: The function to trace.
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


@contextlib.contextmanager
def repeatable_names() -> Iterator[None]:
    """Name functions that are traced inside this context by a count of their own.

    XLA's persistent cache finds a compilation by the name of its function too. TensorFlow 2.21 numbers functions by a
    count of many objects (`ops.uid`), which differs in a program that resumes a run.
    """

    def name(prefix: str) -> Callable[[str], str]:
        return lambda of_python: f"{prefix}traced{next(_numbers)}{of_python}"

    with mock.patch.multiple(
        concrete_function,
        _inference_name=name(concrete_function._INFERENCE_PREFIX),
        _forward_name=name(concrete_function._FORWARD_PREFIX),
        _backward_name=name(concrete_function._BACKWARD_PREFIX),
    ):
        yield


def unordered_call(function: Any, *arguments: Any) -> Any:
    """Call a concrete function without an order among stateful operations; control dependencies give the order.

    TensorFlow 2.21 calls a function that assigns a variable with an operation that counts as stateful. It runs those of
    a graph one after the other, and a loop with one of them no longer overlaps its iterations: two stages in a loop
    took 2.05 s instead of 1.09 s. A caller has to order all calls that read or assign the same variable, and to use a
    result, or the call is pruned.

    Args:
        function: A concrete function.
        *arguments: Its arguments, as it was traced with; None for those that are no tensors.

    Returns:
        Its results.
    """
    tensors = [one for one in tf.nest.flatten(arguments, expand_composites=True) if one is not None]
    specs = function.structured_outputs
    leaves = tf.nest.flatten(specs, expand_composites=True)
    wanted = [leaf for leaf in leaves if leaf is not None]
    types = [leaf.dtype for leaf in wanted]
    results = _partitioned_call(function, [*tensors, *function.captured_inputs], types) if types else []
    for result, leaf in zip(results, wanted, strict=True):
        result.set_shape(leaf.shape)
    remaining = iter(results)
    flat = [None if leaf is None else next(remaining) for leaf in leaves]
    return tf.nest.pack_sequence_as(specs, flat, expand_composites=True)


def _partitioned_call(function: Any, given: Sequence[tf.Tensor], types: Sequence[tf.DType]) -> Any:
    """Add the call to the graph, without inference of the shapes of all tensors inside of the function.

    For that TensorFlow 2.21 would build the graph of the function in C++ for each call
    (tensorflow/core/common_runtime/shape_refiner.cc): 20 ms and 5 MB for one of 400 operations.
    """
    if tf.executing_eagerly():
        return tf.raw_ops.PartitionedCall(args=given, Tout=types, f=function)
    graph = tf.compat.v1.get_default_graph()
    function.add_to_graph(graph)
    attrs = {
        "Tin": _attribute(list=_attribute.ListValue(type=[one.dtype.as_datatype_enum for one in given])),
        "Tout": _attribute(list=_attribute.ListValue(type=[one.as_datatype_enum for one in types])),
        "f": _attribute(func=attr_value_pb2.NameAttrList(name=function.name)),
        attributes.DISABLE_CALL_SHAPE_INFERENCE: _attribute(b=True),
    }
    return graph.create_op("PartitionedCall", list(given), list(types), attrs=attrs).outputs


def unordered_timestamp() -> tf.Tensor:
    """Return the time when it runs, seconds in float64; it waits for the control dependencies given and nothing else.

    TensorFlow 2.21 lets the operations of a function that read the clock run one after the other
    (tensorflow/python/framework/auto_control_deps.py), and with them everything that is timed.
    """
    return _unordered(tf.timestamp())


def _unordered(result: tf.Tensor) -> tf.Tensor:
    """Return the result of a stateful operation, which then waits for no other stateful operation."""
    manager = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(result.op)
    return result


def fresh_zeros(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Return zeros that are computed in each run of a traced function.

    TensorFlow 2.21 computes zeros, and what depends on them alone, once, and holds the result until the program ends:
    constants up to 10 MB, and a variant of any size, since it does not count what the variant refers to
    (`ReplaceTensorWithConstant` in tensorflow/core/common_runtime/constant_folding.cc). A stateful operation is none.
    """
    return _unordered(tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True))


@contextlib.contextmanager
def unexplained_errors(kinds: tuple[type[tf.errors.OpError], ...]) -> Iterator[None]:
    """Raise errors of some kinds inside this context without the lines of Python that created the failed operations.

    For these lines TensorFlow 2.21 reads the stacks of all operations of the failed function
    (`TFE_ContextGetGraphDebugInfo`). After the loss of another process, with more than one Python thread, that has
    ended the process with SIGSEGV, or raised "construction from null is not valid".
    """
    original = InterpolateRuntimeError.__exit__

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        return False if isinstance(error, kinds) else original(self, kind, error, trace)

    with mock.patch.object(InterpolateRuntimeError, "__exit__", leave):
        yield


@contextlib.contextmanager
def short_graph_optimization() -> Iterator[None]:
    """Skip most of TensorFlow 2.21's graph optimization for functions that are traced or called inside this context.

    Its graph optimizer has a dozen passes and goes twice over each function. One round of these five takes 2 to 3 of 25
    seconds less until ResNet50's first step in 4 stages; steps take as long as before, to a few percent. Without any of
    them roundings differ from those on one device, for which constants are folded. `tf.config.optimizer` chooses for
    the whole process, and a choice of the user there is kept; this changes the calling thread alone
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
