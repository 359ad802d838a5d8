"""Keras' own `fit`, which libraries for experiment tracking replace (Keras 3.15)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfpar._compat import versions

_redirected: set[int] = set()  # models, by `id`


def replacement(model: keras.Model, packages: Collection[str]) -> Callable[..., Any] | None:
    """Return the function by which one of some packages has replaced `keras.Model.fit`, or None.

    Args:
        model: The model to train. There is no replacement while its `fit` is redirected.
        packages: Names of top-level packages.
    """
    fit = keras.Model.fit
    module = getattr(fit, "__globals__", {}).get("__name__", "")  # `__module__` is copied from Keras' function
    is_replaced = module.partition(".")[0] in packages and id(model) not in _redirected
    return fit if is_replaced else None


@contextlib.contextmanager
def redirected(model: keras.Model, fit: Callable[..., Any]) -> Iterator[None]:
    """Let Keras' own `fit` of a model call another function inside this context.

    A library that replaces `keras.Model.fit` has kept Keras' function, which is a decorated one
    (keras/src/utils/traceback_utils.py): only what the decorator calls can still be changed.

    Args:
        model: The model.
        fit: Takes the arguments of `fit`, without the model.
    """
    cell = versions.closure_cell(TensorFlowTrainer.fit, "fn")
    original = cell.cell_contents

    def dispatch(trained: Any, *arguments: Any, **settings: Any) -> Any:
        return fit(*arguments, **settings) if trained is model else original(trained, *arguments, **settings)

    cell.cell_contents = dispatch
    _redirected.add(id(model))
    try:
        yield
    finally:
        _redirected.discard(id(model))
        cell.cell_contents = original
