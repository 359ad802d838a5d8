"""Detects assignments to `tf.Variable` objects in eager code. Written for TensorFlow 2.21."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

_METHODS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update", "scatter_nd_add")


@contextlib.contextmanager
def assignments_noted(note: Callable[[str], None]) -> Iterator[None]:
    """Pass the name of each `tf.Variable` that this thread assigns in this context to `note`; skip the assignment."""
    thread = threading.get_ident()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(variable, *args, **kwargs)
            note(variable.name)
            return variable

        return assign

    with contextlib.ExitStack() as stack:
        for kind in (BaseResourceVariable, ResourceVariable):
            for name in _METHODS:
                if name in vars(kind):
                    stack.enter_context(mock.patch.object(kind, name, noting(vars(kind)[name])))
        yield
