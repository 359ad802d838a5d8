"""Tracing and calling of `tf.function` (TensorFlow 2.21)."""

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
    """Leave all functions being traced, as `tf.init_scope` does, but let gradient tapes record.

    `tf.init_scope` stops all tapes, and user code that is traced thread_context may use them, as in a gradient penalty.
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
    """Retrace every `tf.function` called in this context, and drop the traces at its end.

    A function traced in a `keras.StatelessScope` would keep the tensors of the scope instead of the weights in its
    trace. Nested contexts share traces, except with a context for all threads.

    Args:
        in_all_threads: Whether to apply to all threads, not just the calling one.
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
    """Run every eager call of a `tf.function` in this context as Python code, except with XLA.

    Unlike `tf.config.run_functions_eagerly`, it excludes the functions of `tf.vectorized_map`, which need their graph,
    and Keras' grouped convolutions on CPUs, which only run compiled.
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
    """Trace a function whose calls are neither inlined nor specialized per call site.

    TensorFlow 2.21's graph optimizer copies a function for each call with constant arguments or unused results, and
    optimizes every copy: 3 of 22 seconds until the first step of ResNet50 in 4 stages. The attribute that prevents it
    (tensorflow/core/grappler/optimizers/function_optimizer.cc) is not allowed by `tf.function`.

    Args:
        body: The function to trace.
        *specs: The `tf.TypeSpec` of each argument.
        jit_compile: Whether to compile it with XLA.
    """
    names = {"_noinline", "_nospecialize"}
    lists = ("POLYMORPHIC_FUNCTION_ALLOWLIST", "TRACING_COMPILATION_ALLOWLIST", "MONOMORPHIC_FUNCTION_ALLOWLIST")
    with mock.patch.multiple(attributes, **{name: getattr(attributes, name) | names for name in lists}):
        return tf.function(
            body,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=dict.fromkeys(sorted(names), True),
        ).get_concrete_function(*specs)


@contextlib.contextmanager
def repeatable_names() -> Iterator[None]:
    """Use a separate counter for the names of functions traced in this context.

    The keys of XLA's persistent cache include function names. TensorFlow 2.21 numbers functions with a counter shared
    by many objects (`ops.uid`), which differs in a process that resumes a run.
    """

    def name(prefix: str) -> Callable[[str], str]:
        return lambda python_name: f"{prefix}traced{next(_numbers)}{python_name}"

    with mock.patch.multiple(
        concrete_function,
        _inference_name=name(concrete_function._INFERENCE_PREFIX),
        _forward_name=name(concrete_function._FORWARD_PREFIX),
        _backward_name=name(concrete_function._BACKWARD_PREFIX),
    ):
        yield


def unordered_call(function: Any, *arguments: Any) -> Any:
    """Call a concrete function as a stateless op, ordered by control dependencies only.

    TensorFlow 2.21 calls functions that assign variables with a stateful op. Stateful ops of a graph run one after the
    other, and a loop with such an op does not overlap its iterations: two stages in a loop took 2.05 s instead of
    1.09 s. The caller must order calls that access the same variable, and use a result, or the call is pruned.

    Args:
        function: A concrete function.
        *arguments: The arguments in the traced structure, with None for non-tensors.

    Returns:
        The results of the function.
    """
    tensors = [tensor for tensor in tf.nest.flatten(arguments, expand_composites=True) if tensor is not None]
    specs = function.structured_outputs
    leaves = tf.nest.flatten(specs, expand_composites=True)
    result_specs = [leaf for leaf in leaves if leaf is not None]
    types = [leaf.dtype for leaf in result_specs]
    results = _partitioned_call(function, [*tensors, *function.captured_inputs], types) if types else []
    for result, leaf in zip(results, result_specs, strict=True):
        result.set_shape(leaf.shape)
    remaining = iter(results)
    flat = [None if leaf is None else next(remaining) for leaf in leaves]
    return tf.nest.pack_sequence_as(specs, flat, expand_composites=True)


def _partitioned_call(function: Any, inputs: Sequence[tf.Tensor], types: Sequence[tf.DType]) -> Any:
    """Add the call to the graph without shape inference inside the function.

    For shape inference, TensorFlow 2.21 would build the function's graph in C++ for each call
    (tensorflow/core/common_runtime/shape_refiner.cc): 20 ms and 5 MB for 400 ops.
    """
    if tf.executing_eagerly():
        return tf.raw_ops.PartitionedCall(args=inputs, Tout=types, f=function)
    graph = tf.compat.v1.get_default_graph()
    function.add_to_graph(graph)
    attrs = {
        "Tin": _attribute(list=_attribute.ListValue(type=[tensor.dtype.as_datatype_enum for tensor in inputs])),
        "Tout": _attribute(list=_attribute.ListValue(type=[dtype.as_datatype_enum for dtype in types])),
        "f": _attribute(func=attr_value_pb2.NameAttrList(name=function.name)),
        attributes.DISABLE_CALL_SHAPE_INFERENCE: _attribute(b=True),
    }
    return graph.create_op("PartitionedCall", list(inputs), list(types), attrs=attrs).outputs


def unordered_timestamp() -> tf.Tensor:
    """Return the current time in seconds (float64), ordered by explicit control dependencies only.

    TensorFlow 2.21 serializes the clock reads of a function (tensorflow/python/framework/auto_control_deps.py), and
    with them everything that is timed.
    """
    return _unordered(tf.timestamp())


def _unordered(result: tf.Tensor) -> tf.Tensor:
    """Exempt a stateful op from the order of stateful ops."""
    manager = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(result.op)
    return result


def fresh_zeros(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Return zeros that are computed in each run of a traced function instead of folded into a constant.

    TensorFlow 2.21 folds zeros and what depends on them, and keeps the constants until the process ends: up to 10 MB
    each, and variants of any size, since it does not count their content (`ReplaceTensorWithConstant` in
    tensorflow/core/common_runtime/constant_folding.cc). It does not fold stateful ops.
    """
    return _unordered(tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True))


@contextlib.contextmanager
def unexplained_errors(kinds: tuple[type[tf.errors.OpError], ...]) -> Iterator[None]:
    """Raise errors of the given kinds in this context without the Python traceback of the failed op.

    To find it, TensorFlow 2.21 reads the stacks of all ops of the failed function (`TFE_ContextGetGraphDebugInfo`).
    After the loss of another process, and with several Python threads, that has crashed with SIGSEGV or raised
    "construction from null is not valid".
    """
    original = InterpolateRuntimeError.__exit__

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        return False if isinstance(error, kinds) else original(self, kind, error, trace)

    with mock.patch.object(InterpolateRuntimeError, "__exit__", leave):
        yield


@contextlib.contextmanager
def short_graph_optimization() -> Iterator[None]:
    """Skip most graph optimizations for functions traced or called in this context.

    TensorFlow 2.21's graph optimizer runs a dozen passes twice over each function. A single round of the five below
    saves 2 to 3 of 25 seconds until the first step of ResNet50 in 4 stages; the duration of a step stays within a few
    percent. With fewer passes, rounding would differ from that on one device, where constants are folded. Unlike
    `tf.config.optimizer`, this affects the calling thread only (`FunctionCallOptions` in
    tensorflow/python/eager/context.py). Options set by the user are kept.
    """
    thread_context = context.context()
    before = thread_context.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    options = config.graph_options.rewrite_options
    if not options.ByteSize():
        options.meta_optimizer_iterations = options.ONE
        options.optimizers[:] = ["constfold", "remap", "arithmetic", "layout", "dependency"]
    thread_context.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        thread_context.function_call_options = before
