"""Functions that users decorate with `tf.function`, called while their weights and states stand for other tensors.

Written for TensorFlow 2.21. A `tf.function` is traced for a device and a signature, and its trace is used again. One
that was traced inside of a `keras.StatelessScope` holds the tensors of that scope for good, instead of the weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfpar._compat import versions

_traced: list[dict[int, tuple[Function, Function]]] = []


@contextlib.contextmanager
def own_traces() -> Iterator[None]:
    """Let every `tf.function` that is called inside this context have a trace for this context alone.

    A context inside of another shares its traces.
    """
    if _traced:
        yield
        return
    _traced.append({})
    original, thread = Function.__call__, threading.get_ident()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(function, *args, **kwargs)
        if id(function) not in _traced[-1]:
            _traced[-1][id(function)] = function, function._clone(None)
            versions.replace(_traced[-1][id(function)][1], "_omit_frequent_tracing_warning", True)
        return original(_traced[-1][id(function)][1], *args, **kwargs)

    try:
        with mock.patch.object(Function, "__call__", call):
            yield
    finally:
        _traced.pop()


@contextlib.contextmanager
def eager_functions() -> Iterator[None]:
    """Let every `tf.function` that runs eagerly inside this context run as Python code, but those compiled by XLA.

    `tf.config.run_functions_eagerly` takes those too, and on CPUs Keras' grouped convolutions run in no other way.
    """
    original, thread = Function.__call__, threading.get_ident()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and tf.executing_eagerly() and not function._jit_compile:
            return function._python_function(*args, **kwargs)
        return original(function, *args, **kwargs)

    with mock.patch.object(Function, "__call__", call):
        yield
