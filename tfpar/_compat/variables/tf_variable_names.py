"""Gives a weight's `tf.Variable` the same name wherever and whenever it is allocated.

In Keras 3.15 the name of the `tf.Variable` starts with the name scope at its creation: `sequential/dense/bias:0` for
the Keras variable `bias` (keras/src/backend/tensorflow/core.py). Custom optimizers read that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, variables
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow.core import Variable

_SCOPE = "_tfpar_name_scope"


def note_scope(variable: Any) -> None:
    """Record the current name scope for a variable that is allocated later.

    Args:
        variable: A Keras variable.
    """
    setattr(variable, _SCOPE, tf.get_current_name_scope())


@contextlib.contextmanager
def as_without_outer_scope() -> Iterator[None]:
    """Name weights created in a stateless scope inside this context as if the scope did not exist.

    On one device Keras builds the model while the step is traced, outside of any stateless scope. It allocates a weight
    at once, or at the end of the stateless scope in which the enclosing layer traces its call.
    """

    def register(variable: Any) -> None:
        original_register(variable)
        if get_stateless_scope().original_scope is None:
            note_scope(variable)

    def leave(scope: Any, *args: Any, **kwargs: Any) -> None:
        if scope.original_scope is not None and scope.original_scope.original_scope is None:
            for variable in global_state.get_global_attribute("uninitialized_variables", []):
                if not hasattr(variable, _SCOPE):
                    note_scope(variable)
        original_leave(scope, *args, **kwargs)

    def initialize(variable: Any) -> None:
        with scope_of(variable):
            original_initialize(variable)

    original_register, original_leave = variables.register_uninitialized_variable, keras.StatelessScope.__exit__
    original_initialize = Variable._deferred_initialize
    with (
        mock.patch.object(variables, "register_uninitialized_variable", register),
        mock.patch.object(keras.StatelessScope, "__exit__", leave),
        mock.patch.object(Variable, "_deferred_initialize", initialize),
    ):
        yield


def scope_of(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the name scope in which new memory of a variable gets its original name.

    Args:
        variable: A Keras variable, allocated or not.
    """
    name = getattr(getattr(variable, "_value", None), "name", None)
    scope = getattr(variable, _SCOPE, None) if name is None else name.rpartition("/")[0]
    if scope is None:
        return contextlib.nullcontext()
    absolute: contextlib.AbstractContextManager[Any] = tf.name_scope(f"{scope}/" if scope else "")
    return absolute
